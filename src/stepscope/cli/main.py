"""``stepscope``: find the command, run it, turn its outcome into an exit code.

A command's module is imported only when needed: ``stepscope run`` must not pay for ``stepscope sql``. A module with
``OPTIONS_BEFORE_JOB`` gets the words of another program in ``args.job``, untouched by our parser. A module with
``more_words`` gets the positional words after options, which argparse does not accept. A module with ``USAGE_EXIT``
ends with that code if its command line is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from stepscope import __version__
from stepscope.cli.launch.command import split_job
from stepscope.cli.streams import PatientStream, open_missing_streams
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.text import did_you_mean, nearest, say

__all__ = [
    "ALIASES",
    "COMMANDS",
    "HIDDEN",
    "OWN",
    "build_parser",
    "command_module",
    "command_parser",
    "main",
    "options_of",
    "run_command",
]

COMMANDS = (
    "run",
    "demo",
    "watch",
    "alerts",
    "report",
    "incident",
    "list",
    "compare",
    "gate",
    "history",
    "fleet",
    "sweep",
    "tag",
    "delete",
    "archive",
    "sql",
    "goodput",
    "advise",
    "memory",
    "snapshot",
    "capture",
    "export",
    "trace",
    "flight",
    "whatif",
    "serve",
    "mcp",
    "slack",
    "token",
    "audit",
    "key",
    "send",
    "probe",
    "doctor",
    "completion",
    "schema",
)
"""In the order in which a new user meets them."""
OWN = {"help": "show this help, or that of a command", "version": "print the version"}
"""Commands without a module, and their help: ``help run`` is ``run --help``, ``version`` is ``--version``."""
EXPERIMENTS = ("compare", "gate", "history", "fleet", "sweep", "tag", "delete", "archive")
"""Commands about many runs."""
ANALYSES = (
    "goodput",
    "advise",
    "memory",
    "snapshot",
    "capture",
    "export",
    "trace",
    "flight",
    "whatif",
    "probe",
    "schema",
)
"""Commands that analyze what Stepscope or other tools recorded, or a node; and the schemas of what they print."""
OF_HUBS = ("serve", "mcp", "slack", "token", "audit", "key", "send")
"""Commands about a hub: what serves runs, what talks to it, and who may."""
HIDDEN = ("attach",)
"""Started by Stepscope, not by users."""
WITH_JOBS = ("run", "demo", "sweep", "attach")
"""Their exit code is a job's, whatever becomes of what they print."""
ALIASES = {"ls": "list"}

EXAMPLES = """\
examples:
  stepscope run train.py --epochs 3                    one process, your script unchanged
  stepscope run --nproc-per-node 4 train.py            starts torchrun for you
  stepscope run torchrun --nproc-per-node 4 train.py   or any launcher
  stepscope demo                                       four ranks on this machine, one of them slow
  stepscope watch                                      the active run, in the terminal
  stepscope report runs/NAME                           the summary of a run, finished or not
"""

HELP, VERSION = ("-h", "--help"), ("-V", "--version")
SEE = "(see `stepscope --help`)"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse writes "argument --max-disk/--max_disk: …"
        message = re.sub(r"^argument ([^\s/:]+)(?:/[^\s:]+)*: ", r"\1: ", message)
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), known)
            raise argparse.ArgumentError(action, f"must be one of {', '.join(known)}, not {value!r}{hint}")


def command_module(name: str) -> Any:
    """Import the module of a command."""
    folders = {
        **dict.fromkeys(HIDDEN, "launch."),
        **dict.fromkeys(EXPERIMENTS, "experiments."),
        **dict.fromkeys(ANALYSES, "analysis."),
        **dict.fromkeys(OF_HUBS, "hub."),
    }
    return import_module(f"stepscope.cli.{folders.get(name, 'commands.')}{name}")


