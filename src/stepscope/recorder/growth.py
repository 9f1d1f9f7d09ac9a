"""Finds what grows when the memory of this process grows: the list, dict, set or deque that only gets longer.

Now and then, after a step, the memory of the process (and what torch's allocator has in use on the device) is read.  If
it rose several times in a row, all containers and tensors of the process are counted, and once more a little later.  A
container that grew with the steps is described: its name, the line that made it, and what it holds.  A script that
keeps losses, outputs or hidden states keeps them in such a container.  If no container explains the rise, a variable
does whose graph reaches back to the first count (``total += loss``), or tensors of which there are more than before.

The readings also become *floors*: the lowest memory of each stretch of the run, of which there are few however long it
is.  If they rise, they are a fact as well (``floors``): the steps that are judged while a job runs, and the samples
that are kept of a long one, are too few to see 100 MB an epoch.  Then, too, everything is counted, and again when
there is so much more of it: once in an epoch is no rise in a row.

A count visits every object that Python's garbage collector tracks (20 ms for 300,000 of them), so it is only done on
suspicion and at most a few times in a process.  Nothing is kept alive: a count holds ids and lengths.  The result is a
fact (``growing``), which joins the finding ``memory_creep``; it is not a finding of its own.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from stepscope.recorder.guard import failsafe

__all__ = ["GrowthWatch", "MemoryFloors"]

FIRST_LOOK = 50
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
MOST_COUNTS = 6
"""In one process."""
JUMP_BYTES = 256 << 20
JUMP_SHARE = 0.25
"""Memory that rose by that much, and by that share, from one look to the next, jumped."""
LEAST_LENGTH = 16
"""Shorter containers are not counted."""
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
TOLD_AGAIN, MOST_TOLD = 1.3, 14
"""… they are published again when they have risen by this factor, at most so many times …"""
MANY_RANKS, MANY_TOLD_AGAIN, MANY_TOLD = 64, 4.0, 3
"""… in large jobs less often, since the hub keeps all facts that there ever were …"""
TOO_MANY_RANKS = 1024
"""… and in larger ones never."""
UNIT = 1 << 16
"""The unit in which they are published, in bytes."""
CONTAINERS = frozenset({list, dict, set, deque})
MOST_GRAPH_NODES = 20_000
"""Of all variables that are looked at."""
LEAF = 1 << 63
CO_OPTIMIZED = 1
"""The code of a function, as in ``inspect``."""
MOST_NAMED = 8
"""Containers whose elements and names are looked at."""
STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
TEXT = 120
PAGE = os.sysconf("SC_PAGE_SIZE")

Counted = dict[int, int]
"""Length by id."""
Tensors = dict[tuple[Any, ...], int]
"""How many there are, by dtype, shape and device."""


class Census:
    """Containers and tensors of the process after a step."""

    __slots__ = ("lengths", "patient", "sequence", "step", "tensors", "used")

    def __init__(self, step: int, used: int, *, patient: bool) -> None:
        self.step = step
        self.used = used
        self.patient = patient
        """Whether to wait until memory has grown by much more, however long that takes."""
        self.lengths, self.tensors = count_objects()
        self.sequence = _sequence()
        """Of the next node of an autograd graph."""


class GrowthWatch:
    def __init__(self, *, now_s: Callable[[], float] = time.monotonic, used: Callable[[], int] | None = None) -> None:
        self.due_at = FIRST_LOOK
        """After this step, look again."""
        self._now_s = now_s
        self._read = memory_in_use if used is None else lambda: (int(used()), 0)
        self.floors = MemoryFloors(now_s())
        self._every = FIRST_LOOK
        self._looked_s = now_s()
        self._rises: list[tuple[int, int]] = []
        """(step, bytes) of looks, each higher than the one before."""
        self._counted: Census | None = None
        """The first of two, between which something grew."""
        self._counts = 0
        self._last: int | None = None
        self.jumped = False
        """Whether memory jumped before the last look."""
        self.counted = False
        """Whether everything was counted in the last look, which takes some time."""

    @failsafe
    def look(self, step: int) -> dict[str, Any]:
        """Look after this step, if it is time; facts about what grows, or {}."""
        if step < self.due_at:
            return {}
        now_s = self._now_s()
        if now_s - self._looked_s < LEAST_S:
            self._every *= 2
        elif now_s - self._looked_s > MOST_S:
            self._every = max(self._every // 2, LEAST_STEPS)
        self._looked_s = now_s
        self.due_at = step + self._every
        host, device = self._read()
        used = host + device
        self.jumped = self._last is not None and used - self._last >= max(JUMP_BYTES, JUMP_SHARE * self._last)
        self._last = used
        floors = self.floors.add(step, now_s, host, device)
        self.counted = False
        before = self._counted
        if self._rises and used <= self._rises[-1][1]:
            self._rises.clear()
            self._counted = before = before if before is not None and before.patient else None
        self._rises.append((step, used))
        if before is not None and used - before.used >= (2 * LEAST_RISE if before.patient else 1):
            return {**floors, **self._compare(before, step, used)}
        rising = bool(floors) and not self.floors.over
        if before is None and self._counts < MOST_COUNTS and (rising or self._suspicious()):
            self._counts += 1
            self._counted = Census(step, used, patient=not self._suspicious())
            self.counted = True
        return floors

    def _suspicious(self) -> bool:
        (first_step, first), (last_step, last) = self._rises[0], self._rises[-1]
        enough = last - first >= max(LEAST_BYTES, LEAST_PER_STEP * (last_step - first_step))
        return len(self._rises) > RISES and enough

    def _compare(self, before: Census, step: int, used: int) -> dict[str, Any]:
        """Count again, and describe the container that took most, or the tensors.

        A tensor that keeps its graph alive keeps the activations too, which cannot be counted: it explains any rise.
        """
        self._counted = None
        self._rises.clear()
        self._counts += 1
        self.counted = True
        rise, steps = used - before.used, step - before.step
        least = 1.0 if before.patient else LEAST_GROWTH * steps
        objects = gc.get_objects()
        found = sorted(_grown(objects, before.lengths, least), key=lambda one: -one[1])[:MOST_NAMED]
        best: dict[str, Any] = {}
        for container, more in found:
            size, text, graph = describe(_last_of(container))
            weight = rise + size * more if graph else size * more
            if weight >= max(best.get("weight", 0), LEAST_SHARE * rise):
                holder = name_of(container, sys._getframe())
                best = {"weight": weight, **_growing(holder, more / steps, text, size, graph)}
        if not best and (variable := _keeps_graphs(sys._getframe(), before.sequence)):
            best = _growing(variable, 0.0, "", 0, True)
        if not best:
            best = _grown_tensors(objects, before.tensors, steps, LEAST_SHARE * rise)
        best.pop("weight", None)
        return {"growing": {**best, "from": before.step, "to": step}} if best else {}


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
        self._told = 0
        self._told_rise = 0
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
        again, most = (TOLD_AGAIN, MOST_TOLD) if self.world_size <= MANY_RANKS else (MANY_TOLD_AGAIN, MANY_TOLD)
        higher = rise >= max(LEAST_RISE, again * self._told_rise)
        higher = higher and self._told < most and self.world_size <= TOO_MANY_RANKS
        over = rise < self._told_rise / 2 and not self.over  # what was published is no longer true
        if not (higher or over):
            return {}
        self.over = over
        if higher:
            self._told += 1
            self._told_rise = rise
        host, device = ([one[at] // UNIT for one in whole] for at in (1, 2))
        said: dict[str, Any] = {"step": [one[0] for one in whole], "host": host, "epochs": self._epochs_begun}
        said["epoch_steps"] = list(self._epochs)
        return {"floors": {**said, **({"device": device} if any(device) else {})}}

    def _rise(self, at: int) -> int:
        """By how much the floor rose, if it did so in the first, the second and the last third of the run."""
        floor = [one[at] for one in self._stretches[:-1]]
        for place in reversed(range(len(floor) - 1)):
            floor[place] = min(floor[place], floor[place + 1])
        start = len(floor) // 10
        ends = [floor[start + round((len(floor) - 1 - start) * third / 3)] for third in range(4)]
        return ends[3] - ends[0] if ends[0] < ends[1] < ends[2] < ends[3] else 0


def memory_in_use() -> tuple[int, int]:
    """Bytes of this process, without mapped files, and of torch's allocator on the current device."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_bytes().split())
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    device = int(cuda.memory_allocated()) if cuda is not None and cuda.is_initialized() else 0
    return (resident - shared) * PAGE, device


