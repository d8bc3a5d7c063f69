"""A Qwen3-MoE decoder in plain torch around this package's own int4 modules, for machines where importing the models
of transformers takes too long (an emulated CPU: more than ten minutes).

test_decoder.py holds it to transformers' model; it has no cache and no padding.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from int4moe_ipex import formats
from int4moe_ipex.backends.base import RunConfig
from int4moe_ipex.backends.select import Wish
from int4moe_ipex.checkpoint.files import Checkpoint
from int4moe_ipex.cpu import detect
from int4moe_ipex.models.families import activation_of
from int4moe_ipex.moe.experts import Int4Experts, StoredExpert
from int4moe_ipex.moe.linear import DenseLinear, Int4Linear, build_linear

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERT = ("gate_proj", "up_proj", "down_proj")


class Decoder:
    """Reads a checkpoint folder and packs it by the selector's choice; called as transformers' models are.

    Activations between modules have run.dtype; attention scores, norms and the dense router and head are float32.

    Attributes:
        paths: the path of each int4 module.
    """

    def __init__(self, folder: Path, run: RunConfig, backend: Wish = "auto"):
        self.checkpoint = Checkpoint.open(folder)
        self.infos = formats.describe(self.checkpoint)
        self.config, self.run, self.backend = self.checkpoint.config, run, backend
        self.paths: set[str] = set()
        self.embedding = self.tensor("model.embed_tokens.weight")
        self.head = self.tensor("lm_head.weight")
        self.norm = self.tensor("model.norm.weight")
        self.layers = [self._layer(f"model.layers.{i}") for i in range(self.config["num_hidden_layers"])]

    def tensor(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(name).float()

    def _layer(self, name: str) -> SimpleNamespace:
        norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        return SimpleNamespace(
            **{norm.rpartition(".")[2]: self.tensor(f"{name}.{norm}.weight") for norm in norms},
            **{linear: self._linear(f"{name}.self_attn.{linear}") for linear in ATTENTION},
            router=self.tensor(f"{name}.mlp.gate.weight"),
            experts=self._experts(f"{name}.mlp.experts"),
        )

    def _linear(self, name: str) -> Int4Linear | DenseLinear:
        linear = build_linear(*self._read(name), detect(), self.run, self.backend)
        if isinstance(linear, Int4Linear):
            self.paths.add(linear.packed.path)
        return linear

    def _read(self, name: str):
        return formats.read_linear(self.checkpoint, self.infos[name])

    def _experts(self, name: str) -> Int4Experts:
        stored = [
            StoredExpert(*(self._read(f"{name}.{expert}.{projection}") for projection in EXPERT))
            for expert in range(self.config["num_local_experts"])
        ]
        experts = Int4Experts(stored, activation_of(self.config), detect(), self.run, self.backend)
        self.paths |= {pack.packed.path for pack in experts.packs}
        return experts

    def __call__(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        """input_ids [B, T] -> an object with logits [B, T, V] in float32."""
        assert not use_cache
        cos, sin = self._rotation(input_ids.shape[1])
        x = self.embedding[input_ids].to(self.run.dtype)
        for layer in self.layers:
            x = x + self._attention(layer, self._rms(x, layer.input_layernorm), cos, sin)
            x = x + self._mixture(layer, self._rms(x, layer.post_attention_layernorm))
        return SimpleNamespace(logits=self._rms(x, self.norm).float() @ self.head.t())

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, self.config["rms_norm_eps"]).to(self.run.dtype)

    def _rotation(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each position's angles, [T, head_dim]."""
        size = self.config["head_dim"]
        theta = self.config["rope_parameters"]["rope_theta"]
        frequencies = theta ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(tokens), frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()

    def _attention(self, layer: SimpleNamespace, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size = self.config["head_dim"]

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (-1, size)).transpose(1, 2)

        def rotated(y: torch.Tensor) -> torch.Tensor:
            first, second = y.float().chunk(2, dim=-1)
            return y.float() * cos + torch.cat((-second, first), dim=-1) * sin

        q = rotated(self._rms(heads(layer.q_proj(x)), layer.q_norm))
        k = rotated(self._rms(heads(layer.k_proj(x)), layer.k_norm))
        v = heads(layer.v_proj(x)).float()
        shared = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(shared, dim=1).transpose(2, 3) * size**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v.repeat_interleave(shared, dim=1)
        return layer.o_proj(y.transpose(1, 2).flatten(2).to(self.run.dtype))

    def _mixture(self, layer: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weights, ids = (rows.float() @ layer.router.t()).softmax(-1).topk(self.config["num_experts_per_tok"])
        if self.config["norm_topk_prob"]:
            weights = weights / weights.sum(-1, keepdim=True)
        return layer.experts(rows, ids, weights).view_as(x)
