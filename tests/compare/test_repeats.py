"""Further runs of a baseline in its folder are baselines, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster, slow_at
from made_runs import record

from stepscope.cli.main import run_command
from stepscope.comparison.inputs import read_input
from stepscope.comparison.repeats import read_repeats
from stepscope.hub.api.compare import compare_runs
from stepscope.reports.summary import summarize
from stepscope.store.catalog import change_labels, run_entry
from stepscope.store.documents import read_meta, save_summary, write_meta
from stepscope.store.load import load_run

HOUR_NS = 3600 * 10**9


def add(root: Path, name: str, hour: int, *, commit: str = "", command: str = "train.py", **about: Any) -> Path:
    """A finished run that was started in that hour."""
    path = record(root, name, Cluster(**{"ranks": 2, "steps": 120, "seed": hour, "name": name, **about}).run())
    git = {"commit": commit, "branch": "main", "dirty": False} if commit else None
    created = 1_700_000_000 * 10**9 + hour * HOUR_NS
    write_meta(path, {**read_meta(path), "git": git, "created_wall_ns": created, "command": ["python", command]})
    return path


def repeats(root: Path, baseline: str, *candidates: str) -> list[str]:
    first, *others = (read_input(root / name) for name in (baseline, *candidates))
    return [repeat.name for repeat in read_repeats(first, others)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def test_runs_of_the_same_command_and_commit(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for hour, name in enumerate(("base1", "base2", "base3")):
        add(root, name, hour, commit="a" * 40)
    add(root, "other", 5, commit="a" * 40, command="eval.py")
    slow = tuple(slow_at(rank, "forward", 4.0) for rank in range(2))
    add(root, "new", 8, commit="b" * 40, faults=slow)
    add(root, "newer", 9, commit="b" * 40, faults=slow)
    assert repeats(root, "base1", "new") == ["base2", "base3"]
    assert repeats(root, "base1", "new", "base2") == [], "base2 is compared itself, so nothing says whose base3 is"
    assert run_command(["compare", str(root / "base1"), str(root / "new"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["noise"]["between_from"] == "baselines"
    assert document["notices"][0] == (
        "2 more runs of base1 in its folder (base2, base3) are used as baselines, too (--only compares without them)."
    )
    assert run_command(["compare", "--only", str(root / "base1"), str(root / "new"), "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["baselines"]] == ["base1"]


def test_runs_with_the_same_tag(root: Path) -> None:
    for hour, name in enumerate(("one", "two", "three")):
        change_labels(add(root, name, hour, commit=str(hour) * 40), add=["stable", "all"])
    change_labels(add(root, "new", 5, commit="5" * 40), add=["all"])
    assert repeats(root, "three", "new") == ["two", "one"]


def test_where_nothing_recorded_differs_only_runs_on_the_other_side_in_time(root: Path) -> None:
    slow = tuple(slow_at(rank, "forward", 10.0) for rank in range(2))
    add(root, "old", 0, faults=slow)
    add(root, "base1", 1)
    add(root, "base2", 2)
    add(root, "between", 3)
    add(root, "new", 4)
    assert repeats(root, "base2", "new") == ["base1"], "old takes much longer, and between may be like new"
    assert repeats(root, "new", "base2") == []


def test_the_page_says_so_and_shows_the_steps_of_the_list(root: Path) -> None:
    cost = tuple(slow_at(rank, "forward", 60.0, range(step, step + 1)) for step in (30, 60, 90) for rank in range(2))
    add(root, "base", 1, commit="a" * 40, faults=cost, sampled_steps=(30, 60, 90))
    add(root, "new", 2, commit="b" * 40)
    document = compare_runs([root / "base", root / "new"])
    (middle,) = (row for row in document["rows"] if row["name"] == "p50")
    for cell, name in zip(middle["cells"], ("base", "new"), strict=True):
        assert cell["value"] == pytest.approx(median_in_list(root / name), rel=1e-3)
    add(root, "more", 0, commit="a" * 40)
    median_in_list(root / "more")
    notices = compare_runs([root / "base", root / "new"])["runs"][1]["comparison"]["notices"]
    assert notices[-1] == (
        "1 more run of base in its folder (more) is used as a baseline, too; its column shows the mean of all."
    )


def median_in_list(path: Path) -> float:
    """The median step that the list shows once the run has its summary."""
    save_summary(path, summarize(load_run(path).data), "")
    median = run_entry(path).median_step_ms
    assert median is not None
    return median
