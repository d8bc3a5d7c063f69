"""safetensors files that are broken or built to harm: each is one sentence naming the file, never a crash."""

import json
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from int4moe_ipex.checkpoint import Checkpoint
from int4moe_ipex.errors import CheckpointError


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def file_of(header, data=b"\0" * 8, length=None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


GOOD = file_of({"w": entry()})


def opening(folder, content):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    return Checkpoint.open(folder)


def test_the_good_one_opens(tmp_path):
    assert opening(tmp_path, GOOD).tensor("w").tolist() == [0.0, 0.0]
    padded = file_of(b'{"__metadata__":{"format":"pt"},"w":' + json.dumps(entry()).encode() + b"}      ")
    assert list(opening(tmp_path, padded).headers) == ["w"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"", "truncated", id="empty"),
        pytest.param(GOOD[:5], "truncated", id="inside the length"),
        pytest.param(GOOD[:20], "truncated inside its header", id="inside the header"),
        pytest.param(GOOD[:-2], "truncated: its header describes", id="two bytes short"),
        pytest.param(GOOD + b"\0", "belong to no tensor", id="one byte long"),
        pytest.param(struct.pack("<Q", 2**63) + GOOD[8:], "header would be", id="huge length"),
        pytest.param(struct.pack("<Q", 100_000_001) + GOOD[8:], "header would be", id="over the limit"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer", id="lfs pointer"),
        pytest.param(b"version ", "Git LFS pointer", id="cut lfs pointer"),
        pytest.param(file_of(b"\xff\xfe{}", b""), "not valid JSON", id="not utf-8"),
        pytest.param(file_of(b"{", b""), "not valid JSON", id="broken json"),
        pytest.param(file_of(b"[" * 100_000, b""), "not valid JSON", id="nested json"),
        pytest.param(file_of([], b""), "not a JSON object", id="a list"),
        pytest.param(file_of({"w": 3}, b""), "tensor w", id="entry is no object"),
        pytest.param(file_of({"w": {"dtype": "F32"}}, b""), "lacks shape, data_offsets", id="keys missing"),
        pytest.param(file_of({"w": entry("F33")}), "'F33'", id="unknown dtype"),
        pytest.param(file_of({"w": entry(["F32"])}), "cannot be read", id="dtype is a list"),
        pytest.param(file_of({"w": entry(shape=(-2,))}), "not a list of sizes", id="negative size"),
        pytest.param(file_of({"w": entry(shape=(2.0,))}), "not a list of sizes", id="fractional size"),
        pytest.param(file_of({"w": entry(shape=(True,))}), "not a list of sizes", id="boolean size"),
        pytest.param(file_of({"w": entry(shape=(2**62, 4))}), "span 8", id="overflowing size"),
        pytest.param(file_of({"w": entry(offsets=(8, 0))}), "span -8", id="reversed offsets"),
        pytest.param(file_of({"w": entry(offsets=(-8, 0))}), "are not [begin, end]", id="negative offset"),
        pytest.param(file_of({"w": entry(offsets=(0, 8, 9))}), "are not [begin, end]", id="three offsets"),
        pytest.param(file_of({"w": entry(offsets=(0, 4))}), "span 4", id="offsets too short for the shape"),
        pytest.param(file_of({"w": entry(offsets=(2**40, 2**40 + 8))}), "belong to no tensor", id="far offsets"),
        pytest.param(file_of({"v": entry(), "w": entry(offsets=(4, 12))}), "overlap", id="overlap"),
        pytest.param(file_of({"v": entry(), "w": entry()}), "overlap", id="one place twice"),
        pytest.param(file_of({"w": entry(offsets=(8, 16))}, b"\0" * 16), "belong to no tensor", id="hole at the start"),
        pytest.param(
            file_of(b'{"w":%b,"w":%b}' % ((json.dumps(entry()).encode(),) * 2)), "these twice: w", id="same name twice"
        ),
    ],
)
def test_broken_files(tmp_path, content, says):
    with pytest.raises(CheckpointError) as caught:
        opening(tmp_path, content)
    assert "model.safetensors" in str(caught.value) and says in str(caught.value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_and_cut_bytes_never_crash(tmp_path, data):
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    try:
        checkpoint = opening(tmp_path, bytes(content))
        for name in checkpoint.headers:
            checkpoint.tensor(name).sum()
    except CheckpointError as error:
        assert str(tmp_path) in str(error)
