"""Finds what grows when the memory of this process grows: the list, dict, set or deque that only gets longer.

Now and then, after a step, the memory that the process uses (and torch's allocator, on the device) is read.  If
it rose several times in a row, the containers that the script can reach are counted, and once more a little later.  A
container that grew with the steps is described: its name, the line that made it, and what it holds.  A script that
keeps losses, outputs or hidden states keeps them in such a container.  If no container explains the rise, a variable
does whose graph reaches back to the first count (``total += loss``), or tensors of which there are more than before.

The readings also become *floors*: the lowest memory of each stretch of the run, of which there are few however long it
is.  If they rise, they are a fact as well (``floors``): the steps that are judged while a job runs, and the samples
that are kept of a long one, are too few to see 100 MB an epoch.  Then, too, everything is counted, and again when
there is so much more of it: once in an epoch is no rise in a row.

*What a count visits* (``ContainerWalk``): the variables of the functions that run, of the modules that they are in and
of the script's other modules, and from there the attributes and elements that lead on; of a large container only some
elements, since its length is what matters.  Most leaks are found that way in a millisecond or two; if nothing explains
the rise, the next count visits more (``effort``).  It is a walk from the names that the script itself uses, not over
all objects of the process: that takes as long as the process is large (1.6 s for 5 million small lists), while this
takes as long as the script has variables, and it knows their names.  What only C++ or another thread holds is not
found.

*What it costs.*  ``SLICE_NS`` in a step; then the walk waits until its time is less than ``MOST_COST`` of the run's,
and continues after a later step.  In between it holds names, ids, lengths and weak references, so nothing is kept alive
and nothing of the script's code is run (``recorder/variables.py`` has the rules).  The result is a fact (``growing``),
which joins the finding ``memory_creep``; it is not a separate finding.
"""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from stepscope.recorder.guard import failsafe
from stepscope.recorder.layers.malloc_free import MallocFree, free_in_glibc
from stepscope.recorder.variables import (
    CO_OPTIMIZED,
    OUR_MODULES,
    SAMPLE,
    attributes_of,
    class_name,
    class_namespace,
    is_python_class,
    items_of,
    last_of,
    length_of,
    module_namespace,
    sample_of,
    torch_functions_off,
    variables_of,
)

__all__ = ["ContainerWalk", "GrowthWatch", "MemoryFloors", "holder_of"]

FIRST_READING = 16
"""Steps between two readings of the memory, at first."""
LEAST_S, MOST_S = 0.5, 5.0
"""If they are closer than this, the distance doubles; if they are further apart, it becomes half …"""
LEAST_STEPS = 8
"""… but not less than this."""
RISES = 3
"""So many rises in a row are suspicious …"""
LEAST_BYTES = 16 << 20
LEAST_PER_STEP = 100_000.0
"""… if they are that large: 100 MB in 1,000 steps."""
MOST_COUNTS = 12
"""In one process."""
SLICE_NS = 2_000_000
"""The longest that a count continues after one step; it is checked after each variable or object, so a bit longer."""
MOST_COST = 0.001
"""Of the time since the start, for all counts together."""
SLICES_PER_READING = 8
"""A count that has to wait tries to continue this many times between two readings."""
JUMP_BYTES = 256 << 20
JUMP_SHARE = 0.25
"""Memory that rose by that much, and by that share, from one reading to the next, jumped."""
LEAST_GROWTH = 0.2
"""Elements for each step; what grows more slowly is something else."""
LEAST_SHARE = 0.1
"""Of the rise, that the elements must explain: a small log that grows with the steps is not the leak."""
SHORTEST_STRETCH_S = 2.0
MOST_STRETCHES = 32
"""If there are more, every two become one: so the whole run is seen, whatever its length."""
LEAST_STRETCHES = 12
LEAST_RISE = 64 << 20
"""Floors that rose by less are not published …"""
PUBLISH_FACTOR, MOST_PUBLISHED = 1.3, 14
"""… they are published again when they have risen by this factor, at most so many times …"""
MANY_RANKS, MANY_PUBLISH_FACTOR, MANY_PUBLISHED = 64, 4.0, 3
"""… in large jobs less often, since the hub keeps all facts that there ever were …"""
TOO_MANY_RANKS = 1024
"""… and in larger ones never."""
UNIT = 1 << 16
"""The unit in which they are published, in bytes."""
MOST_GRAPH_NODES = 1_000
"""Of all variables that are inspected; each takes 1 to 2 µs."""
LEAF = 1 << 63
MOST_FRAMES = 200
MOST_NAMES = 4_096
"""Variables of one module."""
MOST_ATTRIBUTES = 256
"""Of one object."""
MOST_SEEN = 200_000
"""Containers and objects that one count visits."""
FIRST_OBJECTS = 100
"""Objects whose attributes the first count visits; if that explains nothing, the next one visits all."""
MOST_EFFORT = 2
MOST_WAITING = 20_000
"""Objects that are visited later; each has a weak reference."""
DEEPEST = 4
"""Containers inside each other; below an object it begins again."""
STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
TEXT = 120
PAGE = os.sysconf("SC_PAGE_SIZE")

