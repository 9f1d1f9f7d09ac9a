"""What the watchdog gathered about ranks that stand still, as the judge sees it.  No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepscope.records.collectives import ProcessGroup
from stepscope.records.hang import ThreadStack

__all__ = ["Evidence", "LastCollective", "LostHost", "RankEvidence", "WorkerEvidence"]


@dataclass(frozen=True, kw_only=True)
class LastCollective:
    """The last collective that a rank's words tell of (``ring/words.py``); those inside DDP's reducer are not told."""

    op: str
    group: ProcessGroup | None
    bytes: int
    called_s: float
    """How long ago it was called."""
    waiting: bool
    """Whether the rank is in the wait for it now."""
    peer: int | None = None
    """Of a send or recv: the other rank in the world; None for any."""


@dataclass(frozen=True, kw_only=True)
class WorkerEvidence:
    """A child process of a rank."""

    pid: int
    kind: str
    """``dataloader``, ``compiler`` (of torch.compile or a C compiler) or ``other``."""
    name: str
    """The beginning of its command line, or the name the kernel has for it."""
    process_state: str
    cpu_share: float | None = None
    threads: tuple[ThreadStack, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    rank: int
    pid: int
    alive: bool = True
    ended: str = ""
    """Of a rank that is gone: how, in words (``killed by SIGKILL``, ``raised ValueError: …``); empty: not known."""
    step: int | None = None
    """The step under way; None before the first."""
    phase: str = "other"
    silent_s: float = 0.0
    """How long no word has been written into its ring."""
    process_state: str = ""
    """The kernel's letter of the main thread: R, S, D, T, t, Z; empty: not known."""
    wait_channel: str = ""
    """Where in the kernel it sleeps, if that is told."""
    cpu_share: float | None = None
    """Of one core over the last seconds, all threads, without children."""
    io_bytes_s: float | None = None
    """Read and written, per second, over the last seconds."""
    gil_held: bool | None = None
    """True: a request that needs the GIL was not answered, one that does not was.  False: answered."""
    threads: tuple[ThreadStack, ...] = ()
    """The stacks as first seen …"""
    threads_later: tuple[ThreadStack, ...] = ()
    """… and seconds later: what moved in between is at work."""
    collective: LastCollective | None = None
    groups: tuple[ProcessGroup, ...] = ()
    device: str = "cpu"
    gpu_util_percent: float | None = None
    workers: tuple[WorkerEvidence, ...] = ()
    flight: bytes = b""
    """What its Flight Recorders answered: JSON; empty: nothing."""
    flight_later: bytes = b""
    """… and what that of NCCL had, seconds later, that had not ended; empty: nothing."""


@dataclass(frozen=True, kw_only=True)
class LostHost:
    """A host that the hub hears nothing of any more."""

    host: str
    ranks: tuple[int, ...]
    silent_s: float
    """For how long, when the others were found to stand still."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    host: str
    world_size: int
    ranks: tuple[RankEvidence, ...]
    """Those of this host, dead or alive; of several hosts, those of all."""
    threshold_s: float
    step_s: float | None = None
    """The usual length of a step lately; None before there were any."""
    source_lines: dict[tuple[str, int], str] = field(default_factory=dict)
    """The text of lines of the user's code, by file and line, where it could be read."""
    hosts: dict[int, str] = field(default_factory=dict)
    """Of several hosts (``hangs/joined.py``), which of them each rank is on; else empty."""
    lost: tuple[LostHost, ...] = ()
