"""Matched collectives as tables: by group and operation, by rank, and one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.columns import Ints
from stepscope.traces.model.table import Table, table_of
from stepscope.traces.ranks.exchange_names import OPS, bus_factor
from stepscope.traces.ranks.pairing import Pairs

if TYPE_CHECKING:
    from stepscope.traces.ranks.collectives import Split

__all__ = ["tables_of"]

LISTED = 200
KINDS = (
    *("group", "description", "op", "ranks", "count", "bytes", "total_ns", "wait_ns", "transfer_ns", "least_ns"),
    *("cost_ns", "algorithm_gbps", "bus_gbps", "last_rank", "last_count"),
)
RANKS = ("rank", "last_count", "last_share", "cost_ns", "alone_ns", "wait_ns", "transfer_ns", "wait_share")
EACH = (
    *("group", "op", "step", "sequence", "bytes", "ranks", "last_rank", "cost_ns", "alone_ns", "wait_ns"),
    *("transfer_ns", "algorithm_gbps", "arrived_ns"),
)


def tables_of(
    pairs: Pairs, split: Split, costs: dict[int, int], alone: dict[int, int], zero_ns: int
) -> tuple[Table, ...]:
    """``costs``, ``alone``: by rank."""
    return _by_kind(pairs, split), _by_rank(pairs, split, costs, alone), _each(pairs, split, zero_ns)


def _sums(keys: NDArray[Any], values: Ints, count: int) -> list[int]:
    out = np.zeros(count, np.int64)
    np.add.at(out, keys, values)
    return out.tolist()  # type: ignore[no-any-return]


def _by_kind(pairs: Pairs, split: Split) -> Table:
    wholes = np.flatnonzero(split.counts)
    key = pairs.group.astype(np.int64) * len(OPS) + pairs.op
    known, kind = np.unique(key[wholes], return_inverse=True)
    of_whole = np.full(len(pairs.first), -1, np.int64)
    of_whole[wholes] = kind
    parts = np.flatnonzero(of_whole[pairs.whole] >= 0)
    of_part = of_whole[pairs.whole[parts]]
    count = len(known)
    sized = pairs.bytes[wholes] >= 0
    columns = {
        "count": np.bincount(kind, minlength=count).tolist(),
        "bytes": _sums(kind[sized], pairs.bytes[wholes][sized], count),
        "sized": np.bincount(kind[sized], minlength=count).tolist(),
        "sized_ns": _sums(kind[sized], split.transfer_ns[wholes][sized], count),
        "total_ns": _sums(of_part, (pairs.end_ns - pairs.start_ns)[parts], count),
        "wait_ns": _sums(of_part, split.wait_ns[parts], count),
        "transfer_ns": _sums(kind, split.transfer_ns[wholes], count),
        "least_ns": _sums(kind, split.least_ns[wholes], count),
        "cost_ns": _sums(kind, split.cost_ns[wholes], count),
    }
    ranks = np.zeros(count, np.int64)
    np.maximum.at(ranks, kind, pairs.counts[wholes])
    last = dict(_most_often(kind, split.last[wholes]))
    rows: list[list[Any]] = []
    for at, code in enumerate(known.tolist()):
        group, op = pairs.groups[code // len(OPS)], code % len(OPS)
        own = {name: values[at] for name, values in columns.items()}
        rate = own["bytes"] / own["sized_ns"] if own["sized_ns"] and own["bytes"] else None
        bus = None if rate is None else rate * bus_factor(op, int(ranks[at]))
        place, times = last[at]
        rows.append(
            [
                *(group.name or None, group.description or None, OPS[op], int(ranks[at]), own["count"]),
                own["bytes"] if own["sized"] else None,
                *(own[name] for name in ("total_ns", "wait_ns", "transfer_ns", "least_ns", "cost_ns")),
                *(rate, bus, pairs.ranks[place], times),
            ]
        )
    rows.sort(key=lambda row: -row[KINDS.index("total_ns")])
    note = (
        "transfer: from the last rank's arrival until all were done; wait: of all ranks together, until the last came;"
        " least: the transfer by the shortest duration, which needs no clock; cost: the longest waits"
    )
    return table_of("collectives", "Collectives by group and operation", KINDS, rows, note=note)


def _most_often(kind: NDArray[Any], last: NDArray[np.int32]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Of every kind, who was last most often, and how often."""
    pairs, times = np.unique(np.stack([kind, last]), axis=1, return_counts=True)
    order = np.lexsort((-pairs[1], times))
    for at in order.tolist():
        yield int(pairs[0, at]), (int(pairs[1, at]), int(times[at]))


def _by_rank(pairs: Pairs, split: Split, costs: dict[int, int], alone: dict[int, int]) -> Table:
    count = len(pairs.ranks)
    parts, last = split.counts[pairs.whole], split.last[split.counts]
    part_of = np.bincount(pairs.rank[parts], minlength=count).tolist()
    columns = [
        np.bincount(last, minlength=count).tolist(),
        [costs[rank] for rank in pairs.ranks],
        [alone[rank] for rank in pairs.ranks],
        _sums(pairs.rank[parts], split.wait_ns[parts], count),
        _sums(pairs.rank[parts], split.own_transfer_ns[parts], count),
    ]
    rows: list[list[Any]] = []
    for place, (times, cost_ns, alone_ns, wait_ns, own_ns) in enumerate(zip(*columns, strict=True)):
        total_ns = wait_ns + own_ns
        share = times / part_of[place] if part_of[place] else None
        row = [pairs.ranks[place], times, share, cost_ns, alone_ns, wait_ns, own_ns]
        rows.append([*row, wait_ns / total_ns if total_ns else None])
    rows.sort(key=lambda row: (-row[RANKS.index("cost_ns")], -row[RANKS.index("last_count")], row[0]))
    note = (
        "last: in how many of its collectives the rank arrived last; cost: how long the first to come waited for it,"
        " instants that count once; alone: how much later it was than the last but one"
    )
    return table_of("stragglers", "Who was last", RANKS, rows if len(pairs.first) else (), note=note)


def _each(pairs: Pairs, split: Split, zero_ns: int) -> Table:
    wholes = np.flatnonzero(split.counts)
    order = wholes[np.argsort(-split.cost_ns[wholes], kind="stable")]
    waits = np.add.reduceat(split.wait_ns, pairs.first) if len(pairs.first) else split.wait_ns
    counts = pairs.counts
    rows: list[list[Any]] = []
    for at in order[:LISTED].tolist():
        size, transfer_ns = int(pairs.bytes[at]), int(split.transfer_ns[at])
        rate = size / transfer_ns if size > 0 and transfer_ns else None
        rows.append(
            [
                *(pairs.groups[pairs.group[at]].name or None, OPS[pairs.op[at]], _known(pairs.step[at])),
                *(_known(pairs.sequence[at]), _known(size), counts[at], pairs.ranks[split.last[at]]),
                *(split.cost_ns[at], split.alone_ns[at], waits[at], transfer_ns, rate, split.arrived_ns[at] - zero_ns),
            ]
        )
    table = table_of("collective_list", "Collectives, the longest waits first", EACH, rows)
    return Table(**{**vars(table), "left_out": len(order) - len(rows)})


def _known(value: Any) -> int | None:
    return int(value) if value >= 0 else None
