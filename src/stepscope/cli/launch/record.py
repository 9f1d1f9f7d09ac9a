"""Record a job from start to summary: create the run, supervise the job, pass on signals, conclude.

What the launcher does depends on its node:

    only node        run directory, agent, summary; a hub after some seconds, or as soon as a user connects
    first of several the same, with a hub from the start, which receives the other nodes; the summary covers all nodes
    other node       a spool, which the agent sends to the hub; no summary, since it would cover only a part of the run
    Slurm task       the first task of a node does one of the above; the others start their rank in its run

A job that cannot be recorded still runs. If its hub is not available, each node records locally.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from stepscope import __version__
from stepscope.agent.hangs.on_hang import HangPolicy
from stepscope.cli.launch.command import Nodes, SlurmStep, rank_variables
from stepscope.cli.launch.helpers import (
    DEFAULT_PORT,
    ENDING,
    AgentChild,
    ExporterChild,
    ExportOptions,
    HubChild,
    HubLink,
    HubOptions,
    JobEnd,
    Mask,
    OutputForwarder,
    SenderChild,
    aborted_end,
    host_of,
    job_end,
    open_hub,
    output_targets,
    spawn,
    typed_path,
    url_of,
    watched_signals,
    worst_end,
)
from stepscope.errors import HubError, RingNoSpace, RunError, UsageError
from stepscope.page.links import page_link
from stepscope.recorder.identity import rank_from
from stepscope.records.files import PRIVATE
from stepscope.records.paths import (
    ENV_ALERT,
    ENV_ALERT_SETTINGS,
    ENV_CAPTURE,
    ENV_CLAIM,
    ENV_CLAIMANT,
    ENV_CLOCK,
    ENV_KEY,
    ENV_LAYERS,
    ENV_NATIVE,
    ENV_NVTX,
    ENV_PROFILE,
    ENV_RUN_DIR,
    ENV_SESSION,
    ENV_SWITCH,
    ENV_TEAM_KEY,
    ENV_TORCH_DUMPS,
    RING_SUFFIX,
    nccl_dumps,
    timed_collectives,
)
from stepscope.records.run_clock import environment_of
from stepscope.records.text import say
from stepscope.store.create import RunPaths, create_run, discard_run
from stepscope.store.documents import end_run, note_delivered, read_hub_file, read_meta
from stepscope.store.liveness import process_alive
from stepscope.store.paths import HUB, META, REPORT_FILE
from stepscope.store.user_runs import add_folder, find_user_hub, run_id

if TYPE_CHECKING:
    from stepscope.alerts.settings import AlertSettings
    from stepscope.archive.location import ArchiveUrl
    from stepscope.cli.launch.live_view import LiveView
    from stepscope.cli.launch.slurm_tasks import Leader, Member
    from stepscope.cli.launch.team_hub import TeamHub

__all__ = ["JobOptions", "record"]


# -- orphaned ranks ---------------------------------------------------------------------------------------------------
# torchrun leaves its ranks running if it is killed or interrupted twice. No rank may survive a Ctrl-C.

ORPHAN_GRACE_S = 5.0
"""Time that ranks get to exit, first without a signal and then after SIGTERM."""


def end_orphans(session: Path) -> None:
    """Wait for the ranks to exit; send SIGTERM, then SIGKILL, to those that do not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + ORPHAN_GRACE_S
        ranks = ranks_of(session)
        while ranks and time.monotonic() < deadline:
            time.sleep(0.02)
            ranks = {pid for pid in ranks if process_alive(pid, 0)}
        for pid in ranks:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def ranks_of(session: Path) -> set[int]:
    """Training processes of a run: those that own a ring, or were given a rank by a launcher and have no ring yet."""
    owners = {ring.stem for ring in session.glob(f"*{RING_SUFFIX}")}
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # exited, or owned by another user
        environment = dict(os.fsdecode(variable).partition("=")[::2] for variable in variables)
        if environment.get(ENV_SESSION) != str(session):
            continue
        # A helper of a rank (a DataLoader worker, a logger that outlives the rank) inherits the rank's claim.
        rank = rank_from(environment)
        if entry.name in owners or (rank is not None and environment.get(ENV_CLAIM) != f"rank {rank}"):
            found.add(int(entry.name))
    return found


