"""``tests/support/job_startup``: jobs train without torch's compiler, have all of it when they ask for it, and end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

JOB = """
import sys, torch
calls = []
remove = torch._C._remove_obj_from_tls
torch._C._remove_obj_from_tls = lambda key: calls.append((key, torch._C._is_key_in_tls(key)))
torch.ones(1, requires_grad=True).sum().backward()
torch._C._stash_obj_in_tls("another", 1)
print(calls, torch._C._get_obj_in_tls("another"))
torch._C._remove_obj_from_tls = remove

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("torch._dynamo.eval_frame" in sys.modules, "torch._decomp" in sys.modules)
from torch._dynamo.utils import counters
import torch._dynamo.config
print(torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo.config.suppress_errors, type(counters).__name__)
print(len(dir(torch._meta_registrations)) > 100)
"""


def test_a_job_has_what_it_asks_for_and_nothing_that_hangs_it(root: Path) -> None:
    """The first line: no Python object is left with the exchanges, which a thread of gloo would release."""
    env = {**os.environ, "PYTHONPATH": str(root / "tests" / "support" / "job_startup")}
    done = subprocess.run([sys.executable, "-c", JOB], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[('context', False)] 1", "False False", "True False defaultdict", "True"]
