"""Which slices are called what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.columns import Rows, Trace

__all__ = ["named"]


def named(trace: Trace, rows: Rows, matches: Callable[[str], Any]) -> NDArray[np.bool_]:
    """[rows]; whose name satisfies ``matches``; of row −1: no."""
    answers = np.append(trace.names_where(matches), False)
    return answers[np.where(rows >= 0, trace.slices.name[rows], -1)] if len(rows) else np.zeros(0, bool)
