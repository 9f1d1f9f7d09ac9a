"""A rank whose device waits for its host, on the device's clock.

A host launches ahead of its device.  Where it does not get ahead, the device has nothing to do while the host fetches
input or logs: the device's time in those phases, which is otherwise hidden behind work, is as long as the host's.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.robust import medians
from stepscope.diagnosis.view import View

__all__ = ["LAUNCHING", "host_excess_ns", "host_ns", "slow_host_phase", "waits_for_host"]

Floats = NDArray[np.float64]

LAUNCHING = ("input", "h2d", "forward", "backward", "optimizer")
"""Phases in which a host has to get through before its device can."""
WITHOUT_DEVICE = ("input", "other")
LEAST_NS = 50_000
"""A host that does less than this a step without its device tells nothing."""


class _Late(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def at(self) -> slice: ...
    @property
    def phase(self) -> str | None: ...


def host_ns(view: View, phase: str, at: slice = slice(None)) -> Floats:
    """[R, S]; host time of a view's ranks and steps."""
    window = view.window
    if phase not in window.phases:
        return np.zeros((len(view.rows), len(view.columns[at])))
    return np.asarray(window.phase_ns[window.phases.index(phase)][view.rows][:, view.columns[at]], np.float64)


def waits_for_host(view: View, late: _Late) -> bool:
    """Whether its device stands still while its host does something else, and those of its peers do not."""
    if view.clock != "device":
        return False
    host = idle = 0.0
    for name in WITHOUT_DEVICE:
        if name == late.phase:
            continue  # where it is late, its device may have work
        own_ns = float(medians(host_ns(view, name, late.at)[[late.rank]])[0])
        device_ns = medians(view.phase(name)[:, late.at])
        usual_ns = float(np.nanmedian(np.delete(device_ns, late.rank)))  # clipping, say: work that has no phase
        host += own_ns
        idle += max(min(own_ns, float(device_ns[late.rank])) - usual_ns, 0.0)
    return host >= LEAST_NS and idle >= thresholds.IDLE_SHARE * host


def host_excess_ns(view: View, late: _Late) -> float:
    """What the host takes a step beyond the hosts of its peers, where those do not stand still themselves."""
    by_phase = _host_excess_by_phase(view, late)
    return sum(by_phase.values()) if by_phase else float("inf")


def slow_host_phase(view: View, late: _Late) -> str | None:
    """The phase in which the host takes most of what it takes beyond the hosts of its peers."""
    by_phase = _host_excess_by_phase(view, late)
    name = max(by_phase, key=lambda phase: by_phase[phase], default=None)
    return name if name and by_phase[name] > thresholds.EXPLAINS_SHARE * sum(by_phase.values()) else None


def _host_excess_by_phase(view: View, late: _Late) -> dict[str, float]:
    """Empty for a rank without peers."""
    peers = np.flatnonzero((view.groups == view.groups[late.rank]) & (np.arange(len(view.ranks)) != late.rank))
    if not len(peers):
        return {}
    excess = {}
    for name in (*LAUNCHING, "other"):
        spent = host_ns(view, name, late.at)
        own = float(medians(spent[[late.rank]])[0])
        usual = float(np.nanmedian(np.nanquantile(spent[peers], thresholds.HOST_QUIET, axis=1)))
        excess[name] = max(own - usual, 0.0)
    return excess
