"""A run in memory while it lasts: rows go in, documents for the API and copies for the rules come out.

    live = LiveRun(name="night")
    live.ring(sidecar, node="1")        # introduces a ring, before its first rows
    live.rows(taken)                    # cheap: rows are queued until there are a few thousand
    live.tick()                         # a few times a second: takes in the queued rows, digests the complete steps
    live.steps(0, 1000, bins=100)       # one of the documents for the API

Ingest and the tail feed it (``Intake``, the first half); the API and the rules read from it.  Not thread-safe: only
the hub's event loop calls it.  The rules work on a copy in their own thread (``live/rules.py``).  Everything returned
is plain JSON: columns as lists, times in nanoseconds on the hub's clock, ranks by their displayed numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.view import clock_of, timed_steps
from stepscope.diagnosis.engine.window import set_apart
from stepscope.goodput.accounts import SumsByRing
from stepscope.hub.live.digests import (
    DEVICE_PHASES,
    MEMORY,
    QUANTILES,
    Bins,
    DigestLog,
    device_width,
    digest_block,
    digest_step,
    metrics_of,
)
from stepscope.hub.live.lines import Lines, Noted, parse_raw
from stepscope.hub.live.registry import ENDED, STATES, Registry
from stepscope.hub.live.step_arrays import NO_ROWS, NONE, Batch, Exchanges, Heat, Names, Planes, Rows, Taken, gather
from stepscope.records.finding import Finding
from stepscope.records.layers import LayerRecords, read_layers
from stepscope.records.series import ALIVE, RankSeries
from stepscope.records.steps import BUILTIN_PHASES, COMM
from stepscope.step_table import StepTable, join_steps
from stepscope.store.live.ring_files import RingSidecar
from stepscope.wire.frames import TABLE_FIELDS

__all__ = ["Judged", "LiveRun"]


# -- intake -----------------------------------------------------------------------------------------------------------
# Turns rows into the model.  Rings, planes, digests and the map are updated together.
#
# Rows are queued until there are a few thousand, then taken in at once (``settle``).  A step is complete when every
# live rank has made it.  A rank is not waited for if it was silent for the grace period, or is so far behind that its
# steps would not fit into the window.

ROWS_AT_ONCE = 1 << 17
"""Rows of a finished run that are taken in at once."""
SETTLE_ROWS = 32_768
"""The queue is taken in when it has this many rows, at the latest."""
GRACE_S = 10.0
GRACE_ROUNDS = 3
"""A rank is no longer waited for after both: this many seconds, and this many rounds of all agents, of silence."""
FRAMES_PER_S = 600
"""The number of frames that a hub accepts from all its agents together; a round is one frame from each."""
LATE_AT_ONCE = 2
"""The number of steps that one tick digests again in a large job because a row came late."""
LARGE = 4096
"""The number of ranks above which a job is large."""
LARGEST_WALL_NS = (1 << 63) - 1
ATTEMPTS_COST = 20
"""Assigning rings to attempts may take at most one in this many seconds of the hub's time."""
STRIDE_S = 5.0
MOST_STRIDE = 1024
MOST_EXPECTED = 1 << 17
"""The most ranks to reserve room for because a world size was announced."""
BEHIND = 50
"""One in this many ranks may be further behind than the stride allows for."""
_COMM = f"phase:{BUILTIN_PHASES[COMM]}"
SUMMED_RANKS = 64
"""Ranks whose steps are added up for the ledger: enough for a mean, few enough for each batch."""
SUMMED = ("wall_ns", "start_ns", "flags", "phase:eval", "phase:checkpoint")
KEPT_REDONE = 512
"""The number of redigested steps to remember; a client may be this many behind."""


