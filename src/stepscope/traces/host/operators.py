"""Operators, modules and annotations: calls, time on host and device, and the memory they allocated.

*Self*: while no nested operator was running. Over all operators of a thread, self times add up to the time that
operators cover there. *Total*: including everything nested; a call inside one of the same name counts once. *Device
self*: the device work launched by calls directly inside; *device total*: also by any descendant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.records.capture import BACKWARD_END, LAYER_LABEL
from stepscope.traces.host.stalls import regions_of
from stepscope.traces.model.columns import Ints, Kind, Rows, Slices
from stepscope.traces.model.tables import Table, distinct, table_of
from stepscope.traces.model.window import Groups, Nest, Window, innermost_at, medians, nest_of, padded, sums

__all__ = [
    "MemoryCurve",
    "Modules",
    "memory_of",
    "memory_peak_table",
    "memory_table",
    "modules_of",
    "modules_table",
    "operator_times",
    "operators_by_shape",
    "operators_by_source",
    "operators_table",
    "user_annotations",
    "with_inner",
]


# -- operators --------------------------------------------------------------------------------------------------------

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
    # Overlapping siblings can neither be subtracted from their parent nor added up.
    holder = np.where(inner, nest.above, -1 - slices.thread[rows])
    order = np.argsort(holder, kind="stable")
    siblings = holder[order][1:] == holder[order][:-1]
    clash = siblings & (slices.start_ns[rows[order]][1:] < slices.end_ns[rows[order]][:-1])
    for thread in np.unique(slices.thread[rows[order[1:][clash]]]):
        own = slices.thread[rows] == thread
        out[own] = _latest_started(slices.start_ns[rows[own]].tolist(), slices.end_ns[rows[own]].tolist())
    return out


def _latest_started(starts: list[int], ends: list[int]) -> list[int]:
    """Assign every instant to the running slice that started last."""
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


def operators_table(window: Window, times: OperatorTimes) -> Table:
    names = window.trace.slices.name[times.rows]
    codes, group = distinct(names)
    labels = [(window.trace.strings[code],) for code in codes.tolist()]
    return _table("operators", "Operators", ("operator",), labels, _grouped(window, times, group, len(codes)))


def operators_by_shape(window: Window, times: OperatorTimes) -> Table | None:
    """Group operators by shape; None if the trace has no shapes."""
    trace = window.trace
    side = window.host.side[times.rows]
    dims, types = padded(trace.ops.dims)[side], padded(trace.ops.types)[side]
    if not (dims >= 0).any():
        return None
    count = len(trace.strings) + 1
    key = (trace.slices.name[times.rows] * np.int64(count) + dims + 1) * count + types + 1
    known, group = distinct(key)
    labels = [
        (trace.strings[at // count // count], trace.text(at // count % count - 1), trace.text(at % count - 1))
        for at in known.tolist()
    ]
    named = ("operator", "input_dims", "input_types")
    return _table("operators_by_shape", "Operators by shape", named, labels, _grouped(window, times, group, len(known)))


def operators_by_source(window: Window, times: OperatorTimes) -> Table | None:
    """Group operators by source line; None if the trace has no stacks. Self times only, as these add up."""
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
    note = "Backward operators are counted at the line of their forward operator." if linked else ""
    return table_of("operators_by_source", "Operators by source line", columns, rows, note=note)


def _heaviest(code: NDArray[np.int32], names: NDArray[np.int32], weights: Ints) -> dict[int, int]:
    """Return the name with the largest sum for each source."""
    span = int(names.max(initial=0)) + 1
    keys, group = distinct(code.astype(np.int64) * span + names)
    order = np.argsort(sums(group, weights, len(keys)), kind="stable")
    return {int(keys[at] // span): int(keys[at] % span) for at in order.tolist()}


def _grouped(window: Window, times: OperatorTimes, groups: Groups, count: int) -> tuple[Ints, ...]:
    """Return ``COLUMNS``, [count] each."""
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
    """Return the order, heaviest first: by device time if the trace has any."""
    return np.lexsort((-host_ns, -device_ns)) if device_ns.any() else np.argsort(-host_ns, kind="stable")


def _table(
    name: str, title: str, named: tuple[str, ...], labels: Sequence[tuple[str, ...]], columns: tuple[Ints, ...]
) -> Table:
    by = dict(zip(COLUMNS, columns, strict=True))
    order = _order(by["host_self_ns"], by["device_self_ns"])
    chosen = [labels[at] for at in order.tolist()]
    figures = zip(*(values[order].tolist() for values in columns), strict=True)
    rows = [(*label, *each) for label, each in zip(chosen, figures, strict=True)]
    return table_of(name, title, (*named, *COLUMNS), rows)


# -- modules ----------------------------------------------------------------------------------------------------------
# The tree of ``nn.Module`` calls: time on the host, device work, and their backward.
#
# A module is identified by its path of calls (``Net_0/Sequential_0/Linear_1``; the profiler numbers the instances of a
# class), so one that is called from two places has two nodes. All times include nested calls. A region that
# ``torch.compile`` made is a node, too: the modules in it leave no calls. Without ``with_stack``, a trace has no module
# calls either; the labels of sampled layers (``stepscope.layer decoder.0``) take their place. TorchScript traces have
# operators with a ``Module Hierarchy``; there, each call is an operator.
#
# *Backward* is what autograd ran for the module's forward operators, found by their sequence numbers: exactly what the
# arrows in the trace link. It includes the calls that activation checkpointing repeats inside autograd's operators;
# each belongs to the module that it repeats, which was called next to a module around the forward operator. What has no
# sequence number belongs to no module: ``AccumulateGrad``, and the hooks in it (DDP's buckets).

PREFIX = "nn.Module: "
LIMIT = 1000
NUMBER = re.compile(r"_\d+$")
HIERARCHY = re.compile(r"([^.()]+)\(([^()]*)\)")
"""``SELF(Net)::forward.fc1(Linear)::forward``: name and class of each."""
COMPILED_REGION, LABELED = "compiled region", "layer"
"""In place of the class, where the trace does not have it."""


@dataclass(frozen=True, kw_only=True)
class Modules:
    """Nodes of the tree, parents before children."""

    parent: list[int]
    name: list[str]
    kind: list[str]
    """The class."""
    full_name: list[str]
    """The name, but of a label with what is around it: ``layers.0.mlp``."""
    calls: Ints
    """Without those that are repeated in backward, as in ``host_ns``."""
    host_ns: Ints
    backward_host_ns: Ints
    of: NDArray[np.int32]
    """[slices]; the innermost module around a host row, for autograd's that of the forward operator; −1: none."""
    backward: NDArray[np.bool_]
    """[slices]; rows that belong to the module's backward."""

    def path(self, node: int) -> str:
        return "/".join(self.name[at] for at in self.line(node))

    def line(self, node: int) -> list[int]:
        """Return the nodes from the outermost to this one."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]


class _Tree:
    def __init__(self) -> None:
        self.known: dict[tuple[int, str], int] = {}
        self.parent: list[int] = []
        self.name: list[str] = []
        self.kind: list[str] = []
        self.full_name: list[str] = []
        self.by_full_name: dict[str, int] = {}

    def node(self, parent: int, name: str, kind: str, full_name: str = "") -> int:
        at = self.known.setdefault((parent, name), len(self.parent))
        if at == len(self.parent):
            self.parent.append(parent)
            self.name.append(name)
            self.kind.append(kind)
            self.full_name.append(full_name or name)
            self.by_full_name.setdefault(full_name or name, at)
        return at

    def child_nearby(self, node: int, name: str) -> int | None:
        """Return the child with this name of a node or of one around it, the innermost; None: there is none."""
        while node >= 0 and (node, name) not in self.known:
            node = self.parent[node]
        return self.known.get((node, name))


def modules_of(window: Window, times: OperatorTimes) -> Modules | None:
    """Build the tree; None if the trace has no modules."""
    trace, host = window.trace, window.host
    tree = _Tree()
    own = np.full(len(trace), -1, np.int32)
    rows = _module_rows(window)
    repeated: Rows = rows[:0]
    if not len(rows) and (trace.ops.module >= 0).any():
        calls, host_ns = _from_hierarchy(window, times, tree, own)
    else:
        rows = np.sort(np.concatenate([rows, regions_of(window)]))
        if not len(rows):
            return None
        repeated = _from_calls(window, rows, tree, own)
        once = rows[~host.mask(repeated)[rows]]
        calls = np.bincount(own[once], minlength=len(tree.parent))
        host_ns = sums(own[once], trace.slices.dur_ns[once], len(tree.parent))
    of = _innermost(window, own)
    # The outermost of backward's rows, and in them the repeated calls: without each other, they add up.
    beginnings = nest_of(window.calls, np.flatnonzero((host.created_by >= 0) | host.mask(repeated)).astype(np.int32))
    owners = of[beginnings.rows]
    own_ns = sums(owners[owners >= 0], _self_ns(trace.slices, beginnings)[owners >= 0], len(tree.parent))
    return Modules(
        parent=tree.parent,
        name=tree.name,
        kind=tree.kind,
        full_name=tree.full_name,
        calls=calls,
        host_ns=host_ns,
        backward_host_ns=with_inner(own_ns, tree.parent),
        of=of,
        backward=beginnings.around[:-1] >= 0,
    )


def _module_rows(window: Window) -> Rows:
    """Return the calls of modules or, if there are none, the labels of layers."""
    trace = window.trace
    pythons = window.rows_of((Kind.PYTHON,))
    calls = pythons[trace.names_where(_is_module)[trace.slices.name[pythons]]]
    if len(calls):
        return calls
    marked = window.host.annotations
    return marked[trace.names_where(_is_layer_label)[trace.slices.name[marked]]]


def _is_module(name: str) -> bool:
    return name.startswith(PREFIX)


def _is_layer_label(name: str) -> bool:
    return name.startswith(LAYER_LABEL)


def _is_backward_label(name: str) -> bool:
    return _is_layer_label(name) and name.endswith(BACKWARD_END)


def _from_calls(window: Window, rows: Rows, tree: _Tree, own: NDArray[np.int32]) -> Rows:
    """Fill ``own`` for calls, labels and regions; return those that belong to backward."""
    host, slices, strings = window.host, window.trace.slices, window.trace.strings
    # Labels of backward, and what is in them, after those of forward: a recording may begin in backward.
    labels = rows[window.trace.names_where(_is_backward_label)[slices.name[rows]]]
    late = window.calls.nearest(host.mask(labels))[rows] >= 0
    rows = np.concatenate([rows[~late], rows[late]])
    mask = host.mask(rows)
    nearest, holder = window.calls.nearest(mask), window.calls.holder(mask)[rows]
    depth = padded(window.calls.depth)
    engine = host.backward_op[rows]
    in_engine = (engine >= 0) & (depth[engine] > np.where(holder >= 0, depth[holder], -1))
    around = padded(nearest)[padded(host.created_by)[engine]]
    repeated = []
    in_backward = {-1: False}
    columns = (rows, slices.name[rows], holder, in_engine, around)
    for row, code, above, apart, forward in zip(*(column.tolist() for column in columns), strict=True):
        name, kind = _named_module(strings[code])
        labeled = kind == LABELED and name.endswith(BACKWARD_END)
        in_backward[row] = apart or labeled or in_backward[above]
        if in_backward[row]:
            repeated.append(row)
        if labeled:
            own[row] = _labeled_node(tree, name.removesuffix(BACKWARD_END))
            continue
        parent, full_name = (-1 if above < 0 else int(own[above])), name
        if apart:
            known = tree.child_nearby(-1 if forward < 0 else int(own[forward]), name)
            if known is not None:
                own[row] = known
                continue
            parent = -1
        elif kind == LABELED and parent >= 0:
            name = name.removeprefix(f"{tree.full_name[parent]}.")
        own[row] = tree.node(parent, name, kind, full_name)
    return np.array(repeated, np.int32)


def _labeled_node(tree: _Tree, full_name: str) -> int:
    """Return the node of a label in forward, or a new one."""
    known = tree.by_full_name.get(full_name)
    return tree.node(-1, full_name, LABELED) if known is None else known


def _named_module(name: str) -> tuple[str, str]:
    """Return name and class."""
    if name.startswith(PREFIX):
        name = name.removeprefix(PREFIX)
        return name, NUMBER.sub("", name)
    if name.startswith(LAYER_LABEL):
        return name.removeprefix(LAYER_LABEL), LABELED
    return name, COMPILED_REGION


def _innermost(window: Window, own: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return ``Modules.of``: the nearest around a row decides, a module or an operator of autograd (by its forward)."""
    created_by = window.host.created_by
    nearest = padded(window.calls.nearest((own >= 0) | (created_by >= 0)))
    known = padded(own)
    at = nearest[:-1]
    # In a second backward the forward operator is itself autograd's. Each is earlier than the next: this ends.
    left = np.flatnonzero((at >= 0) & (known[at] < 0))
    while len(left):
        at[left] = nearest[created_by[at[left]]]
        left = left[(at[left] >= 0) & (known[at[left]] < 0)]
    return known[at]


