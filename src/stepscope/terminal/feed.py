"""Keeps a snapshot of a run in sync with its hub, using two threads.

One thread follows the event stream and reconnects after a lost connection, a little later each time. The other thread
requests what the stream does not contain (the visible rows of the table, a rank, a log, the machines) when something
changed, for at most a fraction of the time. Readers take ``feed.now``, an immutable value.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from stepscope.errors import HubError, HubMissing, HubRefused, UsageError
from stepscope.terminal.client import HubReader, RunAddress
from stepscope.terminal.documents import (
    Heartbeat,
    Machines,
    Message,
    MessageDecoder,
    Rank,
    Ranks,
    Run,
    Samples,
    Steps,
    SummaryAnswer,
    decode,
)
from stepscope.terminal.snapshot import (
    KEPT_STEPS,
    Link,
    Output,
    Snapshot,
    Wanted,
    apply_message,
    window_steps,
    with_run,
    with_steps,
)

__all__ = ["Feed"]

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0
LAST_TRIES = 7
"""Attempts to find a hub again after the run is over."""
ASK_S = 1.0
ASKING_SHARE = 0.2
"""Maximum share of the time spent on requests: with thousands of ranks the hub takes long for the table."""
SAMPLES_S = 5.0
LOG_BYTES = 32 << 10
RANK_STEPS = 120
SAMPLE_BINS = 120
MOST_SERIES = 64
"""Maximum number of GPUs or hosts to request; with more, the line says that it covers a part."""
TERMINAL_LOG = "logs/terminal.log"
OUTPUTS = (TERMINAL_LOG, "logs/rank-0.log", "logs/main.log")
"""Files with the output of a job, the best first."""
GPU_FIELDS = "util_percent,mem_used,mem_total,power_w,temperature_c"
HOST_FIELDS = "cpu_percent,mem_total,mem_available"
PROCESS_FIELDS = "rss,rss_file"


class Feed:
    """A snapshot in sync with a hub. ``where`` returns its address; HubError: not available yet.

    ``where`` is called for each connection, since the address may change. It may block; ``close`` calls ``end`` to make
    it return.
    """

    def __init__(self, where: Callable[[], RunAddress], *, end: Callable[[], None] = lambda: None) -> None:
        self._where = where
        self._end = end
        self._now = Snapshot()
        self._ahead_ns: int | None = None
        self._wanted = Wanted()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._poke = threading.Event()
        self._readers: set[HubReader] = set()
        self._place: RunAddress | None = None
        """The hub's address while connected."""
        self._threads = [
            threading.Thread(target=self._follow, name="live stream", daemon=True),
            threading.Thread(target=self._keep_asking, name="live questions", daemon=True),
        ]

    @property
    def now(self) -> Snapshot:
        return self._now

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        self._poke.set()
        with self._lock:
            for reader in self._readers:
                reader.close()
        self._end()
        for thread in self._threads:
            thread.join()

    def want(self, wanted: Wanted) -> None:
        if wanted != self._wanted:
            self._wanted = wanted
            self._poke.set()

    def wall_ns(self) -> int:
        """Current time on the run's clock as reported by the hub, advanced by the monotonic clock."""
        return time.time_ns() if self._ahead_ns is None else time.monotonic_ns() + self._ahead_ns

    def _change(self, change: Callable[[Snapshot], Snapshot]) -> None:
        with self._lock:
            self._now = change(self._now)

    def _linked(self, link: Link, why: str = "") -> None:
        self._change(lambda now: replace(now, link=link, why=why))

    # ── the stream ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(self) -> None:
        wait_s, last_id, last_tries = FIRST_WAIT_S, "", LAST_TRIES
        while not self._stop.is_set():
            before = self._now.beat
            link: Link = "lost"
            try:
                last_id = self._once(self._where(), last_id)
                why = "the hub closed the connection"
            except HubRefused as error:
                link, why = "refused", str(error)
            except HubMissing as error:
                link, why = "missing", str(error)
            except (HubError, UsageError) as error:
                why = str(error)
            if self._now.over and link != "refused":
                # The hub of a job ends with it; another one may have the summary a little later.
                last_tries -= 1
                link, why = ("over" if last_tries else "ended"), ""
            if self._stop.is_set():
                return
            self._linked(link, why)
            if link in ("refused", "ended"):
                return
            wait_s = FIRST_WAIT_S if self._now.beat != before else min(2 * wait_s, LONGEST_WAIT_S)
            self._stop.wait(wait_s)

    def _once(self, place: RunAddress, last_id: str) -> str:
        """Handle one connection to its end; return the ID of the last message."""
        reader = self._join(place)
        try:
            place = replace(place, run=reader.find_run())
            self._load(reader)
            messages = MessageDecoder()
            for piece in reader.stream(last_id):
                if self._place is None:
                    self._place = place
                    self._linked("live")
                    self._poke.set()
                for message in messages.feed(piece):
                    last_id = message.id or last_id
                    self._take(reader, message)
            return last_id
        finally:
            self._place = None
            self._leave(reader)

    def _load(self, reader: HubReader) -> None:
        run = reader.get("", {}, Run)
        # For a finished run the hub holds more steps than are kept here, so that it combines several into one row.
        first = max(0, run.step - max(KEPT_STEPS, window_steps(run)) + 1)
        steps = reader.get("steps", {"first": first, "bins": KEPT_STEPS, "worst": 1}, Steps)
        self._change(lambda now: with_steps(with_run(replace(now, steps=(), stepped_wall_ns=0), run), steps))

    def _take(self, reader: HubReader, message: Message) -> None:
        before = self._now

        if message.event == "heartbeat":
            self._ahead_ns = decode(message.data, Heartbeat).wall_ns - time.monotonic_ns()

        def change(now: Snapshot) -> Snapshot:
            seen_ns = self.wall_ns()
            stepped_ns = seen_ns if message.event == "steps" else now.stepped_wall_ns
            return replace(apply_message(now, message), seen_wall_ns=seen_ns, stepped_wall_ns=stepped_ns)

        self._change(change)
        if message.event == "gone":
            raise HubMissing("the run no longer exists")
        if message.event == "reset" or (self._now.over and not before.over):
            # A job that restarted, or is over, has other figures than before. Steps between our request and the first
            # message of the stream are in neither, so load again.
            self._load(reader)
        if message.event == "status" and _fewer_live(before, self._now):
            self._poke.set()  # the table must show it immediately

    # ── questions ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _keep_asking(self) -> None:
        pause_s = ASK_S
        asker: _Asker | None = None
        while not self._stop.is_set():
            poked = self._poke.wait(pause_s)
            self._poke.clear()
            place = self._place
            if asker is not None and asker.place is not place:
                self._leave(asker.reader)
                asker = None
            if place is None or self._stop.is_set():
                continue
            if asker is None:
                asker = _Asker(place, self._join(place))
                self._change(lambda known, place=place: replace(known, page=place.url))  # type: ignore[misc]
            began_s = time.monotonic()
            try:
                found = asker.ask(self._now, self._wanted, poked=poked)
                self._change(lambda now, found=found: found(now))  # type: ignore[misc]
            except HubError:
                asker.forget()  # the stream thread reports the problem and the recovery
            pause_s = max(ASK_S, (time.monotonic() - began_s) / ASKING_SHARE)
        if asker is not None:
            self._leave(asker.reader)

    def _join(self, place: RunAddress) -> HubReader:
        """A reader that ``close`` interrupts; each thread has its own."""
        reader = HubReader(place)
        with self._lock:
            self._readers.add(reader)
            if self._stop.is_set():
                reader.close()
        return reader

    def _leave(self, reader: HubReader) -> None:
        reader.forget()
        with self._lock:
            self._readers.discard(reader)


