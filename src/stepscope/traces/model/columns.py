"""A trace as columns: what the readers make and all analyses take.

One row per slice (an event with a duration), sorted by start, the longer first where starts are equal, so that a parent
comes before its children.  Times are integer nanoseconds, exact as the file has them: ``start_ns`` counts from
``TraceMeta.origin_ns``, which is the file's earliest instant since the epoch or boot, whatever its clock.

What only some rows have stands in side tables (``Ops``, ``Kernels`` …): each has ``row``, ascending indices into the
slices, and columns as long as that.  Strings are dictionary-coded: a column of codes into ``Trace.strings``; −1: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.categories import DEVICE_WORK, HOST_KINDS, Kind

__all__ = [
    "Collectives",
    "Copies",
    "Flows",
    "Ints",
    "Kernels",
    "Memory",
    "Ops",
    "Pythons",
    "Rows",
    "Slices",
    "Syncs",
    "Thread",
    "Trace",
    "TraceMeta",
]

Ints = NDArray[np.int64]
Rows = NDArray[np.int32]
"""Indices of slices; −1: none."""
Codes = NDArray[np.int32]
"""Indices of ``Trace.strings``; −1: none."""
Reals = NDArray[np.float32]
"""NaN: not said."""


@dataclass(frozen=True, kw_only=True)
class Thread:
    """A line of the timeline: a thread of the host, or what stands for a stream."""

    pid: int | str
    tid: int | str
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class TraceMeta:
    path: str
    """For messages."""
    format: str = "kineto"
    """``kineto`` or ``nsight``."""
    rank: int | None = None
    """As the file itself says; never from its name."""
    world_size: int | None = None
    backend: str | None = None
    host: str | None = None
    pid: int | None = None
    """Of the process that was traced."""
    origin_ns: int = 0
    length_ns: int = 0
    """From there to the end of the last slice."""
    devices: tuple[dict[str, Any], ...] = ()
    """``deviceProperties``: name, totalGlobalMem, numSms, computeMajor …"""
    groups: tuple[dict[str, Any], ...] = ()
    """``distributedInfo.pg_config``: pg_name, pg_desc, ranks …"""
    with_stack: bool = False
    record_shapes: bool = False
    profile_memory: bool = False
    read_events: int = 0
    """Events in the file, of all sorts."""
    truncated: str | None = None
    """Why the file ends early, if it does."""
    problems: tuple[str, ...] = ()
    """One line each: what was left out or mended."""


@dataclass(frozen=True, kw_only=True)
class Slices:
    start_ns: Ints
    dur_ns: Ints
    """Never negative."""
    kind: NDArray[np.uint8]
    """``Kind``."""
    name: Codes
    thread: NDArray[np.int32]
    """Index of ``Trace.threads``."""
    device: NDArray[np.int16]
    """−1: on the host."""
    stream: NDArray[np.int32]
    """−1: on the host; of a synchronisation: all streams."""
    correlation: Ints
    """Joins device work to the call that launched it; −1: none."""
    external: Ints
    """``External id``: joins device work and runtime calls to operators; −1: none."""

    def __len__(self) -> int:
        return len(self.start_ns)

    @cached_property
    def end_ns(self) -> Ints:
        return self.start_ns + self.dur_ns


@dataclass(frozen=True, kw_only=True)
class Ops:
    """Operators (and annotations) of which more than the name is known."""

    row: Rows
    dims: Codes
    """``Input Dims`` as its JSON text."""
    types: Codes
    """``Input type`` as its JSON text."""
    concrete: Codes
    """``Concrete Inputs`` as its JSON text; of convolutions and attention only, where FLOPs need them."""
    stack: Codes
    """``Call stack``: frames with ``;``, the innermost first."""
    module: Codes
    """``Module Hierarchy``."""
    sequence: Ints
    """``Sequence number``: joins forward operators to autograd's; −1: none."""
    forward_thread: Ints
    """``Fwd thread id``: 0 or missing (−1) in forward, else this is autograd's."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    row: Rows
    occupancy: Reals
    """``est. achieved occupancy %``, 0 to 100."""
    blocks_per_sm: Reals
    warps_per_sm: Reals
    graph: Ints
    """``graph id`` of a CUDA graph's kernel; −1: none."""


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Copies and memsets."""

    row: Rows
    bytes: Ints


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Slices, of the host or the device, that say which collective they are."""

    row: Rows
    op: Codes
    group: Codes
    """``Process Group Name``."""
    description: Codes
    """``Process Group Description``: what people called it (``fsdp_dp`` …)."""
    ranks: Codes
    """``Process Group Ranks`` as its JSON text."""
    size: Ints
    """``Group size``; −1: not said, as in all below."""
    sequence: Ints
    """``Seq``."""
    in_elements: Ints
    out_elements: Ints
    dtype: Codes


