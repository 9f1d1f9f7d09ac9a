"""``stepscope demo`` and ``stepscope doctor``, as a newcomer runs them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
