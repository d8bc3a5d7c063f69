"""The parts that every emulated machine shares: Bochs, a kernel, busybox and the kernel module, in a Debian tree."""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import subprocess
from pathlib import Path

RELEASE = "trixie"  # has Bochs 3.0, which knows AMX (bookworm's 2.7 does not)
PACKAGES = (
    *("bochs", "bochs-term", "bochsbios", "vgabios", "isolinux", "syslinux-common", "xorriso", "cpio"),
    *("busybox-static", "kmod", "linux-image-cloud-amd64", "linux-headers-cloud-amd64", "gcc", "libc6-dev", "make"),
)
DISK_MODULES = ("ata_piix", "ata_generic", "sd_mod", "ext4")
GUEST = Path(__file__).parent / "guest"


class EmulatorError(Exception):
    """Setting up or running the emulator failed; the message says where to look."""


def cache_dir() -> Path:
    """INT4MOE_XEON_CACHE, or /var/tmp/int4moe-xeon: about 1 GB for the machine and 1 GB for each Python image."""
    return Path(os.environ.get("INT4MOE_XEON_CACHE", "/var/tmp/int4moe-xeon"))


def apt_mirror() -> str:
    """The first mirror in apt's own sources, so that a site's proxy or mirror is respected.

    Raises:
        EmulatorError: apt has no sources.
    """
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        if match := re.search(r"^URIs:\s*(\S+)", path.read_text(), re.MULTILINE):
            return match.group(1)
    listing = Path("/etc/apt/sources.list")
    if listing.exists() and (match := re.search(r"^deb\s+(?:\[.*?\]\s+)?(\S+)", listing.read_text(), re.MULTILINE)):
        return match.group(1)
    raise EmulatorError("apt names no Debian mirror in /etc/apt/sources.list or sources.list.d: add one")


class Machine:
    """A Debian tree with everything that boots; `ensure()` builds it when it is missing or out of date."""

    def __init__(self, cache: Path | None = None):
        self.cache = cache or cache_dir()
        self.tree = self.cache / "debian"
        self.kit = self.tree / "kit"
        self.log = self.cache / "setup.log"

    @property
    def key(self) -> str:
        """Changes when the cached tree must be built again."""
        parts = [RELEASE, *PACKAGES, *DISK_MODULES]
        parts += [(GUEST / name).read_text() for name in ("tiles.c", "Makefile")]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def ready(self) -> bool:
        stamp = self.kit / "ready"
        return stamp.exists() and stamp.read_text() == self.key

    @property
    def kernel_version(self) -> str:
        return max(p.name for p in (self.tree / "lib/modules").iterdir())

    @property
    def kernel(self) -> Path:
        return self.tree / f"boot/vmlinuz-{self.kernel_version}"

    def ensure(self) -> None:
        """Builds the tree unless it is there. Needs root and a Debian or Ubuntu host with apt.

        Raises:
            EmulatorError: a step failed; the message ends with the last lines of its log.
        """
        if self.ready:
            return
        if os.geteuid() != 0:
            raise EmulatorError("setting up the emulator needs root (debootstrap and chroot)")
        self.cache.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        if shutil.which("debootstrap") is None:
            self._host("apt-get", "update", "-q")
            self._host("apt-get", "install", "-y", "-q", "--no-install-recommends", "debootstrap")
        if not (self.tree / "etc/debian_version").exists():
            self._host("debootstrap", "--variant=minbase", RELEASE, str(self.tree), apt_mirror())
        self.kit.mkdir(exist_ok=True)
        install = "DEBIAN_FRONTEND=noninteractive apt-get"
        self.inside(f"{install} update -q && {install} install -y -q --no-install-recommends {' '.join(PACKAGES)}")
        self._build_module()
        self._collect_disk_modules()
        (self.kit / "ready").write_text(self.key)

    def _build_module(self) -> None:
        source = self.kit / "tiles"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(GUEST, source)
        self.inside(f"make -C /lib/modules/{self.kernel_version}/build M=/kit/tiles modules")

    def _collect_disk_modules(self) -> None:
        """The disk's kernel modules in the order of loading, uncompressed, as busybox's insmod wants them."""
        target = self.kit / "modules"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        names = " ".join(DISK_MODULES)
        listing = self.inside(
            f"depmod {self.kernel_version}; for m in {names}; do modprobe -S {self.kernel_version} -D $m; done"
        )
        order: list[str] = []
        for path in re.findall(r"^insmod (\S+)", listing, re.MULTILINE):
            name = Path(path).name.removesuffix(".xz")
            if name not in order:
                order.append(name)
                data = (self.tree / path.lstrip("/")).read_bytes()
                (target / name).write_bytes(lzma.decompress(data) if path.endswith(".xz") else data)
        (target / "order").write_text("\n".join(order) + "\n")

    def inside(self, script: str) -> str:
        """Runs a shell script in the tree with /proc mounted and returns its standard output."""
        # An own mount namespace: the mount goes when the script ends, however it ends.
        setup = f"mount -t proc proc {self.tree}/proc && exec chroot {self.tree} sh -ec {_quoted(script)}"
        return self._host("unshare", "--mount", "sh", "-ec", setup)

    def _host(self, *command: str) -> str:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
        if done.returncode:
            tail = "\n".join(done.stdout.splitlines()[-8:])
            raise EmulatorError(f"{command[0]} failed with status {done.returncode} (log: {self.log})\n{tail}")
        return done.stdout


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
