"""Boots the emulated Xeon, runs one command there and returns its exit status, printing its output as it comes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.xeon_emulator.machine import GUEST, EmulatorError, Machine

# clearcpuid: the kernel must not see AMX while it boots, because it would set half of its tile state up.
KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet acpi=off nolapic noapic reboot=t mitigations=off nokaslr tsc=reliable lpj=1000000 panic=1 "
    "clearcpuid=amx_tile,amx_int8,amx_bf16 rdinit=/init"
)


@dataclass(frozen=True)
class Guest:
    """What one emulated machine runs.

    Attributes:
        command: the program and its arguments, as seen in the guest. `files` lie in /files, with a disk in /tmp/files.
        files: host files or folders copied into the guest's memory.
        disk: an ext4 image mounted read-only as the root, or None for a statically linked program alone.
        memory_mb: the guest's memory.
        deny_amx: refuse the permission to use tiles, as a seccomp filter or an old kernel would.
        timeout: seconds on the host.
    """

    command: Sequence[str]
    files: Sequence[Path] = ()
    disk: Path | None = None
    memory_mb: int = 1024
    deny_amx: bool = False
    timeout: float = 900
    environment: dict[str, str] = field(default_factory=dict)


def run(machine: Machine, guest: Guest, output: Callable[[str], object] = sys.stdout.write) -> int:
    """The command's exit status.

    Raises:
        EmulatorError: the machine did not boot, or the command did not end within the timeout.
    """
    machine.ensure()
    work = Path(tempfile.mkdtemp(prefix="run.", dir=machine.kit))
    try:
        _initial_ram_disk(machine, guest, work)
        _boot_image(machine, work)
        (work / "bochsrc").write_text("\n".join(_bochs_options(machine, guest, work)) + "\n")
        return _emulate(machine, guest, work, output)
    finally:
        shutil.rmtree(work)


def _inner(machine: Machine, path: Path) -> str:
    return "/" + str(path.relative_to(machine.tree))


def _initial_ram_disk(machine: Machine, guest: Guest, work: Path) -> None:
    root = work / "initrd"
    for name in ("bin", "proc", "sys", "dev", "disk", "files", "tmp"):
        (root / name).mkdir(parents=True)
    shutil.copy(machine.tree / "usr/bin/busybox", root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    shutil.copy(GUEST / "init", root / "init")
    (root / "init").chmod(0o755)
    (root / "modules").mkdir()
    shutil.copy(machine.kit / "tiles/tiles.ko", root / "modules/tiles.ko")
    (root / "modules/order").write_text("")
    if guest.disk is not None:
        shutil.copytree(machine.kit / "modules", root / "modules", dirs_exist_ok=True)
        (root / "wants-disk").touch()
    for path in guest.files:
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, root / "files" / path.name)
    (root / "tiles-options").write_text(f"deny={int(guest.deny_amx)}\n")
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in guest.environment.items())
    (root / "command").write_text(f"{exports}exec {shlex.join(guest.command)}\n")


def _boot_image(machine: Machine, work: Path) -> None:
    iso = work / "iso"
    (iso / "isolinux").mkdir(parents=True)
    shutil.copy(machine.kernel, iso / "vmlinuz")
    shutil.copy(machine.tree / "usr/lib/ISOLINUX/isolinux.bin", iso / "isolinux")
    shutil.copy(machine.tree / "usr/lib/syslinux/modules/bios/ldlinux.c32", iso / "isolinux")
    (iso / "isolinux/isolinux.cfg").write_text(
        f"default xeon\nprompt 0\nlabel xeon\n kernel /vmlinuz\n initrd /initrd\n append {KERNEL_ARGUMENTS}\n"
    )
    inner = _inner(machine, work)
    machine.inside(
        f"cd {inner}/initrd && find . | cpio --quiet -o -H newc > {inner}/iso/initrd && "
        f"xorriso -as mkisofs -quiet -o {inner}/boot.iso -b isolinux/isolinux.bin -c isolinux/boot.cat "
        f"-no-emul-boot -boot-load-size 4 -boot-info-table {inner}/iso"
    )


def _bochs_options(machine: Machine, guest: Guest, work: Path) -> list[str]:
    inner = _inner(machine, work)
    options = [
        # Bochs 3.0 takes at most 2048 MB of host memory and swaps the rest.
        f"memory: guest={guest.memory_mb}, host={min(guest.memory_mb, 2048)}",
        "romimage: file=/usr/share/bochs/BIOS-bochs-latest",
        "vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest",
        "cpu: model=sapphire_rapids, count=1, ips=200000000, reset_on_triple_fault=0",
        "ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14",
        f"ata0-master: type=cdrom, path={inner}/boot.iso, status=inserted",
        "boot: cdrom",
        'display_library: rfb, options="timeout=0"',
        f"com1: enabled=1, mode=file, dev={inner}/console.txt",
        f"com2: enabled=1, mode=file, dev={inner}/output.txt",
        f"log: {inner}/bochs.log",
        "panic: action=fatal",
        "error: action=ignore",
        "info: action=ignore",
        "debug: action=ignore",
        "clock: sync=none",
        "speaker: enabled=0",
    ]
    if guest.disk is not None:
        # A hard link: the tree's chroot sees the image, and the cached file keeps its name.
        (work / "disk.img").hardlink_to(guest.disk)
        options += [
            "ata1: enabled=1, ioaddr1=0x170, ioaddr2=0x370, irq=15",
            f"ata1-master: type=disk, mode=flat, path={inner}/disk.img",
        ]
    return options


def _emulate(machine: Machine, guest: Guest, work: Path, output: Callable[[str], object]) -> int:
    messages = machine.cache / "last-bochs.txt"
    command = ["chroot", str(machine.tree), "bochs", "-q", "-f", f"{_inner(machine, work)}/bochsrc"]
    shown = 0
    deadline = time.monotonic() + guest.timeout
    with messages.open("w") as sink:
        bochs = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        try:
            while (status := _status(work)) is None and bochs.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                shown = _copy_output(work, shown, output)
        finally:
            bochs.kill()
            bochs.wait()
    _copy_output(work, shown, output)
    if status is None:
        status = _status(work)
    if status is None:
        console = machine.cache / "last-console.txt"
        console.write_text(_read(work / "console.txt"))
        ended = "timed out" if time.monotonic() >= deadline else "the emulator ended early"
        raise EmulatorError(f"{ended}; see {console} and {messages}")
    return status


def _read(path: Path) -> str:
    return path.read_bytes().decode(errors="replace").replace("\r", "") if path.exists() else ""


def _status(work: Path) -> int | None:
    for line in _read(work / "console.txt").splitlines():
        if line.startswith("emulated-xeon-exit "):
            return int(line.split()[1])
    return None


def _copy_output(work: Path, shown: int, output: Callable[[str], object]) -> int:
    text = _read(work / "output.txt")
    if len(text) > shown:
        output(text[shown:])
    return len(text)
