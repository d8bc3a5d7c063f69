import threading
import time
from pathlib import Path

import pytest


def need_server():
    """Skips the module that calls this where a package of the server is missing."""
    for name in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name, reason=f"needs {name}: pip install 'int4moe_ipex[serve]'")


# Bounds that only a server that hangs exceeds: on a machine with other work a start alone may take a minute.
LONG = 900
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen3moe-gptq-sym-g128"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
PROMPTS = (
    "The statement is used to",
    "import the module",
    "A class can",
    "return a list of all the names in the current scope, and",
    "x",
    "Objects are",
)


def load_example(**config):
    """A fresh model: the engine changes the one it is given."""
    import int4moe_ipex

    return int4moe_ipex.load(EXAMPLE, **config)


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(EXAMPLE)


class InProcess:
    """A server on a thread of the test, with its engine and model at hand."""

    def __init__(self, model, tokenizer, **serve):
        import uvicorn

        from int4moe_ipex.config import Config
        from int4moe_ipex.serve import server
        from int4moe_ipex.serve.listen import listener

        self.model = model
        self.service = server.service(model, tokenizer, Config.load({"serve": serve}, environ={}), "tiny")
        self.engine = self.service.engine
        self.listener = listener("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        config = uvicorn.Config(self.service.app(), log_level="error", lifespan="off", access_log=False)
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run, args=([self.listener],), daemon=True)
        self.thread.start()
        wait_for(lambda: self.uvicorn.started)

    def close(self):
        self.engine.abort()
        self.uvicorn.should_exit = True
        self.thread.join(LONG)
        assert not self.thread.is_alive()
        assert self.engine.join(LONG)


def wait_for(condition, seconds=LONG):
    """Returns once `condition()` is true; the bound is there to end a broken run, not to measure."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)


class Gate:
    """Holds a model's forward back until it is opened."""

    def __init__(self, model):
        self.opened = threading.Event()
        self.reached = threading.Event()
        forward = model.forward

        def gated(*args, **kwargs):
            self.reached.set()
            assert self.opened.wait(LONG)
            return forward(*args, **kwargs)

        model.forward = gated
