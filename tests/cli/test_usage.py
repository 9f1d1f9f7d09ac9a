"""What the command line answers to a command, option, value or name that it does not know, and how it helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope import __version__
from stepscope.cli.commands import run
from stepscope.cli.launch.command import misplaced_options
from stepscope.cli.main import main, run_command
from stepscope.errors import NotARun, UsageError
from stepscope.records.text import nearest
from stepscope.store.create import create_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a script and two runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for name in ("night", "demo"):
        create_run(tmp_path / "runs", name, ["x"], sessions=tmp_path / "s")
    return tmp_path


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints that ends like ``--help``."""
    with pytest.raises(SystemExit) as ended:
        run_command(words)
    assert ended.value.code in (0, None)
    out, err = capsys.readouterr()
    assert err == ""
    return out


# -- help and version -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["version"], ["-V"], ["--version"]])
def test_the_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(words, capsys) == f"stepscope {__version__}\n"


@pytest.mark.parametrize("words", [["help"], ["help", "help"], ["-h"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(words, capsys)
    assert shown == printed(["--help"], capsys)
    assert "\n    list (ls) " in shown
    assert "\n    help " in shown
    assert "attach" not in shown


@pytest.mark.parametrize(("word", "command"), [("run", "run"), ("ls", "list"), ("token", "token")])
def test_help_about_a_command(word: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(["help", word], capsys) == printed([command, "--help"], capsys)


def test_nothing_typed_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([]) == 0
    assert capsys.readouterr().out == printed(["help"], capsys)


def test_ls_is_list(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["ls"]) == 0
    shown = capsys.readouterr().out
    assert run_command(["list"]) == 0
    assert capsys.readouterr().out == shown


# -- unknown words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("--nporc-per-node", ["--name", "--nproc-per-node"], "--nproc-per-node"),
        ("--nproc", ["--nproc-per-node", "--name"], "--nproc-per-node"),
        ("--n", ["--nproc-per-node", "--name"], ""),
        ("--nope", ["--nnodes"], ""),
        ("--", ["--name"], ""),
        ("Night", ["night"], "night"),
        ("zebra", ["night", "demo"], ""),
        ("night", [], ""),
    ],
)
def test_the_nearest_name(word: str, known: list[str], meant: str) -> None:
    assert nearest(word, known) == meant


@pytest.mark.parametrize(
    ("line", "message", "help_of"),
    [
        ("frobnicate", "unknown command: frobnicate", "stepscope"),
        ("reprot", "unknown command: reprot; did you mean `stepscope report`?", "stepscope"),
        ("help rn", "unknown command: rn; did you mean `stepscope run`?", "stepscope"),
        ("train.py", "unknown command: train.py; to record it, use `stepscope run train.py …`", "stepscope"),
        ("bash x", "unknown command: bash; to record it, use `stepscope run bash …`", "stepscope"),
        ("--verison", "unknown option: --verison; did you mean --version?", "stepscope"),
        (
            "--nproc-per-node=2 run train.py",
            "unknown option: --nproc-per-node; it is an option of `stepscope run` and comes after that word",
            "stepscope",
        ),
        ("report --jsom", "unknown option: --jsom; did you mean --json?", "stepscope report"),
        ("ls --jsom", "unknown option: --jsom; did you mean --json?", "stepscope list"),
        ("report a b", "unknown argument: b", "stepscope report"),
        (
            "serve a b",
            "serve takes one folder, not also b; serve the folder that contains them, or each with a --port of its own",
            "",
        ),
        (
            "run --nporc-per-node 2 train.py",
            "unknown option: --nporc-per-node; did you mean --nproc-per-node?",
            "stepscope run",
        ),
        (
            "token creat",
            "action: must be one of create, list, revoke, not 'creat'; did you mean create?",
            "stepscope token",
        ),
        ("run trian.py", "no such script: trian.py in {here}; did you mean train.py?", ""),
        ("run other.py", "no such script: other.py in {here}", ""),
        ("audit rnus", "rnus does not exist in {here}; did you mean runs?", ""),
        ("flight rnus", "rnus does not exist in {here}; did you mean runs?", ""),
        ("trace runs --against rnus", "rnus does not exist in {here}; did you mean runs?", ""),
    ],
)
def test_an_unknown_word(here: Path, line: str, message: str, help_of: str) -> None:
    with pytest.raises(UsageError) as caught:
        run_command(line.split())
    assert str(caught.value) == message.format(here=here) + (f" (see `{help_of} --help`)" if help_of else "")


@pytest.mark.parametrize("command", ["report", "watch", "sql", "serve", "send"])
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nigth", "no run named nigth: looked for nigth and runs/nigth in {here}; did you mean night?"),
        ("zebra", "no run named zebra: looked for zebra and runs/zebra in {here}; `stepscope list` shows all runs"),
        ("runs/dmeo", "runs/dmeo does not exist; did you mean runs/demo?"),
    ],
)
def test_a_run_that_does_not_exist(here: Path, command: str, word: str, message: str) -> None:
    with pytest.raises(NotARun) as caught:
        run_command([command, word, *(["select 1"] if command == "sql" else [])])
    assert str(caught.value) == message.format(here=here)


