"""How long a rank works in a step, by operator, kernel and line of code, and how long it waits: a window → RankTimes.

*Work* is what the rank does itself.  *Waiting* is left out everywhere: inside collectives, in Python or in autograd's
engine while a collective is active and nothing else runs, in calls that wait for the device, and in kernels of
collectives.  A rank that computes longer makes the others wait, so their steps are equally long; only their work
differs.

An operator's or function's work includes everything inside it.  The host's main thread and autograd's threads count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.collective_calls import Exchanges
from stepscope.traces.host.operators import COMPILED_REGION, LABELED, Modules, modules_of, operator_times, with_inner
from stepscope.traces.host.stalls import loader_rows, sync_rows
from stepscope.traces.model import intervals
from stepscope.traces.model.columns import Ints, Kind, Numbering, Rows
from stepscope.traces.model.kernel_names import is_communication, short_name
from stepscope.traces.model.window import Nest, Window, is_user_frame, nest_of, padded, sums

__all__ = ["Piece", "RankTimes", "rank_times_of"]

MOST_PIECES: Final = 4000
"""Of a rank, the longest; the rest cannot explain a difference that anyone would look at."""
LABEL: Final = re.compile(r"^stepscope\.(?!step \d|layer )(?P<phase>[\w.-]+)")
OPTIMIZER: Final = re.compile(r"^Optimizer\.(step|zero_grad)#")
EXCHANGE: Final = re.compile(r"^(c10d|_c10d_functional|c10d_functional|nccl|gloo|mpi|ucc)::?|^record_param_comms$")
WAITING: Final = re.compile(
    r"run_backward|\b(wait|barrier|synchronize|monitored_barrier)\b|(^|/)torch/distributed/|_broadcast_coalesced"
)
"""Python functions that may wait for a collective."""
BUILT_IN: Final = "<built-in "
MODULE: Final = "nn.Module: "
ENGINE: Final = "autograd::engine::"
FRAME: Final = re.compile(r"^(?P<path>.+)\((?P<line>\d+)\): (?P<function>.+)$")
OPEN_FRAME: Final = re.compile(r"^.+ \((?P<function>[^()]+)\)$")
BACKWARD: Final = -2
"""Stands for the code of a name, where autograd's operators have no label."""

Names = tuple[str, ...]
What = Literal["operator", "layer", "line", "kernel", "phase"]
WHATS: Final[tuple[What, ...]] = ("operator", "layer", "line", "phase")
OPERATOR, LAYER, LINE, PHASE = range(len(WHATS))
IN_KERNEL: Final = 1e6
"""The depth of kernels: nothing is further inside."""
SHORT_NS: Final = 20_000
"""What is shorter is not a wait."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What has the same name, phase and line."""

    what: What
    name: str
    """``aten::mm``; ``Block_0``; of a line the function, ``sleep`` or ``augment``; a phase; a kernel's short name."""
    phase: str
    line: str
    """``train.py:31``; empty if unknown."""
    function: str
    """In which that line is."""
    depth: float
    """How many slices are around it, on average."""
    work_ns: int
    """In a step, with everything inside it."""
    own_ns: int
    """In a step, without other operators, layers and lines inside it."""
    calls: int
    """In all steps."""
    in_steps: int = 0
    """In how many of the steps it runs; unknown of layers in backward."""
    layers: Mapping[Names, int] = field(default_factory=dict)
    """Of operators and kernels: what of the work is directly in each layer, by the names from the outermost that is not
    the whole model; without what is in no such layer."""


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    rank: int
    steps: tuple[int, ...]
    """Their numbers."""
    step_ns: int
    """A step, on average, as all below."""
    wait_ns: int
    """For other ranks."""
    work_by_step_ns: tuple[int, ...]
    """On the host; empty where the device decides."""
    on_device: bool
    """Whether collectives run on a device; then the host's waits say nothing."""
    exchanges: bool
    """Whether there are collectives at all."""
    pieces: tuple[Piece, ...]
    stacked: bool = False
    """Whether the trace has Python's functions: recording them makes small operators take several times as long."""

    @property
    def work_ns(self) -> int:
        return max(self.step_ns - self.wait_ns, 0)


