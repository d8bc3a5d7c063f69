"""Packed weights as records of a store's manifest, and back.

Two layouts are stored. The native core's own is mapped and run as it is, on every machine and instruction set. All
other engines pack for the machine they run on: for them the canonical tensors are stored, and packed at opening.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from int4moe_ipex.backends.base import ExpertsSpec, ExpertWeights, LinearSpec, LinearWeights, Packed, linear_tensors
from int4moe_ipex.backends.by_tokens import ByTokensBackend, PackedByTokens
from int4moe_ipex.backends.select import Choice
from int4moe_ipex.canonical import CanonicalWeight
from int4moe_ipex.errors import StoreError
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.packing import layout

NATIVE = f"{layout.NAME}/{layout.VERSION}"
CANONICAL = "canonical/1"
PROJECTIONS = ("gate", "up", "down")
TENSORS = ("codes", "scales", "zeros", "perm", "bias")

Add = Callable[[str, torch.Tensor], str]
Get = Callable[[str], torch.Tensor]


def record_of(choice: Choice, packed: Packed, prefix: str, add: Add) -> dict[str, Any]:
    """The record of a packed linear or experts; its tensors go to `add` under names that start with `prefix`."""
    if isinstance(packed, PackedByTokens) and all(c.backend.name == "native" for _, c, _ in packed.parts):
        choice, packed = packed.parts[0][1:]
    spec = packed.spec
    if choice.backend.name == "native":
        biases = packed.bias_dtypes if isinstance(spec, ExpertsSpec) else (packed.bias_dtype,)
        return {
            "layout": NATIVE,
            "spec": spec_to_json(spec),
            "tensors": {"packed": add(f"{prefix}.packed", packed.blob)},
            "bias_dtypes": [None if b is None else _name(b) for b in biases],
        }
    tensors = {}
    for name, tensor in _canonical(choice, packed):
        tensors[name] = add(f"{prefix}.{name}", tensor)
    return {"layout": CANONICAL, "spec": spec_to_json(spec), "tensors": tensors}


def open_record(record: dict[str, Any], choice: Choice, get: Get) -> Packed:
    """The packed weights of a record on the chosen backend: mapped where the layouts agree, packed now otherwise.

    Raises:
        StoreError: the store's layout is not one that this release or the chosen backend has.
    """
    spec = spec_from_json(record["spec"])
    if record["layout"] == CANONICAL:
        return _pack_canonical(record, spec, choice, get)
    if record["layout"] != NATIVE:
        raise StoreError(f"layout {record['layout']} is unknown to this release, which has {NATIVE}; convert again")
    if isinstance(choice.backend, ByTokensBackend):
        parts = tuple((last, c, _open_native(record, spec, c, get)) for last, c in choice.backend.choices)
        return PackedByTokens(spec, parts, choice.path)
    return _open_native(record, spec, choice, get)


def other_engine(path: str) -> str:
    """The sentence for weights of the native layout that another engine is to run."""
    return (
        f"the weights are packed for the native backend ({NATIVE}), and {path} is to run: convert the checkpoint again "
        "with that backend, or drop the wish for it"
    )


def _open_native(record: dict[str, Any], spec: ExpertsSpec | LinearSpec, choice: Choice, get: Get) -> Packed:
    if choice.backend.name != "native":
        raise StoreError(other_engine(choice.path))
    from int4moe_ipex.backends import native

    _, isa, compute = choice.path.split("/")
    blob = get(record["tensors"]["packed"])
    dtypes = tuple(None if b is None else getattr(torch, b) for b in record["bias_dtypes"])
    if isinstance(spec, ExpertsSpec):
        return native.open_experts(spec, blob, dtypes, isa, compute)
    return native.open_linear(spec, blob, dtypes[0], isa, compute)


def _canonical(choice: Choice, packed: Packed) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(packed.spec, LinearSpec):
        yield from linear_tensors(choice.backend.unpack_linear(packed)).items()
        return
    for index, expert in enumerate(choice.backend.unpack_experts(packed)):
        for name in PROJECTIONS:
            linear = getattr(expert, name)
            if linear is not None:
                yield from linear_tensors(linear, f"{index}.{name}.").items()


def _pack_canonical(record: dict[str, Any], spec: ExpertsSpec | LinearSpec, choice: Choice, get: Get) -> Packed:
    names = record["tensors"]

    def linear(part: LinearSpec, prefix: str = "") -> LinearWeights:
        found = {key: get(names[prefix + key]) for key in TENSORS if prefix + key in names}
        bias = found.pop("bias", None)
        return LinearWeights(CanonicalWeight(**{"zeros": None, **found}, group_size=part.group_size), bias)

    if isinstance(spec, LinearSpec):
        return choice.pack_linear(spec, linear(spec))

    def experts() -> Iterator[ExpertWeights]:
        for index in range(spec.num_experts):
            parts = (None if p is None else linear(p, f"{index}.{n}.") for n, p in _projections(spec))
            yield ExpertWeights(*parts)

    return choice.pack_experts(spec, experts())


def _projections(spec: ExpertsSpec) -> tuple[tuple[str, LinearSpec | None], ...]:
    return tuple(zip(PROJECTIONS, (spec.gate, spec.up, spec.down)))


def spec_to_json(spec: ExpertsSpec | LinearSpec) -> dict[str, Any]:
    if isinstance(spec, LinearSpec):
        return {**asdict(spec), "scales_dtype": _name(spec.scales_dtype)}
    return {
        "num_experts": spec.num_experts,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "activation": asdict(spec.activation),
        "shared_perm": spec.shared_perm,
        **{name: None if part is None else spec_to_json(part) for name, part in _projections(spec)},
    }


def spec_from_json(data: dict[str, Any]) -> ExpertsSpec | LinearSpec:
    """The inverse of `spec_to_json`.

    Raises:
        StoreError: keys that this release does not know.
    """
    try:
        if "num_experts" not in data:
            return LinearSpec(**{**data, "scales_dtype": getattr(torch, data["scales_dtype"])})
        parts = {n: None if data[n] is None else spec_from_json(data[n]) for n in PROJECTIONS}
        return ExpertsSpec(**{**data, **parts, "activation": Activation(**data["activation"])})
    except (TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"the manifest describes weights in words that this release does not know: {error}") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
