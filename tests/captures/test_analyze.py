"""Captures of two gloo ranks with a fault in rank 1 (``data/train.py``): what their analysis says, and bad traces."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from fakes.traces import MadeTrace

from stepscope.captures.__main__ import main
from stepscope.captures.analyze import Limits, analyze_capture
from stepscope.records.capture import CaptureOrder, CaptureRecord, Difference
from stepscope.store.captures import read_analysis, read_capture, trace_name, write_capture

DATA = Path(__file__).parent / "data"


def captured(run_dir: Path, fault: str) -> Path:
    """A run directory's folder of a capture, delivered and not analyzed."""
    folder = run_dir / "captures" / "step-5"
    folder.mkdir(parents=True)
    for trace in (DATA / fault).iterdir():
        shutil.copy(trace, folder / trace.name)
    order = CaptureOrder(id="step-5", ranks=(0, 1), at_step=5, steps=4)
    record = CaptureRecord(order=order, state="analyzing", requested_wall_ns=7, reason="finding", finding="straggler")
    write_capture(run_dir, record)
    return folder


FOUND = {
    # Two NCCL ranks that share an H200, captured by itself on 18 November 2026: rank 1 multiplies in backward.
    "h200_nccl": Difference(
        what="kernel",
        name="sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_warpsize4x2x1_ffma_aligna4_"
        "alignc4_execute_kernel__5x_cub",
        shown="sm80_xmma_gemm_f32f32_f32f…ernel__5x_cub",
        rank=1,
        peer=0,
        extra_ns=24_407_239,
        phase="backward",
        line="job.py:29",
        text="Rank 1 spends 24.4 ms more per step than rank 0 in kernel sm80_xmma_gemm_f32f32_f32f…ernel__5x_cub in "
        "backward, from job.py:29 (lose); rank 0 does not run it there.",
    ),
    "backward": Difference(
        what="operator",
        name="aten::mm",
        rank=1,
        peer=0,
        extra_ns=5_807_720,
        phase="backward",
        line="train.py:24",
        text="Rank 1 spends 5.81 ms more per step than rank 0 in aten::mm in backward, from train.py:24 (backward); "
        "rank 0 does not run it there.",
    ),
    "loader": Difference(
        what="line",
        name="sleep",
        rank=1,
        peer=0,
        extra_ns=50_034_374,
        phase="input",
        line="train.py:32",
        text="Rank 1 spends 50.0 ms more per step than rank 0 in sleep in input, from train.py:32 (augment).",
    ),
    "line": Difference(
        what="line",
        name="normalize",
        rank=1,
        peer=0,
        extra_ns=34_539_211,
        phase="forward",
        line="train.py:37",
        text="Rank 1 spends 34.5 ms more per step than rank 0 in train.py:37 (normalize) in forward.",
    ),
    "layer": Difference(
        what="operator",
        name="aten::mm",
        rank=1,
        peer=0,
        extra_ns=5_412_831,
        phase="forward",
        line="train.py:56",
        text="Rank 1 spends 5.41 ms more per step than rank 0 in aten::mm in forward, from train.py:56 (forward); "
        "rank 0 does not run it there.",
    ),
}


@pytest.mark.parametrize("fault", FOUND)
def test_the_operator_or_line_that_makes_a_rank_slow_is_named(tmp_path: Path, fault: str) -> None:
    record = analyze_capture(captured(tmp_path, fault))
    assert record.differences[0] == FOUND[fault]
    assert [each.what for each in record.differences[1:]] == ["wait"]
    assert (record.state, record.problem, record.severity) == ("done", "", "warning")
    assert record.verdict == FOUND[fault].text
    assert record.finding == "straggler"
    assert record.files == ("rank-0.pt.trace.json.gz", "rank-1.pt.trace.json.gz")
    assert record.figures["steps"] == ([1401, 1405] if fault == "h200_nccl" else [5, 7])
    if fault == "h200_nccl":
        assert record.figures["step_ms"] == 25.334  # on its host a step takes 6 ms


