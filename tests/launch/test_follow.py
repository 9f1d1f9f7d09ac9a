"""``stepscope report --follow`` beside a job that spends its time between steps."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOP = """
import time
import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def write_report():
    time.sleep(0.06)


for step in range(120):
    loss = model(torch.randn(8, 16)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    write_report()
"""


def test_what_is_found_is_said_while_it_runs(commands: Any, script: Callable[..., Path]) -> None:
    job = commands.start("run", "--quiet", "--name", "live", script(LOOP, "train.py"))
    run_dir = commands.folder / "runs" / "live"
    end = time.monotonic() + 60
    while not list((run_dir / "steps").glob("*.seg")) and time.monotonic() < end:
        time.sleep(0.05)
    followed = commands.finish(commands.start("report", "--follow", "runs/live"))
    assert commands.finish(job).code == 0
    assert followed.code == 0, followed.stderr
    assert "following runs/live" in followed.stderr
    lines = [line for line in followed.stdout.splitlines() if re.match(r"\d\d:\d\d:\d\d  step ", line)]
    assert any("of the training time passes between steps" in line for line in lines)
    # When the run is over the summary follows, and knows the place.
    assert "mostly in write_report, train.py:11" in " ".join(followed.stdout.split())
