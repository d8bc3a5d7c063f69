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
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import MoeModelOutputWithPast

from int4moe_ipex.backends import native
from int4moe_ipex.models import attention
from int4moe_ipex.models.cache import GrowingLayer, cache_keyword, growing
from int4moe_ipex.models.core_calls import Fused
from int4moe_ipex.models.decode_plan import Ends, Plan, make_plan

# Classes whose forward is known, by name in their own module of transformers; their layers: decode_layers.py.
MODELS = {
    "Qwen3MoeModel",
    "MixtralModel",
    "OlmoeModel",
    "Qwen2MoeModel",
    "Glm4MoeModel",
    "DeepseekV2Model",
    "DeepseekV3Model",
    "Glm4MoeLiteModel",
}
# Products of a step that one thread computes as fast as several, which meet eight times a layer.
ALONE = 1 << 20
OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


def fuse(model: nn.Module) -> bool:
    """Turns a decoder of a known class into a `FusedDecoder`, in place; False for any other module."""
    cls = type(model)
    known = cls.__module__.startswith("transformers.models.") and cls.__name__ in MODELS
    if not known or issubclass(cls, FusedDecoder):
        return False
    model.__class__ = FusedDecoder.over(cls)
    return True


PARTS = ("attention", "router", "experts")  # csrc/core/decode.h


@contextlib.contextmanager
def timed(model: nn.Module) -> Iterator[dict[str, float] | None]:
    """Seconds of the core's steps by part, norms included, complete when the block ends.

    Yields None where the model's next step would go through its modules.
    """
    inner = next((m for m in model.modules() if isinstance(m, FusedDecoder)), None)
    plan = None if inner is None else inner.plan()
    if plan is None or plan.decoder is None or plan.watched:
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


