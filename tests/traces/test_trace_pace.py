"""How long a step takes, and the path where the device sets that pace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from fakes.traces import MadeTrace

from stepscope.traces.device.figures import shared_out
from stepscope.traces.model.window import window_of
from stepscope.traces.path.graph import graph_of
from stepscope.traces.path.rank_path import whole_segments
from stepscope.traces.path.whatif import parse_change, what_if
from stepscope.traces.rank_analysis import RankAnalysis, analyze_rank
from stepscope.traces.reading.files import read_trace

H200 = Path(__file__).parent / "data" / "h200"
FILES = sorted(H200.rglob("*.json.gz"))


def behind() -> MadeTrace:
    """Two steps of 10 on the host, each with 40 on the device, which has still 30 of earlier steps to do."""
    made = MadeTrace()
    for number in range(3):
        made.step(number, number * 10, 10)
    made.kernel("gemm", 2, 30)
    made.launched("gemm", at=1, start=32, dur=40)
    made.launched("gemm", at=11, start=72, dur=40)
    made.launched("gemm", at=21, start=112, dur=40)
    return made


def test_the_device_sets_the_pace() -> None:
    found = analyze_rank(behind().trace(), 0)
    pace = found.pace
    assert (pace.steps, pace.host_ns, pace.device_ns, pace.total_ns, pace.step_ns) == (
        2,
        20_000,
        80_000,
        80_000,
        40_000,
    )
    assert pace.by_device
    assert pace.device.kernel_count == 2, "those of earlier steps are not of these"
    assert pace.device.utilization == 1.0
    assert (found.temporal.span_ns, found.device.kernel_count) == (110_000, 3), "all that counts"
    rows = found.tables["temporal_steps"].to_rows()
    assert [
        (row["wall_ns"], row["span_ns"], row["pace_ns"], row["utilization_share"], row["work"]) for row in rows
    ] == [(10_000, 40_000, 40_000, 1.0, 1)] * 2


def test_the_host_sets_the_pace() -> None:
    made = MadeTrace()
    for number in range(3):
        made.step(number, number * 100, 90)
        made.launched("gemm", at=number * 100 + 10, start=number * 100 + 20, dur=30)
    found = analyze_rank(made.trace(), 0)
    assert (found.pace.host_ns, found.pace.device_ns, found.pace.step_ns) == (190_000, 130_000, 95_000)
    assert not found.pace.by_device
    assert found.path.whole is None
    assert found.tables["path_causes"].title == "Critical path by cause"


def test_nothing_has_no_pace() -> None:
    pace = analyze_rank(MadeTrace().trace(), 0).pace
    assert (pace.total_ns, pace.step_ns, pace.by_device) == (0, 0, False)


def test_the_path_over_all_steps_is_the_pace() -> None:
    trace = behind().trace()
    found = analyze_rank(trace, 0)
    whole = found.path.whole
    assert whole is not None
    assert (whole.length_ns, whole.causes) == (80_000, {"compute": 80_000})
    assert found.path.length_ns == 20_000, "per step it is the profiler's step"
    assert [row["cause"] for row in found.tables["path_causes"].to_rows()] == ["compute"]
    replayed = what_if(graph_of(window_of(trace)), parse_change("kernel:gemm=2x"))
    assert (replayed.before_ns, replayed.after_ns) == ((40_000, 40_000), (20_000, 20_000))
    replayed = what_if(graph_of(window_of(trace)), parse_change("kernel:gemm=100x"))
    assert sum(replayed.after_ns) == 20_000, "the host's time is left"


def test_shares_add_up() -> None:
    assert shared_out(10, 3) == (3, 3, 4)


def plain_pace(path: Path) -> tuple[int, int]:
    """Host and device, by nothing but the file's events."""
    events: list[dict[str, Any]] = [
        each for each in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if each.get("ph") == "X"
    ]

    def ns(value: float) -> int:
        return round(value * 1000)

    steps = sorted(
        (ns(each["ts"]), ns(each["ts"]) + ns(each["dur"]))
        for each in events
        if each["name"].startswith("ProfilerStep#") and each["cat"] == "user_annotation"
    )[:-1]
    calls = {
        each["args"]["correlation"]: ns(each["ts"])
        for each in events
        if each["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in each["args"]
    }
    own = [
        (ns(each["ts"]), ns(each["ts"]) + ns(each["dur"]))
        for each in events
        if each["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
        and steps[0][0] <= calls.get(each["args"].get("correlation"), -1) < steps[-1][1]
    ]
    return steps[-1][1] - steps[0][0], max(end for _, end in own) - min(start for start, _ in own)


@pytest.fixture(scope="module")
def analyses() -> dict[str, RankAnalysis]:
    return {str(path): analyze_rank(read_trace(path), 0) for path in FILES}


@pytest.mark.few(5)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_of_real_traces(path: Path, analyses: dict[str, RankAnalysis]) -> None:
    found = analyses[str(path)]
    host_ns, device_ns = plain_pace(path)
    assert found.pace.host_ns == pytest.approx(host_ns, abs=2)
    assert found.pace.device_ns == pytest.approx(device_ns, abs=2)
    own = whole_segments(graph_of(window_of(read_trace(path))))
    assert (own is not None) == found.pace.by_device == (found.path.whole is not None)
    if own is not None and found.path.whole is not None:
        order = own.start_ns.argsort()
        assert (own.start_ns[order][1:] == own.end_ns[order][:-1]).all()
        assert found.path.whole.length_ns == found.pace.total_ns == sum(found.path.whole.causes.values())


def test_fp32_computes(analyses: dict[str, RankAnalysis]) -> None:
    path = H200 / "fp32.json.gz"
    found = analyses[str(path)]
    assert round(found.pace.step_ns / 1e6) == 108
    assert next(iter(found.path.whole.causes if found.path.whole else {})) == "compute"
    assert round(found.pace.device.eligible_fp32_ns / 3 / 1e6) == 96
    replayed = what_if(graph_of(window_of(read_trace(path))), parse_change("kernel:*gemm*=2x"))
    assert 0.4 < replayed.gain_share < 0.5
