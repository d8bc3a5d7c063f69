"""`AutoModelForCausalLM.from_pretrained(path)` with this package's loader, as an explicit and reversible act."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from int4moe_ipex.errors import UnsupportedModelError
from int4moe_ipex.models.families import FAMILIES
from int4moe_ipex.packing.store import QUANT_METHOD

# Keywords of from_pretrained that change nothing for a local folder of safetensors read by our own loader.
HARMLESS = frozenset(
    {"local_files_only", "low_cpu_mem_usage", "use_safetensors", "cache_dir", "revision", "token", "force_download"}
)
OURS = frozenset({"gptq", "awq", "compressed-tensors", "auto-round", QUANT_METHOD})

_original: Any = None


def register() -> None:
    """From here on `AutoModelForCausalLM.from_pretrained(folder)` loads int4 MoE checkpoints with `int4moe_ipex.load`.

    Other paths, other model families and unquantized folders go to transformers as before. Calling it twice is
    harmless; `unregister` undoes it.
    """
    global _original
    from transformers import AutoModelForCausalLM

    if _original is not None:
        return
    _original = AutoModelForCausalLM.__dict__["from_pretrained"]
    original = _original.__get__(None, AutoModelForCausalLM)

    def from_pretrained(cls: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is not AutoModelForCausalLM or not is_ours(pretrained_model_name_or_path):
            return original(pretrained_model_name_or_path, *args, **kwargs)
        if args:
            raise UnsupportedModelError("int4moe_ipex takes keyword arguments only after the folder")
        from int4moe_ipex.models.loader import load

        return load(pretrained_model_name_or_path, **translate(kwargs))

    AutoModelForCausalLM.from_pretrained = classmethod(from_pretrained)


def unregister() -> None:
    """Gives transformers its own `from_pretrained` back."""
    global _original
    from transformers import AutoModelForCausalLM

    if _original is not None:
        AutoModelForCausalLM.from_pretrained = _original
        _original = None


def is_ours(path: Any) -> bool:
    """Whether a path is a local folder with a quantized checkpoint of a supported family, by its JSON files."""
    folder = Path(str(path))
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    if config.get("model_type") not in FAMILIES:
        return False
    for name in ("quantization_config.json", "quantize_config.json"):
        if (folder / name).exists():
            return True
    holders = (config, config.get("text_config") or {})
    return any((holder.get("quantization_config") or {}).get("quant_method") in OURS for holder in holders)


def translate(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords of from_pretrained as keywords of `load`.

    Raises:
        UnsupportedModelError: a keyword that cannot be honoured, in one sentence.
    """
    known = {}
    for key, value in kwargs.items():
        if key in ("dtype", "torch_dtype"):
            known["dtype"] = value
        elif key == "attn_implementation":
            known[key] = value
        elif key == "device_map":
            _check_device_map(value)
        elif key == "trust_remote_code":
            if value:
                raise UnsupportedModelError("int4moe_ipex runs no code from checkpoints: drop trust_remote_code")
        elif key == "int4moe_config":
            known["config"] = value
        elif key not in HARMLESS:
            raise UnsupportedModelError(f"int4moe_ipex does not take from_pretrained's keyword {key!r}")
    return known


def _check_device_map(value: Any) -> None:
    places = value.values() if isinstance(value, dict) else [value]
    for place in places:
        if place is not None and str(place) not in ("cpu", "auto"):
            raise UnsupportedModelError(
                f"device_map asks for {place!r}, but packed experts live in CPU memory: drop device_map"
            )
