"""``/api/v1/fleet``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from stepscope.hub.runs import Runs
from stepscope.store.user_runs import add_folder, known_folders, run_id


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_the_fleet_of_a_folder_and_of_all_runs_of_a_user(serve: Any, runs_of_a_year: Path) -> None:
    hub = serve(lambda: Runs.of_folder(runs_of_a_year))
    document = hub.get("/api/v1/fleet?limit=3").json
    (suspect,) = [row for row in document["hosts"] if row["suspect"]]
    assert (suspect["host"], len(suspect["runs"])) == ("gpu-002", 3)
    assert set(suspect["runs"]) <= {row["id"] for row in hub.get("/api/v1/runs?limit=200").json["runs"]}
    assert hub.get("/api/v1/fleet?since_days=1").json["totals"]["runs"] == 0
    assert hub.get("/api/v1/fleet?limit=1000").status == 400
    add_folder(runs_of_a_year, os.environ)
    everything = serve(lambda: Runs.of_user(lambda: known_folders(os.environ)))
    ids = {id_ for row in everything.get("/api/v1/fleet").json["causes"] for id_ in row["runs"]}
    assert ids <= {run_id(runs_of_a_year.resolve() / f"run-{number:05}") for number in range(120)}


def test_the_hub_of_one_run_has_no_fleet(serve: Any, runs_of_a_year: Path) -> None:
    hub = serve(lambda: Runs.of_folder(runs_of_a_year / "run-00000"))
    assert hub.get("/api/v1/fleet").status == 404
