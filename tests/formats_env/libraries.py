"""The formats' own libraries as functions from stored tensors to a float32 weight [N, K].

Scales are widened to float32 before the library sees them: it then multiplies without rounding, and the result can be
compared bit for bit.
"""

from __future__ import annotations

import torch


def compressed_tensors(tensors, weights) -> torch.Tensor:
    """compressed-tensors' decompressor; weights is the `weights` object of a config group."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    state = {**tensors, "weight_scale": tensors["weight_scale"].float()}
    return PackedQuantizationCompressor.decompress(state, scheme)["weight"]


def compressed_tensors_write(weight, scale, zero_point, weights) -> dict[str, torch.Tensor]:
    """compressed-tensors' compressor: quantizes and packs a float weight."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    return PackedQuantizationCompressor.compress(state, scheme)


def gptqmodel(tensors, bits: int, group_size: int, symmetric: bool, v1: bool = True) -> torch.Tensor:
    """gptqmodel's torch linear, after its own conversion of v1 zeros."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    n = tensors["qweight"].shape[1]
    k = tensors["qweight"].shape[0] * 32 // bits
    module = TorchLinear(
        bits=bits, group_size=group_size, sym=symmetric, desc_act=True, in_features=k, out_features=n, bias=False
    )
    module.qweight, module.qzeros = tensors["qweight"].clone(), tensors["qzeros"].clone()
    module.scales, module.g_idx = tensors["scales"].float(), tensors["g_idx"].clone()
    if v1:
        convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
    module.eval()
    return module.dequantize_weight().t()


def auto_round(tensors, bits: int, group_size: int, v1: bool) -> torch.Tensor:
    """AutoRound's torch linear. It only offers a product; that with the identity is the weight, exactly."""
    if v1:
        from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    else:
        from auto_round_extension.torch.qlinear_torch import QuantLinear

    n = tensors["qweight"].shape[1]
    k = tensors["qweight"].shape[0] * 32 // bits
    module = QuantLinear(bits, group_size, k, n, bias=False, g_idx="g_idx" in tensors)
    module.qweight, module.qzeros = tensors["qweight"].clone(), tensors["qzeros"].clone()
    module.scales = tensors["scales"].float()
    if "g_idx" in tensors:
        module.g_idx = tensors["g_idx"].clone()
    return module(torch.eye(k)).t()


def autoawq(tensors, group_size: int) -> torch.Tensor:
    """AutoAWQ's dequantisation of its gemm layout."""
    from awq.utils.packing_utils import dequantize_gemm

    scales = tensors["scales"].float()
    return dequantize_gemm(tensors["qweight"], tensors["qzeros"], scales, 4, group_size).t()
