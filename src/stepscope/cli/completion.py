"""``stepscope completion``: a script that teaches a shell to complete our command line.

The scripts know nothing about commands and options. On each press of Tab they call ``stepscope complete SHELL WORDS``,
where the last word is the one to complete and may be empty. The answer comes from the parsers, so a saved script stays
valid. Its first line says what else the shell may offer (``files``, ``dirs`` or nothing); each further line is a word
and, after a tab, its description.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.cli.arguments import RUNS_FOLDER, runs_in
from stepscope.cli.launch.command import split_job

__all__ = ["HELP", "SHELLS", "Completions", "add_arguments", "complete_command", "complete_options", "run"]

HELP = "print a script that completes commands, options and runs in your shell"
EPILOG = """\
examples:
  eval "$(stepscope completion bash)"      in ~/.bashrc
  eval "$(stepscope completion zsh)"       in ~/.zshrc, after compinit
  stepscope completion fish | source       in ~/.config/fish/config.fish
"""

BASH = """\
_stepscope() {
    local program=${COMP_WORDS[0]/#\\~/$HOME} more="" line
    COMPREPLY=()
    {
        read -r more
        while IFS= read -r line; do COMPREPLY+=("${line%%$'\\t'*}"); done
    } < <("$program" complete bash "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    local current=${COMP_WORDS[COMP_CWORD]#=}
    case $more in
        files) while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$current") ;;
        dirs) while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -d -- "$current") ;;
        *) return ;;
    esac
    compopt -o filenames 2>/dev/null
}
complete -F _stepscope stepscope
"""
ZSH = """\
#compdef stepscope
_stepscope() {
    local -a lines described
    local line about program=${${(Q)words[1]}/#\\~/$HOME}
    lines=("${(@f)$("$program" complete zsh "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    for line in "${(@)lines[2,-1]}"; do
        about=${line#*$'\\t'}
        [[ -n $line ]] && described+=("${${line%%$'\\t'*}//:/\\\\:}${about:+:$about}")
    done
    (( $#described )) && _describe stepscope described
    case ${lines[1]} in
        files) _files ;;
        dirs) _files -/ ;;
    esac
}
if [[ $funcstack[1] == _stepscope ]]; then _stepscope "$@"; else compdef _stepscope stepscope; fi
"""
FISH = """\
function __stepscope_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l program (string replace -r '^~' $HOME -- $before[1])
    set -e before[1]
    set -l lines ($program complete fish $before "$current" 2>/dev/null)
    for line in $lines[2..]
        echo $line
    end
    switch "$lines[1]"
        case files
            __fish_complete_path "$current"
        case dirs
            __fish_complete_directories "$current"
    end
end
complete -c stepscope -f -a '(__stepscope_complete)'
"""
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
LAUNCHERS = ("accelerate", "deepspeed", "mpirun", "python", "srun", "torchrun")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SHELLS), help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    print(SHELLS[args.shell], end="")
    return 0


# -- what can follow --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Completions:
    words: dict[str, str] = field(default_factory=dict)
    """Each with its description, which may be empty."""
    more: str = ""
    """``files``, ``dirs`` or nothing."""

    def lines(self, current: str) -> Iterator[str]:
        """The answer for a shell: only words that begin with the current one."""
        yield self.more
        yield from (f"{word}\t{about}" for word, about in self.words.items() if word.startswith(current))


def complete_command(parser: argparse.ArgumentParser, commands: Iterable[str], current: str) -> Completions:
    """What can be the first word; with descriptions of the commands that the parser has."""
    if current.startswith("-"):
        return Completions(words=_options(parser))
    about = {
        choice.dest.partition(" (")[0]: choice.help or ""
        for action in parser._actions
        for choice in getattr(action, "_choices_actions", ())
    }
    return Completions(words={name: about.get(name, "") for name in commands})


def complete_options(
    parser: argparse.ArgumentParser, words: Sequence[str], before_job: Iterable[str] | None
) -> Completions:
    """What can follow a command: ``words`` are those after it, the last one being the current word.

    ``before_job`` are the options with a value of a command that starts another program, else None.
    """
    *earlier, current = words
    if before_job is not None and split_job(earlier, tuple(before_job))[1]:
        return Completions(more="files")  # the arguments of a script
    options = parser._option_string_actions
    asking = options.get(earlier[-1]) if earlier else None
    if asking is not None and asking.nargs != 0:
        return _values(asking)
    if current.startswith("-"):
        return Completions(words=_options(parser))
    if before_job is not None:
        launchers = [name for name in LAUNCHERS if shutil.which(name)]
        return Completions(words=dict.fromkeys(launchers, "launcher"), more="files")
    places = [action for action in parser._actions if not action.option_strings]
    given = sum(1 for _ in _positional(earlier, options))
    for action in places:
        if given == 0 or action.nargs in ("*", "+"):
            return _values(action)
        given -= 1
    return Completions()


def _positional(words: Sequence[str], options: dict[str, argparse.Action]) -> Iterator[str]:
    """The words that are neither options nor their values."""
    value = False
    for word in words:
        if not value and not word.startswith("-"):
            yield word
        action = options.get(word)
        value = not value and action is not None and action.nargs != 0


def _options(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The options, each in its first long spelling."""
    found: dict[str, str] = {}
    for action in parser._actions:
        if action.option_strings:
            name = next((name for name in action.option_strings if name.startswith("--")), action.option_strings[0])
            about = "" if action.help is argparse.SUPPRESS else action.help or ""
            found[name] = about % vars(action) if "%(" in about else about
    return found


def _values(action: argparse.Action) -> Completions:
    """What an option's value, or a positional argument, can be."""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    if action.choices is not None:
        return Completions(words=dict.fromkeys(map(str, action.choices), ""))
    parts = metavar.split("|")
    words = {part: "" for part in parts if part.islower() and len(parts) > 1}
    if "RUN" in parts:
        words |= dict.fromkeys(runs_in(RUNS_FOLDER), "run")
        return Completions(words=words, more="files" if "FILE" in parts else "dirs")
    if action.type is not Path and metavar != "FILE":
        return Completions(words=words)
    return Completions(words=words, more="dirs" if metavar.lower() == "dir" else "files")
