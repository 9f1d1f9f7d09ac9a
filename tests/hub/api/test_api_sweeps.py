"""The sweeps of a hub: which folders they are in, what is listed, and files that nobody should trust."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster
from made_sweeps import variant, write_sweep

from stepscope.comparison.sweep import sweep_page
from stepscope.hub.api.auth import Readers
from stepscope.hub.app import make_app
from stepscope.hub.runs import Runs
from stepscope.store.user_runs import run_id
from tests.hub.run_parts import READER, Hub, record


@pytest.fixture
def hub_of(start_hub: Callable[..., Hub]) -> Callable[[Runs], Hub]:
    return lambda runs: start_hub(lambda: make_app(runs, Readers(READER)))


def changed(folder: Path, wall_s: int) -> None:
    os.utime(folder / "result.json", (wall_s, wall_s))


def ids(hub: Hub) -> list[str]:
    return [row["id"] for row in hub.get("/api/v1/sweeps").json["sweeps"]]


def test_sweeps_next_to_the_runs_are_listed_newest_first(tmp_path: Path, hub_of: Callable[[Runs], Hub]) -> None:
    document = write_sweep(tmp_path / "sweeps/fsdp2")
    write_sweep(tmp_path / "sweeps/older", [variant("a", [10.0], 100), variant("b", [], None)], rounds=2)
    changed(tmp_path / "sweeps/fsdp2", 1_800_000_000)
    changed(tmp_path / "sweeps/older", 1_700_000_000)
    (tmp_path / "sweeps/begun").mkdir()
    (tmp_path / "sweeps/begun/sweep.json").write_text("{}")
    (tmp_path / "sweeps/of-another-tool").mkdir()
    (tmp_path / "sweeps/of-another-tool/result.json").write_text("{}")
    (tmp_path / "result.json").write_text("{}")  # of the user's own script, next to runs/
    (tmp_path / "runs").mkdir()
    hub = hub_of(Runs.of_folder(tmp_path / "runs"))
    first, second = hub.get("/api/v1/sweeps").json["sweeps"]
    page = sweep_page(document)
    assert first == {
        "id": "fsdp2",
        "folder": None,
        "changed_wall_ns": 1_800_000_000 * 10**9,
        "name": "fsdp2",
        "problem": None,
        "title": page["verdict"]["title"],
        "variants": 6,
        "failed": 1,
        "complete": True,
    }
    assert (second["id"], second["complete"], second["failed"]) == ("older", False, 0)
    said = hub.get("/api/v1/sweeps/fsdp2").json
    assert said == json.loads(json.dumps(page))
    assert hub.get("/api/v1/sweeps/none").status == 404
    assert hub.get("/api/v1/sweeps/..%2Fsweeps%2Ffsdp2").status == 404
    assert hub.get("/api/v1/sweeps", token=None).status == 401


def test_from_the_runs_of_a_sweep_its_points_lead_to_them(tmp_path: Path, hub_of: Callable[[Runs], Hub]) -> None:
    write_sweep(tmp_path / "fsdp2")
    record(tmp_path / "fsdp2/runs", "fast-3", Cluster(ranks=1, steps=20).run())
    hub = hub_of(Runs.of_folder(tmp_path / "fsdp2/runs"))
    assert ids(hub) == ["fsdp2"]
    points = hub.get("/api/v1/sweeps/fsdp2").json["parts"][0]["points"]
    assert {point["name"]: point["run"] for point in points}["fast"] == "fast-3"
    assert hub.get("/api/v1/runs/fast-3").status == 200


def test_of_several_folders_each_sweep_is_listed_once(tmp_path: Path, hub_of: Callable[[Runs], Hub]) -> None:
    """The folder next to it and its own runs both lead to a sweep; two projects may have one of the same name."""
    for project in ("a", "b"):
        write_sweep(tmp_path / project / "sweeps/fsdp2")
        changed(tmp_path / project / "sweeps/fsdp2", 1_700_000_000 + ord(project))
    folders = [tmp_path / "a/runs", tmp_path / "a/sweeps/fsdp2/runs", tmp_path / "b/runs"]
    for folder in folders:
        folder.mkdir()
    hub = hub_of(Runs.of_user(lambda: {run_id(folder / "x").partition("~")[2]: folder for folder in folders}))
    listed = hub.get("/api/v1/sweeps").json["sweeps"]
    places = [tmp_path / "b/sweeps/fsdp2", tmp_path / "a/sweeps/fsdp2"]
    assert [(row["id"], row["folder"]) for row in listed] == [(run_id(place), str(place.parent)) for place in places]
    points = hub.get(f"/api/v1/sweeps/{listed[1]['id']}").json["parts"][0]["points"]
    assert points[0]["run"] == run_id(folders[1] / "small-3")
    points = hub.get(f"/api/v1/sweeps/{listed[0]['id']}").json["parts"][0]["points"]
    assert points[0]["run"] is None, "this hub does not serve these runs"


def test_the_hub_of_one_run_shows_no_sweeps(tmp_path: Path, hub_of: Callable[[Runs], Hub]) -> None:
    write_sweep(tmp_path / "sweeps/fsdp2")
    record(tmp_path / "runs", "only", Cluster(ranks=1, steps=20).run())
    assert ids(hub_of(Runs.of_folder(tmp_path / "runs/only"))) == []


def edited(**change: Any) -> Callable[[dict[str, Any]], Any]:
    """``variant_…``: of the first variant."""

    def edit(document: dict[str, Any]) -> Any:
        row: Mapping[str, Any] = {
            name.removeprefix("variant_"): value for name, value in change.items() if name.startswith("variant_")
        }
        rows = [{**document["variants"][0], **row}, *document["variants"][1:]]
        return {**document, "variants": rows, **{name: change[name] for name in change if "variant_" not in name}}

    return edit


@pytest.mark.few(7)
@pytest.mark.parametrize(
    "damage",
    [
        lambda _: [],
        lambda _: {"schema": 1},
        edited(schema=2),
        edited(kind="comparison"),
        edited(name=""),
        edited(name="x" * 5000),
        edited(unit="<b>"),
        edited(front=["fast", "oom"]),
        edited(front=[]),
        edited(variants=[]),
        edited(variant_speed=0),
        edited(variant_speed=-1.0),
        edited(variant_speed=None),
        edited(variant_speed_interval=[1.0]),
        edited(variant_speed_interval=[0.0, 1.0]),
        edited(variant_memory="much"),
        edited(variant_memory=None),
        edited(variant_front="everywhere"),
        edited(variant_settings=[]),
        edited(variant_variant="small"),
        edited(confidence=2),
    ],
)
def test_a_damaged_result_is_listed_and_cannot_be_opened(
    tmp_path: Path, hub_of: Callable[[Runs], Hub], damage: Callable[[dict[str, Any]], Any]
) -> None:
    folder = tmp_path / "sweeps/fsdp2"
    document = write_sweep(folder)
    (folder / "result.json").write_text(json.dumps(damage(document)))
    (tmp_path / "runs").mkdir()
    hub = hub_of(Runs.of_folder(tmp_path / "runs"))
    (row,) = hub.get("/api/v1/sweeps").json["sweeps"]
    assert (row["name"], row["problem"]) == ("fsdp2", "its result cannot be read")
    assert hub.get("/api/v1/sweeps/fsdp2").status == 409


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"name": NaN}', "\x00"])
def test_what_is_not_json_is_damaged_as_well(tmp_path: Path, hub_of: Callable[[Runs], Hub], text: str) -> None:
    write_sweep(tmp_path / "sweeps/fsdp2")
    (tmp_path / "sweeps/fsdp2/result.json").write_text(text)
    (tmp_path / "runs").mkdir()
    hub = hub_of(Runs.of_folder(tmp_path / "runs"))
    assert [row["problem"] for row in hub.get("/api/v1/sweeps").json["sweeps"]] == ["its result cannot be read"]
