"""Captures in a run directory: what is written is read again, and nothing hostile is followed or believed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import RunUnwritable, UsageError
from stepscope.records.capture import CaptureOrder, CaptureRecord, CaptureRequest
from stepscope.store import captures
from stepscope.store.paths import CAPTURE_REQUESTS


def _record(name: str = "step-340", wall_ns: int = 1) -> CaptureRecord:
    order = CaptureOrder(id=name, ranks=(0, 2), at_step=340)
    return CaptureRecord(order=order, state="ordered", requested_wall_ns=wall_ns, reason="request")


def _trace(run: Path, capture: str, rank: int, size: int) -> Path:
    path = captures.make_capture_folder(run, capture) / captures.trace_name(rank)
    path.write_bytes(b"x" * size)
    return path


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    later, earlier = _record("step-900", 2), _record("step-340", 1)
    captures.write_capture(tmp_path, later)
    captures.write_capture(tmp_path, earlier)
    assert captures.read_captures(tmp_path) == (earlier, later)
    assert captures.read_capture(tmp_path, "step-900") == later
    assert captures.read_capture(tmp_path, "step-1") is None
    assert captures.read_capture(tmp_path, "../step-900") is None


@pytest.mark.parametrize(
    ("change", "figures"),
    [
        ({"severity": "fatal"}, None),
        ({"severity": 7}, None),
        ({"severity": "critical"}, {}),
        ({"figures": {"step_ms": 41.5, "baseline": {"id": "step-20", "steps": [20, 29]}}}, True),
        ({"figures": {"step_ms": 41.5, "baseline": {"id": "../step-20", "steps": [20, 29]}}}, {"step_ms": 41.5}),
        ({"figures": {"baseline": {"id": "step-20", "steps": ["20", "29"]}}}, {}),
        ({"figures": {"baseline": {"id": "step-20"}}}, {}),
        ({"figures": {"baseline": "step-20"}}, {}),
    ],
)
def test_a_severity_and_a_baseline_of_a_foreign_run_are_checked(tmp_path: Path, change: Any, figures: Any) -> None:
    captures.write_capture(tmp_path, _record())
    file = captures.make_capture_folder(tmp_path, "step-340") / "capture.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    record = captures.read_capture(tmp_path, "step-340")
    expected = change["figures"] if figures is True else figures
    assert (None if record is None else record.figures) == expected


def test_a_request_gets_an_id_and_sorted_ranks(tmp_path: Path) -> None:
    request = CaptureRequest(id="", wall_ns=5, choose="listed", ranks=(3, 0, 3), by="x" * 999)
    written = captures.request_capture(tmp_path, request)
    assert len(written.id) == 12
    assert written.ranks == (0, 3)
    assert written.by == "x" * 200
    line = json.loads((tmp_path / CAPTURE_REQUESTS).read_text())
    assert (line["id"], line["ranks"], line["steps"]) == (written.id, [0, 3], 6)
    assert (tmp_path / CAPTURE_REQUESTS).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "wrong",
    [
        CaptureRequest(id="a", wall_ns=0, steps=0),
        CaptureRequest(id="a", wall_ns=0, steps=101),
        CaptureRequest(id="a", wall_ns=0, warmup=21),
        CaptureRequest(id="a", wall_ns=0, choose="listed"),
        CaptureRequest(id="a", wall_ns=0, choose="listed", ranks=(-1,)),
    ],
)
def test_what_no_capture_could_answer_is_not_requested(tmp_path: Path, wrong: CaptureRequest) -> None:
    with pytest.raises(UsageError):
        captures.request_capture(tmp_path, wrong)
    assert not (tmp_path / CAPTURE_REQUESTS).exists()


def test_requests_have_a_limit_and_no_link_is_followed(tmp_path: Path) -> None:
    request = CaptureRequest(id="a", wall_ns=0)
    captures.request_capture(tmp_path, request)
    with (tmp_path / CAPTURE_REQUESTS).open("ab") as file:
        file.truncate(2 << 20)
    with pytest.raises(RunUnwritable, match="too many requests"):
        captures.request_capture(tmp_path, request)
    other = tmp_path / "other"
    other.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (other / "captures").symlink_to(elsewhere)
    with pytest.raises(RunUnwritable, match="is a link"):
        captures.request_capture(other, request)
    assert list(elsewhere.iterdir()) == []


def test_hostile_captures_are_left_out(tmp_path: Path) -> None:
    captures.write_capture(tmp_path, _record())
    for name in ("pipe", "link", "lies", "deep", "other-id"):
        captures.make_capture_folder(tmp_path, name)
    folder = tmp_path / "captures"
    os.mkfifo(folder / "pipe" / "capture.json")
    (folder / "link" / "capture.json").symlink_to(folder / "step-340" / "capture.json")
    (folder / "lies" / "capture.json").write_text('{"order": 7}')
    (folder / "deep" / "capture.json").write_text("[" * 100_000)
    (folder / "other-id" / "capture.json").write_text((folder / "step-340" / "capture.json").read_text())
    (folder / "linked").symlink_to(folder / "step-340")
    (folder / "..hidden").mkdir()
    assert [record.order.id for record in captures.read_captures(tmp_path)] == ["step-340"]
    assert captures.read_capture(tmp_path, "linked") is None


def test_only_traces_are_opened(tmp_path: Path) -> None:
    _trace(tmp_path, "step-1", 3, 10)
    folder = tmp_path / "captures" / "step-1"
    (folder / "rank-4.pt.trace.json.gz").symlink_to("/etc/hostname")
    os.mkfifo(folder / "rank-5.pt.trace.json.gz")
    (folder / "notes.txt").write_text("x")
    assert captures.trace_sizes(tmp_path, "step-1") == {"rank-3.pt.trace.json.gz": 10}
    with captures.open_trace(tmp_path, "step-1", "rank-3.pt.trace.json.gz") as file:
        assert file.read() == b"x" * 10
    for name in ("rank-4.pt.trace.json.gz", "rank-5.pt.trace.json.gz", "notes.txt", "../../run.json"):
        with pytest.raises(OSError):
            captures.open_trace(tmp_path, "step-1", name)


def test_the_oldest_traces_are_removed_but_never_the_newest(tmp_path: Path) -> None:
    for number in range(4):
        _trace(tmp_path, f"step-{number}", 0, 100)
        captures.write_capture(tmp_path, _record(f"step-{number}", number))
        os.utime(tmp_path / "captures" / f"step-{number}", ns=(number, number))
    assert captures.prune_traces(tmp_path, 400) == ()
    assert captures.prune_traces(tmp_path, 150, without={"step-1"}) == ("step-0", "step-2")
    assert captures.trace_sizes(tmp_path, "step-1") == {"rank-0.pt.trace.json.gz": 100}
    assert captures.prune_traces(tmp_path, 0) == ("step-1",)
    assert captures.trace_sizes(tmp_path, "step-3") == {"rank-0.pt.trace.json.gz": 100}
    assert len(captures.read_captures(tmp_path)) == 4


def test_what_a_dead_hub_left_behind_has_failed() -> None:
    ordered = _record()
    left = captures.left_behind(ordered)
    assert (left.state, left.problem) == ("failed", "The run ended before the capture was complete.")
    assert captures.left_behind(left) is left
