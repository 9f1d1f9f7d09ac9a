"""Uneven ranks that stay uneven: who is late, since when, and in which phase.

Two ways to tell the culprit from its victims, in this order.

*By work.*  Where waiting is measured (or ranks do not run in lockstep) the culprit works longer than its peers: it is
the rank that waits least.

*By phase.*  A single phase is much less noisy than all work together, so an excess may be certain there and lost in the
whole; where waiting is measured the rank's work must then still lean the same way.  Where waiting hides inside other
phases, every rank's work is equally long: the culprit takes longer than its peers in one phase and makes up for it in
another, where they wait and it does not.  A phase is more or less likely to hide a wait (``WAIT_HIDES_IN``); the rank
whose surplus lies in the less likely one is the culprit, the other way round it is a victim.

*By DDP's own samples.*  Where waiting on a GPU was not measured, DDP now and then says how long the gradients took to
compute, and the rank that needs longest is the culprit.

On NCCL a wait is measured where the device's stream waits (``recorder/stalls.py``).  Where it was not, it may hide in
any phase of those who wait, and nobody is named by phase: it would be the victim as often as the culprit.

Each comparison is made step by step against the median of the peers, ranks that do as much work.  An excess must matter
(``EXCESS_…``) and be significant after correction for the number of comparisons: over the whole window, where it must
also stand out from slow wander, or in one stretch of it against the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.claims import Claim
from stepscope.diagnosis.host_bound import host_excess_ns, slow_host_phase, waits_for_host
from stepscope.diagnosis.late_ranks import BETWEEN, Suspect, claims_of
from stepscope.diagnosis.robust import peer_deviation, persistence_z, spread, stretch_z, z_needed
from stepscope.diagnosis.series_stats import local_median
from stepscope.diagnosis.view import View

__all__ = ["WAIT_HIDES_IN", "find_stragglers", "hides_wait"]

Floats = NDArray[np.float64]

WAIT_HIDES_IN = ("input", "h2d", "", "checkpoint", "optimizer", "eval", "other", "forward", "backward", "comm")
"""From the phase least likely to hide a wait for peers to the most likely; "" stands for the user's own phases.
Collectives run inside backward (DDP, FSDP) and forward (FSDP, SyncBatchNorm, buffers), and ``.item()`` or a barrier in
the loop (``other``) waits for whatever is outstanding."""
MEAN_TO_SIGMA = 1.2533
"""Mean absolute deviation of a normal distribution to its standard deviation."""
NOISE_STEPS = 200
"""As many as are needed to know the noise of the typical rank."""
SIEVE_SHARE, SIEVE_SLACK = 0.85, 1.5
"""Of the z that is needed, what is left in the largest window inside a stretch (its median's error, at most half its
steps missing), and how far chance may lower it."""
DIP_STEPS = 2
"""Of the running median below do not end a stretch; more would join it with whatever noise came before."""
SMOOTHED_OVER = 5
"""Steps of the running median in which stretches are sought: two wild steps in a row do not end one."""


@dataclass(frozen=True, kw_only=True)
class _Excess:
    rank: int
    at: slice
    excess_ns: float
    z: float


class _Comparisons:
    """How much more each rank took than its peers, by phase, made when asked for."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.names = [name for name in view.phases if name != "comm"]
        self._known: dict[str, Floats] = {}

    @cached_property
    def work(self) -> Floats:
        return peer_deviation(self.view.work_ns, self.view.groups)

    def phase(self, name: str) -> Floats:
        if name not in self._known:
            durations = self.view.between_ns if name == BETWEEN else self.view.phase(name)
            self._known[name] = peer_deviation(durations, self.view.groups)
        return self._known[name]

    def typical(self, rank: int, at: slice) -> dict[str, float]:
        """Of one rank in one stretch, by phase."""
        found = {name: _median(self.phase(name)[rank, at]) for name in self.view.phases}
        if found.get("other", 0.0) >= thresholds.EXPLAINS_SHARE * max(found.values()):
            found[BETWEEN] = _median(self.phase(BETWEEN)[rank, at])
        return found

    def typical_work(self, rank: int, at: slice) -> float:
        return _median(self.work[rank, at])


def find_stragglers(view: View) -> list[Claim]:
    if len(view.ranks) < 2 or not view.enough:
        return []
    compared = _Comparisons(view)
    suspects = [suspect for suspect in _by_work(view, compared) if not _is_cleared(view, suspect)]
    known = {suspect.rank for suspect in suspects}
    if view.comm_measured or not view.nccl:
        by_phase = (suspect for suspect in _by_phase(view, compared) if suspect.rank not in known)
        suspects += [suspect for suspect in by_phase if not _is_cleared(view, suspect)]
    if not view.comm_measured:
        known = {suspect.rank for suspect in suspects}
        suspects += [suspect for suspect in _by_ddp(view) if suspect.rank not in known]
    return claims_of(view, suspects)


