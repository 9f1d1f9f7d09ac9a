"""``stepscope``: find the command, run it, turn its outcome into an exit code.

A command's module is imported only when needed: ``stepscope run`` must not pay for ``stepscope sql``. A module with
``OPTIONS_BEFORE_JOB`` gets the words of another program in ``args.job``, untouched by our parser. A module with
``more_words`` gets the positional words after options, which argparse does not accept.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from stepscope import __version__
from stepscope.cli.launch.command import split_job
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.text import say

__all__ = ["COMMANDS", "HIDDEN", "build_parser", "command_module", "main", "run_command"]

COMMANDS = (
    "run",
    "demo",
    "watch",
    "report",
    "list",
    "sql",
    "trace",
    "flight",
    "whatif",
    "serve",
    "token",
    "audit",
    "key",
    "send",
    "doctor",
)
"""In the order in which a new user meets them."""
HIDDEN = ("attach",)
"""Started by Stepscope, not by users."""

EXAMPLES = """\
examples:
  stepscope run train.py --epochs 3                    one process, your script unchanged
  stepscope run --nproc-per-node 4 train.py            starts torchrun for you
  stepscope run torchrun --nproc-per-node 4 train.py   or any launcher
  stepscope demo                                       four ranks on this machine, one of them slow
  stepscope watch                                      the active run, in the terminal
  stepscope report runs/NAME                           the summary of a run, finished or not
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def command_module(name: str) -> Any:
    """Import the module of a command."""
    return import_module(f"stepscope.cli.{'launch' if name in HIDDEN else 'commands'}.{name}")


def build_parser(commands: Sequence[str] = (*COMMANDS, *HIDDEN)) -> argparse.ArgumentParser:
    """The parser of the whole command line, or of some commands only."""
    parser = _Parser(
        prog="stepscope",
        description="Find the rank and the phase that slow down your PyTorch run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stepscope {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name in commands:
        module = command_module(name)
        about = {} if name in HIDDEN else {"help": module.HELP}
        subparser = subparsers.add_parser(
            name,
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
    asked = words[0] if words and words[0] in (*COMMANDS, *HIDDEN) else None
    job: list[str] = []
    if asked:
        options = getattr(command_module(asked), "OPTIONS_BEFORE_JOB", None)
        if options is not None:
            ours, job = split_job(words[1:], options)
            words = [asked, *ours]
    parser = build_parser([asked]) if asked else build_parser()
    args, unknown = parser.parse_known_args(words, argparse.Namespace(job=job))
    more = getattr(command_module(asked), "more_words", None) if asked and unknown else None
    if more is not None and not any(word.startswith("-") for word in unknown):
        more(args, unknown)
    elif unknown:
        where = " ".join(filter(None, ("stepscope", args.command)))
        raise UsageError(f"unknown argument: {' '.join(unknown)} (see `{where} --help`)")
    if args.command is None:
        parser.print_help()
        return 0
    code: int = args.run(args)
    return code


def main() -> NoReturn:
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
