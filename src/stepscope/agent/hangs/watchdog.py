"""The watchdog: detects worlds of ranks that are stalled, has the evidence gathered, and reports the result.

If none of their rings gets a word for ``after_s`` (or five steps, if that is longer), that is a reason to inquire, not
yet a hang. The evidence is gathered (``agent/hangs/rank_evidence.py``) and judged (``hangs/judge.py``) in a separate
thread, so that the rings are drained meanwhile. If the judge finds work in progress, it says when to judge again. A
hang is reported immediately in the events, in ``hangs/``, in ``findings.json`` and on the terminal. Its end is reported
too, if the job recovers.

NCCL's watchdog also gives up at some point: it makes all ranks write their Flight Recorders into ``flight/`` and aborts
the waiting rank a minute later. Such a dump is a reason to inquire immediately, whatever ``after_s`` says.

When a rank dies, the Flight Recorders of the remaining ranks are read immediately, because their launcher is about to
end them. In a job on several hosts the evidence is kept, hang or not, to be judged together with that of the others
(``hangs/multi_host.py``).

Progress: which ranks make some, and what the rings say about those that do not or are gone.

Reading the mark of a ring takes a few microseconds (``RingReader.mark``), so it is done on every turn of the agent's
loop. Ranks of one world (of the same attempt) wait for each other and are treated together; a single process is its own
world.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stepscope.agent.drain import RingDrain
from stepscope.agent.flight_reader import ask_flights
from stepscope.agent.hangs.on_hang import HangPolicy, OnHang
from stepscope.agent.hangs.rank_evidence import Gathered, Subject, gather
from stepscope.agent.journal import Journal
from stepscope.agent.procfs import read_process
from stepscope.agent.stacks import StackOffers
from stepscope.flight.wording import ranks_text
from stepscope.hangs.evidence import EXITED_IN_ORDER, Evidence, EvidenceFile, LastCollective, RankEvidence
from stepscope.hangs.judge import NotAHang, judge
from stepscope.hangs.report import finding_of, hang_lines, steps_of
from stepscope.hangs.thresholds import GAP_S, LAST_WORDS_S, LOSS_COUNTS_S, LOSS_S, STEPS
from stepscope.records import run_clock
from stepscope.records.collectives import OPS
from stepscope.records.hang import HangRecord
from stepscope.records.paths import ENV_KEEP_EVIDENCE, SERVER_SUFFIX, error_path
from stepscope.records.text import duration_text, say, without_colors
from stepscope.ring import RingHeader, RingState
from stepscope.store.documents import save_findings
from stepscope.store.file_io import read_document
from stepscope.store.live.failures import keep_flights, nccl_dumped, read_hangs, write_evidence, write_hang
from stepscope.store.paths import hang_path

__all__ = ["Progress", "Subjects", "Watchdog", "World", "WorldKey", "departed_of", "last_call"]

# -- Progress ---------------------------------------------------------------------------------------------------------

WorldKey = tuple[str, int, int]


@dataclass(kw_only=True)
class Member:
    """A rank whose process is alive."""

    drain: RingDrain
    mark: object
    moved_s: float
    """When it was last seen to write a word, or first seen at all."""
    failed_s: float | None = None
    """Since when its ring reports an uncaught exception while the process still exists."""

    @property
    def rank(self) -> int:
        return self.drain.header.identity.rank


@dataclass(frozen=True, kw_only=True)
class Departed:
    """A rank whose process is gone."""

    rank: int
    pid: int
    ended: str
    """How it ended, in words; empty if unknown."""
    in_order: bool
    at_s: float
    step: int | None
    phase: str


@dataclass(kw_only=True)
class World:
    """Ranks that wait for each other."""

    key: WorldKey
    size: int
    members: list[Member] = field(default_factory=list)
    departed: list[Departed] = field(default_factory=list)
    counted_from_s: float = 0.0
    """When the watchdog started to count, or started again."""

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(member.drain.header.pid for member in self.members)

    def moved_s(self) -> float:
        """Return when any of them last made progress."""
        return max(member.moved_s for member in self.members)

    def quiet_since_s(self) -> float:
        """Return the same, but not before the watchdog started to count."""
        return max(self.moved_s(), self.counted_from_s)

    def lost_s(self) -> float | None:
        """Return when the last rank was lost that did not exit normally; None if there was none."""
        gone = [rank.at_s for rank in self.departed if not rank.in_order]
        return max([*gone, *(m.failed_s for m in self.members if m.failed_s is not None)], default=None)

    def step_s(self) -> float | None:
        """Return the duration of recent steps; None before there were any."""
        medians = [statistics.median(m.drain.recent_ns) for m in self.members if m.drain.recent_ns]
        return statistics.median(medians) / 1e9 if medians else None


class Progress:
    """Tracks all ranks. Call ``update`` whenever the rings are checked."""

    def __init__(self) -> None:
        self._members: dict[RingDrain, Member] = {}
        self._departed: dict[WorldKey, list[Departed]] = {}
        self._checked_s = float("-inf")
        self._counted_from_s = 0.0

    def update(self, drains: Iterable[RingDrain], now_s: float) -> list[World]:
        """Return the worlds with at least one live rank."""
        if now_s - self._checked_s > GAP_S:
            self._counted_from_s = now_s
        self._checked_s = now_s
        members = {}
        for drain in drains:
            if drain.ended_wall_ns is not None:
                continue
            mark = drain.reader.mark()
            member = self._members.get(drain) or Member(drain=drain, mark=mark, moved_s=now_s)
            if member.mark != mark:
                member.mark, member.moved_s = mark, now_s
            if drain.reader.state() is not RingState.EXCEPTION:
                member.failed_s = None
            elif member.failed_s is None:
                member.failed_s = now_s
            members[drain] = member
        self._members = members
        worlds = self._worlds()
        self._departed = {world.key: world.departed for world in worlds}
        return worlds

    def depart(self, drain: RingDrain, departed: Departed) -> World | None:
        """Note that a rank's process is gone; return the world it leaves behind, unless it was the last one in it."""
        member = self._members.pop(drain, None)
        key = world_of(drain)
        self._departed.setdefault(key, []).append(departed)
        left = next((world for world in self._worlds() if world.key == key), None)
        if left is None and member is not None:
            del self._departed[key]
        # One that was never seen alive is remembered: it died so early that its peers were not seen either.
        return left

    def _worlds(self) -> list[World]:
        worlds: dict[WorldKey, World] = {}
        for member in self._members.values():
            key = world_of(member.drain)
            if key not in worlds:
                size, gone = member.drain.header.identity.world_size, self._departed.get(key, [])
                worlds[key] = World(key=key, size=size, departed=gone, counted_from_s=self._counted_from_s)
            worlds[key].members.append(member)
        return list(worlds.values())