# -- supervision ------------------------------------------------------------------------------------------------------
# The launcher is the parent of the job, the agent and the hub. It blocks the signals that it handles and takes them one
# at a time, so that it can distinguish a Ctrl-C in the terminal (which the job has received as well) from a ``kill``
# meant for the launcher alone (which it must pass on). If the agent or the hub dies, it is restarted and resumes. If
# the launcher dies, the job and the agent continue without it.

FROM_TERMINAL = 0x80
"""``si_code`` of a signal sent by the kernel, as for Ctrl-C."""
TEND_S = 1.0
"""How often the helper processes are checked."""
ABORT_S = 10.0
"""Time that a hung job gets to end after SIGTERM."""
IMPATIENT = 3
"""Number of Ctrl-C after which a job that does not react is killed."""


class OtherTasks(Protocol):
    """Processes of the same job on this node with other launchers."""

    def over(self) -> bool: ...

    def ends(self) -> list[JobEnd]: ...


@dataclass(frozen=True, kw_only=True)
class JobServices:
    """The helper processes of a job."""

    session: Path
    agent: AgentChild
    hub: HubChild | None = None
    others: OtherTasks | None = None
    view: LiveView | None = None
    forwarder: OutputForwarder | None = None
    sender: SenderChild | None = None
    exporter: ExporterChild | None = None
    left_open: int | None = None
    """Exit code with which the job leaves the run to a successor, which concludes it."""

    def start(self, mask: Mask) -> None:
        self.agent.start(mask)
        if self.forwarder is not None:
            self.forwarder.start(mask)
        if self.hub is not None:
            self.hub.start(mask)
        if self.sender is not None:
            self.sender.start(mask)
        if self.exporter is not None:
            self.exporter.start(mask)
        if self.view is not None:
            self.view.start(mask)

    def keep_alive(self) -> float:
        """Check the helpers; return the number of seconds until the next call at the latest."""
        self.agent.keep_alive()
        if self.forwarder is not None:
            self.forwarder.keep_alive()
        if self.hub is not None:
            self.hub.keep_alive()
        if self.sender is not None:
            self.sender.keep_alive()
        if self.exporter is not None:
            self.exporter.keep_alive()
        return TEND_S if self.view is None else self.view.keep_alive()

    def typed(self, caught: signal.struct_siginfo) -> bool:
        """Whether a signal came from the keyboard, so that the job has already received it."""
        return caught.si_code == FROM_TERMINAL or (self.view is not None and self.view.sent(caught))


