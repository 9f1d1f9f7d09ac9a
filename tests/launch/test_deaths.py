"""Ranks that die, on real jobs: the finding names what happened and to whom, whatever the others say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

JOB = """
import os, resource, signal, sys
import torch
import torch.distributed as dist

def train(fault, faulty):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        if step == 3 and rank == faulty:
            if fault == "exception":
                raise ValueError("not a number")
            elif fault == "refused":
                raise ConnectionRefusedError(111, "Connection refused")
            elif fault == "exit":
                os._exit(7)
            elif fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "memory":
                resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
                bytearray(64 << 30)
        if step == 3 and fault in ("shape", "dtype"):
            other = rank == faulty
            size = 2048 if fault == "shape" and other else 1024
            dist.all_reduce(torch.ones(size, dtype=torch.float64 if fault == "dtype" and other else torch.float32))
        optimizer.zero_grad()
        model(torch.ones(2, 8)).mean().backward()
        optimizer.step()
    dist.destroy_process_group()
"""
UNDER_A_LAUNCHER = JOB + "\ntrain(sys.argv[1], int(sys.argv[2]))\n"
UNTIL_ALL_HAVE_ENDED = (
    JOB
    + """
import torch.multiprocessing as mp

def begin(rank, size, port, fault, faulty):
    os.environ.update(RANK=str(rank), WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    train(fault, int(faulty))

if __name__ == "__main__":
    method, size, fault, faulty = sys.argv[1:]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)
    del store
    context = mp.get_context(method)
    ranks = [context.Process(target=begin, args=(rank, size, port, fault, faulty)) for rank in range(int(size))]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(any(one.exitcode for one in ranks))
"""
)
"""Starts its own ranks and ends none of them: torchrun may end a rank before that could say why it dies."""


def summary_of(done: Any) -> dict[str, Any]:
    assert done.run_dir is not None, done.stderr
    summary: dict[str, Any] = json.loads((done.run_dir / "summary.json").read_text())
    return summary


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "cause", "message"),
    [
        ("exception", "exception", "raised ValueError: not a number"),
        pytest.param(
            "refused",
            "exception",
            "raised ConnectionRefusedError: [Errno 111] Connection refused",
            marks=pytest.mark.soak,
        ),
        pytest.param("exit", "exit_code", "exited with code 7", marks=pytest.mark.soak),
        pytest.param("kill", "signal", "was killed by SIGKILL", marks=pytest.mark.soak),  # near: test_kill.py
        pytest.param("memory", "oom_host", "raised MemoryError", marks=pytest.mark.soak),
    ],
)
def test_the_rank_that_began_it_leads(
    run_stepscope: Run, script: Callable[..., Path], forked_ranks: Path, fault: str, cause: str, message: str
) -> None:
    """A rank that says nothing itself is told of by torchrun; an exception under it: tests/faults/test_kill.py."""
    script(UNDER_A_LAUNCHER)
    launcher = ("--nproc-per-node",) if fault in ("exit", "kill") else (forked_ranks,)
    done = run_stepscope("run", "--quiet", *launcher, "2", "script.py", fault, "1")
    assert done.code == 1
    summary = summary_of(done)
    found = summary["findings"][0]
    assert (found["kind"], found["severity"], found["ranks"]) == ("rank_crashed", "critical", [1])
    assert found["title"].startswith(f"Rank 1 {message} (in step 3")
    assert found["evidence"]["cause"] == cause
    text = (done.run_dir / "summary.txt").read_text()
    assert ("Traceback of rank 1" in text) == (cause not in ("exit_code", "signal"))
    if fault not in ("exit", "kill"):  # torchrun ends the other rank soon: on a busy machine before that leaves its own
        assert {path.name for path in (done.run_dir / "flight").iterdir()} & {"rank_0.json", "rank_1.json"}
    assert "Server" not in done.stderr


@pytest.mark.soak  # near: a collective of another shape in tests/hangs_real
@pytest.mark.ranks
@pytest.mark.parametrize(("fault", "called"), [("shape", "[2048] Float"), ("dtype", "[1024] Double")])
def test_ranks_that_die_of_a_collective_they_do_not_agree_on(
    run_stepscope: Run, script: Callable[..., Path], fault: str, called: str
) -> None:
    """gloo aborts a rank that is sent more than it expects; the others lose a connection."""
    script(UNTIL_ALL_HAVE_ENDED)
    done = run_stepscope("run", "--quiet", "script.py", "fork", "4", fault, "1")
    assert done.code == 1
    found, crash = summary_of(done)["findings"][:2]
    assert (found["kind"], found["severity"], found["ranks"]) == ("hang_mismatch", "critical", [1])
    # The Flight Recorder of a rank that was aborted at once may be missing: then it is told by the bytes.
    by_bytes = re.match(
        r"Rank 1 called all_reduce with (.+) where ranks 0, 2 and 3 called it with (?!\1;).+; "
        r"the library aborted rank [023] ",
        found["title"],
    )
    by_calls = re.match(
        rf"Rank 1 called all_reduce {re.escape(called)} where (ranks .+|rank \d) called all_reduce \[1024\] Float ",
        found["title"],
    )
    assert by_calls or by_bytes
    assert (crash["kind"], crash["severity"]) == ("rank_crashed", "info")


@pytest.mark.ranks
@pytest.mark.soak  # near: an exception of a forked rank above, and tests/recorder/test_failure.py
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_keep_their_exceptions_to_themselves(
    run_stepscope: Run, script: Callable[..., Path], method: str
) -> None:
    """multiprocessing prints the exception of a process and nobody hears of it; every rank's is kept here."""
    script(UNTIL_ALL_HAVE_ENDED)
    done = run_stepscope("run", "--quiet", "script.py", method, "2", "exception", "1")
    assert done.code == 1
    assert "stepscope" not in done.stderr.partition("ValueError")[0].rpartition("Traceback")[2]
    summary = summary_of(done)
    assert summary["findings"][0]["title"].startswith("Rank 1 raised ValueError: not a number (in step 3")
    assert {(error["rank"], error["type"]) for error in summary["errors"]} >= {(0, "RuntimeError"), (1, "ValueError")}
    assert [(row["rank"], row["state"]) for row in summary["ranks"]] == [(0, "exception"), (1, "exception")]