def _from_hierarchy(window: Window, times: OperatorTimes, tree: _Tree, own: NDArray[np.int32]) -> tuple[Ints, Ints]:
    """Fill ``own`` for operators; return calls and times from self times, so that nothing counts twice."""
    side = window.host.side[times.rows]
    codes = padded(window.trace.ops.module)[side]
    nodes = np.full(len(window.trace.strings) + 1, -1, np.int32)
    for code in np.unique(codes[codes >= 0]).tolist():
        text, node = window.trace.strings[code], -1
        found = HIERARCHY.findall(text) or [(part, "") for part in text.split(".") if part]
        for name, kind in found:
            node = tree.node(node, name, kind)
        nodes[code] = node
    of = nodes[codes]
    there = of >= 0
    own[times.rows[there]] = of[there]
    count = len(tree.parent)
    outer = there & (padded(of)[times.nest.above] != of)
    host_ns = sums(of[there], times.host_self_ns[there], count)
    return np.bincount(of[outer], minlength=count), with_inner(host_ns, tree.parent)


def with_inner(values: Ints, parent: list[int]) -> Ints:
    """Add to each node's value those of all its descendants."""
    out = values.tolist()
    for node in range(len(parent) - 1, -1, -1):
        if parent[node] >= 0:
            out[parent[node]] += out[node]
    return np.array(out, np.int64)


