"""Tiny synthetic checkpoints in every format, built from plain codes, scales and zeros.

Written from the format rules with plain loops over Python integers, and sharing no code with the readers, so that
the two cannot drift together. `Linear` is the truth; `gptq`, `awq`, `compressed_tensors` and `dense` store it; the
functions at the end write whole folders. Fixture T is `moe_checkpoint` with its defaults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

AWQ_COLUMN_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass
class Linear:
    """One linear as numbers: W[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g] with g = group_of[k].

    codes: int array [N, K]; scales: float tensor [N, G]; zeros: int array [N, G]; group_of: K group numbers;
    bits: 4 or 8; bias: float tensor [N] or None.
    """

    codes: np.ndarray
    scales: torch.Tensor
    zeros: np.ndarray
    group_of: list[int]
    group_size: int
    bits: int = 4
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def weight(self) -> torch.Tensor:
        """float32 [N, K]."""
        scales = self.scales.to(torch.float32).numpy()
        return torch.from_numpy(
            (self.codes - self.zeros[:, self.group_of]).astype(np.float32) * scales[:, self.group_of]
        )


def linear(
    rng: np.random.Generator,
    out_features: int,
    in_features: int,
    group_size: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
    scales_dtype: torch.dtype = torch.float16,
    scale: float | None = None,
    bits: int = 4,
    bias: bool = False,
) -> Linear:
    """A random linear. group_size -1 is one group; scale gives every group the same one."""
    size = in_features if group_size == -1 else group_size
    groups = math.ceil(in_features / size)
    top = 2**bits
    codes = rng.integers(0, top, (out_features, in_features))
    zeros = np.full((out_features, groups), top // 2)
    if not symmetric:
        zeros = rng.integers(0, top, (out_features, groups))
    values = (
        rng.uniform(0.005, 0.025, (out_features, groups)) if scale is None else np.full((out_features, groups), scale)
    )
    group_of = [k // size for k in range(in_features)]
    if act_order:
        group_of = [group_of[k] for k in rng.permutation(in_features)]
    return Linear(
        codes=codes,
        scales=torch.tensor(values).to(scales_dtype),
        zeros=zeros,
        group_of=group_of,
        group_size=size,
        bits=bits,
        bias=torch.tensor(rng.normal(0, 0.1, out_features)).to(scales_dtype) if bias else None,
    )


# Words ----------------------------------------------------------------------------------------------------------------


def word(fields: list[int], bits: int = 4) -> int:
    """A signed int32 from fields given from the low bits up."""
    value = 0
    for position, entry in enumerate(fields):
        assert 0 <= entry < 2**bits, entry
        value += int(entry) * 2 ** (bits * position)
    return value - 2**32 if value >= 2**31 else value


def _words(rows: list[list[int]], bits: int = 4) -> torch.Tensor:
    """int32 [R, C]: each row's fields packed in their own order, the last word padded with zero fields."""
    per_word = 32 // bits
    packed = []
    for row in rows:
        padded = [*row, *[0] * (-len(row) % per_word)]
        packed.append([word(padded[i : i + per_word], bits) for i in range(0, len(padded), per_word)])
    return torch.tensor(packed, dtype=torch.int32)


def _with_bias(tensors: dict[str, torch.Tensor], source: Linear) -> dict[str, torch.Tensor]:
    return tensors if source.bias is None else {**tensors, "bias": source.bias}


# Formats --------------------------------------------------------------------------------------------------------------


