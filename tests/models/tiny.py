"""Tiny random models of every family, as a stock transformers model and as the int4 checkpoint that equals it.

The stock model's weights are set to (q - 8) * s, so that its logits are what the checkpoint has to give.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 16}
DEEPSEEK = {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}

# family -> configuration, and how its checkpoints name an expert's projections (gate, up, down)
FAMILIES: dict[str, tuple[dict, str, tuple[str, str, str]]] = {
    "qwen2_moe": (
        {"num_experts": 4, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
        "mlp.experts",
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "qwen3_moe": ({"num_experts": 4, "head_dim": 16}, "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ({"num_local_experts": 4}, "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "olmoe": ({"num_experts": 4}, "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "deepseek_v2": (
        DEEPSEEK | MLA | {"topk_method": "group_limited_greedy", "num_key_value_heads": 4},
        "mlp.experts",
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "deepseek_v3": (DEEPSEEK | MLA | {"num_key_value_heads": 4}, "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "glm4_moe": (DEEPSEEK | {"head_dim": 16}, "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}
GROUP = 16


def stock_model(family: str, **changes) -> torch.nn.Module:
    """A random float32 model of the family whose linears (but for head and routers) are exactly int4."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family][0], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0..15 [N, K] and scales [N, G] float32 (bfloat16 values) near a weight."""
    n, k = weight.shape
    groups = weight.reshape(n, k // GROUP, GROUP)
    scales = (groups.abs().amax(-1) / 7.5).clamp(min=1e-3).bfloat16().float()
    codes = (groups / scales[..., None] + 8).round().clamp(0, 15).to(torch.int64)
    return codes.reshape(n, k), scales


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes to int32 [N, K/8], column 8c + i in nibble i (compressed-tensors' pack-quantized)."""
    n, k = codes.shape
    words = torch.zeros(n, k // 8, dtype=torch.int64)
    for i in range(8):
        words |= codes[:, i::8] << (4 * i)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


class _Writer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def int4(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Stores a linear and gives the float32 weight that it stands for."""
        codes, scales = quantize(weight)
        self.tensors[f"{name}.weight_packed"] = pack_words(codes)
        self.tensors[f"{name}.weight_scale"] = scales.bfloat16()
        self.tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
        return (codes - 8).float() * scales.repeat_interleave(GROUP, dim=1)


def write_checkpoint(model: torch.nn.Module, family: str, folder: Path, router: bool = False, naming=None) -> None:
    """Writes the model as a compressed-tensors checkpoint and sets its weights to what was written.

    router: quantize the routers too. naming: (experts' name, (gate, up, down)) in place of the family's own.
    """
    _, experts_name, names = (None, *naming) if naming else FAMILIES[family]
    writer = _Writer()
    done = set()
    with torch.no_grad():
        for name, module in model.named_modules():
            if hasattr(module, "gate_up_proj"):
                stored = name.replace("mlp.experts", experts_name)
                for e in range(module.gate_up_proj.shape[0]):
                    gate, up = module.gate_up_proj[e].chunk(2)
                    module.gate_up_proj[e] = torch.cat(
                        (writer.int4(f"{stored}.{e}.{names[0]}", gate), writer.int4(f"{stored}.{e}.{names[1]}", up))
                    )
                    module.down_proj[e] = writer.int4(f"{stored}.{e}.{names[2]}", module.down_proj[e])
                done |= {f"{name}.gate_up_proj", f"{name}.down_proj"}
            elif isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", "shared_expert_gate")):
                module.weight.copy_(writer.int4(name, module.weight))
                done.add(f"{name}.weight")
            elif router and name.endswith(".gate"):
                module.weight.copy_(writer.int4(_stored(name, experts_name), module.weight))
                done.add(f"{name}.weight")
        tied = model.config.tie_word_embeddings
        for name, tensor in model.state_dict().items():
            if name not in done and not (tied and name == "lm_head.weight"):
                writer.tensors[_stored(name, experts_name)] = tensor.contiguous().clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(writer.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": QUANTIZATION, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, default=str))


def _stored(name: str, experts_name: str) -> str:
    block = experts_name.rpartition(".")[0]
    return name.replace(".mlp.gate", f".{block}.gate")


QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        }
    },
    "ignore": ["lm_head"],
}
