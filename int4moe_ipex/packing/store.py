"""The prepacked store: a folder of safetensors files and a manifest, made once and memory-mapped at every start.

    int4moe_store.json         what was packed, in which layout, from which source files (written last)
    packed-00001.safetensors   packed buffers and all other parameters, every tensor on a 64-byte boundary
    config.json, tokenizer...  copied from the checkpoint, so that the folder stands alone

A store is written into a hidden folder beside its place and renamed when it is complete: there is no half store.
What the records of the manifest mean is in `packing/records.py` and `models/stored.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from int4moe_ipex.checkpoint.files import CONFIG_KEYS, PICKLE_SUFFIXES, QUANTIZATION_FILES, Checkpoint
from int4moe_ipex.checkpoint.headers import DTYPES
from int4moe_ipex.errors import StoreError

MANIFEST = "int4moe_store.json"
EXPORTED = "int4moe_export.json"  # marks a checkpoint that convert wrote, so that it may replace it
FORMAT = "int4moe_ipex prepacked store"
VERSION = 2  # 2: sealed
# What a manifest says beside its format, version and files; see models/stored.py.
KEYS = ("dtype", "layouts", "modules", "tensors", "tied")
# config.json of a store names this method: transformers refuses it by itself instead of guessing at the tensors.
QUANT_METHOD = "int4moe_ipex_store"
ALIGNMENT = 64  # of every tensor in its file: what the kernels need of a mapped buffer
HEADER_ALIGNMENT = 4096
SHARD_BYTES = 1 << 30
SMALL_FILE = 64 << 20  # anything beside the weights that is larger is no tokenizer
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def is_store(path: str | Path) -> bool:
    """Whether a folder is a prepacked store."""
    return (Path(path).expanduser() / MANIFEST).is_file()


# ------------------------------------------------------------------------------------------------------------ writing


class StoreWriter:
    """Collects tensors and writes them shard by shard into `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, dict[str, Any]] = {}
        self._waiting: list[tuple[str, torch.Tensor]] = []
        self._bytes = 0
        self._names: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Takes a tensor (no copy is made while it waits to be written) and gives back its name."""
        if name in self._names:
            raise StoreError(f"{name}: would be stored twice")
        self._names.add(name)
        self._waiting.append((name, tensor))
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes >= SHARD_BYTES:
            self.flush()
        return name

    def flush(self) -> None:
        if self._waiting:
            file = self.folder / f"packed-{len(self.files) + 1:05d}.safetensors"
            digest = write_safetensors(file, self._waiting)
            self.files[file.name] = {"bytes": file.stat().st_size, "sha256": digest}
            self._waiting, self._bytes = [], 0

    def finish(self, manifest: dict[str, Any]) -> None:
        """Writes what waits, and the manifest last."""
        self.flush()
        write_manifest(self.folder, {"format": FORMAT, "version": VERSION, "files": self.files, **manifest})


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Writes it with its seal; config.json is there already."""
    _write(folder / MANIFEST, [json.dumps({**content, "seal": _seal(folder, content)}, indent=1).encode()])


def _seal(folder: Path, manifest: dict[str, Any]) -> str:
    """SHA-256 of what decides how the weights are read: the manifest but for the seal, and config.json."""
    content = {key: value for key, value in manifest.items() if key != "seal"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    digest.update((folder / "config.json").read_bytes())
    return digest.hexdigest()


def write_safetensors(file: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A safetensors file whose tensors start on 64-byte boundaries, with filler tensors in the gaps; its SHA-256."""
    header: dict[str, Any] = {}
    parts: list[tuple[int, torch.Tensor | None]] = []
    position = 0
    for name, tensor in tensors:
        gap = -position % ALIGNMENT
        if gap:
            filler = {"dtype": "U8", "shape": [gap], "data_offsets": [position, position + gap]}
            header[f"__filler__.{file.stem}.{position}"] = filler
            parts.append((gap, None))
            position += gap
        nbytes = tensor.numel() * tensor.element_size()
        dtype = _NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, position + nbytes]}
        parts.append((nbytes, tensor))
        position += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    chunks = (bytes(nbytes) if tensor is None else _bytes_of(tensor) for nbytes, tensor in parts)
    return _write(file, [struct.pack("<Q", len(text)), text], chunks)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _write(file: Path, *groups: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    with open(file, "wb") as handle:
        for group in groups:
            for part in group:
                handle.write(part)
                digest.update(part)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Makes a file's content, or the names in a folder, last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def new_folder(out: Path, replace: bool = False) -> Iterator[Path]:
    """A hidden folder beside `out` that becomes `out` when the block ends well and vanishes when it does not.

    replace: an older store or export at `out` gives way at the very end.

    Raises:
        StoreError: `out` exists (and is to be kept), or its parent folder does not exist or cannot be written.
    """
    out = out.expanduser().absolute()
    if out.exists() and not replace:
        raise StoreError(f"{out}: exists already; choose another folder, or replace it with --force")
    if out.exists() and not (out.is_dir() and _is_ours(out)):
        raise StoreError(f"{out}: was not made by int4moe convert and is not replaced; choose another folder")
    _remove_stale(out)
    temporary = out.parent / f".{out.name}.partial-{os.getpid()}"
    if not out.parent.is_dir():
        raise StoreError(f"{out}: there is no folder {out.parent}; make it first")
    try:
        temporary.mkdir()
    except OSError as error:
        raise StoreError(f"{out}: cannot be made: {error.strerror}") from None
    try:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        if replace and out.exists():
            old = out.parent / f".{out.name}.old-{os.getpid()}"
            os.rename(out, old)
            try:
                os.rename(temporary, out)
            except OSError:
                os.rename(old, out)
                raise
            shutil.rmtree(old)
        else:
            os.rename(temporary, out)
        _sync(out.parent)
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error.strerror}") from error
    except SafetensorError as error:
        raise StoreError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    names = {file.name for file in folder.iterdir()}
    return not names or MANIFEST in names or EXPORTED in names


def _remove_stale(out: Path) -> None:
    """Removes what a killed conversion to the same place left."""
    for folder in out.parent.glob(f".{out.name}.partial-*"):
        number = folder.name.rpartition("-")[2]
        if number.isdigit() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def copy_small_files(source: Path, target: Path, quantization: dict[str, Any] | None) -> None:
    """Tokenizer, configs and licence: what is neither weights nor said about their quantization.

    quantization: what config.json is to say of it instead.
    """
    skipped = (".safetensors", *PICKLE_SUFFIXES, ".gguf", ".index.json")
    ours = (*QUANTIZATION_FILES, MANIFEST, EXPORTED, "config.json")
    for file in sorted(source.iterdir()):
        wanted = file.is_file() and not file.name.endswith(skipped) and file.name not in ours
        if wanted and file.stat().st_size <= SMALL_FILE:
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for holder in (config, config.get("text_config")):
        for key in CONFIG_KEYS if isinstance(holder, dict) else ():
            holder.pop(key, None)
    if quantization is not None:
        config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- source


def fingerprint(checkpoint: Checkpoint, progress: Callable[[int, int, str], None] | None = None) -> dict[str, Any]:
    """Where a checkpoint is, and size, modification time and SHA-256 of every file that its weights depend on."""
    files = _source_files(checkpoint)
    found = {}
    for number, file in enumerate(files, 1):
        found[file.name] = _facts(file) | {"sha256": _sha256(file)}
        if progress is not None:
            progress(number, len(files), file.name)
    return {"path": str(checkpoint.path.absolute()), "files": found}


def check_unchanged(source: dict[str, Any]) -> None:
    """Raises StoreError when files of a fingerprint have changed since it was taken."""
    for name, recorded in source["files"].items():
        file = Path(source["path"]) / name
        if not file.is_file() or any(recorded[key] != value for key, value in _facts(file).items()):
            raise StoreError(f"{file}: changed while it was being converted; start again when it is at rest")


def _source_files(checkpoint: Checkpoint) -> list[Path]:
    weights = {header.file for header in checkpoint.headers.values()}
    others = [checkpoint.path / name for name in ("config.json", *QUANTIZATION_FILES)]
    return sorted({*weights, *(file for file in others if file.exists())})


def _facts(file: Path) -> dict[str, Any]:
    status = file.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _sha256(file: Path) -> str:
    with open(file, "rb") as handle:
        digest = hashlib.sha256()
        while chunk := handle.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------ reading


class Store:
    """An opened store. `tensor(name)` is a view of the mapped file.

    Attributes:
        path: the folder.
        manifest: int4moe_store.json.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], files: Checkpoint):
        self.path, self.manifest, self.files = path, manifest, files

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Reads the manifest and the headers.

        Raises:
            StoreError: no store, another version, a file that is missing or has another size, a manifest or config.json
                that has changed.
        """
        folder = Path(path).expanduser()
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            sentence = f"{folder}: is no prepacked store (it has no {MANIFEST}); make one with int4moe convert"
            raise StoreError(sentence) from None
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"{folder / MANIFEST}: cannot be read: {error}") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise StoreError(f"{folder / MANIFEST}: is not the manifest of a prepacked store")
        if manifest.get("version") != VERSION:
            raise StoreError(
                f"{folder}: is a store of version {manifest.get('version')}, and this release reads version {VERSION}; "
                "convert the checkpoint again"
            )
        missing = [key for key in ("files", "source", *KEYS, "seal") if key not in manifest]
        if missing:
            raise StoreError(f"{folder / MANIFEST}: lacks {', '.join(missing)}; convert the checkpoint again")
        if not (folder / "config.json").is_file() or manifest["seal"] != _seal(folder, manifest):
            raise StoreError(
                f"{folder}: {MANIFEST} and config.json are not as they were written; convert the checkpoint again"
            )
        for name, written in manifest["files"].items():
            file = folder / name
            if not file.is_file():
                raise StoreError(f"{file}: is missing; convert the checkpoint again")
            if file.stat().st_size != written["bytes"]:
                raise StoreError(
                    f"{file}: has {file.stat().st_size} bytes, {written['bytes']} were written; convert again"
                )
        return cls(folder, manifest, Checkpoint.open(folder))

    def damaged(self) -> list[str]:
        """The files whose content is not what was written, by their SHA-256; reads all of them."""
        return [
            name for name, written in self.manifest["files"].items() if _sha256(self.path / name) != written["sha256"]
        ]

    def tensor(self, name: str) -> torch.Tensor:
        return self.files.tensor(name)

    @property
    def source(self) -> Path:
        """Where the checkpoint was when it was converted."""
        return Path(self.manifest["source"]["path"])

    def check_source(self, source: Path | None = None) -> None:
        """Compares the checkpoint at `source` with the one that was packed.

        Sizes and modification times settle it where they are all equal; files that have another time are hashed.
        None means where it was when it was converted, and nothing to compare when it is not there any more.

        Raises:
            StoreError: names the files that are missing or have changed.
        """
        if source is None and not (self.source / "config.json").exists():
            return
        folder = self.source if source is None else Path(source).expanduser()
        changed = []
        for name, recorded in self.manifest["source"]["files"].items():
            file = folder / name
            if not file.is_file():
                changed.append(f"{name} is missing")
                continue
            facts = _facts(file)
            if facts["bytes"] != recorded["bytes"]:
                changed.append(f"{name} has another size")
            elif facts["mtime_ns"] != recorded["mtime_ns"] and _sha256(file) != recorded["sha256"]:
                changed.append(f"{name} has another content")
        if changed:
            raise StoreError(
                f"{self.path}: was packed from another state of {folder} ({'; '.join(changed)}); convert it again"
            )
