"""Every exception of this package.

A message names what is at fault (file, tensor, expert, module) and says what to do about it, in one
sentence where that is possible. All of them derive from `Int4MoeError`, so that a caller can catch one type.
"""

from __future__ import annotations

import copyreg
from typing import Any


class Int4MoeError(Exception):
    """Base of every error that this package raises on purpose."""

    def __reduce__(self) -> Any:
        # Python would call a kind's constructor with the message, which some do not take.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__


class CheckpointError(Int4MoeError):
    """A checkpoint folder or file that cannot be read, is incomplete, or contradicts itself."""


class MissingTensorsError(CheckpointError):
    """Tensors that a model needs and a checkpoint lacks, or has twice, or in another shape.

    Args:
        problems: one line per tensor; all are listed in the message, none is dropped.
    """

    def __init__(self, where: str, problems: list[str]):
        self.problems = list(problems)
        lines = "\n  ".join(self.problems)
        super().__init__(f"{where}: {len(self.problems)} tensor problem(s):\n  {lines}")


class FormatError(CheckpointError):
    """Tensors or labels that break the rules of their quantization format."""


class UnsupportedFormatError(FormatError):
    """A format that is recognised by name and out of scope; the message says what to do instead."""


class UnsupportedModelError(Int4MoeError):
    """A model family (`model_type`) that is not supported; it is refused by name, never guessed."""


class BackendError(Int4MoeError):
    """A backend that was asked for and cannot run the module, with the reason of each rejected row."""


class ConfigError(Int4MoeError):
    """A configuration that is not valid; names file, line, key and the nearest known key."""


class RoutingError(Int4MoeError):
    """Expert ids outside -1 <= id <= num_experts, or routing tensors of the wrong shape."""


class StoreError(Int4MoeError):
    """A prepacked store that belongs to another layout, version or source checkpoint."""
