"""Once a second: which nodes fell silent, what was refused, whose ranks are here, and ``nodes.json``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from stepscope.hub.audit import AuditLog
from stepscope.hub.gate.admission import Admission
from stepscope.hub.gate.ingest import note_end
from stepscope.hub.gate.journal import HubJournal
from stepscope.hub.gate.refusals import Refusals
from stepscope.store.inbox import Inbox
from stepscope.store.sidecar import read_sidecars

__all__ = ["NodeWatch"]

ABSENT_S: Final = 30.0
"""After so long it is told which nodes never came."""
_SAVE_S: Final = 3.0
_COST: Final = 50
"""What writing ``nodes.json`` takes may be one in so many of our seconds: with many nodes it is written less often."""


class NodeWatch:
    """``tick`` about once a second, ``close`` at the end; in the hub's event loop."""

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
        """Everything that is known, a last time."""
        if self._audit is not None:
            for sender in self._admission.senders.values():
                if not (sender.bye or sender.lost):
                    note_end(self._audit, self._admission.names[0], sender, "the hub ends")
        if self._refusals.total:
            self._journal.event("refused_in_all", counts=self._counts())
        self._save()
        self._journal.flush()

    def _claim_own_ranks(self) -> None:
        """Those of the hub's own node, which sends no frames."""
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
