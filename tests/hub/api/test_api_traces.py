"""Trace folders and captures over the API: which there are, their views, and files that nobody should trust."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster
from fakes.traces import MadeTrace

from stepscope.hub.api.auth import Readers
from stepscope.hub.app import make_app
from stepscope.hub.runs import Runs
from stepscope.hub.traces.desk import DeskLimits, TraceDesk
from stepscope.records.capture import CaptureOrder, CaptureRecord
from stepscope.store.captures import write_capture
from tests.hub.run_parts import READER, Hub, record

LONGEST_S = 60.0


def made_trace(rank: int, late: float = 0.0) -> MadeTrace:
    trace = MadeTrace(rank=rank, world_size=2)
    for number in range(4):
        at = number * 20_000.0
        trace.step(number, at, 20_000)
        trace.op("aten::mm", at + 10, 50 + late)
        trace.launched("ampere_sgemm_128x64_nn", at=at + 100 + late, start=at + 200 + late, dur=9_000)
    return trace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "served"
    (root / "job").mkdir(parents=True)
    for rank in range(2):
        made_trace(rank, late=400.0 * rank).write(root / "job" / f"rank{rank}.json")
    return root


@pytest.fixture
def hub_of(tmp_path: Path, start_hub: Callable[..., Hub]) -> Callable[..., Hub]:
    def serve(root: Path, **more: Any) -> Hub:
        limits = replace(more.pop("limits", DeskLimits()), nice=0)  # the machine that tests is busy
        desk = TraceDesk(folder=tmp_path / "views", limits=limits, **more)
        return start_hub(lambda: make_app(Runs.of_folder(root), Readers(READER), desk=desk))

    return serve


def done(hub: Hub, path: str) -> dict[str, Any]:
    """The answer once the worker has made it."""
    until_s = time.monotonic() + LONGEST_S
    while True:
        answer: dict[str, Any] = hub.get(path).json
        if answer.get("state", "done") not in ("waiting", "reading"):
            return answer
        assert time.monotonic() < until_s, answer
        time.sleep(0.05)


def ids(hub: Hub) -> list[str]:
    return sorted(row["id"] for row in hub.get("/api/v1/traces").json["traces"])


def test_a_folder_is_listed_and_its_views_are_made(folder: Path, hub_of: Callable[..., Hub]) -> None:
    hub = hub_of(folder)
    (row,) = hub.get("/api/v1/traces").json["traces"]
    assert (row["id"], row["name"], row["files"]) == ("job", "job", 2)
    page = done(hub, "/api/v1/traces/job")
    assert (page["state"], page["kind"], page["name"], page["ranks"]) == ("done", "trace", "job", [0, 1])
    for rank in (0, 1):
        parts = done(hub, f"/api/v1/traces/job/ranks/{rank}")["parts"]
        assert any(part["title"] == f"Tables of rank {rank}" for part in parts)
    difference = done(hub, "/api/v1/traces/job/ranks/1?peer=0")
    assert difference["parts"][0]["items"] == [
        "400 µs more in aten::mm on the host.",
        "400 µs less in Python between operators.",
    ]
    first = done(hub, "/api/v1/traces/job/timeline")["part"]
    other = done(hub, "/api/v1/traces/job/timeline?rank=0")["part"]
    assert (first["form"], first["view"], other["lanes"][0]["rank"]) == ("timeline", "timeline", 0)
    for path, status in (("ranks/7", 404), ("ranks/x", 400), ("ranks/1?peer=7", 404), ("timeline?rank=7", 404)):
        assert hub.get(f"/api/v1/traces/job/{path}").status == status


def test_the_merged_timeline_is_made_once_and_downloaded(folder: Path, hub_of: Callable[..., Hub]) -> None:
    hub = hub_of(folder)
    assert hub.get("/api/v1/traces/job/perfetto.json.gz").status == 409
    made = done(hub, "/api/v1/traces/job/perfetto")
    answer = hub.get("/api/v1/traces/job/perfetto.json.gz")
    assert (made["state"], made["size_bytes"]) == ("done", len(answer.body))
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''job.json.gz"
    events = json.loads(gzip.decompress(answer.body))["traceEvents"]
    assert {event["pid"] for event in events if event.get("name") == "aten::mm"} != set()


def test_a_changed_file_has_new_views(folder: Path, hub_of: Callable[..., Hub]) -> None:
    hub = hub_of(folder)
    assert done(hub, "/api/v1/traces/job")["ranks"] == [0, 1]
    (folder / "job/rank1.json").unlink()
    assert done(hub, "/api/v1/traces/job")["ranks"] == [0]


def test_which_folders_are_listed(folder: Path, hub_of: Callable[..., Hub]) -> None:
    trace = folder / "job/rank0.json"
    for place in ("a/b", "a/b/c", ".hidden", "empty", "other"):
        (folder / place).mkdir(parents=True)
    for place in ("a/b", "a/b/c", ".hidden"):
        shutil.copy(trace, folder / place / "x.json")
    shutil.copy(trace, folder / "at-the-top.json")
    (folder / "other/package.json").write_text('{"name": "x"}')
    (folder / "linked").symlink_to(folder / "job")
    (folder / "other/link.pt.trace.json").symlink_to(trace)
    os.mkfifo(folder / "other/pipe.pt.trace.json")
    record(folder, "run", Cluster(ranks=1, steps=5).run())
    (folder / "run/captures/step-3").mkdir(parents=True)
    shutil.copy(trace, folder / "run/captures/step-3/rank-0.pt.trace.json")
    hub = hub_of(folder)
    assert ids(hub) == ["a~b", "job", f"~{folder.name}"]
    for wanted in ("other", "linked", "run", ".hidden", "a", "..", "%2e%2e", "a~..", "a%2fb", "~"):
        assert hub.get(f"/api/v1/traces/{wanted}").status == 404, wanted


def test_a_capture_of_a_run_has_views(folder: Path, hub_of: Callable[..., Hub]) -> None:
    record(folder, "run", Cluster(ranks=1, steps=5).run())
    capture = folder / "run/captures/step-3"
    capture.mkdir(parents=True)
    for rank in range(2):
        data = gzip.compress((folder / f"job/rank{rank}.json").read_bytes())
        (capture / f"rank-{rank}.pt.trace.json.gz").write_bytes(data)
    shutil.copy(folder / "job/rank0.json", capture / "other.pt.trace.json")
    (folder / "run/captures/linked").symlink_to(folder / "job")
    hub = hub_of(folder)
    assert done(hub, "/api/v1/runs/run/captures/step-3/view")["ranks"] == [0, 1]
    assert done(hub, "/api/v1/runs/run/captures/step-3/view/ranks/1")["rank"] == 1
    assert hub.get("/api/v1/runs/run/captures/step-3/view/baseline").status == 404
    baseline = folder / "run/captures/step-1"
    baseline.mkdir()
    made_trace(1).write(folder / "before.json")
    (baseline / "rank-1.pt.trace.json.gz").write_bytes(gzip.compress((folder / "before.json").read_bytes()))
    order = CaptureOrder(id="step-3", ranks=(0, 1), at_step=3)
    figures = {"baseline": {"id": "step-1", "steps": [1, 2]}, "work_ms": {"0": 5.0, "1": 5.4}}
    found = CaptureRecord(order=order, state="done", requested_wall_ns=5, reason="request", figures=figures)
    write_capture(folder / "run", found)
    since = done(hub, "/api/v1/runs/run/captures/step-3/view/baseline")
    assert (since.get("rank"), since.get("peer")) == (1, 1), since
    assert since["parts"][0]["title"] == "Rank 1 compared with the baseline, in each step"
    assert since["parts"][0]["items"] == [
        "400 µs more in aten::mm on the host.",
        "400 µs less in Python between operators.",
    ]
    hostile = {"baseline": {"id": "../step-1"}, "work_ms": {"x": []}}
    write_capture(folder / "run", replace(found, figures=hostile))
    assert hub.get("/api/v1/runs/run/captures/step-3/view/baseline").status == 404
    for wanted in ("linked", "step-4", "..", "%2e%2e", "a/b"):
        assert hub.get(f"/api/v1/runs/run/captures/{wanted}/view").status == 404


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"traceEvents": [', "job/bad.json"),
        (b"\x1f\x8b\x08\x00", "job/bad.json"),
        (b"", "job/bad.json"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    tmp_path: Path, hub_of: Callable[..., Hub], content: bytes, words: str
) -> None:
    (tmp_path / "served/job").mkdir(parents=True)
    (tmp_path / "served/job/bad.json").write_bytes(content)
    answer = done(hub_of(tmp_path / "served"), "/api/v1/traces/job")
    assert answer["state"] == "failed"
    assert words in answer["problem"]
    assert "\n" not in answer["problem"]


def test_a_worker_that_dies_or_takes_too_long_is_a_failure(
    folder: Path, hub_of: Callable[..., Hub], tmp_path: Path
) -> None:
    dead = hub_of(folder, command=["sh", "-c", "cat >/dev/null; kill -9 $$"])
    assert "out of memory" in done(dead, "/api/v1/traces/job")["problem"]
    slow = hub_of(folder, command=["sleep", "1000"], limits=DeskLimits(worker_s=0.1))
    assert done(slow, "/api/v1/traces/job")["problem"].startswith("given up after")


def test_a_tight_memory_limit_is_a_sentence(folder: Path, hub_of: Callable[..., Hub]) -> None:
    hub = hub_of(folder, limits=DeskLimits(memory_bytes=40 << 20))
    assert done(hub, "/api/v1/traces/job")["state"] == "failed"


def test_old_views_are_removed(folder: Path, hub_of: Callable[..., Hub], tmp_path: Path) -> None:
    for name in ("second", "third"):
        shutil.copytree(folder / "job", folder / name)
    hub = hub_of(folder, limits=DeskLimits(most_views=2))
    for name in ("job", "second", "third"):
        done(hub, f"/api/v1/traces/{name}/timeline")
    assert len(list((tmp_path / "views").iterdir())) == 2
    assert done(hub, "/api/v1/traces/third")["state"] == "done"
