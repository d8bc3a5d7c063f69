"""What this machine can do at most, measured by the native core in the same run as what is held against it."""

from __future__ import annotations

from dataclasses import dataclass

from int4moe_ipex.errors import BackendError

READ_BYTES = 512 << 20


@dataclass(frozen=True)
class Limits:
    """read: bytes/s that all threads read from memory. The rest are operations/s on registers, a multiply-add
    counting as two: fma of float32, int8 dot products, and bf16 dot products (0 where the CPU has none).
    """

    read: float
    fma: float
    int8: float
    bf16: float = 0.0

    def peak(self, path: str) -> float | None:
        """The arithmetic ceiling of a path such as `native/avx2/w4a8`; None where its tiles are not measured."""
        parts = path.split("/")
        if any(part.startswith("amx") for part in parts):
            return None
        if "w4a8" in parts:
            return self.int8
        return self.bf16 if any("bf16" in part for part in parts[1:2]) and self.bf16 else self.fma


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
    bf16 = core.measure_peak(threads, "bf16_avx512") if wide else 0.0
    return Limits(measure_read(threads, size), fma, int8, bf16)
