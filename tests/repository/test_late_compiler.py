"""``tests/support/late_compiler``: jobs train without torch's compiler, and have all of it when they ask for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

JOB = """
import sys, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("torch._dynamo.eval_frame" in sys.modules)
from torch._dynamo.utils import counters
import torch._dynamo.config
print(torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo.config.suppress_errors, type(counters).__name__)
"""


def test_the_compiler_is_loaded_when_it_is_asked_for(root: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(root / "tests" / "support" / "late_compiler")}
    done = subprocess.run([sys.executable, "-c", JOB], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "True False defaultdict"]
