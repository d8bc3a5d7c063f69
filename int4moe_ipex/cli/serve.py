"""`int4moe serve`: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from int4moe_ipex.cli.common import (
    BackendOption,
    ComputeOption,
    ConfigOption,
    DtypeOption,
    PathArgument,
    killed_by_ctrl_c,
    load_with_progress,
    without_collection,
)

NEEDED = ("starlette", "uvicorn", "prometheus_client")


def command(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    path: PathArgument,
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port; 0 takes a free one.")] = None,
    store: Annotated[Path | None, typer.Option(help="Prepacked store written by `int4moe convert`.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Requests that are computed together.")] = None,
    backend: BackendOption = None,
    dtype: DtypeOption = None,
    compute: ComputeOption = None,
) -> None:
    """Serve a checkpoint by OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.

    SIGTERM finishes the requests that were taken in, up to serve.drain_seconds.

    Example: int4moe serve ./Qwen3-30B-A3B-GPTQ --config deploy.yaml --port 8000
    """
    from int4moe_ipex.config import Config

    _check_installed()
    settings = Config.load(config, backend=backend, dtype=dtype, compute=compute)
    changed: dict[str, Any] = {}
    server = {"host": host, "port": port, "max_running": max_running}
    changed["serve"] = {key: value for key, value in server.items() if value is not None} or None
    changed["store"] = None if store is None else {"path": str(store)}
    settings = Config.load(settings, **{key: value for key, value in changed.items() if value is not None})

    from int4moe_ipex.folders import model_folder
    from int4moe_ipex.serve.listen import listener

    model_folder(path)

    bound = listener(settings.serve.host, settings.serve.port)
    with without_collection():
        with killed_by_ctrl_c():
            from int4moe_ipex.serve import server as serving

        serving.check(path, settings)
        model, tokenizer = load_with_progress(path, settings, False)
        name = settings.serve.model_name or path.resolve().name
        service = serving.service(model, tokenizer, settings, name)
    serving.run(service, bound, settings.serve.drain_seconds)


def _check_installed() -> None:
    import importlib.util

    from int4moe_ipex.errors import Int4MoeError

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Int4MoeError(f"serve needs {', '.join(missing)}: pip install 'int4moe_ipex[serve]'")
