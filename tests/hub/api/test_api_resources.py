"""Every resource, on runs that are over: exact answers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from stepscope.store.load import open_run

RUN = "/api/v1/runs/demo"


@pytest.fixture
def truth(folder: Path) -> Any:
    """[rank, step] of the demo, straight from its files."""
    run = open_run(folder / "demo")
    wall = np.stack([series.steps["wall_ns"] for series in run.ranks])
    names = [name for name in run.ranks[0].phase_names if name]
    return wall, {name: np.stack([series.steps.phase(name) for series in run.ranks]) for name in names}


def test_runs_are_listed_newest_first(hub: Any) -> None:
    document = hub.get("/api/v1/runs").json
    assert document["schema"] == 1
    assert document["total"] == 3
    assert [run["id"] for run in document["runs"]][1:] == ["plain", "demo"]
    assert {run["status"] for run in document["runs"]} == {"finished"}
    assert "path" not in document["runs"][0]
    assert [run["id"] for run in hub.get("/api/v1/runs?first=2&limit=1").json["runs"]] == ["demo"]


def test_a_run_says_how_it_stands(hub: Any) -> None:
    document = hub.get(RUN).json
    assert (document["id"], document["status"], document["over"], document["step"]) == ("demo", "finished", True, 599)
    assert (document["ranks"], document["live_ranks"], document["states"]) == (8, 0, {"exited": 8})
    assert document["context"]["command"] == ["python", "train.py"]
    assert not document["context"].keys() & {"session", "spool", "launcher"}
    assert document["verdict"]["kind"] == "compute_straggler"
    assert document["verdict"]["ranks"] == [3]
    assert document["verdict"]["price"]


def test_steps_are_quantiles_over_the_ranks(hub: Any, truth: Any) -> None:
    wall, phases = truth
    document = hub.get(f"{RUN}/steps?first=100&last=109&worst=1").json
    assert document["first"] == document["last"] == list(range(100, 110))
    assert document["ranks"] == [8] * 10
    quantiles = np.array(document["ns"]["wall"])
    np.testing.assert_allclose(quantiles[:, 0], wall[:, 100:110].min(axis=0), rtol=1e-6)
    np.testing.assert_allclose(quantiles[:, -1], wall[:, 100:110].max(axis=0), rtol=1e-6)
    forward = np.array(document["ns"]["forward"])[:, -1]
    np.testing.assert_allclose(forward, phases["forward"][:, 100:110].max(axis=0), rtol=1e-6)
    assert [worst[0]["rank"] for worst in document["worst"]] == [3] * 10
    assert document["device_mean_ns"] == {}
    assert document["memory_bytes"]["allocated"] == [100 << 20, None] * 5
    starts = document["start_wall_ns"]
    assert starts == sorted(starts)
    assert 1_700_000_000_000_000_000 < starts[0] < 1_700_000_100_000_000_000


def test_steps_in_bins_hold_all_of_them(hub: Any) -> None:
    document = hub.get(f"{RUN}/steps?bins=10").json
    assert len(document["first"]) <= 10
    assert sum(document["steps"]) == 600
    assert (document["first"][0], document["last"][-1]) == (0, 599)
    assert document["memory_bytes"]["allocated"] == [100 << 20] * len(document["first"])


def test_the_map_has_the_worst_of_each_cell(hub: Any, truth: Any) -> None:
    wall, phases = truth
    work = wall - phases["comm"]
    document = hub.get(f"{RUN}/heat?rank_bins=4&step_bins=3&stat=max").json
    assert (document["first_ranks"], document["last_ranks"]) == ([0, 2, 4, 6], [1, 3, 5, 7])
    assert (document["first_steps"], document["last_steps"]) == ([0, 200, 400], [199, 399, 599])
    assert (document["unit"], document["exact"], document["known_from"]) == ("ns", True, 0)
    expected = work.reshape(4, 2, 3, 200).max(axis=(1, 3))
    np.testing.assert_allclose(document["cells"], expected, rtol=1e-6)
    document = hub.get(f"{RUN}/heat?value=forward&stat=mean&ranks=3-3&first=0&last=9&step_bins=2").json
    expected = phases["forward"][3, :10].reshape(2, 5).mean(axis=1)
    np.testing.assert_allclose(document["cells"], [expected], rtol=1e-5)


def test_the_map_as_bytes_is_the_map(hub: Any) -> None:
    path = f"{RUN}/heat?rank_bins=3&step_bins=7"
    document = hub.get(path).json
    packed = hub.get(path, accept="application/vnd.stepscope.heat")
    assert packed.headers["content-type"] == "application/vnd.stepscope.heat"
    assert (packed.headers["x-stepscope-unit"], packed.headers["x-stepscope-known-from"]) == ("ns", "0")
    magic, version, exact, rows, columns = struct.unpack_from("<4sHHII", packed.body)
    assert (magic, version, exact, rows, columns) == (b"STHM", 1, 1, 3, 7)
    numbers = np.frombuffer(packed.body, "<u4", 2 * (rows + columns), 16)
    edges = document["first_ranks"] + document["last_ranks"] + document["first_steps"] + document["last_steps"]
    assert numbers.tolist() == edges
    cells = np.frombuffer(packed.body, "<f4", rows * columns, 16 + numbers.nbytes).reshape(rows, columns)
    np.testing.assert_allclose(cells, document["cells"], rtol=1e-6)
    assert len(packed.body) == 16 + numbers.nbytes + cells.nbytes


def test_memory_can_be_drawn_where_it_was_sampled(hub: Any) -> None:
    document = hub.get(f"{RUN}/heat?value=allocated&first=0&last=3&ranks=0-1").json
    assert (document["unit"], document["cells"]) == ("bytes", [[100 << 20, None, 100 << 20, None]] * 2)


def test_ranks_are_sorted_and_turned_page_by_page(hub: Any) -> None:
    assert hub.get(f"{RUN}/ranks").json["rank"] == list(range(8))
    longest = hub.get(f"{RUN}/ranks?order=forward&limit=1").json
    assert (longest["rank"], longest["total"]) == ([3], 8)
    assert longest["mean_ns"]["forward"][0] > 30e6
    assert hub.get(f"{RUN}/ranks?start=6").json["rank"] == [6, 7]
    assert hub.get(f"{RUN}/ranks?ranks=2-4").json["rank"] == [2, 3, 4]
    assert hub.get(f"{RUN}/ranks?limit=1").json["host"] == ["node0"]
    assert hub.get(f"{RUN}/ranks?order=nonsense").status == 400


def test_a_rank_in_full(hub: Any, truth: Any) -> None:
    wall, phases = truth
    document = hub.get(f"{RUN}/ranks/3?first=10&last=19").json
    assert document["identity"]["host"] == "node0"
    assert (document["log"], document["error"]) == (None, None)
    assert hub.get(f"{RUN}/ranks/0?bins=1").json["log"] == "logs/rank-0.log"
    assert document["now"]["state"] == "exited"
    assert document["steps"]["first"] == document["steps"]["last"] == list(range(10, 20))
    np.testing.assert_allclose(document["steps"]["wall_ns"], wall[3, 10:20], rtol=1e-6)
    np.testing.assert_allclose(document["steps"]["phase_ns"]["forward"], phases["forward"][3, 10:20], rtol=1e-6)
    assert document["steps"]["memory_bytes"]["allocated"] == [100 << 20, None] * 5
    np.testing.assert_allclose(document["past"]["wall_ns"], wall[3, 10:20], rtol=1e-6)
    binned = hub.get(f"{RUN}/ranks/3?bins=2").json["steps"]
    assert (binned["first"], binned["last"]) == ([0, 300], [299, 599])
    np.testing.assert_allclose(binned["wall_ns"], wall[3].reshape(2, 300).mean(axis=1), rtol=1e-5)
    for nobody in ("8", "-1", "x", "9" * 30, "1.5"):
        assert hub.get(f"{RUN}/ranks/{nobody}").status == 404


def test_findings_hangs_summary_collectives(hub: Any) -> None:
    found = hub.get(f"{RUN}/findings").json
    assert found["live"] is False
    assert found["verdict"]["title"] == found["findings"][0]["title"]
    assert found["findings"][0]["cost"]["if_fixed"]["speedup"] > 1.2
    assert hub.get(f"{RUN}/hangs").json["hangs"] == []
    hangs = hub.get("/api/v1/runs/plain/hangs").json
    assert [(hang["kind"], hang["file"]) for hang in hangs["hangs"]] == [
        ("hang_missing_collective", "hangs/node0-1.json")
    ]
    assert hangs["hangs"][0]["stacks"][0]["threads"][0]["frames"][0]["line"] == 41
    summary = hub.get(f"{RUN}/summary").json["summary"]
    assert found["verdict"] == {**summary["verdict"], "look": "critical"}
    text = found["findings"][0]["text"]
    assert text["facts"][:2] == ["A rank computes more slowly", "rank 3"]
    assert (text["look"], text["price"][0]) == ("critical", summary["verdict"]["price"].partition(" (")[0])
    assert summary["steps"]["total"] == 600
    assert hub.get(f"{RUN}/collectives").json == {
        "schema": 1,
        "measured": None,
        "measured_text": "",
        "groups": [],
        "groups_left_out": 0,
    }


def test_events_are_numbered_and_gone_on_from(hub: Any) -> None:
    document = hub.get(f"{RUN}/events?limit=2").json
    assert [event["message"] for event in document["events"]] == ["number 0", "number 1"]
    assert (document["total"], document["next"]) == (5, 2)
    rest = hub.get(f"{RUN}/events?after=2").json
    assert [event["number"] for event in rest["events"]] == [3, 4, 5]
    assert hub.get(f"{RUN}/events?after=5").json == {"schema": 1, "total": 5, "next": 5, "events": []}
    assert hub.get(f"{RUN}/events?event=note").json["events"] == []


def test_samples_are_curves(hub: Any) -> None:
    document = hub.get(f"{RUN}/samples?kind=host&fields=cpu_percent,throttle_reasons&bins=4").json
    assert [(row["node"], row["host"]) for row in document["series"]] == [("node0", "node0"), ("node1", "node1")]
    assert document["series"][0]["values"] == {"cpu_percent": [40.0] * 4}
    assert len(document["wall_ns"]) == 4
    document = hub.get(f"{RUN}/samples?kind=process&nodes=node1&fields=rss&stat=max&bins=1&limit=3").json
    assert [(row["rank"], row["values"]["rss"]) for row in document["series"]] == [
        (rank, [400.0 * (1 << 20)]) for rank in (4, 5, 6)
    ]
    assert document["left_out"] == 1
    first = document["wall_ns"][0]
    later = hub.get(f"{RUN}/samples?first_ns={first + 10**9}&last_ns={first + 2 * 10**9}&bins=4096").json
    assert len([v for v in later["series"][0]["values"]["cpu_percent"] if v is not None]) == 3
    assert hub.get(f"{RUN}/samples?kind=gpu").json["series"] == []
    assert hub.get(f"{RUN}/stacks?rank=3").json["stacks"][0]["frames"][0]["function"] == "main"
    assert hub.get(f"{RUN}/stacks?rank=0").json["stacks"] == []


def test_nodes_have_their_ranks_and_last_figures(hub: Any) -> None:
    document = hub.get(f"{RUN}/nodes").json
    assert [(node["node"], node["ranks"], node["live_ranks"]) for node in document["nodes"]] == [
        ("node0", 4, 0),
        ("node1", 4, 0),
    ]
    assert [node["rank_spans"] for node in document["nodes"]] == [[[0, 3]], [[4, 7]]]
    assert document["nodes"][0]["sample"]["cpu_percent"] == 40.0


def test_a_run_that_was_never_sealed_answers_the_same(hub: Any) -> None:
    document = hub.get("/api/v1/runs/plain").json
    assert (document["status"], document["step"], document["ranks"]) == ("finished", 39, 2)
    assert sum(hub.get("/api/v1/runs/plain/steps").json["steps"]) == 40


def test_hostile_names_are_data(hub: Any, folder: Path) -> None:
    names = [run["id"] for run in hub.get("/api/v1/runs").json["runs"]]
    hostile = next(name for name in names if "<" in name)
    answer = hub.get(f"/api/v1/runs/{quote(hostile, safe='')}")
    assert (answer.status, answer.json["id"]) == (200, hostile)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "name",
    [
        "nobody",
        "..",
        ".",
        "%2e%2e",
        "..%2fdemo",
        "demo%00",
        "demo%2f..",
        "%ff",
        "a" * 300,
        "%0a",
        "demo%5c..",
        "-",
        "~",
    ],
)
def test_a_run_that_is_none_is_404(hub: Any, name: str) -> None:
    for rest in ("", "/steps", "/files", "/stream"):
        answer = hub.get(f"/api/v1/runs/{name}{rest}")
        assert answer.status == 404
        assert answer.json.keys() == {"schema", "error"}
