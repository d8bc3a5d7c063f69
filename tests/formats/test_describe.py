"""describe(): what is listed, and every problem of every tensor in one error."""

import numpy as np
import pytest
import torch

from int4moe_ipex.checkpoint import Checkpoint
from int4moe_ipex.errors import FormatError, MissingTensorsError, UnsupportedFormatError
from int4moe_ipex.formats import describe, read_linear
from tests import builders
from tests.builders import auto_round_label, awq_label, ct_label, gptq_label

SOURCE = builders.linear(np.random.default_rng(0), 16, 64, 32)
FORMATS = {
    "gptq": (builders.gptq(SOURCE), gptq_label()),
    "awq": (builders.awq(SOURCE), awq_label()),
    "compressed-tensors": (builders.compressed_tensors(SOURCE, symmetric=False), ct_label({"symmetric": False})),
}


def opened(folder, tensors, label):
    return Checkpoint.open(builders.one_linear(folder, tensors, label))


def problems_of(folder, tensors, label):
    with pytest.raises(MissingTensorsError) as caught:
        describe(opened(folder, tensors, label))
    return caught.value.problems


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_known_from_headers(tmp_path, name):
    tensors, label = FORMATS[name]
    tensors = {**tensors, "bias": torch.ones(16)}
    info = describe(opened(tmp_path, tensors, label))["m"]
    assert (info.name, info.format, info.bits, info.is_int4) == ("m", name, 4, True)
    assert (info.out_features, info.in_features, info.group_size) == (16, 64, 32)
    assert info.scales_dtype == torch.float16 and info.has_bias
    assert info.act_order == ("g_idx" in tensors)
    assert info.symmetric == (name == "gptq")
    assert info.tensors == {suffix: f"m.{suffix}" for suffix in tensors}
    assert info.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert info.warnings == ()


def test_no_tensor_data_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoint, "tensor", lambda *_: pytest.fail("read a tensor"))
    for name in ("gptq", "awq"):
        describe(opened(tmp_path / name, *FORMATS[name]))


@pytest.mark.parametrize("name", FORMATS)
def test_each_missing_tensor_is_named(tmp_path, name):
    tensors, label = FORMATS[name]
    for suffix in tensors:
        left = {key: tensor for key, tensor in tensors.items() if key != suffix}
        if suffix == "g_idx":
            describe(opened(tmp_path / suffix, left, label))
        else:
            assert problems_of(tmp_path / suffix, left, label) == [f"m.{suffix}: is missing"]


@pytest.mark.parametrize("name", FORMATS)
def test_each_misshaped_tensor_is_named(tmp_path, name):
    tensors, label = FORMATS[name]
    for suffix, tensor in tensors.items():
        longer = torch.cat((tensor, tensor[:1]))
        for number, changed in enumerate((longer, tensor[None], tensor.to(torch.float64))):
            found = problems_of(tmp_path / f"{suffix}{number}", {**tensors, suffix: changed}, label)
            # one wrong tensor is seen through its neighbours; the message always names one and its shape
            assert found and all(problem.startswith("m.") for problem in found)


@pytest.mark.parametrize("name", FORMATS)
def test_unknown_tensors_and_second_storage_are_named(tmp_path, name):
    tensors, label = FORMATS[name]
    assert problems_of(tmp_path / "a", {**tensors, "extra": torch.ones(1)}, label) == [
        "m.extra: is not a tensor of this format"
    ]
    (found,) = problems_of(tmp_path / "b", {**tensors, "weight": torch.ones(16, 64)}, label)
    assert "several ways at once" in found


def test_all_problems_of_all_modules_come_together(tmp_path):
    tensors = {}
    for expert in range(4):
        for suffix, tensor in builders.gptq(SOURCE).items():
            tensors[f"experts.{expert}.up_proj.{suffix}"] = tensor
    del tensors["experts.0.up_proj.scales"], tensors["experts.2.up_proj.qweight"]
    tensors["experts.3.up_proj.qzeros"] = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(MissingTensorsError) as caught:
        describe(Checkpoint.open(builders.write(tmp_path, tensors, gptq_label())))
    names = [problem.split(":")[0] for problem in caught.value.problems]
    assert names == ["experts.0.up_proj.scales", "experts.2.up_proj.qweight", "experts.3.up_proj.qzeros"]
    assert all(name in str(caught.value) for name in names)


