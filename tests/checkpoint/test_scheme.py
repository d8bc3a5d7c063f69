"""What labels say of a module, by each tool's own matching rule, and which formats are refused."""

import pytest

from int4moe_ipex.checkpoint.scheme import ModuleScheme, parse
from int4moe_ipex.errors import FormatError, UnsupportedFormatError
from tests.builders import auto_round_label, awq_label, ct_label, ct_weights, gptq_label

EXPERT = "model.layers.1.mlp.experts.3.gate_proj"
ROUTER = "model.layers.1.mlp.gate"


def scheme_of(label, name=EXPERT):
    return parse(label).module(name)


def test_gptq():
    scheme = parse(gptq_label(group_size=-1))
    assert (scheme.method, scheme.layout, scheme.zeros) == ("gptq", "gptq", "v1")
    assert scheme.module(EXPERT) == ModuleScheme(4, -1, True)
    assert parse(gptq_label(checkpoint_format="gptq_v2")).zeros == "v2"
    label = gptq_label(format="gptq_v2")
    del label["checkpoint_format"]
    assert parse(label).zeros == "v2"
    del label["format"]
    assert parse(label).zeros == "v1"  # AutoGPTQ, optimum and AutoRound write no key


def test_gptq_formats_that_disagree():
    scheme = parse(gptq_label(checkpoint_format="gptq_v2", format="gptq"))
    assert scheme.zeros == "v2"
    assert "checkpoint_format" in scheme.warnings[0]


def test_gptq_dynamic_first_match_wins():
    label = gptq_label(
        dynamic={
            r"-:.*\.mlp\.gate$": {},
            r"+:.*experts\.3\.": {"bits": 8, "group_size": 64},
            r".*experts\.\d+\.": {"sym": False},
            r"-:.*experts\.4": {},
        }
    )
    assert scheme_of(label, ROUTER) is None
    three = scheme_of(label)
    assert (three.bits, three.group_size, three.symmetric) == (8, 64, True)
    four = scheme_of(label, EXPERT.replace("3", "4"))  # the skip comes after a match
    assert (four.bits, four.group_size, four.symmetric) == (4, 32, False)
    assert scheme_of(label, "model.layers.1.self_attn.q_proj") == ModuleScheme(4, 32, True)


def test_gptq_dynamic_matches_from_the_start_of_the_name():
    assert scheme_of(gptq_label(dynamic={r"-:experts": {}})) is not None
    assert scheme_of(gptq_label(dynamic={r"-:model\.layers\.1\.": {}})) is None
    assert scheme_of(gptq_label(dynamic={f"-:{EXPERT}": {}})) is None
    assert (
        scheme_of(gptq_label(dynamic={r"-:model.layers.1": {}}), "model.layers.10.mlp.gate") is None
    )  # as re.match does


def test_gptq_modules_in_block_to_quantize():
    label = gptq_label(
        modules_in_block_to_quantize=[["self_attn.q_proj"], ["experts.3.gate_proj", "experts.3.up_proj"]]
    )
    assert scheme_of(label) is not None
    assert scheme_of(label, ROUTER) is None


def test_awq_skips_by_substring():
    label = awq_label(modules_to_not_convert=["model.layers.1", "lm_head"])
    assert scheme_of(label) is None
    assert scheme_of(label, "model.layers.10.mlp.experts.0.up_proj") is None  # the tool's own rule over-matches
    assert scheme_of(label, "model.layers.2.mlp.experts.0.up_proj") == ModuleScheme(4, 32, False)
    assert scheme_of(awq_label(modules_to_not_convert=None)) is not None
    assert scheme_of(awq_label(zero_point=False)).symmetric is True


def test_awq_old_keys():
    label = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}
    assert scheme_of(label) == ModuleScheme(4, 64, False)


def test_compressed_tensors_ranks_exact_before_regex_before_class():
    label = ct_label()
    label["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": ct_weights(group_size=32)},
        "group_1": {"targets": [r"re:.*experts.*"], "weights": ct_weights(group_size=64)},
        "group_2": {"targets": [EXPERT], "weights": ct_weights(strategy="channel", group_size=None, symmetric=False)},
    }
    assert scheme_of(label, "model.layers.0.self_attn.q_proj").group_size == 32
    assert scheme_of(label, EXPERT.replace("3", "4")).group_size == 64
    exact = scheme_of(label)
    assert (exact.strategy, exact.group_size, exact.symmetric) == ("channel", -1, False)
    assert exact.source == "config_groups.group_2"
    assert parse(label).default is None


