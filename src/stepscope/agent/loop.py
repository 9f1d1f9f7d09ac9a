"""The agent's main loop: wait for a launcher message, a death or the next tick; then drain, sample and write.

One thread does all of this, so nothing here needs a lock. Four other threads exist: one samples the GPUs, one collects
the watchdog's evidence while the job is stalled, one compresses the traces of a capture, and one sends what this thread
wrote to the hub, if there is one.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stepscope.agent.captures import CaptureCourier
from stepscope.agent.disk_space import DiskKeeper, SampleKeeper
from stepscope.agent.drain import RingDrain, Rings
from stepscope.agent.flight_reader import FlightReader
from stepscope.agent.hangs.on_hang import HangPolicy
from stepscope.agent.hangs.watchdog import Subjects, Watchdog, last_call
from stepscope.agent.job_context import Control, GitContext, Parents
from stepscope.agent.journal import Journal
from stepscope.agent.sampling.host import GpuSampler, HostSampler, OomWatch
from stepscope.agent.sampling.probes import Probes
from stepscope.agent.stacks import SEEK_S, StackSampler
from stepscope.errors import RunUnwritable
from stepscope.records import run_clock
from stepscope.records.capture import CaptureOrder
from stepscope.records.files import umask_of
from stepscope.records.paths import helper_command, log_of_rank
from stepscope.records.run_clock import process_start_ticks
from stepscope.records.text import say
from stepscope.ring import RingHeader
from stepscope.store.captures import CAPTURES_BYTES
from stepscope.store.documents import Destination, note_delivered, read_meta, write_meta
from stepscope.store.file_io import disk_limit, read_jsonl
from stepscope.store.live.logs import OutputCopier
from stepscope.store.liveness import LeaseKeeper, is_watched, remove_session
from stepscope.store.paths import EVENTS, STACKS

if TYPE_CHECKING:
    from stepscope.agent.shipping.sender import Delivered, Shipper
    from stepscope.wire.handshake import Peer

__all__ = ["tend"]


# -- Main loop --------------------------------------------------------------------------------------------------------

Ending = Literal["ended", "orphaned", "terminated"]
"""The launcher announced the end; the launcher died and all ranks are gone; we received SIGTERM."""

SAMPLE_S = 1.0
GPU_QUICK_S = 0.2
"""Interval between GPU samples while ranks are new, so that a run of a few seconds gets several."""
GPU_QUICK_FOR_S = 30.0
"""How long after the start of the last rank GPUs are sampled quickly."""
CROWDED_S = 0.02
"""Time to the next look when a ring is filling up."""
NICE = 5
NO_RANKS_S = 10.0
"""How long to wait for the first rank without a launcher."""
LAST_GASP_S = 1.0
"""How long ranks may take to exit after the job has ended."""
FULL_DISK_S = 60.0
"""How long to wait for a failing disk without a launcher. The rings stay for the next process that opens the run."""
SHIPPING_S = 60.0
"""At the end, how long to keep sending the hub what it does not have yet."""
GREETING_S = 10.0
"""At the end, how long to say goodbye to a hub that reads the run directory itself."""
LAST_TRACES_S = 10.0
"""At the end, how long traces of a capture may take to be compressed."""
LONGEST_START_S = 7 * 86400.0
"""An older process at the start of its recording means that its start time is wrong."""
LAST_TRIES_S = 2.0
"""At the end, how long to retry a failing disk."""


class Agent:
    def __init__(
        self,
        run_dir: Path,
        session: Path,
        *,
        owner: int | None = None,
        interval_s: float = 0.2,
        stdin: int = 0,
        on_hang: HangPolicy | None = None,
        probes: Probes | None = None,
        shipper: Shipper | None = None,
        copier: Shipper | None = None,
        launcher: int = 1,
    ) -> None:
        """Raise NotARun if ``run_dir`` is not a run. ``launcher`` is the descriptor that the launcher reads.

        ``copier`` sends a copy of the run to the team's hub.
        """
        meta = read_meta(run_dir)
        self._run_dir = run_dir
        self._session = session
        self._interval_s = interval_s
        self._node = platform.node()
        self._control = Control(stdin)
        self._journal = Journal(run_dir)
        self._lease = LeaseKeeper(run_dir)
        self._rings = Rings(run_dir, session)
        self._outputs = OutputCopier(run_dir)
        self._host = HostSampler(self._node)
        self._gpu = GpuSampler(self._node)
        self._gpu_reported = False
        self._probes = probes
        self._owned = owner is not None
        self._parents = Parents(meta, owner)
        self._git = self._ask_git(run_dir, meta)
        self._shipper, self._copier = shipper, copier
        sends = shipper or copier
        samples = SampleKeeper(run_dir, sends.samples if sends is not None else None)
        self._disk = DiskKeeper(run_dir, disk_limit(meta), journal=self._journal, samples=samples)
        passes_on = shipper is not None and shipper.to.node != 0
        self._captures = CaptureCourier(run_dir, session, self._journal, most_bytes=CAPTURES_BYTES if passes_on else 0)
        self._peers: tuple[Peer, ...] = ()
        self._launcher = launcher
        self.delivered: Delivered | None = None
        """Whether the hub has everything. Set when the run is over, if there is a hub."""
        self._oom = OomWatch()
        self._subjects = Subjects(meta)
        self._flights = FlightReader()
        self._watchdog = Watchdog(
            run_dir, self._journal, node=self._node, policy=on_hang or HangPolicy(), subjects=self._subjects
        )
        self._poll = select.poll()
        self._poll.register(stdin, select.POLLIN)
        self._by_pidfd: dict[int, RingDrain] = {}
        self._askers: dict[RingDrain, StackSampler] = {}
        self._seen_ranks = False
        self._closed_s: float | None = None
        self._terminated = False
        self._sample_s = self._gpu_s = time.monotonic()
        self._rank_s = float("-inf")

    def run(self) -> Ending:
        """Run until the end of the run."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the launcher announces the end
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        os.nice(NICE)
        pid = os.getpid()
        self._journal.event("agent_start", pid=pid, start_ticks=process_start_ticks(pid), host=self._node)
        self._journal.flush()
        if self._shipper is not None:
            self._shipper.start()
        if self._copier is not None:
            self._copier.start()
        ending: Ending | None = None
        while ending is None:
            self._wait()
            self._tick()
            ending = self._over()
        self._finish(ending)
        return ending

    def _wait(self) -> None:
        crowded = any(drain.crowded() for drain in self._rings.known.values())
        deadline_s = time.monotonic() + (CROWDED_S if crowded else self._interval_s)
        while True:
            answering = self._flights.fileno()
            if answering is not None:
                self._poll.register(answering, select.POLLIN)
            left_s = max(0.0, deadline_s - time.monotonic())
            seeking = [drain for drain, asker in self._askers.items() if asker.seeks and not self._watchdog.asks]
            ready = [fd for fd, _ in self._poll.poll((min(left_s, SEEK_S) if seeking else left_s) * 1000)]
            if answering is not None:
                self._poll.unregister(answering)
            if ready == [answering]:
                self._flights.receive()
                continue
            if not ready and left_s > SEEK_S and seeking:
                for drain in seeking:
                    self._ask_for_stack(drain)
                continue
            for fd in ready:
                if fd == self._control.fd:
                    self._hear()
                elif fd in self._by_pidfd:
                    self._bury(self._by_pidfd[fd])
            return

    def _tick(self) -> None:
        self._find_rings()
        watched = self._watched()
        for drain in list(self._rings.known.values()):
            if drain.pidfd is None and not drain.alive():
                self._bury(drain)
            else:
                if not self._watchdog.asks:
                    self._ask_for_stack(drain)
                self._try(drain.save_sidecar, drain)
                if drain.due(watched=watched):
                    self._try(drain.drain, drain)
                drain.move_layers(self._journal)
        self._captures.check(self._rings.known.values(), self._received_order())
        self._lease.renew()
        self._copy_output()
        self._watchdog.check(self._rings.known.values(), captured=self._captures.disturbs)
        if not self._watchdog.asks:
            self._flights.poll(self._rings.known.values(), watched=watched)
        now_s = time.monotonic()
        if now_s - self._gpu_s >= (GPU_QUICK_S if now_s - self._rank_s < GPU_QUICK_FOR_S else SAMPLE_S):
            self._gpu_s = now_s
            self._sample_gpus()
        if now_s - self._sample_s >= SAMPLE_S:
            self._sample_s = now_s
            self._sample()
        else:
            self._host.read_states()
        git = self._git.poll() if self._git else None
        if git:
            self._journal.event("context", git=git)
        self._take_news()
        self._journal.flush()
        self._keep_disk()

    def _watched(self) -> bool:
        """Return whether anyone is viewing the run, here or at its hub."""
        return is_watched(self._session) or (self._shipper is not None and self._shipper.watched)

    def _received_order(self) -> CaptureOrder | None:
        """Return the capture that the hub of another node ordered. On its own node it writes a file."""
        return self._shipper.order if self._shipper is not None and self._shipper.to.node else None

    def _hear(self) -> None:
        self._control.feed()
        if self._control.closed:
            self._poll.unregister(self._control.fd)
            self._closed_s = time.monotonic()

    def _over(self) -> Ending | None:
        if self._control.end is not None:
            return "ended"
        if self._terminated:
            return "terminated"
        if self._closed_s is None or self._busy() or self._parents.alive():
            return None
        if self._seen_ranks or self._owned or time.monotonic() - self._closed_s >= NO_RANKS_S:
            return "orphaned"
        return None

    def _busy(self) -> bool:
        """Return whether ranks run, or rings of dead ranks are left to drain and the disk may yet accept them."""
        ends = [drain.ended_wall_ns for drain in self._rings.known.values()]
        return any(end is None or run_clock.wall_ns() - end < FULL_DISK_S * 1e9 for end in ends)

    def _find_rings(self) -> None:
        try:
            found = self._rings.discover()
        except OSError as error:
            self._journal.refused(error)
            return
        for problem in self._rings.problems:
            self._journal.event("warning", message=problem)
        self._rings.problems.clear()
        for drain in found:
            header = drain.header
            self._seen_ranks = True
            self._rank_s = time.monotonic()
            self._host.watch(header.pid)
            self._oom.watch(header.pid)
            self._parents.watch(header.pid)
            if not drain.resumed:
                who = {"rank": header.identity.rank, "pid": header.pid, "host": header.identity.host}
                self._journal.event("rank_start", **who, age_s=_age_s(header))
                self._journal.flush()  # before its steps: a later agent assumes that the event was written
            if drain.pidfd is not None:
                self._by_pidfd[drain.pidfd] = drain
                self._poll.register(drain.pidfd, select.POLLIN)
            if not drain.alive():
                self._bury(drain)  # it had exited, or its pid was reused, before we looked
            else:
                self._try(drain.save_sidecar, drain)

    def _bury(self, drain: RingDrain) -> None:
        """Handle the end of a rank's process: drain its ring, record how it ended, free the ring."""
        if drain.pidfd is not None and drain.pidfd in self._by_pidfd:
            self._poll.unregister(drain.pidfd)
            del self._by_pidfd[drain.pidfd]
            os.close(drain.pidfd)
            drain.pidfd = None
        self._host.forget(drain.header.pid)
        self._askers.pop(drain, None)
        self._flights.forget(drain)
        first = drain.ended_wall_ns is None
        if first:
            drain.ended_wall_ns = run_clock.wall_ns()
            drain.header = drain.reader.header()
            self._captures.ended(drain)
            oom_killed = self._oom.killed(drain.header.pid) and drain.state() == "vanished"
            self._watchdog.buried(drain, oom_killed=oom_killed)
            who = {"rank": drain.header.identity.rank, "pid": drain.header.pid, "host": drain.header.identity.host}
            how: dict[str, Any] = {"state": drain.state(), **({"oom_kill": True} if oom_killed else {})}
            if drain.state() != "exited" and (call := last_call(drain)) is not None:
                how["collective"] = call
            self._journal.event("rank_end", **who, **how)
        # If the disk rejects a write, the ring stays known as dead and is retried on the next tick.
        written = self._try(drain.drain_to_end, drain) and self._try(drain.save_last_sidecar, drain)
        if written and drain.move_layers(self._journal):
            self._rings.forget(drain)
            drain.remove()

    def _try(self, write: Callable[[], None], drain: RingDrain) -> bool:
        lost, last_seq = drain.segment.lost, drain.segment.last_seq
        try:
            write()
        except OSError as error:
            self._journal.refused(error)
            return False
        if drain.segment.last_seq > last_seq:
            self._journal.accepted()
        if drain.segment.lost > lost:
            rank = drain.header.identity.rank
            message = f"rank {rank}: {drain.segment.lost - lost} records were overwritten before they could be read"
            self._journal.event("warning", message=message)
        return True

    def _ask_for_stack(self, drain: RingDrain) -> None:
        if drain not in self._askers:
            earlier = read_jsonl(drain.run_dir / STACKS)[0] if drain.resumed else []
            sampled = sum(stack.get("pid") == drain.header.pid for stack in earlier)
            self._askers[drain] = StackSampler(drain.reader, drain.header.pid, sampled=sampled)
        stack = self._askers[drain].sample(drain.pidfd)
        if stack is not None:
            self._journal.stack({"rank": drain.header.identity.rank, **stack})

    def _sample(self) -> None:
        drains = {drain.header.pid: drain for drain in self._rings.known.values()}
        whose = [drain.header for drain in drains.values()]
        samples = self._host.sample((drain.pid, drain.identity.rank, self._log_of(drain)) for drain in whose)
        for sample in samples:
            if (
                sample["kind"] == "process"
                and (flight_bytes := self._flights.kept_bytes(drains[sample["pid"]])) is not None
            ):
                sample["rss_answers"] = flight_bytes
        self._journal.samples(samples)
        if self._probes is not None:
            self._journal.samples(self._probes.samples())
            if self._shipper is not None and self._shipper.peers is not self._peers:
                self._peers = self._shipper.peers
                self._probes.peers(self._peers, self._shipper.probe_key)
            if (notice := self._probes.notice()) is not None:
                self._journal.event("probes", message=notice)
        self._oom.sample()

    def _sample_gpus(self) -> None:
        """Collect the samples requested last time, and request new ones."""
        gpus = self._gpu.collect()
        self._journal.samples(gpus)
        self._subjects.saw_gpus(gpus)
        self._gpu.request()
        if self._gpu.silent() and not self._gpu_reported:
            self._gpu_reported = True
            self._journal.event(
                "warning", message="the GPU driver (NVML) does not respond; no GPU samples are recorded"
            )

    def _copy_output(self, *, last: bool = False) -> bool:
        try:
            self._outputs.copy(last=last)
        except OSError as error:
            self._journal.refused(error)
            return False
        return True

    def _keep_disk(self) -> None:
        try:
            self._disk.check()
        except OSError as error:
            self._journal.refused(error)

    def _log_of(self, header: RingHeader) -> Path:
        return log_of_rank(self._run_dir, rank=header.identity.rank, attempt=header.identity.attempt)

    def _finish(self, ending: Ending) -> None:
        if ending == "ended":
            self._let_ranks_end()
        self._watchdog.finish()
        self._captures.finish(0.0 if ending == "terminated" else LAST_TRACES_S)
        self._flights.close()
        if self._git:
            self._git.close()
        self._journal.samples(self._gpu.collect())
        if self._probes is not None:
            self._journal.samples(self._probes.last_samples())
            self._journal.event("probes", ignored=self._probes.ignored)
            self._probes.close()
        self._take_news()
        reason = {"reason": ending, **({"end": self._control.end} if self._control.end else {})}
        self._journal.event("agent_end", pid=os.getpid(), host=self._node, **reason)
        deadline = time.monotonic() + LAST_TRIES_S
        while not self._write_all(last=ending != "terminated") and time.monotonic() < deadline:
            time.sleep(0.1)
        self._outputs.close()
        for drain in self._rings.known.values():
            drain.close()
        remove_session(self._session)
        self._ship_rest(ending)
        self._copy_rest(ending)

    def _take_news(self) -> None:
        for event, fields in self._shipper.news() if self._shipper is not None else ():
            self._journal.event(event, **fields)
            if event in ("hub_refused", "hub_lost"):  # the user may have to act on it
                say(f"{fields['why']}; recording continues on this node")
        for event, fields in self._copier.news() if self._copier is not None else ():
            if event in ("hub_refused", "hub_lost"):  # no event of the run: nothing is missing in it
                say(f"the team's hub: {fields['why']}; recording continues, and what is missing there is sent later")

    def _ship_rest(self, ending: Ending) -> None:
        """Send the hub what it is missing after everything is written, and tell the launcher whether it has it all.

        After SIGTERM, do not wait for that.
        """
        if self._shipper is None:
            return
        if ending == "terminated":
            self._shipper.stop()  # the job may continue with another agent
            return
        end = self._control.end or {"exit_code": None, "status": "orphaned"}
        patience_s = SHIPPING_S if self._shipper.to.node else GREETING_S
        self.delivered = self._shipper.finish(end, patience_s, given_up=lambda: self._terminated)
        if not self.delivered.whole and self._shipper.run_name != self._shipper.to.run:
            self._note_name(self._shipper.run_name)
        try:
            os.write(self._launcher, (json.dumps(self.delivered.word()) + "\n").encode())
        except OSError:
            pass  # the launcher is gone

    def _copy_rest(self, ending: Ending) -> None:
        """Send the team's hub what it is missing; what it does not get in time stays here for ``stepscope send``."""
        if self._copier is None:
            return
        if ending == "terminated":
            self._copier.stop()
            return
        end = self._control.end or {"exit_code": None, "status": "orphaned"}
        copied = self._copier.finish(end, SHIPPING_S, given_up=lambda: self._terminated)
        if copied.whole and ending == "orphaned":  # otherwise its launcher does it, the only writer of the file
            try:
                note_delivered(self._run_dir)
            except RunUnwritable as error:
                say(str(error))
        try:
            os.write(self._launcher, (json.dumps({"copied": copied.word()}) + "\n").encode())
        except OSError:
            pass  # the launcher is gone

    def _note_name(self, name: str) -> None:
        """Record the run's name for ``stepscope send``: the rest belongs to the run that the hub created."""
        meta = read_meta(self._run_dir)
        try:
            write_meta(self._run_dir, {**meta, "hub": {**meta.get("hub", {}), "run": name}})
        except RunUnwritable as error:
            self._journal.event("warning", message=str(error))

    def _let_ranks_end(self) -> None:
        deadline = time.monotonic() + LAST_GASP_S
        self._find_rings()
        while self._rings.known and time.monotonic() < deadline:
            for drain in list(self._rings.known.values()):
                if not drain.alive():
                    self._bury(drain)
            time.sleep(0.01)
        for drain in self._rings.known.values():
            rank, pid = drain.header.identity.rank, drain.header.pid
            self._journal.event("warning", message=f"rank {rank} (process {pid}) was still running when the job ended")

    def _write_all(self, *, last: bool) -> bool:
        self._find_rings()
        done = self._copy_output(last=last)
        for drain in list(self._rings.known.values()):
            if not drain.alive():
                self._bury(drain)
                done = done and drain.reader.path not in self._rings.known
            else:
                done = self._try(drain.drain, drain) and self._try(drain.save_last_sidecar, drain) and done
                done = drain.move_layers(self._journal) and done
        return self._journal.flush() and done

    def _ask_git(self, run_dir: Path, meta: dict[str, Any]) -> GitContext | None:
        known = any(event.get("event") == "context" for event in read_jsonl(run_dir / EVENTS)[0])
        return GitContext(Path(str(meta.get("cwd", ".")))) if not known else None

    def _on_sigterm(self, _signal: int, _frame: object) -> None:
        self._terminated = True


