"""DeepSeek's latent attention, fused: keys and values of all heads come from one short vector, which the cache keeps.

transformers expands every vector of the cache into keys and values again for each new token. Here a single token's
query is taken into the space of those vectors instead, and what it attended to out of it: a head's key is W_k c, so
that q . W_k c = (W_k^T q) . c, and its values' weighted sum is W_v times that of the c. What a fused module is:
fused.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from int4moe_ipex.backends import native
from int4moe_ipex.canonical import dequantize
from int4moe_ipex.models import attention
from int4moe_ipex.models.compact import version_of
from int4moe_ipex.models.core_calls import DTYPES, Fused, is_untouched, own_output, plain, wide
from int4moe_ipex.moe.linear import Int4Linear

# Tables of a rotation as `rotate_pairs` takes them: type, addresses of cos and sin, rows, elements between pairs.
Tables = tuple[int, int, int, int, int]


class FusedLatentAttention(Fused):
    """Rotation in place; a single token attends in the space of the latents, prompts with expanded keys and values."""

    apart = True  # the first of all pairs, then the second: how this class leaves what it has rotated

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        past = kwargs.get("past_key_values", cache)
        tables = self._tables(position_embeddings, hidden_states) if self._is_known(hidden_states) else None
        query = None if tables is None else self._query(hidden_states)
        compressed = None if tables is None else own_output(self.kv_a_proj_with_mqa, hidden_states)
        if tables is None or not plain(query, compressed):
            return super().forward(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **({} if cache is None else {"cache": cache}),
                **kwargs,
            )
        kwargs.pop("past_key_values", None)
        shape, rank = hidden_states.shape[:-1], self.kv_lora_rank
        self._turn(query, self.num_heads, self.qk_nope_head_dim, tables)
        self._turn(compressed, 1, rank, tables)
        latent = self.kv_a_layernorm(compressed[..., :rank].contiguous()).unsqueeze(1)
        turned = compressed[..., rank:].unsqueeze(1)
        if past is not None:
            latent, turned = past.update(latent, turned, self.layer_idx, kwargs=kwargs)
        query = query.view(*shape, self.num_heads, self.qk_head_dim)
        heads = None
        if shape[1] == 1 and attention_mask is None and attention.is_ours(self.config) and attention.harmless(kwargs):
            heads = None if latent.requires_grad or turned.requires_grad else self.head_weights(query.dtype)
        if heads is not None:
            rows = getattr(past, "rows", None)  # of a server's sequences, each of its own length
            out = self._over_latents(query[:, 0], rows or [(latent, turned)], *heads)
            return self.o_proj(out.view(*shape, -1)), None
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        key, value = self.expand_kv(latent, turned)
        out, weights = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](
            self, query.transpose(1, 2), key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.o_proj(out.reshape(*shape, -1)), weights

    def _is_known(self, hidden_states: torch.Tensor) -> bool:
        return (
            self.config._attn_implementation in ("sdpa", attention.NAME, attention.ROWS)
            and not self.training
            and plain(hidden_states)
            and self.qk_rope_head_dim % 2 == 0
            and self.qk_rope_head_dim <= native._native.most_turned
        )

    def _query(self, x: torch.Tensor) -> torch.Tensor:
        if self.q_lora_rank is None:
            return own_output(self.q_proj, x)
        return own_output(self.q_b_proj, self.q_a_layernorm(self.q_a_proj(x)))

    def _tables(self, embeddings: Any, x: torch.Tensor) -> Tables | None:
        cos, sin = embeddings
        fits = cos.shape == sin.shape and self._fits(cos, x, self.qk_rope_head_dim)
        if not (fits and self.config.rope_interleave and plain(cos, sin) and cos.dtype is x.dtype):
            return None
        return DTYPES[cos.dtype], cos.data_ptr(), sin.data_ptr(), cos.numel() // cos.shape[-1], 1

    def _fits(self, table: torch.Tensor, x: torch.Tensor, width: int) -> bool:
        rows = table.dim() == 3 and table.shape[1] == x.shape[1] and table.shape[0] in (1, x.shape[0])
        return rows and table.shape[2] == width

    def _turn(self, x: torch.Tensor, heads: int, first: int, tables: Tables) -> None:
        """Rotates the elements of each head from `first` on; x [batch, tokens, heads * ...] is nobody else's."""
        width = x.shape[-1]
        native._native.rotate_pairs(
            DTYPES[x.dtype],
            x.numel() // width,
            heads,
            self.qk_rope_head_dim,
            x.data_ptr() + first * x.element_size(),
            (width, width // heads),
            *tables,
            self.apart,
            torch.get_num_threads(),
        )

    def _over_latents(
        self,
        query: torch.Tensor,
        rows: list[tuple[torch.Tensor, torch.Tensor]],
        w_key: torch.Tensor,
        w_value: torch.Tensor,
    ) -> torch.Tensor:
        """query [batch, heads, ...]; latents and what was turned, of all or each row -> [batch, heads, v_head_dim]."""
        nope, rank = self.qk_nope_head_dim, self.kv_lora_rank
        wide = query.new_empty(*query.shape[:2], rank + self.qk_rope_head_dim)
        _head_products(query[..., :nope], w_key, wide[..., :rank])
        wide[..., rank:] = query[..., nope:]
        parts = wide.split(1) if len(rows) > 1 else [wide]
        mixed = [attention.over_latents(q, *row, self.scaling) for q, row in zip(parts, rows, strict=True)]
        joined = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        out = query.new_empty(*query.shape[:2], self.v_head_dim)
        _head_products(joined, w_value, out)
        return out

    def head_weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """[heads, kv_lora_rank, qk_nope_head_dim], [heads, v_head_dim, kv_lora_rank] of `kv_b_proj`, in `dtype`.

        None where that is a module of another kind, or somebody wants to see it being called.
        """
        rank, nope, value = self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim
        source = _source(self.kv_b_proj)
        if source is None or "expand_kv" in vars(self) or rank % 32 or nope % 32 or (rank + self.qk_rope_head_dim) % 16:
            return None
        kept = self.__dict__.get("_heads")
        if kept is None or kept[0] != (dtype, source):
            with torch.inference_mode(False), torch.no_grad():
                weight, kept_alive = _weight(self.kv_b_proj)
                w = weight.view(self.num_heads, nope + value, rank)
                w_key, w_value = w[:, :nope].transpose(1, 2), w[:, nope:]
                kept = self.__dict__["_heads"] = (
                    (dtype, source),
                    w_key.to(dtype).contiguous(),
                    w_value.to(dtype).contiguous(),
                    kept_alive,
                )
        return kept[1:3]


class FusedComplexLatentAttention(FusedLatentAttention):
    """The same with complex numbers as tables, and pairs that stay where they are."""

    apart = False

    def _tables(self, embeddings: Any, x: torch.Tensor) -> Tables | None:
        known = type(embeddings) is torch.Tensor and embeddings.dtype is torch.complex64
        if not (known and self._fits(embeddings, x, self.qk_rope_head_dim // 2)):
            return None
        if embeddings.requires_grad or not embeddings.is_contiguous() or embeddings.is_conj():
            return None
        at = embeddings.data_ptr()
        return DTYPES[torch.float32], at, at + 4, embeddings.numel() // embeddings.shape[-1], 2


def _source(linear: nn.Module) -> tuple | None:
    """What a linear's weight is known by, for as long as it stays the same; None where it cannot be used by itself."""
    if not is_untouched(linear):
        return None
    if type(linear) is Int4Linear:
        return None if linear.packed.spec.bias else (linear.packed,)
    from int4moe_ipex.models.fused import FusedLinear, is_fused

    if not (type(linear) is nn.Linear or is_fused(linear, FusedLinear)):
        return None
    weight = linear.weight
    if linear.bias is not None or weight.requires_grad or weight.is_inference() or weight.device.type != "cpu":
        return None
    return weight.data_ptr(), version_of(weight), weight.dtype, weight.shape, weight.stride()


def _weight(linear: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[out_features, in_features] in a dtype that holds it exactly, and whose memory has to stay for it to be known."""
    if type(linear) is Int4Linear:
        return dequantize(linear.backend.unpack_linear(linear.packed).weight), None
    weight = linear.weight.detach()
    return weight, weight  # another could come to lie at its address


def _head_products(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    """y[t, h] = w[h] @ x[t, h]; x [tokens, heads, columns], w [heads, rows, columns], y [tokens, heads, rows]."""
    if x.dtype is not torch.bfloat16:
        for row, out in zip(x, y):  # each by itself: a product of several may sum in another order
            out.copy_((w @ row[..., None])[..., 0])
        return
    native._native.head_linear(
        x.shape[0],
        *w.shape,
        x.data_ptr(),
        x.stride()[:2],
        w.data_ptr(),
        y.data_ptr(),
        y.stride()[:2],
        wide(),
        torch.get_num_threads(),
    )
