"""A running `int4moe serve` under many clients: throughput, latency, memory, and how soon it is back after a kill.

    python benchmarks/serve_load.py PATH [--config deploy.yaml] [--store STORE] [--clients 16] [--requests 200]
    python benchmarks/serve_load.py PATH --clients 0 --starts 5         # starts alone, each after a kill -9

Every answer is compared with the one that a lone request got. Exit status 1: an answer was lost or differed, or the
resident memory of the last quarter of the run exceeds that of the second by more than --growth.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

PROMPTS = ("The statement is used to", "import the module", "A class can", "return a list of", "x", "Objects are")


class Server:
    """The process; `seconds` from its start to the first answer."""

    def __init__(self, options: list[str]):
        start = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "int4moe_ipex", "serve", *options, "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        found = re.search(r":(\d+)$", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line}")
        self.port = int(found.group(1))
        self.complete(PROMPTS[0], 1)
        self.seconds = time.perf_counter() - start

    def complete(self, prompt: str, tokens: int, connection: http.client.HTTPConnection | None = None) -> str:
        connection = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0})
        connection.request("POST", "/v1/completions", body)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer.decode()}")
        return json.loads(answer)["choices"][0]["text"]

    def rss(self) -> int:
        """Resident bytes."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def run(server: Server, clients: int, requests: int, tokens: int) -> dict:
    """Each client sends `requests` requests, one after the other, over a connection that it keeps."""
    alone = {prompt: server.complete(prompt, tokens) for prompt in PROMPTS}
    seconds: list[float] = []
    wrong: list[str] = []
    memory: list[int] = []
    done = threading.Event()

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        for turn in range(requests):
            prompt = PROMPTS[(number + turn) % len(PROMPTS)]
            start = time.perf_counter()
            try:
                text = server.complete(prompt, tokens, connection)
            except Exception as error:
                wrong.append(repr(error))
                connection.close()
                continue
            seconds.append(time.perf_counter() - start)
            if text != alone[prompt]:
                wrong.append(f"{prompt!r} gave {text!r} instead of {alone[prompt]!r}")

    def watch() -> None:
        while not done.wait(0.25):
            memory.append(server.rss())

    watcher = threading.Thread(target=watch)
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    start = time.perf_counter()
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    done.set()
    watcher.join()
    quarter = max(len(memory) // 4, 1)
    memory = memory + [server.rss()] * (2 * quarter + 1 - len(memory))
    return {
        "requests": clients * requests,
        "answered": len(seconds),
        "wrong": wrong[:5],
        "seconds": round(elapsed, 1),
        "requests_per_second": round(len(seconds) / elapsed, 1),
        "tokens_per_second": round(len(seconds) * tokens / elapsed, 1),
        "latency_median": round(statistics.median(seconds), 4),
        "latency_p99": round(statistics.quantiles(seconds, n=100)[98], 4),
        "rss_second_quarter": int(statistics.median(memory[quarter : 2 * quarter])),
        "rss_last_quarter": int(statistics.median(memory[-quarter:])),
        "rss_peak": max(memory),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--config")
    parser.add_argument("--store")
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--clients", type=int, default=16, help="0: no load, starts alone")
    parser.add_argument("--starts", type=int, default=1, help="kills, each followed by a start that is timed")
    parser.add_argument("--requests", type=int, default=200, help="of each client")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--growth", type=float, default=0.02)
    asked = parser.parse_args()
    options = [asked.path, "--max-running", str(asked.max_running)]
    for name in ("config", "store"):
        if getattr(asked, name) is not None:
            options += [f"--{name}", getattr(asked, name)]

    server = Server(options)
    result = {"start_seconds": round(server.seconds, 2)}
    good = True
    if asked.clients:
        result |= run(server, asked.clients, asked.requests, asked.tokens)
        result["rss_growth"] = round(result["rss_last_quarter"] / result["rss_second_quarter"] - 1, 4)
        good = result["answered"] == result["requests"] and not result["wrong"] and result["rss_growth"] <= asked.growth
    restarts = []
    for _ in range(asked.starts):
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        server = Server(options)
        restarts.append(round(server.seconds, 2))
    if restarts:
        result |= {"restart_seconds": restarts, "restart_median": statistics.median(restarts)}
    server.process.send_signal(signal.SIGTERM)
    result["exit_status"] = server.process.wait()
    print(json.dumps(result, indent=1))
    sys.exit(0 if good and result["exit_status"] == 0 else 1)


if __name__ == "__main__":
    main()
