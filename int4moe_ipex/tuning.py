"""Crossing points between rows of the table by tokens per expert, measured on this machine and kept in a file.

`int4moe tune` writes the file, `backends/select.py` asks `entry_here` where a configuration leaves backend and
instruction set open. The file is $INT4MOE_TUNE_FILE (`off` means none), else int4moe/tune.json in the user's cache
folder. An entry holds for one CPU model, version of this package, number of threads, compute and dtype, and for
experts or single linears; without one, the order of the table decides.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from int4moe_ipex.cpu import CpuFeatures
from int4moe_ipex.errors import ConfigError

VARIABLE = "INT4MOE_TUNE_FILE"
OFF = "off"
FORMAT = "int4moe_ipex tuned crossings"
VERSION = 1
# A row later in the table has to be this much faster before it is taken.
MARGIN = 0.05

# (last number of tokens per expert, or None for all from here on; name of the row), by rising numbers.
Crossings = tuple[tuple[int | None, str], ...]


@dataclass(frozen=True)
class Key:
    """What an entry holds for; kind is experts or linear."""

    cpu: str
    max_isa: str
    version: str
    threads: int
    compute: str
    dtype: str
    kind: str


@dataclass(frozen=True)
class Entry:
    """Measured crossings.

    Attributes:
        crossings: which row runs up to which number of tokens per expert.
        seconds: row -> tokens per expert (as text) -> seconds of the fastest call; empty for a row without a rival.
        disturbed: share of the batches during which other processes took more than a little of the CPUs.
        shape, date: what was measured, and when.
    """

    key: Key
    crossings: Crossings
    seconds: dict[str, dict[str, float]]
    disturbed: float
    shape: str
    date: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def in_words(self) -> str:
        """`native/avx2 up to 5 tokens per expert, then native/avx512`."""
        words = [row if last is None else f"{row} up to {last} tokens per expert" for last, row in self.crossings]
        return ", then ".join(words)


def key_here(cpu: CpuFeatures, compute: str, dtype: str, kind: str, threads: int | None = None) -> Key:
    """The key of this machine as it is now; threads None takes torch's number."""
    import int4moe_ipex

    if threads is None:
        import torch

        threads = torch.get_num_threads()
    return Key(cpu.model_name, cpu.best_isa, int4moe_ipex.__version__, threads, compute, dtype, kind)


def file_of(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where tuned values are kept; None when they are switched off."""
    environ = os.environ if environ is None else environ
    named = environ.get(VARIABLE, "")
    if named == OFF:
        return None
    if named:
        return Path(named).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    # os.path's expanduser, since pathlib's raises for a user without a home, as containers have them.
    return Path(os.path.expanduser(cache), "int4moe", "tune.json")


def read(file: Path | None) -> dict[Key, Entry]:
    """Every entry of a file; none where there is no file.

    Raises:
        ConfigError: the file cannot be read as one of this version.
    """
    if file is None:
        return {}
    try:
        status = file.stat()
    except OSError:
        return {}
    return _read(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4)
def _read(file: Path, mtime_ns: int, size: int) -> dict[Key, Entry]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError("it is of another format or version")
        entries = {}
        for item in content["entries"]:
            crossings = tuple((last, str(row)) for last, row in item["crossings"])
            _check(crossings)
            entry = Entry(**{**item, "key": Key(**item["key"]), "crossings": crossings})
            entries[entry.key] = entry
        return entries
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"cannot be read: {error}"
        raise ConfigError(f"{file}: {what}; remove it or run int4moe tune again") from None


def _check(crossings: Crossings) -> None:
    lasts = [last for last, _ in crossings]
    rising = all(type(a) is int and (b is None or a < b) for a, b in itertools.pairwise(lasts))
    if not lasts or lasts[-1] is not None or not rising:
        raise ValueError("crossings do not rise to an open end")


def write(file: Path, entries: Mapping[Key, Entry]) -> None:
    """Adds entries to a file, in one step; older ones with the same key are replaced.

    Raises:
        ConfigError: it cannot be written, or is not a file of this kind.
    """
    merged = {**read(file), **entries}
    content = {"format": FORMAT, "version": VERSION, "entries": [entry.as_dict() for entry in merged.values()]}
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None


def entry_here(cpu: CpuFeatures, compute: str, dtype: str, kind: str) -> Entry | None:
    """What is in use on this machine, with this number of threads."""
    entries = read(file_of())
    return entries.get(key_here(cpu, compute, dtype, kind)) if entries else None


def clip(found: Crossings, first: int, last: int | None) -> Crossings:
    """The part of crossings that lies within first..last tokens (last None: without end); its end is `last`."""
    parts: list[tuple[int | None, str]] = []
    for end, row in found:
        if end is not None and end < first:
            continue
        if last is not None and (end is None or end >= last):
            return (*parts, (last, row))
        parts.append((end, row))
    return tuple(parts)


def decide(seconds: Mapping[str, Mapping[int, float]]) -> Crossings:
    """Crossings from measured seconds, row -> tokens per expert -> seconds, rows in the table's order.

    Weights are held once, by one engine: that of the table's first row, unless another engine's best rows are faster
    by `MARGIN` on the whole. Between rows of that engine the earliest in the table stands unless another is faster by
    `MARGIN`. A crossing lies in the (geometric) middle between the two numbers that were measured.
    """
    ladder = sorted(set.intersection(*(set(times) for times in seconds.values())))
    engines: dict[str, list[str]] = {}
    for row in seconds:
        engines.setdefault(row.partition("/")[0], []).append(row)

    def score(engine: str) -> float:
        product = 1.0
        for tokens in ladder:
            product *= min(seconds[row][tokens] for row in engines[engine])
        return product ** (1 / len(ladder))

    names = list(engines)
    best = names[0]
    for name in names[1:]:
        if score(name) < score(best) * (1 - MARGIN):
            best = name
    rows = engines[best]
    chosen = []
    for tokens in ladder:
        winner = rows[0]
        for row in rows[1:]:
            if seconds[row][tokens] < seconds[winner][tokens] * (1 - MARGIN):
                winner = row
        chosen.append((tokens, winner))
    found: list[tuple[int | None, str]] = []
    for (tokens, row), (after, next_row) in itertools.pairwise(chosen):
        if row != next_row:
            found.append((int((tokens * after) ** 0.5), row))
    return (*found, (None, chosen[-1][1]))
