"""The identity of this process: rank, world, device, versions.

They come from the process group if there is one, else from the launcher's variables.  Nothing here initializes CUDA or
the process group; it only reads what the script has set up already.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.records.paths import ENV_CLAIMANT
from stepscope.records.text import LAUNCHER_MODULES

if TYPE_CHECKING:
    from stepscope.records.identity import RankIdentity

__all__ = [
    "StartTimes",
    "attempt_from",
    "is_launcher",
    "of_this_process",
    "rank_from",
    "ranks_here",
    "start_times",
    "world_size_from",
]

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")
"""The command names of these launchers."""
_OPTION = re.compile(r"-(?:-.*|[bBdEhiIOPqRsSuvVx?]*(?:([cmWX])(.*))?)", re.DOTALL)
_RANKS_HERE = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class StartTimes:
    """When this process passed the stages of its start, on the monotonic clock; 0: not yet, or unknown."""

    def __init__(self) -> None:
        self.imported_ns = 0
        self.joined_ns = 0


start_times = StartTimes()


def rank_from(environment: Mapping[str, str]) -> int | None:
    """The rank a launcher gave this process; None for a single process or the launcher itself.

    Lightning starts the other ranks of a host itself, from the script that is rank 0, and gives them only a local rank;
    that is their rank on the first host.  The script's own local rank, 0, is ignored: its DataLoader workers inherit
    it.
    """
    rank, local = _first_int(environment, _RANK), _first_int(environment, ("LOCAL_RANK",))
    if rank is None and local and environment.get("NODE_RANK") == "0" and "WORLD_SIZE" in environment:
        return local
    return rank


def is_launcher(words: Sequence[str]) -> bool:
    """Whether a Python command line (``sys.orig_argv``) starts ranks and does not train itself.

    It may still have been given a rank: under Slurm each torchrun is a task with its own number.
    """
    words = words[1:]
    while words and (option := _OPTION.fullmatch(words[0])):
        kind, value = option.groups()
        if kind == "c":
            return False
        if kind == "m":
            return (value or "".join(words[1:2])) in LAUNCHER_MODULES
        words = words[2 if kind and not value else 1 :]
    return bool(words) and os.path.basename(words[0]) in LAUNCHERS  # noqa: PTH119 - a rank's start waits for this


def attempt_from(environment: Mapping[str, str]) -> int:
    return _first_int(environment, ("TORCHELASTIC_RESTART_COUNT",)) or 0


def _claimant(environment: Mapping[str, str]) -> int:
    """The process that first claimed our rank, or the job; 0: this one."""
    pid = _first_int(environment, (ENV_CLAIMANT,)) or 0
    return 0 if pid == os.getpid() else pid


def ranks_here(environment: Mapping[str, str]) -> int | None:
    """How many ranks the launcher started on this machine; None if unknown."""
    return _first_int(environment, _RANKS_HERE)


def world_size_from(environment: Mapping[str, str]) -> int | None:
    """The number of ranks according to the launcher; None if unknown."""
    return _first_int(environment, _WORLD_SIZE)


def of_this_process() -> RankIdentity:
    from stepscope.records.identity import RankIdentity  # the launcher loads this module, and has no identity

    environment = os.environ
    rank = rank_from(environment)
    world = world_size_from(environment)
    # A Slurm job step with one task per node that starts torchrun has SLURM_PROCID too; torch's answer is better.
    backend = ""
    torch = sys.modules.get("torch")
    group: Any = getattr(torch, "distributed", None)
    if group is not None and group.is_available() and group.is_initialized():
        rank, world, backend = group.get_rank(), group.get_world_size(), str(group.get_backend())
    return RankIdentity(
        host=os.uname().nodename,
        pid=os.getpid(),
        rank=rank or 0,
        local_rank=_first_int(environment, _LOCAL_RANK) or 0,
        world_size=max(world or 1, (rank or 0) + 1),
        attempt=attempt_from(environment),
        started_by=_claimant(environment),
        backend=backend,
        torch=getattr(torch, "__version__", ""),
        python=sys.version.split()[0],
        script=sys.argv[0] if sys.argv else "",
        imported_ns=start_times.imported_ns,
        joined_ns=start_times.joined_ns,
        **_device(torch),
    )


def _device(torch: Any) -> dict[str, Any]:
    if torch is None:
        return {}
    if torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        return {
            "device": "cuda",
            "device_index": index,
            "device_name": properties.name,
            "device_uuid": str(getattr(properties, "uuid", "")),
            "device_bytes": int(properties.total_memory),
            "device_timed": True,
        }
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_initialized():
        return {"device": "xpu", "device_index": xpu.current_device()}
    # MPS has no "is initialized": memory in use shows that the script put something there.
    if torch.backends.mps.is_built() and torch.mps.current_allocated_memory() > 0:
        return {"device": "mps", "device_index": 0}
    return {}


def _first_int(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = environment.get(name, "")
        if value.isdigit():
            return int(value)
    return None