def modules_table(window: Window, times: OperatorTimes, found: Modules) -> Table:
    """List the modules in tree order; of very many, the heaviest and their ancestors."""
    count = len(found.parent)
    of, backward = found.of[times.rows], found.backward[times.rows]
    there = of >= 0

    def total(values: Ints, which: NDArray[np.bool_]) -> Ints:
        return with_inner(sums(of[which], values[which], count), found.parent)

    device_ns = total(times.device_self_ns, there & ~backward)
    backward_device_ns = total(times.device_self_ns, there & backward)
    weight = device_ns + backward_device_ns if device_ns.any() else found.host_ns
    shown = set(np.argsort(-weight, kind="stable")[:LIMIT].tolist())
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(found.parent):
        children.setdefault(parent, []).append(node)
    rows: list[tuple[str | int, ...]] = []
    stack = [(node, 0, "") for node in reversed(children.get(-1, []))]
    while stack:
        node, depth, path = stack.pop()
        if node not in shown:
            continue
        path = f"{path}/{found.name[node]}" if path else found.name[node]
        times_ns = (found.host_ns[node], found.backward_host_ns[node], device_ns[node], backward_device_ns[node])
        rows.append((path, found.kind[node], depth, int(found.calls[node]), *(int(value) for value in times_ns)))
        stack += [(child, depth + 1, path) for child in reversed(children.get(node, []))]
    columns = ("module", "class", "depth", "calls", "host_ns", "backward_host_ns", "device_ns", "backward_device_ns")
    note = (
        "Times include nested calls; backward is what autograd ran for the module's forward operators, with what"
        " activation checkpointing repeated."
    )
    return Table(
        name="modules", title="Modules", columns=columns, rows=tuple(rows), left_out=count - len(rows), note=note
    )


