"""What the alerts' rules see of a run at one instant, as plain data.

The run's hub builds one every two seconds (``hub/live/observe.py``).  Every time is in nanoseconds on the run's clock;
``None`` or an empty tuple means that it is not known, never that it is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepscope.records.finding_history import FindingEpisode

__all__ = ["GpuUse", "MemoryAtEpoch", "NodeSilence", "NotFinite", "Observation", "RunEnd"]


@dataclass(frozen=True, kw_only=True)
class MemoryAtEpoch:
    """The memory of a rank when an epoch began."""

    rank: int
    epoch: int
    """Counts those that began since the hub was started; some may be missing."""
    step: int
    wall_ns: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    host: str
    index: int
    ranks: tuple[int, ...]
    busy_wall_ns: int
    """When it last had work; when it was first sampled if it never had any."""
    sample_wall_ns: int
    """When it was last sampled."""


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """A loss or gradient norm that was NaN or infinite, most recently."""

    name: str
    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    steps: int
    """How many steps in a row."""
    finite_steps: int
    """How many steps with a finite value came after it."""


@dataclass(frozen=True, kw_only=True)
class NodeSilence:
    """A node that no longer reports, according to the hub."""

    host: str
    since_wall_ns: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Observation:
    wall_ns: int
    """Now."""
    attempt: int = 0
    step: int | None = None
    """The last step that all live ranks have made in this attempt; None: there was none yet."""
    ranks: int = 0
    world_size: int = 0
    findings: tuple[FindingEpisode, ...] = ()
    """The open episodes."""
    judged_step: int | None = None
    """The last step that the rules have judged; None: none yet."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    """By rank."""
    steps: tuple[int, ...] = ()
    step_ns: tuple[float, ...] = ()
    """The last steps and how long each took (the median over ranks); warm-up, compilation, evaluation and checkpoints
    left out."""
    step_walls: tuple[tuple[int, int], ...] = ()
    """Some of the last steps, evenly spaced, and when each began."""
    last_step_wall_ns: int | None = None
    """When the last step of any rank ended."""
    doing: str = ""
    """Why no step may be expected: ``starts``, ``compiles``, ``evaluates``, ``writes a checkpoint``; or the reason that
    the watchdog gave.  Empty: the job should be making steps."""
    doing_since_wall_ns: int = 0
    memory: tuple[MemoryAtEpoch, ...] = ()
    """By rank and step."""
    gpus: tuple[GpuUse, ...] = ()
    not_finite: tuple[NotFinite, ...] = ()
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    first_step_wall_ns: int | None = None
    """When the first step of this attempt ended."""
    checkpoint_wall_ns: int | None = None
    """When the last checkpoint seen was written."""
    checkpoint_step: int | None = None
    nodes_silent: tuple[NodeSilence, ...] = ()
    """Nodes that the hub calls lost."""
    nodes_quiet: tuple[NodeSilence, ...] = ()
    """Nodes that have not reported for some seconds while others have: alone that means little."""
    lines_by_phase: Mapping[str, str] = field(default_factory=dict)
    """The line of code that most stacks of the last half minute show in a phase."""
    lines_by_finding: Mapping[int, str] = field(default_factory=dict)
    """By number of an open episode about slow ranks that names no line: the line that their last stacks show."""


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How the run ended, as ``run.json`` says it."""

    wall_ns: int
    status: str
    """``finished``, ``failed``, ``crashed``, ``interrupted`` or ``unfinished``: its launcher died."""
    exit_code: int | None = None
    step: int | None = None
