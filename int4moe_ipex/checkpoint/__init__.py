"""Raw tensors from disk, and what the labels say about them."""

from int4moe_ipex.checkpoint.files import Checkpoint, TensorHeader

__all__ = ["Checkpoint", "TensorHeader"]
