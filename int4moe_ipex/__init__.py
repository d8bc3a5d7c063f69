"""INT4 Mixture-of-Experts language models on x86 CPUs, inside Hugging Face transformers.

import int4moe_ipex
model = int4moe_ipex.load("path/to/checkpoint")          # a transformers model
int4moe_ipex.register()                                  # or: AutoModelForCausalLM.from_pretrained(path)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load", "refresh", "register", "unregister"]

if TYPE_CHECKING:
    from int4moe_ipex.models.compact import refresh
    from int4moe_ipex.models.loader import load
    from int4moe_ipex.models.register import register, unregister

_HOMES = {
    "load": "int4moe_ipex.models.loader",
    "refresh": "int4moe_ipex.models.compact",
    "register": "int4moe_ipex.models.register",
    "unregister": "int4moe_ipex.models.register",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `int4moe --help` and `doctor` need neither torch nor transformers.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