class _Asker:
    """Remembers the last request and its time."""

    def __init__(self, place: RunAddress, reader: HubReader) -> None:
        self.place = place
        self.reader = reader
        self._beat = -1
        self._wanted: Wanted | None = None
        self._sampled_s = float("-inf")
        self._over = False
        self._output = ""

    def forget(self) -> None:
        self._beat = -1

    def ask(self, now: Snapshot, wanted: Wanted, *, poked: bool) -> Callable[[Snapshot], Snapshot]:
        """The change to apply to the snapshot; raises HubError if the hub does not answer."""
        found: dict[str, Any] = {}
        if now.beat != self._beat or wanted != self._wanted:
            found |= self._table(wanted, device=now.on_device)
            if wanted.rank is not None:
                found["rank"] = self._rank(wanted.rank, device=now.on_device)
            if not now.over:
                found["run"] = self.reader.get("", {}, Run)
            self._beat, self._wanted = now.beat, wanted
        now_s = time.monotonic()
        due = now_s - self._sampled_s >= SAMPLES_S or now.over != self._over
        if due and (not now.over or now.machines is None):
            found["processes"] = self._samples("process", PROCESS_FIELDS)
            found["machines"] = self._machines() if now.over else None
            if not now.over:
                found["gpus"] = self._samples("gpu", GPU_FIELDS)
                found["hosts"] = self._samples("host", HOST_FIELDS)
            self._sampled_s, self._over = now_s, now.over
        if wanted.output and (poked or not now.over or now.output is None):
            rank = found.get("rank", now.rank)
            found["output"] = self._log(rank.log if wanted.rank is not None and rank is not None else None)
        return lambda known: _with(known, found)

    def _table(self, wanted: Wanted, *, device: bool) -> dict[str, Any]:
        order = wanted.order
        ranks = self._ranks(order, wanted.start, max(1, wanted.limit), device=device)
        if order == "work" and wanted.start == 0:
            return {"ranks": ranks, "slowest": ranks}
        return {"ranks": ranks, "slowest": self._ranks("work", 0, 1, device=device)}

    def _ranks(self, order: str, start: int, limit: int, *, device: bool) -> Ranks:
        """Ask for rows of the table by the clock of the findings."""
        by = f"device:{order}" if device and order != "rank" else order
        found = self.reader.get("ranks", {"order": by, "start": start, "limit": limit}, Ranks)
        if not (device and found.device_mean_ns):
            return found
        return msgspec.structs.replace(found, order=order, mean_ns=found.device_mean_ns)

    def _rank(self, rank: int, *, device: bool) -> Rank | None:
        try:
            found = self.reader.get(f"ranks/{rank}", {"bins": RANK_STEPS}, Rank)
        except HubMissing:
            return None  # no step yet
        if device and found.device_mean_ns:
            return msgspec.structs.replace(found, mean_ns=found.device_mean_ns)
        return found

    def _samples(self, kind: str, fields: str) -> Samples:
        asked = {"kind": kind, "fields": fields, "bins": SAMPLE_BINS, "stat": "mean", "limit": MOST_SERIES}
        try:
            return self.reader.get("samples", asked, Samples)
        except HubError:
            return Samples()  # too many at once for a very large job

    def _machines(self) -> Machines | None:
        """Figures from the summary, for the steady steps; samples would include start-up."""
        try:
            return self.reader.get("summary", {"keys": "host"}, SummaryAnswer).summary.host
        except HubError:
            return None  # may not be written yet

    def _log(self, wanted: str | None) -> Output | None:
        """The requested log; else the output of the whole job, under the best name that exists."""
        if wanted is None and self._output:
            wanted = self._output
        for path in (wanted,) if wanted is not None else OUTPUTS:
            try:
                piece = self.reader.file(path, tail=LOG_BYTES)
            except HubMissing:
                continue
            if path in OUTPUTS and piece.size:
                self._output = path
            if piece.size or wanted is not None:
                return Output(path=path, text=piece.data, size=piece.size)
        return None


def _fewer_live(before: Snapshot, now: Snapshot) -> bool:
    return before.status is not None and now.status is not None and now.status.live_ranks < before.status.live_ranks


def _with(known: Snapshot, found: Mapping[str, Any]) -> Snapshot:
    run = found.get("run")
    if run is not None:
        known = with_run(known, run)
    return replace(known, **{name: value for name, value in found.items() if name != "run"})
