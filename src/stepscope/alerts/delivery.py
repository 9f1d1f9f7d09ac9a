"""Deliver the messages of an outbox: each receiver's in order, with retries, until each is sent or refused for good.

A message is sent at least once.  It is sent twice only if the sender is killed after a request and before its answer is
on disk, or if a receiver acted on a request without answering it; receivers for which that changes nothing are listed
in docs/alert-settings.md.  Nothing here starts a thread: ``alerts/sender.py`` has one for each receiver.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from stepscope.alerts.model import Message
from stepscope.alerts.outbox import Delivery, OutboxTail, SentLog
from stepscope.alerts.receivers import ReceiverFunctions, receiver_functions
from stepscope.alerts.receivers.exchange import (
    Answer,
    Context,
    Delivered,
    Destination,
    Outcome,
    Refused,
    Request,
    RetryLater,
)
from stepscope.alerts.settings import AlertSettings, Receiver
from stepscope.alerts.transport import NeverSent, NotSent, Transport
from stepscope.errors import NotARun, UsageError
from stepscope.records.run_clock import now_of
from stepscope.store.documents import read_meta
from stepscope.store.locks import LockBusy, take_lock, writing_barred
from stepscope.store.paths import ALERTS, OUTBOX, SENT

__all__ = [
    "Carrier",
    "Clock",
    "Counts",
    "ReceiverQueue",
    "backoff_s",
    "clock_of_run",
    "deliver_leftovers",
    "deliver_once",
    "destination_of",
    "destinations_of",
]

POLL_S = 0.5
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
MOST_PENDING = 50
"""Messages of one receiver in memory; the rest waits in the file."""
OLDEST_S = 3 * 86_400.0
"""What could not be sent for this long is given up: nobody acts on it any more."""
LEFT_AFTER_S = 900.0
"""Age of an outbox and of a lease from which a run's own sender is gone: it stays at most 10 minutes after the run."""
MOST_RUNS = 1000
LEASE = "lease.json"
FULL = f"{SENT} is too large, so it is not known what was sent"


class Clock(Protocol):
    def monotonic_s(self) -> float: ...

    def wall_ns(self) -> int: ...


class Carrier(Protocol):
    """``Transport``, or a test's."""

    def carry_out(self, request: Request, destination: Destination) -> Answer: ...


class SystemClock:
    @staticmethod
    def monotonic_s() -> float:
        return time.monotonic()

    @staticmethod
    def wall_ns() -> int:
        return time.time_ns()


def clock_of_run(run_dir: Path) -> Callable[[], int]:
    """A function that returns now on the clock of a run, which the times of its messages are on."""
    try:
        meta = read_meta(run_dir)
    except NotARun:
        meta = {}
    return partial(now_of, meta)


def destination_of(receiver: Receiver, environ: Mapping[str, str]) -> Destination:
    """The receiver with its secrets; UsageError if one is missing."""
    return Destination(
        name=receiver.name,
        type=receiver.type,
        options=receiver.options,
        secrets={name: secret.reveal(environ) for name, secret in receiver.secrets.items()},
        timeout_s=receiver.timeout_seconds,
    )


def destinations_of(settings: AlertSettings, environ: Mapping[str, str]) -> tuple[list[Destination], dict[str, str]]:
    """All receivers with their secrets, and by name the problem of each whose secrets are missing."""
    found, problems = [], {}
    for name, receiver in settings.receivers.items():
        try:
            found.append(destination_of(receiver, environ))
        except UsageError as error:
            problems[name] = str(error)
            found.append(Destination(name=name, type=receiver.type))
    return found, problems


def backoff_s(tries: int, share: float) -> float:
    """Seconds before the next try: doubled each time up to a minute; ``share`` (0 to 1) spreads them over the half."""
    longest = min(FIRST_RETRY_S * 2.0 ** min(tries - 1, 30), LONGEST_RETRY_S)
    return longest * (0.5 + share / 2)


