"""The command line's surface is frozen: it changes on purpose (``--update-golden``) or not at all."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from stepscope.cli.main import ALIASES, COMMANDS, HIDDEN, OWN, build_parser, command_module


def describe(parser: argparse.ArgumentParser) -> Iterator[str]:
    """One line per command and, below it, one per flag or argument, in the order of ``--help``."""
    yield parser.prog
    commands: list[argparse.ArgumentParser] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands += dict.fromkeys(action.choices.values())  # an alias is the same parser
        elif not isinstance(action, argparse._HelpAction):
            yield "  " + " ".join(_parts(action))
    for command in commands:
        yield from describe(command)


def _parts(action: argparse.Action) -> Iterator[str]:
    yield ", ".join(action.option_strings) or action.dest
    if action.choices is not None:
        yield "{" + ",".join(str(choice) for choice in action.choices) + "}"
    elif action.nargs != 0 and action.option_strings:
        yield str(action.metavar or action.dest.upper())
    if action.nargs not in (None, 0):
        yield f"nargs={action.nargs}"
    if action.required and action.option_strings:
        yield "required"
    if action.default not in (None, False, argparse.SUPPRESS) and isinstance(action.default, int | float | str | Path):
        yield f"default={action.default}"


def test_flags_are_frozen(golden: Callable[[Path, str], None]) -> None:
    golden(Path(__file__).with_name("flags.txt"), "\n".join(describe(build_parser())) + "\n")


def test_every_command_explains_itself() -> None:
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            shown = {choice.dest.partition(" (")[0] for choice in action._choices_actions if choice.help}
            assert shown == {*COMMANDS, *OWN}
            assert set(action.choices) == {*COMMANDS, *OWN, *HIDDEN, *ALIASES}
            assert all(command.description for command in action.choices.values())


def test_options_before_a_job_are_those_that_take_a_value() -> None:
    """Otherwise their value would be taken for the script."""
    for name in (*COMMANDS, *HIDDEN):
        module = command_module(name)
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        valued = {option for action in parser._actions if action.nargs != 0 for option in action.option_strings}
        assert set(getattr(module, "OPTIONS_BEFORE_JOB", valued)) == valued
