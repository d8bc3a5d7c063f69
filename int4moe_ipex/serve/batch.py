"""One decoding step for several sequences of different lengths, with each row's result equal to that of it alone.

transformers' attention modules see a batch of one token per sequence. Every sequence keeps a cache of its own, and an
attention function computes each row against its own keys and values, as it would alone: no padding, no mask. Matrix
products outside this package's kernels get a fixed number of rows, because libraries choose another order of
summation for another number of rows.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

from int4moe_ipex.backends import native
from int4moe_ipex.errors import UnsupportedModelError
from int4moe_ipex.models import attention
from int4moe_ipex.models.cache import cache_keyword, growing_cache
from int4moe_ipex.models.fused import FusedGroupRouter, FusedLinear, FusedSigmoidRouter, FusedTopKRouter

# Rows of a matrix product that libraries compute by one and the same kernel; with 6 rows, MKL takes another for the
# last two.
ROW_BLOCK = 16
_active = threading.local()


class BatchCache(Cache):
    """The caches of several sequences in one step; questions about lengths are answered for the longest.

    Args:
        caches: one cache per row, each of batch size 1. A step in one call of the core (models/decode.py) extends them.
    """

    def __init__(self, caches: list[Cache]):
        longest = max(caches, key=lambda cache: cache.get_seq_length())
        super().__init__(layers=longest.layers)
        self.caches = caches
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends row i of [B, heads, 1, dim] to cache i and keeps what each row attends to for the attention."""
        self.rows = [
            cache.update(key_states[i : i + 1], value_states[i : i + 1], layer_idx, *args, **kwargs)
            for i, cache in enumerate(self.caches)
        ]
        return key_states, value_states


def _by_rows(inner: Any) -> Any:
    """transformers' attention interface: `inner` for each row of a step by itself, and for all else as it is."""

    def attend(module: nn.Module, query, key, value, attention_mask, **kwargs):
        batch = getattr(_active, "cache", None)
        if batch is None:
            return inner(module, query, key, value, attention_mask, **kwargs)
        expand = getattr(module, "expand_kv", lambda k, v: (k, v))  # of caches that keep latents
        rows = [expand(k, v) for k, v in batch.rows]
        outputs = [inner(module, query[i : i + 1], k, v, None, **kwargs)[0] for i, (k, v) in enumerate(rows)]
        return torch.cat(outputs), None

    attend.inner = inner
    return attend


class FixedRows:
    """Pads the input of a module to `rows` rows with zeros, and cuts its outputs back."""

    def __init__(self, rows: int):
        self.rows = rows

    def attach(self, module: nn.Module) -> None:
        module.forward = self._wrap(module.forward)

    def _wrap(self, forward):
        def padded(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            shape = hidden.shape
            flat = hidden.reshape(-1, shape[-1])
            count = flat.shape[0]
            if count >= self.rows:
                return forward(hidden, *args, **kwargs)
            flat = torch.cat([flat, flat.new_zeros(self.rows - count, shape[-1])])
            out = forward(flat, *args, **kwargs)
            if isinstance(out, torch.Tensor):
                return out[:count].reshape(*shape[:-1], out.shape[-1])
            return type(out)(o[:count] for o in out)

        return padded


class BatchModel:
    """A model that runs up to `rows` sequences at once.

    Raises:
        UnsupportedModelError: a model whose attention cannot be computed row by row this way.
    """

    def __init__(self, model: nn.Module, rows: int):
        self.model, self.rows = model, rows
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        inner = model.config._attn_implementation
        if inner not in ("sdpa", attention.NAME) or kinds - {"full_attention", "sliding_attention"}:
            raise UnsupportedModelError(
                f"serve.max_running above 1 needs scaled dot product attention in every layer, and "
                f"{model.config.model_type} has {inner} with {', '.join(sorted(kinds))}: set serve.max_running to 1"
            )
        AttentionInterface.register(attention.ROWS, _by_rows(AttentionInterface()[inner]))
        AttentionMaskInterface.register(attention.ROWS, sdpa_mask)
        model.config._attn_implementation = attention.ROWS
        fixed = FixedRows(-(-rows // ROW_BLOCK) * ROW_BLOCK)
        for module in model.modules():
            router = type(module).__name__.endswith("Router") and "weight" in module._parameters
            dense = isinstance(module, nn.Linear) or router
            if dense and not _row_by_row(module, rows):
                fixed.attach(module)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, caches: list[Cache]) -> torch.Tensor:
        """Logits [B, vocabulary] after one more token of each sequence, from tokens and positions [B]."""
        cache = caches[0] if len(caches) == 1 else BatchCache(caches)
        if len(caches) > 1:
            _active.cache = cache
        try:
            return _forward(self.model, tokens[:, None], positions[:, None], cache)
        finally:
            _active.cache = None


def _row_by_row(module: nn.Module, rows: int) -> bool:
    """Whether the native core computes this module for so many rows, each of them by itself."""
    wide = isinstance(module, FusedSigmoidRouter | FusedGroupRouter)
    if not ((wide or isinstance(module, FusedLinear | FusedTopKRouter)) and attention.available()):
        return False
    return (
        module.weight.dtype is (torch.float32 if wide else torch.bfloat16)
        and module.weight.shape[1] % 32 == 0
        and rows <= (native._native.decode_rows if wide else native._native.dense_tokens)
    )


class SingleModel:
    """A model that runs one sequence at a time, exactly as transformers' generate does."""

    rows = 1

    def __init__(self, model: nn.Module):
        self.model = model

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, caches: list[Cache]) -> torch.Tensor:
        return _forward(self.model, tokens[:, None], positions[:, None], caches[0])


def prefill(model: nn.Module, prompt: list[int]) -> tuple[torch.Tensor, Cache]:
    """Logits [vocabulary] after a prompt, and the cache that holds it. Prompts are never computed together."""
    cache = growing_cache(model)
    return _forward(model, torch.tensor([prompt]), torch.arange(len(prompt))[None], cache)[0], cache


def _forward(model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
    out = model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **{cache_keyword(): cache})
    return out.logits[:, -1]
