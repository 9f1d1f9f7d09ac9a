"""``stepscope run --live`` on a real terminal: nothing of the job's output is lost, and the terminal is as it was."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.faults

JOB = """
import os, sys, time
import stepscope

print("isatty", sys.stdout.isatty(), sys.stdin.read())
try:
    for step in range(100_000):
        with stepscope.step(), stepscope.phase("sleep"):
            time.sleep(0.01)
        if step % 10 == 0:
            print("line", step)
        if os.path.exists("over"):
            break
except KeyboardInterrupt:
    print("interrupted once")
    time.sleep(0.5)  # a second Ctrl-C would come now
    sys.exit(9)
print("\\x1b[1mlast words\\x1b[0m", file=sys.stderr)
sys.exit(7)
"""
ON_TERMINAL = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Whoever leads a session and opens a terminal has it; the rest of the words are Python's."""
PATIENCE_S = 90.0
ALT_SCREEN, USUAL_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A pseudo-terminal with a job of ours on it, as a shell would start it."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        self._theirs = theirs  # kept, so that what was written last can still be read

    @property
    def modes(self) -> Any:
        return termios.tcgetattr(self._theirs)

    def until(self, what: bytes | Callable[[], Any]) -> bytes:
        """Reads until that was written, or is so; what was written since the last time."""
        begun, end_s = len(self.seen), time.monotonic() + PATIENCE_S
        while not (what in self.seen[begun:] if isinstance(what, bytes) else what()):
            assert time.monotonic() < end_s, self.seen[-3000:].decode(errors="replace")
            if select.select([self.ours], [], [], 0.05)[0]:
                self.seen += os.read(self.ours, 1 << 16)
        return self.seen[begun:]

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def view(self) -> psutil.Process | None:
        # The launcher's own ones: the agent's commands come and go, and of one that has just ended nothing can be read.
        children = psutil.Process(self.process.pid).children()
        return next((child for child in children if "stepscope.terminal" in child.cmdline()), None)

    def finish(self) -> tuple[int, bytes]:
        """The exit code, and all that was written in the meantime."""
        said = self.until(lambda: self.process.poll() is not None)
        while select.select([self.ours], [], [], 0)[0]:
            said += os.read(self.ours, 1 << 16)
        return self.process.returncode, said

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self._theirs)


Start = Callable[..., Terminal]


@pytest.fixture
def start(commands: Any, script: Callable[..., Path], tmp_path: Path) -> Iterator[Start]:
    script(JOB, "train.py")
    started: list[Terminal] = []

    def begin(*words: str, term: str = "xterm-256color") -> Terminal:
        command = ["-m", "stepscope", "run", "--name", "live", *words, "train.py"]
        started.append(Terminal(command, tmp_path, {**commands.environment(), "TERM": term}))
        return started[-1]

    yield begin
    for terminal in started:
        terminal.close()


def printed(folder: Path) -> str:
    return (folder / "runs" / "live" / "logs" / "terminal.log").read_text()


def test_the_view_is_there_until_the_job_ends(start: Start, tmp_path: Path) -> None:
    terminal = start("--live")
    terminal.until(ALT_SCREEN)
    terminal.until(b"running")
    assert terminal.modes != terminal.before
    assert b"line" not in terminal.seen[terminal.seen.index(ALT_SCREEN) :].replace(b"lines", b"")
    (tmp_path / "over").touch()
    code, output = terminal.finish()
    assert code == 7
    assert terminal.modes == terminal.before
    shown = output[output.rindex(USUAL_SCREEN) :]
    assert b"\x1b[1mlast words\x1b[0m\r\n" in shown
    assert shown.index(b"last words") < shown.index(b"The script exited with code 7")
    log = printed(tmp_path)
    lines = [int(number) for number in re.findall(r"^line (\d+)$", log, re.MULTILINE)]
    assert lines == list(range(0, len(lines) * 10, 10))
    assert log.startswith("isatty False \n")
    if log.count("\n") > 20:
        assert b"all of it is in runs/live/logs/terminal.log" in shown