@contextmanager
def signals_held() -> Iterator[Mask]:
    """Hold signals until they are polled, so that a second Ctrl-C cannot lose the summary; yield the previous mask.

    A signal that our parent set to be ignored stays ignored (``nohup``; a background job of a shell script).
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    caught = {number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN}
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {*caught, signal.SIGCHLD})
    try:
        yield earlier
    finally:
        while signal.sigtimedwait(caught, 0) is not None:
            pass  # too late to end anything but the summary
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def supervise(
    command: Sequence[str], environment: Mapping[str, str], services: JobServices, *, mask: Mask, quiet: bool = False
) -> tuple[JobEnd, JobEnd]:
    """Run the job to its end with its helpers; call within ``signals_held``, whose mask the job gets.

    Returns how our own job ended, and how this node's part ended, including ranks with other launchers. Raises
    UsageError if the job cannot be started.
    """
    job = _start(command, environment, mask)
    services.start(mask)
    own, aborted = _wait(job, services, lambda: _Abort(job, services.session))
    if services.forwarder is not None:
        services.forwarder.finish()
    if services.view is not None:
        services.view.finish(quiet=quiet)
    whole = own
    if services.others is not None:
        _await_others(services, services.others)
        whole = worst_end([own, *services.others.ends()])
    elif own.status == "interrupted" or aborted:
        end_orphans(services.session)
    services.agent.finish(whole, quiet=quiet)
    if services.hub is not None:
        if own.exit_code == services.left_open:
            services.hub.leave()
        else:
            services.hub.finish(whole, quiet=quiet)
    if services.sender is not None:
        services.sender.finish(whole)
    if services.view is not None:
        services.view.close()
    return own, whole


def supervise_alone(command: Sequence[str], environment: Mapping[str, str], *, mask: Mask) -> JobEnd:
    """Run a rank to its end if another launcher of this node has the agent."""
    return _wait(_start(command, environment, mask), None)[0]


def _start(command: Sequence[str], environment: Mapping[str, str], mask: Mask) -> int:
    try:
        return spawn(command, environment, mask)
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error


def _wait(job: int, services: JobServices | None, abort: Callable[[], _Abort] | None = None) -> tuple[JobEnd, bool]:
    """How the job ended, and whether we ended it because it hung."""
    watched = watched_signals()
    interrupted: int | None = None
    times = 0
    pause_s = TEND_S
    aborting: _Abort | None = None
    while True:
        caught = signal.sigtimedwait(watched, pause_s)
        if caught is not None and caught.si_signo != signal.SIGCHLD:
            interrupted = caught.si_signo
            times += 1
            typed = services.typed(caught) if services is not None else caught.si_code == FROM_TERMINAL
            if times >= IMPATIENT:
                os.kill(job, signal.SIGKILL)
            elif not typed:
                os.kill(job, caught.si_signo)
        if services is not None:
            pause_s = services.keep_alive()
            if aborting is None and abort is not None and services.agent.wants_end():
                aborting = abort()
        if aborting is not None:
            aborting.insist()
        pid, status = os.waitpid(job, os.WNOHANG)
        if pid == job:
            code = os.waitstatus_to_exitcode(status)
            ours = aborting is not None and interrupted is None
            return (aborted_end(code) if ours else job_end(code, interrupted)), aborting is not None


def _await_others(services: JobServices, others: OtherTasks) -> None:
    """Wait until the other tasks are over. Whatever ends the job ends them too; the third Ctrl-C ends the wait."""
    times = 0
    while not others.over() and times < IMPATIENT:
        caught = signal.sigtimedwait(watched_signals(), 0.2)
        times += caught is not None and caught.si_signo != signal.SIGCHLD
        services.keep_alive()


class _Abort:
    """Ends a hung job: SIGTERM first, then SIGKILL for the job and all its ranks after ``ABORT_S``."""

    def __init__(self, job: int, session: Path) -> None:
        self._job = job
        self._session = session
        self._deadline_s = time.monotonic() + ABORT_S
        say("the job hangs; ending it (--on-hang abort)")
        os.kill(job, signal.SIGTERM)

    def insist(self) -> None:
        if time.monotonic() < self._deadline_s:
            return
        # The ranks first, while the session still identifies them. A stopped rank reacts to SIGKILL only.
        for pid in {*ranks_of(self._session), self._job}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


# -- recording --------------------------------------------------------------------------------------------------------

HOME_S = 1.0
"""How long a home directory may take to respond."""
INJECTED = Path(__file__).parents[2] / "recorder" / "inject"


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    command: list[str]
    root: Path
    name: str | None
    tags: tuple[str, ...] = ()
    quiet: bool = False
    html: bool = True
    """Whether to write ``report.html`` into the run."""
    on_hang: HangPolicy = field(default_factory=HangPolicy)
    nodes: Nodes = field(default_factory=Nodes)
    hub: HubOptions = field(default_factory=HubOptions)
    step: SlurmStep | None = None
    """Set if the job is a Slurm step."""
    ranks_are_tasks: bool = False
    """Whether each task of that step is one rank."""
    live: bool = False
    """Whether to show the run on the terminal."""
    mode: int = PRIVATE
    """Mode of the run directory: who may read it."""
    max_disk: int | None = None
    """Limit of the run on disk, in bytes; 0: no limit; None: the default."""
    native_output: bool = False
    """Whether to keep output of native code, which then passes through files."""
    layers: str | None = None
    """When the ranks look at their model's layers; None: they decide."""
    profile: str | None = None
    """Captures on schedule, checked (``records/capture.py``)."""
    nvtx: bool = False
    """Label steps and phases for other profilers."""
    capture: str = ""
    """``off``, ``2``, ``keep=10GB``; empty: as the environment says."""
    alerts: AlertSettings | None = None
    """What is sent when something is wrong, and to whom; None: nothing."""
    export: ExportOptions = field(default_factory=ExportOptions)
    """The trackers that the run is written to."""
    team: TeamHub | None = None
    """The team's hub, which gets a copy of a run on one node."""
    archive: ArchiveUrl | None = None
    """Where the run is copied when it is over."""
    hint: str = ""
    """Printed if the job fails before its first step; the cause may be a misplaced option."""

    @property
    def shared(self) -> bool:
        """Whether other tasks on this node belong to the same run."""
        return self.ranks_are_tasks and self.step is not None and self.step.tasks_here > 1


