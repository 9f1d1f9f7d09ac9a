"""The examples as a user runs them: the steps are counted exactly and their time is where it belongs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.store.load import open_run

STEPS = 24
WORK = {"forward", "backward", "optimizer"}


@pytest.fixture
def record(run_stepscope: Callable[..., Any], root: Path) -> Callable[..., dict[str, Any]]:
    def run(name: str, *options: str, steps: int = STEPS) -> dict[str, Any]:
        done = run_stepscope("run", "--quiet", *options, root / "examples" / name, "--steps", str(STEPS))
        assert done.code == 0, done.stderr
        assert done.stdout.rstrip().splitlines()[-1].startswith(f"step {STEPS} ")
        summary: dict[str, Any] = json.loads((done.run_dir / "summary.json").read_text())
        assert (summary["status"], summary["exit_code"], summary["errors"]) == ("finished", 0, [])
        assert summary["steps"]["total"] == summary["steps"]["compared"] == steps
        assert [row["steps"] for row in summary["ranks"]] == [steps] * summary["world_size"]
        assert {(row["state"], row["lost"], row["torn"], row["hook_failures"]) for row in summary["ranks"]} == {
            ("exited", 0, 0, 0)
        }
        assert sum(phase["share"] for phase in summary["phases"].values()) == pytest.approx(1, abs=0.01)
        assert summary["notices"] == []
        summary["dir"] = done.run_dir
        return summary

    return run


def phases(summary: dict[str, Any]) -> set[str]:
    return {name for name, phase in summary["phases"].items() if phase["share"] > 0}


def micro_batches(summary: dict[str, Any]) -> list[int]:
    """By step."""
    (series,) = open_run(summary["dir"]).ranks
    return [int(count) for count in series.steps["micro_batches"]]


def test_single(record: Callable[..., Any]) -> None:
    summary = record("single.py")
    assert summary["world_size"] == 1
    assert phases(summary) == {*WORK, "input", "other"}


@pytest.mark.soak
def test_accumulation(record: Callable[..., Any]) -> None:
    summary = record("accumulation.py")
    assert phases(summary) == {*WORK, "input", "other"}
    assert micro_batches(summary)[1:] == [4] * (STEPS - 1)


@pytest.mark.soak
def test_gan(record: Callable[..., Any]) -> None:
    """Two optimizers, one step; only the very first step of the critic cannot know that the generator will follow."""
    summary = record("gan.py", steps=STEPS + 1)
    assert phases(summary) == {*WORK, "input", "other"}
    assert micro_batches(summary) == [1, 1, *[2] * (STEPS - 1)]


@pytest.mark.soak
def test_custom_loop(record: Callable[..., Any]) -> None:
    summary = record("custom_loop.py")
    assert phases(summary) == {"augment", "loss", "update", "other"} | (phases(summary) & {"backward"})
    events = [json.loads(line) for line in (summary["dir"] / "events.jsonl").read_text().splitlines()]
    notes = [event for event in events if event["event"] == "note"]
    assert [note["step"] for note in notes] == list(range(STEPS))
    losses = [note["values"]["loss"] for note in notes]
    assert losses[-1] < losses[0] / 10


@pytest.mark.soak  # near: test_ddp in tests/launch/test_facts_of_runs.py
@pytest.mark.ranks
def test_ddp(record: Callable[..., Any]) -> None:
    summary = record("ddp.py", "--nproc-per-node", "2")
    assert (summary["world_size"], {row["backend"] for row in summary["ranks"]}) == (2, {"gloo"})
    assert {*WORK, "comm", "input", "other"} == phases(summary)


@pytest.mark.soak
@pytest.mark.ranks
def test_fsdp2(record: Callable[..., Any], forked_ranks: Path) -> None:
    summary = record("fsdp2.py", str(forked_ranks), "2")
    assert (summary["world_size"], {row["backend"] for row in summary["ranks"]}) == (2, {"gloo"})
    assert phases(summary) >= {*WORK, "other"}
