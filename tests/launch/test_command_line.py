"""What can be typed after ``stepscope run``, and what comes of it: the exit code is always the job's own."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli.main import run_command
from stepscope.errors import UsageError

Run = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With some things that can be run and some that cannot."""
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "train.py").write_text("print('ran')\n")
    (tmp_path / "notes.txt").write_text("not a script\n")
    (tmp_path / "no-shebang").write_bytes(b"\x00\x01")
    (tmp_path / "no-shebang").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "folder.py"], "folder.py is a folder, not a script"),
        (["run"], "nothing to run; try `stepscope run train.py`"),
        (["run", "-m"], "-m needs the name of a module"),
        (["run", "--nope", "train.py"], "unknown option: --nope (see `stepscope run --help`)"),
        (["run", "no-such-launcher", "train.py"], "cannot start no-such-launcher: not found, or not executable"),
        (
            ["run", "notes.txt"],
            (
                "cannot start notes.txt: not found, or not executable; "
                "a script must end in .py, or be started as `python notes.txt`"
            ),
        ),
        (
            ["run", "train.py --epochs 3"],
            (
                "cannot start train.py --epochs 3: not found, or not executable; "
                "if this is a command with arguments, leave out the quotes: stepscope run train.py --epochs 3"
            ),
        ),
        (["run", "--nproc-per-node", "2", "bash", "x"], "--nproc-per-node starts torchrun for a script;"),
        (["run", "--name", "a/b", "train.py"], "'a/b' is not a valid run name: it must be a plain folder name"),
        (["frobnicate"], "unknown command: frobnicate (see `stepscope --help`)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    with monkeypatch.context() as patch, pytest.raises(UsageError) as refused:
        patch.chdir(folder)
        run_command(words)
    assert str(refused.value).startswith(message)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("missing.py", "no such script: missing.py"),
        ("./no-shebang", "cannot start ./no-shebang: Exec format error"),
    ],
)
def test_that_is_one_line_and_leaves_nothing(run_stepscope: Run, folder: Path, word: str, message: str) -> None:
    done = run_stepscope("run", word)
    assert (done.code, done.stdout) == (2, "")
    lines = [line for line in done.stderr.splitlines() if "recording to" not in line and " page: " not in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"stepscope: {message}")
    assert done.run_dir is None


def test_a_script_that_raises_at_import(run_stepscope: Run, script: Callable[..., Path], tmp_path: Path) -> None:
    """In a folder that has a run of that name."""
    script("import no_such_package\n", "broken.py")
    (tmp_path / "runs" / "one").mkdir(parents=True)
    done = run_stepscope("run", "--name", "one", "broken.py")
    assert done.code == 1
    assert "stepscope: a run named one already exists; this one is named one-2\n" in done.stderr
    assert "stepscope: recording to runs/one-2\n" in done.stderr
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["one", "one-2"]
    bare = f'File "{tmp_path}/broken.py", line 1, in <module>'
    assert bare in done.stderr
    assert done.run_dir == tmp_path / "runs" / "one-2"
    text = (done.run_dir / "summary.txt").read_text()
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert text.startswith("✖ The script raised ModuleNotFoundError: No module named 'no_such_package'")
    assert "No module named 'no_such_package'" in text
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert [(error["rank"], error["type"]) for error in summary["errors"]] == [(0, "ModuleNotFoundError")]
    assert text in done.stderr
    # What the script printed is kept, and is what it would have printed.
    assert (done.run_dir / "logs" / "main.log").read_text().startswith("Traceback (most recent call last):\n")


@pytest.mark.parametrize(
    ("line", "code", "status"),
    [
        # near: test_an_option_of_ours_after_the_script
        pytest.param("sys.exit(7)", 7, "failed", marks=pytest.mark.soak),
        pytest.param("sys.exit()", 0, "finished", marks=pytest.mark.soak),
        pytest.param("sys.exit('a word')", 1, "failed", marks=pytest.mark.soak),  # near: sys.exit(7)
        pytest.param("os._exit(3)", 3, "failed", marks=pytest.mark.soak),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "crashed"),
        pytest.param("os.kill(os.getpid(), signal.SIGABRT)", 134, "crashed", marks=pytest.mark.soak),
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", 143, "interrupted", marks=pytest.mark.soak),
        # near: test_a_signal in tests/faults/test_interrupt.py
        pytest.param("raise KeyboardInterrupt", 130, "interrupted", marks=pytest.mark.soak),
    ],
)
def test_the_exit_code_is_the_jobs_own(
    run_stepscope: Run, script: Callable[..., Path], line: str, code: int, status: str
) -> None:
    script(f"import os, signal, sys\n{line}\n", "job.py")
    done = run_stepscope("run", "--quiet", "job.py")
    assert done.code == code
    end = json.loads((done.run_dir / "run.json").read_text())["end"]
    assert (end["exit_code"], end["status"]) == (code, status)
    assert json.loads((done.run_dir / "summary.json").read_text())["status"] == status


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(["-m", "pkg.mod"], marks=pytest.mark.soak, id="module"),
        pytest.param([sys.executable, "-m", "pkg.mod"], marks=pytest.mark.soak, id="python"),  # near: shell
        # near: test_an_option_of_ours_after_the_script, whose arguments reach it too
        pytest.param(["bash", "-c", 'exec "$0" -m pkg.mod "$@"', sys.executable], marks=pytest.mark.soak, id="shell"),
        pytest.param(["--", "-m", "pkg.mod"], marks=pytest.mark.soak, id="dashes"),
    ],
)
def test_a_module_a_python_and_a_shell(
    run_stepscope: Run, script: Callable[..., Path], tmp_path: Path, way: list[str]
) -> None:
    """Ways to the same script; its arguments reach it, also those that look like ours."""
    script("", "pkg/__init__.py")
    script("import sys; print(__name__, sys.argv[1:])\n", "pkg/mod.py")
    words = ["--name", "theirs", "--dir", "-m", "--", "x y"]
    done = run_stepscope("run", "--quiet", "--name", "way", *way, *words)
    assert (done.code, done.stdout, done.stderr) == (0, f"__main__ {words}\n", "")
    assert done.run_dir == tmp_path / "runs" / "way"
    # It ran recorded: what it printed was kept.
    assert (done.run_dir / "logs" / "main.log").read_text() == done.stdout
    assert json.loads((done.run_dir / "run.json").read_text())["sealed"] is True


