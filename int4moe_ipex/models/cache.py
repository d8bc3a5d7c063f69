"""A key/value cache that grows in place: transformers' own copies every layer's whole cache for each new token."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

# Tokens that a buffer has room for when it is made; it doubles from there.
FIRST = 256


class GrowingLayer(DynamicLayer):
    """keys and values [batch, heads, tokens, head_dim] are views of buffers with room for more tokens."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        # For each sequence in the buffers: addresses of keys and values, strides in elements by head and token of each.
        self.addresses: list[tuple[int, ...]] = []

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.keys.shape[-2]
        total = length + key_states.shape[-2]
        self.reserve(total)
        keys, values = self._buffers
        keys[..., length:total, :].copy_(key_states)
        values[..., length:total, :].copy_(value_states)
        self.keys, self.values = keys[..., :total, :], values[..., :total, :]
        return self.keys, self.values

    def reserve(self, total: int) -> None:
        """Makes room for `total` tokens in the buffers, whose start keys and values then are."""
        if self._fits(total):
            return
        keys, values = self._buffers = _grown(self.keys, total), _grown(self.values, total)
        self.addresses = [
            (keys[i].data_ptr(), values[i].data_ptr(), *keys.stride()[1:3], *values.stride()[1:3])
            for i in range(keys.shape[0])
        ]
        self.keys, self.values = keys[..., : self.keys.shape[-2], :], values[..., : self.values.shape[-2], :]

    def extend(self) -> None:
        """Takes in the token that somebody has written behind the last one."""
        length = self.keys.shape[-2] + 1
        keys, values = self._buffers
        self.keys, self.values = keys.narrow(-2, 0, length), values.narrow(-2, 0, length)

    def _fits(self, total: int) -> bool:
        """Whether keys and values still are the start of the buffers (cropping keeps that, reordering does not)."""
        if self._buffers is None:
            return False
        for view, buffer in zip((self.keys, self.values), self._buffers):
            same = view.data_ptr() == buffer.data_ptr() and view.shape[:-2] == buffer.shape[:-2]
            if not same or total > buffer.shape[-2]:
                return False
        return True


def _grown(view: torch.Tensor, total: int) -> torch.Tensor:
    room = max(FIRST, 2 * total)
    buffer = view.new_empty((*view.shape[:-2], room, view.shape[-1]))
    buffer[..., : view.shape[-2], :].copy_(view)
    return buffer


def growing(layer: Any) -> GrowingLayer | None:
    """The same keys and values in a layer that grows in place; None for other kinds than transformers' plain one."""
    if type(layer) is not DynamicLayer:
        return None
    made = GrowingLayer()
    made.__dict__.update(layer.__dict__)
    return made


def growing_cache(model: Any) -> Cache:
    """An empty cache for `model.generate(..., cache=...)`: plain layers grow in place, others stay what they are."""
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_keyword() -> str:
    """What this transformers calls the cache in `generate` and `forward`."""
    from transformers.generation import utils

    return "cache" if "cache" in getattr(utils, "ALL_CACHE_NAMES", ()) else "past_key_values"
