"""OpenVINO: the MoE layer as batched matmuls over constant int4 weights, which its CPU plugin fuses into one
gathered matmul per projection (the pattern that its model converter writes for MoE models). Activations float32
unless --precision says bf16. It cannot be capped to AVX2 on a wider machine: with ONEDNN_MAX_CPU_ISA it crashes.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
import protocol
from openvino import Shape, Type
from openvino import opset16 as op
from openvino.utils.node_factory import NodeFactory

DISTINCT = 4
ABSENT = -30.0  # a logit whose softmax is nothing beside the chosen ones


def main() -> None:
    layer, args = protocol.parse(
        __doc__,
        weights={"default": "u4", "choices": ["u4", "i4"]},
        precision={"default": "f32", "choices": ["f32", "bf16"]},
    )
    if layer.act_order:
        protocol.refuse("act-order is not expressed in this graph")
    if layer.asym and args.weights == "i4":
        protocol.refuse("i4 weights are symmetric")
    if layer.hidden % layer.group_size or layer.intermediate % layer.group_size:
        protocol.refuse(f"group_size {layer.group_size} does not divide the sizes")
    rng = np.random.default_rng(0)
    hidden, inner, experts, group = layer.hidden, layer.intermediate, layer.experts, layer.group_size
    distinct = min(DISTINCT, experts)
    copies = np.arange(experts) % distinct
    kind = Type.u4 if args.weights == "u4" else Type.i4
    keep: list = []  # tensors that constants share memory with
    made: dict[str, tuple] = {}

    def ints(*values: int):
        return op.constant(np.array(values, dtype=np.int64))

    def shared(tensor):
        keep.append(tensor)
        return ov.op.Constant(tensor, True)

    def weights(name: str, n: int, k: int):
        codes = rng.integers(0, 16, (distinct, n, k), dtype=np.uint8)
        scales = rng.uniform(0.75, 1.25, (distinct, n, k // group, 1)) / (4.6 * k**0.5)
        scales = scales.astype(np.float16)
        zeros = rng.integers(6, 10, (distinct, n, k // group, 1), dtype=np.uint8) if layer.asym else None
        made[name] = (codes, scales, zeros)
        stored = codes if args.weights == "u4" else codes ^ 8  # two's complement of code - 8
        packed = (stored[..., 0::2] | (stored[..., 1::2] << 4))[copies]
        tensor = ov.Tensor(kind, Shape([experts, n, k // group, group]))
        tensor.data.reshape(-1)[:] = packed.reshape(-1)
        x = op.convert(shared(tensor), "f16")
        if args.weights == "u4":
            zero = ov.Tensor(Type.u4, Shape([experts, n, k // group, 1]))
            if zeros is None:
                zero.data[:] = 0x88
            else:
                flat = zeros[copies].reshape(-1)
                zero.data.reshape(-1)[:] = flat[0::2] | (flat[1::2] << 4)
            x = op.subtract(x, op.convert(shared(zero), "f16"))
        x = op.multiply(x, op.constant(scales[copies]))
        x = op.reshape(x, ints(experts, n, k), False)
        return op.convert(x, "f32")

    x = op.parameter([-1, hidden], np.float32, name="x")
    logits = op.parameter([-1, experts], np.float32, name="logits")
    each = op.reshape(op.tile(x, ints(experts, 1)), ints(experts, -1, hidden), False)
    gate = op.matmul(each, weights("gate", inner, hidden), False, True)
    up = op.matmul(each, weights("up", inner, hidden), False, True)
    swish = NodeFactory("opset4").create("Swish", [gate.output(0)], {})
    down = op.matmul(op.multiply(swish, up), weights("down", hidden, inner), False, True)
    top = op.topk(op.softmax(logits, 1), op.constant(np.int64(layer.top_k)), -1, "max", "value", "i64")
    value, index = top.output(0), top.output(1)
    value = op.divide(value, op.reduce_sum(value, ints(-1), True))
    value = op.slice(value, ints(0, 0), op.shape_of(index), ints(1, 1), ints(0, 1))
    nothing = op.broadcast(op.constant(np.zeros(1, np.float32)), op.shape_of(logits))
    scattered = op.transpose(op.scatter_elements_update(nothing, index, value, ints(1)), ints(1, 0))
    tokens = op.gather(op.shape_of(x), ints(0), op.constant(np.int64(0)))
    factor = op.unsqueeze(op.reshape(scattered, op.concat([ints(experts, 1), tokens], 0), False), ints(3))
    outputs = op.reshape(down, op.concat([ints(experts, 1), tokens, ints(hidden)], 0), False)
    result = op.reduce_sum(op.multiply(outputs, factor), ints(0), False)
    model = ov.Model([result], [x, logits], "moe")
    settings = {
        "INFERENCE_NUM_THREADS": layer.threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_PRECISION_HINT": args.precision,
    }
    compiled = ov.Core().compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()
    kernels = set()
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        kind_of = str(getattr(info["layerType"], "value", info["layerType"]))
        if "atmul" in kind_of.lower() or "FullyConnected" in kind_of:
            kernels.add(f"{kind_of}:{getattr(info['primitiveType'], 'value', info['primitiveType'])}")

    def scores(ids):
        table = np.full((len(ids), experts), ABSENT, np.float32)
        for token, chosen in enumerate(ids):
            table[token, chosen] = rng.random(len(chosen)) * 0.5
        return table

    def run(rows, table):
        request.infer({0: rows, 1: table}, share_inputs=True)
        return request.get_output_tensor(0)

    def dense(name: str, expert: int):
        codes, scales, zeros = (None if t is None else t[expert % distinct].astype(np.float32) for t in made[name])
        n, k = codes.shape
        return ((codes.reshape(n, -1, group) - (8 if zeros is None else zeros)) * scales).reshape(n, k)

    rows = rng.standard_normal((2, hidden)).astype(np.float32)
    ids = protocol.routing(layer, 2, 1)
    table = scores(ids)
    got = np.array(run(rows, table).data).reshape(2, hidden)
    expected = np.zeros((2, hidden))
    for token, chosen in enumerate(ids):
        share = np.exp(table[token, chosen])
        share /= share.sum()
        for expert, part in zip(chosen, share):
            g, u = (rows[token] @ dense(name, expert).T for name in ("gate", "up"))
            expected[token] += part * ((g / (1 + np.exp(-g)) * u) @ dense("down", expert).T)
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    made.clear()

    def prepare(tokens, ids):
        rows, table = rng.standard_normal((tokens, hidden)).astype(np.float32), scores(ids)
        return lambda: run(rows, table)

    name = f"OpenVINO {ov.__version__.split('-')[0]} {args.weights}, {args.precision}"
    protocol.serve(layer, prepare, {"name": name, "error": error, "isa": ", ".join(sorted(kernels))})


if __name__ == "__main__":
    main()
