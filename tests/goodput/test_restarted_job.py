"""A real job that torchrun restarts three times: the parts of its ledger add up to the wall time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOB = """
import os, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())
step, attempt = 0, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.path.exists("state.pt"):
    saved = torch.load("state.pt")
    step = saved["step"]
    optimizer.load_state_dict(saved["optimizer"])
while step < 120:
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 20 == 0:
        torch.save({"step": step, "optimizer": optimizer.state_dict()}, "state.pt")
    if attempt < 3 and step == 30 * (attempt + 1):
        raise ValueError("failure")
"""


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "3")


@pytest.mark.soak
@pytest.mark.ranks
def test_three_restarts_of_torchrun(run_stepscope: Callable[..., Any], script: Callable[..., Path]) -> None:
    """It fails after steps 30, 60 and 90, and resumes from steps 20, 60 and 80."""
    script(JOB)
    done = run_stepscope("run", "--quiet", *TORCHRUN, "script.py")
    assert done.code == 0, done.stderr
    summary = json.loads((done.run_dir / "summary.json").read_text())
    ledger = summary["goodput"]
    assert sum(ledger["parts"].values()) == pytest.approx(ledger["seconds"], rel=0.01)
    assert ledger["seconds"] == pytest.approx(summary["run"]["duration_s"], abs=0.01)
    assert [attempt["resumed_at"] for attempt in ledger["attempts"]] == [0, 20, 60, 80]
    assert [attempt["lost_steps"] for attempt in ledger["attempts"]] == [10, 0, 10, 0]
    assert (ledger["restarts"], ledger["estimated"]) == (3, False)
    assert min(ledger["parts"]["imports"], ledger["parts"]["restart"], ledger["parts"]["training"]) > 0
