"""The endpoint over loopback, against a server in this process."""

import socket
import threading

import pytest

from tests.serve.client import Client
from tests.serve.conftest import PROMPTS, TEMPLATE, Gate, InProcess, load_example, need_server, wait_for

need_server()


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    return str(file)


@pytest.fixture(scope="module")
def served(tokenizer, template):
    import copy

    server = InProcess(load_example(), copy.deepcopy(tokenizer), max_running=4, chat_template=template)
    yield server
    server.close()


@pytest.fixture
def client(served):
    return Client(served.port)


@pytest.fixture
def gated(tokenizer):
    """A server whose model waits."""
    model = load_example()
    gate = Gate(model)
    server = InProcess(model, tokenizer, max_queue=1)
    yield server, gate, Client(server.port)
    gate.opened.set()
    server.close()


def test_health_and_models(client):
    assert client("GET", "/health") == (200, {"status": "ok", "running": 0, "waiting": 0})
    listed = client("GET", "/v1/models")[1]["data"]
    assert [m["id"] for m in listed] == ["tiny"] and listed[0]["max_model_len"] == 512
    assert client("GET", "/v1/models/tiny")[1]["id"] == "tiny"


def test_completion_by_text_and_by_ids(client, tokenizer):
    answer = client.complete(PROMPTS[0], max_tokens=6, model="tiny")
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert answer["choices"][0]["finish_reason"] == "length"
    by_ids = client.complete(tokenizer(PROMPTS[0]).input_ids, max_tokens=6)
    assert by_ids["choices"] == answer["choices"]


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_is_the_whole_answer_in_pieces(client, usage):
    whole = client.complete(PROMPTS[0], max_tokens=24)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = client.stream("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 24, **options})
    assert len({event["id"] for event in events}) == 1
    if usage:
        last = events.pop()
        assert last["choices"] == [] and last["usage"] == whole["usage"]
    pieces = [event["choices"][0] for event in events]
    assert "".join(piece["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == ["length"]
    assert len(pieces) > 5


def test_chat_is_the_template_and_a_completion(client):
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": "what is a module?"}]
    want = client.complete("system: brief\nuser: what is a module?\nassistant:", max_tokens=12)["choices"][0]
    status, answer = client("POST", "/v1/chat/completions", {"messages": messages, "max_completion_tokens": 12})
    assert (status, answer["object"]) == (200, "chat.completion")
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": want["text"]}
    assert choice["finish_reason"] == want["finish_reason"]
    events = client.stream("/v1/chat/completions", {"messages": messages, "max_tokens": 12})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == want["text"]
    assert events[-1]["choices"][0]["delta"] == {}


def test_stop_strings_stay_out(client):
    text = client.complete(PROMPTS[0], max_tokens=24)["choices"][0]["text"]
    stopped = client.complete(PROMPTS[0], max_tokens=24, stop=[text[7:10]])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(text[7:10])], "stop")


def test_seeds(client):
    def text(**fields):
        return client.complete(PROMPTS[2], max_tokens=16, temperature=1.5, **fields)["choices"][0]["text"]

    assert text(seed=1) == text(seed=1)
    assert len({text(seed=seed) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/v1/completions", {"prompt": "x", "model": "gpt-4"}, 404, "no model 'gpt-4' here"),
        ("GET", "/v1/models/other", None, 404, "no model 'other' here"),
        ("GET", "/v1/nothing", None, 404, "GET /v1/nothing: Not Found"),
        ("GET", "/v1/completions", None, 405, "GET /v1/completions: Method Not Allowed"),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 600}, 400, "1 tokens and 600 new ones are wanted"),
        ("POST", "/v1/completions", {"prompt": [5] * 512}, 400, "the prompt has 512 tokens, but the context has 512"),
        ("POST", "/v1/completions", {"prompt": [1024]}, 400, "a token id outside 0 to 1023"),
        ("POST", "/v1/completions", {"prompt": [-1]}, 400, "a token id outside 0 to 1023"),
        ("POST", "/v1/completions", {"prompt": "x", "n": 2}, 400, "n: input should be 1"),
        (
            "POST",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 1}},
            400,
            "the chat template refuses",
        ),
        ("POST", "/v1/completions", {"prompt": "\ud800"}, 400, "surrogates not allowed"),
        *(
            (
                "POST",
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": given},
                400,
                f"not for the chat template: {next(iter(given))}",
            )
            for given in (
                {"chat_template": "{{ messages }}"},
                {"tokenize": False},
                {"truncation": True},
                {"return_tensors": "pt"},
                {"continue_final_message": True},
            )
        ),
    ],
)
def test_errors_have_openais_shape(client, method, path, body, status, said):
    got, answer = client(method, path, body)
    assert got == status
    error = answer["error"]
    assert said in error["message"] and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_bodies_that_are_no_requests(client):
    assert client("POST", "/v1/completions", raw=b"{")[1]["error"]["message"].startswith("the body is not JSON")
    assert client("POST", "/v1/completions", raw=b"\xff")[0] == 400
    assert client("POST", "/v1/completions", raw=b"[" * 200000)[0] == 400
    status, answer = client("POST", "/v1/completions", raw=b" " * (16 * 2**20 + 1))
    assert (status, answer["error"]["message"]) == (413, "the body is larger than 16 MiB")


