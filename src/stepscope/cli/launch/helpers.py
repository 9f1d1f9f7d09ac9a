"""Helper processes of the launcher (agent, hub, output forwarder): start, restart and end them; how the job ended.

A helper runs in a separate session, out of reach of the terminal's signals, and is restarted if it dies. Its standard
input is a pipe on which it learns how the job ended, or, by end of file, that the launcher is gone. Its standard output
is a pipe on which it sends JSON objects, one per line. It inherits nothing else except the descriptors passed to it.

The hub is a child of the first node's launcher: where it listens, when it starts, how it ends.

The launcher owns the listening socket. For a job on one node the socket listens on loopback, and the hub starts when
the job has run for some seconds, so that a short script pays nothing, or when someone connects; at once if alerts are
configured. It judges the run, and loads its server only when this user or root connects. The kernel reports the owner
of a connection (``hub/transport.py``); connections of other users are closed. For a job on several nodes the hub runs
from the start. A hub that dies is restarted on the same socket, so that clients that connected in between only wait;
its data is on disk.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import select
import shlex
import signal
import socket
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.agent.hangs.on_hang import HangPolicy
from stepscope.cli.streams import closed_at_start
from stepscope.errors import HubError, RunError, UsageError
from stepscope.page.links import page_link
from stepscope.records.paths import helper_command, helper_environment
from stepscope.records.text import say
from stepscope.store.documents import HubFile, RunStatus, end_run, remove_hub_file, write_hub_file

if TYPE_CHECKING:
    from stepscope.cli.launch.team_hub import TeamHub
    from stepscope.hub.transport import TlsFiles

__all__ = [
    "DEFAULT_PORT",
    "ENDING",
    "AgentChild",
    "ExportOptions",
    "ExporterChild",
    "Helper",
    "HubChild",
    "HubLink",
    "HubOptions",
    "JobEnd",
    "Mask",
    "OutputForwarder",
    "SenderChild",
    "aborted_end",
    "certificate_of",
    "forget_signals",
    "host_of",
    "job_end",
    "listen",
    "open_hub",
    "output_targets",
    "spawn",
    "typed_path",
    "url_of",
    "watched_signals",
    "worst_end",
]

# -- helper process ---------------------------------------------------------------------------------------------------

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_FD = 3
"""Number, in the helper, of the descriptor that is passed on."""
_CHUNK = 1 << 16
_LONGEST = 1 << 20

Mask = set[int | signal.Signals]


class Helper:
    def __init__(
        self,
        what: str,
        command: Sequence[str],
        *,
        starts: int,
        without: str,
        forgiven_s: float = float("inf"),
        passed: int = -1,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """``without`` describes the consequence if the helper is missing; ``passed`` is passed on as ``PASSED_FD``.

        ``variables`` are added to its environment: a process list does not show them to other users.

        ``starts`` is the maximum number of starts in total; a helper that lives for ``forgiven_s`` resets the count.
        """
        self._what = what
        self._command = helper_command(*command)
        self._starts = starts
        self._without = without
        self._forgiven_s = forgiven_s
        self._passed = passed
        self._variables = dict(variables or {})
        self._started_s = 0.0
        self._mask: Mask = set()
        self._pid = 0
        self._to_helper = self._heard = -1
        self._partial = b""
        self._messages: list[dict[str, Any]] = []
        self.started = 0
        """Number of starts so far."""
        self.exit_code: int | None = None
        """Exit code of the last process that ended."""

    @property
    def running(self) -> bool:
        return self._pid != 0

    def start(self, mask: Mask) -> None:
        """Start the process. ``mask``: the mask before ``signals_held``."""
        self._mask = mask
        self.started += 1
        self._started_s = time.monotonic()
        reading, self._to_helper = os.pipe()
        self._heard, writing = os.pipe()
        os.set_blocking(self._heard, False)
        try:
            streams: tuple[int, ...] = (reading, writing)
            if self._passed >= 0:
                streams = (*streams, self._passed)
            self._pid = spawn(self._command, {**helper_environment(os.environ), **self._variables}, mask, streams)
        except OSError as error:
            self._close()
            say(f"the {self._what} cannot be started ({error.strerror}); {self._without}")
        finally:
            os.close(reading)
            os.close(writing)

    def over(self) -> bool:
        """Whether the helper has ended; its process is reaped, and its messages are kept."""
        if self._pid:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
                self._pid = 0
                self._hear()
                self._close()
        return not self._pid

    def restart(self) -> bool:
        """Restart a helper that died, unless it keeps dying; return whether it runs now."""
        if time.monotonic() - self._started_s >= self._forgiven_s:
            self.started = 0
        if self.started >= self._starts:
            say(f"the {self._what} keeps dying; {self._without}")
            return False
        self.start(self._mask)
        return self.running

    def messages(self) -> list[dict[str, Any]]:
        """Messages since the last call."""
        if self._pid:
            self._hear()
        messages, self._messages = self._messages, []
        return messages

    def tell(self, word: Mapping[str, Any]) -> None:
        """Send the last message and close the pipe."""
        try:
            os.write(self._to_helper, json.dumps(word).encode() + b"\n")
        except BrokenPipeError:
            pass  # it has just died
        os.close(self._to_helper)
        self._to_helper = -1

    def wait(self, until_s: float, *, patient: bool = True) -> bool:
        """Whether the helper ended before that time (``time.monotonic``), and no Ctrl-C ended the wait."""
        watched = [signal.SIGCHLD] if patient else watched_signals()
        while not self.over():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            caught = signal.sigtimedwait(watched, min(left_s, 0.5))
            if caught is not None and caught.si_signo != signal.SIGCHLD:
                return False
        return True

    def end(self, grace_s: float = 0.0) -> None:
        """End the helper, with SIGTERM first if ``grace_s`` is given."""
        for number, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 60.0)):
            if seconds and not self.over():
                os.kill(self._pid, number)
                self.wait(time.monotonic() + seconds)

    def _hear(self) -> None:
        try:
            while data := os.read(self._heard, _CHUNK):
                *lines, self._partial = (self._partial + data).split(b"\n")
                self._partial = self._partial[-_LONGEST:]
                self._messages += [word for line in lines if (word := _word(line))]
        except BlockingIOError:
            pass  # no more data

    def _close(self) -> None:
        for fd in (self._to_helper, self._heard):
            if fd >= 0:
                os.close(fd)
        self._to_helper = self._heard = -1
        self._partial = b""


class _Child:
    """A helper of the launcher; it is started again if it dies, as often as ``Helper`` allows."""

    _helper: Helper
    _gone = False
    """Whether it ended for good."""

    def start(self, mask: Mask) -> None:
        self._helper.start(mask)
        self._gone = not self._helper.running

    def keep_alive(self) -> None:
        if not self._gone and self._helper.over():
            self._gone = not self._helper.restart()


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    mask: Mask,
    streams: Sequence[int] | None = None,
    *,
    terminal: int = -1,
) -> int:
    """Start a process with our previous signal mask; with ``streams``, out of reach of our terminal.

    The third of ``streams`` is a descriptor to pass on, not standard error. ``terminal``, if given, becomes all three
    standard streams of the process.
    """
    targets = (0, 1, PASSED_FD)
    actions: list[Any] = [(os.POSIX_SPAWN_DUP2, fd, target) for fd, target in zip(streams or (), targets, strict=False)]
    actions += [(os.POSIX_SPAWN_DUP2, terminal, target) for target in (0, 1, 2) if terminal >= 0]
    if streams is None and terminal < 0:
        actions += [(os.POSIX_SPAWN_CLOSE, fd) for fd in sorted(closed_at_start())]  # as our caller would start it
    return os.posix_spawn(
        command[0],
        list(command),
        dict(environment),
        file_actions=actions,
        setsigmask=[int(number) for number in mask],
        setsid=streams is not None,
    )


def watched_signals() -> list[int]:
    """SIGCHLD, and the signals that end us unless our parent set them to be ignored."""
    return [*(number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN), signal.SIGCHLD]


def forget_signals() -> None:
    """Drop pending signals: they were meant for what is over."""
    while signal.sigtimedwait(watched_signals(), 0) is not None:
        pass


def _word(line: bytes) -> dict[str, Any]:
    try:
        word = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return word if isinstance(word, dict) else {}


# -- end of a job -----------------------------------------------------------------------------------------------------
# What the exit code and the received signals mean.

_BY_SEVERITY: tuple[RunStatus, ...] = ("finished", "interrupted", "failed", "crashed")


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    exit_code: int
    """Exit code of ``stepscope run``: the job's own, or 128 + signal for a job killed by a signal."""
    status: RunStatus

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def job_end(code: int, interrupted: int | None) -> JobEnd:
    """Interpret the exit code of the job, given the signal that was sent to end it."""
    if code == 0:
        return JobEnd(exit_code=0, status="finished")
    if interrupted is None and -code in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        interrupted = -code
    if interrupted is not None:
        # The exit code that a bare run would have, whatever the job makes of an interrupt (torchrun exits with 1).
        return JobEnd(exit_code=code if code > 0 else 128 + interrupted, status="interrupted")
    if code < 0:
        return JobEnd(exit_code=128 - code, status="crashed")
    return JobEnd(exit_code=code, status="failed")


