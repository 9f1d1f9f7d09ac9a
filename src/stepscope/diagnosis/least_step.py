"""How short a step can get, whatever one rank does: no price may promise more.

A rank that is fixed leaves the next thing that a step waits for.  Three of them are known:

- what each phase takes on the rank where it takes least, waiting for the exchange included;
- on NCCL, the exchange itself.  Part of it may be hidden behind the very time that would be saved: all of it, and the
  phases that cannot hide any, since no collective is called in them, stay;
- the host, which has to launch everything.  While its device is behind, it stands still in one phase or another, so
  what it takes in most steps says little; but hardly in the same phase of all steps and ranks.  Outside of all phases
  it may, at each ``.item()``.

Only for views in which waiting was measured; elsewhere the phases of those who wait hold it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.robust import shortest
from stepscope.diagnosis.view import View
from stepscope.records.phases import BUILTIN_PHASES

__all__ = ["least_step_ns"]

Floats = NDArray[np.float64]

LAUNCHING = ("input", "h2d", "forward", "backward", "optimizer")
HOST_QUANTILE = 0.3
"""Of the steps: in so many a host that is ahead of its device does not stand still in a given phase."""


def least_step_ns(view: View) -> Floats:
    """[S] of the view."""
    least = np.asarray(np.sum([shortest(phase_ns) for phase_ns in view.phase_ns], axis=0), np.float64)
    if view.clock == "device":
        least = np.maximum(least, _by_host(view))
        least = np.fmax(least, _by_exchange(view))
    return least


def _by_host(view: View) -> float:
    places = [view.window.phases.index(name) for name in LAUNCHING if name in view.window.phases]
    host_ns = view.window.phase_ns[places][:, view.rows][:, :, view.window.steady]
    if not host_ns.size:
        return 0.0
    return float(np.nansum(np.nanmin(np.nanquantile(host_ns, HOST_QUANTILE, axis=2), axis=1)))


def _by_exchange(view: View) -> Floats:
    """[S]; nan where nothing is known."""
    unknown = np.full(len(view.steps), np.nan)
    exchanges = view.window.communication
    if exchanges is None or exchanges.measured is None:
        return unknown
    by_group: dict[str, Floats] = {}
    for flow in exchanges.flows:
        if flow.device and len(flow.rows) > 1:
            took = flow.least_ns[view.columns].astype(np.float64)
            took = np.where(np.isnan(took), flow.transfer_ns, took)
            by_group[flow.group.name] = by_group.get(flow.group.name, np.zeros(len(took))) + took
    if not by_group:
        return unknown
    slots = np.unique(exchanges.arrivals.call_phase)
    called_in = {"comm", *(BUILTIN_PHASES[slot] for slot in slots if slot < len(BUILTIN_PHASES))}
    beside = [name for name in view.phases if name in BUILTIN_PHASES and name not in called_in]
    stays_ns = np.sum([shortest(view.phase(name)) for name in beside], axis=0)
    # One group after the other at the least: two of them may run side by side.
    return np.asarray(np.max(list(by_group.values()), axis=0) + stays_ns, np.float64)
