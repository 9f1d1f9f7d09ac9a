"""A job that spends its time between steps: the run says where, and the job notices nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.store.load import open_run

Run = Callable[..., Any]

LOOP = """
import multiprocessing, os, signal, sys, time
import torch
from torch import nn

OURS = signal.SIGRTMIN + 12
heard = []
if "own" in sys.argv:
    signal.signal(OURS, lambda *_: heard.append(1))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def write_report():
    time.sleep(0.3)


for step in range(12):
    if "late" in sys.argv and step == 6:
        signal.signal(OURS, lambda *_: heard.append(1))
    loss = model(torch.randn(8, 16)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
    write_report()
    if "fork" in sys.argv and step == 8:
        child = os.fork()
        if not child:
            os._exit(signal.getsignal(OURS) is not signal.SIG_DFL)
        print(os.waitpid(child, 0)[1], file=sys.stderr)
print(len(heard), file=sys.stderr)
if "own" in sys.argv or "late" in sys.argv:
    os.kill(os.getpid(), OURS)
    print(len(heard), file=sys.stderr)
"""


@pytest.fixture
def loop(script: Callable[..., Path]) -> Path:
    return script(LOOP, "train.py")


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(LOOP.splitlines(), 1) if text in line)


def test_the_stack_names_the_function_and_the_line_and_a_forked_child_is_left_alone(
    run_stepscope: Run, loop: Path
) -> None:
    done = run_stepscope("run", "--quiet", loop, "fork")
    assert (done.code, done.stderr.split()) == (0, ["0", "0"])
    data = open_run(done.run_dir)
    assert {stack["pid"] for stack in data.stacks} == {data.ranks[0].identity.pid}
    named = [stack for stack in data.stacks if stack["step"] != 9]  # before which it forks
    assert named
    for stack in named:
        assert (stack["rank"], stack["phase"]) == (0, "other")
        assert 1 <= stack["step"] <= 12
        assert [(frame["file"], frame["line"], frame["function"]) for frame in stack["frames"]] == [
            (str(loop), line_of("time.sleep"), "write_report"),
            (str(loop), line_of("    write_report()"), "<module>"),
        ]
    (series,) = data.ranks
    between, other = series.steps["between_ns"], series.steps.phase("other")
    assert between[0] == 0
    assert (between[1:] >= 300_000_000).all()
    assert (between <= other).all()
    # And nothing is left in the session.
    assert not Path(json.loads((done.run_dir / "run.json").read_text())["session"]).exists()


@pytest.mark.soak
def test_switched_off_nobody_is_asked(run_stepscope: Run, loop: Path) -> None:
    done = run_stepscope("run", "--quiet", loop, env={"STEPSCOPE_STACKS": "0"})
    assert done.code == 0, done.stderr
    assert not (done.run_dir / "stacks.jsonl").exists()
    assert open_run(done.run_dir).stacks == ()


@pytest.mark.soak
@pytest.mark.parametrize(("when", "requested"), [("own", True), ("late", False)])
def test_a_handler_of_the_scripts_own_is_its_own(run_stepscope: Run, loop: Path, when: str, requested: bool) -> None:
    done = run_stepscope("run", "--quiet", loop, when)
    assert (done.code, done.stderr.split()) == (0, ["0", "1"])
    if requested:  # by another signal; with "late" the offer may have been withdrawn before the first question
        assert open_run(done.run_dir).stacks


WITHIN = """
import sys, time
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
late = dist.get_rank() == 1
fault = sys.argv[1] if len(sys.argv) > 1 else ""


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        if fault == "data" and late:
            time.sleep(0.03)  # data
        return torch.ones(16)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 1)

    def forward(self, x):
        if fault == "forward" and late:
            time.sleep(0.03)  # forward
        return self.layer(x)


torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(Data()):
    loss = model(batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if late:
    print(loss.item().hex())
dist.destroy_process_group()
"""


@pytest.mark.soak  # near: the first test here, and tests/diagnosis
@pytest.mark.parametrize(
    ("fault", "kind", "function"),
    [("data", "input_straggler", "Data.__getitem__"), ("forward", "compute_straggler", "Net.forward")],
)
def test_a_late_rank_gets_its_line_within_the_step(
    run_stepscope: Run, script: Callable[..., Path], forked_ranks: Path, fault: str, kind: str, function: str
) -> None:
    path = script(WITHIN, "train.py")
    line = next(number for number, text in enumerate(WITHIN.splitlines(), 1) if text.endswith(f"# {fault}"))
    done = run_stepscope("run", "--quiet", forked_ranks, "2", path, fault, env={"OMP_NUM_THREADS": "1"})
    assert done.code == 0, done.stderr
    findings = json.loads((done.run_dir / "summary.json").read_text())["findings"]
    (found,) = (finding for finding in findings if finding["kind"] == kind)
    assert (found["ranks"], found["evidence"]["place"]) == ([1], f"{function}, train.py:{line}")
