"""What findings may claim of the time of a step: not what extra backward passes take, nor what earlier rules explain,
and not more than a step can be shortened by.

A rank that is late from step 40 on also makes every step longer from there on, and that is one cause, not two.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.communication import Arrivals
from stepscope.diagnosis.engine.view import LAUNCHING_PHASES, View
from stepscope.diagnosis.engine.window import model_bytes
from stepscope.judge import thresholds
from stepscope.judge.chain import Claim, unexplained
from stepscope.judge.statistics import mean_rank, shortest
from stepscope.records.steps import BUILTIN_PHASES, COMPUTE_PHASES

__all__ = [
    "averages_weights",
    "exchange_at_stake_ns",
    "least_step_ns",
    "longer_by_passes",
    "model_exchanges",
    "unexplained_steps",
]


# -- extra backward passes --------------------------------------------------------------------------------------------
# Some steps are longer by design because they have more backward passes than most: a GAN that steps its generator with
# every fifth batch, a regularization of every 16th step, a step that takes over the batches left from an epoch.  The
# time of the extra passes is not a slow step, not a change, and cannot be saved.  Time beyond that is still
# unexplained.

Floats = NDArray[np.float64]
PASS_PHASES = (*COMPUTE_PHASES, "comm")
"""Phases in which a pass of another model may take any time; all others grow only with the number of passes."""


def longer_by_passes(view: View) -> Floats:
    """[S]; by how much each step is longer because it has more backward passes or calls of the model, or averages."""
    longer = _longer_by_forwards(view) + _longer_by_averaging(view)
    counts = view.backwards
    usual = _usual_passes(counts)
    more = counts > usual
    if usual < 1 or not more.any():
        return longer
    inside = mean_rank(np.sum([view.phase(name) for name in PASS_PHASES], axis=0))
    parts = (inside, thresholds.PASS_AT_MOST), (view.step_ns - inside, 1.0)
    for count in np.unique(counts[more]):
        at = counts == count
        ratio = float(count / usual - 1)
        for took_ns, most in parts:
            usual_ns = float(np.median(took_ns[counts == usual]))
            if at.sum() >= thresholds.ALIKE_STEPS:
                longer[at] += np.clip(np.median(took_ns[at]) - usual_ns, 0.0, most * ratio * usual_ns)
            else:
                longer[at] += np.clip(took_ns[at] - usual_ns, 0.0, ratio * usual_ns)
    return np.minimum(longer, view.step_ns)


def _longer_by_forwards(view: View) -> Floats:
    """[S]; the same for calls of the model in steps with one backward pass: an episode of reinforcement learning."""
    counts, same = view.forwards, view.backwards <= _usual_passes(view.backwards)
    usual = float(np.median(counts)) if len(counts) else 0.0
    more = same & (counts > usual)
    if usual < 1 or not more.any():
        return np.zeros(len(view.steps))
    usual_ns = float(np.median(view.step_ns[~more]))
    most_ns = thresholds.FORWARD_AT_MOST * (counts / usual - 1) * usual_ns
    return np.where(more, np.clip(view.step_ns - usual_ns, 0.0, np.maximum(most_ns, 0.0)), 0.0)


def _longer_by_averaging(view: View) -> Floats:
    """[S]; the same for steps in which ranks that train alone otherwise wait for each other and average (Local SGD)."""
    longer = np.zeros(len(view.steps))
    exchanges = model_exchanges(view)
    if exchanges is None or not averages_weights(exchanges) or (view.clock == "host" and view.nccl):
        return longer
    averaging = exchanges[view.columns]
    if averaging.any() and not averaging.all():
        waited = mean_rank(view.phase("comm"))
        more = waited[averaging] - np.median(waited[~averaging])
        longer[averaging] = np.clip(more, 0.0, thresholds.AVERAGE_AT_MOST * max(float(np.median(more)), 0.0))
    return longer


def model_exchanges(view: View) -> NDArray[np.bool_] | None:
    """[S] of the window; the steps that exchange as many bytes as gradients or weights have; None: not known."""
    sizes = [model_bytes(view.window.facts[row]) for row in view.rows]
    if not sizes or not all(sizes):
        return None
    return np.asarray(view.window.exchanged_bytes >= thresholds.EXCHANGED_SHARE * max(sizes), np.bool_)


def averages_weights(exchanges: NDArray[np.bool_]) -> bool:
    """Whether the ranks train alone most of the time and average their weights now and then (Local SGD)."""
    count = int(exchanges.sum())
    return thresholds.AVERAGED_TIMES <= count <= thresholds.AVERAGED_STEPS_SHARE * len(exchanges)


def _usual_passes(counts: NDArray[np.int64]) -> int:
    """Backward passes of an ordinary step: the smallest count that more than a few steps have."""
    values, times = np.unique(counts, return_counts=True)
    often = values[times >= thresholds.USUAL_PASSES_SHARE * len(counts)]
    return int(often[0]) if len(often) else 0


# -- what is left ----------------------------------------------------------------------------------------------------


def unexplained_steps(view: View, claims: Iterable[Claim]) -> Floats:
    """[S]; the length of each step without what the claims explain and without extra backward passes."""
    return unexplained(view.step_ns - longer_by_passes(view), claims)


# -- shortest possible step -------------------------------------------------------------------------------------------
# How short a step can get, whatever one rank does: no finding may promise more.
#
# After a rank is fixed, a step waits for the next thing.  Three such limits are known:
#
# - what each phase takes on the rank where it takes least, waiting for the exchange included;
# - on NCCL, the exchange itself.  Part of it may be hidden behind the very time that would be saved: all of it stays,
#   and so do phases that cannot hide any, since no collective is called in them, or only after a part of them is done;
# - the host, which has to launch everything.  While its device is behind, it blocks in one phase or another, so its
#   time in most steps says little; but it hardly blocks in the same phase of all steps and ranks.  Outside of all
#   phases it may, at each ``.item()``.  A host that seems to need nearly all of the step may block in all phases (a
#   full launch queue, a model that waits for its device): then its pace is unknown.
#
# Only for views in which waiting was measured; elsewhere the phases of the waiting ranks contain it.


def least_step_ns(view: View, without: str = "") -> Floats:
    """[S] of the view; ``without`` a phase, if that is what would be saved on all ranks."""
    kept = [shortest(view.phase(name)) for name in view.phases if name != without]
    least = np.asarray(np.sum(kept, axis=0) if kept else np.zeros(len(view.steps)), np.float64)
    if view.clock == "device":
        least = np.maximum(least, _least_by_host(view, without))
        least = np.fmax(least, _least_by_exchange(view, without))
    return least


def _least_by_host(view: View, without: str = "") -> float:
    names = [name for name in LAUNCHING_PHASES if name in view.window.phases and name != without]
    places = [view.window.phases.index(name) for name in names]
    host_ns = view.window.phase_ns[places][:, view.rows][:, :, view.window.steady]
    if not host_ns.size:
        return 0.0
    pace_ns = float(np.nansum(np.nanmin(np.nanquantile(host_ns, thresholds.HOST_QUIET, axis=2), axis=1)))
    return pace_ns if pace_ns < thresholds.HOST_FREE_SHARE * float(view.step_ns.mean()) else 0.0


def _least_by_exchange(view: View, without: str = "") -> Floats:
    """[S]; nan if unknown."""
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
    # Collectives of one kind run one after the other; others may run in parallel, like FSDP's gathers and scatters.
    return np.asarray(np.max(took, axis=0) + stays_ns, np.float64)


# -- uncertain prices -------------------------------------------------------------------------------------------------
# When a late rank is in time, all ranks arrive together, and the exchange itself changes.  On NCCL a part of it may
# have been hidden behind the very time that is saved, and shows then: of what is hidden, as much as the excess takes of
# its phase.  On the host's clock (gloo), where parameters are exchanged within forward and backward (FSDP),
# a late rank finds the data of the others ready; together, the exchange may take up to twice as long as for that rank.
# DDP on the host exchanges at the end of backward, and recorded jobs gained what was promised.


def exchange_at_stake_ns(view: View, rank: int, phase: str | None, at: slice, gain_ns: float) -> float:
    """Per step: by how much the exchange may grow when a rank (a row) that is late in ``phase`` no longer is."""
    if not view.comm_measured or not view.lockstep:
        return 0.0
    exposed_ns = float(shortest(view.phase("comm"))[at].mean())
    if view.clock == "host":
        return exposed_ns if view.facts.get("fsdp") else 0.0
    exchanges = view.window.communication
    if exchanges is None or exchanges.measured is None:
        return 0.0
    if phase is not None and not _calls_by_phase(exchanges.arrivals).get(phase):
        return 0.0
    own_ns = float(np.nanmean((view.work_ns if phase is None else view.phase(phase))[rank, at]))
    took_ns = sum(flow.transfer_ns for flow in exchanges.flows if flow.device and len(flow.rows) > 1)
    hidden_ns = max(float(took_ns) - exposed_ns, 0.0)
    return hidden_ns * min(gain_ns / own_ns, 1.0) if own_ns > 0 else 0.0


def _calls_by_phase(arrivals: Arrivals) -> dict[str, float]:
    """Average number of collectives that a rank calls per step in each phase."""
    steps = len(np.unique(np.stack([arrivals.call_row, arrivals.call_place]), axis=1)[0])
    slots, counts = np.unique(arrivals.call_phase, return_counts=True)
    named = zip(slots.tolist(), counts.tolist(), strict=True)
    return {BUILTIN_PHASES[slot]: count / max(steps, 1) for slot, count in named if slot < len(BUILTIN_PHASES)}
