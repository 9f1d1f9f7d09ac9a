"""memory_creep, memory_pressure, memory_imbalance, fragmentation."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from example_counts import examples, seeds
from fakes.cluster import ANCHOR_WALL_NS, MIB, Cluster, Death, slow_at
from fakes.samples import with_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.engine.view import view_of
from stepscope.diagnosis.engine.window import build_window
from stepscope.diagnosis.rules.memory import find_memory, rise_of_floors
from stepscope.judge import thresholds
from stepscope.judge.finding_cost import finding_order
from stepscope.recorder.layers.growth import MemoryFloors
from stepscope.records.finding import Finding, Severity
from stepscope.records.series import RankError, RunData

GIB = 1 << 30
SECOND = {"input": 2.0, "forward": 300.0, "backward": 600.0, "optimizer": 90.0, "other": 8.0}
"""Steps of a second, so that there are as many samples as steps."""
QUICK = {"forward": 20.0, "backward": 40.0}
Steps = NDArray[Any]


def found(run: RunData) -> list[Finding]:
    claims = find_memory(view_of(build_window(run)))
    assert all(not claim.explained_ns.any() for claim in claims)
    assert all(claim.finding.cost["share"] == 0.0 for claim in claims)
    return [claim.finding for claim in claims]


def kinds(run: RunData) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(finding.kind, finding.severity, finding.ranks) for finding in found(run)]


def on_device(ranks: int = 1, steps: int = 200, **more: Any) -> Cluster:
    return Cluster(ranks=ranks, steps=steps, device_timed=True, **more)


# -- host memory that grows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [60, 100])
def test_a_large_leak_is_seen_in_a_run_of_seconds(steps: int) -> None:
    """1.6 GB over the run, four or six samples."""
    cluster = Cluster(ranks=1, steps=steps, phases_ms={"forward": 20.0, "backward": 40.0}, noise=0.01, warmup_ms=50.0)
    length_s = steps * 0.06
    (creep,) = found(with_samples(cluster, rss_mb=lambda _, at: 400 + 1600 * at / length_s))
    assert (creep.kind, creep.ranks) == ("memory_creep", ())
    assert creep.evidence["which"] == "host_rss"
    assert creep.evidence["bytes_per_step"] == pytest.approx(1600 * MIB / steps, rel=0.05)
    assert creep.evidence["samples"] == len(np.arange(0.5, length_s, 1.0))
    assert creep.confidence == 0.75
    # 40 GiB are available.
    assert creep.evidence["runs_out_at_step"] == pytest.approx(steps + 40 * 1024 / (1600 / steps), rel=0.05)
    assert creep.severity == "critical"


def test_of_a_job_that_ran_out_of_memory_no_end_is_foretold() -> None:
    error = RankError(rank=0, pid=1000, type="MemoryError", message="", wall_ns=ANCHOR_WALL_NS + 200 * 10**9)
    cluster = Cluster(ranks=1, steps=100, phases_ms=SECOND, errors=(error,))
    crash, creep = (
        finding
        for finding in diagnose(with_samples(cluster, rss_mb=lambda _, at: 1000 + 4.0 * at))
        if finding.kind in ("rank_crashed", "memory_creep")
    )
    assert (crash.kind, crash.evidence["cause"]) == ("rank_crashed", "oom_host")
    assert (creep.evidence["runs_out_at_step"], creep.evidence["runs_out_in_s"]) == (None, None)
    assert creep.title == "Host memory grows by 4.0 MiB a step, from 1,057 MiB at step 13 to 1,392 MiB at step 97."


def test_a_leak_of_all_ranks_names_none_and_fills_the_host_together() -> None:
    run = with_samples(Cluster(ranks=4, steps=100, phases_ms=SECOND), rss_mb=lambda _, at: 1000 + 4.0 * at)
    (creep,) = found(run)
    assert (creep.kind, creep.severity, creep.ranks) == ("memory_creep", "critical", ())
    assert creep.evidence["bytes_per_step"] == pytest.approx(4 * MIB, rel=0.03)
    assert creep.evidence["ranks_growing"] == [0, 1, 2, 3]
    assert creep.evidence["runs_out_at_step"] == pytest.approx(99 + 40 * 1024 / 16, rel=0.03)
    assert creep.evidence["runs_out_in_s"] == pytest.approx(40 * 1024 / 16, rel=0.03)
    assert creep.title == (
        "Host memory of every rank grows by 4.1 MiB a step, from 1,058 MiB at step 13 to 1,398 MiB at step 97; at this "
        f"pace it runs out at step {creep.evidence['runs_out_at_step']:,}, after another {_duration(creep)}."
    )


def _duration(creep: Finding) -> str:
    seconds = round(creep.evidence["runs_out_in_s"])
    return f"{seconds // 60} min {seconds % 60:02d} s"


@pytest.mark.parametrize("steps", [40, 150])
def test_the_sentence_gives_what_the_samples_say_at_those_steps(steps: int) -> None:
    cluster = Cluster(ranks=1, steps=steps, phases_ms=SECOND, noise=0.0, warmup_ms=0.0)
    run = with_samples(cluster, rss_mb=lambda _, at: 1000 + 40.0 * at)
    (creep,) = found(run)
    for end in ("first", "last"):  # a step is a second; the step lies between two samples
        step = creep.evidence[f"{end}_step"]
        assert abs(creep.evidence[f"{end}_bytes"] / MIB - (1000 + 40.0 * (step + 0.5))) <= 40.0


def test_a_leak_of_one_rank_names_it() -> None:
    run = with_samples(
        Cluster(ranks=4, steps=100, phases_ms=SECOND), rss_mb=lambda rank, at: 1000 + (3.0 if rank == 2 else 0.0) * at
    )
    (creep,) = found(run)
    assert (creep.kind, creep.ranks) == ("memory_creep", (2,))
    assert creep.title.startswith("Host memory of rank 2 grows by 3.0 MiB a step")


def test_what_grows_is_said_first() -> None:
    run = with_samples(
        Cluster(ranks=4, steps=100, phases_ms=SECOND), rss_mb=lambda rank, at: 1000 + (3.0 if rank == 2 else 0.0) * at
    )
    growing = {"holder": "kept, a list made at train.py:88", "per_step": 1.0, "element": "float32 []", "graph": True}
    run.ranks[2].facts["growing"] = {**growing, "element_bytes": 4, "from": 200, "to": 250}
    (creep,) = found(run)
    assert creep.evidence["growing"]["rank"] == 2
    assert creep.advice[0] == (
        "kept, a list made at train.py:88, gets longer by 1 element a step: float32 [], each with its autograd graph: "
        "keep .detach() or .item() instead."
    )
    for more, expected in (
        (
            {"per_step": 0.0133, "to": 350},
            "kept, a list made at train.py:88, gets longer by 2 elements within 150 steps",
        ),
        ({"holder": "", "per_step": 0.0133, "to": 350}, "Tensors of one kind increase by 2 elements"),
        ({"holder": "total in main (train.py:9)", "per_step": 0.0, "element": ""}, "total in main (train.py:9) keeps"),
    ):
        run.ranks[2].facts["growing"] = {**growing, "element_bytes": 4, "from": 200, "to": 250, **more}
        assert found(run)[0].advice[0].startswith(expected)
    run.ranks[2].facts["growing"].pop("element")
    (creep,) = found(run)
    assert creep.evidence["growing"] is None
    assert creep.advice[0].startswith("Look for what the loop keeps")


@pytest.mark.parametrize(("step_ms", "severity"), [(400.0, "info"), (1000.0, "warning")])
def test_growth_within_some_seconds_may_be_an_allocator_that_settles(step_ms: float, severity: str) -> None:
    """imagenet of pytorch/examples: 146 MiB in 20 s, of 24 GiB; what is known to grow is never excused."""
    run = with_samples(
        Cluster(ranks=1, steps=100, phases_ms={"forward": step_ms}),
        rss_mb=lambda _, at: 423 + 2000.0 / step_ms * at,
        host={"mem_available": 60 * GIB},
    )
    (creep,) = found(run)
    assert creep.severity == severity


@pytest.mark.parametrize(
    ("available", "severity"), [(GIB, "critical"), (60 * GIB, "warning"), (2048 * GIB, "info"), (None, "warning")]
)
def test_it_is_as_grave_as_it_is_near(available: int | None, severity: str) -> None:
    run = with_samples(
        Cluster(ranks=1, steps=100, phases_ms=SECOND),
        rss_mb=lambda _, at: 1000 + 2.0 * at,
        host={"mem_available": available},
    )
    (creep,) = found(run)
    assert creep.severity == severity
    assert (creep.evidence["runs_out_at_step"] is None) is (available is None)


def test_a_leak_under_noise_and_a_sawtooth_is_still_one() -> None:
    random = np.random.default_rng(1)
    run = with_samples(
        Cluster(ranks=2, steps=150, phases_ms=SECOND),
        rss_mb=lambda _, at: 800 + 3.0 * at + 60 * (at % 10) / 10 + random.normal(0, 3, len(at)),
    )
    (creep,) = found(run)
    assert creep.kind == "memory_creep"
    assert creep.evidence["bytes_per_step"] == pytest.approx(3 * MIB, rel=0.1)


def test_a_leak_in_stairs_is_found() -> None:
    run = with_samples(
        Cluster(ranks=1, steps=200, phases_ms=SECOND), rss_mb=lambda _, at: 800 + 100 * np.floor(at / 30)
    )
    assert [finding.kind for finding in found(run)] == ["memory_creep"]


LEAKS = {
    "even": lambda random, at: 1000 + 4.0 * at,
    "stairs": lambda random, at: 800 + 50 * np.floor(at / 12),
    "sawtooth": lambda random, at: 800 + 3.0 * at + 60 * (at % 10) / 10 + random.normal(0, 3, len(at)),
    "ever faster": lambda random, at: 800 + 3.0 * at + 0.01 * at**2,
    "large": lambda random, at: 70_000 + 90.0 * at,
}


@pytest.mark.parametrize("shape", LEAKS)
@pytest.mark.parametrize("steps", [9, 150])
def test_the_numbers_of_the_sentence_agree(shape: str, steps: int) -> None:
    """Pace by steps is what lies between the two ends; also of a run with a handful of samples."""
    scale, random = 150 / steps, np.random.default_rng(1)
    cluster = Cluster(ranks=2, steps=steps, phases_ms=SECOND)
    creeps = found(with_samples(cluster, rss_mb=lambda _, at: LEAKS[shape](random, at * scale)))
    assert creeps or steps < 12  # a few samples have to rise evenly
    for creep in creeps:
        evidence = creep.evidence
        steps_between = evidence["last_step"] - evidence["first_step"]
        grown = evidence["last_bytes"] - evidence["first_bytes"]
        assert abs(grown - evidence["bytes_per_step"] * steps_between) <= 1 + steps_between
        assert creep.steps is not None
        assert creep.steps[0] <= evidence["first_step"] < evidence["last_step"] <= creep.steps[1]
        read = re.search(r"by ([\d.,]+ \wiB) a step, from ([\d.,]+ \wiB) at step (\d+) to ([\d.,]+ \wiB)", creep.title)
        assert read is not None
        pace, first, last = (_bytes(read[at]) for at in (1, 2, 4))
        assert (last - first) / steps_between == pytest.approx(pace, rel=0.1)


def _bytes(text: str) -> float:
    number, unit = text.replace(",", "").split()
    return float(number) * 1024 ** ("KiB", "MiB", "GiB").index(unit) * 1024


HEALTHY = {
    "flat": lambda random, at: 900 + random.normal(0, 5, len(at)),
    "sawtooth": lambda random, at: 900 + 400 * (at * 4.3 / at[-1] % 1),
    "slow sawtooth": lambda random, at: 900 + 400 * (at % (0.65 * at[-1])) / at[-1],
    "cache that fills": lambda random, at: 900 + 800 * np.minimum(at / (0.4 * at[-1]), 1.0),
    "cache that fills ever slower": lambda random, at: 900 + 800 * (1 - np.exp(-at / (0.3 * at[-1]))),
    "one jump": lambda random, at: 900 + 800 * (at > 0.5 * at[-1]),
    "start": lambda random, at: 900 + 1500 * np.minimum(at / (0.08 * at[-1]), 1.0),
    "rise and fall": lambda random, at: 900 + 600 * np.sin(np.pi * at / at[-1]),
    "small": lambda random, at: 900 + 30 * at / at[-1],
    "small share": lambda random, at: 90_000 + 0.05 * at,
    "wander": lambda random, at: 900 + np.cumsum(random.normal(0, 4, len(at))),
    "falls": lambda random, at: 2000 - 10 * at,
}


@pytest.mark.few(10)
@pytest.mark.seeds
@pytest.mark.parametrize("shape", HEALTHY)
@pytest.mark.parametrize("steps", [15, 60, 300])
def test_what_healthy_processes_do_is_no_leak(shape: str, steps: int) -> None:
    for seed in seeds(8):
        random = np.random.default_rng(seed)
        cluster = Cluster(ranks=3, steps=steps, phases_ms=SECOND, seed=seed)
        run = with_samples(cluster, rss_mb=lambda _, at, random=random: HEALTHY[shape](random, at))
        assert found(run) == [], (shape, seed)


@pytest.mark.parametrize("shape", sorted(HEALTHY.keys() - {"small"}))
def test_nor_is_it_on_a_device(shape: str) -> None:
    random = np.random.default_rng(0)
    assert kinds(on_device(ranks=2, allocated_mb=lambda _, at: HEALTHY[shape](random, at)).run()) == []


def test_pages_of_mapped_files_are_not_the_process_s_own() -> None:
    run = with_samples(
        Cluster(ranks=1, steps=100, phases_ms=SECOND),
        rss_mb=lambda _, at: 1000 + 20.0 * at,
        process={"rss_file": lambda _, at: [int((100 + 20.0 * second) * MIB) for second in at]},
    )
    assert found(run) == []


def test_what_torch_s_server_keeps_of_its_answers_is_no_leak_of_the_job() -> None:
    """As on an H200: 12 MB a second, one more thread of the server each time."""
    grows = {"rss_mb": lambda _, at: 1000 + 12.0 * at}
    cluster = Cluster(ranks=1, steps=60, phases_ms=SECOND)
    recorded = with_samples(
        cluster, **grows, process={"rss_answers": lambda _, at: [int(12.0 * second * MIB) for second in at]}
    )
    assert found(recorded) == []
    assert [finding.kind for finding in found(with_samples(cluster, **grows))] == ["memory_creep"]


FREED = {"malloc": {"step": [10, 60, 99], "free": [50 * 16, 300 * 16, 495 * 16], "resident": [20_000] * 3}}
"""5 MiB more a step."""


@pytest.mark.parametrize(("grows", "expected"), [(5.0, False), (7.0, False), (7.5, True), (25.0, True)])
def test_what_the_c_library_keeps_of_freed_memory_is_no_leak(grows: float, expected: bool) -> None:
    run = with_samples(Cluster(ranks=2, steps=100, phases_ms=SECOND), rss_mb=lambda _, at: 1000 + grows * at)
    (leak,) = found(run)
    for rank in run.ranks:
        rank.facts.update(FREED)
    assert found(run) == ([leak] if expected else [])


def test_only_ranks_that_use_more_are_named() -> None:
    run = with_samples(Cluster(ranks=2, steps=100, phases_ms=SECOND), rss_mb=lambda _, at: 1000 + 5.0 * at)
    run.ranks[0].facts.update(FREED)
    assert [finding.ranks for finding in found(run)] == [(1,)]


def test_what_the_recorder_saw_growing_is_no_freed_memory() -> None:
    """As of a short run on a busy machine: too few readings to judge what it uses."""
    growing = {
        "holder": "outputs",
        "per_step": 1.0,
        "element": "",
        "element_bytes": 0,
        "graph": True,
        "from": 4,
        "to": 9,
    }
    run = with_samples(Cluster(ranks=2, steps=100, phases_ms=SECOND), rss_mb=lambda _, at: 1000 + 5.0 * at)
    run.ranks[0].facts.update(FREED)
    run.ranks[1].facts.update({**FREED, "growing": growing})
    (leak,) = found(run)
    assert (leak.evidence["which"], leak.ranks, leak.evidence["growing"]["rank"]) == ("host_rss", (1,), 1)


def test_an_allocator_that_keeps_ever_more_is_reported_as_such() -> None:
    run = with_samples(Cluster(ranks=1, steps=100, phases_ms=SECOND), rss_mb=lambda _, at: 1000 + 30.0 * at)
    run.ranks[0].facts.update({"malloc": {"step": [0, 99], "free": [0, 2_970 * 16], "resident": [50_000] * 2}})
    (creep,) = found(run)
    assert creep.advice[0].startswith("Most of it was freed, but the C library keeps it (")
    assert creep.evidence["bytes_per_step"] == pytest.approx(30 * MIB, rel=0.1)


STEPS = np.arange(16, 1_500, 48)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_leak_that_lives_on_what_was_free_is_found(rank: int) -> None:
    """As of a job that kept 256 KiB a step: the C library first kept 330 MB, then gave them to the leak."""
    run = with_samples(Cluster(ranks=2, steps=1_500, phases_ms=QUICK), rss_mb=lambda _, at: 700 + 0.0 * at)
    free = 400 * 16 - STEPS * 4
    run.ranks[rank].facts.update(malloc_of(STEPS, free, np.full(len(STEPS), 700 * 16)))
    (leak,) = found(run)
    assert (leak.evidence["which"], leak.ranks) == ("host_used", (rank,))
    assert leak.evidence["bytes_per_step"] == pytest.approx(256 * 1024, rel=0.02)
    assert leak.title.startswith(f"Host memory in use of rank {rank} grows by 256 KiB a step, from 3")


@pytest.mark.parametrize("shape", sorted(HEALTHY.keys() - {"small"}))
def test_what_healthy_processes_use_is_no_leak(shape: str) -> None:
    used = HEALTHY[shape](np.random.default_rng(0), STEPS)
    run = with_samples(Cluster(ranks=1, steps=1_500, phases_ms=QUICK), rss_mb=lambda _, at: 9_000 + 0.0 * at)
    run.ranks[0].facts.update(malloc_of(STEPS, 144_000 - used * 16, np.full(len(STEPS), 144_000)))
    assert found(run) == []


def test_old_readings_are_not_judged() -> None:
    """A cache that filled until step 150; in the run, nobody grows."""
    steps = np.arange(16, 160, 8)
    run = with_samples(Cluster(ranks=1, steps=1_500, phases_ms=QUICK), rss_mb=lambda _, at: 4_000 + 0.0 * at)
    run.ranks[0].facts.update(malloc_of(steps, 16 * (1_000 - 6 * steps), np.full(len(steps), 64_000)))
    assert found(run) == []
    steps = np.append(steps, np.arange(160, 1_500, 100))
    run.ranks[0].facts.update(malloc_of(steps, 16 * (1_000 - 6 * np.minimum(steps, 150)), np.full(len(steps), 64_000)))
    assert found(run) == []


@pytest.mark.parametrize(
    "raw", [{}, {"step": [1, 2], "free": [1]}, {"step": [3] * 20, "free": [1] * 20, "resident": [*range(20)]}]
)
def test_readings_that_are_none(raw: dict[str, Any]) -> None:
    run = with_samples(Cluster(ranks=1, steps=100, phases_ms=SECOND), rss_mb=lambda _, at: 700 + 0.0 * at)
    run.ranks[0].facts.update({"malloc": raw})
    assert found(run) == []


def malloc_of(steps: Steps, free: Steps, resident: Steps) -> dict[str, Any]:
    return {"malloc": {"step": steps.tolist(), "free": free.astype(int).tolist(), "resident": resident.tolist()}}


def test_two_samples_and_short_runs_say_nothing() -> None:
    short = Cluster(ranks=1, steps=30, phases_ms={"forward": 20.0, "backward": 40.0})
    assert found(with_samples(short, rss_mb=lambda _, at: 400 + 2000 * at, first_s=0.4)) == []
    few = Cluster(ranks=1, steps=8, phases_ms=SECOND)
    assert found(with_samples(few, rss_mb=lambda _, at: 400 + 2000 * at)) == []
    assert found(Cluster(ranks=0, steps=0).run()) == []


def test_a_rank_that_died_does_not_keep_the_others_from_being_judged() -> None:
    run = with_samples(
        Cluster(ranks=3, steps=100, phases_ms=SECOND, deaths=(Death(rank=1, step=20),)),
        rss_mb=lambda rank, at: 1000 + 5.0 * at,
    )
    assert [finding.kind for finding in found(run)] == ["memory_creep"]


# -- device memory that grows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_a_leak_on_the_device_is_told_once_with_its_end(every: int) -> None:
    cluster = on_device(ranks=2, allocated_mb=lambda _, at: 10_000 + 10 * at, memory_every=every)
    run = with_samples(cluster, gpu={"mem_used": 20 * GIB, "mem_total": 24 * GIB})
    (creep,) = found(run)
    assert (creep.kind, creep.severity, creep.ranks) == ("memory_creep", "critical", ())
    assert creep.evidence["which"] == "device_allocated"
    assert creep.evidence["bytes_per_step"] == 10 * MIB
    for end in ("first", "last"):  # what was there at that step, not half a stretch before it
        assert creep.evidence[f"{end}_bytes"] == (10_000 + 10 * creep.evidence[f"{end}_step"]) * MIB
    # Of the reserve nothing is free, the reserve's median of the second half being behind the peak.
    assert creep.evidence["runs_out_at_step"] == 199 + 410
    assert "loss.item()" in creep.advice[0]


def test_a_small_leak_of_a_large_job_is_seen_while_it_runs() -> None:
    """100 MB in 1,000 steps of a job that holds 20 GB, in the steps that are judged live."""
    steps = thresholds.LIVE_STEPS

    def creeps(bytes_a_step: float) -> list[Finding]:
        cluster = on_device(steps=steps, allocated_mb=lambda _, at: 20_000 + bytes_a_step / MIB * at)
        return found(with_samples(cluster, gpu={"mem_used": 24 * GIB, "mem_total": 141 * GIB}))

    (creep,) = creeps(105_000)
    assert (creep.kind, creep.evidence["which"]) == ("memory_creep", "device_allocated")
    assert creep.evidence["bytes_per_step"] == pytest.approx(105_000, rel=0.01)
    assert creeps(80_000) == [], "less than 100 MB in 1,000 steps"


def test_a_reserve_that_grows_by_itself_is_told_as_such() -> None:
    cluster = on_device(ranks=2, allocated_mb=4000.0, reserved_mb=lambda rank, at: 4500 + (4.0 * at if rank else 0.0))
    (creep,) = found(cluster.run())
    assert (creep.kind, creep.severity, creep.ranks) == ("memory_creep", "warning", (1,))
    assert creep.evidence["which"] == "device_reserved"
    assert creep.evidence["runs_out_at_step"] is None
    assert any("expandable_segments" in line for line in creep.advice)


def test_no_device_no_finding() -> None:
    assert kinds(Cluster(ranks=2, steps=100).run()) == []


# -- levels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("used", "expected"), [(0.90, None), (0.93, "warning"), (0.98, "critical")])
def test_a_full_device(used: float, expected: str | None) -> None:
    cluster = on_device(ranks=2, allocated_mb=1000.0)
    run = with_samples(cluster, gpu={"mem_used": lambda rank, at: int((used if rank else 0.5) * 80 * GIB)})
    assert kinds(run) == ([("memory_pressure", expected, (1,))] if expected else [])


def test_a_reserve_that_nobody_needs_does_not_press() -> None:
    cluster = on_device(allocated_mb=1000.0, peak_mb=60_000.0, reserved_mb=70_000.0)
    assert kinds(with_samples(cluster, gpu={"mem_used": 76 * GIB})) == []
    cluster = on_device(allocated_mb=1000.0, peak_mb=69_900.0, reserved_mb=70_000.0)
    (pressed,) = found(with_samples(cluster, gpu={"mem_used": 76 * GIB}))
    assert (pressed.kind, pressed.severity, pressed.ranks) == ("memory_pressure", "warning", ())
    assert pressed.title == "Device memory is nearly full: 95% of 80 GiB needed at the peak."


@pytest.mark.parametrize(("total", "severity"), [(80, "info"), (10, "warning")])
def test_a_rank_that_needs_more_than_its_peers(total: int, severity: str) -> None:
    cluster = on_device(ranks=4, allocated_mb=1000.0, peak_mb=lambda rank, at: 8000.0 if rank == 3 else 5000.0)
    run = with_samples(cluster, gpu={"mem_used": 4 * GIB, "mem_total": total * GIB})
    (uneven,) = found(run)
    assert (uneven.kind, uneven.severity, uneven.ranks) == ("memory_imbalance", severity, (3,))
    assert uneven.title == "Rank 3 needs 7.8 GiB of device memory at its peak, its peers typically 4.9 GiB."
    assert uneven.evidence["excess_bytes"] == 3000 * MIB


def test_small_differences_and_other_groups_are_no_imbalance() -> None:
    assert kinds(on_device(ranks=2, allocated_mb=lambda rank, at: 1000.0 + 400 * rank).run()) == []
    assert kinds(on_device(ranks=2, allocated_mb=lambda rank, at: 5000.0 + 900 * rank).run()) == []
    run = on_device(ranks=4, allocated_mb=lambda rank, at: 5000.0 + 3000 * (rank // 2)).run()
    for series in run.ranks:
        series.facts["peers"] = [[series.rank // 2 * 2, 2, 1]]
    assert kinds(run) == []


@pytest.mark.parametrize(("total", "severity"), [(80, "info"), (12, "warning")])
def test_a_fragmented_reserve(total: int, severity: str) -> None:
    cluster = on_device(allocated_mb=1000.0, peak_mb=6000.0, reserved_mb=10_000.0)
    run = with_samples(cluster, gpu={"mem_used": 9 * GIB, "mem_total": total * GIB})
    (loose,) = found(run)
    assert (loose.kind, loose.severity, loose.ranks) == ("fragmentation", severity, ())
    assert loose.title == "The allocator holds 9.8 GiB of device memory, 40% of it never in use at once."
    assert loose.evidence["growing"] is False


def test_activations_that_are_gone_at_the_end_of_the_step_are_no_gap() -> None:
    assert kinds(on_device(allocated_mb=1000.0, peak_mb=9000.0, reserved_mb=10_000.0).run()) == []


def test_gaps_that_grow_are_one_finding() -> None:
    cluster = on_device(allocated_mb=1000.0, peak_mb=4000.0, reserved_mb=lambda _, at: 5000 + 20 * at)
    (loose,) = found(cluster.run())
    assert (loose.kind, loose.severity) == ("fragmentation", "warning")
    assert loose.evidence["growing"] is True


# -- garbage ------------------------------------------------------------------------------------------------------

ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2),
    st.just(10**400), st.sampled_from([0, -1, 1, 1e18, "node0", "GPU-x", 1000]),
)  # fmt: skip
MEMORY_KEYS = (
    "node",
    "pid",
    "rss",
    "rss_file",
    "rss_answers",
    "index",
    "uuid",
    "mem_used",
    "mem_total",
    "mem_available",
    "name",
)


@given(
    st.lists(
        st.tuples(st.sampled_from(["host", "process", "gpu"]), st.dictionaries(st.sampled_from(MEMORY_KEYS), ANYTHING)),
        max_size=20,
    )
)
@settings(max_examples=examples(60), deadline=None)
def test_samples_may_hold_anything(lines: list[tuple[str, dict[str, Any]]]) -> None:
    run = with_samples(on_device(ranks=2, steps=40, allocated_mb=1000.0), rss_mb=500.0)
    odd = [
        {**dict(run.samples[index % len(run.samples)]), "kind": kind, **values}
        for index, (kind, values) in enumerate(lines)
    ]
    for finding in found(RunData(**{**run.__dict__, "samples": (*run.samples, *odd)})):
        finding.to_dict()


# -- growth over the whole run, from floors ---------------------------------------------------------------------------

BASE = 20_000_000_000
EPOCH = 1_000
MB = 1_000_000


def floors_of(
    used: Any, *, steps: int, epoch: int = EPOCH, step_s: float = 0.3, device: bool = False
) -> dict[str, Any]:
    """The fact that the recorder of a process tells last; {} if it tells none."""
    floors, recorded, due = MemoryFloors(0.0), {}, 0
    for step in range(steps):
        if epoch and step % epoch == 0:
            floors.epoch_begins(step)
        if step >= due:
            due, size = step + 50, int(used(step))
            recorded |= floors.add(step, step * step_s, 0 if device else size, size if device else 0)
    return recorded


def long_rise(facts: dict[str, Any], name: str = "host") -> bool:
    return bool(rise_of_floors([facts], name, 3, np.zeros(1)).rise.rises[0])


SLOW_LEAKS = {
    "even": lambda random, step: 105 * MB * step / EPOCH + abs(random.normal(0, 20 * MB)),
    "at each epoch": lambda random, step: 105 * MB * (step // EPOCH) + abs(random.normal(0, 20 * MB)),
    "under a sawtooth": lambda random, step: 105 * MB * step / EPOCH + 200 * MB * (step % 137) / 137,
}


@pytest.mark.seeds
@pytest.mark.parametrize("shape", SLOW_LEAKS)
def test_a_leak_of_100_mb_an_epoch_in_a_job_that_holds_20_gb(shape: str) -> None:
    """After ten epochs, half of what 5% of the job would be."""
    for seed in seeds(8):
        random = np.random.default_rng(seed)
        recorded = floors_of(lambda step, random=random: BASE + SLOW_LEAKS[shape](random, step), steps=10 * EPOCH)
        assert long_rise(recorded), seed


SLOW_AND_HEALTHY = {
    "flat": lambda random, step: abs(random.normal(0, 60 * MB)),
    "warm-up": lambda random, step: 3000 * MB * min(step / 600, 1) + abs(random.normal(0, 20 * MB)),
    "data cached in the first epoch": lambda random, step: 5000 * MB * min(step / EPOCH, 1),
    "a cache that fills ever slower": lambda random, step: 2000 * MB * (1 - np.exp(-step / 3000)),
    "a heap that fragments": lambda random, step: 300 * MB * np.log1p(step / 200) + abs(random.normal(0, 20 * MB)),
    "a sawtooth over four epochs": lambda random, step: 900 * MB * (step % 4100) / 4100,
    "checkpoints": lambda random, step: 4000 * MB * (step % EPOCH < 30) + abs(random.normal(0, 20 * MB)),
    "evaluation leaves something once": lambda random, step: 400 * MB * (step > 3 * EPOCH),
    "it twice": lambda random, step: 400 * MB * ((step > 3 * EPOCH) + (step > 8 * EPOCH)),
    "half as fast": lambda random, step: 50 * MB * step / EPOCH + abs(random.normal(0, 20 * MB)),
}


@pytest.mark.few(6)
@pytest.mark.seeds
@pytest.mark.parametrize("shape", SLOW_AND_HEALTHY)
@pytest.mark.parametrize("epoch", [EPOCH, 0])
def test_what_healthy_jobs_do_over_epochs_is_no_leak_at_any_time(shape: str, epoch: int) -> None:
    for seed in seeds(4):
        random = np.random.default_rng(seed)
        for steps in (1500, 3000, 5500, 7000, 12_000):
            recorded = floors_of(
                lambda step, random=random: BASE + SLOW_AND_HEALTHY[shape](random, step),
                steps=steps,
                epoch=epoch,
            )
            assert not long_rise(recorded), (seed, steps)


def test_a_slow_leak_is_told_by_epoch_while_the_job_runs() -> None:
    """The window that is judged live is long after its beginning, and shows nothing."""
    cluster = on_device(ranks=2, steps=thresholds.LIVE_STEPS, allocated_mb=20_000.0)
    run = with_samples(cluster, gpu={"mem_used": 24 * GIB, "mem_total": 141 * GIB})
    run.ranks[1].facts.update(floors_of(lambda step: BASE + 20_000 * step, steps=60_000, epoch=6_000, device=True))
    (creep,) = found(run)
    assert (creep.kind, creep.ranks, creep.evidence["which"]) == ("memory_creep", (1,), "device_allocated")
    assert creep.evidence["bytes_per_epoch"] == pytest.approx(120 * MB, rel=0.02)
    assert creep.title.startswith("Device memory in use of rank 1 grows by 114 MiB an epoch, from 19,")


def test_growth_over_the_whole_run_may_be_freed_memory_too() -> None:
    run = with_samples(on_device(ranks=1, steps=thresholds.LIVE_STEPS, allocated_mb=20_000.0))
    run.ranks[0].facts.update(floors_of(lambda step: BASE + 120_000 * step, steps=8_000, epoch=0))
    assert [finding.evidence["which"] for finding in found(run)] == ["host_rss"]
    free = [0, 120_000 * 8_000 >> 16]
    run.ranks[0].facts.update({"malloc": {"step": [0, 8_000], "free": free, "resident": [BASE >> 16] * 2}})
    assert found(run) == []


def test_the_first_epoch_is_awaited_if_it_is_short_enough() -> None:
    recorded = floors_of(lambda step: BASE + 300_000 * step, steps=8_000, epoch=0)
    assert long_rise(recorded)
    assert long_rise({**recorded, "loader": {"length": 1_000_000}})
    assert not long_rise({**recorded, "loader": {"length": 10_000}})


@pytest.mark.parametrize("raw", [{}, {"step": [1, 2], "host": [1]}, {"step": [3] * 20, "host": [1] * 20}])
def test_floors_that_are_none(raw: dict[str, Any]) -> None:
    assert not long_rise({"floors": raw})


# -- order ----------------------------------------------------------------------------------------------------------


def test_a_leak_that_ends_the_job_soon_comes_before_a_rank_that_slows_it() -> None:
    """Rank 1 is late by a third of each step; what is left of the memory lasts for some minutes."""
    late = slow_at(1, "forward", 500.0)
    run = with_samples(
        Cluster(ranks=2, steps=100, phases_ms=SECOND, faults=(late,)), rss_mb=lambda _, at: 1000 + 40.0 * at
    )
    first, second, *_ = diagnose(run)
    assert [(each.kind, each.severity) for each in (first, second)] == [
        ("memory_creep", "critical"),
        ("compute_straggler", "critical"),
    ]
    assert second.cost["share"] > 0.3


def _leak(in_s: float | None, severity: Severity = "critical") -> Finding:
    return Finding(kind="memory_creep", severity=severity, title=f"{in_s}", evidence={"runs_out_in_s": in_s})


def test_what_ruins_or_ends_a_job_comes_before_what_slows_it() -> None:
    slow = Finding(kind="low_overlap", severity="critical", title="slow", cost={"share": 0.9})
    wrong = Finding(kind="replica_desync", severity="critical", title="wrong")
    passing = Finding(kind="loss_nan", severity="info", title="passing")
    full = Finding(kind="memory_pressure", severity="critical", title="full")
    recorded = [slow, full, passing, _leak(None), _leak(240.0), _leak(60.0), _leak(5000.0, "warning"), wrong]
    order = [each.title for each in sorted(recorded, key=finding_order, reverse=True)]
    assert order == ["wrong", "60.0", "240.0", "None", "slow", "full", "5000.0", "passing"]
