"""Labeling and deleting runs through the API: who may, from where, and what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from alert_messages import incident
from fakes.cluster import Cluster
from shifted_clock import shift_clock

from stepscope.alerts.incident_file import append_incident
from stepscope.alerts.requests import RequestDesk, run_silences
from stepscope.hub.api.auth import ALL, Readers, ReaderTokens
from stepscope.hub.app import make_app
from stepscope.hub.runs import Runs
from stepscope.reports import summarize
from stepscope.store.catalog import read_labels
from stepscope.store.documents import save_summary
from tests.hub.run_parts import READER, Hub, record

BEARER = {"Authorization": f"Bearer {READER}"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changes") / "runs"
    for name in ("night", "day"):
        record(folder, name, Cluster(ranks=2, steps=12).run())
    return folder


Start = Callable[..., Hub]


@pytest.fixture
def start(runs: Path, tokens: ReaderTokens, start_hub: Callable[..., Hub]) -> Start:
    def begin(folder: Path = runs, *, changes: bool = True) -> Hub:
        return start_hub(lambda: make_app(Runs.of_folder(folder), Readers(READER, named=tokens), changes=changes))

    return begin


def label(hub: Hub, run: str, change: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    headers = {**BEARER, **JSON} if headers is None else headers
    return hub.client.post(f"/api/v1/runs/{run}/labels", content=json.dumps(change), headers=headers)


def test_a_run_is_labeled(start: Start, runs: Path) -> None:
    hub = start()
    answer = label(hub, "night", {"name": "Before", "tags": ["bf16"], "note": "slow"})
    assert answer.json() == {"schema": 1, "name": "Before", "tags": ["bf16"], "note": "slow"}
    assert label(hub, "night", {"tags": []}).json() == {"schema": 1, "name": "Before", "tags": [], "note": "slow"}
    assert read_labels(runs / "night").note == "slow"
    (row,) = [row for row in hub.get("/api/v1/runs").json["runs"] if row["id"] == "night"]
    assert (row["name"], row["tags"], row["note"]) == ("Before", [], "slow")
    document = hub.get("/api/v1/runs/night").json
    assert (document["id"], document["name"], document["tags"], document["note"]) == ("night", "Before", [], "slow")


@pytest.mark.parametrize(
    "change", [[], {"tag": ["x"]}, {"tags": "x"}, {"tags": ["a b"]}, {"name": "a\nb"}, "x" * 70_000]
)
def test_a_wrong_change_changes_nothing(start: Start, runs: Path, change: Any) -> None:
    assert label(start(), "night", change).status_code in (400, 413)
    assert not (runs / "night" / "labels.json").exists()


def test_a_run_is_deleted(start: Start, runs: Path) -> None:
    hub = start()
    assert hub.get("/api/v1/runs/night").status == 200
    assert hub.get("/api/v1/runs").json["may"] == ["label", "delete"]
    answer = hub.get("/api/v1/runs/night", method="DELETE")
    assert (answer.status, answer.json) == (200, {"schema": 1, "deleted": "night"})
    assert [path.name for path in runs.iterdir()] == ["day"]
    assert [row["id"] for row in hub.get("/api/v1/runs").json["runs"]] == ["day"]
    assert hub.get("/api/v1/runs/night", method="DELETE").status == 404


@pytest.mark.parametrize("name", ["..", ".", "%2e%2e", "..%2fruns%2fnight", "night%2f..%2fday", ".deleted-1"])
def test_nothing_outside_the_folder_is_deleted(start: Start, runs: Path, name: str) -> None:
    assert start().get(f"/api/v1/runs/{name}", method="DELETE").status in (404, 405)
    assert sorted(path.name for path in runs.iterdir()) == ["day", "night"]


def test_a_run_that_is_in_use_is_not_deleted(start: Start, runs: Path) -> None:
    (runs / "night" / "link").symlink_to("/etc/passwd")
    answer = start().get("/api/v1/runs/night", method="DELETE")
    assert answer.status == 409
    assert "was not deleted: link in it is not a regular file or folder" in answer.json["error"]
    assert (runs / "night" / "run.json").is_file()


def test_a_hub_of_one_run_does_not_delete_it(start: Start, runs: Path) -> None:
    hub = start(runs / "night")
    assert hub.get("/api/v1/runs").json["may"] == ["label"]
    assert hub.get("/api/v1/runs/night", method="DELETE").status == 403
    assert label(hub, "night", {"note": "x"}).status_code == 200
    assert label(hub, "day", {"note": "x"}).status_code == 404


def test_named_tokens_only_read(start: Start, runs: Path, tokens: ReaderTokens) -> None:
    token = tokens.create("anna", ALL, now_s=2_000_000_000, seconds=10_000_000_000)
    hub = start()
    for headers in ({"Authorization": f"Bearer {token}"},):
        assert hub.client.get("/api/v1/runs", headers=headers).json()["may"] == []
        refused = hub.client.delete("/api/v1/runs/night", headers=headers)
        assert (refused.status_code, refused.json()["error"]) == (
            403,
            "you need the role delete for this, or the hub's own token",
        )
        assert label(hub, "night", {"note": "x"}, {**headers, **JSON}).status_code == 403
    session = hub.client.post("/api/v1/session", json={"token": token})
    assert session.status_code == 200
    here = {"Sec-Fetch-Site": "same-origin"}
    assert hub.client.delete("/api/v1/runs/night", headers=here).status_code == 403
    assert (runs / "night" / "run.json").is_file()


def test_nobody_changes_anything_in_a_hub_that_only_reads(start: Start) -> None:
    hub = start(changes=False)
    assert hub.get("/api/v1/runs").json["may"] == []
    assert hub.get("/api/v1/runs/night", method="DELETE").status == 405
    assert label(hub, "night", {"note": "x"}).status_code == 404


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "null"}, 403),
        ({}, 403),
        ({"Origin": "HERE"}, 200),
    ],
)
def test_a_cookie_changes_something_only_from_the_page_itself(
    start: Start, runs: Path, headers: dict[str, str], status: int
) -> None:
    hub = start()
    hub.client.post("/api/v1/session", json={"token": READER})
    sent = {name: hub.url if value == "HERE" else value for name, value in headers.items()}
    assert label(hub, "night", {"note": "x"}, {**JSON, **sent}).status_code == status
    assert hub.client.delete("/api/v1/runs/day", headers=sent).status_code == status
    assert (runs / "day").exists() is (status == 403)


def test_a_form_changes_nothing(start: Start, runs: Path) -> None:
    """A browser sends a form to another site without asking it."""
    hub = start()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert label(hub, "night", {"note": "x"}, {**BEARER, "Content-Type": kind}).status_code == 403
    assert not (runs / "night" / "labels.json").exists()


def test_a_page_that_others_embed_changes_nothing() -> None:
    with pytest.raises(ValueError, match="must not change runs"):
        make_app(Runs.of_folder(Path("runs")), Readers(READER), framed=True, changes=True)


def test_the_history_of_the_runs_like_one(start: Start, runs: Path) -> None:
    for number in range(5):
        data = Cluster(ranks=2, steps=40, seed=number).run()
        save_summary(record(runs, f"more-{number}", data), summarize(data), "")
    hub = start()
    label(hub, "more-3", {"tags": ["x"]})
    document = hub.get("/api/v1/history?like=more-4").json
    assert document["kind"] == "history"
    assert "path" not in document["runs"][0]
    assert sorted(row["run"] for row in document["runs"]) == [f"more-{number}" for number in range(5)]
    assert document["sentences"][0].startswith("No change found in 5 runs")
    assert [row["run"] for row in hub.get("/api/v1/history?like=more-4&tag=x").json["runs"]] == ["more-3"]
    assert hub.get("/api/v1/history?like=none").status == 400
    assert len(hub.get("/api/v1/history?last=2").json["runs"]) <= 2


def test_incidents_are_acknowledged_and_alerts_silenced(start: Start, runs: Path) -> None:
    append_incident(runs / "night", incident())
    hub = start()
    url = "/api/v1/runs/night"

    def post(path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        headers = {**BEARER, **JSON} if headers is None else headers
        return hub.client.post(f"{url}/{path}", content=json.dumps(body), headers=headers)

    assert post("incidents/1/acknowledge", {"by": "anna"}).json() == {"schema": 1, "acknowledged": 1, "by": "anna"}
    desk = RequestDesk(runs / "night", {"HOME": str(runs)})
    assert [(each.incident, each.by) for each in desk.acknowledgments()] == [(1, "anna")]
    assert post("incidents/2/acknowledge", {}).status_code == 404
    silence = post("silences", {"seconds": 3600, "kind": "*_straggler", "why": "new loader"}).json()
    assert silence.pop("schema") == 1
    assert (silence["kind"], silence["why"]) == ("*_straggler", "new loader")
    assert hub.get(f"{url}/silences").json["silences"] == [silence]
    assert [post("silences", body).status_code for body in ({}, {"seconds": -1}, {"seconds": 1e8}, [])] == [400] * 4
    ended = hub.client.delete(f"{url}/silences/{silence['id']}", headers=BEARER)
    assert ended.json() == {"schema": 1, "ended": silence["id"]}
    assert hub.client.delete(f"{url}/silences/{silence['id']}", headers=BEARER).status_code == 404
    assert hub.get(f"{url}/silences").json["silences"] == []


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_silence_is_on_the_clock_of_its_run(start: Start, runs: Path, hours: int) -> None:
    """The time of day was set by two hours while the run was active."""
    hour_ns = 3600 * 10**9
    now_ns = shift_clock(runs / "night", hours * hour_ns)
    hub = start()
    url = "/api/v1/runs/night/silences"
    made = hub.client.post(url, content=json.dumps({"seconds": 3600}), headers={**BEARER, **JSON}).json()
    assert 0 <= made["until_wall_ns"] - now_ns - hour_ns < 600 * 10**9
    assert [each["id"] for each in hub.get(url).json["silences"]] == [made["id"]]


def test_who_may_not_change_a_run_may_not_silence_it(start: Start, runs: Path, tokens: ReaderTokens) -> None:
    append_incident(runs / "night", incident())
    hub = start()
    named = {
        "Authorization": f"Bearer {tokens.create('anna', ALL, now_s=2_000_000_000, seconds=10_000_000_000)}",
        **JSON,
    }
    for path in ("incidents/1/acknowledge", "silences"):
        body = json.dumps({"seconds": 60} if path == "silences" else {})
        assert hub.client.post(f"/api/v1/runs/night/{path}", content=body, headers=named).status_code == 403
    assert run_silences(runs / "night") == []
