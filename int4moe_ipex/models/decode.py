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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from int4moe_ipex.backends import native
from int4moe_ipex.backends.by_tokens import PackedByTokens
from int4moe_ipex.backends.native import NativeExperts, NativeLinear
from int4moe_ipex.backends.native.run import ALONE
from int4moe_ipex.models import attention
from int4moe_ipex.models.cache import GrowingLayer, cache_keyword, growing
from int4moe_ipex.models.fused import MAX_EXPERTS, FusedAttention, FusedRMSNorm, FusedRotaryEmbedding, FusedTopKRouter
from int4moe_ipex.moe.experts import Int4Experts
from int4moe_ipex.moe.linear import Int4Linear

# Classes whose forward is known to be what the core computes, by name in their own module of transformers.
MODELS = {"Qwen3MoeModel", "MixtralModel"}
LAYERS = {"Qwen3MoeDecoderLayer", "MixtralDecoderLayer"}
BLOCKS = {"Qwen3MoeSparseMoeBlock", "MixtralSparseMoeBlock"}
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


@dataclass
class Plan:
    """The core's object for a model's layers, and everything that it relies on.

    Attributes:
        decoder: None where a layer is of a kind that the core does not know.
        rows: sequences that a step may have.
        products: of one token through all layers.
        children: (a parent's modules, name, the module) that must stay where they are.
        tensors: (a module's parameters, name, address).
        packs: (a module, its pack).
        insides: the attributes of every child.
    """

    decoder: Any = None
    rows: int = 0
    head_dim: int = 0
    products: int = 0
    children: list[tuple[dict, str, nn.Module, type]] = field(default_factory=list)
    tensors: list[tuple[dict, str, int]] = field(default_factory=list)
    packs: list[tuple[nn.Module, Any]] = field(default_factory=list)
    insides: list[dict[str, Any]] = field(default_factory=list)

    def holds(self) -> bool:
        for siblings, name, module, cls in self.children:
            if siblings.get(name) is not module or module.__class__ is not cls:
                return False
        for parameters, name, address in self.tensors:
            tensor = parameters.get(name)
            if tensor is None or tensor.data_ptr() != address or tensor.requires_grad:
                return False
        return all(_packed_of(module) is packed for module, packed in self.packs)

    def is_hooked(self) -> bool:
        """Whether somebody wants to see a module being called, or has put a forward of his own over a module's."""
        everywhere = nn.modules.module
        if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
            return True
        for own in self.insides:
            if own["_forward_hooks"] and _watched(own["_forward_hooks"]):
                return True
            if "forward" in own or own["_forward_pre_hooks"]:
                return True
        return False


def _watched(hooks: dict[int, Any]) -> bool:
    # transformers leaves its own in place once hidden states were asked for; they do nothing until the next time.
    return any(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks.values())


class _Unknown(Exception):
    """A layer is of a kind that the core does not know."""


def make_plan(model: nn.Module) -> Plan:
    """What `FusedDecoder` needs of this model as it is now."""
    plan = Plan()
    for name, module in model.named_modules():
        if not name or name in ("embed_tokens", "norm"):  # they are called as ever
            continue
        parent, _, child = name.rpartition(".")
        plan.children.append((model.get_submodule(parent)._modules, child, module, module.__class__))
        plan.insides.append(vars(module))
    try:
        _fill(plan, model)
    except _Unknown:
        plan.decoder = None
    return plan


def _fill(plan: Plan, model: nn.Module) -> None:
    config = model.config
    first = model.layers[0].self_attn if len(model.layers) else None
    _need(isinstance(first, FusedAttention) and isinstance(model.rotary_emb, FusedRotaryEmbedding))
    plan.rows, plan.head_dim = native._native.decode_rows, first.head_dim
    hidden = config.hidden_size
    _need(hidden % 32 == 0 and plan.head_dim % 16 == 0 and len(model.layers) == config.num_hidden_layers)
    plan.decoder = native._native.Decoder(hidden, config.num_attention_heads, config.num_key_value_heads, plan.head_dim)
    for layer in model.layers:
        _need(type(layer).__name__ in LAYERS and type(layer.mlp).__name__ in BLOCKS)
        _add_layer(plan, layer, hidden)


