"""Who may be compared with whom: ranks that have the same work to do.

The recorder says for each rank which ranks are its peers, where DDP or a device mesh says so (``recorder/mesh.py``).
Process groups say it as well: ranks of a data-, tensor-, context- or expert-parallel group are peers.  A group without
a name (``new_group``, as Megatron-style loops and DeepSpeed make them) counts as one if its ranks exchange collectives
in most steps and hold equally many parameters; the first and the last stage that share an embedding do not.

Where nobody says anything all ranks are peers, but for the stages of a pipeline.  That there is one is known by its
schedule on the stack, by the name of a group, or by ranks that send to each other in most steps and hold different
numbers of parameters (ranks of a ring, which send to each other too, hold the same).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.records.collectives import OPS, GroupKind, ProcessGroup
from stepscope.records.group_kinds import ALIKE, kind_of
from stepscope.records.series import RankSeries

__all__ = ["is_pipeline", "peer_groups", "share_samples", "splits_sequences"]

RANKS_AT_MOST = 1 << 24
"""More ranks in a group than any job has: the numbers are of another hand."""
ONE_MODEL: tuple[GroupKind, ...] = ("tensor", "context", "pipeline")
"""Groups whose ranks hold parts of one model and train on the same samples."""
SENT = tuple(OPS.index(op) for op in ("send", "recv"))
TOGETHER = tuple(OPS.index(op) for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))


def peer_groups(ranks: Sequence[RankSeries]) -> NDArray[np.intp]:
    """[R]; equal numbers for peers, from 0 in the order of ranks."""
    told = [_named(series.facts.get("peers")) for series in ranks]
    stages = is_pipeline(ranks)
    if not stages and len(set(told)) <= 1:
        return np.zeros(len(ranks), np.intp)
    joined = _Joined(len(ranks))
    first: dict[object, int] = {}
    for row, peers in enumerate(told):
        if peers is not None or not stages:
            joined.join(row, first.setdefault(peers, row))
    rows = {series.rank: row for row, series in enumerate(ranks)}
    for members in _of_process_groups(ranks, rows):
        for row in members[1:]:
            joined.join(members[0], row)
    known: dict[int, int] = {}
    return np.array([known.setdefault(joined.root(row), len(known)) for row in range(len(ranks))], np.intp)


def is_pipeline(ranks: Sequence[RankSeries]) -> bool:
    """Whether the ranks are stages of a pipeline: what one does, the next goes on with."""
    if any(series.facts.get("pipeline") is True or _has(series.facts.get("mesh"), ("pipeline",)) for series in ranks):
        return True
    if any(group.kind == "pipeline" and group.size > 1 for series in ranks for group in series.groups):
        return True
    held = {_parameters(series) for series in ranks}
    return len(held) > 1 and None not in held and all(_in_most_steps(series, SENT) for series in ranks)


def share_samples(ranks: Sequence[RankSeries]) -> bool:
    """Whether some ranks are to read the same samples, because they hold parts of one model."""
    return is_pipeline(ranks) or _any_has(ranks, ONE_MODEL)


def splits_sequences(ranks: Sequence[RankSeries]) -> bool:
    """Whether some ranks hold parts of one sequence."""
    return _any_has(ranks, ("context",))


def _any_has(ranks: Sequence[RankSeries], kinds: Sequence[GroupKind]) -> bool:
    """Whether a dimension of the mesh, or a process group, is of one of these kinds."""
    if any(_has(series.facts.get("mesh"), kinds) for series in ranks):
        return True
    return any(group.kind in kinds and group.size > 1 for series in ranks for group in series.groups)


class _Joined:
    """Sets of rows, joined two by two."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))

    def root(self, row: int) -> int:
        while self._above[row] != row:
            self._above[row] = row = self._above[self._above[row]]
        return row

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.root(one), self.root(other)))
        self._above[high] = low


def _of_process_groups(ranks: Sequence[RankSeries], rows: dict[int, int]) -> Iterator[list[int]]:
    """Rows of the ranks of each group whose ranks are peers, as far as they are there."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for series in ranks:
        for group in series.groups:
            key = (group.name, group.ranks)
            if len(group.ranks) < 2 or group.kind == "world" or key in seen:
                continue
            seen.add(key)
            members = [rows[rank] for rank in group.ranks if rank in rows]
            if group.kind in ALIKE or (
                group.kind == "other" and _do_the_same(series, group, [ranks[at] for at in members])
            ):
                yield members


def _do_the_same(series: RankSeries, group: ProcessGroup, members: Sequence[RankSeries]) -> bool:
    """Of a group that nobody gave a name."""
    held = {_parameters(one) for one in members}
    alike = len(held) == 1 and None not in held
    return alike and _in_most_steps(series, TOGETHER, group.slot) and not _in_most_steps(series, SENT, group.slot)


def _in_most_steps(series: RankSeries, ops: Sequence[int], slot: int | None = None) -> bool:
    """Whether a rank calls one of these operations in most of its steps, in the group of that slot or in any."""
    if series.comm is None or not len(series.comm) or not len(series.steps):
        return False
    rows = series.comm[np.isin(series.comm["op"], ops)]
    rows = rows if slot is None else rows[rows["group"] == slot]
    return len(np.unique(rows["step"])) >= thresholds.COMM_STEPS_SHARE * len(np.unique(series.comm["step"]))


def _parameters(series: RankSeries) -> int | None:
    model: Any = series.facts.get("model")
    held = model.get("parameters") if isinstance(model, dict) else None
    return held if isinstance(held, int) else None


def _has(mesh: Any, kinds: Sequence[GroupKind]) -> bool:
    """Whether a dimension of a device mesh is of one of these kinds."""
    names, shape = (mesh.get("names"), mesh.get("shape")) if isinstance(mesh, dict) else (None, None)
    if not isinstance(names, list) or not isinstance(shape, list):
        return False
    pairs = zip(names, shape, strict=False)
    return any(kind_of(str(name)) in kinds and isinstance(size, int) and size > 1 for name, size in pairs)


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
