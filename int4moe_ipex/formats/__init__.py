"""Checkpoint tensors to exact weights. All quirks of all formats die in this folder; see README.md.

`survey` reads headers only and says what every linear of a checkpoint is and what is wrong with it; `describe` raises
if anything is; `read_linear` reads one of them.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping

import torch

from int4moe_ipex.canonical import DenseWeight, Weight
from int4moe_ipex.checkpoint.files import Checkpoint, TensorHeader
from int4moe_ipex.checkpoint.refuse import refuse_stored
from int4moe_ipex.checkpoint.scheme import QuantizationScheme, parse
from int4moe_ipex.errors import FormatError, MissingTensorsError, UnsupportedFormatError
from int4moe_ipex.formats import awq, compressed_tensors, gptq
from int4moe_ipex.formats.base import LinearInfo
from int4moe_ipex.formats.common import FLOAT_DTYPES, Parts, read_finite
from int4moe_ipex.formats.export import compressed_tensors_config, to_compressed_tensors

__all__ = ["LinearInfo", "compressed_tensors_config", "describe", "read_linear", "survey", "to_compressed_tensors"]

log = logging.getLogger(__name__)

WORD_SUFFIXES = {"qweight", "qzeros", "scales", "g_idx"}
PACKED_SUFFIXES = {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"}
KNOWN_SUFFIXES = WORD_SUFFIXES | PACKED_SUFFIXES | {"weight", "bias"}
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Projections are what every tool quantizes; routers, embeddings and heads are left out by some without a word.
PROJECTION = re.compile(r"(_proj|^w[123])$")


def describe(checkpoint: Checkpoint) -> dict[str, LinearInfo]:
    """What every linear of the checkpoint is, by name, from headers and labels alone; see `survey`.

    Raises:
        MissingTensorsError: lists every tensor that is missing, unknown, of the wrong shape or dtype, or contradicts
            its label.
        UnsupportedFormatError, FormatError: as `survey` does.
    """
    infos, problems = survey(checkpoint)
    if problems:
        raise MissingTensorsError(str(checkpoint.path), [line for found in problems.values() for line in found])
    return infos


def survey(checkpoint: Checkpoint) -> tuple[dict[str, LinearInfo], dict[str, list[str]]]:
    """The sound linears of the checkpoint by name, and the problems of the others by name, from headers alone.

    The stored tensors decide what a module is. Every module with a 2-D float `.weight` is listed as dense, embeddings
    and heads included; norms, fused 3-D experts and loose parameters are left out. A problem is a tensor that is
    missing, unknown, of the wrong shape or dtype, or contradicts its label. Warnings are logged if there is none.

    Raises:
        UnsupportedFormatError: the format is known and out of scope.
        FormatError: quantized tensors without a quantization config, or a config that no tool writes.
    """
    modules: dict[str, dict[str, TensorHeader]] = {}
    for name, header in checkpoint.headers.items():
        prefix, _, suffix = name.rpartition(".")
        modules.setdefault(prefix, {})[suffix] = header
    scheme = None if checkpoint.quantization is None else parse(checkpoint.quantization)
    infos: dict[str, LinearInfo] = {}
    problems: dict[str, list[str]] = {}
    for name, headers in modules.items():
        info, found = _describe_module(checkpoint, scheme, name, headers)
        if found:
            problems[name] = found
        elif info is not None:
            infos[name] = info
    if problems:
        return infos, problems
    for text in (*checkpoint.warnings, *(scheme.warnings if scheme else ())):
        log.warning("%s: %s", checkpoint.path, text)
    for text, count in Counter(text for info in infos.values() for text in info.warnings).items():
        log.warning("%s: %s (%d modules)", checkpoint.path, text, count)
    return infos, problems


def _describe_module(
    checkpoint: Checkpoint, scheme: QuantizationScheme | None, name: str, headers: Mapping[str, TensorHeader]
) -> tuple[LinearInfo | None, list[str]]:
    words, packed = not WORD_SUFFIXES.isdisjoint(headers), not PACKED_SUFFIXES.isdisjoint(headers)
    if not words and not packed:
        refuse_stored(header.name for suffix, header in headers.items() if suffix not in KNOWN_SUFFIXES)
        return _describe_dense(scheme, name, headers)
    _refuse_odd_quantized(name, headers)
    if scheme is None:
        raise FormatError(
            f"{name}: its tensors ({', '.join(headers)}) are quantized, but neither config.json nor a side file has a "
            "quantization config"
        )
    stored = [what for what, found in (("dense", "weight" in headers), ("qweight", words), ("packed", packed)) if found]
    if len(stored) > 1:
        return None, [f"{name}: is stored in several ways at once ({', '.join(headers)})"]
    if packed != (scheme.layout == "compressed-tensors"):
        return None, [f"{name}: has {', '.join(headers)}, which is not how {scheme.layout} stores a linear"]
    labelled = scheme.module(name)
    parts = Parts(name, headers, labelled or scheme.default)
    if labelled is None:
        parts.warnings.append("the labels say not quantized, the stored tensors are; these are believed")
    if scheme.layout == "gptq":
        info = gptq.describe(parts, scheme.zeros)
    elif scheme.layout == "awq":
        info = awq.describe(parts)
    else:
        info = compressed_tensors.describe(parts, checkpoint)
    return info, parts.problems


def _refuse_odd_quantized(name: str, headers: Mapping[str, TensorHeader]) -> None:
    refuse_stored(header.name for suffix, header in headers.items() if suffix not in KNOWN_SUFFIXES)
    if "weight" in headers and "weight_scale" in headers and "weight_packed" not in headers:
        dtype = str(headers["weight"].dtype).removeprefix("torch.")
        raise UnsupportedFormatError(
            f"{name}: is stored as an unpacked {dtype} weight with a scale (int-, float- or naive-quantized), which is "
            "out of scope; take a pack-quantized checkpoint"
        )


def _describe_dense(
    scheme: QuantizationScheme | None, name: str, headers: Mapping[str, TensorHeader]
) -> tuple[LinearInfo | None, list[str]]:
    weight = headers.get("weight")
    if weight is None or len(weight.shape) != 2:
        return None, []
    if weight.dtype in FLOAT8_DTYPES:
        raise UnsupportedFormatError(
            f"{weight.name}: is FP8, which is out of scope; take a checkpoint whose other weights are 16-bit"
        )
    if weight.dtype not in FLOAT_DTYPES:
        return None, [f"{weight.name}: is {str(weight.dtype).removeprefix('torch.')}, which no supported format stores"]
    n, k = weight.shape
    bias = headers.get("bias")
    if bias is not None and bias.shape != (n,):
        return None, [f"{bias.name}: has shape {list(bias.shape)}, expected {[n]}"]
    warnings = ()
    if scheme is not None and PROJECTION.search(name.rpartition(".")[2]) and scheme.module(name) is not None:
        warnings = ("the labels say quantized, the stored weight is dense; it is used as it is",)
    kept = {suffix: header for suffix, header in headers.items() if suffix in ("weight", "bias")}
    return LinearInfo(
        name=name,
        format="dense",
        bits=weight.dtype.itemsize * 8,
        out_features=n,
        in_features=k,
        group_size=k,
        symmetric=False,
        zero_convention="none",
        act_order=False,
        scales_dtype=None,
        has_bias=bias is not None,
        tensors={suffix: header.name for suffix, header in kept.items()},
        nbytes=sum(header.nbytes for header in kept.values()),
        warnings=warnings,
    ), []


READERS = {"gptq": gptq.read, "awq": awq.read, "compressed-tensors": compressed_tensors.read}


def read_linear(checkpoint: Checkpoint, info: LinearInfo) -> tuple[Weight, torch.Tensor | None]:
    """The exact weight of one linear, and its bias [N] in the stored dtype or None.

    A `CanonicalWeight` for 4 bits; a `DenseWeight` in float32 for 8 bits, and as stored for dense ones. Tensors may be
    views of the memory-mapped file: do not write to them. The weight's own group_size and perm hold where they differ
    from `info` (a g_idx with groups of unequal sizes).

    Raises:
        FormatError: values that break the format's rules; the message names tensor and index.
    """
    bias = read_finite(checkpoint, info.tensors["bias"], ("row",)) if info.has_bias else None
    if info.format == "dense":
        return DenseWeight(checkpoint.tensor(info.tensors["weight"])), bias
    return READERS[info.format](checkpoint, info), bias
