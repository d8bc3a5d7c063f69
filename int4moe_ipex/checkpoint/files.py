"""A checkpoint folder: its config, its shards and their tensors, memory-mapped.

Headers are read and checked first; a tensor's bytes are touched only when somebody asks for it. Nothing is ever
written into the folder, and pickles are never opened.
"""

from __future__ import annotations

import json
import logging
import mmap
import re
from pathlib import Path
from typing import Any

import torch

from int4moe_ipex.checkpoint.headers import TensorHeader, read_headers
from int4moe_ipex.errors import CheckpointError, MissingTensorsError, UnsupportedFormatError
from int4moe_ipex.folders import model_folder

__all__ = ["Checkpoint", "TensorHeader"]

log = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Files that sit beside a model and are not part of it: adapters, and Mistral's second copy in its own naming.
NOT_THE_MODEL = re.compile(r"^(adapter_model|consolidated)[.\-_]")
SHARD_NUMBER = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors$")

# config.json is first: where files disagree it wins, as it does for transformers, and the difference is reported.
QUANTIZATION_FILES = ("quantize_config.json", "quantization_config.json", "quant_config.json")
CONFIG_KEYS = ("quantization_config", "compression_config")
# What a file says about its quantizer when it names no quant_method: the tools that wrote it before the key existed.
METHOD_OF_FILE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
# Keys that describe the tool's run rather than the tensors; copies of a config may well differ in them.
UNCOMPARED_KEYS = {"meta", "provider", "version_info", "autoround_version", "dataset", "tokenizer"}


class Checkpoint:
    """A folder of safetensors files with a config.json. Open it with `Checkpoint.open(path)`.

    Attributes:
        path: the folder.
        config: config.json as a dict.
        headers: full tensor name -> TensorHeader, over all shards.
        quantization: the quantization config, merged from config.json and its side files, or None. Unparsed;
            `checkpoint.scheme` gives it meaning.
        warnings: one line for everything odd that was found and did not stop the opening.
        problems: one line for each tensor that is in two shards or not where the index puts it; empty unless opened
            with `collect=True`.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        headers: dict[str, TensorHeader],
        quantization: dict[str, Any] | None,
        warnings: list[str],
        problems: list[str] | None = None,
    ):
        self.path = path
        self.config = config
        self.headers = headers
        self.quantization = quantization
        self.warnings = warnings
        self.problems = problems or []
        self._maps: dict[Path, torch.Tensor] = {}
        self._said: set[str] = set()

    @classmethod
    def open(cls, path: str | Path, *, collect: bool = False) -> Checkpoint:
        """Reads the configs and all headers of a local folder; no tensor data.

        Args:
            collect: keep tensors that are duplicated or absent in `problems` instead of raising, for a caller that
                goes on to find more and names all of them at once.

        Raises:
            CheckpointError: no such folder, no config.json, no safetensors, a shard that is missing, truncated or
                malformed, an index and shards that disagree.
            MissingTensorsError: tensors that the index names and no shard holds, or that two shards hold.
            UnsupportedFormatError: the folder holds its weights as pickles or GGUF only.
        """
        folder = model_folder(path)
        warnings: list[str] = []
        config = _read_json(folder / "config.json")
        files, index = _find_shards(folder, warnings)
        headers, problems = _read_shards(folder, files, index, warnings)
        if problems and not collect:
            raise MissingTensorsError(str(folder), problems)
        quantization = _merge_quantization(folder, config, warnings)
        return cls(folder, config, headers, quantization, warnings, problems)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as a view of the memory-mapped file: shape and dtype as stored, no copy.

        The mapping is private: writing to the view changes neither the file nor what other processes see. A tensor
        that lies unaligned in its file is copied.

        Raises:
            CheckpointError: no tensor of this name, or the file cannot be mapped.
        """
        header = self.headers.get(name)
        if header is None:
            raise CheckpointError(f"{self.path}: has no tensor {name}")
        if header.nbytes == 0:
            return torch.empty(header.shape, dtype=header.dtype)
        data = self._map(header.file)[header.start : header.start + header.nbytes]
        if header.start % header.dtype.itemsize:
            data = data.clone()
        return data.view(header.dtype).view(header.shape)

    def warn(self, text: str, where: str) -> None:
        """Adds a warning that was found while reading `where`. Each text is kept and logged once, however many tensors
        it holds for."""
        if text not in self._said:
            self._said.add(text)
            self.warnings.append(f"{text} (first in {where})")
            log.warning("%s: %s (first in %s)", self.path, text, where)

    def _map(self, file: Path) -> torch.Tensor:
        data = self._maps.get(file)
        if data is None:
            data = self._maps[file] = _map_file(file)
        return data


def _map_file(file: Path) -> torch.Tensor:
    # Private and unreserved: torch wants writable memory, the file must stay as it is, and a checkpoint larger than
    # memory must still map.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        with open(file, "rb") as handle:
            mapped = mmap.mmap(handle.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be memory-mapped: {error}") from error
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: does not exist; a checkpoint folder needs it") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: is not a JSON object")
    return content


