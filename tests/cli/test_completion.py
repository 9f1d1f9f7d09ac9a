"""``stepscope completion``: what each shell offers with the script that it is given."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stepscope.cli.commands.completion import SHELLS, completion_script
from stepscope.cli.main import COMMANDS, OWN, build_parser, run_command
from stepscope.store.create import create_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a script, two runs and another folder among them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train it.py").touch()
    (tmp_path / "folder").mkdir()
    for name in ("night", "noon"):
        create_run(tmp_path / "runs", name, ["x"], sessions=tmp_path / "s")
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path


def in_shell(here: Path, *words: str, text: str) -> list[str]:
    """The lines that a script prints in a shell."""
    (here / "script").write_text(text)
    done = subprocess.run(
        [*words, str(here / "script")],
        env={**os.environ, "HOME": str(here)},
        cwd=here,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_in_bash(here: Path) -> None:
    cases = {
        "re": "report",
        "l": "list,ls",
        "help re": "report",
        "--v": "--version",
        "run --nproc": "--nproc-per-node",
        "run --share ''": "group,all",
        "run --on-hang a": "abort",
        "run --name ''": "",
        "run --dir f": "folder",
        "run --quiet --max": "--max-disk",
        "run train": "train it.py",
        "run tor": "torchrun",
        "run --name x train.py tr": "train it.py",
        "report f": "folder",
        "report --json no": "noon",
        "report night ''": "",
        "report --html tr": "train it.py",
        "watch ni": "night",
        "compare night tr": "train it.py",
        "list --sort se": "severity",
        "ls --li": "--limit",
        "token ''": "create,list,revoke",
        "token create anna --run no": "noon",
        "trace a b tr": "train it.py",
        "trace --engine ''": "local,ray",
        "completion ''": "bash,zsh,fish,tcsh",
    }
    try_one = (
        'try() { COMP_WORDS=(stepscope "$@"); COMP_CWORD=$#; _shtab_stepscope; (IFS=,; echo "${COMPREPLY[*]}"); }\n'
    )
    text = (
        completion_script("bash") + "\ncomplete -p stepscope\n" + try_one + "\n".join(f"try {case}" for case in cases)
    )
    registered, *found = in_shell(here, "bash", "--norc", text=text)
    assert registered == "complete -o bashdefault -F _shtab_stepscope stepscope"
    assert dict(zip(cases, found, strict=True)) == cases


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_in_fish(here: Path) -> None:
    cases = ("re", "run --nproc", "run train", "report n", "list --sort=st")
    text = completion_script("fish") + "".join(
        f'\ncomplete -C "stepscope {case}" | string replace -r "\\t.*" ""' for case in cases
    )
    found = in_shell(here, "fish", "--no-config", text=text)
    sorts = [f"--sort={order}" for order in ("started", "status", "steps", "step-time")]
    assert found == ["report", "--nproc-per-node", "train it.py", "night", "noon", *sorts]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_in_zsh_the_script_is_valid_and_registered(here: Path) -> None:
    (here / "_stepscope").write_text(completion_script("zsh"))
    text = """
    autoload -Uz compinit && compinit -u -D
    eval "$(<_stepscope)"
    echo ${_comps[stepscope]}
    """
    assert in_shell(here, "zsh", "-f", text=text) == ["_shtab_stepscope"]


@pytest.mark.skipif(shutil.which("tcsh") is None, reason="tcsh is not installed")
def test_in_tcsh_the_script_is_valid_and_registered(here: Path) -> None:
    text = completion_script("tcsh") + "\ncomplete stepscope\n"
    assert "(report abort)" in in_shell(here, "tcsh", "-f", text=text)[0]


@pytest.mark.parametrize("shell", SHELLS)
def test_all_commands_and_options_are_in_the_script(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert run_command(["completion", shell]) == 0
    script = capsys.readouterr().out
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in COMMANDS:
                options = {each.option_strings[0] for each in action.choices[command]._actions if each.option_strings}
                assert [option for option in options if option.lstrip("-") not in script] == []
    assert [name for name in (*COMMANDS, *OWN, "ls") if name not in script] == []
