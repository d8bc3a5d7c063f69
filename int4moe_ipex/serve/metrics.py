"""What a running server tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.process_collector import ProcessCollector

from int4moe_ipex.serve.engine import Engine

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self, engine: Engine, model: str, version: str, paths: list[str]):
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def made(kind, name: str, text: str, labels: tuple[str, ...] = (), **more):
            return kind(f"int4moe_{name}", text, labels, registry=self.registry, **more)

        self.requests = made(Counter, "requests", "Requests answered.", ("endpoint", "status"))
        self.seconds = made(Histogram, "request_seconds", "Arrival to last byte.", ("endpoint",), buckets=SECONDS)
        self.first = made(Histogram, "first_token_seconds", "Arrival to first token.", buckets=SECONDS)
        self.between = made(Histogram, "between_tokens_seconds", "Between tokens of a request.", buckets=SECONDS)
        self.prompt_tokens = made(Counter, "prompt_tokens", "Tokens of prompts taken in.")
        self.prompts = made(Histogram, "prompt_length_tokens", "Tokens per prompt.", buckets=TOKENS)
        self.new_tokens = made(Counter, "generated_tokens", "Tokens generated.")
        made(Gauge, "running_requests", "Requests being computed.").set_function(lambda: engine.running)
        made(Gauge, "waiting_requests", "Requests in the queue.").set_function(lambda: engine.waiting)
        info = made(Info, "model", "What is served.")
        info.info({"name": model, "version": version, "paths": ", ".join(paths)})

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
