"""What a load will do, decided from headers alone: which tensors of the checkpoint become which module.

Every problem (a missing, unknown, duplicated or mis-shaped tensor) is known here, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from int4moe_ipex.checkpoint.files import Checkpoint
from int4moe_ipex.errors import MissingTensorsError, UnsupportedModelError
from int4moe_ipex.formats.base import LinearInfo
from int4moe_ipex.models.families import Family


@dataclass(frozen=True)
class ExpertsPlan:
    """One experts module: for each expert the infos of gate, up and down."""

    module: str
    experts: tuple[tuple[LinearInfo, LinearInfo, LinearInfo], ...]


@dataclass
class LoadPlan:
    """experts and linears are replaced by this package's modules; the rest keeps transformers' own.

    Attributes:
        linears: (module name, info) of linears that are quantized in the checkpoint.
        dequantized: (parameter name, info) of quantized weights whose module is no linear, such as a router.
        tensors: parameter or buffer name -> tensor name in the checkpoint.
        tied: names of parameters that share the input embedding.
    """

    experts: list[ExpertsPlan] = field(default_factory=list)
    linears: list[tuple[str, LinearInfo]] = field(default_factory=list)
    dequantized: list[tuple[str, LinearInfo]] = field(default_factory=list)
    tensors: dict[str, str] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)


# What transformers says of experts that compute down(act(gate(x)) * up(x)), gate's rows before up's.
PLAIN = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}
CLAMPED = PLAIN | {"has_bias": True, "is_transposed": True, "is_concatenated": False}


def is_experts(module: nn.Module, family: Family) -> bool:
    """Whether a module is transformers' collection of fused experts (3-D gate_up_proj and down_proj).

    Raises:
        UnsupportedModelError: one that computes something else than this package's experts do.
    """
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not all(isinstance(p, nn.Parameter) and p.dim() == 3 for p in (gate_up, down)):
        return False
    known = CLAMPED if family.clamped else PLAIN
    other = [name for name, value in known.items() if getattr(module, name, value) != value]
    if other:
        raise UnsupportedModelError(f"{type(module).__name__}: not experts of a known kind ({', '.join(other)})")
    return True


def build_plan(
    model: nn.Module,
    family: Family,
    checkpoint: Checkpoint,
    infos: Mapping[str, LinearInfo],
    faulty: Mapping[str, list[str]] | None = None,
) -> LoadPlan:
    """Matches a model on the meta device with a checkpoint's headers.

    Args:
        infos, faulty: what `formats.survey` found: sound linears, and problems by module.

    Raises:
        MissingTensorsError: lists every tensor that is missing, unknown or of another shape.
    """
    layers = model.config.num_hidden_layers
    faulty = {name: found for name, found in (faulty or {}).items() if not family.is_ignored(f"{name}.", layers)}
    planner = _Planner(family, checkpoint, infos, faulty)
    owned: set[str] = set()
    for name, module in model.named_modules():
        if is_experts(module, family):
            planner.add_experts(name, module)
            owned.add(name)
        elif type(module) is nn.Linear and planner.add_linear(name, module):
            owned.add(name)
    for name, tensor in own_tensors(model):
        if name.rpartition(".")[0] not in owned:
            planner.add_tensor(name, tensor, model.config)
    planner.find_unknown(layers)
    if planner.problems:
        raise MissingTensorsError(str(checkpoint.path), planner.problems)
    return planner.plan


def own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers that a checkpoint stores, by name."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


class _Planner:
    def __init__(
        self,
        family: Family,
        checkpoint: Checkpoint,
        infos: Mapping[str, LinearInfo],
        faulty: Mapping[str, list[str]],
    ):
        self.family, self.checkpoint, self.infos, self.faulty = family, checkpoint, infos, faulty
        self.plan = LoadPlan()
        self.problems = [*checkpoint.problems, *(line for found in faulty.values() for line in found)]
        self.used: set[str] = set()

    def use(self, info: LinearInfo) -> None:
        self.used.update(info.tensors.values())

    def add_experts(self, name: str, module: nn.Module) -> None:
        num_experts, twice, hidden = module.gate_up_proj.shape
        if self.family.clamped:
            twice, hidden = hidden, twice
        shapes = ((twice // 2, hidden), (twice // 2, hidden), (hidden, twice // 2))
        naming = self._naming(name, num_experts)
        found = []
        for expert in range(num_experts):
            prefixes = [naming(expert, index) for index in range(3)]
            trio = [self.infos.get(prefix) for prefix in prefixes]
            for prefix, info, shape in zip(prefixes, trio, shapes):
                if info is None:
                    if prefix not in self.faulty:
                        self.problems.append(f"{prefix}: missing, no tensor of this expert's projection is there")
                    continue
                self.use(info)
                self._check_shape(info, shape)
                if self.family.clamped and not info.has_bias:
                    self.problems.append(f"{prefix}.bias: missing")
            found.append(tuple(trio))
        if all(info is not None for trio in found for info in trio):
            self.plan.experts.append(ExpertsPlan(name, tuple(found)))

    def _naming(self, name: str, num_experts: int):
        """The naming of this layer's experts that most of the checkpoint's names follow."""
        options = [(base, names) for base in self.family.checkpoint_names(name) for names in self.family.projections]

        def count(option: tuple[str, tuple[str, str, str]]) -> int:
            base, names = option
            known = (f"{base}.{e}.{names[i]}" for e in range(num_experts) for i in range(3))
            return sum(name in self.infos or name in self.faulty for name in known)

        base, names = max(options, key=count)
        return lambda expert, index: f"{base}.{expert}.{names[index]}"

    def _check_shape(self, info: LinearInfo, shape: tuple[int, int]) -> None:
        stored = (info.out_features, info.in_features)
        if stored != tuple(shape):
            self.problems.append(
                f"{info.name}: [out_features, in_features] is {list(stored)} in the file, {list(shape)} by config.json"
            )

    def _info(self, module: str) -> LinearInfo | None:
        for name in self.family.checkpoint_names(module):
            if name in self.infos:
                return self.infos[name]
        return None

    def add_linear(self, name: str, module: nn.Linear) -> bool:
        """Plans a quantized linear; a dense one is left to `add_tensor`, parameter by parameter."""
        info = self._info(name)
        if info is None or info.format == "dense" or name.endswith(self.family.read_weights):
            return False
        self.use(info)
        self._check_shape(info, (module.out_features, module.in_features))
        if module.bias is not None and not info.has_bias:
            self.problems.append(f"{info.name}.bias: missing")
        self.plan.linears.append((name, info))
        return True

    def add_tensor(self, name: str, tensor: torch.Tensor, config) -> None:
        stored = next((n for n in self.family.checkpoint_names(name) if n in self.checkpoint.headers), None)
        module, _, kind = name.rpartition(".")
        if any(n in self.faulty for n in self.family.checkpoint_names(module)):
            return
        if name == "lm_head.weight" and getattr(config, "tie_word_embeddings", False):
            self.plan.tied.append(name)
            if stored is not None:
                self.used.add(stored)
                self.plan.tensors[name] = stored
            return
        if stored is None:
            info = self._info(module) if kind == "weight" else None
            if info is None or info.format == "dense":
                self.problems.append(f"{self.family.checkpoint_names(name)[0]}: missing")
                return
            self.use(info)
            self._check_shape(info, tuple(tensor.shape))
            self.plan.dequantized.append((name, info))
            return
        header = self.checkpoint.headers[stored]
        self.used.add(stored)
        if tuple(header.shape) != tuple(tensor.shape):
            self.problems.append(
                f"{stored}: shape is {list(header.shape)} in the file and {list(tensor.shape)} by config.json"
            )
            return
        self.plan.tensors[name] = stored

    def find_unknown(self, num_hidden_layers: int) -> None:
        for name in self.checkpoint.headers:
            if name in self.used or self.family.is_ignored(name, num_hidden_layers):
                continue
            if name.rpartition(".")[0] in self.faulty:
                continue
            self.problems.append(f"{name}: unknown, nothing in a {self.family.model_type} model takes it")
