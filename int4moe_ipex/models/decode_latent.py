"""What the core needs of each decoder layer of DeepSeek's for a step in one call; see decode_layers.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from int4moe_ipex.backends import native
from int4moe_ipex.models import attention
from int4moe_ipex.models.cache import kind_of
from int4moe_ipex.models.compact import version_of
from int4moe_ipex.models.core_calls import wide
from int4moe_ipex.models.decode_layers import add_block, address_of, keep, linear_of, need, norm_of
from int4moe_ipex.models.fused import (
    FusedComplexLatentAttention,
    FusedComplexRotaryEmbedding,
    FusedLatentAttention,
    FusedRMSNorm,
    is_fused,
)
from int4moe_ipex.moe.linear import Int4Linear

if TYPE_CHECKING:
    from int4moe_ipex.models.decode_plan import Plan

# Sizes and settings of an attention module, which all layers have in common.
SAME = (
    "num_heads",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "scaling",
)


def latent_decoder(plan: Plan, model: nn.Module) -> Any:
    first = model.layers[0].self_attn
    numbers = is_fused(model.rotary_emb, FusedComplexRotaryEmbedding)
    kind = FusedComplexLatentAttention if numbers else FusedLatentAttention
    rank, nope, turned, value = (getattr(first, name) for name in ("kv_lora_rank", *SAME[3:5], "v_head_dim"))
    need(turned == plan.turned != rank and turned <= native._native.most_turned)  # the cache keeps both side by side
    if not numbers:
        keep(plan, vars(model.config), "rope_interleave", True)
    plan.head_dim, heads = rank + turned, first.num_heads
    plan.cache_kind = kind_of((torch.bfloat16, 1, rank), (torch.bfloat16, 1, turned))
    sizes = plan.hidden, heads, heads // attention.heads_together(heads), plan.head_dim
    decoder = native._native.Decoder(*sizes, wide(), turned)
    tables = native.FLOAT_TYPES[torch.float32 if numbers else torch.bfloat16]
    decoder.set_latent(rank, nope, value, tables, kind.apart)
    for layer in model.layers:
        attn = layer.self_attn
        need(is_fused(attn, kind))
        for name in SAME:
            need(getattr(attn, name) == getattr(first, name))
            keep(plan, vars(attn), name, getattr(first, name))
        keep(plan, vars(attn), "expand_kv", None)
        keep(plan, vars(attn), "training", False)  # dropout
        keep(plan, vars(layer.mlp), "training", False)
        _add_layer(plan, decoder, layer)
    return decoder


def _add_layer(plan: Plan, decoder: Any, layer: nn.Module) -> None:
    attn, hidden, heads = layer.self_attn, plan.hidden, layer.self_attn.num_heads
    norms = layer.input_layernorm, layer.post_attention_layernorm
    inner = attn.kv_a_layernorm, *(() if attn.q_lora_rank is None else (attn.q_a_layernorm,))
    need(all(isinstance(m, FusedRMSNorm) for m in (*norms, *inner)))
    for some in (norms, inner):
        for m in some:
            keep(plan, vars(m), "variance_epsilon", some[0].variance_epsilon)
    between = hidden if attn.q_lora_rank is None else attn.q_lora_rank
    query = attn.q_proj if attn.q_lora_rank is None else attn.q_b_proj
    decoder.add_layer(
        (norm_of(plan, norms[0], hidden), norm_of(plan, norms[1], hidden)),
        norms[0].variance_epsilon,
        [
            linear_of(plan, query, between, heads * attn.qk_head_dim),
            linear_of(plan, attn.kv_a_proj_with_mqa, hidden, plan.head_dim),
            linear_of(plan, attn.o_proj, heads * attn.v_head_dim, hidden),
        ],
        (
            0 if attn.q_lora_rank is None else norm_of(plan, attn.q_a_layernorm, between),
            norm_of(plan, attn.kv_a_layernorm, attn.kv_lora_rank),
        ),
        False,
        inner[0].variance_epsilon,
        attn.scaling,
    )
    first = [] if attn.q_lora_rank is None else [linear_of(plan, attn.q_a_proj, hidden, between)]
    decoder.add_latents(first, *_head_weights(plan, attn))
    add_block(plan, decoder, layer.mlp)


def _head_weights(plan: Plan, attn: Any) -> tuple[int, int]:
    """Addresses of both; the plan holds for as long as the linear that they are copies of is what it was."""
    weights = attn.head_weights(torch.bfloat16)
    need(weights is not None)
    linear = attn.kv_b_proj
    if type(linear) is Int4Linear:
        plan.guard.same(vars(linear), "packed", linear.packed)
    else:
        address_of(plan, linear, "weight", linear.weight.shape, linear.weight.dtype)
        keep(plan, linear._parameters, "bias", None)
        plan.versions.append((linear.weight, version_of(linear.weight)))
    plan.products += sum(w.numel() for w in weights)
    plan.held.append(weights)
    return tuple(w.data_ptr() for w in weights)
