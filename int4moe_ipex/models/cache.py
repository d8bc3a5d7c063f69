"""A key/value cache that grows in place: transformers' own copies every layer's whole cache for each new token."""

from __future__ import annotations

import functools
from array import array
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from int4moe_ipex.backends.native import FLOAT_TYPES

# Tokens that a buffer has room for when it is made; it doubles from there.
FIRST = 256


class GrowingLayer(DynamicLayer):
    """keys and values [batch, heads, tokens, head_dim] are the start of buffers with room for more tokens.

    Only what lies behind the last token is ever written. Once somebody has set keys or values (cropped, reordered), the
    next token makes new buffers, so that tensors taken from the cache before keep what they hold. Views are made when
    somebody looks: a decoding step in one call (decode.py) writes behind the last token and counts. It reads `length`
    and `place` from the instance's attributes (csrc/bindings_caches.h).
    """

    def __init__(self, **kwargs: Any):
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        # Keys and values, and of how many tokens they are views; others are out of date.
        self._views: list[torch.Tensor | None] = [None, None]
        self._viewed: int | None = None
        # Tokens, where keys and values are the start of the buffers; None where somebody has set them himself.
        self.length: int | None = None
        self.room = 0
        self.place = b""  # what the core has to know of the buffers: see _place
        super().__init__(**kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """For copies of any sort: the tokens alone, in memory of their own."""
        views = [None if view is None else view.clone() for view in (self.keys, self.values)]
        fresh = {"_buffers": None, "_views": views, "_viewed": None, "length": None, "room": 0, "place": b""}
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
        if self._viewed != self.length:
            self._views, self._viewed = [None, None], self.length
        view = self._views[which]
        if view is None and self.length is not None:
            view = self._views[which] = self._buffers[which].narrow(-2, 0, self.length)
        return view

    def _set(self, which: int, value: torch.Tensor | None) -> None:
        self._views = [self._view(0), self._view(1)]
        self._views[which] = value
        self._viewed = self.length = self._buffers = None

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
        self._buffers = _grown_together(keys, values, total)
        self._views = [None, None]
        self._viewed = self.length = keys.shape[-2]
        self.room = self._buffers[0].shape[-2]
        self.place = _place(*self._buffers)

    def extend(self, tokens: int = 1) -> None:
        """Takes in tokens that somebody has written behind the last one, into room that was reserved."""
        self.length += tokens


def kind_of(*shapes: tuple[torch.dtype, int, int]) -> bytes:
    """What `GrowingLayer.place` starts with where keys and values have these dtypes, heads and head_dims."""
    return array("q", [n for dtype, *sizes in shapes for n in (FLOAT_TYPES.get(dtype, -1), *sizes)]).tobytes()


def _place(keys: torch.Tensor, values: torch.Tensor) -> bytes:
    """The kind, the tokens that there is room for, whether inference mode alone may write, and the number of sequences;
    for each of these, addresses of keys and values, then strides in elements by head and token of each. All int64."""
    numbers = array("q", [keys.shape[-2], keys.is_inference(), keys.shape[0]])
    for k, v in zip(keys, values):
        numbers.extend((k.data_ptr(), v.data_ptr(), *k.stride()[:2], *v.stride()[:2]))
    return kind_of(*((t.dtype, *t.shape[1::2]) for t in (keys, values))) + numbers.tobytes()


def _grown(view: torch.Tensor, total: int) -> torch.Tensor:
    room = max(FIRST, 2 * total)
    buffer = view.new_empty((*view.shape[:-2], room, view.shape[-1]))
    buffer[..., : view.shape[-2], :].copy_(view)
    return buffer


def _grown_together(keys: torch.Tensor, values: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of one head and what was rotated beside them (DeepSeek) side by side: they are read as one key."""
    width = keys.shape[-1]
    if keys.shape[-3] > 1 or width == values.shape[-1] or keys.dtype is not values.dtype:
        return _grown(keys, total), _grown(values, total)
    both = _grown(torch.cat((keys, values), dim=-1), total)
    return both[..., :width], both[..., width:]


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


@functools.cache
def cache_keyword() -> str:
    """What this transformers calls the cache in `generate` and `forward`."""
    from transformers.generation import utils

    return "cache" if "cache" in getattr(utils, "ALL_CACHE_NAMES", ()) else "past_key_values"
