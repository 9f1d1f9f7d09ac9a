"""The matrix, as data: framework, fault and who has it; and what Stepscope should say of each, with the reason."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["CASES", "FRAMEWORKS", "OWN_WAITS", "Case", "Expected", "command", "expected_of", "fault_lines"]

JOBS = Path(__file__).resolve().parent / "jobs"
EVERY_STEP = ("data", "collate", "forward", "callback")
FAULTS = (*EVERY_STEP, "evaluation", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Framework:
    name: str
    job: str
    package: str
    """That has to be installed."""
    launcher: tuple[str, ...]
    """What is typed between ``stepscope run`` and the script."""
    ranks: int = 2
    shares: tuple[str, ...] = ("common.py",)
    """Other files in which its faults are."""


def _torchrun(ranks: int) -> tuple[str, ...]:
    # A port that is free, so that two jobs can run at once.
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


# With --cpu it would start one process; --multi_gpu starts as many as asked for, which then find no GPU.
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
DEEPSPEED = (sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2")
LOOP = ("common.py", "loop.py")

FRAMEWORKS = (
    Framework(name="hf", job="hf.py", package="transformers", launcher=_torchrun(2)),
    Framework(name="lightning", job="lightning_job.py", package="lightning", launcher=(sys.executable,)),
    Framework(name="accelerate", job="accelerate_job.py", package="accelerate", launcher=ACCELERATE),
    Framework(name="deepspeed", job="deepspeed_job.py", package="deepspeed", launcher=DEEPSPEED, shares=LOOP),
    Framework(name="ray", job="ray_job.py", package="ray", launcher=(sys.executable,), shares=LOOP),
    Framework(name="fsdp2", job="fsdp2.py", package="torch", launcher=_torchrun(2), shares=LOOP),
    Framework(name="tp", job="tp.py", package="torch", launcher=_torchrun(2), shares=LOOP),
    Framework(name="pp", job="pp.py", package="torch", launcher=_torchrun(2)),
    Framework(name="dp-tp", job="dp_tp.py", package="torch", launcher=_torchrun(4), ranks=4, shares=LOOP),
)


@dataclass(frozen=True, kw_only=True)
class Expected:
    kinds: frozenset[str]
    """Of the first finding."""
    why: str
    line: bool = True
    """Whether the finding must name the line that loses the time …"""
    functions: tuple[str, ...] = ()
    """… or one of these functions of a framework, which call it."""


def _expected(*kinds: str, why: str, line: bool = True, functions: tuple[str, ...] = ()) -> Expected:
    return Expected(kinds=frozenset(kinds), why=why, line=line, functions=functions)


SAVERS = ("_save_checkpoint", "save_checkpoint", "save_state", "dump_checkpoint", "dcp.save", "torch.save")
EXPECTED = {
    ("data", "one"): _expected("input_straggler", why="one rank waits for its own samples, the others for that rank"),
    ("data", "all"): _expected("input_bound", why="every rank waits for samples; no rank is to blame"),
    ("collate", "one"): _expected("input_straggler", why="collating is part of making a batch"),
    ("collate", "all"): _expected("input_bound", why="collating is part of making a batch"),
    ("forward", "one"): _expected("compute_straggler", why="the same work takes one rank longer"),
    ("forward", "all"): _expected(
        "healthy",
        "compute_bound",
        why="equal work on every rank is nothing to warn of; the time is where it should be, in forward",
        line=False,
    ),
    ("callback", "one"): _expected("between_steps", "straggler", why="one rank does something between its steps"),
    ("callback", "all"): _expected("between_steps", why="every rank does something between its steps"),
    ("evaluation", "one"): _expected(
        "between_steps", "jitter", why="every 20th step is followed by an evaluation that takes one rank longer"
    ),
    ("evaluation", "all"): _expected("between_steps", why="evaluation takes a large part of the time, on every rank"),
    ("checkpoint", "one"): _expected(
        "between_steps", "jitter", why="one rank writes for long, the others wait", functions=SAVERS
    ),
    ("checkpoint", "all"): _expected(
        "between_steps", why="checkpoints take a large part of the time, on every rank", functions=SAVERS
    ),
}
PIPELINE = {
    ("forward", "one"): _expected(
        "imbalance", "compute_straggler", why="a stage is slow: its layers are too many, or its rank is slow"
    ),
    ("data", "one"): _expected(
        "input_straggler", "imbalance", why="the stages are not equal, but each of them reads the same samples"
    ),
    ("collate", "one"): _expected(
        "input_straggler", "imbalance", why="the stages are not equal, but each of them reads the same samples"
    ),
}
OWN_WAITS = {"ray": "ray.train.report"}
"""Where a framework itself waits: Ray's workers for their controller, which looks every two seconds. True, not ours."""
OWN = {"pp": PIPELINE}
"""What else is right of some frameworks."""


@dataclass(frozen=True, kw_only=True)
class Case:
    framework: Framework
    fault: str = "none"
    culprit: int | None = None
    """None: all ranks, or a healthy run."""
    number: int = 0
    """Of healthy runs."""

    @property
    def healthy(self) -> bool:
        return self.fault == "none"

    @property
    def who(self) -> str:
        return "all" if self.culprit is None else "one"

    @property
    def name(self) -> str:
        return f"{self.framework.name}/" + (f"healthy-{self.number}" if self.healthy else f"{self.fault}-{self.who}")

    @property
    def fault_text(self) -> str:
        """As the jobs take it."""
        return "none" if self.healthy else f"{self.fault}:{'all' if self.culprit is None else self.culprit}"


def _cases() -> Iterator[Case]:
    for framework in FRAMEWORKS:
        for number in (1, 2):
            yield Case(framework=framework, number=number)
        for number, fault in enumerate(FAULTS):
            # Another rank in each case; checkpoints are usually rank 0's.
            culprit = 0 if fault == "checkpoint" else (number + 1) % framework.ranks
            yield Case(framework=framework, fault=fault, culprit=culprit)
            yield Case(framework=framework, fault=fault)


CASES = tuple(_cases())


def expected_of(case: Case) -> Expected | None:
    """None of a healthy run: nobody is accused, whatever else is said."""
    if case.healthy:
        return None
    key = case.fault, case.who
    return OWN.get(case.framework.name, {}).get(key, EXPECTED[key])


@cache
def _marked(file: str) -> tuple[tuple[str, int], ...]:
    """Faults and the lines that they are in."""
    lines = (JOBS / file).read_text().splitlines()
    found = [(re.search(r"# fault: (\w+)", line), number) for number, line in enumerate(lines, start=1)]
    return tuple((match[1], number) for match, number in found if match)


def fault_lines(case: Case) -> frozenset[tuple[str, int]]:
    """File names and lines that lose the time, and those of ours that call them."""
    return frozenset(
        (file, line)
        for file in (case.framework.job, *case.framework.shares)
        for fault, line in _marked(file)
        if fault == case.fault
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command(case: Case) -> list[str]:
    """As a user types it."""
    launcher = case.framework.launcher
    if launcher == DEEPSPEED:
        # Its launcher takes port 29500 unless told otherwise, so two jobs at once need two ports.
        launcher = (*launcher, "--master_port", str(_free_port()))
    return [*launcher, str(JOBS / case.framework.job), "--fault", case.fault_text]
