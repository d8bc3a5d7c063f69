"""What a checkpoint holds, layer by layer, for `int4moe inspect`: read from headers and g_idx alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from int4moe_ipex import formats
from int4moe_ipex.checkpoint.files import Checkpoint
from int4moe_ipex.errors import CheckpointError, MissingTensorsError, UnsupportedModelError
from int4moe_ipex.formats import act_order
from int4moe_ipex.formats.base import LinearInfo
from int4moe_ipex.models.families import family_of
from int4moe_ipex.packing.store import Store

LAYER = re.compile(r"^(.*?\blayers\.(\d+))\.(.+)$")
EXPERT = re.compile(r"\bexperts\.(\d+)\.")


@dataclass
class ModuleGroup:
    """Modules of one layer that are alike but for the expert's number.

    name is relative to the layer, with `*` for the expert; shape is [out_features, in_features]; act_order says that
    a g_idx other than the trivial one is stored; nbytes is the sum of the stored bytes.
    """

    name: str
    count: int
    format: str
    bits: int
    shape: tuple[int, int]
    group_size: int
    symmetric: bool
    zero_convention: str
    act_order: bool
    scales_dtype: str | None
    bias: bool
    nbytes: int


@dataclass
class LayerSummary:
    """One decoder layer: how many experts it stores, and its linears grouped."""

    name: str
    experts: int
    modules: list[ModuleGroup] = field(default_factory=list)
    nbytes: int = 0


@dataclass
class Summary:
    """A whole checkpoint. problems are what `load` would refuse, warnings what it would only report."""

    path: str
    model_type: str | None
    supported: bool
    quant_method: str | None
    layers: list[LayerSummary] = field(default_factory=list)
    other: list[ModuleGroup] = field(default_factory=list)
    nbytes: int = 0
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(path: str | Path) -> Summary:
    """Reads a folder's headers; tensors and labels at fault become `problems` instead of an exception.

    Raises:
        CheckpointError: the folder cannot be read as a checkpoint at all.
    """
    checkpoint = Checkpoint.open(path, collect=True)
    model_type = checkpoint.config.get("model_type")
    summary = Summary(
        path=str(checkpoint.path),
        model_type=model_type,
        supported=True,
        quant_method=(checkpoint.quantization or {}).get("quant_method"),
        nbytes=sum(header.nbytes for header in checkpoint.headers.values()),
        warnings=list(checkpoint.warnings),
        problems=list(checkpoint.problems),
    )
    try:
        family_of(checkpoint.config, checkpoint.quantization)
    except UnsupportedModelError as error:
        summary.supported = False
        summary.problems.append(str(error))
    try:
        infos = formats.describe(checkpoint)
    except MissingTensorsError as error:
        summary.problems += error.problems
        return summary
    except CheckpointError as error:
        summary.problems.append(str(error))
        return summary
    summary.warnings += sorted({w for info in infos.values() for w in info.warnings})
    _add_layers(summary, checkpoint, infos)
    return summary


def _add_layers(summary: Summary, checkpoint: Checkpoint, infos: Mapping[str, LinearInfo]) -> None:
    layers: dict[str, LayerSummary] = {}
    experts: dict[str, set[str]] = {}
    groups: dict[tuple, ModuleGroup] = {}
    for name, info in infos.items():
        match = LAYER.match(name)
        layer = match.group(1) if match else ""
        inner = match.group(3) if match else name
        expert = EXPERT.search(inner)
        if expert:
            experts.setdefault(layer, set()).add(expert.group(1))
            inner = EXPERT.sub("experts.*.", inner)
        try:
            permuted = _is_permuted(checkpoint, info)
        except CheckpointError as error:
            summary.problems.append(str(error))
            permuted = True
        group = ModuleGroup(
            name=inner,
            count=0,
            format=info.format,
            bits=info.bits,
            shape=(info.out_features, info.in_features),
            group_size=info.group_size,
            symmetric=info.symmetric,
            zero_convention=info.zero_convention,
            act_order=permuted,
            scales_dtype=None if info.scales_dtype is None else str(info.scales_dtype).removeprefix("torch."),
            bias=info.has_bias,
            nbytes=0,
        )
        key = (layer, *asdict(group).values())
        if key not in groups:
            groups[key] = group
            if match:
                layers.setdefault(layer, LayerSummary(layer, 0)).modules.append(group)
            else:
                summary.other.append(group)
        groups[key].count += 1
        groups[key].nbytes += info.nbytes
    for name, layer in layers.items():
        layer.experts = len(experts.get(name, ()))
        layer.nbytes = sum(group.nbytes for group in layer.modules)
    summary.layers = sorted(layers.values(), key=lambda layer: int(LAYER.match(layer.name + ".x").group(2)))


def _is_permuted(checkpoint: Checkpoint, info: LinearInfo) -> bool:
    names = [name for suffix, name in info.tensors.items() if suffix in ("g_idx", "weight_g_idx")]
    if not names:
        return False
    groups = -(-info.in_features // info.group_size)
    return act_order.from_g_idx(checkpoint.tensor(names[0]), info.group_size, groups, names[0]).perm is not None


@dataclass(frozen=True)
class StoredModule:
    """One module of a store; name is relative to its layer, what is its kind and layout in words."""

    layer: str
    name: str
    what: str
    nbytes: int


@dataclass(frozen=True)
class StoreSummary:
    """A prepacked store, from its manifest and headers."""

    path: str
    source: str
    dtype: str
    nbytes: int
    layouts: dict[str, int]
    modules: list[StoredModule]
    other_nbytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize_store(path: str | Path) -> StoreSummary:
    """What a store holds, by module.

    Raises:
        StoreError: it is damaged or of another version.
    """
    store = Store.open(path)
    manifest = store.manifest

    def nbytes(names: Iterable[str]) -> int:
        return sum(store.files.headers[name].nbytes for name in names)

    modules = []
    for name, record in manifest["modules"].items():
        linears = [part for parts in record.get("composed", {}).values() for part in parts.values()]
        parts = [*record["packs"], *linears] if record["kind"] == "experts" else [record]
        layouts = ", ".join(sorted({part.get("layout", "dense") for part in parts}))
        what = f"{record['num_experts']} experts, {layouts}" if record["kind"] == "experts" else layouts
        match = LAYER.match(name)
        layer, inner = (match.group(1), match.group(3)) if match else ("other linears", name)
        size = sum(nbytes(part["tensors"].values()) for part in parts)
        modules.append(StoredModule(layer, inner, what, size))
    return StoreSummary(
        path=str(store.path),
        source=str(store.source),
        dtype=manifest["dtype"],
        nbytes=sum(file["bytes"] for file in manifest["files"].values()),
        layouts=manifest["layouts"],
        modules=sorted(modules, key=lambda module: [int(n) for n in re.findall(r"\d+", module.layer)] or [1 << 30]),
        other_nbytes=nbytes(manifest["tensors"]),
    )