def build_parser(commands: Sequence[str] = (*COMMANDS, *OWN, *HIDDEN)) -> argparse.ArgumentParser:
    """The parser of the whole command line, or of some commands only."""
    parser = _Parser(
        prog="stepscope",
        description="Find the rank and the phase that slow down your PyTorch run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"stepscope {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name in commands:
        if name in OWN:
            own = subparsers.add_parser(name, help=OWN[name], description=OWN[name])
            if name == "help":
                own.add_argument("about", metavar="COMMAND", nargs="?", help="the command")
            continue
        module = command_module(name)
        about = {} if name in HIDDEN else {"help": module.HELP}
        subparser = subparsers.add_parser(
            name,
            aliases=[alias for alias, meant in ALIASES.items() if meant == name],
            description=module.HELP,
            epilog=getattr(module, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **about,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def run_command(words: Sequence[str]) -> int:
    """Parse and run; raises StepscopeError for everything that the user can fix."""
    words = _without_own(words)
    command = _command(words[0]) if words else ""
    if not command:
        parser = build_parser([] if words and words[0] in VERSION else (*COMMANDS, *OWN))
        if words:
            parser.parse_args(words[:1])  # prints, and raises SystemExit
        parser.print_help()
        return 0
    module = command_module(command)
    try:
        return _run_module(module, command, words)
    except UsageError as error:
        error.exit_code = getattr(module, "USAGE_EXIT", error.exit_code)
        raise


def _run_module(module: Any, command: str, words: Sequence[str]) -> int:
    job: list[str] = []
    options = getattr(module, "OPTIONS_BEFORE_JOB", None)
    ours = list(words[1:])
    if options is not None:
        ours, job = split_job(ours, options)
    parser = build_parser([command])
    args, unknown = parser.parse_known_args([command, *ours], argparse.Namespace(job=job))
    more = getattr(module, "more_words", None) if unknown else None
    if more is not None and not any(word.startswith("-") for word in unknown):
        more(args, unknown)
    elif unknown:
        raise UsageError(_unknown(command, unknown, options_of(parser, command)))
    code: int = args.run(args)
    return code


def options_of(parser: argparse.ArgumentParser, command: str) -> dict[str, argparse.Action]:
    """All options of a command, by each of their spellings."""
    return dict(command_parser(parser, command)._option_string_actions)


def command_parser(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found: argparse.ArgumentParser = commands.choices[command]
    return found


def _without_own(words: Sequence[str]) -> list[str]:
    """``help NAME`` as ``NAME --help``, ``help`` as ``--help``, ``version`` as ``--version``."""
    if words[:1] == ["version"]:
        return ["--version"]
    if words[:1] != ["help"]:
        return list(words)
    about = [word for word in words[1:2] if word not in OWN and not word.startswith("-")]
    return [*about, "--help"]


def _command(word: str) -> str:
    """The command that a first word names; empty for an option of the program itself; UsageError for anything else."""
    word = ALIASES.get(word, word)
    if word in (*COMMANDS, *HIDDEN):
        return word
    if word in (*HELP, *VERSION):
        return ""
    if word.startswith("-"):
        option = word.partition("=")[0]
        parser = build_parser(COMMANDS)
        having = [name for name in COMMANDS if option in options_of(parser, name)]
        of = f"; it is an option of `stepscope {having[0]}` and comes after that word" if having else ""
        raise UsageError(f"unknown option: {option}{of or did_you_mean(option, (*HELP, *VERSION))} {SEE}")
    if Path(word).suffix == ".py" or (shutil.which(word) and not nearest(word, COMMANDS)):
        raise UsageError(f"unknown command: {word}; to record it, use `stepscope run {shlex.quote(word)} …` {SEE}")
    hint = did_you_mean(word, (*COMMANDS, *OWN, *ALIASES), "`stepscope {}`")
    raise UsageError(f"unknown command: {word}{hint} {SEE}")


def _unknown(command: str, words: Sequence[str], known: Iterable[str]) -> str:
    """Message about words that argparse did not recognize; the first option among them is probably the cause."""
    option = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
    what, hint = ("option", did_you_mean(option, known)) if option else ("argument", "")
    shown = option or " ".join(words)
    return f"unknown {what}: {shown}{hint} (see `stepscope {command} --help`)"


def main() -> NoReturn:
    open_missing_streams()
    sys.stderr = PatientStream(sys.stderr)
    if sys.argv[1:2] and sys.argv[1] in WITH_JOBS:
        sys.stdout = PatientStream(sys.stdout)
    try:
        code = run_command(sys.argv[1:])
        sys.stdout.flush()
    except StepscopeError as error:
        say(str(error))
        code = error.exit_code
    except BrokenPipeError:
        # The reader of our output is gone (`stepscope list | head`); the rest must not be flushed into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
