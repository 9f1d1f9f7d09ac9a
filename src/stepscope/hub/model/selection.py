"""Which ranks the rules judge while a job runs: all of them, or the worst and an even sample of the rest.

Rules compare ranks with one another.  Among a hundred thousand, the few that hold the others back are those with the
most work, or the most of one phase, over the window; what is usual is known as well from some hundreds as from all.  So
the worst by each measure, those that ended badly or lag behind, and an even sample in order of ranks are judged: the
same ones whenever the numbers are the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.live_run import LiveRun
from stepscope.hub.model.registry import STATES

__all__ = ["MOST_JUDGED", "select"]

MOST_JUDGED = 512
WORST = 16
"""By each measure."""
ENDED_BADLY = 32


def select(live: LiveRun, most: int = MOST_JUDGED) -> NDArray[np.intp]:
    """Columns, in order of ranks; without those that are silent and not known to have ended."""
    of = live.registry.of
    state, shown = of["state"][live.ring_of], of["shown"][live.ring_of]
    gone = (state >= STATES.index("exited")) | (of["ended_wall_ns"][live.ring_of] > 0)
    order = np.argsort(shown, kind="stable")
    order = order[(live.live_columns() | gone)[order]]
    if len(order) <= most:
        return order
    chosen = np.zeros(live.planes.columns, np.bool_)
    for values in _measures(live):
        chosen[order[_largest(values[order], WORST)]] = True
    badly = order[np.isin(state[order], [STATES.index("exception"), STATES.index("vanished")])]
    chosen[badly[:ENDED_BADLY]] = True
    running = order[~gone[order]]
    chosen[running[_largest(-of["last_step"][live.ring_of][running], WORST)]] = True
    rest = order[~chosen[order]]
    room = max(0, most - int(chosen.sum()))
    chosen[rest[np.linspace(0, len(rest) - 1, min(room, len(rest))).astype(np.intp)]] = True
    return order[chosen[order]]


def _measures(live: LiveRun) -> list[NDArray[np.float32]]:
    """[column] each: work and every phase, as the host saw them and as the device did."""
    n, held = live.planes.columns, live.planes.held
    means = live.means(("work", *live.used_phases()))
    found = [values for name, values in means.items() if name != "comm"]
    on_device = [name for name in held if name.startswith("device:")]
    if on_device:
        count = np.maximum(held["device"][:, :n].sum(axis=0), 1)
        sums = {name: np.asarray(held[name][:, :n].sum(axis=0) / count, np.float32) for name in on_device}
        worked = [values for name, values in sums.items() if name != "device:comm"]
        found += [*worked, np.sum(worked, axis=0, dtype=np.float32)] if worked else []
    return found


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    if len(values) <= count:
        return np.arange(len(values))
    largest: NDArray[np.intp] = np.argpartition(values, len(values) - count)[len(values) - count :]
    return largest
