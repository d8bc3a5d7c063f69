"""oneDNN's objects: each owns its handle and destroys it when it is collected.

Nothing here knows torch: memory is an address. Objects keep alive what they were made from.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_char_p, c_void_p

from int4moe_ipex.backends.onednn.enums import (
    Arg,
    DataType,
    EngineKind,
    FpmathMode,
    Query,
    ScratchpadMode,
    StreamFlags,
)
from int4moe_ipex.backends.onednn.library import Dims, ExecArg, Library


class _Object:
    """A handle and its destructor. At the end of the process nothing is destroyed: the library may be gone by then."""

    def __init__(self, library: Library, handle: c_void_p, destroy: Callable[[c_void_p], None]):
        self.library, self.handle = library, handle
        weakref.finalize(self, destroy, handle).atexit = False


class Engine(_Object):
    """dnnl_engine_t: the CPU.

    Raises:
        OneDnnError: this build has no CPU engine, or finds no CPU.
    """

    def __init__(self, library: Library, kind: EngineKind = EngineKind.CPU, index: int = 0):
        handle = c_void_p()
        with library.cpu_visible():
            library.engine_create(byref(handle), kind, index)
        super().__init__(library, handle, library.engine_destroy)


class Stream(_Object):
    """dnnl_stream_t: where primitives run, in order."""

    def __init__(self, engine: Engine, flags: StreamFlags = StreamFlags.IN_ORDER):
        self.engine = engine
        handle = c_void_p()
        engine.library.stream_create(byref(handle), engine.handle, flags)
        super().__init__(engine.library, handle, engine.library.stream_destroy)

    def wait(self) -> None:
        """Blocks until everything that was executed on the stream is done."""
        self.library.stream_wait(self.handle)


class MemoryDesc(_Object):
    """dnnl_memory_desc_t: dimensions, data type, strides in elements (row-major when None)."""

    def __init__(self, library: Library, dims: Sequence[int], dtype: DataType, strides: Sequence[int] | None = None):
        if strides is None:
            strides = [1] * len(dims)
            for axis in range(len(dims) - 2, -1, -1):
                strides[axis] = strides[axis + 1] * dims[axis + 1]
        handle = c_void_p()
        library.memory_desc_create_with_strides(byref(handle), len(dims), Dims(*dims), dtype, Dims(*strides))
        super().__init__(library, handle, library.memory_desc_destroy)

    @property
    def size(self) -> int:
        """Bytes that memory of this description takes."""
        return self.library.memory_desc_get_size(self.handle)


class Memory(_Object):
    """dnnl_memory_t: a description and an address, which the caller keeps alive. The address may be set later."""

    def __init__(self, engine: Engine, desc: MemoryDesc, address: int | None = None):
        self.engine, self.desc = engine, desc
        handle = c_void_p()
        engine.library.memory_create(byref(handle), desc.handle, engine.handle, address)
        super().__init__(engine.library, handle, engine.library.memory_destroy)

    def point(self, address: int) -> None:
        """Moves the memory object to another buffer."""
        self.library.memory_set_data_handle(self.handle, address)


class Attributes(_Object):
    """dnnl_primitive_attr_t."""

    def __init__(self, library: Library):
        handle = c_void_p()
        library.primitive_attr_create(byref(handle))
        super().__init__(library, handle, library.primitive_attr_destroy)

    def scales(self, arg: Arg, mask: int, groups: Sequence[int], dtype: DataType) -> Attributes:
        """One scale per group: mask has a bit per dimension along which they differ; groups may be empty."""
        dims = Dims(*groups) if groups else None
        self.library.primitive_attr_set_scales(self.handle, arg, mask, len(groups), dims, dtype)
        return self

    def zero_points(self, arg: Arg, mask: int, groups: Sequence[int], dtype: DataType) -> Attributes:
        """As `scales`; mask 0 is one zero point for all."""
        dims = Dims(*groups) if groups else None
        self.library.primitive_attr_set_zero_points(self.handle, arg, mask, len(groups), dims, dtype)
        return self

    def fpmath(self, mode: FpmathMode, apply_to_int: bool) -> Attributes:
        """apply_to_int lets integer weights be converted to the floats of the activations."""
        self.library.primitive_attr_set_fpmath_mode_v2(self.handle, mode, apply_to_int)
        return self

    def scratchpad(self, mode: ScratchpadMode) -> Attributes:
        self.library.primitive_attr_set_scratchpad_mode(self.handle, mode)
        return self


class MatmulDesc(_Object):
    """dnnl_primitive_desc_t of `dst = src @ weights + bias`: which implementation would run it.

    Raises:
        OneDnnUnimplemented: none would.
    """

    def __init__(
        self,
        engine: Engine,
        src: MemoryDesc,
        weights: MemoryDesc,
        dst: MemoryDesc,
        attributes: Attributes | None = None,
        bias: MemoryDesc | None = None,
    ):
        self.engine = engine
        library, handle = engine.library, c_void_p()
        library.matmul_primitive_desc_create(
            byref(handle),
            engine.handle,
            src.handle,
            weights.handle,
            None if bias is None else bias.handle,
            dst.handle,
            None if attributes is None else attributes.handle,
        )
        super().__init__(library, handle, library.primitive_desc_destroy)

    @property
    def implementation(self) -> str:
        """Its name as ONEDNN_VERBOSE prints it, such as `brg_matmul:avx2`; `ref:any` is the slow reference."""
        text = c_char_p()
        self.library.primitive_desc_query(self.handle, Query.IMPL_INFO_STR, 0, byref(text))
        return (text.value or b"").decode()

    def memory_desc(self, which: Query, index: int = 0) -> MemoryDesc:
        """A copy of one of its memory descriptions, Query.SCRATCHPAD_MD above all."""
        desc = MemoryDesc.__new__(MemoryDesc)
        handle = c_void_p()
        inner = self.library.primitive_desc_query_md(self.handle, which, index)
        self.library.memory_desc_clone(byref(handle), inner)
        _Object.__init__(desc, self.library, handle, self.library.memory_desc_destroy)
        return desc


class Primitive(_Object):
    """dnnl_primitive_t: compiled code for one description."""

    def __init__(self, desc: MatmulDesc):
        self.engine = desc.engine
        handle = c_void_p()
        desc.library.primitive_create(byref(handle), desc.handle)
        super().__init__(desc.library, handle, desc.library.primitive_destroy)

    def bind(self, arguments: Mapping[int, Memory]) -> Execution:
        """The primitive with its memories, ready to run again and again."""
        return Execution(self, arguments)


class Execution:
    """A primitive and the memory of each of its arguments."""

    def __init__(self, primitive: Primitive, arguments: Mapping[int, Memory]):
        self.primitive, self.arguments = primitive, dict(arguments)
        self._list = (ExecArg * len(arguments))(*(ExecArg(arg, m.handle) for arg, m in self.arguments.items()))

    def run(self, stream: Stream) -> None:
        """Executes and waits.

        Raises:
            OneDnnError: the execution failed.
        """
        library = self.primitive.library
        library.primitive_execute(self.primitive.handle, stream.handle, len(self._list), self._list)
        library.stream_wait(stream.handle)


def address_of(buffer: ctypes.Array) -> int:
    """The address of a ctypes buffer, for use without torch."""
    return ctypes.addressof(buffer)