def _find_shards(folder: Path, warnings: list[str]) -> tuple[list[str], dict[str, str] | None]:
    """The file names that make up the model, and the index (tensor -> file name) if there is one."""
    names = sorted(entry.name for entry in folder.iterdir())
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    index_name = INDEX_NAME if INDEX_NAME in indexes else (indexes[0] if len(indexes) == 1 else None)
    if index_name is None and indexes:
        raise CheckpointError(f"{folder}: has several indexes and none is {INDEX_NAME}: {', '.join(indexes)}")
    if index_name is not None:
        index = _read_index(folder / index_name)
        files = sorted(set(index.values()))
        if SINGLE_NAME in names and SINGLE_NAME not in files:
            raise CheckpointError(
                f"{folder}: has {SINGLE_NAME} and also {index_name}, which names other files; remove one of the two"
            )
        absent = [file for file in files if not (folder / file).exists()]
        if absent:
            raise CheckpointError(f"{folder}: {index_name} names files that are absent: {', '.join(absent)}")
        unnamed = [n for n in names if n.endswith(".safetensors") and n not in files and not NOT_THE_MODEL.match(n)]
        if unnamed:
            warnings.append(f"{index_name} does not name these files, which are left out: {', '.join(unnamed)}")
        return files, index
    files = [name for name in names if name.endswith(".safetensors")]
    files = [name for name in files if not NOT_THE_MODEL.match(name)] or files
    if files:
        _check_shard_numbers(folder, files)
        return files, None
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        raise UnsupportedFormatError(
            f"{folder}: holds GGUF ({gguf[0]}), which is out of scope; run it with llama.cpp, or take the model's "
            "GPTQ, AWQ or compressed-tensors checkpoint"
        )
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise UnsupportedFormatError(
            f"{folder}: holds only pickled weights ({', '.join(pickles)}), which can run code when opened and are "
            "refused unopened; convert them to safetensors where you trust them"
        )
    raise CheckpointError(f"{folder}: has no .safetensors file")


def _check_shard_numbers(folder: Path, files: list[str]) -> None:
    sets: dict[tuple[str, int], set[int]] = {}
    for name in files:
        match = SHARD_NUMBER.match(name)
        if match:
            sets.setdefault((match["stem"], int(match["total"])), set()).add(int(match["number"]))
    for (stem, total), numbers in sets.items():
        absent = sorted(set(range(1, total + 1)) - numbers)
        if absent:
            listed = ", ".join(f"{stem}-{number:05d}-of-{total:05d}.safetensors" for number in absent)
            raise CheckpointError(f"{folder}: these shards are absent: {listed}")


def _read_index(file: Path) -> dict[str, str]:
    weight_map = _read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            hint = "; pickles are refused" if isinstance(name, str) and name.endswith(PICKLE_SUFFIXES) else ""
            raise CheckpointError(f"{file}: maps {tensor} to {name!r}, which is not a .safetensors file{hint}")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{file}: maps {tensor} to {name!r}, which lies outside the folder")
    return weight_map


def _read_shards(
    folder: Path, files: list[str], index: dict[str, str] | None, warnings: list[str]
) -> tuple[dict[str, TensorHeader], list[str]]:
    """All headers by tensor name, and a line for each tensor that is duplicated or not where the index puts it."""
    headers: dict[str, TensorHeader] = {}
    problems: list[str] = []
    for name in files:
        for header in read_headers(folder / name):
            other = headers.setdefault(header.name, header)
            if other is not header:
                problems.append(f"{header.name}: is in two files, {other.file.name} and {name}")
    if index is not None:
        for tensor, name in index.items():
            header = headers.get(tensor)
            if header is None:
                problems.append(f"{tensor}: the index puts it in {name}, which lacks it")
            elif header.file != folder / name:
                problems.append(f"{tensor}: the index puts it in {name}, but it is in {header.file.name}")
        unnamed = [tensor for tensor in headers if tensor not in index]
        if unnamed:
            shown = ", ".join(unnamed[:3]) + (", ..." if len(unnamed) > 3 else "")
            warnings.append(f"the index does not name {len(unnamed)} stored tensor(s), which are used: {shown}")
    if not headers:
        raise CheckpointError(f"{folder}: its safetensors files hold no tensors")
    return headers, problems


def _merge_quantization(folder: Path, config: dict[str, Any], warnings: list[str]) -> dict[str, Any] | None:
    sources: list[tuple[str, dict[str, Any]]] = []
    for holder, where in ((config, "config.json"), (config.get("text_config"), "config.json text_config")):
        for key in CONFIG_KEYS:
            found = holder.get(key) if isinstance(holder, dict) else None
            if found is None:
                continue
            if not isinstance(found, dict):
                raise CheckpointError(f"{folder / 'config.json'}: {key} is not a JSON object")
            sources.append((f"{where} {key}", found))
    for name in QUANTIZATION_FILES:
        if (folder / name).exists():
            found = _read_json(folder / name)
            if "quant_method" not in found and name in METHOD_OF_FILE and not sources:
                found = {**found, "quant_method": METHOD_OF_FILE[name]}
            sources.append((name, found))
    if not sources:
        return None
    first, merged = sources[0][0], dict(sources[0][1])
    for where, found in sources[1:]:
        for key, value in found.items():
            if key not in merged:
                merged[key] = value
            elif merged[key] != value and key not in UNCOMPARED_KEYS:
                warnings.append(f"{where} says {key}: {value!r}, {first} says {merged[key]!r}; the latter is used")
    return merged
