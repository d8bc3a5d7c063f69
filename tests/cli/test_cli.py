"""The command line as a user calls it, on the checkpoint that the repository carries."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.real import EXAMPLE, HELDOUT, REPO, expected

ENTRY = "from int4moe_ipex.cli import main; main()"


def int4moe(*arguments, status=0):
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, *map(str, arguments)], cwd=REPO, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status, done.stderr
    return done


def test_generate_json_has_every_field():
    want = expected(EXAMPLE)
    arguments = ("--prompt", want["prompt"], "--max-new-tokens", 24, "--backend", "reference", "--dtype", "float32")
    result = json.loads(int4moe("generate", EXAMPLE, *arguments, "--json").stdout)
    assert result["text"] == want["greedy_text"] and result["token_ids"] == want["greedy_ids"]
    assert result["prompt_tokens"] == 5
    assert result["prefill_tokens_per_second"] > 0 and result["decode_tokens_per_second"] > 0
    assert result["peak_rss_bytes"] > 10**8
    assert result["paths"][0]["path"] == "reference/float32"


def test_generate_for_people_prints_text_rates_and_path():
    done = int4moe("generate", EXAMPLE, "--prompt", "The statement is used to", "--max-new-tokens", 8)
    for word in ("The statement is used to", "prefill", "decode", "tokens/s", "path", "modules"):
        assert word in done.stdout


def test_perplexity_json():
    arguments = ("--text", HELDOUT, "--max-tokens", 1024, "--backend", "reference", "--dtype", "float32", "--json")
    result = json.loads(int4moe("perplexity", EXAMPLE, *arguments).stdout)
    assert result["tokens"] == 7 * 128 and 20 < result["perplexity"] < 60


def test_inspect_text_and_json():
    text = int4moe("inspect", EXAMPLE).stdout
    assert "16 experts" in text and "gptq int4" in text and "z-1 (v1)" in text
    summary = json.loads(int4moe("inspect", EXAMPLE, "--json").stdout)
    assert [layer["experts"] for layer in summary["layers"]] == [16, 16, 16]
    assert summary["problems"] == []
    group = next(m for m in summary["layers"][0]["modules"] if m["name"] == "mlp.experts.*.up_proj")
    assert (group["count"], group["bits"], group["group_size"], group["act_order"]) == (16, 4, 128, False)


def test_errors_are_one_message_and_status_2(tmp_path):
    done = int4moe("generate", tmp_path / "nowhere", "--prompt", "x", status=2)
    assert done.stderr.startswith("int4moe: ") and "nowhere" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", [("generate",), ("verify",), ("inspect", "--routing")])
def test_a_prompt_that_is_no_text(verb):
    done = int4moe(*verb, EXAMPLE, "--prompt", os.fsdecode(b"a\xff"), status=2)
    assert done.stderr.startswith("int4moe: --prompt: is no text in UTF-8: ") and "Traceback" not in done.stderr


def test_inspect_of_a_broken_checkpoint_names_problems(tmp_path):
    from tests.models.tiny import stock_model, write_checkpoint

    write_checkpoint(stock_model("qwen3_moe"), "qwen3_moe", tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    done = int4moe("inspect", tmp_path, status=1)
    assert "experts.2.up_proj.weight_scale" in done.stdout


def test_language_model_of_a_checkpoint_with_an_image_encoder(tmp_path):
    """Every verb that looks at weights, on names under model.language_model."""
    from tests.models.tiny import stock_model, write_checkpoint

    path, store = tmp_path / "c", tmp_path / "s"
    write_checkpoint(stock_model("qwen3_5_moe", vocab_size=1024), "qwen3_5_moe", path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, path)
    summary = json.loads(int4moe("inspect", path, "--json").stdout)
    assert summary["problems"] == [] and [layer["experts"] for layer in summary["layers"]] == [4, 4]
    assert json.loads(int4moe("doctor", path, "--json").stdout)["can_run"]
    int4moe("convert", path, store, "--dtype", "float32")
    options = ("--dtype", "float32", "--json")
    assert json.loads(int4moe("verify", store, *options).stdout)["good"]
    prompt = ("--prompt", "The statement", "--max-new-tokens", 5)
    texts = [json.loads(int4moe("generate", where, *prompt, *options).stdout)["token_ids"] for where in (path, store)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("verb", ["generate", "perplexity", "inspect"])
def test_help_has_an_example(verb):
    assert f"int4moe {verb} ./" in int4moe(verb, "--help").stdout
