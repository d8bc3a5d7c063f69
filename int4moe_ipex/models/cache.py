"""A key/value cache that grows in place: transformers' own copies every layer's whole cache for each new token."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

# Tokens that a buffer has room for when it is made; it doubles from there.
FIRST = 256


class GrowingLayer(DynamicLayer):
    """keys and values [batch, heads, tokens, head_dim] are views of buffers with room for more tokens.

    Views are made when somebody looks: a decoding step in one call (decode.py) writes behind the last token and counts.
    """

    def __init__(self, **kwargs: Any):
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._views: list[torch.Tensor | None] = [None, None]
        # Tokens, where keys and values are the start of the buffers; None where somebody has set them himself.
        self.length: int | None = None
        self.room = 0
        # For each sequence in the buffers: addresses of keys and values, strides in elements by head and token of each.
        self.addresses: list[tuple[int, ...]] = []
        super().__init__(**kwargs)

    @property
    def keys(self) -> torch.Tensor | None:
        return self._view(0)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._set(0, value)

    @property
    def values(self) -> torch.Tensor | None:
        return self._view(1)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._set(1, value)

    def _view(self, which: int) -> torch.Tensor | None:
        view = self._views[which]
        if view is None and self.length is not None:
            view = self._views[which] = self._buffers[which].narrow(-2, 0, self.length)
        return view

    def _set(self, which: int, value: torch.Tensor | None) -> None:
        self._views = [self._view(0), self._view(1)]
        self._views[which] = value
        self.length = None

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self.length is None else self.length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        total = length + key_states.shape[-2]
        self.reserve(total)
        keys, values = self._buffers
        keys[..., length:total, :].copy_(key_states)
        values[..., length:total, :].copy_(value_states)
        self.extend(total - length)
        return self.keys, self.values

    def reserve(self, total: int) -> None:
        """Makes keys and values the start of buffers with room for `total` tokens."""
        if self.length is None and self._fits():
            self.length = self._views[0].shape[-2]
        if self.length is None or total > self.room:
            keys, values = self.keys, self.values
            self.length = keys.shape[-2]
            self._buffers = _grown(keys, total), _grown(values, total)
            self._views = [None, None]
            self.room = self._buffers[0].shape[-2]
        keys, values = self._buffers
        first = (keys.data_ptr(), values.data_ptr())
        if not self.addresses or self.addresses[0][:2] != first:  # new buffers, or a copy of this object
            self.addresses = [
                (keys[i].data_ptr(), values[i].data_ptr(), *keys.stride()[1:3], *values.stride()[1:3])
                for i in range(keys.shape[0])
            ]

    def extend(self, tokens: int = 1) -> None:
        """Takes in tokens that somebody has written behind the last one, into room that was reserved."""
        self.length += tokens
        self._views = [None, None]

    def _fits(self) -> bool:
        """Whether keys and values still are the start of the buffers (cropping keeps that, reordering does not)."""
        if self._buffers is None:
            return False
        for view, buffer in zip(self._views, self._buffers):
            if view is None or view.data_ptr() != buffer.data_ptr() or view.shape[:-2] != buffer.shape[:-2]:
                return False
        return self._views[0].shape[-2] == self._views[1].shape[-2]


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
    for name, value in vars(layer).items():
        setattr(made, name, value)
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
