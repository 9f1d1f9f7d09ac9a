"""Who may be compared with whom: ranks that do as much work as each other.

The recorder says for each rank which ranks are its peers (``recorder/mesh.py``).
Where nobody says anything all ranks are peers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepscope.records.series import RankSeries

__all__ = ["peer_groups"]

RANKS_AT_MOST = 1 << 24
"""More ranks in a group than any job has: the numbers are of another hand."""


def peer_groups(ranks: Sequence[RankSeries]) -> NDArray[np.intp]:
    """[R]; equal numbers for peers, from 0 in the order of ranks; ranks that said nothing are one group."""
    known: dict[object, int] = {}
    named = [_named(series.facts.get("peers")) for series in ranks]
    return np.array([known.setdefault(name, len(known)) for name in named], np.intp)


def _named(peers: object) -> tuple[tuple[int, ...], ...] | None:
    """The group as it was told, as a key; None when it was not, or in a form that is not ours."""
    if not isinstance(peers, list) or not peers:
        return None
    runs = []
    for run in peers:
        if not isinstance(run, list) or len(run) != 3 or not all(isinstance(number, int) for number in run):
            return None
        if not 0 <= run[1] <= RANKS_AT_MOST:
            return None
        runs.append(tuple(run))
    return tuple(runs)
