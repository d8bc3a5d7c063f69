"""From a checkpoint folder to a transformers model whose experts and int4 linears run on this package's backends.

The model is built on the meta device and filled by our own reader, layer by layer: a layer's experts are read,
packed and dropped before the next one is touched, so that loading peaks at the packed size plus one layer.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from int4moe_ipex import formats, threads
from int4moe_ipex.backends import onednn
from int4moe_ipex.canonical import dequantize
from int4moe_ipex.checkpoint.files import Checkpoint
from int4moe_ipex.config import Config
from int4moe_ipex.cpu import CpuFeatures, detect
from int4moe_ipex.errors import BackendError, CheckpointError, UnsupportedModelError
from int4moe_ipex.models.compact import make_compact
from int4moe_ipex.models.families import activation_of, family_of
from int4moe_ipex.models.fused import FusedLinear, fuse
from int4moe_ipex.models.meta import (
    fill_computed_buffers,
    hf_config_of,
    meta_model,
    put_tensor,
    replace_module,
    tie,
)
from int4moe_ipex.models.plan import LoadPlan, build_plan, own_tensors
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.moe.experts import Int4Experts, StoredExpert
from int4moe_ipex.moe.linear import Int4Linear, build_linear

log = logging.getLogger("int4moe_ipex")

Progress = Callable[[int, int, str], None]

# Dense tensors of this many bytes stay mapped; smaller ones are copied, so that they lie together.
MAPPED = 1 << 20


@dataclass
class LoadReport:
    """What a loaded model is made of; `model.int4moe_report`.

    Attributes:
        paths: path name (such as `native/avx2/w4a16`) -> module names that run on it.
        rejected: (row, reason) -> module names for which a row before the chosen one was rejected.
        warnings: one line each: disagreeing labels, a differing copy of a tied head.
        packed_nbytes: bytes of all packed weights.
        fused: transformers' classes whose forward the native core computes (see fused.py) -> how many modules.
        compact_linears, compact_nbytes: bfloat16 linears that have a copy in 12 bits (see compact.py), and its bytes.
    """

    paths: dict[str, list[str]] = field(default_factory=dict)
    rejected: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    packed_nbytes: int = 0
    fused: dict[str, int] = field(default_factory=dict)
    compact_linears: int = 0
    compact_nbytes: int = 0

    def add(self, module: str, packed: Any, rejected: tuple[tuple[str, str], ...]) -> None:
        self.paths.setdefault(packed.path, []).append(module)
        for row in rejected:
            self.rejected.setdefault(row, []).append(module)
        self.packed_nbytes += sum(t.numel() * t.element_size() for t in packed.tensors().values())


def load(
    path: str | Path,
    config: Any = None,
    *,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> nn.Module:
    """Loads a checkpoint folder as a transformers causal language model, ready for `generate`.

    Args:
        path: a local folder with config.json and safetensors files, or a prepacked store (`int4moe convert`). With
            `store: {path: ...}` in the configuration the store is opened, and path is the checkpoint it belongs to.
        config: a YAML file's path, a mapping, a `Config`, or None for the default (see config.py).
        dtype: of activations and dense weights: float32, bfloat16 or float16, as a name or a torch.dtype; None takes
            the configuration's (bfloat16 by default).
        attn_implementation: passed on to transformers.
        progress: called as (done, total, module name) for each module that is read.
        overrides: single keys of the configuration, such as backend="reference".

    Raises:
        CheckpointError and its kinds: files, formats or tensors at fault; all missing tensors are named.
        UnsupportedModelError: a family that is not supported.
        StoreError: a store of another version, layout or dtype, or of another state of the checkpoint.
        BackendError: no allowed backend can run a module.
    """
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    settings = Config.load(config, dtype=dtype, **overrides)
    threads.apply(settings.threads)
    onednn.configure(settings.onednn.lib)
    from int4moe_ipex.models import stored

    store = stored.store_of(path, settings)
    if store is not None:
        source = None if store == Path(path).expanduser() else path
        return stored.open_store(
            store, settings, source=source, attn_implementation=attn_implementation, progress=progress
        )
    with _without_collection():
        prepared = prepare(path, settings, attn_implementation)
        filler = _Filler(prepared.model, prepared.checkpoint, settings, detect(), progress, prepared.plan)
        filler.report.warnings += prepared.warnings
        filler.fill_tensors()
        filler.fill_linears()
        filler.fill_experts(prepared.activation)
    finish(
        prepared.model,
        prepared.checkpoint.path,
        filler.report,
        settings,
        keep_attention=attn_implementation is not None,
    )
    return prepared.model


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Python's cyclic collector would walk a growing heap of headers again and again, and find nothing to free."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass(frozen=True)
class Prepared:
    """A checkpoint matched with its model, from headers alone; model is on the meta device."""

    checkpoint: Checkpoint
    model: nn.Module
    plan: LoadPlan
    activation: Activation
    warnings: list[str]


def prepare(path: str | Path, settings: Config, attn_implementation: str | None = None) -> Prepared:
    """Everything that a load decides before it reads or allocates a tensor. Raises what `load` raises for that."""
    checkpoint = Checkpoint.open(path, collect=True)
    family = family_of(checkpoint.config, checkpoint.quantization)
    infos, problems = formats.survey(checkpoint)
    hf_config = hf_config_of(checkpoint.path, family)
    activation = activation_of(hf_config.to_dict())
    model = meta_model(checkpoint.path, hf_config, getattr(torch, settings.dtype), attn_implementation)
    plan = build_plan(model, family, checkpoint, infos, problems)
    warnings = [*checkpoint.warnings, *sorted({w for info in infos.values() for w in info.warnings})]
    return Prepared(checkpoint, model, plan, activation, warnings)


def dense_tensors(
    model: nn.Module, checkpoint: Checkpoint, plan: LoadPlan, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every tensor that is neither int4 nor tied: its name in the model, its value in the dtype that the model holds
    it in, and whether that is a view of the mapped file."""
    wide = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        wide |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    made = dict(own_tensors(model))

    def held(name: str, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        # A tensor that its class makes in a dtype of its own keeps that, as in transformers' loader.
        return value.to(torch.float32 if any(pattern in name for pattern in wide) else made[name].dtype)

    for name, stored in plan.tensors.items():
        if name not in plan.tied:
            tensor = checkpoint.tensor(stored)
            value = held(name, tensor)
            yield name, value, value is tensor
    for name, info in plan.dequantized:
        yield name, held(name, dequantize(formats.read_linear(checkpoint, info)[0])), False


class _Filler:
    """Fills a meta model by a plan; everything it makes is reachable from the model or dropped."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        settings: Config,
        cpu: CpuFeatures,
        progress: Progress | None,
        plan: LoadPlan,
    ):
        self.model, self.checkpoint, self.settings, self.cpu = model, checkpoint, settings, cpu
        self.dtype = getattr(torch, settings.dtype)
        self.plan, self.progress = plan, progress
        self.report = LoadReport()
        self.done, self.total = 0, len(plan.linears) + sum(len(e.experts) for e in plan.experts)

    def step(self, name: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, name)

    def fill_tensors(self) -> None:
        for name, value, mapped in dense_tensors(self.model, self.checkpoint, self.plan, self.dtype):
            # Embeddings and heads stay mapped: their pages are shared between processes and cost no time to load.
            put_tensor(self.model, name, value.clone() if mapped and value.nbytes < MAPPED else value)
        for name in self.plan.tied:
            self._tie(name)
        fill_computed_buffers(self.model)

    def _tie(self, name: str) -> None:
        embedding = self.model.get_input_embeddings().weight
        stored = self.plan.tensors.get(name)
        if stored is not None and not torch.equal(self.checkpoint.tensor(stored).to(embedding.dtype), embedding):
            warning = f"{stored} differs from the input embedding, which tie_word_embeddings says to use; it is used"
            self.report.warnings.append(warning)
            log.warning(warning)
        tie(self.model, name)

    def fill_linears(self) -> None:
        for name, info in self.plan.linears:
            weight, bias = formats.read_linear(self.checkpoint, info)
            bands = self.settings.bands(name)
            with naming(name):
                module = build_linear(weight, bias, self.cpu, bands[0].run, bands)
            if isinstance(module, Int4Linear):
                self.report.add(name, module.packed, module.choice.rejected)
            replace_module(self.model, name, module)
            self.step(name)

    def fill_experts(self, activation) -> None:
        for plan in self.plan.experts:
            bands = self.settings.bands(plan.module)
            stored = []
            for trio in plan.experts:
                stored.append(StoredExpert(*(formats.read_linear(self.checkpoint, info) for info in trio)))
                self.step(plan.module)
            with naming(plan.module):
                module = Int4Experts(stored, activation, self.cpu, bands[0].run, bands)
            for pack in module.packs:
                self.report.add(plan.module, pack.packed, pack.choice.rejected)
            replace_module(self.model, plan.module, module)


@contextlib.contextmanager
def naming(module: str) -> Iterator[None]:
    """Errors of choosing a backend name the module."""
    try:
        yield
    except BackendError as error:
        raise BackendError(f"{module}: {error}") from None


def finish(model: nn.Module, path: Path, report: LoadReport, settings: Config, keep_attention: bool) -> None:
    """The last steps of every load: nothing is left on the meta device, and what the core computes goes to it.

    keep_attention: the caller has chosen an attention implementation, which stays.
    """
    from transformers import GenerationConfig

    left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if left:
        raise CheckpointError(f"{path}: these were not filled: {', '.join(left)}")
    if (path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    if any(name.startswith("native/") for name in report.paths):
        report.fused = fuse(model, keep_attention=keep_attention)
        if settings.bfloat16_weights == "compact":
            linears = (module for module in model.modules() if isinstance(module, FusedLinear))
            report.compact_linears, report.compact_nbytes = make_compact(linears)
    model.config.name_or_path = str(path)
    model.int4moe_report = report
    model.save_pretrained = _no_save
    model.eval()


def _no_save(*args: Any, **kwargs: Any) -> None:
    raise UnsupportedModelError(
        "a packed model cannot be saved with save_pretrained, which would drop its experts; use `int4moe convert`"
    )
