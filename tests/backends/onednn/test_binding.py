"""The binding to oneDNN's C API by itself: no torch, plain ctypes buffers."""

from __future__ import annotations

import ctypes
import gc

import pytest

from int4moe_ipex.backends import onednn
from int4moe_ipex.backends.onednn.enums import Arg, CpuIsa, DataType, FpmathMode, Query, ScratchpadMode, Status
from int4moe_ipex.backends.onednn.errors import OneDnnError, OneDnnUnimplemented, raise_for
from int4moe_ipex.backends.onednn.library import load
from int4moe_ipex.backends.onednn.objects import (
    Attributes,
    Engine,
    MatmulDesc,
    Memory,
    MemoryDesc,
    Primitive,
    Stream,
    address_of,
)
from int4moe_ipex.errors import BackendError

available, how = onednn.status()
needs_library = pytest.mark.skipif(not available, reason=how)
pytestmark = pytest.mark.onednn


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(load())


def test_each_status_is_an_exception_that_names_function_and_status():
    raise_for("dnnl_f", Status.SUCCESS)
    with pytest.raises(OneDnnUnimplemented, match=r"dnnl_f: unimplemented \(status 3\)"):
        raise_for("dnnl_f", 3)
    with pytest.raises(OneDnnError, match=r"dnnl_f: invalid arguments \(status 2\)") as caught:
        raise_for("dnnl_f", 2)
    assert caught.value.status is Status.INVALID_ARGUMENTS and isinstance(caught.value, BackendError)
    with pytest.raises(OneDnnError, match=r"unknown \(status 99\)"):
        raise_for("dnnl_f", 99)


@pytest.mark.parametrize(
    ("bits", "name"),
    [
        (0x7, "avx2"),
        (0xF, "avx2_vnni"),
        (0x27, "avx512_core"),
        (0xE7, "avx512_core_bf16"),
        (0x1FEF, "avx512_core_amx_fp16"),
    ],
)
def test_instruction_sets_are_told_by_bits(bits, name):
    assert CpuIsa.name_of(bits) == name


@needs_library
def test_version_and_runtime():
    library = load()
    assert library.version >= (3, 10) and library.runtime.name
    # A SYCL build looks for devices once per process: whoever asks first has to let it find the CPU.
    with library.cpu_visible():
        assert library.engine_get_count(1) == 1


@needs_library
def test_float32_matmul_with_bias_on_ctypes_buffers(engine):
    def buffer(*values: float) -> ctypes.Array:
        return (ctypes.c_float * len(values))(*values)

    library = engine.library
    src, weights, bias, dst = buffer(1, 2, 3, 4), buffer(1, 0, -1, 2, 1, 0), buffer(10, 20, 30), buffer(*[0] * 6)
    descs = [MemoryDesc(library, dims, DataType.F32) for dims in ((2, 2), (2, 3), (1, 3), (2, 3))]
    assert [d.size for d in descs] == [16, 24, 12, 24]
    desc = MatmulDesc(engine, descs[0], descs[1], descs[3], bias=descs[2])
    arguments = {
        arg: Memory(engine, desc, address_of(data))
        for arg, desc, data in zip((Arg.SRC, Arg.WEIGHTS, Arg.BIAS, Arg.DST), descs, (src, weights, bias, dst))
    }
    Primitive(desc).bind(arguments).run(Stream(engine))
    assert list(dst) == [15, 22, 29, 21, 24, 27]


@needs_library
def test_memory_can_be_moved_to_another_buffer(engine):
    library = engine.library
    desc = MemoryDesc(library, (1, 1), DataType.F32)
    buffers = [(ctypes.c_float * 1)(value) for value in (2, 3, 5, 0)]
    src, weights, dst = (Memory(engine, desc, address_of(b)) for b in (buffers[0], buffers[1], buffers[3]))
    run = Primitive(MatmulDesc(engine, desc, desc, desc)).bind({Arg.SRC: src, Arg.WEIGHTS: weights, Arg.DST: dst})
    stream = Stream(engine)
    run.run(stream)
    assert buffers[3][0] == 6
    src.point(address_of(buffers[2]))
    run.run(stream)
    assert buffers[3][0] == 15


@needs_library
def test_wrong_arguments_and_missing_implementations_are_told_apart(engine):
    library = engine.library
    a, b = MemoryDesc(library, (2, 4), DataType.F32), MemoryDesc(library, (3, 2), DataType.F32)
    with pytest.raises(OneDnnError, match="dnnl_matmul_primitive_desc_create: invalid arguments"):
        MatmulDesc(engine, a, b, a)
    narrow = MemoryDesc(library, (2, 64), DataType.BF16), MemoryDesc(library, (64, 32), DataType.U4, (1, 64))
    with pytest.raises(OneDnnUnimplemented):  # int4 weights need leave to become bfloat16
        MatmulDesc(engine, *narrow, MemoryDesc(library, (2, 32), DataType.BF16))


@needs_library
def test_attributes_choose_the_implementation(engine):
    library = engine.library

    def implementation(mode: FpmathMode) -> str:
        attributes = (
            Attributes(library)
            .scales(Arg.WEIGHTS, 3, (32, 1), DataType.F32)
            .zero_points(Arg.WEIGHTS, 0, (), DataType.S32)
            .fpmath(mode, apply_to_int=True)
            .scratchpad(ScratchpadMode.USER)
        )
        descs = (
            MemoryDesc(library, (4, 64), DataType.F32),
            MemoryDesc(library, (64, 32), DataType.U4, (1, 64)),
            MemoryDesc(library, (4, 32), DataType.F32),
        )
        desc = MatmulDesc(engine, *descs, attributes)
        assert desc.memory_desc(Query.SCRATCHPAD_MD).size >= 0
        return desc.implementation

    assert implementation(FpmathMode.STRICT).startswith("brg_matmul:avx")
    assert implementation(FpmathMode.BF16) == "ref:any"  # float32 activations may not be cut to bfloat16 there


@needs_library
def test_objects_are_destroyed_when_they_are_collected(engine, monkeypatch):
    destroyed = []
    original = engine.library.memory_desc_destroy
    monkeypatch.setattr(
        engine.library, "memory_desc_destroy", lambda handle: (destroyed.append(handle.value), original(handle))
    )
    desc = MemoryDesc(engine.library, (2, 2), DataType.F32)
    address = desc.handle.value
    del desc
    gc.collect()
    assert destroyed == [address]
