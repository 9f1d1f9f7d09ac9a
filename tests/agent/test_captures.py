"""Captures in the agent: orders reach the ranks, and traces the run directory, whatever ends in between."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.agent.captures import CaptureCourier
from stepscope.agent.drain import RingDrain, Rings
from stepscope.agent.journal import Journal
from stepscope.records.capture import CaptureOrder, CaptureReport
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.ring.layout import REQUESTS_WORD
from stepscope.store.captures import trace_sizes
from stepscope.store.create import RunPaths
from stepscope.store.file_io import read_jsonl

ORDER = CaptureOrder(id="step-40", ranks=(1,), at_step=40)
TRACE = b'{"traceEvents": []}' * 1000


class Scene:
    """An agent's courier between a hub and two ranks, whose parts the test plays."""

    def __init__(self, paths: RunPaths, drains: dict[int, RingDrain]) -> None:
        self.paths, self.drains = paths, drains
        self.journal = Journal(paths.run_dir)
        self.now_s = 1000.0
        self.courier = self.begin()

    def begin(self) -> CaptureCourier:
        return CaptureCourier(self.paths.run_dir, self.paths.session, self.journal, now=lambda: self.now_s)

    def order(self, order: CaptureOrder | None) -> None:
        path = self.paths.session / "capture.json"
        if order is None:
            path.unlink()
            return
        path.with_suffix(".new").write_text(json.dumps(encoded(order)))
        path.with_suffix(".new").rename(path)

    def beside(self, rank: int, suffix: str) -> Path:
        return self.drains[rank].reader.path.with_suffix(suffix)

    def requests(self, rank: int) -> int:
        return int.from_bytes(self.drains[rank].reader.path.read_bytes()[8 * REQUESTS_WORD :][:8], "little")

    def report(self, rank: int, state: str, *, trace: bytes | None = None, **fields: Any) -> None:
        if trace is not None:
            self.beside(rank, ".trace").write_bytes(trace)
        fields = {"id": ORDER.id, "rank": rank, "pid": 1, "state": state, **fields}
        spare = self.beside(rank, ".spare")
        spare.write_text(json.dumps(encoded(CaptureReport(**fields))))
        spare.rename(self.beside(rank, ".captured"))

    def check(self, received: CaptureOrder | None = None) -> None:
        self.courier.check(self.drains.values(), received)

    def events(self) -> list[tuple[str, int, str, str]]:
        """Of ranks, after everything that is on its way has arrived."""
        self.courier.finish(30.0)
        self.journal.flush()
        found = read_jsonl(self.paths.run_dir / "events.jsonl")[0]
        return [
            (event["capture"], event["rank"], event["state"], event["problem"])
            for event in found
            if event["event"] == "capture_rank"
        ]


@pytest.fixture
def scene(stage: Any) -> Iterator[Scene]:
    for rank in (0, 1):
        stage.rank(rank)
    paths: RunPaths = stage.paths
    drains = Rings(paths.run_dir, paths.session).discover()
    yield Scene(paths, {drain.header.identity.rank: drain for drain in drains})
    for drain in drains:
        drain.close()


def test_an_order_reaches_all_ranks_and_a_trace_the_run(scene: Scene) -> None:
    scene.check()
    assert scene.requests(0) == 0
    scene.order(ORDER)
    scene.check()
    scene.check()
    for rank in (0, 1):
        assert scene.requests(rank) == 1
        assert decoded(CaptureOrder, json.loads(scene.beside(rank, ".capture").read_text())) == ORDER
    scene.report(0, "waiting")
    scene.report(1, "profiling")
    scene.check()
    assert scene.events() == []
    scene.report(1, "written", trace=TRACE, first_step=40, last_step=45, trace_bytes=len(TRACE))
    scene.check()
    assert scene.events() == [("step-40", 1, "written", "")]
    (event,) = (event for event in read_jsonl(scene.paths.run_dir / "events.jsonl")[0])
    assert (event["first_step"], event["last_step"], event["trace_bytes"]) == (40, 45, len(TRACE))
    folder = scene.paths.run_dir / "captures" / "step-40"
    assert trace_sizes(scene.paths.run_dir, "step-40") == {"rank-1.pt.trace.json.gz": event["file_bytes"]}
    assert gzip.decompress((folder / "rank-1.pt.trace.json.gz").read_bytes()) == TRACE
    assert [path.name for path in folder.iterdir()] == ["rank-1.pt.trace.json.gz"]
    assert not scene.beside(1, ".trace").exists()
    assert not scene.beside(1, ".captured").exists()


def test_a_rank_that_profiles_keeps_the_job_from_making_progress(scene: Scene) -> None:
    scene.order(ORDER)
    scene.check()
    assert not scene.courier.disturbs
    scene.report(1, "profiling")
    scene.check()
    scene.now_s += 60.0
    assert scene.courier.disturbs
    scene.report(1, "written", trace=TRACE)
    scene.check()
    scene.now_s += 14.0
    assert scene.courier.disturbs  # until its step is over
    scene.now_s += 2.0
    assert not scene.courier.disturbs


