"""Steps that have more to do than most: more backward passes, so they are longer by design.

A GAN whose generator is stepped with every fifth batch, a regularisation of every 16th step, a step that takes over the
batches that an epoch left: each has more passes than the usual step, and what these take is no slow step, no change and
nothing that could be saved.  What such a step takes beyond that is still unexplained.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.robust import mean_rank
from stepscope.diagnosis.view import View
from stepscope.records.phases import COMPUTE_PHASES

__all__ = ["longer_by_passes"]

Floats = NDArray[np.float64]
OF_A_PASS = (*COMPUTE_PHASES, "comm")
"""What a pass of another model may take any time in; all else grows only as the number of passes does."""


def longer_by_passes(view: View) -> Floats:
    """[S]; by how much each step is longer because it has more backward passes than an ordinary one."""
    longer: Floats = np.zeros(len(view.steps))
    counts = view.backwards
    usual = _usual_passes(counts)
    more = counts > usual
    if usual < 1 or not more.any():
        return longer
    inside = mean_rank(np.sum([view.phase(name) for name in OF_A_PASS], axis=0))
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


def _usual_passes(counts: NDArray[np.int64]) -> int:
    """How many backward passes an ordinary step has: the least that more than a few have."""
    values, times = np.unique(counts, return_counts=True)
    often = values[times >= thresholds.USUAL_PASSES_SHARE * len(counts)]
    return int(often[0]) if len(often) else 0
