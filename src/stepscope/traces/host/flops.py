"""Floating-point operations by operator, what the device made of them, and the share of what it could (MFU).

Only the innermost operators with a formula count: ``aten::linear`` is ``aten::addmm``.  The utilisation is the time the
work would take at the device's peak for its type of number, over the length of the steps.  Where an operator that does
such work lacks its shapes or settings, or the device is not known, there is no sum and no utilisation.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np

from stepscope.traces.host.device_peaks import peak_of
from stepscope.traces.host.flop_formulas import FORMULAS, flops_of
from stepscope.traces.model.calls import padded
from stepscope.traces.model.columns import Ints, Rows
from stepscope.traces.model.nesting import nest_of, sums
from stepscope.traces.model.table import Table, table_of
from stepscope.traces.model.window import Window

__all__ = ["Flops", "flops", "flops_found"]

TF32 = re.compile(r"tf32|_s1688|xmma.*f32f32_f32f32.*tensor", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Columns over the operators that count, within steps."""

    rows: Rows
    flops: Ints
    device_ns: Ints
    host_ns: Ints
    unknown: int
    """Operators of the same sorts about which too little is known."""
    total: int | None
    mfu: float | None


def flops_found(window: Window) -> Flops:
    trace, slices, host = window.trace, window.trace.slices, window.host
    wanted = host.ops[trace.names_where(FORMULAS.__contains__)[slices.name[host.ops]]]
    wanted = wanted[window.step_of[wanted] >= 0]
    worth = _worth(window, wanted)
    # The innermost with a formula: not those that hold another that could be counted.
    countable = nest_of(window.calls, wanted[worth >= 0])
    holds = np.zeros(len(countable.rows), bool)
    holds[countable.above[countable.above >= 0]] = True
    rows, values = countable.rows[~holds], worth[worth >= 0][~holds]
    nest = nest_of(window.calls, rows)
    work = window.device_rows
    owner = nest.around[window.owner[work]]
    owned = owner >= 0
    device_ns = sums(owner[owned], slices.dur_ns[work[owned]], len(rows))
    missed = wanted[worth < 0]
    covered = (countable.around[missed] >= 0) | _holds_any(window, missed, rows)
    unknown = int((~covered).sum())
    total = int(values.sum()) if len(rows) and not unknown else None
    return Flops(
        rows=rows,
        flops=values,
        device_ns=device_ns,
        host_ns=slices.dur_ns[rows],
        unknown=unknown,
        total=total,
        mfu=_utilisation(window, rows, values) if total and len(work) else None,
    )


def _worth(window: Window, wanted: Rows) -> Ints:
    """[wanted]; −1: not known; each combination of name, shapes and settings is worked out once."""
    trace, side = window.trace, window.host.side[wanted]
    columns = (trace.slices.name[wanted], padded(trace.ops.dims)[side], padded(trace.ops.concrete)[side])
    if not len(wanted):
        return np.empty(0, np.int64)
    keys, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    found = [flops_of(trace.text(name), trace.text(dims), trace.text(more)) for name, dims, more in keys.tolist()]
    return np.array([-1 if each is None else each for each in found], np.int64)[inverse.reshape(-1)]


def _holds_any(window: Window, outer: Rows, inner: Rows) -> np.ndarray:
    """[outer]; whether one of ``inner`` is inside."""
    nest = nest_of(window.calls, outer)
    held = np.zeros(len(outer), bool)
    at = nest.around[inner]
    while (at >= 0).any():
        held[at[at >= 0]] = True
        at = padded(nest.above)[at]
    return held


def _utilisation(window: Window, rows: Rows, values: Ints) -> float | None:
    trace = window.trace
    device = np.bincount(np.maximum(trace.slices.device[window.device_rows], 0)).argmax()
    names = [each.get("name") for each in trace.meta.devices if each.get("id", device) == device]
    peak = peak_of(names[0] if names else None)
    steps_ns = sum(step.end_ns - step.start_ns for step in window.steps)
    if peak is None or not steps_ns:
        return None
    used = np.unique(trace.slices.name[window.device_rows])
    tf32 = any(TF32.search(trace.strings[code]) for code in used.tolist())
    types = padded(trace.ops.types)[window.host.side[rows]]
    codes, group = np.unique(types, return_inverse=True)
    needed_ns = 0.0
    for code, count in zip(codes.tolist(), sums(group, values, len(codes)).tolist(), strict=True):
        tflops = peak.tflops(_number(trace.text(code)), tf32=tf32)
        if tflops is None:
            return None
        needed_ns += count / tflops / 1000
    return needed_ns / steps_ns


def _number(types: str) -> str:
    """The type of number the product is made in: that of the last of the first three inputs that is a tensor's."""
    try:
        known = [each for each in json.loads(types or "[]")[:3] if isinstance(each, str)]
    except ValueError:
        return ""
    return next((each for each in reversed(known) if each == "float" or each.startswith("c10::")), "")


def flops(window: Window, found: Flops) -> Table | None:
    """None: the trace has no shapes."""
    if not len(found.rows):
        return None
    trace = window.trace
    codes, group = np.unique(trace.slices.name[found.rows], return_inverse=True)
    count = len(codes)
    calls = np.bincount(group, minlength=count)
    work, device_ns = sums(group, found.flops, count), sums(group, found.device_ns, count)
    host_ns = sums(group, found.host_ns, count)
    spent_ns = device_ns if device_ns.any() else host_ns
    rows = [
        (
            trace.strings[codes[at]],
            calls[at],
            work[at],
            spent_ns[at],
            work[at] / spent_ns[at] / 1000 if spent_ns[at] else None,
        )
        for at in np.argsort(-work, kind="stable").tolist()
    ]
    notes = ["Time of the device." if device_ns.any() else "Time of the host: the trace has no device work."]
    if found.unknown:
        notes.append(f"{found.unknown} calls of such operators lack shapes or settings and are not counted.")
    columns = ("operator", "calls", "work_flops", "time_ns", "achieved_tflops")
    return table_of("flops", "Floating-point operations", columns, rows, note=" ".join(notes))
