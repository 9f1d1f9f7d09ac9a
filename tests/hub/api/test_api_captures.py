"""Captures through the API: the list, one of them, its traces, and requests for another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.cluster import Cluster

from stepscope.hub.api.auth import ALL, Readers, ReaderTokens
from stepscope.hub.app import make_app
from stepscope.hub.runs import Runs
from stepscope.records.capture import CaptureOrder, CaptureRecord
from stepscope.store.captures import make_capture_folder, trace_name, write_capture
from stepscope.store.documents import HubFile, read_meta, write_hub_file, write_meta
from stepscope.store.paths import CAPTURE_REQUESTS
from tests.hub.run_parts import READER, Hub, record

BEARER = {"Authorization": f"Bearer {READER}"}
JSON = {"Content-Type": "application/json"}
URL = "/api/v1/runs/night/captures"
TRACE = trace_name(2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captures") / "runs"
    record(folder, "night", Cluster(ranks=2, steps=12).run())
    for number in (1, 2):
        order = CaptureOrder(id=f"step-{number}", ranks=(0, 2), at_step=number)
        done = CaptureRecord(
            order=order, state="done", requested_wall_ns=number, reason="request", verdict="slow", files=(TRACE,)
        )
        write_capture(folder / "night", done)
        (make_capture_folder(folder / "night", order.id) / TRACE).write_bytes(bytes(range(200)))
    (folder / "night" / "captures" / "step-2" / "analysis.json").write_text('{"schema": 5, "ranks": []}')
    return folder


Start = Callable[..., Hub]


@pytest.fixture
def start(runs: Path, tokens: ReaderTokens, start_hub: Callable[..., Hub]) -> Start:
    def begin(*, changes: bool = True) -> Hub:
        return start_hub(lambda: make_app(Runs.of_folder(runs), Readers(READER, named=tokens), changes=changes))

    return begin


def test_the_list_and_one_of_them(start: Start) -> None:
    hub = start()
    listed = hub.get(URL).json
    assert [row["id"] for row in listed["captures"]] == ["step-2", "step-1"]
    assert (listed["total"], listed["may"]) == (2, [])  # the run is over
    assert [row["id"] for row in hub.get(f"{URL}?limit=1").json["captures"]] == ["step-2"]
    found = hub.get(f"{URL}/step-2").json
    assert (found["state"], found["verdict"], found["order"]["ranks"]) == ("done", "slow", [0, 2])
    assert found["analysis"] == {"schema": 5, "ranks": []}
    assert hub.get(f"{URL}/step-1").json["analysis"] is None
    for name in ("step-9", "..", "%2e%2e", "requests.jsonl"):
        assert hub.get(f"{URL}/{name}").status == 404


def test_a_trace_is_streamed_whole_or_in_part(start: Start, runs: Path) -> None:
    hub, url = start(), f"{URL}/step-1/files/{TRACE}"

    def get(span: str | None = None) -> httpx.Response:
        return hub.client.get(url, headers=BEARER | ({"Range": span} if span else {}))

    whole = get()
    assert (whole.status_code, whole.content) == (200, bytes(range(200)))
    assert whole.headers["content-type"] == "application/gzip"
    assert "content-encoding" not in whole.headers
    part = get("bytes=10-19")
    assert (part.status_code, part.content) == (206, bytes(range(10, 20)))
    assert part.headers["content-range"] == "bytes 10-19/200"
    assert get("bytes=190-999").content == bytes(range(190, 200))
    assert get("bytes=-5").content == bytes(range(195, 200))
    for wrong in ("bytes=200-", "bytes=9-3", "bytes=-", "lines=1-2", "bytes=-0", "bytes=1-2,4-5"):
        assert get(wrong).status_code == 416
    (runs / "night" / "captures" / "step-1" / trace_name(3)).symlink_to(runs / "night" / "run.json")
    for name in (trace_name(3), trace_name(4), "capture.json", "..%2f..%2frun.json"):
        assert hub.client.get(f"{URL}/step-1/files/{name}", headers=BEARER).status_code == 404


def test_a_capture_is_requested_of_an_active_run_only(start: Start, runs: Path) -> None:
    hub = start()

    def post(body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        return hub.client.post(URL, content=json.dumps(body), headers=headers or {**BEARER, **JSON})

    over = post({})
    assert (over.status_code, over.json()["error"]) == (409, "the run has ended")
    meta = dict(read_meta(runs / "night"))
    meta.pop("end", None)
    write_meta(runs / "night", meta)
    assert post({}).json()["error"] == "the run is recorded without a hub, which orders captures"
    write_hub_file(runs / "night", HubFile(url="http://127.0.0.1:9", token="x"))
    request = post({"ranks": [1, 0], "steps": 3, "memory": True, "by": "anna"}).json()["request"]
    line = json.loads((runs / "night" / CAPTURE_REQUESTS).read_text())
    wanted = {"id": request, "choose": "listed", "ranks": [0, 1], "steps": 3, "memory": True, "by": "anna"}
    assert {name: line[name] for name in wanted} == wanted
    for wrong in ({"steps": 0}, {"steps": "2"}, {"choose": "listed"}, {"rank": 3}, {"ranks": [-1]}, []):
        assert post(wrong).status_code == 400


def test_who_may_not_change_a_run_requests_nothing(start: Start, runs: Path, tokens: ReaderTokens) -> None:
    token = tokens.create("anna", ALL, now_s=2_000_000_000, seconds=10_000_000_000)
    hub = start()
    named = {"Authorization": f"Bearer {token}", **JSON}
    assert hub.client.post(URL, content="{}", headers=named).status_code == 403
    assert not (runs / "night" / CAPTURE_REQUESTS).exists()
