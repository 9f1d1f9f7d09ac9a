"""A synthetic cluster: the recording of a synchronous data-parallel job, with faults put where a test wants them.

The model is the one that matters for a verdict.  A rank does its work before the all-reduce (input … backward), then
all ranks leave the all-reduce at the same instant, then each does its work after it (optimizer, other …).  Whoever
arrives early waits, so every rank's step has the same length whoever is slow.  The wait is booked as ``comm`` where it
can be measured (DDP on CPU) and stays inside ``backward`` where it cannot (FSDP2).

    run = Cluster(ranks=4, steps=60, faults=(slow_at(2, "forward", 30.0),)).run()

``other`` lies between two steps (``between_ns``); what a fault or a phase named ``inside`` takes is ``other`` as well,
but lies within one.

Everything follows from the seed; nothing here reads a clock or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fakes.load_noise import waits_ms
from fakes.records import Records, steps_of
from fakes.traffic import Played, Traffic, collectives_of, comm_of
from stepscope.records.identity import RankIdentity
from stepscope.records.series import RankError, RankSeries, RankState, RunData
from stepscope.records.steps import (
    BACKWARD,
    BUILTIN_PHASES,
    COMM,
    DEVICE,
    FIRST_USER_SLOT,
    FLAG_COMPILED,
    FLAG_EPOCH_START,
    FLAG_FIRST,
    FLAG_SAMPLED,
    PHASE_SLOTS,
    STEP,
)
from stepscope.step_table import DEVICE_DTYPE, STEP_DTYPE, RankSteps

__all__ = ["Cluster", "Death", "Fault", "gpu_uuid", "slow_at"]

INSIDE = "inside"
"""Not a phase but a place: time that is booked as ``other`` and does not lie between two steps."""
AFTER_SYNC = frozenset({"optimizer", "other", "eval", "checkpoint", INSIDE})
"""Phases that a rank is in after the all-reduce; all others come before it."""
ANCHOR_WALL_NS = 1_700_000_000_000_000_000
ANCHOR_MONO_NS = 1_000_000_000
MIB = 1 << 20
Level = float | NDArray[np.float64] | Callable[[int, NDArray[np.float64]], NDArray[np.float64]]
DISPATCH_SHARE = 0.1
"""Of a device's work, what the host needs to enqueue it; the rest it waits for in ``other``."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Extra time in one phase of one rank."""

    rank: int
    phase: str
    ms: float
    steps: range | None = None
    """None: every step."""
    ramp: bool = False
    """Whether it grows, from nothing at the run's first step to ``ms`` at its end."""


def gpu_uuid(rank: int) -> str:
    """Of the device that a rank is on, as torch says it (NVML puts ``GPU-`` before it)."""
    return f"00000000-0000-4000-8000-{rank:012x}"


def slow_at(rank: int, phase: str, ms: float, steps: range | None = None, *, ramp: bool = False) -> Fault:
    return Fault(rank=rank, phase=phase, ms=ms, steps=steps, ramp=ramp)


