"""The desk of captures: a run's hub takes requests, orders captures from the agents, and has their traces analyzed.

    desk = CaptureDesk(run_dir, LiveJob(live), orders=…)
    desk.tick(history.open)         # about once a second
    desk.ordered()                  # for the acknowledgments that agents of other nodes get

A capture is a record (``captures/ID/capture.json``) and goes through these states:

    ordered     the agents have the order, or will have it in time for its first step
    profiling   a rank has reached the first warm-up step
    delivering  the steps are over: traces are written, compressed, and sent to this node
    analyzing   all traces are here, or given up; a process with low priority reads them (it is started before, while
                traces are delivered, since loading its modules takes as long as its work)
    done        or failed, with a sentence that says why

Only one capture is ordered at a time.  Those that processes order themselves (``run --profile``) are noticed by what
agents report about their traces.  A hub that is started again continues with the records on disk.  No processes, clocks
or sockets here except those that are passed in.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from stepscope.alerts.outbox import LineTail
from stepscope.errors import UsageError
from stepscope.hub.live.capture_job import JobRank, Pace, TraceReport
from stepscope.records import run_clock
from stepscope.records.capture import (
    CaptureOrder,
    CaptureRecord,
    CaptureReport,
    CaptureRequest,
    RecordState,
)
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.records.finding_history import FindingEpisode
from stepscope.records.paths import SESSION_CAPTURE, helper_command, helper_environment
from stepscope.store.captures import (
    CAPTURES_BYTES,
    checked_request,
    is_capture_id,
    prune_traces,
    read_capture,
    read_captures,
    trace_name,
    trace_sizes,
    write_capture,
)
from stepscope.store.file_io import write_bytes
from stepscope.store.paths import CAPTURE_REQUESTS

__all__ = ["CaptureDesk", "CapturePolicy", "Job", "SessionOrders", "start_analysis"]


# -- policy -----------------------------------------------------------------------------------------------------------
# Which findings have a capture taken without a request, and how often.

CAPTURED_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("straggler", "compute_straggler", "input_straggler", "h2d_straggler"), "a slow rank"),
    **dict.fromkeys(("node_straggler", "rotating_straggler", "imbalance"), "slow ranks"),
    **dict.fromkeys(("input_bound", "comm_bound", "comm_hook_bound", "optimizer_bound", "between_steps"), "a bound"),
    **dict.fromkeys(("wait_heavy", "pipeline_bubble", "low_gpu_utilization"), "a bound"),
    **dict.fromkeys(("change_point", "drift", "throughput_drop"), "a change"),
    **dict.fromkeys(("jitter",), "slow steps that recur"),
    **dict.fromkeys(("comm_straggler", "slow_collective", "group_imbalance", "low_overlap"), "communication"),
}
"""Kinds of findings that the operators and kernels of a few steps can explain.  A single stall is over by then."""
MOST_PER_HOUR = 4
"""Captures because of findings, unless set otherwise (``run --capture``): each slows six steps."""
SHOWN_EVALUATIONS = 2
"""This many evaluations must have shown the finding: what comes and goes is not captured …"""
SHOWN_S = 6.0
"""… or it was shown for this long: a hub that nobody watches evaluates rarely."""
SETTLED_S = 30.0
"""No capture so soon after the first step: caches, allocators and compilers still warm up."""
HOUR_S = 3600.0
LEAST_SHARE = 0.05
"""A finding that costs a smaller share of the time is not worth slowing the job."""


@dataclass
class _Shown:
    evaluations: int
    since_s: float


class CapturePolicy:
    """Decides when a finding is captured.

    ``most_per_hour``: 0: never; ``on_gpus``: also in a job on GPUs (``CaptureSettings``).
    """

    def __init__(self, most_per_hour: int = MOST_PER_HOUR, *, on_gpus: bool = False) -> None:
        self._most = most_per_hour
        self.on_gpus = on_gpus
        self._shown: dict[int, _Shown] = {}
        self._captured: dict[int, str] = {}
        """The severity with which an episode was captured."""
        self._recent: list[tuple[float, str]] = []
        """When a capture was requested, and the finding's kind and rank."""

    def note(self, record: CaptureRecord, age_s: float, now_s: float) -> None:
        """A capture from before this hub was started counts, too."""
        if record.reason == "finding" and age_s < HOUR_S:
            self._recent.append((now_s - age_s, record.finding))

    def choose(self, episodes: Sequence[FindingEpisode], evaluations: int, now_s: float) -> FindingEpisode | None:
        """The finding to capture now; the leading one if there are several."""
        numbers = {episode.number for episode in episodes}
        self._shown = {number: shown for number, shown in self._shown.items() if number in numbers}
        for number in numbers:
            self._shown.setdefault(number, _Shown(evaluations, now_s))
        self._recent = [(at_s, subject) for at_s, subject in self._recent if now_s - at_s < HOUR_S]
        if len(self._recent) >= self._most:
            return None
        due = [episode for episode in episodes if self._is_due(episode, evaluations, now_s)]
        return max(due, key=lambda episode: (_severe(episode), _share(episode)), default=None)

    def captured(self, episode: FindingEpisode, now_s: float) -> None:
        """A capture for it was ordered."""
        self._captured[episode.number] = str(episode.finding.get("severity"))
        self._recent.append((now_s, subject_of(episode.finding)))

    def _is_due(self, episode: FindingEpisode, evaluations: int, now_s: float) -> bool:
        finding, shown = episode.finding, self._shown[episode.number]
        severity = finding.get("severity")
        if finding.get("kind") not in CAPTURED_KINDS or severity not in ("warning", "critical"):
            return False
        if self._captured.get(episode.number) in (severity, "critical") or _share(episode) < LEAST_SHARE:
            return False
        if any(subject == subject_of(finding) for _, subject in self._recent):
            return False
        return evaluations - shown.evaluations >= SHOWN_EVALUATIONS - 1 or now_s - shown.since_s >= SHOWN_S