def record(job: JobOptions) -> int:
    """Run a job to its end, recorded; return its exit code."""
    if os.environ.get(ENV_SWITCH) == "0":
        _run_unrecorded(job)
    if job.shared and job.step is not None:
        from stepscope.cli.launch.slurm_tasks import Leader, Member

        try:
            return _lead(job, Leader(job.step)) if job.step.task_here == 0 else _follow(job, Member(job.step))
        except RingNoSpace as error:
            say(f"{error}; the tasks of this node cannot share a run, and the job runs unrecorded")
            _run_unrecorded(job)
    return _record(job, None)


def _lead(job: JobOptions, leader: Leader) -> int:
    try:
        return _record(job, leader)
    finally:
        leader.close()


def _follow(job: JobOptions, member: Member) -> int:
    """Run a rank in the run of this node's first task."""
    found = member.wait()
    if isinstance(found, str):
        say(f"{found}; the job runs unrecorded")
        _run_unrecorded(job)
    with signals_held() as mask:
        end = supervise_alone(job.command, _environment(job, *found), mask=mask)
        member.ended(end)
    return end.exit_code


def _record(job: JobOptions, leader: Leader | None) -> int:
    link = _link(job)
    name = f"{job.name}.node{job.nodes.rank}" if job.nodes.rank else job.name
    try:
        paths = _continued(job, link) or create_run(
            job.root, name, job.command, version=__version__, mode=job.mode, more=_meta(job, link)
        )
    except RunError as error:
        if leader is not None:
            leader.refuse(str(error))
            leader.close()
        say(f"{error}; the job runs unrecorded")
        _run_unrecorded(job)
    for notice in paths.notices:
        say(notice)
    if job.tags and not (link is not None and link.sends):
        _label(paths.run_dir, job.tags)
    hub, link = _open_hub(job, paths, link)
    if leader is not None:
        leader.announce(paths.run_dir, paths.session)
    user_page = None if link is not None and link.sends else _user_page(paths.run_dir)
    if not job.quiet:
        _tell_where(job, paths.run_dir, hub, link, user_page)
    team, team_run = _join_team(job, paths.run_dir)
    agent = AgentChild(paths.run_dir, paths.session, job.on_hang, link, team=team, team_run=team_run)
    view = _open_view(job, paths.run_dir, hub) if job.live else None
    forwarder = _open_forwarder(paths.run_dir) if job.native_output else None
    services = JobServices(
        session=paths.session,
        agent=agent,
        hub=hub,
        others=leader,
        view=view,
        forwarder=forwarder,
        sender=_open_sender(job, paths.run_dir) if hub is not None else None,
        exporter=ExporterChild(paths.run_dir, job.export, hub.url) if job.export.words and hub is not None else None,
        left_open=_left_open(job),
    )
    with signals_held() as mask:
        try:
            environment = _environment(job, paths.run_dir, paths.session)
            if forwarder is not None:
                environment[ENV_NATIVE] = forwarder.targets
            if view is not None:
                # Python buffers output to a file until a block is full or the script ends.
                environment.setdefault("PYTHONUNBUFFERED", "1")
            own, whole = supervise(job.command, environment, services, mask=mask, quiet=job.quiet)
        except UsageError as error:
            if view is not None:
                view.close()
            if hub is not None:
                hub.close()
            if leader is not None:
                leader.refuse(str(error))
            discard_run(paths)
            raise
        if own.exit_code == services.left_open:
            say(f"other nodes still record; the next `stepscope run --hub-only` with this name continues {paths.name}")
        elif link is not None and link.sends:
            _hand_over(paths, whole, link, agent, quiet=job.quiet)
        else:
            _note_copied(paths.run_dir, team, team_run, agent, quiet=job.quiet)
            _conclude(paths.run_dir, whole, quiet=job.quiet, hint=job.hint)
            _pass_on(job, paths.run_dir, services, mask)
    return own.exit_code


