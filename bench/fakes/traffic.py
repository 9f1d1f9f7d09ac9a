"""What the ranks of a synthetic cluster exchange within a step: the collectives of a mesh, with faults where wanted.

    mesh = Traffic(mesh={"dp": 2, "tp": 2}, exchanges=(Exchange(dimension="tp", count=4, ms=1.0),))
    Cluster(ranks=4, traffic=replace(mesh, faults=(SlowLink(ranks=(3,), times=4.0),))).run()

The ranks come out of forward, run the collectives one after the other, each after a little work of its own, and go on
into backward.  A group leaves a collective together, when its last rank came and the transfer is over.  Everything is
an array over ``[rank, step]``; nothing here knows how the rest of a step passes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.collectives import (
    COLLECTIVE_ROW,
    COMM_ROW,
    FLAG_ASYNC,
    FLAG_DEVICE,
    FLAG_WAITED,
    OPS,
    GroupKind,
    ProcessGroup,
    kept_by_itself,
)

__all__ = ["Exchange", "Played", "SlowLink", "Traffic", "collectives_of", "comm_of"]

Floats = NDArray[np.float64]
KINDS: Mapping[str, GroupKind] = {"dp": "data", "tp": "tensor", "pp": "pipeline", "ep": "expert"}
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Collectives that every rank calls in each step, along one dimension of the mesh."""

    dimension: str
    op: str = "all_reduce"
    count: int = 1
    mb: float = 4.0
    ms: float = 1.0
    """Each, when all ranks are there."""
    hidden_ms: float | None = None
    """So much of it passes beside the computation, before anybody waits for it; None: it is called and waited for."""


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """Every collective of a group with one of the ranks takes longer, or has more to send."""

    ranks: Collection[int]
    times: float = 1.0
    bytes_times: float = 1.0
    dimension: str | None = None
    """None: along all dimensions."""
    steps: range | None = None


@dataclass(frozen=True, kw_only=True)
class Played:
    """[rank, step] each, in nanoseconds, and the records of each rank."""

    leave_ns: Floats
    work_ns: Floats
    blocked_ns: Floats
    calls: tuple[_Calls, ...]
    device: bool = False


@dataclass(frozen=True, kw_only=True)
class _Calls:
    exchange: Exchange
    slot: int
    nth: int
    """In its group and step."""
    start_ns: Floats
    blocked_ns: Floats
    end_ns: Floats
    bytes: Floats


@dataclass(frozen=True, kw_only=True)
class Traffic:
    mesh: Mapping[str, int]
    """Dimension → size; the ranks count along the last one."""
    exchanges: tuple[Exchange, ...]
    faults: tuple[SlowLink, ...] = ()
    work_ms: float = 0.2
    """What a rank does before each, on the average (exponential)."""
    noise: float = 0.05
    """Spread of a transfer's time, relative (log-normal)."""
    backend: str = "gloo"
    device: bool = False
    """Whether its times are the device's, as NCCL's Flight Recorder has them."""

    def play(self, arrival_ns: Floats, random: np.random.Generator) -> Played:
        """``arrival_ns`` [rank, step]: when each comes out of forward, on a clock that all share."""
        shape = (*self.mesh.values(), arrival_ns.shape[1])
        now = arrival_ns.reshape(shape).copy()
        work, blocked = np.zeros(shape), np.zeros(shape)
        calls, numbers = [], dict.fromkeys(self.mesh, 0)
        for exchange in self.exchanges:
            axis = list(self.mesh).index(exchange.dimension)
            times, more = self._faults_of(exchange, shape, axis)
            for _ in range(exchange.count):
                own = random.exponential(self.work_ms * 1e6, shape)
                now, work = now + own, work + own
                hidden_ns = (exchange.hidden_ms or 0.0) * 1e6
                takes = exchange.ms * 1e6 * random.lognormal(0.0, self.noise, times.shape) * times
                end = np.fmax.reduce(now, axis=axis, keepdims=True) + np.maximum(takes - hidden_ns, 0.0)
                calls.append(
                    _Calls(
                        exchange=exchange,
                        slot=axis + 1,
                        nth=numbers[exchange.dimension],
                        start_ns=(now - hidden_ns).reshape(arrival_ns.shape),
                        blocked_ns=(end - now).reshape(arrival_ns.shape),
                        end_ns=np.broadcast_to(end, shape).reshape(arrival_ns.shape),
                        bytes=np.broadcast_to(exchange.mb * MIB * more, shape).reshape(arrival_ns.shape),
                    )
                )
                blocked += end - now
                now = np.where(np.isnan(now), np.nan, end)
                numbers[exchange.dimension] += 1
        flat = (values.reshape(arrival_ns.shape) for values in (now, work, blocked))
        leave_ns, work_ns, blocked_ns = flat
        return Played(leave_ns=leave_ns, work_ns=work_ns, blocked_ns=blocked_ns, calls=tuple(calls), device=self.device)

    def _faults_of(self, exchange: Exchange, shape: tuple[int, ...], axis: int) -> tuple[Floats, Floats]:
        """By how much longer and larger, for each group and step."""
        groups = tuple(1 if place == axis else size for place, size in enumerate(shape))
        times, more = np.ones(groups), np.ones(groups)
        for fault in self.faults:
            if fault.dimension not in (None, exchange.dimension):
                continue
            hit = np.isin(np.arange(np.prod(shape[:-1])), list(fault.ranks)).reshape(shape[:-1])
            hit_group = np.logical_or.reduce(hit, axis=axis, keepdims=True)
            where = hit_group[..., None] & self._during(fault, shape[-1])
            times, more = np.where(where, times * fault.times, times), np.where(where, more * fault.bytes_times, more)
        return times, more

    def _during(self, fault: SlowLink, steps: int) -> NDArray[np.bool_]:
        return np.isin(np.arange(steps), list(fault.steps or range(steps)))

    def groups(self, rank: int) -> tuple[ProcessGroup, ...]:
        """The world, and one for each dimension."""
        sizes = list(self.mesh.values())
        everyone = np.arange(int(np.prod(sizes))).reshape(sizes)
        at = np.argwhere(everyone == rank)[0]
        world = ProcessGroup(
            slot=0, name="0", description="default_pg", kind="world", backend=self.backend,
            ranks=tuple(everyone.ravel().tolist()), size=everyone.size,
        )  # fmt: skip
        found = [world]
        for axis, dimension in enumerate(self.mesh):
            ranks = everyone[tuple(slice(None) if place == axis else at[place] for place in range(len(sizes)))]
            found.append(
                ProcessGroup(
                    slot=axis + 1,
                    name=f"{dimension}{int(ranks.min())}",
                    description=f"mesh_{dimension}",
                    kind=KINDS.get(dimension, "other"),
                    backend=self.backend,
                    ranks=tuple(ranks.tolist()),
                    size=len(ranks),
                )
            )
        return tuple(found)