def _by_work(view: View, compared: _Comparisons) -> list[Suspect]:
    found = []
    for one in _excesses(view, compared.work, comparisons=len(view.ranks)):
        by_phase = compared.typical(one.rank, one.at)
        parts = {name: by_phase[name] for name in compared.names}
        name, most = max(parts.items(), key=lambda item: item[1], default=("", 0.0))
        phase = name if most >= thresholds.EXPLAINS_SHARE * one.excess_ns else None
        suspect = _suspect(one, phase, by_phase, by_work=True)
        if phase is None and waits_for_host(view, suspect):
            # A device that waits for its host does so a little in every phase; the host knows which one holds it up.
            suspect = replace(suspect, phase=slow_host_phase(view, suspect))
        found.append(suspect)
    return found


def _is_cleared(view: View, suspect: Suspect) -> bool:
    """Whether something else that was measured speaks for it."""
    return _keeps_pace(view, suspect) or _waits_for_peers(view, suspect)


def _waits_for_peers(view: View, suspect: Suspect) -> bool:
    """Whether NCCL's Flight Recorder has it waiting for its peers, and not them for it.

    A wait that no mark tells of (``recorder/stalls.py`` does not know all of them) looks like work.
    """
    if view.waited_ns is None:
        return False
    more_ns = peer_deviation(view.waited_ns, view.groups)[suspect.rank, suspect.at]
    return _median(more_ns) >= thresholds.EXPLAINS_SHARE * suspect.excess_ns


def _keeps_pace(view: View, suspect: Suspect) -> bool:
    """Whether its device waits for its host, and that takes no longer than the hosts of its peers.

    Where hosts are what the job waits for, the one that happens to be behind has a device that stands still, and the
    others, whose devices are a little ahead, wait for it; but none of them would be faster alone.
    """
    return waits_for_host(view, suspect) and host_excess_ns(view, suspect) < thresholds.EXPLAINS_SHARE * (
        suspect.excess_ns
    )


def _by_phase(view: View, compared: _Comparisons) -> list[Suspect]:
    comparisons = len(compared.names) * len(view.ranks)
    best: dict[int, Suspect] = {}
    for name in compared.names:
        for one in _excesses(view, compared.phase(name), comparisons=comparisons):
            if one.rank in best and one.excess_ns <= best[one.rank].excess_ns:
                continue
            by_phase = compared.typical(one.rank, one.at)
            work_ns = compared.typical_work(one.rank, one.at)
            carried = view.comm_measured and work_ns >= thresholds.CARRIED_SHARE * one.excess_ns
            if carried or _made_up_by_peers_waiting(view, by_phase, name, one.excess_ns):
                best[one.rank] = _suspect(one, name, by_phase, by_work=False)
    return list(best.values())


def _by_ddp(view: View) -> list[Suspect]:
    """Of the n-th sample of all ranks; it is of the same step on each."""
    samples = [view.window.ddp_ns[row] for row in view.rows]
    count = min(map(len, samples), default=0)
    if count < thresholds.DDP_SAMPLES:
        return []
    deviation = peer_deviation(np.stack([own[len(own) - count :] for own in samples]), view.groups)
    found = []
    for rank, own in enumerate(deviation):
        excess_ns = _median(own)
        always = float((own > 0).mean()) >= thresholds.DDP_SHARE
        if excess_ns >= _least_excess(view) and always and excess_ns >= thresholds.SPREADS_APART * spread(own):
            whole = _Excess(rank=rank, at=slice(0, len(view.steps)), excess_ns=excess_ns, z=float("inf"))
            found.append(_suspect(whole, "backward", {"backward": excess_ns}, by_work=False, sampled=True))
    return found


def _suspect(
    one: _Excess, phase: str | None, by_phase: dict[str, float], *, by_work: bool, sampled: bool = False
) -> Suspect:
    return Suspect(
        rank=one.rank,
        phase=phase,
        at=one.at,
        excess_ns=one.excess_ns,
        by_phase=by_phase,
        by_work=by_work,
        sampled=sampled,
        z=one.z,
    )


def _made_up_by_peers_waiting(view: View, by_phase: dict[str, float], phase: str, excess_ns: float) -> bool:
    """Whether the rank is shorter than its peers where they are more likely to wait than in ``phase``."""
    other = min((name for name in by_phase if name != BETWEEN), key=lambda name: by_phase[name])
    if view.comm_measured and other == "backward":
        return False  # the wait in backward is known: less of it is just less work
    enough = -by_phase[other] >= thresholds.EXPLAINS_SHARE * excess_ns
    return bool(enough) and hides_wait(phase) < hides_wait(other)


def hides_wait(phase: str) -> int:
    return WAIT_HIDES_IN.index(phase if phase in WAIT_HIDES_IN else "")


# -- excesses that matter and are no accident -----------------------------------------------------------------------