def test_an_option_of_ours_after_the_script(run_stepscope: Run, script: Callable[..., Path]) -> None:
    """The script gets it unchanged; a hint follows if it fails at once."""
    script("import sys; print(sys.argv[1:]); sys.exit('--name' in sys.argv and 2)\n", "picky.py")
    failed = run_stepscope("run", "picky.py", "--lr", "3", "--name", "x y")
    assert (failed.code, failed.stdout) == (2, "['--lr', '3', '--name', 'x y']\n")
    hint = "stepscope: options after picky.py are passed to it; if you meant Stepscope's"
    assert failed.stderr.splitlines()[-1] == f"{hint} --name: stepscope run --name 'x y' picky.py …"
    end = json.loads((failed.run_dir / "run.json").read_text())["end"]
    assert (end["exit_code"], end["status"]) == (2, "failed")
    assert json.loads((failed.run_dir / "summary.json").read_text())["status"] == "failed"


@pytest.mark.soak  # near: test_an_option_of_ours_after_the_script
def test_an_option_that_the_script_reads_and_one_that_it_cannot_know(
    run_stepscope: Run, script: Callable[..., Path]
) -> None:
    script("import sys  # reads --hang_after\n", "reads.py")
    assert "options after" not in run_stepscope("run", "reads.py", "--hang-after", "5", "--name", "x").stderr
    script("import sys; print(sys.argv[1:])\n", "picky.py")
    unread = run_stepscope("run", "picky.py", "--hang-after", "5")
    assert (unread.code, unread.stdout) == (0, "['--hang-after', '5']\n")
    hint = "stepscope: options after picky.py are passed to it; if you meant Stepscope's"
    assert unread.stderr.splitlines()[0] == f"{hint} --hang-after: stepscope run --hang-after 5 picky.py …"
    assert unread.stderr.count("options after") == 1


def test_switched_off_it_is_not_there(
    run_stepscope: Run, script: Callable[..., Path], tmp_path: Path, root: Path
) -> None:
    script(
        """
        import os, sys
        import stepscope
        stepscope.init()
        with stepscope.step(), stepscope.phase("a"):
            stepscope.note(x=1)
        print(stepscope.summary(), [name for name in sys.modules if name.startswith("stepscope.rec")] != [])
        own = ("STEPSCOPE_HTML", "STEPSCOPE_C_HOOKS")  # of the tests themselves
        print([name for name in os.environ if name.startswith("STEPSCOPE") and "TEST" not in name and name not in own])
        print([path for path in sys.path if "inject" in path], "sitecustomize" in sys.modules)
        sys.exit(5)
        """
    )
    done = run_stepscope("run", "script.py", env={"STEPSCOPE": "0", "PYTHONPATH": str(root / "src")})
    assert (done.code, done.stderr, done.run_dir) == (5, "", None)
    assert done.stdout.splitlines()[:3] == ["{} True", "['STEPSCOPE']", "[] False"]
    assert not (tmp_path / "runs").exists()


def test_signals_that_our_parent_ignores_stay_ignored(commands: Any, script: Callable[..., Path]) -> None:
    """``nohup stepscope run …``: the terminal goes, the job stays; and it knows that SIGHUP is ignored."""
    script(
        """
        import signal, sys, time
        print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, flush=True)
        time.sleep(0.5)
        sys.exit(3)
        """
    )
    starter = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    words = [sys.executable, "-m", "stepscope", "run", "--quiet", "script.py"]
    process = commands.start_python("-c", starter, *words)
    assert process.stdout.readline() == "True\n"
    os.kill(process.pid, signal.SIGHUP)
    done = commands.finish(process)
    assert done.code == 3
    assert json.loads((done.run_dir / "run.json").read_text())["end"]["status"] == "failed"
