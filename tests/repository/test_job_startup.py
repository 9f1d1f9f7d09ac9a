"""``tests/support/job_startup``: jobs train without torch's compiler, have all of it when they ask for it, and end."""

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
    env = {**os.environ, "PYTHONPATH": str(root / "tests" / "support" / "job_startup")}
    done = subprocess.run([sys.executable, "-c", JOB], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "True False defaultdict"]


BACKWARD = """
import torch
calls = []
torch._C._remove_obj_from_tls = lambda key: calls.append((key, torch._C._is_key_in_tls(key)))
torch.ones(1, requires_grad=True).sum().backward()
torch._C._stash_obj_in_tls("another", 1)
print(calls, torch._C._get_obj_in_tls("another"))
"""


def test_backward_leaves_no_python_object_with_the_exchanges(root: Path) -> None:
    """Which a thread of gloo would release, and hang the job at its end."""
    env = {**os.environ, "PYTHONPATH": str(root / "tests" / "support" / "job_startup")}
    done = subprocess.run([sys.executable, "-c", BACKWARD], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[('context', False)] 1"
