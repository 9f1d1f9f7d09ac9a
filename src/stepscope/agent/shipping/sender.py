"""Sends a run directory to the hub: the sender's turns, its thread, and the estimate of the hub's clock.

``Sender`` does one turn at a time: join, send what is new, handle the answer. It has no thread and never sleeps: the
caller of ``turn`` waits for the returned time and calls again. The hub's answers:

    200   accepted: the answer says how long to collect before the next frame, and gives the hub's clock
    401   unknown token, as after a restart: join again and resume from the hub's position
    409   earlier data is missing: resume from the hub's position
    413   send smaller frames from now on
    429   too many requests; 507: the hub's disk is full: retry later
    else  refused, or not a proper answer: join again later

After a failure that leaves the fate of a frame unknown, joining again gives the hub's position, so nothing is left out
and nothing is sent twice. While the hub is unreachable the pause doubles up to ten seconds, with random jitter, so that
the nodes do not all come back at once.
"""

from __future__ import annotations

import math
import os
import platform
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepscope.agent.disk_space import SampleClaim
from stepscope.agent.shipping.client import Answer, HubClient
from stepscope.agent.shipping.outgoing import Batch, Outgoing
from stepscope.errors import FrameError, HubError, HubRefused, KeyRefused, UsageError
from stepscope.records import run_clock
from stepscope.records.capture import CaptureOrder
from stepscope.records.dataclass_json import decoded
from stepscope.store.documents import Destination, read_meta
from stepscope.wire.frames import JOIN_BYTES, FrameHead, pack_frame
from stepscope.wire.handshake import Join, KeyRing, Peer, Positions, Welcome, peers_of, positions_of, write_join

__all__ = ["Delivered", "HubClock", "Sender", "Shipper"]


# -- Clock ------------------------------------------------------------------------------------------------------------
# How far this machine's clock is ahead of the hub's, estimated from round trips.
#
# A round trip gives four times: we sent, the hub received, the hub answered, we received. The true offset lies within
# half of the total travel time, however it is split between the two directions, so the fastest round trip of the last
# minutes gives the best estimate. Our times are monotonic, so that a wall clock that is set meanwhile, here or there,
# is not averaged with its old value. If two round trips contradict each other, the hub's clock was set, and the later
# one counts.

WINDOW_NS = 120 * 10**9
"""How long a round trip counts, since clocks drift apart."""
DRIFT = 5e-4
"""The maximum drift between two clocks while NTP adjusts one of them, in seconds per second."""


@dataclass(frozen=True, kw_only=True)
class ClockEstimate:
    offset_ns: int
    """How far our wall clock is ahead of the hub's."""
    rtt_ns: int
    """The error bound of ``offset_ns`` is half of this."""


@dataclass(frozen=True, kw_only=True)
class _RoundTrip:
    heard_mono_ns: int
    hub_ahead_ns: int
    """How far the hub's wall clock is ahead of our monotonic clock."""
    rtt_ns: int