# -- containers -------------------------------------------------------------------------------------------------------


def count_objects() -> tuple[Counted, Tensors]:
    objects, plain = gc.get_objects(), _tensor_types()
    lengths = {id(one): len(one) for one in objects if type(one) in CONTAINERS and len(one) >= LEAST_LENGTH}
    tensors: Tensors = {}
    for one in [one for one in objects if type(one) in plain]:
        key = _key(one)
        tensors[key] = tensors.get(key, 0) + 1
    return lengths, tensors


def _tensor_types() -> frozenset[type]:
    torch: Any = sys.modules.get("torch")
    return frozenset() if torch is None else frozenset({torch.Tensor, torch.nn.Parameter})


def _key(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.device


def _grown(objects: list[Any], before: Counted, least: float) -> list[tuple[Any, int]]:
    """Containers that have at least that many more elements than before, and how many."""
    return [
        (one, more)
        for one in objects
        if type(one) in CONTAINERS and id(one) in before and (more := len(one) - before[id(one)]) >= max(least, 1)
    ]


def _grown_tensors(objects: list[Any], before: Tensors, steps: int, least: float) -> dict[str, Any]:
    """The kind of tensor of which there are most bytes more than before, and what keeps the last one; or {}."""
    now: dict[tuple[Any, ...], list[Any]] = {}
    plain = _tensor_types()
    for one in objects:
        if type(one) in plain:
            now.setdefault(_key(one), []).append(one)
    sizes = {key: (len(found) - before.get(key, 0)) * found[-1].nbytes for key, found in now.items()}
    key = max(sizes, key=lambda one: sizes[one], default=None)
    if key is None or sizes[key] < max(least, 1):
        return {}
    kept = now.pop(key)
    size, text, graph = describe(kept[-1])
    holder = holder_of(kept[-1], sys._getframe(), {id(objects), id(kept)})
    return _growing(holder, (len(kept) - before.get(key, 0)) / steps, text, size, graph)


def _last_of(container: Any) -> Any:
    if isinstance(container, dict):
        return next(reversed(container.values()), None)
    if isinstance(container, set):
        return next(iter(container), None)
    return container[-1] if container else None


def describe(element: Any) -> tuple[int, str, bool]:
    """Its size in bytes, what it is in words, and whether it keeps a graph alive."""
    if isinstance(element, tuple | list | dict):
        values = list(element.values()) if isinstance(element, dict) else list(element)
        parts = [describe(value) for value in values[:MOST_NAMED] if not isinstance(value, tuple | list | dict)]
        if not parts:
            return sys.getsizeof(element), type(element).__name__, False
        size = sum(part[0] for part in parts)
        largest = max(parts, key=lambda part: part[0])
        return size, f"{type(element).__name__} with {largest[1]}", any(part[2] for part in parts)
    shape, dtype, nbytes = (getattr(element, name, None) for name in ("shape", "dtype", "nbytes"))
    if isinstance(nbytes, int) and dtype is not None and shape is not None:
        kind = f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"
        device = getattr(element, "device", None)
        where = f" on {device}" if getattr(device, "type", "cpu") != "cpu" else ""
        return nbytes, f"{kind}{where}", getattr(element, "grad_fn", None) is not None
    return sys.getsizeof(element), type(element).__name__, False


# -- graphs -----------------------------------------------------------------------------------------------------------


def _sequence() -> int:
    torch: Any = sys.modules.get("torch")
    return 0 if torch is None else int(torch._C._autograd._get_sequence_nr())


def _keeps_graphs(frame: FrameType | None, before: int) -> str:
    """``total in main (train.py:88)``: a variable of the script whose graph has nodes from before this number."""
    torch: Any = sys.modules.get("torch")
    nodes = MOST_GRAPH_NODES
    while torch is not None and frame is not None:
        code = frame.f_code
        if not _is_ours(frame.f_globals) and not str(frame.f_globals.get("__name__", "")).startswith("torch."):
            for name, value in _variables(frame):
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    found, nodes = _reaches_back(value.grad_fn, before, nodes)
                    if found:
                        made = next(_lines_of(code, name), code.co_firstlineno)
                        function = "" if code.co_name == "<module>" else f" in {code.co_name}"
                        return f"{name}{function} ({Path(code.co_filename).name}:{made})"
        frame = frame.f_back
    return ""


def _variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Local variables of a function, and the attributes of the object that it is a method of."""
    names = _locals_of(frame)
    yield from names.items()
    held = getattr(names.get("self"), "__dict__", None)
    if type(held) is dict:
        yield from ((f"self.{name}", value) for name, value in list(held.items()))


def _reaches_back(node: Any, before: int, most: int) -> tuple[bool, int]:
    """Whether the oldest way through a graph has a node from before; and how many nodes may still be visited."""
    while most > 0:
        most -= 1
        # Leaves have the largest number that there is.
        older = [one for one, _ in node.next_functions if one is not None]
        node = min(older, key=lambda one: int(one._sequence_nr()), default=None)
        if node is None:
            break
        sequence = int(node._sequence_nr())
        if sequence < before:
            return True, most
        if sequence >= LEAF:
            break
    return False, most


# -- names ------------------------------------------------------------------------------------------------------------


def name_of(container: Any, frame: FrameType | None) -> str:
    """``kept, a list made at train.py:88``: how the script calls it, as far as that can be found."""
    kind = type(container).__name__
    found = _in_frames(container, frame) or _in_referrers(container)
    return f"{found[0]}, a {kind}{found[1]}" if found else f"a {kind}"


def holder_of(tensor: Any, frame: FrameType | None, ours: set[int]) -> str:
    """The container with a name that holds a tensor; empty if there is none.  ``ours``: ids of our own containers."""
    holders = (list, tuple, dict, set, deque)
    containers = [one for one in gc.get_referrers(tensor) if type(one) in holders and id(one) not in ours and len(one)]
    ours = {*ours, id(containers)}
    for container in containers:
        holder = container
        if type(holder) is tuple:  # a list of pairs: the list is what grows
            outer = [one for one in gc.get_referrers(holder) if type(one) in (list, dict) and id(one) not in ours]
            holder = outer[0] if outer else None
        if holder is not None and not _is_namespace(holder):
            found = name_of(holder, frame)
            if "," in found:  # it has a name
                return found
    return ""


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """The local variables of a function that is running.

    Up to Python 3.12 a frame keeps the dict that it answers with, and with it the values that the variables have now,
    until the function returns: the batch, the output and the loss of this step, for hours.  So it is emptied.
    """
    held = frame.f_locals
    names = dict(held)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        held.clear()  # not of a module, whose variables they are
    return names


def _is_namespace(holder: Any) -> bool:
    """Whether it holds the variables of a module, or the attributes of a module of the model."""
    return type(holder) is dict and ("__name__" in holder or "_parameters" in holder)


def _in_frames(container: Any, frame: FrameType | None) -> tuple[str, str] | None:
    """As a variable of a function that is running, or of a module that one is in."""
    seen: set[int] = set()
    while frame is not None:
        if not _is_ours(frame.f_globals):
            for names, code in ((_locals_of(frame), frame.f_code), (frame.f_globals, None)):
                if code is None:
                    if id(names) in seen:
                        continue
                    seen.add(id(names))
                for name, value in list(names.items()):
                    if value is container:
                        return name, _made_at(name, code or _module_code(frame))
        frame = frame.f_back
    return None


def _in_referrers(container: Any) -> tuple[str, str] | None:
    """As a variable of a module, or as an attribute of an object."""
    for holder in gc.get_referrers(container):
        if isinstance(holder, ModuleType | FrameType):
            continue
        names = holder if type(holder) is dict else getattr(holder, "__dict__", None)
        if type(names) is not dict or _is_ours(names):
            continue
        for name, value in list(names.items()):
            if value is container and isinstance(name, str):
                module = sys.modules.get(str(names.get("__name__")))
                if module is not None and vars(module) is names:
                    return f"{module.__name__}.{name}", ""
                owner = holder if names is not holder else _owner_of(names)
                return (f"{type(owner).__name__}.{name}" if owner is not None else repr(name)), ""
    return None


def _owner_of(names: dict[str, Any]) -> Any:
    for holder in gc.get_referrers(names):
        if getattr(holder, "__dict__", None) is names:
            return holder
    return None


def _is_ours(names: Any) -> bool:
    return str(names.get("__name__", "")).partition(".")[0] == "stepscope"


def _module_code(frame: FrameType) -> CodeType | None:
    """Of the module that the frame is in, if it is running, as a script is."""
    here: FrameType | None = frame
    while here is not None:
        if here.f_code.co_name == "<module>" and here.f_globals is frame.f_globals:
            return here.f_code
        here = here.f_back
    return None


def _made_at(name: str, code: CodeType | None) -> str:
    """``made at train.py:88``: the first line that assigns the name."""
    if code is None:
        return ""
    lines = _lines_of(code, name)
    line = next(lines, None)
    return "" if line is None else f" made at {Path(code.co_filename).name}:{line}"


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
