"""``stepscope capture`` without a job: what it prints of a record, and one line for everything that is in the way."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli.main import run_command
from stepscope.errors import NotARun, RunError, UsageError
from stepscope.records.capture import CaptureOrder, CaptureRecord, CaptureReport, Difference
from stepscope.records.run_clock import process_start_ticks
from stepscope.store.captures import make_capture_folder, trace_name, write_capture
from stepscope.store.create import create_run
from stepscope.store.documents import HubFile, read_meta, write_hub_file, write_meta
from stepscope.store.paths import CAPTURE_REQUESTS

DIFFERENCE = Difference(what="operator", name="aten::mm", rank=2, peer=0, extra_ns=30_000_000, text="Rank 2 is slow.")
DONE = CaptureRecord(
    order=CaptureOrder(id="step-40", ranks=(0, 2), at_step=40),
    state="done",
    requested_wall_ns=1,
    reason="request",
    verdict="Rank 2 is slow.",
    size_bytes=2 << 20,
    findings=({"title": "The GPU waits for the host."},),
    differences=(DIFFERENCE,),
    figures={"usual_step_ms": 20.0, "step_ms": 24.5},
)


@pytest.fixture
def active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose launcher is alive, with a hub that does not answer."""
    monkeypatch.chdir(tmp_path)
    paths = create_run(tmp_path / "runs", "job", ["python", "train.py"], sessions=tmp_path / "sessions")
    pid = os.getppid()
    launcher = {"pid": pid, "start_ticks": process_start_ticks(pid)}
    write_meta(paths.run_dir, {**read_meta(paths.run_dir), "launcher": launcher})
    write_hub_file(paths.run_dir, HubFile(url="http://127.0.0.1:9", token="x"))
    return paths.run_dir


@contextmanager
def answering(run_dir: Path, answer: Callable[[dict[str, Any]], CaptureRecord]) -> Iterator[None]:
    """A hub's part: one record for the first request."""
    over = threading.Event()

    def serve() -> None:
        path = run_dir / CAPTURE_REQUESTS
        while not over.wait(0.01):
            if path.exists() and path.read_text().endswith("\n"):
                write_capture(run_dir, answer(json.loads(path.read_text())))
                return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_the_verdict_is_printed(active: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(active, lambda line: replace(DONE, request=line["id"])):
        assert run_command(["capture", "job", "--ranks", "2,0", "--steps", "3", "--no-stacks", "--memory"]) == 0
    line = json.loads((active / CAPTURE_REQUESTS).read_text())
    assert (line["choose"], line["ranks"], line["steps"]) == ("listed", [0, 2], 3)
    assert (line["stacks"], line["memory"], line["shapes"]) == (False, True, False)
    assert capsys.readouterr().out == (
        "Rank 2 is slow.\n"
        "  The GPU waits for the host.\n"
        "Steps 40 to 45 of ranks 0 and 2, 2.0 MiB; a step took 24.5 ms instead of 20.0 ms\n"
        "runs/job/captures/step-40\n"
    )


def test_the_record_as_json(active: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(active, lambda line: replace(DONE, request=line["id"])):
        assert run_command(["capture", "job", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["order"]["ranks"], document["verdict"]) == ("done", [0, 2], "Rank 2 is slow.")


def test_a_capture_that_fails_is_one_line(active: Path) -> None:
    failed = replace(DONE, state="failed", problem="Rank 1 has ended.")
    with answering(active, lambda line: replace(failed, request=line["id"])), pytest.raises(RunError) as raised:
        run_command(["capture", "job", "--ranks", "1"])
    assert str(raised.value) == "no capture: Rank 1 has ended."
    assert raised.value.exit_code == 3


def test_nobody_answers(active: Path) -> None:
    with pytest.raises(RunError, match=r"nothing happened for 1 s: the run's hub did not take the request"):
        run_command(["capture", "job", "--wait", "1"])


def test_a_capture_that_does_not_progress(active: Path) -> None:
    ordered = replace(DONE, state="ordered")
    with (
        answering(active, lambda line: replace(ordered, request=line["id"])),
        pytest.raises(RunError, match="nothing happened for 1 s: the capture is still ordered") as raised,
    ):
        run_command(["capture", "job", "--wait", "1"])
    assert f"begins when its ranks reach step {DONE.order.at_step}" in str(raised.value)
    assert "`stepscope capture runs/job --list`" in str(raised.value)


def test_what_is_in_the_way(active: Path) -> None:
    with pytest.raises(NotARun, match="no run named jib"):
        run_command(["capture", "jib"])
    for wrong in ("x", "1,", "-1", "0-3"):
        with pytest.raises(UsageError, match="--ranks"):
            run_command(["capture", "job", f"--ranks={wrong}"])
    with pytest.raises(UsageError, match="from 1 to 100 steps"):
        run_command(["capture", "job", "--steps", "500"])
    write_capture(active, replace(DONE, state="profiling"))
    with pytest.raises(RunError, match=r"another capture of runs/job is in progress \(step-40\)"):
        run_command(["capture", "job"])
    write_capture(active, DONE)
    (active / "hub.json").unlink()
    with pytest.raises(RunError, match="without a hub"):
        run_command(["capture", "job"])
    write_meta(active, {**read_meta(active), "end": {"status": "finished", "wall_ns": 5}})
    with pytest.raises(RunError, match="runs/job has ended; a capture needs a running job"):
        run_command(["capture", "job"])
    with pytest.raises(UsageError, match="--pid and a run exclude each other"):
        run_command(["capture", "job", "--pid", "7"])
    with pytest.raises(
        UsageError, match="--pid and --memory exclude each other: allocations are recorded in captures of"
    ):
        run_command(["capture", "--memory", "--pid", "7"])
    with pytest.raises(UsageError, match="--ms and --output are for --pid"):
        run_command(["capture", "job", "--ms", "7"])
    assert not (active / CAPTURE_REQUESTS).exists()


def test_the_list(active: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["capture", "job", "--list"]) == 0
    assert capsys.readouterr().out == "no captures in runs/job/captures\n"
    write_capture(active, DONE)
    report = CaptureReport(id="step-90", rank=1, pid=7, state="failed", problem="It ended.")
    order = replace(DONE.order, id="step-90", ranks=(1,))
    failed = CaptureRecord(
        order=order,
        state="failed",
        requested_wall_ns=2,
        reason="finding",
        finding="compute_straggler 1",
        problem="Rank 1: It ended.\x1b[2J",
        reports=(report,),
    )
    write_capture(active, failed)
    (make_capture_folder(active, "step-40") / trace_name(0)).write_bytes(b"x")
    assert run_command(["capture", "job", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["capture", "why", "ranks", "size", "state", "verdict"]
    assert lines[2].split()[:5] == ["step-90", "finding:", "compute_straggler", "1", "1"]
    assert "\x1b" not in lines[2]
    assert lines[3].split() == ["step-40", "request", "0,2", "2.0", "MiB", "done", "Rank", "2", "is", "slow."]
