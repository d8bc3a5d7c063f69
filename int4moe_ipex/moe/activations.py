"""The activations between up and down, in float32 semantics shared by every backend.

`apply` is the reference; native kernels are tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from int4moe_ipex.errors import UnsupportedModelError

GATED = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_clamped")


@dataclass(frozen=True)
class Activation:
    """Which function stands between gate/up and down.

    Attributes:
        name: silu, gelu (erf), gelu_tanh, relu2 (square of relu) or swiglu_clamped.
        alpha: factor inside the sigmoid of swiglu_clamped (gpt-oss: 1.702).
        limit: clamp of swiglu_clamped (gpt-oss: 7.0).

    With a gate the result is `f(gate) * up`, without one `f(up)`. swiglu_clamped needs a gate:
    `g = min(gate, limit)`, `u = clamp(up, -limit, limit)`, result `g * sigmoid(alpha * g) * (u + 1)`
    (as in gpt-oss's published model code).
    """

    name: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if self.name not in GATED:
            raise UnsupportedModelError(f"activation {self.name!r} is not supported; known: {', '.join(GATED)}")

    def apply(self, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
        """gate, up [T, I] float32 -> [T, I]; gate None for experts without a gate."""
        if self.name == "swiglu_clamped":
            if gate is None:
                raise UnsupportedModelError("swiglu_clamped needs a gate projection")
            g = gate.clamp(max=self.limit)
            u = up.clamp(-self.limit, self.limit)
            return g * torch.sigmoid(self.alpha * g) * (u + 1)
        if gate is None:
            return self._function(up)
        return self._function(gate) * up

    def _function(self, x: torch.Tensor) -> torch.Tensor:
        if self.name == "silu":
            return F.silu(x)
        if self.name == "gelu":
            return F.gelu(x)
        if self.name == "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        return F.relu(x).square()
