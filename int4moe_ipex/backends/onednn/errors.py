"""oneDNN's status codes as exceptions."""

from __future__ import annotations

from int4moe_ipex.backends.onednn.enums import Status
from int4moe_ipex.errors import BackendError


class OneDnnError(BackendError):
    """A call of oneDNN that returned another status than success.

    Attributes:
        function: the C function, such as `dnnl_primitive_create`.
        status: a Status, or the bare number where it is not a known one.
    """

    def __init__(self, function: str, status: int):
        self.function = function
        try:
            self.status: Status | int = Status(status)
            name = self.status.name.lower().replace("_", " ")
        except ValueError:
            self.status, name = status, "unknown"
        super().__init__(f"{function}: {name} (status {int(status)})")


class OneDnnUnimplemented(OneDnnError):
    """Nothing in this build of oneDNN does what was asked on this CPU (status 3)."""


def raise_for(function: str, status: int) -> None:
    """Does nothing on success, else raises the exception of the status."""
    if status == Status.SUCCESS:
        return
    kind = OneDnnUnimplemented if status == Status.UNIMPLEMENTED else OneDnnError
    raise kind(function, status)
