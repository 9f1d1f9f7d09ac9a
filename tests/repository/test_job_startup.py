"""``tests/support/job_startup``: jobs train without torch's compiler, have all of it when they ask for it, and end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
print("torch._dynamo.eval_frame" in sys.modules)
from torch._dynamo.utils import counters
import torch._dynamo.config
print(torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo.config.suppress_errors, type(counters).__name__)
"""


@pytest.mark.soak  # near: every job that a test starts
def test_a_job_has_the_compiler_when_it_asks_for_it_and_leaves_no_object_with_the_exchanges(root: Path) -> None:
    """Backward's, which a thread of gloo would release, and hang the job at its end."""
    env = {**os.environ, "PYTHONPATH": str(root / "tests" / "support" / "job_startup")}
    env.pop("STEPSCOPE_WHOLE_TORCH", None)
    done = subprocess.run([sys.executable, "-c", JOB], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[('context', False)] 1", "False", "True False defaultdict"]


METHODS = """
import dataclasses, sys
sitecustomize = sys.modules["sitecustomize"]
sitecustomize.COMPILED = sys.argv[1]

@dataclasses.dataclass(frozen=True, order=True)
class Pair:
    one: int
    two: str = "x"

print(Pair(1), Pair(1) == Pair(1, "x"), Pair(1) < Pair(2), len({Pair(1), Pair(1)}), sitecustomize.are_new)
try:
    Pair(1).one = 2
except dataclasses.FrozenInstanceError as error:
    print(error)
sitecustomize.save_compiled()
"""


def test_methods_of_dataclasses_are_compiled_once(root: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(root / "tests" / "support" / "job_startup")}
    command = [sys.executable, "-c", METHODS, str(tmp_path / "compiled" / "dataclasses")]
    said = [subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    first = "Pair(one=1, two='x') True True 1 True\ncannot assign to field 'one'\n"
    assert said == [first, first.replace("1 True", "1 False")]
    (tmp_path / "compiled" / "dataclasses").write_bytes(b"damaged")
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == first
