"""Incidents through the API: the list, one of them, as Markdown, for tokens of one run, and in report.html."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster, slow_at
from page_files import data_in

from stepscope.alerts.incident_file import append_incident
from stepscope.alerts.model import Incident
from stepscope.hub.api.auth import Readers, ReaderTokens, run_scope
from stepscope.hub.app import make_app, write_copy
from stepscope.hub.runs import Runs
from stepscope.records.redaction import REDACTED
from stepscope.reports import summarize
from stepscope.store.documents import save_summary
from tests.hub.run_parts import READER, Hub, record

SLOW = Cluster(ranks=4, steps=200, faults=(slow_at(2, "forward", 30.0, range(100, 200)),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``night`` has a recorded incident, ``day`` only its final findings, ``fine`` neither."""
    folder = tmp_path_factory.mktemp("incidents") / "runs"
    for name, cluster in (("day", SLOW), ("night", SLOW), ("fine", Cluster(ranks=2, steps=40))):
        run = cluster.run()
        path = record(folder, name, run)
        save_summary(path, summarize(run), "")
    wall_ns = SLOW.run().ranks[0].anchor_wall_ns
    incident = Incident(
        number=1, topic="speed", state="open", kind="compute_straggler", severity="critical", title="Rank 2 is slow.",
        ranks=(2,), hosts=("node0",), since_step=100, since_wall_ns=wall_ns, opened_wall_ns=wall_ns + 10**9,
    )  # fmt: skip
    append_incident(folder / "night", incident)
    (folder / "night" / "logs").mkdir(exist_ok=True)
    (folder / "night" / "logs" / "rank-2.log").write_text("reading shard 7\n")
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> ReaderTokens:
    return ReaderTokens(tmp_path_factory.mktemp("tokens") / "tokens.json")


@pytest.fixture(scope="module")
def hub(folder: Path, tokens: ReaderTokens) -> Iterator[Hub]:
    opened = Hub(lambda: make_app(Runs.of_folder(folder), Readers(READER, named=tokens), changes=True))
    yield opened
    opened.close()


def test_the_list_says_where_the_incidents_come_from(hub: Hub) -> None:
    recorded = hub.get("/api/v1/runs/night/incidents").json
    assert [(row["number"], row["title"], row["state"]) for row in recorded["incidents"]] == [
        (1, "Rank 2 is slow.", "open")
    ]
    assert (recorded["made_from"], recorded["notice"], recorded["may"]) == ("incidents.jsonl", "", [])
    made = hub.get("/api/v1/runs/day/incidents").json
    assert [(row["kind"], row["state_text"]) for row in made["incidents"]] == [("compute_straggler", "over")]
    assert made["made_from"] == "summary.json" and "final findings" in made["notice"]
    assert hub.get("/api/v1/runs/fine/incidents").json["incidents"] == []


def test_one_incident_with_what_other_runs_show(hub: Hub) -> None:
    document = hub.get("/api/v1/runs/night/incidents/1").json
    assert (document["incident"]["title"], document["onset"]["step"], document["schema"]) == ("Rank 2 is slow.", 100, 1)
    assert document["logs"]["pieces"][0]["lines"] == ["reading shard 7"]
    assert [chart["title"] for chart in document["samples"]["charts"]] == ["work of a step, without waiting"]
    text = hub.get("/api/v1/runs/night/incidents/1?form=markdown").json["markdown"]
    assert text.startswith("# ✖ Rank 2 is slow.\n")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("night/incidents/2", 404),
        ("night/incidents/0", 404),
        ("night/incidents/x", 400),
        ("night/incidents/1?form=x", 400),
        ("gone/incidents/1", 404),
    ],
)
def test_wrong_requests(hub: Hub, path: str, status: int) -> None:
    assert hub.get(f"/api/v1/runs/{path}").status == status


def test_a_token_for_one_run_does_not_show_others(hub: Hub, tokens: ReaderTokens) -> None:
    secret = tokens.create("ci", run_scope("night"), now_s=0.0, seconds=1e12)
    headers = {"Authorization": f"Bearer {secret}"}
    document = hub.client.get("/api/v1/runs/night/incidents/1", headers=headers).json()
    assert document["incident"]["number"] == 1
    assert {"changes", "earlier"} & set(document) == set()
    assert {"changes", "earlier"} <= set(hub.get("/api/v1/runs/night/incidents/1").json)
    assert hub.client.get("/api/v1/runs/day/incidents", headers=headers).status_code == 403


def test_the_report_has_the_incidents(hub: Hub) -> None:
    document, _ = data_in(hub.client.get("/api/v1/runs/night/report.html", headers=bearer()).content)
    answers: dict[str, Any] = document["answers"]
    assert answers["incidents"]["incidents"][0]["number"] == 1
    assert answers["incidents/1"]["logs"]["pieces"][0]["lines"] == ["reading shard 7"]
    assert REDACTED not in json.dumps(answers["incidents/1"])


def test_the_report_of_a_token_for_one_run_does_not_show_others(hub: Hub, tokens: ReaderTokens) -> None:
    def shown(headers: dict[str, str]) -> set[str]:
        document, _ = data_in(hub.client.get("/api/v1/runs/night/report.html", headers=headers).content)
        return {"changes", "earlier"} & set(document["answers"]["incidents/1"])

    secret = tokens.create("mail", run_scope("night"), now_s=0.0, seconds=1e12)
    assert shown(bearer()) == {"changes", "earlier"}
    assert shown({"Authorization": f"Bearer {secret}"}) == set()


def test_a_redacted_report_does_not_show_others(folder: Path, tmp_path: Path) -> None:
    write_copy(folder / "night", tmp_path / "sent.html", redact=True)
    document, _ = data_in((tmp_path / "sent.html").read_bytes())
    assert document["answers"]["incidents/1"]["incident"]["number"] == 1
    assert {"changes", "earlier"} & set(document["answers"]["incidents/1"]) == set()


def test_other_runs_are_not_read_again_for_each_step_of_an_active_run(folder: Path, tmp_path: Path) -> None:
    runs = Path(shutil.copytree(folder, tmp_path / "runs"))
    hub = Hub(lambda: make_app(Runs.of_folder(runs), Readers(READER), changes=True))
    try:
        before = hub.get("/api/v1/runs/night/incidents/1").json
        shutil.rmtree(runs / "day")
        with (runs / "night" / "incidents.jsonl").open("a") as file:
            file.write("\n")  # the run has changed and is loaded again
        after = hub.get("/api/v1/runs/night/incidents/1").json
    finally:
        hub.close()
    assert before["earlier"]["incidents"][0]["run"] == "day"
    assert (after["earlier"], after["changes"]) == (before["earlier"], before["changes"])


def bearer() -> dict[str, str]:
    return {"Authorization": f"Bearer {READER}"}
