"""A model to a prepacked store and back.

`write_store` packs a checkpoint module by module, as `load` does, and writes what it packed; `open_store` maps that
again. The manifest keeps, beside what packing/store.py says of files and source:

    dtype     what activations and dense tensors were prepared for
    layouts   packed layouts that occur, with their versions
    modules   name -> one linear, or the packs and the composed experts of a layer (see packing/records.py)
    tensors   parameters and buffers of the model that are stored under their own names
    tied      parameters that are the input embedding
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from int4moe_ipex import formats
from int4moe_ipex.backends.base import ExpertsSpec, LinearSpec, RunConfig
from int4moe_ipex.backends.select import Wish, choose
from int4moe_ipex.config import Config
from int4moe_ipex.cpu import CpuFeatures, detect
from int4moe_ipex.errors import BackendError, ConfigError, StoreError
from int4moe_ipex.models.families import activation_of, family_of
from int4moe_ipex.models.loader import MAPPED, LoadReport, Progress, dense_tensors, finish, naming, prepare
from int4moe_ipex.models.meta import fill_computed_buffers, hf_config_of, meta_model, put_tensor, replace_module, tie
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.moe.experts import ComposedExpert, ExpertsPack, Int4Experts, StoredExpert
from int4moe_ipex.moe.linear import DenseLinear, Int4Linear, build_linear
from int4moe_ipex.packing import store as files
from int4moe_ipex.packing.layout import allocate
from int4moe_ipex.packing.records import (
    CANONICAL,
    NATIVE,
    PROJECTIONS,
    open_record,
    other_engine,
    record_of,
    spec_from_json,
)
from int4moe_ipex.packing.store import Store, StoreWriter


@dataclass(frozen=True)
class Written:
    """A folder that was written: bytes of its weights, layout -> number of packs in it, and what to know of it."""

    path: Path
    nbytes: int
    layouts: dict[str, int]
    warnings: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------------ writing


def write_store(
    path: str | Path,
    out: str | Path,
    config: Any = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    **overrides: Any,
) -> Written:
    """Packs a checkpoint as `load(path, config)` would and writes it into the folder `out`.

    Memory peaks at one layer and one gigabyte of what waits to be written.

    Args:
        path, config, overrides, progress: as for `load`.
        out: a folder that does not exist yet; with force, an older store that gives way when the new one is there.

    Raises:
        StoreError: `out` exists or cannot be written, or the checkpoint changes meanwhile.
        CheckpointError, BackendError and their kinds: as for `load`.
    """
    settings = Config.load(config, **overrides)
    if files.is_store(path):
        raise StoreError(f"{path}: is a store already; give the checkpoint that it was made from")
    out = Path(out).expanduser().absolute()
    if out == Path(path).expanduser().absolute():
        raise StoreError(f"{out}: is the checkpoint itself; choose another folder for the store")
    prepared = prepare(path, settings)
    with files.new_folder(out, force) as folder:
        writer = StoreWriter(folder)
        manifest = _Packer(prepared, settings, writer, progress).manifest()
        files.copy_small_files(prepared.checkpoint.path, folder, {"quant_method": files.QUANT_METHOD})
        files.check_unchanged(manifest["source"])
        writer.finish(manifest)
    return Written(out, sum(file["bytes"] for file in writer.files.values()), manifest["layouts"])


class _Packer:
    def __init__(self, prepared: Any, settings: Config, writer: StoreWriter, progress: Progress | None):
        self.prepared, self.settings, self.writer, self.progress = prepared, settings, writer, progress
        self.cpu = detect()
        self.layouts: dict[str, int] = {}

    def manifest(self) -> dict[str, Any]:
        import int4moe_ipex

        checkpoint, plan = self.prepared.checkpoint, self.prepared.plan
        source = files.fingerprint(checkpoint, self.progress)
        dtype = getattr(torch, self.settings.dtype)
        dense = dense_tensors(self.prepared.model, checkpoint, plan, dtype)
        tensors = [self.writer.add(name, value) for name, value, _ in dense]
        modules: dict[str, dict[str, Any]] = {}
        total = len(plan.linears) + len(plan.experts)
        for name, info in plan.linears:
            modules[name] = self.linear(name, info)
            self.step(len(modules), total, name)
        for experts in plan.experts:
            modules[experts.module] = self.experts(experts)
            self.step(len(modules), total, experts.module)
        return {
            "int4moe_ipex": int4moe_ipex.__version__,
            "dtype": self.settings.dtype,
            "layouts": self.layouts,
            "source": source,
            "modules": modules,
            "tensors": tensors,
            "tied": plan.tied,
        }

    def step(self, done: int, total: int, name: str) -> None:
        if self.progress is not None:
            self.progress(done, total, name)

    def linear(self, name: str, info: Any) -> dict[str, Any]:
        weight, bias = formats.read_linear(self.prepared.checkpoint, info)
        bands = self.settings.bands(name)
        with naming(name):
            return self.linear_record(build_linear(weight, bias, self.cpu, bands[0].run, bands), name)

    def experts(self, plan: Any) -> dict[str, Any]:
        checkpoint = self.prepared.checkpoint
        read = [StoredExpert(*(formats.read_linear(checkpoint, info) for info in trio)) for trio in plan.experts]
        bands = self.settings.bands(plan.module)
        with naming(plan.module):
            module = Int4Experts(read, self.prepared.activation, self.cpu, bands[0].run, bands)
        packs = [
            {"ids": list(pack.ids), **self.record(pack.choice, pack.packed, f"{plan.module}.{number}")}
            for number, pack in enumerate(module.packs)
        ]
        composed = {
            expert: {
                projection: self.linear_record(linear, f"{plan.module}.composed.{expert}.{projection}")
                for projection in PROJECTIONS
                if (linear := getattr(parts, projection)) is not None
            }
            for expert, parts in module.composed.items()
        }
        return {
            "kind": "experts",
            "num_experts": module.num_experts,
            "hidden_size": module.hidden_size,
            "packs": packs,
            "composed": composed,
        }

    def linear_record(self, module: Int4Linear | DenseLinear, name: str) -> dict[str, Any]:
        if isinstance(module, Int4Linear):
            return {"kind": "int4", **self.record(module.choice, module.packed, name)}
        tensors = {"weight": module.dense_weight, "bias": module.dense_bias}
        stored = {key: self.writer.add(f"{name}.{key}", value) for key, value in tensors.items() if value is not None}
        return {"kind": "dense", "tensors": stored}

    def record(self, choice: Any, packed: Any, name: str) -> dict[str, Any]:
        record = record_of(choice, packed, name, self.writer.add)
        self.layouts[record["layout"]] = self.layouts.get(record["layout"], 0) + 1
        return record


# ------------------------------------------------------------------------------------------------------------ opening


def open_store(
    path: str | Path,
    settings: Config,
    *,
    source: str | Path | None = None,
    attn_implementation: str | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """The model of a store, as `load` gives it for the checkpoint: the same bits come out.

    Args:
        path: the store.
        settings: backend, isa and compute may differ from those of `convert`; dtype may not.
        source: the checkpoint that the store has to belong to; None for where it was when it was converted, if it is
            still there.

    Raises:
        StoreError: another version, layout, dtype or state of the source, or files that are not as they were written.
        BackendError: no allowed backend can run a module.
    """
    store = Store.open(path)
    store.check_source(None if source is None else Path(source))
    for layout in store.manifest["layouts"]:
        check_layout(store, layout)
    settings = _with_dtype_of(store, settings)
    hf_config = hf_config_of(store.path, family_of(store.files.config))
    model = meta_model(store.path, hf_config, getattr(torch, settings.dtype), attn_implementation)
    opener = _Opener(store, settings, activation_of(hf_config.to_dict()))
    modules = store.manifest["modules"]
    for number, (name, record) in enumerate(modules.items(), 1):
        bands = settings.bands(name)
        with naming(name), _naming_store(store, name):
            replace_module(model, name, opener.module(name, record, bands[0].run, bands))
        if progress is not None:
            progress(number, len(modules), name)
    for name in store.manifest["tensors"]:
        value = opener.get(name)
        put_tensor(model, name, value.clone() if value.nbytes < MAPPED else value)
    for name in store.manifest["tied"]:
        tie(model, name)
    fill_computed_buffers(model)
    finish(model, store.path, opener.report, settings, keep_attention=attn_implementation is not None)
    return model


def check_layout(store: Store, layout: str) -> None:
    """Raises StoreError for a layout, or a version of one, that this release does not have."""
    if layout not in (NATIVE, CANONICAL):
        raise StoreError(
            f"{store.path}: holds weights in layout {layout}, and this release has {NATIVE} and {CANONICAL}; "
            "convert the checkpoint again"
        )


def specs_of(store: Store) -> list[tuple[str, ExpertsSpec | LinearSpec]]:
    """(module name, spec) of every pack in a store, from its manifest alone."""
    found = []
    for name, record in store.manifest["modules"].items():
        linears = [part for parts in record.get("composed", {}).values() for part in parts.values()]
        for one in [*record.get("packs", ()), *linears, *([] if record["kind"] == "experts" else [record])]:
            if "spec" in one:
                found.append((name, spec_from_json(one["spec"])))
    return found


def problems_of(store: Store, settings: Config) -> list[str]:
    """What would make `open_store` refuse this store here, one sentence each, without reading its weights."""
    found: list[str] = []
    try:
        store.check_source()
        for layout in store.manifest["layouts"]:
            check_layout(store, layout)
        _with_dtype_of(store, settings)
        if NATIVE in store.manifest["layouts"]:
            for name, spec in specs_of(store):
                bands = settings.bands(name)
                choice = choose(spec, detect(), bands[0].run, bands)
                if not choice.path.startswith("native/"):
                    raise StoreError(f"{store.path}: {name}: {other_engine(choice.path)}")
    except BackendError:
        pass  # which doctor says of the module itself
    except StoreError as error:
        found.append(str(error))
    return found


def checkpoint_of(path: str | Path, source: str | Path | None = None) -> Path:
    """The checkpoint behind `path`: `path` itself, or where a store's source is (`source`, or as it was converted).

    Raises:
        StoreError: the source is gone, or has changed.
    """
    if not files.is_store(path):
        return Path(path)
    store = Store.open(path)
    folder = store.source if source is None else Path(source)
    if not (folder / "config.json").exists():
        raise StoreError(f"{path}: its checkpoint is not at {folder} (any more); say where with --source")
    store.check_source(folder)
    return folder


def _with_dtype_of(store: Store, settings: Config) -> Config:
    """The settings with the store's dtype where they ask for none."""
    dtype = store.manifest["dtype"]
    if settings.dtype == dtype:
        return settings
    origin = settings.origins().get("dtype", "default")
    if origin != "default":
        raise StoreError(
            f"{store.path}: was prepared for dtype {dtype}, and {origin} asks for {settings.dtype}; convert the "
            f"checkpoint again with --dtype {settings.dtype}"
        )
    return Config.load(settings, dtype=dtype)