HUNGRY = """
import resource
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(3)])
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

def main():
    kept = []
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(32, 64)).mean().backward()
        optimizer.step()
        kept.append(torch.ones(2 << 20))
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
    torch.empty(8 << 30)

main()
"""


def test_a_script_without_memory_says_what_took_it(run_stepscope: Run, script: Callable[..., Path]) -> None:
    script(HUNGRY)
    done = run_stepscope("run", "--quiet", "--layers", "every", "script.py")
    assert done.code == 1
    found = summary_of(done)["findings"][0]
    assert (found["kind"], found["evidence"]["cause"]) == ("rank_crashed", "oom_host")
    memory = found["evidence"]["memory"]
    weight, bias = 64 * 64 * 4, 64 * 4
    assert memory["requested_bytes"] == (8 << 30) * 4
    assert {kind: memory["kinds"][kind] for kind in ("parameters", "gradients", "optimizer")} == {
        "parameters": 3 * (weight + bias),
        "gradients": 3 * (weight + bias),
        "optimizer": 3 * (2 * (weight + bias) + 2 * 4),
    }
    assert memory["activations_step"] == 3
    tensor = memory["tensors"][0]
    assert (tensor["count"], tensor["shape"], tensor["kind"]) == (4, [2 << 20], "other")
    assert tensor["where"] == "kept, a list made at script.py:15"
    assert " MiB were in use: " in found["advice"][0]
    assert any("address space (ulimit -v)" in text for text in found["advice"])
    shown = run_stepscope("memory", done.run_dir, "--json")
    document = json.loads(shown.stdout)
    assert (document["step"], document["out_of_memory"], document["samples"]) == (4, True, 3)
    assert document["text"]["shown"] == "Rank 0 in step 4 when it ran out of memory (3 samples)"
