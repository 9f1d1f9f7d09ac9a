"""Where time that was lost at some steps lies: in which phase, on which rank.

The steps in question are set against usual ones, phase by phase and rank by rank.  Waiting for a peer is excess too, so
the phases are asked in the order of how unlikely they are to hide a wait (``stragglers.WAIT_HIDES_IN``); measured waits
are asked last of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.robust import mean_rank, median_rank
from stepscope.diagnosis.stragglers import hides_wait
from stepscope.diagnosis.view import View

__all__ = ["Place", "by_phase_ms", "locate", "some", "typical", "where_text"]

Floats = NDArray[np.float64]

STEPS_USED = 32
"""Steps that speak for many: their median is good to a few per cent of their spread."""


@dataclass(frozen=True, kw_only=True)
class Place:
    row: int | None
    """Of the view's ranks: the one that lost the time; None: all of them, several, or nobody knows."""
    phase: str | None

    def ranks(self, view: View) -> tuple[int, ...]:
        return () if self.row is None else (view.ranks[self.row],)


def some(columns: NDArray[np.intp] | Sequence[int], most: int = STEPS_USED) -> NDArray[np.intp]:
    """Evenly chosen from many."""
    at = np.asarray(columns, np.intp)
    return at if len(at) <= most else at[np.linspace(0, len(at) - 1, most).round().astype(np.intp)]


def typical(view: View, columns: NDArray[np.intp]) -> Floats:
    """[P, R]; the median over (some of) these steps; nan for a rank that was not there."""
    chosen = view.phase_ns[:, :, some(columns)]
    phases, ranks, steps = chosen.shape
    return median_rank(chosen.reshape(phases * ranks, steps).T).reshape(phases, ranks)


def locate(view: View, excess_ns: Floats, lost_ns: float) -> Place:
    """``excess_ns`` [P, R] of the steps that lost so much.

    A phase must explain half of it on some rank; a rank is named when it is the only one that has half as much there as
    the one that has most.
    """
    known = np.nan_to_num(excess_ns)
    if not known.size:
        return Place(row=None, phase=None)
    most = known.max(axis=1)
    candidates = [index for index in range(len(most)) if most[index] >= thresholds.EXPLAINS_SHARE * lost_ns]
    work = [index for index in candidates if view.phases[index] != "comm"]
    if not candidates or (not work and view.comm_measured):
        own = known[[index for index, name in enumerate(view.phases) if name != "comm"]].sum(axis=0)
        if view.comm_measured and own.max() >= thresholds.EXPLAINS_SHARE * lost_ns:
            return Place(row=_alone(own), phase=None)
        return Place(row=None, phase="comm" if candidates else None)
    if view.comm_measured or not view.lockstep:
        at = max(work or candidates, key=lambda index: float(most[index]))
    else:
        at = min(candidates, key=lambda index: hides_wait(view.phases[index]))
    return Place(row=_alone(known[at]), phase=view.phases[at])


def by_phase_ms(view: View, excess_ns: Floats, row: int | None) -> dict[str, float]:
    """For the evidence: of one rank, or of the mean one."""
    mine = excess_ns[:, row] if row is not None else mean_rank(excess_ns.T)
    return {name: round(float(one) / 1e6, 3) for name, one in zip(view.phases, np.nan_to_num(mine), strict=True)}


def where_text(place: Place, view: View) -> str:
    """`` on rank 1 in forward``, `` in input``, or nothing."""
    who = f" on rank {view.ranks[place.row]}" if place.row is not None else ""
    if place.phase == "other":
        return f"{who} outside model and optimizer (other)"
    if place.phase == "comm":
        return f"{who} in communication (comm)"
    return f"{who} in {place.phase}" if place.phase else who


def _alone(by_rank: Floats) -> int | None:
    having = np.flatnonzero(by_rank >= thresholds.EXPLAINS_SHARE * by_rank.max())
    return int(having[0]) if len(having) == 1 and len(by_rank) > 1 else None
