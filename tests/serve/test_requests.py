"""Every field that cannot be honoured is refused by name."""

import pytest

from int4moe_ipex.config import Generation
from int4moe_ipex.serve.requests import BadRequest, Chat, Completion, parse

USER = [{"role": "user", "content": "hi"}]
WRONG = [
    (Completion, {}, "prompt is missing", "prompt"),
    (Completion, {"prompt": 3}, "prompt: ", "prompt"),
    (
        Completion,
        {"prompt": "x", "max_tokens": 0},
        "max_tokens: input should be greater than",
        "max_tokens",
    ),
    (Completion, {"prompt": "x", "max_tokens": "5"}, "max_tokens: input should be a valid integer", "max_tokens"),
    (Completion, {"prompt": "x", "max_tokens": True}, "max_tokens: input should be a valid integer", "max_tokens"),
    (Completion, {"prompt": "x", "temperature": -1}, "temperature: ", "temperature"),
    (Completion, {"prompt": "x", "temperature": float("nan")}, "temperature: ", "temperature"),
    (Completion, {"prompt": "x", "top_p": 0}, "top_p: ", "top_p"),
    (Completion, {"prompt": "x", "n": 2}, "n: input should be 1", "n"),
    (Completion, {"prompt": "x", "best_of": 3}, "best_of: input should be 1", "best_of"),
    (Completion, {"prompt": "x", "echo": True}, "echo: input should be False", "echo"),
    (Completion, {"prompt": "x", "logprobs": 1}, "logprobs: input should be None", "logprobs"),
    (Completion, {"prompt": "x", "suffix": "y"}, "suffix: input should be None", "suffix"),
    (Completion, {"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias: ", "logit_bias"),
    (Completion, {"prompt": "x", "stop": ["a"] * 17}, "stop takes up to 16 strings", None),
    (Completion, {"prompt": "x", "stop": [""]}, "stop takes up to 16 strings", None),
    (Completion, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options needs stream", None),
    (Completion, {"prompt": "x", "temprature": 1, "a": 2}, "unknown or unsupported: a, temprature", "a"),
    (Completion, [1], "the body must be a JSON object", None),
    (Chat, {"messages": []}, "messages: list should have at least 1 item", "messages"),
    (Chat, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role: input should be 'system'", "messages"),
    (Chat, {"messages": [{"role": "user"}]}, "messages.0.content is missing", "messages"),
    (Chat, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content: ", "messages"),
    (Chat, {"messages": USER, "tools": [{"type": "function"}]}, "tools: list should have at most 0 items", "tools"),
    (Chat, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format.type: ", "response_format"),
    (Chat, {"messages": USER, "logprobs": True}, "logprobs: input should be False", "logprobs"),
]


@pytest.mark.parametrize(("kind", "body", "message", "param"), WRONG)
def test_refused_by_name(kind, body, message, param):
    with pytest.raises(BadRequest) as caught:
        parse(kind, body)
    assert str(caught.value).startswith(message)
    assert (caught.value.param, caught.value.status) == (param, 400)


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", "b"], [[1], [2]]])
def test_one_prompt_with_something_in_it(prompt):
    with pytest.raises(BadRequest):
        _ = parse(Completion, {"prompt": prompt}).one_prompt


def test_forms_of_a_prompt():
    for prompt, want in (("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])):
        assert parse(Completion, {"prompt": prompt}).one_prompt == want


def test_sampling_of_requests_over_the_configuration():
    greedy, sampled = Generation(), Generation(do_sample=True, temperature=0.7, top_k=5, seed=3)

    def sampling(defaults, **fields):
        return parse(Completion, {"prompt": "x", **fields}).sampling(defaults)

    assert not sampling(greedy).do_sample
    assert not sampling(greedy, top_p=1).do_sample
    assert sampling(greedy, top_p=0.9).do_sample
    assert sampling(greedy, temperature=1).do_sample
    assert not sampling(sampled, temperature=0).do_sample
    own = sampling(sampled)
    assert (own.temperature, own.top_k, own.seed) == (0.7, 5, 3)
    own = sampling(sampled, temperature=0.2, top_k=-1, seed=-1)
    assert (own.temperature, own.top_k, own.seed) == (0.2, 0, 2**64 - 1)


def test_chat_text_of_parts_and_limits():
    asked = parse(
        Chat,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "max_tokens": 5,
            "max_completion_tokens": 7,
        },
    )
    assert asked.messages[0].for_template() == {"role": "user", "content": "ab"}
    assert asked.new_tokens == 7