def test_only_the_steps_that_both_ranks_recorded_count(tmp_path: Path) -> None:
    """Rank 1 was done first and wrote its trace; rank 0 waits for it in step 7, of which rank 1 has nothing."""
    folder = tmp_path / "captures" / "step-5"
    folder.mkdir(parents=True)
    for rank, last in ((0, 9), (1, 7)):
        made = MadeTrace(rank=rank, world_size=2)
        for step in range(5, last + 1):
            at = (step - 5) * 100_000.0
            made.annotation(f"ProfilerStep#{step}", at, 99_000)
            made.op("aten::mm", at + 1_000, 97_000)
            made.op("gloo:all_reduce", at + (52_000 if step < 7 else 2_000), 2_000 if step < 7 else 90_000, tid=7)
        made.write(folder / trace_name(rank))
    record = analyze_capture(folder)
    document = read_analysis(tmp_path, "step-5")
    assert document is not None
    assert (record.problem, record.verdict) == (
        "",
        "Nothing stands out: 2 steps of 99.5 ms on 2 ranks, all of it on the host.",
    )
    assert record.figures["steps"] == [5, 6]
    assert record.figures["work_ms"] == {"0": 99.0, "1": 99.0}
    assert document["notices"] == [
        "only steps 5 to 6 count: rank 0 recorded more, which other ranks' traces do not have"
    ]


@pytest.mark.parametrize(("usual_optimizer_ms", "severity"), [(8.0, "info"), (10.0, "warning"), (None, "warning")])
def test_the_run_decides_whether_the_optimizer_takes_too_long(
    tmp_path: Path, usual_optimizer_ms: float | None, severity: str
) -> None:
    """The profiler makes each of its calls longer."""
    folder = tmp_path / "captures" / "step-5"
    folder.mkdir(parents=True)
    made = MadeTrace(rank=0, world_size=1)
    for step in range(5, 9):
        at = (step - 5) * 100_000.0
        made.annotation(f"ProfilerStep#{step}", at, 100_000)
        made.op("aten::mm", at, 80_000)
        made.annotation("Optimizer.step#AdamW.step", at + 80_000, 20_000)
        for call in range(200):
            made.op("aten::mul_", at + 80_000 + call * 100, 100)
    made.write(folder / trace_name(0))
    order = CaptureOrder(id="step-5", ranks=(0,), at_step=5)
    figures = {"usual_step_ms": 100.0, **({"usual_optimizer_ms": usual_optimizer_ms} if usual_optimizer_ms else {})}
    record = CaptureRecord(order=order, state="analyzing", requested_wall_ns=7, reason="request", figures=figures)
    write_capture(tmp_path, record)
    record = analyze_capture(folder)
    title = "AdamW updates each parameter for itself, with 200 calls a step: 20.0 ms of each 100 ms step (20%)"
    (row,) = record.findings
    assert row["severity"] == severity
    if severity == "info":
        title += "; without the profiler, which makes small operators longer, the optimizer takes 8%"
        assert record.verdict == "Nothing stands out: 3 steps of 100 ms, all of it on the host."
    assert row["title"] == f"{title}."


def test_ranks_that_work_equally_long_have_no_difference(tmp_path: Path) -> None:
    record = analyze_capture(captured(tmp_path, "healthy"))
    assert record.differences == ()
    assert record.state == "done"
    assert not record.verdict.startswith("Rank ")


def test_the_process_replaces_the_record_and_writes_the_document(tmp_path: Path) -> None:
    folder = captured(tmp_path, "backward")
    assert main([str(folder)]) == 0
    record = read_capture(tmp_path, "step-5")
    assert record is not None
    assert record.state == "done"
    assert record.done_wall_ns > 0
    document = read_analysis(tmp_path, "step-5")
    assert document is not None
    assert list(document["ranks"]) == ["0", "1"]
    assert document["differences"] == [each.text for each in record.differences]


def test_only_the_folder_of_a_capture_is_analyzed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "captures" / "..")]) == 2
    assert "not the folder of a capture" in capsys.readouterr().err


