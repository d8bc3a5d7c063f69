"""What the tests of decoding in one call share: prompts, steps, and the way through the modules."""

import contextlib

import torch
from transformers.cache_utils import DynamicCache

from int4moe_ipex.models.cache import cache_keyword, growing_cache
from tests.models.tiny import stock_model, write_checkpoint


@contextlib.contextmanager
def module_by_module(model):
    handle = model.model.layers[0].register_forward_hook(lambda *args: None)
    try:
        yield
    finally:
        handle.remove()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(sum(shape)))


@torch.inference_mode()
def logits_of(model, rows: int = 1, prompt: int = 5, steps: int = 6, cache=None, **kwargs) -> torch.Tensor:
    """Logits of some steps after a prompt; every row is another text."""
    cache = growing_cache(model) if cache is None else cache
    past = {cache_keyword(): cache, "use_cache": True}
    model(tokens(rows, prompt), **past)
    return torch.cat([model(t, **past, **kwargs).logits for t in tokens(rows, steps).split(1, dim=1)], dim=1)


def checkpoint(folder, family: str, **changes):
    write_checkpoint(stock_model(family, **changes), family, folder)
    return folder


def both_ways(model, run):
    """The results of `run` in one call where that is possible, and module by module."""
    ours = run()
    with module_by_module(model):
        return ours, run()


@torch.no_grad()
def one_more(model, cache=None, prompt: int = 6, **kwargs):
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(tokens(1, prompt), cache=cache)
    return model(tokens(1, 1), cache=cache, **kwargs)
