"""This package: one backend and compute mode."""

from __future__ import annotations

import sys
from pathlib import Path

import protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    layer, args = protocol.parse(
        __doc__,
        backend={"default": "native"},
        compute={"default": "w4a16"},
        dtype={"default": "bfloat16"},
        isa={"default": "auto"},
    )
    import torch

    from int4moe_ipex.backends.base import RunConfig
    from int4moe_ipex.bench.layer import LayerCase, build
    from int4moe_ipex.bench.shapes import LayerShape
    from int4moe_ipex.cpu import detect
    from int4moe_ipex.errors import BackendError

    torch.set_num_threads(layer.threads)
    torch.set_grad_enabled(False)
    shape = LayerShape("peer", layer.hidden, layer.intermediate, layer.experts, layer.top_k)
    case = LayerCase(shape, layer.group_size, layer.asym, layer.act_order)
    run = RunConfig(isa=args.isa, compute=args.compute, dtype=getattr(torch, args.dtype))
    try:
        engine = build(case, args.backend, run, detect())
    except BackendError as error:
        protocol.refuse(str(error))

    def prepare(tokens, ids):
        x = torch.randn(tokens, layer.hidden).to(run.dtype)
        index, weights = torch.tensor(ids), torch.full((tokens, layer.top_k), 1 / layer.top_k)
        return lambda: engine.call(x, index, weights)

    about = {"name": f"int4moe {engine.path}", "error": engine.error(), "isa": args.isa}
    protocol.serve(layer, prepare, about | {"pack_seconds": engine.pack_seconds})


if __name__ == "__main__":
    main()
