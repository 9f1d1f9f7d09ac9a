"""The tree of ``nn.Module`` calls: time on the host, device work, and their backward.

A module is known by its path of calls (``Net_0/Sequential_0/Linear_1``; the profiler numbers the instances of a class):
one that is called from two places has two.  All times include what is inside.  *Backward* is what autograd ran for the
forward operators of the module, found by their sequence numbers.  Traces of TorchScript have no calls of modules, but
operators with a ``Module Hierarchy``: there a call is an operator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.host.operators import OperatorTimes
from stepscope.traces.model.calls import padded
from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Ints
from stepscope.traces.model.nesting import sums
from stepscope.traces.model.table import Table
from stepscope.traces.model.window import Window

__all__ = ["Modules", "modules", "modules_of"]

PREFIX = "nn.Module: "
LIMIT = 1000
NUMBER = re.compile(r"_\d+$")
HIERARCHY = re.compile(r"([^.()]+)\(([^()]*)\)")
"""``SELF(Net)::forward.fc1(Linear)::forward``: name and class of each."""


@dataclass(frozen=True, kw_only=True)
class Modules:
    """Nodes of the tree, a parent before its children."""

    parent: list[int]
    name: list[str]
    kind: list[str]
    """The class."""
    calls: Ints
    host_ns: Ints
    of: NDArray[np.int32]
    """[slices]; of host rows the innermost module around it, that of the forward operator for autograd's; −1: none."""

    def path(self, node: int) -> str:
        names = []
        while node >= 0:
            names.append(self.name[node])
            node = self.parent[node]
        return "/".join(reversed(names))


class _Tree:
    def __init__(self) -> None:
        self.known: dict[tuple[int, str], int] = {}
        self.parent: list[int] = []
        self.name: list[str] = []
        self.kind: list[str] = []

    def node(self, parent: int, name: str, kind: str) -> int:
        at = self.known.setdefault((parent, name), len(self.parent))
        if at == len(self.parent):
            self.parent.append(parent)
            self.name.append(name)
            self.kind.append(kind)
        return at


def modules_of(window: Window, times: OperatorTimes) -> Modules | None:
    """None: the trace has no modules."""
    trace = window.trace
    pythons = window.rows_of((Kind.PYTHON,))
    named = trace.names_where(lambda name: name.startswith(PREFIX))
    rows = pythons[named[trace.slices.name[pythons]]]
    tree = _Tree()
    own = np.full(len(trace), -1, np.int32)
    if len(rows):
        mask = window.host.mask(rows)
        above = window.calls.holder(mask)[rows]
        node_of = {-1: -1}
        names = {code: trace.strings[code][len(PREFIX) :] for code in np.unique(trace.slices.name[rows]).tolist()}
        for row, holder, code in zip(rows.tolist(), above.tolist(), trace.slices.name[rows].tolist(), strict=True):
            name = names[code]
            node_of[row] = tree.node(node_of[holder], name, NUMBER.sub("", name))
        own[rows] = [node_of[row] for row in rows.tolist()]
        calls = np.bincount(own[rows], minlength=len(tree.parent))
        host_ns = sums(own[rows], trace.slices.dur_ns[rows], len(tree.parent))
    elif (trace.ops.module >= 0).any():
        calls, host_ns = _from_hierarchy(window, times, tree, own)
    else:
        return None
    of = padded(own)[window.calls.nearest(own >= 0)]
    of = np.where(window.host.forward_of >= 0, padded(of)[window.host.forward_of], of)
    return Modules(parent=tree.parent, name=tree.name, kind=tree.kind, calls=calls, host_ns=host_ns, of=of)


def _from_hierarchy(window: Window, times: OperatorTimes, tree: _Tree, own: NDArray[np.int32]) -> tuple[Ints, Ints]:
    """Fills ``own`` for operators; their self times, so that nothing counts twice."""
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
    return np.bincount(of[outer], minlength=count), _with_inner(host_ns, tree.parent)


def _with_inner(values: Ints, parent: list[int]) -> Ints:
    """Each node's with all inside."""
    out = values.tolist()
    for node in range(len(parent) - 1, -1, -1):
        if parent[node] >= 0:
            out[parent[node]] += out[node]
    return np.array(out, np.int64)


def modules(window: Window, times: OperatorTimes, found: Modules) -> Table:
    """In the order of the tree; of very many the heaviest, with all they are in."""
    count = len(found.parent)
    of, backward = found.of[times.rows], window.host.forward_of[times.rows] >= 0
    there = of >= 0

    def total(values: Ints, which: NDArray[np.bool_]) -> Ints:
        return _with_inner(sums(of[which], values[which], count), found.parent)

    device_ns = total(times.device_self_ns, there & ~backward)
    backward_device_ns = total(times.device_self_ns, there & backward)
    backward_host_ns = total(times.host_self_ns, there & backward)
    weight = device_ns + backward_device_ns if device_ns.any() else found.host_ns
    kept = set(np.argsort(-weight, kind="stable")[:LIMIT].tolist())
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(found.parent):
        children.setdefault(parent, []).append(node)
    rows: list[tuple[str | int, ...]] = []
    stack = [(node, 0, "") for node in reversed(children.get(-1, []))]
    while stack:
        node, depth, path = stack.pop()
        if node not in kept:
            continue
        path = f"{path}/{found.name[node]}" if path else found.name[node]
        times_ns = (found.host_ns[node], backward_host_ns[node], device_ns[node], backward_device_ns[node])
        rows.append((path, found.kind[node], depth, int(found.calls[node]), *(int(value) for value in times_ns)))
        stack += [(child, depth + 1, path) for child in reversed(children.get(node, []))]
    columns = ("module", "class", "depth", "calls", "host_ns", "backward_host_ns", "device_ns", "backward_device_ns")
    note = "Times include what is inside; backward is what autograd ran for the module's forward operators."
    return Table(
        name="modules", title="Modules", columns=columns, rows=tuple(rows), left_out=count - len(rows), note=note
    )
