"""What one rank recorded, and a whole run: the values that the store passes to diagnosis and reports."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from stepscope.records.capture import CaptureRecord
from stepscope.records.collectives import ProcessGroup
from stepscope.records.finding_history import FindingEpisode
from stepscope.records.hang import HangRecord
from stepscope.records.identity import RankIdentity
from stepscope.records.layers import LayerRecords, MemoryAccount
from stepscope.records.steps import SEEN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.step_table import RankSteps

__all__ = [
    "ALIVE",
    "NOTED",
    "SEEN_EVENT",
    "RankError",
    "RankSeries",
    "RankState",
    "RunData",
    "Unrecorded",
    "is_gradient_norm",
    "is_learning_rate",
    "is_loss",
    "logged_by_script",
    "note_event",
    "noted_health",
    "noted_names",
    "noted_numbers",
]

LARGEST = 1e300
"""No figure in training is larger."""
RankState = Literal["starting", "running", "exited", "exception", "vanished"]
ALIVE: tuple[RankState, ...] = ("starting", "running")
"""``vanished``: the process ended without notice (killed by a signal or the kernel, or with its machine)."""


@dataclass(frozen=True, kw_only=True)
class RankSeries:
    """All steps of one process.  An elastic restart gives a second series with the same rank and another attempt."""

    identity: RankIdentity
    rank: int
    """``identity.rank``, unless two processes claimed the same one; then the second has the next free number."""
    state: RankState
    phase_names: tuple[str, ...]
    """Sixteen names by slot; unused slots are empty."""
    steps: RankSteps
    """Its rows in the table of the run's steps, by step, without repeats."""
    anchor_mono_ns: int
    anchor_wall_ns: int
    """One instant on both clocks: ``wall = start_ns - anchor_mono_ns + anchor_wall_ns``."""
    live_phase: int = 0
    live_since_ns: int = 0
    """Where the rank was when last seen (a slot number and a monotonic time)."""
    lost: int = 0
    """Records overwritten in the ring before they were read."""
    torn: int = 0
    """Records that could not be read completely."""
    hook_failures: int = 0
    """Errors of our own that the recorder's guard swallowed."""
    ended_wall_ns: int | None = None
    """When the process was found to be gone."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the recorder saw in the live objects: loader, model, DDP, optimizer, mesh (docs/schema.md); {}: nothing."""
    groups: tuple[ProcessGroup, ...] = ()
    comm: NDArray[Any] | None = None
    """dtype ``COMM_ROW``, by step: collectives summed by group and operation; None: none were seen."""
    collectives: NDArray[Any] | None = None
    """dtype ``COLLECTIVE_ROW``, by step and call: each collective of some of the steps."""


@dataclass(frozen=True, kw_only=True)
class RankError:
    """An exception that ended a process (or the launcher's account of how a rank ended)."""

    rank: int | None
    """None for the launcher."""
    pid: int
    type: str
    message: str
    traceback: str = ""
    wall_ns: int = 0
    step: int | None = None
    script: bool = False
    """From a process that did not train and got no rank from a launcher: the script that starts those that train."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    """From a launcher's error: rank → exit code (negative for a signal)."""
    memory: MemoryAccount | None = None
    """What the process held, if it ran out of memory."""


