"""How short a step can get, whatever one rank does: no price may promise more.

A rank that is fixed leaves the next thing that a step waits for.  Three of them are known:

- what each phase takes on the rank where it takes least, waiting for the exchange included;
- on NCCL, the exchange itself.  Part of it may be hidden behind the very time that would be saved: all of it stays, and
  so do phases that cannot hide any, since no collective is called in them, or not before a part of them is done;
- the host, which has to launch everything.  While its device is behind, it stands still in one phase or another, so
  what it takes in most steps says little; but hardly in the same phase of all steps and ranks.  Outside of all phases
  it may, at each ``.item()``.  One that seems to need nearly all of the step may stand still in all of them (a full
  queue of launches, a model that waits for its device): then its pace is not known.

Only for views in which waiting was measured; elsewhere the phases of those who wait hold it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.communication_arrivals import Arrivals
from stepscope.diagnosis.host_bound import LAUNCHING
from stepscope.diagnosis.robust import shortest
from stepscope.diagnosis.view import View
from stepscope.records.phases import BUILTIN_PHASES

__all__ = ["least_step_ns"]

Floats = NDArray[np.float64]


def least_step_ns(view: View, without: str = "") -> Floats:
    """[S] of the view; ``without`` a phase, if that is what would be saved on all ranks."""
    kept = [shortest(view.phase(name)) for name in view.phases if name != without]
    least = np.asarray(np.sum(kept, axis=0) if kept else np.zeros(len(view.steps)), np.float64)
    if view.clock == "device":
        least = np.maximum(least, _by_host(view, without))
        least = np.fmax(least, _by_exchange(view, without))
    return least


def _by_host(view: View, without: str = "") -> float:
    names = [name for name in LAUNCHING if name in view.window.phases and name != without]
    places = [view.window.phases.index(name) for name in names]
    host_ns = view.window.phase_ns[places][:, view.rows][:, :, view.window.steady]
    if not host_ns.size:
        return 0.0
    pace_ns = float(np.nansum(np.nanmin(np.nanquantile(host_ns, thresholds.HOST_QUIET, axis=2), axis=1)))
    return pace_ns if pace_ns < thresholds.HOST_FREE_SHARE * float(view.step_ns.mean()) else 0.0


def _by_exchange(view: View, without: str = "") -> Floats:
    """[S]; nan where nothing is known."""
    unknown = np.full(len(view.steps), np.nan)
    exchanges = view.window.communication
    if exchanges is None or exchanges.measured is None or without == "comm":
        return unknown
    took = [
        np.where(np.isnan(least_ns := flow.least_ns[view.columns].astype(np.float64)), flow.transfer_ns, least_ns)
        for flow in exchanges.flows
        if flow.device and len(flow.rows) > 1
    ]
    if not took:
        return unknown
    counts = _calls_by_phase(exchanges.arrivals)
    stays_ns = np.zeros(len(view.steps))
    for name in view.phases:
        if name in BUILTIN_PHASES and name not in ("comm", without):
            # Nothing can be exchanged before the first part of a phase is done; the rest may hide the exchange.
            stays_ns += shortest(view.phase(name)) / max(counts.get(name, 1.0), 1.0)
    # Collectives of one kind run one after the other; others may run beside them, as FSDP's gathers and scatters do.
    return np.asarray(np.max(took, axis=0) + stays_ns, np.float64)


def _calls_by_phase(arrivals: Arrivals) -> dict[str, float]:
    """Collectives a step that a rank calls in each phase, on the average."""
    steps = len(np.unique(np.stack([arrivals.call_row, arrivals.call_place]), axis=1)[0])
    slots, counts = np.unique(arrivals.call_phase, return_counts=True)
    named = zip(slots.tolist(), counts.tolist(), strict=True)
    return {BUILTIN_PHASES[slot]: count / max(steps, 1) for slot, count in named if slot < len(BUILTIN_PHASES)}
