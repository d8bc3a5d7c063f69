"""kt-kernel's CPU MoE: its llamafile path (Q4_0 blocks, group 32), or its int4 kernels for raw or GPTQ weights."""

from __future__ import annotations

import os

import numpy as np
import protocol
import torch

DISTINCT = 4
Q4_0, BF16 = 2, 30  # ggml's type numbers


def main() -> None:
    layer, args = protocol.parse(__doc__, kind={"choices": ["llamafile", "raw", "gptq"], "default": "llamafile"})
    if layer.asym or layer.act_order:
        protocol.refuse("these kernels are symmetric and without act-order")
    import kt_kernel
    import kt_kernel_ext as ext
    from kt_kernel_ext import moe as kernels

    torch.set_grad_enabled(False)
    hidden, inner, experts, group = layer.hidden, layer.intermediate, layer.experts, layer.group_size
    most = 4096
    pool = ext.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [layer.threads]
    cpu = ext.CPUInfer(pool)
    mask = torch.zeros(experts, dtype=torch.bool)
    config = kernels.MOEConfig(experts, layer.top_k, hidden, inner, mask.data_ptr())
    config.layer_idx, config.pool, config.max_len = 0, cpu.backend_, most
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    rng = np.random.default_rng(0)
    dense: dict[str, list[torch.Tensor]] = {name: [] for name in shapes}
    keep = []  # memory that the kernels read from

    if args.kind == "llamafile":
        import gguf

        for name, (n, k) in shapes.items():
            blocks = []
            for _ in range(min(DISTINCT, experts)):
                values = (rng.standard_normal((n, k)) / k**0.5).astype(np.float32)
                blocks.append(gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0))
                dense[name].append(torch.from_numpy(gguf.quants.dequantize(blocks[-1], gguf.GGMLQuantizationType.Q4_0)))
            memory = torch.from_numpy(np.concatenate([blocks[e % len(blocks)].reshape(1, -1) for e in range(experts)]))
            keep.append(memory)
            setattr(config, f"{name}_proj", memory.data_ptr())
            setattr(config, f"{name}_type", Q4_0)
        config.hidden_type, config.m_block, config.group_min_len, config.group_max_len = BF16, 32, 10, most
        kernel = kernels.MOE
        used_group = 32
    else:
        codes_of: dict[str, list] = {name: [] for name in shapes}
        scales_of: dict[str, list] = {name: [] for name in shapes}
        for expert in range(experts):
            for name, (n, k) in shapes.items():
                if expert >= DISTINCT:
                    codes_of[name].append(codes_of[name][expert % DISTINCT].clone())
                    scales_of[name].append(scales_of[name][expert % DISTINCT].clone())
                    continue
                codes = torch.from_numpy(rng.integers(0, 16, (n, k), dtype=np.uint8))
                scales = torch.from_numpy(rng.uniform(0.75, 1.25, (n, k // group)) / (4.6 * k**0.5)).bfloat16()
                dense[name].append((codes.float() - 8) * scales.float().repeat_interleave(group, 1))
                codes_of[name].append(_raw(codes) if args.kind == "raw" else _gptq(codes))
                scales_of[name].append(scales if args.kind == "raw" else scales.float().t().contiguous())
        for name in shapes:
            setattr(config, f"{name}_projs", [[t.data_ptr() for t in codes_of[name]]])
            setattr(config, f"{name}_scales", [[t.data_ptr() for t in scales_of[name]]])
        keep += [codes_of, scales_of]
        quant = config.quant_config
        quant.bits, quant.group_size, quant.zero_point = 4, group, False
        kernel = kernels.AVX2RawInt4_MOE if args.kind == "raw" else kernels.AVX2GPTQInt4_MOE
        used_group = group

    moe = kernel(config)
    identity = torch.arange(experts, dtype=torch.int64)
    cpu.submit(moe.load_weights_task(identity.data_ptr()))
    cpu.sync()

    def inputs(tokens, ids):
        x = torch.from_numpy(rng.standard_normal((tokens, hidden))).bfloat16()
        count = torch.tensor([tokens], dtype=torch.int32)
        weights = torch.full((tokens, layer.top_k), 1 / layer.top_k)
        return x, torch.tensor(ids, dtype=torch.int64), weights, torch.zeros_like(x), count

    def run(x, ids, weights, out, count):
        pointers = (t.data_ptr() for t in (ids, weights, x, out))
        cpu.submit(moe.forward_task(count.data_ptr(), layer.top_k, *pointers, False))
        cpu.sync()
        return out

    args_of = inputs(2, protocol.routing(layer, 2, 1))
    got = run(*args_of).float()
    expected = torch.zeros(2, hidden)
    for token in range(2):
        row = args_of[0][token].float()
        for expert in args_of[1][token].tolist():
            gate, up, down = (dense[name][expert % len(dense[name])] for name in shapes)
            expected[token] += down @ (torch.nn.functional.silu(gate @ row) * (up @ row)) / layer.top_k
    error = ((got - expected).norm() / expected.norm()).item()
    dense.clear()

    def prepare(tokens, ids):
        prepared = inputs(tokens, ids)
        return lambda: run(*prepared)

    name = f"kt-kernel {kt_kernel.__version__} {args.kind}, g {used_group}"
    variant = getattr(kt_kernel, "__cpu_variant__", os.environ.get("KT_KERNEL_CPU_VARIANT", "auto"))
    protocol.serve(layer, prepare, {"name": name, "error": error, "isa": variant})


def _raw(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes to [N, K/2] bytes, low nibble first."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()


def _gptq(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes to GPTQ's int32 [K/8, N]."""
    rows = codes.t().reshape(-1, 8, codes.shape[0]).numpy().astype(np.uint32)
    shifts = (np.arange(8, dtype=np.uint32) * 4)[None, :, None]
    return torch.from_numpy(np.bitwise_or.reduce(rows << shifts, axis=1).view(np.int32).copy())


if __name__ == "__main__":
    main()