class FusedDecoder(Fused):
    """A whole decoder: steps of one token per sequence in one call, everything else as before."""

    @classmethod
    @functools.cache
    def over(fusion, cls: type) -> type:
        # It keeps the name: transformers looks up by it which outputs a model can record.
        return type(cls.__name__, (fusion, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        past = kwargs.get("past_key_values", cache)
        hidden = None
        caching = self.config.use_cache if use_cache is None else use_cache  # without, some return no cache
        if inputs_embeds is None and past is not None and caching and self._is_plain(kwargs):
            hidden = self._step(input_ids, attention_mask, position_ids, past)
        if hidden is not None:
            return MoeModelOutputWithPast(last_hidden_state=hidden, **{cache_keyword(): past})
        if cache is not None:
            kwargs[cache_keyword()] = cache
        if "_plan" in vars(self):
            self._plan.sampled = False
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def plan(self) -> Plan:
        """For the model as it is now."""
        plan = self.__dict__.get("_plan")
        if plan is None or not plan.holds():
            plan = self.__dict__["_plan"] = make_plan(self)
        return plan

    def _is_plain(self, kwargs: dict[str, Any]) -> bool:
        """Whether no argument and no setting asks for more than the next hidden states."""
        if self.training or torch.compiler.is_compiling() or kwargs.get("return_dict") is False:
            return False
        for name, value in kwargs.items():
            if value is not None and value is not False and name not in _HARMLESS:
                return False
        settings = vars(self.config)
        return settings.get("return_dict", True) is not False and not any(map(settings.get, OUTPUTS))

    def _step(self, input_ids, attention_mask, position_ids, cache) -> torch.Tensor | None:
        """Hidden states after the last norm [rows, 1, hidden_size], or None: not here."""
        if type(input_ids) is not torch.Tensor or input_ids.dim() != 2:
            return None
        rows, columns = input_ids.shape
        if columns != 1 or not 0 < rows <= native._native.decode_rows:
            return None
        plan = self.plan()
        if plan.decoder is None or rows > plan.rows or plan.watched or not attention.is_ours(self.config):
            return None
        caches = _caches_of(cache, rows, plan)
        if caches is None:
            return None
        lengths = caches.lengths
        positions = lengths if position_ids is None else _positions(position_ids, rows)
        if positions is None or not _sees_all(attention_mask, rows, max(lengths) + 1):
            return None
        ends = plan.ends if plan.whole else None
        hidden = self._embedded(input_ids, rows, plan.hidden, ends)
        if hidden is None:
            return None
        tables = self.rotary_emb.tables(hidden, max(positions) + 1)
        if tables is None or tables[0].shape[-1] != plan.turned:
            return None
        cos, sin, first, cos_rows = *tables, positions[0], 1
        if min(positions) != max(positions):
            cos, sin, first, cos_rows = cos[positions], sin[positions], 0, rows
        offset = first * plan.turned * cos.element_size()
        plan.decoder.step(
            hidden.data_ptr(),
            cos.data_ptr() + offset,
            sin.data_ptr() + offset,
            cos_rows,
            caches,
            1 if rows * plan.products <= ALONE else torch.get_num_threads(),
        )
        caches.extend()
        if ends is None:
            return self.norm(hidden)
        at, bfloat16 = hidden.data_ptr(), native.FLOAT_TYPES[torch.bfloat16]
        native._native.rms_norm(bfloat16, rows, plan.hidden, at, ends.norm, ends.eps, at, torch.get_num_threads())
        return hidden

    def _embedded(self, input_ids: torch.Tensor, rows: int, hidden_size: int, ends: Ends | None) -> torch.Tensor | None:
        """[rows, 1, hidden_size] that nobody else holds; None where it is not what the core takes."""
        if ends is None:
            hidden = self.embed_tokens(input_ids)
            return hidden.clone() if _is_row(hidden, rows, hidden_size) else None
        if input_ids.dtype not in (torch.int64, torch.int32):
            return None
        hidden = torch.empty(rows, 1, hidden_size, dtype=torch.bfloat16, device="cpu")
        ids, row_bytes = input_ids.flatten().tolist(), hidden_size * hidden.element_size()
        taken = native._native.take_rows(ends.table, ends.vocabulary, row_bytes, ids, hidden.data_ptr())
        return hidden if taken else None


_HARMLESS = (attention.HARMLESS - set(OUTPUTS)) | {"past_key_values"}


def _is_row(hidden: torch.Tensor, rows: int, hidden_size: int) -> bool:
    return (
        type(hidden) is torch.Tensor
        and hidden.shape == (rows, 1, hidden_size)
        and hidden.dtype is torch.bfloat16
        and hidden.device.type == "cpu"
        and not hidden.requires_grad
    )


def _positions(position_ids: Any, rows: int) -> list[int] | None:
    """One for each row, or one for all; None where they are neither."""
    if type(position_ids) is not torch.Tensor or position_ids.dtype not in (torch.int64, torch.int32):
        return None
    if position_ids.dim() != 2 or position_ids.shape[1] != 1 or position_ids.shape[0] not in (1, rows):
        return None
    positions = position_ids.flatten().tolist()
    return positions if min(positions) >= 0 else None


def _sees_all(attention_mask: Any, rows: int, tokens: int) -> bool:
    """Whether a mask lets every token of the cache be seen, and the new one."""
    if attention_mask is None:
        return True
    if type(attention_mask) is not torch.Tensor or attention_mask.dim() != 2:
        return False
    return attention_mask.shape[0] == rows and attention_mask.shape[1] >= tokens and bool(attention_mask.all())


def _caches_of(cache: Any, rows: int, plan: Plan) -> Any:
    """The core's object for one cache, or a batch of caches, with room for one more token.

    None where they are not plain, not of this model's kind, or differ in size.
    """
    parts = getattr(cache, "caches", None) or [cache]
    if len(parts) > 1 and len({id(part) for part in parts}) < len(parts):
        return None
    inference = torch.is_inference_mode_enabled()
    found = native._native.DecodeCaches(plan.layers, rows, plan.cache_kind, GrowingLayer, inference)
    for one in parts:
        if type(one) is not DynamicCache or "update" in vars(one) or getattr(one, "offloading", False):
            return None
        # Its layers are made to grow in place, and to have room, once they do not.
        if not found.add(one.layers) and not (_make_room(one.layers) and found.add(one.layers)):
            return None
    return found if found.complete() else None


def _make_room(layers: list[Any]) -> bool:
    """Room for one more token in every layer of a cache; False where one is not plain."""
    for i, layer in enumerate(layers):
        if type(layer) is not GrowingLayer:
            layer = growing(layer)
            if layer is None:
                return False
            layers[i] = layer
        if not layer.is_initialized or "update" in vars(layer):
            return False
        layer.reserve(layer.get_seq_length() + 1)
    return True
