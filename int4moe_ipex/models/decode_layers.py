"""What the core needs of each decoder layer for a step in one call (decode.py): addresses, shapes and settings."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from int4moe_ipex.backends import native
from int4moe_ipex.backends.by_tokens import PackedByTokens
from int4moe_ipex.backends.native import NativeExperts, NativeLinear
from int4moe_ipex.models.cache import kind_of
from int4moe_ipex.models.compact import compact_of
from int4moe_ipex.models.core_calls import wide
from int4moe_ipex.models.fused import (
    MAX_EXPERTS,
    SILU,
    FusedAttention,
    FusedGroupRouter,
    FusedLatentAttention,
    FusedLinear,
    FusedMLP,
    FusedPartialAttention,
    FusedRMSNorm,
    FusedRotaryEmbedding,
    FusedSharedExpertBlock,
    FusedSigmoidRouter,
    FusedTopKRouter,
    FusedWholeNormAttention,
    is_fused,
)
from int4moe_ipex.moe.experts import Int4Experts
from int4moe_ipex.moe.linear import Int4Linear

if TYPE_CHECKING:
    from int4moe_ipex.models.decode_plan import Ends, Plan

# Classes whose forward is known to be what the core computes, by name in their own module of transformers.
LAYERS = {
    "Qwen3MoeDecoderLayer",
    "MixtralDecoderLayer",
    "OlmoeDecoderLayer",
    "Qwen2MoeDecoderLayer",
    "Glm4MoeDecoderLayer",
    "DeepseekV2DecoderLayer",
    "DeepseekV3DecoderLayer",
    "Glm4MoeLiteDecoderLayer",
}
# Of blocks, with the name of the MLP that they add to the experts.
BLOCKS = {
    "Qwen3MoeSparseMoeBlock": None,
    "MixtralSparseMoeBlock": None,
    "OlmoeSparseMoeBlock": None,
    "Glm4MoeMoE": "shared_experts",
    "DeepseekV2Moe": "shared_experts",
    "DeepseekV3MoE": "shared_experts",
    "Glm4MoeLiteMoE": "shared_experts",
}
# Settings of single families that change what their modules compute, with the values that do not.
PLAIN = {"sliding_window": (None, 0), "clip_qkv": (None,)}


class Unknown(Exception):
    """A layer is of a kind that the core does not know."""


def _is_theirs(module: nn.Module, names: Collection[str]) -> bool:
    """Whether its class is transformers' own of one of these names, and not somebody's copy or subclass."""
    cls = type(module)
    return cls.__name__ in names and cls.__module__.startswith("transformers.models.")


def decoder_of(plan: Plan, model: nn.Module) -> Any:
    config = model.config
    plan.layers, plan.hidden = len(model.layers), config.hidden_size
    first = model.layers[0].self_attn if plan.layers else None
    need(isinstance(model.rotary_emb, FusedRotaryEmbedding) and plan.hidden % 32 == 0)
    plan.rows = native._native.decode_rows
    plan.turned = 2 * model.rotary_emb.inv_freq.numel()  # the tables' width is looked at with every step
    keep(plan, vars(config), "num_hidden_layers", plan.layers)
    for name, values in PLAIN.items():
        value = vars(config).get(name)
        need(value in values)
        plan.guard.equals(vars(config), name, value)
    _need_full_attention(plan, config)
    for index, layer in enumerate(model.layers):
        need(_is_theirs(layer, LAYERS))
        keep(plan, vars(layer.self_attn), "layer_idx", index)
    if isinstance(first, FusedLatentAttention):
        from int4moe_ipex.models.decode_latent import latent_decoder

        return latent_decoder(plan, model)
    need(isinstance(first, FusedAttention))
    plan.head_dim, heads, kv_heads = first.head_dim, config.num_attention_heads, config.num_key_value_heads
    need(plan.head_dim % 16 == 0)
    need(plan.turned == plan.head_dim or (isinstance(first, FusedPartialAttention) and plan.turned < plan.head_dim))
    plan.cache_kind = kind_of(*[(torch.bfloat16, kv_heads, plan.head_dim)] * 2)
    sizes = plan.hidden, heads, kv_heads, plan.head_dim
    decoder = native._native.Decoder(*sizes, wide(), plan.turned)
    for layer in model.layers:
        _add_layer(plan, decoder, layer, (heads * plan.head_dim, kv_heads * plan.head_dim))
    return decoder


def _need_full_attention(plan: Plan, config: Any) -> None:
    kinds = vars(config).get("layer_types")
    if kinds is None:
        plan.guard.equals(vars(config), "layer_types", None)
        return
    need(set(kinds) <= {"full_attention"})
    plan.guard.same(vars(config), "layer_types", kinds)
    plan.guard.items(kinds)


def keep(plan: Plan | Ends, attributes: dict[str, Any], name: str, value: Any) -> None:
    """The plan relies on this attribute, which must have this value."""
    need(attributes.get(name) == value)
    plan.guard.equals(attributes, name, value)


def _add_layer(plan: Plan, decoder: Any, layer: nn.Module, widths: tuple[int, int]) -> None:
    attn = layer.self_attn
    hidden, (wide, narrow) = plan.hidden, widths
    norms = layer.input_layernorm, layer.post_attention_layernorm
    head_norms = getattr(attn, "q_norm", None), getattr(attn, "k_norm", None)
    need(isinstance(attn, FusedAttention) and all(isinstance(m, FusedRMSNorm) for m in norms))
    need((head_norms[0] is None) == (head_norms[1] is None))
    eps = norms[0].variance_epsilon
    whole = isinstance(attn, FusedWholeNormAttention)
    need(not whole or head_norms[0] is not None)
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
        keep(plan, vars(module), name, value)
    norm_sizes = widths if whole else (plan.head_dim, plan.head_dim)
    decoder.add_layer(
        (norm_of(plan, norms[0], hidden), norm_of(plan, norms[1], hidden)),
        eps,
        [
            linear_of(plan, attn.q_proj, hidden, wide),
            linear_of(plan, attn.k_proj, hidden, narrow),
            linear_of(plan, attn.v_proj, hidden, narrow),
            linear_of(plan, attn.o_proj, wide, hidden),
        ],
        tuple(0 if m is None else norm_of(plan, m, size) for m, size in zip(head_norms, norm_sizes)),
        whole,
        head_eps,
        attn.scaling,
    )
    add_block(plan, decoder, layer.mlp)


def add_block(plan: Plan, decoder: Any, block: nn.Module) -> None:
    """What follows attention: experts, an MLP for all tokens, or both."""
    mlp = score = None
    if is_fused(block, FusedMLP):
        mlp = block
    else:
        if is_fused(block, FusedSharedExpertBlock):
            mlp, score = block.shared_expert, block.shared_expert_gate
        else:
            need(_is_theirs(block, BLOCKS))
            name = BLOCKS[type(block).__name__]
            mlp = None if name is None else getattr(block, name)
        _add_experts(plan, decoder, block.gate, block.experts)
    if mlp is None:
        return
    need(is_fused(mlp, FusedMLP) and type(mlp.act_fn) in SILU)
    inner = mlp.up_proj.out_features
    linears = [
        linear_of(plan, mlp.gate_proj, plan.hidden, inner),
        linear_of(plan, mlp.up_proj, plan.hidden, inner),
        linear_of(plan, mlp.down_proj, inner, plan.hidden),
    ]
    decoder.add_mlp(linears if score is None else [*linears, linear_of(plan, score, plan.hidden, 1)])


# What a router with a float32 weight looks at, beside `norm_topk_prob`.
FLOAT = ("num_experts", "hidden_dim", "top_k", "num_group", "topk_group", "routed_scaling_factor", "topk_method")


def _add_experts(plan: Plan, decoder: Any, router: nn.Module, experts: nn.Module) -> None:
    sigmoid, groups = is_fused(router, FusedSigmoidRouter), is_fused(router, FusedGroupRouter)
    wide = sigmoid or groups
    need((wide or isinstance(router, FusedTopKRouter)) and type(experts) is Int4Experts)
    normalise = getattr(router, "norm_topk_prob", None)  # Mixtral always does, and keeps float32 scores
    for name in FLOAT if wide else ("top_k",):
        keep(plan, vars(router), name, getattr(router, name, None))
    keep(plan, vars(router), "norm_topk_prob", normalise)
    packed = _experts_pack(plan, experts)
    spec = packed.spec
    need(router.num_experts == spec.num_experts <= MAX_EXPERTS and spec.hidden_size == plan.hidden)
    plan.products += router.top_k * 3 * plan.hidden * spec.intermediate_size
    decoder.add_experts(
        0 if wide else address_of(plan, router, "weight", (router.num_experts, plan.hidden)),
        not groups and (normalise is None or bool(normalise)),
        native.FLOAT_TYPES[torch.float32 if wide or normalise is None else torch.bfloat16],
        router.top_k,
        packed.handle,
        packed.address,
    )
    if not wide:
        return
    need(router._is_known())
    bias = "e_score_correction_bias"
    decoder.set_float_router(
        address_of(plan, router, "weight", (router.num_experts, plan.hidden), torch.float32),
        address_of(plan, router, bias, (router.num_experts,), torch.float32) if sigmoid else 0,
        *((router.num_group, router.topk_group) if sigmoid else router.groups()),
        router.routed_scaling_factor,
    )


def need(condition: bool) -> None:
    if not condition:
        raise Unknown


def _experts_pack(plan: Plan, experts: Int4Experts) -> Any:
    """The one pack of a layer's experts."""
    plan.guard.same(vars(experts), "packs", experts.packs)
    plan.guard.items(experts.packs)
    plan.guard.size(experts.composed._modules)
    for pack in experts.packs:
        plan.guard.same(vars(pack), "local", pack.local)
    need(len(experts.packs) == 1 and not experts.composed and experts.packs[0].local is None)
    return _few_of(plan, experts.packs[0], NativeExperts)


