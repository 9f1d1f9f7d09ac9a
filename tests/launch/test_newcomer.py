"""``stepscope demo`` and ``stepscope doctor``, as a newcomer runs them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.soak  # near: .ci/run runs the demo and asks for the same rank
@pytest.mark.ranks
def test_the_demo_names_the_slow_rank(run_stepscope: Callable[..., Any], tmp_path: Path) -> None:
    done = run_stepscope("demo", "--steps", "40", "--phase", "backward", "--dir", tmp_path / "there")
    assert done.code == 0, done.stderr
    assert done.run_dir == tmp_path / "there" / "demo"
    assert "rank 2 is slowed by 30 ms per step in backward." in done.stderr
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["steps"]["total"]) == ("finished", 4, 40)
    straggler = summary["findings"][0]
    assert (straggler["kind"], straggler["ranks"], straggler["phase"]) == ("compute_straggler", [2], "backward")
    assert (done.run_dir / "summary.txt").read_text() in done.stderr + "\n"
    # Its ranks are forks of one process; each is a rank of its own nevertheless, to its end.
    assert [row["state"] for row in summary["ranks"]] == ["exited"] * 4
    logs = {path.name: path.read_text() for path in (done.run_dir / "logs").iterdir()}
    assert [line.split()[:2] for line in logs.pop("rank-0.log").splitlines()] == [["step", "0"], ["step", "25"]]
    assert logs == {"main.log": "", **{f"rank-{rank}.log": "" for rank in (1, 2, 3)}}


USAGE = """
import argparse, os

if os.environ.get("RANK"):
    raise RuntimeError("\\x1b[1mno data\\x1b[0m for rank " + os.environ["RANK"])
argparse.ArgumentParser(prog="train.py").parse_args(["--what"])
"""


def test_a_script_that_does_not_get_to_training_is_quoted(run_stepscope: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(USAGE)
    done = run_stepscope("run", "--name", "usage", "train.py")
    assert done.code == 2
    text = " ".join((tmp_path / "runs" / "usage" / "summary.txt").read_text().split())
    quoted = "✖ The script ended with exit code 2 before it trained: train.py: error: unrecognized arguments: --what"
    assert text.startswith(quoted)
    assert "container" not in text

    (tmp_path / "two.sh").write_text("RANK=0 python3 train.py\nRANK=1 python3 train.py\n")
    assert run_stepscope("run", "--name", "two", "bash", "two.sh").code == 1
    text = " ".join((tmp_path / "runs" / "two" / "summary.txt").read_text().split())
    assert "raised RuntimeError: no data for rank 0 before" in text
    assert "two · 2 ranks, none recorded · 0 steps" in text


def test_the_doctor(run_stepscope: Callable[..., Any], tmp_path: Path, root: Path) -> None:
    healthy = run_stepscope("doctor")
    assert (healthy.code, healthy.stderr) == (0, "")
    lines = healthy.stdout.splitlines()
    assert lines[0].startswith("✔ stepscope ")
    assert any(line.startswith("✔ torch 2.") for line in lines)
    assert any(f"runs are stored in {tmp_path}/runs (" in line for line in lines)
    assert not (tmp_path / "runs").exists()

    (tmp_path / "sitecustomize.py").write_text("")
    (tmp_path / "file").touch()
    path = os.pathsep.join([str(tmp_path), str(root / "src")])
    odd = run_stepscope("doctor", "--dir", "file/runs", env={"PYTHONPATH": path})
    assert odd.code == 1
    assert "✖ " in odd.stdout
    assert "you have a sitecustomize module" in odd.stdout
