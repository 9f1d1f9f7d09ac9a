"""GPU hours of a run by cause, and what its record has."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from stepscope.fleet.record import CAUSES, hours_column, record_of, team_of

PARTS = {"start_up": 300.0, "training": 3000.0, "evaluation": 100.0, "checkpoint": 50.0, "hang": 100.0, "lost": 50.0}
FACTS = {
    "created_wall_ns": 10**18,
    "command": ["/opt/bin/python3.12", "/opt/jobs/train.py", "--seed", "17", "--out", "/data/run-3"],
    "host": "a",
    "tags": ["baseline", "team:vision"],
    "status": "finished",
}
META = {"user": "anna", "python": "3.12.3", "driver": "575.51", "environment": {"STEPSCOPE_IMAGE": "train:2"}}


def rank(number: int, host: str, step_ms: float, comm_ms: float | None) -> dict[str, Any]:
    about = {"rank": number, "host": host, "device": "cuda", "device_name": "H100", "device_index": number % 2}
    return {**about, "step_ms": step_ms, "comm_ms": comm_ms, "torch": "2.9.1"}


@pytest.fixture
def summary() -> dict[str, Any]:
    return {
        "world_size": 4,
        "run": {"ended_wall_ns": 10**18 + 3600 * 10**9},
        "goodput": {"goodput": 0.8, "parts": PARTS},
        "step_time": {"mean_ms": 100.0, "p50_ms": 100.0},
        "phases": {
            "input": {"share": 0.1, "mean_ms": 10.0, "device": None},
            "forward": {"share": 0.4, "mean_ms": 40.0, "device": None},
            "comm": {"share": 0.15, "mean_ms": 15.0, "device": None},
        },
        "clock": "host",
        "ranks": [rank(0, "a", 100, 20), rank(1, "a", 100, 18), rank(2, "b", 100, 17), rank(3, "b", 100, 5)],
        "host": {"gpus": [{"node": "b", "index": 1, "uuid": "GPU-b-1", "name": "H100"}]},
        "findings": [
            {
                "kind": "compute_straggler",
                "severity": "warning",
                "title": "Rank 3 is slow.",
                "phase": "forward",
                "cost": {"share": 0.12, "seconds": 360.0},
                "evidence": {"hosts": ["b"], "excess_share": 0.13},
            }
        ],
    }


def hours_of(summary: dict[str, Any]) -> dict[str, float]:
    run = record_of("night", FACTS, META, summary).run
    return {cause: round(run[hours_column(cause)], 6) for cause in CAUSES}


def test_hours_by_cause_add_up_to_duration_times_ranks(summary: dict[str, Any]) -> None:
    hours = hours_of(summary)
    assert sum(hours.values()) == pytest.approx(4.0)
    a_second = 4 / 3600
    # The rank that waits least waits 5 ms of 100; all wait 15 ms in the mean.
    assert hours["exchange"] == pytest.approx(3000 * 0.05 * a_second, abs=1e-5)
    assert hours["slow_rank"] == pytest.approx(3000 * 0.10 * a_second, abs=1e-5)
    assert hours["input"] == pytest.approx(3000 * 0.10 * a_second, abs=1e-5)
    assert hours["useful"] == pytest.approx(3000 * 0.75 * a_second, abs=1e-5)
    assert hours["hangs"] == pytest.approx(100 * a_second, abs=1e-5)
    assert hours["lost_steps"] == pytest.approx(50 * a_second, abs=1e-5)
    assert hours["unknown"] == 0.0


def test_without_measured_waiting_the_findings_say_what_was_waited_for(summary: dict[str, Any]) -> None:
    for row in summary["ranks"]:
        row["comm_ms"] = None
    del summary["phases"]["comm"]
    assert hours_of(summary)["slow_rank"] == pytest.approx(3000 * 0.12 * 4 / 3600, abs=1e-5)
    hosts = record_of("night", FACTS, META, summary).hosts
    assert [(row["host"], row["work_ms"]) for row in hosts] == [("a", 100.0), ("b", pytest.approx(113.0))]


def test_work_since_the_last_checkpoint_is_lost_with_a_crash(summary: dict[str, Any]) -> None:
    before = hours_of(summary)
    crash = {"kind": "rank_crashed", "severity": "critical", "title": "Rank 0 died.", "cost": {"seconds": 600.0}}
    summary["findings"].append(crash)
    after = hours_of(summary)
    assert after["crashes"] - before["crashes"] == pytest.approx(600 * 4 / 3600, abs=1e-5)
    assert sum(after.values()) == pytest.approx(4.0)
    summary["findings"][-1]["severity"] = "info"  # while it shut down
    assert hours_of(summary) == before


def test_a_record_has_the_hosts_with_their_slowest_rank(summary: dict[str, Any]) -> None:
    made = record_of("night", FACTS, META, summary)
    assert made.hosts == (
        {
            "host": "a", "position": 0, "ranks": 2, "device": "H100", "work_ms": 82.0, "slowest_rank": 1,
            "gpu_uuid": None,
        },
        {
            "host": "b", "position": 1, "ranks": 2, "device": "H100", "work_ms": 95.0, "slowest_rank": 3,
            "gpu_uuid": "GPU-b-1",
        },
    )  # fmt: skip
    run = made.run
    assert run["job"] == "train.py --seed # --out run-# · 4 ranks"
    assert (run["team"], run["image"], run["driver"], run["exchange_ms"]) == ("vision", "train:2", "575.51", 5.0)
    assert made.findings[0] == {
        "position": 0, "kind": "compute_straggler", "severity": "warning", "title": "Rank 3 is slow.",
        "phase": "forward", "hosts": ["b"], "cost_share": 0.12, "cost_gpu_hours": pytest.approx(0.4),
    }  # fmt: skip


def test_gpus_that_were_throttled_and_hardware_that_failed(summary: dict[str, Any]) -> None:
    named = {"node": "b", "gpu": 1, "held_back_share": 0.4, "reasons": ["hw_thermal_slowdown"]}
    summary["findings"].append({"kind": "gpu_throttled", "severity": "warning", "evidence": {"gpus": [named]}})
    end = {"cause": "device_error", "host": "a", "type": "AcceleratorError", "message": "uncorrectable ECC error"}
    summary["attempt_ends"] = [end]
    throttled, failed = record_of("night", FACTS, META, summary).gpus
    assert throttled == {
        "host": "b", "gpu_index": 1, "gpu_uuid": "GPU-b-1", "gpu_name": "H100", "event": "throttled",
        "throttled_share": 0.4, "reasons": ["hw_thermal_slowdown"],
    }  # fmt: skip
    assert failed == {"host": "a", "event": "hardware_error", "reasons": ["uncorrectable"]}


@pytest.mark.parametrize("key", ["goodput", "ranks", "phases", "findings", "step_time", "host", "world_size"])
@pytest.mark.parametrize("value", [None, "x", 7, [1], {"a": [None]}, float("nan"), 1e300])
def test_a_summary_may_be_anything(summary: dict[str, Any], key: str, value: Any) -> None:
    made = record_of("night", FACTS, META, {**copy.deepcopy(summary), key: value})
    assert made.run["run"] == "night"


def test_the_team_is_named_by_its_tag_or_the_first() -> None:
    assert [team_of(tags) for tags in (["a", "team=b"], ["a", "b"], [], ["team:"])] == ["b", "a", "", "team:"]
