"""Ingest for one run on several nodes: its inbox, nodes that fell silent, and journals to seal.

    gathering = RunIngest(run_dir, live, refusals, …)     # after a restart, ``live`` gets what was already received
    gathering.ingest                                      # for the application
    gathering.tick()                                      # once a second
    gathering.missing()                                   # at the end: nodes that have not said bye

A separate process rewrites each full journal in columns (``store/inbox/parts.py``), one at a time, so that sealing
takes neither memory nor time from the hub.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from stepscope.hub.audit import AuditLog
from stepscope.hub.ingest.auth import SILENT_S, Admission, Challenges
from stepscope.hub.ingest.endpoints import HubJournal, IngestApp, note_end
from stepscope.hub.ingest.tail import InboxTail
from stepscope.hub.limits import Refusals
from stepscope.hub.live.live_run import LiveRun
from stepscope.records import run_clock
from stepscope.records.paths import helper_command, helper_environment
from stepscope.store.inbox.journal import journals
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.live.ring_files import read_sidecars
from stepscope.wire.keys import KeyRing

__all__ = ["NodeWatch", "RunIngest"]


# -- node watch -------------------------------------------------------------------------------------------------------
# Checks once a second which nodes fell silent, what was refused and which ranks are on this node, and saves
# ``nodes.json``.

ABSENT_S: Final = 30.0
"""When to report the nodes that never connected."""
_SAVE_S: Final = 3.0
_COST: Final = 50
"""Writing ``nodes.json`` may take one in this many seconds: with many nodes it is written less often."""


class NodeWatch:
    """Call ``tick`` about once a second and ``close`` at the end, in the hub's event loop."""

    def __init__(
        self,
        *,
        admission: Admission,
        inbox: Inbox,
        journal: HubJournal,
        refusals: Refusals,
        audit: AuditLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admission, self._inbox, self._journal, self._refusals = admission, inbox, journal, refusals
        self._audit = audit
        self._clock = clock
        self._save_at_s = 0.0
        self._absent_at_s = clock() + ABSENT_S
        self._told: set[str] = set()

    def tick(self) -> None:
        for sender in self._admission.look():
            silent_s = round(sender.silent_s(self._clock()), 1)
            self._journal.event("node_lost", node=sender.node, host=sender.host, silent_s=silent_s)
            if self._audit is not None:
                note_end(self._audit, self._admission.names[0], sender, "silent")
        if self._clock() >= self._absent_at_s:
            self._absent_at_s = float("inf")
            came = {node.node for node in self._inbox.nodes()}
            came |= {sender.node for sender in self._admission.senders.values()}
            if absent := sorted(set(range(1, self._admission.nnodes)) - came):
                self._journal.event("node_absent", nodes=absent)
        for reason, count in self._counts().items():
            if reason not in self._told:
                self._told.add(reason)
                self._journal.event("refusals", reason=reason, count=count)
        if self._clock() >= self._save_at_s:
            self._claim_own_ranks()
            self._save()
        self._journal.flush()

    def close(self) -> None:
        """Write everything that is known a last time."""
        if self._audit is not None:
            for sender in self._admission.senders.values():
                if not (sender.bye or sender.lost):
                    note_end(self._audit, self._admission.names[0], sender, "the hub ends")
        if self._refusals.total:
            self._journal.event("refused_in_all", counts=self._counts())
        self._save()
        self._journal.flush()

    def _claim_own_ranks(self) -> None:
        """Claim the ranks of the hub's own node, which sends no frames."""
        spool = self._admission.local_spool
        if spool:
            rings, _ = read_sidecars(self._journal.run_dir)
            self._admission.claims.take(spool, rings.values())

    def _save(self) -> None:
        began_s = self._clock()
        try:
            self._inbox.save_nodes(refused=self._counts())
        except OSError as error:
            self._journal.refused(error)
        took_s = self._clock() - began_s
        self._save_at_s = began_s + max(_SAVE_S, took_s * _COST)

    def _counts(self) -> dict[str, int]:
        return {reason: count for reason, count in self._refusals.by_reason().items() if count}


# -- run ingest -------------------------------------------------------------------------------------------------------

UNHEARD_S = 5.0
"""At the end, how long to wait for a node that never connected, in case the job was very short."""
SEAL_AGAIN_S = 60.0
"""The delay after a failed attempt to seal a journal."""
SEAL_END_S = 20.0
"""At the end, how long to wait for a journal being sealed; otherwise it is sealed with the run."""


class RunIngest:
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
        keys: KeyRing | None = None,
        challenges: Challenges | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """UsageError if there is no key, OSError if the inbox cannot be read or written.

        ``keys``, ``challenges``: from a server that admits agents to several runs.
        """
        self._run_dir = run_dir
        self._live = live
        self._own_spool = own_spool
        self._nnodes = nnodes
        self._inbox = Inbox(run_dir)
        self.keys = keys if keys is not None else KeyRing(os.environ)
        self._admission = Admission(
            keys=self.keys,
            certificate=fingerprint,
            names=names,
            nnodes=nnodes,
            local_spool=own_spool,
            challenges=challenges,
        )
        self._admission.recall([node.spool for node in self._inbox.nodes()])
        InboxTail(run_dir, live, self._admission.claims).catch_up()
        journal = HubJournal(run_dir, live)
        journal.event("hub_start", pid=os.getpid())
        self._watch = NodeWatch(
            admission=self._admission, inbox=self._inbox, journal=journal, refusals=refusals, audit=audit
        )
        self.ingest = IngestApp(
            admission=self._admission, inbox=self._inbox, live=live, journal=journal, refusals=refusals, audit=audit
        )
        self._own_keys = keys is None
        if self._own_keys:
            self.keys.start()
        self._sealing: subprocess.Popen[bytes] | None = None
        self._seal_at_s = 0.0
        self._ending_s: float | None = None

    def tick(self) -> None:
        self._admission.watched = self._live.watched
        self._watch.tick()
        self._seal()

    def missing(self) -> list[int]:
        """List the nodes that may still send something; first called when the job is over here."""
        if self._ending_s is None:
            self._ending_s = time.monotonic()
        awaited = {sender.node for sender in self._admission.awaited()}
        # Include nodes that joined before the hub was restarted and are about to rejoin.
        heard_ns = run_clock.wall_ns() - int(SILENT_S * 1e9)
        known = [node for node in self._inbox.nodes() if node.spool != self._own_spool and not node.replaced_by]
        joined = self._admission.senders
        awaited |= {n.node for n in known if n.spool not in joined and n.bye is None and n.heard_wall_ns > heard_ns}
        if time.monotonic() - self._ending_s < UNHEARD_S:
            awaited |= set(range(1, self._nnodes)) - {node.node for node in known}
        return sorted(awaited)

    def close(self) -> None:
        if self._own_keys:
            self.keys.stop()
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
            words = helper_command("stepscope.store.inbox.parts", str(self._run_dir), str(min(full)))
            self._sealing = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=helper_environment(os.environ)
            )
