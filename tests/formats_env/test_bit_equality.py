"""Canonical weights against the formats' own libraries, bit for bit, in the environment of tools/env-formats.sh."""

import numpy as np
import pytest
import torch

from int4moe_ipex.canonical import CanonicalWeight, dequantize, pack_codes
from int4moe_ipex.checkpoint import Checkpoint
from int4moe_ipex.formats import describe, read_linear, to_compressed_tensors
from tests import builders, real
from tests.formats_env import libraries

for package in ("compressed_tensors", "gptqmodel", "auto_round_extension", "awq"):
    pytest.importorskip(package, reason=f"{package} is not installed; run tools/ci-formats.sh")


def stored(checkpoint, info):
    return {suffix: checkpoint.tensor(name) for suffix, name in info.tensors.items()}


def by_library(checkpoint, info) -> torch.Tensor:
    label, tensors = checkpoint.quantization, stored(checkpoint, info)
    if info.format == "compressed-tensors":
        return libraries.compressed_tensors(tensors, label["config_groups"]["group_0"]["weights"])
    if info.format == "awq":
        return libraries.autoawq(tensors, label["group_size"])
    if label["quant_method"] == "auto-round":
        return libraries.auto_round(tensors, 4, label["group_size"], v1=True)
    return libraries.gptqmodel(tensors, 4, label["group_size"], label["sym"])


@pytest.mark.parametrize("path", [p for p in real.checkpoints() if "bf16" not in p.name], ids=lambda path: path.name)
def test_every_linear_of_the_real_checkpoints(path):
    checkpoint = Checkpoint.open(path)
    linears = [info for info in describe(checkpoint).values() if info.is_int4]
    assert len(linears) == 3 * (4 + 48)
    for info in linears:
        weight, _ = read_linear(checkpoint, info)
        assert torch.equal(dequantize(weight), by_library(checkpoint, info)), info.name


def read_one(folder, tensors, label):
    checkpoint = Checkpoint.open(builders.one_linear(folder, tensors, label))
    info = describe(checkpoint)["m"]
    return read_linear(checkpoint, info)[0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("zeros", ["v1", "v2"])
def test_gptq_against_gptqmodel(tmp_path, bits, symmetric, act_order, zeros):
    source = builders.linear(np.random.default_rng(0), 64, 128, 32, symmetric, act_order, bits=bits)
    tensors = builders.gptq(source, zeros)
    layout = {"v1": "gptq", "v2": "gptq_v2"}[zeros]
    label = builders.gptq_label(bits=bits, sym=symmetric, desc_act=act_order, checkpoint_format=layout)
    weight = read_one(tmp_path, tensors, label)
    expected = libraries.gptqmodel(tensors, bits, 32, symmetric, v1=zeros == "v1")
    assert torch.equal(dequantize(weight), expected)
    assert torch.equal(source.weight, expected)  # the builder is right too


@pytest.mark.parametrize("v1", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_auto_round_packing_read_back(tmp_path, v1, symmetric):
    """Packed by AutoRound's own code, zeros of 0 included (which v1 clamps), read by ours and by theirs."""
    if v1:
        from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    else:
        from auto_round_extension.torch.qlinear_torch import QuantLinear
    source = builders.linear(np.random.default_rng(1), 64, 128, 32, symmetric)
    layer = torch.nn.Linear(128, 64, bias=False)
    layer.weight.data = source.weight
    module = QuantLinear(4, 32, 128, 64, bias=False)
    module.device = torch.device("cpu")  # which its exporter sets before it packs
    module.pack(layer, source.scales.float(), torch.tensor(source.zeros, dtype=torch.float32))
    tensors = {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")}
    packing = "auto_round:auto_gptq" if v1 else "auto_round:gptqmodel"
    label = builders.auto_round_label(packing_format=packing, sym=symmetric, block_name_to_quantize="m")
    weight = read_one(tmp_path, tensors, label)
    assert torch.equal(dequantize(weight), libraries.auto_round(tensors, 4, 32, v1))
    if not v1 or not (source.zeros == 0).any():
        assert torch.equal(dequantize(weight), source.weight)


@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(24, 64), (20, 96)])
def test_compressed_tensors_written_by_the_library(tmp_path, strategy, symmetric, bits, shape):
    n, k = shape
    rng = torch.Generator().manual_seed(2)
    grid = {"group": (n, k // 32), "channel": (n, 1), "tensor": (1,)}[strategy]
    scale = (torch.rand(grid, generator=rng) * 0.02 + 0.005).bfloat16()
    middle = 2 ** (bits - 1)
    zero_point = torch.zeros(grid, dtype=torch.int8)
    if not symmetric:
        zero_point = torch.randint(-middle, middle, grid, generator=rng, dtype=torch.int8)
    weights = builders.ct_weights(num_bits=bits, symmetric=symmetric, strategy=strategy)
    if strategy != "group":
        weights["group_size"] = None
    tensors = libraries.compressed_tensors_write(
        torch.randn(n, k, generator=rng) * 0.1, scale.float(), zero_point, weights
    )
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    tensors["weight_scale"] = scale
    weight = read_one(tmp_path, tensors, builders.ct_label(weights))
    assert torch.equal(dequantize(weight), libraries.compressed_tensors(tensors, weights))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, -1])
def test_export_is_read_by_the_library(symmetric, group_size):
    source = builders.linear(np.random.default_rng(3), 20, 96, group_size, symmetric)
    weight = CanonicalWeight(
        pack_codes(torch.tensor(source.codes, dtype=torch.uint8)),
        source.scales,
        None if symmetric else torch.tensor(source.zeros, dtype=torch.uint8),
        source.group_size,
    )
    exported = to_compressed_tensors(weight)
    weights = builders.ct_weights(symmetric=symmetric)
    if group_size == -1:
        weights.update(strategy="channel", group_size=None)
    assert torch.equal(libraries.compressed_tensors(exported, weights), source.weight)


@pytest.mark.parametrize("path", [p for p in real.checkpoints() if "bf16" not in p.name], ids=lambda path: path.name)
def test_a_checkpoint_written_by_convert_is_read_by_the_library(tmp_path, path):
    """Its configuration names a scheme for every int4 module and none for the dense ones; its tensors decompress.

    Act-order is refused by the library's later releases, loudly, as its label says what it is.
    """
    from compressed_tensors.quantization import QuantizationConfig

    from int4moe_ipex.models.export import write_compressed_tensors

    write_compressed_tensors(path, tmp_path / "ct")
    source, written = Checkpoint.open(path), Checkpoint.open(tmp_path / "ct")
    if "desc-act" in path.name:
        with pytest.raises(ValueError, match="actorder='group' has been removed"):
            QuantizationConfig.model_validate(written.quantization)
        return
    label = QuantizationConfig.model_validate(written.quantization)
    (scheme,) = label.config_groups.values()
    assert scheme.targets == ["Linear"]
    infos = describe(written)
    for name, info in describe(source).items():
        assert (name in label.ignore) != info.is_int4, name
        if info.is_int4:
            weight, _ = read_linear(source, info)
            decompressed = libraries.compressed_tensors(stored(written, infos[name]), scheme.weights.model_dump())
            assert torch.equal(decompressed, dequantize(weight)), name