def _continued(job: JobOptions, link: HubLink | None) -> RunPaths | None:
    """The unfinished run of a hub without a job, if this is its successor."""
    if not job.hub.only or job.name is None:
        return None
    from stepscope.cli.launch.other_nodes import continue_run

    return continue_run(job.root, job.name, _meta(job, link))


def _join_team(job: JobOptions, run_dir: Path) -> tuple[TeamHub | None, str]:
    """The team's hub, and the name of the run there."""
    if job.team is None:
        return None, ""
    if job.nodes.several:
        if not job.nodes.rank:
            say("a run on several nodes is not sent to the team's hub")
        return None, ""
    try:
        run = job.team.begin(run_dir)
    except RunError as error:
        say(f"{error}; the run is not sent to the team's hub")
        return None, ""
    if not job.quiet:
        say(f"the team's page: {page_link(job.team.url, run)}")
    return job.team, run


def _note_copied(run_dir: Path, team: TeamHub | None, run: str, agent: AgentChild, *, quiet: bool) -> None:
    if team is None:
        return
    if agent.copied:
        with suppress(RunError):  # the end of the run cannot be written either, which is reported
            note_delivered(run_dir)
        if not quiet:
            say(f"the team's hub has the run: {page_link(team.url, run)}")
        return
    why = f" ({agent.why_not_copied})" if agent.why_not_copied else ""
    say(f"the team's hub at {host_of(team.url)} does not have all of the run{why}; send the rest later with")
    say(f"    stepscope send {typed_path(run_dir)}")


def _left_open(job: JobOptions) -> int | None:
    if not job.hub.only:
        return None
    from stepscope.cli.launch.other_nodes import LEFT_OPEN

    return LEFT_OPEN


def _pass_on(job: JobOptions, run_dir: Path, services: JobServices, mask: Mask) -> None:
    """Export the end of the run, and archive it: in this order, since the export writes a log into it."""
    if services.exporter is not None:
        services.exporter.finish(quiet=job.quiet)
    if job.archive is not None:
        from stepscope.cli.launch.archiving import archive_at_end

        archive_at_end(typed_path(run_dir), job.archive, mask, quiet=job.quiet)


def _label(run_dir: Path, tags: Sequence[str]) -> None:
    from stepscope.store.catalog import change_labels

    try:
        change_labels(run_dir, add=tags, made_here=True)
    except (RunError, UsageError) as error:
        say(f"the run has no tags: {error}")


def _tell_where(
    job: JobOptions, run_dir: Path, hub: HubChild | None, link: HubLink | None, user_page: str | None
) -> None:
    """Print where the run is recorded and how to view it; only the first node has the page.

    ``user_page``: the page in the user's hub, which outlives the run and is therefore preferred to the run's own.
    """
    sends = link is not None and link.sends
    url = link.url if link is not None and sends else hub.url if hub is not None else ""
    say(f"recording to {typed_path(run_dir)}{f' (hub: {url})' if url and job.nodes.several else ''}")
    if user_page is not None:
        say(f"page: {user_page}")
        return
    about = read_hub_file(run_dir) if not sends else None
    if about is None:
        return
    if sys.stderr.isatty():
        say(f"page: {page_link(url, run_dir.name, about.token)}")
    else:
        say(f"page: {page_link(url, run_dir.name)} (its token: {typed_path(run_dir / HUB)})")
    if about.fingerprint and job.hub.certificate is None:
        say(f"your browser will ask whether to trust the run's self-signed certificate (SHA-256 {about.fingerprint})")


def _user_page(run_dir: Path) -> str | None:
    """Remember this folder of runs, and return the run's page in the user's hub; None if no such hub runs.

    A home directory on a network file system may not respond. The job does not wait for it: this is done in a thread.
    """
    found: list[str] = []

    def watch() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread waits for them
        with suppress(OSError, RuntimeError):  # no home directory, or it is not writable
            folder = add_folder(run_dir.parent, os.environ)
            if (hub := find_user_hub(os.environ)) is not None:
                shown = sys.stderr.isatty()
                link = page_link(hub.url, run_id(folder / run_dir.name), hub.token if shown else "")
                found.append(link if shown else f"{link} (its token: {hub.token_file})")

    thread = threading.Thread(target=watch, name="user-runs", daemon=True)
    with suppress(RuntimeError):  # no more threads are allowed
        thread.start()
        thread.join(HOME_S)
    return found[0] if found else None


