"""Each wrong configuration is one error: a sentence with file, line, key, and the nearest key or what is allowed."""

import pytest

from int4moe_ipex.config import Config
from int4moe_ipex.errors import ConfigError

WRONG = {
    "unknown key": ("backnd: native\n", ":1: unknown key backnd; did you mean backend?"),
    "unknown key in a section": (
        "version: 1\nthreads:\n  cout: 4\n",
        ":3: unknown key threads.cout; did you mean threads.count?",
    ),
    "a key of another section": (
        "max_queue: 4\n",
        ":1: unknown key max_queue; did you mean serve.max_queue?",
    ),
    "nothing like it": (
        "store:\n  colour: red\n",
        ":2: unknown key store.colour; known here: path, placement",
    ),
    "unknown key in a rule": (
        "rules:\n  - match: '*'\n    backend: torch\n    max_token: 3\n",
        ":4: unknown key rules[0].max_token; did you mean rules[0].max_tokens?",
    ),
    "unknown value": (
        "isa: avx\n",
        ":1: isa must be auto, scalar, avx2, avx2_vnni, avx512 or amx, not 'avx'",
    ),
    "text for a number": (
        "threads:\n  count: many\n",
        ":2: threads.count must be auto or a whole number of at least 1, not 'many'",
    ),
    "a number out of range": (
        "\nserve:\n  port: 70000\n",
        ":3: serve.port must be a whole number of at least 0 and of at most 65535, not 70000",
    ),
    "a number for a switch": (
        "generation:\n  do_sample: 1\n",
        ":2: generation.do_sample must be true or false, not 1",
    ),
    "a switch for a number": (
        "generation:\n  top_k: yes\n",
        ":2: generation.top_k must be a whole number of at least 0, not true",
    ),
    "a number in quotes": (
        "generation:\n  max_new_tokens: '128'\n",
        ":2: generation.max_new_tokens must be a whole number of at least 1, not '128'",
    ),
    "null": ("backend:\n", ":1: backend must be auto, native, ipex, onednn, torch or reference, not null"),
    "a value for a section": ("threads: 8\n", ":1: threads must be a section of keys, not 8"),
    "a section for a list": ("rules:\n  match: '*'\n", ":1: rules must be a list of a section of keys, not a mapping"),
    "a rule without match": ("rules:\n  - backend: torch\n", ":2: rules[0].match is missing"),
    "another version": ("version: 2\n", ":1: version must be 1, not 2"),
    "a key given twice": ("isa: avx2\ndtype: float32\nisa: amx\n", ":3: isa is given twice (first in line 1)"),
    "not YAML": ("isa: [avx2\nbackend: native\n", ":2: this is not valid YAML: "),
    "no text": ("isa: \0\n", ": this is not valid YAML: "),
    "a value in itself": ("rules: &a [*a]\n", ": a value holds itself, or is nested too deep"),
    "a deep value": ("rules: " + 5000 * "[", ": a value is nested too deep"),
    "a CPU that no kernel has": ("threads: {cpus: 0-99999999999}\n", ":1: threads.cpus: there is no CPU 99999999999"),
    "not a mapping": ("- isa\n", ":1: a configuration is a mapping of keys to values, not a list"),
    "w4a8 where there is none": (
        "backend: torch\ncompute: w4a8\n",
        ":2: backend torch has no w4a8; use compute w4a16, or backend auto or native",
    ),
    "the same through a rule": (
        "compute: w4a8\nrules:\n  - match: '*.self_attn.*'\n    backend: reference\n",
        ":3: backend reference has no w4a8; use compute w4a16, or backend auto or native",
    ),
    "tokens the wrong way round": (
        "rules:\n  - match: '*.experts'\n    min_tokens: 9\n    max_tokens: 8\n    compute: w4a8\n",
        ":3: the rule for *.experts has min_tokens 9 above max_tokens 8",
    ),
    "a rule that can never apply": (
        "rules:\n  - {match: '*', backend: torch}\n  - {match: '*.experts', backend: native}\n",
        ":3: rules[1] (*.experts) can never apply: rules[0] (*) stands before it and matches the same",
    ),
    "a rule that changes nothing": (
        "rules:\n  - match: '*.experts'\n",
        ":2: the rule for *.experts changes nothing; give it a backend, an isa or a compute",
    ),
    "sampling values without sampling": (
        "generation:\n  temperature: 0.7\n",
        ":2: generation.temperature has no effect while generation.do_sample is false",
    ),
    "two bindings": (
        "threads:\n  numa_node: 0\n  cpus: 0-3\n",
        ":3: threads.numa_node and threads.cpus both say where to run; give one of them",
    ),
    "cpus in another notation": (
        "threads:\n  cpus: 0..3\n",
        ":2: threads.cpus is a list such as 0-31,64-95, not '0..3'",
    ),
    "what is not there yet": (
        "expert_parallel: 2\n",
        ":1: expert_parallel above 1 is not implemented in this release",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_sentence_with_file_and_line(case, tmp_path):
    text, sentence = WRONG[case]
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load(file, environ={})
    message = str(caught.value)
    assert "\n" not in message
    if sentence.endswith(": "):
        assert message.startswith(f"{file}{sentence}")
    else:
        assert message == f"{file}{sentence}"


def test_every_mistake_is_named_at_once(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("backnd: native\nisa: avx\n")
    with pytest.raises(ConfigError) as caught:
        Config.load(file, environ={})
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [f"{file}:2", f"{file}:1"]


@pytest.mark.parametrize(
    ("source", "environ", "overrides", "sentence"),
    [
        (None, {"INT4MOE_BACKEND": "fast"}, {}, "INT4MOE_BACKEND: backend must be auto, native, "),
        (None, {"INT4MOE_THREADS_COUNT": "0"}, {}, "INT4MOE_THREADS_COUNT: threads.count must be auto or "),
        (None, {"INT4MOE_DTYPE": "[a"}, {}, "INT4MOE_DTYPE='[a': this is not a YAML value"),
        (None, {"INT4MOE_CONFIG": "/no/such.yaml"}, {}, "/no/such.yaml: no such configuration file, nor one of"),
        (None, {}, {"isa": "sse"}, "argument isa: isa must be auto, scalar, "),
        (None, {}, {"bakend": "torch"}, "argument bakend: unknown key bakend; did you mean backend?"),
        ({"dtype": "int8"}, {}, {}, "argument dtype: dtype must be bfloat16, float16 or float32, not 'int8'"),
        ("avx51", {}, {}, "avx51: no such configuration file, nor one of those shipped: amx, auto, "),
    ],
)
def test_other_sources_are_named(source, environ, overrides, sentence):
    with pytest.raises(ConfigError) as caught:
        Config.load(source, environ=environ, **overrides)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_contradiction_points_at_the_source_that_made_it(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("backend: torch\n")
    with pytest.raises(ConfigError, match=r"^INT4MOE_COMPUTE: backend torch has no w4a8"):
        Config.load(file, environ={"INT4MOE_COMPUTE": "w4a8"})
