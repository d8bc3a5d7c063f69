"""Finding a oneDNN library, loading it with what it needs, and the signatures of its C functions.

Order: the configuration's `onednn.lib`, the environment variable INT4MOE_ONEDNN_LIB, the package `onednn` of this
Python environment, the system's libdnnl. The first two name one file and are not fallen back from.

The package's build runs on SYCL, which finds no CPU unless OCL_ICD_FILENAMES names the OpenCL driver installed beside
it, nor its own libraries unless they are loaded before it: both are done here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import re
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path

from int4moe_ipex import cpu
from int4moe_ipex.backends.onednn.enums import CpuIsa, Runtime
from int4moe_ipex.backends.onednn.errors import raise_for
from int4moe_ipex.errors import BackendError

PACKAGE = "onednn"
SONAME = "libdnnl.so.3"
VARIABLE = "INT4MOE_ONEDNN_LIB"
OLDEST = (3, 10)  # float32 activations with int4 weights run on its reference implementation before
MAX_NDIMS = 12
Dims = c_int64 * MAX_NDIMS
_CAPS = {
    "scalar": CpuIsa.SSE41,
    "avx2": CpuIsa.AVX2,
    "avx2_vnni": CpuIsa.AVX2_VNNI,
    "avx512": CpuIsa.AVX512_CORE_FP16,
}


class ExecArg(ctypes.Structure):
    """dnnl_exec_arg_t."""

    _fields_ = (("arg", c_int), ("memory", c_void_p))


class _Version(ctypes.Structure):
    """dnnl_version_t."""

    _fields_ = (
        ("major", c_int),
        ("minor", c_int),
        ("patch", c_int),
        ("hash", c_char_p),
        ("cpu_runtime", c_uint),
        ("gpu_runtime", c_uint),
    )


# Functions that return a status; `Library` has each as a method that raises.
_CHECKED: dict[str, tuple] = {
    "dnnl_engine_create": (POINTER(c_void_p), c_int, c_size_t),
    "dnnl_engine_destroy": (c_void_p,),
    "dnnl_stream_create": (POINTER(c_void_p), c_void_p, c_uint),
    "dnnl_stream_wait": (c_void_p,),
    "dnnl_stream_destroy": (c_void_p,),
    "dnnl_memory_desc_create_with_strides": (POINTER(c_void_p), c_int, POINTER(c_int64), c_int, POINTER(c_int64)),
    "dnnl_memory_desc_clone": (POINTER(c_void_p), c_void_p),
    "dnnl_memory_desc_destroy": (c_void_p,),
    "dnnl_memory_create": (POINTER(c_void_p), c_void_p, c_void_p, c_void_p),
    "dnnl_memory_set_data_handle": (c_void_p, c_void_p),
    "dnnl_memory_destroy": (c_void_p,),
    "dnnl_primitive_attr_create": (POINTER(c_void_p),),
    "dnnl_primitive_attr_set_scales": (c_void_p, c_int, c_int, c_int, POINTER(c_int64), c_int),
    "dnnl_primitive_attr_set_zero_points": (c_void_p, c_int, c_int, c_int, POINTER(c_int64), c_int),
    "dnnl_primitive_attr_set_fpmath_mode_v2": (c_void_p, c_int, c_int),
    "dnnl_primitive_attr_set_scratchpad_mode": (c_void_p, c_int),
    "dnnl_primitive_attr_destroy": (c_void_p,),
    "dnnl_matmul_primitive_desc_create": (
        POINTER(c_void_p),
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
    ),
    "dnnl_primitive_desc_query": (c_void_p, c_int, c_int, c_void_p),
    "dnnl_primitive_desc_destroy": (c_void_p,),
    "dnnl_primitive_create": (POINTER(c_void_p), c_void_p),
    "dnnl_primitive_execute": (c_void_p, c_void_p, c_int, POINTER(ExecArg)),
    "dnnl_primitive_destroy": (c_void_p,),
    "dnnl_set_max_cpu_isa": (c_int,),
    "dnnl_set_verbose": (c_int,),
    "dnnl_set_primitive_cache_capacity": (c_int,),
}
# Functions that return a value.
_PLAIN: dict[str, tuple] = {
    "dnnl_version": (POINTER(_Version),),
    "dnnl_get_effective_cpu_isa": (c_int,),
    "dnnl_engine_get_count": (c_size_t, c_int),
    "dnnl_memory_desc_get_size": (c_size_t, c_void_p),
    "dnnl_primitive_desc_query_md": (c_void_p, c_void_p, c_int, c_int),
}


class Library:
    """A loaded oneDNN: its C functions as methods without the prefix `dnnl_`.

    Functions that return a status raise instead: OneDnnUnimplemented for status 3, OneDnnError for any other failure.

    Attributes:
        path, origin: the file, and why it was taken.
        version: (major, minor, patch).
        runtime: what its CPU engine runs on.

    Raises:
        BackendError: the file does not load, is no oneDNN, or is too old.
    """

    def __init__(self, path: str, origin: str = "given"):
        self.path, self.origin = path, origin
        self._dll = _load_with_siblings(path)
        for name, arguments in _CHECKED.items():
            self._bind(name, c_int, arguments, checked=True)
        for name, (result, *arguments) in _PLAIN.items():
            self._bind(name, result, arguments, checked=False)
        version = self.version_struct()
        self.version: tuple[int, int, int] = (version.major, version.minor, version.patch)
        self.runtime = Runtime(version.cpu_runtime)
        if self.version < OLDEST:
            raise BackendError(
                f"{path} is oneDNN {self.version_text}; int4 weights need {'.'.join(map(str, OLDEST))} or later"
            )
        if self.runtime == Runtime.THREADPOOL:
            raise BackendError(f"{path} wants a thread pool from its caller; take a build with OpenMP, TBB or SYCL")

    def _bind(self, name: str, result, arguments, checked: bool) -> None:
        try:
            function = getattr(self._dll, name)
        except AttributeError:
            raise BackendError(f"{self.path} has no {name}: it is no oneDNN {'.'.join(map(str, OLDEST))}") from None
        function.restype, function.argtypes = result, arguments
        if checked:

            def errcheck(status, _function, _arguments, name=name):
                raise_for(name, status)

            function.errcheck = errcheck
        setattr(self, "version_struct" if name == "dnnl_version" else name.removeprefix("dnnl_"), function)
        if name == "dnnl_version":
            self.version_struct = lambda: function().contents

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def effective_isa(self) -> str:
        """The instruction set that it will use, such as `avx512_core_bf16`."""
        return CpuIsa.name_of(self.get_effective_cpu_isa())

    @contextlib.contextmanager
    def cpu_visible(self) -> Iterator[None]:
        """While an engine is made: lets a SYCL build find the OpenCL CPU driver that lies beside it."""
        driver = Path(self.path).with_name("libintelocl.so")
        if Runtime.SYCL not in self.runtime or not driver.is_file():
            yield
            return
        before = os.environ.get("OCL_ICD_FILENAMES")
        os.environ["OCL_ICD_FILENAMES"] = str(driver) if not before else f"{before}{os.pathsep}{driver}"
        try:
            yield
        finally:
            if before is None:
                del os.environ["OCL_ICD_FILENAMES"]
            else:
                os.environ["OCL_ICD_FILENAMES"] = before


def _load_with_siblings(path: str, within: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Loads a library; whatever it misses is loaded first from its own folder, if it lies there.

    Raises:
        BackendError: it does not load.
    """
    while True:
        try:
            return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            missing = re.match(r"([^\s:/]+): cannot open shared object file", str(error))
            sibling = None if missing is None else Path(path).with_name(missing[1])
            if sibling is None or not sibling.is_file() or str(sibling) in (path, *within):
                raise BackendError(f"{path} does not load: {error}") from error
            _load_with_siblings(str(sibling), (path, *within))