def gptq(source: Linear, zeros: str = "v1", g_idx: bool = True, g_idx_dtype=torch.int32) -> dict[str, torch.Tensor]:
    """GPTQ tensors. zeros: v1 (stored minus one, by whole words, as gptqmodel does) or v2 (as they are)."""
    n, k = source.shape
    columns = [[int(source.codes[row, column]) for column in range(k)] for row in range(n)]
    qweight = _words(columns, source.bits).t().contiguous()  # packed along K, so words of a column lie below each other
    groups = source.zeros.shape[1]
    qzeros = _words([[int(source.zeros[row, group]) for row in range(n)] for group in range(groups)], source.bits)
    if zeros == "v1":
        one = sum(2 ** (source.bits * i) for i in range(32 // source.bits))
        stored = [[(int(w) % 2**32 - one) % 2**32 for w in row] for row in qzeros]
        qzeros = torch.tensor([[w - 2**32 if w >= 2**31 else w for w in row] for row in stored], dtype=torch.int32)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": source.scales.t().contiguous()}
    if g_idx:
        tensors["g_idx"] = torch.tensor(source.group_of, dtype=g_idx_dtype)
    return _with_bias(tensors, source)


def awq(source: Linear) -> dict[str, torch.Tensor]:
    """AWQ gemm tensors."""

    def interleave(row: list[int]) -> list[int]:
        return [row[8 * (i // 8) + AWQ_COLUMN_OF_NIBBLE[i % 8]] for i in range(len(row))]

    n, k = source.shape
    groups = source.zeros.shape[1]
    tensors = {
        "qweight": _words([interleave([int(source.codes[row, column]) for row in range(n)]) for column in range(k)]),
        "qzeros": _words([interleave([int(source.zeros[row, group]) for row in range(n)]) for group in range(groups)]),
        "scales": source.scales.t().contiguous(),
    }
    return _with_bias(tensors, source)


def compressed_tensors(
    source: Linear, symmetric: bool = True, strategy: str = "group", g_idx: bool = False
) -> dict[str, torch.Tensor]:
    """compressed-tensors pack-quantized tensors. A field is the signed value plus 2**(bits-1), so it is the code."""
    n, k = source.shape
    groups = source.zeros.shape[1]
    scale = {"group": source.scales, "channel": source.scales[:, :1], "tensor": source.scales[0, :1]}[strategy]
    tensors = {
        "weight_packed": _words([[int(code) for code in row] for row in source.codes], source.bits),
        "weight_scale": scale.contiguous(),
        "weight_shape": torch.tensor([n, k], dtype=torch.int64),
    }
    if not symmetric:
        if strategy == "tensor":
            middle = 2 ** (source.bits - 1)
            tensors["weight_zero_point"] = torch.tensor([int(source.zeros[0, 0]) - middle], dtype=torch.int8)
        else:
            by_group = [[int(source.zeros[row, group]) for row in range(n)] for group in range(groups)]
            tensors["weight_zero_point"] = _words(by_group, source.bits).t().contiguous()
    if g_idx:
        tensors["weight_g_idx"] = torch.tensor(source.group_of, dtype=torch.int32)
    return _with_bias(tensors, source)


def dense(source: Linear, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return _with_bias({"weight": source.weight.to(dtype)}, source)


# Labels ---------------------------------------------------------------------------------------------------------------


def gptq_label(**changes: Any) -> dict[str, Any]:
    label = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    return {**label, "checkpoint_format": "gptq", **changes}


def awq_label(**changes: Any) -> dict[str, Any]:
    label = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return {**label, **changes}


def ct_weights(**changes: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **changes}


def ct_label(weights: Mapping[str, Any] | None = None, targets: tuple[str, ...] = ("Linear",), **changes: Any) -> dict:
    group = {"targets": list(targets), "weights": ct_weights(**(weights or {})), "input_activations": None}
    label = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return {**label, "ignore": ["lm_head"], **changes}


def auto_round_label(**changes: Any) -> dict[str, Any]:
    label = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
    return {**label, "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers", **changes}


# Folders --------------------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    quantization: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
    index: bool = True,
) -> Path:
    """A checkpoint folder: config.json and one safetensors file, or several with or without their index."""
    folder.mkdir(parents=True, exist_ok=True)
    content = dict(config or {"model_type": "qwen3_moe"})
    if quantization is not None:
        content["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(content))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    files = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    weight_map = {name: files[position % shards] for position, name in enumerate(names)}
    for file in files:
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    if index:
        total = sum(tensor.nbytes for tensor in tensors.values())
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return folder


def one_linear(folder: Path, tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any] | None) -> Path:
    """A checkpoint of the single module `m`."""
    return write(folder, {f"m.{suffix}": tensor for suffix, tensor in tensors.items()}, quantization)


def qwen3_moe_config(**changes: Any) -> dict[str, Any]:
    """Fixture T: 1 layer, hidden 64, 4 experts of 32, top 2."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return {**config, **changes}


def qwen3_moe_rest(config: Mapping[str, Any], seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict:
    """Everything of a qwen3_moe checkpoint but its experts, in 16 bits."""
    rng = np.random.default_rng(seed)
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def random(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.normal(0, 0.05, shape)).to(dtype)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    tensors = {"model.embed_tokens.weight": random(config["vocab_size"], hidden), "model.norm.weight": ones(hidden)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = ones(hidden)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ones(hidden)
        tensors[f"{prefix}.mlp.gate.weight"] = random(config["num_experts"], hidden)
        for name, shape in {
            "q": (queries, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, queries),
        }.items():
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = random(*shape)
        tensors[f"{prefix}.self_attn.q_norm.weight"] = ones(head)
        tensors[f"{prefix}.self_attn.k_norm.weight"] = ones(head)
    return tensors


@dataclass
class Moe:
    """A written MoE checkpoint: its folder, its stored tensors and the truth of each expert projection."""

    folder: Path
    tensors: dict[str, torch.Tensor]
    linears: dict[str, Linear] = field(default_factory=dict)


def moe_checkpoint(
    folder: Path,
    quantization: Mapping[str, Any] | None = None,
    store: Callable[[Linear], dict[str, torch.Tensor]] = gptq,
    make: Callable[[np.random.Generator, str, int, int], Linear] | None = None,
    config: Mapping[str, Any] | None = None,
    rest: Callable[[Mapping[str, Any]], dict[str, torch.Tensor]] = qwen3_moe_rest,
    name: str = "model.layers.{layer}.mlp.experts.{expert}.{projection}",
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    change: Callable[[dict[str, torch.Tensor]], None] | None = None,
    shards: int = 1,
    seed: int = 0,
) -> Moe:
    """A whole MoE checkpoint whose experts are quantized and whose rest is 16-bit.

    Args:
        folder: where to write.
        quantization: the label; symmetric GPTQ in groups of 32 by default.
        store: a format of this file, or a function over one.
        make: gives the linear for (rng, module name, N, K); by default random codes with every scale 2**-6.
        config: config.json; `qwen3_moe_config()` by default.
        rest: gives all other tensors for a config.
        name: template of a projection's name, with the fields layer, expert and projection.
        projections: the names of gate, up and down.
        change: last change of all tensors before they are written, such as dropping one.
        shards: number of files.
        seed: of the random codes.
    """
    config = dict(config or qwen3_moe_config())
    quantization = gptq_label() if quantization is None else quantization
    make = make or (lambda rng, _, n, k: linear(rng, n, k, scale=2**-6))
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    tensors = rest(config)
    moe = Moe(folder, tensors)
    for layer in range(config["num_hidden_layers"]):
        for expert in range(config["num_experts"]):
            for projection, (n, k) in zip(projections, ((inner, hidden), (inner, hidden), (hidden, inner))):
                module = name.format(layer=layer, expert=expert, projection=projection)
                moe.linears[module] = make(rng, module, n, k)
                for suffix, tensor in store(moe.linears[module]).items():
                    tensors[f"{module}.{suffix}"] = tensor
    if change is not None:
        change(tensors)
    write(folder, tensors, quantization, config, shards)
    return moe
