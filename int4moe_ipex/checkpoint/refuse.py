"""Formats that are out of scope: recognised by their labels or by the tensors they store, refused in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from int4moe_ipex.errors import UnsupportedFormatError

TAKE = "take the model's GPTQ, AWQ (gemm), compressed-tensors (pack-quantized) or AutoRound int4 checkpoint"

# quant_method -> what it is.
METHODS = {
    "mxfp4": "MXFP4 (4-bit floats with shared exponents)",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "finegrained_fp8": "FP8",
    "modelopt": "NVIDIA ModelOpt (fp8 or nvfp4)",
    "nvfp4": "NVFP4",
    "bitsandbytes": "bitsandbytes",
    "gguf": "GGUF",
    "hqq": "HQQ",
    "torchao": "torchao",
    "quark": "AMD Quark",
    "quanto": "Quanto",
    "aqlm": "AQLM",
    "vptq": "VPTQ",
    "higgs": "HIGGS",
    "eetq": "EETQ",
    "spqr": "SpQR",
    "bitnet": "BitNet",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "qqq": "QQQ",
    "marlin": "Marlin",
    "gptq_marlin": "GPTQ repacked for Marlin",
    "awq_marlin": "AWQ repacked for Marlin",
    "bitblas": "BitBLAS",
    "paroquant": "ParoQuant",
}

PLAIN_LAYOUTS = {
    "gptq": {"gptq", "gptq_v2"},
    "awq": {"gemm"},
    # mixed-precision says that each group names its own format, and those are checked one by one.
    "compressed-tensors": {"pack-quantized", "mixed-precision"},
}

# What a tensor's name gives away when no label does.
STORED_SIGNS = (
    (re.compile(r"experts\.(gate_up_proj|down_proj)_(packed|scale|shape|zero_point)$"), None),
    (re.compile(r"_blocks$"), "MXFP4 (4-bit floats with shared exponents)"),
    (re.compile(r"\.weight_scale_inv$"), "FP8 with block scales"),
    (re.compile(r"\.(weight\.)?(absmax|quant_map|quant_state\.bitsandbytes__\w+)$"), "bitsandbytes"),
    (re.compile(r"\.weight_global_scale$"), "NVFP4"),
    (re.compile(r"\.W_q$"), "HQQ"),
    (re.compile(r"\.(B|B_24|B_meta)$"), "Marlin"),
)


def refuse_method(method: str, config: dict[str, Any]) -> None:
    """Refuses a quant_method that is known and out of scope."""
    if method in METHODS:
        raise UnsupportedFormatError(f"{METHODS[method]} is out of scope; {TAKE}")
    if method.startswith("bitsandbytes") or config.get("load_in_4bit") or config.get("load_in_8bit"):
        raise UnsupportedFormatError(f"bitsandbytes is out of scope; {TAKE}")


def refuse_unless_plain_int(config: dict[str, Any], layout: str, where: str = "quantization config") -> None:
    """Refuses layouts and additions that change what the weights mean.

    Args:
        config: the quantization config, or one of its parts with the quant_method added.
        layout: the value of its format key, in lower case.
        where: how messages name it.

    Raises:
        UnsupportedFormatError
    """
    method = str(config.get("quant_method") or "").lower()
    allowed = PLAIN_LAYOUTS.get(method)
    if allowed is not None and layout not in allowed:
        raise UnsupportedFormatError(
            f"{where}: {method} in the {layout!r} layout is out of scope ({', '.join(sorted(allowed))} is read); {TAKE}"
        )
    if config.get("is_marlin_format"):
        raise UnsupportedFormatError(f"{where}: GPTQ repacked for Marlin is out of scope; {TAKE}")
    if str(config.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
        raise UnsupportedFormatError(
            f"{where}: pack_dtype {config['pack_dtype']} is out of scope; export the model again with pack_dtype int32"
        )
    data_type = str(config.get("data_type") or "int").lower()
    if data_type not in ("int", "int_sym", "int_asym") and "quant_method" in config:
        raise UnsupportedFormatError(f"{where}: data_type {data_type!r} is out of scope (int is read); {TAKE}")
    activations = config.get("act_bits")
    if isinstance(activations, int) and activations < 16:
        raise UnsupportedFormatError(
            f"{where}: {activations}-bit activations are out of scope; take a weight-only (W4A16) checkpoint"
        )
    for key in ("input_activations", "output_activations"):
        if config.get(key):
            raise UnsupportedFormatError(
                f"{where}: {key} are quantized, which is out of scope; take a weight-only (W4A16) checkpoint"
            )
    for key in ("rotation", "rotation_config", "spinquant_config", "activation", "adapter", "transform_config"):
        if config.get(key):
            raise UnsupportedFormatError(
                f"{where}: {key} changes the model beyond its weights and is out of scope; {TAKE} without it"
            )
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and str(sparsity.get("format") or "dense") != "dense":
        raise UnsupportedFormatError(f"{where}: sparsity format {sparsity['format']!r} is out of scope; {TAKE}")


def refuse_stored(names: Iterable[str]) -> None:
    """Refuses formats that give themselves away by tensor names, whatever the labels say.

    Raises:
        UnsupportedFormatError: names the first such tensor.
    """
    for name in names:
        for pattern, what in STORED_SIGNS:
            if not pattern.search(name):
                continue
            if what is None:
                raise UnsupportedFormatError(
                    f"{name}: llm-compressor 0.12 fused the experts before packing and wrote them corrupt; quantize "
                    "the model again with llm-compressor 0.13 or later"
                )
            raise UnsupportedFormatError(f"{name}: is a tensor of {what}, which is out of scope; {TAKE}")
