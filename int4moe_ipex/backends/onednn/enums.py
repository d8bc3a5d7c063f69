"""Numbers of oneDNN's C API (dnnl_common_types.h, dnnl_types.h), as far as matmul needs them."""

from __future__ import annotations

from enum import IntEnum, IntFlag


class Status(IntEnum):
    """dnnl_status_t."""

    SUCCESS = 0
    OUT_OF_MEMORY = 1
    INVALID_ARGUMENTS = 2
    UNIMPLEMENTED = 3
    LAST_IMPL_REACHED = 4
    RUNTIME_ERROR = 5
    NOT_REQUIRED = 6
    INVALID_GRAPH = 7
    INVALID_GRAPH_OP = 8
    INVALID_SHAPE = 9
    INVALID_DATA_TYPE = 10


class DataType(IntEnum):
    """dnnl_data_type_t."""

    UNDEF = 0
    F16 = 1
    BF16 = 2
    F32 = 3
    S32 = 4
    S8 = 5
    U8 = 6
    F64 = 7
    S4 = 11
    U4 = 12


class EngineKind(IntEnum):
    """dnnl_engine_kind_t."""

    ANY = 0
    CPU = 1
    GPU = 2


class StreamFlags(IntFlag):
    """dnnl_stream_flags_t."""

    IN_ORDER = 1
    OUT_OF_ORDER = 2


class FpmathMode(IntEnum):
    """dnnl_fpmath_mode_t: which narrower type floats may be converted to on the way."""

    STRICT = 0
    BF16 = 1
    F16 = 2
    ANY = 3
    TF32 = 4


class ScratchpadMode(IntEnum):
    """dnnl_scratchpad_mode_t: who holds a primitive's working memory."""

    LIBRARY = 0
    USER = 1


class Query(IntEnum):
    """dnnl_query_t."""

    IMPL_INFO_STR = 8
    SRC_MD = 129
    WEIGHTS_MD = 131
    DST_MD = 133
    SCRATCHPAD_MD = 136


class Arg(IntEnum):
    """DNNL_ARG_*: which memory an execution argument is. Scales and zero points are `ATTR_* | argument`."""

    SRC = 1
    DST = 17
    WEIGHTS = 33
    BIAS = 41
    SCRATCHPAD = 80
    ATTR_SCALES = 4096
    ATTR_ZERO_POINTS = 8192


class Runtime(IntFlag):
    """DNNL_RUNTIME_*: what a build runs its threads on."""

    SEQ = 1
    OMP = 2
    TBB = 4
    THREADPOOL = 8
    OCL = 256
    SYCL = 512
    ZE = 1024


class CpuIsa(IntEnum):
    """dnnl_cpu_isa_t. Each is the union of the bits below it: ask for bits, never for an order."""

    DEFAULT = 0x0
    SSE41 = 0x1
    AVX = 0x3
    AVX2 = 0x7
    AVX2_VNNI = 0xF
    AVX2_VNNI_2 = 0x1F
    AVX512_CORE = 0x27
    AVX512_CORE_VNNI = 0x67
    AVX512_CORE_BF16 = 0xE7
    AVX512_CORE_FP16 = 0x1EF
    AVX512_CORE_AMX = 0xFEF
    AVX512_CORE_AMX_FP16 = 0x1FEF
    AVX10_2 = 0x201FF
    AVX10_2_AMX_2 = 0x22FFF

    @classmethod
    def name_of(cls, bits: int) -> str:
        """The widest known instruction set whose bits are all there, in lower case."""
        return max((isa for isa in cls if isa & bits == isa), key=int).name.lower()
