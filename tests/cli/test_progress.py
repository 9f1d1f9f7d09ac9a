"""The bar on the terminal: when it is there, what it says, and that nothing of it stays."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.cluster import Cluster

from stepscope.cli.output import progress_bar
from stepscope.records.text import bytes_text
from stepscope.store.load import open_run
from stepscope.store.sealed.seal import seal
from tests.hub.run_parts import record

CLEAR = "\r\x1b[K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def sit_at(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the test itself: pytest has an error stream of its own for each fixture."""
    monkeypatch.setattr(sys, "stderr", terminal)


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


def shown(terminal: Terminal) -> list[str]:
    """What stood there, one after the other."""
    return terminal.getvalue().split(CLEAR)[1:]


class Seconds:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_there_is_none_where_quiet_was_asked_for(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    sit_at(terminal, monkeypatch)
    clock = Seconds()
    with progress_bar("sealing", None, quiet=True, clock=clock) as progress:
        clock.now_s += 60.0
        progress(1, 6)
    assert terminal.getvalue() == ""


def test_it_comes_after_a_while_and_is_gone_at_the_end(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    sit_at(terminal, monkeypatch)
    clock = Seconds()
    with progress_bar("reading dumps", clock=clock) as progress:
        for done, at_s in ((1, 0.1), (2, 0.49), (3, 0.51), (4, 0.55), (6, 0.62)):
            clock.now_s = 100.0 + at_s
            progress(done, 6)
    assert shown(terminal) == [
        "reading dumps ████████████░░░░░░░░░░░░ 3/6",
        "reading dumps ████████████████████████ 6/6",
        "",
    ]


@pytest.mark.parametrize(
    ("done", "line"),
    [
        (0, "sending ░░░░░░░░░░░░░░░░░░░░░░░░ 0 B/3.0 MiB"),
        (1 << 20, "sending ████████░░░░░░░░░░░░░░░░ 1.0 MiB/3.0 MiB, 20 s left"),
        (2 << 20, "sending ████████████████░░░░░░░░ 2.0 MiB/3.0 MiB"),
        (9 << 20, "sending ████████████████████████ 3.0 MiB/3.0 MiB"),
    ],
)
def test_it_says_how_long_it_will_take_if_that_is_long(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, done: int, line: str
) -> None:
    sit_at(terminal, monkeypatch)
    clock = Seconds()
    with progress_bar("sending", bytes_text, clock=clock) as progress:
        clock.now_s += 10.0
        progress(done, 3 << 20)
    assert shown(terminal) == [line, ""]


def test_a_narrow_terminal_gets_one_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    sit_at(terminal, monkeypatch)
    monkeypatch.setenv("COLUMNS", "30")
    clock = Seconds()
    with progress_bar("reading dumps", clock=clock) as progress:
        clock.now_s += 1.0
        progress(1, 2)
    assert shown(terminal) == ["reading dumps ████████████░░░", ""]


def test_parts_that_say_nothing_are_a_percentage(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    sit_at(terminal, monkeypatch)
    clock = Seconds()
    with progress_bar("sealing", None, clock=clock) as progress:
        clock.now_s += 1.0
        progress(2, 3)
        clock.now_s += 1.0
        progress(0, 0)
    assert shown(terminal) == ["sealing ████████████████░░░░░░░░ 66%", "sealing ░░░░░░░░░░░░░░░░░░░░░░░░ 0%", ""]


def test_an_error_takes_it_away(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    sit_at(terminal, monkeypatch)
    clock = Seconds()
    with pytest.raises(KeyboardInterrupt), progress_bar("sealing", clock=clock) as progress:
        clock.now_s += 1.0
        progress(1, 2)
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith(CLEAR)


def test_what_is_soon_done_or_goes_into_a_pipe_shows_none(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    sit_at(terminal, monkeypatch)
    with progress_bar("sealing") as progress:
        progress(1, 2)
    assert terminal.getvalue() == ""
    pipe = io.StringIO()
    sit_at(pipe, monkeypatch)
    clock = Seconds()
    with progress_bar("sealing", clock=clock) as progress:
        clock.now_s += 10.0
        progress(1, 2)
    assert pipe.getvalue() == ""


def test_sealing_and_opening_tell_how_far_they_are_and_never_go_back(tmp_path: Path) -> None:
    run_dir = record(tmp_path, "some", Cluster(ranks=3, steps=20).run(), sealed=False)
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))

    open_run(run_dir, progress=progress)
    assert calls == [(1, 3), (2, 3), (3, 3)]
    calls.clear()
    seal(run_dir, progress=progress)
    assert calls == [(1, 9), (2, 9), (3, 9), (2, 3), (7, 9), (8, 9), (9, 9)]
    calls.clear()
    open_run(run_dir, progress=progress)
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_on_a_real_terminal() -> None:
    work = (
        "import time\nfrom stepscope.cli.output import progress_bar\n"
        "with progress_bar('waiting') as told:\n    time.sleep(0.6)\n    told(1, 2)\nprint('done')\n"
    )
    terminal, other = pty.openpty()
    with os.fdopen(other, "wb") as side:
        done = subprocess.run([sys.executable, "-c", work], stderr=side, stdout=subprocess.PIPE, text=True, check=True)
    seen = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert (done.stdout, seen) == ("done\n", f"{CLEAR}waiting ████████████░░░░░░░░░░░░ 1/2{CLEAR}")
