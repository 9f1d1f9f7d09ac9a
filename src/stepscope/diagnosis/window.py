"""Which steps of which ranks are compared: the one window that all rules look through, live and at the end.

Only steps that every live rank has completed stand in a window.  A rank that ended (died, raised, returned) is live up
to its last step; afterwards the others are compared without it.  What a running rank has not finished yet is left out,
and so is every step with a lost record.  Of an elastic job the last attempt counts.

Everything is an array over ``[rank, step]``; 1,024 ranks of 1,000 steps are built in a fraction of a second.  A window
over the last n steps only is the same thing with fewer columns: every rule works on either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.communication import Communication, build_communication
from stepscope.diagnosis.expert_tokens import Routed, routed_bytes
from stepscope.diagnosis.peers import is_pipeline, peer_groups, share_samples, splits_sequences
from stepscope.diagnosis.robust import mean_rank, spread
from stepscope.diagnosis.samples import during, of_kind
from stepscope.records.identity import RankIdentity
from stepscope.records.phases import BUILTIN_PHASES
from stepscope.records.series import RankSeries, RunData
from stepscope.records.slot import FLAG_COMPILED, FLAG_DISCOVERY, FLAG_FIRST

__all__ = ["Apart", "Window", "build_window", "last_attempt"]

Reason = Literal["first", "compile", "discovery", "warm-up"]
_ENDED = ("exited", "exception", "vanished")


@dataclass(frozen=True, kw_only=True)
class Apart:
    """A step that is not counted among the steady ones."""

    step: int
    reason: Reason


@dataclass(frozen=True, kw_only=True)
class Planes:
    """The arrays of a window: R ranks, S steps, P phases."""

    wall_ns: NDArray[np.float64]
    """[R, S]; nan where a rank was not there any more, here and below."""
    phase_ns: NDArray[np.float64]
    """[P, R, S]; host time; sums to ``wall_ns``."""
    device_ns: NDArray[np.float64] | None
    """[P, R, S]; device time between the phase's marks, also nan where it was not recorded; None without any."""
    between_ns: NDArray[np.float64]
    """[R, S]; of the phase ``other``, what lies between two steps."""
    allocated: NDArray[np.float64]
    """[R, S]; bytes of the device's allocator in use at the end of the step; nan where it was not sampled."""
    reserved: NDArray[np.float64]
    """[R, S]; bytes the allocator holds, used or not."""
    peak_allocated: NDArray[np.float64]
    """[R, S]; the most bytes in use since the process began, within steps too: where it is higher than at the read
    before, that was in the steps between the two; elsewhere a step's own peak is not known."""
    end_wall_ns: NDArray[np.float64]
    """[R, S]; when the step ended, by the clock of the rank's machine (to a quarter of a microsecond)."""
    flags: NDArray[np.uint16]
    """[R, S]; 0 where a rank was not there."""


