"""Why a rank does not run: the cause joins the finding that has its price; none is named that does not explain it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np
import pytest
from example_counts import seeds
from fakes.cluster import Cluster, slow_at
from fakes.samples import with_samples

from stepscope.diagnosis import diagnose
from stepscope.records.finding import Finding

SLOW = Cluster(ranks=4, steps=150, faults=(slow_at(3, "forward", 18.0),))
WORK = {"forward": 30.0, "backward": 50.0, "optimizer": 10.0}
STARVED = Cluster(ranks=4, steps=100, phases_ms=WORK, faults=tuple(slow_at(3, *each) for each in WORK.items()))
Figure = Callable[[int, np.ndarray], Any]


def only(rank: int, value: float, others: float = 0.0) -> Figure:
    return lambda which, seconds: np.full(len(seconds), value if which == rank else others)


def first(cluster: Cluster, process: Mapping[str, Any], host: Mapping[str, Any] | None = None) -> Finding:
    return diagnose(with_samples(cluster, host=host, process=process))[0]


def test_a_rank_that_waits_for_a_core_is_named_with_the_tasks_on_it() -> None:
    found = first(STARVED, {"cpu_wait": only(3, 0.5, 0.01)}, {"procs_running": 9, "cpu_count": 8})
    assert (found.kind, found.ranks) == ("cpu_saturated", (3,))
    waits = "waits 90.5 ms a step for a core (50% of its time, its peers 2%)"
    costs = "all other ranks wait for it, which costs 88.9 ms a step"
    assert found.title == f"Rank 3 {waits}, every step: 9 tasks on 8 cores; {costs}."
    assert {key: found.evidence[key] for key in ("cause", "tasks", "cores")} == {
        "cause": "cores",
        "tasks": 9,
        "cores": 8,
    }


def test_a_rank_that_may_use_few_cores_is_named_with_them() -> None:
    process = {"cpu_wait": only(3, 0.5, 0.01), "processors": only(3, 1, 8)}
    found = first(STARVED, process, {"procs_running": 5, "cpu_count": 8})
    assert ", every step: it may use 1 of 8 cores; " in found.title
    assert found.evidence["processors"] == 1


def test_a_rank_whose_cgroup_has_a_quota_is_named_with_it() -> None:
    process = {
        "cpu_wait": only(3, 0.5, 0.01),
        "cpu_quota": lambda which, seconds: [0.5 if which == 3 else None] * len(seconds),
        "throttled": lambda which, seconds: [0.45 if which == 3 else None] * len(seconds),
    }
    found = first(STARVED, process)
    assert (found.kind, found.ranks, found.evidence["cause"]) == ("cpu_saturated", (3,), "quota")
    assert ", every step: its cgroup is throttled " in found.title
    assert " a step by its quota of 0.5 CPUs; all other ranks wait for it, which" in found.title
    assert len(found.advice) == 1
    assert found.advice[0].startswith("Raise the CPU quota of its cgroup")


def test_a_quota_that_all_ranks_share_does_not_single_one_out() -> None:
    found = first(STARVED, {"cpu_wait": only(3, 0.5, 0.01), "cpu_quota": 4.0, "throttled": 0.3})
    assert found.evidence.get("cause") != "quota"


def test_a_rank_that_reads_swapped_memory_is_named() -> None:
    step_s = 0.057
    faults = 240 / step_s
    process = {"major_faults_ps": only(3, faults), "swapped": only(3, 300 << 20), "disk_wait": only(3, 0.3)}
    found = first(SLOW, process)
    assert (found.kind, found.ranks, found.phase) == ("compute_straggler", (3,), "forward")
    assert found.evidence["cause"] == "swap"
    assert found.evidence["major_faults_per_step"] == pytest.approx(240, rel=0.03)
    assert ": it reads swapped memory, 24" in found.title
    assert found.title.endswith(" major faults a step; all other ranks wait for it.")
    assert found.advice[0].startswith("Memory ran out and the kernel swapped")
    plain = first(SLOW, {})
    assert (found.cost, found.severity) == (plain.cost, plain.severity)


def test_fast_swap_needs_no_wait_to_be_named() -> None:
    process = {"major_faults_ps": only(3, 500 / 0.057), "swapped": only(3, 300 << 20), "disk_wait": 0.0}
    assert first(SLOW, process).evidence["cause"] == "swap"
    assert "cause" not in first(SLOW, process | {"swapped": 0}).evidence


def test_a_rank_that_reads_a_mapped_file_is_named() -> None:
    process = {"major_faults_ps": only(3, 100 / 0.057), "swapped": 0, "disk_wait": only(3, 0.3)}
    found = first(SLOW, process)
    assert found.evidence["cause"] == "mapped_file"
    assert ": it reads mapped files from the disk page by page, 10" in found.title


def test_a_rank_that_waits_for_the_disk_is_named() -> None:
    found = first(SLOW, {"disk_wait": only(3, 0.3, 0.01), "major_faults_ps": 0.0})
    assert found.evidence["cause"] == "disk"
    assert found.evidence["disk_wait_ms"] == pytest.approx(16.6, abs=0.5)
    assert " a step for the disk; all other ranks wait for it." in found.title


def test_workers_that_wait_for_the_disk_are_named() -> None:
    cluster = Cluster(ranks=4, steps=150, faults=(slow_at(3, "input", 18.0),))
    found = first(cluster, {"disk_wait": 0.0, "children_disk_wait": only(3, 0.8, 0.1)})
    assert (found.kind, found.evidence["cause"]) == ("input_straggler", "workers_disk")
    assert ": its DataLoader workers wait for the disk 80% of the time; " in found.title


def test_input_of_all_ranks_that_waits_for_the_disk_is_named() -> None:
    phases = {"input": 30.0, "forward": 10.0, "backward": 20.0}
    found = first(Cluster(ranks=2, steps=150, phases_ms=phases), {"disk_wait": 0.45})
    assert (found.kind, found.evidence["cause"]) == ("input_bound", "disk")
    assert found.title.rstrip(".").endswith(" a step for the disk")


@pytest.mark.parametrize(
    ("wait", "causes"), [(0.3, {"input_bound": "disk"}), (0.75, {"input_bound": "disk", "optimizer_bound": "disk"})]
)
def test_one_wait_for_the_disk_explains_one_finding(wait: float, causes: dict[str, str]) -> None:
    phases = {"input": 40.0, "forward": 10.0, "backward": 20.0, "optimizer": 40.0}
    found = diagnose(with_samples(Cluster(ranks=2, steps=150, phases_ms=phases), process={"disk_wait": wait}))
    assert {each.kind for each in found} >= {"input_bound", "optimizer_bound"}
    assert {each.kind: each.evidence["cause"] for each in found if "cause" in each.evidence} == causes


def test_a_stall_while_the_disk_is_slow_is_named() -> None:
    cluster = Cluster(ranks=2, steps=200, faults=(slow_at(1, "input", 4000.0, range(100, 101)),))

    def disk_wait(rank: int, seconds: np.ndarray) -> np.ndarray:
        return np.where((seconds > 4.5) & (seconds < 8.6), 1.0, 0.0) * (rank == 1)

    found = first(cluster, {"disk_wait": disk_wait})
    assert (found.kind, found.ranks, found.evidence.get("cause")) == ("stall", (1,), "disk")


@pytest.mark.parametrize(
    "process",
    [
        {"disk_wait": 0.3, "major_faults_ps": 4000.0, "swapped": 300 << 20},
        {"disk_wait": only(1, 0.3), "major_faults_ps": only(1, 4000.0)},
        {"disk_wait": only(3, 0.03)},
        {"disk_wait": lambda which, seconds: [None] * len(seconds)},
    ],
    ids=["all ranks alike", "another rank", "too short", "unknown"],
)
def test_what_does_not_explain_the_excess_is_not_named(process: Mapping[str, Any]) -> None:
    found = first(SLOW, process)
    assert (found.kind, found.ranks) == ("compute_straggler", (3,))
    assert "cause" not in found.evidence
    assert found.title == first(SLOW, {}).title


def test_a_host_whose_processors_are_stolen_is_named() -> None:
    late = tuple(slow_at(rank, "forward", 18.0) for rank in (2, 3))
    cluster = Cluster(ranks=4, steps=150, hosts=2, faults=late)
    found = first(cluster, {"disk_wait": 0.0}, {"cpu_steal": lambda host, seconds: [0.4 * host] * len(seconds)})
    assert (found.kind, found.evidence["cause"]) == ("node_straggler", "steal")
    assert "the hypervisor takes 40% of the processors' time of " in found.title


QUOTA = {"cpu_quota": 1.5, "throttled": 0.3, "cpu_wait": 0.3}


def test_a_quota_of_all_ranks_is_a_finding_of_its_own() -> None:
    found = first(Cluster(ranks=2, steps=150), QUOTA)
    assert (found.kind, found.severity, found.ranks) == ("cpu_saturated", "warning", ())
    assert (
        found.title
        == "The CPU quota of the ranks (1.5 CPUs) is used up 30% of the time: they wait 11.8 ms of each step."
    )
    assert found.evidence["cause"] == "quota"


def test_a_quota_that_is_seldom_used_up_is_not_mentioned() -> None:
    assert first(Cluster(ranks=2, steps=150), {"cpu_quota": 1.5, "throttled": 0.02}).kind == "healthy"


def test_a_quota_that_is_used_up_on_processors_where_no_rank_waits_is_not_mentioned() -> None:
    """The kernel counts it as a sum over processors."""
    assert first(Cluster(ranks=2, steps=150), QUOTA | {"throttled": 0.9, "cpu_wait": 0.01}).kind == "healthy"
    found = first(Cluster(ranks=2, steps=150), QUOTA | {"throttled": 0.9, "cpu_wait": None})
    assert (found.evidence["cause"], found.evidence["throttled_share"]) == ("quota", 0.9)


def test_without_a_known_quota_none_is_named() -> None:
    assert first(Cluster(ranks=2, steps=150), {"throttled": 0.4, "cpu_wait": 0.4}).kind == "healthy"
    process = {"cpu_wait": only(3, 0.5, 0.01), "throttled": only(3, 0.45)}
    assert first(STARVED, process).evidence.get("cause") != "quota"


def test_a_quota_on_one_host_does_not_hide_what_another_host_has() -> None:
    process = {name: lambda which, seconds, value=value: [value if which < 2 else None] * len(seconds)
               for name, value in QUOTA.items()}  # fmt: skip
    host = {"cpu_steal": lambda host, seconds: [0.4 * host] * len(seconds)}
    found = diagnose(with_samples(Cluster(ranks=4, steps=150, hosts=2), process=process, host=host))
    causes = {(each.evidence["cause"], *each.evidence["nodes"]) for each in found if each.kind == "cpu_saturated"}
    assert causes == {("quota", "node0"), ("steal", "node1")}


def test_a_host_short_of_memory_does_not_hide_that_another_swaps() -> None:
    process = {"major_faults_ps": lambda which, seconds: [2000.0 * (which < 2)] * len(seconds), "swapped": 300 << 20}
    host = {"mem_available": lambda host, seconds: [(2 if host else 40) << 30] * len(seconds)}
    found = diagnose(with_samples(Cluster(ranks=4, steps=150, hosts=2), process=process, host=host))
    shown = {(each.evidence.get("cause"), *each.evidence["nodes"]) for each in found if each.kind == "ram_pressure"}
    assert shown == {("swap", "node0"), (None, "node1")}


@pytest.mark.parametrize(
    ("process", "severity"),
    [
        ({"disk_wait": 0.0, "major_faults_ps": 0.0}, "info"),
        ({"disk_wait": 0.2, "major_faults_ps": 0.0}, "warning"),
        ({"disk_wait": 0.0, "major_faults_ps": 20_000.0}, "warning"),
        ({"disk_wait": 0.0, "major_faults_ps": None}, "warning"),  # not known
    ],
)
def test_memory_pressure_that_no_rank_feels_is_information(process: dict[str, Any], severity: str) -> None:
    found = diagnose(with_samples(Cluster(ranks=2, steps=150), process=process, host={"memory_pressure": 0.35}))
    assert [each.severity for each in found if each.kind == "ram_pressure"] == [severity]


def test_ranks_that_all_read_swapped_memory_have_a_finding() -> None:
    found = first(Cluster(ranks=2, steps=150), {"major_faults_ps": 2000.0, "swapped": 300 << 20})
    assert (found.kind, found.severity) == ("ram_pressure", "warning")
    assert found.title == "The ranks read swapped memory: 78 major faults a step."
    assert first(Cluster(ranks=2, steps=150), {"major_faults_ps": 2000.0, "swapped": 0}).kind == "healthy"


def test_a_hypervisor_that_takes_the_processors_has_a_finding() -> None:
    found = first(Cluster(ranks=2, steps=150), {}, {"cpu_steal": 0.15})
    assert (found.kind, found.severity) == ("cpu_saturated", "warning")
    assert found.title == "The hypervisor takes 15% of the processors' time (steal)."
    assert first(Cluster(ranks=2, steps=150), {}, {"cpu_steal": 0.04}).kind == "healthy"


@pytest.mark.seeds
def test_healthy_runs_have_no_cause() -> None:
    """Beside ordinary reads, some faults, and workers that sleep on the disk now and then."""
    for seed in seeds(8):
        random = np.random.default_rng(seed)

        def some(which: int, seconds: np.ndarray, random: np.random.Generator = random) -> np.ndarray:
            return (random.random(len(seconds)) < 0.1) * 0.2

        process = {"disk_wait": some, "major_faults_ps": some, "children_disk_wait": 0.3, "swapped": 4 << 20}
        for found in diagnose(with_samples(Cluster(ranks=4, steps=150, seed=seed, tail=0.01), process=process)):
            assert "cause" not in found.evidence


def conversions(ranks: int) -> int:
    """How often rules make an array of the samples of all ranks."""
    run = with_samples(Cluster(ranks=ranks, steps=100, faults=(slow_at(3, "forward", 18.0),)), rss_mb=100.0)
    made = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal made
        code = frame.f_code
        made += event == "call" and code.co_name == "of" and code.co_filename.endswith("/readings.py")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        diagnose(run)
    finally:
        sys.setprofile(before)
    return made


def test_samples_are_not_read_again_for_every_rank() -> None:
    """A thousand ranks took a minute instead of two seconds."""
    assert 0 < conversions(40) == conversions(8)
