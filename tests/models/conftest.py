import pytest

from int4moe_ipex.models import decode


@pytest.fixture
def steps(monkeypatch):
    """How many rows each step in one call had."""
    seen = []
    made = decode.make_plan

    class Spy:
        def __init__(self, decoder):
            self.decoder = decoder

        def step(self, *args):
            seen.append(len(args[4].lengths))
            return self.decoder.step(*args)

    def make_plan(model):
        plan = made(model)
        if plan.decoder is not None:
            plan.decoder = Spy(plan.decoder)
        return plan

    monkeypatch.setattr(decode, "make_plan", make_plan)
    return seen