@dataclass(frozen=True, kw_only=True)
class Death:
    """A rank that finishes the steps before ``step`` and no more."""

    rank: int
    step: int
    state: RankState = "vanished"
    phase: str = "backward"
    """Where it was."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    ranks: int = 4
    steps: int = 100
    phases_ms: Mapping[str, float] = field(
        default_factory=lambda: {"input": 2.0, "forward": 10.0, "backward": 20.0, "optimizer": 5.0, "other": 1.0}
    )
    comm_ms: float = 1.0
    """What the all-reduce itself takes."""
    comm_measured: bool = True
    traffic: Traffic | None = None
    """Collectives between forward and backward; needs ``comm_measured``."""
    ddp_hidden_ms: float | None = None
    """What of the all-reduce passes during backward, as DDP's own logging tells; None: it tells nothing."""
    synchronized: bool = True
    """False: independent processes that never wait for each other."""
    noise: float = 0.02
    """Spread of a phase's time, relative (log-normal)."""
    tail: float = 0.0
    """Probability that a phase of a step takes several times as long (interrupts, garbage collection, neighbors)."""
    drift: float = 0.0
    """Spread of a slow wander of each rank's speed, relative: noise that does not average out from step to step."""
    load: str = "none"
    """Other programs on the cores of the ranks (``fakes.load_noise``)."""
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    deaths: tuple[Death, ...] = ()
    missing: Mapping[int, Collection[int]] = field(default_factory=dict)
    """Rank → steps whose records were lost."""
    unfinished: Mapping[int, int] = field(default_factory=dict)
    """Rank → how many steps it has finished so far; every rank is then still running."""
    warmup_steps: int = 1
    warmup_ms: float = 200.0
    """Extra forward time of each warm-up step."""
    compile_steps: tuple[int, ...] = ()
    compile_ms: float = 500.0
    sampled_steps: tuple[int, ...] = ()
    """Steps in which layers were looked at.  Their time is not added: that is for faults."""
    epoch_every: int = 0
    epoch_input_ms: float = 100.0
    backwards: NDArray[np.int64] | None = None
    """[S]; backward passes of each step; None: one.  Their time is not added: that is for faults."""
    hosts: int = 1
    device_timed: bool = False
    backend: str = "gloo"
    allocated_mb: Level | None = None
    """MiB of the device in use at the end of each step, by rank and step; None: no device memory was sampled."""
    reserved_mb: Level | None = None
    """MiB that the allocator holds; None: as much as was ever in use."""
    peak_mb: Level | None = None
    """MiB in use at the most so far; None: the most of ``allocated_mb``."""
    memory_every: int = 1
    """Steps from one sample of device memory to the next."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of every rank."""
    name: str = "synthetic"
    attempt: int = 0
    errors: tuple[RankError, ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> RunData:
        series = self.series()
        meta: dict[str, Any] = {"schema": 1, "name": self.name, "command": ["train.py"], "host": "node0", "end": None}
        meta["created_wall_ns"] = ANCHOR_WALL_NS - 1_000_000_000
        meta.update(self.meta)
        return RunData(
            name=self.name,
            path=f"runs/{self.name}",
            meta=meta,
            ranks=series,
            errors=self.errors,
            samples=self.samples,
        )

    def series(self) -> tuple[RankSeries, ...]:
        names, times = self._work_ns()
        played = self._play(names, times)
        start, wait, wall = self._synchronize(names, times, played)
        host, device = self._book(names, times, wait)
        between = times[names.index("other")]
        origin = start - self._before_step(names, times) + ANCHOR_MONO_NS
        names.remove(INSIDE)
        records = [self._records(rank, names, start, host, device, between) for rank in range(self.ranks)]
        if played is not None and self.ddp_hidden_ms is not None:
            for rank, (rows, _) in enumerate(records):
                rows["ddp_comm_ns"] -= np.rint(played.blocked_ns[rank, rows["step"].astype(np.intp)]).astype(np.uint64)
        slots = tuple(names) + ("",) * (PHASE_SLOTS - len(names))
        steps = steps_of(records, [slots] * self.ranks)
        ranks = [self._rank(rank, slots, start, wall, steps[rank]) for rank in range(self.ranks)]
        if played is not None:
            ranks = [self._with_traffic(series, played, origin) for series in ranks]
        return tuple(ranks)

    # -- the model ------------------------------------------------------------------------------------------------

    def _work_ns(self) -> tuple[list[str], NDArray[np.float64]]:
        """Names by slot, then INSIDE, and the working time [phase, rank, step]; nan once a rank is dead."""
        named = [*self.phases_ms, *(fault.phase for fault in self.faults)]
        user = sorted({name for name in named if name not in BUILTIN_PHASES and name != INSIDE})
        if len(user) > PHASE_SLOTS - FIRST_USER_SLOT:
            raise ValueError(f"at most {PHASE_SLOTS - FIRST_USER_SLOT} phases of one's own: {user}")
        names = [*BUILTIN_PHASES, *user, INSIDE]
        random = np.random.default_rng(self.seed)
        times = np.zeros((len(names), self.ranks, self.steps))
        shape = (self.ranks, self.steps)
        wander = np.zeros(shape)
        if self.drift:
            wander = _wander(random, shape) * self.drift
        for name, base_ms in self.phases_ms.items():
            spread = np.exp(random.normal(0.0, self.noise, shape) + wander)
            if self.tail:
                spread += (random.random(shape) < self.tail) * random.exponential(3.0, shape)
            times[names.index(name)] = base_ms * spread
        for fault in self.faults:
            hit = np.array([s for s in fault.steps or range(self.steps) if s < self.steps], int)
            times[names.index(fault.phase), fault.rank, hit] += fault.ms * (hit / self.steps if fault.ramp else 1.0)
        times[names.index("forward"), :, : self.warmup_steps] += self.warmup_ms
        for step in self.compile_steps:
            times[names.index("forward"), :, step] += self.compile_ms
        if self.epoch_every:
            times[names.index("input"), :, :: self.epoch_every] += self.epoch_input_ms
        if self.load != "none":
            times += self._waits_ms(times)
        for death in self.deaths:
            times[:, death.rank, death.step :] = np.nan
        return names, times * 1e6

    def _waits_ms(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """[phase, rank, step]; of ``times`` without waits."""
        return waits_ms(self.load, times, cores=self.cores, random=np.random.default_rng((self.seed, 2)))

    def cpu_wait(self, rank: int, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """[T]; the share of the time since the sample before that a rank waited for a processor."""
        _, work_ns = replace(self, load="none")._work_ns()
        waited_s = np.cumsum(np.nan_to_num(self._waits_ms(work_ns / 1e6)).sum(axis=0)[rank]) / 1e3
        steps = self.run().ranks[rank].steps
        ends_s = (steps["start_ns"] + steps["wall_ns"] - steps["start_ns"][0]) / 1e9
        at = np.interp(seconds, ends_s, waited_s[: len(ends_s)], left=0.0)
        since = np.diff(np.concatenate(([0.0], seconds)))
        return np.clip(np.diff(np.concatenate(([0.0], at))) / np.maximum(since, 1e-9), 0.0, 1.0)

    @property
    def cores(self) -> int:
        """Of each host: one for each of its ranks, and at least two."""
        return max(-(-self.ranks // self.hosts), 2)

    def _before_step(self, names: list[str], times: NDArray[np.float64]) -> NDArray[np.float64]:
        """[rank, step]; what a rank does between the all-reduce of the step before and the end of that step."""
        after_ns: NDArray[np.float64] = times[[name in AFTER_SYNC for name in names]].sum(axis=0)
        previous: NDArray[np.float64] = np.zeros_like(after_ns)
        previous[:, 1:] = after_ns[:, :-1]
        return previous

    def _play(self, names: list[str], times: NDArray[np.float64]) -> Played | None:
        """The collectives within the steps; the work between them becomes a part of forward."""
        if self.traffic is None:
            return None
        ahead = [name not in AFTER_SYNC and name != "backward" for name in names]
        arrival = self._before_step(names, times) + times[ahead].sum(axis=0)
        played = self.traffic.play(arrival, np.random.default_rng((self.seed, 1)))
        times[names.index("forward")] += played.work_ns
        return played

    def _synchronize(
        self, names: list[str], times: NDArray[np.float64], played: Played | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Start (from 0), wait (in all collectives) and wall [rank, step]."""
        after = np.array([name in AFTER_SYNC for name in names])
        before_ns, after_ns = times[~after].sum(axis=0), times[after].sum(axis=0)
        if self.synchronized and self.ranks > 1 and self.steps:
            within = 0.0 if played is None else played.blocked_ns
            arrival = self._before_step(names, times) + before_ns + within
            last = np.where(np.isnan(arrival), -np.inf, arrival).max(axis=0)
            wait = np.where(np.isfinite(last), last, 0.0) - arrival + self.comm_ms * 1e6 + within
        else:
            wait = np.zeros_like(before_ns)
        wall = before_ns + wait + after_ns
        start = np.zeros_like(wall)
        start[:, 1:] = np.cumsum(wall, axis=1)[:, :-1]
        return start, wait, wall

    def _book(
        self, names: list[str], times: NDArray[np.float64], wait: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """Host time and device time per phase: where each kind of clock sees the work and the wait."""
        truth = times.copy()
        truth[names.index("comm" if self.comm_measured else "backward")] += wait
        truth[names.index("other")] += truth[names.index(INSIDE)]
        truth = truth[: names.index(INSIDE)]
        if not self.device_timed:
            return truth, None
        host = truth.copy()
        for name in ("forward", "backward", "comm", "optimizer"):
            row = names.index(name)
            host[row] = truth[row] * DISPATCH_SHARE
            host[names.index("other")] += truth[row] - host[row]
        return host, truth

    # -- the records ----------------------------------------------------------------------------------------------

    def _death(self, rank: int) -> Death | None:
        return next((death for death in self.deaths if death.rank == rank), None)

    def _records(
        self,
        rank: int,
        names: list[str],
        start: NDArray[np.float64],
        host: NDArray[np.float64],
        device: NDArray[np.float64] | None,
        between: NDArray[np.float64],
    ) -> Records:
        death = self._death(rank)
        finished = self.unfinished.get(rank, self.steps)
        lost = np.array(sorted(self.missing.get(rank, ())), int)
        keep = np.setdiff1d(np.arange(min(finished, death.step if death else self.steps)), lost)
        rows = np.zeros(len(keep), STEP_DTYPE)
        rows["kind"], rows["seq"], rows["step"] = STEP, keep + 1, keep
        phase_ns = np.rint(host[:, rank, keep]).astype(np.uint64)
        rows["phase_ns"][:, : len(names)] = phase_ns.T
        rows["wall_ns"] = phase_ns.sum(axis=0)
        rows["between_ns"] = np.where(keep == 0, 0, np.rint(between[rank, keep])).astype(np.uint64)
        rows["start_ns"] = start[rank, keep].astype(np.uint64) + ANCHOR_MONO_NS
        rows["flags"] = self._flags(keep)
        self._put_memory(rows, rank, keep)
        rows["batches"] = rows["micro_batches"] = rows["forwards"] = 1
        if self.backwards is not None:
            rows["micro_batches"] = self.backwards[keep]
        if self.ddp_hidden_ms is not None:
            rows["ddp_comm_ns"] = rows["phase_ns"][:, COMM] + np.uint64(self.ddp_hidden_ms * 1e6)
            rows["ddp_compute_ns"] = rows["phase_ns"][:, BACKWARD]
        return rows, _device_rows(rows, None if device is None else device[:, rank, keep])

    def _rank(
        self,
        rank: int,
        names: tuple[str, ...],
        start: NDArray[np.float64],
        wall: NDArray[np.float64],
        steps: RankSteps,
    ) -> RankSeries:
        death = self._death(rank)
        return RankSeries(
            identity=self._identity(rank),
            rank=rank,
            state=death.state if death else ("running" if self.unfinished else "exited"),
            phase_names=names,
            steps=steps,
            anchor_mono_ns=ANCHOR_MONO_NS,
            anchor_wall_ns=ANCHOR_WALL_NS,
            live_phase=names.index(death.phase) if death else 0,
            lost=len(self.missing.get(rank, ())),
            ended_wall_ns=self._ended(rank, start, wall, death),
            facts=dict(self.facts),
        )

    def _with_traffic(self, series: RankSeries, played: Played, origin_ns: NDArray[np.float64]) -> RankSeries:
        rank, steps = series.rank, series.steps["step"].astype(np.intp)
        return replace(
            series,
            groups=self.traffic.groups(rank) if self.traffic else (),
            comm=comm_of(played, rank, steps),
            collectives=collectives_of(played, rank, steps, origin_ns[rank]),
        )

    def _put_memory(self, rows: NDArray[Any], rank: int, keep: NDArray[np.intp]) -> None:
        if self.allocated_mb is None:
            return
        allocated = self._level(self.allocated_mb, rank)
        peak = np.maximum.accumulate(allocated) if self.peak_mb is None else self._level(self.peak_mb, rank)
        reserved = peak if self.reserved_mb is None else self._level(self.reserved_mb, rank)
        sampled = keep % self.memory_every == 0
        for column, level in (("allocated", allocated), ("reserved", reserved), ("peak_allocated", peak)):
            rows[column] = np.where(sampled, np.rint(level[keep] * MIB), 0).astype(np.uint64)

    def _level(self, level: Level, rank: int) -> NDArray[np.float64]:
        """[S]; from a number, an array [R, S] or [S], or a function of rank and steps."""
        steps = np.arange(self.steps, dtype=np.float64)
        found = np.asarray(level(rank, steps) if callable(level) else level, np.float64)
        return np.broadcast_to(found[rank] if found.ndim > 1 else found, steps.shape)

    def _identity(self, rank: int) -> RankIdentity:
        per_host = -(-self.ranks // self.hosts)
        return RankIdentity(
            host=f"node{rank // per_host}",
            pid=1000 + 10_000 * self.attempt + rank,
            rank=rank,
            local_rank=rank % per_host,
            world_size=self.ranks,
            attempt=self.attempt,
            backend=self.backend if self.ranks > 1 else "",
            device="cuda" if self.device_timed else "cpu",
            device_index=rank % per_host if self.device_timed else -1,
            device_uuid=gpu_uuid(rank) if self.device_timed else "",
            device_timed=self.device_timed,
        )

    def _flags(self, steps: NDArray[np.intp]) -> NDArray[np.uint16]:
        flags = np.where(steps == 0, FLAG_FIRST, 0)
        flags |= np.where(np.isin(steps, self.compile_steps), FLAG_COMPILED, 0)
        flags |= np.where(np.isin(steps, self.sampled_steps), FLAG_SAMPLED, 0)
        if self.epoch_every:
            flags |= np.where(steps % self.epoch_every == 0, FLAG_EPOCH_START, 0)
        return flags.astype(np.uint16)

    def _ended(
        self, rank: int, start: NDArray[np.float64], wall: NDArray[np.float64], death: Death | None
    ) -> int | None:
        if self.unfinished:
            return None
        last = (death.step if death else self.steps) - 1
        spent = start[rank, last] + wall[rank, last] if last >= 0 else 0.0
        return ANCHOR_WALL_NS + int(spent)


def _wander(random: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """A stationary first-order autoregression of unit spread along the steps."""
    memory = 0.9
    shocks = random.normal(0.0, 1.0, shape)
    level: NDArray[np.float64] = shocks.copy()
    for step in range(1, shape[1]):
        level[:, step] = memory * level[:, step - 1] + np.sqrt(1 - memory**2) * shocks[:, step]
    return level


def _device_rows(rows: NDArray[Any], times: NDArray[np.float64] | None) -> NDArray[Any]:
    if times is None:
        return np.zeros(0, DEVICE_DTYPE)
    device = np.zeros(len(rows), DEVICE_DTYPE)
    device["kind"], device["step"], device["flags"] = DEVICE, rows["step"], rows["flags"]
    device["phase_ns"][:, : len(times)] = np.rint(times.T).astype(np.uint64)
    device["wall_ns"] = device["phase_ns"].sum(axis=1)
    return device