class HubClock:
    def __init__(
        self, *, wall_ns: Callable[[], int] = run_clock.wall_ns, mono_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._wall_ns = wall_ns
        self._mono_ns = mono_ns
        self._trips: deque[_RoundTrip] = deque()
        """In order of time. A trip is dropped when a later one is faster, so the first one is the fastest."""

    def heard(self, *, sent_mono_ns: int, received_wall_ns: int, answered_wall_ns: int, heard_mono_ns: int) -> None:
        """Add a round trip. The middle two times are on the hub's clock. Ignored if it took negative time."""
        rtt_ns = (heard_mono_ns - sent_mono_ns) - (answered_wall_ns - received_wall_ns)
        if rtt_ns < 0 or not 0 <= received_wall_ns <= answered_wall_ns < 1 << 62:
            return
        ahead_ns = ((received_wall_ns - sent_mono_ns) + (answered_wall_ns - heard_mono_ns)) // 2
        trip = _RoundTrip(heard_mono_ns=heard_mono_ns, hub_ahead_ns=ahead_ns, rtt_ns=rtt_ns)
        if any(not _trips_agree(earlier, trip) for earlier in self._trips):
            self._trips.clear()
        while self._trips and self._trips[-1].rtt_ns >= rtt_ns:
            self._trips.pop()
        self._trips.append(trip)

    def estimate(self) -> ClockEstimate | None:
        """Return the estimate; None before the first round trip, and when the last one is too old."""
        now_ns = self._mono_ns()
        while self._trips and now_ns - self._trips[0].heard_mono_ns > WINDOW_NS:
            self._trips.popleft()
        if not self._trips:
            return None
        best = self._trips[0]
        return ClockEstimate(offset_ns=self._wall_ns() - now_ns - best.hub_ahead_ns, rtt_ns=best.rtt_ns)


def _trips_agree(earlier: _RoundTrip, later: _RoundTrip) -> bool:
    """Return whether both can be true if no clock was set in between."""
    most_ns = (earlier.rtt_ns + later.rtt_ns) / 2 + DRIFT * (later.heard_mono_ns - earlier.heard_mono_ns)
    return abs(earlier.hub_ahead_ns - later.hub_ahead_ns) <= most_ns + 1


# -- Sender -----------------------------------------------------------------------------------------------------------

PATIENCE_S = 10.0
"""Limit for one call, from the first byte to the last."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
CATCH_UP_S = 0.25
"""Pause between full frames: catching up must not take a whole core from the job."""
HEARTBEAT_S = 2.0
"""How often the hub gets a frame even if there is nothing to send."""
SHORTEST_HUB_S = 0.05
LONGEST_HUB_S = 600.0
"""Longest wait that we accept from the hub."""
LOST_AFTER_S = 5.0
"""A hub that is unreachable for longer is noted in the journal. A shorter outage explains nothing."""
MOST_NEWS = 100
CHALLENGE_CHARS = 255
EXPLAINS = (
    *("command", "cwd", "python", "executable", "platform", "driver", "file_system", "git"),
    *("user", "stepscope", "created_wall_ns", "environment"),
)

News = tuple[str, dict[str, Any]]
"""A journal event and its fields."""


@dataclass(kw_only=True)
class Counts:
    joins: int = 0
    frames: int = 0
    """Frames accepted by the hub."""
    sent_bytes: int = 0
    """Bytes of those frames."""
    failed: int = 0
    """Calls without a result."""
    refused: int = 0
    """Frames that the hub did not accept, for any reason."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    wait_s: float
    """Time until the next turn."""
    delivered: bool = False
    """The hub has everything, including our last frame."""


class Sender:
    """Not thread-safe, except for ``news``, ``peers`` and ``probe_key``, which other threads may read."""

    def __init__(
        self,
        run_dir: Path,
        to: Destination,
        keys: Callable[[], Sequence[bytes]],
        *,
        probe_port: int = 0,
        lost_after_s: float = LOST_AFTER_S,
        traces: bool = True,
    ) -> None:
        """``keys`` is called for each join and may raise UsageError. Raise NotARun if ``run_dir`` is not a run.

        ``traces``: whether traces of captures are sent, too.
        """
        meta = read_meta(run_dir)
        self._to = to
        self._keys = keys
        self._spool = str(meta.get("spool", ""))
        self._meta = {name: meta[name] for name in EXPLAINS if name in meta}
        self._probe_port = probe_port
        self._lost_after_s = lost_after_s
        self._outgoing = Outgoing(run_dir, traces=traces)
        self._clock = HubClock()
        self._client: HubClient | None = None
        self._proved = b""
        """The key with which the hub last accepted us."""
        self._welcome: Welcome | None = None
        self._joined_run: str | None = None
        self._next_s = FIRST_PAUSE_S
        self._tries = 0
        """Calls since the hub last accepted something."""
        self._sent_s = float("-inf")
        self._away_s: float | None = None
        """Since when the hub is unreachable."""
        self._lost = False
        self.heard_s = float("-inf")
        """When the hub last answered, with whatever result."""
        self.counts = Counts()
        self.trouble = ""
        """Why the last turn failed; empty if it did not."""
        self.refusal = ""
        """Why the hub refused us; empty if it accepted us or did not answer."""
        self.news: deque[News] = deque(maxlen=MOST_NEWS)
        self.peers: tuple[Peer, ...] = ()
        self.watched = False
        """Whether the run was being viewed when the hub last answered."""
        self.order: CaptureOrder | None = None
        """The capture that was ordered when the hub last answered."""
        self.probe_key = ""

    def turn(self, *, bye: Mapping[str, Any] | None = None, patience_s: float = PATIENCE_S) -> Turn:
        """Make one call to the hub. With ``bye``, send everything there is, and the bye with the last of it."""
        try:
            if self._welcome is None:
                return self._join(patience_s, hurry=bye is not None)
            return self._send(self._welcome, bye, patience_s)
        except (HubError, UsageError) as error:
            self._welcome = None
            self._outgoing.shrink()
            self.counts.failed += 1
            if isinstance(error, HubRefused) and not self.refusal:
                self.refusal = str(error)
                self.news.append(("hub_refused", {"why": self.refusal}))
            self._away(str(error))
            return Turn(wait_s=self._pause_s())

    @property
    def local(self) -> bool:
        """Whether the hub reads our run directory directly."""
        return self._welcome is not None and self._welcome.local

    @property
    def samples(self) -> SampleClaim:
        """Which samples the hub has."""
        return self._outgoing.samples

    @property
    def run_name(self) -> str:
        """The run's name at the hub, as far as known."""
        return self._to.run if self._joined_run is None else self._joined_run

    def left_bytes(self) -> int:
        """Return roughly how many bytes are still to be sent."""
        return self._outgoing.left_bytes()

    def unsent(self) -> str:
        """Return a sentence on what no frame can hold; empty if there is nothing."""
        names = sorted(self._outgoing.unsent)
        return f"cannot send {', '.join(names[:3])}{' …' if len(names) > 3 else ''}" if names else ""

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _join(self, patience_s: float, *, hurry: bool) -> Turn:
        self._welcome = welcome = self._taken_in(patience_s)
        self.heard_s = time.monotonic()
        self.refusal = ""
        self._joined_run = welcome.run
        self.counts.joins += 1
        self._outgoing.rewind(welcome.positions)
        if welcome.local:
            self.samples.free()
        self.probe_key, self.peers = welcome.probe_key, welcome.peers  # the loop checks the peers, then takes the key
        self._next_s = _seconds(welcome.next_s)
        # Random, because the nodes of a job start together and should not send in lockstep forever.
        return Turn(wait_s=0.0 if hurry or self._tries else random.uniform(0, self._next_s))

    def _taken_in(self, patience_s: float) -> Welcome:
        """Join with the newest key. While keys are being changed, the hub may have only the previous one.

        Once the hub has proved the newer key, older ones are not tried: a hub without that key is a different one.
        """
        deadline_s = time.monotonic() + patience_s
        keys = list(self._keys())
        if self._proved in keys:
            del keys[keys.index(self._proved) + 1 :]
        *newer, last = keys
        for key in newer:
            try:
                return self._join_with(key, deadline_s)
            except KeyRefused:
                continue
        return self._join_with(last, deadline_s)

    def _join_with(self, key: bytes, deadline_s: float) -> Welcome:
        self.close()
        self._client = HubClient(self._to.url, key)
        welcome = self._client.join(self._who(), patience_s=deadline_s - time.monotonic())
        self._proved = key
        return welcome

    def _who(self) -> Join:
        join = Join(
            run=self._to.run,
            node=self._to.node,
            nnodes=self._to.nnodes,
            host=platform.node(),
            spool=self._spool,
            nonce=secrets.token_hex(16),
            challenge="0" * CHALLENGE_CHARS,  # same length as the hub's
            probe_port=self._probe_port,
            stepscope=str(self._meta.get("stepscope", "")),
            meta=self._meta,
        )
        for name in ("environment", "command"):
            if len(write_join(join, b"", b"")[0]) > JOIN_BYTES:
                join = replace(join, meta={key: value for key, value in join.meta.items() if key != name})
        return join

    def _send(self, welcome: Welcome, bye: Mapping[str, Any] | None, patience_s: float) -> Turn:
        batch = Batch() if welcome.local else self._outgoing.collect(final=bye is not None)
        last = bye is not None and not batch.more and not batch.problem
        if not batch.parts and not last and time.monotonic() - self._sent_s < HEARTBEAT_S:
            self.trouble = batch.problem
            return Turn(wait_s=self._next_s)
        assert self._client is not None
        clock = self._clock.estimate()
        head = FrameHead(
            node=self._to.node,
            spool=self._spool,
            sent_wall_ns=run_clock.wall_ns(),
            offset_ns=clock.offset_ns if clock else None,
            rtt_ns=clock.rtt_ns if clock else None,
            bye=bye if last else None,
        )
        frame = pack_frame(head, batch.parts)
        answer = self._client.send(welcome.run, frame, patience_s=patience_s)
        self.heard_s = time.monotonic()
        if answer.status != 200:
            self.counts.refused += 1
            return self._refused(answer)
        self._taken(answer, batch, len(frame))
        if bye is not None:
            return Turn(wait_s=self._next_s if batch.problem else 0.0, delivered=last)
        return Turn(wait_s=min(self._next_s, CATCH_UP_S) if batch.more else self._next_s)

    def _taken(self, answer: Answer, batch: Batch, size: int) -> None:
        """Process a 200 answer. Raise HubError if it is invalid: then it is unknown whether the frame was accepted."""
        document = answer.document
        try:
            self._next_s = _seconds(document["next_s"])
            self._clock.heard(
                sent_mono_ns=answer.sent_mono_ns,
                received_wall_ns=int(document["received_wall_ns"]),
                answered_wall_ns=int(document["sent_wall_ns"]),
                heard_mono_ns=answer.heard_mono_ns,
            )
            self.watched = document.get("watched") is True
            if document.get("peers") is not None:
                self.peers = peers_of(document["peers"])
            ordered = document.get("capture")
            self.order = None if ordered is None else decoded(CaptureOrder, ordered)
        except (KeyError, TypeError, ValueError, OverflowError, FrameError):
            raise HubError("the answer is not from a Stepscope hub") from None
        self._outgoing.acked(batch)
        self._sent_s = time.monotonic()
        self._tries = 0
        self.trouble = batch.problem
        self.counts.frames += 1
        self.counts.sent_bytes += size
        if self._lost and self._away_s is not None:
            self.news.append(("hub_found", {"away_s": round(time.monotonic() - self._away_s, 1)}))
        self._away_s, self._lost = None, False

    def _refused(self, answer: Answer) -> Turn:
        if answer.status in (429, 507):
            if answer.status == 507:
                self._away("the hub accepts no data: its disk is full")
            else:
                self.trouble = "the hub accepts no data: it is overloaded"
            return Turn(wait_s=_seconds(answer.document.get("retry_s")) * random.uniform(1.0, 1.25))
        if answer.status == 401:
            self._welcome = None
            self.trouble = "the hub does not recognize this node"
        elif answer.status == 409:
            self._outgoing.rewind(_positions(answer))
            self.trouble = "the hub is missing earlier data"
        elif answer.status == 413:
            self._outgoing.shrink(for_good=True)
            self.trouble = "the hub rejected a frame as too large"
        else:
            raise HubError(f"the hub rejected a frame: {answer.why or f'HTTP status {answer.status}'}")
        # Retry immediately the first time, but pause if the hub repeats its answer.
        first, pause_s = not self._tries, self._pause_s()
        return Turn(wait_s=0.0 if first else pause_s)

    def _away(self, why: str) -> None:
        self.trouble = why
        now_s = time.monotonic()
        if self._away_s is None:
            self._away_s = now_s
        if not self._lost and now_s - self._away_s >= self._lost_after_s:
            self._lost = True
            self.news.append(("hub_lost", {"why": why, "away_s": round(now_s - self._away_s, 1)}))

    def _pause_s(self) -> float:
        self._tries += 1
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._tries - 1, 16), LONGEST_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)


