"""Layers of random shapes and kinds on every row of the native core, against the float64 layer."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from int4moe_ipex.backends import native
from int4moe_ipex.cpu import detect
from tests.backends.native.cases import TOLERANCE, layer, needs_core, pack, routing, run_config
from tests.weights import exact_moe, relative_error

pytestmark = needs_core
BACKEND = native.NativeBackend()

HERE = [row for row, usable in native.rows().items() if usable and detect().has(row[0])]
# With few columns and tokens the error of int8 activations scatters; design's 1.5e-2 is for layers of real size.
SMALL_W4A8 = 3e-2


@settings(max_examples=150, deadline=None)
@given(
    row=st.sampled_from(HERE or [("scalar", "w4a16")]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    hidden=st.integers(32, 150).map(lambda n: 2 * n),
    intermediate=st.integers(32, 120).map(lambda n: 2 * n),
    group_size=st.sampled_from([8, 16, 24, 32, 64, 96, 128, 1000]),
    scales_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    flags=st.fixed_dictionaries({k: st.booleans() for k in ("symmetric", "act_order", "shared_perm", "bias", "gate")}),
    tokens=st.integers(1, 70),
    seed=st.integers(0, 2**31),
)
def test_random_layer(row, dtype, hidden, intermediate, group_size, scales_dtype, flags, tokens, seed):
    gen = torch.Generator().manual_seed(seed)
    kinds = {"hidden": hidden, "intermediate": intermediate, "group_size": group_size, "scales_dtype": scales_dtype}
    spec, stored = layer(gen, 3, **kinds, **flags)
    packed = pack(spec, stored, run_config(*row, dtype))
    # Of one token alone W4A8's error scatters to 4e-2: it is taken over several calls.
    total = max(tokens, 24) if row[1] == "w4a8" else tokens
    ids, weights = routing(gen, total, 2, 3)
    x = torch.randn(total, hidden, generator=gen).to(dtype)
    calls = [slice(i, i + tokens) for i in range(0, total, tokens)]
    y = torch.cat([BACKEND.experts_forward(packed, x[part], ids[part], weights[part]) for part in calls])
    bound = SMALL_W4A8 if row[1] == "w4a8" else TOLERANCE[row[1], dtype]
    assert relative_error(y, exact_moe(stored, spec.activation, x, ids, weights)) <= bound