def _add_layer(plan: Plan, layer: nn.Module, hidden: int) -> None:
    attn, router, experts = layer.self_attn, layer.mlp.gate, layer.mlp.experts
    norms = layer.input_layernorm, layer.post_attention_layernorm
    head_norms = getattr(attn, "q_norm", None), getattr(attn, "k_norm", None)
    _need(isinstance(attn, FusedAttention) and isinstance(router, FusedTopKRouter) and type(experts) is Int4Experts)
    _need(getattr(attn, "sliding_window", None) is None and attn.head_dim == plan.head_dim)
    _need(norms[0].variance_epsilon == norms[1].variance_epsilon and (head_norms[0] is None) == (head_norms[1] is None))
    head_eps = 0.0 if head_norms[0] is None else head_norms[0].variance_epsilon
    _need(head_norms[1] is None or head_norms[1].variance_epsilon == head_eps)
    packed = _few_of(plan, experts, _packed_of(experts), NativeExperts)
    spec = packed.spec
    _need(router.num_experts == spec.num_experts <= MAX_EXPERTS and spec.hidden_size == hidden)
    plan.products += router.top_k * 3 * hidden * spec.intermediate_size
    normalise = getattr(router, "norm_topk_prob", None)  # Mixtral always does, and keeps float32 scores
    plan.decoder.add_layer(
        (_norm(plan, norms[0], hidden), _norm(plan, norms[1], hidden)),
        norms[0].variance_epsilon,
        [_linear(plan, m) for m in (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj)],
        tuple(0 if m is None else _norm(plan, m, plan.head_dim) for m in head_norms),
        head_eps,
        attn.scaling,
        _tensor(plan, router, "weight", (router.num_experts, hidden)),
        normalise is None or bool(normalise),
        native.FLOAT_TYPES[torch.float32 if normalise is None else torch.bfloat16],
        router.top_k,
        packed.handle,
        packed.address,
    )


def _need(condition: bool) -> None:
    if not condition:
        raise _Unknown


def _packed_of(module: nn.Module) -> Any:
    if isinstance(module, Int4Experts):
        if len(module.packs) != 1 or module.composed or module.packs[0].local is not None:
            return None
        return module.packs[0].packed
    return module.packed


def _few_of(plan: Plan, module: nn.Module, packed: Any, kind: type) -> Any:
    """The native pack that runs this module at one token."""
    plan.packs.append((module, packed))
    if isinstance(packed, PackedByTokens):
        plan.rows = 1
        packed = packed.at(1)[1]
    _need(type(packed) is kind)
    return packed


def _tensor(plan: Plan, module: nn.Module, name: str, shape: tuple[int, ...]) -> int:
    tensor = module._parameters.get(name)
    _need(
        tensor is not None
        and tensor.dtype is torch.bfloat16
        and tuple(tensor.shape) == shape
        and tensor.is_contiguous()
        and tensor.device.type == "cpu"
    )
    plan.tensors.append((module._parameters, name, tensor.data_ptr()))
    return tensor.data_ptr()


def _norm(plan: Plan, module: nn.Module, size: int) -> int:
    _need(isinstance(module, FusedRMSNorm))
    return _tensor(plan, module, "weight", (size,))


def _linear(plan: Plan, module: nn.Module) -> Any:
    if type(module) is Int4Linear:
        packed = _few_of(plan, module, module.packed, NativeLinear)
        plan.products += module.in_features * module.out_features
        return native._native.DecodeLinear.int4(packed.handle, packed.address)
    _need(isinstance(module, nn.Linear) and module.in_features % 32 == 0)
    plan.products += module.in_features * module.out_features
    rows, columns = module.weight.shape
    weight = _tensor(plan, module, "weight", (rows, columns))
    bias = 0 if module.bias is None else _tensor(plan, module, "bias", (rows,))
    return native._native.DecodeLinear.dense(weight, bias, rows, columns)
