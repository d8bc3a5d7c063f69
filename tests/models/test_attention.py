"""The attention kernel against float64, and what goes to transformers' sdpa instead."""

import pytest
import torch
import torch.nn.functional as F

from int4moe_ipex.cpu import detect
from int4moe_ipex.models import attention, core_calls

pytestmark = pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")


class Module:
    is_causal = True
    training = False

    def __init__(self, groups: int):
        self.num_key_value_groups = groups


def heads(batch, tokens, count, dim, dtype, room=0):
    """[batch, count, tokens, dim] as attention modules make it: a transposed view, with room behind it if asked."""
    return torch.randn(batch, tokens + room, count, dim).to(dtype).transpose(1, 2)[:, :, :tokens]


def exact(q, k, v, scale):
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale).transpose(1, 2)


@pytest.fixture(params=["avx2", "avx512"])
def width(request, monkeypatch):
    if not detect().has(request.param):
        pytest.skip(f"this CPU lacks {request.param}, or INT4MOE_MAX_ISA forbids it")
    monkeypatch.setenv("INT4MOE_MAX_ISA", request.param)
    assert core_calls.wide() == (request.param == "avx512")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "tokens", "keys", "dim", "value_dim"),
    [
        (1, 32, 4, 1, 513, 128, 128),
        (2, 8, 8, 65, 65, 64, 64),
        (1, 6, 2, 1, 1, 64, 32),
        (3, 4, 1, 7, 7, 72, 48),
        (1, 16, 16, 129, 129, 192, 128),
        (1, 128, 1, 3, 3, 8, 16),
        (2, 5, 5, 1, 64, 32, 16),
        (1, 12, 1, 1, 700, 64, 96),
        (1, 6, 2, 1, 255, 72, 32),
    ],
)
def test_against_float64(width, dtype, batch, q_heads, kv_heads, tokens, keys, dim, value_dim):
    torch.manual_seed(0)
    q = heads(batch, tokens, q_heads, dim, dtype)
    k, v = heads(batch, keys, kv_heads, dim, dtype, room=3), heads(batch, keys, kv_heads, value_dim, dtype)
    assert attention._takes(q, k, v, causal=True)
    out, weights = attention.attention(Module(q_heads // kv_heads), q, k, v, None, scaling=0.3)
    want = exact(q, k, v, 0.3)
    assert weights is None and out.shape == want.shape and out.dtype is dtype
    assert float((out.double() - want).norm() / want.norm()) < (2e-6 if dtype is torch.float32 else 3e-3)


@pytest.mark.parametrize("keys", [100, 600])
def test_threads_do_not_change_a_bit(width, keys):
    torch.manual_seed(1)
    q, k, v = (heads(2, keys, n, 64, torch.bfloat16) for n in (8, 2, 2))
    if keys == 600:
        q = q[:, :, -1:]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(attention.attention(Module(4), q, k, v, None)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_large_scores_do_not_overflow():
    q = torch.full((1, 1, 4, 16), 300.0)
    out, _ = attention.attention(Module(1), q, q.clone(), torch.arange(64.0).view(1, 1, 4, 16), None)
    assert out.isfinite().all()
    assert torch.allclose(out[0, 0, 0], torch.arange(16.0))


@pytest.mark.parametrize("why", ["mask", "float16", "more keys than tokens", "not causal", "odd size", "gradient"])
def test_the_rest_is_sdpa(why, monkeypatch):
    monkeypatch.setattr(attention, "_run", lambda *_: pytest.fail("the kernel ran"))
    torch.manual_seed(2)
    dtype = torch.float16 if why == "float16" else torch.float32
    dim = 20 if why == "odd size" else 32
    tokens, keys = (3, 9) if why == "more keys than tokens" else (5, 5)
    q, k, v = heads(1, tokens, 4, dim, dtype), heads(1, keys, 2, dim, dtype), heads(1, keys, 2, dim, dtype)
    q.requires_grad_(why == "gradient")
    mask = torch.ones(1, 1, tokens, keys, dtype=torch.bool) if why in ("mask", "more keys than tokens") else None
    causal = False if why == "not causal" else None
    out, _ = attention.attention(Module(2), q, k, v, mask, is_causal=causal)
    groups = (k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    want = F.scaled_dot_product_attention(q, *groups, attn_mask=mask, is_causal=mask is None and causal is None)
    assert torch.allclose(out, want.transpose(1, 2), atol=2e-3)
