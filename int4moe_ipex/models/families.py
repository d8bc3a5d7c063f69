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
        ignored: regular expressions (full match) of tensors that this family's checkpoints may carry and the model
            has no use for, such as the layers of multi-token prediction.
    """

    model_type: str
    renames: tuple[tuple[str, str], ...] = ()
    projections: tuple[tuple[str, str, str], ...] = (GATED_NAMES,)
    ignored: tuple[str, ...] = ()

    def checkpoint_names(self, module: str) -> list[str]:
        """The names that a module of the tree may have in a checkpoint, most usual first."""
        names = [module.replace(tree, stored) for tree, stored in self.renames if tree in module]
        return [*names, module]

    def is_ignored(self, tensor: str, num_hidden_layers: int) -> bool:
        """Whether a tensor may be left unread: rotary tables, and layers past the last decoder layer."""
        if tensor.endswith(".rotary_emb.inv_freq"):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", tensor)
        if layer and int(layer.group(1)) >= num_hidden_layers and self.model_type in MTP_FAMILIES:
            return True
        return any(re.fullmatch(pattern, tensor) for pattern in self.ignored)


# These publish their multi-token-prediction layers as decoder layers past the last one.
MTP_FAMILIES = ("deepseek_v3", "glm4_moe")

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("qwen2_moe"),
        Family("qwen3_moe"),
        Family(
            "mixtral",
            renames=((".mlp.", ".block_sparse_moe."),),
            projections=(MIXTRAL_NAMES, GATED_NAMES),
        ),
        Family("olmoe"),
        Family("deepseek_v2"),
        Family("deepseek_v3"),
        Family("glm4_moe"),
    )
}

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}


def family_of(config: Mapping) -> Family:
    """The family of a raw config.json.

    Raises:
        UnsupportedModelError: no model_type, or one that is not in the table.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported yet; supported families: {known}. It is not guessed, because "
            "families differ in routing, naming and activation"
        )
    return FAMILIES[model_type]


def activation_of(config: Mapping) -> Activation:
    """The experts' activation by the config's `hidden_act`.

    Raises:
        UnsupportedModelError: an activation that no kernel has.
    """
    name = config.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return Activation(ACTIVATIONS[name])