def test_compressed_tensors_ignore():
    label = ct_label(ignore=["lm_head", r"re:.*mlp\.gate$", "model.layers.1.self_attn.q_proj"])
    assert scheme_of(label, "lm_head") is None
    assert scheme_of(label, ROUTER) is None
    assert scheme_of(label, "model.layers.1.self_attn.q_proj") is None
    assert scheme_of(label, "model.layers.11.self_attn.q_proj") is not None
    assert scheme_of(label) is not None  # gate_proj: the pattern ends on a boundary
    assert scheme_of(ct_label(ignore=["re:experts"])) is not None  # re.match, from the start


def test_compressed_tensors_actorder_leaves_plain_groups():
    for actorder in ("weight", "static", "group", None):
        assert scheme_of(ct_label({"actorder": actorder})) == ModuleScheme(
            4, 32, True, "group", "config_groups.group_0"
        )


def test_compressed_tensors_group_without_weights_is_passed_over():
    label = ct_label()
    label["config_groups"]["group_1"] = {"targets": ["re:.*self_attn.*"], "weights": None}
    assert scheme_of(label) is not None


def test_auto_round():
    label = auto_round_label(
        extra_config={
            EXPERT: {"bits": 8, "group_size": 64, "sym": False},
            r".*layers\.1\.mlp\.gate.*": {"bits": 16, "data_type": "float"},
            "lm_head": {"bits": 4},
            "empty": {},
        }
    )
    scheme = parse(label)
    assert (scheme.method, scheme.layout, scheme.zeros) == ("auto-round", "gptq", "v1")
    exact = scheme.module(EXPERT)  # although the pattern below fits gate_proj too
    assert (exact.bits, exact.group_size, exact.symmetric) == (8, 64, False)
    assert scheme.module(ROUTER) is None
    assert scheme.module("model.layers.1.mlp.gate_proj") is None  # re.search: the pattern fits it
    assert scheme.module("model.layers.0.mlp.gate_proj") == ModuleScheme(4, 32, True)
    assert scheme.module("lm_head") is not None  # named, although outside the blocks
    assert scheme.module("visual.blocks.0.attn.qkv") is None


@pytest.mark.parametrize(
    "blocks", ["model.layers,model.other", ["model.layers"], [["model.layers.0", "model.layers.1"]]]
)
def test_auto_round_blocks(blocks):
    label = auto_round_label(block_name_to_quantize=blocks)
    assert scheme_of(label) is not None
    assert scheme_of(label, "lm_head") is None
    old = auto_round_label(to_quant_block_names=blocks)
    del old["block_name_to_quantize"]
    assert scheme_of(old, "lm_head") is None


@pytest.mark.parametrize(
    ("packing", "layout", "zeros"),
    [
        ("auto_round:auto_gptq", "gptq", "v1"),
        ("auto_round:gptq", "gptq", "v1"),
        ("auto_round:gptqmodel", "gptq", "v2"),
        ("auto_round", "gptq", "v2"),
        ("auto_round:auto_awq", "awq", None),
        ("auto_round:awq", "awq", None),
        ("auto_round:llm_compressor", "compressed-tensors", None),
        (None, "gptq", None),
    ],
)
def test_auto_round_packing_formats(packing, layout, zeros):
    scheme = parse(auto_round_label(packing_format=packing))
    assert (scheme.layout, scheme.zeros) == (layout, zeros)


@pytest.mark.parametrize("name", ["intel/auto-round", "auto-round"])
def test_auto_round_names(name):
    assert parse(auto_round_label(quant_method=name)).method == "auto-round"


