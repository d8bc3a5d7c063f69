"""How a decoding step in one call (decode.py) notices that a model is not what it was."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from int4moe_ipex.backends import native
from int4moe_ipex.models.compact import changes_of, version_of
from int4moe_ipex.models.decode_layers import Unknown, address_of, decoder_of, keep, need, norm_of

ENDS = ("embed_tokens", "norm")
ASK_AGAIN = 64  # steps through the modules after which a model that was unfit is looked at again


# How torch (since 2.10) describes a tensor to other libraries in one call.
EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
FITS, WATCHED, CHANGED = range(3)  # what a guard sees (csrc/bindings_guard.cpp)


Weight = tuple[dict, str, int, torch.dtype, tuple, tuple]


@dataclass
class Plan:
    """The core's object for a model's layers, and everything that it relies on.

    Attributes:
        guard: the core's, of the objects and values that must stay what they are.
        decoder: None where a layer is of a kind that the core does not know.
        rows: sequences that a step may have.
        layers: of the model; cache_kind: what `GrowingLayer.place` of each starts with.
        turned: of each head, by the rotation.
        products: of one token through all layers.
        held: what the decoder reads and no module is sure to keep.
        versions: (tensor, version) of weights that the decoder has copies of: they must not have been written to.
        weights: (a module's tensors, name, address, dtype, shape, strides) of those that the guard cannot see.
        watched: whether at the last look somebody wanted to see a layer's module being called, or had put a forward of
            his own over one's.
        ends: what is before and after the layers; whole: whether the core computes it, unwatched at the last look.
        asked: how often a plan without a decoder was asked for.
        sampled: whether `versions` were looked at since the last prompt.
    """

    guard: Any
    decoder: Any = None
    rows: int = 0
    layers: int = 0
    cache_kind: bytes = b""
    hidden: int = 0
    head_dim: int = 0
    turned: int = 0
    products: int = 0
    held: list[Any] = field(default_factory=list)
    versions: list[tuple[torch.Tensor, tuple[int | None, int]]] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    watched: bool = False
    ends: Ends | None = None
    whole: bool = False
    asked: int = 0
    sampled: bool = False

    def holds(self) -> bool:
        """Whether the model still is what the plan was made for."""
        if self.decoder is None:
            # What made the model unfit may have gone: dtypes, gradients.
            self.asked += 1
            if self.asked % ASK_AGAIN == 0:
                return False
        return self.look()

    def look(self) -> bool:
        """Whether all is as it was; finds out whether somebody watches."""
        seen = _seen(self), FITS if self.ends is None else _seen(self.ends)
        self.watched = seen[0] == WATCHED
        self.whole = self.ends is not None and self.ends.known and seen[1] == FITS
        return CHANGED not in seen and self._unwritten()

    def _unwritten(self) -> bool:
        """Samples come from memory that nothing else reads: they are taken once after each prompt."""
        if self.sampled:
            return all(changes_of(tensor) == version[0] for tensor, version in self.versions)
        self.sampled = True
        return all(version_of(tensor) == version for tensor, version in self.versions)


@dataclass
class Ends:
    """The embedding and the norm after the last layer, which are called as ever while somebody watches them.

    Attributes:
        guard, weights: as of a plan.
        known: whether they are of a kind that the core computes.
        table: address of the embedding's weight; vocabulary: its rows.
        norm: address of the norm's weight; eps: of the norm.
    """

    guard: Any
    weights: list[Weight] = field(default_factory=list)
    known: bool = False
    table: int = 0
    vocabulary: int = 0
    norm: int = 0
    eps: float = 0.0


def _seen(of: Plan | Ends) -> int:
    seen = of.guard.look()
    return seen if all(map(_is_same, of.weights)) else CHANGED


def _is_same(weight: Weight) -> bool:
    parameters, name, address, dtype, shape, strides = weight
    tensor = parameters.get(name)
    return (
        tensor is not None
        and tensor.data_ptr() == address
        and not tensor.requires_grad
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.stride() == strides
    )


def _watched(hooks: dict[int, Any]) -> bool:
    # transformers leaves its own in place once hidden states were asked for; they do nothing until the next time.
    return any(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks.values())


# The forward that each class had when it was first seen.
_first_forward: dict[type, Any] = {}


def _is_its_own(cls: type) -> bool:
    """Whether nobody has put another forward into the class that defines it."""
    owner = next(c for c in cls.__mro__ if "forward" in vars(c))
    return owner is nn.Module or vars(owner)["forward"].__qualname__.startswith(f"{owner.__qualname__}.")


def make_plan(model: nn.Module) -> Plan:
    """What `FusedDecoder` needs of this model as it is now."""
    plan = Plan(native._native.Guard(_watched, EXCHANGE))
    inside = [
        (parent, name)
        for parent in model.modules()
        for name, module in parent._modules.items()
        if module is not None and not (parent is model and name in ENDS)
    ]
    classes = _watch(plan.guard, inside)
    plan.guard.size(model.layers._modules)
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        plan.guard.empty(vars(nn.modules.module), name)
    with contextlib.suppress(Unknown):
        _need_own_forward(classes)
        plan.decoder = decoder_of(plan, model)
        plan.ends = _ends(model)
    plan.look()
    return plan


def _watch(guard: Any, modules: list[tuple[nn.Module, str]]) -> set[type]:
    """These modules (parent, name) must stay, unwatched; returns their classes."""
    found: dict[nn.Module, None] = {}
    for parent, name in modules:
        guard.module(parent._modules, name, parent._modules[name])
        found[parent._modules[name]] = None
    for module in found:
        own = vars(module)
        guard.missing(own, "forward")
        guard.hooks(own, "_forward_hooks")
        guard.empty(own, "_forward_pre_hooks")
    classes = {type(module) for module in found if hasattr(type(module), "forward")}
    for cls in classes:
        guard.forward_of(cls)
    return classes


def _need_own_forward(classes: set[type]) -> None:
    for cls in classes:
        need(cls.forward is _first_forward.setdefault(cls, cls.forward) and _is_its_own(cls))


def _ends(model: nn.Module) -> Ends:
    ends, hidden = Ends(native._native.Guard(_watched, EXCHANGE)), model.config.hidden_size
    classes = _watch(ends.guard, [(model, name) for name in ENDS])
    embedding, norm = (getattr(model, name) for name in ENDS)
    with contextlib.suppress(Unknown):
        _need_own_forward(classes)
        need(type(embedding) is nn.Embedding)
        keep(ends, vars(embedding), "max_norm", None)
        ends.vocabulary = embedding.num_embeddings
        ends.table = address_of(ends, embedding, "weight", (ends.vocabulary, hidden))
        ends.norm, ends.eps = norm_of(ends, norm, hidden), norm.variance_epsilon
        keep(ends, vars(norm), "variance_epsilon", ends.eps)
        ends.known = True
    return ends