def test_a_rank_that_never_stops_profiling_disturbs_for_two_minutes(scene: Scene) -> None:
    scene.order(ORDER)
    scene.check()
    scene.report(1, "profiling")
    scene.check()
    scene.now_s += 119.0
    assert scene.courier.disturbs
    scene.now_s += 2.0
    assert not scene.courier.disturbs


def test_ranks_of_other_nodes_disturb_from_the_order_on(scene: Scene) -> None:
    scene.check(replace(ORDER, ranks=(7,)))
    assert scene.courier.disturbs
    scene.check(None)
    scene.now_s += 16.0
    assert not scene.courier.disturbs


def test_an_order_from_another_node_does_the_same(scene: Scene) -> None:
    scene.check(ORDER)
    scene.check(ORDER)
    assert scene.requests(1) == 1
    scene.check(None)
    assert scene.events() == [("step-40", 1, "failed", "It did not answer before the capture was given up.")]


def test_why_a_rank_failed_is_a_sentence(scene: Scene) -> None:
    scene.order(ORDER)
    scene.check()
    scene.report(1, "failed", problem="the script uses torch's profiler itself")
    scene.check()
    scene.order(None)
    scene.check()
    assert scene.events() == [("step-40", 1, "failed", "The script uses torch's profiler itself.")]


def test_a_rank_that_dies_is_given_up_but_not_what_it_wrote(scene: Scene) -> None:
    scene.order(ORDER)
    scene.check()
    scene.report(1, "written", trace=TRACE)
    scene.courier.ended(scene.drains[1])
    assert scene.events() == [("step-40", 1, "written", "")]
    scene.order(CaptureOrder(id="step-90", ranks=(1,), at_step=90))
    scene.check()
    scene.courier.ended(scene.drains[1])
    scene.courier.ended(scene.drains[1])
    assert scene.events()[1:] == [("step-90", 1, "failed", "The process ended before its trace was written.")]


def test_an_agent_that_is_started_again_asks_nobody_twice(scene: Scene) -> None:
    scene.order(ORDER)
    scene.check()
    scene.courier = scene.begin()
    scene.check()
    assert scene.requests(1) == 1
    scene.report(1, "written", trace=TRACE)
    scene.check()
    assert scene.events() == [("step-40", 1, "written", "")]


def test_what_a_process_captures_by_itself_is_moved_too(scene: Scene) -> None:
    scene.report(0, "written", trace=TRACE, id="step-20", first_step=20)
    scene.check()
    scene.report(1, "written", id="step-20")  # not profiled: no trace
    scene.check()
    assert scene.events() == [("step-20", 0, "written", "")]
    (event,) = read_jsonl(scene.paths.run_dir / "events.jsonl")[0]
    assert event["reason"] == "schedule"


def test_a_disk_that_is_full_costs_the_trace_and_nothing_else(scene: Scene) -> None:
    scene.order(ORDER)
    scene.check()
    scene.journal.samples_wanted = False
    scene.report(1, "written", trace=TRACE)
    scene.check()
    ((_, _, state, problem),) = scene.events()
    assert (state, "--max-disk" in problem) == ("failed", True)
    assert not scene.beside(1, ".trace").exists()


def test_a_folder_that_cannot_be_written_costs_the_trace(scene: Scene) -> None:
    (scene.paths.run_dir / "captures").write_text("in the way")
    scene.order(ORDER)
    scene.check()
    scene.report(1, "written", trace=TRACE)
    scene.check()
    ((_, _, state, problem),) = scene.events()
    assert state == "failed"
    assert problem.startswith("Its trace could not be written to the run directory: ")


@pytest.mark.parametrize(
    "text",
    ["", "not json", "[" * 100_000, '{"id": "../../x", "ranks": [1], "at_step": 4}', '{"id": 7}', '{"id": "a"}'],
)
def test_files_may_contain_anything(scene: Scene, text: str) -> None:
    (scene.paths.session / "capture.json").write_text(text)
    scene.check()
    assert scene.requests(1) == 0
    scene.order(ORDER)
    scene.check()
    scene.beside(1, ".captured").write_text(text)
    scene.check()
    assert scene.events() == []
    scene.report(1, "written", trace=TRACE, id="../outside")
    scene.check()
    assert scene.events() == []
    assert not (scene.paths.run_dir / "outside").exists()


def test_pipes_and_links_are_not_followed(scene: Scene, tmp_path: Path) -> None:
    os.mkfifo(scene.paths.session / "capture.json")
    scene.check()
    (scene.paths.session / "capture.json").unlink()
    scene.order(ORDER)
    scene.check()
    secret = tmp_path / "secret"
    secret.write_text("secret")
    scene.beside(1, ".trace").symlink_to(secret)
    scene.report(1, "written")
    scene.check()
    ((_, _, state, problem),) = scene.events()
    assert (state, problem.startswith("Its trace cannot be read: ")) == ("failed", True)
    assert trace_sizes(scene.paths.run_dir, "step-40") == {}
    assert secret.read_text() == "secret"