def _age_s(header: RingHeader) -> float | None:
    """How long a process had existed when it created its ring: what it imported and set up before; None: unknown."""
    if not header.start_ticks:
        return None
    asleep_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()  # ticks count on while the machine sleeps
    started_s = header.start_ticks / os.sysconf("SC_CLK_TCK") - asleep_s
    age_s = header.anchor_mono_ns / 1e9 - started_s
    return round(age_s, 3) if 0 <= age_s < LONGEST_START_S else None


# -- Process ----------------------------------------------------------------------------------------------------------
# Entry point of the agent process. An orphaned agent also writes the summary, because no launcher will.


def tend(
    run_dir: Path,
    session: Path,
    *,
    owner: int | None = None,
    interval_s: float = 0.2,
    on_hang: HangPolicy | None = None,
    hub: Destination | None = None,
    team: Destination | None = None,
) -> int:
    """Record a run until it is over and return the exit code. Raise NotARun if ``run_dir`` is not a run.

    ``owner`` is a process that may still start ranks, for jobs without a Stepscope launcher that announces the end.
    Everything is sent to ``hub``. On a node other than the hub's own, the run directory is only a spool, which is
    deleted once the hub has it. ``team``: the hub of the team, which gets a copy of a run on one node.
    """
    os.umask(umask_of(run_dir))
    run_clock.follow_run(read_meta(run_dir))
    shipper = probes = None
    if hub is not None:
        from stepscope.agent.shipping.sender import Shipper  # HTTP takes a megabyte or two: only with a hub

        probes = Probes(platform.node(), hub.node)
        shipper = Shipper(run_dir, hub, probe_port=probes.port)
    copier = None
    if team is not None:
        from stepscope.agent.shipping.sender import Shipper
        from stepscope.wire.handshake import KeyRing, team_environ

        team_keys = KeyRing(team_environ(os.environ), tell=lambda _: None).refresh
        copier = Shipper(run_dir, team, keys=team_keys, traces=False)
    agent = Agent(
        run_dir,
        session,
        owner=owner,
        interval_s=interval_s,
        on_hang=on_hang,
        probes=probes,
        shipper=shipper,
        copier=copier,
    )
    if agent.run() != "orphaned":
        return 0
    if hub is not None and hub.node != 0:
        if agent.delivered is not None and agent.delivered.whole and not agent.delivered.local:
            shutil.rmtree(run_dir, ignore_errors=True)
    else:
        # Replace this process: what a summary needs is loaded only now, and the agent's memory is freed.
        command = helper_command("stepscope", "report", "--quiet", str(run_dir))
        os.execv(command[0], command)
    return 0