def _positions(answer: Answer) -> Positions:
    try:
        return positions_of(answer.document["positions"])
    except (KeyError, TypeError, ValueError, FrameError):
        raise HubError("the hub did not report which data it has") from None


def _seconds(value: object) -> float:
    """Return the wait that the hub asked for, within limits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return FIRST_PAUSE_S
    return min(max(value, SHORTEST_HUB_S), LONGEST_HUB_S)


# -- Sending thread ---------------------------------------------------------------------------------------------------
# Sends a run directory to the hub while the agent keeps draining.
#
# The thread shares only two things with the agent's loop: files, which only the loop writes, and a list of news, which
# the loop moves into its journal. Whatever the hub does, the loop never waits for this thread, except at the very end
# and with a time limit.

LAST_PAUSE_S = 1.0
"""At the end there is no time for longer pauses."""
SILENCE_S = 8.0
"""At the end, give up on a hub that is silent for this long. One that was restarted would have answered."""
THREAD_GRACE_S = 1.0
JOIN_POLL_S = 0.2
OUT_OF_TIME = "the time limit was reached"


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """Whether the hub has everything; if not, how much is left and why."""

    whole: bool
    left_bytes: int = 0
    why: str = ""
    local: bool = False
    """Whether the hub reads the run directory directly."""
    run: str = ""
    """The run's name at the hub."""

    def word(self) -> dict[str, Any]:
        """Return the message for the launcher."""
        if self.whole:
            return {"delivered": True, "run": self.run}
        return {"delivered": False, "left_bytes": self.left_bytes, "why": self.why}


