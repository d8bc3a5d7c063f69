"""The experts of one MoE layer as a torch module that stands where transformers' experts module stood.

Experts that share a spec go to one backend as one pack. What remains (experts with an 8-bit or 16-bit projection,
or another group size) is put together from single linears. The parts of a mixed layer are added in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from int4moe_ipex.backends.base import ExpertsSpec, ExpertWeights, LinearSpec, LinearWeights, RunConfig
from int4moe_ipex.backends.select import Choice, Wish, choose
from int4moe_ipex.canonical import CanonicalWeight, Weight
from int4moe_ipex.cpu import CpuFeatures
from int4moe_ipex.errors import BackendError
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.moe.gradients import refuse_gradients
from int4moe_ipex.moe.linear import build_linear
from int4moe_ipex.moe.routing import check_routing, run_grouped

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True, eq=False)
class StoredExpert:
    """One expert as read from a checkpoint: (weight, bias) for gate (None without a gate), up and down."""

    gate: tuple[Weight, torch.Tensor | None] | None
    up: tuple[Weight, torch.Tensor | None]
    down: tuple[Weight, torch.Tensor | None]

    def projections(self) -> list[tuple[Weight, torch.Tensor | None]]:
        return [p for p in (self.gate, self.up, self.down) if p is not None]

    @property
    def is_int4(self) -> bool:
        return all(isinstance(weight, CanonicalWeight) for weight, _ in self.projections())

    def signature(self) -> tuple:
        """Equal for experts that one pack can hold: zeros and perms may be there in some and not in others."""
        specs = (None if p is None else LinearSpec.of(*p) for p in (self.gate, self.up, self.down))
        return tuple(None if s is None else replace(s, symmetric=True, act_order=False) for s in specs)

    def weights(self) -> ExpertWeights:
        gate = None if self.gate is None else LinearWeights(*self.gate)
        return ExpertWeights(gate, LinearWeights(*self.up), LinearWeights(*self.down))


def experts_spec(experts: Sequence[StoredExpert], activation: Activation) -> ExpertsSpec:
    """The spec of experts with one signature: symmetric if all are, act_order if any is.

    Raises:
        BackendError: gate, up and down do not fit together.
    """

    def merged(name: str) -> LinearSpec | None:
        parts = [getattr(e, name) for e in experts]
        if parts[0] is None:
            return None
        specs = [LinearSpec.of(*p) for p in parts]
        return replace(specs[0], symmetric=all(s.symmetric for s in specs), act_order=any(s.act_order for s in specs))

    gate, up, down = (merged(name) for name in PROJECTIONS)
    if down.in_features != up.out_features or (gate is not None and gate.out_features != up.out_features):
        raise BackendError(f"projections do not fit together: gate {gate}, up {up}, down {down}")
    return ExpertsSpec(
        num_experts=len(experts),
        hidden_size=up.in_features,
        intermediate_size=up.out_features,
        gate=gate,
        up=up,
        down=down,
        activation=activation,
        shared_perm=all(_same_perm(e) for e in experts),
    )


def _same_perm(expert: StoredExpert) -> bool:
    if expert.gate is None:
        return True
    gate, up = expert.gate[0].perm, expert.up[0].perm
    if gate is None or up is None:
        return gate is up
    return torch.equal(gate, up)


class ExpertsPack:
    """Experts of one spec on one backend; `local` maps id + 1 to the id within the pack, -1 where it has none."""

    def __init__(self, choice: Choice, packed, ids: Sequence[int], num_experts: int):
        self.choice, self.packed, self.ids = choice, packed, tuple(ids)
        self.local = None
        if self.ids != tuple(range(num_experts)):
            self.local = torch.full((num_experts + 2,), -1, dtype=torch.int64)
            self.local[torch.tensor(self.ids) + 1] = torch.arange(len(self.ids))

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        if self.local is not None:
            top_k_index = self.local[top_k_index.long() + 1]
        y = self.choice.backend.experts_forward(self.packed, x, top_k_index, top_k_weights)
        return refuse_gradients(y, x, top_k_weights)


class ComposedExpert(nn.Module):
    """One expert made of single linears, each int4 or dense; float32 in between. x [m, H] -> [m, H] float32."""

    def __init__(self, expert: StoredExpert, activation: Activation, cpu: CpuFeatures, run: RunConfig, backend: Wish):
        super().__init__()
        self.activation = activation
        wide = replace(run, dtype=torch.float32)

        def build(stored: tuple[Weight, torch.Tensor | None]) -> nn.Module:
            # A 16-bit weight stays at 16 bits when the activations are; int4 ones take float32 at no cost.
            return build_linear(*stored, cpu, wide if isinstance(stored[0], CanonicalWeight) else run, backend)

        self.gate = None if expert.gate is None else build(expert.gate)
        self.up = build(expert.up)
        self.down = build(expert.down)

    @classmethod
    def of_parts(cls, activation: Activation, gate: nn.Module | None, up: nn.Module, down: nn.Module) -> ComposedExpert:
        """One made of linears that are built already."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.activation, made.gate, made.up, made.down = activation, gate, up, down
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        gate = None if self.gate is None else self.gate(x)
        return self.down(self.activation.apply(gate, self.up(x)))


