"""Fused modules of what follows attention: routers, MLPs and shared experts. What a fused module is: fused.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import SiLUActivation

from int4moe_ipex.backends import native
from int4moe_ipex.models.core_calls import DTYPES, MAX_EXPERTS, Fused, few_tokens, float_logits, plain

SILU = {nn.SiLU, SiLUActivation}


class FusedTopKRouter(Fused):
    """Softmax over the experts and the top k of them."""

    def forward(self, hidden_states: torch.Tensor):
        if not plain(hidden_states, self.weight):
            return super().forward(hidden_states)
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        logits = few_tokens(hidden_states, self.weight, None)
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
            1,
            1,
            1.0,
            torch.get_num_threads(),
        )
        return logits, scores, ids


class FusedSigmoidRouter(Fused):
    """Sigmoids of float32 logits, a bias for the choice alone, and the top k within the best groups."""

    def forward(self, hidden_states: torch.Tensor):
        if not (plain(hidden_states) and plain(self.weight, self.e_score_correction_bias) and self._is_known()):
            return super().forward(hidden_states)
        x = hidden_states.view(-1, self.hidden_dim)
        tokens, logits = x.shape[0], float_logits(self, x)
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


class FusedGroupRouter(Fused):
    """Softmax of float32 logits over all experts, and the top k within the groups that have the greatest."""

    def forward(self, hidden_states: torch.Tensor):
        if not (plain(hidden_states) and plain(self.weight) and self._is_known()):
            return super().forward(hidden_states)
        x = hidden_states.view(-1, self.hidden_dim)
        tokens, logits = x.shape[0], float_logits(self, x)
        scores = torch.empty(tokens, self.top_k, dtype=torch.float32)
        ids = torch.empty(tokens, self.top_k, dtype=torch.int64)
        float32 = DTYPES[torch.float32]
        native._native.softmax_top_k(
            float32,
            tokens,
            self.num_experts,
            self.top_k,
            logits.data_ptr(),
            False,
            float32,
            scores.data_ptr(),
            ids.data_ptr(),
            *self.groups(),
            self.routed_scaling_factor,
            torch.get_num_threads(),
        )
        return logits, scores, ids

    def groups(self) -> tuple[int, int]:
        """How many there are, and how many are chosen from."""
        return (1, 1) if self.topk_method == "greedy" else (self.num_group, self.topk_group)

    def _is_known(self) -> bool:
        """Whether weights and settings are such that every choice is one of an expert."""
        if self.topk_method not in ("greedy", "group_limited_greedy"):
            return False
        experts, (groups, chosen) = self.num_experts, self.groups()
        return (
            self.weight.dtype is torch.float32
            and self.weight.shape == (experts, self.hidden_dim)
            and experts <= MAX_EXPERTS
            and experts % groups == 0
            and 0 < chosen <= groups
            and 0 < self.top_k <= chosen * (experts // groups)
        )


class FusedMLP(Fused):
    """`down(silu(gate(x)) * up(x))` with the middle in one pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = self.act_fn
        if type(act) not in SILU or act._forward_hooks or act._forward_pre_hooks:
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if gate.shape != up.shape or not plain(gate, up):
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


class FusedSharedExpertBlock(Fused):
    """Experts and, weighted by the sigmoid of a score, an expert that all tokens share: their sum in one pass."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        shared = self.shared_expert(x)
        _, weights, ids = self.gate(x)
        experts = self.experts(x, ids, weights)
        score = self.shared_expert_gate(x)
        if not plain(experts, shared, score) or experts.shape != shared.shape or score.numel() != experts.shape[0]:
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