# -- annotations ------------------------------------------------------------------------------------------------------
# Ranges that users (or libraries) marked with ``record_function`` or NVTX: phases of a step.
#
# *Device*: the work launched inside, on the same thread or by autograd's threads at the same time, as backward runs
# there while the caller waits. It counts for each range around the launch, once per name. *Device span*: from the first
# start to the last end of that work, over the calls.

INTERNAL = re.compile(r"^ProfilerStep|^PyTorch Profiler|_data: .*\bcompile_id=")
"""Steps are not phases; the last alternative matches the compiler's notes on its own phases."""


def user_annotations(window: Window) -> Table | None:
    """Build the table; None without annotations."""
    trace, slices = window.trace, window.trace.slices
    internal = trace.names_where(INTERNAL.search)
    rows = window.host.annotations
    rows = rows[~internal[slices.name[rows]]]
    if not len(rows):
        return None
    nest = nest_of(window.calls, rows)
    codes, group = distinct(slices.name[rows])
    count = len(codes)
    outermost = nest.outermost(group)
    work, holder = _launched_inside(window, nest)
    device = sums(holder, slices.dur_ns[work], len(rows))
    device_ns = nest.totals(group, device, count, outermost)
    host_ns = sums(group[outermost], slices.dur_ns[rows[outermost]], count)
    span_ns = sums(group[outermost], _spans(nest, holder, slices.start_ns[work], slices.end_ns[work])[outermost], count)
    calls, median_ns = np.bincount(group, minlength=count), medians(group, slices.dur_ns[rows], count)
    order = np.lexsort((-host_ns, -device_ns)) if device_ns.any() else np.argsort(-host_ns, kind="stable")
    found = [
        (trace.strings[codes[at]], calls[at], host_ns[at], median_ns[at], device_ns[at], span_ns[at])
        for at in order.tolist()
    ]
    columns = ("annotation", "calls", "host_ns", "host_median_ns", "device_ns", "device_span_ns")
    return table_of("annotations", "User annotations", columns, found)