def _tell_links(run_dir: Path) -> None:
    """Print how to view the run now that its own hub has ended."""
    if (run_dir / REPORT_FILE).is_file():
        say(f"report: {(run_dir.absolute() / REPORT_FILE).as_uri()}")
    say(f"page: {_user_page(run_dir) or shlex.join(['stepscope', 'serve', typed_path(run_dir), '--open'])}")


def _link(job: JobOptions) -> HubLink | None:
    """Link of this node to the hub of its run; None for a single node, for ``--no-hub`` and without a usable key."""
    if not job.nodes.several or job.hub.off:
        return None
    from stepscope.wire.handshake import load_keys

    try:
        load_keys(os.environ)
    except UsageError as error:
        say(f"{error}; this node is recorded separately")
        return None
    host = job.hub.host if job.hub.host not in ("", "0.0.0.0", "::") else job.nodes.address
    url = url_of(host, DEFAULT_PORT if job.hub.port is None else job.hub.port, tls=job.hub.tls)
    return HubLink(url=url, run=str(job.name), node=job.nodes.rank, nnodes=job.nodes.count)


def _open_hub(job: JobOptions, paths: RunPaths, link: HubLink | None) -> tuple[HubChild | None, HubLink | None]:
    """The hub, on the first or only node, and the link to it, which uses loopback on this node."""
    if job.hub.off or (link is not None and link.sends) or (link is None and job.nodes.several):
        return None, link
    nnodes = job.nodes.count if link is not None else 1
    try:
        hub = open_hub(
            paths.run_dir,
            job.hub,
            name=paths.wanted,
            nnodes=nnodes,
            address=job.nodes.address,
            variables={
                **_alert_variables(job, secrets=False),
                **({ENV_CAPTURE: job.capture} if job.capture else {}),
            },
            at_once=_sends_alerts(job),
        )
    except (HubError, UsageError) as error:
        alone = "; this node is recorded separately" if link is not None else ""
        say(f"{error}{alone or '; the run is still recorded'}")
        return None, None
    here = read_hub_file(paths.run_dir)
    if link is None or here is None:
        return hub, None
    return hub, HubLink(url=here.url, run=link.run, node=link.node, nnodes=link.nnodes)


def _open_sender(job: JobOptions, run_dir: Path) -> SenderChild | None:
    return SenderChild(run_dir, _alert_variables(job, secrets=True)) if _sends_alerts(job) else None


def _sends_alerts(job: JobOptions) -> bool:
    return job.alerts is not None and job.alerts.sends


def _alert_variables(job: JobOptions, *, secrets: bool) -> dict[str, str]:
    """The settings for the hub and the sender; without any they use the defaults."""
    if job.alerts is None:
        return {}
    from stepscope.alerts.settings import settings_variables

    return settings_variables(job.alerts, secrets=secrets)


def _open_view(job: JobOptions, run_dir: Path, hub: HubChild | None) -> LiveView | None:
    """Open the live view; None, and a message with the reason, if that is not possible."""
    from stepscope.cli.launch.live_view import LiveView, why_no_screen, why_no_terminal

    why = why_no_terminal() or why_no_screen()
    if job.nodes.rank:
        why = "it is on node 0"
    elif hub is None:
        why = why or "there is no hub to get data from"
    if not why:
        try:
            return LiveView(run_dir)
        except OSError as error:
            why = error.strerror or type(error).__name__
    say(f"live view not available: {why}")
    return None


def _open_forwarder(run_dir: Path) -> OutputForwarder | None:
    """The forwarder for output kept in files; None, and a message, if all output goes to a terminal."""
    targets = output_targets()
    if targets is None:
        say("--native-output has no effect when output goes to a terminal; use --live, which writes it to a file")
        return None
    return OutputForwarder(run_dir, targets)