def world_of(drain: RingDrain) -> WorldKey:
    identity = drain.header.identity
    if identity.world_size > 1:
        return "world", identity.attempt, identity.world_size
    return "process", identity.attempt, identity.pid


# -- Subjects ---------------------------------------------------------------------------------------------------------
# What the rings say about ranks that are stalled or gone. All evidence starts from this.

LONGEST_MESSAGE = 300
ENDED = (RingState.EXITED, RingState.EXCEPTION)
"""States that the ring may report while the process still exists: shutting down may take seconds."""


class Subjects:
    """Creates subjects and remembers the last GPU utilization."""

    def __init__(self, meta: dict[str, Any]) -> None:
        launcher = meta.get("launcher")
        self._launcher = launcher.get("pid") if isinstance(launcher, dict) else None
        self._gpus: dict[str | int, float] = {}
        """Utilization by uuid and by index."""

    def saw_gpus(self, samples: Iterable[dict[str, Any]]) -> None:
        for sample in samples:
            if isinstance(used := sample.get("util_percent"), (int, float)):
                uuid = str(sample.get("uuid", "")).removeprefix("GPU-")  # torch omits the prefix
                self._gpus |= dict.fromkeys((uuid, sample.get("index", -1)), float(used))

    def suspended(self) -> bool:
        """Return whether the job was stopped together with its launcher, for example by Ctrl-Z."""
        reading = read_process(self._launcher) if isinstance(self._launcher, int) else None
        return reading is not None and reading.state in ("T", "t")

    def of(self, world: World, now_s: float) -> list[Subject]:
        living = [self._subject(member, now_s) for member in world.members]
        return [*living, *(Subject(evidence=_evidence_of(rank, now_s)) for rank in world.departed)]

    def servers(self, members: Iterable[Member]) -> dict[int, Path]:
        """Return the worker server sockets by rank."""
        return {m.rank: path for m in members if (path := _server(m.drain)) is not None}

    def _subject(self, member: Member, now_s: float) -> Subject:
        drain = member.drain
        header = drain.header = drain.reader.header()
        identity = header.identity
        silent_s = max(now_s - member.moved_s, 0.0)
        if header.live_since_ns:  # it may have gone silent before the watchdog started
            silent_s = max(silent_s, (time.perf_counter_ns() - header.live_since_ns) / 1e9)
        evidence = RankEvidence(
            rank=identity.rank,
            pid=header.pid,
            ended=_how_it_ended(drain, oom_killed=False) if header.state in ENDED else "",
            step=header.live_step or None,
            phase=header.phase_names[header.live_phase],
            silent_s=round(silent_s, 1),
            collective=_last_collective(drain, header),
            groups=header.groups,
            device=identity.device,
            gpu_util_percent=self._gpus.get(
                identity.device_uuid.removeprefix("GPU-"), self._gpus.get(identity.device_index)
            )
            if identity.device != "cpu"
            else None,
        )
        return Subject(
            evidence=evidence,
            pidfd=_copy_pidfd(drain.pidfd),
            offers=StackOffers(
                ring=drain.reader.path,
                threads=drain.reader.thread_offer(),
                stacks=drain.reader.stack_offer(),
                running=drain.reader.running_offer(),
                trains=drain.reader.training_thread(),
            ),
            server=_server(drain),
        )