class Intake:
    def __init__(
        self,
        *,
        name: str = "",
        run_dir: Path | None = None,
        meta: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        planes: Planes | None = None,
        digests: DigestLog | None = None,
        received: Lines | None = None,
    ) -> None:
        self.name = name
        self.run_dir = run_dir
        self.partial = False
        """Whether it has only the last steps, until another model that has all of them takes its place."""
        self.meta: Mapping[str, Any] = {} if meta is None else meta
        self.registry = Registry()
        self.planes = Planes() if planes is None else planes
        self.digests = DigestLog() if digests is None else digests
        self.map = Heat()
        self.exchanges = Exchanges()
        self.received = Lines() if received is None else received
        self.noted = Noted()
        self.sums = SumsByRing()
        """What the steps of the first ranks took, over all attempts; for the ledger."""
        self.ring_of: NDArray[np.intp] = np.zeros(0, np.intp)
        """The registry's number of each column."""
        self.offsets_ns: dict[str, int] = {}
        """How far each node's clock is ahead of the hub's."""
        self.frontier = NONE
        """The last step that all live ranks have made; steps up to here are digested."""
        self.redone: dict[int, int] = {}
        """By redigested step, the value of ``redigests`` at that time; the newest is last."""
        self.redigests = 0
        """How many times a step was digested again."""
        self.rows_taken = 0
        self.rows_repeated = 0
        self.rows_unknown = 0
        """Rows from rings without a sidecar."""
        self.version = 0
        """Increases with every change that is visible from outside."""
        self.waiting: set[asyncio.Future[None]] = set()
        """Waiters for the next change of ``version``."""
        self._clock = clock
        self._pending: list[tuple[NDArray[np.intp], Taken]] = []
        self._pending_rows = 0
        self._late: set[int] = set()
        self._stride_s = self._attempts_s = clock()

    # -- input ----------------------------------------------------------------------------------------------------

    def ring(self, about: RingSidecar, *, node: str) -> None:
        """Register a ring, or update what is known about it."""
        self.registry.put(about, node=node, now_s=self._clock())
        self.touch()

    def rows(self, taken: Taken) -> None:
        """Queue rows; the sidecars of their rings must have arrived."""
        if not len(taken.table):
            return
        ids = taken.table["ring"].tobytes()
        known = self.registry.by_id
        rings = np.array([known.get(ids[at : at + 16], NONE) for at in range(0, len(ids), 16)], np.intp)
        self._pending.append((rings, taken))
        self._pending_rows += len(taken.slots)
        if self._pending_rows >= SETTLE_ROWS:
            self.settle()

    def take_series(self, ranks: Sequence[RankSeries], nodes: Mapping[str, str]) -> None:
        """Take in the processes of a finished run, by attempt, and the steps of the last one.

        ``nodes``: the node name by host; the default is the host.
        """
        rings = []
        for series in ranks:
            host = series.identity.host
            ring = self.registry.put_series(series, node=nodes.get(host, host), now_s=self._clock())
            if len(series.steps):
                rings.append((series, ring))
        rings = [pair for pair in rings if pair[0].identity.attempt == self.registry.attempt]
        table = join_steps([series.steps for series, _ in rings])
        numbers = np.array([ring for _, ring in rings], np.intp)
        self._give_columns(numbers)
        # A stretch of steps of all ranks, then the next, so that each step is digested while all its rows are there.
        for rows, counts in _stretches(table):
            self.take(self._batch_of(table, rows, np.repeat(numbers, counts)))
            self.tick()

    def _batch_of(self, table: StepTable, rows: NDArray[np.intp], ring: NDArray[np.intp]) -> Batch:
        renamed, device = self.planes.named.of_table, NO_ROWS
        if table.timed is not None and table.device_ns is not None:
            timed = table.timed[rows]
            times = zip(table.phases, table.device_ns[:, rows[timed]], strict=True)
            values = {**renamed({f"device:{name}": own for name, own in times}), "device": np.ones(timed.sum(), bool)}
            device = Rows(ring=ring[timed], step=table.step[rows[timed]], values=values)
        return Batch(steps=Rows(ring=ring, step=table.step[rows], values=renamed(table.by_name(rows))), device=device)

    def lines(self, file: str, lines: Sequence[bytes], *, node: str, offset_ns: int) -> None:
        """Take lines of ``events.jsonl``, ``samples.jsonl``, ``stacks.jsonl`` or ``layers.jsonl``."""
        self.offsets_ns[node] = offset_ns
        self.received.put(file, lines, node=node, offset_ns=offset_ns)
        self.touch()

    def tick(self) -> None:
        """Take in the queued rows, and digest the complete steps."""
        self.settle()
        self._fit_stride()
        self._digest()

    def settle(self) -> None:
        """Take in the queued rows; readers call this first."""
        if self.registry.doubtful and self._clock() >= self._attempts_s:
            self._settle_attempts()
        if not self._pending:
            return
        pending, self._pending, self._pending_rows = self._pending, [], 0
        self._hear(pending)
        if any((rings == NONE).any() for rings, _ in pending):
            pending = [self._introduced(rings, taken) for rings, taken in pending]
        pending = [(rings, taken) for rings, taken in pending if len(taken.slots)]
        if pending:
            pending.sort(key=lambda rows: int(rows[0][0]))
            n, of = self.registry.count, self.registry.of
            names = Names(given=self.registry.names, number=of["names"][:n])
            self.take(gather(pending, of["last_step"][:n], self.planes.named, names))
        self.touch()

    def take(self, batch: Batch) -> None:
        """Take in new steps of registered rings at once."""
        self.rows_repeated += batch.repeated
        self.rows_taken += len(batch.steps.step)
        if len(batch.steps.step):
            self._take_steps(batch)
        if len(batch.exchanges.ring):
            self.exchanges.put(batch.exchanges, ranks=self.planes.columns, oldest=self.planes.oldest)
        if len(batch.device.step):
            self._take_device(batch.device)
        if len(batch.notes.ring):
            of = self.registry.of
            own = of["attempt"][batch.notes.ring] == self.registry.attempt
            rings = batch.notes.ring[own]
            whose = zip(of["rank"][rings].tolist(), of["pid"][rings].tolist(), strict=True)
            self.noted.take(batch.notes.slots[own], list(whose))

    def touch(self) -> None:
        """Announce a visible change."""
        self.version += 1
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(None)

    # -- details --------------------------------------------------------------------------------------------------

    def _settle_attempts(self) -> None:
        """Assign rings to attempts before rows are taken in: rows of an earlier attempt are not kept."""
        began_s = self._clock()
        offsets = [self.offsets_ns.get(node, 0) for node in self.registry.nodes]
        if self.registry.settle_attempts(np.array(offsets, np.int64)):
            self._begin_attempt()
        now_s = self._clock()
        self._attempts_s = now_s + ATTEMPTS_COST * (now_s - began_s)

    def _begin_attempt(self) -> None:
        self.planes.clear()
        self.digests.clear()
        self.map.clear()
        self.exchanges.clear()
        self.noted.clear()
        self.registry.of["column"][:] = NONE
        self.ring_of = np.zeros(0, np.intp)
        self.frontier = NONE
        self.redone.clear()
        self._late.clear()

    def _hear(self, pending: Sequence[tuple[NDArray[np.intp], Taken]]) -> None:
        """Update each rank's live step, phase and state from the tables."""
        rings = np.concatenate([own for own, _ in pending])
        whole = np.dtype(f"V{np.dtype(TABLE_FIELDS).itemsize}")  # joining field by field is ten times slower
        table = np.concatenate([np.ascontiguousarray(taken.table).view(whole) for _, taken in pending])
        table = table.view(TABLE_FIELDS)
        table, rings = table[rings != NONE], rings[rings != NONE]
        of = self.registry.of
        for name in ("live_step", "live_since_ns"):
            of[name][rings] = np.minimum(table[name], np.uint64((1 << 63) - 1)).astype(np.int64)
        of["live_phase"][rings] = table["live_phase"] % 16
        # For a process that is gone, the sidecar's state is final.
        of["state"][rings] = np.where(of["state"][rings] >= ENDED, of["state"][rings], np.minimum(table["state"], 3))
        of["heard_s"][rings] = self._clock()
        for name in ("lost", "torn"):
            if table[name].any():
                np.add.at(of[name], rings, table[name].astype(np.int64))

    def _introduced(self, rings: NDArray[np.intp], taken: Taken) -> tuple[NDArray[np.intp], Taken]:
        """Drop the rows of rings without a sidecar."""
        known = rings != NONE
        rows = np.repeat(known, taken.table["rows"])
        self.rows_unknown += int((~rows).sum())
        return rings[known], _Rows(taken.slots[rows], taken.table[known])

    def _take_device(self, rows: Rows) -> None:
        timed = self.planes.take_device(rows, self._columns_of(rows.ring))
        self._late.update(timed[timed <= self.frontier].tolist())

    def _columns_of(self, ring: NDArray[np.intp]) -> NDArray[np.intp]:
        return self.registry.of["column"][ring].astype(np.intp)

    def _take_steps(self, batch: Batch) -> None:
        of, steps = self.registry.of, batch.steps
        self._give_columns(steps.ring[np.concatenate(([True], np.diff(steps.ring) != 0))])
        column = self._columns_of(steps.ring)
        wall = steps.values["wall_ns"].astype(np.float32)
        work = wall - steps.values[_COMM].astype(np.float32) if _COMM in steps.values else wall
        of["last_step"][steps.ring] = steps.step
        first = np.flatnonzero(of["rank"][steps.ring] < SUMMED_RANKS)
        self.sums.add(
            steps.ring[first], {name: column[first] for name, column in steps.values.items() if name in SUMMED}
        )
        of["rows"][: self.registry.count] += np.bincount(steps.ring, minlength=self.registry.count)
        here = np.flatnonzero(column != NONE)
        self.map.add(column[here], steps.step[here], work[here], wall[here])
        if len(batch.waits.step):
            own = self._columns_of(batch.waits.ring)
            kept, more = self.planes.take_waits(batch.waits, own)
            self.map.add(own[kept], batch.waits.step[kept], -more)
            self._late.update(s for s in batch.waits.step[kept].tolist() if s <= self.frontier)
        if len(here):
            self._into_planes(steps.part(here), column[here], batch.device)

    def _into_planes(self, steps: Rows, column: NDArray[np.intp], device: Rows) -> None:
        """Process steps in order, half a window at a time: a backlog may be longer than the window."""
        half = max(1, self.planes.width // 2) * self.planes.stride
        newest, upto = int(steps.step.max()), max(int(steps.step.min()) + half, self.planes.newest)
        if newest <= upto + half:
            self._part_into_planes(steps, column)
            return
        done = NONE
        while done < newest:
            own = np.flatnonzero((steps.step > done) & (steps.step <= upto))
            if len(own):
                self._part_into_planes(steps.part(own), column[own])
            # Take in their device times before the steps leave the window.
            timed = np.flatnonzero((device.step > done) & (device.step <= upto))
            if len(timed):
                self._take_device(device.part(timed))
            # Skip gaps in the step numbers.
            rest = steps.step[steps.step > upto]
            done, upto = upto, max(upto, int(rest.min())) + half if len(rest) else upto
            if not len(rest):
                return

    def _part_into_planes(self, steps: Rows, column: NDArray[np.intp]) -> None:
        newest = int(steps.step.max())
        leaving = self.planes.leaving(newest)
        for step in leaving[leaving <= self.frontier].tolist():
            if step in self._late:
                self._write(step)
        self._put_steps(self.digests, leaving[leaving > self.frontier])
        self._late.difference_update(leaving.tolist())
        self.planes.advance(newest)
        touched = self.planes.steps[self.planes.take(steps, column)]
        self._late.update(touched[touched <= self.frontier].tolist())

    def _give_columns(self, rings: NDArray[np.intp]) -> None:
        """Assign columns to rings of the last attempt that made their first step."""
        of = self.registry.of
        fresh = rings[(of["column"][rings] == NONE) & (of["attempt"][rings] == self.registry.attempt)]
        if of["started_by"][fresh].any():
            fresh = fresh[~self.registry.helpers()[fresh]]
        if not len(fresh):
            return
        of["column"][fresh] = self.planes.add_columns(len(fresh))
        expected = max(self.planes.columns, min(self.registry.world_size, MOST_EXPECTED))
        self.planes.expect(expected)
        self.map.make_room(expected)
        self.ring_of = np.concatenate([self.ring_of, fresh])
        for ring in fresh.tolist():
            self.registry.number(ring)

    def live_columns(self) -> NDArray[np.bool_]:
        """Mark the columns whose ranks are waited for."""
        grace_s = max(GRACE_S, GRACE_ROUNDS * len(self.registry.nodes) / FRAMES_PER_S)
        live: NDArray[np.bool_] = self.registry.live(self._clock() - grace_s)[self.ring_of]
        return live

    def silent_s(self, rings: NDArray[np.intp]) -> float:
        """How long ago there was news of any of these rings."""
        return self._clock() - float(self.registry.of["heard_s"][rings].max())

    def _digest(self) -> None:
        if not self.planes.columns:
            return
        last = self.registry.of["last_step"][self.ring_of]
        awaited = self.live_columns() & (last >= self.planes.oldest - 1)
        frontier = int(last[awaited].min()) if awaited.any() else self.planes.newest
        kept = self.planes.complete()
        due = kept[(kept > self.frontier) & (kept <= frontier)]
        self._put_steps(self.digests, due)
        self._late.difference_update(due.tolist())
        self.frontier = max(self.frontier, frontier)
        late = sorted(self._late)
        for step in late[:LATE_AT_ONCE] if self.planes.columns > LARGE else late:
            self._write(step)
        if len(due) or late:
            self.touch()

    def _put_steps(self, log: DigestLog, steps: NDArray[np.int64]) -> None:
        """Digest steps in the window: in blocks where possible, otherwise one by one."""
        while len(steps) > 1 and log.last_step < steps[0]:
            block = digest_block(self.planes, steps)
            if block is None:
                break
            block.start_wall_ns[:] = self.wall_ns_of(0, block.start_wall_ns)
            log.extend(block)
            steps = steps[len(block) :]
        for step in steps.tolist():
            digested = digest_step(self.planes, step)
            if digested is not None:
                digest, column = digested
                digest.start_wall_ns[:] = self.wall_ns_of(column, digest.start_wall_ns)
                log.put(digest)

    def _write(self, step: int) -> None:
        self._put_steps(self.digests, np.array([step]))
        self._late.discard(step)
        if step <= self.frontier:
            self.redone.pop(step, None)
            self.redigests += 1
            self.redone[step] = self.redigests
            if len(self.redone) > KEPT_REDONE:
                del self.redone[next(iter(self.redone))]

    def newest_step_end_ns(self) -> int | None:
        """Return when the newest step of any rank ended."""
        planes = self.planes
        if planes.newest == NONE or not planes.columns:
            return None
        rows = planes.row_of(planes.complete()[-1:])
        if not len(rows):
            return None
        made = np.flatnonzero(planes.have[rows[0], : planes.columns])
        if not len(made):
            return None
        ends = planes.arrays["start_ns"][rows[0], made] + planes.arrays["wall_ns"][rows[0], made].astype(np.int64)
        last = int(ends.argmax())
        return int(self.wall_ns_of(int(made[last]), int(ends[last])))

    def wall_ns_of(self, column: int, start_ns: int | NDArray[np.int64]) -> NDArray[Any]:
        """Return when steps began, on the hub's clock, according to one rank."""
        of, ring = self.registry.of, self.ring_of[column]
        offset_ns = self.offsets_ns.get(self.registry.nodes[of["node"][ring]], 0)
        ahead_ns = int(of["anchor_wall_ns"][ring]) - int(of["anchor_mono_ns"][ring]) - offset_ns
        # Unbounded integers: a clock received from an agent may have any value.
        walls: NDArray[Any] = np.clip(np.asarray(start_ns).astype(object) + ahead_ns, 0, LARGEST_WALL_NS)
        return walls

    def _fit_stride(self) -> None:
        """Keep fewer steps if the ranks, whose rows arrive at different times, are further apart than the window."""
        now_s = self._clock()
        if now_s - self._stride_s < STRIDE_S or not self.planes.columns:
            return
        self._stride_s = now_s
        last = self.registry.of["last_step"][self.ring_of][self.live_columns()]
        if not len(last):
            return
        # Ignore the slowest few: a node that comes back after an hour must not cost all others their steps.
        behind = self.planes.newest - int(np.partition(last, len(last) // BEHIND)[len(last) // BEHIND])
        stride = self.planes.stride
        while behind > 0.8 * self.planes.width * stride and stride < MOST_STRIDE:
            stride *= 2
        while stride > 1 and behind < 0.2 * self.planes.width * stride:
            stride //= 2
        if stride != self.planes.stride:
            self.planes.set_stride(stride)


def _stretches(table: StepTable) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Yield rows of a table, one stretch of steps of all ranks at a time, and how many each rank has."""
    if not len(table):
        return
    steps = table.shared_steps()
    numbers = np.unique(table.step) if steps is None else steps
    edges = np.append(numbers[:: max(1, ROWS_AT_ONCE // table.ranks)], numbers[-1] + 1)
    begins = [table.first[:-1] + np.searchsorted(numbers, edge) for edge in edges.tolist()]
    if steps is None:
        ranks = [table.rank(rank)["step"] for rank in range(table.ranks)]
        begins = list(table.first[:-1] + np.array([np.searchsorted(own, edges) for own in ranks]).T)
    for begin, end in pairwise(begins):
        counts = end - begin
        offsets = np.repeat(begin - (np.cumsum(counts) - counts), counts)
        yield offsets + np.arange(len(offsets)), counts


class _Rows:
    """The rows that remain after filtering."""

    def __init__(self, slots: NDArray[np.uint8], table: NDArray[Any]) -> None:
        self.slots = slots
        self.table = table


# -- live run ---------------------------------------------------------------------------------------------------------

MOST_ROWS = 10_000
"""The limit for ranks, events or samples in one answer."""
MOST_BINS = 4096
UNFOLDED_CELLS = 1 << 16
"""The limit for steps times ranks that one answer digests again; takes tens of milliseconds."""
WATCHED_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The result of the last evaluation of the rules."""

    findings: tuple[Finding, ...] = ()
    """The findings shown, the most severe first."""
    standing: Mapping[int, str] = field(default_factory=dict)
    """By rank, what it is doing while the job is hung (``hangs/report.py``)."""
    communication: Mapping[str, Any] | None = None
    """What the ranks exchanged in the evaluated steps: the table of ``summary.json``."""
    throughput: Mapping[str, Any] | None = None
    """The same for samples, tokens and operations per second."""
    goodput: Mapping[str, Any] | None = None
    """The ledger so far, as in ``summary.json``; None: unknown."""
    first_step: int = NONE
    step: int = NONE
    """The first and the last step that were judged."""
    ranks: int = 0
    """How many ranks were judged."""
    of_ranks: int = 0
    """How many ranks there are."""
    collecting: str = ""
    """A sentence that says how many steps are still needed, if there are too few to judge."""
    evaluations: int = 0
    took_s: float = 0.0
    period_s: float = 0.0
    """The time from one evaluation to the next."""
    failed: str = ""
    """The error of a failed evaluation, if any; a bug in the hub."""


class LiveRun(Intake):
    judged = Judged()
    requested_s = float("-inf")
    """When a client last asked for this run."""
    _steps_answer: tuple[tuple[int, ...], dict[str, Any]] | None = None
    """The last answer of ``steps`` and its arguments: every newly opened page asks the same."""
    _steady_at: tuple[tuple[int, ...], NDArray[np.bool_]] | None = None
    """The last answer of ``steady_rows``, and for which steps."""
    _clock_at: tuple[tuple[int, ...], str] | None = None
    _means_at: tuple[tuple[int, ...], dict[str, NDArray[np.float32]], dict[str, NDArray[np.float32]]] | None = None
    """The means of all ranks, and for which steps: the page of every rank needs them."""

    def note_request(self) -> None:
        """Note that a client asked for this run."""
        self.requested_s = self._clock()

    @property
    def watched(self) -> bool:
        """Whether a client is following the run: clients ask at every heartbeat."""
        return self._clock() - self.requested_s < WATCHED_S

    def judge(self, judged: Judged) -> None:
        self.judged = judged
        self.touch()

    async def changed(self, version: int, timeout_s: float) -> int:
        """Wait until the version differs or the timeout passes; return the version."""
        if self.version == version:
            waiter = asyncio.get_running_loop().create_future()
            self.waiting.add(waiter)
            try:
                await asyncio.wait((waiter,), timeout=timeout_s)
            finally:
                self.waiting.discard(waiter)
        return self.version

    def info(self) -> dict[str, Any]:
        """Return the run's status as one document."""
        self.settle()
        n, of = self.registry.count, self.registry.of
        own = of["attempt"][:n] == self.registry.attempt
        states = Counter(STATES[state] for state in self.registry.states()[own & (of["shown"][:n] != NONE)].tolist())
        return {
            "name": self.name,
            "attempt": self.registry.attempt,
            "world_size": self.registry.world_size,
            "ranks": self.planes.columns,
            "live_ranks": int(self.live_columns().sum()) if self.planes.columns else 0,
            "still_ranks": self._still_ranks(),
            "rings": n,
            "states": dict(states),
            "nodes": len(self.registry.nodes),
            "hosts": len(self.registry.hosts),
            "step": self.frontier,
            "newest_step": self.planes.newest,
            "window": {"steps": self.planes.width, "stride": self.planes.stride, "oldest_step": self.planes.oldest},
            "phases": self.used_phases(),
            "clock": self.clock(),
            "rows": self.rows_taken,
            "rows_repeated": self.rows_repeated,
            "rows_unknown": self.rows_unknown,
            "lost": int(of["lost"][:n].sum()),
            "torn": int(of["torn"][:n].sum()),
            "events": self.received.events_seen,
            "version": self.version,
            "model_bytes": self.planes.nbytes + self.map.nbytes,
            "judged": self._judged(),
        }

    def ranks(
        self, *, first: int = 0, limit: int = 1000, order: str = "rank", chosen: Collection[int] | None = None
    ) -> dict[str, Any]:
        """Return the ranks of the last attempt as columns.

        ``order``: ``rank``; or ``work``, ``wall`` or the name of a phase: the longest first, by the mean over the
        steady steps of the window; after ``device:``, by the time on the device.  ``chosen``: only these ranks.
        """
        self.settle()
        of, rings = self.registry.of, self.ring_of
        shown = of["shown"][rings]
        key = self.version, *self._window_key()
        if self._means_at is None or self._means_at[0] != key:
            self._means_at = key, self.means(("wall", "work", *self.used_phases())), self.device_means()
        _, host, device = self._means_at
        means = host | {f"device:{name}": values for name, values in device.items()}
        place = np.argsort(shown) if order not in means else np.lexsort((shown, -means[order]))
        if chosen is not None:
            place = place[np.isin(shown[place], list(chosen))]
        place = place[first : first + min(limit, MOST_ROWS)]
        at = rings[place]
        offsets = np.array([self.offsets_ns.get(node, 0) for node in self.registry.nodes], np.int64)
        since = of["live_since_ns"][at] - of["anchor_mono_ns"][at] + of["anchor_wall_ns"][at]
        names = [self.registry.phase_names(ring) for ring in at.tolist()]
        live = zip(names, of["live_phase"][at].tolist(), strict=True)
        heard = of["live_step"][at] > of["last_step"][at]  # otherwise the position is older than the last step it sent
        states = [self.registry.state(ring) for ring in at.tolist()]
        standing = [self.judged.standing.get(rank) for rank in shown[place].tolist()]
        plain = ("attempt", "local_rank", "pid", "last_step", "rows", "lost", "torn", "hook_failures")
        return {
            "total": len(rings),
            "rank": shown[place].tolist(),
            **{name: of[name][at].tolist() for name in plain},
            "live_step": np.maximum(of["live_step"][at], of["last_step"][at] + 1).tolist(),
            "node": [self.registry.nodes[node] for node in of["node"][at].tolist()],
            "host": [self.registry.hosts[host] for host in of["host"][at].tolist()],
            "state": states,
            "standing": [how if state in ALIVE else None for how, state in zip(standing, states, strict=True)],
            "live_phase": [
                given[slot] if known else None for (given, slot), known in zip(live, heard.tolist(), strict=True)
            ],
            "live_since_wall_ns": (since - offsets[of["node"][at]]).tolist() if len(at) else [],
            "ended_wall_ns": [ended or None for ended in of["ended_wall_ns"][at].tolist()],
            "mean_ns": {
                name: np.round(values[place]).astype(np.int64).tolist()
                for name, values in means.items()
                if not name.startswith("device:")
            },
            "device_mean_ns": {
                name: np.round(values[place]).astype(np.int64).tolist() for name, values in device.items()
            },
        }

    def steps(self, first: int = 0, last: int | None = None, *, bins: int = 512) -> dict[str, Any]:
        """Return the digests of these steps as columns, in at most ``bins`` bins."""
        self.tick()
        last = max(0, self.planes.newest) if last is None else last
        arguments = (self.version, first, last, bins)
        if self._steps_answer is None or self._steps_answer[0] != arguments:
            self._steps_answer = arguments, self._as_columns(self._bins(first, last, bins))
        return dict(self._steps_answer[1])

    def steps_redone(self, after: int) -> dict[str, Any] | None:
        """Return the steps digested again after redigest number ``after`` as columns; None if there were none."""
        redone = [step for step, number in self.redone.items() if number > after]
        if not redone:
            return None
        found = self._bins(min(redone), max(redone), MOST_BINS)
        return self._as_columns(found.part(np.isin(found.first, redone) & (found.first == found.last)))

    def _bins(self, first: int, last: int, bins: int) -> Bins:
        most = min(max(1, bins), MOST_BINS)
        log = self._unfolded(first, last, most) or self.digests
        return log.bins(first, last, most, metrics=metrics_of(self.planes), device=device_width(self.planes))

    def _unfolded(self, first: int, last: int, most: int) -> DigestLog | None:
        """Digest steps anew where the log is coarser than requested, if the window still has them all."""
        if self.planes.stride > 1 or self.digests.coarsest(first, last) <= max(1, (last - first + 1) // most):
            return None
        kept = self.planes.complete()
        there = kept[(kept >= first) & (kept <= min(last, self.frontier))]
        if not len(there) or len(there) * self.planes.columns > UNFOLDED_CELLS or kept[0] > first:
            return None
        log = DigestLog(len(there))
        self._put_steps(log, there)
        return log

    def _as_columns(self, found: Bins) -> dict[str, Any]:
        metrics = {"wall": 0, "work": 1, **{name: 2 + self.planes.phases.index(name) for name in self.used_phases()}}
        shown = self.registry.of["shown"][self.ring_of].tolist()
        values = np.round(found.values[:, :, list(metrics.values())]).astype(np.int64).tolist()
        worst = [
            [
                {"rank": shown[column], "step": step, **dict(zip(metrics, own, strict=True))}
                for column, step, own in zip(*of_bin, strict=True)
                if column != NONE
            ]
            for of_bin in zip(found.worst.tolist(), found.worst_step.tolist(), values, strict=True)
        ]
        return {
            "first": found.first.tolist(),
            "last": found.last.tolist(),
            "steps": found.steps.tolist(),
            "sampled": found.sampled.tolist(),
            "ranks": found.ranks.tolist(),
            "quantiles": list(QUANTILES),
            "ns": {
                name: np.round(found.quantiles[:, metric]).astype(np.int64).tolist() for name, metric in metrics.items()
            },
            "mean_ns": {
                name: np.round(found.mean[:, metric]).astype(np.int64).tolist() for name, metric in metrics.items()
            },
            "device_mean_ns": self._device_columns(found),
            "device_slowest_ns": self._device_column(found, 1),
            "worst": worst,
            "start_wall_ns": found.start_wall_ns.tolist(),
            "memory_bytes": {
                name: [None if level != level else round(level) for level in found.memory[:, at].tolist()]
                for at, name in enumerate(MEMORY)
            },
        }

    def _device_columns(self, found: Bins) -> dict[str, list[int | None]]:
        """Return columns by phase with any time on a device; None for a bin without a timed step."""
        if not found.device.size:
            return {}
        return {
            name: self._device_column(found, place)
            for place, name in enumerate(self.planes.phases, DEVICE_PHASES)
            if f"device:{name}" in self.planes.arrays
        }

    @staticmethod
    def _device_column(found: Bins, place: int) -> list[int | None]:
        if not found.device.size:
            return [None] * len(found)
        timed = (found.device[:, 0] > 0).tolist()
        levels = np.round(found.device[:, place]).astype(np.int64).tolist()
        return [level if known else None for level, known in zip(levels, timed, strict=True)]

    def findings(self) -> dict[str, Any]:
        return {**self._judged(), "findings": [finding.to_dict() for finding in self.judged.findings]}

    def events(self, after: int = 0, *, limit: int = 1000) -> list[dict[str, Any]]:
        """Return the events after number ``after``, the oldest first; each has its ``number`` and ``node``."""
        return self.received.events(after, min(limit, MOST_ROWS))

    def samples(
        self,
        *,
        kinds: Collection[str] | None = None,
        nodes: Collection[str] | None = None,
        since_wall_ns: int = 0,
        limit: int = 1000,
    ) -> list[dict[str, Any]]:
        found = self.received.parsed(
            "samples.jsonl", nodes=nodes, since_wall_ns=since_wall_ns, limit=min(limit, MOST_ROWS)
        )
        return [line for line in found if kinds is None or line.get("kind") in kinds]

    def layers(self) -> LayerRecords:
        """Parse what sampled steps showed of the layers so far; takes up to a second, so call it in a thread."""
        return read_layers(parse_raw(self.received.layers.raw()))[0]

    def stacks(self, *, nodes: Collection[str] | None = None, limit: int = 1000) -> list[dict[str, Any]]:
        return self.received.parsed("stacks.jsonl", nodes=nodes, limit=min(limit, MOST_ROWS))

    # -- details --------------------------------------------------------------------------------------------------

    def used_phases(self) -> list[str]:
        """Return the phases with any time in them."""
        return [name for name in self.planes.phases if f"phase:{name}" in self.planes.arrays]

    def means(self, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """By name, [column]: the mean over the steady steps of the window; 0 for a rank without a step in it."""
        mean = self._mean_of(self.planes.have)
        found = {}
        for name in names:
            if name == "work":
                found[name] = mean("wall_ns") - mean("phase:comm")
            else:
                found[name] = mean("wall_ns" if name == "wall" else f"phase:{name}")
        return found

    def device_means(self) -> dict[str, NDArray[np.float32]]:
        """The same for the devices, over the steady steps that were timed there; empty if none was."""
        if "device" not in self.planes.arrays:
            return {}
        mean = self._mean_of(self.planes.arrays["device"])
        timed = [name for name in self.planes.phases if f"device:{name}" in self.planes.arrays]
        phases = {name: mean(f"device:{name}") for name in timed}
        wall = np.sum(list(phases.values()), axis=0, dtype=np.float32)
        return {"wall": wall, "work": wall - phases.get("comm", np.float32(0)), **phases}

    def _mean_of(self, there: NDArray[np.bool_]) -> Callable[[str], NDArray[np.float32]]:
        n, used = self.planes.columns, self.steady_rows()
        count = np.maximum(np.add.reduce(there[:, :n], axis=0, where=used[:, None]), 1).astype(np.float32)
        weight = used.astype(np.float32)

        def mean(name: str) -> NDArray[np.float32]:
            plane = self.planes.arrays.get(name)
            if plane is None:
                return np.zeros(n, np.float32)
            return np.asarray(weight @ plane[:, :n] / count, np.float32)

        return mean

    def steady_rows(self) -> NDArray[np.bool_]:
        """[row of the window]: whether its step is like the others, as the rules decide it; all if none is."""
        planes, key = self.planes, self._window_key()
        if self._steady_at is None or self._steady_at[0] != key:
            kept = planes.complete()
            rows, n = planes.row_of(kept), planes.columns
            have = planes.have[rows, :n]
            wall = np.where(have, planes.arrays["wall_ns"][rows, :n], np.nan) if len(rows) else np.zeros((0, n))
            flags = (
                planes.arrays["flags"][rows, :n] if "flags" in planes.arrays else np.zeros((len(rows), n), np.uint16)
            )
            there = have.any(axis=1)
            apart = set_apart(kept[there], wall[there].T.astype(np.float64), flags[there].T)
            used = np.zeros(planes.width, np.bool_)
            used[rows[there]] = True
            used[planes.row_of(np.array([step.step for step in apart], np.int64))] = False
            if not used.any():
                used[rows] = True
            self._steady_at = key, used
        return self._steady_at[1]

    def clock(self) -> str:
        """Return ``device`` if enough steady steps were timed there on all ranks, as the rules decide, or ``host``."""
        key = self._window_key()
        if self._clock_at is None or self._clock_at[0] != key:
            self._clock_at = key, self._clock_now()
        return self._clock_at[1]

    def _clock_now(self) -> str:
        planes, n = self.planes, self.planes.columns
        if "device" not in planes.arrays or not n:
            return "host"
        rows = np.flatnonzero(self.steady_rows())
        return clock_of(timed_steps(planes.have[rows, :n].T, planes.arrays["device"][rows, :n].T))

    def _window_key(self) -> tuple[int, ...]:
        return self.frontier, self.redigests, self.planes.newest, self.planes.columns, self.planes.width

    def _still_ranks(self) -> int:
        """Count the ranks that are alive but make no progress: those blocking the job, and those waiting for them."""
        if not self.judged.standing:
            return 0
        shown = self.registry.of["shown"][self.ring_of]
        standing = self.ring_of[np.isin(shown, list(self.judged.standing))].tolist()
        return sum(self.registry.state(ring) in ALIVE for ring in standing)

    def _judged(self) -> dict[str, Any]:
        judged = self.judged
        return {
            "first_step": None if judged.first_step == NONE else judged.first_step,
            "step": None if judged.step == NONE else judged.step,
            "ranks": judged.ranks,
            "of_ranks": judged.of_ranks,
            "collecting": judged.collecting,
            "evaluations": judged.evaluations,
            "looks": judged.evaluations,  # the earlier name, for older clients
            "took_s": round(judged.took_s, 4),
            "period_s": round(judged.period_s, 2),
            "failed": judged.failed,
        }

    def ended(self) -> bool:
        """Whether every rank of the last attempt is known to be gone."""
        states = self.registry.of["state"][self.ring_of]
        return bool(len(states)) and bool((states >= ENDED).all())
