"""What a decoding step in one call (decode.py) knows of a model, and how it notices that this has changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from int4moe_ipex.backends import native
from int4moe_ipex.backends.by_tokens import PackedByTokens
from int4moe_ipex.backends.native import NativeExperts, NativeLinear
from int4moe_ipex.models.fused import (
    MAX_EXPERTS,
    FusedAttention,
    FusedLinear,
    FusedRMSNorm,
    FusedRotaryEmbedding,
    FusedTopKRouter,
    _fused_class,
)
from int4moe_ipex.moe.experts import Int4Experts
from int4moe_ipex.moe.linear import Int4Linear

# Classes whose forward is known to be what the core computes, by name in their own module of transformers.
LAYERS = {"Qwen3MoeDecoderLayer", "MixtralDecoderLayer"}
BLOCKS = {"Qwen3MoeSparseMoeBlock", "MixtralSparseMoeBlock"}
ASK_AGAIN = 64  # steps through the modules after which a model that was unfit is looked at again


@dataclass
class Plan:
    """The core's object for a model's layers, and everything that it relies on.

    Attributes:
        decoder: None where a layer is of a kind that the core does not know.
        rows: sequences that a step may have.
        layers: of the model; cache_kind: `GrowingLayer.kind` of each of them.
        products: of one token through all layers.
        children: (a parent's modules, name, the module, its class) that must stay where they are.
        insides: the attributes of every child.
        settings: (attributes, name, value) that must stay so.
        forwards: (a class, its forward).
        tensors: (a module's parameters, name, address, shape, strides); an address of None says that there is none.
        packs: (a module, its pack).
        stack: the layers by name.
        asked: how often a plan without a decoder was asked for.
    """

    decoder: Any = None
    rows: int = 0
    layers: int = 0
    cache_kind: tuple = ()
    hidden: int = 0
    head_dim: int = 0
    products: int = 0
    children: list[tuple[dict, str, nn.Module, type]] = field(default_factory=list)
    insides: list[dict[str, Any]] = field(default_factory=list)
    settings: list[tuple[dict, str, Any]] = field(default_factory=list)
    forwards: list[tuple[type, Any]] = field(default_factory=list)
    tensors: list[tuple[dict, str, int | None, tuple, tuple]] = field(default_factory=list)
    packs: list[tuple[nn.Module, Any]] = field(default_factory=list)
    stack: dict[str, Any] = field(default_factory=dict)
    asked: int = 0

    def holds(self) -> bool:
        """Whether the model still is what the plan was made for."""
        if self.decoder is None:
            # What made the model unfit may have gone: dtypes, gradients.
            self.asked += 1
            if self.asked % ASK_AGAIN == 0:
                return False
        if len(self.stack) != self.layers:
            return False
        for siblings, name, module, cls in self.children:
            if siblings.get(name) is not module or module.__class__ is not cls:
                return False
        for attributes, name, value in self.settings:
            if attributes.get(name) != value:
                return False
        for parameters, name, address, shape, strides in self.tensors:
            tensor = parameters.get(name)
            if tensor is None or address is None:
                if tensor is not address:
                    return False
            elif (
                tensor.data_ptr() != address
                or tensor.requires_grad
                or tensor.dtype is not torch.bfloat16
                or tensor.shape != shape
                or tensor.stride() != strides
            ):
                return False
        if any(cls.forward is not forward for cls, forward in self.forwards):
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


# The forward that each class had when it was first seen.
_first_forward: dict[type, Any] = {}


def _is_its_own(cls: type) -> bool:
    """Whether nobody has put another forward into the class that defines it."""
    owner = next(c for c in cls.__mro__ if "forward" in vars(c))
    return owner is nn.Module or vars(owner)["forward"].__qualname__.startswith(f"{owner.__qualname__}.")


def make_plan(model: nn.Module) -> Plan:
    """What `FusedDecoder` needs of this model as it is now."""
    plan = Plan()
    plan.stack = model.layers._modules
    for name, module in model.named_modules():
        if not name or name in ("embed_tokens", "norm"):  # they are called as ever
            continue
        parent, _, child = name.rpartition(".")
        plan.children.append((model.get_submodule(parent)._modules, child, module, module.__class__))
        plan.insides.append(vars(module))
    classes = {cls for _, _, _, cls in plan.children if "forward" in dir(cls)}
    plan.forwards = [(cls, cls.forward) for cls in classes]
    try:
        for cls in classes:
            _need(cls.forward is _first_forward.setdefault(cls, cls.forward) and _is_its_own(cls))
        _fill(plan, model)
    except _Unknown:
        plan.decoder = None
    return plan


def _is_theirs(module: nn.Module, names: set[str]) -> bool:
    """Whether its class is transformers' own of one of these names, and not somebody's copy or subclass."""
    cls = type(module)
    return cls.__name__ in names and cls.__module__.startswith("transformers.models.")


def _fill(plan: Plan, model: nn.Module) -> None:
    config = model.config
    plan.layers, plan.hidden = len(model.layers), config.hidden_size
    first = model.layers[0].self_attn if plan.layers else None
    _need(isinstance(first, FusedAttention) and isinstance(model.rotary_emb, FusedRotaryEmbedding))
    plan.rows, plan.head_dim = native._native.decode_rows, first.head_dim
    _need(plan.hidden % 32 == 0 and plan.head_dim % 16 == 0)
    _keep(plan, vars(config), "num_hidden_layers", plan.layers)
    _keep(plan, vars(config), "sliding_window", None)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    plan.cache_kind = (torch.bfloat16, kv_heads, plan.head_dim) * 2
    decoder = native._native.Decoder(plan.hidden, heads, kv_heads, plan.head_dim)
    for index, layer in enumerate(model.layers):
        _need(_is_theirs(layer, LAYERS) and _is_theirs(layer.mlp, BLOCKS))
        _keep(plan, vars(layer.self_attn), "layer_idx", index)
        _add_layer(plan, decoder, layer, (heads * plan.head_dim, kv_heads * plan.head_dim))
    plan.decoder = decoder


def _keep(plan: Plan, attributes: dict[str, Any], name: str, value: Any) -> None:
    """The plan relies on this attribute, which must have this value."""
    _need(attributes.get(name) == value)
    plan.settings.append((attributes, name, value))


def _add_layer(plan: Plan, decoder: Any, layer: nn.Module, widths: tuple[int, int]) -> None:
    attn, router, experts = layer.self_attn, layer.mlp.gate, layer.mlp.experts
    hidden, (wide, narrow) = plan.hidden, widths
    norms = layer.input_layernorm, layer.post_attention_layernorm
    head_norms = getattr(attn, "q_norm", None), getattr(attn, "k_norm", None)
    _need(isinstance(attn, FusedAttention) and isinstance(router, FusedTopKRouter) and type(experts) is Int4Experts)
    _need(all(isinstance(m, FusedRMSNorm) for m in norms) and (head_norms[0] is None) == (head_norms[1] is None))
    eps = norms[0].variance_epsilon
    head_eps = 0.0 if head_norms[0] is None else head_norms[0].variance_epsilon
    normalise = getattr(router, "norm_topk_prob", None)  # Mixtral always does, and keeps float32 scores
    for module, name, value in (
        (attn, "head_dim", plan.head_dim),
        (attn, "scaling", attn.scaling),
        (attn, "training", False),  # dropout
        (layer.mlp, "training", False),  # jitter
        (attn, "sliding_window", None),
        (router, "top_k", router.top_k),
        (router, "norm_topk_prob", normalise),
        *((m, "variance_epsilon", eps) for m in norms),
        *((m, "variance_epsilon", head_eps) for m in head_norms if m is not None),
    ):
        _keep(plan, vars(module), name, value)
    packed = _few_of(plan, experts, _packed_of(experts), NativeExperts)
    spec = packed.spec
    _need(router.num_experts == spec.num_experts <= MAX_EXPERTS and spec.hidden_size == hidden)
    plan.products += router.top_k * 3 * hidden * spec.intermediate_size
    decoder.add_layer(
        (_norm(plan, norms[0], hidden), _norm(plan, norms[1], hidden)),
        eps,
        [
            _linear(plan, attn.q_proj, hidden, wide),
            _linear(plan, attn.k_proj, hidden, narrow),
            _linear(plan, attn.v_proj, hidden, narrow),
            _linear(plan, attn.o_proj, wide, hidden),
        ],
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
        and tensor.shape == shape
        and tensor.is_contiguous()
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
    )
    plan.tensors.append((module._parameters, name, tensor.data_ptr(), tensor.shape, tensor.stride()))
    return tensor.data_ptr()


def _norm(plan: Plan, module: nn.Module, size: int) -> int:
    _need(isinstance(module, FusedRMSNorm))
    return _tensor(plan, module, "weight", (size,))


def _linear(plan: Plan, module: nn.Module, columns: int, rows: int) -> Any:
    # A subclass may compute something else.
    _need(type(module) in (Int4Linear, nn.Linear, _fused_class(FusedLinear, nn.Linear)))
    _need((module.in_features, module.out_features) == (columns, rows))
    plan.products += columns * rows
    if type(module) is Int4Linear:
        packed = _few_of(plan, module, module.packed, NativeLinear)
        return native._native.DecodeLinear.int4(packed.handle, packed.address)
    _need(columns % 32 == 0)
    weight = _tensor(plan, module, "weight", (rows, columns))
    if module.bias is not None:
        return native._native.DecodeLinear.dense(weight, _tensor(plan, module, "bias", (rows,)), rows, columns)
    plan.tensors.append((module._parameters, "bias", None, (), ()))
    return native._native.DecodeLinear.dense(weight, 0, rows, columns)