def aborted_end(code: int) -> JobEnd:
    """End of a job that we aborted: it failed, whatever its exit code says."""
    return JobEnd(exit_code=code if 0 < code <= 128 else 1, status="failed")


def worst_end(ends: Iterable[JobEnd]) -> JobEnd:
    """The worst of several processes of one job; the first among equals."""
    return max(ends, key=lambda end: _BY_SEVERITY.index(end.status))


# -- agent ------------------------------------------------------------------------------------------------------------
# On the first or only node the agent is done when the rings are drained. On another node it then sends what the hub
# does not have yet. We wait for that, but not forever: the user may stop us, and what was not sent stays on disk.

AGENT_STARTS = 5
AGENT_END_S = 30.0
"""Time that the agent gets for its last drain …"""
SEND_S = 60.0
"""… and, on other nodes than the first, to send the rest."""
SAY_AFTER_S = 1.0
"""If it takes longer, print a line that explains the wait."""
AGENT_GRACE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class HubLink:
    """The hub of a multi-node job and this node's number in it; stored in ``run.json``."""

    url: str
    run: str
    """The requested name."""
    node: int
    nnodes: int

    @property
    def sends(self) -> bool:
        """Whether this node sends its part to another."""
        return self.node > 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class AgentChild(_Child):
    def __init__(
        self,
        run_dir: Path,
        session: Path,
        on_hang: HangPolicy,
        link: HubLink | None = None,
        *,
        team: TeamHub | None = None,
        team_run: str = "",
    ) -> None:
        """``team``: where a copy of the run is sent, under the name ``team_run``."""
        words = ["stepscope.agent", "--run-dir", str(run_dir), "--session", str(session)]
        words += ["--hang-after", str(on_hang.after_s), f"--on-hang={on_hang.action}"]
        if link is not None:
            words += ["--hub", link.url, "--node", str(link.node), "--nnodes", str(link.nnodes)]
            words += [f"--run-name={link.run}"]
        if team is not None:
            words += ["--team-hub", team.url, f"--team-run={team_run}"]
        self._link, self._team = link, team
        self._helper = Helper(
            "agent",
            words,
            starts=AGENT_STARTS,
            without="steps stay in their rings until the end",
            variables=None if team is None else team.variables,
        )
        self.copied: bool | None = None
        """Whether the team's hub has all of the run; None: nothing was reported."""
        self.why_not_copied = ""
        self._wants_end = False
        self.delivered = False
        """Whether the hub has all data of this node."""
        self.why_not = ""
        self.run_name = "" if link is None else link.run
        """Name of the run at the hub."""

    def keep_alive(self) -> None:
        super().keep_alive()
        self._hear()

    def wants_end(self) -> bool:
        """Whether the agent asked us to end the job."""
        return self._wants_end

    def finish(self, end: JobEnd, *, quiet: bool = False) -> None:
        """Tell the agent that the job is over; wait for its last drain and, if it sends to a hub, until all is sent."""
        self.keep_alive()  # if it has just died, restart it once more to free the remaining rings
        if not self._helper.running:
            return
        self._helper.tell({"end": end.to_dict()})
        began_s = time.monotonic()
        if self._link is not None and self._link.sends:
            self._let_send(self._link.url, began_s, quiet=quiet)
        elif self._team is not None:
            self._let_send(self._team.url, began_s, quiet=quiet)
        elif not self._helper.wait(began_s + AGENT_END_S):
            say("the agent did not exit; the summary may lack the last steps")
            self._helper.end()
        self._hear()
        self._gone = True

    def _let_send(self, url: str, began_s: float, *, quiet: bool) -> None:
        if not self._helper.wait(began_s + SAY_AFTER_S):
            if not quiet:
                say(f"sending the rest to {host_of(url)} … (Ctrl-C: stop waiting)")
            forget_signals()
            if not self._helper.wait(began_s + AGENT_END_S + SEND_S, patient=False):
                self._helper.end(AGENT_GRACE_S)

    def _hear(self) -> None:
        for word in self._helper.messages():
            self._wants_end = self._wants_end or "abort" in word
            self.delivered = self.delivered or word.get("delivered") is True
            self.why_not = str(word.get("why", self.why_not))
            if isinstance(copied := word.get("copied"), dict):
                self.copied = copied.get("delivered") is True
                self.why_not_copied = str(copied.get("why", ""))
            self.run_name = str(word.get("run") or self.run_name)