def test_a_body_that_ends_early_is_no_failure(client, caplog):
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    gone = 'int4moe_requests_total{endpoint="completions",status="499"}'
    wait_for(lambda: gone in client("GET", "/metrics")[1])
    assert "a request failed" not in caplog.text


def test_a_template_that_is_no_text(tmp_path):
    from int4moe_ipex.config import Config
    from int4moe_ipex.errors import ConfigError
    from int4moe_ipex.serve import server

    file = tmp_path / "chat.jinja"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"serve\.chat_template .*chat\.jinja: .*invalid start byte"):
        server.chat_template(Config.load({"serve": {"chat_template": str(file)}}, environ={}))


def test_default_length_ends_at_the_context(client):
    answer = client.complete([5] * 500, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 12


def test_full_queue_is_429_and_nothing_taken_in_is_lost(gated):
    server, gate, client = gated
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(client.complete("x", max_tokens=2))) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: (server.engine.running, server.engine.waiting) == (1, 1))
    connection, response = client.send("POST", "/v1/completions", {"prompt": "x"})
    assert (response.status, response.getheader("retry-after")) == (429, "1")
    assert b"serve.max_queue" in response.read()
    connection.close()
    assert client("GET", "/health")[1] == {"status": "ok", "running": 1, "waiting": 1}
    gate.opened.set()
    for thread in threads:
        thread.join()
    assert len(answers) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_makes_room(gated, stream):
    server, gate, client = gated
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": stream}
    import http.client
    import json

    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", json.dumps(body))
    wait_for(gate.reached.is_set)
    if stream:
        gate.opened.set()
        response = connection.getresponse()
        assert response.status == 200 and response.readline().startswith(b"data: ")
        response.close()
    connection.close()
    if not stream:
        wait_for(lambda: 'status="499"' in client("GET", "/metrics")[1])
        gate.opened.set()
    wait_for(lambda: server.engine.running == 0)
    wait_for(lambda: 'int4moe_requests_total{endpoint="completions",status="499"} 1.0' in client("GET", "/metrics")[1])
    generated = next(
        float(line.split()[1])
        for line in client("GET", "/metrics")[1].splitlines()
        if line.startswith("int4moe_generated_tokens_total")
    )
    assert generated < 500


def test_a_failing_model_is_500_and_the_server_goes_on(gated):
    server, gate, client = gated
    gate.opened.set()
    forward = server.model.forward

    def failing(*args, **kwargs):
        raise RuntimeError("no memory")

    server.model.forward = failing
    status, answer = client("POST", "/v1/completions", {"prompt": "x", "stream": True})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    server.model.forward = forward
    assert client.complete("x", max_tokens=3)["usage"]["completion_tokens"] == 3


def test_metrics_count(client):
    def counted():
        text = client("GET", "/metrics")[1]
        lines = [line.split() for line in text.splitlines() if not line.startswith(("#", "int4moe_model"))]
        return {name: float(value) for name, value in lines}

    before = counted()
    client.complete(PROMPTS[0], max_tokens=7, ignore_eos=True)
    client("POST", "/v1/completions", {"prompt": "x", "n": 2})
    after = counted()

    def more(name):
        return after[name] - before.get(name, 0)

    assert more("int4moe_generated_tokens_total") == 7
    assert more("int4moe_prompt_tokens_total") == 5
    assert more("int4moe_first_token_seconds_count") == 1
    assert more("int4moe_between_tokens_seconds_count") == 6
    assert more('int4moe_requests_total{endpoint="completions",status="200"}') == 1
    assert more('int4moe_requests_total{endpoint="completions",status="400"}') == 1
    assert after["int4moe_running_requests"] == 0
    assert after["process_resident_memory_bytes"] > 2**20


def test_the_openai_package_as_a_client(served):
    openai = pytest.importorskip("openai", reason="needs openai")
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
    assert [m.id for m in api.models.list()] == ["tiny"]
    whole = api.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=12)
    stream = api.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    messages = [{"role": "user", "content": "what is a class?"}]
    chat = api.chat.completions.create(model="tiny", messages=messages, max_tokens=12)
    chunks = list(
        api.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == chat.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="context has 512"):
        api.completions.create(model="tiny", prompt="x", max_tokens=1000)
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="other", prompt="x")