def subject_of(finding: Mapping[str, Any]) -> str:
    """A finding's kind, with its rank if it names one."""
    ranks = finding.get("ranks")
    return (
        f"{finding.get('kind')} {ranks[0]}" if isinstance(ranks, list | tuple) and ranks else str(finding.get("kind"))
    )


def _severe(episode: FindingEpisode) -> bool:
    return episode.finding.get("severity") == "critical"


def _share(episode: FindingEpisode) -> float:
    cost = episode.finding.get("cost")
    share = cost.get("share") if isinstance(cost, Mapping) else None
    return float(share) if isinstance(share, int | float) else 0.0


# -- orders -----------------------------------------------------------------------------------------------------------

HEAR_S = 2.0
"""How long until an order is known to all ranks of this node: a turn of its agent, and half a second of a rank …"""
HEAR_REMOTE_S = 6.0
"""… and of other nodes, whose agents learn of it with their next acknowledgment."""
LEAST_MOST_S = 60.0
MOST_STEP_FACTOR = 4.0
"""A rank gives up when its steps take this many times as long as usual, but not before ``LEAST_MOST_S``."""
LONGEST_WINDOW_S = 300.0
"""Fewer steps are captured if they would take longer; at least one."""
ANSWER_S = 90.0
"""Beyond the time that the steps take: how long a rank may take to write its trace, and the agent to compress it."""
OTHERS_S = 15.0
"""After the trace of a capture that processes ordered themselves: how long to wait for other ranks that took part."""
ARRIVE_S = 60.0
"""A trace from another node may take longer, as long as more of it arrives within this time."""
MOST_PROFILED = 64
"""Ranks of one capture: the traces of each step of each rank take about a megabyte."""
BY_ITSELF = ("schedule", "baseline")
"""Reasons of captures that processes order themselves."""
EARLY_S = 120.0
"""How long a request waits for the first steps of the run."""
STALE_S = 300.0
"""A request that is older when it is first read was meant for an earlier hub."""


class Orders(Protocol):
    """Where the agent of this node finds the order."""

    def put(self, order: CaptureOrder | None) -> None: ...


class SessionOrders:
    """In the session, as a file.  What the disk refuses is lost: then no rank answers, and the capture fails."""

    def __init__(self, session: Path | None) -> None:
        self._path = None if session is None else session / SESSION_CAPTURE

    def put(self, order: CaptureOrder | None) -> None:
        with suppress(OSError):
            if self._path is None:
                return
            if order is None:
                self._path.unlink(missing_ok=True)
            else:
                write_bytes(self._path, json.dumps(encoded(order)).encode())