def host_of(url: str) -> str:
    return url.partition("//")[2]


# -- output forwarder -------------------------------------------------------------------------------------------------
# The process that forwards output kept in files (``run --native-output``). It outlives a launcher that is killed; if it
# is killed itself, it is restarted and resumes. If both are gone, the job keeps writing to its files undisturbed.

FORWARDER_STARTS = 5
FORWARDER_END_S = 30.0
"""Time that the last output gets to arrive; its reader may be slow."""


def output_targets() -> str | None:
    """Identity of descriptors 1 and 2, as in ``ENV_NATIVE``; None if neither can be replaced by a file."""
    found = []
    for fd in (1, 2):
        try:
            info = os.fstat(fd)
        except OSError:
            found.append("-")
            continue
        replaced = stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode) or stat.S_ISREG(info.st_mode)
        found.append(f"{info.st_dev}:{info.st_ino}" if replaced else "-")
    return " ".join(found) if found != ["-", "-"] else None


class OutputForwarder(_Child):
    def __init__(self, run_dir: Path, targets: str) -> None:
        self.targets = targets
        self._output = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) if targets[0] != "-" else -1
        self._helper = Helper(
            "process that forwards output",
            ["stepscope.agent.output_forwarder", str(run_dir)],
            starts=FORWARDER_STARTS,
            without=f"the job's output is only in {run_dir / 'logs'}",
            passed=self._output,
        )

    def finish(self) -> None:
        """Forward all remaining output of the finished job."""
        self.keep_alive()
        if self._helper.running:
            self._helper.tell({"end": True})
            if not self._helper.wait(time.monotonic() + FORWARDER_END_S):
                say("the reader of the job's output is slow; the rest will arrive later")
        if self._output >= 0:
            os.close(self._output)