def departed_of(drain: RingDrain, *, at_s: float, oom_killed: bool) -> Departed:
    """Describe a rank whose process is gone and whose ring is still open."""
    header = drain.header
    return Departed(
        rank=header.identity.rank,
        pid=header.pid,
        ended=_how_it_ended(drain, oom_killed=oom_killed),
        in_order=header.state is RingState.EXITED,
        at_s=at_s,
        step=header.live_step or None,
        phase=header.phase_names[header.live_phase],
    )


def last_call(drain: RingDrain) -> dict[str, Any] | None:
    """Return the collective that a rank called last, for its ``rank_end``; None if none is known."""
    last = _last_collective(drain, drain.header)
    if last is None or last.group is None:
        return None
    return {"op": last.op, "group": last.group.name, "bytes": last.bytes}


def _evidence_of(departed: Departed, now_s: float) -> RankEvidence:
    return RankEvidence(
        rank=departed.rank,
        pid=departed.pid,
        alive=False,
        ended=departed.ended,
        step=departed.step,
        phase=departed.phase,
        silent_s=round(now_s - departed.at_s, 1),
    )


def _how_it_ended(drain: RingDrain, *, oom_killed: bool) -> str:
    """Return how a rank ended, in words; empty if unknown."""
    if drain.header.state is RingState.EXITED:
        return EXITED_IN_ORDER
    if oom_killed:
        return "killed by the kernel, which ran out of memory"
    try:
        error = json.loads(read_document(error_path(drain.run_dir, drain.header.pid)))
        message = without_colors(str(error["message"]))
        return f"raised {error['type']}: {message}"[:LONGEST_MESSAGE].rstrip(": \n")
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return ""


def _last_collective(drain: RingDrain, header: RingHeader) -> LastCollective | None:
    last = drain.reader.last_collective()
    if last is None:
        return None
    return LastCollective(
        op=OPS[last.op] if last.op < len(OPS) else OPS[0],
        group=next((group for group in header.groups if group.slot == last.group), None),
        bytes=last.size_bytes,
        called_s=round(max(0.0, (time.perf_counter_ns() - last.called_ns) / 1e9), 1),
        waiting=last.waiting,
        peer=last.peer,
    )


def _server(drain: RingDrain) -> Path | None:
    return drain.reader.path.with_suffix(SERVER_SUFFIX) if drain.reader.server_offer() else None


def _copy_pidfd(pidfd: int | None) -> int | None:
    """Return a duplicate that stays open after the rank is buried."""
    with suppress(OSError):
        return None if pidfd is None else os.dup(pidfd)
    return None


# -- Watchdog ---------------------------------------------------------------------------------------------------------

WIDTH = 100

Judge = Callable[..., HangRecord | NotAHang]


@dataclass(kw_only=True)
class _Stop:
    """A period in which a world makes no progress."""

    world: WorldKey
    moved_s: float
    """When a rank last made progress."""
    stopped_wall_ns: int
    pids: frozenset[int]
    next_s: float = 0.0
    """When to inquire (again)."""
    reasons: set[str] = field(default_factory=set)
    """Reasons reported so far why it is not a hang."""
    earlier: dict[int, RankEvidence] = field(default_factory=dict)
    gave_up: tuple[int, ...] = ()
    """Ranks whose dump NCCL's watchdog wrote in this period: it is about to abort them."""
    record: HangRecord | None = None
    evidence_file: EvidenceFile | None = None
    """The last evidence, if other hosts are involved too."""


