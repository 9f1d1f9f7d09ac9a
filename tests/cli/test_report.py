"""``stepscope report``: any run directory becomes a summary, on the terminal and beside the run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster, slow_at
from fakes.records import records_of
from fakes.traces import MadeTrace
from trace_events import checked_events, tracks_of

from stepscope.cli.finalize import finalize_run
from stepscope.cli.main import run_command
from stepscope.errors import NotARun, RunError, UsageError
from stepscope.records.capture import CaptureOrder, CaptureRecord
from stepscope.records.identity import RankIdentity
from stepscope.records.paths import capture_folder
from stepscope.ring import RingBatch, RingReader, RingState, RingWriter
from stepscope.store.captures import make_capture_folder, write_capture
from stepscope.store.create import create_run
from stepscope.store.documents import end_run, read_meta, write_meta
from stepscope.store.live.ring_files import SegmentWriter, sidecar_of, write_sidecar
from stepscope.store.load import open_run
from stepscope.store.paths import segment_path

NOBODY = 2**22 + 1
"""Above every pid that Linux gives out."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three ranks whose launcher is gone and which nobody has sealed."""
    paths = create_run(tmp_path / "runs", "night", ["train.py"], sessions=tmp_path / "sessions")
    for series in Cluster(ranks=3, steps=60, faults=(slow_at(1, "optimizer", 20.0),)).series():
        pid = NOBODY + series.rank
        identity = RankIdentity(host=os.uname().nodename, pid=pid, rank=series.rank, world_size=3, backend="gloo")
        ring = RingWriter(paths.session / f"{pid}.ring", identity)
        ring.set_state(RingState.EXITED)
        reader = RingReader(ring.path)
        about = replace(sidecar_of(reader.header(), heard_wall_ns=1), ended_wall_ns=2)
        write_sidecar(paths.run_dir, about)
        slots = [row.tobytes() for row in records_of(series)[0]]
        segment = SegmentWriter(segment_path(paths.run_dir, about.key))
        segment.append(RingBatch(slots=slots, last_seq=len(slots), lost=0, torn=0))
        reader.close()
        ring.close()
        ring.path.unlink()
    (paths.run_dir / "logs" / "rank-10.log").write_text("x")
    (paths.run_dir / "logs" / "rank-2.log").write_text("x")
    end_run(paths.run_dir, exit_code=0, status="finished")
    return paths.run_dir


