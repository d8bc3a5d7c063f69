"""`register` makes from_pretrained(folder) load int4 experts, and `unregister` takes it back."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

import int4moe_ipex
from int4moe_ipex.errors import UnsupportedModelError
from int4moe_ipex.models.register import translate
from int4moe_ipex.moe.experts import Int4Experts
from tests.models.tiny import stock_model, write_checkpoint
from tests.real import EXAMPLE


@pytest.fixture
def registered():
    int4moe_ipex.register()
    yield
    int4moe_ipex.unregister()


def test_from_pretrained_gives_packed_experts(registered):
    int4moe_ipex.register()  # twice is harmless
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32, device_map="cpu")
    assert isinstance(model, Qwen3MoeForCausalLM)
    assert isinstance(model.model.layers[0].mlp.experts, Int4Experts)
    assert model.dtype == torch.float32


def test_everything_else_goes_to_transformers(registered, tmp_path):
    stock_model("qwen3_moe").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not isinstance(model.model.layers[0].mlp.experts, Int4Experts)


def test_unregister_restores_transformers(tmp_path):
    before = AutoModelForCausalLM.__dict__["from_pretrained"]
    int4moe_ipex.register()
    int4moe_ipex.unregister()
    assert AutoModelForCausalLM.__dict__["from_pretrained"] is before
    write_checkpoint(stock_model("qwen3_moe"), "qwen3_moe", tmp_path)
    int4moe_ipex.unregister()  # twice is harmless


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"device_map": {"": "disk"}}, "disk"),
        ({"device_map": "cuda"}, "cuda"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"load_in_8bit": True}, "load_in_8bit"),
    ],
)
def test_what_cannot_be_honoured_is_refused(kwargs, words):
    with pytest.raises(UnsupportedModelError, match=words):
        translate(kwargs)


def test_harmless_keywords_are_taken():
    known = translate({"torch_dtype": "float32", "local_files_only": True, "device_map": {"": "cpu"}})
    assert known == {"dtype": "float32"}
