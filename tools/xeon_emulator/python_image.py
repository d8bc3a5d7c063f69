"""A disk image with the running Python interpreter, some of its installed distributions, and the C libraries they need.

Everything keeps its absolute path, except the distributions' modules, which go to /site. The image is built once per
environment and reused while the versions stay the same; the project's own code is not on it (it changes too often).
"""

from __future__ import annotations

import hashlib
import importlib.metadata as metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.xeon_emulator.machine import EmulatorError, Machine

SITE = "/site"
# Not needed to run anything, and large.
LEFT_OUT = re.compile(
    r"^torch/(include|share|test)/|^torch/bin/(?!torch_shm_manager)|^torch/lib/.*\.a$"
    r"|^(numpy|sympy|networkx|transformers)/.*tests?/|\.pyi$"
)
# Of what distributions put beside site-packages (oneDNN and its runtimes): shared objects and what those read.
BESIDE = re.compile(r"/lib/[^/]+\.(so[.\d]*|rtl|bc|o|cfg|spv)$")
STDLIB_LEFT_OUT = {"test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages", "dist-packages"}


def environment() -> dict[str, str]:
    """What the interpreter needs to find its distributions in the guest."""
    return {"PYTHONPATH": SITE, "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp", "PATH": "/bin", "LC_ALL": "C.UTF-8"}


def interpreter() -> str:
    return os.path.realpath(sys.executable)


def build(machine: Machine, requirements: Iterable[str]) -> Path:
    """The image's path, built unless one with the same contents is cached.

    Raises:
        EmulatorError: a requirement is not installed, or mke2fs failed.
    """
    distributions = _closure(requirements)
    listing = [sys.version, *sorted(f"{d.metadata['Name']}=={d.version}" for d in distributions)]
    listing.append(Path(__file__).read_text())
    key = hashlib.sha256("\n".join(listing).encode()).hexdigest()[:16]
    machine.cache.mkdir(parents=True, exist_ok=True)
    # Beside the tree that Bochs is locked into, and on the same file system: runs link to it.
    environment_key = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    image = machine.tree / f"images/python-{environment_key}-{key}.img"
    if image.exists():
        return image
    image.parent.mkdir(exist_ok=True)
    for old in image.parent.glob(f"python-{environment_key}-*"):
        old.unlink() if old.is_file() else shutil.rmtree(old)
    stage = image.with_suffix(".stage")
    _copy_interpreter(stage)
    _copy_distributions(stage, distributions)
    _copy_libraries(stage)
    for name in ("proc", "sys", "dev", "tmp", "bin"):
        (stage / name).mkdir(exist_ok=True)
    shutil.copy(machine.tree / "usr/bin/busybox", stage / "bin/busybox")
    for applet in ("sh", "env", "ls", "cat"):
        (stage / "bin" / applet).symlink_to("busybox")
    _make_image(stage, image)
    shutil.rmtree(stage)
    return image


def _closure(requirements: Iterable[str]) -> list[metadata.Distribution]:
    """The distributions and what they require here, without extras."""
    found: dict[str, metadata.Distribution] = {}
    pending = list(requirements)
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name in {re.sub(r"[-_.]+", "-", r).lower() for r in requirements}:
                raise EmulatorError(f"{name} is not installed for {sys.executable}") from None
            continue  # required on other platforms or Python versions only
        for line in found[name].requires or ():
            if "extra ==" not in line:
                pending.append(re.match(r"[A-Za-z0-9._-]+", line).group())
    return list(found.values())


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        try:
            target.hardlink_to(source.resolve())
        except OSError:
            shutil.copy2(source, target)


def _copy_interpreter(stage: Path) -> None:
    _link(Path(interpreter()), stage / interpreter().lstrip("/"))
    for folder in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}:
        # In a virtual environment platstdlib may point into it, where there is no standard library.
        if not (Path(folder) / "os.py").exists() and not (Path(folder) / "lib-dynload").exists():
            continue
        for path in _files(Path(folder), STDLIB_LEFT_OUT):
            _link(path, stage / str(path).lstrip("/"))


def _files(folder: Path, left_out: set[str]) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        if Path(here) == folder:
            folders[:] = [f for f in folders if f not in left_out]
        for name in names:
            yield Path(here) / name


def _copy_distributions(stage: Path, distributions: Iterable[metadata.Distribution]) -> None:
    for distribution in distributions:
        for entry in distribution.files or ():
            relative = str(entry)
            path = Path(os.path.normpath(distribution.locate_file(entry)))
            if not path.is_file() or LEFT_OUT.search(relative):
                continue
            if not relative.startswith(".."):
                _link(path, stage / SITE.lstrip("/") / relative)
            elif BESIDE.search(str(path)):
                _link(path, stage / str(path).lstrip("/"))


def _copy_libraries(stage: Path) -> None:
    """What the dynamic linker finds for the interpreter and for each shared object in the stage."""
    objects = [p for p in stage.rglob("*.so*") if p.is_file()] + [stage / interpreter().lstrip("/")]
    listing = subprocess.run(["ldd", *map(str, objects)], capture_output=True, text=True, check=False).stdout
    for path in set(re.findall(r"(?:=> |^\t)(/\S+) \(0x", listing, re.MULTILINE)):
        if not path.startswith(str(stage)):
            _link(Path(path), stage / path.lstrip("/"))


def _make_image(stage: Path, image: Path) -> None:
    blocks = sum(-(-p.lstat().st_size // 4096) + 1 for p in stage.rglob("*"))
    megabytes = blocks * 4096 // (1 << 20)
    unfinished = image.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    with unfinished.open("wb") as file:
        file.truncate((megabytes + megabytes // 8 + 64) << 20)
    mke2fs = shutil.which("mke2fs") or "/sbin/mke2fs"
    options = ["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-d", str(stage)]
    done = subprocess.run([mke2fs, *options, str(unfinished)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"mke2fs failed: {done.stderr.strip()}")
    unfinished.rename(image)