def _launched_inside(window: Window, nest: Nest) -> tuple[Rows, NDArray[np.int32]]:
    """Return device rows, and for each the innermost annotation (index into ``nest.rows``) it was launched in."""
    slices, work = window.trace.slices, window.device_rows
    anchor = np.where(window.launch[work] >= 0, window.launch[work], window.owner[work])
    work, anchor = work[anchor >= 0], anchor[anchor >= 0]
    main = window.host.main_thread
    apart = np.isin(slices.thread[anchor], window.host.autograd_threads)
    there = np.full(int(apart.sum()), main, np.int32)
    meanwhile = innermost_at(window.trace, window.calls, window.host_rows, there, slices.start_ns[anchor[apart]])
    work = np.concatenate([work, work[apart]])
    holder = np.concatenate([nest.around[anchor], nest.around[meanwhile]])
    return work[holder >= 0], holder[holder >= 0]


def _spans(nest: Nest, holder: NDArray[np.int32], start_ns: Ints, end_ns: Ints) -> Ints:
    """Return the span of the work launched in each row or a nested one, [rows]."""
    first = np.full(len(nest.rows), np.iinfo(np.int64).max)
    last = np.full(len(nest.rows), np.iinfo(np.int64).min)
    while len(holder):
        np.minimum.at(first, holder, start_ns)
        np.maximum.at(last, holder, end_ns)
        up = nest.above[holder]
        inner = up >= 0
        holder, start_ns, end_ns = up[inner], start_ns[inner], end_ns[inner]
    return np.where(last > first, last - np.minimum(first, last), 0)


# -- memory -----------------------------------------------------------------------------------------------------------
# Memory of the device over time, and what it was allocated for at the peak.
#
# *Allocated* is what tensors use, *reserved* what the caching allocator holds; the difference is cached or fragmented.
# The device with the most events is shown; host memory only if there is no other.
#
# What was alive at the peak is known if the trace has addresses: a block is alive if the last event of its address was
# an allocation. It is attributed to the innermost operator that ran on the thread at that instant. Without addresses,
# the net growth up to the peak is attributed instead. Memory allocated before the trace is a separate row.

