"""Slow hosts, slow links and shared changes in simulated clusters: found, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from example_counts import seeds
from fakes.fleet import BadHost, FleetYear, MadeRun

from stepscope.fleet.columns import Fleet
from stepscope.fleet.document import fleet_document, suspect_hosts

FleetFrom = Callable[[Iterable[MadeRun]], Fleet]


@pytest.fixture(scope="module")
def document(small_year: FleetYear, fleet_from: FleetFrom) -> dict[str, Any]:
    return fleet_document(fleet_from(small_year.runs()), generated_wall_ns=1, limit=5)


def test_the_slow_hosts_are_suspects_and_no_others(document: dict[str, Any]) -> None:
    assert {row["host"] for row in document["hosts"] if row["suspect"]} == {"gpu-007", "gpu-023"}
    assert set(suspect_hosts(document)) == {"gpu-007", "gpu-023"}
    row = next(row for row in document["hosts"] if row["host"] == "gpu-007")
    assert row["phase"] == "forward"
    assert row["slowdown_low_share"] <= row["slowdown_share"] <= row["slowdown_high_share"]
    assert 0.04 < row["slowdown_share"] < 0.10
    assert row["slow_runs"] > 3 * row["expected_slow_runs"]
    assert len(row["runs"]) == 5
    assert row["run_count"] == row["slow_runs"]


def test_the_slow_link_is_found_between_its_two_hosts(document: dict[str, Any]) -> None:
    assert [(row["hosts"], row["kind"]) for row in document["links"]] == [(["gpu-015", "gpu-016"], "slow_link")]
    assert 1.7 < document["links"][0]["exchange_ratio"] < 2.4


def test_the_image_change_is_dated_and_named(document: dict[str, Any]) -> None:
    (row,) = document["changes"]
    assert row["what"][0]["name"] == "image"
    assert (row["what"][0]["before"], row["what"][0]["after"]) == ("train:25.01", "train:25.06")
    day = (row["wall_ns"] - 1_735_689_600_000_000_000) / 86_400e9
    assert 150.5 <= day < 152
    assert (row["direction"], row["phase"]) == ("slower", "forward")


def test_the_throttled_gpu_is_listed_with_its_runs(document: dict[str, Any]) -> None:
    (row,) = document["gpu_events"]
    assert (row["host"], row["gpu_uuid"], row["kind"]) == ("gpu-023", "GPU-gpu-023-0", "throttled")
    assert row["reasons"] == ["hw_thermal_slowdown"]


def test_all_splits_add_up_to_the_whole(document: dict[str, Any]) -> None:
    total = document["totals"]["gpu_hours"]
    assert sum(row["gpu_hours"] for row in document["causes"]) == pytest.approx(total, abs=0.1)
    splits = [document[f"by_{what}"] for what in ("job", "team", "user", "host")]
    for rows in [*splits, document["over_time"]["rows"]]:
        assert sum(row["gpu_hours"] for row in rows) == pytest.approx(total, abs=0.1)
        assert all(sum(row["by_cause"].values()) == pytest.approx(row["gpu_hours"], abs=0.1) for row in rows)
    assert sum(row["run_count"] for row in document["by_team"]) == 2000


@pytest.mark.seeds
def test_a_healthy_cluster_has_no_suspects(small_year: FleetYear, fleet_from: FleetFrom) -> None:
    for seed in seeds(8):
        year = replace(small_year, seed=100 + seed, count=600, bad_hosts=(), bad_links=(), image_changes=())
        document = fleet_document(fleet_from(year.runs()), generated_wall_ns=1)
        assert suspect_hosts(document) == []
        assert document["links"] == []
        assert document["changes"] == []


def test_a_repaired_host_is_not_a_suspect_any_more(small_year: FleetYear, fleet_from: FleetFrom) -> None:
    year = replace(small_year, bad_hosts=(BadHost(host=7, slow=0.10),), bad_links=(), image_changes=())
    begin, day = 1_735_689_600_000_000_000, 86_400_000_000_000
    broken = [made for made in year.runs() if made.meta["created_wall_ns"] < begin + 150 * day]
    healthy = replace(year, bad_hosts=()).runs()
    runs = [*broken, *(made for made in healthy if made.meta["created_wall_ns"] >= begin + 150 * day)]
    document = fleet_document(fleet_from(runs), generated_wall_ns=1)
    row = next(row for row in document["hosts"] if row["host"] == "gpu-007")
    assert row["suspect"] is False
    assert abs((row["repaired_wall_ns"] - begin) / day - 150) < 10
    assert suspect_hosts(document) == []


def made_run(
    number: int, job: str, works_ms: list[float], hosts: list[str], *, exchange_ms: float = 5.0, **about: Any
) -> MadeRun:
    step = max(works_ms) + exchange_ms
    ranks = [
        {"rank": at, "host": host, "device": "cuda", "device_index": 0, "step_ms": step, "comm_ms": step - work}
        for at, (host, work) in enumerate(zip(hosts, works_ms, strict=True))
    ]
    meta = {
        "name": f"run-{number}",
        "created_wall_ns": 10**18 + number * 10**13,
        "command": ["python", *job.split()],
        "host": "a",
        **about,
    }
    parts = {"goodput": {"parts": {"training": 3600.0}}, "step_time": {"mean_ms": step, "p50_ms": step}}
    summary = {"status": "finished", "world_size": len(ranks), "ranks": ranks, **parts}
    return MadeRun(name=meta["name"], meta={**meta, "git": {"commit": ""}}, summary=summary, tags=())


def test_a_place_with_more_work_is_no_fault_of_its_host(fleet_from: FleetFrom) -> None:
    """Rank 0 works more in every run, and the scheduler always puts it on host a."""
    runs = [made_run(at, "train.py", [120.0, 100.0, 101.0, 99.0], ["a", "b", "c", "d"]) for at in range(200)]
    assert suspect_hosts(fleet_document(fleet_from(runs), generated_wall_ns=1)) == []


def test_a_host_that_is_slow_in_every_place_is_a_suspect(fleet_from: FleetFrom) -> None:
    """Twelve runs of one job on three hosts in turn, one of which is slow."""
    orders = [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    runs = [
        made_run(at, "train.py", [115.0 if host == "b" else 100.0 for host in orders[at % 3]], orders[at % 3])
        for at in range(12)
    ]
    document = fleet_document(fleet_from(runs), generated_wall_ns=1)
    assert suspect_hosts(document) == ["b"]
    assert document["hosts"][0]["title"].startswith("b was the slowest host in 5 of its last 5 runs, 13% each")


def test_a_host_that_is_slow_in_different_jobs_is_a_suspect_even_if_each_ran_once(fleet_from: FleetFrom) -> None:
    words = ("red", "blue", "green", "cyan", "pink", "gray", "gold", "lime", "navy", "teal")
    runs = [
        made_run(at, f"{word}.py", [110.0, 100.0, 101.0], ["b", f"x{at}", f"y{at}"]) for at, word in enumerate(words)
    ]
    assert suspect_hosts(fleet_document(fleet_from(runs), generated_wall_ns=1)) == ["b"]


def test_an_allocation_with_a_slow_exchange_is_no_proof_against_its_first_host(fleet_from: FleetFrom) -> None:
    """Twelve runs on a to d, four on e to h behind another switch: the four show the same once, not four times."""
    places = [(list("abcd"), 10.0)] * 12 + [(list("efgh"), 13.0)] * 4
    runs = [
        made_run(at, "train.py", [90.0] * 4, hosts, exchange_ms=took * (1 + at % 3 / 300))
        for at, (hosts, took) in enumerate(places)
    ]
    document = fleet_document(fleet_from(runs), generated_wall_ns=1)
    assert (document["links"], suspect_hosts(document)) == ([], [])


def with_partners(slow: str, partners: list[list[str]]) -> list[MadeRun]:
    """Runs of one job on three hosts; each list of partners once with host ``slow``, and ten times with others."""
    runs = []
    for at, pair in enumerate(partners):
        runs.append(made_run(11 * at, "train.py", [90.0] * 3, [slow, *pair], exchange_ms=20.0))
        runs += [
            made_run(11 * at + 1 + n, "train.py", [90.0] * 3, [f"x{at}-{n}", f"y{at}-{n}", f"z{at}-{n}"])
            for n in range(10)
        ]
    return runs


def test_a_host_whose_network_is_slow_with_every_partner_is_named_alone(fleet_from: FleetFrom) -> None:
    runs = with_partners("b", [[f"p{at}", f"q{at}"] for at in range(6)])
    document = fleet_document(fleet_from(runs), generated_wall_ns=1)
    assert [(row["kind"], row["hosts"], row["slow_runs"]) for row in document["links"]] == [("slow_network", ["b"], 6)]
    assert suspect_hosts(document) == ["b"]


def test_of_two_hosts_that_are_always_together_neither_is_excluded(fleet_from: FleetFrom) -> None:
    runs = with_partners("b", [["c", f"q{at}"] for at in range(6)])
    document = fleet_document(fleet_from(runs), generated_wall_ns=1)
    assert [(row["kind"], row["hosts"]) for row in document["links"]] == [("slow_link", ["b", "c"])]
    assert suspect_hosts(document) == []


def test_a_setting_that_makes_rank_0_work_more_is_no_fault_of_its_host(fleet_from: FleetFrom) -> None:
    """Commands that differ in a number are one job, but their places are compared command by command."""
    runs = [
        made_run(at, f"pretrain.py --save-every {every}", works, hosts)
        for at, (every, works, hosts) in enumerate(
            [(100, [94.5, 90.0, 90.1, 89.9], list("abcd"))] * 10 + [(5000, [90.0, 90.1, 89.9, 90.0], list("efgh"))] * 10
        )
    ]
    document = fleet_document(fleet_from(runs), generated_wall_ns=1)
    assert suspect_hosts(document) == []


def test_a_run_that_had_the_new_driver_early_neither_repeats_nor_dates_the_change(fleet_from: FleetFrom) -> None:
    """Of twelve jobs with two runs a day, all 5% slower since day 30, one ran once with the driver on day 27."""
    day_ns = 86_400_000_000_000
    runs = []
    for day in range(60):
        for job in range(24):
            name, early = f"{'abcdefghijkl'[job % 12]}.py", (day, job) == (27, 3)
            number = len(runs)
            work = (99.75 if day >= 30 else 95.0) * (1 + number * 7919 % 61 / 10_000)
            driver = "550" if day >= 30 or early else "535"
            about = {"created_wall_ns": day * day_ns + job * 3600 * 10**9 + 10**18 // day_ns * day_ns, "driver": driver}
            runs.append(made_run(number, name, [work, work], ["a", "b"], **about))
    (row,) = fleet_document(fleet_from(runs), generated_wall_ns=1)["changes"]
    assert [(each["name"], each["before"], each["after"]) for each in row["what"]] == [("driver", "535", "550")]
    assert (row["wall_ns"] - 10**18 // day_ns * day_ns) // day_ns == 30
    assert row["changed_jobs"] == 12


@pytest.mark.parametrize(
    ("first", "last", "unit", "begins"),
    [
        ("2026-01-30T23:00", "2026-02-01T01:00", "day", ["2026-01-30", "2026-01-31", "2026-02-01"]),
        ("2026-01-01T00:00", "2026-03-01T23:59", "day", ["2026-01-01", "2026-01-02", "2026-03-01"]),
        ("2025-12-31T12:00", "2026-03-02T00:00", "week", ["2025-12-29", "2026-01-05", "2026-03-02"]),
        ("2024-01-31T12:00", "2026-02-28T00:00", "month", ["2024-01-01", "2024-02-01", "2026-02-01"]),
        ("2019-06-01T00:00", "2026-02-28T00:00", "year", ["2019-01-01", "2020-01-01", "2026-01-01"]),
        ("1970-01-01T00:00", "2110-04-01T00:00", "decade", ["1970-01-01", "1980-01-01", "2110-01-01"]),
    ],
)
def test_a_bar_over_time_is_a_unit_of_the_calendar_and_there_are_at_most_sixty(
    first: str, last: str, unit: str, begins: list[str], fleet_from: FleetFrom
) -> None:
    def started(when: str) -> int:
        return int(datetime.fromisoformat(f"{when}+00:00").timestamp()) * 10**9

    runs = [made_run(at, "train.py", [100.0], ["a"]) for at in range(3)]
    for made, when in zip(runs, (first, last, last), strict=True):
        made.meta["created_wall_ns"] = started(when)
    over = fleet_document(fleet_from(runs), generated_wall_ns=1)["over_time"]
    rows = over["rows"]
    assert (over["unit"], len(rows) <= 60) == (unit, True)
    assert [rows[at]["begin_wall_ns"] for at in (0, 1, -1)] == [started(f"{day}T00:00") for day in begins]
    assert [rows[0]["run_count"], rows[-1]["run_count"]] == [1, 2]
    assert sum(row["gpu_hours"] for row in rows) == pytest.approx(3.0)
    assert [row["useful_share"] for row in rows[1:-1]] == [None] * (len(rows) - 2)


def test_sentences_have_the_figures_of_the_document_with_the_rounding_of_the_page(document: dict[str, Any]) -> None:
    totals, (slow, _), (change,) = document["totals"], document["hosts"][:2], document["changes"]
    assert (totals["useful_share"], totals["gpu_hours"], document["causes"][3]["share"]) == (
        0.7806,
        37539.855,
        0.097254,
    )
    assert totals["headline"] == (
        "22% of 37,540 GPU hours were not useful training; most of that: exchange between ranks (9.7%)."
    )
    assert (slow["slowdown_share"], slow["slow_share_without"]) == (0.0651, 0.0681)
    assert slow["title"].endswith(" 6.5% each; runs of these jobs without it had a slow host in 6.8%.")
    assert change["change_share"] == 0.0666
    assert change["title"].startswith("6 of 11 jobs are 6.7% slower since 2025-05-31")


def test_no_runs_make_an_empty_document(fleet_from: FleetFrom) -> None:
    document = fleet_document(fleet_from([]), generated_wall_ns=1)
    assert document["totals"]["headline"] == "0 runs; no hours are known."
    assert (document["hosts"], document["links"], document["changes"], document["by_job"]) == ([], [], [], [])
