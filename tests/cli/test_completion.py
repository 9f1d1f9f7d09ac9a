"""``stepscope completion``: what a shell is told on each press of Tab, and its script in the shell itself."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.cli.completion import SHELLS
from stepscope.cli.main import COMMANDS, OWN, build_parser, command_module, run_command
from stepscope.store.create import create_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a script and two runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train it.py").touch()
    for name in ("night", "noon"):
        create_run(tmp_path / "runs", name, ["x"], sessions=tmp_path / "s")
    return tmp_path


def offered(words: list[str], capsys: pytest.CaptureFixture[str], shell: str = "bash") -> tuple[str, list[str]]:
    """What else the shell may offer, and the words without their descriptions."""
    assert run_command(["complete", shell, *words]) == 0
    more, *lines = capsys.readouterr().out.splitlines()
    return more, [line.partition("\t")[0] for line in lines]


@pytest.mark.parametrize(
    ("words", "more", "found"),
    [
        (["re"], "", ["report"]),
        (["l"], "", ["list", "ls"]),
        (["help", "re"], "", ["report"]),
        (["--v"], "", ["--version"]),
        (["frobnicate", ""], "files", []),
        (["run", "--nproc"], "", ["--nproc-per-node"]),
        (["run", "--share", ""], "", ["group", "all"]),
        (["run", "--share", "=", "g"], "", ["group"]),
        (["run", "--share", "="], "", ["group", "all"]),
        (["run", "--on-hang", "a"], "", ["abort"]),
        (["run", "--name", ""], "", []),
        (["run", "--dir", ""], "dirs", []),
        (["run", "--quiet", "--max"], "", ["--max-disk"]),
        (["run", "zzz"], "files", []),
        (["run", "train.py", "--na"], "files", []),
        (["run", "--name", "x", "train.py", ""], "files", []),
        (["report", ""], "dirs", ["night", "noon"]),
        (["report", "ni"], "dirs", ["night"]),
        (["report", "--json", "no"], "dirs", ["noon"]),
        (["report", "night", ""], "", []),
        (["report", "--html", ""], "files", []),
        (["watch", ""], "dirs", ["night", "noon"]),
        (["ls", "--sort", "se"], "", ["severity"]),
        (["list", "x", "--li"], "", ["--limit"]),
        (["token", ""], "", ["create", "list", "revoke"]),
        (["token", "create", "anna", "--run", "no"], "dirs", ["noon"]),
        (["trace", "a", "b", ""], "files", []),
        (["trace", "--engine", ""], "", ["local", "ray"]),
        (["completion", ""], "", ["bash", "zsh", "fish"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_can_follow(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], more: str, found: list[str]
) -> None:
    assert offered(words, capsys) == (more, found)


@pytest.mark.parametrize("shell", SHELLS)
def test_all_commands_are_offered(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    more, words = offered([""], capsys, shell)
    assert (more, set(words)) == ("", {*COMMANDS, *OWN, "ls"})
    run_command(["complete", shell, "doc"])
    about = "" if shell == "bash" else command_module("doctor").HELP
    assert capsys.readouterr().out == f"\ndoctor\t{about}\n"


def test_all_options_are_offered(capsys: pytest.CaptureFixture[str]) -> None:
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in COMMANDS:
                options = {each.option_strings[-1] for each in action.choices[command]._actions if each.option_strings}
                spelled = {word.replace("-", "_") for word in offered([command, "-"], capsys)[1]}
                assert spelled == {option.replace("-", "_") for option in options}


# -- in the shells ----------------------------------------------------------------------------------------------------


def in_shell(words: list[str], here: Path, text: str) -> list[str]:
    """The lines that a script prints in a shell that finds ``stepscope``."""
    program = here / "bin" / "stepscope"
    program.parent.mkdir()
    main = "from stepscope.cli.main import main; main()"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{main}' \"$@\"\n")
    program.chmod(0o755)
    (here / "script").write_text(text)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    done = subprocess.run(
        [*words, str(here / "script")],
        env={**os.environ, "PATH": path, "HOME": str(here)},
        cwd=here,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_in_bash(here: Path) -> None:
    text = """
    eval "$(stepscope completion bash)"
    complete -p stepscope
    try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _stepscope; (IFS=,; echo "${COMPREPLY[*]}"); }
    try stepscope re
    try stepscope run --nproc
    try stepscope run "train"
    try stepscope run train.py --na
    try stepscope report n
    try stepscope list --sort = st
    try ~/bin/stepscope run --share ''
    """
    assert in_shell(["bash", "--norc"], here, text) == [
        "complete -F _stepscope stepscope",
        "report",
        "--nproc-per-node",
        "train it.py",
        "",
        "night,noon",
        "started,status,steps,step-time",
        "group,all",
    ]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_in_fish(here: Path) -> None:
    text = """
    stepscope completion fish | source
    for line in "stepscope re" "stepscope run --nproc" "stepscope run train" "stepscope report n"
        complete -C $line | string replace -r "\\t.*" ""
    end
    """
    found = in_shell(["fish", "--no-config"], here, text)
    assert found == ["report", "--nproc-per-node", "train it.py", "night", "noon"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_in_zsh_the_script_is_valid_and_registered(here: Path) -> None:
    text = """
    autoload -Uz compinit && compinit -u -D
    eval "$(stepscope completion zsh)"
    echo ${_comps[stepscope]}
    """
    assert in_shell(["zsh", "-f"], here, text) == ["_stepscope"]
