"""From a checkpoint and a configuration to a listening process, and to its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from int4moe_ipex import __version__
from int4moe_ipex.config import Config
from int4moe_ipex.errors import ConfigError
from int4moe_ipex.serve.app import Service
from int4moe_ipex.serve.engine import Engine
from int4moe_ipex.serve.metrics import Metrics

# Over serve.drain_seconds, for answers that are being written.
SLACK_SECONDS = 5


def context_of(own: int | None, config: Config) -> int:
    """Tokens of a sequence, at most; `own` is what the model was made for (max_position_embeddings).

    Raises:
        ConfigError: serve.max_context is more than the model was made for, or auto and the model does not say.
    """
    wanted = config.serve.max_context
    if wanted == "auto":
        if own is None:
            raise ConfigError(
                "serve.max_context is auto, but config.json has no max_position_embeddings: give a number"
            )
        return own
    if own is not None and wanted > own:
        raise ConfigError(f"serve.max_context {wanted} is more than the model's {own} (max_position_embeddings)")
    return wanted


def chat_template(config: Config) -> str | None:
    """The text of serve.chat_template; raises ConfigError where its file cannot be read."""
    if config.serve.chat_template is None:
        return None
    try:
        return Path(config.serve.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"serve.chat_template {config.serve.chat_template}: {reason}") from None


def check(path: Path, config: Config) -> None:
    """Raises ConfigError for settings that do not fit the model at `path`, as far as its config.json tells before a
    load; what is wrong with that file itself is left to the load."""
    chat_template(config)
    try:
        own = json.loads((path / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if isinstance(own, int):
        context_of(own, config)


def service(model: Any, tokenizer: Any, config: Config, name: str) -> Service:
    """The routes over a loaded model. Its engine's thread runs from now on."""
    template = chat_template(config)
    if template is not None:
        tokenizer.chat_template = template
    context = context_of(getattr(model.config, "max_position_embeddings", None), config)
    engine = Engine(model, tokenizer, config.serve.max_running, config.serve.max_queue)
    metrics = Metrics(engine, name, __version__, list(model.int4moe_report.paths))
    return Service(engine, tokenizer, name, context, config, metrics)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which end a graceful stop with the signal's exit status."""

    def __init__(self, config: uvicorn.Config, started: Any):
        super().__init__(config)
        self._started = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._started()


def run(made: Service, bound: socket.socket, drain_seconds: float) -> None:
    """Serves until SIGTERM or SIGINT; then requests that were taken in get `drain_seconds`, and what is left gets 503.

    A second signal does not wait.
    """
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    host, port = bound.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    settings = uvicorn.Config(
        made.app(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=int(drain_seconds) + SLACK_SECONDS,
    )
    server = _Server(settings, lambda: print(f"serving {made.name} at http://{address}:{port}", flush=True))

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            again = server.should_exit
            server.should_exit = True
            if again:
                made.engine.abort()
                return
            made.engine.stop()
            loop.call_later(drain_seconds, made.engine.abort)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await server.serve(sockets=[bound])

    asyncio.run(main())
    made.engine.abort()
    made.engine.join(SLACK_SECONDS)
