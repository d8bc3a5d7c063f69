"""How often each expert is taken for a text: counted where the router's choice reaches the experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from int4moe_ipex.errors import Int4MoeError
from int4moe_ipex.moe.experts import Int4Experts
from int4moe_ipex.plots import import_pyplot, save

WINDOW = 1024  # tokens of a long text that are fed at once, each window a sequence of its own


@dataclass(frozen=True)
class ExpertUse:
    """One MoE layer: how many (token, expert) pairs went to each expert."""

    module: str
    counts: list[int]

    @property
    def used(self) -> int:
        return sum(count > 0 for count in self.counts)

    @property
    def balance(self) -> float:
        """Entropy of the use over that of even use: 1 is even, 0 is one expert alone."""
        total = sum(self.counts)
        if total == 0 or len(self.counts) == 1:
            return 1.0
        shares = [count / total for count in self.counts if count]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.counts)) + 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"module": self.module, "used": self.used, "balance": self.balance, "counts": self.counts}


def expert_use(
    model: nn.Module, token_ids: list[int], progress: Callable[[int, int, str], None] | None = None
) -> list[ExpertUse]:
    """Counts for every MoE layer of a loaded model, in the model's order.

    Raises:
        Int4MoeError: no tokens, or a model without MoE layers.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Int4Experts)}
    if not layers:
        raise Int4MoeError("the model has no MoE layer whose routing could be shown")
    if not token_ids:
        raise Int4MoeError("the text has no tokens; give some with --prompt or --text")
    counts = {name: torch.zeros(module.num_experts, dtype=torch.int64) for name, module in layers.items()}

    def counter(name: str) -> Callable[..., None]:
        def count(module: Int4Experts, args: tuple, kwargs: dict) -> None:
            ids = (args[1] if len(args) > 1 else kwargs["top_k_index"]).reshape(-1).long()
            # -1 and num_experts stand for no expert.
            ids = ids[(ids >= 0) & (ids < module.num_experts)]
            counts[name] += torch.bincount(ids, minlength=module.num_experts)

        return count

    hooks = [module.register_forward_pre_hook(counter(name), with_kwargs=True) for name, module in layers.items()]
    try:
        for start in range(0, len(token_ids), WINDOW):
            with torch.inference_mode():
                model(input_ids=torch.tensor([token_ids[start : start + WINDOW]]), use_cache=False)
            if progress is not None:
                progress(min(start + WINDOW, len(token_ids)), len(token_ids), "")
    finally:
        for hook in hooks:
            hook.remove()
    return [ExpertUse(name, found.tolist()) for name, found in counts.items()]


def plot(use: list[ExpertUse], title: str, path: str | Path) -> None:
    """A heat map, layers over experts, as a share of even use; format by the file's suffix.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = import_pyplot()
    width = max(len(layer.counts) for layer in use)
    rows = [[share(layer, e) if e < len(layer.counts) else math.nan for e in range(width)] for layer in use]
    figure, axes = pyplot.subplots(figsize=(max(6, width / 14), max(2, len(use) / 5 + 1)), layout="constrained")
    image = axes.imshow(rows, aspect="auto", interpolation="nearest", cmap="magma", vmin=0)
    axes.set_xlabel("expert")
    axes.set_ylabel("MoE layer")
    axes.set_title(title)
    figure.colorbar(image, ax=axes, label="use (1 is even)")
    save(figure, path)


def share(layer: ExpertUse, expert: int) -> float:
    """An expert's count as a multiple of even use."""
    total = sum(layer.counts)
    return layer.counts[expert] * len(layer.counts) / total if total else 0.0