TensorKind = tuple[Any, ...]
"""dtype, shape and device."""
Namer = Callable[[Any], tuple[str, str]]
"""How to name a value, called only if it has grown: its name, or an empty text, and where it was made."""


class Census:
    """Lengths of containers and numbers of tensors; of both only what identifies them."""

    def __init__(self, step: int, used: int, *, patient: bool) -> None:
        self.step = step
        self.used = used
        self.patient = patient
        """Whether to wait until memory has grown by much more, however long that takes."""
        self.lengths: dict[int, tuple[int, int]] = {}
        """By id: the length, and after which step it was counted."""
        self.tensors: dict[TensorKind, int] = {}
        self.sequence = _sequence()
        """Of the next node of an autograd graph."""


class _Count:
    """The first of two counts: what is there."""

    def __init__(self, census: Census, *, effort: int) -> None:
        self.census = census
        self.walk = ContainerWalk(effort=effort)

    def container(self, value: Any, length: int, namer: Namer, step: int) -> None:
        self.census.lengths[id(value)] = length, step

    def tensor(self, value: Any, holder: Any, namer: Namer) -> None:
        kind = _tensor_kind(value)
        self.census.tensors[kind] = self.census.tensors.get(kind, 0) + 1

    def finish(self, step: int, used: int) -> dict[str, Any]:
        return {}


class _Comparison:
    """The second of two counts: what has grown since the first."""

    def __init__(self, before: Census, used: int, *, effort: int) -> None:
        self.before = before
        self.walk = ContainerWalk(effort=effort)
        self._rise = used - before.used
        self._best: dict[str, Any] = {}
        self._weight = 0
        self._tensors: dict[TensorKind, list[Any]] = {}
        """How many there are, the size of one, its description, and what holds it."""

    def container(self, value: Any, length: int, namer: Namer, step: int) -> None:
        known = self.before.lengths.get(id(value))
        if known is None or length <= known[0]:
            return
        more, steps = length - known[0], max(step - known[1], 1)
        if not self.before.patient and more < LEAST_GROWTH * steps:
            return
        size, text, graph = describe(last_of(value))
        # A tensor that keeps its graph alive keeps the activations too, which cannot be counted: it explains any rise.
        weight = self._rise + size * more if graph else size * more
        if weight >= max(self._weight, LEAST_SHARE * self._rise):
            self._weight = weight
            self._best = _growing(_named(value, namer) or f"a {class_name(value)}", more / steps, text, size, graph)

    def tensor(self, value: Any, holder: Any, namer: Namer) -> None:
        """Count a tensor, which is in a container, or not (None)."""
        kind = _tensor_kind(value)
        known = self._tensors.get(kind)
        if known is None:
            self._tensors[kind] = known = [0, *describe(value), ""]
        known[0] += 1
        if known[0] > self.before.tensors.get(kind, 0) and not known[4] and holder is not None:
            known[4] = _named(holder, namer)

    def finish(self, step: int, used: int) -> dict[str, Any]:
        before, best = self.before, self._best
        if not best and (variable := _keeps_graphs(sys._getframe(), before.sequence)):
            best = _growing(variable, 0.0, "", 0, True)
        if not best:
            best = self._more_tensors(max(step - before.step, 1))
        return {"growing": {**best, "from": before.step, "to": step}} if best else {}

    def _more_tensors(self, steps: int) -> dict[str, Any]:
        """The kind of tensor of which there are most bytes more than before, and what keeps one; or {}."""
        best, most = {}, max(LEAST_SHARE * self._rise, 1)
        for kind, (count, size, text, graph, holder) in self._tensors.items():
            more = count - self.before.tensors.get(kind, 0)
            if more * size >= most:
                most = more * size
                best = _growing(holder, more / steps, text, size, graph)
        return best