def comm_of(played: Played, rank: int, steps: NDArray[np.intp]) -> NDArray[Any]:
    """Dtype ``COMM_ROW``: of the ``steps`` of one rank."""
    summed: dict[tuple[int, int], list[_Calls]] = {}
    for call in played.calls:
        summed.setdefault((call.slot, OPS.index(call.exchange.op)), []).append(call)
    parts = []
    for (slot, op), calls in summed.items():
        rows = np.zeros(len(steps), np.dtype(COMM_ROW))
        rows["step"], rows["group"], rows["op"], rows["count"] = steps, slot, op, len(calls)
        rows["flags"] = np.bitwise_or.reduce([_flags(call) for call in calls])
        for name, values in (
            ("bytes", [call.bytes for call in calls]),
            ("exposed_ns", [call.blocked_ns for call in calls]),
            ("span_ns", [call.end_ns - call.start_ns for call in calls]),
        ):
            rows[name] = np.rint(sum(one[rank, steps] for one in values))
        if played.device:
            rows["flags"], rows["exposed_ns"] = FLAG_DEVICE, 0
        parts.append(rows)
    joined = np.concatenate(parts)
    return joined[np.lexsort((joined["op"], joined["group"], joined["step"]))]


def collectives_of(played: Played, rank: int, steps: NDArray[np.intp], origin_ns: Floats) -> NDArray[Any]:
    """Dtype ``COLLECTIVE_ROW``; ``origin_ns`` [step]: the rank's own clock at the instant that times count from."""
    kept = np.array([step for step in steps.tolist() if kept_by_itself(step)], np.intp)
    rows = np.zeros((len(kept), len(played.calls)), np.dtype(COLLECTIVE_ROW))
    for index, call in enumerate(played.calls):
        own = rows[:, index]
        own["step"], own["group"], own["op"], own["nth"] = kept, call.slot, OPS.index(call.exchange.op), call.nth
        own["flags"], own["bytes"] = _flags(call), np.rint(call.bytes[rank, kept])
        own["start_ns"] = np.rint(call.start_ns[rank, kept] + origin_ns[kept])
        own["end_ns"] = np.rint(call.end_ns[rank, kept] + origin_ns[kept])
        own["exposed_ns"] = np.rint(call.blocked_ns[rank, kept])
        if played.device:
            own["flags"], own["exposed_ns"], own["nth"] = FLAG_DEVICE, 0, kept * len(played.calls) + index
    return rows.reshape(-1)


def _flags(call: _Calls) -> int:
    return FLAG_WAITED | (0 if call.exchange.hidden_ms is None else FLAG_ASYNC)