def test_a_run_is_sealed_its_results_saved_and_shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["report", str(run_dir)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("✖ Rank 1 is 19.8 ms slower than its peers in optimizer every step; all other\n")
    assert "3 ranks" in printed
    assert "\x1b" not in printed
    assert read_meta(run_dir)["sealed"] is True
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["steps"]["total"]) == ("finished", 0, 60)
    assert summary["logs"] == ["logs/rank-2.log", "logs/rank-10.log"]
    assert json.loads((run_dir / "findings.json").read_text())["findings"] == summary["findings"]
    text = (run_dir / "summary.txt").read_text()
    assert text.startswith("✖ Rank 1 ")
    assert max(map(len, text.splitlines())) <= 80
    assert run_command(["report", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert run_command(["report", str(run_dir), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert finalize_run(run_dir) == finalize_run(run_dir)
    assert "\x1b[" in finalize_run(run_dir, color=True)[1]
    assert "\x1b[" not in finalize_run(run_dir, color=False)[1]
    assert "\x1b[" not in (run_dir / "summary.txt").read_text()


def test_the_command_alone(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["/v/bin/python", "train.py", "--note", "two words", "--token", "[redacted]"]
    write_meta(run_dir, {**read_meta(run_dir), "command": words})
    assert run_command(["report", str(run_dir), "--command"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "/v/bin/python train.py --note 'two words' --token '[redacted]'\n"
    assert shown.err == "stepscope: values that may be secrets were not recorded; replace [redacted]\n"
    assert read_meta(run_dir)["sealed"] is False
    with pytest.raises(UsageError, match="--command and --redact cannot be used together"):
        run_command(["report", str(run_dir), "--command", "--redact"])


def test_a_run_by_its_name_and_the_newest_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.chdir(run_dir.parents[1])
        assert run_command(["report", "night"]) == 0
        assert "Rank 1" in capsys.readouterr().out
        assert run_command(["report"]) == 0
        shown = capsys.readouterr()
        assert shown.err == "stepscope: using runs/night, the newest run\n"
        assert shown.out.startswith("✖ Rank 1 ")
        patch.chdir(run_dir)
        with pytest.raises(UsageError, match=r"no runs in .*/runs yet"):
            run_command(["report"])


def test_a_run_that_cannot_be_written_is_shown_all_the_same(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not bind the superuser, so the refusal is injected where files are made.
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("stepscope.store.file_io.write_bytes", refuse)
    monkeypatch.setattr("stepscope.store.file_io.write_json", refuse)
    before = sorted(run_dir.rglob("*"))
    assert run_command(["report", str(run_dir)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("✖ Rank 1 is 19.8 ms slower")
    assert "Not saved: cannot write the summary to" in printed
    assert "Read-only file system" in printed
    assert "summary.json" not in printed
    assert not (run_dir / "summary.json").exists()
    assert {path.name for path in before} >= {"run.json", "logs"}
    assert read_meta(run_dir)["sealed"] is False


def test_a_run_that_still_goes_on_is_left_alone(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.cli.finalize.processes_alive", lambda _: True)
    summary, text = finalize_run(run_dir)
    assert summary["steps"]["total"] == 60
    assert "Rank 1" in text
    assert read_meta(run_dir)["sealed"] is False
    assert not (run_dir / "summary.json").exists()


@pytest.mark.parametrize("what", ["missing", "empty", "foreign"])
def test_what_is_no_run_is_told(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what != "missing":
        path.mkdir()
    if what == "foreign":
        (path / "run.json").write_text("[]")
    with pytest.raises(NotARun, match=what):
        run_command(["report", str(path)])


def test_the_command_alone_loads_nothing_heavy(run_python: Callable[..., object]) -> None:
    code = "import sys, stepscope.cli.commands.report; print(sorted({'numpy', 'duckdb', 'torch'} & set(sys.modules)))"
    done = run_python("-c", code)
    assert done.stdout == "[]\n"  # type: ignore[attr-defined]


# ── report.html ─────────────────────────────────────────────────────────────────────────────────────────────────────


def stand_in(monkeypatch: pytest.MonkeyPatch, why: str = "") -> list[Path]:
    """In place of what makes the page, which has tests of its own: which runs it was made for."""
    requests: list[Path] = []

    def add(run_dir: Path, known: Any, _progress: Any) -> str:
        assert known.summary["run"]["name"] == "night"
        requests.append(run_dir)
        if not why:
            (run_dir / "report.html").write_text("a page")
        return why

    monkeypatch.setenv("STEPSCOPE_HTML", "1")
    monkeypatch.setattr("stepscope.cli.finalize.is_built", lambda: True)
    monkeypatch.setattr("stepscope.hub.app.add_copy", add)
    return requests


def test_a_page_is_made_when_a_run_is_sealed_and_only_then(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch)
    first = finalize_run(run_dir)
    assert "summary.json · report.html" in first[1]
    assert finalize_run(run_dir) == first
    assert asked == [run_dir]
    assert "report.html" in (run_dir / "summary.txt").read_text()


def test_a_page_that_fails_is_a_notice_and_nothing_more(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "the disk is full")
    summary, text = finalize_run(run_dir)
    assert summary["notices"][-1] == "report.html was not written: the disk is full."
    assert "summary.json · report.html" not in text
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert "summary.json · report.html" not in (run_dir / "summary.txt").read_text()


def test_who_wants_no_page_gets_none(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch)
    write_meta(run_dir, {**read_meta(run_dir), "html": False})
    assert "report.html" not in finalize_run(run_dir)[1]
    assert asked == []


def test_html_on_demand(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = stand_in(monkeypatch)
    monkeypatch.setenv("STEPSCOPE_HTML", "0")
    elsewhere, made = run_dir.parent / "a.html", []

    def write(of: Path, path: Path, *, known: Any, redact: bool, progress: Any) -> int:
        assert not redact
        assert (of, known.summary["run"]["name"], len(known.data.ranks)) == (run_dir, "night", 3)
        made.append(path)
        return path.write_bytes(bytes(1_234_567))

    monkeypatch.setattr("stepscope.hub.app.write_copy", write)
    for words in ([str(run_dir), "--html"], ["--html", str(run_dir)], [str(run_dir), "--html", str(elsewhere)]):
        assert run_command(["report", *words]) == 0
        assert "summary.json · report.html" in capsys.readouterr().out
    assert (asked, made) == ([run_dir, run_dir], [elsewhere])
    assert run_command(["report", str(run_dir), "--html", str(elsewhere)]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"stepscope: {elsewhere}: 1.2 MB, opens in any browser"
    with pytest.raises(UsageError, match="is a folder"):
        run_command(["report", str(run_dir), "--html", str(run_dir.parent)])


def test_who_asked_for_a_page_that_cannot_be_made_is_told(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "the disk is full")
    with pytest.raises(RunError, match=r"report\.html was not written: the disk is full$"):
        run_command(["report", str(run_dir), "--html"])
    assert "summary.json · report.html" not in (run_dir / "summary.txt").read_text()


def test_a_timeline_with_a_capture(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = CaptureOrder(id="step-20", ranks=(1, 2), at_step=20)
    write_capture(run_dir, CaptureRecord(order=order, state="done", requested_wall_ns=1, reason="request"))
    made = MadeTrace(rank=1)
    series = open_run(run_dir).ranks[1]
    started_ns = int(series.steps["start_ns"][20]) - series.anchor_mono_ns + series.anchor_wall_ns
    made.step(20, started_ns // 1000, 100)
    made.write(make_capture_folder(run_dir, "step-20") / "rank-1.pt.trace.json.gz")
    (capture_folder(run_dir, "step-20") / "rank-2.pt.trace.json.gz").write_bytes(b"no trace")
    out = tmp_path / "run.json.gz"
    assert run_command(["report", str(run_dir), "--perfetto", str(out), "--steps", "10-29"]) == 0
    shown = capsys.readouterr()
    assert "Rank 1 is 19.8 ms slower" in shown.out
    assert f"stepscope: {out}: Steps 10 to 29." in shown.err
    assert "Left out: " in shown.err
    tracks = tracks_of(checked_events(out))
    assert [len(own["steps"]) for name, own in tracks.items() if name != "run"] == [20, 20, 20]
    rank = next(own for name, own in tracks.items() if name.startswith("rank 1"))
    assert any(event["name"] == "ProfilerStep#20" for events in rank.values() for event in events)
    # Captures of other steps stay out.
    run_command(["report", str(run_dir), "--perfetto", str(out), "--steps", "30-40", "--quiet"])
    assert "ProfilerStep#20" not in str(checked_events(out))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--steps", "3-9"), UsageError),
        (("--perfetto", "a.json", "--steps", "9-3"), UsageError),
        (("--perfetto", "a.json", "--steps", "x"), UsageError),
        (("--perfetto", "a.json", "--steps", "500-600"), RunError),
        (("--perfetto", "a.json", "--redact"), UsageError),
        (("--perfetto", "/proc/none/a.json"), UsageError),
    ],
)
def test_timelines_that_cannot_be(
    run_dir: Path, words: tuple[str, ...], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir)
    with pytest.raises(error) as raised:
        run_command(["report", str(run_dir), *words])
    assert "\n" not in str(raised.value)
    assert not (run_dir / "a.json").exists()
