"""Command line of the emulated Xeon: `setup`, `static` for one program, `python` for the running interpreter."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.xeon_emulator import __doc__ as overview
from tools.xeon_emulator import python_image
from tools.xeon_emulator.boot import Guest, run
from tools.xeon_emulator.machine import EmulatorError, Machine


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.xeon_emulator",
        description=overview,
        epilog="INT4MOE_XEON_CACHE names the folder for what is built once (default /var/tmp/int4moe-xeon).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("setup", help="build the machine once, about a minute, as root")
    static = verbs.add_parser("static", help="run a statically linked program")
    python = verbs.add_parser("python", help="run this Python interpreter; its arguments follow")
    python.add_argument("--package", action="append", default=[], help="an installed distribution to take along")
    for verb, memory in ((static, 512), (python, 2048)):
        verb.add_argument("--file", action="append", type=Path, default=[], help="a file or folder to take along")
        verb.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
        verb.add_argument("--memory-mb", type=int, default=memory)
        verb.add_argument("--timeout", type=float, default=900, help="seconds on this machine")
        verb.add_argument("--deny-amx", action="store_true", help="refuse the permission to use tiles")
    static.add_argument("program", type=Path)
    for verb in (static, python):
        verb.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def main() -> int:
    options = _parser().parse_args()
    machine = Machine()
    machine.ensure()
    if options.verb == "setup":
        print(f"ready: {machine.tree}")
        return 0
    environment = dict(pair.split("=", 1) for pair in options.env)
    files, disk = list(options.file), None
    if options.verb == "static":
        command = [f"/files/{options.program.name}", *options.arguments]
        files.append(options.program)
    else:
        command = [python_image.interpreter(), *options.arguments]
        disk = python_image.build(machine, options.package)
        environment = python_image.environment() | environment
    guest = Guest(command, files, disk, options.memory_mb, options.deny_amx, options.timeout, environment)
    return run(machine, guest, lambda text: print(text, end="", flush=True))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EmulatorError as error:
        sys.exit(f"xeon_emulator: {error}")