def test_a_rank_is_compared_with_the_baseline_of_the_run(tmp_path: Path) -> None:
    folder = captured(tmp_path, "backward")
    baseline = tmp_path / "captures" / "step-2"
    baseline.mkdir()
    shutil.copy(DATA / "backward" / trace_name(0), baseline / trace_name(1))  # as rank 1 was before its fault
    order = CaptureOrder(id="step-2", ranks=(1,), at_step=2, steps=4)
    write_capture(tmp_path, CaptureRecord(order=order, state="done", requested_wall_ns=3, reason="baseline"))
    record = analyze_capture(folder)
    assert record.figures["baseline"] == {"id": "step-2", "steps": [5, 7]}
    assert record.verdict == record.differences[0].text  # which rank is slow comes before what changed
    assert record.changes[0].text == (
        "Rank 1 spends 5.81 ms more per step in aten::mm in backward, from train.py:24 (backward), than in the "
        "baseline of steps 5 to 7; the baseline does not run it there."
    )
    (folder / trace_name(0)).unlink()
    alone = analyze_capture(folder)
    assert (alone.verdict, alone.severity) == (record.changes[0].text, "warning")
    shutil.rmtree(baseline)
    assert analyze_capture(folder).changes == ()


def test_a_process_that_waits_begins_with_a_line_or_ends_without(tmp_path: Path) -> None:
    folder = captured(tmp_path, "backward")
    for line, state in (("", "analyzing"), ("\n", "done")):
        command = [sys.executable, "-m", "stepscope.captures", "--wait", str(folder)]
        assert subprocess.run(command, input=line, text=True, check=False).returncode == 0
        record = read_capture(tmp_path, "step-5")
        assert record is not None
        assert record.state == state


# -- bad traces -------------------------------------------------------------------------------------------------------


def test_a_trace_that_is_cut_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = captured(tmp_path, "backward")
    trace = folder / trace_name(1)
    trace.write_bytes(trace.read_bytes()[:30_000])
    record = analyze_capture(folder)
    assert record.state == "done"
    assert "Rank 1's trace" in record.problem


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"not json", gzip.compress(b'{"traceEvents": ["x", 3, {"ph": "X"}]}', mtime=0)]
)
def test_a_damaged_trace_leaves_its_rank_out(tmp_path: Path, damage: bytes) -> None:
    folder = captured(tmp_path, "backward")
    (folder / trace_name(1)).write_bytes(damage)
    record = analyze_capture(folder)
    assert record.state == "done"
    assert record.problem.startswith("Rank 1's trace is left out: ")
    assert record.differences == ()
    (folder / trace_name(0)).unlink()
    record = analyze_capture(folder)
    assert record.state == "failed"
    assert record.problem.startswith("Rank 1's trace is left out: ")


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    folder = captured(tmp_path, "backward")
    other = tmp_path / "other.json.gz"
    (folder / trace_name(1)).rename(other)
    (folder / trace_name(1)).symlink_to(other)
    os.mkfifo(folder / trace_name(2))
    record = analyze_capture(folder)
    assert record.files == ("rank-0.pt.trace.json.gz",)
    assert record.state == "done"


def test_without_traces_the_capture_failed(tmp_path: Path) -> None:
    folder = captured(tmp_path, "backward")
    for trace in folder.glob("*.gz"):
        trace.unlink()
    record = analyze_capture(folder)
    assert (record.state, record.problem) == ("failed", "None of the ranks delivered a trace.")


def test_a_damaged_record_does_not_prevent_the_analysis(tmp_path: Path) -> None:
    folder = captured(tmp_path, "backward")
    (folder / "capture.json").write_text("[" * 100_000)
    record = analyze_capture(folder)
    assert (record.state, record.order.id) == ("done", "step-5")
    assert record.differences[0] == FOUND["backward"]


def test_what_is_beyond_the_limits_is_left_out(tmp_path: Path) -> None:
    folder = captured(tmp_path, "backward")
    small = (folder / trace_name(0)).stat().st_size
    record = analyze_capture(folder, limits=Limits(trace_bytes=small))
    assert record.problem.startswith("Rank 1's trace is left out: it is too large (")
    record = analyze_capture(folder, limits=Limits(ranks=1))
    assert record.problem == "Only the traces of 1 rank are analyzed."

    def ticks() -> Iterator[float]:
        yield from (0.0, 0.0)
        yield from count(500.0)

    passed = ticks()
    record = analyze_capture(folder, clock=lambda: next(passed))
    assert record.problem == "After 3 min 1 trace had not been read; they are left out."
    assert record.state == "done"


def test_the_document_is_valid_json_for_every_reader(tmp_path: Path) -> None:
    folder = captured(tmp_path, "line")
    analyze_capture(folder)
    text = (folder / "analysis.json").read_text()
    json.loads(text, parse_constant=pytest.fail)