def _meta(job: JobOptions, link: HubLink | None) -> dict[str, Any]:
    """Fields of ``run.json`` about nodes, hub and Slurm."""
    found: dict[str, Any] = {}
    if job.nodes.several:
        found["nnodes"] = job.nodes.count
    if link is not None and link.sends:
        found["hub"] = link.to_dict()
    if job.hub.only:
        found["command"] = ["stepscope", "run", "--hub-only"]
    if not job.html:
        found["html"] = False
    if job.max_disk is not None:
        found["max_disk"] = job.max_disk
    if job.step is not None:
        found["slurm"] = {"job": job.step.job, "step": job.step.step, "restarts": job.step.restarts}
    return found


def _conclude(run_dir: Path, end: JobEnd, *, quiet: bool, hint: str = "") -> None:
    """Write and show the summary; if it cannot be written it is still shown."""
    # Load numpy and the store's engine only now, when the job has freed its memory.
    from stepscope.cli.finalize import finalize_run

    try:
        end_run(run_dir, exit_code=end.exit_code, status=end.status)
    except RunError as error:
        say(str(error))
    try:
        color = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        summary, text = finalize_run(run_dir, end=end.to_dict(), color=color, quiet=quiet, made_here=True)
    except RunError as error:
        say(f"no summary: {error}")
        if not os.path.isfile(run_dir / META):  # noqa: PTH113 - its own raises where the file system has gone
            command = f"`stepscope report {typed_path(run_dir)}` when the directory is available again"
            say(f"the recorded data is kept in memory; run {command}")
        return
    if not quiet:
        print(text, file=sys.stderr)
        _tell_links(run_dir)
        if hint and end.status == "failed" and not summary["steps"]["total"]:
            say(hint)


def _hand_over(paths: RunPaths, end: JobEnd, link: HubLink, agent: AgentChild, *, quiet: bool) -> None:
    """Remove this node's part if the hub has all of it; else keep it for ``stepscope send``."""
    if agent.delivered:
        discard_run(paths)
        if not quiet:
            where = host_of(link.url)
            say(f"all data of node {link.node} was sent to {where}; the summary of the run {agent.run_name} is there")
        return
    try:
        end_run(paths.run_dir, exit_code=end.exit_code, status=end.status)
    except RunError as error:
        say(str(error))
    short = typed_path(paths.run_dir)
    why = f" ({agent.why_not})" if agent.why_not else ""
    say(f"the hub at {host_of(link.url)} does not have all data of node {link.node}{why}; send the rest later with")
    say(f"    stepscope send {short}")


def _environment(job: JobOptions, run_dir: Path, session: Path) -> dict[str, str]:
    environment = _bare_environment(job)
    outer = environment.get(ENV_RUN_DIR)
    if outer and environment.get(ENV_TORCH_DUMPS[0]) == nccl_dumps(Path(outer)):
        del environment[ENV_TORCH_DUMPS[0]]  # set by the enclosing run, not by the user
    environment.pop(ENV_CLAIM, None)
    environment.pop(ENV_CLAIMANT, None)
    environment.pop(ENV_NATIVE, None)
    earlier = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{INJECTED}{os.pathsep}{earlier}" if earlier else str(INJECTED)
    environment[ENV_RUN_DIR] = str(run_dir)
    environment[ENV_SESSION] = str(session)
    if job.hub.only:
        environment[ENV_SWITCH] = "0"  # the process that waits for the other nodes is not a rank
    if job.layers is not None:
        environment[ENV_LAYERS] = job.layers
    if job.profile is not None:
        environment[ENV_PROFILE] = job.profile
    if job.nvtx:
        environment[ENV_NVTX] = "1"
    environment.pop(ENV_CLOCK, None)
    environment.update(environment_of(read_meta(run_dir)))
    if not any(environment.get(name) for name in ENV_TORCH_DUMPS):
        environment[ENV_TORCH_DUMPS[0]] = nccl_dumps(run_dir)
    return {**timed_collectives(environment), **environment}


def _bare_environment(job: JobOptions) -> dict[str, str]:
    """The job's own environment, without the key that our nodes share and the addresses that alerts are sent to."""
    ranks = rank_variables(job.step, os.environ) if job.ranks_are_tasks and job.step is not None else {}
    ours = (ENV_KEY, ENV_TEAM_KEY, ENV_ALERT, ENV_ALERT_SETTINGS)
    return {**{name: value for name, value in os.environ.items() if name not in ours}, **ranks}


def _run_unrecorded(job: JobOptions) -> NoReturn:
    os.execve(job.command[0], job.command, _bare_environment(job))