@dataclass(frozen=True, kw_only=True)
class Syncs:
    """What device-side waits (``Kind.SYNC``) wait for."""

    row: Rows
    on_stream: Ints
    """The stream that is waited for; −1: none or all."""
    record_correlation: Ints
    """Correlation of the ``cudaEventRecord`` that is waited for; −1: not said."""


@dataclass(frozen=True, kw_only=True)
class Pythons:
    """Python functions; a module's call is named ``nn.Module: Linear_0``."""

    row: Rows
    id: Ints
    parent: Ints
    module: Ints
    """``Python module id``; −1: no module."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The allocator's instants, by time: not slices, so without ``row``."""

    time_ns: Ints
    thread: NDArray[np.int32]
    device_type: NDArray[np.int16]
    """0: host, 1: CUDA."""
    device: NDArray[np.int16]
    bytes: Ints
    """Negative: freed."""
    allocated: Ints
    """In all, after it; −1: not said."""
    reserved: Ints
    address: Ints
    """Of the block: joins what is freed to what was allocated; −1: not said."""


@dataclass(frozen=True, kw_only=True)
class Flows:
    """Arrows from forward operators to backward ones: from where and when to where and when."""

    from_thread: NDArray[np.int32]
    from_ns: Ints
    to_thread: NDArray[np.int32]
    to_ns: Ints


@dataclass(frozen=True, kw_only=True)
class Trace:
    meta: TraceMeta
    strings: list[str]
    threads: list[Thread]
    slices: Slices
    ops: Ops
    kernels: Kernels
    copies: Copies
    collectives: Collectives
    syncs: Syncs
    pythons: Pythons
    memory: Memory
    flows: Flows

    def __len__(self) -> int:
        return len(self.slices)

    def text(self, code: int) -> str:
        return self.strings[code] if code >= 0 else ""

    def name(self, row: int) -> str:
        return self.strings[int(self.slices.name[row])]

    def rows_of(self, kinds: Iterable[Kind]) -> Rows:
        """Ascending, that is by start."""
        wanted = np.zeros(256, bool)
        wanted[[int(kind) for kind in kinds]] = True
        return np.flatnonzero(wanted[self.slices.kind]).astype(np.int32)

    @cached_property
    def host_rows(self) -> Rows:
        return self.rows_of(HOST_KINDS)

    @cached_property
    def device_rows(self) -> Rows:
        """Kernels, copies and memsets: what keeps a device busy."""
        return self.rows_of(DEVICE_WORK)

    def names_where(self, matches: Callable[[str], object]) -> NDArray[np.bool_]:
        """[strings]; which names of slices satisfy ``matches(name)``: to be indexed with their codes.

        Strings that are no names (shapes, stacks) are not asked about.  The answers of functions and patterns are kept.
        """
        known = self._answers.get(matches)
        if known is None:
            known = np.zeros(len(self.strings), bool)
            known[self._names] = [bool(matches(self.strings[code])) for code in self._names]
            if getattr(matches, "__name__", "") != "<lambda>":
                self._answers[matches] = known
        return known

    @cached_property
    def _names(self) -> list[int]:
        """Strings that are names of slices."""
        used: list[int] = np.flatnonzero(np.bincount(self.slices.name, minlength=len(self.strings))).tolist()
        return used

    @cached_property
    def _answers(self) -> dict[Any, NDArray[np.bool_]]:
        return {}


def side_columns(table: Any) -> dict[str, NDArray[Any]]:
    """The columns of slices or of a side table, by name."""
    return {each.name: getattr(table, each.name) for each in fields(table)}
