"""``stepscope history``: which runs it uses, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from stepscope.store.catalog import change_labels
from stepscope.store.create import create_run
from stepscope.store.documents import end_run, read_meta, save_summary, write_meta


def add_run(
    folder: Path, name: str, at: int, ms: float, *, command: str = "train.py", status: str = "finished"
) -> None:
    run_dir = create_run(folder / "runs", name, ["python", command], sessions=folder / "s").run_dir
    created = (1_700_000_000 + at * 3600) * 10**9
    git = {"commit": f"{at:040x}", "branch": "main", "dirty": False}
    write_meta(run_dir, {**read_meta(run_dir), "created_wall_ns": created, "git": git, "launcher": None})
    end_run(run_dir, exit_code=0, status="finished")
    summary: dict[str, Any] = {
        "schema": 1,
        "status": status,
        "status_severity": "info" if status == "finished" else "critical",
        "world_size": 2,
        "run": {"name": name, "created_wall_ns": created},
        "steps": {"total": 60, "steady": 50},
        "step_time": {"mean_ms": ms, "p50_ms": ms, "p90_ms": ms * 1.002},
        "phases": {},
    }
    save_summary(run_dir, summary, "")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for at in range(12):
        add_run(tmp_path, f"night-{at:02}", at, (100.0 if at < 8 else 108.0) + at % 3 / 10)
    add_run(tmp_path, "failed", 5, 500.0, status="failed")
    add_run(tmp_path, "other", 30, 20.0, command="eval.py")  # the newest, but the only one of its command
    change_labels(tmp_path / "runs" / "night-11", add=["nightly"])
    return tmp_path / "runs"


def test_the_change_and_the_commits_in_between(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["history", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Slower since night-08 (commit 0000000000): +8.0% (+7.")
    assert lines[1] == "The commits in between: git log --oneline 0000000000..0000000000"
    assert "12 runs of python train.py, oldest first:" in lines
    assert [line.split()[-2:] for line in lines if line.startswith("night-08")] == [["▲", "+8.0%"]]
    assert lines[-2:] == [
        "1 run with another command or number of ranks not shown (--any-command).",
        "failed left out: it did not finish: failed.",
    ]


def test_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["history", "--json", "--last", "5", str(runs)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in document["runs"]] == ["night-07", "night-08", "night-09", "night-10", "night-11"]
    assert (document["schema"], document["kind"], document["command"]) == (1, "history", ["python", "train.py"])
    assert document["runs"][0]["step_ms"] == 100.1


def test_markdown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["history", "--markdown", str(runs)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("### Step time of 12 runs\n\n- Slower since night-08")
    assert "| run | started | commit | steps | mean step | change |\n|---|---|---|---|---|---|\n" in out


def test_filters(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, names in (
        (["--tag", "nightly"], ["night-11"]),
        (["--name", "night-0[0-2]"], ["night-00", "night-01", "night-02"]),
        (["--name", "other"], ["other"]),
    ):
        assert run_command(["history", "--json", str(runs), *options]) == 0
        document = json.loads(capsys.readouterr().out)
        assert [row["run"] for row in document["runs"]] == names
        assert document["verdict"] == "cannot_tell"
    assert run_command(["history", "--json", "--any-command", str(runs)]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 13
    with pytest.raises(UsageError, match=r"no runs in .* with that name or tag"):
        run_command(["history", str(runs), "--tag", "none"])
    with pytest.raises(UsageError, match="no runs in"):
        run_command(["history", str(runs / "night-00")])
