"""``stepscope completion``: a script that teaches a shell to complete our command line, written by shtab.

shtab turns the parsers into a script, so a press of Tab starts no Python. What a value can be is read from its parser:
its choices, the words of a metavar such as ``report|abort|CMD``, runs, files or directories.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stepscope.cli.arguments import RUNS_FOLDER, run_or_url
from stepscope.cli.main import COMMANDS, OWN, build_parser, command_module, command_parser
from stepscope.store.paths import META

__all__ = ["EPILOG", "HELP", "SHELLS", "add_arguments", "completion_script", "run"]

HELP = "print a script that completes commands, options and runs in your shell"
EPILOG = """\
examples:
  stepscope completion bash > ~/.local/share/bash-completion/completions/stepscope
  stepscope completion zsh > DIR/_stepscope      a folder of fpath, before compinit runs
  stepscope completion fish > ~/.config/fish/completions/stepscope.fish
  stepscope completion tcsh > ~/.stepscope.tcsh  and `source ~/.stepscope.tcsh` in ~/.tcshrc
"""
SHELLS = ("bash", "zsh", "fish", "tcsh")
LAUNCHERS = ("accelerate", "deepspeed", "mpirun", "python", "srun", "torchrun")
FILES = {"bash": "compgen -f", "zsh": "_files", "fish": "__fish_complete_path", "tcsh": "f"}
FOLDERS = {"bash": "compgen -d", "zsh": "_files -/", "fish": "__fish_complete_directories", "tcsh": "d"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh, fish or tcsh")


def run(args: argparse.Namespace) -> int:
    print(completion_script(args.shell))
    return 0


def completion_script(shell: str) -> str:
    import shtab

    parser = build_parser((*COMMANDS, *OWN))
    for name in COMMANDS:
        command = command_parser(parser, name)
        if hasattr(command_module(name), "OPTIONS_BEFORE_JOB"):
            job = command.add_argument(
                "job", nargs=argparse.REMAINDER, help="the script or launcher, and its arguments"
            )
            _complete_with(job, _function("job_file", FILES, words=LAUNCHERS))
        for action in command._actions:
            _describe_value(action)
    about: Any = command_parser(parser, "help")._actions[-1]
    about.choices = COMMANDS
    text: str = shtab.complete(parser, shell, root_prefix="stepscope")
    return text


def _describe_value(action: argparse.Action) -> None:
    """Tell shtab what an option's value, or a positional argument, can be."""
    action.option_strings = [name for name in action.option_strings if "_" not in name]
    if action.choices is not None or hasattr(action, "complete"):
        return
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    parts = metavar.split("|")
    words = [part for part in parts if part.islower() and len(parts) > 1]
    if "RUN" in parts:
        with_files = "FILE" in parts
        _complete_with(
            action, _function("run_or_file" if with_files else "run_dir", FILES if with_files else FOLDERS, runs=True)
        )
    elif words:
        action.choices = words
    elif action.type in (Path, run_or_url) or metavar == "FILE":
        _complete_with(action, _function("dir", FOLDERS) if metavar.lower() == "dir" else _function("file", FILES))


def _complete_with(action: argparse.Action, complete: dict[str, Any]) -> None:
    action.complete = complete  # type: ignore[attr-defined]


def _function(name: str, paths: dict[str, str], *, words: tuple[str, ...] = (), runs: bool = False) -> dict[str, Any]:
    """A completer of shtab: these words, runs of the usual folder, and files or directories.

    shtab calls the function of a shell by its name; in bash a name with ``_file`` or ``_dir`` marks what it prints as
    the names of files.
    """
    function = f"_stepscope_{name}"
    pattern = f"{RUNS_FOLDER}/*/{META}"
    bash = [f'compgen -W "{" ".join(words)}" -- "$1"'] if words else []
    zsh = [f"compadd {' '.join(words)}"] if words else []
    fish = [f"printf '%s\\n' {' '.join(words)}"] if words else []
    if runs:
        bash += [
            "local meta",
            f'for meta in {RUNS_FOLDER}/"$1"*/{META}; do',
            f'  if [ -e "$meta" ]; then meta=${{meta#{RUNS_FOLDER}/}}; echo "${{meta%/{META}}}"; fi',
            "done",
        ]
        zsh.append(f"compadd -- {pattern}(N:h:t)")
        fish += [f"for meta in {pattern}", "  basename (dirname $meta)", "end"]
    bash.append(f'{paths["bash"]} -- "$1"')
    zsh.append(paths["zsh"])
    fish.append(f"{paths['fish']} (commandline -ct)")
    return {
        "bash": function,
        "zsh": function,
        "fish": f"({function})",
        "tcsh": paths["tcsh"],
        "preamble": {
            "bash": "\n  ".join([f"{function}() {{", *bash]) + "\n}",
            "zsh": "\n  ".join([f"{function}() {{", *zsh]) + "\n}",
            "fish": "\n  ".join([f"function {function}", *fish]) + "\nend",
        },
    }
