"""The thread that sends a run directory to the hub while the agent goes on draining.

It shares nothing with the agent's loop but files, which only the loop writes, and a list of news, which the loop takes
and puts into its journal.  Whatever becomes of the hub, the loop never waits for this thread, except at the very end
and then not longer than it says.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.agent.sample_keeper import SampleClaim
from stepscope.agent.shipping.destination import Destination
from stepscope.agent.shipping.outgoing import Outgoing
from stepscope.agent.shipping.sender import PATIENCE_S, Counts, News, Sender
from stepscope.wire.joining import Peer
from stepscope.wire.keys import KeyRing

__all__ = ["Delivered", "Shipper"]

LAST_PAUSE_S = 1.0
"""At the end there is no time for longer ones."""
SILENCE_S = 8.0
"""At the end, a hub that does not answer for so long is not waited for: one that was started again would have."""
GRACE_S = 1.0
LOOK_S = 0.2
OUT_OF_TIME = "there was no time for more"


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """Whether the hub has everything; if not, how much is left and why."""

    whole: bool
    left_bytes: int = 0
    why: str = ""
    local: bool = False
    """The hub reads the run directory where it is."""
    run: str = ""
    """What the run is called there."""

    def word(self) -> dict[str, Any]:
        """As the launcher is told."""
        if self.whole:
            return {"delivered": True, "run": self.run}
        return {"delivered": False, "left_bytes": self.left_bytes, "why": self.why}


class Shipper:
    """``start``, then ``finish`` or ``stop``; neither raises, whatever the hub does."""

    def __init__(
        self,
        run_dir: Path,
        to: Destination,
        *,
        keys: Callable[[], Sequence[bytes]] | None = None,
        probe_port: int = 0,
    ) -> None:
        """NotARun when ``run_dir`` is none."""
        self.to = to
        self._run_dir = run_dir
        if keys is None:
            keys = KeyRing(os.environ, tell=lambda _: None).look  # what a job prints is its own
        self._sender = Sender(run_dir, to, keys, probe_port=probe_port)
        self._wake = threading.Event()
        self._bye: Mapping[str, Any] | None = None
        self._ending_s = self._deadline_s = float("inf")
        self._delivered: Delivered | None = None
        self._thread = threading.Thread(target=self._run, name="shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def news(self) -> list[News]:
        """Events for the journal, each once."""
        taken: list[News] = []
        while self._sender.news:
            taken.append(self._sender.news.popleft())
        return taken

    @property
    def samples(self) -> SampleClaim:
        """What of the samples the hub has."""
        return self._sender.samples

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Agents that answer probes, as the hub last said."""
        return self._sender.peers

    @property
    def probe_key(self) -> str:
        """What probes are signed with; empty before the hub was reached."""
        return self._sender.probe_key

    @property
    def watched(self) -> bool:
        """Whether somebody looked at the run when the hub last answered."""
        return self._sender.watched

    @property
    def counts(self) -> Counts:
        return self._sender.counts

    @property
    def run_name(self) -> str:
        """What the run is called at the hub."""
        return self._sender.run_name

    def finish(
        self, end: Mapping[str, Any], deadline_s: float, *, given_up: Callable[[], bool] = lambda: False
    ) -> Delivered:
        """Send everything and, last, how it ended; at most so long, and less when nobody is there or it is given up."""
        self._ending_s = time.monotonic()
        self._deadline_s = self._ending_s + deadline_s
        self._bye = end
        self._wake.set()
        last_s = self._deadline_s + GRACE_S
        while self._thread.is_alive() and time.monotonic() < last_s:
            self._thread.join(LOOK_S)
            if given_up():
                self.stop()
                break
        if self._delivered is not None:
            return self._delivered
        # The thread waits for an answer, or died of a fault of ours; of its own account nothing can be asked.
        why = OUT_OF_TIME if self._thread.is_alive() else "sending failed, which is a fault of Stepscope's"
        return Delivered(whole=False, left_bytes=Outgoing(self._run_dir).left_bytes(), why=why)

    def stop(self) -> None:
        """Without a last word: another agent may go on."""
        self._deadline_s = float("-inf")
        self._wake.set()
        self._thread.join(GRACE_S)

    def _run(self) -> None:
        whole = False
        while not whole and (left_s := self._left_s()) > 0:
            bye = self._bye
            turn = self._sender.turn(bye=bye, patience_s=min(PATIENCE_S, left_s))
            whole = turn.delivered
            if whole or (bye is None and self._bye is not None):
                continue  # it is over, or the end came meanwhile
            pause_s = turn.wait_s if bye is None else min(turn.wait_s, LAST_PAUSE_S)
            self._wake.wait(min(pause_s, max(self._left_s(), 0)))
            self._wake.clear()
        self._sender.close()
        unsent = self._sender.unsent()
        if whole and not unsent:
            self._delivered = Delivered(whole=True, local=self._sender.local, run=self._sender.run_name)
        else:
            why = self._sender.refusal or self._sender.trouble or (unsent if whole else OUT_OF_TIME)
            self._delivered = Delivered(whole=False, left_bytes=self._sender.left_bytes(), why=why)

    def _left_s(self) -> float:
        patient_s = max(self._ending_s, self._sender.heard_s) + SILENCE_S
        return min(self._deadline_s, patient_s) - time.monotonic()
