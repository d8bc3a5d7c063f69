"""transformers' small modules with their operators fused into one call of the native core.

At one token the experts and int4 linears of a layer take a fraction of a millisecond, and so do the hundred small
operators around them. A fused module keeps its class as a base, its parameters and its hooks; whatever the core does
not take (autograd, torch.compile, other dtypes, other attention implementations) runs transformers' own forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from int4moe_ipex.backends import native
from int4moe_ipex.models import attention
from int4moe_ipex.models.compact import compact_of
from int4moe_ipex.models.core_calls import DTYPES, MAX_EXPERTS, Fused, few_tokens, is_untouched, own_output, plain
from int4moe_ipex.models.fused_latent import FusedComplexLatentAttention, FusedLatentAttention
from int4moe_ipex.models.fused_moe import (
    SILU,
    FusedGroupRouter,
    FusedMLP,
    FusedSharedExpertBlock,
    FusedSigmoidRouter,
    FusedTopKRouter,
)

FIRST_POSITIONS = 512  # of a rotary table; it doubles from there


class FusedRMSNorm(Fused):
    """`weight * (x / rms(x))` with the roundings of transformers' own."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if not plain(hidden_states, weight):
            return super().forward(hidden_states)
        y = torch.empty_like(hidden_states)
        columns = weight.shape[0]
        native._native.rms_norm(
            DTYPES[y.dtype],
            y.numel() // columns,
            columns,
            hidden_states.data_ptr(),
            weight.data_ptr(),
            self.variance_epsilon,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y


class FusedLinear(Fused):
    """A dense bfloat16 linear for a few tokens, at the speed of reading its weight: the head of most checkpoints."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = few_tokens(input, self.weight, self.bias, compact_of(self))
        return super().forward(input) if y is None else y


class FusedRotaryEmbedding(Fused):
    """Rows of a table that transformers' own forward has computed once, instead of the functions at every step."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor):
        if torch.compiler.is_compiling() or not position_ids.numel() or int(position_ids.min()) < 0:
            return super().forward(x, position_ids)
        tables = self.tables(x, int(position_ids.max()) + 1)
        if tables is None:
            return super().forward(x, position_ids)
        return tables[0][position_ids], tables[1][position_ids]

    def tables(self, x: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """cos and sin [at least `positions`, head_dim], as this class rotates x; None beyond what it was made for."""
        most = self.config.max_position_embeddings
        if positions > most:
            return None
        frequencies = self.inv_freq
        changes = None if frequencies.is_inference() else frequencies._version
        key = (x.dtype, frequencies.data_ptr(), changes, self.attention_scaling)
        kept = self.__dict__.get("_tables")
        if kept is None or kept[0] != key or kept[3] is not frequencies or kept[1].shape[0] < positions:
            room = min(most, max(FIRST_POSITIONS, 2 * positions))
            cos, sin = self._computed(x, torch.arange(room)[None])
            # With the frequencies themselves: others may come to lie at their address.
            kept = self.__dict__["_tables"] = (key, cos[0].contiguous(), sin[0].contiguous(), frequencies)
        return kept[1:3]

    def _computed(self, x: torch.Tensor, positions: torch.Tensor):
        return super().forward(x, positions)


class FusedComplexRotaryEmbedding(FusedRotaryEmbedding):
    """The same where transformers' own forward gives complex numbers [positions, head_dim / 2]."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor):
        rows = super().forward(x, position_ids)
        return rows if type(rows) is torch.Tensor else torch.complex(*(t[..., : t.shape[-1] // 2] for t in rows))

    def _computed(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = super()._computed(x, positions)
        return torch.cat([numbers.real] * 2, dim=-1), torch.cat([numbers.imag] * 2, dim=-1)


class FusedAttention(Fused):
    """Attention over whole-head rotary embeddings: norm of each head and rotation in place, in one pass."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        cos, sin = position_embeddings
        if not (
            self.config._attn_implementation in ("sdpa", attention.NAME, attention.ROWS)
            and not self.training
            and self._is_known()
            and self._turns(cos.shape[-1])
            and cos.dim() == 3
            and cos.shape[1] == hidden_states.shape[1]
            and cos.shape[0] in (1, hidden_states.shape[0])
            and self._norms_are_known()
            and plain(hidden_states, cos, sin, *self._norm_weights())
            and plain(hidden_states, query := own_output(self.q_proj, hidden_states))
            and plain(hidden_states, key := own_output(self.k_proj, hidden_states))
        ):
            return super().forward(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **({} if cache is None else {"cache": cache}),
                **kwargs,
            )
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        cache = kwargs.pop("past_key_values", cache)
        shape = hidden_states.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        query = self._rotated(query, "q_norm", cos, sin).view(heads).transpose(1, 2)
        key = self._rotated(key, "k_norm", cos, sin).view(heads).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, weights = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=getattr(self, "sliding_window", None),
            **kwargs,
        )
        return self.o_proj(out.reshape(*shape, -1)), weights

    def _norms(self) -> list[nn.Module]:
        return [norm for norm in (getattr(self, n, None) for n in ("q_norm", "k_norm")) if norm is not None]

    def _norm_weights(self) -> list[torch.Tensor]:
        return [norm.weight for norm in self._norms()]

    def _norms_are_known(self) -> bool:
        """Whether they may be computed with the rotation, not called: unwatched, and of the class they were."""
        return all(
            is_untouched(norm) and (is_fused(norm, FusedRMSNorm) or _fusion(norm) is FusedRMSNorm)
            for norm in self._norms()
        )

    def _is_known(self) -> bool:
        """Whether the settings that the class has of its own are those that this computes."""
        return True

    def _turns(self, width: int) -> bool:
        """Whether the class rotates so much of a head."""
        return width == self.head_dim

    def _rotated(self, x: torch.Tensor, norm: str, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, heads * head_dim], which nobody else holds, changed in place."""
        return self._rotate(x, getattr(self, norm, None), cos, sin)

    def _rotate(self, x: torch.Tensor, norm: Any, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        rows = x.numel() // x.shape[-1]
        native._native.rotate(
            DTYPES[x.dtype],
            rows,
            x.shape[-1] // self.head_dim,
            self.head_dim,
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.numel() // cos.shape[-1],
            cos.shape[-1],
            0 if norm is None else norm.weight.data_ptr(),
            0.0 if norm is None else norm.variance_epsilon,
            torch.get_num_threads(),
        )
        return x


class FusedWholeNormAttention(FusedAttention):
    """The same with norms of all heads together, before they are split."""

    def _is_known(self) -> bool:
        config = self.config
        return config.clip_qkv is None and getattr(config, "sliding_window", None) is None

    def _norms_are_known(self) -> bool:
        return True  # they are called

    def _rotated(self, x: torch.Tensor, norm: str, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self._rotate(own_output(getattr(self, norm), x), None, cos, sin)


class FusedPartialAttention(FusedAttention):
    """The same where only the first part of a head may be rotated, and norms are optional."""

    def _is_known(self) -> bool:
        return self.use_qk_norm == hasattr(self, "q_norm")

    def _turns(self, width: int) -> bool:
        return width <= self.head_dim and width % 2 == 0


def _of(kind: str, *families: str) -> set[str]:
    return {f"{family}{kind}" for family in families}


# Classes of transformers whose forward is known to be what the fused one computes, by name in their own module.
_DEEPSEEK_LIKE = ("DeepseekV3", "Glm4Moe", "Glm4MoeLite", "Dots1", "ExaoneMoe", "SolarOpen")
_MORE_NORMS = ("MiniMaxM2", "Ernie4_5_Moe", "HunYuanMoEV1", "Lfm2Moe", "MiMoV2Flash")
_MORE_MLPS = ("Qwen3Next", "Qwen3_5Moe", "Ernie4_5_Moe", "HunYuanMoEV1", "FlexOlmo", "Afmoe", "MiMoV2Flash")
NORMS = _of("RMSNorm", "Qwen2Moe", "Qwen3Moe", "Mixtral", "Olmoe", "DeepseekV2", *_DEEPSEEK_LIKE, *_MORE_NORMS)
ATTENTIONS = {"Qwen2MoeAttention", "Qwen3MoeAttention", "MixtralAttention", "Dots1Attention"}
WHOLE_NORM_ATTENTIONS = {"OlmoeAttention"}
PARTIAL_ATTENTIONS = {"Glm4MoeAttention"}
LATENT_ATTENTIONS = {
    "DeepseekV2Attention": FusedComplexLatentAttention,
    "DeepseekV3Attention": FusedLatentAttention,
    "Glm4MoeLiteAttention": FusedLatentAttention,
}
_MORE_ROTARY = ("Qwen3Next", "MiniMaxM2", "HunYuanMoEV1", "Lfm2Moe", "Afmoe")
ROTARY = _of("RotaryEmbedding", "Qwen2Moe", "Qwen3Moe", "Mixtral", "Olmoe", *_DEEPSEEK_LIKE, *_MORE_ROTARY)
COMPLEX_ROTARY = {"DeepseekV2RotaryEmbedding"}
# Of rotary embeddings; other kinds change their frequencies with the length of the sequence.
FIXED_KINDS = {"default", "linear", "llama3", "yarn"}
ROUTERS = _of("TopKRouter", "Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Olmoe", "FlexOlmo", "Mixtral")
SIGMOID_ROUTERS = _of("TopkRouter", *_DEEPSEEK_LIKE, "MiMoV2Flash")
GROUP_ROUTERS = {"DeepseekV2TopkRouter"}
MLPS = _of("MLP", "Qwen2Moe", "DeepseekV2", *_DEEPSEEK_LIKE, *_MORE_MLPS)
SHARED_EXPERT_BLOCKS = _of("SparseMoeBlock", "Qwen2Moe", "Qwen3Next", "Qwen3_5Moe")


def _fusion(module: nn.Module) -> type | None:
    cls = type(module)
    if cls is nn.Linear and module.weight.dtype is torch.bfloat16:
        return FusedLinear
    if not cls.__module__.startswith("transformers.models."):
        return None
    if cls.__name__ in NORMS:
        return FusedRMSNorm
    if cls.__name__ in ROUTERS and module.num_experts <= MAX_EXPERTS:
        return FusedTopKRouter
    if cls.__name__ in ROTARY | COMPLEX_ROTARY and module.rope_type in FIXED_KINDS:
        return FusedComplexRotaryEmbedding if cls.__name__ in COMPLEX_ROTARY else FusedRotaryEmbedding
    if cls.__name__ in LATENT_ATTENTIONS and hasattr(module, "expand_kv"):  # else it caches what is expanded
        return LATENT_ATTENTIONS[cls.__name__]
    if cls.__name__ in ATTENTIONS and _heads_are_plain(module):
        return FusedAttention
    if cls.__name__ in WHOLE_NORM_ATTENTIONS and _heads_are_plain(module):
        return FusedWholeNormAttention
    if cls.__name__ in PARTIAL_ATTENTIONS and _heads_are_plain(module):
        return FusedPartialAttention
    if cls.__name__ in SIGMOID_ROUTERS:
        return FusedSigmoidRouter
    if cls.__name__ in GROUP_ROUTERS:
        return FusedGroupRouter
    if cls.__name__ in MLPS and type(module.act_fn) in SILU:
        return FusedMLP
    if cls.__name__ in SHARED_EXPERT_BLOCKS:
        return FusedSharedExpertBlock
    return None


def _heads_are_plain(attention: Any) -> bool:
    norms = [getattr(attention, n, None) for n in ("q_norm", "k_norm")]
    dtypes = {n.weight.dtype for n in norms if n is not None} | {attention.config.dtype}
    return attention.head_dim % 2 == 0 and len(dtypes) == 1


def is_fused(module: nn.Module, fusion: type) -> bool:
    """Whether a module is one of transformers' made into this fusion, and not somebody's subclass of that."""
    cls = type(module)
    return len(cls.__bases__) == 2 and cls.__bases__[0] is fusion and cls is fusion.over(cls.__bases__[1])


def fuse(model: nn.Module, keep_attention: bool = False) -> dict[str, int]:
    """Turns the modules that can be into fused ones, in place; class name -> how many. Needs AVX2 and the core.

    `keep_attention` leaves the model's attention implementation as it is.
    """
    fused: dict[str, int] = {}
    if not attention.available():
        return fused
    if not keep_attention and model.config._attn_implementation == "sdpa":
        attention.register()
        model.config._attn_implementation = attention.NAME
    from int4moe_ipex.models import decode

    for module in model.modules():
        fusion = _fusion(module)
        name = type(module).__name__
        if fusion is not None:
            module.__class__ = fusion.over(type(module))
            fused[name] = fused.get(name, 0) + 1
        elif decode.fuse(module):
            fused[name] = fused.get(name, 0) + 1
    return fused
