"""What Slurm says of the job step that ``srun stepscope run …`` is a task of.  Pure: from variables to values.

Only a step that srun started counts.  The shell of ``salloc`` and the script of ``sbatch`` have most of the same
variables, but run once, on the first node, whatever was allocated.  The node list is taken apart here, since the
command that does it (``scontrol show hostnames``) is not to be had inside every container.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["SlurmStep", "first_host", "hosts_of", "rank_variables", "slurm_step", "tasks_by_node"]

NO_TASKS = 0xFFFF_FFF0
"""Steps from here on are the batch script, the interactive shell and the like."""
MASTER_PORTS = range(10_000, 20_000)
HUB_PORTS = range(20_000, 30_000)
"""Below the ports that systems give to outgoing connections."""
MOST_HOSTS = 1 << 20

_LIST = re.compile(r"(?:[^\[\]]|\[[^\[\]]*\])*")
_PIECE = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_NUMBERS = {
    "job": ("SLURM_JOB_ID", "SLURM_JOBID"),
    "step": ("SLURM_STEP_ID", "SLURM_STEPID"),
    "nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    "node": ("SLURM_NODEID",),
    "tasks": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "task": ("SLURM_PROCID",),
    "task_here": ("SLURM_LOCALID",),
}
"""By field, the variable that has it, and what it was called before."""


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    job: int
    step: int
    restarts: int
    """How often the job was requeued before."""
    nodes: int
    node: int
    tasks: int
    task: int
    tasks_here: int
    task_here: int
    first_host: str

    @property
    def name(self) -> str:
        """The same on all nodes, and no other step's."""
        return f"slurm-{self.job}.{self.step}" if self.step else f"slurm-{self.job}"

    @property
    def address(self) -> str:
        """Where the first rank is to be found."""
        return self.first_host if self.nodes > 1 else "127.0.0.1"

    @property
    def master_port(self) -> int:
        return self._port(MASTER_PORTS)

    @property
    def hub_port(self) -> int:
        return self._port(HUB_PORTS)

    def _port(self, ports: range) -> int:
        """One that all nodes find by themselves, and that the next jobs on the same node do not."""
        return ports[(self.job * 17 + self.step) % len(ports)]


def slurm_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """None: no task of a step, or one whose variables do not fit together."""
    said = {field: _number(environ, *names) for field, names in _NUMBERS.items()}
    known = {field: value for field, value in said.items() if value is not None}
    if len(known) < len(said) or known["step"] >= NO_TASKS:
        return None
    counts = tasks_by_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    step = SlurmStep(
        **known,
        restarts=_number(environ, "SLURM_RESTART_COUNT") or 0,
        tasks_here=counts[known["node"]] if known["node"] < len(counts) else 0,
        first_host=first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")),
    )
    return step if step.node < step.nodes and step.task < step.tasks and step.task_here < step.tasks_here else None


def rank_variables(step: SlurmStep, environ: Mapping[str, str]) -> dict[str, str]:
    """What torch wants to know of a task that is a rank; what the user has set already stays as it is."""
    said = {
        "RANK": step.task,
        "WORLD_SIZE": step.tasks,
        "LOCAL_RANK": step.task_here,
        "LOCAL_WORLD_SIZE": step.tasks_here,
        "MASTER_ADDR": step.address,
        "MASTER_PORT": step.master_port,
    }
    return {name: str(value) for name, value in said.items() if name not in environ}


def tasks_by_node(text: str) -> list[int]:
    """``2(x3),1`` → 2, 2, 2, 1; empty for what is none."""
    counts: list[int] = []
    for piece in text.split(","):
        found = _COUNT.fullmatch(piece)
        if found is None or len(counts) + int(found[2] or 1) > MOST_HOSTS:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(text: str) -> str:
    """Of a node list; empty when there is none."""
    return next(_hosts(text), "")


def hosts_of(text: str) -> list[str]:
    """``gpu[01-04,7],login1`` → gpu01, gpu02, gpu03, gpu04, gpu7, login1: as many as there are, up to a million."""
    return list(itertools.islice(_hosts(text), MOST_HOSTS))


def _hosts(text: str) -> Iterator[str]:
    if _LIST.fullmatch(text):  # every bracket that is opened is closed
        for piece in _PIECE.findall(text):
            yield from _expanded(piece)


def _expanded(piece: str) -> Iterator[str]:
    """One name with any number of ranges in it, the last one counting fastest."""
    before, bracket, rest = piece.partition("[")
    if not bracket:
        yield piece
        return
    inside, _, after = rest.partition("]")
    for span in inside.split(","):
        found = _SPAN.fullmatch(span)
        if found is None:
            return
        width = len(found[1])
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            for end in _expanded(after):
                yield f"{before}{number:0{width}}{end}"


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    text = next((environ[name] for name in names if name in environ), "")
    return int(text) if text.isascii() and text.isdigit() else None
