"""Proof of a deployment: what is packed is what the checkpoint says, and what runs computes what it means.

Two independent checks per module. Every packed weight is unpacked and compared bit for bit with the canonical codes,
zeros, scales, permutation and bias that the checkpoint's bytes give; and the module's output on random inputs is
compared with the float32 reference computed from those. A fault in packing shows in the first, one in a kernel in
the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from int4moe_ipex import formats
from int4moe_ipex.backends.base import LinearWeights
from int4moe_ipex.canonical import SYMMETRIC_ZERO, CanonicalWeight, DenseWeight, Weight, dequantize, unpack_codes
from int4moe_ipex.config import Config
from int4moe_ipex.models.loader import Prepared
from int4moe_ipex.models.stored import store_of
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.moe.experts import Int4Experts
from int4moe_ipex.moe.linear import DenseLinear, Int4Linear
from int4moe_ipex.packing.store import Store

Stored = tuple[Weight, torch.Tensor | None]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Relative Frobenius error of a module's output against float32 that rounding alone stays below, with room for paths
# that keep scales at 16 bits or round between projections. A wrong zero or a swap gives 0.1 and more.
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 3e-3, torch.float32: 1e-4}
LIMIT_W4A8 = 3e-2
ROWS_OF_LINEAR = (1, 33)
TOKENS_PER_EXPERT = (1, 9)
SHOWN = 20


@dataclass
class ModuleResult:
    """One module: the path it runs on, what differs (one sentence each), and its largest relative output error."""

    module: str
    path: str
    weights: int = 0
    differs: list[str] = field(default_factory=list)
    output_error: float | None = None
    limit: float | None = None

    @property
    def good(self) -> bool:
        return not self.differs


def verify(
    model: nn.Module,
    prepared: Prepared,
    dtype: torch.dtype,
    progress: Callable[[int, int, str], None] | None = None,
) -> Iterator[ModuleResult]:
    """Each module that holds weights of the checkpoint, compared with `prepared.checkpoint`.

    Args:
        model: as `load` gives it, from the checkpoint or from a store made of it.
        prepared: the source, `models.loader.prepare(path, settings)`.
        dtype: of the activations, for the inputs and for the limits.
    """
    plan = prepared.plan
    total = len(plan.linears) + len(plan.experts) + 1
    done = 0
    for name, info in plan.linears:
        stored = formats.read_linear(prepared.checkpoint, info)
        yield _linear(name, model.get_submodule(name), stored, dtype)
        done += 1
        if progress:
            progress(done, total, name)
    for experts in plan.experts:
        trios = (tuple(formats.read_linear(prepared.checkpoint, info) for info in trio) for trio in experts.experts)
        module = model.get_submodule(experts.module)
        yield _experts(experts.module, module, trios, prepared.activation, dtype)
        done += 1
        if progress:
            progress(done, total, experts.module)
    yield _rest(model, prepared)


def stored_files(path: str | Path, settings: Config) -> Iterator[ModuleResult]:
    """For a model that comes from a store: its files compared with what `convert` wrote, by their SHA-256."""
    folder = store_of(path, settings)
    if folder is not None:
        store = Store.open(folder)
        differs = [f"{name}: its content is not what convert wrote" for name in store.damaged()]
        yield ModuleResult(str(folder), "store", differs=differs)


# --------------------------------------------------------------------------------------------------------- one module


def _linear(name: str, module: nn.Module, stored: Stored, dtype: torch.dtype) -> ModuleResult:
    result = ModuleResult(name, _path(module), weights=1)
    result.differs += differences("weight", held(module), stored)
    generator = torch.Generator().manual_seed(_seed(name))
    x = torch.randn(max(ROWS_OF_LINEAR), stored[0].in_features, generator=generator).to(dtype)
    want = _apply(stored, x.float())
    w4a8 = result.path.endswith("w4a8")
    pairs = [(f"{rows} rows", _run(module, x[:rows]), want[:rows]) for rows in ROWS_OF_LINEAR]
    _compare_outputs(result, pairs, dtype, w4a8)
    return result


def _experts(
    name: str, module: Int4Experts, trios: Iterator[tuple[Stored, ...]], activation: Activation, dtype: torch.dtype
) -> ModuleResult:
    result = ModuleResult(name, _path(module))
    num, hidden = module.num_experts, module.hidden_size
    generator = torch.Generator().manual_seed(_seed(name))
    k = min(4, num)
    rounds = [-(-num * per_expert // k) for per_expert in TOKENS_PER_EXPERT]
    tokens = max(rounds)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    # Every expert gets its share of the first tokens already, and no token has an expert twice.
    ids = (torch.arange(tokens).unsqueeze(1) * k + torch.arange(k)) % num
    shares = torch.rand(tokens, k, generator=generator) + 0.5
    want = torch.zeros(tokens, hidden)
    for expert, (trio, packed) in enumerate(zip(trios, _held_experts(module))):
        result.weights += len(trio)
        found = _expert_differences(trio, packed)
        result.differs += [f"expert {expert} {sentence}" for sentence in found]
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        inputs = x[rows].float()
        gate, up, down = trio
        inner = activation.apply(None if gate is None else _apply(gate, inputs), _apply(up, inputs))
        want.index_add_(0, rows, _apply(down, inner) * shares[rows, slots].unsqueeze(1))
    w4a8 = "w4a8" in result.path
    pairs = [(f"{n} tokens", _run(module, x[:n], ids[:n], shares[:n]), want[:n]) for n in dict.fromkeys(rounds)]
    _compare_outputs(result, pairs, dtype, w4a8)
    return result


def _expert_differences(trio: tuple[Stored, ...], packed: tuple[Stored | None, ...]) -> list[str]:
    gate, up, down = trio
    if gate is not None and not _same(packed[0], gate) and _same(packed[0], up) and _same(packed[1], gate):
        return ["gate_proj and up_proj are swapped", *differences("down_proj", packed[2], down)]
    found = []
    for projection, have, wanted in zip(PROJECTIONS, packed, trio):
        found += differences(projection, have, wanted)
    return found


def _rest(model: nn.Module, prepared: Prepared) -> ModuleResult:
    """Dense parameters (norms, embeddings, routers), which are rounded to the model's dtype and to nothing else."""
    result = ModuleResult("all other parameters", "dense")
    tensors = {name: (lambda s=stored: prepared.checkpoint.tensor(s)) for name, stored in prepared.plan.tensors.items()}
    for name, info in prepared.plan.dequantized:
        tensors[name] = lambda i=info: dequantize(formats.read_linear(prepared.checkpoint, i)[0])
    for name in prepared.plan.tied:
        tensors.pop(name, None)
    for name, read in tensors.items():
        module, _, attribute = name.rpartition(".")
        have, want = getattr(model.get_submodule(module), attribute).detach(), read()
        result.weights += 1
        # A value that is not a number is unequal to itself.
        if have.shape != want.shape or not torch.equal(have.view(-1), want.to(have.dtype).reshape(-1)):
            result.differs.append(f"{name} differs")
    return result


