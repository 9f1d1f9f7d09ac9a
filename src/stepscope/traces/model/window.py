"""Which rows of a trace count, and in which step: steps, launches, owning operators, host rows and their source lines.

Profiler steps are host annotations named ``ProfilerStep#N``, or without any ``stepscope.step N``. With two or more, the
last is left out, since the work it launched may be cut off: host slices from its start on, and the device work that
they launched. Without profiler steps, everything is one step, from the first slice that counts to the last.

Ranks are compared over the same steps: if one rank's recording ends (or begins) at another step than its peers', the
steps that not all of them have are left out in the same way (``only``; ``job.common_steps`` finds them).

Device work belongs to the step in which it was launched or, if the launch is not in the trace, to the step in which it
began. Work that began before the first work launched by the steps was queued by earlier steps: a device may be several
steps behind its host when the trace begins. Such work counts but belongs to no step.

The call tree of host threads, below, says which slice lies inside which, and sums over nested calls.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.columns import DEVICE_KINDS, DEVICE_WORK, HOST_KINDS, LAUNCHING, Ints, Kind, Rows, Trace
from stepscope.traces.model.native_parts import native_part
from stepscope.traces.model.tables import distinct, sorted_by_key

__all__ = [
    "LABEL",
    "PROFILER",
    "STEP",
    "CallTree",
    "Nest",
    "Step",
    "Window",
    "calls_of",
    "holders",
    "innermost_at",
    "is_user_frame",
    "launches_of",
    "medians",
    "nest_of",
    "padded",
    "sums",
    "window_of",
]

# -- call tree --------------------------------------------------------------------------------------------------------

NATIVE = "stepscope.traces.model.native_calls"
FOREVER = 1 << 62


def padded(values: NDArray[np.int32]) -> NDArray[np.int32]:
    """Append −1, so that row −1 (none) has the value −1 (none)."""
    return np.append(values, np.int32(-1))


@dataclass(frozen=True, kw_only=True)
class CallTree:
    """The nesting of slices; all columns have one entry per slice of the trace."""

    parents: Rows
    """The innermost slice around it on the same thread; −1: none, or not in the tree."""
    depth: NDArray[np.int32]
    """Number of slices around it; −1: not in the tree."""

    def nearest(self, which: NDArray[np.bool_]) -> Rows:
        """Return the slice itself if it is in ``which``, else the innermost around it that is; −1: none; [slices]."""
        native = native_part(NATIVE)
        if native is not None:
            return np.frombuffer(native.nearest(self.parents.tobytes(), which.tobytes()), np.int32)
        # One more entry for −1 keeps rows beyond the outermost there; each iteration doubles how far a row looks.
        up = padded(self.parents)
        marked = np.append(which, True)
        up[:-1][which] = np.flatnonzero(which)
        left = np.flatnonzero(~marked[up])
        while len(left):
            further = up[up[left]]
            up[left] = further
            left = left[~marked[further]]
        return up[:-1]

    def holder(self, which: NDArray[np.bool_]) -> Rows:
        """Return the innermost slice of ``which`` around it, excluding itself; −1: none; [slices]."""
        return padded(self.nearest(which))[self.parents]


def holders(tree: CallTree, which: NDArray[np.bool_], rows: Rows) -> Rows:
    """Return ``CallTree.holder`` for some rows only (−1: none): many times faster for few rows; [rows]."""
    up, known = padded(tree.parents), np.append(which, True)
    at = up[rows]
    left = np.flatnonzero(~known[at])
    while len(left):
        at[left] = up[at[left]]
        left = left[~known[at[left]]]
    return at


def calls_of(trace: Trace, rows: Rows) -> CallTree:
    """Build the tree of ``rows`` (ascending).

    A slice that begins inside another but ends after it (clocks, asynchronous ranges) is not its child; nor is a slice
    without duration at the other's end.
    """
    parents = np.full(len(trace), -1, np.int32)
    depth = np.full(len(trace), -1, np.int32)
    slices = trace.slices
    threads = slices.thread[rows]
    native = native_part(NATIVE)
    if native is not None:
        times = (slices.start_ns[rows].tobytes(), slices.end_ns[rows].tobytes())
        above, depth[rows] = (np.frombuffer(each, np.int32) for each in native.nest(threads.tobytes(), *times))
        parents[rows] = padded(rows)[above]
        return CallTree(parents=parents, depth=depth)
    order = _by_thread(threads)
    for own in np.split(rows[order], np.flatnonzero(np.diff(threads[order])) + 1):
        above, depth[own], crossing = _laminar(slices.start_ns[own], slices.end_ns[own])
        parents[own] = padded(own)[above]
        for first, end in crossing:
            part = own[first:end]
            starts, ends = slices.start_ns[part].tolist(), slices.end_ns[part].tolist()
            parents[part], depth[part] = _nested(starts, ends, part.tolist())
    return CallTree(parents=parents, depth=depth)


def _by_thread(threads: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the order by thread, else as before; numpy sorts integers of 16 bits by radix, without comparing them."""
    few = len(threads) == 0 or threads.max() < 2**15
    return np.argsort(threads.astype(np.int16) if few else threads, kind="stable")


