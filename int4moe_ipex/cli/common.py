"""What several verbs share: options, loading with a progress bar, printing a load's paths."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

PathArgument = Annotated[Path, typer.Argument(help="Folder of the checkpoint.", show_default=False)]
BackendOption = Annotated[str | None, typer.Option(help="auto, native, ipex, onednn, torch or reference.")]
DtypeOption = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16, of activations and dense weights.")
]
ComputeOption = Annotated[str | None, typer.Option(help="w4a16 (exact activations) or w4a8 (int8 activations).")]
ConfigOption = Annotated[Path | None, typer.Option(help="YAML configuration; see configs/auto.yaml.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text for people.")]


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Keeps Python's cyclic collector off what is made inside, now and in its later rounds.

    For imports of torch and transformers, and a server's load: they make a million objects that stay, and looking for
    garbage among them again and again is a quarter of the time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # The interpreter's last collection is to find them: modules in C++ check that they are let go.
        atexit.register(gc.unfreeze)
        if was:
            gc.enable()


@contextlib.contextmanager
def killed_by_ctrl_c() -> Iterator[None]:
    """While libraries are imported, which may swallow Python's KeyboardInterrupt, Ctrl-C ends the process at once."""
    here = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not here or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def import_transformers() -> None:
    """Imports torch and transformers, as fast as they can be."""
    with without_collection(), killed_by_ctrl_c():
        import transformers.modeling_utils  # noqa: F401


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def quiet_transformers() -> None:
    """Keeps transformers' own bars and notices off the terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextlib.contextmanager
def progress_bar(what: str, as_json: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr as a function of (done, total, name); silent for machines or where stderr is no terminal."""
    if as_json or not sys.stderr.isatty():
        yield lambda done, total, name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, name="")
        yield lambda done, total, name: bar.update(task, completed=done, total=total, name=name)


def load_with_progress(path: Path, config: Any, as_json: bool, **options: Any) -> tuple[Any, Any]:
    """(model, tokenizer), with a progress bar; config is a file, a `Config` or None.

    The folder and the configuration are checked before torch and transformers are imported.
    """
    from int4moe_ipex.config import Config
    from int4moe_ipex.folders import model_folder

    model_folder(path)
    settings = Config.load(config, **{key: value for key, value in options.items() if value is not None})
    import_transformers()
    import int4moe_ipex

    quiet_transformers()
    with progress_bar("loading", as_json) as step:
        model = int4moe_ipex.load(path, settings, progress=step)
    return model, load_tokenizer(path)


def load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    from int4moe_ipex.errors import CheckpointError

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: no usable tokenizer: {error}") from error


def paths_summary(report: Any) -> list[dict[str, Any]]:
    """For each path: how many modules run on it, an example, and why the rows before it were not taken."""
    summary = []
    for path, modules in report.paths.items():
        here = set(modules)
        reasons = [f"{row}: {reason}" for (row, reason), where in report.rejected.items() if here & set(where)]
        summary.append({"path": path, "modules": len(here), "example": modules[-1], "rejected": reasons})
    return summary
