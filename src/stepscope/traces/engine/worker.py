"""A process of our own that works off files one after another, and the end of it that starts and asks it.

It is started as a program, not forked, so it does not matter what threads or libraries the caller has, nor whether the
caller's script can be imported twice.  The two talk over a socket; what they exchange is pickled, which is fine among
ourselves and nowhere else.  A worker that dies, killed for its memory or otherwise, closes the socket: that is noticed
at once, and costs the one file it had.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

from stepscope.traces.engine.analyse import Job, Options, Outcome, Problem, outcome_of

__all__ = ["Worker", "serve"]

PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from stepscope.traces.engine.worker import serve; serve(int(sys.argv[1]))"
)


def serve(descriptor: int) -> None:
    """What the worker runs, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted, and ends us
    with Connection(descriptor) as connection:
        while True:
            try:
                job, options = connection.recv()
                connection.send(outcome_of(job, options))
            except (EOFError, ConnectionError):
                return


class Worker:
    """The caller's end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *sys.path]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self.connection = Connection(ours.detach())
        """Readable when there is an outcome, or the worker is gone."""
        self.pid = self._process.pid
        self.job: Job | None = None
        """What it has to do."""

    @property
    def alive(self) -> bool:
        return not self.connection.closed

    def start(self, job: Job, options: Options) -> None:
        self.job = job
        try:
            self.connection.send((job, options))
        except ConnectionError:
            pass  # it died before it had anything to do: the outcome says so

    def outcome(self) -> Outcome:
        """Of the job it has, once ``connection`` is readable."""
        job, self.job = self.job, None
        path = str(job.path) if job else ""
        try:
            outcome: Outcome = self.connection.recv()
        except (EOFError, ConnectionError):
            self.connection.close()
            return Problem(path=path, message=f"{path}: the process that read it {_ended(self._process.wait())}")
        return outcome

    def close(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
    return f"was killed ({name}){', most likely for want of memory' if -code == signal.SIGKILL else ''}"
