"""The queue in front of the model, and the thread that computes: prompts one by one, decoding steps together."""

from __future__ import annotations

import collections
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from int4moe_ipex.serve.batch import BatchModel, SingleModel, prefill
from int4moe_ipex.serve.sampling import Sampler, Sampling
from int4moe_ipex.serve.text import Detokenizer, StopStrings

log = logging.getLogger("int4moe_ipex.serve")


class Refused(Exception):
    """A request that is not taken in: the queue is full (status 429) or the server stops (503)."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Delta:
    """New text of a request (may be empty) and how many tokens it has generated so far."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Finished:
    """The end of a request: `stop` (end token or stop string) or `length`."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """A request that ends without a result, with the HTTP status that says why."""

    status: int
    message: str


Event = Delta | Finished | Failed


@dataclass
class Request:
    """A request as the engine takes it; `deliver` is called from the engine's thread with each event."""

    prompt: list[int]
    max_new_tokens: int
    deliver: Callable[[Event], None]
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    arrived: float = field(default_factory=time.monotonic)
    cancelled: bool = False

    def cancel(self) -> None:
        """Takes effect before the next token; nothing is delivered any more."""
        self.cancelled = True


class _Running:
    """A request that has been prefilled, with its cache."""

    def __init__(self, request: Request, tokenizer: Any, ends: frozenset[int]):
        self.request = request
        self.sampler = Sampler(request.sampling, request.prompt)
        self.text, self.stops = Detokenizer(tokenizer), StopStrings(request.stop)
        self.ends = frozenset() if request.ignore_end else ends
        self.cache: Any = None
        self.last = -1
        self.generated = 0

    @property
    def position(self) -> int:
        """Of the last token, which the next step feeds."""
        return len(self.request.prompt) + self.generated - 1

    def take(self, logits: torch.Tensor) -> Finished | None:
        """Picks a token and delivers its text; the end that is to be delivered now, if it is one."""
        self.last = self.sampler.pick(logits)
        self.generated += 1
        reason = None
        if self.last in self.ends:
            text, reason = "", "stop"
        else:
            text = self.stops.put(self.text.put(self.last))
            reason = "stop" if self.stops.found else None
        if reason is None and self.generated >= self.request.max_new_tokens:
            reason = "length"
        if reason is not None and not self.stops.found:
            text += self.stops.put(self.text.flush())
            if self.stops.found:
                reason = "stop"
            else:
                text += self.stops.flush()
        self.request.deliver(Delta(text, self.generated))
        return None if reason is None else Finished(reason)


class Engine:
    """Owns the thread that runs the model. Every request that is taken in gets exactly one Finished or Failed.

    Args:
        model: a loaded transformers model.
        tokenizer: its tokenizer.
        max_running: sequences that decode together.
        max_queue: requests that may wait beyond those.
    """

    def __init__(self, model: Any, tokenizer: Any, max_running: int = 1, max_queue: int = 64):
        self._model = BatchModel(model, max_running) if max_running > 1 else SingleModel(model)
        self._tokenizer = tokenizer
        self._capacity = max_running + max_queue
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: list[_Running] = []
        self._ends = end_tokens(model)
        self.vocabulary: int = model.config.vocab_size
        self._state = threading.Condition()
        self._taken = 0  # requests between submit and their last event
        self._stopping = False
        self._abort_message: str | None = None
        self._thread = threading.Thread(target=self._run, name="int4moe-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        return self._taken - len(self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, *requests: Request) -> None:
        """Takes all the requests in, or none.

        Raises:
            Refused: no room, or stopping.
        """
        with self._state:
            if self._stopping:
                raise Refused(503, "the server is stopping")
            if not self.alive:
                raise Refused(503, "the engine has died; see the server's log")
            if self._taken + len(requests) > self._capacity:
                raise Refused(
                    429, f"{self._taken} requests are running or waiting, and serve.max_queue allows no more: try later"
                )
            self._taken += len(requests)
            self._waiting.extend(requests)
            self._state.notify()

    def stop(self) -> None:
        """Takes no more requests in; those that are in are finished."""
        with self._state:
            self._stopping = True
            self._state.notify()

    def abort(self, message: str = "the server stopped before this request was done") -> None:
        """Ends every request now with status 503, before its next token."""
        self._abort_message = message
        self.stop()

    def join(self, timeout: float | None = None) -> bool:
        """Waits until all is done after `stop` or `abort`; whether that happened in time."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._state:
                    while not self._waiting and not self._running and not self._stopping:
                        self._state.wait()
                    if not self._waiting and not self._running:
                        return
                    admitted = None
                    if self._waiting and len(self._running) < self._model.rows:
                        admitted = self._waiting.popleft()
                if self._abort_message is not None:
                    self._fail_all(self._abort_message, admitted)
                    continue
                if admitted is not None:
                    self._start(admitted)
                self._drop_cancelled()
                if self._running:
                    self._step()

    def _start(self, request: Request) -> None:
        if request.cancelled:
            self._release()
            return
        try:
            running = _Running(request, self._tokenizer, self._ends)
            logits, running.cache = prefill(self._model.model, request.prompt)
            end = running.take(logits)
        except Exception:
            self._fail([request])
            return
        if end is None:
            self._running.append(running)
        else:
            self._end(request, end)

    def _step(self) -> None:
        batch = self._running
        try:
            logits = self._model.step(
                torch.tensor([r.last for r in batch]),
                torch.tensor([r.position for r in batch]),
                [r.cache for r in batch],
            )
        except Exception:
            # The caches may have been half updated: none of these sequences can go on.
            self._running = []
            self._fail([r.request for r in batch])
            return
        kept = []
        for running, row in zip(batch, logits):
            try:
                end = running.take(row)
            except Exception:
                self._fail([running.request])
                continue
            if end is None:
                kept.append(running)
            else:
                self._end(running.request, end)
        self._running = kept

    def _drop_cancelled(self) -> None:
        kept = [r for r in self._running if not r.request.cancelled]
        self._release(len(self._running) - len(kept))
        self._running = kept

    def _release(self, count: int = 1) -> None:
        with self._state:
            self._taken -= count

    def _end(self, request: Request, event: Finished | Failed) -> None:
        """The last event of a request; its place is free before, for whoever asks again on seeing it."""
        self._release()
        request.deliver(event)

    def _fail(self, requests: list[Request]) -> None:
        log.exception("a request failed")
        for request in requests:
            self._end(request, Failed(500, "the model failed on this request; see the server's log"))

    def _fail_all(self, message: str, admitted: Request | None) -> None:
        with self._state:
            requests = [*self._waiting, *(r.request for r in self._running), *([admitted] if admitted else [])]
            self._waiting.clear()
            self._running = []
            self._taken -= len(requests)
        for request in requests:
            request.deliver(Failed(503, message))


def end_tokens(model: Any) -> frozenset[int]:
    """The ids that end a text, by generation_config.json, else config.json."""
    ids = itertools.chain.from_iterable(
        [value] if isinstance(value, int) else value or []
        for value in (model.generation_config.eos_token_id, getattr(model.config, "eos_token_id", None))
    )
    return frozenset(ids)