def _excesses(view: View, deviation: Floats, *, comparisons: int) -> Iterator[_Excess]:
    least_ns = _least_excess(view)
    for rank in _candidates(deviation, least_ns, comparisons):
        there = ~np.isnan(deviation[rank])
        own = deviation[rank][there]
        if len(own) < thresholds.MIN_STEPS:
            continue
        test = _Test(least_ns=least_ns, comparisons=comparisons, stretch=_least_stretch(view))
        at, z = _lasting(own, test) or _passing(own, test) or (None, 0.0)
        if at is not None:
            columns = np.flatnonzero(there)
            at = slice(int(columns[at.start]), int(columns[at.stop - 1]) + 1)
            yield _Excess(rank=int(rank), at=at, excess_ns=_median(deviation[rank, at]), z=z)


@dataclass(frozen=True, kw_only=True)
class _Test:
    least_ns: float
    comparisons: int
    stretch: int
    """Steps in the shortest stretch."""


def _least_stretch(view: View) -> int:
    sampled = view.clock == "device" and len(view.steps) * 2 <= int(view.steps[-1] - view.steps[0]) + 1
    return thresholds.SAMPLED_STRETCH_STEPS if sampled else thresholds.STRETCH_STEPS


def _least_excess(view: View) -> float:
    return max(thresholds.EXCESS_SHARE * view.median_step_ns, thresholds.EXCESS_FLOOR_NS)


def _candidates(deviation: Floats, least_ns: float, comparisons: int) -> NDArray[np.intp]:
    """Ranks that may have an excess at all; a sieve that lets pass too many, never too few.

    A stretch of n steps that passes the test below has, in some window of 2^k <= n < 2^(k+1) steps, a mean that is
    high in terms of the noise of the typical rank.  Single wild steps are cut off first.
    """
    known = np.nan_to_num(deviation) if np.isnan(deviation).any() else deviation
    some = known[:, :: max(1, known.shape[1] // NOISE_STEPS)]
    noise_ns = float(np.median(np.abs(some).mean(axis=1))) * MEAN_TO_SIGMA
    ceiling = 3 * max(least_ns, noise_ns)
    sums = np.zeros((known.shape[0], known.shape[1] + 1))
    np.clip(known, -ceiling, ceiling, out=sums[:, 1:])
    np.cumsum(sums[:, 1:], axis=1, out=sums[:, 1:])
    found = np.zeros(len(known), np.bool_)
    width = thresholds.STRETCH_STEPS
    while True:
        width = min(width, known.shape[1])
        stride = max(1, width // thresholds.STRETCH_STEPS)
        means = (sums[:, width::stride] - sums[:, : sums.shape[1] - width : stride]) / width
        places = 1 if width == known.shape[1] else max(known.shape[1] // thresholds.STRETCH_STEPS, 1)
        needed = z_needed(comparisons * places)
        sigmas = max(needed * SIEVE_SHARE - SIEVE_SLACK, 0.0)
        found |= means.max(axis=1) >= max(least_ns / 2, sigmas * noise_ns / np.sqrt(width))
        if width == known.shape[1]:
            return np.flatnonzero(found)
        width *= 2


def _lasting(own: Floats, test: _Test) -> tuple[slice, float] | None:
    """An excess of the whole window; from where on, when it began in it."""
    if np.median(own) < test.least_ns:
        return None
    z = persistence_z(own)
    if z < z_needed(test.comparisons):
        return None
    at = _longest_stretch(own, test)
    if at is not None:
        outside = np.delete(own, at)
        if len(outside) >= test.stretch and np.median(outside) < test.least_ns / 2:
            return at, z
    return slice(0, len(own)), z


def _passing(own: Floats, test: _Test) -> tuple[slice, float] | None:
    """An excess of one stretch, told by the rest of the window."""
    at = _longest_stretch(own, test)
    if at is None or len(own) - (at.stop - at.start) < thresholds.MIN_STEPS:
        return None
    z = stretch_z(own, at)
    # Any stretch might have been the one; those that share most of their steps are one and the same.
    return (at, z) if z >= z_needed(test.comparisons * len(own) // test.stretch) else None


def _longest_stretch(own: Floats, test: _Test) -> slice | None:
    """Where the running median stays above; a short dip does not end it."""
    least_ns = test.least_ns
    above = local_median(own, SMOOTHED_OVER) >= least_ns
    edges = np.flatnonzero(np.diff(np.concatenate(([False], above, [False])).astype(np.int8)))
    starts, stops = edges[::2].tolist(), edges[1::2].tolist()
    joined: list[list[int]] = []
    for start, stop in zip(starts, stops, strict=True):
        if joined and start - joined[-1][1] <= DIP_STEPS:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    first, stop = max(joined, key=lambda one: one[1] - one[0], default=[0, 0])
    while first < stop and own[first] < least_ns:
        first += 1
    while first < stop and own[stop - 1] < least_ns:
        stop -= 1
    return slice(first, stop) if stop - first >= test.stretch else None


def _median(values: Floats) -> float:
    there = values[~np.isnan(values)]
    return float(np.median(there)) if len(there) else 0.0
