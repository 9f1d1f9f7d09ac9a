"""The parts of the league that decide something: the plan of faults, the matrix, the peer's words, the replay."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes.cluster import Cluster
from league import replay
from league.cases import CASES
from league.peer import read_summary
from league.score import judge
from league.synthetic import CELLS
from league.table import Scored, render
from league.truth import Claim, Truth, claim_of


@pytest.fixture(scope="module")
def plan() -> ModuleType:
    """A script's part, which is no part of the package."""
    path = Path(__file__).parents[2] / "bench" / "league" / "jobs" / "plan.py"
    spec = importlib.util.spec_from_file_location("plan", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "hit"),
    [
        ("forward:1:5", [(1, step) for step in range(8)]),
        ("forward:1:5:from=6", [(1, 6), (1, 7)]),
        ("forward:0+1:5:once=3", [(0, 3), (1, 3)]),
        ("forward:all:5:span=2-4", [(0, 2), (0, 3), (1, 2), (1, 3)]),
        ("forward:0:5:every=4", [(0, 3), (0, 7)]),
        ("forward:rotating:5", [(0, 0), (0, 2), (0, 4), (0, 6), (1, 1), (1, 3), (1, 5), (1, 7)]),
    ],
)
def test_whom_a_fault_hits(plan: ModuleType, text: str, hit: list[tuple[int, int]]) -> None:
    fault = plan.Fault(text)
    assert [(rank, step) for rank in range(2) for step in range(8) if fault.hits(rank, 2, step)] == hit


@pytest.mark.parametrize("text", ["forward:1", "sideways:1:5", "forward:1:5:sometimes", "forward:1:much"])
def test_a_fault_that_is_none(plan: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        plan.Fault(text)


def test_times_follow_from_rank_and_step_alone(plan: ModuleType) -> None:
    def make(rank: int) -> Any:
        faults = [plan.Fault("forward:1:8:drift"), plan.Fault("backward:1:5")]
        return plan.Plan({"forward": 10.0}, faults, rank=rank, ranks=2, steps=10, noise=0.1)

    first, repeated, other = make(1), make(1), make(0)
    assert first.seconds("forward", 4) == repeated.seconds("forward", 4)
    assert first.seconds("forward", 4) != first.seconds("forward", 5)
    assert first.fault_s("forward", 5) == pytest.approx(0.004)
    assert first.seconds("backward", 3) == 0.005
    assert other.seconds("backward", 3) == 0.0


def test_every_case_is_its_own(plan: ModuleType) -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    for case in CASES:
        words = iter(case.args)
        for fault in [plan.Fault(next(words)) for word in words if word == "--fault"]:
            if case.ranks == 1 or case.truth.healthy:
                continue  # nobody asks for the rank
            named = fault.ranks not in ("all", "rotating")
            assert case.truth.ranks == (tuple(int(rank) for rank in fault.ranks.split("+")) if named else None), case.id


def test_the_matrix_is_as_wide_as_it_should_be() -> None:
    healthy = [case for case in CASES if case.truth.healthy]
    assert len(healthy) >= 12
    assert {case.ranks for case in CASES} == {1, 2, 4}
    kinds = set().union(*(case.truth.kinds for case in CASES))
    not_put_there = {"memory_pressure", "ram_pressure", "gpu_throttled"}
    assert kinds == {
        *("input_bound", "h2d_bound", "comm_bound", "comm_hook_bound", "optimizer_bound", "between_steps"),
        *("wait_heavy",),
        *("input_straggler", "compute_straggler", "h2d_straggler", "straggler", "rotating_straggler"),
        *("node_straggler", "imbalance", "jitter", "stall", "drift", "change_point", "throughput_drop"),
        *("memory_creep", "memory_imbalance", "fragmentation", "low_gpu_utilization", "cpu_saturated"),
    }
    assert not kinds & not_put_there


def test_every_cell_can_be_played() -> None:
    assert len({cell.id for cell in CELLS}) == len(CELLS)
    for cell in CELLS[::11]:
        assert len(cell.run(seed=1).ranks) == cell.cluster.ranks


def test_the_peers_words(tmp_path: Path) -> None:
    slow = {"kind": "STRAGGLER", "severity": "crit", "ranks": [1], "phase": None, "status": "S", "summary": "s"}
    residual = {"kind": "RESIDUAL_HEAVY", "severity": "warn", "ranks": [0], "metric": "residual"}
    fine = {"kind": "NORMAL", "severity": "info", "ranks": []}
    summary = {"step_time": {"diagnosis": slow, "issues": [slow, residual]}, "system": {"diagnosis": fine}}
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    assert read_summary(tmp_path) == []
    (folder / "final_summary.json").write_text(json.dumps(summary))
    first, second, third = read_summary(tmp_path)
    assert (first.severity, first.ranks, "between_steps" in first.kinds) == ("critical", (1,), True)
    assert (second.kinds, second.ranks) == (("wait_heavy", "between_steps", "comm_bound"), ())
    assert (third.kinds, third.warned) == (("normal",), False)


@pytest.mark.parametrize(
    ("said_at", "after"),
    [(range(45, 80), 6), ([42, *range(50, 80)], 11), (range(77, 80), 38), (range(40, 60), 1), ([50], None), ([], None)],
)
def test_detected_when_it_stays(monkeypatch: pytest.MonkeyPatch, said_at: list[int], after: int | None) -> None:
    def fake(run: Any, *, alive: bool) -> list[Claim]:
        assert alive
        at = int(run.ranks[0].steps["step"][-1])
        return [claim_of({"kind": "stall", "severity": "info"})] if at in said_at else []

    monkeypatch.setattr(replay, "verdict", fake)
    truth = Truth(kinds=frozenset({"stall"}), start=40)
    assert replay.detected_after(Cluster(ranks=1, steps=80).run(), truth, 1) == after


def test_nothing_to_detect() -> None:
    run = Cluster(ranks=1, steps=20).run()
    assert replay.detected_after(run, Truth(kinds=frozenset({"stall"})), 1) is None
    assert replay.detected_after(run, Truth(kinds=frozenset({"stall"}), start=40), 1) is None


def test_the_table_says_what_was_missed() -> None:
    truth = Truth(kinds=frozenset({"stall"}), start=40)
    missed = Scored(id="effect10/2/x", judged=judge(truth, [], 2), said="nothing", has_start=True)
    found = Scored(
        id="effect10/4/x",
        judged=judge(truth, [claim_of({"kind": "stall", "severity": "warning"})], 4),
        said="stall",
        detected_after=12,
        has_start=True,
    )
    text = render({"stepscope": [missed, found], "other": []})
    assert "recall                      0.97      MISSED  0.500 (1 of 2)" in text
    assert "steps until a 10% effect      10  median 12, max 12, 1 never" in text
    assert "effect10/2/x                       missed   [nothing]" in text
    assert "other" not in text
