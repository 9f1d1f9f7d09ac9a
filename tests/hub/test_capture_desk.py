"""The desk of captures: from a request to a record that says what was found, or why not.  Clock and job are made up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster
from hub_feed import sidecar_of, taken_of

from stepscope.hub.captures import CaptureDesk, CapturePolicy
from stepscope.hub.live.capture_job import JobRank, LiveJob, Pace, TraceReport
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.step_arrays import Planes
from stepscope.records.capture import CaptureOrder, CaptureRecord, CaptureReport, CaptureRequest
from stepscope.records.finding_history import FindingEpisode
from stepscope.records.steps import FLAG_SAMPLED
from stepscope.store.captures import (
    CaptureSettings,
    capture_settings,
    make_capture_folder,
    read_capture,
    read_captures,
    request_capture,
    trace_name,
    write_capture,
)
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.paths import CAPTURE_REQUESTS

MS = 1e6


@dataclass
class Analysis:
    """A process that analyzes: it ends when the test says so."""

    run: Path
    folder: Path
    begun: bool = False
    code: int | None = None
    killed: bool = False

    def begin(self) -> None:
        self.begun = True

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.killed = True

    def ends(self, code: int = 0, *, verdict: str = "rank 2 is slow in aten::mm") -> None:
        record = read_capture(self.run, self.folder.name)
        if not code and record is not None:
            write_capture(self.run, replace(record, state="done", verdict=verdict))
        self.code = code


@dataclass
class Job:
    """Four ranks with steps of 100 ms; rank 2 works longest and rank 1 is the median of the others."""

    step: int = 100
    alive: list[bool] = field(default_factory=lambda: [True] * 4)
    work_ms: list[float] = field(default_factory=lambda: [40.0, 50.0, 90.0, 60.0])
    found: list[dict[str, Any]] = field(default_factory=list)
    events: list[TraceReport] = field(default_factory=list)
    evaluations: int = 0
    compiling: bool = False
    step_s: float = 0.1
    nodes: int = 1
    on_gpu: bool = False
    optimizer_s: float | None = None

    def newest(self) -> int:
        return self.step

    def pace(self) -> Pace | None:
        if self.step < 1:
            return None
        return Pace(
            newest=self.step,
            step_s=self.step_s,
            age_s=0.05,
            compiling=self.compiling,
            nodes=self.nodes,
            optimizer_s=self.optimizer_s,
        )

    def ranks(self) -> tuple[JobRank, ...]:
        return tuple(
            JobRank(rank=rank, alive=alive, work_ns=work * MS)
            for rank, (alive, work) in enumerate(zip(self.alive, self.work_ms, strict=True))
        )

    def step_ms(self, ranks: Sequence[int], first: int, last: int) -> float | None:
        return 130.5 if ranks and last >= first else None

    def findings(self) -> Sequence[Mapping[str, Any]]:
        return self.found

    def reports(self) -> list[TraceReport]:
        new, self.events = self.events, []
        return new


@dataclass
class World:
    run: Path
    job: Job = field(default_factory=Job)
    now_s: float = 0.0
    order: CaptureOrder | None = None
    analyses: list[Analysis] = field(default_factory=list)
    most_bytes: int = 1 << 30
    most_per_hour: int = 4
    on_gpus: bool = False

    def __post_init__(self) -> None:
        self.desk = self.begin()

    def begin(self) -> CaptureDesk:
        return CaptureDesk(
            self.run,
            self.job,
            orders=self,
            policy=CapturePolicy(self.most_per_hour, on_gpus=self.on_gpus),
            analyze=self.analyze,
            most_bytes=self.most_bytes,
            clock=lambda: self.now_s,
            wall_ns=lambda: int(self.now_s * 1e9),
        )

    def put(self, order: CaptureOrder | None) -> None:
        self.order = order

    def analyze(self, folder: Path) -> Analysis:
        self.analyses.append(Analysis(self.run, folder))
        return self.analyses[-1]

    def request(self, **fields: Any) -> str:
        request = CaptureRequest(id=f"r{self.now_s}", wall_ns=int(self.now_s * 1e9), **fields)
        return request_capture(self.run, request).id

    def tick(self, *, step: int | None = None, after_s: float = 1.0, episodes: Sequence[FindingEpisode] = ()) -> None:
        self.now_s += after_s
        self.job.step = self.job.step if step is None else step
        self.desk.tick(episodes)

    def report(self, rank: int, state: str = "written", size: int = 10, **fields: Any) -> None:
        capture = fields.pop("capture", None) or (self.order.id if self.order else "")
        report = CaptureReport(id=capture, rank=rank, pid=10 + rank, state=state, **fields)  # type: ignore[arg-type]
        self.job.events.append(TraceReport(report=report, file_bytes=size if state == "written" else 0))

    def deliver(self, rank: int, size: int = 10, capture: str = "") -> None:
        capture = capture or (self.order.id if self.order else "")
        (make_capture_folder(self.run, capture) / trace_name(rank)).write_bytes(b"x" * size)

    @property
    def record(self) -> CaptureRecord:
        return read_captures(self.run)[-1]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def episode(
    number: int = 1, kind: str = "compute_straggler", severity: str = "warning", **fields: Any
) -> FindingEpisode:
    finding = {"kind": kind, "severity": severity, "ranks": [3], "cost": {"share": 0.2}, **fields}
    return FindingEpisode(
        number=number,
        change="opened",
        finding=finding,
        attempt=0,
        first_step=50,
        first_wall_ns=0,
        step=50,
        wall_ns=0,
    )


def test_the_record_has_what_the_optimizer_takes_without_the_profiler(world: World) -> None:
    world.job.optimizer_s = 0.008
    world.request(steps=4)
    world.tick()
    assert world.record.figures == {"usual_step_ms": 100.0, "usual_optimizer_ms": 8.0}


def test_the_optimizer_of_a_usual_step() -> None:
    """Its share of the sums, in steps in which no stacks were sampled: with gradient accumulation most have none."""
    series = Cluster(ranks=3, steps=20).series()
    live = LiveRun(planes=Planes(most_steps=64))
    for each in series:
        live.ring(RingSidecar.from_dict(sidecar_of(each, state="running")), node="0")
    live.rows(taken_of(series, range(20)))
    live.tick()
    pace = LiveJob(live).pace()
    assert pace is not None
    assert pace.optimizer_s is not None
    usual = ~np.any([each.steps["flags"] & FLAG_SAMPLED for each in series], axis=0)
    spent, whole = (
        sum(float(column(each.steps)[usual].sum()) for each in series)
        for column in (lambda steps: steps.phase("optimizer"), lambda steps: steps["wall_ns"])
    )
    assert pace.optimizer_s == pytest.approx(spent / whole * pace.step_s, rel=1e-5)
    assert 0 < pace.optimizer_s < pace.step_s


def test_from_a_request_to_a_verdict(world: World) -> None:
    request = world.request(by="me", steps=4)
    world.tick()
    order = world.order
    # 2.05 s until all have heard of it, 2 for warm-up, and one to spare.
    assert order is not None
    assert (order.id, order.ranks, order.at_step, order.steps, order.most_s) == ("step-124", (1, 2), 124, 4, 60.0)
    assert json.loads(world.desk.ordered())["id"] == "step-124"
    assert world.record.state == "ordered"
    assert (world.record.request, world.record.by) == (request, "me")
    assert world.record.figures == {"usual_step_ms": 100.0}

    world.tick(step=120)
    assert world.record.state == "ordered"
    world.tick(step=121)
    assert world.record.state == "profiling"
    world.tick(step=127)
    assert world.record.state == "delivering"

    world.report(2, first_step=124, last_step=127, start_ms=7.0)
    world.deliver(2)
    world.report(1, first_step=124, last_step=127, size=30)
    world.deliver(1, size=20)
    world.tick()
    assert world.record.state == "delivering"
    assert world.desk.busy
    assert [analysis.begun for analysis in world.analyses] == [False]  # its process loads its modules meanwhile
    world.deliver(1, size=30)
    world.tick()
    assert world.order is None
    assert world.desk.ordered() == b"null"
    record = world.record
    assert record.state == "analyzing"
    assert [(report.rank, report.state) for report in record.reports] == [(1, "delivered"), (2, "delivered")]
    assert (record.size_bytes, record.figures) == (40, {"usual_step_ms": 100.0, "step_ms": 130.5})

    assert [(analysis.folder.name, analysis.begun) for analysis in world.analyses] == [("step-124", True)]
    world.tick()
    assert world.record.state == "analyzing"
    world.analyses[0].ends()
    world.tick()
    assert (world.record.state, world.record.verdict) == ("done", "rank 2 is slow in aten::mm")
    assert not world.desk.analyzing
    assert (world.desk.busy, world.desk.finished) == (False, 1)


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [
        ({"choose": "all"}, (0, 1, 2, 3)),
        ({"choose": "listed", "ranks": (3, 0)}, (0, 3)),
        ({"choose": "worst"}, (1, 2)),
    ],
)
def test_which_ranks_are_captured(world: World, fields: dict[str, Any], ranks: tuple[int, ...]) -> None:
    world.request(**fields)
    world.tick()
    assert world.order is not None
    assert world.order.ranks == ranks


def test_the_rank_of_the_leading_finding_is_the_worst(world: World) -> None:
    world.job.found = [{"kind": "memory_creep", "ranks": [1]}, {"kind": "compute_straggler", "ranks": [3]}]
    world.request()
    world.tick()
    assert world.order is not None
    assert world.order.ranks == (1, 3)  # of 0, 1 and 2, rank 1 has the median work


def test_a_job_of_one_rank_captures_that(world: World) -> None:
    world.job.alive, world.job.work_ms = [True], [40.0]
    world.request()
    world.tick()
    assert world.order is not None
    assert world.order.ranks == (0,)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"choose": "listed", "ranks": (9,)}, "There is no rank 9: the run has the ranks 0 to 3."),
        ({"choose": "listed", "ranks": (0, 1)}, "Rank 1 has ended."),
    ],
)
def test_what_cannot_be_captured_is_refused_with_a_sentence(world: World, fields: dict[str, Any], problem: str) -> None:
    world.job.alive[1] = False
    request = world.request(**fields)
    world.tick()
    assert world.order is None
    assert (world.record.state, world.record.problem, world.record.request) == ("failed", problem, request)


def test_there_is_one_capture_at_a_time(world: World) -> None:
    world.request()
    world.tick()
    first = world.order
    world.request()
    world.tick()
    assert world.order == first
    refused = next(record for record in read_captures(world.run) if record.state == "failed")
    assert refused.problem == "Another capture is in progress: step-124."


def test_a_run_without_steps_has_nothing_to_capture(world: World) -> None:
    world.job.step = -1
    world.request()
    world.tick()
    assert read_captures(world.run) == ()
    world.tick(after_s=121.0)
    assert world.record.problem == "The run has not made two steps yet."
    world.request()
    world.tick()
    world.tick(step=5)
    assert world.order is not None


def test_orders_for_several_nodes_leave_more_time(world: World) -> None:
    world.job.nodes = 2
    world.request()
    world.tick()
    assert world.order is not None
    assert world.order.at_step == 164


def test_long_steps_make_a_short_window(world: World) -> None:
    world.job.step_s = 60.0
    world.request(steps=20)
    world.tick()
    assert world.order is not None
    assert (world.order.steps, world.order.at_step, world.order.most_s) == (3, 104, 1440.0)


def test_a_rank_that_never_answers_is_given_up_and_the_others_are_analyzed(world: World) -> None:
    world.request()
    world.tick()
    world.report(2, first_step=124, last_step=129)
    world.deliver(2)
    world.tick(step=140)
    assert world.record.state == "delivering"
    world.tick(after_s=400.0)
    record = world.record
    assert record.state == "analyzing"
    assert [(report.rank, report.state, report.problem) for report in record.reports] == [
        (1, "failed", "It did not deliver a trace in time."),
        (2, "delivered", ""),
    ]


def test_if_all_ranks_fail_the_capture_does(world: World) -> None:
    world.request()
    world.tick()
    world.report(1, "failed", problem="The script uses torch.profiler itself.")
    world.report(2, "failed", problem="The script uses torch.profiler itself.")
    world.tick()
    assert (world.record.state, world.record.problem) == ("failed", "Rank 1: The script uses torch.profiler itself.")
    assert world.order is None
    assert world.analyses == []


def test_a_trace_that_still_arrives_is_waited_for(world: World) -> None:
    world.request()
    world.tick()
    for rank in (1, 2):
        world.report(rank, size=1000)
    world.deliver(1, size=1000)
    for size in range(100, 900, 100):
        world.deliver(2, size=size)
        world.tick(after_s=59.0)
    assert world.record.state == "delivering"
    world.tick(after_s=61.0)
    assert world.record.reports[1].problem == "It did not deliver a trace in time."


def test_ranks_that_died_are_not_waited_for_long(world: World) -> None:
    world.request()
    world.tick()
    world.job.alive = [True, False, False, True]
    world.tick()
    world.tick(after_s=16.0)
    assert world.record.state == "failed"


def test_the_run_ends_in_the_middle(world: World) -> None:
    world.request()
    world.tick()
    world.report(2, first_step=124, last_step=129)
    world.deliver(2)
    world.desk.conclude()
    assert world.desk.analyzing
    assert world.record.reports[0].problem == "The run ended before its trace was delivered."
    world.tick()
    world.desk.abandon()
    assert world.analyses[0].killed
    assert world.record.state == "failed"
    assert world.record.problem == (
        "The run ended before the analysis; its traces are there, and `stepscope trace` reads them."
    )


@pytest.mark.parametrize("code", [1, -9])
def test_an_analysis_that_fails(world: World, code: int) -> None:
    world.request()
    world.tick()
    for rank in (1, 2):
        world.report(rank)
        world.deliver(rank)
    world.tick()
    world.analyses[0].ends(code)
    world.tick()
    assert world.record.state == "failed"
    assert world.record.problem.startswith(f"The analysis ended with exit code {code}; its traces are there")


def test_an_analysis_that_takes_too_long_is_ended(world: World) -> None:
    world.request()
    world.tick()
    for rank in (1, 2):
        world.report(rank)
        world.deliver(rank)
    world.tick()
    world.tick(after_s=301.0)
    assert world.analyses[0].killed
    assert world.record.problem.startswith("The analysis took longer than 300 s")


def test_a_hub_that_is_started_again_continues(world: World) -> None:
    world.request()
    world.tick()
    order = world.order
    world.order = None
    world.desk = world.begin()
    assert world.order == order
    for rank in (1, 2):
        world.report(rank)
        world.deliver(rank)
    world.tick()
    assert world.record.state == "analyzing"
    world.desk = world.begin()  # again, while the analysis of the first one runs or not
    world.tick()
    assert len(world.analyses) == 2
    world.analyses[1].ends()
    world.tick()
    assert world.record.state == "done"
    assert len(read_captures(world.run)) == 1  # the request was not taken again


def test_old_requests_are_not_for_this_hub(world: World) -> None:
    world.request()
    world.now_s = 400.0
    world.tick()
    assert read_captures(world.run) == ()


def test_requests_may_be_anything(world: World) -> None:
    path = world.run / CAPTURE_REQUESTS
    path.parent.mkdir()
    path.write_text(
        '{"id": 7}\nnot json\n{"id": "a", "wall_ns": 1, "choose": "listed"}\n[]\n{"id":"b","wall_ns":1,"steps":999}\n'
    )
    world.tick()
    assert read_captures(world.run) == ()
    path.unlink()
    path.mkdir()
    world.tick()


def test_what_processes_capture_by_themselves_gets_a_record(world: World) -> None:
    for rank in (0, 3):
        world.deliver(rank, capture="step-20")
        world.report(rank, capture="step-20", reason="baseline", first_step=20, last_step=29)
    world.tick()
    record = world.record
    assert (record.state, record.reason, record.order.ranks) == ("delivering", "baseline", (0, 3))
    assert (record.order.at_step, record.order.steps) == (20, 10)
    world.tick(after_s=16.0)
    assert world.record.state == "analyzing"
    assert [report.state for report in world.record.reports] == ["delivered", "delivered"]
    world.report(1, capture="unknown")  # not ordered by this hub
    world.tick()
    assert len(read_captures(world.run)) == 1


def test_old_traces_are_removed(world: World) -> None:
    world.most_bytes = 100
    world.desk = world.begin()
    for number in range(3):
        world.job.step = 100 + 100 * number
        world.request()
        world.tick()
        for rank in (1, 2):
            world.report(rank, size=40)
            world.deliver(rank, size=40)
        world.tick()
        world.analyses[number].ends()
        world.tick()
    records = read_captures(world.run)
    assert [(record.state, record.size_bytes) for record in records] == [("done", 0), ("done", 0), ("done", 80)]


# -- by itself --------------------------------------------------------------------------------------------------------


def shown(world: World, *episodes: FindingEpisode, times: int = 2) -> None:
    for _ in range(times):
        world.job.evaluations += 1
        world.tick(after_s=2.0, episodes=episodes)


def settle(world: World) -> None:
    world.tick(after_s=1.0)
    world.tick(after_s=31.0)


def test_a_finding_is_captured_once_it_was_shown_twice(world: World) -> None:
    settle(world)
    shown(world, episode(), times=1)
    assert world.order is None
    shown(world, episode(), times=1)
    assert world.order is not None
    assert (world.order.ranks, world.order.reason) == ((1, 3), "finding")
    assert (world.record.finding, world.record.by) == ("compute_straggler 3", "stepscope")


def test_a_finding_about_all_ranks_captures_the_one_that_works_longest(world: World) -> None:
    settle(world)
    shown(world, episode(kind="input_bound", ranks=[0, 1, 2, 3]))
    assert world.order is not None
    assert world.order.ranks == (1, 2)


@pytest.mark.parametrize(
    "finding",
    [
        episode(kind="memory_creep"),
        episode(severity="info"),
        episode(cost={"share": 0.04}),
        episode(kind="stall"),
    ],
)
def test_what_is_not_captured(world: World, finding: FindingEpisode) -> None:
    settle(world)
    shown(world, finding, times=8)
    assert world.order is None


@pytest.mark.parametrize("allowed", [False, True])
def test_a_job_on_gpus_is_captured_by_itself_only_if_that_was_chosen(world: World, allowed: bool) -> None:
    world.job.on_gpu, world.on_gpus = True, allowed
    world.desk = world.begin()
    settle(world)
    shown(world, episode(), times=4)
    assert (world.order is not None) == allowed


def test_how_often_is_chosen_also_for_gpus() -> None:
    assert capture_settings("") == CaptureSettings(most_per_hour=4, on_gpus=False)
    assert capture_settings("keep=1GB").on_gpus is False
    assert capture_settings("2") == CaptureSettings(most_per_hour=2, on_gpus=True)
    assert capture_settings("off").most_per_hour == 0
    assert capture_settings("", unloads_cupti=True) == CaptureSettings(most_per_hour=4, on_gpus=True)


def test_not_at_once_and_not_while_compiling(world: World) -> None:
    shown(world, episode(), times=5)
    assert world.order is None
    world.job.compiling = True
    settle(world)
    shown(world, episode(), times=5)
    assert world.order is None
    world.job.compiling = False
    shown(world, episode(), times=1)
    assert world.order is not None


def finish(world: World, number: int) -> None:
    assert world.order is not None
    for rank in world.order.ranks:
        world.report(rank)
        world.deliver(rank)
    world.tick()
    world.analyses[number].ends()
    world.tick()


def test_the_same_finding_is_not_captured_again_within_an_hour_unless_it_is_another_rank(world: World) -> None:
    settle(world)
    shown(world, episode())
    finish(world, 0)
    shown(world, episode(), episode(severity="critical"), times=4)
    assert world.order is None
    shown(world, episode(2), times=4)  # it came back
    assert world.order is None
    shown(world, episode(3, ranks=[0]), times=2)
    assert world.order is not None
    assert 0 in world.order.ranks
    finish(world, 1)
    world.now_s += 3600.0
    shown(world, episode(2), times=2)
    assert world.order is not None


def test_at_most_so_many_an_hour(world: World) -> None:
    world.most_per_hour = 1
    world.desk = world.begin()
    settle(world)
    shown(world, episode())
    finish(world, 0)
    shown(world, episode(2, ranks=[0]), times=4)
    assert world.order is None
    world.desk = world.begin()  # a hub that is started again remembers it
    settle(world)
    shown(world, episode(2, ranks=[0]), times=4)
    assert world.order is None
    world.most_per_hour = 0
    world.desk = world.begin()
    world.now_s += 7200.0
    settle(world)
    shown(world, episode(2, ranks=[0]), times=4)
    assert world.order is None
