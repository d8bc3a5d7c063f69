"""`int4moe convert`: a checkpoint into a prepacked store, or into a standard compressed-tensors checkpoint."""

from __future__ import annotations

import sys
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from int4moe_ipex.cli.common import (
    BackendOption,
    ConfigOption,
    DtypeOption,
    JsonOption,
    PathArgument,
    import_transformers,
    print_json,
    progress_bar,
    quiet_transformers,
)


class Target(str, Enum):
    store = "store"
    compressed_tensors = "compressed-tensors"


def command(app: typer.Typer) -> None:
    app.command("convert")(convert)


def convert(
    path: PathArgument,
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.", show_default=False)],
    to: Annotated[Target, typer.Option(help="A prepacked store, or a standard checkpoint.")] = Target.store,
    backend: BackendOption = None,
    dtype: DtypeOption = None,
    config: ConfigOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier convert wrote there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Pack a checkpoint once, for starts that map the packed weights instead of packing them again.

    The store stands alone: give its folder wherever a checkpoint's is taken. It is opened in about a second whatever
    its size, and processes share its memory. With --to compressed-tensors the weights are written unpacked, bit for
    bit, as a checkpoint that other tools read. What is interrupted leaves nothing behind.

    Example: int4moe convert ./Qwen3-30B-A3B-GPTQ ./Qwen3-30B-A3B.store --dtype bfloat16
    """
    from int4moe_ipex.cli.inspect import size
    from int4moe_ipex.config import Config
    from int4moe_ipex.errors import ConfigError
    from int4moe_ipex.folders import model_folder

    if to is Target.compressed_tensors and any(option is not None for option in (backend, dtype, config)):
        raise ConfigError("--backend, --dtype and --config belong to a store; compressed-tensors keeps what is stored")
    model_folder(path)
    settings = Config.load(config, backend=backend, dtype=dtype)
    import_transformers()
    quiet_transformers()
    start = time.perf_counter()
    with progress_bar("converting", as_json) as step:
        if to is Target.store:
            from int4moe_ipex.models.stored import write_store

            written = write_store(path, out, settings, force=force, progress=step)
        else:
            from int4moe_ipex.models.export import write_compressed_tensors

            written = write_compressed_tensors(path, out, force=force, progress=step)
    seconds = time.perf_counter() - start
    kind = "modules in layout " if to is Target.store else "linears as "
    layouts = ", ".join(f"{count} {kind}{layout}" for layout, count in written.layouts.items())
    if as_json:
        facts = {"to": to.value, "bytes": written.nbytes, "layouts": written.layouts, "seconds": round(seconds, 3)}
        print_json({"path": str(written.path), **facts, "warnings": list(written.warnings)})
    else:
        print(f"{written.path}: {size(written.nbytes)} in {seconds:.1f} s; {layouts}")
        for warning in written.warnings:
            print(f"warning: {warning}", file=sys.stderr)
