"""Files that a verb reads or writes, checked before its work begins."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from int4moe_ipex.errors import ConfigError
from int4moe_ipex.plots import SUFFIXES


def check_output(option: str, file: Path | None) -> None:
    """Raises ConfigError where `file` of an option cannot be written at the end; None is no file."""
    if file is None:
        return
    folder = file.expanduser().absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {folder}; make it first")
    if file.is_dir():
        raise ConfigError(f"{option} {file}: is a folder; name a file")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {file}: cannot be written there; choose another place")


def check_plot(file: Path | None) -> None:
    """`check_output` for --plot, with the format and matplotlib."""
    if file is None:
        return
    if file.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {file}: the file's name has to end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'int4moe_ipex[plot]'")
    check_output("--plot", file)


def read_text(file: Path) -> str:
    """The text of a UTF-8 file. Raises ConfigError where it cannot be read as that."""
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is no text in UTF-8: {error.reason} at byte {error.start}") from None


def check_prompt(prompt: str | None) -> str | None:
    """For options; raises ConfigError where bytes of the command line were no UTF-8."""
    try:
        (prompt or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"--prompt: is no text in UTF-8: {error.reason} at character {error.start}") from None
    return prompt