@dataclass(frozen=True, kw_only=True)
class Window(Planes):
    """Of the phases, those with any time in them."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """By rank, as ``ranks``."""
    attempt: int
    steps: NDArray[np.int64]
    """Step numbers, ascending."""
    phases: tuple[str, ...]
    warmup: tuple[Apart, ...]
    """Steps set apart, ascending."""
    left_out: int
    """Steps seen on some rank that are not in the window."""
    identities: tuple[RankIdentity, ...]
    """By rank, as ``ranks``; so are the facts and the groups."""
    facts: tuple[dict[str, Any], ...]
    ddp_ns: tuple[NDArray[np.float64], ...]
    """By rank, how long DDP says that computing the gradients took, whenever it said so."""
    groups: NDArray[np.intp]
    """[R]; ranks of one number have the same work to do and may be compared."""
    stages: bool
    """Whether the ranks are stages of a pipeline; ranks of different groups then do different work."""
    share_samples: bool
    """Whether some ranks are to read the same samples, because they hold parts of one model."""
    batches: NDArray[np.float64]
    """[R]; how many batches make a step, in the median one; 1 without gradient accumulation, 0: not known."""
    backwards: NDArray[np.int64]
    """[S]; how many backward passes a step has, on the rank with the most; 0: none was seen."""
    splits_sequences: bool
    """Whether some ranks hold parts of one sequence (context parallelism)."""
    routed: Routed | None
    """What the router of a mixture of experts sent to whom; None: there is none, or it is not known."""
    samples: tuple[dict[str, Any], ...]
    """What the agents saw of hosts, processes and GPUs while these steps ran."""
    probes: tuple[dict[str, Any], ...]
    """What they said of the network between them, for some minutes at the least: it takes a while to show."""
    stacks: tuple[dict[str, Any], ...]
    communication: Communication | None
    """What the ranks exchanged; None: there is one rank, or nothing was seen of it."""

    @cached_property
    def lines(self) -> dict[object, list[dict[str, Any]]]:
        """The samples by their kind."""
        found: dict[object, list[dict[str, Any]]] = {}
        for line in self.samples:
            found.setdefault(line["kind"] if isinstance(line.get("kind"), str) else None, []).append(line)
        return found

    @cached_property
    def steady(self) -> NDArray[np.bool_]:
        """[S]; all but the steps set apart."""
        return _steady(self.steps, self.warmup)

    @cached_property
    def begin_wall_ns(self) -> NDArray[np.float64]:
        """[R]; when a rank's first step began; nan without any."""
        return np.asarray(np.fmin.reduce(self.end_wall_ns - self.wall_ns, axis=1, initial=np.nan), np.float64)

    @cached_property
    def last_wall_ns(self) -> NDArray[np.float64]:
        """[R]; when a rank's last step ended."""
        return np.asarray(np.fmax.reduce(self.end_wall_ns, axis=1, initial=np.nan), np.float64)

    @cached_property
    def apart_wall_ns(self) -> tuple[tuple[NDArray[np.float64], NDArray[np.float64]], ...]:
        """From when to when [R] each stretch of steps that are set apart lasted; nan for ranks that were not there."""
        at = np.flatnonzero(~self.steady)
        found = []
        for stretch in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if len(at) else ():
            ends = self.end_wall_ns[:, stretch]
            begins = ends - self.wall_ns[:, stretch]
            found.append((np.fmin.reduce(begins, axis=1), np.fmax.reduce(ends, axis=1)))
        return tuple(found)


def last_attempt(ranks: Sequence[RankSeries]) -> list[RankSeries]:
    """The processes of the last attempt, by rank."""
    last = max((series.identity.attempt for series in ranks), default=0)
    return sorted((series for series in ranks if series.identity.attempt == last), key=lambda series: series.rank)


def build_window(run: RunData, *, last: int | None = None) -> Window:
    """The window over all steps, or over the ``last`` so many."""
    current = last_attempt(run.ranks)
    trained = [series for series in current if len(series.steps)]
    steps, alive, seen = _complete_steps(trained)
    if last is not None and last < len(steps):
        seen -= len(steps) - last
        steps, alive = steps[-last:], alive[:, -last:]
        trained, alive = _still_there(trained, alive)
    names = _phase_names(trained)
    planes = _fill_planes(trained, steps, alive, names)
    used = _used(planes.phase_ns)
    if planes.device_ns is not None:
        used |= _used(planes.device_ns)  # on NCCL it is the device that waits, and never the host
    begins, ends = _period(planes)
    warmup, groups = _set_apart(steps, planes.wall_ns, planes.flags), peer_groups(trained)
    in_use: dict[str, Any] = {
        **vars(planes),
        "phase_ns": planes.phase_ns[used],
        "device_ns": None if planes.device_ns is None else planes.device_ns[used],
    }
    return Window(
        **in_use,
        ranks=tuple(series.rank for series in trained),
        hosts=tuple(series.identity.host for series in trained),
        attempt=current[0].identity.attempt if current else 0,
        steps=steps,
        phases=tuple(name for name, keep in zip(names, used, strict=True) if keep),
        warmup=warmup,
        left_out=seen - len(steps),
        identities=tuple(series.identity for series in trained),
        facts=tuple(series.facts for series in trained),
        ddp_ns=tuple(_ddp_samples(series, steps) for series in trained),
        groups=groups,
        stages=is_pipeline(trained),
        share_samples=share_samples(trained),
        batches=np.array([_batches(series) for series in trained], np.float64),
        backwards=_backwards(trained, steps),
        splits_sequences=splits_sequences(trained),
        routed=routed_bytes(trained, steps),
        samples=tuple(during(run.samples, begins, ends)),
        probes=_probes(run, begins, ends),
        stacks=tuple(during(run.stacks, begins, ends)),
        communication=build_communication(trained, steps, _steady(steps, warmup), planes.phase_ns, groups),
    )


