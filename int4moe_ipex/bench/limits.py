"""What this machine can do at most, measured by the native core in the same run as what is held against it."""

from __future__ import annotations

from dataclasses import dataclass

from int4moe_ipex.errors import BackendError

READ_BYTES = 512 << 20


@dataclass(frozen=True)
class Limits:
    """read: bytes/s that all threads read from memory; fma: float32 FLOP/s; int8: multiply-adds as 2 ops/s."""

    read: float
    fma: float
    int8: float

    def peak(self, compute: str) -> float:
        """The arithmetic ceiling of a compute mode: float32 FMA of w4a16, int8 dot products of w4a8."""
        return self.int8 if compute == "w4a8" else self.fma


def _core():
    try:
        from int4moe_ipex import _native
    except ImportError as error:
        raise BackendError(
            f"the machine's limits are measured by the native core, which is not built: {error}"
        ) from error
    return _native


def measure_read(threads: int, size: int = READ_BYTES) -> float:
    """Bytes per second that `threads` threads read together from memory (best of several passes).

    Raises:
        BackendError: the native core is not built, or memory is short.
    """
    result = _core().measure_read_bandwidth(threads, size)
    if result <= 0:
        raise BackendError(f"cannot measure the read bandwidth: {size >> 20} MiB are not to be had")
    return result


def measure_limits(threads: int, isa: str, size: int = READ_BYTES) -> Limits:
    """Read bandwidth, float32 FMA rate and int8 rate of `threads` threads with the instruction set `isa`.

    Raises:
        BackendError: the native core is not built, or this CPU lacks the instruction set.
    """
    core = _core()
    wide = isa in ("avx512", "amx")
    fma = core.measure_peak(threads, "fma_avx512" if wide else "fma_avx2")
    int8 = core.measure_peak(threads, "int8_avx512" if wide else "int8_avxvnni" if isa == "avx2_vnni" else "int8_avx2")
    if fma <= 0 or int8 <= 0:
        raise BackendError(f"this CPU cannot run {isa} instructions")
    return Limits(measure_read(threads, size), fma, int8)
