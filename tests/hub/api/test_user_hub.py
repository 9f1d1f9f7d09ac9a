"""A hub of all runs of a user: several folders, runs of the same name, folders that appear later, the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fakes.cluster import Cluster

from stepscope.hub.api.auth import Readers, ReaderTokens, run_scope
from stepscope.hub.app import make_app
from stepscope.hub.runs import Runs
from stepscope.page.assets import is_built
from stepscope.store.user_runs import add_folder, known_folders, run_id
from tests.hub.run_parts import HOSTILE, Hub


@pytest.fixture
def user(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def named(user: dict[str, str], record_run: Any, tmp_path: Path) -> Callable[..., Path]:
    """``named("one", "night", steps=5)``: a run in a folder that the registry knows."""

    def make(folder: str, name: str, *, steps: int) -> Path:
        run_dir: Path = record_run(tmp_path / folder, name, Cluster(ranks=1, steps=steps).run())
        return add_folder(run_dir.parent, user) / run_dir.name

    return make


def test_runs_of_all_folders_and_those_that_appear_later(
    serve: Any, named: Callable[..., Path], user: dict[str, str]
) -> None:
    first, two = named("one", "night", steps=5), named("two", "night", steps=9)
    hub = serve(lambda: Runs.of_user(lambda: known_folders(user)))
    listed = {row["id"]: row for row in hub.get("/api/v1/runs").json["runs"]}
    assert {(row["name"], row["folder"]) for row in listed.values()} == {
        ("night", str(first.parent)),
        ("night", str(two.parent)),
    }
    for path, steps in ((first, 5), (two, 9)):
        about = hub.get(f"/api/v1/runs/{run_id(path)}").json
        assert (about["label"], about["newest_step"], about["id"]) == ("night", steps - 1, run_id(path))
        assert run_id(path) in listed
    assert hub.get("/api/v1/runs/night").status == 404
    assert hub.get(f"/api/v1/runs/{run_id(first.parent / 'none')}").status == 404
    assert hub.get(f"/api/v1/runs/{run_id(Path('/elsewhere/night'))}").status == 404
    later = named("three", HOSTILE, steps=3)
    assert hub.get(f"/api/v1/runs/{quote(run_id(later))}").json["newest_step"] == 2
    assert hub.get("/api/v1/runs").json["total"] == 3


def test_a_token_for_one_run_does_not_open_another_of_that_name(
    named: Callable[..., Path], user: dict[str, str], tmp_path: Path
) -> None:
    first, two = named("one", "night", steps=5), named("two", "night", steps=5)
    tokens = ReaderTokens(tmp_path / "tokens.json")
    by_name, by_id = (
        tokens.create(scope, run_scope(scope), now_s=0.0, seconds=1e12) for scope in ("night", run_id(first))
    )
    hub = Hub(lambda: make_app(Runs.of_user(lambda: known_folders(user)), Readers("token", named=tokens)))
    try:
        for path in (first, two):
            assert hub.get(f"/api/v1/runs/{run_id(path)}", token=by_name).status == 403
        assert hub.get("/api/v1/runs", token=by_name).json["runs"] == []
        assert hub.get(f"/api/v1/runs/{run_id(first)}", token=by_id).status == 200
        assert hub.get(f"/api/v1/runs/{run_id(two)}", token=by_id).status == 403
        assert [row["id"] for row in hub.get("/api/v1/runs", token=by_id).json["runs"]] == [run_id(first)]
    finally:
        hub.close()


def test_metrics_of_two_runs_of_one_name_are_two_series(
    serve: Any, named: Callable[..., Path], user: dict[str, str]
) -> None:
    paths = named("one", "night", steps=5), named("two", "night", steps=5)
    hub = serve(lambda: Runs.of_user(lambda: known_folders(user)))
    for path in paths:
        hub.get(f"/api/v1/runs/{run_id(path)}")
    text = hub.get("/metrics").body.decode()
    for path in paths:
        assert f'stepscope_run_step{{run="{run_id(path)}"}} 4' in text


@pytest.mark.skipif(not is_built(), reason="the page is not built")
def test_a_report_is_a_download_with_the_data_of_the_run(hub: Hub, serve: Any, begun: Any) -> None:
    answer = hub.get(f"/api/v1/runs/{quote(HOSTILE)}/report.html")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    named = quote(f"{HOSTILE}.html", safe="")
    assert answer.headers["content-disposition"] == f"attachment; filename*=UTF-8''{named}"
    assert b'id="stepscope-data"' in answer.body
    assert hub.get(f"/api/v1/runs/{quote(HOSTILE)}/report.html", token=None).status == 401
    assert hub.get("/api/v1/runs/none/report.html").status == 404
    cluster = Cluster(ranks=2, steps=20)
    run_dir, append = begun(cluster)
    for series in cluster.series():
        append(run_dir, series, 0, 10)
    growing = serve(lambda: Runs.of_folder(run_dir.parent))
    assert growing.get("/api/v1/runs/growing/report.html").status == 200


def test_a_hub_that_ends_with_its_run_says_how_to_show_it_again(serve: Any, record_run: Any, tmp_path: Path) -> None:
    from stepscope.hub.live.live_run import LiveRun

    run_dir = record_run(tmp_path / "my runs", "night", Cluster(ranks=1, steps=5).run())
    own = serve(lambda: Runs.of_live(run_dir, LiveRun(name="night", run_dir=run_dir)))
    assert own.get("/api/v1/runs/night").json["reopen"] == f"stepscope serve '{run_dir}' --open"
    kept = serve(lambda: Runs.of_folder(run_dir.parent))
    assert json.loads(kept.get("/api/v1/runs/night").body)["reopen"] is None