class GrowthWatch:
    def __init__(
        self,
        *,
        now_s: Callable[[], float] = time.monotonic,
        used: Callable[[], int] | None = None,
        malloc_free: Callable[[], int] | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """``used``: memory of the process; ``malloc_free``: the free part of it; ``clock_ns``: measures counts."""
        self.due_at = FIRST_READING
        """After this step, check again."""
        self._now_s = now_s
        self._clock_ns = clock_ns
        self._read = memory_in_use if used is None else lambda: (int(used()), 0)
        self.floors = MemoryFloors(now_s())
        self.malloc_free = MallocFree(free_in_glibc() if used is None else malloc_free)
        self._every = FIRST_READING
        self._read_at = FIRST_READING
        self._began_s = self._read_s = now_s()
        self._rises: list[tuple[int, int]] = []
        """(step, bytes) of readings, each higher than the one before."""
        self._census: Census | None = None
        """The first of two, between which something grew."""
        self._count: _Count | _Comparison | None = None
        """The count in progress."""
        self._effort = 0
        """More after counts that explained nothing."""
        self._spent_ns = 0
        self._counts = 0
        self._enough_until = 0
        """Bytes: once it is known what grows, nothing is counted before there is twice as much."""
        self._last: int | None = None
        """What was used at the last reading …"""
        self._size: int | None = None
        """… and what the process held."""
        self.jumped = False
        """Whether memory jumped before the last reading."""
        self.counted = False
        """Whether something was counted in the last check, which takes some time."""

    @failsafe
    def check(self, step: int) -> dict[str, Any]:
        """Look after this step, if it is time; facts about what grows, or {}."""
        if step < self.due_at:
            return {}
        self.counted = self.jumped = False
        facts = self._take_reading(step) if step >= self._read_at else {}
        if self._count is not None and self._spent_ns <= MOST_COST * 1e9 * (self._now_s() - self._began_s):
            facts = {**facts, **self._go_on(self._count, step)}
        wait = max(self._every // SLICES_PER_READING, 1)
        self.due_at = self._read_at if self._count is None else min(self._read_at, step + wait)
        return facts

    def _take_reading(self, step: int) -> dict[str, Any]:
        now_s = self._now_s()
        if now_s - self._read_s < LEAST_S:
            self._every *= 2
        elif now_s - self._read_s > MOST_S:
            self._every = max(self._every // 2, LEAST_STEPS)
        self._read_s = now_s
        self._read_at = step + self._every
        host, device = self._read()
        free, of_malloc = self.malloc_free.read(step, now_s, host)
        used = max(host - free, 0) + device
        last, self._size = self._size, host + device
        self.jumped = last is not None and self._size - last >= max(JUMP_BYTES, JUMP_SHARE * last)
        self._last = used
        floors = self.floors.add(step, now_s, host, device)
        if self._rises and used <= self._rises[-1][1]:
            self._rises.clear()
            if self._census is not None and not self._census.patient:
                self._census = self._count = None
        self._rises.append((step, used))
        if self._count is None:
            self._begin_count(step, used, rising=bool(floors) and not self.floors.over)
        return {**floors, **of_malloc}

    def _begin_count(self, step: int, used: int, *, rising: bool) -> None:
        census = self._census
        if census is not None:
            if used - census.used >= (2 * LEAST_RISE if census.patient else 1):
                self._counts += 1
                self._count = _Comparison(census, used, effort=self._effort)
        elif self._counts < MOST_COUNTS and used >= self._enough_until and (rising or self._suspicious()):
            self._counts += 1
            self._census = Census(step, used, patient=not self._suspicious())
            self._count = _Count(self._census, effort=self._effort)

    def _go_on(self, count: _Count | _Comparison, step: int) -> dict[str, Any]:
        """Count for a while; if that is the end of it, what was found."""
        self.counted = True
        began_ns = self._clock_ns()
        until_ns = began_ns + SLICE_NS
        facts: dict[str, Any] = {}
        try:
            with torch_functions_off():
                over = count.walk.go_on(sys._getframe(), count, step, lambda: self._clock_ns() >= until_ns)
                if over:
                    self._count = None
                    facts = count.finish(step, self._last or 0)
        finally:
            self._spent_ns += self._clock_ns() - began_ns
        if over and type(count) is _Comparison:
            self._census = None
            self._rises.clear()
            self._enough_until = 2 * (self._last or 0) if facts else 0
            self._effort = 0 if facts else min(self._effort + 1, MOST_EFFORT)
        return facts

    def _suspicious(self) -> bool:
        (first_step, first), (last_step, last) = self._rises[0], self._rises[-1]
        enough = last - first >= max(LEAST_BYTES, LEAST_PER_STEP * (last_step - first_step))
        return len(self._rises) > RISES and enough


def _growing(holder: str, per_step: float, element: str, size: int, graph: bool) -> dict[str, Any]:
    return {
        "holder": holder[:TEXT],
        "per_step": round(per_step, 2 if per_step >= 1 else 4),
        "element": element[:TEXT],
        "element_bytes": size,
        "graph": graph,
    }


class MemoryFloors:
    """The lowest memory of stretches of the run, from readings between steps."""

    def __init__(self, now_s: float) -> None:
        self._run_began_s = self._began_s = now_s
        self._stretch_s = SHORTEST_STRETCH_S
        self._stretches: list[list[int]] = []
        """``[first step, lowest on the host, lowest on the device]``, the last one not complete yet."""
        self._epochs: list[int] = []
        """The steps at which the first, the second and the last epoch began …"""
        self._epochs_begun = 0
        """… and how many there were."""
        self._published = 0
        self._published_rise = 0
        self.over = False
        """Whether what was published last is no longer so."""
        self.world_size = 1

    def epoch_begins(self, step: int) -> None:
        if self._epochs and self._epochs[-1] == step:
            return
        self._epochs_begun += 1
        self._epochs = [*self._epochs[:2], step]

    def add(self, step: int, now_s: float, host: int, device: int) -> dict[str, Any]:
        """Add a reading after this step; facts if the floors rise, else {}."""
        if not self._stretches or now_s - self._began_s >= self._stretch_s:
            self._began_s = now_s
            self._stretches.append([step, host, device])
            if len(self._stretches) > MOST_STRETCHES:
                self._join(now_s)
            return self._facts()
        last = self._stretches[-1]
        last[1:] = min(last[1], host), min(last[2], device)
        return {}

    def _join(self, now_s: float) -> None:
        self._stretch_s = 2 * (now_s - self._run_began_s) / MOST_STRETCHES
        *whole, current = self._stretches
        pairs = zip(whole[::2], whole[1::2], strict=True)
        self._stretches = [[a[0], min(a[1], b[1]), min(a[2], b[2])] for a, b in pairs]
        self._stretches.append(current)

    def _facts(self) -> dict[str, Any]:
        whole = self._stretches[:-1]
        rise = max(self._rise(1), self._rise(2)) if len(whole) >= LEAST_STRETCHES else 0
        factor, most = (
            (PUBLISH_FACTOR, MOST_PUBLISHED) if self.world_size <= MANY_RANKS else (MANY_PUBLISH_FACTOR, MANY_PUBLISHED)
        )
        higher = rise >= max(LEAST_RISE, factor * self._published_rise)
        higher = higher and self._published < most and self.world_size <= TOO_MANY_RANKS
        over = rise < self._published_rise / 2 and not self.over  # what was published is no longer true
        if not (higher or over):
            return {}
        self.over = over
        if higher:
            self._published += 1
            self._published_rise = rise
        host, device = ([stretch[at] // UNIT for stretch in whole] for at in (1, 2))
        floors: dict[str, Any] = {"step": [stretch[0] for stretch in whole], "host": host, "epochs": self._epochs_begun}
        floors["epoch_steps"] = list(self._epochs)
        return {"floors": {**floors, **({"device": device} if any(device) else {})}}

    def _rise(self, at: int) -> int:
        """By how much the floor rose, if it did so in the first, the second and the last third of the run."""
        floor = [stretch[at] for stretch in self._stretches[:-1]]
        for place in reversed(range(len(floor) - 1)):
            floor[place] = min(floor[place], floor[place + 1])
        start = len(floor) // 10
        ends = [floor[start + round((len(floor) - 1 - start) * third / 3)] for third in range(4)]
        return ends[3] - ends[0] if ends[0] < ends[1] < ends[2] < ends[3] else 0


def memory_in_use() -> tuple[int, int]:
    """Bytes of this process, without mapped files, and of torch's allocator on the current device."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_bytes().split())
    torch: Any = sys.modules.get("torch")
    cuda: Any = getattr(torch, "cuda", None)
    device = 0
    if cuda is not None and cuda.is_initialized():
        index = cuda.current_device()
        device = int(torch._C._cuda_memoryStats(index)["allocated_bytes"]["all"]["current"])
    return (resident - shared) * PAGE, device


# -- Walk -------------------------------------------------------------------------------------------------------------

_closure = FunctionType.__dict__["__closure__"].__get__
_defaults = FunctionType.__dict__["__defaults__"].__get__
_function = MethodType.__dict__["__func__"].__get__
_owner = MethodType.__dict__["__self__"].__get__

_ATOMS = frozenset(map(id, (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, CodeType)))
"""Types whose objects lead nowhere, by id."""


class ContainerWalk:
    """One walk over what the script can reach, in slices: in between it holds names, ids and weak references."""

    def __init__(self, *, effort: int = 0) -> None:
        """``effort``: 0 visits the first objects that are met, 1 all, 2 also the variables of libraries."""
        self._effort = effort
        self._objects_left = FIRST_OBJECTS if effort == 0 else MOST_SEEN
        self._frames_done = 0
        """From the outermost one."""
        self._modules = [name for name in list(sys.modules) if type(name) is str]
        """Names of the modules still to be visited, the last one first."""
        self._libraries: list[str] = []
        """Those among them that are not the script's; they are visited at the end."""
        self._later: deque[weakref.ref[Any]] = deque()
        """Objects still to be visited."""
        self._seen: set[int] = set()
        """Ids of values that were met …"""
        self._visited: set[int] = set()
        """… and of objects whose attributes were visited."""
        torch: Any = sys.modules.get("torch")
        self._tensor = id(torch.Tensor) if tensor_types() else 0
        self._parameter = id(torch.nn.Parameter) if tensor_types() else 0
        self._module: type | None = torch.nn.Module if tensor_types() else None

    def go_on(self, frame: FrameType | None, count: _Count | _Comparison, step: int, over: Callable[[], bool]) -> bool:
        """Continue with the stack of ``frame`` until ``over``; return whether everything was visited."""
        for visit in (self._visit_frame, self._visit_module, self._visit_object, self._visit_library):
            while visit(frame, count, step):
                if len(self._seen) >= MOST_SEEN:
                    return True
                if over():
                    return False
        return True

    def _visit_frame(self, frame: FrameType | None, count: _Count | _Comparison, step: int) -> bool:
        """Visit the variables of the outermost function that was not visited; False if there is none."""
        frames = [here for here in islice(_stack(frame), MOST_FRAMES) if not is_ours(here.f_globals)]
        frames.reverse()  # the outermost ones stay the same from step to step
        if self._frames_done >= len(frames):
            return False
        here = frames[self._frames_done]
        self._frames_done += 1
        # Containers first: the closure of an inner function has the same ones, but no line that made them.
        for name, value in sorted(variables_of(here), key=lambda pair: length_of(pair[1]) < 0):
            self._visit(value, _variable(name, here.f_code), count, step)
        if id(here.f_globals) not in self._seen:
            self._visit_names(here.f_globals, "", _module_code(frame, here.f_globals), count, step)
        return True

    def _visit_module(self, frame: FrameType | None, count: _Count | _Comparison, step: int) -> bool:
        """Visit the variables of a module of the script; False if there is none."""
        if not self._modules:
            return False
        name = self._modules.pop()
        if self._effort < MOST_EFFORT and name in _known_libraries:
            return True
        names = module_namespace(sys.modules.get(name))
        if names is None or id(names) in self._seen or is_ours(names):
            return True
        if name in _known_libraries or is_library(names):
            _known_libraries.add(name)
            self._libraries += [name] if self._effort >= MOST_EFFORT else []
        else:
            self._visit_names(names, "" if name == "__main__" else f"{name}.", None, count, step)
        return True

    def _visit_library(self, frame: FrameType | None, count: _Count | _Comparison, step: int) -> bool:
        """Visit a module that is not the script's: only its variables, not what is in them."""
        if not self._libraries:
            return False
        name = self._libraries.pop()
        names = module_namespace(sys.modules.get(name))
        if names is not None:
            self._visit_names(names, f"{name}.", None, count, step, deep=False)
        return True

    def _visit_object(self, frame: FrameType | None, count: _Count | _Comparison, step: int) -> bool:
        """Visit what an object refers to: its attributes and slots, in a dict or not."""
        if not self._later or not self._objects_left:
            return False
        self._objects_left -= 1
        value = self._later.popleft()()
        if value is not None and id(value) not in self._visited:
            self._visited.add(id(value))
            namer = _attribute(value)
            if self._module is not None and issubclass(type(value), self._module):
                # All layers of a model, however many: each may keep something.
                for child in dict.values((attributes_of(value) or {}).get("_modules") or {}):
                    self._wait(child)
            for part in gc.get_referents(value):
                if not issubclass(type(part), type):
                    self._visit(part, namer, count, step, keyed=False)
        return True

    def _visit_names(
        self,
        names: dict[str, Any],
        prefix: str,
        code: CodeType | None,
        count: _Count | _Comparison,
        step: int,
        *,
        deep: bool = True,
    ) -> None:
        """Visit the variables of a module; not ``deep``: only those that are containers, not what is in them."""
        self._seen.add(id(names))
        for name, value in list(islice(names.items(), MOST_NAMES)):
            kind = type(value)
            if id(kind) in _ATOMS or type(name) is not str or name.startswith("__"):
                continue
            if not deep:
                length = -1 if kind is FunctionType or kind is type else length_of(value)
                if length > 0:
                    count.container(value, length, _variable(name, code, prefix), step)
            elif issubclass(kind, type):
                self._visit_class(value, names, count, step)
            else:
                self._visit(value, _variable(name, code, prefix), count, step)

    def _visit_class(self, cls: type, names: dict[str, Any], count: _Count | _Comparison, step: int) -> None:
        """Visit the attributes of a class that is defined in this module."""
        own = class_namespace(cls)
        if id(cls) in self._seen or own.get("__module__") is not names.get("__name__"):
            return
        self._seen.add(id(cls))
        for key, value in list(own.items()):
            if id(type(value)) not in _ATOMS and length_of(value) >= 0:
                self._visit(value, _variable(key, None, f"{class_name(cls, itself=True)}."), count, step)

    def _visit(self, value: Any, namer: Namer, count: _Count | _Comparison, step: int, *, keyed: bool = True) -> None:
        """Visit a value and what is in it; ``keyed``: what is in it is named by its key, not by ``namer`` itself."""
        left: list[tuple[Any, Namer, int, Any, Namer]] = [(value, namer, 0, None, namer)]
        seen = self._seen
        while left:
            value, namer, depth, holder, holder_namer = left.pop()
            kind = type(value)
            if id(kind) in _ATOMS or id(kind) == self._parameter or id(value) in seen:
                continue
            seen.add(id(value))
            if id(kind) == self._tensor:
                count.tensor(value, holder, holder_namer)
                continue
            length = length_of(value)
            if length >= 0:
                if length and not issubclass(kind, tuple | frozenset):
                    count.container(value, length, namer, step)
                if depth < DEEPEST and length:
                    most = SAMPLE if keyed or depth or not _may_be_attributes(value) else MOST_ATTRIBUTES
                    left += [
                        (part, _element(value, key, namer) if keyed else namer, depth + 1, value, namer)
                        for key, part in items_of(value, most)
                    ]
            elif kind is FunctionType:
                for name, part in _kept_by(value):
                    inner = _variable_of_function(name, value)
                    left.append((part, inner, depth + 1, None, inner))
            elif kind is MethodType:
                left += [(part, namer, depth + 1, None, namer) for part in (_owner(value), _function(value))]
            elif is_python_class(kind) and not issubclass(kind, type | ModuleType):
                self._wait(value)

    def _wait(self, value: Any) -> None:
        """Visit an object later, if it is there then."""
        if value is not None and len(self._later) < MOST_WAITING:
            try:
                self._later.append(weakref.ref(value))
            except TypeError:  # a class with slots
                return


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


_paths = sysconfig.get_paths()
_LIBRARIES = tuple({f"{_paths[name]}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


_known_libraries: set[str] = set()
"""Names of modules."""


def is_library(names: dict[str, Any]) -> bool:
    """Whether the module with these variables is installed, or part of Python."""
    file = names.get("__file__")
    if type(file) is not str:
        return names.get("__name__") != "__main__"
    return file.startswith(_LIBRARIES) or any(part in file for part in _INSTALLED)


def is_ours(names: Any) -> bool:
    name = names.get("__name__")
    return type(name) is str and name.startswith(OUR_MODULES)


def _may_be_attributes(value: Any) -> bool:
    """Whether a part of an object may be the dict of its attributes."""
    return type(value) is dict and type(next(iter(value))) is str


def _kept_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Variables that a function keeps while it is not running: those of its closure, and defaults of its arguments."""
    code, defaults = function.__code__, _defaults(function) or ()
    for name, cell in zip(code.co_freevars, _closure(function) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not yet filled
            continue
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=False)


# -- Names ------------------------------------------------------------------------------------------------------------


def _named(value: Any, namer: Namer) -> str:
    """``kept, a list made at train.py:88``; empty for what has no name."""
    name, made = namer(value)
    return f"{name}, a {class_name(value)}{made}" if name else ""


def _variable(name: str, code: CodeType | None, prefix: str = "") -> Namer:
    return lambda _: (prefix + name, made_at(name, code))


def _variable_of_function(name: str, function: FunctionType) -> Namer:
    code = function.__code__
    return lambda _: (f"{name} of {code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})", "")


def _element(container: Any, key: Any, outer: Namer) -> Namer:
    """``history['loss']``."""
    return lambda _: (outer(container)[0] + _key_text(key), "")


def _attribute(owner: Any) -> Namer:
    return lambda value: (attribute_name(owner, value), "")


def _key_text(key: Any) -> str:
    return f"[{key!r}]" if type(key) in (str, int) else "[…]"


def attribute_name(owner: Any, value: Any) -> str:
    """``Trainer.seen`` or ``Trainer.log['loss']``: how an object leads to a value; empty for its dict of attributes."""
    kind, names = class_name(owner), attributes_of(owner) or {}
    if names is value:
        return ""
    named = [(name, attribute) for name, attribute in list(names.items()) if type(name) is str]
    for name, attribute in named:
        if attribute is value:
            return f"{kind}.{name}"
    for name, attribute in named:
        for key, inner in items_of(attribute):
            if inner is value:
                return f"{kind}.{name}{_key_text(key)}"
    return f"an attribute of {kind}"


def holder_of(tensor: Any, frame: FrameType | None, ours: set[int]) -> str:
    """The container with a name that holds a tensor, or empty.  ``ours``: ids of our own containers.

    It visits every object of the process, so it is only for one that is dying (``layers/memory_dump.py``).
    """
    holders = (list, tuple, dict, set, deque)
    containers = [
        referrer for referrer in gc.get_referrers(tensor) if type(referrer) in holders and id(referrer) not in ours
    ]
    ours = {*ours, id(containers)}
    for container in containers:
        holder = container
        if type(holder) is tuple:  # a list of pairs: the list is what grows
            outer = [
                referrer
                for referrer in gc.get_referrers(holder)
                if type(referrer) in (list, dict) and id(referrer) not in ours
            ]
            holder = outer[0] if outer else None
        if holder is not None and not _is_namespace(holder):
            found = _in_frames(holder, frame) or _in_referrers(holder)
            if found is not None:
                name, made = found
                return f"{name}, a {class_name(holder)}{made}"
    return ""


def _is_namespace(holder: Any) -> bool:
    """Whether it holds the variables of a module, or the attributes of a module of the model."""
    return type(holder) is dict and ("__name__" in holder or "_parameters" in holder)


def _in_frames(container: Any, frame: FrameType | None) -> tuple[str, str] | None:
    """As a variable of a function that is running, or of a module that one is in."""
    for here in _stack(frame):
        if is_ours(here.f_globals):
            continue
        for name, value in variables_of(here):
            if value is container:
                return name, made_at(name, here.f_code)
        for name, value in list(here.f_globals.items()):
            if value is container:
                return name, made_at(name, _module_code(frame, here.f_globals))
    return None


def _in_referrers(container: Any) -> tuple[str, str] | None:
    """As a variable of a module, or as an attribute of an object."""
    for holder in gc.get_referrers(container):
        kind = type(holder)
        if issubclass(kind, ModuleType | FrameType):
            continue
        if kind is not dict:
            if is_python_class(kind) and any(value is container for value in (attributes_of(holder) or {}).values()):
                return attribute_name(holder, container), ""
            continue
        names: dict[str, Any] = holder
        if is_ours(names):
            continue
        for name, value in list(names.items()):
            if value is container and type(name) is str:
                module = sys.modules.get(str(names.get("__name__")))
                if module is not None and module_namespace(module) is names:
                    return f"{names['__name__']}.{name}", ""
                owner = next(
                    (referrer for referrer in gc.get_referrers(holder) if attributes_of(referrer) is names), None
                )
                return (attribute_name(owner, container) if owner is not None else repr(name)), ""
    return None


def _module_code(frame: FrameType | None, names: Any) -> CodeType | None:
    """Of the module with these variables, if it is running, as a script is."""
    codes = (here.f_code for here in _stack(frame) if here.f_globals is names and here.f_code.co_name == "<module>")
    return next(codes, None)


def made_at(name: str, code: CodeType | None) -> str:
    """``made at train.py:88``: the first line that assigns the name."""
    line = None if code is None else next(_lines_of(code, name), None)
    return "" if code is None or line is None else f" made at {Path(code.co_filename).name}:{line}"


def _lines_of(code: CodeType, name: str) -> Iterator[int]:
    import dis  # only where something grows

    line = code.co_firstlineno
    for at in dis.get_instructions(code):
        start = at.starts_line
        if type(start) is int:
            line = start
        elif start and (number := getattr(at, "line_number", None)) is not None:  # Python 3.13: a bool and a number
            line = number
        if at.opname in STORES and at.argval == name:
            yield line


# -- Elements ---------------------------------------------------------------------------------------------------------
# Tensors of exactly torch's own classes are read with the descriptors of those classes, while ``__torch_function__`` is
# off: neither a subclass nor a mode of the script sees it.  Of other classes only what they refer to is described.

_BUILT_IN = frozenset(map(id, (int, float, complex, str, bytes, bytearray, range, list, tuple, dict, set, frozenset)))


def tensor_types() -> frozenset[int]:
    """The ids of torch's own classes of tensors."""
    torch: Any = sys.modules.get("torch")
    nn: Any = getattr(torch, "nn", None)
    if nn is None or not hasattr(torch._C, "DisableTorchFunction"):
        return frozenset()
    return frozenset({id(torch.Tensor), id(nn.Parameter)})


def _tensor_kind(tensor: Any) -> TensorKind:
    torch: Any = sys.modules["torch"]
    base = torch._C.TensorBase
    return base.dtype.__get__(tensor), tuple(base.shape.__get__(tensor)), base.device.__get__(tensor)


def describe(element: Any, deeper: int = 2) -> tuple[int, str, bool]:
    """Its size in bytes, what it is in words, and whether it keeps a graph alive."""
    kind = type(element)
    if id(kind) in tensor_types():
        torch: Any = sys.modules["torch"]
        base = torch._C.TensorBase
        size = int(base.nbytes.__get__(element))
        return size, _array_text(*_tensor_kind(element)), base.grad_fn.__get__(element) is not None
    numpy: Any = sys.modules.get("numpy")
    array: Any = getattr(numpy, "ndarray", None)
    if array is not None and kind is array:
        return int(element.nbytes), _array_text(element.dtype, element.shape), False
    name = class_name(element)
    parts = []
    if deeper and length_of(element) > 0:
        parts = sample_of(element)
    elif deeper and length_of(element) < 0 and is_python_class(kind):
        parts = [part for part in gc.get_referents(element) if not issubclass(type(part), type)]
    size = sys.getsizeof(element) if id(kind) in _BUILT_IN else object.__sizeof__(element)
    described = [describe(part, deeper - 1) for part in parts[:LEAST_STEPS] if id(type(part)) not in _ATOMS]
    largest = max(described, key=lambda part: part[0], default=None)
    if largest is None or largest[0] <= size:
        return size, name, False
    # An object's attributes may be in a dict, which is no news.
    text = largest[1].removeprefix("dict with ") if length_of(element) < 0 else largest[1]
    return sum(part[0] for part in described), f"{name} with {text}", any(part[2] for part in described)


def _array_text(dtype: Any, shape: Any, device: Any = None) -> str:
    where = "" if device is None or device.type == "cpu" else f" on {device}"
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]{where}"


# -- Graphs -----------------------------------------------------------------------------------------------------------


def _sequence() -> int:
    torch: Any = sys.modules.get("torch")
    return 0 if torch is None else int(torch._C._autograd._get_sequence_nr())


def _keeps_graphs(frame: FrameType | None, before: int) -> str:
    """``total in main (train.py:88)``: a variable of the script whose graph has nodes from before this number."""
    torch: Any = sys.modules.get("torch")
    plain = tensor_types()
    nodes = MOST_GRAPH_NODES
    for here in _stack(frame) if plain else ():
        code, module = here.f_code, here.f_globals.get("__name__")
        if is_ours(here.f_globals) or (type(module) is str and module.startswith("torch.")):
            continue
        for name, value in _tensors_of(here, plain):
            node = torch._C.TensorBase.grad_fn.__get__(value)
            if node is not None:
                found, nodes = _reaches_back(torch, node, before, nodes)
                if found:
                    made = next(_lines_of(code, name), code.co_firstlineno)
                    function = "" if code.co_name == "<module>" else f" in {code.co_name}"
                    return f"{name}{function} ({Path(code.co_filename).name}:{made})"
    return ""


def _tensors_of(frame: FrameType, plain: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Local variables of a function, and the attributes of the object that it is a method of."""
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        names: Any = list(islice(frame.f_globals.items(), MOST_NAMES))
    else:
        names = variables_of(frame)
    for name, value in names:
        if id(type(value)) in plain:
            yield name, value
        elif name == "self" and is_python_class(type(value)):
            attributes = list((attributes_of(value) or {}).items())
            yield from ((f"self.{key}", inner) for key, inner in attributes if id(type(inner)) in plain)


def _reaches_back(torch: Any, node: Any, before: int, most: int) -> tuple[bool, int]:
    """Whether the oldest way through a graph has a node from before; and how many nodes may still be visited."""
    while most > 0:
        most -= 1
        # Leaves have the largest number that there is.
        older = [(_sequence_of(torch, inner), inner) for inner, _ in _next_of(torch, node) if inner is not None]
        sequence, node = min(older, key=lambda pair: pair[0], default=(LEAF, None))
        if sequence < before:
            return True, most
        if sequence >= LEAF:
            break
    return False, most


def _next_of(torch: Any, node: Any) -> Any:
    """A node of a function that the script defines is read as torch's own class is."""
    if issubclass(type(node), torch._C._FunctionBase):
        return torch._C._FunctionBase.next_functions.__get__(node)
    return node.next_functions


def _sequence_of(torch: Any, node: Any) -> int:
    if issubclass(type(node), torch._C._FunctionBase):
        return int(torch._C._FunctionBase._sequence_nr(node))
    return int(node._sequence_nr())
