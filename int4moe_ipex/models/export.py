"""A checkpoint of any supported format written again as compressed-tensors pack-quantized, which other tools read.

Int4 linears keep codes, scales and zero points bit for bit. Everything else keeps its stored bytes, except 8-bit
linears, which become what they mean in float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import int4moe_ipex
from int4moe_ipex import formats
from int4moe_ipex.canonical import CanonicalWeight, Weight
from int4moe_ipex.checkpoint.files import INDEX_NAME, Checkpoint
from int4moe_ipex.errors import FormatError, StoreError
from int4moe_ipex.models.loader import Progress
from int4moe_ipex.models.stored import Written
from int4moe_ipex.packing import store as files

SHARD_BYTES = 2 << 30
ACT_ORDER = (
    "the checkpoint has act-order (a g_idx), which compressed-tensors reads before 0.19 only; later releases refuse it "
    "(actorder='group' has been removed)"
)


def write_compressed_tensors(
    path: str | Path, out: str | Path, *, force: bool = False, progress: Progress | None = None
) -> Written:
    """Writes the checkpoint at `path` into the folder `out`. Memory peaks at one shard.

    Raises:
        StoreError: `out` exists (see `write_store`) or cannot be written, or `path` is a store.
        FormatError: a linear that compressed-tensors has no way to say, by name; or no quantized linear at all.
        CheckpointError and its kinds: as for `load`.
    """
    if files.is_store(path):
        raise StoreError(f"{path}: is a store; give the checkpoint that it was made from")
    checkpoint = Checkpoint.open(path)
    infos = formats.describe(checkpoint)
    if all(info.format == "dense" for info in infos.values()):
        raise FormatError(f"{path}: has no quantized linear; there is nothing to convert")
    with files.new_folder(Path(out), force) as folder:
        schemes: dict[str, Any] = {}
        shards = _Shards(folder)
        for name, tensor in _tensors(checkpoint, infos, schemes, progress):
            shards.add(name, tensor)
        nbytes = shards.finish()
        packed = any(isinstance(weight, CanonicalWeight) for weight in schemes.values())
        label = formats.compressed_tensors_config(schemes) if packed else None
        files.copy_small_files(checkpoint.path, folder, label)
        source = {"int4moe_ipex": int4moe_ipex.__version__, "source": str(checkpoint.path.absolute())}
        (folder / files.EXPORTED).write_text(json.dumps(source, indent=1), encoding="utf-8")
    int4 = [weight for weight in schemes.values() if isinstance(weight, CanonicalWeight)]
    counts = {"int4": len(int4), "dense": len(schemes) - len(int4)}
    warnings = (ACT_ORDER,) if any(weight.perm is not None for weight in int4) else ()
    return Written(Path(out).expanduser().absolute(), nbytes, counts, warnings)


def _tensors(
    checkpoint: Checkpoint, infos: dict[str, formats.LinearInfo], schemes: dict[str, Any], progress: Progress | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the new checkpoint in the old one's order; `schemes` gets what each linear became, without its
    bytes."""
    owner = {stored: name for name, info in infos.items() for stored in info.tensors.values()}
    done: set[str] = set()
    for stored in checkpoint.headers:
        name = owner.get(stored)
        if name is None:
            yield stored, checkpoint.tensor(stored)
            continue
        if name in done:
            continue
        done.add(name)
        weight, bias = formats.read_linear(checkpoint, infos[name])
        try:
            tensors = formats.to_compressed_tensors(weight, bias)
        except FormatError as error:
            raise FormatError(f"{name}: {error}") from None
        for suffix, tensor in tensors.items():
            yield f"{name}.{suffix}", tensor
        schemes[name] = _without_bytes(weight)
        if progress is not None:
            progress(len(done), len(infos), name)


def _without_bytes(weight: Weight) -> Weight:
    tensors = {field: value for field, value in vars(weight).items() if isinstance(value, torch.Tensor)}
    return replace(weight, **{field: tensor.to("meta") for field, tensor in tensors.items()})


class _Shards:
    """safetensors files with an index, as transformers writes them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.waiting: dict[str, torch.Tensor] = {}
        self.waiting_bytes = self.nbytes = 0
        self.places: dict[str, int] = {}
        self.count = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self.waiting and self.waiting_bytes + tensor.nbytes > SHARD_BYTES:
            self.flush()
        self.waiting[name] = tensor
        self.waiting_bytes += tensor.nbytes

    def flush(self) -> None:
        from safetensors.torch import save_file

        self.count += 1
        self.places |= dict.fromkeys(self.waiting, self.count)
        file = self.folder / f"part-{self.count}"
        # A copy each: views of one mapped file count as shared memory, which safetensors refuses.
        save_file({name: t.clone() for name, t in self.waiting.items()}, file, metadata={"format": "pt"})
        self.nbytes += self.waiting_bytes
        self.waiting, self.waiting_bytes = {}, 0

    def finish(self) -> int:
        """Names the shards, writes the index; the bytes of all tensors."""
        self.flush()
        if self.count == 1:
            (self.folder / "part-1").rename(self.folder / "model.safetensors")
            return self.nbytes
        names = {n: f"model-{n:05d}-of-{self.count:05d}.safetensors" for n in range(1, self.count + 1)}
        for number, name in names.items():
            (self.folder / f"part-{number}").rename(self.folder / name)
        index = {
            "metadata": {"total_size": self.nbytes},
            "weight_map": {tensor: names[number] for tensor, number in self.places.items()},
        }
        (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")
        return self.nbytes
