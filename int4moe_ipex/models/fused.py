"""transformers' small modules with their operators fused into one call of the native core.

At one token the experts and int4 linears of a layer take a fraction of a millisecond, and so do the hundred small
operators around them. A fused module keeps its class as a base, its parameters and its hooks; whatever the core does
not take (autograd, torch.compile, other dtypes, other attention implementations) runs transformers' own forward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import SiLUActivation

from int4moe_ipex.backends import native
from int4moe_ipex.models import attention

DTYPES = {torch.bfloat16: 1, torch.float32: 2}  # csrc/core/layout.h
MAX_EXPERTS = 1024  # csrc/core/elementwise.cpp
FIRST_POSITIONS = 512  # of a rotary table; it doubles from there


def _plain(*tensors: torch.Tensor) -> bool:
    """Whether the core may read these: dense CPU tensors of one dtype it knows, outside tracing and autograd."""
    if torch.compiler.is_compiling():
        return False
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        return False
    for t in tensors:
        kind = type(t)
        if kind is not torch.Tensor and kind is not nn.Parameter:
            return False
        if t.dtype is not dtype or t.requires_grad or not t.is_contiguous() or t.device.type != "cpu":
            return False
    return True


class FusedRMSNorm:
    """`weight * (x / rms(x))` with the roundings of transformers' own."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if not _plain(hidden_states, weight):
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


