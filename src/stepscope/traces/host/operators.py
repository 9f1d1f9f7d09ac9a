"""Operators: how often, how long on the host, how much device work they launched.

*Self*: while no operator inside was running.  Over all operators of a thread it adds up to the time that operators
cover there.  *Total*: with everything inside; a call inside of one of the same name counts once.  *Device self*: the
device work launched by calls directly inside; *device total*: by any descendant too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.calls import padded
from stepscope.traces.model.columns import Ints, Rows, Slices
from stepscope.traces.model.nesting import Groups, Nest, medians, nest_of, sums
from stepscope.traces.model.table import Table, table_of
from stepscope.traces.model.window import Window

__all__ = ["OperatorTimes", "operator_times", "operators", "operators_by_shape", "operators_by_source"]

COLUMNS = ("calls", "host_self_ns", "host_total_ns", "host_median_ns", "device_self_ns", "device_total_ns")


@dataclass(frozen=True, kw_only=True)
class OperatorTimes:
    """Columns over ``HostView.ops``."""

    nest: Nest
    host_self_ns: Ints
    device_self_ns: Ints

    @property
    def rows(self) -> Rows:
        return self.nest.rows


def operator_times(window: Window) -> OperatorTimes:
    slices = window.trace.slices
    nest = nest_of(window.calls, window.host.ops)
    work = window.device_rows
    owner = nest.around[window.owner[work]]
    owned = owner >= 0
    return OperatorTimes(
        nest=nest,
        host_self_ns=_self_ns(slices, nest),
        device_self_ns=sums(owner[owned], slices.dur_ns[work[owned]], len(nest.rows)),
    )


def _self_ns(slices: Slices, nest: Nest) -> Ints:
    rows, inner = nest.rows, nest.above >= 0
    out = slices.dur_ns[rows] - sums(nest.above[inner], slices.dur_ns[rows[inner]], len(rows))
    # Siblings that overlap cannot simply be taken away from who holds them, nor be added up.
    holder = np.where(inner, nest.above, -1 - slices.thread[rows])
    order = np.argsort(holder, kind="stable")
    siblings = holder[order][1:] == holder[order][:-1]
    clash = siblings & (slices.start_ns[rows[order]][1:] < slices.end_ns[rows[order]][:-1])
    for thread in np.unique(slices.thread[rows[order[1:][clash]]]):
        own = slices.thread[rows] == thread
        out[own] = _latest_started(slices.start_ns[rows[own]].tolist(), slices.end_ns[rows[own]].tolist())
    return out


def _latest_started(starts: list[int], ends: list[int]) -> list[int]:
    """Every instant goes to the one that started last of those that run."""
    out = [0] * len(starts)
    running: list[int] = []
    now = 0
    for at, start in enumerate([*starts, max(ends, default=0)]):
        while now < start:
            while running and ends[running[-1]] <= now:
                running.pop()
            if not running:
                break
            until = min(ends[running[-1]], start)
            out[running[-1]] += until - now
            now = until
        now = start
        running.append(at)
    return out


def operators(window: Window, times: OperatorTimes) -> Table:
    names = window.trace.slices.name[times.rows]
    codes, group = np.unique(names, return_inverse=True)
    labels = [(window.trace.strings[code],) for code in codes.tolist()]
    return _table("operators", "Operators", ("operator",), labels, _grouped(window, times, group, len(codes)))


def operators_by_shape(window: Window, times: OperatorTimes) -> Table | None:
    """None: the trace has no shapes."""
    trace = window.trace
    side = window.host.side[times.rows]
    dims, types = padded(trace.ops.dims)[side], padded(trace.ops.types)[side]
    if not (dims >= 0).any():
        return None
    count = len(trace.strings) + 1
    key = (trace.slices.name[times.rows] * np.int64(count) + dims + 1) * count + types + 1
    known, group = np.unique(key, return_inverse=True)
    labels = [
        (trace.strings[at // count // count], trace.text(at // count % count - 1), trace.text(at % count - 1))
        for at in known.tolist()
    ]
    named = ("operator", "input_dims", "input_types")
    return _table("operators_by_shape", "Operators by shape", named, labels, _grouped(window, times, group, len(known)))


def operators_by_source(window: Window, times: OperatorTimes) -> Table | None:
    """None: the trace has no stacks.  Self times only: they add up, whatever calls what."""
    sources = window.host.sources
    if not sources.texts:
        return None
    code = sources.code[times.rows]
    there, above = code >= 0, padded(code)[times.nest.above]
    count = len(sources.texts)
    calls = np.bincount(code[there & (above != code)], minlength=count)
    host_ns = sums(code[there], times.host_self_ns[there], count)
    device_ns = sums(code[there], times.device_self_ns[there], count)
    weights = times.device_self_ns if device_ns.any() else times.host_self_ns
    top = _heaviest(code, window.trace.slices.name[times.rows], weights)
    rows = [
        (sources.texts[at], calls[at], host_ns[at], device_ns[at], window.trace.text(top.get(at, -1)))
        for at in _order(host_ns, device_ns).tolist()
        if calls[at]
    ]
    linked = (window.host.forward_of[times.rows] >= 0).any()
    columns = ("source", "calls", "host_self_ns", "device_self_ns", "heaviest_operator")
    note = "Backward operators are counted at the line of their forward one." if linked else ""
    return table_of("operators_by_source", "Operators by source line", columns, rows, note=note)


def _heaviest(code: NDArray[np.int32], names: NDArray[np.int32], weights: Ints) -> dict[int, int]:
    """By source, the name with the largest sum."""
    span = int(names.max(initial=0)) + 1
    keys, group = np.unique(code.astype(np.int64) * span + names, return_inverse=True)
    order = np.argsort(sums(group, weights, len(keys)), kind="stable")
    return {int(keys[at] // span): int(keys[at] % span) for at in order.tolist()}


def _grouped(window: Window, times: OperatorTimes, groups: Groups, count: int) -> tuple[Ints, ...]:
    """``COLUMNS``, [count] each."""
    dur = window.trace.slices.dur_ns[times.rows]
    outermost = times.nest.outermost(groups)
    return (
        np.bincount(groups, minlength=count),
        sums(groups, times.host_self_ns, count),
        sums(groups[outermost], dur[outermost], count),
        medians(groups, dur, count),
        sums(groups, times.device_self_ns, count),
        times.nest.totals(groups, times.device_self_ns, count, outermost),
    )


def _order(host_ns: Ints, device_ns: Ints) -> NDArray[np.int64]:
    """The heaviest first: by device time where the trace has any."""
    return np.lexsort((-host_ns, -device_ns)) if device_ns.any() else np.argsort(-host_ns, kind="stable")


def _table(
    name: str, title: str, named: tuple[str, ...], labels: Sequence[tuple[str, ...]], columns: tuple[Ints, ...]
) -> Table:
    by = dict(zip(COLUMNS, columns, strict=True))
    order = _order(by["host_self_ns"], by["device_self_ns"])
    told = [labels[at] for at in order.tolist()]
    figures = zip(*(values[order].tolist() for values in columns), strict=True)
    rows = [(*label, *each) for label, each in zip(told, figures, strict=True)]
    return table_of(name, title, (*named, *COLUMNS), rows)
