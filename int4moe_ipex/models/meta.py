"""Building a model without its memory."""

from __future__ import annotations

import torch


def meta_device() -> torch.device:
    """torch's meta device, for `with meta_device():` around the construction of a transformers model.

    transformers' modules import torch._dynamo when they are first used, and torch 2.8 cannot import it inside such a
    context (a circular import); so it is imported here, before.
    """
    import torch._dynamo

    return torch.device("meta")