def rank_times_of(window: Window, exchanges: Exchanges, rank: int) -> RankTimes:
    steps = max(len(window.steps), 1)
    layers = _layers_of(window)
    host, host_waits_ns = _host_pieces(window, exchanges, layers)
    device, device_wait_ns, on_device = _device_pieces(window, layers)
    lengths_ns = np.array([step.end_ns - step.start_ns for step in window.steps], np.int64)
    pieces = sorted([*host, *device], key=lambda piece: -piece.work_ns)[:MOST_PIECES]
    return RankTimes(
        rank=rank,
        steps=tuple(step.number for step in window.steps),
        step_ns=int(lengths_ns.sum()) // steps,
        wait_ns=(device_wait_ns if on_device else int(host_waits_ns.sum())) // steps,
        work_by_step_ns=() if on_device else tuple((lengths_ns - host_waits_ns).tolist()),
        on_device=on_device,
        exchanges=on_device or len(exchanges) > 0,
        pieces=tuple(pieces),
        stacked=bool(len(window.host.pythons)),
    )


# -- host -------------------------------------------------------------------------------------------------------------


def _host_pieces(window: Window, exchanges: Exchanges, layers: _Layers) -> tuple[list[Piece], Ints]:
    """The pieces of the host's threads, and how long they wait for other ranks in each step."""
    trace, depth = window.trace, window.calls.depth
    rows = _training_rows(window)
    if not len(rows):
        return [], np.zeros(len(window.steps), np.int64)
    nest = nest_of(window.calls, rows)
    work_ns, waited_ns = _work(window, nest, exchanges)
    what, places = _whats(window, rows, layers), _places(window)
    named = nest_of(window.calls, rows[what >= 0])
    # Time inside what has no name (torch's Python, calls of the runtime) belongs to the innermost around it.
    holder = named.around[rows]
    own_ns = sums(holder[holder >= 0], work_ns[holder >= 0], len(named.rows))
    inside_ns = _inside(nest, depth[rows], work_ns)[what >= 0]
    phases, texts = _phases(window)

    columns = (what[what >= 0], trace.slices.name[named.rows], phases[named.rows], places.code[named.rows])
    keys, group = np.unique(np.stack(columns, axis=1).astype(np.int64), axis=0, return_inverse=True)
    group = group.reshape(-1)
    outermost = named.outermost(group)
    total_ns = sums(group[outermost], inside_ns[outermost], len(keys))
    summed_ns = sums(group, own_ns, len(keys))
    calls = np.bincount(group, minlength=len(keys))
    in_steps = _in_steps(group, window.step_of[named.rows], len(keys))
    depths = np.bincount(group, depth[named.rows], len(keys)) / np.maximum(calls, 1)
    steps = max(len(window.steps), 1)
    by_layer = layers.shares(group[outermost], named.rows[outermost], inside_ns[outermost], steps)
    pieces = _layer_pieces(window, layers, rows, work_ns, texts, steps)
    for at in np.argsort(-total_ns, kind="stable")[:MOST_PIECES].tolist():
        kind, name, phase, place = keys[at].tolist()
        line, function = places.at[place] if place >= 0 else ("", "")
        pieces.append(
            Piece(
                what=WHATS[kind],
                name=_shown(kind, trace.strings[name], function, texts.get(name, "")),
                phase=texts.get(phase, ""),
                line=line,
                function=function,
                depth=float(depths[at]),
                work_ns=int(total_ns[at]) // steps,
                own_ns=int(summed_ns[at]) // steps,
                calls=int(calls[at]),
                in_steps=int(in_steps[at]),
                layers=by_layer.get(at, {}) if kind == OPERATOR else {},
            )
        )
    return pieces, sums(window.step_of[rows], waited_ns, len(window.steps))


def _training_rows(window: Window) -> Rows:
    """Host rows within steps, of the threads that train."""
    slices = window.trace.slices
    threads = [window.host.main_thread, *window.host.autograd_threads.tolist()]
    rows = window.host_rows[np.isin(slices.thread[window.host_rows], threads)]
    return rows[window.step_of[rows] >= 0]


