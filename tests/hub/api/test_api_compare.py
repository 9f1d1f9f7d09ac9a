"""Runs compared by the hub: what `stepscope compare` says, in columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster, slow_at

from stepscope.hub.api import compare
from stepscope.hub.api.auth import Readers
from stepscope.hub.app import make_app
from stepscope.hub.runs import Runs
from tests.hub.run_parts import READER, Hub, record

STEPS = 300


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """``base``; ``again`` is the same with other noise; in ``slow`` rank 1 takes longer; ``short`` has few steps."""
    root: Path = tmp_path_factory.mktemp("compared") / "runs"
    record(root, "base", Cluster(ranks=2, steps=STEPS).run())
    record(root, "again", Cluster(ranks=2, steps=STEPS, seed=7).run())
    record(root, "slow", Cluster(ranks=2, steps=STEPS, faults=(slow_at(1, "forward", 30.0),)).run())
    record(root, "short", Cluster(ranks=2, steps=2).run())
    for name in ("device", "device-slow"):
        faults = (slow_at(1, "forward", 30.0),) if name == "device-slow" else ()
        record(root, name, Cluster(ranks=2, steps=STEPS, device_timed=True, faults=faults).run())
    hub = Hub(lambda: make_app(Runs.of_folder(root), Readers(READER)))
    yield hub
    hub.close()


def test_each_run_is_a_column_and_the_first_is_the_baseline(compared: Hub) -> None:
    document = compared.get("/api/v1/compare?runs=base,again,slow").json
    assert [run["id"] for run in document["runs"]] == ["base", "again", "slow"]
    base, repeated, slow = (run["comparison"] for run in document["runs"])
    assert base is None
    assert repeated["look"] in ("healthy", "info")
    assert slow["title"].startswith("slow is ")
    assert "% slower than base." in slow["title"]
    assert slow["cause"] == "Rank 1 takes 29.9 ms longer in forward; the other ranks wait."
    step = document["rows"][0]
    assert (step["section"], step["name"]) == ("Step time", "mean step")
    assert [cell["look"] for cell in step["cells"]] == [None, "alike", "worse"]
    assert step["cells"][0]["change"] is None
    assert "% slower (99% certain)" in step["cells"][2]["change"]
    middle, high = document["rows"][1:3]
    assert [(row["section"], row["name"]) for row in (middle, high)] == [("Step time", "p50"), ("Step time", "p90")]
    assert [cell["look"] for cell in high["cells"]] == [None] * 3
    assert high["cells"][0]["change"] is None
    assert high["cells"][2]["change"].startswith("+")
    (forward,) = (row for row in document["rows"] if (row["section"], row["name"]) == ("Phases", "forward"))
    assert [cell["look"] for cell in forward["cells"]] == [None, "alike", "worse"]
    assert (document["clock"], [run["problem"] for run in document["runs"]]) == ("host", [None] * 3)


def test_findings_are_new_gone_or_kept_with_their_price(compared: Hub) -> None:
    slower = compared.get("/api/v1/compare?runs=base,slow").json["runs"][1]["comparison"]["findings"]
    (new,) = slower["new"]
    assert (new["kind"], new["ranks"], slower["gone"]) == ("compute_straggler", [1], [])
    assert new["price"].endswith("% of the training time")
    faster = compared.get("/api/v1/compare?runs=slow,base").json["runs"][1]["comparison"]["findings"]
    assert [row["kind"] for row in faster["gone"]] == ["compute_straggler"]
    assert faster["new"] == []


def test_the_clock_of_the_devices_is_used_if_all_runs_have_it(compared: Hub) -> None:
    document = compared.get("/api/v1/compare?runs=device,device-slow").json
    assert document["clock"] == "device"
    mixed = compared.get("/api/v1/compare?runs=device,device-slow,base").json
    assert mixed["clock"] == "host"
    before, after, _ = mixed["rows"][0]["cells"]
    assert before["value"] < after["value"]


def test_a_run_that_cannot_be_compared_says_why_and_the_others_are_compared(compared: Hub) -> None:
    document = compared.get("/api/v1/compare?runs=base,short,slow").json
    assert document["runs"][1]["problem"].startswith("cannot tell: short has ")
    assert document["runs"][1]["comparison"] is None
    assert document["rows"][0]["cells"][1] is None
    assert document["runs"][2]["comparison"]["look"] == "warning"
    alone = compared.get("/api/v1/compare?runs=short,base").json
    assert alone["runs"][1]["problem"].startswith("cannot tell: short has ")


@pytest.mark.parametrize("runs", ["", "base", "base,base", ",".join(f"r{n}" for n in range(9))])
def test_two_to_eight_different_runs(compared: Hub, runs: str) -> None:
    assert compared.get(f"/api/v1/compare?runs={runs}").status == 400


def test_runs_that_do_not_exist_are_not_revealed(compared: Hub) -> None:
    for name in ("none", "..", "../runs"):
        assert compared.get(f"/api/v1/compare?runs=base,{name}").status == 404
    assert compared.get("/api/v1/compare?runs=base,slow", token=None).status == 401


def test_a_comparison_is_made_once_until_a_run_changes(
    serve: Any, record_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(paths: Any) -> dict[str, Any]:
        made.append(paths)
        rows = [{"over": True} for _ in paths]
        return {"clock": None, "runs": rows, "rows": [], "settings": []}

    monkeypatch.setattr(compare, "compare_runs", make)
    monkeypatch.setattr(compare, "CHECK_S", 0.0)
    for name in ("one", "two", "a,b"):
        record_run(tmp_path / "runs", name, Cluster(ranks=1, steps=5).run())
    hub = serve(lambda: Runs.of_folder(tmp_path / "runs"))
    for _ in range(3):
        assert hub.get("/api/v1/compare?runs=one,two").status == 200
    assert len(made) == 1
    (tmp_path / "runs" / "two" / "summary.json").write_text("{}")
    hub.get("/api/v1/compare?runs=one,two")
    assert len(made) == 2
    odd = hub.get("/api/v1/compare?runs=one,a%252Cb").json
    assert [run["id"] for run in odd["runs"]] == ["one", "a,b"]
