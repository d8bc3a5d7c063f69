"""What every plot needs: matplotlib, if it is there, and a file to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from int4moe_ipex.errors import ConfigError

SUFFIXES = (".svg", ".png", ".pdf")


def import_pyplot() -> Any:
    """matplotlib.pyplot without a window. Raises ConfigError where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib (pip install 'int4moe_ipex[plot]'): {error}") from error
    matplotlib.use("svg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str | Path) -> None:
    """Writes a figure in the format of the file's suffix and closes it; the same figure gives the same bytes.

    Raises:
        ConfigError: the file cannot be written, or its suffix is no format.
    """
    pyplot = import_pyplot()
    try:
        figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
