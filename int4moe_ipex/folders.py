"""Where a model is to be, checked before anything that takes seconds is imported."""

from __future__ import annotations

from pathlib import Path

from int4moe_ipex.errors import CheckpointError


def model_folder(path: str | Path) -> Path:
    """The folder of a checkpoint or store, `~` expanded.

    Raises:
        CheckpointError: no such folder, a file, or no config.json in it.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder; give the path of a downloaded checkpoint")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; give the folder of the checkpoint")
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder / 'config.json'}: does not exist; a checkpoint folder needs it")
    return folder