def test_gptq_and_awq_labels_are_not_mixed_up(tmp_path):
    assert "AWQ packing" in problems_of(tmp_path / "a", FORMATS["awq"][0], gptq_label())[0]
    assert "GPTQ packing" in problems_of(tmp_path / "b", builders.gptq(SOURCE, g_idx=False), awq_label())[0]
    assert "not how gptq stores" in problems_of(tmp_path / "c", FORMATS["compressed-tensors"][0], gptq_label())[0]
    assert "not how compressed-tensors" in problems_of(tmp_path / "d", FORMATS["gptq"][0], ct_label())[0]


def test_quantized_tensors_without_any_label(tmp_path):
    with pytest.raises(FormatError, match=r"m: its tensors .* quantization config"):
        describe(opened(tmp_path, FORMATS["gptq"][0], None))


def test_dense_linears_embeddings_and_the_rest(tmp_path):
    tensors = {
        "embed.weight": torch.ones(8, 4),
        "norm.weight": torch.ones(4),
        "conv.weight": torch.ones(4, 2, 2),
        "q_proj.weight": torch.ones(6, 4, dtype=torch.bfloat16),
        "q_proj.bias": torch.ones(6),
        "experts.gate_up_proj": torch.ones(2, 4, 4),
        "sinks": torch.ones(3),
    }
    infos = describe(Checkpoint.open(builders.write(tmp_path, tensors)))
    assert set(infos) == {"embed", "q_proj"}
    info = infos["q_proj"]
    assert (info.format, info.bits, info.is_int4, info.has_bias) == ("dense", 16, False, True)
    assert (info.out_features, info.in_features, info.nbytes) == (6, 4, 6 * 4 * 2 + 24)
    weight, bias = read_linear(Checkpoint.open(tmp_path), info)
    assert torch.equal(weight.weight, tensors["q_proj.weight"]) and torch.equal(bias, tensors["q_proj.bias"])


def test_dense_bias_of_the_wrong_length(tmp_path):
    tensors = {"weight": torch.ones(6, 4), "bias": torch.ones(5)}
    assert problems_of(tmp_path, tensors, None) == ["m.bias: has shape [5], expected [6]"]


def test_disagreements_are_reported_per_module(tmp_path):
    tensors = {f"a_proj.{suffix}": tensor for suffix, tensor in FORMATS["awq"][0].items()}
    tensors["b_proj.weight"] = torch.ones(8, 8)
    tensors["gate.weight"] = torch.ones(8, 8)
    label = awq_label(modules_to_not_convert=["a_proj"])
    infos = describe(Checkpoint.open(builders.write(tmp_path, tensors, label)))
    assert infos["a_proj"].is_int4 and "labels say not quantized" in infos["a_proj"].warnings[0]
    assert "labels say quantized" in infos["b_proj"].warnings[0]
    assert infos["gate"].warnings == ()  # routers are left out by every tool without a word


def test_stored_bits_outrank_the_label(tmp_path):
    source = builders.linear(np.random.default_rng(1), 16, 64, 32, bits=8)
    for number, (tensors, label) in enumerate(
        [(builders.gptq(source), gptq_label()), (builders.compressed_tensors(source), ct_label())]
    ):
        checkpoint = opened(tmp_path / str(number), tensors, label)
        info = describe(checkpoint)["m"]
        assert info.bits == 8 and "says 4 bits, the tensors hold 8" in info.warnings[0]
        assert torch.equal(read_linear(checkpoint, info)[0].weight, source.weight)