METHODS = [
    "mxfp4", "fp8", "fbgemm_fp8", "modelopt", "nvfp4", "bitsandbytes", "bitsandbytes_4bit", "gguf", "hqq", "torchao",
    "quark", "quanto", "aqlm", "vptq", "higgs", "eetq", "spqr", "bitnet", "exl2", "exl3", "qqq", "marlin",
    "gptq_marlin", "awq_marlin", "bitblas", "paroquant",
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_are_refused_by_name(method):
    with pytest.raises(UnsupportedFormatError, match="is out of scope; take the model's GPTQ, AWQ"):
        parse({"quant_method": method, "bits": 4})


def test_unknown_and_absent_methods():
    with pytest.raises(UnsupportedFormatError, match="'frobnicate' is not known; supported are gptq"):
        parse({"quant_method": "frobnicate"})
    with pytest.raises(FormatError, match="no quant_method"):
        parse({"bits": 4})


@pytest.mark.parametrize(
    ("label", "word"),
    [
        (gptq_label(checkpoint_format="marlin"), "marlin"),
        (gptq_label(checkpoint_format="bitblas"), "bitblas"),
        (gptq_label(checkpoint_format="gptq_p"), "gptq_p"),
        (gptq_label(checkpoint_format=None, format="exl3"), "exl3"),
        (gptq_label(is_marlin_format=True), "Marlin"),
        (gptq_label(pack_dtype="int16"), "pack_dtype"),
        (gptq_label(rotation="hadamard"), "rotation"),
        (gptq_label(activation={"bits": 8}), "activation"),
        (gptq_label(adapter={"name": "eora"}), "adapter"),
        (gptq_label(bits=3), "3-bit"),
        (gptq_label(bits=2), "2-bit"),
        (gptq_label(dynamic={"+:a": {"bits": 3}}), "3-bit"),
        (awq_label(version="gemv"), "gemv"),
        (awq_label(version="GEMV_FAST"), "gemv_fast"),
        (awq_label(version="marlin"), "marlin"),
        (awq_label(version=None, format="llm-awq"), "llm-awq"),
        (awq_label(bits=8), "8 bits"),
        (auto_round_label(data_type="mx_fp"), "mx_fp"),
        (auto_round_label(data_type="nv_fp4"), "nv_fp4"),
        (auto_round_label(data_type="fp8"), "fp8"),
        (auto_round_label(act_bits=8), "8-bit activations"),
        (auto_round_label(packing_format="auto_round:fp8_static"), "fp8_static"),
        (auto_round_label(packing_format="auto_round:mlx"), "mlx"),
        (auto_round_label(bits=2), "2-bit"),
        (auto_round_label(extra_config={"a": {"bits": 2}}), "2-bit"),
        (auto_round_label(extra_config={"a": {"bits": 8, "data_type": "mx_fp"}}), "mx_fp"),
        (auto_round_label(rotation_config={"a": 1}), "rotation_config"),
        (ct_label(format="marlin-24"), "marlin-24"),
        (ct_label(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (ct_label(format="mxfp4-pack-quantized"), "mxfp4-pack-quantized"),
        (ct_label(format="float-quantized"), "float-quantized"),
        (ct_label(format="int-quantized"), "int-quantized"),
        (ct_label(format="naive-quantized"), "naive-quantized"),
        (ct_label(transform_config={"config_groups": {"u": {}}}), "transform_config"),
        (ct_label(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (ct_label({"num_bits": 3}), "3-bit"),
        (ct_label({"type": "float"}), "float"),
        (ct_label({"strategy": "block"}), "block"),
        (ct_label({"strategy": "tensor_group"}), "tensor_group"),
    ],
)
def test_variants_out_of_scope_are_named(label, word):
    with pytest.raises(UnsupportedFormatError, match=word) as caught:
        parse(label)
    assert any(verb in str(caught.value) for verb in ("take", "export"))  # it says what to do


def test_compressed_tensors_group_out_of_scope_is_named():
    label = ct_label(format="mixed-precision")
    label["config_groups"]["group_0"]["format"] = "pack-quantized"
    assert parse(label).module(EXPERT) is not None
    label["config_groups"]["fp8"] = {
        "targets": ["re:.*self_attn.*"],
        "weights": ct_weights(num_bits=8, type="float", strategy="channel"),
        "format": "float-quantized",
    }
    with pytest.raises(UnsupportedFormatError, match=r"config_groups\.fp8.*float-quantized"):
        parse(label)
    label = ct_label()
    label["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(UnsupportedFormatError, match=r"config_groups\.group_0.*input_activations.*W4A16"):
        parse(label)


def test_compressed_tensors_empty_additions_are_nothing():
    parse(ct_label(transform_config={}, sparsity_config={}, kv_cache_scheme=None))
    parse(ct_label(sparsity_config={"format": "dense"}))
    assert "kv_cache_scheme" in parse(ct_label(kv_cache_scheme={"num_bits": 8})).warnings[0]


@pytest.mark.parametrize(
    "label",
    [
        gptq_label(bits="4"),
        gptq_label(bits=None),
        gptq_label(group_size=0),
        gptq_label(group_size=-2),
        gptq_label(sym="yes"),
        gptq_label(dynamic=["a"]),
        gptq_label(dynamic={"+:(": {}}),
        gptq_label(dynamic={"+:a": 4}),
        awq_label(group_size=None),
        auto_round_label(extra_config={"a": 3}),
        ct_label(config_groups=None),
        ct_label(config_groups={}),
        ct_label(config_groups={"g": 3}),
        ct_label(config_groups={"g": {"targets": ["Linear"], "weights": 4}}),
        ct_label({"num_bits": None}),
        ct_label({"group_size": None}),
        ct_label(ignore=["re:("]),
        ct_label(targets=("re:[",)),
        ct_label(targets=(1,)),
        ct_label(ignore=[None]),
        ct_label(ignore={"a": 1}),
        {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": 3},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_in_block_to_quantize": [None]},
    ],
)
def test_values_that_no_tool_writes(label):
    with pytest.raises(FormatError, match="quantization config"):
        parse(label)