# -- sender of alerts -------------------------------------------------------------------------------------------------
# It delivers what the hub puts into the outbox. At the end of the job it gets a moment; then it continues by itself,
# for a limited time, and nobody waits for it.

SENDER_STARTS = 5
SENDER_END_S = 3.0


class SenderChild(_Child):
    def __init__(self, run_dir: Path, variables: Mapping[str, str]) -> None:
        """``variables``: the settings of alerts, with secrets."""
        self._helper = Helper(
            "sender of alerts",
            ["stepscope.alerts.sender", "--run-dir", str(run_dir)],
            starts=SENDER_STARTS,
            without=f"alerts stay in {run_dir / 'alerts'}",
            forgiven_s=FORGIVEN_S,
            variables=variables,
        )

    def finish(self, end: JobEnd) -> None:
        """Report that the job is over, and give the last messages a moment."""
        self.keep_alive()
        if self._helper.running:
            self._helper.tell({"end": end.to_dict()})
            self._helper.wait(time.monotonic() + SENDER_END_S, patient=False)


# -- exporter ---------------------------------------------------------------------------------------------------------
# It writes the run to trackers. If it dies it is not restarted: a tracker would get a second run.

EXPORTER_END_S = 60.0
"""Time that it gets, once the summary is written, for the last rows and the files."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    words: tuple[str, ...] = ()
    """Destinations as of ``run --to``, checked."""
    link: str = ""
    """Address of the hub whose page is linked to; empty: the run's own."""