class ReceiverQueue:
    """The messages of one run to one receiver.  One thread at a time may use it."""

    def __init__(
        self,
        run_dir: Path,
        destination: Destination,
        log: SentLog,
        *,
        carrier: Carrier,
        clock: Clock,
        share: Callable[[], float] = random.random,
        problem: str = "",
        run_now_ns: Callable[[], int] | None = None,
    ) -> None:
        """``problem``: why nothing can be sent to it for now; ``share``: random numbers from 0 to 1.

        ``run_now_ns``: now, on the clock of the run, as the times of messages are (default: by ``clock``).
        """
        self._destination = destination
        self._log = log
        self._carrier = carrier
        self._clock = clock
        self._share = share
        self._problem = problem
        self._run_now_ns = clock.wall_ns if run_now_ns is None else run_now_ns
        self._tail = OutboxTail(run_dir, destination.name)
        self._pending: deque[Message] = deque()
        self._receipts: dict[str, dict[str, Any]] = {}
        self._open: dict[str, Message] = {}
        """By key, the last message about each incident that the receiver believes open."""
        self._functions: ReceiverFunctions | None = None
        self._tries = 0
        self._due_s = 0.0
        self._renew_due_s = 0.0
        self._why = ""
        self.waiting = False
        """Whether something is still to be sent, as of the last ``step``."""

    def step(self) -> float:
        """Send the next message if it is due; return the seconds until there may be something to do (0: now)."""
        self._read()
        self.waiting = bool(self._pending)
        now_s = self._clock.monotonic_s()
        if not self._pending:
            return self._renew(now_s)
        if self._due_s > now_s:
            return self._due_s - now_s
        message = self._pending[0]
        outcome = self._too_old(message) or self._try(message)
        if isinstance(outcome, RetryLater):
            self._failed(message, outcome)
            return self._due_s - self._clock.monotonic_s()
        self._settle(message, outcome)
        self.waiting = bool(self._pending)
        return 0.0

    def _read(self) -> None:
        while len(self._pending) < MOST_PENDING and (messages := self._tail.read()):
            for message in messages:
                state = self._log.state_of(message.id)
                if state is None or not state.settled:
                    self._pending.append(message)
                elif state.state == "sent":
                    self._note_sent(message, state.receipt)

    def _try(self, message: Message) -> Outcome:
        self._tries += 1
        problem = self._problem or (FULL if self._log.full else "")
        if problem:
            return RetryLater(why=problem)
        before = self._log.state_of(message.id)
        if before is None:
            self._write(message, "sending")
        context = Context(
            wall_ns=self._clock.wall_ns(),
            receipt=self._receipts.get(message.dedup_key, {}),
            repeated=before is not None,
        )
        try:
            exchange = self._load().exchange(self._destination, message, context)
            request = next(exchange)
            while True:
                request = exchange.send(self._carrier.carry_out(request, self._destination))
        except StopIteration as finished:
            return _outcome(finished.value)
        except NotSent as error:
            return RetryLater(why=str(error))
        except (NeverSent, ValueError) as error:
            return Refused(why=str(error))

    def _load(self) -> ReceiverFunctions:
        if self._functions is None:
            self._functions = receiver_functions(self._destination.type)
        return self._functions

    def _too_old(self, message: Message) -> Refused | None:
        age_s = (self._run_now_ns() - message.created_wall_ns) / 1e9
        return Refused(why=f"could not be sent for {OLDEST_S / 86_400:.0f} days") if age_s > OLDEST_S else None

    def _failed(self, message: Message, outcome: RetryLater) -> None:
        delay_s = max(backoff_s(max(self._tries, 1), self._share()), outcome.after_s or 0.0)
        self._due_s = self._clock.monotonic_s() + delay_s
        # A line for every try of a receiver that is down for days would fill the disk.
        if outcome.why != self._why or self._tries & (self._tries - 1) == 0:
            self._why = outcome.why
            self._write(message, "failed", why=outcome.why)

    def _settle(self, message: Message, outcome: Delivered | Refused) -> None:
        self._pending.popleft()
        if isinstance(outcome, Delivered):
            self._write(message, "sent", receipt=outcome.receipt)
            self._note_sent(message, outcome.receipt)
        else:
            self._write(message, "given_up", why=outcome.why)
        self._tries, self._due_s, self._why = 0, 0.0, ""

    def _write(self, message: Message, state: Any, *, why: str = "", receipt: Mapping[str, Any] | None = None) -> None:
        self._log.append(
            Delivery(
                id=message.id,
                state=state,
                tries=self._tries,
                wall_ns=self._run_now_ns(),
                why=self._destination.without_secrets(why),
                receipt=dict(receipt or {}),
            )
        )

    # -- what the receiver believes open ------------------------------------------------------------------------------

    def _note_sent(self, message: Message, receipt: Mapping[str, Any]) -> None:
        key = message.dedup_key
        if message.status == "resolved":
            self._open.pop(key, None)
            self._receipts.pop(key, None)
            return
        self._open[key] = message
        self._receipts[key] = {**self._receipts.get(key, {}), **receipt}

    def _renew(self, now_s: float) -> float:
        """Keep open alerts open at receivers that forget them; return the seconds until that is due again."""
        if not self._open or self._problem:
            return POLL_S
        functions = self._load()
        if functions.renewal is None:
            return POLL_S
        if not self._renew_due_s:
            self._renew_due_s = now_s + functions.renew_s
        if now_s >= self._renew_due_s:
            request = functions.renewal(self._destination, list(self._open.values()), self._clock.wall_ns())
            self._renew_due_s = now_s + functions.renew_s
            try:
                self._carrier.carry_out(request, self._destination)
            except NotSent:
                self._renew_due_s = now_s + functions.renew_s / 4
            except NeverSent:
                self._open.clear()
        return POLL_S


