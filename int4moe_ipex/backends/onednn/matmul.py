"""One int4 linear as oneDNN matmuls: how it runs on this CPU, and primitives kept for use again.

oneDNN 3.13 has no optimised int4 matmul whose number of rows is left open, so rows are padded to the next of a few
sizes. Which types it is fast for depends on the instruction set and changes with its version; it is asked.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from int4moe_ipex.backends.onednn.enums import Arg, DataType, FpmathMode, Query, ScratchpadMode
from int4moe_ipex.backends.onednn.errors import OneDnnUnimplemented
from int4moe_ipex.backends.onednn.library import Library, load
from int4moe_ipex.backends.onednn.objects import (
    Attributes,
    Engine,
    Execution,
    MatmulDesc,
    Memory,
    MemoryDesc,
    Primitive,
    Stream,
)
from int4moe_ipex.canonical import SYMMETRIC_ZERO

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MAX_PRIMITIVES = 256
GROUP_STEP = 16  # its groups are multiples of this
DTYPES = {torch.float32: DataType.F32, torch.bfloat16: DataType.BF16, torch.float16: DataType.F16}
TORCH = {value: key for key, value in DTYPES.items()}
_FPMATH = {DataType.F32: FpmathMode.STRICT, DataType.BF16: FpmathMode.BF16, DataType.F16: FpmathMode.F16}


@dataclass(frozen=True)
class Problem:
    """src [M, K] @ codes [N, K/2] -> float32 [M, N]: everything that decides which code runs.

    grouped_zeros: a zero point per group; otherwise 8 for all.
    """

    in_features: int
    out_features: int
    group_size: int
    grouped_zeros: bool
    source: DataType
    scales: DataType

    def __str__(self) -> str:
        types = f"{self.source.name}:U4:F32 with {self.scales.name} scales".lower()
        return f"{types}, in_features {self.in_features}, out_features {self.out_features}, groups of {self.group_size}"


def rows_of(count: int) -> int:
    """The number of rows that `count` (1..512) rows are padded to."""
    return next(size for size in ROWS if size >= count)


def describe(engine: Engine, problem: Problem, rows: int) -> MatmulDesc:
    """The description of the problem with that many rows.

    Raises:
        OneDnnUnimplemented: no implementation takes it.
    """
    library = engine.library
    k, n = problem.in_features, problem.out_features
    groups = (problem.group_size, 1)
    attributes = (
        Attributes(library)
        .scales(Arg.WEIGHTS, 3, groups, problem.scales)
        .fpmath(_FPMATH[problem.source], apply_to_int=True)
        .scratchpad(ScratchpadMode.USER)
    )
    if problem.grouped_zeros:
        attributes.zero_points(Arg.WEIGHTS, 3, groups, DataType.U8)
    else:
        attributes.zero_points(Arg.WEIGHTS, 0, (), DataType.S32)
    return MatmulDesc(
        engine,
        MemoryDesc(library, (rows, k), problem.source),
        MemoryDesc(library, (k, n), DataType.U4, (1, k)),  # [N, K/2] bytes as they are
        MemoryDesc(library, (rows, n), DataType.F32),
        attributes,
    )


class Session:
    """The engine and stream of a library, primitives by (problem, rows) with a bound, and one scratchpad.

    A lock makes executions follow one another: each uses all threads.
    """

    def __init__(self, library: Library):
        self.library = library
        self.engine = Engine(library)
        self.stream = Stream(self.engine)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Problem, int], tuple[Execution, int]] = OrderedDict()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._eight = torch.tensor([SYMMETRIC_ZERO], dtype=torch.int32)

    @functools.cache  # noqa: B019  one session lives as long as the process
    def implementation(self, problem: Problem) -> str:
        """The implementation that would run the problem at one row and at many; "" where there is none.

        Both are asked, as oneDNN may treat a single row differently; a reference implementation outweighs the other.
        """
        names = []
        for rows in (ROWS[0], ROWS[-1]):
            try:
                names.append(describe(self.engine, problem, rows).implementation)
            except OneDnnUnimplemented:
                return ""
        return next((name for name in names if name.startswith("ref")), names[-1])

    def multiply(
        self,
        problem: Problem,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [M, K], M >= 1, in the problem's source type -> float32 [M, N].

        codes uint8 [N, K/2], scales [G, N] in the problem's type, zeros uint8 [G, N] or None; all contiguous.
        """
        if x.shape[0] > ROWS[-1]:
            parts = [self.multiply(problem, part, codes, scales, zeros) for part in x.split(ROWS[-1])]
            return torch.cat(parts)
        count = x.shape[0]
        rows = rows_of(count)
        if rows == count:
            source = x.contiguous()
        else:
            source = x.new_zeros(rows, x.shape[1])
            source[:count] = x
        y = torch.empty(rows, problem.out_features)
        with self._lock:
            execution, scratch = self._execution(problem, rows)
            if scratch > self._scratch.numel():
                self._scratch = torch.empty(scratch, dtype=torch.uint8)
            memory = execution.arguments
            memory[Arg.SRC].point(source.data_ptr())
            memory[Arg.WEIGHTS].point(codes.data_ptr())
            memory[Arg.ATTR_SCALES | Arg.WEIGHTS].point(scales.data_ptr())
            memory[Arg.ATTR_ZERO_POINTS | Arg.WEIGHTS].point((self._eight if zeros is None else zeros).data_ptr())
            memory[Arg.DST].point(y.data_ptr())
            memory[Arg.SCRATCHPAD].point(self._scratch.data_ptr())
            execution.run(self.stream)
        return y[:count]

    def _execution(self, problem: Problem, rows: int) -> tuple[Execution, int]:
        key = (problem, rows)
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found
        desc = describe(self.engine, problem, rows)
        scratchpad = desc.memory_desc(Query.SCRATCHPAD_MD)
        k, n = problem.in_features, problem.out_features
        groups = (k // problem.group_size, n)

        def memory(dims: tuple[int, ...], dtype: DataType, strides: tuple[int, ...] | None = None) -> Memory:
            return Memory(self.engine, MemoryDesc(self.library, dims, dtype, strides))

        zeros = memory(groups, DataType.U8) if problem.grouped_zeros else memory((1,), DataType.S32)
        execution = Primitive(desc).bind(
            {
                Arg.SRC: memory((rows, k), problem.source),
                Arg.WEIGHTS: memory((k, n), DataType.U4, (1, k)),
                Arg.ATTR_SCALES | Arg.WEIGHTS: memory(groups, problem.scales),
                Arg.ATTR_ZERO_POINTS | Arg.WEIGHTS: zeros,
                Arg.DST: memory((rows, n), DataType.F32),
                Arg.SCRATCHPAD: Memory(self.engine, scratchpad),
            }
        )
        self._kept[key] = execution, scratchpad.size
        if len(self._kept) > MAX_PRIMITIVES:
            self._kept.popitem(last=False)
        return self._kept[key]


@functools.cache
def session() -> Session:
    """The process's session.

    Raises:
        BackendError: no usable oneDNN.
    """
    return Session(load())