class Int4Experts(nn.Module):
    """All experts of one MoE layer.

    Args:
        experts: one StoredExpert per expert. The list is emptied as it is packed, so that a layer is never held twice.
        activation: between up and down.
        cpu, run, backend: what chooses the backend (see backends/select.py).

    Raises:
        BackendError: no allowed backend can run the layer.
    """

    def __init__(
        self,
        experts: list[StoredExpert],
        activation: Activation,
        cpu: CpuFeatures,
        run: RunConfig,
        backend: Wish = "auto",
    ):
        super().__init__()
        self.num_experts = len(experts)
        self.hidden_size = experts[0].up[0].in_features
        self.packs: list[ExpertsPack] = []
        self.composed = nn.ModuleDict()
        groups: dict[tuple, list[int]] = {}
        rest: list[int] = []
        for index, expert in enumerate(experts):
            if expert.is_int4:
                groups.setdefault(expert.signature(), []).append(index)
            else:
                rest.append(index)
        for ids in groups.values():
            spec = experts_spec([experts[i] for i in ids], activation)
            choice = choose(spec, cpu, run, backend)
            packed = choice.pack_experts(spec, _drain(experts, ids))
            self.packs.append(ExpertsPack(choice, packed, ids, self.num_experts))
        for index in rest:
            self.composed[str(index)] = ComposedExpert(experts[index], activation, cpu, run, backend)
            experts[index] = None
        experts.clear()

    @classmethod
    def of_parts(
        cls, num_experts: int, hidden_size: int, packs: list[ExpertsPack], composed: dict[str, ComposedExpert]
    ) -> Int4Experts:
        """One made of parts that are packed already, as a prepacked store has them."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.num_experts, made.hidden_size, made.packs = num_experts, hidden_size, packs
        made.composed = nn.ModuleDict(composed)
        return made

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], top_k_index and top_k_weights [T, k] -> [T, H] in x's dtype; see `Backend.experts_forward`.

        Raises:
            RoutingError: ids outside -1..num_experts, or wrong shapes.
        """
        if len(self.packs) == 1 and not self.composed:
            return self.packs[0].forward(x, top_k_index, top_k_weights)
        ids = check_routing(x, top_k_index, top_k_weights, self.num_experts)
        total = torch.zeros(x.shape, dtype=torch.float32)
        for pack in self.packs:
            total += pack.forward(x, ids, top_k_weights).float()
        if self.composed:
            others = torch.tensor([str(e) in self.composed for e in range(self.num_experts)] + [False, False])
            total += run_grouped(
                x.float(),
                torch.where(others[ids], ids, -1),
                top_k_weights,
                self.num_experts,
                lambda expert, rows: self.composed[str(expert)](rows),
            )
        return total.to(x.dtype)

    def extra_repr(self) -> str:
        packs = ", ".join(f"{len(p.ids)} on {p.packed.path}" for p in self.packs)
        return f"num_experts={self.num_experts}, {packs or 'none packed'}, {len(self.composed)} composed"


def _drain(experts: list, ids: Sequence[int]):
    for index in ids:
        expert, experts[index] = experts[index], None
        yield expert.weights()