def _still_there(trained: Sequence[RankSeries], alive: NDArray[np.bool_]) -> tuple[list[RankSeries], NDArray[np.bool_]]:
    """Without the ranks that were gone before the window began."""
    there = np.asarray(alive.any(axis=1))
    return [series for series, keep in zip(trained, there, strict=True) if keep], alive[there]


def _fill_planes(
    trained: Sequence[RankSeries], steps: NDArray[np.int64], alive: NDArray[np.bool_], names: list[str]
) -> Planes:
    shape = (len(trained), len(steps))
    timed = any(len(series.device_steps) for series in trained)
    sampled = any(series.steps["reserved"].any() for series in trained)
    nowhere = np.broadcast_to(np.float64(np.nan), shape)  # takes no room

    def unknown() -> NDArray[np.float64]:
        return np.full(shape, np.nan)

    planes = Planes(
        wall_ns=unknown(),
        phase_ns=np.full((len(names), *shape), np.nan),
        device_ns=np.full((len(names), *shape), np.nan) if timed else None,
        between_ns=unknown(),
        allocated=unknown() if sampled else nowhere,
        reserved=unknown() if sampled else nowhere,
        peak_allocated=unknown() if sampled else nowhere,
        end_wall_ns=unknown(),
        flags=np.zeros(shape, np.uint16),
    )
    for index, series in enumerate(trained):
        _put(planes, index, series, steps, alive[index], names)
    return planes


def _put(
    planes: Planes,
    index: int,
    series: RankSeries,
    steps: NDArray[np.int64],
    there: NDArray[np.bool_],
    names: list[str],
) -> None:
    # A slice instead of a mask where nothing is missing: it saves copying every array once more.
    at: Any = slice(None) if there.all() else there
    rows = series.steps
    if len(rows) != len(steps) or not there.all():
        rows = rows[np.searchsorted(rows["step"], steps[there])]
    planes.wall_ns[index, at] = rows["wall_ns"]
    planes.flags[index, at] = rows["flags"]
    planes.between_ns[index, at] = rows["between_ns"]
    memory = ("allocated", planes.allocated), ("reserved", planes.reserved), ("peak_allocated", planes.peak_allocated)
    for column, plane in memory if planes.reserved.flags.writeable else ():
        plane[index, at] = np.where(rows[column] > 0, rows[column], np.nan)
    offset = series.anchor_wall_ns - series.anchor_mono_ns
    planes.end_wall_ns[index, at] = rows["start_ns"].astype(np.float64) + rows["wall_ns"] + offset
    _fill(planes.phase_ns[:, index], at, rows["phase_ns"], series, names)
    if planes.device_ns is not None:
        found, device_rows = _device_rows(series, steps)
        _fill(planes.device_ns[:, index], found, device_rows["phase_ns"], series, names)


def _period(planes: Planes) -> tuple[float, float]:
    """From the start of the first step to the end of the last, on the wall clock: start-up is another matter."""
    if not planes.wall_ns.size:
        return 0.0, 0.0
    starts = planes.end_wall_ns - planes.wall_ns
    return float(np.nanmin(starts)), float(np.nanmax(planes.end_wall_ns))


def _probes(run: RunData, begins: float, ends: float) -> tuple[dict[str, Any], ...]:
    lines = of_kind(run.samples, "probe")
    since = min(begins, ends - thresholds.PROBES_BACK_S * 1e9)
    return tuple(during(lines, since, ends + thresholds.PROBES_AFTER_S * 1e9))


