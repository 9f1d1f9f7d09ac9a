"""Hosts, GPUs and memory in the summary: figures of the steady steps, peaks with their steps, and what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, gpu_uuid

from stepscope.records.series import RunData
from stepscope.reports import render_text, summarize

GIB = 1 << 30
MIB_OF_GIB = 1024.0
TENTH = {"forward": 100.0}
STARTING = {
    "util_percent": 0,
    "power_w": 90.0,
    "mem_used": GIB,
    "temperature_c": 30,
    "throttle_reasons": ["hw_thermal"],
}
BUSY = {"util_percent": 97, "power_w": 600.0, "mem_used": 36 * GIB, "temperature_c": 61, "throttle_reasons": []}


def cluster(**more: Any) -> Cluster:
    """The first step takes a second, all others a tenth: 100 of them are steady from 1.0 to 10.9 seconds."""
    known = {"ranks": 1, "steps": 100, "phases_ms": TENTH, "noise": 0.0, "warmup_ms": 900.0, "comm_ms": 0.0, **more}
    return Cluster(**{"device_timed": True, **known})


def gpu(at_s: float, rank: int = 0, node: str = "node0", **more: Any) -> dict[str, Any]:
    who = {"kind": "gpu", "node": node, "index": rank, "uuid": f"GPU-{gpu_uuid(rank)}", "name": "NVIDIA H200"}
    return {**who, "wall_ns": ANCHOR_WALL_NS + int(at_s * 1e9), "mem_total": 140 * GIB, **more}


def at_work(times: Iterable[float], ends_s: float, **more: Any) -> list[dict[str, Any]]:
    """Idle while it starts up, warms up, and after the last step."""
    return [gpu(at, **(BUSY if 1.0 < at < ends_s else STARTING), **more) for at in times]


def with_lines(run: RunData, lines: Iterable[dict[str, Any]]) -> RunData:
    return replace(run, samples=tuple(sorted(lines, key=lambda line: int(line["wall_ns"]))))


def lines_of(run: RunData, label: str) -> list[str]:
    """What the text says beside a label."""
    found: list[str] = []
    for line in render_text(summarize(run)).splitlines():
        name, words = line[2:12].strip(), line[12:]
        if name == label or (found and words and not name):
            found.append(words)
        elif found:
            break  # the next label, or a blank line
    return found


# -- figures of the steady steps ----------------------------------------------------------------------------------


def test_start_up_and_warm_up_are_not_in_the_figures() -> None:
    run = with_lines(cluster().run(), at_work(range(-20, 15), 10.9))
    (row,) = summarize(run)["host"]["gpus"]
    assert row["samples"] == 8  # from 3 to 10: the one at 2 looks back at the warm-up
    assert row["util_percent"] == {"median": 97.0, "max": 97.0}
    assert row["power_w"] == {"median": 600.0, "max": 600.0}
    assert row["temperature_c"] == {"median": 61.0, "max": 61.0}
    assert (row["mem_used_max"], row["mem_total"]) == (36 * GIB, 140 * GIB)
    assert (row["throttle_reasons"], row["throttled_share"]) == ([], 0.0)
    assert (row["in_use"], row["ranks"]) == (True, [0])
    assert lines_of(run, "GPU") == ["1× NVIDIA H200 · busy 97% · up to 61 °C · up to 600 W"]


def test_a_short_run_has_the_quick_samples_of_its_steady_steps() -> None:
    run = with_lines(cluster(steps=31).run(), at_work(np.arange(-6.0, 6.0, 0.2), 4.0))
    (row,) = summarize(run)["host"]["gpus"]
    assert (row["samples"], row["util_percent"]) == (10, {"median": 97.0, "max": 97.0})  # 2.0 to 4.0


def test_quick_samples_of_the_first_seconds_do_not_outweigh_the_rest() -> None:
    times = [*np.arange(0.0, 30.0, 0.2), *np.arange(30.0, 102.0, 1.0)]
    slow_start = [gpu(at, **{**BUSY, "util_percent": 40 if at < 30 else 97}) for at in times]
    (row,) = summarize(with_lines(cluster(steps=1000).run(), slow_start))["host"]["gpus"]
    assert row["util_percent"] == {"median": 97.0, "max": 97.0}
    assert row["samples"] == 101  # 30 of the first 28 seconds, 0.9 seconds apart, and 71


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_a_run_that_is_too_short_to_sample_says_so(steps: int) -> None:
    run = with_lines(cluster(steps=steps).run(), at_work(range(-20, 5), 1.0 + 0.1 * steps))
    (row,) = summarize(run)["host"]["gpus"]
    levels = ("util_percent", "power_w", "temperature_c", "mem_used_max", "throttled_share")
    assert {key: row[key] for key in levels} == dict.fromkeys(levels)
    assert (row["samples"], row["throttle_reasons"], row["mem_total"]) == (0, [], 140 * GIB)
    assert lines_of(run, "GPU") == ["1× NVIDIA H200 · no sample in the steady steps"]
    assert lines_of(run, "GPU mem") == []


def test_each_gpu_goes_by_the_steps_of_its_own_ranks() -> None:
    """Independent processes, the second of which begins when the first is over."""
    run = cluster(ranks=2, synchronized=False).run()
    first, second = run.ranks
    run = replace(run, ranks=(first, replace(second, anchor_wall_ns=ANCHOR_WALL_NS + 20 * 10**9)))
    lines = [gpu(at, rank, util_percent=10 * (rank + 1) + (at > 15)) for at in range(-5, 40) for rank in (0, 1)]
    rows = summarize(with_lines(run, lines))["host"]["gpus"]
    assert [(row["ranks"], row["samples"], row["util_percent"]) for row in rows] == [
        ([0], 8, {"median": 10.0, "max": 10.0}),
        ([1], 8, {"median": 21.0, "max": 21.0}),
    ]
    assert lines_of(with_lines(run, lines), "GPU") == ["2× NVIDIA H200 · busy 10–21%"]


def test_a_node_whose_clock_is_off_goes_by_its_own() -> None:
    """Its steps and its samples are off by the same: five minutes, as if nobody had measured it."""
    run = cluster(ranks=2, hosts=2).run()
    ahead_s = 300.0
    first, second = run.ranks
    run = replace(run, ranks=(first, replace(second, anchor_wall_ns=ANCHOR_WALL_NS + int(ahead_s * 1e9))))
    lines = at_work(range(-20, 15), 10.9)
    for line in at_work(range(-20, 15), 10.9, rank=1, node="node1"):
        lines.append({**line, "wall_ns": line["wall_ns"] + int(ahead_s * 1e9)})
        lines.append({**line, "util_percent": 3})  # from before that node began: steady only by the other's clock
    rows = summarize(with_lines(run, lines))["host"]["gpus"]
    assert [(row["node"], row["samples"], row["util_percent"]["median"]) for row in rows] == [
        ("node0", 8, 97.0),
        ("node1", 8, 97.0),
    ]


def test_of_several_attempts_the_last_one_counts() -> None:
    first = cluster(attempt=0).series()
    repeated = [
        replace(rank_series, anchor_wall_ns=ANCHOR_WALL_NS + 60 * 10**9) for rank_series in cluster(attempt=1).series()
    ]
    run = replace(cluster().run(), ranks=(*first, *repeated))
    lines = [gpu(at, util_percent=20, power_w=200.0) for at in range(-5, 60)]
    lines += [{**line, "wall_ns": line["wall_ns"] + 60 * 10**9} for line in at_work(range(15), 10.9)]
    (row,) = summarize(with_lines(run, lines))["host"]["gpus"]
    assert (row["samples"], row["util_percent"], row["power_w"]) == (
        8,
        {"median": 97.0, "max": 97.0},
        {"median": 600.0, "max": 600.0},
    )


def test_gpus_that_the_job_does_not_use_are_listed_but_not_told_of() -> None:
    others = [gpu(at, rank, **STARTING) for at in range(15) for rank in (1, 2, 3)]
    run = with_lines(cluster().run(), [*at_work(range(15), 10.9), *others])
    rows = summarize(run)["host"]["gpus"]
    assert [(row["index"], row["in_use"], row["ranks"]) for row in rows] == [
        (0, True, [0]),
        (1, False, []),
        (2, False, []),
        (3, False, []),
    ]
    assert lines_of(run, "GPU") == ["1 of 4× NVIDIA H200 · busy 97% · up to 61 °C · up to 600 W"]
    # A job that leaves all of them alone may want to know.
    idle = with_lines(cluster(device_timed=False).run(), others)
    assert lines_of(idle, "GPU")[0].startswith("3× NVIDIA H200 · busy 0%")


def test_a_host_has_figures_of_the_steady_steps_and_its_memory_of_the_whole_run() -> None:
    def host(at_s: float) -> dict[str, Any]:
        busy = 1.0 < at_s < 10.9
        figures = {"cpu_percent": 80.0 if busy else 4.0, "net_tx_bps": 3e8 if busy else 10.0, "load1": 9.0}
        memory = {"mem_total": 64 * GIB, "mem_available": (20 if at_s == -3 else 50) * GIB, "swap_used": 0}
        return {"kind": "host", "node": "node0", "wall_ns": ANCHOR_WALL_NS + int(at_s * 1e9), **figures, **memory}

    run = with_lines(cluster().run(), map(host, range(-20, 15)))
    (row,) = summarize(run)["host"]["nodes"]
    assert (row["samples"], row["cpu_percent"]) == (8, {"median": 80.0, "max": 80.0})
    assert row["net_tx_bps"] == {"median": 3e8, "max": 3e8}
    assert row["mem_available_min"] == 20 * GIB
    short = with_lines(cluster(steps=4).run(), map(host, range(-20, 3)))
    (row,) = summarize(short)["host"]["nodes"]
    assert (row["samples"], row["cpu_percent"], row["mem_available_min"]) == (0, None, 20 * GIB)
    assert lines_of(short, "host") == ["RAM 44 GiB of 64 GiB"]


# -- device memory --------------------------------------------------------------------------------------------------


def remembers(levels: Callable[[np.ndarray[Any, Any]], Any], **more: Any) -> RunData:
    """A rank whose peak since the start is ``levels(step)`` in GiB, read after every fifth step."""
    peaks = lambda _, steps: MIB_OF_GIB * np.asarray(levels(steps), np.float64)  # noqa: E731
    return cluster(
        peak_mb=peaks, **{"allocated_mb": 1.0, "reserved_mb": 35.0 * MIB_OF_GIB, "memory_every": 5, **more}
    ).run()


@pytest.mark.parametrize(
    ("levels", "peak_gib", "steps", "text"),
    [
        (lambda steps: np.where(steps < 42, 20.0, 31.0), 31, [41, 45], "(steps 41–45)"),
        (lambda steps: 20.0 + np.minimum(steps, 60) / 10, 26, [56, 60], "(steps 56–60)"),
        (lambda steps: np.full(len(steps), 31.0), 31, [None, 0], "(by step 0)"),
        # A script that resets its peak: the highest one was reached before that, and again later.
        (lambda steps: np.where((steps < 20) | (steps > 70), 31.0, 8.0), 31, [None, 0], "(by step 0)"),
        (lambda steps: np.select([steps < 20, steps < 70], [9.0, 8.0], 10.0), 10, [66, 70], "(steps 66–70)"),
    ],
)
def test_the_steps_in_which_the_peak_was_reached(
    levels: Any, peak_gib: int, steps: list[int | None], text: str
) -> None:
    run = remembers(levels)
    memory = summarize(run)["memory"]
    assert memory["device_peak"] == {"bytes": peak_gib * GIB, "rank": 0, "steps": steps}
    assert memory["ranks"][0]["device_peak_steps"] == steps
    assert lines_of(run, "GPU mem") == [f"allocated {peak_gib} GiB at peak {text} · reserved 35 GiB"]


def test_a_read_after_every_step_names_one_step_and_a_lost_one_widens_the_range() -> None:
    def rises(steps: Any) -> Any:
        return np.where(steps < 42, 20.0, 31.0)

    assert summarize(remembers(rises, memory_every=1))["memory"]["device_peak"]["steps"] == [42, 42]
    assert " at peak (step 42) · " in lines_of(remembers(rises, memory_every=1), "GPU mem")[0]
    lost = remembers(rises, missing={0: range(31, 46)})
    assert summarize(lost)["memory"]["device_peak"]["steps"] == [31, 50]


def test_room_is_what_nobody_uses_of_the_device() -> None:
    run = remembers(lambda steps: np.where(steps < 42, 20.0, 31.0))
    # The sample of the warm-up does not count, though more was in use.
    lines = [*at_work(range(-5, 15), 10.9), gpu(0.5, **{**STARTING, "mem_used": 139 * GIB})]
    run = with_lines(run, lines)
    (row,) = summarize(run)["memory"]["ranks"]
    assert {key: row[key] for key in row if key.startswith("device")} == {
        "device_allocated": 1 << 20,
        "device_reserved": 35 * GIB,
        "device_reserved_max": 35 * GIB,
        "device_peak": 31 * GIB,
        "device_peak_steps": [41, 45],
        "device_total": 140 * GIB,
        "device_free": 104 * GIB,
        "device_free_from": "nvml",
    }
    assert lines_of(run, "GPU mem") == [
        "allocated 31 GiB at peak (steps 41–45) · reserved 35 GiB",
        "104 GiB of 140 GiB free",
    ]


def test_without_samples_room_is_what_the_own_allocator_does_not_hold() -> None:
    run = remembers(lambda steps: np.full(len(steps), 31.0))
    (series,) = run.ranks
    known = replace(run, ranks=(replace(series, identity=replace(series.identity, device_bytes=140 * GIB)),))
    (row,) = summarize(known)["memory"]["ranks"]
    assert (row["device_total"], row["device_free"], row["device_free_from"]) == (140 * GIB, 105 * GIB, "allocator")
    assert lines_of(known, "GPU mem")[-1].endswith("105 GiB of 140 GiB not reserved")
    # A sample of start-up tells how much there is, not how much of it was free.
    starting = with_lines(run, [gpu(-3.0, **STARTING)])
    (row,) = summarize(starting)["memory"]["ranks"]
    assert (row["device_total"], row["device_free"], row["device_free_from"]) == (140 * GIB, 105 * GIB, "allocator")


def test_a_reserve_that_was_given_back_counts_for_the_text() -> None:
    run = remembers(
        lambda steps: np.full(len(steps), 31.0),
        reserved_mb=lambda _, steps: MIB_OF_GIB * np.where(steps < 50, 35.0, 10.0),
    )
    (row,) = summarize(run)["memory"]["ranks"]
    assert (row["device_reserved"], row["device_reserved_max"]) == (10 * GIB, 35 * GIB)
    assert lines_of(run, "GPU mem") == ["allocated 31 GiB at peak (by step 0) · reserved 35 GiB"]


def test_of_several_ranks_the_one_with_the_least_room_is_shown() -> None:
    run = cluster(
        ranks=4,
        allocated_mb=1.0,
        peak_mb=lambda rank, steps: MIB_OF_GIB * (30.0 + rank + (steps >= 10)),
        reserved_mb=40.0 * MIB_OF_GIB,
    ).run()
    # Somebody else holds memory on the device of rank 1.
    lines = [gpu(at, rank, mem_used=(90 if rank == 1 else 42) * GIB) for at in range(15) for rank in range(4)]
    assert lines_of(with_lines(run, lines), "GPU mem") == [
        "allocated 32 GiB at peak (step 10) · reserved 40 GiB",
        "50 GiB of 140 GiB free (rank 1)",
    ]
    assert lines_of(run, "GPU mem") == ["allocated 34 GiB at peak (step 10) · reserved 40 GiB (rank 3)"]
    assert summarize(run)["memory"]["device_peak"] == {"bytes": 34 * GIB, "rank": 3, "steps": [10, 10]}


def test_a_device_whose_allocator_was_not_read_has_its_room() -> None:
    assert lines_of(with_lines(cluster().run(), at_work(range(15), 10.9)), "GPU mem") == ["104 GiB of 140 GiB free"]
    unknown = [{**line, "uuid": None} for line in at_work(range(15), 10.9)]
    ranks = with_lines(cluster(ranks=2).run(), [*unknown, *({**line, "index": 1} for line in unknown)])
    assert [row["ranks"] for row in summarize(ranks)["host"]["gpus"]] == [[], []]
    assert lines_of(ranks, "GPU mem") == ["104 GiB of 140 GiB free"]
