"""Tokens are picked as transformers' generate does it, from one's own random stream."""

import pytest
import torch

from int4moe_ipex.serve.sampling import Sampler, Sampling

LOGITS = torch.tensor([1.0, 3.0, 2.9, -1.0, 0.5])


def picks(sampling, count=20, prompt=(0, 3)):
    sampler = Sampler(sampling, list(prompt))
    return [sampler.pick(LOGITS) for _ in range(count)]


def test_greedy_takes_the_largest():
    assert set(picks(Sampling())) == {1}


def test_the_coldest_temperature_is_greedy():
    sampler = Sampler(Sampling(do_sample=True, temperature=1e-300), [0])
    assert [sampler.pick(torch.tensor([-1e4, 5.0, 4.99, 1e-3])) for _ in range(20)] == [1] * 20


def test_a_seed_decides_everything():
    sampling = Sampling(do_sample=True, temperature=2.0, seed=5)
    assert picks(sampling) == picks(sampling)
    assert picks(sampling) != picks(Sampling(do_sample=True, temperature=2.0, seed=6))
    torch.manual_seed(0)
    first = torch.rand(1)
    torch.manual_seed(0)
    picks(sampling)
    assert torch.equal(torch.rand(1), first)  # the process's own stream is left alone


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(do_sample=True, temperature=5.0, top_k=2), {1, 2}),
        (Sampling(do_sample=True, temperature=0.001), {1}),  # the next one has a chance of e^-100
        (Sampling(do_sample=True, top_p=0.4), {1}),
        (Sampling(do_sample=True, temperature=100.0), {0, 1, 2, 3, 4}),
    ],
)
def test_limits_of_sampling(sampling, possible):
    assert set(picks(sampling, 300)) == possible


def test_penalties_count_generated_tokens_alone():
    # 1 wins; after it 2, since 3.0 - 0.4 < 2.9; then both have been there.
    assert picks(Sampling(presence_penalty=0.4), 4) == [1, 2, 1, 1]
    assert picks(Sampling(frequency_penalty=0.4), 4) == [1, 2, 1, 2]
    assert picks(Sampling(presence_penalty=2.0), 1, prompt=(1, 1)) == [1]


def test_repetition_penalty_counts_the_prompt():
    assert picks(Sampling(repetition_penalty=2.0), 1, prompt=(1,)) == [2]
