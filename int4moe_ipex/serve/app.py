"""The HTTP side: routes, OpenAI's answers and errors, streams, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from int4moe_ipex.config import Config
from int4moe_ipex.serve import engine as engines
from int4moe_ipex.serve import responses
from int4moe_ipex.serve.metrics import Metrics
from int4moe_ipex.serve.requests import BadRequest, Chat, Common, Completion, parse

log = logging.getLogger("int4moe_ipex.serve")

MAX_BODY = 16 * 2**20
GONE = 499  # nginx's status for a client that closed the connection


class ClientGone(Exception):
    """The client closed the connection before its answer was done."""


class Service:
    """The routes over one engine.

    Args:
        engine: computes.
        tokenizer: of the model.
        name: the model's name in answers.
        context: tokens of prompt and answer together, at most.
        config: its generation section has the defaults of requests.
        metrics: counts.
    """

    def __init__(
        self, engine: engines.Engine, tokenizer: Any, name: str, context: int, config: Config, metrics: Metrics
    ):
        self.engine, self.tokenizer, self.name, self.context = engine, tokenizer, name, context
        self.config, self.metrics = config, metrics
        self.started = int(time.time())
        self._template_arguments = set(inspect.signature(tokenizer.apply_chat_template).parameters)
        # One thread: tokenizers are not safe to share between several.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="int4moe-tokenizer")

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.metrics_text),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    async def health(self, _: HttpRequest) -> Response:
        if not self.engine.alive or self.engine.stopping:
            return JSONResponse({"status": "stopping" if self.engine.stopping else "dead"}, 503)
        return JSONResponse({"status": "ok", "running": self.engine.running, "waiting": self.engine.waiting})

    async def metrics_text(self, _: HttpRequest) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    def _described(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "int4moe_ipex",
            "max_model_len": self.context,
        }

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, http: HttpRequest) -> Response:
        if http.path_params["name"] != self.name:
            return _error(self._no_model(http.path_params["name"]))
        return JSONResponse(self._described())

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, "completions", Completion)

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, "chat", Chat)

    async def _answer(self, http: HttpRequest, endpoint: str, kind: type[Common]) -> Response:
        call = _Call(self, http, endpoint)
        try:
            response = await call.answer(kind)
        except BadRequest as error:
            response = _error(error)
        except ClientGone:
            response = Response(status_code=GONE)
        except Exception:
            log.exception("a request failed")
            response = JSONResponse(responses.error("internal error; see the server's log", "server_error"), 500)
        if not isinstance(response, _Stream):
            call.count(response.status_code)
        return response

    def _no_model(self, name: str) -> BadRequest:
        return BadRequest(f"no model {name!r} here; this server has {self.name!r}", "model", "model_not_found", 404)

    def token_ids(self, asked: Common) -> list[int]:
        """The prompt of a request as ids. Raises BadRequest."""
        if isinstance(asked, Chat):
            return self._chat_ids(asked)
        prompt = asked.one_prompt
        if isinstance(prompt, str):
            return self.tokenizer(prompt).input_ids
        vocabulary = self.engine.vocabulary
        if not all(0 <= token < vocabulary for token in prompt):
            raise BadRequest(f"the prompt has a token id outside 0 to {vocabulary - 1}", "prompt")
        return list(prompt)

    def _chat_ids(self, asked: Chat) -> list[int]:
        from jinja2 import TemplateError

        if self.tokenizer.chat_template is None:
            raise BadRequest(
                "this checkpoint has no chat template: use /v1/completions, or give the server a serve.chat_template",
                "messages",
            )
        given = asked.chat_template_kwargs or {}
        # What is not the template's but transformers' own: another template, cut prompts, other kinds of answers.
        taken = sorted(self._template_arguments & set(given))
        if taken:
            raise BadRequest(f"not for the chat template: {', '.join(taken)}", "chat_template_kwargs")
        try:
            return self.tokenizer.apply_chat_template(
                [message.for_template() for message in asked.messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **given,
            )["input_ids"]
        except (TemplateError, TypeError) as error:
            raise BadRequest(f"the chat template refuses these messages: {error}", "messages") from None

    async def prompt_of(self, asked: Common) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, self.token_ids, asked)

    def room(self, prompt: int, wanted: int | None) -> int:
        """New tokens that a request may have.

        Raises:
            BadRequest: the context is too short for the prompt, or for what was asked for.
        """
        left = self.context - prompt
        if prompt == 0:
            raise BadRequest("the prompt has no tokens", "prompt")
        if left < 1 or (wanted is not None and wanted > left):
            asked = f"the prompt has {prompt} tokens" + (f" and {wanted} new ones are wanted" if wanted else "")
            raise BadRequest(
                f"{asked}, but the context has {self.context} in all", "max_tokens", "context_length_exceeded"
            )
        return wanted or min(self.config.generation.max_new_tokens, left)


class _Call:
    """One request from its body to the last byte of its answer."""

    def __init__(self, service: Service, http: HttpRequest, endpoint: str):
        self.service, self.http, self.endpoint = service, http, endpoint
        self.arrived = time.monotonic()
        self.events: asyncio.Queue[engines.Event] = asyncio.Queue()
        self.tokens = 0
        self._last_token = 0.0

    def count(self, status: int) -> None:
        metrics = self.service.metrics
        metrics.requests.labels(self.endpoint, str(status)).inc()
        metrics.seconds.labels(self.endpoint).observe(time.monotonic() - self.arrived)

    async def answer(self, kind: type[Common]) -> Response:
        asked = parse(kind, await _body(self.http))
        service = self.service
        if asked.model is not None and asked.model != service.name:
            raise service._no_model(asked.model)
        prompt = await service.prompt_of(asked)
        new_tokens = service.room(len(prompt), asked.new_tokens)
        loop = asyncio.get_running_loop()

        def deliver(event: engines.Event) -> None:
            # Once the loop is closed, the server has given up on its clients.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.events.put_nowait, event)

        request = engines.Request(
            prompt,
            new_tokens,
            deliver,
            asked.sampling(service.config.generation),
            asked.stops,
            bool(asked.ignore_eos),
        )
        try:
            service.engine.submit(request)
        except engines.Refused as refused:
            return _refusal(refused.status, str(refused))
        service.metrics.prompt_tokens.inc(len(prompt))
        service.metrics.prompts.observe(len(prompt))
        shape = responses.Shape(service.name, isinstance(asked, Chat))
        streaming = False
        try:
            # The first event decides the status, so that a failure is no stream of status 200.
            first = await self._or_gone(self.events.get())
            if isinstance(first, engines.Failed):
                return _refusal(first.status, first.message)
            if not asked.stream:
                return await self._or_gone(self._whole(first, shape, len(prompt)))
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            streaming = True
            return _Stream(self, request, self._pieces(first, shape, len(prompt), usage))
        finally:
            if not streaming:
                request.cancel()  # has no effect on one that is done

    async def _or_gone(self, work: Any) -> Any:
        """The result of `work`, unless the client closes the connection before."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGone
        finally:
            task.cancel()
            gone.cancel()

    async def _gone(self) -> None:
        while (await self.http.receive())["type"] != "http.disconnect":
            pass

    async def _each(self, first: engines.Event) -> AsyncIterator[engines.Event]:
        """`first` and all that follow, to the end."""
        event = first
        while True:
            if isinstance(event, engines.Delta):
                self._note(event)
            yield event
            if not isinstance(event, engines.Delta):
                return
            event = await self.events.get()

    def _note(self, delta: engines.Delta) -> None:
        metrics, now = self.service.metrics, time.monotonic()
        metrics.new_tokens.inc(delta.tokens - self.tokens)
        self.tokens = delta.tokens
        if delta.tokens == 1:
            metrics.first.observe(now - self.arrived)
        else:
            metrics.between.observe(now - self._last_token)
        self._last_token = now

    async def _whole(self, first: engines.Event, shape: responses.Shape, prompt_tokens: int) -> Response:
        text = []
        async for event in self._each(first):
            if isinstance(event, engines.Failed):
                return _refusal(event.status, event.message)
            if isinstance(event, engines.Finished):
                return JSONResponse(shape.whole("".join(text), event.reason, prompt_tokens, self.tokens))
            text.append(event.text)
        raise AssertionError("the engine ends every request")

    async def _pieces(
        self, first: engines.Event, shape: responses.Shape, prompt_tokens: int, usage: bool
    ) -> AsyncIterator[str]:
        opening = shape.first()
        if opening is not None:
            yield responses.sse(opening)
        async for event in self._each(first):
            if isinstance(event, engines.Failed):
                self.failed = event.status
                yield responses.sse(responses.error(event.message, _kind(event.status)))
                return
            if isinstance(event, engines.Finished):
                yield responses.sse(shape.piece("", event.reason))
            elif event.text:
                yield responses.sse(shape.piece(event.text, None))
        if usage:
            yield responses.sse(shape.usage_piece(prompt_tokens, self.tokens))
        yield responses.DONE
        self.complete = True

    failed: int | None = None
    complete = False