# ------------------------------------------------------------------------------------------------- what a module holds


def held(module: nn.Module) -> Stored:
    """The weight that a linear of ours holds, given back by its backend."""
    if isinstance(module, Int4Linear):
        linear = module.backend.unpack_linear(module.packed)
        return linear.weight, linear.bias
    if isinstance(module, DenseLinear):
        return DenseWeight(module.dense_weight), module.dense_bias
    raise TypeError(f"{type(module).__name__} is no linear of this package")


def _held_experts(module: Int4Experts) -> Iterator[tuple[Stored | None, ...]]:
    """Gate, up and down of each expert in the order of their ids."""
    streams = {}
    owner = {}
    for index, pack in enumerate(module.packs):
        streams[index] = pack.choice.backend.unpack_experts(pack.packed)
        owner |= dict.fromkeys(pack.ids, index)
    for expert in range(module.num_experts):
        if expert in owner:
            weights = next(streams[owner[expert]])
            yield tuple(_pair(part) for part in (weights.gate, weights.up, weights.down))
        else:
            composed = module.composed[str(expert)]
            parts = (composed.gate, composed.up, composed.down)
            yield tuple(None if part is None else held(part) for part in parts)


def _pair(linear: LinearWeights | None) -> Stored | None:
    return None if linear is None else (linear.weight, linear.bias)


def _path(module: nn.Module) -> str:
    if isinstance(module, Int4Linear):
        return module.packed.path
    if isinstance(module, Int4Experts):
        paths = [pack.packed.path for pack in module.packs] + ["composed"] * bool(module.composed)
        return " + ".join(dict.fromkeys(paths))
    return "dense"


# ---------------------------------------------------------------------------------------------------------- comparing