@dataclass(kw_only=True)
class _Inquiry:
    """Evidence being gathered and judged."""

    stop: _Stop
    thread: threading.Thread
    outcome: HangRecord | NotAHang | None = None
    ranks: tuple[RankEvidence, ...] = ()
    evidence_file: EvidenceFile | None = None


class Watchdog:
    """Call ``check`` whenever the rings are read, ``buried`` after a rank's process died, ``finish`` at the end."""

    def __init__(
        self,
        run_dir: Path,
        journal: Journal,
        *,
        node: str,
        policy: HangPolicy,
        subjects: Subjects,
        gather: Callable[..., Gathered] = gather,
        judge: Judge = judge,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._journal = journal
        self._node = node
        self._after_s = policy.after_s
        self._on_hang = OnHang(policy.action, run_dir, journal)
        self._subjects = subjects
        self._gather, self._judge, self._now = gather, judge, now
        self._progress = Progress()
        self._stops: dict[WorldKey, _Stop] = {}
        self._inquiry: _Inquiry | None = None
        self._records: dict[int, HangRecord] = {record.number: record for record in self._earlier()}
        self._inherited = {number for number, record in self._records.items() if record.over is None}
        """Open hangs that an earlier agent declared, and that this one has not seen continue or end."""
        self._unsaved: set[int] = set()
        self._read_s: dict[int, float] = {}

    def check(self, drains: Iterable[RingDrain], *, captured: bool = False) -> None:
        """``captured``: ranks may be standing still because torch's profiler writes a trace."""
        if not self._after_s:
            return
        now_s = self._now()
        worlds = self._progress.update(drains, now_s)
        there = {world.key for world in worlds}
        for key in [key for key in self._stops if key not in there]:
            self._leave(key)
        earlier = self._inquiry
        for world in worlds:
            self._close_inherited(world)
            self._watch(world, now_s, captured=captured)
        if self._inquiry is earlier:  # an inquiry that just began cannot tell yet whether the job continues
            self._take_outcome(now_s)
        self._on_hang.poll()
        self._save()

    def buried(self, drain: RingDrain, *, oom_killed: bool) -> None:
        """Handle a dead process, whose ring still shows what it did last."""
        departed = departed_of(drain, at_s=self._now(), oom_killed=oom_killed)
        world = self._progress.depart(drain, departed) if self._after_s else None
        if world is None or departed.in_order:
            return
        stop = self._stops.get(world.key)
        if stop is not None and stop.record is not None:
            return  # what was saved when it was declared a hang says more than its last ranks say now
        servers = self._subjects.servers(world.members)
        late = {rank: path for rank, path in servers.items() if self._now() - self._read_s.get(rank, -1e9) > 1.0}
        self._read_s |= dict.fromkeys(late, self._now())
        try:
            keep_flights(self._run_dir, ask_flights(late, patience_s=LAST_WORDS_S))
        except OSError as error:
            self._journal.refused(error)

    @property
    def asks(self) -> bool:
        """Whether stacks are being requested from ranks right now, so that no other code should request any."""
        return self._inquiry is not None

    def finish(self) -> None:
        """Close all open hangs at the end of the run."""
        for key in list(self._stops):
            self._leave(key)
        over: Literal["aborted", "ended"] = "aborted" if self._on_hang.aborted else "ended"
        for record in list(self._records.values()):
            if record.over is None:
                self._update(replace(record, over=over, over_wall_ns=run_clock.wall_ns()))
        self._save()

    def _watch(self, world: World, now_s: float, *, captured: bool) -> None:
        stop = self._stops.get(world.key)
        if stop is not None and stop.record is not None:
            self._watch_for_end(world, stop, now_s)
            return
        moved_s = world.moved_s()
        if stop is not None and (moved_s > stop.moved_s or world.pids != stop.pids):
            self._leave(world.key)
            stop = None
        gave_up = stop.gave_up if stop is not None and stop.gave_up else self._gave_up(world, now_s)
        stands = not captured and self._stands_still(world, now_s)
        if not gave_up and not stands and not self._lost_one(world, now_s):
            return
        if stop is None:
            stop = self._stops[world.key] = _Stop(
                world=world.key,
                moved_s=moved_s,
                stopped_wall_ns=run_clock.wall_ns() - round((now_s - moved_s) * 1e9),
                pids=world.pids,
            )
        if gave_up and not stop.gave_up:
            stop.gave_up, stop.next_s = gave_up, now_s  # earlier excuses no longer count: there is little time left
        stop.record = self._declared_earlier(world)
        if stop.record is None and now_s >= stop.next_s and self._inquiry is None and not self._subjects.suspended():
            self._inquire(world, stop, now_s)

    def _declared_earlier(self, world: World) -> HangRecord | None:
        """Return the open hang of an earlier agent that this stop is: the same processes in the same steps."""
        for number in sorted(self._inherited):
            record = self._records[number]
            there = {(rank.pid, rank.step) for rank in record.ranks if rank.alive}
            if there and there == {(pid, step or None) for pid, step in _steps_in_progress(world).items()}:
                self._inherited.discard(number)
                return record
        return None

    def _close_inherited(self, world: World) -> None:
        """Close hangs of an earlier agent from which all ranks resumed while no agent was there."""
        for number in sorted(self._inherited):
            record = self._records[number]
            steps = _steps_in_progress(world)
            passed = [rank.step is not None and steps.get(rank.pid, -1) > rank.step for rank in record.ranks]
            if passed and all(passed):
                self._inherited.discard(number)
                self._recovered(record, (run_clock.wall_ns() - record.stopped_wall_ns) / 1e9)

    def _leave(self, key: WorldKey) -> None:
        """Drop a stop whose world has resumed or is gone."""
        self._mark_over(self._stops.pop(key))

    def _mark_over(self, stop: _Stop) -> None:
        """Set the end time in evidence that was never declared a hang; for a hang, the record has it."""
        if stop.evidence_file is not None and stop.record is None:
            with suppress(OSError):
                write_evidence(self._run_dir, replace(stop.evidence_file, over_wall_ns=run_clock.wall_ns()))

    def _stands_still(self, world: World, now_s: float) -> bool:
        quiet_s = now_s - world.quiet_since_s()
        return quiet_s >= self._after_s and quiet_s >= self._patience_s(world)  # the second takes longer to compute

    def _patience_s(self, world: World) -> float:
        return max(self._after_s, STEPS * (world.step_s() or 0.0))

    def _lost_one(self, world: World, now_s: float) -> bool:
        lost_s = world.lost_s()
        if lost_s is None or world.moved_s() - lost_s > LOSS_COUNTS_S:
            return False
        return now_s - max(lost_s, world.quiet_since_s()) >= min(LOSS_S, self._after_s)

    def _gave_up(self, world: World, now_s: float) -> tuple[int, ...]:
        """Return ranks whose dump NCCL's watchdog wrote since anyone last made progress; its abort follows in 60 s."""
        quiet_s = now_s - world.quiet_since_s()
        if quiet_s < min(LOSS_S, self._after_s):
            return ()
        return tuple(sorted(nccl_dumped(self._run_dir, since_ns=time.time_ns() - round(quiet_s * 1e9))))

    def _inquire(self, world: World, stop: _Stop, now_s: float) -> None:
        """Start to gather and judge; ``_take_outcome`` takes the result."""
        subjects = self._subjects.of(world, now_s)
        threshold_s, step_s = self._patience_s(world), world.step_s()
        number = max(self._records, default=0) + 1
        gave_up = stop.gave_up

        def work() -> None:
            gathered = self._gather(subjects, earlier=stop.earlier)
            inquiry.ranks = gathered.ranks
            evidence = Evidence(
                host=self._node,
                world_size=world.size,
                ranks=gathered.ranks,
                threshold_s=threshold_s,
                step_s=step_s,
                source_lines=gathered.source_lines,
            )
            now_ns, stopped_ns = run_clock.wall_ns(), stop.stopped_wall_ns
            outcome = self._judge(evidence, number=number, declared_wall_ns=now_ns, stopped_wall_ns=stopped_ns)
            if isinstance(outcome, HangRecord):
                self._keep(gathered)
                outcome = replace(outcome, evidence=(*outcome.evidence, *_given_up(gave_up)))
            if world.size > len(gathered.ranks) or os.environ.get(ENV_KEEP_EVIDENCE) == "1":
                inquiry.evidence_file = EvidenceFile(
                    number=number,
                    stopped_wall_ns=stopped_ns,
                    gathered_wall_ns=now_ns,
                    evidence=evidence,
                    excuse=outcome.reason if isinstance(outcome, NotAHang) else "",
                )
                with suppress(OSError):
                    write_evidence(self._run_dir, inquiry.evidence_file)
            inquiry.outcome = outcome

        thread = threading.Thread(target=work, name="watchdog", daemon=True)
        inquiry = self._inquiry = _Inquiry(stop=stop, thread=thread)
        thread.start()

    def _keep(self, gathered: Gathered) -> None:
        """Keep the raw answers. A failed write is not retried for them, only for the verdict."""
        flights = {rank.rank: rank.flight for rank in gathered.ranks if rank.flight and rank.alive}
        with suppress(OSError):
            keep_flights(self._run_dir, flights, gathered.stack_texts)

    def _take_outcome(self, now_s: float) -> None:
        """Take the result of a finished inquiry."""
        inquiry = self._inquiry
        if inquiry is None or inquiry.thread.is_alive():
            return
        self._inquiry = None
        stop, outcome = inquiry.stop, inquiry.outcome
        stop.earlier = {rank.pid: rank for rank in inquiry.ranks}
        stop.evidence_file = inquiry.evidence_file
        if self._stops.get(stop.world) is not stop:
            self._mark_over(stop)
            return  # it resumed in the meantime
        if outcome is None:
            stop.next_s = float("inf")  # a Stepscope bug, with its traceback on the terminal; once is enough
        elif isinstance(outcome, NotAHang):
            stop.next_s = now_s + outcome.check_again_s
            if outcome.reason not in stop.reasons:
                stop.reasons.add(outcome.reason)
                self._journal.event("not_a_hang", reason=outcome.reason, evidence=list(outcome.evidence))
        else:
            self._declare(stop, outcome)

    def _declare(self, stop: _Stop, record: HangRecord) -> None:
        stop.record = record
        self._update(record)
        self._save()
        self._journal.event(
            "hang",
            number=record.number,
            kind=record.kind,
            title=record.title,
            culprits=[culprit.rank for culprit in record.culprits],
            victims=list(record.victims),
            steps=steps_of(record),
        )
        say(
            "\n".join(
                [f"the job hangs ({record.kind})", *hang_lines(record, WIDTH, now_wall_ns=record.declared_wall_ns)]
            ),
            lines=True,
        )
        self._journal.flush()  # write the evidence first: the job may be ended next
        action = self._on_hang.act(record, hang_path(self._run_dir, record.host, record.number))
        if action:
            self._journal.event("on_hang", number=record.number, action=action)
            stop.record = replace(record, action=action)
            self._update(stop.record)

    def _watch_for_end(self, world: World, stop: _Stop, now_s: float) -> None:
        """Close a hang when all stalled ranks have resumed. One alone may just be failing, which ends phases too."""
        record = stop.record
        still = [m for m in world.members if m.moved_s <= stop.moved_s]
        if record is None or still or not stop.pids <= world.pids:
            return
        del self._stops[world.key]
        self._recovered(record, now_s - stop.moved_s)

    def _recovered(self, record: HangRecord, seconds: float) -> None:
        seconds = round(seconds, 1)
        self._update(replace(record, over="recovered", over_wall_ns=run_clock.wall_ns()))
        self._journal.event("hang_over", number=record.number, seconds=seconds)
        say(f"the job resumed after {duration_text(seconds, whole=True)}; it was a stall", lines=True)

    def _update(self, record: HangRecord) -> None:
        self._records[record.number] = record
        self._unsaved.add(record.number)

    def _save(self) -> None:
        """Save changed records; failed writes are retried."""
        if not self._unsaved:
            return
        try:
            for number in sorted(self._unsaved):
                write_hang(self._run_dir, self._records[number])
            save_findings(self._run_dir, [finding_of(record).to_dict() for record in self._records.values()])
        except OSError as error:
            self._journal.refused(error)
        else:
            self._unsaved.clear()

    def _earlier(self) -> list[HangRecord]:
        """Return what an earlier agent found on this host."""
        return [record for record in read_hangs(self._run_dir)[0] if record.host == self._node]


def _steps_in_progress(world: World) -> dict[int, int]:
    """By pid."""
    headers = (member.drain.reader.header() for member in world.members)
    return {header.pid: header.live_step for header in headers}


def _given_up(ranks: tuple[int, ...]) -> tuple[str, ...]:
    if not ranks:
        return ()
    dumps = "dump" if len(ranks) == 1 else "dumps"
    return (f"NCCL's watchdog timed out too: it had already written the {dumps} of {ranks_text(ranks)}.",)