def _ddp_samples(series: RankSeries, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    if not len(steps):
        return np.zeros(0)
    said = series.steps["ddp_compute_ns"]
    return np.asarray(said[(said > 0) & (series.steps["step"] >= steps[0])], np.float64)


def _batches(series: RankSeries) -> float:
    """Of a loop without a DataLoader, backward passes: as many, unless there are several models."""
    taken = float(np.median(series.steps["batches"]))
    return taken or float(np.median(series.steps["micro_batches"]))


def _backwards(trained: Sequence[RankSeries], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    most = np.zeros(len(steps), np.int64)
    for series in trained:
        own = series.steps["step"].astype(np.int64)
        at = np.minimum(np.searchsorted(own, steps), max(len(own) - 1, 0))
        there = own[at] == steps
        most[there] = np.maximum(most[there], series.steps["micro_batches"][at[there]])
    return most


def _complete_steps(trained: Sequence[RankSeries]) -> tuple[NDArray[np.int64], NDArray[np.bool_], int]:
    """The steps to compare, who was alive in them [R, S], and how many steps were seen at all."""
    if not trained:
        return np.zeros(0, np.int64), np.zeros((0, 0), np.bool_), 0
    numbers = [series.steps["step"].astype(np.int64) for series in trained]
    first = numbers[0]
    if all(len(own) == len(first) and (own == first).all() for own in numbers):
        return first, np.ones((len(trained), len(first)), np.bool_), len(first)
    universe = np.unique(np.concatenate(numbers))
    have = np.stack([np.isin(universe, own, assume_unique=True) for own in numbers])
    alive = np.ones_like(have)
    complete = np.ones(len(universe), np.bool_)
    for index, (series, own) in enumerate(zip(trained, numbers, strict=True)):
        if series.state in _ENDED:
            alive[index] = universe <= own[-1]
        else:
            complete &= universe <= own[-1]
    complete &= (have | ~alive).all(axis=0)
    return universe[complete], alive[:, complete], len(universe)


def _phase_names(trained: Sequence[RankSeries]) -> list[str]:
    """Ours in their order, then the users' names of any rank; two ranks may have given a slot different names."""
    names = list(BUILTIN_PHASES)
    for own in dict.fromkeys(series.phase_names for series in trained):
        names.extend(name for name in own if name and name not in names)
    return names


def _fill(out: NDArray[np.float64], at: Any, by_slot: NDArray[Any], series: RankSeries, names: list[str]) -> None:
    """Put a rank's times ``[step, slot]`` into its ``[phase, step]`` plane, by the names it gave its slots."""
    out[:, at] = 0.0
    for slot, name in enumerate(series.phase_names):
        if name:
            out[names.index(name), at] = by_slot[:, slot]


def _device_rows(series: RankSeries, steps: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[Any]]:
    """Where in ``steps`` there are device times, and their rows."""
    _, found, rows = np.intersect1d(
        steps, series.device_steps["step"].astype(np.int64), assume_unique=True, return_indices=True
    )
    return found, series.device_steps[rows]


def _steady(steps: NDArray[np.int64], warmup: Sequence[Apart]) -> NDArray[np.bool_]:
    return ~np.isin(steps, [apart.step for apart in warmup])


def _used(phase_ns: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.array([bool((plane > 0).any()) for plane in phase_ns], np.bool_)


def _set_apart(steps: NDArray[np.int64], wall_ns: NDArray[np.float64], flags: NDArray[np.uint16]) -> tuple[Apart, ...]:
    """First step, compile steps wherever they are, and the leading steps that are not yet like the rest."""
    if not len(steps):
        return ()
    any_flag = np.bitwise_or.reduce(flags, axis=0)
    reasons: list[Reason | None] = [None] * len(steps)
    for index in range(len(steps)):
        if any_flag[index] & FLAG_FIRST:
            reasons[index] = "first"
        elif any_flag[index] & FLAG_COMPILED:
            reasons[index] = "compile"
    length_ns = mean_rank(wall_ns)
    at_most = int(len(steps) * thresholds.WARMUP_AT_MOST)
    rest = length_ns[at_most:][[reason is None for reason in reasons[at_most:]]]
    typical = float(np.median(rest)) if len(rest) else float("inf")
    limit = typical + max(thresholds.WARMUP_SPREADS * spread(rest), thresholds.WARMUP_SHARE * typical)
    for index in range(len(steps)):
        if reasons[index] is not None:
            continue
        if any_flag[index] & FLAG_DISCOVERY:
            reasons[index] = "discovery"
        elif index < at_most and length_ns[index] > limit:
            reasons[index] = "warm-up"
        else:
            break
    return tuple(
        Apart(step=int(step), reason=reason) for step, reason in zip(steps, reasons, strict=True) if reason is not None
    )
