"""What differs between model families: how a checkpoint names what transformers' module tree names.

Everything else (attention, routers, shared experts, norms) is transformers' own code. A family that is not in
this table is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from int4moe_ipex.errors import UnsupportedModelError
from int4moe_ipex.moe.activations import Activation

GATED_NAMES = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        model_type: as in config.json.
        renames: (name in the module tree, name in checkpoints) pairs of substrings; each is one more naming that
            checkpoints of this family use beside the module tree's own.
        projections: the names of gate, up and down inside `experts.E.`, most usual first.
        ignored: regular expressions, for the start of a name, of tensors that the language model has no use for: layers
            of multi-token prediction, an image encoder.
        extra_layers: whether layers of multi-token prediction are stored as decoder layers past the last one.
        config_type: the model_type whose config class of transformers reads config.json; "" for model_type itself.
        architecture: the only one in config.json's `architectures` that is taken; "" for any.
        read_weights: ends of names of linears whose weight transformers' own code looks at: they stay dense.
        clamped: whether the experts are gpt-oss's: with biases, transposed and interleaved in the module tree, and the
            activation swiglu_clamped.
        methods: the only quant_methods whose files are known to mean what the names say; () for any.
    """

    model_type: str
    renames: tuple[tuple[str, str], ...] = ()
    projections: tuple[tuple[str, str, str], ...] = (GATED_NAMES,)
    ignored: tuple[str, ...] = ()
    extra_layers: bool = False
    config_type: str = ""
    architecture: str = ""
    read_weights: tuple[str, ...] = ()
    clamped: bool = False
    methods: tuple[str, ...] = ()

    def checkpoint_names(self, module: str) -> list[str]:
        """The names that a module of the tree may have in a checkpoint, most usual first."""
        names = [module.replace(tree, stored) for tree, stored in self.renames if tree in module]
        return [*names, module]

    def is_ignored(self, tensor: str, num_hidden_layers: int) -> bool:
        """Whether a tensor may be left unread: rotary tables, what `ignored` says, and layers past the last one."""
        if tensor.endswith(".rotary_emb.inv_freq"):
            return True
        layer = re.match(r"(?:language_model\.)?model\.layers\.(\d+)\.", tensor) if self.extra_layers else None
        if layer and int(layer.group(1)) >= num_hidden_layers:
            return True
        return any(re.match(pattern, tensor) for pattern in self.ignored)


_BLOCK = (".mlp.", ".block_sparse_moe.")
_IN_VLM = (("model.", "model.language_model."),)
_KIMI = (("model.", "language_model.model."), ("lm_head", "language_model.lm_head"))
_MIXTRAL_LIKE = (MIXTRAL_NAMES, GATED_NAMES)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("qwen2_moe"),
        Family("qwen3_moe"),
        Family("mixtral", renames=(_BLOCK,), projections=_MIXTRAL_LIKE),
        Family("olmoe"),
        Family("deepseek_v2"),
        Family("deepseek_v3", extra_layers=True),
        Family("glm4_moe", extra_layers=True),
        Family("glm4_moe_lite", extra_layers=True),
        Family("kimi_k2", extra_layers=True, config_type="deepseek_v3", architecture="DeepseekV3ForCausalLM"),
        Family("kimi_k25", renames=_KIMI, ignored=(r"vision_tower\.", r"mm_projector\."), extra_layers=True),
        Family("qwen3_next", ignored=(r"mtp\.",)),
        Family("qwen3_5_moe", renames=_IN_VLM, ignored=(r"mtp\.", r"model\.visual\.")),
        Family("qwen3_5_moe_text", renames=_IN_VLM, ignored=(r"mtp\.",)),
        # llm-compressor's gate_proj and up_proj of gpt_oss are halves of rows in which gate and up take turns.
        Family("gpt_oss", clamped=True, methods=("auto-round",)),
        Family("minimax_m2", renames=(_BLOCK,), projections=_MIXTRAL_LIKE, extra_layers=True),
        Family(
            "minimax",  # what MiniMax-M2 calls itself in some config.json files; MiniMax-Text-01 does too
            renames=(_BLOCK,),
            projections=_MIXTRAL_LIKE,
            extra_layers=True,
            config_type="minimax_m2",
            architecture="MiniMaxM2ForCausalLM",
        ),
        Family("ernie4_5_moe", renames=((".mlp.gate.moe_statics", ".mlp.moe_statics"),), ignored=(r"model\.mtp_",)),
        Family("dots1"),
        Family("hunyuan_v1_moe", read_weights=(".gate.wg",)),
        Family("phimoe", renames=((".mlp.router", ".block_sparse_moe.gate"), _BLOCK), projections=_MIXTRAL_LIKE),
        Family("lfm2_moe", projections=_MIXTRAL_LIKE),
        Family(
            "exaone_moe", renames=((".gate.e_score_correction_bias", ".e_score_correction_bias"),), ignored=(r"mtp\.",)
        ),
        Family("solar_open"),
        Family("flex_olmo"),
        Family("afmoe"),
        Family(
            "mimo_v2_flash",
            renames=((".self_attn.sinks", ".self_attn.attention_sink_bias"),),
            ignored=(r"model\.mtp\.",),
        ),
    )
}

# Families that are asked for and not taken, and why.
REFUSED = {
    "dbrx": "a layer's experts are the rows of one matrix",
    "granitemoe": "a layer's experts are one tensor in published checkpoints, and no INT4 naming of theirs is known",
    "granitemoehybrid": "as granitemoe",
    "llama4": "the router's scores scale what goes into an expert, not what comes out",
    "longcat_flash": "some of its experts give back their input",
}

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}


def family_of(config: Mapping, quantization: Mapping | None = None) -> Family:
    """The family of a raw config.json.

    Args:
        quantization: what the checkpoint says of its quantization.

    Raises:
        UnsupportedModelError: no model_type, one that is not in the table, or not the architecture or quant_method that
            is meant.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        why = REFUSED.get(
            str(model_type), "it is not guessed, because families differ in routing, naming and activation"
        )
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported: {why}. Supported families: {known}")
    family, found = FAMILIES[model_type], config.get("architectures")
    if family.architecture and found != [family.architecture]:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is supported with the architecture {family.architecture}, and config.json has "
            f"{found}"
        )
    method = (quantization or {}).get("quant_method")
    if family.methods and method is not None and method not in family.methods:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is supported with quant_method {' or '.join(family.methods)}: with {method!r} "
            "it is not known which rows gate_proj and up_proj hold"
        )
    return family


def activation_of(config: Mapping) -> Activation:
    """The experts' activation by the language model's config.

    Raises:
        UnsupportedModelError: an activation that no kernel has.
    """
    family = FAMILIES.get(config.get("model_type"))
    if family is not None and family.clamped:
        return Activation("swiglu_clamped", config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0))
    name = config.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return Activation(ACTIVATIONS[name])