class FusedLinear:
    """A dense bfloat16 linear for a few tokens, at the speed of reading its weight: the head of most checkpoints."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = _few_tokens(input, self.weight, self.bias)
        return super().forward(input) if y is None else y


class FusedRotaryEmbedding:
    """Rows of a table that transformers' own forward has computed once, instead of the functions at every step."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor):
        if torch.compiler.is_compiling() or not position_ids.numel() or int(position_ids.min()) < 0:
            return super().forward(x, position_ids)
        tables = self.tables(x, int(position_ids.max()) + 1)
        if tables is None:
            return super().forward(x, position_ids)
        return tables[0][position_ids], tables[1][position_ids]

    def tables(self, x: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """cos and sin in x's dtype [at least `positions`, head_dim]; None beyond what the model was made for."""
        most = self.config.max_position_embeddings
        if positions > most:
            return None
        frequencies = self.inv_freq
        changes = None if frequencies.is_inference() else frequencies._version
        key = (x.dtype, frequencies.data_ptr(), changes, self.attention_scaling)
        kept = self.__dict__.get("_tables")
        if kept is None or kept[0] != key or kept[1].shape[0] < positions:
            room = min(most, max(FIRST_POSITIONS, 2 * positions))
            cos, sin = super().forward(x, torch.arange(room)[None])
            kept = self.__dict__["_tables"] = (key, cos[0].contiguous(), sin[0].contiguous())
        return kept[1:]


class FusedAttention:
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
            and _plain(hidden_states, cos, sin)
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
        query = self._rotated(self.q_proj(hidden_states), "q_norm", cos, sin).view(heads).transpose(1, 2)
        key = self._rotated(self.k_proj(hidden_states), "k_norm", cos, sin).view(heads).transpose(1, 2)
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

    def _rotated(self, x: torch.Tensor, norm: str, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self._rotate(getattr(self, norm)(x), None, cos, sin)


class FusedPartialAttention(FusedAttention):
    """The same where only the first part of a head may be rotated, and norms are optional."""

    def _is_known(self) -> bool:
        return self.use_qk_norm == hasattr(self, "q_norm")

    def _turns(self, width: int) -> bool:
        return width <= self.head_dim and width % 2 == 0


class FusedTopKRouter:
    """Softmax over the experts and the top k of them."""

    def forward(self, hidden_states: torch.Tensor):
        if not _plain(hidden_states, self.weight):
            return super().forward(hidden_states)
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        logits = _few_tokens(hidden_states, self.weight, None)
        if logits is None:
            logits = F.linear(hidden_states, self.weight)
        tokens = logits.shape[0]
        # Mixtral always normalises, and keeps float32 scores.
        normalise = getattr(self, "norm_topk_prob", None)
        dtype = torch.float32 if normalise is None else logits.dtype
        scores = torch.empty(tokens, self.top_k, dtype=dtype)
        ids = torch.empty(tokens, self.top_k, dtype=torch.int64)
        native._native.softmax_top_k(
            DTYPES[logits.dtype],
            tokens,
            self.num_experts,
            self.top_k,
            logits.data_ptr(),
            normalise is None or normalise,
            DTYPES[dtype],
            scores.data_ptr(),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        return logits, scores, ids


class FusedSigmoidRouter:
    """Sigmoids of float32 logits, a bias for the choice alone, and the top k within the best groups."""

    def forward(self, hidden_states: torch.Tensor):
        if not (_plain(hidden_states) and _plain(self.weight, self.e_score_correction_bias) and self._is_known()):
            return super().forward(hidden_states)
        x = hidden_states.view(-1, self.hidden_dim)
        tokens, weight = x.shape[0], self.weight
        logits = torch.empty(tokens, self.num_experts, dtype=torch.float32)
        few = 0 < tokens <= native._native.decode_rows
        if few and x.dtype is torch.bfloat16 and self.hidden_dim % 32 == 0:
            pointers = x.data_ptr(), weight.data_ptr(), logits.data_ptr()
            native._native.float_linear(tokens, *weight.shape, *pointers, torch.get_num_threads())
        else:
            logits = F.linear(x.float(), weight)
        scores = torch.empty(tokens, self.top_k, dtype=torch.float32)
        ids = torch.empty(tokens, self.top_k, dtype=torch.int64)
        native._native.sigmoid_top_k(
            tokens,
            self.num_experts,
            self.top_k,
            self.num_group,
            self.topk_group,
            logits.data_ptr(),
            self.e_score_correction_bias.data_ptr(),
            bool(self.norm_topk_prob),
            self.routed_scaling_factor,
            scores.data_ptr(),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        return logits, scores, ids

    def _is_known(self) -> bool:
        """Whether weights and settings are such that every choice is one of an expert."""
        experts, groups, chosen = self.num_experts, self.num_group, self.topk_group
        return (
            self.weight.dtype is torch.float32
            and self.weight.shape == (experts, self.hidden_dim)
            and self.e_score_correction_bias.shape == (experts,)
            and experts <= MAX_EXPERTS
            and experts % groups == 0
            and experts // groups >= 2
            and 0 < chosen <= groups
            and 0 < self.top_k <= chosen * (experts // groups)
        )


class FusedMLP:
    """`down(silu(gate(x)) * up(x))` with the middle in one pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = self.act_fn
        if type(act) not in SILU or act._forward_hooks or act._forward_pre_hooks:
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if gate.shape != up.shape or not _plain(gate, up):
            return self.down_proj(act(gate) * up)
        y = torch.empty_like(gate)
        native._native.gated_silu(
            DTYPES[y.dtype],
            y.numel() // y.shape[-1],
            y.shape[-1],
            gate.data_ptr(),
            up.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return self.down_proj(y)


class FusedSharedExpertBlock:
    """Experts and, weighted by the sigmoid of a score, an expert that all tokens share: their sum in one pass."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        shared = self.shared_expert(x)
        _, weights, ids = self.gate(x)
        experts = self.experts(x, ids, weights)
        score = self.shared_expert_gate(x)
        if not _plain(experts, shared, score) or experts.shape != shared.shape or score.numel() != experts.shape[0]:
            return (experts + torch.sigmoid(score) * shared).reshape(hidden_states.shape)
        y = torch.empty_like(experts)
        native._native.add_scaled(
            DTYPES[y.dtype],
            *y.shape,
            experts.data_ptr(),
            shared.data_ptr(),
            score.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y.reshape(hidden_states.shape)


def _few_tokens(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """F.linear where the core has it and is faster: bfloat16, a few tokens, in_features a multiple of 32."""
    rows, columns = weight.shape
    tokens = x.numel() // columns
    if not (0 < tokens <= native._native.dense_tokens and columns % 32 == 0 and x.dtype is torch.bfloat16):
        return None
    if not (_plain(x, weight) if bias is None else _plain(x, weight, bias)):
        return None
    y = torch.empty(*x.shape[:-1], rows, dtype=x.dtype)
    native._native.dense_linear(
        tokens,
        rows,
        columns,
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


# Classes of transformers whose forward is known to be what the fused one computes, by name in their own module.
NORMS = {f"{f}RMSNorm" for f in ("Qwen2Moe", "Qwen3Moe", "Mixtral", "Olmoe", "DeepseekV2", "DeepseekV3", "Glm4Moe")}
ATTENTIONS = {"Qwen2MoeAttention", "Qwen3MoeAttention", "MixtralAttention"}
WHOLE_NORM_ATTENTIONS = {"OlmoeAttention"}
PARTIAL_ATTENTIONS = {"Glm4MoeAttention"}
ROTARY = {f"{f}RotaryEmbedding" for f in ("Qwen2Moe", "Qwen3Moe", "Mixtral", "Olmoe", "DeepseekV3", "Glm4Moe")}
ROUTERS = {"Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter"}
SIGMOID_ROUTERS = {"Glm4MoeTopkRouter"}
MLPS = {"Qwen2MoeMLP", "Glm4MoeMLP"}
SHARED_EXPERT_BLOCKS = {"Qwen2MoeSparseMoeBlock"}
SILU = {nn.SiLU, SiLUActivation}


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
    # Other kinds change their frequencies with the length of the sequence.
    if cls.__name__ in ROTARY and module.rope_type == "default":
        return FusedRotaryEmbedding
    if cls.__name__ in ATTENTIONS and _heads_are_plain(module):
        return FusedAttention
    if cls.__name__ in WHOLE_NORM_ATTENTIONS and _heads_are_plain(module):
        return FusedWholeNormAttention
    if cls.__name__ in PARTIAL_ATTENTIONS and _heads_are_plain(module):
        return FusedPartialAttention
    if cls.__name__ in SIGMOID_ROUTERS:
        return FusedSigmoidRouter
    if cls.__name__ in MLPS and type(module.act_fn) in SILU:
        return FusedMLP
    if cls.__name__ in SHARED_EXPERT_BLOCKS:
        return FusedSharedExpertBlock
    return None


def _heads_are_plain(attention: Any) -> bool:
    norms = [getattr(attention, n, None) for n in ("q_norm", "k_norm")]
    dtypes = {n.weight.dtype for n in norms if n is not None} | {attention.config.dtype}
    return attention.head_dim % 2 == 0 and len(dtypes) == 1


@functools.cache
def _fused_class(fusion: type, cls: type) -> type:
    return type(f"Fused{cls.__name__}", (fusion, cls), {"__module__": __name__})


def is_fused(module: nn.Module, fusion: type) -> bool:
    """Whether a module is one of transformers' made into this fusion, and not somebody's subclass of that."""
    cls = type(module)
    return len(cls.__bases__) == 2 and cls.__bases__[0] is fusion and cls is _fused_class(*cls.__bases__)


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
            module.__class__ = _fused_class(fusion, type(module))
            fused[name] = fused.get(name, 0) + 1
        elif decode.fuse(module):
            fused[name] = fused.get(name, 0) + 1
    return fused
