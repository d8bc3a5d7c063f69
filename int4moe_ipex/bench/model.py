"""A whole model: prefill and decode tokens per second, memory, and what a step's time goes to."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from int4moe_ipex.bench.timing import cpu_seconds
from int4moe_ipex.machine import peak_rss_bytes
from int4moe_ipex.models import decode
from int4moe_ipex.models.cache import cache_keyword
from int4moe_ipex.moe.experts import Int4Experts

# Class-name endings -> part; what no module of these covers (residuals, rotary tables, Python) is "other".
PARTS = (
    ("Attention", "attention"),
    ("Norm", "norms"),
    ("TopKRouter", "router"),
    ("Gate", "router"),
    ("Experts", "experts"),
    ("Embedding", "embedding"),
)


@dataclass(frozen=True)
class ModelResult:
    """Tokens per second (median runs), bytes, and seconds of one decode step by part of the model.

    foreign: the share of the machine's CPU time that other processes used meanwhile.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_rate: float
    decode_rate: float
    decode_seconds: list[float]
    peak_rss_bytes: int
    packed_bytes: int
    decode_parts: dict[str, float]
    prefill_parts: dict[str, float]
    foreign: float

    @property
    def outside_experts(self) -> float:
        """Share of a decode step that does not go into the routed experts."""
        return 1 - self.decode_parts.get("experts", 0.0) / sum(self.decode_parts.values())


def _part_of(name: str, module: nn.Module) -> str | None:
    if isinstance(module, Int4Experts):
        return "experts"
    if name.endswith("lm_head"):
        return "lm_head"
    if name.endswith(("mlp.gate", "block_sparse_moe.gate")):
        return "router"
    if "shared_expert" in name.rpartition(".")[2]:
        return "shared experts"
    for ending, part in PARTS:
        if type(module).__name__.endswith(ending):
            return part
    return None


@contextmanager
def breakdown(model: nn.Module, step: bool = False):
    """Within the block, adds up the seconds spent in each part's modules, each part without those nested in it.

    Args:
        step: decoding steps are what is measured. Where the core takes all layers in one call, its own clock tells the
            parts (norms belong to attention and router then); modules that are watched would not be left out.

    Yields:
        A dict part -> seconds, complete when the block ends; "other" is what no part covers.
    """
    seconds: dict[str, float] = defaultdict(float)
    stack: list[list[Any]] = []  # [part, start, seconds of nested parts]

    def enter(part: str):
        def hook(*_: Any) -> None:
            stack.append([part, time.perf_counter(), 0.0])

        return hook

    def leave(*_: Any) -> None:
        part, start, nested = stack.pop()
        taken = time.perf_counter() - start
        seconds[part] += taken - nested
        if stack:
            stack[-1][2] += taken

    handles = []
    with ExitStack() as contexts:
        layers = contexts.enter_context(decode.timed(model)) if step else None
        for name, module in model.named_modules():
            part = _part_of(name, module)
            inside = ".layers." in name or name.endswith("rotary_emb")
            if part is not None and not (inside and layers is not None):
                handles += [module.register_forward_pre_hook(enter(part)), module.register_forward_hook(leave)]
        start = time.perf_counter()
        try:
            yield seconds
        finally:
            total = time.perf_counter() - start
            for handle in handles:
                handle.remove()
    for part, taken in (layers or {}).items():
        seconds[part] += taken
    seconds["other"] = total - sum(seconds.values())


class Session:
    """Greedy decoding by plain forward calls with a cache, without generate()'s own work."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.cache: Any = None
        self.next: torch.Tensor | None = None

    def feed(self, ids: torch.Tensor) -> None:
        name = cache_keyword()
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: self.cache})
        self.cache = getattr(out, name)
        self.next = out.logits[:, -1:].max(-1).indices  # four times as fast as torch's argmax of bfloat16

    def step(self) -> None:
        self.feed(self.next)


def measure(model: nn.Module, prompt_tokens: int = 512, new_tokens: int = 64, repeat: int = 3) -> ModelResult:
    """Feeds random ids, then decodes greedily.

    Args:
        repeat: prefills, each on fresh random ids; the last one's cache is decoded from.
    """
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)

    def prompt() -> torch.Tensor:
        return torch.randint(0, vocabulary, (1, prompt_tokens), generator=generator)

    busy, own, began = *cpu_seconds(), time.perf_counter()
    with torch.inference_mode():
        Session(model).feed(prompt()[:, :8])  # first touch of every page and library
        prefills = []
        for _ in range(repeat):
            session, ids = Session(model), prompt()
            start = time.perf_counter()
            session.feed(ids)
            prefills.append(time.perf_counter() - start)
        steps = []
        for _ in range(new_tokens):
            start = time.perf_counter()
            session.step()
            steps.append(time.perf_counter() - start)
        with breakdown(model, step=True) as decode_parts:
            for _ in range(max(1, new_tokens // 4)):
                session.step()
        with breakdown(model) as prefill_parts:
            Session(model).feed(prompt())
    busy_after, own_after = cpu_seconds()
    capacity = (time.perf_counter() - began) * (os.cpu_count() or 1)
    counted = max(1, new_tokens // 4)
    return ModelResult(
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        prefill_rate=prompt_tokens / statistics.median(prefills),
        decode_rate=1 / statistics.median(steps),
        decode_seconds=steps,
        peak_rss_bytes=peak_rss_bytes(),
        packed_bytes=model.int4moe_report.packed_nbytes,
        decode_parts={part: seconds / counted for part, seconds in decode_parts.items()},
        prefill_parts=dict(prefill_parts),
        foreign=max(0.0, ((busy_after - busy) - (own_after - own)) / capacity),
    )