@contextlib.contextmanager
def _naming_store(store: Store, module: str) -> Iterator[None]:
    """Errors of opening one module's record name store and module."""
    try:
        yield
    except StoreError as error:
        raise StoreError(f"{store.path}: {module}: {error}") from None
    except (KeyError, ValueError) as error:
        what = f"its record cannot be read ({type(error).__name__}: {error})"
        raise StoreError(f"{store.path}: {module}: {what}; convert the checkpoint again") from error


class _Opener:
    def __init__(self, store: Store, settings: Config, activation: Activation):
        self.store, self.activation = store, activation
        self.copies = settings.store.placement == "copy"
        self.cpu: CpuFeatures = detect()
        self.report = LoadReport()

    def get(self, name: str) -> torch.Tensor:
        mapped = self.store.tensor(name)
        if not self.copies:
            return mapped
        return allocate(mapped.nbytes).view(mapped.dtype).view(mapped.shape).copy_(mapped)

    def module(self, name: str, record: dict[str, Any], run: RunConfig, wish: Wish) -> nn.Module:
        if record["kind"] != "experts":
            return self.linear(name, record, run, wish)
        packs = []
        for part in record["packs"]:
            choice = choose(spec_from_json(part["spec"]), self.cpu, run, wish)
            packed = open_record(part, choice, self.get)
            packs.append(ExpertsPack(choice, packed, part["ids"], record["num_experts"]))
            self.report.add(name, packed, choice.rejected)
        composed = {expert: self.composed(name, parts, run, wish) for expert, parts in record["composed"].items()}
        return Int4Experts.of_parts(record["num_experts"], record["hidden_size"], packs, composed)

    def composed(self, name: str, parts: dict[str, Any], run: RunConfig, wish: Wish) -> ComposedExpert:
        wide = replace(run, dtype=torch.float32)
        linears = {
            projection: self.linear(name, part, wide if part["kind"] == "int4" else run, wish, report=False)
            for projection, part in parts.items()
        }
        return ComposedExpert.of_parts(self.activation, linears.get("gate"), linears["up"], linears["down"])

    def linear(
        self, name: str, record: dict[str, Any], run: RunConfig, wish: Wish, report: bool = True
    ) -> Int4Linear | DenseLinear:
        if record["kind"] == "dense":
            tensors = {key: self.get(stored) for key, stored in record["tensors"].items()}
            return DenseLinear(tensors["weight"], tensors.get("bias"), run.dtype)
        choice = choose(spec_from_json(record["spec"]), self.cpu, run, wish)
        packed = open_record(record, choice, self.get)
        if report:
            self.report.add(name, packed, choice.rejected)
        return Int4Linear(choice, packed)


def store_of(path: str | Path, settings: Config) -> Path | None:
    """The store that a load of `path` takes: `path` itself, the configuration's, or None for the checkpoint's files.

    Raises:
        ConfigError: two different ones.
    """
    configured = None if settings.store.path is None else Path(settings.store.path).expanduser()
    if not files.is_store(path):
        return configured
    if configured is not None and configured.absolute() != Path(path).expanduser().absolute():
        origin = settings.origins().get("store.path", "store.path")
        raise ConfigError(f"{origin}: store.path is {configured}, and {path} is another store; give one of them")
    return Path(path).expanduser()