class Job(Protocol):
    """The part of ``LiveJob`` that the desk uses."""

    @property
    def evaluations(self) -> int: ...

    @property
    def on_gpu(self) -> bool: ...

    def newest(self) -> int: ...

    def pace(self) -> Pace | None: ...

    def ranks(self) -> tuple[JobRank, ...]: ...

    def step_ms(self, ranks: Sequence[int], first: int, last: int) -> float | None: ...

    def findings(self) -> Sequence[Mapping[str, Any]]: ...

    def reports(self) -> list[TraceReport]: ...


class _Impossible(Exception):
    """Why a request cannot be fulfilled, as a sentence."""


def chosen_ranks(request: CaptureRequest, ranks: Sequence[JobRank], findings: Sequence[Mapping[str, Any]]) -> list[int]:
    """The ranks to profile; _Impossible without any."""
    alive = [each for each in ranks if each.alive]
    if not alive:
        raise _Impossible("No rank of the run is alive.")
    if request.choose == "all":
        if len(alive) > MOST_PROFILED:
            raise _Impossible(f"The run has {len(alive):,} ranks; list at most {MOST_PROFILED} of them.")
        return [each.rank for each in alive]
    if request.choose == "listed":
        return _listed(request.ranks, ranks)
    by_work = sorted(alive, key=lambda each: (each.work_ns, each.rank))
    living = {each.rank for each in alive}
    named = [rank for rank in request.ranks if rank in living]
    named = _named_by(findings, living) if len(named) in (0, len(living)) else named
    worst = named[0] if named else by_work[-1].rank
    others = [each.rank for each in by_work if each.rank != worst and each.rank not in named] or [
        each.rank for each in by_work if each.rank != worst
    ]
    return sorted([worst, others[len(others) // 2]]) if others else [worst]


def _listed(wanted: Sequence[int], ranks: Sequence[JobRank]) -> list[int]:
    known = {each.rank: each.alive for each in ranks}
    if missing := [rank for rank in wanted if rank not in known]:
        raise _Impossible(f"There is no rank {missing[0]}: the run has the ranks {min(known)} to {max(known)}.")
    if dead := [rank for rank in wanted if not known[rank]]:
        raise _Impossible(f"Rank {dead[0]} has ended.")
    if len(wanted) > MOST_PROFILED:
        raise _Impossible(f"At most {MOST_PROFILED} ranks can be captured at a time, not {len(wanted):,}.")
    return list(wanted)


def _named_by(findings: Sequence[Mapping[str, Any]], living: set[int]) -> list[int]:
    """The ranks of the leading finding that names some, but not all."""
    for finding in findings:
        ranks = finding.get("ranks")
        if finding.get("kind") in CAPTURED_KINDS and isinstance(ranks, list | tuple) and 0 < len(ranks) < len(living):
            named = [rank for rank in ranks if rank in living]
            if named:
                return named
    return []


def order_for(request: CaptureRequest, capture: str, ranks: Sequence[int], pace: Pace) -> CaptureOrder:
    """The order: its first step is late enough for all ranks to hear of it."""
    hear_s = HEAR_S if pace.nodes < 2 else HEAR_REMOTE_S
    step_s = max(pace.step_s, 1e-6)
    steps = request.steps
    if (steps + request.warmup) * step_s > LONGEST_WINDOW_S:
        steps = max(1, min(steps, int(LONGEST_WINDOW_S / step_s) - request.warmup))
    at_step = pace.newest + math.ceil((min(pace.age_s, step_s + hear_s) + hear_s) / step_s) + request.warmup + 1
    return CaptureOrder(
        id=capture,
        ranks=tuple(ranks),
        at_step=at_step,
        steps=steps,
        warmup=request.warmup,
        memory=request.memory,
        stacks=request.stacks,
        shapes=request.shapes,
        reason=request.reason,
        most_s=max(LEAST_MOST_S, MOST_STEP_FACTOR * (steps + request.warmup + 1) * step_s),
    )


# -- analysis ---------------------------------------------------------------------------------------------------------

ANALYSIS_NICE = 5
"""It yields to the job: on a core that two ranks use it gets a seventh, and needs it for a second or two.  On a machine
whose cores ten processes use, it waited for a minute with 10, and for minutes with 19."""
ANALYSIS_BYTES = 8 << 30
ANALYSIS_S = 300.0
"""The longest that the analysis of one capture may take."""
TRACES_STAY = "its traces are there, and `stepscope trace` reads them"


class Analysis(Protocol):
    """A process that analyzes one capture, once it may begin."""

    def begin(self) -> None: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


def start_analysis(folder: Path) -> Analysis:
    """Start the process that analyzes the traces of this folder and completes its record.  OSError if it cannot."""
    return _AnalysisProcess(folder)


class _AnalysisProcess:
    """Ends by itself if this process ends before it may begin."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            helper_command("stepscope.captures", "--wait", str(folder)),
            env=helper_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with suppress(OSError):  # it is over already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, ANALYSIS_NICE)
            resource.prlimit(self._process.pid, resource.RLIMIT_DATA, (ANALYSIS_BYTES, ANALYSIS_BYTES))

    def begin(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it is over already: ``poll`` says so
            self._process.stdin.write(b"\n")
            self._process.stdin.close()

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """End it, and wait for that."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._process.stdin.close()


# -- desk -------------------------------------------------------------------------------------------------------------


@dataclass
class _Open:
    """A capture that is not finished."""

    record: CaptureRecord
    deadline_s: float
    reports: dict[int, TraceReport] = field(default_factory=dict)
    """By rank, the last of each."""
    arrived: int = 0
    """Bytes of its traces so far."""


class CaptureDesk:
    def __init__(
        self,
        run_dir: Path,
        job: Job,
        *,
        orders: Orders,
        policy: CapturePolicy | None = None,
        analyze: Callable[[Path], Analysis] = start_analysis,
        most_bytes: int = CAPTURES_BYTES,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = run_clock.wall_ns,
    ) -> None:
        self.job = job
        self._run_dir = run_dir
        self._orders = orders
        self._policy = CapturePolicy() if policy is None else policy
        self._analyze = analyze
        self._most_bytes = most_bytes
        self._clock = clock
        self._wall_ns = wall_ns
        self._requests = LineTail(run_dir / CAPTURE_REQUESTS)
        self._settled_s: float | None = None
        """Since when the job makes steps."""
        self._open: dict[str, _Open] = {}
        self._finished: set[str] = set()
        self._baseline = ""
        """The last baseline: later captures are compared with its traces, so they are not removed."""
        self._answered: set[str] = set()
        """Ids of requests."""
        self._early: list[tuple[CaptureRequest, float]] = []
        """Requests from before the first steps, and until when they wait for them."""
        self._ready: tuple[str, Analysis] | None = None
        """The process for a capture whose traces are being delivered."""
        self._process: tuple[str, Analysis, float] | None = None
        self._ordered = b"null"
        self._resume()

    def tick(self, episodes: Sequence[FindingEpisode] = ()) -> None:
        """Do what is due.  OSError if the disk refuses; it is tried again in the next call."""
        self._take_reports()
        self._advance()
        self._take_requests()
        self._suggest(episodes)
        self._keep_analyzing()

    def ordered(self) -> bytes:
        """The order for agents of other nodes, as JSON, or ``null``."""
        return self._ordered

    @property
    def busy(self) -> bool:
        """Whether a capture is in progress."""
        return bool(self._open)

    @property
    def finished(self) -> int:
        """How many captures are over."""
        return len(self._finished)

    @property
    def analyzing(self) -> bool:
        return self._process is not None or any(each.record.state == "analyzing" for each in self._open.values())

    def conclude(self) -> None:
        """The run is over: what has not been delivered will not be.  Call ``tick`` until nothing is ``analyzing``."""
        self._take_reports()
        self._advance()
        for each in list(self._open.values()):
            if each.record.state != "analyzing":
                self._collected(each, "The run ended before its trace was delivered.")

    def abandon(self) -> None:
        """End the analysis: the hub ends with the run."""
        self._discard_ready()
        if self._process is not None:
            _, process, _ = self._process
            process.kill()
            self._process = None
        for each in list(self._open.values()):
            with suppress(OSError):
                self._close(each, "failed", f"The run ended before the analysis; {TRACES_STAY}.")

    # -- requests -----------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        now_ns, now_s = self._wall_ns(), self._clock()
        for record in read_captures(self._run_dir):
            self._answered.add(record.request)
            self._policy.note(record, (now_ns - record.requested_wall_ns) / 1e9, now_s)
            if record.reason == "baseline":
                self._baseline = record.order.id
            if record.state in ("done", "failed"):
                self._finished.add(record.order.id)
                continue
            each = self._open[record.order.id] = _Open(record, now_s + record.order.most_s + ANSWER_S)
            if record.state != "analyzing" and record.reason not in BY_ITSELF:
                self._give(each.record.order)

    def _take_requests(self) -> None:
        with suppress(OSError):  # a link or pipe in its place, or the file system has gone
            while lines := self._requests.read():
                for line in lines:
                    try:
                        request = checked_request(decoded(CaptureRequest, line))
                    except (ValueError, RecursionError, UsageError):
                        continue
                    age_s = (self._wall_ns() - request.wall_ns) / 1e9
                    if request.id not in self._answered and age_s < STALE_S:
                        self._answered.add(request.id)
                        self._early.append((request, self._clock() + EARLY_S))
        early, self._early = self._early, []
        for request, until_s in early:
            if self.job.pace() is None and self._clock() < until_s:
                self._early.append((request, until_s))
            else:
                self._order(request)

    def _order(self, request: CaptureRequest) -> None:
        """Order a capture, or record why that is not possible."""
        self._answered.add(request.id)
        try:
            record = self._possible(request)
        except _Impossible as why:
            order = CaptureOrder(id=self._new_id(max(self.job.newest(), 0)), ranks=(), at_step=0, reason=request.reason)
            record = replace(self._record(order, request), state="failed", problem=str(why))
            self._finished.add(order.id)
            write_capture(self._run_dir, replace(record, done_wall_ns=self._wall_ns()))
            return
        write_capture(self._run_dir, record)
        order = record.order
        pace_s = record.figures["usual_step_ms"] / 1e3
        until_s = 2.0 * (order.at_step - self.job.newest()) * pace_s
        self._open[order.id] = _Open(record, self._clock() + until_s + order.most_s + ANSWER_S)
        self._give(order)

    def _possible(self, request: CaptureRequest) -> CaptureRecord:
        for each in self._open.values():
            if each.record.state != "analyzing" and each.record.reason not in BY_ITSELF:
                raise _Impossible(f"Another capture is in progress: {each.record.order.id}.")
        pace = self.job.pace()
        if pace is None:
            raise _Impossible("The run has not made two steps yet.")
        ranks = chosen_ranks(request, self.job.ranks(), self.job.findings())
        order = order_for(request, "", ranks, pace)
        order = replace(order, id=self._new_id(order.at_step))
        figures = {"usual_step_ms": round(pace.step_s * 1e3, 3)}
        if pace.optimizer_s is not None:
            figures["usual_optimizer_ms"] = round(pace.optimizer_s * 1e3, 3)
        return replace(self._record(order, request), figures=figures)

    def _record(self, order: CaptureOrder, request: CaptureRequest) -> CaptureRecord:
        return CaptureRecord(
            order=order,
            state="ordered",
            requested_wall_ns=self._wall_ns(),
            reason=request.reason,
            request=request.id,
            finding=request.finding,
            by=request.by,
        )

    def _new_id(self, step: int) -> str:
        name, number = f"step-{step}", 2
        while name in self._open or name in self._finished or read_capture(self._run_dir, name) is not None:
            name, number = f"step-{step}-{number}", number + 1
        return name

    def _give(self, order: CaptureOrder | None) -> None:
        self._ordered = b"null" if order is None else json.dumps(encoded(order)).encode()
        self._orders.put(order)

    def _suggest(self, episodes: Sequence[FindingEpisode]) -> None:
        """Request a capture because of a finding, if one is due and the job is ready for it."""
        now_s = self._clock()
        if self.job.newest() < 0 or (self.job.on_gpu and not self._policy.on_gpus):
            return
        if self._settled_s is None:
            self._settled_s = now_s
        episode = self._policy.choose(episodes, self.job.evaluations, now_s)
        if episode is None or self._open or now_s - self._settled_s < SETTLED_S:
            return
        pace = self.job.pace()
        if pace is None or pace.compiling:
            return
        ranks = episode.finding.get("ranks")
        request = checked_request(
            CaptureRequest(
                id="",
                wall_ns=self._wall_ns(),
                ranks=tuple(rank for rank in ranks if type(rank) is int and rank >= 0)[:MOST_PROFILED]
                if isinstance(ranks, list | tuple)
                else (),
                reason="finding",
                finding=subject_of(episode.finding),
                by="stepscope",
            )
        )
        self._policy.captured(episode, now_s)
        self._order(request)

    # -- progress -----------------------------------------------------------------------------------------------------

    def _take_reports(self) -> None:
        for found in self.job.reports():
            report = found.report
            if not is_capture_id(report.id) or report.id in self._finished:
                continue
            each = self._open.get(report.id)
            if each is None:
                if report.reason == "request":
                    continue  # from an earlier life of the run, or of a capture that was removed
                each = self._open[report.id] = self._ordered_by_processes(report)
            if each.record.state == "analyzing":
                continue
            if report.reason in BY_ITSELF and report.rank not in each.record.order.ranks:
                each.deadline_s = self._clock() + OTHERS_S
                order = each.record.order
                ranks = tuple(sorted({*order.ranks, report.rank}))
                each.record = replace(each.record, order=replace(order, ranks=ranks))
                write_capture(self._run_dir, each.record)
            if report.rank in each.record.order.ranks:
                each.reports[report.rank] = found

    def _ordered_by_processes(self, report: CaptureReport) -> _Open:
        steps = max(report.last_step - report.first_step + 1, 1)
        order = CaptureOrder(
            id=report.id, ranks=(report.rank,), at_step=max(report.first_step, 0), steps=steps, reason=report.reason
        )
        record = CaptureRecord(order=order, state="delivering", requested_wall_ns=self._wall_ns(), reason=report.reason)
        write_capture(self._run_dir, record)
        if report.reason == "baseline":
            self._baseline = report.id
        return _Open(record, self._clock() + OTHERS_S)

    def _advance(self) -> None:
        newest = self.job.newest()
        for each in list(self._open.values()):
            record, order = each.record, each.record.order
            if record.state == "analyzing":
                continue
            state: RecordState = record.state
            if each.reports or newest >= order.at_step + order.steps - 1:
                state = "delivering"
            elif newest >= order.at_step - order.warmup - 1:
                state = "profiling"
            if state != record.state:
                each.record = replace(record, state=state)
                write_capture(self._run_dir, each.record)
            written = any(found.report.state == "written" for found in each.reports.values())
            if written and self._ready is None and self._process is None:
                with suppress(OSError):  # it is tried again when it is needed
                    self._ready = order.id, self._analyze(self._run_dir / "captures" / order.id)
            missing = self._missing(each)
            late = self._clock() >= each.deadline_s
            if late or (not missing and record.reason not in BY_ITSELF):
                self._collected(each, "It did not deliver a trace in time.")

    def _missing(self, each: _Open) -> list[int]:
        """The ranks that have neither delivered a trace nor failed."""
        sizes = trace_sizes(self._run_dir, each.record.order.id) if each.reports else {}
        silent = [rank for rank in each.record.order.ranks if rank not in each.reports]
        if silent and not self._any_alive(silent):
            each.deadline_s = min(each.deadline_s, self._clock() + ARRIVE_S / 4)  # their agents may be about to report
        arriving = [
            rank
            for rank, found in each.reports.items()
            if found.report.state == "written" and sizes.get(trace_name(rank), -1) < found.file_bytes
        ]
        arrived = sum(sizes.values())
        if arriving and arrived > each.arrived:
            each.deadline_s = max(each.deadline_s, self._clock() + ARRIVE_S)
        each.arrived = arrived
        return [*silent, *arriving]

    def _any_alive(self, ranks: Sequence[int]) -> bool:
        return any(each.alive for each in self.job.ranks() if each.rank in ranks)

    def _collected(self, each: _Open, why_missing: str) -> None:
        """All that will come has come: have it analyzed, or give the capture up."""
        order, missing = each.record.order, set(self._missing(each))
        reports = []
        for rank in order.ranks:
            found = each.reports.get(rank)
            report = found.report if found is not None else CaptureReport(id=order.id, rank=rank, pid=0, state="failed")
            if rank in missing:
                report = replace(report, state="failed", problem=report.problem or why_missing)
            elif report.state == "written":
                report = replace(report, state="delivered")
            reports.append(report)
        delivered = [report for report in reports if report.state == "delivered"]
        sizes = trace_sizes(self._run_dir, order.id)
        each.record = replace(
            each.record,
            reports=tuple(reports),
            files=tuple(sizes),
            size_bytes=sum(sizes.values()),
            figures={**each.record.figures, **self._step_ms(delivered)},
        )
        if self._ordered != b"null" and json.loads(self._ordered)["id"] == order.id:
            self._give(None)
        if delivered:
            each.record = replace(each.record, state="analyzing")
            write_capture(self._run_dir, each.record)
        else:
            problem = next(
                (f"Rank {report.rank}: {report.problem}" for report in reports if report.problem), why_missing
            )
            self._close(each, "failed", problem)

    def _step_ms(self, reports: Sequence[CaptureReport]) -> dict[str, float]:
        """How long the captured steps took."""
        known = [report for report in reports if report.last_step >= report.first_step >= 0]
        if not known:
            return {}
        first, last = min(report.first_step for report in known), max(report.last_step for report in known)
        step_ms = self.job.step_ms([report.rank for report in known], first, last)
        return {} if step_ms is None else {"step_ms": step_ms}

    def _close(self, each: _Open, state: RecordState, problem: str = "") -> None:
        record = replace(each.record, state=state, problem=problem, done_wall_ns=self._wall_ns())
        write_capture(self._run_dir, record)
        self._forget(record.order.id)

    def _forget(self, capture: str) -> None:
        self._open.pop(capture, None)
        self._finished.add(capture)
        if self._ready is not None and self._ready[0] == capture:
            self._discard_ready()
        if self._ordered != b"null" and json.loads(self._ordered)["id"] == capture:
            self._give(None)
        for pruned in prune_traces(self._run_dir, self._most_bytes, without=(*self._open, self._baseline)):
            if (record := read_capture(self._run_dir, pruned)) is not None:
                write_capture(self._run_dir, replace(record, files=(), size_bytes=0))

    # -- analysis -----------------------------------------------------------------------------------------------------

    def _keep_analyzing(self) -> None:
        """One analysis at a time."""
        if self._process is not None:
            capture, process, deadline_s = self._process
            exit_code = process.poll()
            if exit_code is None:
                if self._clock() < deadline_s:
                    return
                process.kill()
            self._process = None
            self._analyzed(capture, exit_code)
        waiting = next((each for each in self._open.values() if each.record.state == "analyzing"), None)
        if waiting is None:
            return
        capture = waiting.record.order.id
        if self._ready is not None and (self._ready[0] != capture or self._ready[1].poll() is not None):
            self._discard_ready()
        try:
            process = self._ready[1] if self._ready is not None else self._analyze(self._run_dir / "captures" / capture)
        except OSError as error:
            self._close(waiting, "failed", f"The analysis could not be started ({error.strerror}); {TRACES_STAY}.")
            return
        self._ready = None
        process.begin()
        self._process = capture, process, self._clock() + ANALYSIS_S

    def _discard_ready(self) -> None:
        if self._ready is not None:
            self._ready[1].kill()
            self._ready = None

    def _analyzed(self, capture: str, exit_code: int | None) -> None:
        """The process is over: it has completed the record, or failed."""
        each, record = self._open.get(capture), read_capture(self._run_dir, capture)
        if record is not None and record.state in ("done", "failed"):
            self._forget(capture)
        elif each is not None:
            why = f"took longer than {ANALYSIS_S:.0f} s" if exit_code is None else f"ended with exit code {exit_code}"
            self._close(each, "failed", f"The analysis {why}; {TRACES_STAY}.")
