"""``stepscope trace --watch``: files arrive between polls; no test waits for time to pass."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fakes.traces import MadeTrace

from stepscope.cli.analysis.trace_watch import watch_folder
from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from stepscope.traces.arrivals import Arrivals
from stepscope.traces.engine import Options


def made(rank: int, at: float = 10**15) -> MadeTrace:
    trace = MadeTrace(rank=rank, world_size=2)
    for step in range(3):
        trace.step(step, at + step * 100_000, 100_000)
        trace.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + step * 100_000, 60_000)
    return trace


def watch(folder: Path, actions: Sequence[Callable[[], object]], *, as_json: bool = True) -> int:
    """Run one action between two polls, which are a second apart; the end is Ctrl-C."""
    left, now = iter(actions), iter(range(1000))

    def wait() -> None:
        action = next(left, None)
        if action is None:
            raise KeyboardInterrupt
        action()

    return watch_folder(folder, Options(), as_json=as_json, wait=wait, clock=lambda: next(now), settle_s=2)


def nothing() -> None:
    pass


def test_one_verdict_per_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(0).write(tmp_path / "there already.json")
    text = made(1).text()
    growing, later = tmp_path / "rank1.json", tmp_path / "later"
    actions = [
        lambda: made(0).write(tmp_path / "rank0.json.gz"),
        lambda: growing.write_bytes(text[:50]),
        nothing,
        lambda: growing.write_bytes(text),
        lambda: (tmp_path / "notes.json").write_text('{"not": "a trace"}'),
        *[nothing] * 4,
        later.mkdir,
        lambda: (later / "part").write_bytes(gzip.compress(made(0, 10**15 + 10**9).text())),
        lambda: (later / "part").rename(later / "a.pt.trace.json.gz"),
        *[nothing] * 4,
    ]
    assert watch(tmp_path, actions) == 0
    shown = capsys.readouterr()
    first, second = map(json.loads, shown.out.splitlines())
    assert (first["files"], first["ranks"], first["steps"]) == (["rank0.json.gz", "rank1.json"], [0, 1], 2)
    assert (first["severity"], first["problem"]) == ("critical", None)
    assert "waits for the DataLoader" in first["title"]
    assert (second["folder"], second["files"]) == (str(later), ["a.pt.trace.json.gz"])
    assert "files that are there already (1) are not analyzed" in shown.err


def test_text_and_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    actions = [
        lambda: made(0).write(tmp_path / "a.json"),
        *[nothing] * 4,
        lambda: (tmp_path / "bad.json").write_text('{"traceEvents": [{"ph": "X"'),
        *[nothing] * 4,
    ]
    assert watch(tmp_path, actions, as_json=False) == 0
    good, bad = capsys.readouterr().out.splitlines()
    assert good.startswith(f"{tmp_path} (a.json): Training waits for the DataLoader")
    assert bad.startswith(f"{tmp_path} (bad.json): ")


def test_a_file_is_handed_out_once_and_again_if_it_changes(tmp_path: Path) -> None:
    arrivals = Arrivals(tmp_path, settle_s=0)
    path = tmp_path / "a.json"
    path.write_text("[1]")
    assert arrivals.poll(0) == []
    assert [recording.files for recording in arrivals.poll(1)] == [(path,)]
    assert arrivals.poll(2) == arrivals.poll(3) == []
    path.write_text("[1, 2]")
    assert arrivals.poll(4) == []
    assert [recording.files for recording in arrivals.poll(5)] == [(path,)]
    path.unlink()
    assert arrivals.poll(6) == []
    assert arrivals.passed_over == 0


def test_empty_files_links_and_others_are_passed_over(tmp_path: Path) -> None:
    arrivals = Arrivals(tmp_path, settle_s=0)
    (tmp_path / "empty.json").touch()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "link.json").symlink_to(tmp_path / "notes.txt")
    (tmp_path / "around").symlink_to(tmp_path)
    assert [arrivals.poll(now) for now in range(3)] == [[], [], []]


@pytest.mark.parametrize("words", [("a.json",), (".", "--html", "x.html"), (".", "."), (".", "--what-if", "comm=0")])
def test_what_it_refuses(tmp_path: Path, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(0).write(tmp_path / "a.json")
    with pytest.raises(UsageError):
        run_command(["trace", "--watch", *words])
