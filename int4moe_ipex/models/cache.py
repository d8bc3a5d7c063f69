"""A key/value cache that grows in place: transformers' own copies every layer's whole cache for each new token."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

# Tokens that a buffer has room for when it is made; it doubles from there.
FIRST = 256


class GrowingLayer(DynamicLayer):
    """keys and values [batch, heads, tokens, head_dim] are the start of buffers with room for more tokens.

    Only what lies behind the last token is ever written. Once somebody has set keys or values (cropped, reordered), the
    next token makes new buffers, so that tensors taken from the cache before keep what they hold. Views are made when
    somebody looks: a decoding step in one call (decode.py) writes behind the last token and counts.
    """

    def __init__(self, **kwargs: Any):
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._views: list[torch.Tensor | None] = [None, None]
        # Tokens, where keys and values are the start of the buffers; None where somebody has set them himself.
        self.length: int | None = None
        self.room = 0
        # For each sequence in the buffers: addresses of keys and values, strides in elements by head and token of each.
        self.addresses: list[tuple[int, ...]] = []
        # dtype, heads and head_dim of keys, and of values.
        self.kind: tuple = ()
        super().__init__(**kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """For copies of any sort: the tokens alone, in memory of their own."""
        views = [None if view is None else view.clone() for view in (self.keys, self.values)]
        fresh = {"_buffers": None, "_views": views, "length": None, "room": 0, "addresses": [], "kind": ()}
        return self.__dict__ | fresh

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
        self.length = self._buffers = None

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self.length is None else self.length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for ours, new in ((self.keys, key_states), (self.values, value_states)):
            if ours.dtype is not new.dtype or ours.shape[:-2] != new.shape[:-2] or ours.shape[-1] != new.shape[-1]:
                return super().update(key_states, value_states, *args, **kwargs)  # joins them or says why it cannot
        length = self.get_seq_length()
        total = length + key_states.shape[-2]
        self.reserve(total)
        keys, values = self._buffers
        keys[..., length:total, :].copy_(key_states)
        values[..., length:total, :].copy_(value_states)
        self.extend(total - length)
        return self.keys, self.values

    def reserve(self, total: int) -> None:
        """Makes keys and values the start of buffers with room for `total` tokens.

        Raises:
            ValueError: keys and values were set to different numbers of tokens.
        """
        fits = self.length is not None and total <= self.room
        # Tensors made in inference mode can be written in inference mode alone.
        if fits and (torch.is_inference_mode_enabled() or not self._buffers[0].is_inference()):
            return
        keys, values = self.keys, self.values
        if keys.shape[:-1] != values.shape[:-1]:
            raise ValueError(f"a cache holds keys {tuple(keys.shape)} and values {tuple(values.shape)}")
        self._buffers = _grown(keys, total), _grown(values, total)
        self._views = [None, None]
        self.length, self.room = keys.shape[-2], self._buffers[0].shape[-2]
        keys, values = self._buffers
        self.addresses = [
            (keys[i].data_ptr(), values[i].data_ptr(), *keys.stride()[1:3], *values.stride()[1:3])
            for i in range(keys.shape[0])
        ]
        self.kind = (keys.dtype, *keys.shape[1::2], values.dtype, *values.shape[1::2])

    def extend(self, tokens: int = 1) -> None:
        """Takes in tokens that somebody has written behind the last one, into room that was reserved."""
        self.length += tokens
        self._views = [None, None]


def _grown(view: torch.Tensor, total: int) -> torch.Tensor:
    room = max(FIRST, 2 * total)
    buffer = view.new_empty((*view.shape[:-2], room, view.shape[-1]))
    buffer[..., : view.shape[-2], :].copy_(view)
    return buffer


def growing(layer: Any) -> GrowingLayer | None:
    """The same keys and values in a layer that grows in place; None for other kinds than transformers' plain one."""
    if type(layer) is not DynamicLayer or "update" in vars(layer):
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
