"""Tiny random models of every family, as a stock transformers model and as the int4 checkpoint that equals it.

The stock model's weights are set to (q - 8) * s, so that its logits are what the checkpoint has to give.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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

GDN = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SHARED = {"num_experts": 4, "head_dim": 16, "shared_expert_intermediate_size": 32}
GATED = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")
BLOCK = (".mlp.", ".block_sparse_moe.")


@dataclass(frozen=True)
class Tiny:
    """A family's tiny model, and how its published checkpoints name what transformers' module tree names.

    Attributes:
        config: fields of the configuration.
        renames: (in the module tree, in checkpoints), replaced one after the other in every name.
        names: of an expert's gate, up and down.
        stock: the model_type of the language model in transformers, where it is another.
        holder: fields of a config.json around the language model's, which is its text_config.
        unread: names of stored tensors that the language model has no use for.
        method: the quant_method of such checkpoints.
        renamed_type: the language model's own model_type in config.json, where transformers' is another.
    """

    config: dict
    renames: tuple[tuple[str, str], ...] = ()
    names: tuple[str, str, str] = GATED
    stock: str = ""
    holder: dict | None = None
    unread: tuple[str, ...] = ()
    method: str = "compressed-tensors"
    renamed_type: str = ""


FAMILIES: dict[str, Tiny] = {
    "qwen2_moe": Tiny({"num_experts": 4, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0]}),
    "qwen3_moe": Tiny({"num_experts": 4, "head_dim": 16}),
    "mixtral": Tiny({"num_local_experts": 4}, (BLOCK,), MIXTRAL),
    "olmoe": Tiny({"num_experts": 4}),
    "deepseek_v2": Tiny(DEEPSEEK | MLA | {"topk_method": "group_limited_greedy", "num_key_value_heads": 4}),
    "deepseek_v3": Tiny(DEEPSEEK | MLA | {"num_key_value_heads": 4}, unread=("model.layers.9.eh_proj.weight",)),
    "glm4_moe": Tiny(DEEPSEEK | {"head_dim": 16}, unread=("model.layers.9.eh_proj.weight",)),
    "glm4_moe_lite": Tiny(DEEPSEEK | MLA | {"num_key_value_heads": 4}, unread=("model.layers.9.eh_proj.weight",)),
    "kimi_k2": Tiny(DEEPSEEK | MLA | {"num_key_value_heads": 4}, stock="deepseek_v3", renamed_type="kimi_k2"),
    "kimi_k25": Tiny(
        DEEPSEEK | MLA | {"num_key_value_heads": 4},
        (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
        stock="deepseek_v3",
        holder={"architectures": ["KimiK25ForConditionalGeneration"]},
        unread=("vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"),
        renamed_type="kimi_k2",
    ),
    "qwen3_next": Tiny(SHARED | GDN, unread=("mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight")),
    "qwen3_5_moe": Tiny(
        SHARED | GDN,
        (("model.", "model.language_model."),),
        stock="qwen3_5_moe_text",
        holder={"architectures": ["Qwen3_5MoeForConditionalGeneration"]},
        unread=("mtp.fc.weight", "model.visual.patch_embed.proj.weight"),
    ),
    "qwen3_5_moe_text": Tiny(SHARED | GDN, unread=("mtp.fc.weight",)),
    "gpt_oss": Tiny(
        {"num_local_experts": 4, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        method="auto-round",
    ),
    "minimax_m2": Tiny({"num_local_experts": 4, "head_dim": 16, "intermediate_size": 32}, (BLOCK,), MIXTRAL),
    "minimax": Tiny(
        {"num_local_experts": 4, "head_dim": 16, "intermediate_size": 32},
        (BLOCK,),
        MIXTRAL,
        stock="minimax_m2",
        renamed_type="minimax",
    ),
    "ernie4_5_moe": Tiny(
        {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
        ((".gate.moe_statics.", ".moe_statics."),),
        unread=("model.mtp_linear_proj.0.weight", "model.mtp_block.0.mlp.up_proj.weight"),
    ),
    "dots1": Tiny(DEEPSEEK),
    "hunyuan_v1_moe": Tiny({"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "phimoe": Tiny({"num_local_experts": 4}, ((".mlp.router.", ".mlp.gate."), BLOCK), MIXTRAL),
    "lfm2_moe": Tiny(
        {"num_experts": 4, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, names=MIXTRAL
    ),
    "exaone_moe": Tiny(
        {"num_experts": 8, "n_group": 2, "topk_group": 1, "num_shared_experts": 1, "head_dim": 16},
        ((".gate.e_score", ".e_score"),),
        unread=("mtp.fc.weight",),
    ),
    "solar_open": Tiny(DEEPSEEK | {"head_dim": 16}),
    "flex_olmo": Tiny({"num_experts": 4}),
    "afmoe": Tiny({"num_experts": 4, "head_dim": 16, "num_dense_layers": 1}),
    "mimo_v2_flash": Tiny(
        DEEPSEEK | {"head_dim": 16, "v_head_dim": 16},
        ((".self_attn.sinks", ".self_attn.attention_sink_bias"),),
        unread=("model.mtp.layers.0.eh_proj.weight",),
    ),
}
GROUP = 16
# Linears that quantizers leave dense.
DENSE = ("lm_head", "shared_expert_gate", ".gate", ".gate.wg", ".router", "in_proj_ba", "in_proj_a", "in_proj_b")
ROUTERS = (".gate", ".gate.wg", ".router")


def stock_model(family: str, **changes) -> torch.nn.Module:
    """A random float32 model of the family whose linears (but for head and routers) are exactly int4."""
    torch.manual_seed(0)
    tiny = FAMILIES[family]
    config = AutoConfig.for_model(tiny.stock or family, **{**COMMON, **tiny.config, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if name.endswith(("e_score_correction_bias", "expert_bias", "sinks")):
            torch.nn.init.uniform_(tensor, -0.1, 0.1)
        if name.endswith(("proj.bias", "proj_bias", "router.bias")):
            torch.nn.init.uniform_(tensor, -0.5, 0.5)
        if name.endswith("norm.weight"):
            with torch.no_grad():
                tensor += torch.empty_like(tensor).uniform_(-0.2, 0.2)
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


def write_checkpoint(
    model: torch.nn.Module, family: str, folder: Path, router: bool = False, naming=None, dense: bool = False
) -> None:
    """Writes the model as a compressed-tensors checkpoint and sets its weights to what was written.

    router: quantize the routers too. naming: (renames, (gate, up, down)) in place of the family's own. dense: store the
    weights as they are.
    """
    tiny = FAMILIES[family]
    renames, names = naming or (tiny.renames, tiny.names)
    writer = _Writer()

    def rename(name: str) -> str:
        for tree, stored in renames:
            name = name.replace(tree, stored)
        return name

    def linear(name: str, weight: torch.Tensor) -> torch.Tensor:
        if not dense:
            return writer.int4(name, weight)
        writer.tensors[f"{name}.weight"] = weight.clone()
        return weight

    done = set()
    with torch.no_grad():
        for name, module in model.named_modules():
            if hasattr(module, "gate_up_proj"):
                for e in range(module.gate_up_proj.shape[0]):
                    prefixes = [f"{rename(name)}.{e}.{projection}" for projection in names]
                    if family == "gpt_oss":
                        _gpt_oss_expert(module, e, prefixes, linear, writer)
                        continue
                    parts = (*module.gate_up_proj[e].chunk(2), module.down_proj[e])
                    gate, up, down = (linear(*pair) for pair in zip(prefixes, parts))
                    module.gate_up_proj[e], module.down_proj[e] = torch.cat((gate, up)), down
                done |= {f"{name}.{kind}_proj{bias}" for kind in ("gate_up", "down") for bias in ("", "_bias")}
            elif isinstance(module, torch.nn.Linear) and not name.endswith(DENSE):
                module.weight.copy_(linear(rename(f"{name}.")[:-1], module.weight))
                done.add(f"{name}.weight")
            elif router and name.endswith(ROUTERS) and hasattr(module, "weight"):
                module.weight.copy_(writer.int4(rename(f"{name}.")[:-1], module.weight))
                done.add(f"{name}.weight")
        tied = model.config.tie_word_embeddings
        for name, tensor in model.state_dict().items():
            if name not in done and not (tied and name == "lm_head.weight"):
                writer.tensors[rename(name)] = tensor.contiguous().clone()
    writer.tensors |= {name: torch.zeros(4, 4) for name in tiny.unread}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(writer.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    if tiny.renamed_type:
        config["model_type"] = tiny.renamed_type
    if tiny.holder is not None:
        config = {"model_type": family, "text_config": config, **tiny.holder}
    if not dense:
        config["quantization_config"] = QUANTIZATION | {"quant_method": tiny.method}
    (folder / "config.json").write_text(json.dumps(config, default=str))


def _gpt_oss_expert(module: torch.nn.Module, e: int, prefixes: list[str], linear, writer: _Writer) -> None:
    """Gate and up take turns in columns of the module tree; AutoRound stores them apart, each with its bias."""
    gate_up, biases = module.gate_up_proj[e], module.gate_up_proj_bias[e]
    gate, up, down = prefixes
    gate_up[:, ::2] = linear(gate, gate_up[:, ::2].T).T
    gate_up[:, 1::2] = linear(up, gate_up[:, 1::2].T).T
    module.down_proj[e] = linear(down, module.down_proj[e].T).T
    for prefix, bias in zip(prefixes, (biases[::2], biases[1::2], module.down_proj_bias[e])):
        writer.tensors[f"{prefix}.bias"] = bias.clone()


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
    "packing_format": "auto_round:llm_compressor",  # which AutoRound alone reads
}