def test_a_folder_of_runs_is_not_a_run(here: Path) -> None:
    with pytest.raises(NotARun, match=r"^runs is a folder of runs, not a run; name one of them, such as runs/demo$"):
        run_command(["report", "runs"])


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run --nproc-per-node two train.py", "must be 1 or more ranks, or cpu, gpu or auto, not 'two'"),
        ("run --nproc_per_node 0 train.py", "must be 1 or more ranks, or cpu, gpu or auto, not '0'"),
        ("run --nproc-per-node=-1 train.py", "must be 1 or more ranks, or cpu, gpu or auto, not '-1'"),
        ("run --hang-after -5 train.py", "must be 0 or more seconds, not '-5'"),
        ("run --hang-after soon train.py", "must be 0 or more seconds, not 'soon'"),
        ("run --hang-after nan train.py", "must be 0 or more seconds, not 'nan'"),
        ("run --max-disk 5X train.py", "must be a size such as 10G or 500M, not '5X'"),
        ("run --hub-port 0 train.py", "must be a port from 1 to 65535, not '0'"),
        ("run --master-port x train.py", "must be a port from 1 to 65535, not 'x'"),
        ("run --on-hang abrot train.py", "must be report, abort or a command, not 'abrot'; did you mean abort?"),
        ("run --share evrybody train.py", "must be one of group, all, not 'evrybody'"),
        ("demo --steps -5", "must be 1 or more steps, not '-5'"),
        ("demo --steps 1.5", "must be 1 or more steps, not '1.5'"),
        ("demo --slow-ms -1", "must be 0 or more milliseconds, not '-1'"),
        ("demo --phase froward", "must be one of input, forward, backward, optimizer, not 'froward'; did you mean f"),
        ("serve --port abc", "must be a port from 0 to 65535, not 'abc'"),
        ("trace --top 0 x.json", "must be 1 or more rows, not '0'"),
    ],
)
def test_a_value_is_checked_before_anything_starts(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    words = line.split()
    option = words[1].partition("=")[0].replace("_", "-")
    monkeypatch.setattr("sys.argv", ["stepscope", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"stepscope: {option}: {message}")
    assert err.endswith(f" (see `stepscope {words[0]} --help`)\n")
    assert err.count("\n") == 1
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["demo", "night"]


@pytest.mark.parametrize("action", ["abort", "bash", "reporter --now", "./mail.sh $STEPSCOPE_HANG_FILE"])
def test_any_command_may_run_on_a_hang(here: Path, action: str) -> None:
    with pytest.raises(UsageError, match="no such script"):
        run_command(["run", "--on-hang", action, "missing.py"])


# -- our options after the script -------------------------------------------------------------------------------------

TAKES_VALUE = {"--name": True, "--quiet": False}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("train.py --name x --lr 3 --quiet", [["--name", "x"], ["--quiet"]]),
        ("train.py --name=x", [["--name=x"]]),
        ("train.py --name", [["--name"]]),
        ("train.py --lr 3 -- --name x", []),
        ("-m pkg.train --name x", [["--name", "x"]]),
        ("torchrun --name x train.py --quiet", []),
        ("", []),
    ],
)
def test_options_that_may_be_misplaced(line: str, found: list[list[str]]) -> None:
    assert misplaced_options(line.split(), TAKES_VALUE) == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("train.py --layers 12", []),  # the script's own
        ("train.py --layers=12 --quiet", [["--quiet"]]),
        ("train.py --layers every", [["--layers", "every"]]),
        ("train.py --layers=off", [["--layers=off"]]),
    ],
)
def test_a_number_of_layers_is_the_scripts_own(line: str, found: list[list[str]]) -> None:
    assert run.own_options(line.split()) == found
