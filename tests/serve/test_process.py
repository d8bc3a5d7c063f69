"""`int4moe serve` as a process: many clients, a kill, a graceful stop, and what it says when it cannot start."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.serve.client import Client
from tests.serve.conftest import EXAMPLE, LONG, PROMPTS, need_server

need_server()

SLOW = ("--backend", "reference")  # some 20 ms for each token, whatever else the machine does


class Process:
    def __init__(self, *options, path=EXAMPLE, env=()):
        command = [sys.executable, "-m", "int4moe_ipex", "serve", str(path), "--port", "0", *options]
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **dict(env)}
        )

    def client(self):
        line = self.popen.stdout.readline()
        found = re.match(r"serving \S+ at http://127\.0\.0\.1:(\d+)$", line)
        assert found, line + self.popen.stderr.read()
        return Client(int(found.group(1)))

    def end(self):
        if self.popen.poll() is None:
            self.popen.kill()
        out, err = self.popen.communicate(timeout=LONG)
        return self.popen.returncode, out, err

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


@pytest.mark.parametrize("rows", [1, 8])
def test_many_clients_lose_nothing_and_see_one_truth(rows):
    clients, each = 16, 6
    with Process("--max-running", str(rows)) as process:
        client = process.client()
        alone = {prompt: client.complete(prompt, max_tokens=8)["choices"] for prompt in PROMPTS}
        wrong, answered = [], []

        def work(number):
            for turn in range(each):
                prompt = PROMPTS[(number + turn) % len(PROMPTS)]
                got = client.complete(prompt, max_tokens=8)["choices"]
                answered.append(prompt)
                if got != alone[prompt]:
                    wrong.append((prompt, got))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and len(answered) == clients * each
        assert client("GET", "/health")[1] == {"status": "ok", "running": 0, "waiting": 0}


def test_killed_and_started_again():
    with Process() as process:
        first = process.client().complete(PROMPTS[0], max_tokens=5)["choices"]
        process.popen.kill()
        assert process.popen.wait(LONG) == -signal.SIGKILL
    with Process() as process:
        assert process.client().complete(PROMPTS[0], max_tokens=5)["choices"] == first


def queued(client, count, tokens):
    """`count` threads whose requests of so many tokens wait behind the one that runs, and the list of their answers."""
    body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True}
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(client("POST", "/v1/completions", body))) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    while client("GET", "/health")[1]["waiting"] != count:
        time.sleep(0.005)
    return threads, answers


def test_sigterm_finishes_what_was_taken_in():
    with Process(*SLOW, env={"INT4MOE_SERVE_DRAIN_SECONDS": str(LONG)}) as process:
        client = process.client()
        body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
        running, response = client.send("POST", "/v1/completions", body)
        assert response.status == 200 and response.readline()
        threads, answers = queued(client, 2, 3)
        process.popen.send_signal(signal.SIGTERM)
        rest = response.read().decode()
        assert rest.endswith("data: [DONE]\n\n") and '"finish_reason": "length"' in rest
        running.close()
        for thread in threads:
            thread.join()
        assert [answer["usage"]["completion_tokens"] for _, answer in answers] == [3, 3]
        assert process.popen.wait(LONG) == 0
        assert process.popen.stderr.read() == ""


def test_sigterm_does_not_wait_longer_than_allowed():
    with Process(*SLOW, env={"INT4MOE_SERVE_DRAIN_SECONDS": "0"}) as process:
        client = process.client()
        body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
        _, response = client.send("POST", "/v1/completions", body)
        assert response.readline()
        threads, answers = queued(client, 2, 500)
        process.popen.send_signal(signal.SIGTERM)
        rest = response.read().decode()
        assert '"finish_reason": "length"' not in rest
        said = "the server stopped before this request was done"
        assert said in rest
        for thread in threads:
            thread.join()
        assert [(status, answer["error"]["message"]) for status, answer in answers] == [(503, said)] * 2
        assert process.popen.wait(LONG) == 0


def test_a_taken_port_is_said_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Process("--port", str(port)) as process:
            assert process.popen.wait(LONG) == 2
            _, _, err = process.end()
    assert err == f"int4moe: serve.host 127.0.0.1, serve.port {port}: cannot listen there: Address already in use\n"


def test_settings_come_from_one_file(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    file = tmp_path / "deploy.yaml"
    file.write_text(
        "backend: reference\ndtype: float32\n"
        f"serve: {{model_name: mine, max_context: 40, chat_template: {template}}}\n"
        "generation: {max_new_tokens: 9}\n"
    )
    with Process("--config", str(file)) as process:
        client = process.client()
        assert [(m["id"], m["max_model_len"]) for m in client("GET", "/v1/models")[1]["data"]] == [("mine", 40)]
        body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "ignore_eos": True}
        _, answer = client("POST", "/v1/chat/completions", body)
        assert answer["usage"]["completion_tokens"] == 9
        assert client("POST", "/v1/completions", {"prompt": "x", "max_tokens": 40})[0] == 400
        assert 'paths="reference' in client("GET", "/metrics")[1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("serve: {max_context: 100000}", "serve.max_context 100000 is more than the model's 512"),
        ("serve: {chat_template: /no/such.jinja}", "serve.chat_template /no/such.jinja: No such file"),
        ("serve: {host: no.such.host.invalid}", "serve.host no.such.host.invalid: "),
    ],
)
def test_settings_that_cannot_be_are_one_sentence(tmp_path, settings, said):
    file = tmp_path / "deploy.yaml"
    file.write_text(settings)
    with Process("--config", str(file)) as process:
        assert process.popen.wait(LONG) == 2
        _, out, err = process.end()
    assert out == "" and err.startswith(f"int4moe: {said}") and err.count("\n") == 1