def _outcome(value: Any) -> Outcome:
    assert isinstance(value, Delivered | RetryLater | Refused)
    return value


# -- what earlier senders left ----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Counts:
    sent: int = 0
    given_up: int = 0
    waiting: int = 0
    """Receivers (of a run) that still have something to get."""
    with_sender: int = 0
    """Runs that were left to their own senders, which still run."""

    def __iadd__(self, other: Counts) -> Counts:
        self.sent += other.sent
        self.given_up += other.given_up
        self.waiting += other.waiting
        self.with_sender += other.with_sender
        return self


class _CountingLog(SentLog):
    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.counts = Counts()

    def append(self, delivery: Delivery) -> None:
        super().append(delivery)
        self.counts.sent += delivery.state == "sent"
        self.counts.given_up += delivery.state == "given_up"


def deliver_once(
    run_dir: Path,
    destinations: Iterable[Destination],
    *,
    carrier: Carrier | None = None,
    clock: Clock | None = None,
    down: set[str] | None = None,
) -> Counts:
    """Send what a run's outbox still has, each receiver until its first failure; LockBusy if a sender is at it.

    ``down``: names of receivers that are not tried; those that fail are added.
    """
    down = set() if down is None else down
    lock = take_lock(run_dir / ALERTS)
    try:
        log = _CountingLog(run_dir)
        run_now_ns = clock_of_run(run_dir) if clock is None else clock.wall_ns
        for destination in destinations:
            queue = ReceiverQueue(
                run_dir,
                destination,
                log,
                carrier=carrier or Transport(),
                clock=clock or SystemClock(),
                run_now_ns=run_now_ns,
            )
            while destination.name not in down:
                pause_s = queue.step()
                if not queue.waiting and pause_s:
                    break
                if pause_s:
                    down.add(destination.name)
            log.counts.waiting += queue.waiting
        return log.counts
    finally:
        os.close(lock)


def deliver_leftovers(
    runs: Path,
    destinations: Iterable[Destination],
    *,
    without: Path | None = None,
    left_after_s: float = LEFT_AFTER_S,
    carrier: Carrier | None = None,
    clock: Clock | None = None,
) -> Counts:
    """Send what senders of earlier runs in a folder could not; runs that are active, or not ours, are left alone.

    ``left_after_s``: nothing may have been put into an outbox for this long.
    """
    destinations = list(destinations)
    total, down = Counts(), set[str]()
    for run_dir in _runs_with_outbox(runs, (clock or SystemClock()).wall_ns() / 1e9, left_after_s):
        if (without is None or run_dir != without) and writing_barred(run_dir) is None:
            try:
                total += deliver_once(run_dir, destinations, carrier=carrier, clock=clock, down=down)
            except LockBusy:
                total.with_sender += 1
            except OSError:
                continue
    return total


def _runs_with_outbox(runs: Path, now_s: float, left_after_s: float) -> list[Path]:
    """Runs whose outbox is neither recent nor older than what is still sent; the oldest first."""
    found = []
    try:
        with os.scandir(runs) as entries:
            for entry in entries:
                run_dir = Path(entry.path)
                age_s = _age_s(run_dir / OUTBOX, now_s)
                if left_after_s <= age_s < OLDEST_S and _age_s(run_dir / LEASE, now_s) > LEFT_AFTER_S:
                    found.append((age_s, run_dir))
    except OSError:
        return []
    return [run_dir for _, run_dir in sorted(found, reverse=True)[:MOST_RUNS]]


def _age_s(path: Path, now_s: float) -> float:
    """Seconds since a file was written; infinite if it does not exist."""
    try:
        return now_s - path.lstat().st_mtime
    except OSError:
        return float("inf")
