"""transformers' attention interface on the native core's kernel: the implementation named "int4moe".

torch's own takes 10 to 40 times as long for one token over grouped heads (enable_gqa), and up to 3 times over a prompt
(benchmarks/results.md). What the kernel does not take (a mask, autograd, torch.compile, other dtypes) goes to "sdpa".
"""

from __future__ import annotations

from typing import Any

import torch

from int4moe_ipex.backends import native
from int4moe_ipex.backends.native import FLOAT_TYPES
from int4moe_ipex.cpu import detect
from int4moe_ipex.models import core_calls

NAME = "int4moe"
# Either of these for several sequences of different lengths (serve/batch.py).
ROWS = "int4moe_rows"
# Products below which one thread is enough: another region of threads takes as long.
ALONE = 1 << 18
# Heads that read the same latents in one pass (csrc/isa/attention_kernels.h); several tasks let threads share them, and
# fewer heads would read them too often.
LATENT_HEADS = range(8, 3, -1)
# Arguments of the interface that change nothing once there is no mask; any other that is set goes to sdpa.
HARMLESS = frozenset({"sliding_window", "position_ids", "use_cache", "output_router_logits", "cache_position"})


def available() -> bool:
    """Whether this build and this CPU (as capped by INT4MOE_MAX_ISA) have the kernel."""
    return native._native is not None and native._native.dense_available() and detect().has("avx2")


def register() -> None:
    """Makes the name known to transformers; repeating it changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def is_ours(config: Any) -> bool:
    """Whether a model's attention is the core's kernel, for each sequence of a batch too."""
    name = config._attn_implementation
    if name == ROWS:
        from transformers import AttentionInterface

        return getattr(AttentionInterface()[name], "inner", None) is attention
    return name == NAME


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [batch, heads, tokens, head_dim], key, value [batch, kv_heads, keys, ...] -> [batch, tokens, heads, ...].

    Computed in float32 and rounded once to query's dtype.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and not dropout and _takes(query, key, value, causal) and harmless(kwargs):
        return _run(query, key, value, scaling), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


def harmless(kwargs: dict[str, Any]) -> bool:
    """Whether none of these further arguments of the interface changes anything."""
    return all(value is None or value is False or key in HARMLESS for key, value in kwargs.items())


def _takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> bool:
    if torch.compiler.is_compiling() or query.dtype not in (torch.bfloat16, torch.float32):
        return False
    for t in (query, key, value):
        if type(t) is not torch.Tensor or t.dtype is not query.dtype or t.requires_grad or t.stride(-1) != 1:
            return False
    tokens, keys = query.shape[2], key.shape[2]
    return (
        query.device.type == "cpu"
        and tokens > 0
        and (tokens == 1 or (causal and tokens == keys))
        and query.shape[1] % key.shape[1] == 0
        and query.shape[3] % 8 == 0
        and value.shape[3] % 16 == 0
    )


def heads_together(heads: int) -> int:
    """Heads of one token that go over the latents they share in one task of the kernel."""
    return next((n for n in LATENT_HEADS if heads % n == 0), heads)


def over_latents(query: torch.Tensor, latent: torch.Tensor, turned: torch.Tensor, scaling: float) -> torch.Tensor:
    """One token over keys that are latents and what was rotated side by side, and values that are the latents alone.

    query [batch, heads, rank + width], latent [batch, 1, keys, rank], turned [batch, 1, keys, width]
    -> [batch, heads, rank]
    """
    rank = latent.shape[-1]
    beside = latent.stride() == turned.stride() and latent.stride(-1) == 1 and latent.dtype is query.dtype
    if not (beside and latent.data_ptr() + rank * latent.element_size() == turned.data_ptr()):  # not our cache's
        latent = torch.cat((latent, turned), dim=-1).to(query.dtype)[..., :rank]
    heads = query.shape[1]
    shared = latent.expand(-1, heads // heads_together(heads), -1, -1)
    return _run(query.unsqueeze(2), shared, shared, scaling).squeeze(1)


def _run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    batch, heads, tokens, head_dim = query.shape
    _, kv_heads, keys, value_dim = value.shape
    out = torch.empty(batch, tokens, heads, value_dim, dtype=query.dtype)
    small = batch * heads * tokens * keys * (head_dim + value_dim) < ALONE
    native._native.attention(
        FLOAT_TYPES[query.dtype],
        batch,
        heads,
        kv_heads,
        tokens,
        keys,
        head_dim,
        value_dim,
        query.data_ptr(),
        query.stride()[:3],
        key.data_ptr(),
        key.stride()[:3],
        value.data_ptr(),
        value.stride()[:3],
        out.data_ptr(),
        head_dim**-0.5 if scaling is None else scaling,
        core_calls.wide(),
        1 if small else torch.get_num_threads(),
    )
    return out
