"""Generating text and measuring perplexity with a loaded model, as the command line does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from int4moe_ipex.errors import Int4MoeError

# Windows of perplexity that are fed at once; each is still a sequence of its own.
WINDOWS_AT_ONCE = 8


@dataclass(frozen=True)
class Generation:
    """text and token_ids without the prompt; tokens per second for prefill and for decode (None below 2 new tokens)."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float | None


class _Clock:
    """A transformers streamer that notes when each token came; `on_token` hears every new id."""

    def __init__(self, on_token: Callable[[int], None] | None):
        self.times: list[float] = []
        self.on_token = on_token
        self.prompt_seen = False

    def put(self, ids: torch.Tensor) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.times.append(time.perf_counter())
        if self.on_token is not None:
            self.on_token(int(ids.reshape(-1)[0]))

    def end(self) -> None:
        pass


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int,
    on_token: Callable[[int], None] | None = None,
    **sampling: Any,
) -> Generation:
    """Continues a prompt; greedy unless `sampling` says do_sample=True.

    Raises:
        Int4MoeError: the prompt has no tokens or max_new_tokens is below 1.
    """
    # It imports transformers, which measuring perplexity of other models does not need.
    from int4moe_ipex.models.cache import cache_keyword, growing_cache

    ids = tokenizer(prompt, return_tensors="pt").input_ids
    if not ids.numel():
        raise Int4MoeError("the prompt has no tokens; give --prompt some text")
    if max_new_tokens < 1:
        raise Int4MoeError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    clock = _Clock(on_token)
    sampling.setdefault("do_sample", False)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids.long(),
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=clock,
            **{cache_keyword(): growing_cache(model)},
            **sampling,
        )
    new = out[0, ids.shape[1] :].tolist()
    prefill = clock.times[0] - start
    decode = clock.times[-1] - clock.times[0]
    return Generation(
        text=tokenizer.decode(new, skip_special_tokens=True),
        token_ids=new,
        prompt_tokens=ids.shape[1],
        prefill_tokens_per_second=ids.shape[1] / prefill,
        decode_tokens_per_second=(len(new) - 1) / decode if len(new) > 1 else None,
    )


def perplexity(
    model: Any,
    token_ids: list[int],
    window: int = 128,
    max_tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[float, int]:
    """exp of the mean negative log likelihood over disjoint windows, logits in float32, and the tokens scored.

    Windows start at 0, window, 2 window, ... while start < min(n - 1, max_tokens) - window; a window feeds
    `t[s : s + window)` and scores the `window` next tokens `t[s + 1 : s + window + 1)`.

    Raises:
        Int4MoeError: the text is too short for one window.
    """
    limit = min(len(token_ids) - 1, max_tokens) - window
    starts = list(range(0, limit, window)) if window > 0 else []
    if not starts:
        raise Int4MoeError(f"{len(token_ids)} tokens are too few for one window of {window}")
    ids = torch.tensor(token_ids)
    total = 0.0
    for first in range(0, len(starts), WINDOWS_AT_ONCE):
        some = starts[first : first + WINDOWS_AT_ONCE]
        fed = torch.stack([ids[s : s + window] for s in some])
        scored = torch.stack([ids[s + 1 : s + window + 1] for s in some])
        with torch.inference_mode():
            logits = model(input_ids=fed, use_cache=False).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), scored.flatten(), reduction="none")
        total += loss.double().sum().item()
        if progress is not None:
            progress(min(first + WINDOWS_AT_ONCE, len(starts)), len(starts))
    tokens = len(starts) * window
    return math.exp(total / tokens), tokens