class Shipper:
    """Call ``start``, then ``finish`` or ``stop``. Neither of these raises, whatever the hub does."""

    def __init__(
        self,
        run_dir: Path,
        to: Destination,
        *,
        keys: Callable[[], Sequence[bytes]] | None = None,
        probe_port: int = 0,
        traces: bool = True,
    ) -> None:
        """Raise NotARun if ``run_dir`` is not a run. ``traces``: whether traces of captures are sent, too."""
        self.to = to
        self._run_dir = run_dir
        self._traces = traces
        if keys is None:
            keys = KeyRing(os.environ, tell=lambda _: None).refresh  # print nothing into the job's output
        self._sender = Sender(run_dir, to, keys, probe_port=probe_port, traces=traces)
        self._wake = threading.Event()
        self._bye: Mapping[str, Any] | None = None
        self._ending_s = self._deadline_s = float("inf")
        self._delivered: Delivered | None = None
        self._thread = threading.Thread(target=self._run, name="shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def news(self) -> list[News]:
        """Return new journal events, each once."""
        taken: list[News] = []
        while self._sender.news:
            taken.append(self._sender.news.popleft())
        return taken

    @property
    def samples(self) -> SampleClaim:
        """Which samples the hub has."""
        return self._sender.samples

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Agents that answer probes, according to the hub."""
        return self._sender.peers

    @property
    def probe_key(self) -> str:
        """The key that signs probes; empty until the hub was reached."""
        return self._sender.probe_key

    @property
    def watched(self) -> bool:
        """Whether the run was being viewed when the hub last answered."""
        return self._sender.watched

    @property
    def order(self) -> CaptureOrder | None:
        """The capture that is ordered, according to the hub's last answer."""
        return self._sender.order

    @property
    def counts(self) -> Counts:
        return self._sender.counts

    @property
    def run_name(self) -> str:
        """The run's name at the hub."""
        return self._sender.run_name

    def finish(
        self, end: Mapping[str, Any], deadline_s: float, *, given_up: Callable[[], bool] = lambda: False
    ) -> Delivered:
        """Send everything, then how it ended. Give up after ``deadline_s``, if the hub is silent or ``given_up``."""
        self._ending_s = time.monotonic()
        self._deadline_s = self._ending_s + deadline_s
        self._bye = end
        self._wake.set()
        last_s = self._deadline_s + THREAD_GRACE_S
        while self._thread.is_alive() and time.monotonic() < last_s:
            self._thread.join(JOIN_POLL_S)
            if given_up():
                self.stop()
                break
        if self._delivered is not None:
            return self._delivered
        # The thread waits for an answer, or died of a bug; in both cases its state cannot be read, so count again.
        why = OUT_OF_TIME if self._thread.is_alive() else "sending failed because of a bug in Stepscope"
        return Delivered(whole=False, left_bytes=Outgoing(self._run_dir, traces=self._traces).left_bytes(), why=why)

    def stop(self) -> None:
        """Stop without a final frame: another agent may continue."""
        self._deadline_s = float("-inf")
        self._wake.set()
        self._thread.join(THREAD_GRACE_S)

    def _run(self) -> None:
        whole = False
        while not whole and (left_s := self._left_s()) > 0:
            bye = self._bye
            turn = self._sender.turn(bye=bye, patience_s=min(PATIENCE_S, left_s))
            whole = turn.delivered
            if whole or (bye is None and self._bye is not None):
                continue  # everything is sent, or the end came meanwhile
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