def innermost_at(trace: Trace, tree: CallTree, rows: Rows, threads: NDArray[np.int32], times: Ints) -> Rows:
    """Return the innermost of ``rows`` that ran at each instant on each thread, [n]; −1: none.

    ``rows`` are ascending and all in the tree. A row runs from its start up to, but not including, its end.
    """
    slices = trace.slices
    own = rows[_by_thread(slices.thread[rows])]
    step = int(max(slices.end_ns.max(initial=0), times.max(initial=0))) + 1
    keys = slices.thread[own] * np.int64(step) + slices.start_ns[own]
    at = np.searchsorted(keys, threads * np.int64(step) + times, side="right") - 1
    found = padded(own)[at]
    found = np.where((found >= 0) & (slices.thread[found] == threads), found, -1) if len(own) else found
    ended = np.flatnonzero((found >= 0) & (slices.end_ns[found] <= times)) if len(own) else at[:0]
    while len(ended):
        found[ended] = tree.parents[found[ended]]
        ended = ended[(found[ended] >= 0)]
        ended = ended[slices.end_ns[found[ended]] <= times[ended]]
    return found.astype(np.int32)


def _laminar(start_ns: Ints, end_ns: Ints) -> tuple[Rows, NDArray[np.int32], list[tuple[int, int]]]:
    """Return indices of parents, and depths, for one thread, and the ranges in which crossing slices make them wrong.

    Without crossings, every slice that began earlier and is still open encloses this one: its depth is the number of
    open slices, and its parent the last one before it with a depth one less. A slice without duration encloses nothing.
    """
    count = len(start_ns)
    lasting = end_ns > start_ns
    depth: Ints = np.cumsum(lasting, dtype=np.int64) - lasting.astype(np.int64)
    depth -= np.searchsorted(np.sort(end_ns[lasting]), start_ns, side="right")
    level = depth.astype(np.int32)
    at = np.flatnonzero(lasting)
    # Depth and place in one number: in sorted order, the parent is just before the child's position.
    keys = np.sort(depth[at] * count + at)
    found = np.searchsorted(keys, (depth - 1) * count + np.arange(count)) - 1
    inner = level > 0
    above = np.where(inner, keys[found] % count if len(keys) else -1, -1).astype(np.int32)
    wrong = np.flatnonzero(inner & (end_ns[above] < end_ns))
    if not len(wrong):
        return above, level, []
    # Everything restarts where nothing is open, so crossings elsewhere do not matter.
    borders = np.append(np.flatnonzero(~inner), count)
    hit = np.unique(np.searchsorted(borders, wrong, side="right"))
    return above, level, [(int(borders[each - 1]), int(borders[each])) for each in hit.tolist()]