def _in_steps(group: NDArray[np.int64], step: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """In how many steps each group has rows, [count]."""
    steps = int(step.max(initial=0)) + 1
    return np.bincount(np.unique(group * steps + step) // steps, minlength=count)


def _inside(nest: Nest, depth: NDArray[np.int32], work_ns: Ints) -> Ints:
    """The work of each row with everything inside it, [rows]."""
    total: Ints = work_ns.copy()
    order = np.argsort(-depth, kind="stable")
    for level in np.split(order, np.flatnonzero(np.diff(depth[order])) + 1):
        inner = level[nest.above[level] >= 0]
        total += sums(nest.above[inner], total[inner], len(total))
    return total


def _work(window: Window, nest: Nest, exchanges: Exchanges) -> tuple[Ints, Ints]:
    """How long each row works and waits for other ranks, without what is inside it; both [rows]."""
    trace, slices, rows = window.trace, window.trace.slices, nest.rows
    inner = nest.above >= 0
    alone_ns = np.maximum(slices.dur_ns[rows] - sums(nest.above[inner], slices.dur_ns[rows[inner]], len(rows)), 0)
    kinds = slices.kind[rows]
    calls = np.isin(kinds, [Kind.OP, Kind.ANNOTATION]) & trace.names_where(EXCHANGE.match)[slices.name[rows]]
    for_ranks = window.calls.nearest(window.host.mask(rows[calls]))[rows] >= 0
    for_device = window.calls.nearest(window.host.mask(sync_rows(window)))[rows] >= 0
    waited_ns = np.where(for_ranks & ~for_device, alone_ns, 0)

    # Autograd's engine and torch's Python do not mark when they wait for a collective.
    stacked = bool(len(window.host.pythons))
    may_wait = (kinds == (Kind.PYTHON if stacked else Kind.ANNOTATION)) & ~for_ranks & (alone_ns > SHORT_NS)
    if stacked:
        may_wait &= trace.names_where(WAITING.search)[slices.name[rows]]
    host = exchanges.row[slices.device[exchanges.row] < 0]
    active = intervals.merge(slices.start_ns[host], slices.end_ns[host])
    by_parent = np.argsort(nest.above, kind="stable")
    parents = nest.above[by_parent]
    for at in np.flatnonzero(may_wait).tolist() if len(active.start_ns) else ():
        inside = rows[by_parent[np.searchsorted(parents, at) : np.searchsorted(parents, at, "right")]]
        span = intervals.merge(slices.start_ns[rows[at : at + 1]], slices.end_ns[rows[at : at + 1]])
        alone = intervals.difference(span, intervals.merge(slices.start_ns[inside], slices.end_ns[inside]))
        waited_ns[at] = intervals.total(intervals.intersection(alone, active))

    work_ns = np.where(for_device, 0, np.maximum(alone_ns - waited_ns, 0))
    if len(window.host.autograd_threads):
        # The main thread waits for autograd's.
        engine = trace.names_where(lambda name: "run_backward" in name)[slices.name[rows]]
        work_ns[engine & (kinds == Kind.PYTHON)] = 0
    return work_ns, waited_ns


def _whats(window: Window, rows: Rows, layers: _Layers) -> NDArray[np.int64]:
    """Index into ``WHATS``, [rows]; −1: not named in a difference."""
    trace, slices = window.trace, window.trace.slices
    kinds, names = slices.kind[rows], slices.name[rows]
    user = trace.names_where(is_user_frame)
    python = kinds == Kind.PYTHON
    built_in = python & trace.names_where(lambda name: name.startswith(BUILT_IN))[names]
    parents = window.calls.parents[rows]
    of_user = (parents >= 0) & (slices.kind[parents] == Kind.PYTHON) & user[slices.name[parents]]
    out = np.full(len(rows), -1, np.int64)
    out[kinds == Kind.OP] = OPERATOR
    # In backward, a call that is repeated is a part of its layer's work, see _layer_pieces.
    out[python & trace.names_where(lambda name: name.startswith(MODULE))[names] & ~layers.backward[rows]] = LAYER
    out[(python & user[names]) | (built_in & of_user)] = LINE
    out[np.isin(rows, _phase_rows(window)[0])] = PHASE
    return out


def _shown(kind: int, name: str, function: str, phase: str) -> str:
    if kind == LAYER:
        return name.removeprefix(MODULE)
    if kind == PHASE:
        return phase
    if kind == LINE:
        return (
            name.removeprefix(BUILT_IN).removesuffix(">").split(" of ")[0].split()[-1] if BUILT_IN in name else function
        )
    return name


# -- layers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Layers:
    of: NDArray[np.int32]
    """[slices] plus one entry for row −1; index into ``names``; −1: none."""
    names: list[tuple[str, ...]]
    """By node of the tree; empty for the whole model and what is around it."""
    modules: Modules | None
    backward: NDArray[np.bool_]
    """[slices]"""

    def shares(self, groups: NDArray[np.int64], rows: Rows, work_ns: Ints, steps: int) -> dict[int, dict[Names, int]]:
        """Return the work of each group in a step by layer."""
        layer = self.of[rows]
        there = (layer >= 0) & (work_ns > 0)
        count = max(len(self.names), 1)
        keys, at = np.unique(groups[there] * count + layer[there], return_inverse=True)
        found: dict[int, dict[Names, int]] = {}
        for key, spent_ns in zip(keys.tolist(), sums(at, work_ns[there], len(keys)).tolist(), strict=True):
            if names := self.names[key % count]:
                of_group = found.setdefault(key // count, {})
                of_group[names] = of_group.get(names, 0) + spent_ns // steps
        return found


def _layers_of(window: Window) -> _Layers:
    modules = modules_of(window, operator_times(window))
    if modules is None or not _in_all_steps(window, modules):
        none = np.full(len(window.trace) + 1, -1, np.int32)
        return _Layers(of=none, names=[], modules=None, backward=np.zeros(len(window.trace), bool))
    whole = _whole(modules.parent)
    names = [
        tuple(modules.full_name[at] for at in modules.line(node) if at not in whole)
        for node in range(len(modules.parent))
    ]
    return _Layers(of=padded(modules.of), names=names, modules=modules, backward=modules.backward)


def _in_all_steps(window: Window, modules: Modules) -> bool:
    """Whether all steps show their layers: with labels, only sampled steps do, which may differ between ranks."""
    if LABELED not in modules.kind:
        return True
    steps = window.step_of[np.flatnonzero(modules.of >= 0)]
    return len(np.unique(steps[steps >= 0])) == len(window.steps)


def _whole(parent: list[int]) -> set[int]:
    """The nodes that all others are in or around, unless nothing is in them: the model and its wrappers."""
    children: dict[int, list[int]] = {}
    for node, above in enumerate(parent):
        children.setdefault(above, []).append(node)
    found: set[int] = set()
    at = -1
    while len(children.get(at, [])) == 1:
        at = children[at][0]
        if at in children:
            found.add(at)
    return found


def _layer_pieces(
    window: Window, layers: _Layers, rows: Rows, work_ns: Ints, texts: Mapping[int, str], steps: int
) -> list[Piece]:
    """The layers in backward: what autograd ran for their operators, on whatever thread."""
    modules = layers.modules
    if modules is None:
        return []
    rows, work_ns = rows[layers.backward[rows]], work_ns[layers.backward[rows]]
    of, count = modules.of[rows], len(modules.parent)
    own_ns = sums(of[of >= 0], work_ns[of >= 0], count)
    total_ns = with_inner(own_ns, modules.parent)
    engine = np.unique(window.host.backward_op[rows])
    engine = engine[engine >= 0]
    # Between the phase and the operators.
    phases = [
        window.calls.depth[row]
        for row in _phase_rows(window)[0].tolist()
        if texts[int(window.trace.slices.name[row])] == "backward"
    ]
    outermost = int(window.calls.depth[engine].min()) if len(engine) else 0
    depth = max([*phases, outermost - 1]) + 0.25
    found: dict[str, Piece] = {}
    for node, names in enumerate(layers.names):
        if not names or not total_ns[node] or modules.kind[node] == COMPILED_REGION:
            continue
        same = found.get(names[-1])
        found[names[-1]] = Piece(
            what="layer",
            name=names[-1],
            phase="backward",
            line="",
            function="",
            depth=depth + len(names) / IN_KERNEL,
            work_ns=int(total_ns[node]) // steps + (same.work_ns if same else 0),
            own_ns=int(own_ns[node]) // steps + (same.own_ns if same else 0),
            calls=int(modules.calls[node]) + (same.calls if same else 0),
        )
    return list(found.values())


# -- phases and lines -------------------------------------------------------------------------------------------------


def _phase_rows(window: Window) -> tuple[Rows, dict[int, str]]:
    """Annotations of phases, and the phase by the code of their name: our own labels, or else what torch labels."""
    trace, rows = window.trace, window.host.annotations
    codes = np.unique(trace.slices.name[rows]).tolist()
    texts = {code: match["phase"] for code in codes if (match := LABEL.match(trace.strings[code]))}
    if not texts:
        texts = {code: "optimizer" for code in codes if OPTIMIZER.match(trace.strings[code])}
        texts |= dict.fromkeys(np.unique(trace.slices.name[loader_rows(window)]).tolist(), "input")
        rows = np.sort(np.union1d(rows, loader_rows(window))).astype(np.int32)
    return rows[np.isin(trace.slices.name[rows], list(texts))], texts


def _phases(window: Window) -> tuple[NDArray[np.int32], dict[int, str]]:
    """The code of the phase's name for each slice (−1: unknown), and what these codes mean."""
    slices = window.trace.slices
    rows, texts = _phase_rows(window)
    code = padded(slices.name)[window.calls.nearest(window.host.mask(rows))]
    known = next((each for each, text in texts.items() if text == "backward"), BACKWARD)
    autograd = (window.host.forward_of >= 0) | np.isin(slices.thread, window.host.autograd_threads)
    return np.where((code < 0) & autograd, known, code).astype(np.int32), {BACKWARD: "backward", **texts}


@dataclass(frozen=True, kw_only=True)
class _Places:
    code: NDArray[np.int64]
    """[slices]; index into ``at``; −1: unknown."""
    at: list[tuple[str, str]]
    """``train.py:31``, and the function."""


def _places(window: Window) -> _Places:
    """Where in the user's code each host row is: the innermost function around it; in autograd the forward's."""
    trace, slices, calls = window.trace, window.trace.slices, window.calls
    pythons = window.host.pythons
    frames = pythons[trace.names_where(is_user_frame)[slices.name[pythons]]]
    frame = calls.nearest(window.host.mask(frames))
    of_forward = window.host.forward_of
    operators = window.host.ops
    engine = operators[trace.names_where(lambda name: name.startswith(ENGINE))[slices.name[operators]]]
    around = calls.nearest(window.host.mask(engine))
    # A frame around the engine only says where backward() was called.
    depth = padded(calls.depth)
    outside = (around >= 0) & ((frame < 0) | (depth[frame] < depth[around]))
    sources = window.host.sources
    known: Numbering[tuple[str, bool]] = Numbering()
    began_ns = window.steps[0].start_ns if window.steps else 0
    code = np.full(len(trace), -1, np.int64)
    for at in np.unique(frame[frame >= 0]).tolist():
        code[at] = known[trace.name(at), bool(slices.start_ns[at] < began_ns)]
    code = np.where(frame >= 0, np.append(code, -1)[frame], -1)
    lines = sources.code
    without = outside | (frame < 0)
    numbers = np.array([known[text, False] for text in sources.texts] or [-1], np.int64)
    found = np.where((lines >= 0) & ((of_forward >= 0) | (around < 0)), numbers[np.maximum(lines, 0)], -1)
    return _Places(code=np.where(without, found, code), at=[_place(*key) for key in known.keys_in_order])


def _place(text: str, opened_before: bool) -> tuple[str, str]:
    """``train.py(31): step`` → (``train.py:31``, ``step``); no line of a function that was running at the beginning.

    Its line is where it was then, not where the time is spent.
    """
    match = FRAME.match(text)
    if match is None:
        opened = OPEN_FRAME.match(text)
        return "", "" if opened is None else opened["function"]
    file = match["path"].rpartition("/")[2]
    return ("" if opened_before else f"{file}:{match['line']}"), match["function"]


# -- device -----------------------------------------------------------------------------------------------------------


def _device_pieces(window: Window, layers: _Layers) -> tuple[list[Piece], int, bool]:
    """The kernels and copies of all steps, how long the device only exchanges, and whether it exchanges at all."""
    trace, slices = window.trace, window.trace.slices
    rows = window.device_rows
    rows = rows[window.step_of[rows] >= 0]
    if not len(rows):
        return [], 0, False
    exchange = (slices.kind[rows] == Kind.KERNEL) & trace.names_where(is_communication)[slices.name[rows]]
    comm, work = rows[exchange], rows[~exchange]
    busy = intervals.merge(slices.start_ns[work], slices.end_ns[work])
    waited = intervals.difference(intervals.merge(slices.start_ns[comm], slices.end_ns[comm]), busy)

    phases, texts = _phases(window)
    places = _places(window)
    owner = window.owner[work]
    columns = (slices.name[work], padded(phases)[owner], np.append(places.code, -1)[owner])
    keys, group = np.unique(np.stack(columns, axis=1).astype(np.int64), axis=0, return_inverse=True)
    group = group.reshape(-1)
    total_ns, calls = sums(group, slices.dur_ns[work], len(keys)), np.bincount(group, minlength=len(keys))
    in_steps = _in_steps(group, window.step_of[work], len(keys))
    steps = max(len(window.steps), 1)
    by_layer = layers.shares(group, owner, slices.dur_ns[work], steps)
    pieces = []
    for at in np.argsort(-total_ns, kind="stable")[:MOST_PIECES].tolist():
        name, phase, place = keys[at].tolist()
        line, function = places.at[place] if place >= 0 else ("", "")
        time_ns = int(total_ns[at]) // steps
        pieces.append(
            Piece(
                what="kernel",
                name=short_name(trace.strings[name]),
                phase=texts.get(phase, ""),
                line=line,
                function=function,
                depth=IN_KERNEL,
                work_ns=time_ns,
                own_ns=time_ns,
                calls=int(calls[at]),
                in_steps=int(in_steps[at]),
                layers=by_layer.get(at, {}),
            )
        )
    return pieces, intervals.total(waited), bool(len(comm))