def test_auto_round_without_packing_format_reads_symmetric_only(tmp_path):
    for zeros in ("v1", "v2"):
        checkpoint = opened(tmp_path / zeros, builders.gptq(SOURCE, zeros), auto_round_label(packing_format=None))
        weight, _ = read_linear(checkpoint, describe(checkpoint)["m"])
        assert weight.zeros is None
        assert not any("zero points" in warning for warning in checkpoint.warnings)  # nothing to contradict
    label = auto_round_label(packing_format=None, sym=False)
    assert "no label says" in problems_of(tmp_path / "asym", builders.gptq(SOURCE), label)[0]


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({"experts.gate_up_proj_packed": torch.zeros(2, dtype=torch.int32)}, "llm-compressor 0.12"),
        ({"experts.gate_up_proj_blocks": torch.zeros(2, dtype=torch.uint8)}, "MXFP4"),
        ({"q_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, "FP8"),
        ({"q_proj.weight": torch.ones(2, 2), "q_proj.weight_scale_inv": torch.ones(1)}, "FP8"),
        (
            {"q_proj.weight": torch.ones(2, 2, dtype=torch.int8), "q_proj.weight_scale": torch.ones(2, 1)},
            "unpacked int8",
        ),
        (
            {"q_proj.weight": torch.zeros(2, 1, dtype=torch.uint8), "q_proj.weight.absmax": torch.ones(1)},
            "bitsandbytes",
        ),
        ({"q_proj.W_q": torch.zeros(2, 1, dtype=torch.uint8)}, "HQQ"),
        (
            {
                "q_proj.weight_packed": torch.zeros(2, 1, dtype=torch.uint8),
                "q_proj.weight_scale": torch.ones(1),
                "q_proj.weight_global_scale": torch.ones(1),
            },
            "NVFP4",
        ),
    ],
)
def test_formats_that_only_their_tensors_give_away(tmp_path, tensors, word):
    with pytest.raises(UnsupportedFormatError, match=word):
        describe(Checkpoint.open(builders.write(tmp_path, tensors, ct_label())))


def test_integer_weights_are_not_taken_for_dense(tmp_path):
    assert "int8" in problems_of(tmp_path, {"weight": torch.ones(4, 4, dtype=torch.int8)}, None)[0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_not_finite(tmp_path, name, value):
    tensors, label = FORMATS[name]
    suffix = "weight_scale" if name == "compressed-tensors" else "scales"
    scales = tensors[suffix].clone()
    index = (5, 1) if name == "compressed-tensors" else (1, 5)
    scales[index] = value
    checkpoint = opened(tmp_path, {**tensors, suffix: scales}, label)
    info = describe(checkpoint)["m"]
    place = "row 5, group 1" if name == "compressed-tensors" else "group 1, row 5"
    with pytest.raises(FormatError, match=rf"m\.{suffix}: is {value} at {place} \(1 of 32 values") as caught:
        read_linear(checkpoint, info)
    assert not isinstance(caught.value, UnsupportedFormatError)


def test_scales_whose_sum_overflows_are_finite(tmp_path):
    tensors, label = FORMATS["gptq"]
    scales = torch.full_like(tensors["scales"], 3e38, dtype=torch.float32)
    checkpoint = opened(tmp_path, {**tensors, "scales": scales}, label)
    weight, _ = read_linear(checkpoint, describe(checkpoint)["m"])
    assert torch.equal(weight.scales, scales.t())


def test_a_bias_that_is_not_finite(tmp_path):
    checkpoint = opened(tmp_path, {**FORMATS["gptq"][0], "bias": torch.tensor([1.0] * 15 + [torch.nan])}, gptq_label())
    with pytest.raises(FormatError, match=r"m\.bias: is nan at row 15"):
        read_linear(checkpoint, describe(checkpoint)["m"])


def test_per_tensor_zero_point_out_of_range(tmp_path):
    source = builders.linear(np.random.default_rng(1), 16, 64, -1, scale=0.5)
    tensors = builders.compressed_tensors(source, symmetric=False, strategy="tensor")
    tensors["weight_zero_point"] = torch.tensor([8], dtype=torch.int8)
    label = ct_label({"strategy": "tensor", "symmetric": False, "group_size": None})
    checkpoint = opened(tmp_path, tensors, label)
    with pytest.raises(FormatError, match=r"m\.weight_zero_point: is 8, outside -8\.\.7"):
        read_linear(checkpoint, describe(checkpoint)["m"])
