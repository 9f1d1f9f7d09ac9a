"""The sender: a small process next to a job that delivers its alerts (``python -m stepscope.alerts.sender``).

The launcher starts it if the settings name receivers, and ends it by a word on its standard input: ``{"end": …}``, or
end of file if the launcher is gone.  It then stays until everything is delivered, at most ``LINGER_S``; what is left is
sent by the next sender in the same folder of runs, or by ``stepscope alerts flush``.  One thread per receiver: one that
is slow or down delays no other, and the hub, which only appends to a file, never waits for any of them.

It may be killed at any time.  Only one sender works on a run: it holds the lock of the folder ``alerts``.  Settings and
secrets come from its environment (``alerts/settings.py``), never from the run directory or the command line.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepscope.alerts.delivery import (
    POLL_S,
    ReceiverQueue,
    SystemClock,
    clock_of_run,
    deliver_leftovers,
    destinations_of,
)
from stepscope.alerts.outbox import SentLog
from stepscope.alerts.receivers.exchange import Destination
from stepscope.alerts.settings import settings_from
from stepscope.alerts.transport import Transport
from stepscope.errors import StepscopeError
from stepscope.records.files import folder_mode, umask_of
from stepscope.records.text import say
from stepscope.store.locks import LockBusy, take_lock
from stepscope.store.paths import ALERTS

__all__ = ["LINGER_S", "main"]

LINGER_S = 600.0
"""How long it stays after the run to deliver the rest."""
QUIET_S = 90.0
"""How long nothing must have come after the launcher died: the hub may still be concluding the run."""
LEFTOVERS_AFTER_S = 5.0
LEFTOVERS_EVERY_S = 600.0
ENDS_IN_S = 2.0
"""Time that requests under way get when the sender ends."""


class _Worker(threading.Thread):
    """Delivers to one receiver until ``stop``."""

    def __init__(self, queue: ReceiverQueue, name: str, stop: threading.Event) -> None:
        super().__init__(name=f"receiver {name}", daemon=True)
        self._queue = queue
        self._stopped = stop
        self.empty_at_s = -1.0
        """When the last step began that found nothing to send."""

    def run(self) -> None:
        while not self._stopped.is_set():
            began_s = time.monotonic()
            pause_s = self._queue.step()
            if not self._queue.waiting:
                self.empty_at_s = began_s
            if pause_s:
                self._stopped.wait(min(pause_s, POLL_S))


class _Input:
    """The launcher's words on standard input."""

    def __init__(self) -> None:
        self.over_s: float | None = None
        """When the run ended, or the launcher was gone."""
        self.launcher_gone = False

    def wait(self, seconds: float) -> None:
        if self.over_s is not None:
            time.sleep(seconds)
            return
        readable, _, _ = select.select([0], [], [], seconds)
        if readable:
            text = os.read(0, 65_536)
            if not text or b'"end"' in text:
                self.over_s = time.monotonic()
                self.launcher_gone = not text
                _detach()


def _detach() -> None:
    """Give up standard output and error: whoever reads the job's output would wait for us to close them."""
    nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for fd in (1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)


def _lock(run_dir: Path, words: _Input) -> bool:
    """Take the sender's lock of a run as soon as an earlier sender is gone; False if the run ended meanwhile."""
    folder = run_dir / ALERTS
    folder.mkdir(mode=folder_mode(run_dir), exist_ok=True)
    while words.over_s is None:
        try:
            take_lock(folder)
        except LockBusy:
            words.wait(POLL_S)
        else:
            return True
    return False


def _deliver_leftovers(
    run_dir: Path, destinations: Sequence[Destination], transport: Transport, stop: threading.Event
) -> None:
    pause_s = LEFTOVERS_AFTER_S
    while not stop.wait(pause_s):
        deliver_leftovers(run_dir.parent, destinations, without=run_dir, carrier=transport)
        pause_s = LEFTOVERS_EVERY_S


def _supervise(workers: Sequence[_Worker], words: _Input, *, linger_s: float) -> int:
    """Wait until the run is over and everything is delivered; return the exit code."""
    while True:
        words.wait(POLL_S)
        if not all(worker.is_alive() for worker in workers):
            return 1  # the launcher starts another
        if words.over_s is None:
            continue
        quiet_s = QUIET_S if words.launcher_gone else 0.0
        if all(worker.empty_at_s >= words.over_s + quiet_s for worker in workers):
            return 0
        if time.monotonic() - words.over_s > linger_s:
            return 0


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    parser = argparse.ArgumentParser(prog="stepscope.alerts.sender", description="Deliver the alerts of a run.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--linger", type=float, default=LINGER_S, metavar="SECONDS")
    options = parser.parse_args(arguments)
    run_dir = options.run_dir.absolute()
    words = _Input()
    try:
        destinations, problems = destinations_of(settings_from(environ), environ)
        os.umask(umask_of(run_dir))
        if not _lock(run_dir, words):
            return 0  # the other sender delivers the rest
    except (StepscopeError, OSError) as error:
        say(f"alerts are not sent: {error}")
        return 2
    for name, problem in problems.items():
        say(f"alerts to {name} are not sent: {problem}")
    stop = threading.Event()
    transport, log, run_now_ns = Transport(environ), SentLog(run_dir), clock_of_run(run_dir)
    workers = []
    for destination in destinations:
        queue = ReceiverQueue(
            run_dir,
            destination,
            log,
            carrier=transport,
            clock=SystemClock(),
            problem=problems.get(destination.name, ""),
            run_now_ns=run_now_ns,
        )
        workers.append(_Worker(queue, destination.name, stop))
    usable = [destination for destination in destinations if destination.name not in problems]
    leftovers = threading.Thread(
        target=_deliver_leftovers, args=(run_dir, usable, transport, stop), name="leftovers", daemon=True
    )
    for thread in (*workers, leftovers):
        thread.start()
    code = _supervise(workers, words, linger_s=options.linger)
    stop.set()
    for thread in workers:
        thread.join(ENDS_IN_S)
    return code


if __name__ == "__main__":
    sys.exit(main())
