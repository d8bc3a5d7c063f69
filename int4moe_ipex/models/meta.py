"""A transformers model without its memory, and the means to fill it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from int4moe_ipex.errors import CheckpointError, UnsupportedModelError
from int4moe_ipex.models.families import Family


def meta_device() -> torch.device:
    """torch's meta device, for `with meta_device():` around the construction of a transformers model.

    transformers' modules import torch._dynamo when they are first used, and torch 2.8 cannot import it inside such a
    context (a circular import); so it is imported here, before.
    """
    import torch._dynamo

    return torch.device("meta")


def hf_config_of(path: Path, family: Family) -> Any:
    """transformers' config of a folder's language model, without what it says of quantization.

    Raises:
        UnsupportedModelError: this release of transformers has no such model.
        CheckpointError: it refuses config.json.
    """
    import transformers

    model_type = family.config_type or family.model_type
    if model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedModelError(f"transformers {transformers.__version__} has no {model_type}: a later one may")
    config_class = transformers.CONFIG_MAPPING[model_type]
    with _naming_config(path):
        fields, _ = config_class.get_config_dict(path, local_files_only=True)
        config = config_class.from_dict(fields | {"model_type": model_type}).get_text_config()
    # transformers would look for a quantizer of its own; the formats are translated here instead.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def meta_model(path: Path, hf_config: Any, dtype: torch.dtype, attn_implementation: str | None) -> nn.Module:
    """The causal language model of a folder's config, on the meta device.

    Raises:
        CheckpointError: transformers cannot make one of it.
    """
    from transformers import AutoModelForCausalLM

    kwargs = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with _naming_config(path), meta_device():
        return AutoModelForCausalLM.from_config(hf_config, dtype=dtype, **kwargs)


@contextlib.contextmanager
def _naming_config(path: Path) -> Iterator[None]:
    """Errors of transformers, which may be of any kind, name the file whose values it dislikes."""
    try:
        yield
    except ImportError:  # of an attention implementation that was asked for
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{path / 'config.json'}: transformers makes no model of it: {reason}") from error


def put_tensor(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Sets a parameter or buffer by its dotted name."""
    module_name, _, attribute = name.rpartition(".")
    module = model.get_submodule(module_name)
    if attribute in module._parameters:
        module._parameters[attribute] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[attribute] = value


def tie(model: nn.Module, name: str) -> None:
    """Makes a parameter the same as the input embedding."""
    module_name, _, attribute = name.rpartition(".")
    model.get_submodule(module_name)._parameters[attribute] = model.get_input_embeddings().weight


def fill_computed_buffers(model: nn.Module) -> None:
    """Buffers that no checkpoint stores (rotary tables) are computed by transformers' own initialisation."""
    for module in model.modules():
        if any(b.is_meta for n, b in module.named_buffers(recurse=False) if n in module._non_persistent_buffers_set):
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts a module in the place of the one with this dotted name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