def test_what_native_code_prints_is_in_the_log_too(start: Start, script: Callable[..., Path], tmp_path: Path) -> None:
    script(
        """
        import os, sys, stepscope
        print("of Python", file=sys.stderr)
        os.write(2, b"of native code\\n")
        print("of Python again")
        with stepscope.step():
            pass
        os.write(2, b"free(): invalid pointer\\n")
        os.abort()
        """,
        "train.py",
    )
    code, _ = start("--live").finish()
    assert code == 128 + signal.SIGABRT
    run = tmp_path / "runs" / "live"
    lines = [
        line for line in (run / "logs" / "main.log").read_text().splitlines() if not line.startswith("stepscope: ")
    ]
    assert lines == ["of Python", "of native code", "of Python again", "free(): invalid pointer"]
    crash = json.loads((run / "summary.json").read_text())["findings"][0]
    assert (crash["evidence"]["native"], crash["evidence"]["native_rank"]) == (["free(): invalid pointer"], 0)


@pytest.mark.soak
def test_q_leaves_it_and_the_output_comes(start: Start, tmp_path: Path) -> None:
    terminal = start("--live", "--quiet")
    terminal.until(lambda: all(word in terminal.seen for word in (ALT_SCREEN, b"q", b"running")))
    terminal.type(b"q")
    terminal.until(b"the job continues, and its output follows")
    terminal.until(b"line ")
    assert terminal.modes == terminal.before
    assert terminal.view() is None
    (tmp_path / "over").touch()
    code, _ = terminal.finish()
    assert code == 7
    after = terminal.seen[terminal.seen.rindex(USUAL_SCREEN) :]
    shown = [int(number) for number in re.findall(rb"^line (\d+)\r$", after, re.MULTILINE)]
    assert shown == list(range(shown[0], shown[0] + 10 * len(shown), 10))
    assert f"line {shown[-1]}\n" in printed(tmp_path)
    assert after.rstrip().endswith(b"last words\x1b[0m")  # --quiet: no summary


@pytest.mark.soak  # near: q leaves it and the output comes
def test_a_view_that_is_killed_leaves_a_terminal_behind(start: Start, tmp_path: Path) -> None:
    terminal = start("--live", "--quiet")
    terminal.until(b"running")
    view = terminal.view()
    assert view is not None
    view.kill()
    terminal.until(b"the view crashed (signal 9); the job continues")
    terminal.until(b"line ")
    assert terminal.modes == terminal.before
    assert terminal.seen.rindex(USUAL_SCREEN) > terminal.seen.rindex(ALT_SCREEN)
    terminal.type(b"\x03")  # from the terminal itself now
    code, output = terminal.finish()
    assert code == 9
    assert output.count(b"interrupted once") == 1


@pytest.mark.soak
def test_ctrl_c_in_the_view_is_one_for_the_job(start: Start, tmp_path: Path) -> None:
    terminal = start("--live")
    terminal.until(b"running")
    terminal.type(b"\x03")
    code, output = terminal.finish()
    assert code == 9
    assert printed(tmp_path).count("interrupted once") == 1
    assert b"Traceback" not in output
    assert b"interrupted, exit code 9" in output
    assert terminal.modes == terminal.before


@pytest.mark.soak
def test_a_signal_for_the_launcher_reaches_the_job(start: Start, tmp_path: Path) -> None:
    terminal = start("--live", "--quiet")
    terminal.until(b"running")
    terminal.process.send_signal(signal.SIGTERM)
    code, _ = terminal.finish()
    assert code == 128 + signal.SIGTERM
    assert terminal.modes == terminal.before


@pytest.mark.soak  # near: the next one
def test_without_a_screen_it_runs_as_usual(start: Start, tmp_path: Path) -> None:
    (tmp_path / "over").touch()
    terminal = start("--live", "--quiet", term="dumb")
    terminal.type(b"\x04")  # the job reads its terminal to the end
    code, _ = terminal.finish()
    assert b"isatty True" in terminal.seen
    assert code == 7
    assert b"stepscope: live view not available: this terminal cannot show a full-screen view" in terminal.seen
    assert b"line 0\r\n" in terminal.seen
    assert not (tmp_path / "runs/live/logs/terminal.log").exists()


def test_no_hub_no_view(run_stepscope: Callable[..., Any], script: Callable[..., Path]) -> None:
    script("", "train.py")
    done = run_stepscope("run", "--live", "--no-hub", "train.py")
    assert (done.code, "--live needs the hub" in done.stderr) == (2, True)
