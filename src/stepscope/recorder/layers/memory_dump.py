"""What a process holds in memory: when it runs out of it, and when someone asks.

``MemoryDump`` has sizes by layer, the largest tensors and the allocator's statistics.  It is made once, while an
uncaught out-of-memory error ends the process (``recorder/failure.py``).  The frames of the traceback still hold the
model, the batch and what the script keeps.  Only metadata is read: no tensor operation is called, so nothing is
allocated on a device and nothing waits for one.  Time and sizes are bounded, whatever the process holds; what could not
be done in time is left out.

The allocator's state on CUDA (``save_snapshot``) is what ``torch.cuda.memory._dump_snapshot`` writes, so torch's viewer
opens it.

``stepscope snapshot`` asks for it with a file next to the ring, and counts up the ring's request word, which a process
that uses CUDA reads about twice a second, after a step (``SnapshotRequests``).  No thread and no signal is needed, and
between two steps no graph is being captured and the allocator is not in use.  The snapshot is written in memory; the
command copies it.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from stepscope.recorder.guard import failsafe
from stepscope.recorder.layers.growth import holder_of
from stepscope.recorder.layers.tree import ModuleTree, local_part
from stepscope.recorder.requests import RequestWord
from stepscope.recorder.variables import attributes_of, variables_of
from stepscope.records.files import file_mode, folder_mode
from stepscope.records.layers import MEMORY_KINDS
from stepscope.records.paths import ANSWER_SUFFIX, ASK_SUFFIX, SNAPSHOT_SUFFIX

__all__ = ["MemoryDump", "SnapshotRequests", "save_snapshot"]

MOST_S = 2.0
"""From here on, no further place is searched for."""
MOST_ROOTS = 4
"""Models that are described, the largest ones."""
MOST_ROOTS_SEEN = 64
MOST_MODULES_SAVED = 512
MOST_GROUPS = 24
"""Of equal tensors."""
MOST_PLACES = 8
"""Groups for which it is searched where they are kept: a search visits every object."""
MOST_BLOCKS = 300_000
"""Of the allocator; a snapshot of more would take too long and too much memory."""
MOST_SNAPSHOT_BYTES = 256 << 20
TEXT = 120
OF_PROCESS = ("VmRSS", "VmHWM", "VmSize", "VmPeak")
OF_HOST = ("MemTotal", "MemAvailable")


class MemoryDump:
    """The state of this process's memory on one kind of device."""

    def __init__(
        self,
        torch: Any,
        device: str,
        trace: TracebackType | None,
        *,
        compiled: bool = False,
        objects: Callable[[], Sequence[Any]] = gc.get_objects,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``device``: ``cuda`` or ``cpu``; ``trace``: of the error; ``compiled``: code was compiled in this process."""
        self._torch = torch
        self._device = device
        self._trace = trace
        self._compiled = compiled
        self._now_s = now_s
        self._until_s = now_s() + MOST_S
        self._plain = (torch.Tensor, torch.nn.Parameter)
        modules, self._optimizers, self._tensors = self._sorted(objects())
        self.trees = self._trees(modules)
        self._owners: dict[int, tuple[str, str]] = {}
        """By address of a storage: the kind of memory, and the module."""
        self.sizes: list[dict[str, list[int]]] = [self._sizes_of(tree) for tree in self.trees]
        """By tree, kind and node."""

    def account(self, activations: Sequence[tuple[int, list[int]] | None]) -> dict[str, Any]:
        """What is saved; ``activations``: by tree, a sampled step and the bytes that its modules kept then."""
        steps = []
        for sizes, known in zip(self.sizes, activations, strict=True):
            if known is not None and len(known[1]) == len(sizes["parameters"]):
                steps.append(known[0])
                sizes["activations"] = known[1]
        rows = sorted(self._rows(), key=lambda row: -sum(row[2]))
        kinds = {kind: sum(sum(sizes[kind]) for sizes in self.sizes if kind in sizes) for kind in MEMORY_KINDS}
        if not steps:
            del kinds["activations"]
        total, groups = self._groups()
        return {
            "device": self._device,
            "kinds": kinds,
            "activations_step": max(steps, default=None),
            "modules": rows[:MOST_MODULES_SAVED],
            "modules_left_out": max(len(rows) - MOST_MODULES_SAVED, 0),
            "tensors": groups,
            "tensor_bytes": total,
            "process": _of_process(),
            "allocator": self._allocator(),
        }

    # -- What there is --------------------------------------------------------------------------------------------

    def _sorted(self, objects: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """All modules, optimizers and tensors that Python knows; classes are compared, nothing of them is called."""
        torch = self._torch
        bases = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
        found: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        places: dict[int, int] = {}
        for value in objects:
            kind = type(value)
            at = places.get(id(kind))
            if at is None:
                at = next((at for at, base in enumerate(bases) if issubclass(kind, base)), -1)
                places[id(kind)] = at
            if at >= 0:
                found[at].append(value)
        return found

    def _trees(self, modules: Sequence[Any]) -> list[ModuleTree]:
        """Of the models: modules with parameters that are in no other module."""
        known = [(module, attributes_of(module) or {}) for module in modules]
        complete = [(module, names) for module, names in known if names.get("_modules") is not None]
        inside = {id(child) for _, names in complete for child in names["_modules"].values()}
        tops = [
            module
            for module, names in complete
            if id(module) not in inside and (names["_modules"] or names.get("_parameters"))
        ]
        trees = [_tree_of(top, self._compiled) for top in tops[:MOST_ROOTS_SEEN]]
        sized = [(sum(row[3] for row in tree.rows), tree) for tree in trees if tree is not None]
        ordered = sorted((entry for entry in sized if entry[0]), key=lambda entry: -entry[0])
        return [tree for _, tree in ordered[:MOST_ROOTS]]

    def _sizes_of(self, tree: ModuleTree) -> dict[str, list[int]]:
        names = [row[0] or row[1] for row in tree.rows]
        sizes = {kind: [0] * len(names) for kind in ("parameters", "gradients", "optimizer", "buffers")}
        for at, parameter in tree.parameters():
            owned = [("parameters", parameter)]
            if parameter.is_leaf and parameter.grad is not None:
                owned.append(("gradients", parameter.grad))
            for optimizer in self._optimizers:
                state: Any = (attributes_of(optimizer) or {}).get("state")
                own = state.get(parameter) if issubclass(type(state), dict) else None
                if type(own) is dict:
                    tensors = [value for value in own.values() if issubclass(type(value), self._torch.Tensor)]
                    owned += [("optimizer", value) for value in tensors]
            for kind, tensor in owned:
                sizes[kind][at] += self._own(tensor, kind, names[at])
        for at, buffer in tree.buffers():
            sizes["buffers"][at] += self._own(buffer, "buffers", names[at])
        return sizes

    def _own(self, tensor: Any, kind: str, name: str) -> int:
        """The bytes of a tensor that is known; 0 if its memory was counted before, or is elsewhere."""
        storage = self._storage(tensor)
        if storage is None or storage[0] in self._owners:
            return 0
        self._owners[storage[0]] = (kind, name)
        return storage[1]

    def _storage(self, tensor: Any) -> tuple[int, int] | None:
        """Address and bytes of the memory of a tensor on this kind of device; None if it has none."""
        local = local_part(tensor)
        if type(local) not in self._plain or local.device.type != self._device:
            return None
        if local.layout is not self._torch.strided:
            return None
        try:
            storage = local.untyped_storage()
            size, address = storage.nbytes(), storage.data_ptr()
        except RuntimeError:  # a wrapper without memory, as those of functorch are
            return None
        return (address, size) if size and address else None

    def _rows(self) -> Iterator[list[Any]]:
        """``[name, class, bytes by kind]`` of each module that holds something itself."""
        for tree, sizes in zip(self.trees, self.sizes, strict=True):
            columns = [sizes.get(kind) or [0] * len(tree.rows) for kind in MEMORY_KINDS]
            for row, *own in zip(tree.rows, *columns, strict=True):
                if any(own):
                    yield [row[0] or row[1], row[1], own]

    # -- Tensors --------------------------------------------------------------------------------------------------

    def _groups(self) -> tuple[int, list[dict[str, Any]]]:
        """Bytes of all tensors that Python knows, and the largest groups of equal ones."""
        seen: set[int] = set()
        groups: dict[Any, list[Any]] = {}
        total = 0
        for tensor in self._tensors:
            storage = self._storage(tensor)
            if storage is None or storage[0] in seen:
                continue
            seen.add(storage[0])
            total += storage[1]
            kind, owner = self._owners.get(storage[0], ("", ""))
            local = local_part(tensor)
            key = (str(local.dtype).removeprefix("torch."), tuple(local.shape), str(local.device), kind)
            known = groups.setdefault(key, [0, 0, tensor, owner])
            known[0] += 1
            known[1] += storage[1]
        largest = sorted(groups.items(), key=lambda group: -group[1][1])[:MOST_GROUPS]
        ours = {id(self._tensors), *(id(known) for known in groups.values())}
        rows = []
        searches = MOST_PLACES
        for (dtype, shape, device, kind), (count, size, tensor, owner) in largest:
            where = owner
            if not kind and searches and self._now_s() < self._until_s:
                searches -= 1
                where = self._place(tensor, ours)
            rows.append(
                {
                    "count": count,
                    "dtype": dtype,
                    "shape": list(shape),
                    "device": device,
                    "bytes": size,
                    "kind": kind or "other",
                    "where": where[:TEXT],
                }
            )
        return total, rows

    def _place(self, tensor: Any, ours: set[int]) -> str:
        """Which container or variable of the script holds a tensor; empty if that is not found."""
        return holder_of(tensor, _innermost(self._trace), ours) or self._variable(tensor)

    def _variable(self, tensor: Any) -> str:
        found = ""
        for frame, line in _frames(self._trace):
            code = frame.f_code
            for name, value in variables_of(frame):
                if value is tensor:
                    found = f"{name} in {code.co_name} ({Path(code.co_filename).name}:{line})"
        return found

    # -- Allocator ------------------------------------------------------------------------------------------------

    def _allocator(self) -> dict[str, Any] | None:
        """Statistics of the device that is in use, of all pools together; None without one."""
        cuda = self._torch.cuda
        if self._device != "cuda" or not cuda.is_initialized():
            return None
        index = cuda.current_device()
        raw = self._torch._C._cuda_memoryStats(index)
        statistics: dict[str, Any] = {"device": index}
        for name, value in raw.items():
            if type(value) is int:
                statistics[name] = value
            elif isinstance(value, dict) and isinstance(value.get("all"), dict):
                statistics[name] = {key: value["all"][key] for key in ("current", "peak") if key in value["all"]}
        return statistics


@failsafe
def _tree_of(top: Any, compiled: bool) -> ModuleTree:
    return ModuleTree(top, compiled=compiled)


def _of_process() -> dict[str, int]:
    """Bytes of the process and of the host, from the kernel, and the limit on its address space."""
    import resource

    sizes: dict[str, int] = {}
    for file, names in (("/proc/self/status", OF_PROCESS), ("/proc/meminfo", OF_HOST)):
        for line in Path(file).read_text().splitlines():
            name, _, value = line.partition(":")
            number = re.match(r"\s*(\d+) kB", value)
            if name in names and number:
                sizes[name] = int(number[1]) * 1024
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return sizes if limit == resource.RLIM_INFINITY else {**sizes, "limit": limit}


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Frames of a traceback and their lines, the outermost first."""
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _innermost(trace: TracebackType | None) -> FrameType | None:
    last = None
    for last, _ in _frames(trace):  # noqa: B007 - the last one is wanted
        pass
    return last


# -- Snapshots --------------------------------------------------------------------------------------------------------


def save_snapshot(torch: Any, path: Path, *, most_bytes: int = MOST_SNAPSHOT_BYTES) -> str:
    """Write the state of CUDA's allocator, and its history if it records one; return why not, or ``""``."""
    if not torch.cuda.is_initialized():
        return "CUDA is not in use in this process"
    statistics: Mapping[str, Any] = torch._C._cuda_memoryStats(torch.cuda.current_device())
    blocks = sum(_current(statistics, name) for name in ("active", "inactive_split"))
    if blocks > MOST_BLOCKS:
        return f"the allocator has {blocks:,} blocks, more than {MOST_BLOCKS:,}"
    snapshot = torch.cuda.memory._snapshot()
    path.parent.mkdir(mode=folder_mode(path.parent.parent), exist_ok=True)
    partial = path.with_suffix(".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file_mode(path.parent))
    try:
        with os.fdopen(descriptor, "wb") as file:
            pickle.dump(snapshot, _Bounded(file.write, most_bytes), protocol=4)
    except (OSError, _TooLargeError) as error:
        partial.unlink(missing_ok=True)
        return str(error)
    partial.replace(path)
    return ""


def _current(statistics: Mapping[str, Any], name: str) -> int:
    found = (statistics.get(name) or {}).get("all") or {}
    return int(found.get("current", 0))


class _TooLargeError(Exception):
    pass


class _Bounded:
    """A file that refuses to become larger than this."""

    def __init__(self, write: Callable[[Any], Any], left: int) -> None:
        self._write = write
        self._most = self._left = left

    def write(self, data: Any) -> None:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise _TooLargeError(f"it would be larger than {self._most >> 20} MiB")
        self._write(data)


# -- Requests ---------------------------------------------------------------------------------------------------------

LONGEST_HISTORY_S = 600.0
MOST_ENTRIES = 100_000
"""Of the allocator's history: some hundred bytes each, of which the last ones are kept."""
ROOM_SHARE = 0.5
"""Of what is free where the snapshot is written: rings need room there."""


class SnapshotRequests:
    """Looks for a request after some steps, and answers it.  Called on the training thread.

    A request is ``{"id": …, "history_s": …}``.  The answer has the same id and a state: ``recording``, ``done`` (with
    ``step``, ``history``: whether one was recorded, and ``own_history``: by the script) or ``failed`` (``problem``).
    """

    def __init__(
        self, torch: Any, ring: Path, header: memoryview, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._torch = torch
        self._ring = ring
        self._now_s = now_s
        self._word = RequestWord(header, now_s=now_s)
        self._changed = False
        """Whether something was requested that has not been read."""
        self._current: dict[str, Any] | None = None
        self._until_s = 0.0
        self._recording = False
        """Whether we have turned the allocator's history on."""

    @property
    def due_at(self) -> int:
        """After this step, check again."""
        return self._word.due_at

    def hurry(self) -> None:
        """Steps take longer than before: see now whether something was requested."""
        self._word.hurry()

    def check(self, step: int, *, busy: bool) -> None:
        """Read the request word after this step; ``busy``: a graph is being captured, so nothing may be done now."""
        self._changed |= self._word.changed(step)
        if busy:
            return
        if self._current is None and self._changed:
            self._changed = False
            self._begin()
        if self._current is not None and self._now_s() >= self._until_s:
            self._finish(step)

    @failsafe
    def stop(self) -> None:
        """Turn off what was turned on."""
        self._current = None
        if self._recording:
            self._recording = False
            self._torch.cuda.memory._record_memory_history(enabled=None)

    def _begin(self) -> None:
        path = self._ring.with_suffix(ASK_SUFFIX)
        try:
            raw = json.loads(path.read_bytes())
            path.unlink()
        except (OSError, ValueError):
            return
        if not isinstance(raw, dict) or not isinstance(raw.get("id"), str):
            return
        history_s = raw.get("history_s")
        seconds = float(history_s) if isinstance(history_s, int | float) else 0.0
        seconds = min(max(seconds, 0.0), LONGEST_HISTORY_S)
        self._current = {"id": raw["id"][:TEXT]}
        self._until_s = self._now_s() + seconds
        if seconds and not self._has_history():
            self._recording = failsafe(self._record)() is True
            if not self._recording:
                self._answer(state="failed", problem="torch refused to record the allocator's history")
                self._current = None
                return
        if seconds:
            self._answer(state="recording")

    def _record(self) -> bool:
        # Python's frames only: those of C++ would have to be symbolized, which takes minutes.
        record = self._torch.cuda.memory._record_memory_history
        record(enabled="all", context="all", stacks="python", max_entries=MOST_ENTRIES)
        return True

    def _has_history(self) -> bool:
        """Whether the script records it; then it is left as it is."""
        enabled = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)
        return bool(enabled is not None and enabled())

    def _finish(self, step: int) -> None:
        path = self._ring.with_suffix(SNAPSHOT_SUFFIX)
        about = os.statvfs(path.parent)
        room = int(about.f_bavail * about.f_frsize * ROOM_SHARE)
        own = not self._recording and self._has_history()
        recorded = self._recording
        problem = failsafe(save_snapshot)(self._torch, path, most_bytes=min(MOST_SNAPSHOT_BYTES, room))
        if problem == "":
            self._answer(state="done", step=step, history=recorded or own, own_history=own)
        else:
            self._answer(state="failed", problem=problem or "torch failed to take the snapshot")
        self.stop()

    def _answer(self, **figures: Any) -> None:
        path = self._ring.with_suffix(ANSWER_SUFFIX)
        partial = path.with_suffix(".partial")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(json.dumps({**(self._current or {}), **figures}).encode())
        partial.replace(path)
