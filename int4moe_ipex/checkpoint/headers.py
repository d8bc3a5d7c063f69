"""The safetensors header: read and checked in full before any tensor is touched.

The format (huggingface/safetensors, README "Format"): 8 bytes little-endian N, then N bytes of JSON
`{name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {...}}`, then the data. Offsets count from the
end of the header, cover the data without a hole and do not overlap.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from int4moe_ipex.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
LFS_MAGIC = b"version https://git-lfs"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Where one tensor lies, without its data.

    Attributes:
        name: full name in the checkpoint.
        dtype, shape: as stored.
        file: the shard that holds it.
        start: byte position in that file.
        nbytes: stored bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


def read_headers(path: Path) -> list[TensorHeader]:
    """All tensor headers of one safetensors file, in the order of the file's JSON.

    Raises:
        CheckpointError: the file cannot be read, is truncated or longer than its header says, or its header breaks
            the format; the message names the file and, where there is one, the tensor.
    """
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            if LFS_MAGIC.startswith(prefix) and prefix:
                raise CheckpointError(
                    f"{path}: is a Git LFS pointer, not the weights; run `git lfs pull` in its folder"
                )
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: is truncated: {size} bytes are too few for a safetensors header")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: is not a safetensors file: its header would be {length} bytes long "
                    f"(at most {MAX_HEADER_BYTES} are allowed)"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path}: is truncated inside its header: {size} bytes, but the header alone ends at {8 + length}"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    entries = _parse_json(path, raw)
    data_start = 8 + length
    headers = [_header(path, name, entry, data_start) for name, entry in entries if name != "__metadata__"]
    _check_coverage(path, headers, data_start, size)
    return headers


def _parse_json(path: Path, raw: bytes) -> list[tuple[str, Any]]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise CheckpointError(f"{path}: its header names these twice: {', '.join(twice)}")
        return result

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its safetensors header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its safetensors header is not a JSON object")
    return list(header.items())


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _header(path: Path, name: str, entry: Any, data_start: int) -> TensorHeader:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: its header entry is not an object")
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in entry]
    if missing:
        raise CheckpointError(f"{where}: its header entry lacks {', '.join(missing)}")
    shape, offsets, label = entry["shape"], entry["data_offsets"], entry["dtype"]
    if not isinstance(shape, list) or not all(_is_size(dim) for dim in shape):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(f"{where}: data_offsets {offsets!r} are not [begin, end]")
    dtype = DTYPES.get(label) if isinstance(label, str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: dtype {label!r} cannot be read; known ones are {', '.join(DTYPES)}")
    begin, end = offsets
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise CheckpointError(
            f"{where}: {label} {tuple(shape)} takes {needed} bytes, but its data_offsets {offsets} span {end - begin}"
        )
    return TensorHeader(name, dtype, tuple(shape), path, data_start + begin, needed)


def _check_coverage(path: Path, headers: list[TensorHeader], data_start: int, size: int) -> None:
    position, previous = data_start, "the header"
    for header in sorted(headers, key=lambda h: (h.start, h.nbytes)):
        if header.start < position:
            raise CheckpointError(f"{path}: tensors {previous} and {header.name} overlap")
        if header.start > position:
            raise CheckpointError(
                f"{path}: {header.start - position} bytes between {previous} and {header.name} belong to no tensor"
            )
        position, previous = header.start + header.nbytes, header.name
    if position > size:
        raise CheckpointError(
            f"{path}: is truncated: its header describes {position} bytes, the file has {size}; download it again"
        )
    if position < size:
        raise CheckpointError(f"{path}: {size - position} bytes at its end belong to no tensor")