class ExporterChild(_Child):
    def __init__(self, run_dir: Path, options: ExportOptions, hub_url: str) -> None:
        to = shlex.join([run_dir.as_posix(), "--to", ",".join(options.words)])
        self._repeat = f"`stepscope export {to}` writes all of it"
        self._log = run_dir / "logs" / "export.log"
        places = [part for word in options.words for part in ("--to", word)]
        places += ["--page", page_link(options.link or hub_url, run_dir.name)]
        self._helper = Helper(
            "exporter",
            ["stepscope.integrations.beside_job", "--run-dir", str(run_dir), *places],
            starts=1,
            without=self._repeat,
        )

    def keep_alive(self) -> None:
        if not self._gone and self._helper.over():
            self._gone = True
            say(f"the exporter ended early ({self._log}); {self._repeat}")

    def finish(self, *, quiet: bool) -> None:
        """Let it write the end of a run whose summary is there; report what became of it."""
        if self._helper.running:
            began_s = time.monotonic()
            self._helper.tell({"end": True})
            if not self._helper.wait(began_s + SAY_AFTER_S):
                if not quiet:
                    say("exporting the rest … (Ctrl-C: stop waiting)")
                forget_signals()
                if not self._helper.wait(began_s + EXPORTER_END_S, patient=False):
                    self._helper.end(1.0)
                    say(f"the export did not finish; {self._repeat}")
        for outcome in (each for word in self._helper.messages() for each in word.get("exported") or ()):
            where = f"{outcome['destination']['tool']}"
            if outcome["problem"]:
                say(f"{where}: {outcome['problem']}; {self._repeat}")
            elif not quiet:
                say(f"{where}: {outcome['where']}")


# -- hub --------------------------------------------------------------------------------------------------------------

DEFAULT_PORT = 29_555
HUB_AFTER_S = 15.0
"""How long a job on one node runs before its hub starts: a short script pays nothing."""
HUB_STARTS = 5
FORGIVEN_S = 60.0
"""A hub that lived this long does not count as one that keeps dying."""
HUB_RETRY_S = 10.0
"""After that many deaths the next start waits this long: someone may rely on its alerts."""
HUB_END_STARTS = 3
"""How often a hub that dies at the end of the job is started again."""
HUB_END_S = 75.0
"""Time that the hub gets to wait for the last data of other nodes and write it; the hub limits itself as well."""
ALONE_END_S = 16.0
"""The same without other nodes."""
HUB_GRACE_S = 5.0
_BACKLOG = 4096
_ANYWHERE = ("", "0.0.0.0", "::")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HIGH_FD = 10
"""Above the descriptor's number in the hub, so that the two do not collide."""


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    off: bool = False
    only: bool = False
    """Whether this node has the hub and no job."""
    host: str = ""
    """Empty: loopback for one node, every interface for several."""
    port: int | None = None
    """None: any free port for one node, ``DEFAULT_PORT`` for several."""
    tls: bool = True
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UsageError("--tls-cert and --tls-key must be used together")
        if self.certificate is not None and not self.tls:
            raise UsageError("--no-tls and --tls-cert cannot be used together")
        for option, path in (("--tls-cert", self.certificate), ("--tls-key", self.key)):
            if path is not None and not path.is_file():
                raise UsageError(f"{option} {path}: no such file")


