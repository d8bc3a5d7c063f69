"""Write a GGUF of Qwen3-MoE's architecture with random Q4_0 weights: llama.cpp's side of the whole-model comparison.

    python write_gguf.py OUT.gguf --layers 12 --head q4_0

Runs in the environment `gguf` of install.py. Norms and routers are float32, all else is Q4_0, as `llama-quantize
--pure` would have it; without --pure llama.cpp keeps the head at Q6_K (--head q6_K).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

CODE_STD = 4.61  # of a uniform 4-bit code
Q4_0, Q6_K, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q6_K", "F32"))


class Source:
    """Random tensors as GGUF bytes; the last axis of a shape is K."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def q4_0(self, shape: tuple[int, ...], gain: float) -> np.ndarray:
        """uint8 [..., K / 32 * 18]: per block a float16 scale, then 16 bytes of codes; rows have norm `gain`."""
        blocks = np.empty((*shape[:-1], shape[-1] // 32, 18), np.uint8)
        mean = gain / (CODE_STD * shape[-1] ** 0.5)
        scales = self.rng.uniform(0.75 * mean, 1.25 * mean, blocks.shape[:-1]).astype(np.float16)
        blocks[..., :2] = scales[..., None].view(np.uint8)
        blocks[..., 2:] = np.frombuffer(self.rng.bytes(blocks[..., 2:].size), np.uint8).reshape(blocks[..., 2:].shape)
        return blocks.reshape(*shape[:-1], -1)

    def q6_k(self, shape: tuple[int, ...], gain: float) -> np.ndarray:
        """uint8 [..., K / 256 * 210]: 192 bytes of 6-bit codes, 16 int8 scales, one float16 scale per block."""
        blocks = np.empty((*shape[:-1], shape[-1] // 256, 210), np.uint8)
        blocks[..., :192] = np.frombuffer(self.rng.bytes(blocks[..., :192].size), np.uint8).reshape(
            blocks[..., :192].shape
        )
        blocks[..., 192:208] = self.rng.integers(48, 80, blocks[..., 192:208].shape, dtype=np.uint8)
        scale = np.float16(gain / (18.5 * 64 * shape[-1] ** 0.5))
        blocks[..., 208:] = np.frombuffer(scale.tobytes(), np.uint8)
        return blocks.reshape(*shape[:-1], -1)

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return (self.rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


def tensors(args: argparse.Namespace, source: Source):
    """Yields (name, GGUF type, logical shape, maker of its bytes) in the order of the file."""
    hidden, inner, experts = args.hidden, args.intermediate, args.experts
    query, value = args.heads * args.head_dim, args.kv_heads * args.head_dim
    small = 1 / (2 * args.layers) ** 0.5  # what adds to the residual stream

    def quantized(name: str, *shape: int, gain: float = 1.0):
        return name, Q4_0, shape, lambda: source.q4_0(shape, gain)

    def ones(name: str, count: int):
        return name, F32, (count,), lambda: np.ones(count, np.float32)

    yield quantized("token_embd.weight", args.vocab, hidden, gain=hidden**0.5 * 0.02)
    for i in range(args.layers):
        yield ones(f"blk.{i}.attn_norm.weight", hidden)
        yield quantized(f"blk.{i}.attn_q.weight", query, hidden)
        yield quantized(f"blk.{i}.attn_k.weight", value, hidden)
        yield quantized(f"blk.{i}.attn_v.weight", value, hidden)
        yield quantized(f"blk.{i}.attn_output.weight", hidden, query, gain=small)
        yield ones(f"blk.{i}.attn_q_norm.weight", args.head_dim)
        yield ones(f"blk.{i}.attn_k_norm.weight", args.head_dim)
        yield ones(f"blk.{i}.ffn_norm.weight", hidden)
        yield f"blk.{i}.ffn_gate_inp.weight", F32, (experts, hidden), lambda: source.normal((experts, hidden))
        yield quantized(f"blk.{i}.ffn_gate_exps.weight", experts, inner, hidden)
        yield quantized(f"blk.{i}.ffn_up_exps.weight", experts, inner, hidden)
        yield quantized(f"blk.{i}.ffn_down_exps.weight", experts, hidden, inner, gain=small)
    yield ones("output_norm.weight", hidden)
    if args.head == "q4_0":
        yield quantized("output.weight", args.vocab, hidden)
    else:
        yield "output.weight", Q6_K, (args.vocab, hidden), lambda: source.q6_k((args.vocab, hidden), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--head", choices=("q4_0", "q6_K"), default="q4_0")
    sizes = {"hidden": 2048, "intermediate": 768, "experts": 128, "top-k": 8, "layers": 12, "vocab": 151936}
    sizes |= {"heads": 32, "kv-heads": 4, "head-dim": 128}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    writer = gguf.GGUFWriter(args.out, "qwen3moe")
    writer.add_name("random")
    writer.add_context_length(40960)
    writer.add_embedding_length(args.hidden)
    writer.add_block_count(args.layers)
    writer.add_feed_forward_length(3 * args.hidden)
    writer.add_expert_feed_forward_length(args.intermediate)
    writer.add_expert_count(args.experts)
    writer.add_expert_used_count(args.top_k)
    writer.add_head_count(args.heads)
    writer.add_head_count_kv(args.kv_heads)
    writer.add_key_length(args.head_dim)
    writer.add_value_length(args.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(args.vocab)
    writer.add_tokenizer_model("none")
    source = Source(0)
    for name, kind, shape, _ in tensors(args, source):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        stored = (*shape[:-1], shape[-1] // block * size) if kind != F32 else shape
        count = int(np.prod(shape)) // block * size
        dtype = np.dtype(np.float32 if kind == F32 else np.uint8)
        writer.add_tensor_info(name, stored, dtype, count, raw_dtype=None if kind == F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, _, _, make in tensors(args, source):
        writer.write_tensor_data(make())
    writer.close()


if __name__ == "__main__":
    main()
