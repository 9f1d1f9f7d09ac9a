"""How rows become the model: rings, planes, digests and the map are brought up to date together.

Rows wait until a few thousand have come together; then they are taken in at once (``settle``).  A step is complete when
every live rank has made it.  One that was silent for the grace, or is so far behind that its steps would not fit into
the window, is not waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.batch import Batch, Taken, gather
from stepscope.hub.model.digest import digest_steps
from stepscope.hub.model.digest_block import digest_block
from stepscope.hub.model.digest_log import DigestLog
from stepscope.hub.model.exchanges import Exchanges
from stepscope.hub.model.heat import Heat
from stepscope.hub.model.lines import Lines
from stepscope.hub.model.planes import NONE, Names, Planes
from stepscope.hub.model.registry import ENDED, Registry
from stepscope.records.phases import COMM
from stepscope.store.sidecar import RingSidecar
from stepscope.wire.blocks import TABLE_FIELDS

__all__ = ["Intake"]

SETTLE_ROWS = 32_768
"""So many rows are taken in at once, at the latest."""
GRACE_S = 10.0
GRACE_ROUNDS = 3
"""A rank that was silent for longer, and for so many rounds of all agents, is not waited for."""
FRAMES_PER_S = 600
"""What a hub lets its agents send, all together; a round is one frame of each."""
LATE_AT_ONCE = 2
"""Steps of large jobs that are digested again in one tick because a row of theirs came late."""
LARGE = 4096
"""Ranks of a large job."""
LARGEST_WALL_NS = (1 << 63) - 1
ATTEMPTS_COST = 20
"""Telling attempts apart may take one in so many of our seconds."""
STRIDE_S = 5.0
MOST_STRIDE = 1024
MOST_EXPECTED = 1 << 17
"""Ranks that room is made for because somebody said there would be so many."""
BEHIND = 50
"""One in so many ranks may be further behind than the stride provides for."""
KEPT_REDONE = 512
"""Steps that were digested again; as many as a client may be behind."""


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
    ) -> None:
        self.name = name
        self.run_dir = run_dir
        self.meta: Mapping[str, Any] = {} if meta is None else meta
        self.registry = Registry()
        self.planes = Planes() if planes is None else planes
        self.digests = DigestLog() if digests is None else digests
        self.map = Heat()
        self.exchanges = Exchanges()
        self.said = Lines()
        self.ring_of: NDArray[np.intp] = np.zeros(0, np.intp)
        """The registry's number of each column."""
        self.offsets_ns: dict[str, int] = {}
        """What the clock of each node is ahead of the hub's."""
        self.frontier = NONE
        """The last step that all live ranks have made; up to here steps are digested."""
        self.redone: dict[int, int] = {}
        """By step that was digested again, the number of that time; the newest at the end."""
        self.redigests = 0
        """How many times there were."""
        self.rows_taken = 0
        self.rows_repeated = 0
        self.rows_unknown = 0
        """Of rings that nobody introduced."""
        self.version = 0
        """Grows with everything that can be seen from outside …"""
        self.waiting: set[asyncio.Future[None]] = set()
        """… and those who wait for that."""
        self._clock = clock
        self._pending: list[tuple[NDArray[np.intp], Taken]] = []
        self._pending_rows = 0
        self._late: set[int] = set()
        self._stride_s = self._attempts_s = clock()

    # -- in -------------------------------------------------------------------------------------------------------

    def ring(self, about: RingSidecar, *, node: str) -> None:
        """Register a ring, or bring what is known of it up to date."""
        self.registry.put(about, node=node, now_s=self._clock())
        self.touch()

    def rows(self, taken: Taken) -> None:
        """Take rows; the sidecars of their rings must have come."""
        if not len(taken.table):
            return
        ids = taken.table["ring"].tobytes()
        known = self.registry.by_id
        rings = np.array([known.get(ids[at : at + 16], NONE) for at in range(0, len(ids), 16)], np.intp)
        self._pending.append((rings, taken))
        self._pending_rows += len(taken.slots)
        if self._pending_rows >= SETTLE_ROWS:
            self.settle()

    def lines(self, file: str, lines: Sequence[bytes], *, node: str, offset_ns: int) -> None:
        """Lines of ``events.jsonl``, ``samples.jsonl`` or ``stacks.jsonl``."""
        self.offsets_ns[node] = offset_ns
        self.said.put(file, lines, node=node, offset_ns=offset_ns)
        self.touch()

    def tick(self) -> None:
        """Take in what waits, and digest what is complete."""
        self.settle()
        self._fit_stride()
        self._digest()

    def settle(self) -> None:
        """Take in what waits; whoever reads calls it first."""
        if self.registry.doubtful and self._clock() >= self._attempts_s:
            self._settle_attempts()
        if not self._pending:
            return
        pending, self._pending, self._pending_rows = self._pending, [], 0
        self._hear(pending)
        if any((rings == NONE).any() for rings, _ in pending):
            pending = [self._introduced(rings, taken) for rings, taken in pending]
        pending = [one for one in pending if len(one[1].slots)]
        if pending:
            pending.sort(key=lambda one: int(one[0][0]))
            batch = gather(pending, self.registry.of["last_step"][: self.registry.count])
            self._take(batch)
        self.touch()

    def touch(self) -> None:
        """Something can be seen that was not there before."""
        self.version += 1
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(None)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _settle_attempts(self) -> None:
        """Before rows are taken in: those of an attempt that is over have no place here."""
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
        self.registry.of["column"][:] = NONE
        self.ring_of = np.zeros(0, np.intp)
        self.frontier = NONE
        self.redone.clear()
        self._late.clear()

    def _hear(self, pending: Sequence[tuple[NDArray[np.intp], Taken]]) -> None:
        """Where the ranks are, as their tables say."""
        rings = np.concatenate([own for own, _ in pending])
        whole = np.dtype(f"V{np.dtype(TABLE_FIELDS).itemsize}")  # joining fields one by one takes ten times as long
        table = np.concatenate([np.ascontiguousarray(taken.table).view(whole) for _, taken in pending])
        table = table.view(TABLE_FIELDS)
        table, rings = table[rings != NONE], rings[rings != NONE]
        of = self.registry.of
        for name in ("live_step", "live_since_ns"):
            of[name][rings] = np.minimum(table[name], np.uint64((1 << 63) - 1)).astype(np.int64)
        of["live_phase"][rings] = table["live_phase"] % 16
        # What the sidecar says of a process that is gone is the last word.
        of["state"][rings] = np.where(of["state"][rings] >= ENDED, of["state"][rings], np.minimum(table["state"], 3))
        of["heard_s"][rings] = self._clock()
        for name in ("lost", "torn"):
            if table[name].any():
                np.add.at(of[name], rings, table[name].astype(np.int64))

    def _introduced(self, rings: NDArray[np.intp], taken: Taken) -> tuple[NDArray[np.intp], Taken]:
        """Without the rows of rings that nobody introduced."""
        known = rings != NONE
        rows = np.repeat(known, taken.table["rows"])
        self.rows_unknown += int((~rows).sum())
        return rings[known], _Rows(taken.slots[rows], taken.table[known])

    def _take(self, batch: Batch) -> None:
        self.rows_repeated += batch.repeated
        self.rows_taken += len(batch.step)
        if len(batch.step):
            self._take_steps(batch)
        if len(batch.exchanges):
            oldest = self.planes.oldest
            self.exchanges.put(batch.exchange_ring, batch.exchanges, ranks=self.planes.columns, oldest=oldest)
        if len(batch.device):
            self._take_device(batch.device, batch.device_ring)

    def _take_device(self, rows: NDArray[Any], ring: NDArray[np.intp]) -> None:
        of = self.registry.of
        names = Names(given=self.registry.names, number=of["names"][ring])
        timed = self.planes.take_device(rows, of["column"][ring].astype(np.intp), names)
        self._late.update(timed[timed <= self.frontier].tolist())

    def _take_steps(self, batch: Batch) -> None:
        of = self.registry.of
        self._give_columns(batch.ring[np.concatenate(([True], np.diff(batch.ring) != 0))])
        column = of["column"][batch.ring].astype(np.intp)
        wall = batch.rows["wall_ns"].astype(np.float32)
        work = wall - batch.rows["phase_ns"][:, COMM].astype(np.float32) - batch.waited
        of["last_step"][batch.ring] = batch.step
        of["rows"][: self.registry.count] += np.bincount(batch.ring, minlength=self.registry.count)
        here = np.flatnonzero(column != NONE)
        self.map.add(column[here], batch.step[here], work[here], wall[here])
        if batch.again is not None:
            own = of["column"][batch.again.ring].astype(np.intp)
            kept, more = self.planes.take_again(batch.again, own)
            self.map.add(own[kept], batch.again.step[kept], -more)
            self._late.update(s for s in batch.again.step[kept].tolist() if s <= self.frontier)
        if len(here):
            self._into_planes(batch.part(here), column[here])

    def _into_planes(self, batch: Batch, column: NDArray[np.intp]) -> None:
        """In order of steps, half a window at a time: a backlog may be longer than the window."""
        names = self.registry.of["names"][batch.ring]
        half = max(1, self.planes.width // 2) * self.planes.stride
        newest, upto = int(batch.step.max()), max(int(batch.step.min()) + half, self.planes.newest)
        if newest <= upto + half:
            self._part_into_planes(batch, column, Names(given=self.registry.names, number=names))
            return
        done, device = NONE, batch.device["step"].astype(np.int64)
        while done < newest:
            own = np.flatnonzero((batch.step > done) & (batch.step <= upto))
            if len(own):
                self._part_into_planes(
                    batch.part(own), column[own], Names(given=self.registry.names, number=names[own])
                )
            # Their device times too, before they leave.
            timed = np.flatnonzero((device > done) & (device <= upto))
            if len(timed):
                self._take_device(batch.device[timed], batch.device_ring[timed])
            # A gap in the numbers is passed over at once.
            rest = batch.step[batch.step > upto]
            done, upto = upto, max(upto, int(rest.min())) + half if len(rest) else upto
            if not len(rest):
                return

    def _part_into_planes(self, batch: Batch, column: NDArray[np.intp], names: Names) -> None:
        newest = int(batch.step.max())
        leaving = self.planes.leaving(newest)
        for step in leaving[leaving <= self.frontier].tolist():
            if step in self._late:
                self._write(step)
        self._put_steps(self.digests, leaving[leaving > self.frontier])
        self._late.difference_update(leaving.tolist())
        self.planes.advance(newest)
        touched = self.planes.steps[self.planes.take(batch, column, names)]
        self._late.update(touched[touched <= self.frontier].tolist())

    def _give_columns(self, rings: NDArray[np.intp]) -> None:
        """A place for the rings of the last attempt that made their first step."""
        of = self.registry.of
        fresh = rings[(of["column"][rings] == NONE) & (of["attempt"][rings] == self.registry.attempt)]
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
        """Which columns are of ranks that are waited for."""
        grace_s = max(GRACE_S, GRACE_ROUNDS * len(self.registry.nodes) / FRAMES_PER_S)
        live: NDArray[np.bool_] = self.registry.live(self._clock() - grace_s)[self.ring_of]
        return live

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
        """Digest steps of the window: many at once where that can be, else one by one."""
        while len(steps) > 1 and log.last_step < steps[0]:
            block = digest_block(self.planes, steps)
            if block is None:
                break
            block.start_wall_ns[:] = self._wall_ns(0, block.start_wall_ns)
            log.extend(block)
            steps = steps[len(block) :]
        for digest in digest_steps(self.planes, steps.tolist()):
            log.put(digest, int(self._wall_ns(digest.column, digest.start_ns)))

    def _write(self, step: int) -> None:
        self._put_steps(self.digests, np.array([step]))
        self._late.discard(step)
        if step <= self.frontier:
            self.redone.pop(step, None)
            self.redigests += 1
            self.redone[step] = self.redigests
            if len(self.redone) > KEPT_REDONE:
                del self.redone[next(iter(self.redone))]

    def _wall_ns(self, column: int, start_ns: int | NDArray[np.int64]) -> NDArray[Any]:
        """When steps began, on the hub's clock, by the word of one rank."""
        of, ring = self.registry.of, self.ring_of[column]
        offset_ns = self.offsets_ns.get(self.registry.nodes[of["node"][ring]], 0)
        ahead_ns = int(of["anchor_wall_ns"][ring]) - int(of["anchor_mono_ns"][ring]) - offset_ns
        # Whole numbers without an end: clocks that somebody sent may be anything.
        walls: NDArray[Any] = np.clip(np.asarray(start_ns).astype(object) + ahead_ns, 0, LARGEST_WALL_NS)
        return walls

    def _fit_stride(self) -> None:
        """Keep fewer steps where the ranks, heard at different times, are further apart than the window is long."""
        now_s = self._clock()
        if now_s - self._stride_s < STRIDE_S or not self.planes.columns:
            return
        self._stride_s = now_s
        last = self.registry.of["last_step"][self.ring_of][self.live_columns()]
        if not len(last):
            return
        # Not the very last: a node that comes back after an hour must not cost all others their steps.
        behind = self.planes.newest - int(np.partition(last, len(last) // BEHIND)[len(last) // BEHIND])
        stride = self.planes.stride
        while behind > 0.8 * self.planes.width * stride and stride < MOST_STRIDE:
            stride *= 2
        while stride > 1 and behind < 0.2 * self.planes.width * stride:
            stride //= 2
        if stride != self.planes.stride:
            self.planes.set_stride(stride)


class _Rows:
    """Rows that are left of others."""

    def __init__(self, slots: NDArray[np.uint8], table: NDArray[Any]) -> None:
        self.slots = slots
        self.table = table
