import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The folder of real tiny checkpoints."""
    folder = Path(os.environ.get("INT4MOE_CHECKPOINTS", ROOT.parent / "shared" / "checkpoints"))
    if not folder.is_dir():
        pytest.skip(f"needs the real checkpoints: no folder {folder} (INT4MOE_CHECKPOINTS)")
    return folder
