"""low_gpu_utilization, gpu_throttled, cpu_saturated, ram_pressure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from fakes.cluster import Cluster
from fakes.records import edited
from fakes.samples import GPU, HOST, with_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepscope.diagnosis.engine.view import view_of
from stepscope.diagnosis.engine.window import build_window
from stepscope.diagnosis.rules.machine import find_machine
from stepscope.diagnosis.rules.memory import find_memory
from stepscope.records.finding import Finding
from stepscope.records.series import RankSeries, RunData

GIB = 1 << 30
PHASES = {"input": 2.0, "forward": 30.0, "backward": 50.0, "optimizer": 15.0, "other": 3.0}
"""A tenth of a second: 100 steps are ten samples."""
IN_INPUT = {"input": 60.0, "forward": 10.0, "backward": 20.0, "optimizer": 7.0, "other": 3.0}


def found(run: RunData) -> list[Finding]:
    claims = find_machine(view_of(build_window(run)))
    assert all(not claim.explained_ns.any() for claim in claims)
    assert all(claim.finding.cost["share"] == 0.0 for claim in claims)
    return [claim.finding for claim in claims]


def kinds(run: RunData) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(finding.kind, finding.severity, finding.ranks) for finding in found(run)]


def on_host(ranks: int = 4, hosts: int = 1, facts: dict[str, Any] | None = None, **host: Any) -> RunData:
    return with_samples(Cluster(ranks=ranks, hosts=hosts, phases_ms=PHASES, facts=facts or {}), host=host)


def on_gpus(ranks: int = 4, phases: dict[str, float] | None = None, steps: int = 100, **gpu: Any) -> RunData:
    return with_samples(Cluster(ranks=ranks, steps=steps, phases_ms=phases or PHASES, device_timed=True), gpu=gpu)


def test_a_healthy_machine_says_nothing() -> None:
    assert kinds(on_gpus()) == []
    assert kinds(on_host(hosts=2)) == []
    assert kinds(Cluster(ranks=2).run()) == []
    assert kinds(Cluster(ranks=0, steps=0).run()) == []


# -- processors ---------------------------------------------------------------------------------------------------


def test_ranks_that_fill_their_cores_are_told_not_warned_of() -> None:
    (full,) = found(on_host(cpu_percent=99.0, own_cpu_percent=97.0, cpu_count=2, procs_running=4, cpu_pressure=0.9))
    assert (full.kind, full.severity, full.ranks) == ("cpu_saturated", "info", ())
    assert full.title == "The job keeps all 2 cores busy."
    assert full.advice == ("4 ranks share 2 cores: more ranks will not be faster here.",)
    assert full.evidence["nodes"] == ["node0"]
    assert full.evidence["procs_running"] == 4.0


def test_other_processes_on_the_cores_are_a_warning() -> None:
    (full,) = found(on_host(cpu_percent=100.0, own_cpu_percent=50.0, cpu_count=8, procs_running=14))
    assert (full.kind, full.severity, full.ranks) == ("cpu_saturated", "warning", ())
    assert full.title == "Other processes use 4.00 of 8 cores; the job competes for them."
    assert full.advice[0].startswith("Find the process with top (the samples name none), or give the job its own cores")


def test_the_processes_that_use_the_cpu_are_named() -> None:
    lines = ["4711 97.0 /usr/bin/python burn.py --fast", "4712 40.0 cc1plus -O2 a.cc", "4713 60.0 cc1plus -O2 a.cc"]
    run = on_host(cpu_percent=100.0, own_cpu_percent=50.0, cpu_count=4, procs_running=14, busy_processes=lines)
    (full,) = found(run)
    mostly = "cc1plus -O2 a.cc (pids 4712, 4713, 100% of a core)"
    assert full.title == f"Other processes use 2.00 of 4 cores, mostly {mostly}; the job competes for them."
    other = "python burn.py (pid 4711, 97% of a core)"
    own_cores = "give the job its own cores (taskset, cgroups, --exclusive)"
    assert full.advice == (f"Stop or move {mostly}, {other}; or {own_cores}.",)
    assert full.evidence["busy_processes"] == [
        {"command": "cc1plus -O2 a.cc", "pids": [4712, 4713], "cpu_percent": 100.0},
        {"command": "/usr/bin/python burn.py --fast", "pids": [4711], "cpu_percent": 97.0},
    ]


def test_other_processes_take_nothing_from_ranks_that_sleep() -> None:
    (full,) = found(on_host(ranks=1, cpu_percent=100.0, own_cpu_percent=2.0, cpu_count=2, procs_running=11))
    assert (full.kind, full.severity) == ("cpu_saturated", "info")
    assert full.title == "Other processes use 1.96 of 2 cores; the job uses 0.040."
    (full,) = found(on_host(ranks=1, cpu_percent=100.0, own_cpu_percent=9.0, cpu_count=2, procs_running=11))
    assert full.severity == "warning"


def test_threads_times_ranks_is_a_warning_with_the_right_number() -> None:
    facts = {"threads": 8, "loader": {"num_workers": 2}}
    (full,) = found(on_host(facts=facts, cpu_percent=100.0, own_cpu_percent=98.0, cpu_count=8, procs_running=30))
    assert (full.kind, full.severity) == ("cpu_saturated", "warning")
    assert full.title == "The job overloads all 8 cores: typically 30.0 tasks are ready to run at once."
    assert full.advice == (
        "4 ranks with 8 threads each on 8 cores: OMP_NUM_THREADS=2 or torch.set_num_threads(2).",
        "2 DataLoader workers for each rank are too many for the cores: num_workers=1.",
    )


@pytest.mark.parametrize(
    "host",
    [
        {"cpu_percent": 100.0, "cpu_count": 8, "procs_running": 9},  # well used
        {"cpu_percent": 90.0, "cpu_count": 8, "procs_running": 40},
        {"cpu_percent": 100.0, "cpu_count": 8, "procs_running": None, "load1": 9.0},
        {"cpu_percent": "100", "cpu_count": None, "procs_running": []},
        {"cpu_pressure": 0.4},
    ],
)
def test_a_busy_machine_on_which_nobody_waits_is_none(host: dict[str, Any]) -> None:
    assert kinds(on_host(**host)) == []


def test_a_quota_shows_as_waiting() -> None:
    (full,) = found(on_host(cpu_percent=30.0, own_cpu_percent=10.0, cpu_pressure=0.8))
    assert (full.kind, full.severity) == ("cpu_saturated", "info")
    assert full.title == "Tasks wait for a processor 80% of the time, though the CPUs are not full."


def test_without_the_job_s_own_share_nobody_is_blamed() -> None:
    (full,) = found(on_host(cpu_percent=100.0, own_cpu_percent=None, cpu_count=4, procs_running=None, load1=9.0))
    assert full.severity == "info"
    assert full.title == "All 4 cores are busy all the time."


def test_one_host_of_several_names_its_ranks() -> None:
    run = on_host(
        ranks=4, hosts=2, cpu_count=8, procs_running=14, own_cpu_percent=30.0,
        cpu_percent=lambda host, at: 100.0 if host else 40.0,
    )  # fmt: skip
    (full,) = found(run)
    assert (full.kind, full.severity, full.ranks) == ("cpu_saturated", "warning", (2, 3))
    assert full.title == "Other processes use 5.60 of 8 cores of node1; the job competes for them."


def test_two_samples_are_a_moment() -> None:
    run = with_samples(Cluster(ranks=1, steps=20, phases_ms=PHASES), host={"cpu_percent": 100.0, "procs_running": 60})
    assert len(build_window(run).samples) == 4
    assert kinds(run) == []


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "severity"), [(0.06, None), (0.04, "warning"), (0.01, "critical")])
def test_memory_that_is_nearly_used_up(share: float, severity: str | None) -> None:
    run = on_host(mem_available=int(share * 64 * GIB))
    assert kinds(run) == ([("ram_pressure", severity, ())] if severity else [])


def test_it_is_said_in_bytes_and_with_the_workers() -> None:
    (short,) = found(on_host(facts={"loader": {"num_workers": 4}}, mem_available=2 * GIB))
    assert short.title == "Host memory is nearly used up: 2.0 GiB available (3%)."
    assert short.advice[0].startswith("Each of 4 DataLoader workers copies")


def test_a_dip_of_two_samples_is_none() -> None:
    assert kinds(on_host(mem_available=lambda _, at: [GIB if 2 < second < 4 else 30 * GIB for second in at])) == []


def test_swapping_counts_when_memory_is_short() -> None:
    growing = {"swap_used": lambda _, at: [int(second * 0.1 * GIB) for second in at]}
    assert kinds(on_host(mem_available=6 * GIB, **growing)) == [("ram_pressure", "warning", ())]
    assert kinds(on_host(mem_available=40 * GIB, **growing)) == []
    assert kinds(on_host(mem_available=6 * GIB, swap_used=8 * GIB)) == []


def test_tasks_that_wait_for_memory() -> None:
    (short,) = found(on_host(memory_pressure=0.35))
    assert (short.kind, short.severity) == ("ram_pressure", "warning")
    assert short.title == "Tasks wait for memory 35% of the time."


# -- GPUs ---------------------------------------------------------------------------------------------------------


def test_an_idle_gpu_with_what_it_waits_for() -> None:
    (idle,) = found(on_gpus(ranks=1, phases=IN_INPUT, util_percent=31))
    assert (idle.kind, idle.severity, idle.phase) == ("low_gpu_utilization", "warning", "input")
    assert idle.title == "The GPU is busy only 31% of the time, while waiting for input takes 60% of the step."
    assert "num_workers" in idle.advice[0]


def test_an_idle_gpu_with_nothing_to_blame_is_told() -> None:
    tiny = {"forward": 30.0, "backward": 50.0, "optimizer": 20.0}
    run = with_samples(Cluster(ranks=1, phases_ms=tiny, device_timed=True), gpu={"util_percent": 15})

    # The host's wait for the device stands in "other" here; a host that launches work all the time has none.
    def launch(_: RankSeries, steps: NDArray[Any]) -> None:
        steps["phase_ns"][:, 3] += steps["phase_ns"][:, 0]
        steps["phase_ns"][:, 0] = 0

    (idle,) = found(edited(run, launch))
    assert (idle.severity, idle.phase, idle.title) == ("info", None, "The GPU is busy only 15% of the time.")
    assert "CUDA graphs" in idle.advice[0]


@pytest.mark.parametrize(("util", "severity"), [(55, None), (45, "info"), (35, "warning")])
def test_by_how_idle_it_is(util: int, severity: str | None) -> None:
    run = on_gpus(ranks=2, phases=IN_INPUT, util_percent=util)
    assert kinds(run) == ([("low_gpu_utilization", severity, ())] if severity else [])


def test_four_samples_do_not_tell_how_idle_a_gpu_is() -> None:
    assert kinds(on_gpus(ranks=1, phases=IN_INPUT, steps=38, util_percent=5)) == []


def test_gpus_that_are_not_the_job_s_are_left_out() -> None:
    run = on_gpus(ranks=1)
    stranger = [
        {**line, "index": 5, "uuid": "GPU-ffffffff", "util_percent": 0, "throttle_reasons": ["hw_thermal"]}
        for line in run.samples
        if line["kind"] == "gpu"
    ]
    assert kinds(replace(run, samples=(*run.samples, *stranger))) == []
    # Also where the job's own cannot be told: two GPUs, one rank.
    unknown = [{**line, "uuid": None} for line in run.samples if line["kind"] == "gpu"]
    assert kinds(replace(run, samples=(*unknown, *stranger))) == []


@pytest.mark.parametrize("reason", ["hw_thermal", "sw_thermal", "hw_slowdown", "hw_power_brake"])
def test_a_gpu_that_is_held_back_names_its_rank(reason: str) -> None:
    run = on_gpus(throttle_reasons=lambda rank, at: [[reason] if rank == 2 and 3 < s < 6 else [] for s in at])
    (hot,) = found(run)
    assert (hot.kind, hot.severity, hot.ranks) == ("gpu_throttled", "warning", (2,))
    assert hot.title.startswith("GPU 2 (rank 2) is held back by ")
    assert hot.evidence["gpus"][0]["reasons"] == [reason]
    assert hot.evidence["gpus_held_back"] == 1


def test_a_single_throttled_sample_and_the_power_cap_are_normal() -> None:
    assert kinds(on_gpus(throttle_reasons=lambda rank, at: [["hw_thermal"] if 3 < s < 4 else [] for s in at])) == []
    assert kinds(on_gpus(throttle_reasons=["sw_power_cap"])) == []


def test_a_power_cap_that_shows_in_the_clock_is_told() -> None:
    run = on_gpus(
        throttle_reasons=lambda rank, at: [["sw_power_cap"]] * len(at),
        sm_clock_mhz=lambda rank, at: [1980 if second < 2 else 1600 for second in at],
    )
    (capped,) = found(run)
    assert (capped.kind, capped.severity, capped.ranks) == ("gpu_throttled", "info", ())
    assert capped.title == "GPU 0 (rank 0) is at its power limit: 1600 MHz instead of 1980 MHz."


def test_a_gpu_slower_than_its_peers_is_a_warning_without_a_reason() -> None:
    (slow,) = found(on_gpus(sm_clock_mhz=lambda rank, at: 1700 if rank == 3 else 1980))
    assert (slow.kind, slow.severity, slow.ranks) == ("gpu_throttled", "warning", (3,))
    assert slow.title == "GPU 3 (rank 3) runs at 1700 MHz, GPUs of the same kind at 1980 MHz."
    assert kinds(on_gpus(sm_clock_mhz=lambda rank, at: 1900 if rank == 3 else 1980)) == []


def test_idle_clocks_and_other_models_are_not_compared() -> None:
    idle = on_gpus(
        sm_clock_mhz=lambda rank, at: 345 if rank == 3 else 1980, util_percent=lambda rank, at: 3 if rank == 3 else 97
    )
    assert kinds(idle) == []
    other = on_gpus(
        sm_clock_mhz=lambda rank, at: 1410 if rank == 3 else 1980, name=lambda rank, at: "A" if rank == 3 else "B"
    )
    assert kinds(other) == []


# -- start-up -----------------------------------------------------------------------------------------------------

STARTING_S = 60.0
"""A first step that compiles for a minute, in which the GPU idles; 12 seconds of steps follow."""


def starts_slowly(
    *, gpu: dict[str, Any] | None = None, host: dict[str, Any] | None = None, then: dict[str, Any] | None = None
) -> RunData:
    """``gpu`` and ``host``: what they do in the first minute; ``then``: afterwards, unless it is what is usual."""
    compiling = Cluster(
        ranks=2, steps=121, phases_ms=IN_INPUT, noise=0.0, warmup_ms=STARTING_S * 1000, device_timed=True
    )
    usual = {**HOST, **GPU, **(then or {})}

    def at_first(values: dict[str, Any] | None) -> dict[str, Any]:
        return {
            key: lambda _, at, first=first, later=usual[key]: [first if s < STARTING_S else later for s in at]
            for key, first in (values or {}).items()
        }

    return with_samples(compiling, gpu=at_first(gpu), host=at_first(host))


@pytest.mark.parametrize(
    "gpu",
    [
        {"util_percent": 0},
        {"util_percent": 97, "sm_clock_mhz": 345},
        {"throttle_reasons": ["hw_thermal"]},
        {"mem_used": 79 * GIB},
    ],
)
def test_what_a_gpu_did_while_the_first_step_compiled_is_no_finding(gpu: dict[str, Any]) -> None:
    run = starts_slowly(gpu=gpu)
    assert len([line for line in run.samples if line["kind"] == "gpu"]) == 2 * 72
    assert kinds(run) == []
    assert find_memory(view_of(build_window(run))) == []


@pytest.mark.parametrize(
    "host", [{"cpu_percent": 100.0, "own_cpu_percent": 20.0, "procs_running": 90}, {"mem_available": GIB}]
)
def test_what_a_host_did_while_the_first_step_compiled_is_no_finding(host: dict[str, Any]) -> None:
    assert kinds(starts_slowly(host=host)) == []


def test_an_idle_gpu_is_told_by_its_steady_steps() -> None:
    (idle,) = found(starts_slowly(gpu={"util_percent": 97}, then={"util_percent": 12}))
    assert idle.title == "The GPUs are busy only 12% of the time, while waiting for input takes 59% of the step."
    assert (idle.evidence["util_percent"], idle.evidence["samples"]) == (12.0, 11)


def test_quick_samples_count_as_one_a_second() -> None:
    """Three quick ones in a row are half a second, and ten are two: moments, not a run."""
    hot = {"throttle_reasons": lambda _, at: [["hw_thermal"] if 4.0 <= s < 4.6 else [] for s in at]}
    quick = with_samples(Cluster(ranks=1, phases_ms=PHASES, device_timed=True), gpu=hot, every_s=0.2)
    assert kinds(quick) == []
    few = Cluster(ranks=1, steps=35, phases_ms=IN_INPUT, device_timed=True)
    assert kinds(with_samples(few, gpu={"util_percent": 3}, every_s=0.2)) == []


# -- false alarms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_noisy_but_healthy_machines_say_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    run = with_samples(
        Cluster(ranks=4, hosts=2, phases_ms=PHASES, device_timed=True, seed=seed, steps=200),
        host={
            "cpu_percent": lambda _, at: random.uniform(20, 100, len(at)),
            "procs_running": lambda _, at: random.integers(1, 40, len(at)),
            "mem_available": lambda _, at: random.uniform(8 * GIB, 60 * GIB, len(at)),
        },
        gpu={
            "util_percent": lambda _, at: random.uniform(40, 100, len(at)),
            "sm_clock_mhz": lambda _, at: random.normal(1900, 30, len(at)),
            "throttle_reasons": lambda _, at: [["sw_power_cap"] if random.random() < 0.9 else [] for _ in at],
        },
    )
    assert kinds(run) == []


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2),
    st.just(10**400), st.sampled_from([0, -1, 1, 1e18, "node0", "GPU-x", 100, ["hw_thermal"], [["x"], None]]),
)  # fmt: skip
KEYS = (
    "node", "cpu_percent", "own_cpu_percent", "cpu_count", "procs_running", "load1", "cpu_pressure", "mem_total",
    "mem_available", "swap_used", "memory_pressure", "index", "uuid", "name", "util_percent", "sm_clock_mhz",
    "throttle_reasons",
)  # fmt: skip
FACTS = st.dictionaries(st.sampled_from(["threads", "loader"]), st.one_of(ANYTHING, st.just({"num_workers": "2"})))


@given(
    st.lists(
        st.tuples(st.sampled_from(["host", "process", "gpu"]), st.dictionaries(st.sampled_from(KEYS), ANYTHING)),
        max_size=20,
    ),
    FACTS,
)
@settings(max_examples=examples(60), deadline=None)
def test_samples_and_facts_may_hold_anything(lines: list[tuple[str, dict[str, Any]]], facts: dict[str, Any]) -> None:
    run = with_samples(
        Cluster(ranks=2, steps=60, phases_ms=PHASES, device_timed=True, facts=facts),
        host={"cpu_percent": 100.0, "cpu_count": 1, "procs_running": 9, "mem_available": GIB},
    )
    odd = [{**run.samples[index % len(run.samples)], "kind": kind, **more} for index, (kind, more) in enumerate(lines)]
    for finding in found(replace(run, samples=(*run.samples, *odd))):
        finding.to_dict()
