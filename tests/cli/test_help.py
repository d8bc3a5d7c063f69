"""Every command explains itself: help with an example that names options which exist."""

import re

import pytest
import typer

from int4moe_ipex.cli.app import build_app


def commands(group, prefix=()):
    """(words, command) of every command, nested ones included."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*prefix, name))
        else:
            yield (*prefix, name), command


COMMANDS = dict(commands(typer.main.get_command(build_app())))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_an_example_that_fits(words):
    command = COMMANDS[words]
    examples = re.findall(r"Example: (.*?)(?:\n\n|$)", command.help, re.DOTALL)
    assert examples, f"int4moe {' '.join(words)} --help has no example"
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for example in examples:
        call = " ".join(example.split())
        assert f"int4moe {' '.join(words)}" in call
        for option in re.findall(r"(?<=\s)--[a-z-]+", call):
            assert option in known, f"{call} has {option}, which is no option of it"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_is_explained(words):
    for parameter in COMMANDS[words].params:
        assert parameter.help, f"int4moe {' '.join(words)}: {parameter.name} has no help"


def test_the_examples_are_shown():
    from typer.testing import CliRunner

    for words in COMMANDS:
        shown = CliRunner().invoke(build_app(), [*words, "--help"])
        assert shown.exit_code == 0 and "Example: " in shown.stdout
