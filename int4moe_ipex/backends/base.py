"""What a backend is: one signature for every engine.

A backend says whether it can run a module (`support_*`), packs canonical weights into its own layout
(`pack_*`), runs it (`*_forward`) and gives the canonical weights back (`unpack_*`, for `int4moe verify`).
It never falls back by itself: choosing is `select.py`'s work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from int4moe_ipex.canonical import CanonicalWeight
from int4moe_ipex.cpu import CpuFeatures
from int4moe_ipex.errors import UnsupportedModelError
from int4moe_ipex.moe.activations import Activation


@dataclass(frozen=True)
class LinearSpec:
    """What has to be known of one int4 linear to choose a backend for it, before its bytes are read.

    group_size is already resolved (never -1); act_order says that a permutation other than the identity is there.
    """

    in_features: int
    out_features: int
    group_size: int
    symmetric: bool
    act_order: bool = False
    scales_dtype: torch.dtype = torch.float16
    bias: bool = False

    @classmethod
    def of(cls, weight: CanonicalWeight, bias: torch.Tensor | None = None) -> LinearSpec:
        return cls(
            in_features=weight.in_features,
            out_features=weight.out_features,
            group_size=weight.group_size,
            symmetric=weight.symmetric,
            act_order=weight.perm is not None,
            scales_dtype=weight.scales.dtype,
            bias=bias is not None,
        )


@dataclass(frozen=True)
class ExpertsSpec:
    """What has to be known of one layer's int4 experts. All experts share it (see moe/experts.py for mixed layers).

    gate is None for experts without a gate. shared_perm says that gate and up of each expert have the same
    permutation (experts may differ from each other). `symmetric` False means that some expert has zeros (others may
    still have None), `act_order` True that some expert has a perm.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    gate: LinearSpec | None
    up: LinearSpec
    down: LinearSpec
    activation: Activation = field(default_factory=Activation)
    shared_perm: bool = True


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """One int4 linear: canonical weight and bias [N] (float dtype as stored) or None."""

    weight: CanonicalWeight
    bias: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One int4 expert: up [I, H], down [H, I] and gate [I, H] (None for experts without a gate)."""

    gate: LinearWeights | None
    up: LinearWeights
    down: LinearWeights


def linear_tensors(linear: LinearWeights, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a canonical linear by name, such as `codes` and `scales`."""
    weight = linear.weight
    parts = {"codes": weight.codes, "scales": weight.scales, "zeros": weight.zeros, "perm": weight.perm}
    parts["bias"] = linear.bias
    return {prefix + name: tensor for name, tensor in parts.items() if tensor is not None}


@dataclass(frozen=True)
class RunConfig:
    """What the user's configuration says about one module.

    isa caps the instruction set (auto, scalar, avx2, avx2_vnni, avx512, amx); compute is w4a16 or w4a8;
    dtype is the activations' dtype (bfloat16, float16 or float32). forced says that the user named this backend
    (select.py sets it): a backend whose only path here is right but slow rejects the module unless it is forced.
    """

    isa: str = "auto"
    compute: str = "w4a16"
    dtype: torch.dtype = torch.bfloat16
    forced: bool = False


@dataclass(frozen=True)
class Supported:
    """The backend can run the module. path names the row that will run, such as `native/avx2/w4a16`."""

    path: str
    note: str = ""


@dataclass(frozen=True)
class Rejected:
    """The backend cannot run the module; reason is one sentence for a person."""

    reason: str


Verdict = Supported | Rejected


class Immutable:
    """What is packed never changes, so that a copy of a model shares it. It may hold addresses of this process."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce_ex__(self, protocol: int) -> Any:
        raise UnsupportedModelError(
            "packed weights cannot be pickled (pickle, torch.save, an argument of a process that is spawned): write a "
            "store with `int4moe convert` and load that, also in each process, as they share its pages"
        )


class Packed(Protocol):
    """A backend's packed weights. `tensors` are all the memory it holds, by name; `spec` is what it was packed from."""

    spec: Any
    path: str

    def tensors(self) -> dict[str, torch.Tensor]: ...


class Backend(Protocol):
    """One engine. Implementations are stateless objects; state lives in what `pack_*` returns."""

    name: str

    def support_experts(self, spec: ExpertsSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict: ...

    def support_linear(self, spec: LinearSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict: ...

    def pack_experts(self, spec: ExpertsSpec, experts: Iterable[ExpertWeights], run: RunConfig) -> Packed:
        """Packs num_experts experts, consuming the iterable one expert at a time so that few are alive at once."""
        ...

    def pack_linear(self, spec: LinearSpec, linear: LinearWeights, run: RunConfig) -> Packed: ...

    def experts_forward(
        self, packed: Packed, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """x [T, H], top_k_index [T, k] int32 or int64, top_k_weights [T, k] float -> y [T, H] in x's dtype.

        Ids of -1 and of num_experts contribute nothing, whatever their weight (even NaN); any other id outside
        0..num_experts-1 raises RoutingError. Repeated ids within a token each contribute. T may be 0. Strides are
        arbitrary. Accumulation is in float32, the sum over k in the order of k.
        """
        ...

    def linear_forward(self, packed: Packed, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N] in x's dtype; leading dimensions may be empty."""
        ...

    def unpack_experts(self, packed: Packed) -> Iterator[ExpertWeights]:
        """The canonical weights again, bit for bit, expert by expert."""
        ...

    def unpack_linear(self, packed: Packed) -> LinearWeights: ...
