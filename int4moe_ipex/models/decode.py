"""One token through all decoder layers in one call of the native core (csrc/core/decode.h).

At one token a step spends as long between transformers' modules as in the products. Where a model's layers are all of
a kind that the core knows, a step with a cache leaves their modules out; the results keep the bits that the fused
modules (fused.py) give. Whatever would make a difference, such as a hook, a replaced module, moved weights, a mask that
masks or a wish for hidden states, takes transformers' own way through the modules.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from int4moe_ipex.backends import native
from int4moe_ipex.backends.native.run import ALONE
from int4moe_ipex.models import attention
from int4moe_ipex.models.cache import GrowingLayer, cache_keyword, growing
from int4moe_ipex.models.decode_plan import Plan, make_plan

# Classes whose forward is known, by name in their own module of transformers; their layers: decode_plan.py.
MODELS = {"Qwen3MoeModel", "MixtralModel"}
OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


def fuse(model: nn.Module) -> bool:
    """Turns a decoder of a known class into a `FusedDecoder`, in place; False for any other module."""
    cls = type(model)
    known = cls.__module__.startswith("transformers.models.") and cls.__name__ in MODELS
    if not known or issubclass(cls, FusedDecoder):
        return False
    model.__class__ = _fused_class(cls)
    return True


@functools.cache
def _fused_class(cls: type) -> type:
    # It keeps the name: transformers looks up by it which outputs a model can record.
    return type(cls.__name__, (FusedDecoder, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


PARTS = ("attention", "router", "experts")  # csrc/core/decode.h


@contextlib.contextmanager
def timed(model: nn.Module) -> Iterator[dict[str, float] | None]:
    """Seconds of the core's steps by part, norms included, complete when the block ends.

    Yields None where the model's next step would go through its modules.
    """
    inner = next((m for m in model.modules() if isinstance(m, FusedDecoder)), None)
    plan = None if inner is None else inner.plan()
    if plan is None or plan.decoder is None or plan.is_hooked():
        yield None
        return
    seconds: dict[str, float] = {}
    plan.decoder.timed = True
    plan.decoder.take_seconds()
    try:
        yield seconds
    finally:
        plan.decoder.timed = False
        seconds.update(zip(PARTS, plan.decoder.take_seconds()))


class FusedDecoder:
    """A whole decoder: steps of one token per sequence in one call, everything else as before."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, **kwargs):
        past = kwargs.get("past_key_values", cache)
        hidden = self._step(input_ids, attention_mask, position_ids, past, kwargs)
        if hidden is not None:
            from transformers.modeling_outputs import MoeModelOutputWithPast

            return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden), **{cache_keyword(): past})
        if cache is not None:
            kwargs[cache_keyword()] = cache
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)

    def plan(self) -> Plan:
        """For the model as it is now."""
        plan = self.__dict__.get("_plan")
        if plan is None or not plan.holds():
            plan = self.__dict__["_plan"] = make_plan(self)
        return plan

    def _step(self, input_ids, attention_mask, position_ids, cache, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Hidden states before the last norm [rows, 1, hidden_size], or None: not here."""
        if cache is None or input_ids is None or torch.compiler.is_compiling():
            return None
        shape = input_ids.shape
        if len(shape) != 2 or shape[1] != 1 or not 0 < shape[0] <= native._native.decode_rows:
            return None
        if not self._is_plain(attention_mask, kwargs):
            return None
        plan = self.plan()
        if plan.decoder is None or shape[0] > plan.rows or plan.is_hooked():
            return None
        caches = _caches_of(cache, shape[0], len(self.layers))
        if caches is None:
            return None
        lengths = [layers[0].length for layers in caches for _ in layers[0].addresses]
        positions = lengths if position_ids is None else position_ids.flatten().tolist()
        if len(positions) not in (1, shape[0]) or min(positions) < 0:
            return None
        hidden = self.embed_tokens(input_ids)
        if hidden.dtype is not torch.bfloat16 or hidden.requires_grad or not hidden.is_contiguous():
            return None
        cos, sin = self.rotary_emb.tables(hidden, max(positions) + 1)
        if cos.shape[-1] != plan.head_dim or cos.dtype is not torch.bfloat16:
            return None
        rows = 1 if min(positions) == max(positions) else shape[0]
        if rows > 1:
            cos, sin, first = cos[positions], sin[positions], 0
        else:
            first = positions[0] * plan.head_dim * cos.element_size()
        plan.decoder.step(
            hidden.data_ptr(),
            cos.data_ptr() + first,
            sin.data_ptr() + first,
            rows,
            [number for layers in zip(*caches) for layer in layers for row in layer.addresses for number in row],
            lengths,
            1 if shape[0] * plan.products <= ALONE else torch.get_num_threads(),
        )
        for layers in caches:
            for layer in layers:
                layer.extend()
        return hidden

    def _is_plain(self, attention_mask, kwargs: dict[str, Any]) -> bool:
        """Whether no argument and no setting asks for more than the next hidden states."""
        if self.training:
            return False
        for name, value in kwargs.items():
            if value is not None and value is not False and name not in _HARMLESS:
                return False
        config = self.config
        if config._attn_implementation not in ("sdpa", attention.NAME, attention.ROWS):
            return False
        settings = vars(config)
        if settings.get("return_dict", True) is False or any(map(settings.get, OUTPUTS)):
            return False
        if attention_mask is None:
            return True
        return type(attention_mask) is torch.Tensor and attention_mask.dim() == 2 and bool(attention_mask.all())


_HARMLESS = attention.HARMLESS | {"past_key_values"}


def _caches_of(cache: Any, rows: int, count: int) -> list[list[GrowingLayer]] | None:
    """For one cache, or each of those in a batch of caches, its layers, with room for one more token."""
    found = []
    for one in getattr(cache, "caches", None) or [cache]:
        layers = _room_for_one(one, count)
        if layers is None:
            return None
        found.append(layers)
    return found if sum(len(layers[0].addresses) for layers in found) == rows else None


def _room_for_one(cache: Any, count: int) -> list[GrowingLayer] | None:
    """The cache's layers; None where they are not plain or differ in size."""
    layers = getattr(cache, "layers", None)
    if layers is None or len(layers) != count or getattr(cache, "offloading", False):
        return None
    for i, layer in enumerate(layers):
        if type(layer) is not GrowingLayer:
            layer = growing(layer)
            if layer is None:
                return None
            layers[i] = layer
        if not layer.is_initialized:
            return None
        layer.reserve(layer.get_seq_length() + 1)
        if layer.length != layers[0].length or len(layer.addresses) != len(layers[0].addresses):
            return None
    return layers if layers[0]._buffers[0].dtype is torch.bfloat16 else None
