"""The native core as torch operators: opcheck, torch.compile without graph breaks, torch.export with dynamic tokens."""

import pytest
import torch
from torch import nn

from int4moe_ipex.backends import native
from int4moe_ipex.backends.base import LinearSpec, LinearWeights, RunConfig
from tests.backends.native.cases import layer, needs_core, pack, routing
from tests.weights import random_weight

pytestmark = needs_core
BACKEND = native.NativeBackend()
RUN = RunConfig(isa="scalar", dtype=torch.float32)


class Layer(nn.Module):
    def __init__(self, experts, linear):
        super().__init__()
        self.experts, self.linear = experts, linear

    def forward(self, x, ids, weights):
        return BACKEND.linear_forward(self.linear, BACKEND.experts_forward(self.experts, x * 2, ids, weights)) + 1


@pytest.fixture(scope="module")
def gen():
    return torch.Generator().manual_seed(3)


@pytest.fixture(scope="module")
def experts(gen):
    spec, stored = layer(gen, 4, hidden=32, intermediate=48, group_size=16, symmetric=False)
    return pack(spec, stored, RUN)


@pytest.fixture(scope="module")
def linear(gen):
    weight = random_weight(gen, 20, 32, 16)
    return BACKEND.pack_linear(LinearSpec.of(weight), LinearWeights(weight), RUN)


def inputs(gen, tokens):
    ids, weights = routing(gen, tokens, 2, 4)
    return torch.randn(tokens, 32, generator=gen), ids, weights


def test_opcheck(gen, experts, linear):
    import int4moe_ipex.backends.native.ops  # noqa: F401  (registers the operators)

    act = experts.spec.activation
    numbers = (experts.layout.experts, experts.layout.numbers, act.name, act.alpha, act.limit, True)
    arguments = (*inputs(gen, 5), experts.blob, *numbers, "scalar", "w4a16")
    torch.library.opcheck(torch.ops.int4moe.experts.default, arguments)
    arguments = (torch.randn(2, 3, 32), linear.blob, linear.layout.numbers, "scalar", "w4a16")
    torch.library.opcheck(torch.ops.int4moe.linear.default, arguments)


def test_compile_in_one_graph(gen, experts, linear):
    module = Layer(experts, linear)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (1, 3, 8):
        args = inputs(gen, tokens)
        assert torch.equal(compiled(*args), module(*args))


def test_export_with_dynamic_tokens(gen, experts, linear):
    module = Layer(experts, linear)
    tokens = torch.export.Dim("tokens", min=1, max=64)
    args = inputs(gen, 4)
    program = torch.export.export(module, args, dynamic_shapes=({0: tokens}, {0: tokens}, {0: tokens}))
    for count in (2, 9):
        args = inputs(gen, count)
        assert torch.equal(program.module()(*args), module(*args))
