"""What a decoding step in one call (decode.py) knows of a model, and how it notices that this has changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from int4moe_ipex.backends import native
from int4moe_ipex.backends.by_tokens import PackedByTokens
from int4moe_ipex.backends.native import NativeExperts, NativeLinear
from int4moe_ipex.models.fused import MAX_EXPERTS, FusedAttention, FusedRMSNorm, FusedRotaryEmbedding, FusedTopKRouter
from int4moe_ipex.moe.experts import Int4Experts
from int4moe_ipex.moe.linear import Int4Linear

# Classes whose forward is known to be what the core computes, by name in their own module of transformers.
LAYERS = {"Qwen3MoeDecoderLayer", "MixtralDecoderLayer"}
BLOCKS = {"Qwen3MoeSparseMoeBlock", "MixtralSparseMoeBlock"}


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
