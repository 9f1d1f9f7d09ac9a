"""Which slices are called what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.columns import Rows, Trace

__all__ = ["named"]


def named(trace: Trace, rows: Rows, matches: Callable[[str], Any]) -> NDArray[np.bool_]:
    """[rows]; whose name satisfies ``matches``, which is asked once per name that these rows have; of row −1: no.

    Strings of a trace may be many (shapes, stacks) and long (kernels), names of few kinds of rows are neither.
    """
    codes = np.where(rows >= 0, trace.slices.name[rows], len(trace.strings)) if len(rows) else rows
    used = np.flatnonzero(np.bincount(codes, minlength=1))
    table = np.zeros(len(trace.strings) + 1, bool)
    table[used] = [code < len(trace.strings) and bool(matches(trace.strings[code])) for code in used.tolist()]
    return table[codes]
