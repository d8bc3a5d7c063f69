"""What a decoding step in one call (decode.py) knows of a model, and how it notices that this has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from int4moe_ipex.backends import native
from int4moe_ipex.backends.by_tokens import PackedByTokens
from int4moe_ipex.backends.native import NativeExperts, NativeLinear
from int4moe_ipex.models import attention
from int4moe_ipex.models.cache import kind_of
from int4moe_ipex.models.fused import (
    MAX_EXPERTS,
    SILU,
    FusedAttention,
    FusedLinear,
    FusedMLP,
    FusedPartialAttention,
    FusedRMSNorm,
    FusedRotaryEmbedding,
    FusedSharedExpertBlock,
    FusedSigmoidRouter,
    FusedTopKRouter,
    FusedWholeNormAttention,
    _fused_class,
    is_fused,
)
from int4moe_ipex.moe.experts import Int4Experts
from int4moe_ipex.moe.linear import Int4Linear

# Classes whose forward is known to be what the core computes, by name in their own module of transformers.
LAYERS = {
    "Qwen3MoeDecoderLayer",
    "MixtralDecoderLayer",
    "OlmoeDecoderLayer",
    "Qwen2MoeDecoderLayer",
    "Glm4MoeDecoderLayer",
}
# Of blocks, with the name of the MLP that they add to the experts.
BLOCKS = {
    "Qwen3MoeSparseMoeBlock": None,
    "MixtralSparseMoeBlock": None,
    "OlmoeSparseMoeBlock": None,
    "Glm4MoeMoE": "shared_experts",
}
# Settings of single families that change what their modules compute, with the values that do not.
PLAIN = {"sliding_window": (None, 0), "clip_qkv": (None,)}
ENDS = ("embed_tokens", "norm")
ASK_AGAIN = 64  # steps through the modules after which a model that was unfit is looked at again


# How torch (since 2.10) describes a tensor to other libraries in one call.
EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
FITS, WATCHED, CHANGED = range(3)  # what a guard sees (csrc/bindings_guard.cpp)


Weight = tuple[dict, str, int, torch.dtype, tuple, tuple]


@dataclass
class Plan:
    """The core's object for a model's layers, and everything that it relies on.

    Attributes:
        guard: the core's, of the objects and values that must stay what they are.
        decoder: None where a layer is of a kind that the core does not know.
        rows: sequences that a step may have.
        layers: of the model; cache_kind: what `GrowingLayer.place` of each starts with.
        turned: of each head, by the rotation.
        products: of one token through all layers.
        weights: (a module's tensors, name, address, dtype, shape, strides) of those that the guard cannot see.
        watched: whether at the last look somebody wanted to see a layer's module being called, or had put a forward of
            his own over one's.
        ends: what is before and after the layers; whole: whether the core computes it, unwatched at the last look.
        asked: how often a plan without a decoder was asked for.
    """

    guard: Any
    decoder: Any = None
    rows: int = 0
    layers: int = 0
    cache_kind: bytes = b""
    hidden: int = 0
    head_dim: int = 0
    turned: int = 0
    products: int = 0
    weights: list[Weight] = field(default_factory=list)
    watched: bool = False
    ends: Ends | None = None
    whole: bool = False
    asked: int = 0

    def holds(self) -> bool:
        """Whether the model still is what the plan was made for."""
        if self.decoder is None:
            # What made the model unfit may have gone: dtypes, gradients.
            self.asked += 1
            if self.asked % ASK_AGAIN == 0:
                return False
        return self.look()

    def look(self) -> bool:
        """Whether all is as it was; finds out whether somebody watches."""
        seen = _seen(self), FITS if self.ends is None else _seen(self.ends)
        self.watched = seen[0] == WATCHED
        self.whole = self.ends is not None and self.ends.known and seen[1] == FITS
        return CHANGED not in seen


@dataclass
class Ends:
    """The embedding and the norm after the last layer, which are called as ever while somebody watches them.

    Attributes:
        guard, weights: as of a plan.
        known: whether they are of a kind that the core computes.
        table: address of the embedding's weight; vocabulary: its rows.
        norm: address of the norm's weight; eps: of the norm.
    """

    guard: Any
    weights: list[Weight] = field(default_factory=list)
    known: bool = False
    table: int = 0
    vocabulary: int = 0
    norm: int = 0
    eps: float = 0.0


def _seen(of: Plan | Ends) -> int:
    seen = of.guard.look()
    return seen if all(map(_is_same, of.weights)) else CHANGED


def _is_same(weight: Weight) -> bool:
    parameters, name, address, dtype, shape, strides = weight
    tensor = parameters.get(name)
    return (
        tensor is not None
        and tensor.data_ptr() == address
        and not tensor.requires_grad
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.stride() == strides
    )


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
    plan = Plan(native._native.Guard(_watched, EXCHANGE))
    inside = [
        (parent, name)
        for parent in model.modules()
        for name, module in parent._modules.items()
        if module is not None and not (parent is model and name in ENDS)
    ]
    classes = _watch(plan.guard, inside)
    plan.guard.size(model.layers._modules)
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        plan.guard.empty(vars(nn.modules.module), name)
    with contextlib.suppress(_Unknown):
        _need_own_forward(classes)
        plan.decoder = _decoder(plan, model)
        plan.ends = _ends(model)
    plan.look()
    return plan


def _watch(guard: Any, modules: list[tuple[nn.Module, str]]) -> set[type]:
    """These modules (parent, name) must stay, unwatched; returns their classes."""
    found: dict[nn.Module, None] = {}
    for parent, name in modules:
        guard.module(parent._modules, name, parent._modules[name])
        found[parent._modules[name]] = None
    for module in found:
        own = vars(module)
        guard.missing(own, "forward")
        guard.hooks(own, "_forward_hooks")
        guard.empty(own, "_forward_pre_hooks")
    classes = {type(module) for module in found if hasattr(type(module), "forward")}
    for cls in classes:
        guard.forward_of(cls)
    return classes


def _need_own_forward(classes: set[type]) -> None:
    for cls in classes:
        _need(cls.forward is _first_forward.setdefault(cls, cls.forward) and _is_its_own(cls))


def _ends(model: nn.Module) -> Ends:
    ends, hidden = Ends(native._native.Guard(_watched, EXCHANGE)), model.config.hidden_size
    classes = _watch(ends.guard, [(model, name) for name in ENDS])
    embedding, norm = (getattr(model, name) for name in ENDS)
    with contextlib.suppress(_Unknown):
        _need_own_forward(classes)
        _need(type(embedding) is nn.Embedding)
        _keep(ends, vars(embedding), "max_norm", None)
        ends.vocabulary = embedding.num_embeddings
        ends.table = _tensor(ends, embedding, "weight", (ends.vocabulary, hidden))
        ends.norm, ends.eps = _norm(ends, norm, hidden), norm.variance_epsilon
        _keep(ends, vars(norm), "variance_epsilon", ends.eps)
        ends.known = True
    return ends


def _is_theirs(module: nn.Module, names: Collection[str]) -> bool:
    """Whether its class is transformers' own of one of these names, and not somebody's copy or subclass."""
    cls = type(module)
    return cls.__name__ in names and cls.__module__.startswith("transformers.models.")


def _decoder(plan: Plan, model: nn.Module) -> Any:
    config = model.config
    plan.layers, plan.hidden = len(model.layers), config.hidden_size
    first = model.layers[0].self_attn if plan.layers else None
    _need(isinstance(first, FusedAttention) and isinstance(model.rotary_emb, FusedRotaryEmbedding))
    plan.rows, plan.head_dim = native._native.decode_rows, first.head_dim
    _need(plan.hidden % 32 == 0 and plan.head_dim % 16 == 0)
    _keep(plan, vars(config), "num_hidden_layers", plan.layers)
    for name, values in PLAIN.items():
        value = vars(config).get(name)
        _need(value in values)
        plan.guard.equals(vars(config), name, value)
    _need_full_attention(plan, config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    plan.cache_kind = kind_of(*[(torch.bfloat16, kv_heads, plan.head_dim)] * 2)
    plan.turned = 2 * model.rotary_emb.inv_freq.numel()  # the tables' width is looked at with every step
    _need(plan.turned == plan.head_dim or (isinstance(first, FusedPartialAttention) and plan.turned < plan.head_dim))
    sizes = plan.hidden, heads, kv_heads, plan.head_dim
    decoder = native._native.Decoder(*sizes, attention.wide(), plan.turned)
    for index, layer in enumerate(model.layers):
        _need(_is_theirs(layer, LAYERS))
        _keep(plan, vars(layer.self_attn), "layer_idx", index)
        _add_layer(plan, decoder, layer, (heads * plan.head_dim, kv_heads * plan.head_dim))
    return decoder


def _need_full_attention(plan: Plan, config: Any) -> None:
    kinds = vars(config).get("layer_types")
    if kinds is None:
        plan.guard.equals(vars(config), "layer_types", None)
        return
    _need(set(kinds) <= {"full_attention"})
    plan.guard.same(vars(config), "layer_types", kinds)
    plan.guard.items(kinds)


def _keep(plan: Plan | Ends, attributes: dict[str, Any], name: str, value: Any) -> None:
    """The plan relies on this attribute, which must have this value."""
    _need(attributes.get(name) == value)
    plan.guard.equals(attributes, name, value)


def _add_layer(plan: Plan, decoder: Any, layer: nn.Module, widths: tuple[int, int]) -> None:
    attn = layer.self_attn
    hidden, (wide, narrow) = plan.hidden, widths
    norms = layer.input_layernorm, layer.post_attention_layernorm
    head_norms = getattr(attn, "q_norm", None), getattr(attn, "k_norm", None)
    _need(isinstance(attn, FusedAttention) and all(isinstance(m, FusedRMSNorm) for m in norms))
    _need((head_norms[0] is None) == (head_norms[1] is None))
    eps = norms[0].variance_epsilon
    whole = isinstance(attn, FusedWholeNormAttention)
    _need(not whole or head_norms[0] is not None)
    head_eps = 0.0 if head_norms[0] is None else head_norms[0].variance_epsilon
    for module, name, value in (
        (attn, "head_dim", plan.head_dim),
        (attn, "scaling", attn.scaling),
        (attn, "training", False),  # dropout
        (layer.mlp, "training", False),  # jitter
        (attn, "sliding_window", None),
        (attn, "use_qk_norm", (head_norms[0] is not None) if isinstance(attn, FusedPartialAttention) else None),
        *((m, "variance_epsilon", eps) for m in norms),
        *((m, "variance_epsilon", head_eps) for m in head_norms if m is not None),
    ):
        _keep(plan, vars(module), name, value)
    decoder.add_layer(
        (_norm(plan, norms[0], hidden), _norm(plan, norms[1], hidden)),
        eps,
        [
            _linear(plan, attn.q_proj, hidden, wide),
            _linear(plan, attn.k_proj, hidden, narrow),
            _linear(plan, attn.v_proj, hidden, narrow),
            _linear(plan, attn.o_proj, wide, hidden),
        ],
        tuple(
            0 if m is None else _norm(plan, m, size if whole else plan.head_dim) for m, size in zip(head_norms, widths)
        ),
        whole,
        head_eps,
        attn.scaling,
    )
    _add_block(plan, decoder, layer.mlp)


def _add_block(plan: Plan, decoder: Any, block: nn.Module) -> None:
    """What follows attention: experts, an MLP for all tokens, or both."""
    mlp = score = None
    if is_fused(block, FusedMLP):
        mlp = block
    else:
        if is_fused(block, FusedSharedExpertBlock):
            mlp, score = block.shared_expert, block.shared_expert_gate
        else:
            _need(_is_theirs(block, BLOCKS))
            name = BLOCKS[type(block).__name__]
            mlp = None if name is None else getattr(block, name)
        _add_experts(plan, decoder, block.gate, block.experts)
    if mlp is None:
        return
    _need(is_fused(mlp, FusedMLP) and type(mlp.act_fn) in SILU)
    inner = mlp.up_proj.out_features
    linears = [
        _linear(plan, mlp.gate_proj, plan.hidden, inner),
        _linear(plan, mlp.up_proj, plan.hidden, inner),
        _linear(plan, mlp.down_proj, inner, plan.hidden),
    ]
    decoder.add_mlp(linears if score is None else [*linears, _linear(plan, score, plan.hidden, 1)])


# What a sigmoid router looks at, beside `norm_topk_prob`.
SIGMOID = ("num_experts", "hidden_dim", "top_k", "num_group", "topk_group", "routed_scaling_factor")


def _add_experts(plan: Plan, decoder: Any, router: nn.Module, experts: nn.Module) -> None:
    sigmoid = is_fused(router, FusedSigmoidRouter)
    _need((sigmoid or isinstance(router, FusedTopKRouter)) and type(experts) is Int4Experts)
    normalise = getattr(router, "norm_topk_prob", None)  # Mixtral always does, and keeps float32 scores
    for name in SIGMOID if sigmoid else ("top_k",):
        _keep(plan, vars(router), name, getattr(router, name))
    _keep(plan, vars(router), "norm_topk_prob", normalise)
    packed = _experts_pack(plan, experts)
    spec = packed.spec
    _need(router.num_experts == spec.num_experts <= MAX_EXPERTS and spec.hidden_size == plan.hidden)
    plan.products += router.top_k * 3 * plan.hidden * spec.intermediate_size
    decoder.add_experts(
        0 if sigmoid else _tensor(plan, router, "weight", (router.num_experts, plan.hidden)),
        normalise is None or bool(normalise),
        native.FLOAT_TYPES[torch.float32 if sigmoid or normalise is None else torch.bfloat16],
        router.top_k,
        packed.handle,
        packed.address,
    )
    if sigmoid:
        _need(router._is_known())
        decoder.set_sigmoid_router(
            _tensor(plan, router, "weight", (router.num_experts, plan.hidden), torch.float32),
            _tensor(plan, router, "e_score_correction_bias", (router.num_experts,), torch.float32),
            router.num_group,
            router.topk_group,
            router.routed_scaling_factor,
        )


def _need(condition: bool) -> None:
    if not condition:
        raise _Unknown


def _experts_pack(plan: Plan, experts: Int4Experts) -> Any:
    """The one pack of a layer's experts."""
    plan.guard.same(vars(experts), "packs", experts.packs)
    plan.guard.items(experts.packs)
    plan.guard.size(experts.composed._modules)
    for pack in experts.packs:
        plan.guard.same(vars(pack), "local", pack.local)
    _need(len(experts.packs) == 1 and not experts.composed and experts.packs[0].local is None)
    return _few_of(plan, experts.packs[0], NativeExperts)


def _few_of(plan: Plan, owner: Any, kind: type) -> Any:
    """The native pack that runs at one token, of a module or one of its packs."""
    packed = owner.packed
    plan.guard.same(vars(owner), "packed", packed)
    if isinstance(packed, PackedByTokens):
        plan.rows = 1
        packed = packed.at(1)[1]
    _need(type(packed) is kind)
    return packed


def _tensor(
    plan: Plan | Ends, module: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> int:
    """The address of a parameter or buffer that the plan relies on."""
    tensors = module._buffers if name in module._buffers else module._parameters
    tensor = tensors.get(name)
    _need(
        tensor is not None
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.is_contiguous()
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
    )
    if plan.guard.sees_weights():
        plan.guard.weight(tensors, name, tensor._cdata, tensor.untyped_storage()._cdata)
    else:
        plan.weights.append((tensors, name, tensor.data_ptr(), dtype, tensor.shape, tensor.stride()))
    return tensor.data_ptr()


def _norm(plan: Plan | Ends, module: nn.Module, size: int) -> int:
    _need(isinstance(module, FusedRMSNorm))
    return _tensor(plan, module, "weight", (size,))


def _linear(plan: Plan, module: nn.Module, columns: int, rows: int) -> Any:
    # A subclass may compute something else.
    _need(type(module) in (Int4Linear, nn.Linear, _fused_class(FusedLinear, nn.Linear)))
    _need((module.in_features, module.out_features) == (columns, rows))
    plan.products += columns * rows
    if type(module) is Int4Linear:
        packed = _few_of(plan, module, NativeLinear)
        return native._native.DecodeLinear.int4(packed.handle, packed.address)
    _need(columns % 32 == 0)
    weight = _tensor(plan, module, "weight", (rows, columns))
    if module.bias is not None:
        return native._native.DecodeLinear.dense(weight, _tensor(plan, module, "bias", (rows,)), rows, columns)
    plan.guard.equals(module._parameters, "bias", None)
    return native._native.DecodeLinear.dense(weight, 0, rows, columns)