def _few_of(plan: Plan, owner: Any, kind: type) -> Any:
    """The native pack that runs at one token, of a module or one of its packs."""
    packed = owner.packed
    plan.guard.same(vars(owner), "packed", packed)
    if isinstance(packed, PackedByTokens):
        plan.rows = 1
        packed = packed.at(1)[1]
    need(type(packed) is kind)
    return packed


def address_of(
    plan: Plan | Ends, module: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> int:
    """The address of a parameter or buffer that the plan relies on."""
    tensors = module._buffers if name in module._buffers else module._parameters
    tensor = tensors.get(name)
    need(
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


def norm_of(plan: Plan | Ends, module: nn.Module, size: int) -> int:
    need(isinstance(module, FusedRMSNorm))
    return address_of(plan, module, "weight", (size,))


def linear_of(plan: Plan, module: nn.Module, columns: int, rows: int) -> Any:
    # A subclass may compute something else.
    need(type(module) in (Int4Linear, nn.Linear, FusedLinear.over(nn.Linear)))
    need((module.in_features, module.out_features) == (columns, rows))
    plan.products += columns * rows
    if type(module) is Int4Linear:
        packed = _few_of(plan, module, NativeLinear)
        return native._native.DecodeLinear.int4(packed.handle, packed.address)
    need(columns % 32 == 0)
    weight = address_of(plan, module, "weight", (rows, columns))
    bias = 0
    if module.bias is None:
        plan.guard.equals(module._parameters, "bias", None)
    else:
        bias = address_of(plan, module, "bias", (rows,))
    return native._native.DecodeLinear.dense(weight, _compact(plan, module), bias, rows, columns)


def _compact(plan: Plan, module: nn.Module) -> Any:
    """The core's copy of a dense weight in 12 bits, or None."""
    compact = compact_of(module)
    if compact is None:
        return None
    plan.guard.same(vars(module), "_compact", compact)
    plan.versions.append((module.weight, compact.version))
    return compact.packed
