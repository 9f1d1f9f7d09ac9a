"""What other nodes sent to a run, read from its inbox into the live model: once, or again and again while it grows.

    tail = InboxTail(run_dir, live)
    tail.catch_up()             # a hub that was started again: all that is there
    tail.poll()                 # one that only looks on: what is new, for a while at most

Of journals that were sealed before the first look only who sent is told, not the steps.  Frames are read from where the
last poll ended, journal by journal.  One is sealed some seconds after the next was begun; who was late for it reads on
in its part (``store/parts.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stepscope.errors import FrameError
from stepscope.hub.gate.claims import RankClaims
from stepscope.hub.model.live_run import LiveRun
from stepscope.records.slot import SLOT_BYTES
from stepscope.store.assemble import STEP_DTYPE
from stepscope.store.journal import Received, journal_path, journals, read_journal
from stepscope.store.parts import leaves_rest, part_steps, read_part_steps, rest_path
from stepscope.store.positions import read_positions
from stepscope.store.sample_parts import leaves_samples, sample_parts
from stepscope.store.spools import LIVE_FIELDS, Live, sidecars_of
from stepscope.store.taken import TABLE_DTYPE, TakenRows, unpack_block
from stepscope.wire.frames import Frame, inflate_part, read_frame

__all__ = ["InboxTail"]

TICK_ROWS = 1 << 16
"""After so many the model digests what it has."""
MOST_S = 0.5
"""Of one poll."""
ALL = ("rings", "steps", "lines")
BESIDE = ("rings", "lines")
"""What is told of a journal ahead of its steps, or without them."""


class _Left(NamedTuple):
    rest: bool
    samples: bool


class InboxTail:
    def __init__(
        self,
        run_dir: Path,
        live: LiveRun,
        claims: RankClaims | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``claims``: are told which rings are whose."""
        self._run_dir = run_dir
        self._live = live
        self._claims = RankClaims() if claims is None else claims
        self._clock = clock
        self._begun = False
        self._journal = 0
        self._offset = 0
        self._rests = 0
        """How many frames of this journal were told of which its part, once it is one, has a rest …"""
        self._samples = 0
        """… and of which it has the samples."""
        self._late: Iterator[int] = iter(())
        self._rows = 0

    def catch_up(self) -> None:
        """Everything that is there now.  OSError when it cannot be read."""
        self._take(float("inf"))

    def poll(self) -> int:
        """What is new, for a while at most; how many frames that were."""
        try:
            return self._take(MOST_S)
        except OSError:
            return 0  # sealed while we looked, or the run is gone

    def _take(self, most_s: float) -> int:
        began_s, taken = self._clock(), 0
        if not self._begun:
            self._begun = True
            sealed = read_positions(self._run_dir)
            self._journal = sealed.through + 1
            for part in sample_parts(self._run_dir, sealed.parts):
                for received in read_journal(part.path(self._run_dir)):
                    self._tell(received, BESIDE)
            for number in sealed.parts:
                for received in read_journal(rest_path(self._run_dir, number)):
                    self._tell(received, BESIDE)
        for frames in chain(self._overtaken(), self._received()):
            taken += frames
            if self._clock() - began_s > most_s:
                break
        self._rows = 0
        self._live.tick()
        return taken

    def _received(self) -> Iterator[int]:
        """Tell every frame behind the last one that was told."""
        there = journals(self._run_dir, after=self._journal - 1)
        if there[:1] != [self._journal]:
            return  # not begun yet; or sealed just now, and the next poll finds its part
        for number in there:
            if number > self._journal:
                self._begin_journal(number)
            for received in read_journal(journal_path(self._run_dir, number), self._offset):
                self._offset = received.end
                left = self._tell(received, ALL)
                self._rests += left.rest
                self._samples += left.samples
                yield 1

    def _overtaken(self) -> Iterator[int]:
        """Tell what was sealed before it was read here, a stretch at a time."""
        there = journals(self._run_dir, after=self._journal - 1)
        for late in (self._late, self._parts(there)):
            self._late = late
            while (frames := next(late, None)) is not None:  # not ``yield from``: the end of a poll would end it
                yield frames

    def _parts(self, there: list[int]) -> Iterator[int]:
        """``there``: the journals that are left; where ours is none of them it was sealed."""
        if not there or there[0] <= self._journal:
            return
        sealed = read_positions(self._run_dir)
        senders = sealed.spools.values()
        rings = {ring.number: (ident, ring.live) for spool in senders for ident, ring in spool.rings.items()}
        while self._journal in sealed.parts:
            number, told, told_samples = self._journal, self._rests, self._samples
            self._begin_journal(number + 1)  # a part that cannot be read is passed
            rest = rest_path(self._run_dir, number)
            for received in islice(read_journal(rest), told, None):
                self._tell(received, BESIDE)
                yield 1
            for part in sample_parts(self._run_dir, range(number, number + 1)):
                if not part.span_s and part.last == number:  # else it is hours old, and thinned
                    for received in islice(read_journal(part.path(self._run_dir)), told_samples, None):
                        self._tell(received, BESIDE)
                        yield 1
            for path in part_steps(self._run_dir, [number]):
                self._live.rows(self._steps(path, rings))
                yield 0
            for received in islice(read_journal(rest), told, None):
                self._tell(received, ("steps",))  # what is known of a step goes to it
            self._live.rows(_stand(list(rings.values())))
        if self._journal < there[0]:
            self._begin_journal(there[0])  # what was before it is nowhere any more

    def _begin_journal(self, number: int) -> None:
        self._journal, self._offset, self._rests, self._samples = number, 0, 0, 0

    def _steps(self, path: Path, rings: dict[int, tuple[bytes, Live]]) -> TakenRows:
        """Those that the model does not have; a journal may have been read in part."""
        self._live.settle()
        known = self._live.registry
        whose, slots = [], []
        for number, steps in read_part_steps([path]):
            ident, live = rings[number]
            ring = known.by_id.get(ident)
            last = -1 if ring is None else int(known.of["last_step"][ring])
            fresh = steps[steps.view(STEP_DTYPE).reshape(-1)["step"].astype(np.int64) > last]
            whose.append((ident, live))
            slots.append(fresh)
        stand = _stand(whose)
        stand.table["rows"] = [len(own) for own in slots]
        return TakenRows(table=stand.table, slots=np.concatenate(slots))

    def _tell(self, received: Received, kinds: tuple[str, ...]) -> _Left:
        """These parts of it; in which files a sealed part keeps something of it."""
        try:
            frame = read_frame(received.raw)
        except FrameError:
            return _Left(rest=True, samples=False)  # of another version
        blocks = self._put(frame, kinds)
        self._rows += sum(len(block.slots) for block in blocks)
        if self._rows >= TICK_ROWS:
            self._rows = 0
            self._live.tick()
        return _Left(rest=leaves_rest(frame, blocks), samples=leaves_samples(frame))

    def _put(self, frame: Frame, kinds: tuple[str, ...]) -> list[TakenRows]:
        """Its blocks of steps."""
        node, blocks = str(frame.head.node), []
        for part in frame.parts:
            if part.kind not in kinds:
                continue
            if part.kind == "rings":
                rings = sidecars_of(part)
                self._claims.take(frame.head.spool, rings)
                for about in rings:
                    self._live.ring(about, node=node)
            elif part.kind == "steps":
                blocks.append(unpack_block(part.data))
                self._live.rows(blocks[-1])
            else:
                lines = [line for line in inflate_part(part).split(b"\n") if line]
                self._live.lines(part.name, lines, node=node, offset_ns=frame.head.offset_ns or 0)
        return blocks


def _stand(rings: list[tuple[bytes, Live]]) -> TakenRows:
    """How far these rings are, without rows."""
    table = np.zeros(len(rings), TABLE_DTYPE)
    table["ring"] = np.frombuffer(b"".join(ident for ident, _ in rings), TABLE_DTYPE["ring"])
    for at, name in enumerate(LIVE_FIELDS):
        table[name] = [live[at] for _, live in rings]
    return TakenRows(table=table, slots=np.zeros((0, SLOT_BYTES), np.uint8))