def _nested(starts: list[int], ends: list[int], rows: list[int]) -> tuple[list[int], list[int]]:
    """Return parents and depths for one thread."""
    parents, depths = [], []
    # The open slices; their ends never increase from bottom to top. A slice that ends before the newest can enclose
    # nothing that the newest, which is nearer, does not. Each is therefore removed once, and the whole is linear.
    open_rows, open_ends = [-1], [FOREVER]
    top_end = FOREVER
    for start, end, row in zip(starts, ends, rows, strict=True):
        while top_end < end or top_end <= start:
            open_rows.pop()
            open_ends.pop()
            top_end = open_ends[-1]
        parents.append(open_rows[-1])
        depths.append(len(open_rows) - 1)
        open_rows.append(row)
        open_ends.append(end)
        top_end = end
    return parents, depths


# -- sums over nested rows --------------------------------------------------------------------------------------------
# Some host rows (operators, annotations, modules) with their nesting, and sums over them. A call inside another of the
# same group (name, shape, path) counts once in totals.

Groups = NDArray[np.int64]


def sums(groups: NDArray[np.integer], values: Ints, count: int) -> Ints:
    """Sum by group, [count]; exact, as nanoseconds and bytes of a trace stay far below 2⁵³."""
    return np.bincount(groups, values, count).astype(np.int64)