class HubChild:
    """A listening socket, and the hub process behind it if one runs."""

    def __init__(
        self,
        run_dir: Path,
        listening: socket.socket,
        *,
        name: str,
        nnodes: int,
        tls: TlsFiles | None,
        shown: str,
        variables: Mapping[str, str] | None = None,
        after_s: float = HUB_AFTER_S,
    ) -> None:
        """``name`` is the requested name of the run; ``shown`` is the URL for users and other nodes.

        ``variables`` are added to the hub's environment: the settings of alerts. ``after_s``: when the hub of one node
        starts; 0: with the job.
        """
        self._run_dir = run_dir
        self._fd = fcntl.fcntl(listening, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
        self._several = nnodes > 1
        self._tls = tls
        self._mask: Mask = set()
        self._dying = False
        """Whether it was reported that the hub keeps dying."""
        self._start_at_s = 0.0 if self._several else after_s
        """When the hub is due; before ``start``, how long after it."""
        words = ["stepscope.hub", "--run-dir", str(run_dir), "--fd", str(PASSED_FD), "--nnodes", str(nnodes)]
        words += [f"--name={name}"]
        if tls is not None:
            words += ["--tls-cert", str(tls.certificate), "--tls-key", str(tls.key)]
        without = "the other nodes keep their data" if self._several else "the run is still recorded"
        self._helper = Helper(
            "hub",
            words,
            starts=HUB_STARTS,
            without=without,
            forgiven_s=FORGIVEN_S,
            passed=self._fd,
            variables=variables,
        )
        self.url = shown

    def start(self, mask: Mask) -> None:
        self._mask = mask
        self._start_at_s += time.monotonic()
        self.keep_alive()

    def keep_alive(self) -> None:
        """Start the hub if it is due or a client connects, or restart it if it died; called about once a second."""
        if self._helper.running:
            if self._helper.over():
                self._gone()
        elif time.monotonic() >= self._start_at_s or (not self._helper.started and self._connected()):
            self._helper.start(self._mask)
            self._start_at_s = float("inf") if self._helper.over() else time.monotonic() + HUB_RETRY_S

    def finish(self, end: JobEnd, *, quiet: bool = False) -> None:
        """Tell the hub that this node's job is over, and wait until it has received the rest from the other nodes."""
        if self._helper.running:
            self.keep_alive()
        elif self._helper.started:
            self._helper.start(self._mask)  # it kept dying; once more, for the end
        if self._helper.running:
            if not self._several:
                # Lets the hub conclude for its viewers; if the run is not writable, the error is reported when we
                # conclude.
                with suppress(RunError):
                    end_run(self._run_dir, exit_code=end.exit_code, status=end.status)
            self._helper.tell({"end": end.to_dict()})
            self._await_end(end, quiet=quiet)
        self.close()

    def leave(self) -> None:
        """Stop without an end: another hub continues the run."""
        if self._helper.running:
            self._helper.end(HUB_GRACE_S)
        self.close()

    def close(self) -> None:
        """Stop listening."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            remove_hub_file(self._run_dir)
            if self._tls is not None:
                self._tls.remove()

    def _await_end(self, end: JobEnd, *, quiet: bool) -> None:
        starts = 1
        until_s = time.monotonic() + (HUB_END_S if self._several else ALONE_END_S)
        awaited: list[Any] = []
        forget_signals()
        while time.monotonic() < until_s:
            if self._helper.over():
                if self._helper.exit_code == 0 or starts >= HUB_END_STARTS:
                    return
                starts += 1  # it was killed, perhaps before it had judged the end of the job
                self._helper.start(self._mask)
                if not self._helper.running:
                    return
                self._helper.tell({"end": end.to_dict()})
            for word in self._helper.messages():
                waiting = word.get("waiting")
                if isinstance(waiting, list) and waiting and not awaited and not quiet:
                    awaited = waiting
                    say(f"waiting for the last data of {_nodes(waiting)} … (Ctrl-C: stop waiting)")
            step_s = min(time.monotonic() + 0.5, until_s)
            if not self._helper.wait(step_s, patient=False) and time.monotonic() < step_s:
                break  # the user lost patience
        if not self._helper.over():
            self._helper.end(HUB_GRACE_S)

    def _gone(self) -> None:
        """Handle a hub that ended: normally, after a long time without requests, or by dying."""
        if self._helper.exit_code == 0 and not self._several:
            self._helper.started = 0
            self._helper.start(self._mask)
            return
        if not self._dying:
            say(f"the hub died ({_how(self._helper.exit_code or 0)}); restarting it")
            self._dying = not self._helper.restart()
        self._start_at_s = time.monotonic() + HUB_RETRY_S

    def _connected(self) -> bool:
        """Whether a connection waits to be accepted."""
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        return bool(waiting.poll(0))


def open_hub(
    run_dir: Path,
    options: HubOptions,
    *,
    name: str,
    nnodes: int,
    address: str,
    variables: Mapping[str, str] | None = None,
    at_once: bool = False,
) -> HubChild:
    """Listen, make a certificate if needed, write ``hub.json``; raises HubError or UsageError.

    ``address`` is this node's address, for clients on other machines; ``variables``: see ``HubChild``. ``at_once``: the
    hub starts with the job.
    """
    several = nnodes > 1
    host = options.host or ("" if several else _LOOPBACK[0])
    in_use = "choose another --hub-port, the same on every node" if several else "omit --hub-port to use any free port"
    listening = listen(host, (DEFAULT_PORT if several else 0) if options.port is None else options.port, in_use=in_use)
    tls: TlsFiles | None = None
    try:
        port = listening.getsockname()[1]
        outside = host not in _LOOPBACK
        if options.tls and (outside or options.certificate is not None):
            tls = certificate_of(options, [name for name in (address, host, socket.gethostname()) if name])
        local = url_of(_LOOPBACK[0] if host in _ANYWHERE else host, port, tls=tls is not None)
        shown = url_of(address or socket.gethostname(), port, tls=tls is not None) if outside else local
        fingerprint = tls.fingerprint.hex() if tls is not None else ""
        write_hub_file(run_dir, HubFile(url=local, token=_token(), fingerprint=fingerprint))
        return HubChild(
            run_dir,
            listening,
            name=name,
            nnodes=nnodes,
            tls=tls,
            shown=shown,
            variables=variables,
            after_s=0.0 if at_once else HUB_AFTER_S,
        )
    except OSError as error:
        if tls is not None:
            tls.remove()
        raise HubError(f"cannot write hub.json: {error.strerror}") from error
    finally:
        listening.close()


def _token() -> str:
    """The same as ``secrets.token_urlsafe(32)``, whose module loads OpenSSL."""
    return base64.urlsafe_b64encode(os.urandom(32)).rstrip(b"=").decode()


def listen(host: str, port: int, *, in_use: str = "") -> socket.socket:
    """Listen on one address, or on all if ``host`` is empty; raises HubError, with ``in_use`` if the port is taken."""
    tries: list[tuple[str, socket.AddressFamily, bool]] = []
    if host in _ANYWHERE:
        if host != "0.0.0.0" and socket.has_dualstack_ipv6():
            tries.append(("::", socket.AF_INET6, True))
        if host != "::":
            tries.append(("0.0.0.0", socket.AF_INET, False))
    else:
        tries.append((host, socket.AF_INET6 if ":" in host else socket.AF_INET, False))
    why = ""
    for address, family, dual in tries:
        try:
            return socket.create_server((address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        except socket.gaierror as error:
            why = str(error.strerror)
        except OSError as error:
            why = os.strerror(error.errno or 0)  # the error's own text contains an address that the user did not type
            if error.errno == errno.EADDRINUSE and in_use:
                why += f"; {in_use}"
    raise HubError(f"the hub cannot listen on port {port}{f' of {host}' if host else ''}: {why}")


def url_of(host: str, port: int, *, tls: bool) -> str:
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def certificate_of(options: HubOptions, names: list[str]) -> TlsFiles:
    """The user's certificate, or a new one for these names."""
    from stepscope.hub.transport import make_certificate, user_certificate

    if options.certificate is not None and options.key is not None:
        return user_certificate(options.certificate, options.key)
    return make_certificate(names)


def _nodes(numbers: list[Any]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return f"node{'s' if len(numbers) > 1 else ''} {shown}{' …' if len(numbers) > 8 else ''}"


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def typed_path(path: Path) -> str:
    """The path as the user would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
