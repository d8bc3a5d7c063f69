"""The engine alone: the same tokens as generate, the same whoever else is there, and exactly one end per request."""

import queue

import pytest
import torch

from int4moe_ipex.serve import engine as engines
from int4moe_ipex.serve.engine import Delta, Engine, Failed, Finished, Refused, Request
from int4moe_ipex.serve.sampling import Sampler, Sampling
from tests.serve.conftest import LONG, PROMPTS, Gate, load_example, wait_for


class Asked(Request):
    """A request that collects its events."""

    def __init__(self, prompt, new_tokens, **fields):
        self.events = queue.Queue()
        super().__init__(prompt, new_tokens, self.events.put, **fields)

    def result(self):
        """(text, tokens, last event)."""
        text, tokens = "", 0
        while True:
            event = self.events.get(timeout=LONG)
            if not isinstance(event, Delta):
                assert self.events.empty()
                return text, tokens, event
            assert event.tokens == tokens + 1
            text, tokens = text + event.text, event.tokens


@pytest.fixture
def start(tokenizer):
    engines = []

    def make(model, *args, **kwargs):
        engines.append(Engine(model, tokenizer, *args, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.abort()
        assert engine.join(LONG)


def ids(tokenizer, text):
    return tokenizer(text).input_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_is_generates(start, tokenizer, dtype, rows):
    reference = load_example(dtype=dtype)
    engine = start(load_example(dtype=dtype), rows)
    for prompt in PROMPTS[:3]:
        tokens = ids(tokenizer, prompt)
        want = reference.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False)[0, len(tokens) :]
        asked = Asked(tokens, 20)
        engine.submit(asked)
        text, count, end = asked.result()
        assert text == tokenizer.decode(want, skip_special_tokens=True)
        assert (count, end) == (len(want), Finished("length" if len(want) == 20 else "stop"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_together_is_as_alone(start, tokenizer, dtype, monkeypatch):
    """Bit for bit: the logits of every step, not the text alone."""
    logits = {}

    class Recording(Sampler):
        def __init__(self, sampling, prompt):
            super().__init__(sampling, prompt)
            self.seen = logits.setdefault(tuple(prompt), [])

        def pick(self, row):
            self.seen.append(row.clone())
            return super().pick(row)

    def asked():
        sampled = Sampling(do_sample=True, temperature=1.3, seed=7)
        return [
            Asked(ids(tokenizer, prompt), 16, sampling=sampled if i == 1 else Sampling(), ignore_end=True)
            for i, prompt in enumerate(PROMPTS)
        ]

    monkeypatch.setattr(engines, "Sampler", Recording)
    model = load_example(dtype=dtype)
    engine = start(model, len(PROMPTS))
    sizes, step = [], engine._model.step
    engine._model.step = lambda tokens, *rest: sizes.append(len(tokens)) or step(tokens, *rest)

    results = []
    for request in asked():
        engine.submit(request)
        results.append(request.result())
    assert set(sizes) == {1}
    alone = dict(logits)
    logits.clear()

    gate = Gate(model)
    requests = asked()
    engine.submit(*requests)
    gate.opened.set()
    assert [request.result() for request in requests] == results
    assert max(sizes) == len(PROMPTS)
    for prompt, rows in alone.items():
        assert torch.equal(torch.stack(rows), torch.stack(logits[prompt]))


def test_stop_strings_and_end_tokens(start, tokenizer):
    model = load_example()
    engine = start(model)
    prompt = ids(tokenizer, PROMPTS[0])
    free = Asked(prompt, 24)
    engine.submit(free)
    text, _, _ = free.result()
    stop = text[5:9]
    stopped = Asked(prompt, 24, stop=(stop,))
    engine.submit(stopped)
    got, tokens, end = stopped.result()
    assert (got, end) == (text[: text.index(stop)], Finished("stop")) and tokens < 24

    first = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    ending = start(load_example())
    ending._ends = frozenset([first])
    for ignore, want in ((False, ("", 1, Finished("stop"))), (True, (text, 24, Finished("length")))):
        asked = Asked(prompt, 24, ignore_end=ignore)
        ending.submit(asked)
        assert asked.result() == want


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_place_is_free_before_the_answer_that_held_it_is_seen(start, tokenizer, tokens):
    engine = start(load_example(), max_queue=0)
    prompt, found = ids(tokenizer, "x"), []

    first, second = (Asked(prompt, tokens, ignore_end=True) for _ in range(2))

    def ask_again(event):
        if not isinstance(event, Delta):
            found.append(engine.running)
            engine.submit(second)
        first.events.put(event)

    first.deliver = ask_again
    engine.submit(first)
    assert first.result()[2] == second.result()[2] == Finished("length")
    assert found == [0]


def test_the_queue_is_bounded(start, tokenizer):
    model = load_example()
    gate = Gate(model)
    engine = start(model, max_queue=2)
    prompt = ids(tokenizer, "x")
    taken = [Asked(prompt, 2) for _ in range(3)]
    for asked in taken:
        engine.submit(asked)
    assert gate.reached.wait(LONG)
    assert (engine.running, engine.waiting) == (1, 2)
    with pytest.raises(Refused) as refused:
        engine.submit(Asked(prompt, 2))
    assert refused.value.status == 429
    gate.opened.set()
    assert {asked.result()[2] for asked in taken} == {Finished("length")}
    wait_for(lambda: (engine.running, engine.waiting) == (0, 0))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_failure_ends_its_requests_alone(start, tokenizer, rows):
    model = load_example()
    engine = start(model, rows)
    forward, calls = model.forward, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no memory")
        return forward(*args, **kwargs)

    model.forward = failing
    first = Asked(ids(tokenizer, PROMPTS[0]), 8, ignore_end=True)
    engine.submit(first)
    assert first.result()[2].status == 500
    second = Asked(ids(tokenizer, PROMPTS[0]), 8, ignore_end=True)
    engine.submit(second)
    assert second.result()[1:] == (8, Finished("length"))


def test_cancelled_requests_make_room(start, tokenizer):
    model = load_example()
    gate = Gate(model)
    engine = start(model, max_queue=1)
    running, waiting = (Asked(ids(tokenizer, "x"), 400, ignore_end=True) for _ in range(2))
    engine.submit(running, waiting)
    assert gate.reached.wait(LONG)
    running.cancel()
    waiting.cancel()
    gate.opened.set()
    wait_for(lambda: (engine.running, engine.waiting) == (0, 0))
    assert running.events.qsize() <= 2 and waiting.events.empty()


def test_stop_finishes_and_abort_does_not(tokenizer):
    model = load_example()
    gate = Gate(model)
    engine = Engine(model, tokenizer, max_queue=1)
    taken = [Asked(ids(tokenizer, "x"), 3, ignore_end=True) for _ in range(2)]
    engine.submit(*taken)
    engine.stop()
    with pytest.raises(Refused) as refused:
        engine.submit(Asked(ids(tokenizer, "x"), 3))
    assert refused.value.status == 503
    gate.opened.set()
    assert [asked.result()[2] for asked in taken] == [Finished("length")] * 2
    assert engine.join(LONG)

    engine = Engine(model, tokenizer, max_queue=1)
    gate.opened.clear()
    taken = [Asked(ids(tokenizer, "x"), 300, ignore_end=True) for _ in range(2)]
    engine.submit(*taken)
    engine.abort("over")
    gate.opened.set()
    assert {asked.result()[2] for asked in taken} == {Failed(503, "over")}
    assert engine.join(LONG)