@dataclass
class _Choice:
    configured: str | None = None
    loaded: Library | None = None
    problem: str | None = None


_choice = _Choice()


def configure(lib: str | None) -> None:
    """What the configuration's `onednn.lib` says; None leaves the search to the rest of the order.

    Raises:
        BackendError: another library is loaded already; a process can hold one.
    """
    if _choice.loaded is not None and lib is not None and Path(lib) != Path(_choice.loaded.path):
        raise BackendError(f"oneDNN is loaded from {_choice.loaded.path} already; {lib} needs a new process")
    if lib != _choice.configured:
        _choice.configured, _choice.problem = lib, None


def _packaged() -> Path | None:
    """The library of the package `onednn`, found through its metadata."""
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(f.locate())).resolve().with_name(SONAME) for f in files if f.name == SONAME]
    return found[0] if found and found[0].is_file() else None


def _find() -> tuple[str, str]:
    """(path, origin) of the library to load.

    Raises:
        BackendError: a named file is not there.
    """
    for path, origin in (
        (_choice.configured, "onednn.lib of the configuration"),
        (os.environ.get(VARIABLE), f"the environment variable {VARIABLE}"),
    ):
        if path:
            if not Path(path).is_file():
                raise BackendError(f"{path} is no file (from {origin})")
            return path, origin
    packaged = _packaged()
    return (SONAME, "the system") if packaged is None else (str(packaged), f"the package {PACKAGE}")


HOW = f"no oneDNN: pip install onednn==2026.1.0, or name a libdnnl.so with onednn.lib or {VARIABLE}"


def load() -> Library:
    """The process's oneDNN, loaded on first use and capped as INT4MOE_MAX_ISA says.

    Raises:
        BackendError: none is found or the one that is named cannot be used; the same sentence at every call.
    """
    if _choice.loaded is not None:
        return _choice.loaded
    if _choice.problem is None:
        try:
            _choice.loaded = _open(*_find())
            return _choice.loaded
        except BackendError as error:
            _choice.problem = str(error)
    raise BackendError(_choice.problem)


def _open(path: str, origin: str) -> Library:
    try:
        library = Library(path, origin)
    except BackendError as error:
        if path == SONAME and "cannot open shared object file" in str(error):
            raise BackendError(HOW) from None
        raise
    cap = _CAPS.get(cpu.detect().max_isa)
    if cap is not None and "ONEDNN_MAX_CPU_ISA" not in os.environ:
        library.set_max_cpu_isa(cap)
    return library


def status() -> tuple[bool, str]:
    """Whether oneDNN can be used here, and one line for a person: which one, or how to get it. Loads it."""
    try:
        library = load()
    except BackendError as error:
        return False, str(error)
    return True, (
        f"oneDNN {library.version_text} ({library.runtime.name}, {library.effective_isa}) from {library.origin}: "
        f"{library.path}"
    )


@functools.cache
def narrower(isa: str) -> bool:
    """Whether a cap of ours is narrower than what the loaded oneDNN uses."""
    cap = _CAPS.get(isa)
    return cap is not None and bool(load().get_effective_cpu_isa() & ~int(cap))
