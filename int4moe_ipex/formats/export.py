"""Canonical weights written as compressed-tensors pack-quantized, for `int4moe convert`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from int4moe_ipex.canonical import CanonicalWeight, DenseWeight, Weight
from int4moe_ipex.errors import FormatError
from int4moe_ipex.formats.codes import permute_codes


def to_compressed_tensors(weight: Weight, bias: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The tensors of one linear by suffix: weight_packed, weight_scale, ... for int4, weight for dense ones.

    Codes, scales and zero points are kept bit for bit. An act-order permutation becomes weight_g_idx, which
    compressed-tensors has not read since 0.19; this package does.

    Raises:
        FormatError: a tail group, which compressed-tensors has no way to say.
    """
    tensors = {} if bias is None else {"bias": bias}
    if isinstance(weight, DenseWeight):
        return {**tensors, "weight": weight.weight}
    n, k = weight.out_features, weight.in_features
    if k % weight.group_size:
        raise FormatError(
            f"{k} input features in groups of {weight.group_size} leave a tail group, which compressed-tensors does "
            "not have; keep the original format"
        )
    codes = weight.codes if weight.perm is None else _original_order(weight.codes, weight.perm)
    tensors["weight_packed"] = _words(codes)
    tensors["weight_scale"] = weight.scales.contiguous()
    tensors["weight_shape"] = torch.tensor([n, k], dtype=torch.int64)
    if weight.zeros is not None:
        pairs = torch.nn.functional.pad(weight.zeros, (0, 0, 0, n % 2)).t()
        tensors["weight_zero_point"] = _words(pairs[:, 0::2] | (pairs[:, 1::2] << 4)).t().contiguous()
    if weight.perm is not None:
        g_idx = torch.empty(k, dtype=torch.int32)
        g_idx[weight.perm.long()] = torch.arange(k, dtype=torch.int32) // weight.group_size
        tensors["weight_g_idx"] = g_idx
    return tensors


def compressed_tensors_config(weights: Mapping[str, Weight], ignore: Iterable[str] = ()) -> dict[str, Any]:
    """The quantization_config for linears exported under these names.

    Args:
        weights: module name -> what was exported; dense ones are added to the ignore list.
        ignore: further linears that stay as they are.
    """
    targets: dict[tuple, list[str]] = {}
    dense = [*ignore, *(name for name, weight in weights.items() if isinstance(weight, DenseWeight))]
    int4 = {name: weight for name, weight in weights.items() if not isinstance(weight, DenseWeight)}
    grouped = {_group_key(weight) for weight in int4.values() if weight.num_groups > 1}
    for name, weight in int4.items():
        key = _group_key(weight)
        # One group per row is per-channel, unless it is what the others' group size comes to in a narrow linear.
        targets.setdefault(key if key in grouped else (None, *key[1:]), []).append(name)
    # The most frequent scheme is the default for every linear; the others name their modules.
    ranked = sorted(targets.items(), key=lambda item: -len(item[1]))
    groups = {
        f"group_{number}": {
            "targets": ["Linear"] if number == 0 else sorted(names),
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": symmetric,
                "strategy": "channel" if group_size is None else "group",
                "group_size": group_size,
                "actorder": actorder,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
        for number, ((group_size, symmetric, actorder), names) in enumerate(ranked)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(dense),
    }


def _group_key(weight: CanonicalWeight) -> tuple[int, bool, str | None]:
    """group_size, symmetric and actorder: what a config group says of a weight."""
    return weight.group_size, weight.symmetric, "group" if weight.perm is not None else None


def _original_order(codes: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    return permute_codes(codes, torch.argsort(perm).to(torch.int32))


def _words(pairs: torch.Tensor) -> torch.Tensor:
    """Nibble pairs uint8 [R, C/2] to int32 [R, ceil(C/8)], padded with zero."""
    padded = torch.nn.functional.pad(pairs, (0, -pairs.shape[1] % 4))
    return torch.empty(padded.shape, dtype=torch.uint8).copy_(padded).view(torch.int32)
