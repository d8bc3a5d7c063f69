"""No gradient is lost in silence: a backward pass that reaches an int4 module without one is an error."""

from __future__ import annotations

import torch

from int4moe_ipex.errors import BackendError


def no_gradient(*_) -> None:
    """Raises BackendError."""
    raise BackendError(
        "this backend computes no gradients through int4 modules; load the model with backend: reference to train "
        "what is around them"
    )


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return y.view_as(y)

    backward = staticmethod(no_gradient)


def refuse_gradients(y: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """y, which was computed from `inputs`; where autograd follows these and not y, backward through y is an error."""
    if torch.is_grad_enabled() and not y.requires_grad and any(t.requires_grad for t in inputs):
        # What torch traces are operators, which say so themselves.
        return y if torch.compiler.is_compiling() else _NoGradient.apply(y, *inputs)
    return y