@dataclass(frozen=True, kw_only=True)
class Unrecorded:
    """Why nothing was recorded of a process that loaded the recorder."""

    pid: int
    script: str
    """What it ran, by its file name."""
    torch: str
    """The version of torch that it imported; empty: it did not import torch."""
    hooks: str
    """HOOKS_INSTALLED or HOOKS_MISSED (``records/paths.py``), or the error that prevented them."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as stored in its directory, finished or not."""

    name: str
    path: str
    meta: dict[str, Any]
    """``run.json``."""
    ranks: tuple[RankSeries, ...]
    samples: tuple[dict[str, Any], ...] = ()
    """Host, process and GPU samples (docs/schema.md)."""
    events: tuple[dict[str, Any], ...] = ()
    errors: tuple[RankError, ...] = ()
    unrecorded: tuple[Unrecorded, ...] = ()
    """Scripts and ranks that ended by themselves and of which nothing was recorded."""
    stacks: tuple[dict[str, Any], ...] = ()
    """Where ranks were seen in long stretches that no phase claims (docs/schema.md)."""
    layers: LayerRecords = field(default_factory=lambda: LayerRecords(models={}, samples=()))
    """What sampled steps showed of the model's layers; of very many samples, evenly spaced ones."""
    hangs: tuple[HangRecord, ...] = ()
    """What the watchdog found when the job made no progress."""
    flight: dict[str, Any] = field(default_factory=dict)
    """The verdict of ``flight/`` on the Flight Recorders of ranks that failed; {}: no data."""
    native: dict[int | None, tuple[str, ...]] = field(default_factory=dict)
    """The last lines that native code printed in ranks that did not end well; None: the rank is unknown."""
    last_line: str = ""
    """The last line that a job printed of which nothing was recorded."""
    training_log: dict[str, Any] = field(default_factory=dict)
    """What the framework itself printed about the training (docs/schema.md); {}: nothing known."""
    nodes: tuple[dict[str, Any], ...] = ()
    """Nodes that joined, as in ``nodes.json`` (docs/schema.md); ``series``: attempt and rank of what each sent;
    ``here``: the one whose own directory this is."""
    history: tuple[FindingEpisode, ...] = ()
    """What the run's hub showed while the job ran: each change of a finding, in order."""
    captures: tuple[CaptureRecord, ...] = ()
    """Steps that were profiled, the oldest first, with what their analysis found."""
    notices: tuple[str, ...] = ()
    """What is missing or could not be read, in sentences."""


SEEN_EVENT = "seen"
NOTED = ("note", SEEN_EVENT)
"""Events with values that belong to a step: what the script gave to ``note``, and what the recorder saw itself."""


def note_event(values: Any) -> dict[str, Any]:
    """``event`` and ``values`` of a note in the ring."""
    if isinstance(values, Mapping) and values and all(str(name).startswith(SEEN) for name in values):
        return {
            "event": SEEN_EVENT,
            "values": {str(name).removeprefix(SEEN): number for name, number in values.items()},
        }
    return {"event": "note", "values": values}


def noted_names(events: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The names of all values that the script noted itself; what the recorder saw by the same name is not shown."""
    notes = (event.get("values") for event in events if event.get("event") == "note")
    return frozenset(str(name) for values in notes if isinstance(values, Mapping) for name in values)


def logged_by_script(noted: Collection[str]) -> frozenset[str]:
    """Names of values that the recorder saw and that are not shown, because the script notes them itself.

    The same names; and ``lr`` for a learning rate by any name (HF Trainer's is ``learning_rate``).
    """
    return frozenset({*noted, "lr"} if any(map(is_learning_rate, noted)) else noted)


def noted_numbers(event: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, float]:
    """The numbers in a note or in what the recorder saw, by name; ``own``: names for which only notes count."""
    values = event.get("values") if event.get("event") in NOTED else None
    if not isinstance(values, Mapping):
        return {}
    if event["event"] == SEEN_EVENT:
        values = {name: value for name, value in values.items() if name not in own}
    numbers = {str(name): value for name, value in values.items() if type(value) in (int, float)}
    return {name: float(value) for name, value in numbers.items() if abs(value) < LARGEST}  # also not nan


def is_loss(name: str) -> bool:
    return "loss" in name.lower()


def is_learning_rate(name: str) -> bool:
    """``lr``, ``learning_rate``, ``train/lr`` …"""
    return name.lower().rpartition("/")[2].replace("_", "").replace(" ", "") in ("lr", "learningrate")


def is_gradient_norm(name: str) -> bool:
    """``grad_norm``, as Trainers call it, ``train/grad-norm`` …"""
    return "gradnorm" in name.lower().replace("_", "").replace("-", "").replace(" ", "")


NOT_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""As ``note`` writes them, because JSON has no such numbers."""


def noted_health(event: Mapping[str, Any]) -> dict[str, float]:
    """The losses and gradient norms in an event, noted or seen, by name, including those that are not finite."""
    values = event.get("values") if event.get("event") in NOTED else None
    if not isinstance(values, Mapping):
        return {}
    named = {str(name): value for name, value in values.items() if is_loss(str(name)) or is_gradient_norm(str(name))}
    numbers: dict[str, Any] = {
        name: NOT_NUMBERS.get(value) if isinstance(value, str) else value for name, value in named.items()
    }
    # An int may be too large for a float.
    return {
        name: float(value)
        for name, value in numbers.items()
        if type(value) is float or (type(value) is int and abs(value) < LARGEST)
    }
