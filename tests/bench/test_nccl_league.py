"""The league on NCCL: its cases, its prices and its scoring; and a whole league of one case on the CPU."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster, slow_at
from nccl import league
from nccl.cases import CASES, CPU, CUDA, Case, fault_ms, fault_text
from nccl.job import span_ms, spans
from nccl.overhead import added
from nccl.score import Judged, Price, Seen, good_enough, judge, promised_ms, render
from nccl.shared_gpu import mps

FAULT = Case(
    name="ddp/2/backward-device", strategy="ddp", ranks=2, where="backward", side="device", culprit=1, size=0.8
)
SMALL = replace(FAULT, name="ddp/2/small", size=0.1)
HEALTHY = Case(name="ddp/2/healthy-1", strategy="ddp", ranks=2)
PRICE = Price(with_ms=20.0, without_ms=10.0)


def finding(**more: Any) -> dict[str, Any]:
    """Rank 1 in backward: 10 of 20 ms."""
    cost = {"share": 0.5, "seconds": 1.0, "if_fixed": {"step_ms": 10.0, "speedup": 2.0}}
    whole = {"kind": "compute_straggler", "severity": "critical", "ranks": [1], "phase": "backward", "cost": cost}
    return {**whole, **more}


def costing(saved_ms: float, step_ms: float = 20.0) -> dict[str, Any]:
    return {"share": saved_ms / step_ms, "if_fixed": {"step_ms": step_ms - saved_ms}}


def test_the_matrix_has_what_was_asked_for() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 48
    faults = [case for case in CASES if not case.healthy]
    assert len(faults) >= 40
    configurations = {case.configuration for case in CASES}
    assert configurations == {"ddp/2", "ddp/4", "fsdp2/2", "fsdp2/4", "tp/2"}
    assert Counter(case.configuration for case in CASES if case.healthy) == dict.fromkeys(configurations, 2)
    for configuration in configurations:
        own = [case for case in faults if case.configuration == configuration]
        assert {case.where for case in own} == {"input", "forward", "backward", "optimizer", "between"}
        assert any(case.late for case in own)
        assert any(case.size == 0.1 for case in own)
        assert len({case.culprit for case in own}) == own[0].ranks
    assert all(0 <= case.culprit < case.ranks for case in faults)


@pytest.mark.parametrize(
    ("case", "healthy_ms", "ms"),
    [(SMALL, 9.2, 0.92), (SMALL, 40.0, 4.0), (FAULT, 9.2, 7.36), (FAULT, 1.0, 2.0), (FAULT, 90.0, 40.0)],
)
def test_a_fault_lasts_as_long_as_the_healthy_step_asks_for(case: Case, healthy_ms: float, ms: float) -> None:
    assert fault_ms(case, healthy_ms) == ms


def test_a_fault_is_written_as_the_job_takes_it() -> None:
    assert fault_text(HEALTHY, 0.0, CUDA) == "none"
    assert fault_text(FAULT, 7.36, CUDA) == "backward:device:1:7.36"
    assert fault_text(replace(FAULT, late=True), 7.36, CPU) == "backward:device:1:7.36:60"


def test_steps_are_measured_with_the_fault_and_without_it() -> None:
    assert spans(200, 0, 30, 0) == {"with": (30, 200)}
    assert spans(200, 70, 30, 0) == {"with": (30, 200), "after": (210, 270)}
    assert spans(420, 70, 30, 300) == {"with": (300, 420), "before": (30, 300), "after": (430, 490)}
    ends = [0.0, 0.010, 0.020, 0.050, 0.080]
    assert span_ms(ends, 0, 2) == {"step_ms": 10.0, "median_ms": 10.0, "steps": 2}
    assert span_ms(ends, 2, 4) == {"step_ms": 30.0, "median_ms": 30.0, "steps": 2}


def test_a_price_is_taken_from_the_same_job_or_from_healthy_ones() -> None:
    measured = {
        "with": {"step_ms": 20.0, "steps": 120},
        "before": {"step_ms": 9.0, "steps": 270},
        "after": {"step_ms": 12.0, "steps": 30},
    }
    assert league.price_of({"measured": measured}, None).without_ms == pytest.approx(9.3)
    assert league.price_of({"measured": measured}, 8.0).without_ms == 8.0
    rows = {f"ddp/2/healthy-{n}": {"measured": {"with": {"step_ms": ms}}} for n, ms in ((1, 9.0), (2, 11.0))}
    assert league.healthy_ms_of(rows, FAULT) == 10.0
    assert league.healthy_ms_of({"ddp/2/healthy-1": {"problem": "died"}}, FAULT) is None


def test_what_a_finding_promises_is_per_step_that_was_hit() -> None:
    assert promised_ms(finding(), 1.0) == pytest.approx(10.0)
    # A mean step of 12.5 ms, of which 2.5 would be saved; all of it in a quarter of the steps.
    late = finding(cost={"share": 0.2, "if_fixed": {"step_ms": 10.0}})
    assert promised_ms(late, 0.25) == pytest.approx(10.0)
    assert promised_ms(finding(cost={"share": 0.2, "if_fixed": None}), 1.0) is None
    assert promised_ms(finding(cost={}), 1.0) is None


@pytest.mark.parametrize(
    ("findings", "problems"),
    [
        ([finding()], ()),
        ([finding(severity="info")], ()),
        ([finding(cost=costing(10.9))], ()),
        ([finding(cost=costing(11.1))], ("price",)),
        ([finding(cost=costing(8.9))], ("price",)),
        ([finding(ranks=[0])], ("rank",)),
        ([finding(ranks=[0, 1])], ("rank",)),
        ([finding(phase="forward")], ("phase",)),
        ([finding(kind="input_straggler", phase="input")], ("kind",)),
        ([finding(kind="comm_bound", ranks=[])], ("not found",)),
        ([], ("not found",)),
        ([finding(), finding(kind="comm_bound", ranks=[])], ()),
        ([finding(), finding(kind="change_point")], ()),
        ([finding(), finding(kind="jitter", ranks=[0])], ("also blames jitter r0",)),
        ([finding(), finding(kind="jitter", ranks=[0], severity="info")], ()),
        ([finding(ranks=[0]), finding()], ("also blames compute_straggler r0",)),
    ],
)
def test_a_fault_is_judged_by_kind_rank_phase_and_price(findings: list[Any], problems: tuple[str, ...]) -> None:
    judged = judge(FAULT, Seen(findings=findings), PRICE)
    assert (judged.problems, judged.right, judged.healthy) == (problems, not problems, False)


def test_a_small_price_may_be_off_by_a_third_of_a_millisecond() -> None:
    price = Price(with_ms=10.0, without_ms=9.2)
    assert judge(SMALL, Seen(findings=[finding(cost=costing(1.05, 10.0))]), price).right
    assert judge(SMALL, Seen(findings=[finding(cost=costing(1.15, 10.0))]), price).problems == ("price",)


def test_a_healthy_run_must_not_be_accused() -> None:
    price = Price(with_ms=10.0, without_ms=10.0)
    bound = finding(kind="comm_bound", ranks=[])
    judged = judge(HEALTHY, Seen(findings=[bound, finding(severity="info")]), price)
    assert (judged.right, judged.others) == (True, ("comm_bound", "(compute_straggler r1)"))
    judged = judge(HEALTHY, Seen(findings=[finding()]), price)
    assert (judged.right, judged.accused, judged.problems) == (False, True, ("accused: compute_straggler r1",))


def test_a_fault_that_costs_nothing_makes_a_healthy_run() -> None:
    price = Price(with_ms=10.2, without_ms=10.0)
    nothing = judge(FAULT, Seen(findings=[]), price)
    cheap = judge(FAULT, Seen(findings=[finding(cost=costing(0.2, 10.2))]), price)
    dear = judge(FAULT, Seen(findings=[finding(cost=costing(3.0, 10.2))]), price)
    assert (nothing.right, nothing.healthy, nothing.hidden) == (True, True, True)
    assert (cheap.right, cheap.accused) == (True, False)
    assert (dear.right, dear.accused) == (False, True)


def test_enough_is_95_in_100_and_no_healthy_run_accused() -> None:
    faults = [Judged(name=str(number), healthy=False, right=number > 0) for number in range(20)]
    healthy = Judged(name="healthy", healthy=True, right=True)
    assert good_enough([*faults, healthy])
    assert not good_enough([*faults[:19], healthy])
    assert not good_enough([*faults, replace(healthy, right=False, accused=True)])
    text = render([*faults, healthy])
    assert "faults: 19 of 20 right (95.0%; needed: 95%)" in text
    assert "healthy: 0 of 1 accused" in text


def test_without_a_gpu_there_is_no_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with mps(ranks=2) as (environment, words):
        assert (environment, words) == ({}, "no GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with mps(ranks=2) as (environment, words):
        assert (environment, words) == ({}, "every rank has a GPU of its own")


def test_mps_is_started_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-cuda-mps-control"
    tool.write_text(
        f'#!/bin/sh\necho "$* $(cat) $(test -d "$CUDA_MPS_PIPE_DIRECTORY" && echo there)" >> {tmp_path}/said\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(RuntimeError), mps(ranks=2) as (environment, words):
        assert set(environment) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_DEVICE_MAX_CONNECTIONS"}
        assert words.startswith("with MPS")
        raise RuntimeError
    assert [line.split() for line in (tmp_path / "said").read_text().splitlines()] == [
        ["-d", "there"],
        ["quit", "there"],
    ]
    tool.write_text("#!/bin/sh\necho no permission\nexit 1\n")
    with mps(ranks=2) as (environment, words):
        assert environment == {}
        assert "did not start (no permission)" in words


@pytest.mark.parametrize(("first", "until"), [(0, 60), (40, 80)])
def test_steps_after_the_fault_are_not_shown_to_the_rules(first: int, until: int) -> None:
    """They would make a fault that lasts all the time one that passes, and half its price."""
    faults = (slow_at(1, "backward", 20.0, range(first, until)),)
    run = Cluster(ranks=2, steps=120, faults=faults, warmup_ms=50.0).run()
    seen = league.look_at(run, first=first, steps=until)
    named = next(each for each in seen.findings if each["kind"] == "compute_straggler")
    assert (named["ranks"], named["phase"], named["steps"][1]) == ([1], "backward", until - 1)
    assert promised_ms(named, seen.hit_share) == pytest.approx(20.0, rel=0.1)
    assert seen.hit_share == pytest.approx(1.0 if first == 0 else 0.5, abs=0.1)


def test_what_recording_adds_is_the_median_of_neighboring_blocks() -> None:
    def blocks(*figures: float) -> list[dict[str, float]]:
        return [{"cpu_us": figure} for figure in figures]

    rounds = [
        {"bare": blocks(100, 200, 300), "recorded": blocks(110, 212, 900)},
        {"bare": blocks(100, 100, 100), "recorded": blocks(108, 108, 108)},
        {"bare": blocks(10, 20, 30), "recorded": blocks(20, 30, 40)},
    ]
    assert added(rounds, "recorded", "cpu_us") == (8, 10, 12)


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_league_runs_is_kept_and_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single case with a step far too long to be mistaken; prices on a busy machine are another matter."""
    folder, results = tmp_path / "kept", tmp_path / "results.json"
    only = "ddp/2/input-host"
    league.main(["--device", "cpu", "--jobs", "1", "--only", only, "--keep", str(folder), "--json", str(results)])
    document = json.loads(results.read_text())
    assert [row["name"] for row in document["rows"]] == ["ddp/2/healthy-1", "ddp/2/healthy-2", only]
    row = document["rows"][-1]
    assert (row["kind"], row["ranks"], row["phase"]) == ("input_straggler", [1], "input"), row
    assert not list(folder.rglob("*.log"))
    assert not list(folder.rglob("logs"))
    output = capsys.readouterr().out
    league.main(["--rejudge", str(folder), "--only", only])
    assert capsys.readouterr().out == output
    # The clean steps that follow the fault are measured, and not shown to the rules.
    seen = league.look_at(league.open_run(folder / "runs" / "ddp-2-input-host"), first=0, steps=CPU.steps)
    assert all(each["steps"][1] < CPU.steps for each in seen.findings if each["steps"])
    assert np.isclose(seen.hit_share, 1.0)