class _Stream(StreamingResponse):
    """A stream that cancels its request when the client goes away, and is counted at its end."""

    def __init__(self, call: _Call, request: engines.Request, pieces: AsyncIterator[str]):
        super().__init__(pieces, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self.call, self.request = call, request

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.request.cancel()
            self.call.count(200 if self.call.complete else self.call.failed or GONE)


async def _body(http: HttpRequest) -> Any:
    """The JSON of a request's body. Raises BadRequest and ClientGone."""
    parts, size = [], 0
    try:
        async for part in http.stream():
            size += len(part)
            if size > MAX_BODY:
                raise BadRequest(f"the body is larger than {MAX_BODY // 2**20} MiB", status=413)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    body = b"".join(parts)
    try:
        content = json.loads(body)
        if b"\\u" in body:
            json.dumps(content, ensure_ascii=False).encode()  # halves of surrogate pairs are no text
        return content
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _error(error: BadRequest) -> JSONResponse:
    return JSONResponse(responses.error(str(error), _kind(error.status), error.param, error.code), error.status)


def _refusal(status: int, message: str) -> JSONResponse:
    code = {429: "queue_full", 503: "stopping"}.get(status)
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return JSONResponse(responses.error(message, _kind(status), code=code), status, headers)


async def _http_error(http: HttpRequest, error: HTTPException) -> Response:
    """Unknown paths and methods, in OpenAI's shape."""
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(responses.error(message, _kind(error.status_code)), error.status_code, error.headers)
