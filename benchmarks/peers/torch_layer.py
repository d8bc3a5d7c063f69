"""torch's int4 op, aten::_weight_int4pack_mm_for_cpu, called per expert in bfloat16, gate and up as one matrix.

The leanest loop around the op that we could write: this is the op's own speed, not a framework's.
"""

from __future__ import annotations

import protocol
import torch

DISTINCT = 4  # experts that are really random; the others are copies in memory of their own


def main() -> None:
    layer, _ = protocol.parse(__doc__)
    if layer.group_size not in (32, 64, 128, 256):
        protocol.refuse(f"group_size {layer.group_size} is not one of 32, 64, 128, 256")
    torch.set_num_threads(layer.threads)
    torch.set_grad_enabled(False)
    generator = torch.Generator().manual_seed(0)
    multiply, pack = torch.ops.aten._weight_int4pack_mm_for_cpu, torch.ops.aten._convert_weight_to_int4pack_for_cpu
    group, inner = layer.group_size, layer.intermediate

    def linear(n: int, k: int):
        codes = torch.randint(0, 16, (n, k), dtype=torch.int32, generator=generator)
        scales = (torch.rand(k // group, n, generator=generator) * 0.5 + 0.75) / (4.6 * k**0.5)
        scales = scales.bfloat16()
        zeros = torch.zeros_like(scales)
        if layer.asym:
            zeros = (8 - torch.randint(6, 10, scales.shape, generator=generator)) * scales
        dense = (codes - 8) * scales.t().float().repeat_interleave(group, 1)
        dense += zeros.t().float().repeat_interleave(group, 1)
        return pack(codes, 1), torch.stack((scales, zeros), -1).contiguous(), dense

    made = []
    for _ in range(min(DISTINCT, layer.experts)):
        order = torch.randperm(layer.hidden, generator=generator) if layer.act_order else None
        inner_order = torch.randperm(inner, generator=generator) if layer.act_order else None
        made.append((linear(2 * inner, layer.hidden), linear(layer.hidden, inner), order, inner_order))
    experts = [
        (*(t.clone() for t in up[:2]), *(t.clone() for t in down[:2]), order, inner_order)
        for up, down, order, inner_order in (made[e % len(made)] for e in range(layer.experts))
    ]

    def run(x, ids, weights):
        out = torch.zeros_like(x)
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        token = order // layer.top_k
        share = weights.reshape(-1)[order].unsqueeze(1)
        start = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=layer.experts).tolist()):
            if not count:
                continue
            rows = token[start : start + count]
            up, up_scale, down, down_scale, columns, inner_columns = experts[expert]
            picked = x[rows] if columns is None else x[rows][:, columns]
            both = multiply(picked, up, group, up_scale)
            h = torch.nn.functional.silu(both[:, :inner]) * both[:, inner:]
            if inner_columns is not None:
                h = h[:, inner_columns]
            y = multiply(h, down, group, down_scale)
            out.index_add_(0, rows, y * share[start : start + count])
            start += count
        return out

    def inputs(tokens, ids):
        x = torch.randn(tokens, layer.hidden, generator=generator).bfloat16()
        return x, torch.tensor(ids), torch.full((tokens, layer.top_k), 1 / layer.top_k).bfloat16()

    x, ids, weights = inputs(4, protocol.routing(layer, 4, 1))
    expected = torch.zeros(4, layer.hidden)
    for t in range(4):
        for e in ids[t].tolist():
            up, down, columns, inner_columns = made[e % len(made)]
            row = x[t].float() if columns is None else x[t].float()[columns]
            both = up[2] @ row
            h = torch.nn.functional.silu(both[:inner]) * both[inner:]
            expected[t] += down[2] @ (h if inner_columns is None else h[inner_columns]) / layer.top_k
    error = ((run(x, ids, weights).float() - expected).norm() / expected.norm()).item()
    capability = torch.backends.cpu.get_cpu_capability()
    made.clear()

    def prepare(tokens, ids):
        args = inputs(tokens, ids)
        return lambda: run(*args)

    protocol.serve(
        layer, prepare, {"name": f"torch {torch.__version__} int4 op, bf16", "error": error, "isa": capability}
    )


if __name__ == "__main__":
    main()