def medians(groups: Groups, values: Ints, count: int) -> Ints:
    """Return the lower median of each group, a value that occurred, [count]; no group is empty."""
    _, values = sorted_by_key(groups, values)
    sizes = np.bincount(groups, minlength=count)
    first = np.cumsum(sizes) - sizes
    middle: Ints = values[first + (sizes - 1) // 2]
    return middle


@dataclass(frozen=True, kw_only=True)
class Nest:
    rows: Rows
    above: NDArray[np.int32]
    """[rows]; index into ``rows`` of the innermost one around it; −1: none."""
    around: NDArray[np.int32]
    """[slices] plus one entry for row −1; index into ``rows`` of itself or the innermost around it; −1: none."""

    def outermost(self, groups: Groups) -> NDArray[np.bool_]:
        """Return which rows are not inside another of the same group, [rows]."""
        out = np.ones(len(self.rows), bool)
        left = np.flatnonzero(self.above >= 0)
        up = self.above[left]
        while len(left):
            same = groups[up] == groups[left]
            out[left[same]] = False
            left, up = left[~same], self.above[up[~same]]
            left, up = left[up >= 0], up[up >= 0]
        return out

    def totals(self, groups: Groups, values: Ints, count: int, outermost: NDArray[np.bool_]) -> Ints:
        """Sum ``values`` [rows] for the row itself and each one around it, once per group; [count]."""
        out = np.zeros(count, np.int64)
        at = np.flatnonzero(values).astype(np.int32)
        worth = values[at]
        while len(at):
            once = outermost[at]
            out += sums(groups[at[once]], worth[once], count)
            at = self.above[at]
            worth, at = worth[at >= 0], at[at >= 0]
        return out


def nest_of(calls: CallTree, rows: Rows) -> Nest:
    index = np.full(len(calls.parents) + 1, -1, np.int32)
    index[rows] = np.arange(len(rows), dtype=np.int32)
    nearest = np.append(calls.nearest(index[:-1] >= 0), np.int32(-1))
    around = index[nearest]
    return Nest(rows=rows, above=around[calls.parents[rows]], around=around)


# -- launches ---------------------------------------------------------------------------------------------------------


def launches_of(trace: Trace) -> Rows:
    """Return for device rows the runtime call with the same correlation, else −1; [slices].

    One launch of a CUDA graph has many device rows. If calls share a correlation (a driver call inside a runtime call),
    the first and therefore outer one is returned.
    """
    slices = trace.slices
    out = np.full(len(slices), -1, np.int32)
    calls = trace.rows_of(LAUNCHING)
    calls = calls[slices.correlation[calls] > 0]
    work = trace.rows_of(DEVICE_KINDS)
    work = work[slices.correlation[work] > 0]
    if not len(calls) or not len(work):
        return out
    order = np.argsort(slices.correlation[calls], kind="stable")
    known = slices.correlation[calls][order]
    wanted = slices.correlation[work]
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    found = known[at] == wanted
    out[work[found]] = calls[order][at[found]]
    return out


# -- owners -----------------------------------------------------------------------------------------------------------
# The operator that a runtime call, and the device work it launched, belongs to. It is the innermost operator around the
# call on the same thread. Without one (the call is on a separate thread, or missing from the trace), it is the operator
# with the same ``External id``. Many versions of the profiler write the correlation there, which may match an
# operator's id by chance and is ignored.


def owner_of(window: Window) -> Rows:
    """Return for runtime and device rows that count their operator, which also counts; −1 otherwise; [slices].

    Cached as ``Window.owner``.
    """
    slices = window.trace.slices
    out = np.full(len(slices), -1, np.int32)
    ops = window.host.ops
    if not len(ops):
        return out
    calls = window.rows_of((Kind.RUNTIME,))
    work = window.rows_of(DEVICE_KINDS)
    out[calls] = window.host.op_holder[calls]
    launched = work[window.launch[work] >= 0]
    out[launched] = out[window.launch[launched]]
    rest = np.concatenate([calls, work])
    rest = rest[(out[rest] < 0) & (slices.external[rest] > 0) & (slices.external[rest] != slices.correlation[rest])]
    out[rest] = _by_external(slices.external[ops], ops, slices.external[rest])
    # Calls may have found their operator only now, so look again for the work they launched.
    orphans = launched[out[launched] < 0]
    out[orphans] = out[window.launch[orphans]]
    return out


def _by_external(known: np.ndarray, ops: Rows, wanted: np.ndarray) -> Rows:
    """Return the first operator with each id, [wanted]; −1: none."""
    order = np.argsort(known, kind="stable")
    at = np.minimum(np.searchsorted(known[order], wanted), len(known) - 1)
    row = ops[order][at]
    return np.where(known[order][at] == wanted, row, -1).astype(np.int32)


# -- sources ----------------------------------------------------------------------------------------------------------
# The line of user code that a host slice comes from, as opposed to torch, libraries and Python.
#
# With ``with_stack`` it is the innermost user function around the slice, or the first user frame in the operator's
# ``Call stack``. The profiler names a function by the file and line of its definition, and a frame that was already
# open by the line where it was when the recording began, which says nothing about the slices in it: that line is left
# out. It strips the prefixes in ``sys.path``, so libraries are recognized by their package names.

FRAME = re.compile(r"^(?P<path>[^<>()]+\.(?:py|ipynb)|<ipython[^>]*>|/tmp/ipykernel[^()]*)\((?P<line>\d+)\): ")
FOREIGN = re.compile(r"(^|/)(site-packages|dist-packages|lib/python\d[\d.]*|torchinductor_[^/]*|stepscope/recorder)/")
LIBRARIES = frozenset(
    (
        "torch",
        "torchvision",
        "torchaudio",
        "torchdata",
        "torchrec",
        "torchtext",
        "triton",
        "functorch",
        "numpy",
        "pandas",
        "transformers",
        "accelerate",
        "datasets",
        "diffusers",
        "tokenizers",
        "peft",
        "trl",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "deepspeed",
        "fairscale",
        "xformers",
        "apex",
        "flash_attn",
        "bitsandbytes",
        "ignite",
        "fastai",
        "timm",
        "wandb",
        "tensorboard",
        "tqdm",
        "einops",
        "nvidia",
        "ray",
        "stepscope",
    )
)


def is_user_frame(name: str) -> bool:
    match = FRAME.match(name)
    if match is None:
        return False
    path = match["path"]
    if FOREIGN.search(path):
        return False
    first = path.split("/", 1)[0].removesuffix(".py")
    # A relative path is a module found on sys.path: Python's own, a library's or the user's.
    return path.startswith("/") or (first not in LIBRARIES and first not in sys.stdlib_module_names)


OPEN_SHARE = 0.95
"""A Python frame that covers so much of its thread's recording was open when it began, or hardly later."""


def _opened_before(host: HostView) -> NDArray[np.bool_]:
    """[pythons]; frames that were open when the first step began; without steps, those that are open all the time."""
    slices, rows, began_ns = host.trace.slices, host.pythons, host.began_ns
    if began_ns is not None:
        return np.asarray((slices.start_ns[rows] < began_ns) & (slices.end_ns[rows] > began_ns))
    _, thread = distinct(slices.thread[rows])
    first_ns = np.full(int(thread.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    last_ns = np.zeros(len(first_ns), np.int64)
    np.minimum.at(first_ns, thread, slices.start_ns[rows])
    np.maximum.at(last_ns, thread, slices.end_ns[rows])
    return np.asarray(slices.dur_ns[rows] >= OPEN_SHARE * (last_ns - first_ns)[thread])


def _without_line(frame: str) -> str:
    """``train.py(31): step`` → ``train.py (step)``."""
    match = FRAME.match(frame)
    return frame if match is None else f"{match['path']} ({frame[match.end() :]})"


@dataclass(frozen=True, kw_only=True)
class Sources:
    code: NDArray[np.int32]
    """[slices]; index into ``texts`` for host rows; −1: unknown."""
    texts: list[str]
    """``train.py(31): step``; ``train.py (step)`` for a frame that was open before."""

    def text(self, row: int) -> str | None:
        return self.texts[int(self.code[row])] if row >= 0 and self.code[row] >= 0 else None


def sources_of(host: HostView) -> Sources:
    """Find the source lines; cached as ``HostView.sources``.

    Autograd's operators get the line of the forward operator that created them, if known.
    """
    trace, calls, ops = host.trace, host.calls, host.trace.ops
    stacked = np.flatnonzero(ops.stack >= 0)
    known: dict[str, int] = {}
    code = np.full(len(trace), -1, np.int32)
    pythons = host.pythons
    if not len(stacked) and not len(pythons):
        return Sources(code=code, texts=[])
    if len(pythons):
        own = trace.names_where(is_user_frame)
        names = trace.slices.name[pythons]
        mine, opened = pythons[own[names]], _opened_before(host)[own[names]]
        used, inverse = distinct(2 * trace.slices.name[mine].astype(np.int64) + opened)
        frames = [(trace.strings[key // 2], key % 2) for key in used.tolist()]
        texts = [_without_line(frame) if without else frame for frame, without in frames]
        code[mine] = np.array([known.setdefault(text, len(known)) for text in texts], np.int32)[inverse]
    if len(stacked):
        used, inverse = distinct(ops.stack[stacked])
        lines = [_first(trace.strings[at]) for at in used.tolist()]
        codes = np.array([known.setdefault(text, len(known)) if text else -1 for text in lines], np.int32)[inverse]
        code[ops.row[stacked]] = np.where(codes >= 0, codes, code[ops.row[stacked]])
    code = padded(code)[calls.nearest(code >= 0)]
    forward = padded(code)[host.forward_of]
    return Sources(code=np.where(forward >= 0, forward, code), texts=list(known))


def _first(stack: str) -> str | None:
    """Return the innermost user frame."""
    return next((frame.strip() for frame in stack.split(";") if is_user_frame(frame.strip())), None)


# -- host view --------------------------------------------------------------------------------------------------------
# What all host analyses need from a window, computed once: ``Window.host``.
#
# Old profilers wrote annotations (steps, those of the DataLoader and the optimizer) as operators; they are recognized
# by name.
#
# *Forward of*: autograd's operators carry the sequence number of the forward operator that created their node. Several
# forward operators share a number (outer ones, too). The last of them to start created the node, since that increments
# the number.

LABEL = re.compile(r"^(ProfilerStep\s*#?\s*\d|enumerate\(DataLoader\)#|Optimizer\.\w+#)")
"""Annotations that old profilers wrote as operators."""
Mask = NDArray[np.bool_]


class HostView:
    def __init__(self, window: Window) -> None:
        # Do not store the window: it stores this object, and a reference cycle would live until the collector runs.
        self.trace = window.trace
        self.calls = window.calls
        self.host_rows = window.host_rows
        marked = bool(window.steps) and STEP.match(window.steps[0].name) is not None
        self.began_ns = window.steps[0].start_ns if marked else None
        """When the first step that counts began; None: no step is marked."""
        self._ops = window.rows_of((Kind.OP,))
        self._annotations = window.rows_of((Kind.ANNOTATION,))
        self.pythons = window.rows_of((Kind.PYTHON,))

    @cached_property
    def _labels(self) -> Mask:
        return self.trace.names_where(LABEL.match)

    @cached_property
    def ops(self) -> Rows:
        """Operators that count, without annotations, by start."""
        return self._ops[~self._labels[self.trace.slices.name[self._ops]]]

    @cached_property
    def annotations(self) -> Rows:
        """By start, including those written as operators."""
        mistaken = self._ops[self._labels[self.trace.slices.name[self._ops]]]
        return np.sort(np.concatenate([self._annotations, mistaken]))

    def mask(self, rows: Rows) -> Mask:
        out = np.zeros(len(self.trace), bool)
        out[rows] = True
        return out

    @cached_property
    def op_holder(self) -> Rows:
        """[slices]; the innermost operator around a host row; −1: none."""
        return self.calls.holder(self.is_op[:-1])

    @cached_property
    def is_op(self) -> Mask:
        """[slices] plus one entry for row −1: operators that count."""
        return np.append(self.mask(self.ops), False)

    @cached_property
    def side(self) -> Rows:
        """[slices]; index into ``Trace.ops`` for operators and annotations; −1: none."""
        out = np.full(len(self.trace), -1, np.int32)
        out[self.trace.ops.row] = np.arange(len(self.trace.ops.row), dtype=np.int32)
        return out

    @cached_property
    def main_thread(self) -> int:
        """The thread with the profiler's steps, else the process's first, else the busiest; −1: no host rows."""
        slices, threads = self.trace.slices, self.trace.threads
        if not len(self.host_rows):
            return -1
        marked = self.annotations[self.trace.names_where(STEP.match)[slices.name[self.annotations]]]
        for row in marked.tolist():
            return int(slices.thread[row])
        used = np.unique(slices.thread[self.host_rows])
        first = [int(at) for at in used if threads[at].pid == threads[at].tid]
        if len(first) == 1:
            return first[0]
        roots = self.host_rows[self.calls.parents[self.host_rows] < 0]
        return int(np.bincount(slices.thread[roots], slices.dur_ns[roots]).argmax())

    @cached_property
    def autograd_threads(self) -> NDArray[np.int32]:
        """Threads, other than the main one, on which autograd's engine runs operators."""
        ops, slices = self.trace.ops, self.trace.slices
        rows = ops.row[(ops.forward_thread > 0) & (ops.sequence >= 0)]
        rows = rows[self.is_op[rows]]
        return np.setdiff1d(slices.thread[rows], self.main_thread).astype(np.int32)

    @cached_property
    def sources(self) -> Sources:
        return sources_of(self)

    @cached_property
    def forward_of(self) -> Rows:
        """[slices]; the forward operator for autograd's operators and everything inside them; −1: none."""
        return padded(self.created_by)[self.backward_op]

    @cached_property
    def backward_op(self) -> Rows:
        """[slices]; the autograd operator that a host row is or is inside, the innermost whose forward is known."""
        return self.calls.nearest(self.created_by >= 0)

    @cached_property
    def created_by(self) -> Rows:
        """[slices]; for autograd's operators themselves, the forward operator that created their node; −1: none."""
        ops, slices = self.trace.ops, self.trace.slices
        out = np.full(len(self.trace), -1, np.int32)
        numbered = (ops.sequence >= 0) & self.mask(self.ops)[ops.row]
        backward = np.flatnonzero(numbered & (ops.forward_thread > 0))
        forward = np.flatnonzero(numbered & (ops.forward_thread <= 0))
        if not len(backward) or not len(forward):
            return out
        threads = slices.thread[ops.row[forward]]
        for origin in np.unique(ops.forward_thread[backward]):
            own = backward[ops.forward_thread[backward] == origin]
            best, most = None, 0
            # The profiler numbers threads in its own way: the matches show which thread is meant.
            for thread in np.unique(threads):
                there = forward[threads == thread]
                found = _last_before(ops.sequence, ops.row, there, own)
                if (count := int((found >= 0).sum())) > most:
                    best, most = found, count
            if best is not None:
                out[ops.row[own]] = best
        return out


def _last_before(sequence: Ints, row: Rows, forward: NDArray[np.int64], backward: NDArray[np.int64]) -> Rows:
    """Return the last row of ``forward`` with the same number that starts earlier, [backward]; −1: none."""
    span = int(row.max()) + 2
    keys = sequence[forward] * span + row[forward]
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], sequence[backward] * span + row[backward]) - 1
    found = forward[order][np.maximum(at, 0)]
    return np.where((at >= 0) & (sequence[found] == sequence[backward]), row[found], -1).astype(np.int32)


# -- window -----------------------------------------------------------------------------------------------------------

LONGEST_MARK_NS = 50_000
"""No step of a training is that short; in what a script profiles, Stepscope marks where a step begins."""
STEP = re.compile(r"^(?:ProfilerStep\s*#?\s*|stepscope\.step )(\d{1,18})")
PROFILER = "ProfilerStep"


@dataclass(frozen=True, kw_only=True)
class Step:
    number: int
    """The profiler's number; 0 without profiler steps."""
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class Window:
    """A trace with what all analyses need to know about it."""

    trace: Trace
    counts: NDArray[np.bool_]
    """[slices]; host and device slices that count; never those of ``Kind.OTHER`` and ``OVERHEAD``."""
    launch: Rows
    """[slices]; the launching call, whether it counts or not; −1: unknown."""
    steps: tuple[Step, ...]
    """The steps that count, by time; at least one unless nothing counts."""
    left_out: Step | None
    """The first profiler step after those that count, if it is left out."""

    @cached_property
    def device_rows(self) -> Rows:
        """Kernels, copies and memsets that count, by start."""
        return self.rows_of(DEVICE_WORK)

    @cached_property
    def host_rows(self) -> Rows:
        return self.rows_of(HOST_KINDS)

    @cached_property
    def calls(self) -> CallTree:
        """The nesting of host slices that count."""
        return calls_of(self.trace, self.host_rows)

    @cached_property
    def owner(self) -> Rows:
        """[slices]; the operator that runtime and device rows belong to, see ``owner_of``; −1: none."""
        return owner_of(self)

    @cached_property
    def host(self) -> HostView:
        """What the host analyses have in common."""
        return HostView(self)

    def rows_of(self, kinds: tuple[Kind, ...]) -> Rows:
        """Return rows that count; the result is cached and must not be modified."""
        known = self._rows.get(kinds)
        if known is None:
            known = self._rows[kinds] = np.flatnonzero(self.trace.is_of(kinds) & self.counts).astype(np.int32)
        return known

    @cached_property
    def _rows(self) -> dict[tuple[Kind, ...], Rows]:
        return {}

    @cached_property
    def step_of(self) -> NDArray[np.int32]:
        """[slices]; index into ``steps``; −1: before, between or after them, or it does not count."""
        slices = self.trace.slices
        known = self.launch >= 0
        began = np.where(known, slices.start_ns[self.launch], slices.start_ns)
        step = np.where(self.counts, _step_at(self.steps, began), -1).astype(np.int32)
        rows = self.device_rows
        launched = rows[known[rows] & (step[rows] >= 0)]
        if len(launched) and self.steps[0].name:
            earlier = rows[~known[rows] & (slices.start_ns[rows] < slices.start_ns[launched[0]])]
            step[earlier] = -1
        return step


def window_of(trace: Trace, *, keep_last: bool = False, only: Collection[int] = ()) -> Window:
    """``only``: numbers of the steps that count, which follow each other; ignored if the trace has none of them."""
    slices = trace.slices
    launch = launches_of(trace)
    counts = trace.is_of((*HOST_KINDS, *DEVICE_KINDS))
    steps = _profiler_steps(trace)
    left_out = None
    if len(steps) > 1 and not keep_last:
        *steps, left_out = steps
    shared = [step for step in steps if step.number in only]
    if shared:
        left_out = next((step for step in steps if step.start_ns > shared[-1].start_ns), left_out)
        if shared[0] is not steps[0]:
            # What was open before, or still ran on the device, counts as it does before a trace's own first step.
            counts &= (slices.start_ns < steps[0].start_ns) | (slices.end_ns > shared[0].start_ns)
        steps = shared
    if left_out is not None:
        on_host = trace.is_of(HOST_KINDS)
        late = on_host & (slices.start_ns >= left_out.start_ns)
        launched_late = (launch >= 0) & late[launch]
        counts &= ~late & ~launched_late
    if not steps and counts.any():
        start_ns, end_ns = int(slices.start_ns[counts].min()), int(slices.end_ns[counts].max())
        steps = [Step(number=0, name="", start_ns=start_ns, end_ns=end_ns)]
    return Window(trace=trace, counts=counts, launch=launch, steps=tuple(steps), left_out=left_out)


def _profiler_steps(trace: Trace) -> list[Step]:
    """Find the profiler steps by time; if several processes or threads have the same number, the first counts."""
    slices = trace.slices
    named = trace.names_where(STEP.match)
    found: dict[int, Step] = {}
    rows = np.flatnonzero(named[slices.name] & trace.is_of((Kind.OP, Kind.ANNOTATION))).tolist()
    names = [trace.name(row) for row in rows]
    profilers = any(name.startswith(PROFILER) for name in names)
    for row, name in zip(rows, names, strict=True):
        if profilers and not name.startswith(PROFILER):
            continue
        match = STEP.match(name)
        number = int(match.group(1)) if match else 0
        if number not in found:
            start_ns, end_ns = int(slices.start_ns[row]), int(slices.end_ns[row])
            found[number] = Step(number=number, name=name, start_ns=start_ns, end_ns=end_ns)
    steps = sorted(found.values(), key=lambda step: step.start_ns)
    last_ns = int(slices.end_ns[trace.host_rows].max(initial=0))
    return steps if profilers else _until_next(steps, last_ns)


def _until_next(steps: list[Step], last_ns: int) -> list[Step]:
    """Where the label of a step is only a mark, its step lasts until the next one; the last, as long as the trace."""
    found = []
    for at, step in enumerate(steps):
        end_ns = step.end_ns
        if end_ns - step.start_ns < LONGEST_MARK_NS:
            following = steps[at + 1] if at + 1 < len(steps) else None
            if following is None:
                end_ns = max(end_ns, last_ns)
            elif following.number == step.number + 1:
                end_ns = following.start_ns
        found.append(replace(step, end_ns=end_ns))
    return found


def _step_at(steps: tuple[Step, ...], times: Ints) -> NDArray[np.int64]:
    """Return the step that contains each instant, [n]; −1: none."""
    if not steps:
        return np.full(len(times), -1, np.int64)
    starts = np.array([step.start_ns for step in steps])
    ends = np.array([step.end_ns for step in steps])
    at = np.searchsorted(starts, times, side="right") - 1
    return np.where((at >= 0) & (times < ends[np.maximum(at, 0)]), at, -1)
