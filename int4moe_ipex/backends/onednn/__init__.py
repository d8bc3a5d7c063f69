"""oneDNN's int4-weight matmul through a binding of our own to its C API.

enums.py, errors.py, library.py and objects.py are the binding: typed, without torch, useful alone. matmul.py runs one
int4 linear on it with torch tensors, and backend.py is the backend. Nothing is loaded before it is needed.
"""

from int4moe_ipex.backends.onednn.backend import OneDnnBackend
from int4moe_ipex.backends.onednn.errors import OneDnnError, OneDnnUnimplemented
from int4moe_ipex.backends.onednn.library import configure, status

__all__ = ["OneDnnBackend", "OneDnnError", "OneDnnUnimplemented", "configure", "status"]
