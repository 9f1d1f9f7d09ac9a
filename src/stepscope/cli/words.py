"""From the words after ``stepscope run`` to the command that starts the job."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.cli.nodes import Nodes
from stepscope.errors import UsageError

__all__ = ["MASTER_PORT", "Torchrun", "job_command", "split_job"]

MASTER_PORT = 29_500
"""As torchrun has it."""


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """The torchrun that is to be put before a script."""

    ranks: str | None = None
    """Per node; None: one, as torchrun has it, and what the user has may be a launcher of its own."""
    nodes: Nodes = field(default_factory=Nodes)
    port: int = MASTER_PORT
    name: str = ""
    """Of the job."""

    @property
    def asked(self) -> bool:
        return self.ranks is not None


def split_job(words: Sequence[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """Our own words and the job's, which begin at ``--``, ``-m`` or the first word that is no option of ours.

    ``options`` are those of ours that take a value.
    """
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--"):
        at += 2 if words[at] in options else 1
    return list(words[:at]), list(words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:])


def job_command(words: Sequence[str], torchrun: Torchrun | None = None) -> list[str]:
    """A script, ``-m module`` or any launcher with its own arguments; UsageError for what cannot be started."""
    if not words:
        raise UsageError("nothing to run; try `stepscope run train.py`")
    first = words[0]
    if first == "-m":
        if len(words) == 1:
            raise UsageError("-m needs the name of a module")
    elif first.endswith(".py"):
        _check_script(Path(first))
    elif torchrun is not None and torchrun.asked:
        raise UsageError(
            f"--nproc-per-node starts torchrun for a script; {first} is given its own processes by its own flags"
        )
    else:
        return [_executable(first), *words[1:]]
    if torchrun is None:
        return [sys.executable, *words]
    if importlib.util.find_spec("torch") is None:
        flag = "--nproc-per-node" if torchrun.asked else "--nnodes"
        raise UsageError(f"{flag} needs torch, and {sys.executable} has none")
    ranks = ["--nproc-per-node", torchrun.ranks or "1"]
    return [sys.executable, "-m", "torch.distributed.run", *_meeting(torchrun), *ranks, *words]


def _meeting(torchrun: Torchrun) -> list[str]:
    """How the nodes find one another."""
    nodes = torchrun.nodes
    if not nodes.several:
        return ["--standalone"]  # a free port of its own, so that two jobs on one machine do not meet
    if nodes.least < nodes.count:
        host = f"[{nodes.address}]" if ":" in nodes.address else nodes.address or "127.0.0.1"
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{torchrun.port}", "--rdzv-id", torchrun.name]
        return ["--nnodes", f"{nodes.least}:{nodes.count}", *meeting]
    address = ["--master-addr", nodes.address] if nodes.address else []
    where = ["--node-rank", str(nodes.rank), *address, "--master-port", str(torchrun.port)]
    return ["--nnodes", str(nodes.count), *where]


def _check_script(script: Path) -> None:
    if script.is_dir():
        raise UsageError(f"{script} is a folder, not a script")
    if not script.exists():
        raise UsageError(f"no such script: {script}")


def _executable(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        hint = f"; a script must end in .py, or be started as `python {name}`" if Path(name).is_file() else ""
        raise UsageError(f"cannot start {name}: not found, or not executable{hint}")
    return found