def differences(name: str, have: Stored | None, want: Stored | None) -> list[str]:
    """What differs between two linears, a sentence for each kind of tensor; empty when they are equal bit for bit."""
    if have is None or want is None:
        return [] if have is want else [f"{name}: {'missing' if have is None else 'not in the checkpoint'}"]
    (weight, bias), (wanted, wanted_bias) = have, want
    if isinstance(weight, CanonicalWeight) != isinstance(wanted, CanonicalWeight):
        return [f"{name}: one is int4, the other is not"]
    shape = (weight.out_features, weight.in_features)
    if shape != (wanted.out_features, wanted.in_features):
        return [f"{name}: shape {list(shape)} instead of {[wanted.out_features, wanted.in_features]}"]
    found = []
    if isinstance(weight, CanonicalWeight):
        found += _canonical_differences(name, weight, wanted)
    elif not torch.equal(weight.weight.float(), wanted.weight.float()):
        found.append(_count(f"{name} weight", weight.weight.float(), wanted.weight.float()))
    if (bias is None) != (wanted_bias is None) or (
        bias is not None and not torch.equal(bias.float(), wanted_bias.float())
    ):
        found.append(f"{name} bias differs")
    return found


def _canonical_differences(name: str, have: CanonicalWeight, want: CanonicalWeight) -> list[str]:
    found = []
    if not torch.equal(have.codes, want.codes):
        found.append(_count(f"{name} codes", unpack_codes(have.codes), unpack_codes(want.codes)))
    if have.group_size != want.group_size:
        return [*found, f"{name} group_size is {have.group_size} instead of {want.group_size}"]
    if have.scales.dtype != want.scales.dtype:
        found.append(f"{name} scales are {have.scales.dtype} instead of {want.scales.dtype}")
    elif not torch.equal(have.scales, want.scales):
        found.append(_count(f"{name} scales", have.scales, want.scales))
    zeros, wanted_zeros = (
        torch.full(w.scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8) if w.zeros is None else w.zeros
        for w in (have, want)
    )
    if not torch.equal(zeros, wanted_zeros):
        shift = (zeros.int() - wanted_zeros.int()).unique()
        by = f", each by {int(shift):+d}" if shift.numel() == 1 else ""
        found.append(_count(f"{name} zero points", zeros, wanted_zeros) + by)
    identity = torch.arange(want.in_features, dtype=torch.int32)
    if not torch.equal(*(identity if w.perm is None else w.perm for w in (have, want))):
        found.append(f"{name} permutation differs")
    return found


def _count(name: str, have: torch.Tensor, want: torch.Tensor) -> str:
    wrong = (have != want).nonzero()
    row, column = wrong[0].tolist()
    first = f"first at row {row}, column {column}: {have[row, column].item():g} instead of {want[row, column].item():g}"
    return f"{name}: {len(wrong)} of {have.numel()} differ, {first}"


def _same(have: Stored, want: Stored) -> bool:
    return not differences("", have, want)


def _apply(stored: Stored, x: torch.Tensor) -> torch.Tensor:
    weight, bias = stored
    return F.linear(x, dequantize(weight), None if bias is None else bias.float())


def _run(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return module(*args).float()


def relative_error(have: torch.Tensor, want: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `want`; infinite when a value is not finite."""
    if not torch.isfinite(have).all():
        return float("inf")
    return ((have - want).norm() / want.norm().clamp_min(1e-30)).item()


def _compare_outputs(
    result: ModuleResult, pairs: list[tuple[str, torch.Tensor, torch.Tensor]], dtype: torch.dtype, w4a8: bool
) -> None:
    result.limit = max(LIMITS[dtype], LIMIT_W4A8 if w4a8 else 0.0)
    errors = {what: relative_error(have, want) for what, have, want in pairs}
    result.output_error = max(errors.values())
    for what, error in errors.items():
        if not error <= result.limit:
            result.differs.append(f"output for {what} is off by {error:.2g} of its norm (limit {result.limit:g})")


def _seed(name: str) -> int:
    return sum(byte * 31**i for i, byte in enumerate(name.encode())) % 2**31


# ------------------------------------------------------------------------------------------------------------- logits


@dataclass(frozen=True)
class LogitsResult:
    """The logits of a prompt's last token against the float32 reference."""

    relative_error: float
    kl_divergence: float
    top5: list[int]
    reference_top5: list[int]
    limit: float

    @property
    def good(self) -> bool:
        return self.kl_divergence <= self.limit

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "good": self.good}


def last_logits(model: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [vocabulary] at the last token of token_ids [1, T]."""
    with torch.inference_mode():
        return model(input_ids=token_ids, use_cache=False).logits[0, -1].float()


def compare_logits(have: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> LogitsResult:
    """KL divergence (nats) of the next-token distribution from the reference's, and how far the logits are off."""
    divergence = F.kl_div(have.log_softmax(-1), want.log_softmax(-1), log_target=True, reduction="sum").item()
    return LogitsResult(
        relative_error=relative_error(have, want),
        kl_divergence=divergence if divergence == divergence else float("inf"),
        top5=have.topk(5).indices.tolist(),
        reference_top5=want.topk(5).indices.tolist(),
        limit=1e-4 if dtype == torch.float32 else 5e-2,
    )
