"""input_bound: all ranks wait for data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, slow_at
from fakes.records import edited
from numpy.typing import NDArray

from stepscope.diagnosis import diagnose
from stepscope.records.finding import Finding
from stepscope.records.series import RankSeries, RunData
from stepscope.reports import summarize

REMARKS = {"compute_bound", "jitter", "stall"}


def compute(input_ms: float) -> dict[str, float]:
    return {"input": input_ms, "forward": 10.0, "backward": 20.0, "optimizer": 5.0, "other": 1.0}


def of(run: RunData) -> list[Finding]:
    """Without remarks: that a job computes most of the time, that single steps were slow."""
    findings = diagnose(run)
    return [finding for finding in findings if finding is findings[0] or finding.kind not in REMARKS]


def kinds(cluster: Cluster) -> list[tuple[str, str]]:
    return [(finding.kind, finding.severity) for finding in of(cluster.run())]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("measured", [True, False])
def test_input_that_all_ranks_wait_for(ranks: int, measured: bool) -> None:
    assert kinds(Cluster(ranks=ranks, steps=60, phases_ms=compute(40.0), comm_measured=measured)) == [
        ("input_bound", "critical")
    ]
    assert kinds(Cluster(ranks=ranks, steps=60, phases_ms=compute(8.0), comm_measured=measured)) == [
        ("input_bound", "warning")
    ]
    assert kinds(Cluster(ranks=ranks, steps=60, phases_ms=compute(3.0), comm_measured=measured)) == [
        ("healthy", "info")
    ]


@pytest.mark.parametrize("hook", ["compress, train.py:12", None])
def test_a_communication_hook_that_takes_long_on_all_ranks(hook: str | None) -> None:
    run = Cluster(ranks=2, steps=60, noise=0.001, phases_ms={**compute(1.0), "comm_hook": 20.0}).run()
    ddp = {"ddp": {"comm_hook": hook}} if hook else {}
    found = diagnose(replace(run, ranks=tuple(replace(rank, facts=ddp) for rank in run.ranks)))[0]
    assert (found.kind, found.severity, found.phase) == ("comm_hook_bound", "warning", "comm_hook")
    where = f", mostly in {hook}" if hook else ""
    assert found.title == f"DDP's communication hook takes 20.0 ms of every step, 34% of the training time{where}."


@pytest.mark.parametrize(
    ("hook", "kind"), [("compress, train.py:12", "comm_hook_bound"), (None, "comm_bound"), ("fast", "comm_bound")]
)
def test_what_a_hook_appends_to_the_exchange_is_no_transfer(hook: str | None, kind: str) -> None:
    """60 ms for 4 MB on one host; 4 MB need a third of it on a busy machine, 200 MB take as long."""
    run = Cluster(ranks=2, steps=60, noise=0.001, comm_ms=60.0, ddp_hidden_ms=1.0).run()
    size = {"gradient_mb": 200.0 if hook == "fast" else 2.0, "buckets": 1, "bucket_mb": 25.0}
    facts = {"ddp": {**size, **({"comm_hook": hook} if hook else {})}}
    found = diagnose(replace(run, ranks=tuple(replace(rank, facts=facts) for rank in run.ranks)))[0]
    assert found.kind == kind
    assert ("DDP's communication hook (compress, train.py:12) runs in it." in found.title) == (kind != "comm_bound")


def test_its_price_is_the_wait() -> None:
    (found,) = of(Cluster(ranks=4, steps=101, noise=0.001, phases_ms=compute(20.0)).run())
    assert found.title == "Training waits for input: 20.0 ms of every step, 35% of the training time."
    assert found.phase == "input"
    assert found.ranks == ()
    assert found.cost["share"] == pytest.approx(20 / 57, abs=0.001)
    assert found.cost["if_fixed"]["step_ms"] == pytest.approx(37.0, abs=0.1)
    assert found.cost["if_fixed"]["speedup"] == pytest.approx(1 / (1 - found.cost["share"]), abs=0.001)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_its_share_is_that_of_the_table(noise: float) -> None:
    """The longest steps, which say nothing about it, wait as the others do."""
    run = Cluster(ranks=1, steps=200, noise=noise, phases_ms=compute(80.0)).run()
    (finding,) = of(run)
    table = summarize(run)["phases"]["input"]
    assert finding.cost["share"] == pytest.approx(table["share"], abs=0.004)
    assert finding.evidence["input_share"] == pytest.approx(table["share"], abs=0.004)
    assert finding.evidence["input_ms_per_step"] == pytest.approx(table["mean_ms"], rel=0.01)


def test_what_the_longest_steps_have_beyond_the_others_is_no_part_of_it() -> None:
    stalled = tuple(slow_at(0, "input", 5000.0, range(step, step + 1)) for step in (40, 90))
    run = Cluster(ranks=1, steps=200, noise=0.0, phases_ms=compute(64.0), faults=stalled).run()
    finding = next(found for found in diagnose(run) if found.kind == "input_bound")
    assert finding.cost["seconds"] == pytest.approx(finding.evidence["steps_used"] * 0.064 + 4 * 0.064, abs=0.1)


def test_a_tiny_quickstart_is_not_accused() -> None:
    tiny = {"input": 0.3, "forward": 0.2, "backward": 0.3, "optimizer": 0.15, "other": 0.05}
    assert kinds(Cluster(ranks=1, steps=300, phases_ms=tiny, noise=0.2, tail=0.02)) == [("healthy", "info")]


def test_long_epoch_starts_now_and_then_are_not_the_steady_state() -> None:
    found = kinds(Cluster(ranks=2, steps=200, epoch_every=50, epoch_input_ms=2000.0))
    assert found == [("jitter", "warning")]  # which says that it is the epoch starts


def test_short_epochs_that_start_slowly_are() -> None:
    (found,) = of(Cluster(ranks=2, steps=200, epoch_every=5, epoch_input_ms=300.0).run())
    assert found.kind == "input_bound"
    assert found.evidence["epoch_starts_included"] is True
    assert "persistent_workers" in found.advice[0]


def test_one_long_wait_is_not() -> None:
    faults = tuple(slow_at(rank, "input", 5000.0, range(40, 41)) for rank in range(2))
    assert [kind for kind, _ in kinds(Cluster(ranks=2, steps=100, faults=faults))] == ["stall"]


def test_an_episode_is_not() -> None:
    faults = tuple(slow_at(rank, "input", 60.0, range(40, 60)) for rank in range(2))
    assert [kind for kind, _ in kinds(Cluster(ranks=2, steps=120, faults=faults))] == ["throughput_drop"]


def test_workers_that_fall_behind_every_fourth_step_are_seen_and_told_apart() -> None:
    def fall_behind(_: RankSeries, steps: NDArray[Any]) -> None:
        steps["phase_ns"][::4, 1] += np.uint64(80_000_000)
        steps["wall_ns"][::4] += np.uint64(80_000_000)

    (found,) = of(edited(Cluster(ranks=1, steps=101).run(), fall_behind))
    assert found.kind == "input_bound"
    assert found.evidence["input_ms_per_step"] == pytest.approx(22.0, rel=0.1)
    assert found.advice[0].startswith("Workers fall behind in bursts")


def slow_batches(input_ms: float, extra_ms: float, every: int, ranks: int = 1) -> Cluster:
    faults = tuple(
        slow_at(rank, "input", extra_ms, range(at, at + 1)) for at in range(0, 300, every) for rank in range(ranks)
    )
    return Cluster(ranks=ranks, steps=300, noise=0.0, phases_ms=compute(input_ms), faults=faults)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slow_batch_now_and_then_is_told_as_such_and_not_of_every_step(ranks: int) -> None:
    (found,) = of(slow_batches(2.0, 500.0, 25, ranks).run())
    assert (found.kind, found.phase, found.evidence["period"]) == ("jitter", "input", 25)


def test_input_that_every_step_waits_for_is_priced_beside_the_slow_batches() -> None:
    first, second = (finding for finding in diagnose(slow_batches(9.0, 500.0, 25).run()))
    assert (first.kind, second.kind) == ("jitter", "input_bound")
    assert second.title.startswith("Training waits for input: 9.00 ms of every step")
    assert second.evidence["steps_used"] <= 300 - 300 // 25
    assert first.cost["share"] + second.cost["share"] < 1


def test_waits_of_some_steps_are_told_as_a_mean() -> None:
    (found,) = of(slow_batches(2.0, 80.0, 4).run())
    assert found.title == "Training waits for input: 20.6 ms a step on average, 36% of the training time."


def host_sample(cpu_percent: Any, **more: Any) -> dict[str, Any]:
    return {"kind": "host", "node": "node0", "cpu_percent": cpu_percent, "wall_ns": ANCHOR_WALL_NS + 2 * 10**9, **more}


def process_sample(cpu_percent: Any, pid: int = 1000) -> dict[str, Any]:
    return {**host_sample(cpu_percent), "kind": "process", "pid": pid}


@pytest.mark.parametrize(
    ("own_percent", "io_pressure", "expected"),
    [
        (60.0, 0.0, "The workers compute all the time: raise num_workers from 2"),
        (60.0, 0.5, "The workers compute all the time: raise num_workers from 2"),
        (10.0, 0.5, "The workers wait for storage: a local copy, larger files, or more of them (num_workers from 2)."),
        (10.0, 0.0, "Every step waits: raise num_workers from 2"),
    ],
)
def test_storage_is_blamed_only_if_workers_wait_for_it(own_percent: float, io_pressure: float, expected: str) -> None:
    """Of four cores the job takes 2.4, of which the rank has 0.1."""
    host = host_sample(own_percent, own_cpu_percent=own_percent, cpu_count=4, io_pressure=io_pressure)
    run = Cluster(ranks=1, steps=60, phases_ms=compute(40.0)).run()
    facts = {"loader": {"num_workers": 2}}
    series = tuple(replace(rank, facts=facts) for rank in run.ranks)
    (found,) = of(replace(run, ranks=series, samples=(host, process_sample(10.0))))
    assert found.advice[0].startswith(expected)
    assert "storage is too slow" not in " ".join(found.advice)


def test_compiling_is_not_advised_for_a_compiled_model() -> None:
    run = Cluster(ranks=1, steps=60, phases_ms={"forward": 20.0, "backward": 40.0}).run()
    for model, autocast, ways in (
        ({}, None, "autocast, torch.compile, a larger batch"),
        ({"compiled": True}, None, "autocast, a larger batch"),
        ({"compiled": True}, "bfloat16", "a larger batch"),
    ):
        facts = {"model": model, "autocast": autocast}
        found = diagnose(replace(run, ranks=tuple(replace(rank, facts=facts) for rank in run.ranks)))
        assert found[0].advice == (f"Faster from here means less compute per sample: {ways}.",)
        assert ("torch.compile" in " ".join(found[1].advice)) is (not model)
    compiled = Cluster(ranks=1, steps=60, phases_ms={"forward": 20.0, "backward": 40.0}, compile_steps=(3,)).run()
    assert "torch.compile" not in " ".join(diagnose(compiled)[0].advice)


@pytest.mark.parametrize(
    ("own_percent", "expected"),
    [
        (8.0, "Every step waits: raise num_workers"),
        (68.0, "Every step waits: raise num_workers"),
        (70.0, "The CPUs are already busy"),
        ("broken", "The CPUs are already busy"),
    ],
)
def test_cpus_that_others_keep_busy_are_no_reason_against_workers(own_percent: Any, expected: str) -> None:
    seen = (host_sample(98.0, own_cpu_percent=own_percent), process_sample(8.0))
    found = of(Cluster(ranks=1, steps=60, phases_ms=compute(40.0), samples=seen * 3).run())[0]
    assert (found.kind, found.advice[0].startswith(expected)) == ("input_bound", True)


@pytest.mark.parametrize(
    ("process_percent", "cpu_percent", "expected"),
    [
        (99.0, 50.0, "The batch is made in the training process itself"),
        (80.0, "broken", "The batch is made in the training process itself"),
        (79.0, 50.0, "Every step waits: raise num_workers"),
        ("broken", 50.0, "Every step waits: raise num_workers"),
        (99.0, 98.0, "The CPUs are already busy"),
    ],
)
def test_advice_fits_what_was_seen(process_percent: Any, cpu_percent: Any, expected: str) -> None:
    before_training = ({**host_sample(100.0), "wall_ns": 1}, {**process_sample(5.0), "wall_ns": 1})
    of_another = process_sample(3.0, pid=7)
    seen = (host_sample(cpu_percent), process_sample(process_percent), of_another, of_another)
    (found,) = of(Cluster(ranks=1, steps=60, phases_ms=compute(40.0), samples=(*before_training * 9, *seen * 3)).run())
    assert found.advice[0].startswith(expected)


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        (1, 64, "let DataLoader(num_workers=4) do it in parallel"),
        (1, 3, "let DataLoader(num_workers=2) do it in parallel"),
        (4, 8, "let DataLoader(num_workers=1) do it in parallel"),
        (4, 2, "let DataLoader(num_workers=1) do it in parallel"),
        (1, None, "let DataLoader workers (num_workers) do it in parallel"),
    ],
)
def test_no_more_workers_are_advised_than_there_are_cores(ranks: int, cores: int | None, expected: str) -> None:
    samples = (host_sample(50.0, cpu_count=cores), *(process_sample(99.0, 1000 + rank) for rank in range(ranks)))
    (found,) = of(Cluster(ranks=ranks, steps=60, phases_ms=compute(40.0), samples=samples).run())
    assert expected in found.advice[0]


def test_the_cores_are_told_where_there_may_be_too_few_workers() -> None:
    samples = (host_sample(50.0, cpu_count=8), process_sample(20.0))
    (found,) = of(Cluster(ranks=1, steps=60, phases_ms=compute(40.0), samples=samples).run())
    assert "raise num_workers (a process has about 8 cores here)" in found.advice[0]


def test_on_a_device_input_counts_only_where_the_device_waited() -> None:
    """Host input that is hidden behind device work takes none of the device's time."""

    def fetch(_: RankSeries, steps: NDArray[Any]) -> None:
        steps["phase_ns"][:, 1] += np.uint64(25_000_000)
        steps["phase_ns"][:, 0] -= np.uint64(25_000_000)

    (found,) = of(edited(Cluster(ranks=1, steps=60, device_timed=True, phases_ms=compute(2.0)).run(), fetch))
    assert found.kind == "healthy"
    (bound,) = of(Cluster(ranks=1, steps=60, device_timed=True, phases_ms=compute(30.0)).run())
    assert (bound.kind, bound.evidence["clock"]) == ("input_bound", "device")
    assert "pin_memory" in bound.advice[1]


def test_one_process_waits_for_nobody() -> None:
    """DDP of one process: backward less what the gradients took is its own work."""
    alone = diagnose(Cluster(ranks=1, phases_ms={"forward": 10.0, "backward": 10.0, "comm": 20.0}).run())
    assert "comm_bound" not in {finding.kind for finding in alone}
