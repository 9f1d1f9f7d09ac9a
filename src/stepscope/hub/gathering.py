"""What a hub of several nodes has besides: who may send, what they sent, and the journals that are full.

    gathering = Gathering(run_dir, live, refusals, …)     # after a restart, ``live`` gets what is there already
    gathering.ingest                                      # for the application
    gathering.tick()                                      # once a second
    gathering.missing()                                   # at the end: nodes that have not said bye

A journal that is full is rewritten in columns by a process of its own (``store/parts.py``), one at a time, so that
neither its memory nor its time is the hub's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepscope.errors import FrameError
from stepscope.hub.gate.admission import SILENT_S, Admission
from stepscope.hub.gate.claims import RankClaims
from stepscope.hub.gate.ingest import IngestApp
from stepscope.hub.gate.journal import HubJournal
from stepscope.hub.gate.refusals import Refusals
from stepscope.hub.gate.watch import NodeWatch
from stepscope.hub.model.live_run import LiveRun
from stepscope.store.inbox import Inbox
from stepscope.store.journal import journal_path, journals, read_journal
from stepscope.store.parts import rest_path
from stepscope.store.positions import read_positions
from stepscope.store.spools import sidecars_of
from stepscope.store.taken import unpack_block
from stepscope.wire.frames import Frame, inflate_part, read_frame
from stepscope.wire.keys import load_key

__all__ = ["Gathering", "replay"]

UNHEARD_S = 5.0
"""At the end, how long to wait for a node that has never been heard of: of a job that is over at once."""
SEAL_AGAIN_S = 60.0
"""After sealing a journal did not work."""
SEAL_END_S = 20.0
"""At the end, for a journal that is being sealed; what is not done by then is done when the run is."""
_TICK_ROWS = 1 << 16


class Gathering:
    def __init__(
        self,
        run_dir: Path,
        live: LiveRun,
        refusals: Refusals,
        *,
        names: Sequence[str],
        nnodes: int,
        fingerprint: bytes,
        own_spool: str,
    ) -> None:
        """UsageError when there is no key, OSError when the inbox cannot be read or written."""
        self._run_dir = run_dir
        self._own_spool = own_spool
        self._nnodes = nnodes
        self._inbox = Inbox(run_dir)
        self._admission = Admission(
            key=load_key(os.environ), certificate=fingerprint, names=names, nnodes=nnodes, local_spool=own_spool
        )
        self._admission.recall([node.spool for node in self._inbox.nodes()])
        replay(run_dir, live, self._admission.claims)
        journal = HubJournal(run_dir, live)
        journal.event("hub_start", pid=os.getpid())
        self._watch = NodeWatch(admission=self._admission, inbox=self._inbox, journal=journal, refusals=refusals)
        self.ingest = IngestApp(
            admission=self._admission, inbox=self._inbox, live=live, journal=journal, refusals=refusals
        )
        self._sealing: subprocess.Popen[bytes] | None = None
        self._seal_at_s = 0.0
        self._ending_s: float | None = None

    def tick(self) -> None:
        self._watch.tick()
        self._seal()

    def missing(self) -> list[int]:
        """Nodes from which something may still come; first asked when the job is over here."""
        if self._ending_s is None:
            self._ending_s = time.monotonic()
        awaited = {sender.node for sender in self._admission.awaited()}
        # Of those that joined before the hub was started again, the ones that will join any moment.
        heard_ns = time.time_ns() - int(SILENT_S * 1e9)
        known = [node for node in self._inbox.nodes() if node.spool != self._own_spool and not node.replaced_by]
        joined = self._admission.senders
        awaited |= {n.node for n in known if n.spool not in joined and n.bye is None and n.heard_wall_ns > heard_ns}
        if time.monotonic() - self._ending_s < UNHEARD_S:
            awaited |= set(range(1, self._nnodes)) - {node.node for node in known}
        return sorted(awaited)

    def close(self) -> None:
        self._watch.close()
        self._inbox.close()
        if self._sealing is not None:
            try:
                self._sealing.wait(SEAL_END_S)
            except subprocess.TimeoutExpired:
                self._sealing.kill()
                self._sealing.wait()

    def _seal(self) -> None:
        if self._sealing is not None:
            if self._sealing.poll() is None:
                return
            self._seal_at_s = time.monotonic() + (SEAL_AGAIN_S if self._sealing.returncode else 0.0)
            self._sealing = None
        full = [number for number in journals(self._run_dir, after=0) if number < self._inbox.journal]
        if full and time.monotonic() >= self._seal_at_s:
            words = [sys.executable, "-m", "stepscope.store.parts", str(self._run_dir), str(min(full))]
            self._sealing = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def replay(run_dir: Path, live: LiveRun, claims: RankClaims) -> None:
    """Tell the model what other nodes sent before the hub was started: all rings, and the steps not yet sealed."""
    sealed = read_positions(run_dir)
    for number in sealed.parts:
        for frame in _frames(rest_path(run_dir, number)):
            _tell(live, claims, frame, steps=False)
    rows = 0
    for number in journals(run_dir, after=sealed.through):
        for frame in _frames(journal_path(run_dir, number)):
            rows += _tell(live, claims, frame, steps=True)
            if rows >= _TICK_ROWS:
                live.tick()
                rows = 0
    live.tick()


def _frames(path: Path) -> Iterator[Frame]:
    for received in read_journal(path):
        try:
            frame = read_frame(received.raw)
        except FrameError:
            continue  # of another version
        yield frame


def _tell(live: LiveRun, claims: RankClaims, frame: Frame, *, steps: bool) -> int:
    """How many rows that were."""
    node, rows = str(frame.head.node), 0
    for part in frame.parts:
        if part.kind == "rings":
            rings = sidecars_of(part)
            claims.take(frame.head.spool, rings)
            for about in rings:
                live.ring(about, node=node)
        elif part.kind == "steps" and steps:
            taken = unpack_block(part.data)
            rows += len(taken.slots)
            live.rows(taken)
        elif part.kind == "lines":
            lines = [line for line in inflate_part(part).split(b"\n") if line]
            live.lines(part.name, lines, node=node, offset_ns=frame.head.offset_ns or 0)
    return rows