POINTS = 500
BEFORE = "(before the trace)"
OUTSIDE = "(outside operators)"


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Memory of one device; columns by time."""

    device_type: int
    device: int
    at: NDArray[np.int64]
    """Index into ``Trace.memory``."""
    allocated: Ints
    reserved: Ints
    absolute: bool
    """Otherwise ``allocated`` counts from the start of the trace, and ``reserved`` is unknown (all −1)."""
    peak: int
    """Index of the first instant with the most allocated."""

    @property
    def name(self) -> str:
        return "host" if self.device_type == 0 else f"device {self.device}"


def memory_of(window: Window) -> MemoryCurve | None:
    """Return the curve of the part of the trace that counts; None without memory events."""
    memory = window.trace.memory
    counts = np.ones(len(memory.time_ns), bool)
    if window.left_out is not None:
        counts = memory.time_ns < window.left_out.start_ns
    if not counts.any():
        return None
    key = memory.device_type.astype(np.int64) * 65536 + memory.device
    on_device = counts & (memory.device_type > 0)
    used, sizes = np.unique(key[on_device if on_device.any() else counts], return_counts=True)
    at = np.flatnonzero(counts & (key == used[sizes.argmax()]))
    absolute = bool((memory.allocated[at] >= 0).all())
    allocated = memory.allocated[at] if absolute else np.cumsum(memory.bytes[at])
    return MemoryCurve(
        device_type=int(memory.device_type[at[0]]),
        device=int(memory.device[at[0]]),
        at=at,
        allocated=allocated,
        reserved=memory.reserved[at] if absolute else np.full(len(at), -1),
        absolute=absolute,
        peak=int(allocated.argmax()),
    )


def memory_table(window: Window, curve: MemoryCurve) -> Table:
    """List at most ``POINTS`` instants: the lowest and highest of each interval, so the peak is included."""
    count = len(curve.at)
    shown = np.arange(count)
    if count > POINTS:
        edges = np.linspace(0, count, POINTS // 2).astype(np.int64)[:-1]
        stretch = np.repeat(np.arange(len(edges)), np.diff(np.append(edges, count)))
        order = np.lexsort((np.arange(count), curve.allocated, stretch))
        # The first instant with the lowest value of each interval, and the first with the highest.
        falling = np.lexsort((np.arange(count), -curve.allocated, stretch))
        shown = np.unique(np.concatenate([order[edges], falling[edges], [0, count - 1]]))
    time_ns = window.trace.memory.time_ns[curve.at[shown]]
    reserved = [None if value < 0 else value for value in curve.reserved[shown].tolist()]
    rows = zip(time_ns.tolist(), curve.allocated[shown].tolist(), reserved, strict=True)
    base = "" if curve.absolute else " The trace does not say how much was allocated before it: counted from its start."
    note = f"Of {curve.name}; times from the trace's first event.{base}"
    return table_of("memory", "Memory", ("time_ns", "allocated_bytes", "reserved_bytes"), rows, note=note)


def memory_peak_table(window: Window, curve: MemoryCurve, modules: Modules | None) -> Table:
    memory, trace, sources = window.trace.memory, window.trace, window.host.sources
    until = curve.at[: curve.peak + 1]
    addressed = bool((memory.address[until] >= 0).all())
    alive = _alive(memory.address[until], memory.bytes[until]) if addressed else np.arange(len(until))
    at = until[alive]
    running = innermost_at(trace, window.calls, window.host_rows, memory.thread[at], memory.time_ns[at])
    operator = np.where(window.host.is_op[running], running, padded(window.host.op_holder)[running])
    name = padded(trace.slices.name)[operator]
    source = padded(sources.code)[running]
    module = padded(modules.of)[running] if modules is not None else np.full(len(at), -1)
    keys = np.stack([name, module, source], axis=1)
    groups, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    sizes, blocks = sums(inverse, memory.bytes[at], len(groups)), np.bincount(inverse, minlength=len(groups))
    peak = int(curve.allocated[curve.peak])
    rows = [
        (
            trace.strings[op] if op >= 0 else OUTSIDE,
            modules.path(node) if modules is not None and node >= 0 else None,
            sources.texts[line] if line >= 0 else None,
            int(size),
            int(count),
            int(size) / peak if peak > 0 else None,
        )
        for (op, node, line), size, count in zip(groups.tolist(), sizes, blocks, strict=True)
        if size > 0
    ]
    rest = peak - int(sizes.sum())
    if rest > 0 and addressed and curve.absolute:
        rows.append((BEFORE, None, None, rest, 0, rest / peak))
    rows.sort(key=lambda row: -row[3])
    note = (
        f"What was alive on {curve.name} at the peak."
        if addressed
        else f"The trace has no addresses: this is net growth on {curve.name} up to the peak."
    )
    columns = ("operator", "module", "source", "alive_bytes", "blocks", "peak_share")
    return table_of("memory_peak", "Memory at the peak", columns, rows, limit=200, note=note)


def _alive(address: Ints, size: Ints) -> NDArray[np.int64]:
    """Return the events that allocated blocks which were not freed afterwards."""
    order = np.lexsort((np.arange(len(address)), address))
    last = np.append(address[order][1:] != address[order][:-1], True)
    ends = order[last]
    return np.sort(ends[size[ends] > 0])
