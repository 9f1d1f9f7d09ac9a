"""What changed between two traces: bookkeeping that comes out even, and the sentence about it."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.findings import analyze_job
from stepscope.traces.job import JobAnalysis
from stepscope.traces.job_diff import OTHERS, Side, TraceDiff, changes, diff, per_step
from stepscope.traces.model.tables import table_of
from stepscope.traces.model.window import Window
from stepscope.traces.rank_analysis import RankAnalysis, analyze_rank


def job_of(*made: MadeTrace) -> JobAnalysis:
    traces = [trace.trace() for trace in made]
    return analyze_job([analyze_rank(trace, trace.meta.rank or 0) for trace in traces])


def rows(found: TraceDiff, table: str) -> dict[str, dict[str, Any]]:
    """By the first column."""
    every = found.tables[table]
    return {row[every.columns[0]]: row for row in every.to_rows()}


def training(
    *,
    steps: int = 4,
    copies: int = 2,
    gemm_us: float = 1000,
    extra: str | None = None,
    rank: int = 0,
    lengths: tuple[float, ...] = (),
    shapes: bool = False,
) -> MadeTrace:
    """Steps of a product and some copies, each as long as the device works; one more step, which is left out."""
    made = MadeTrace(rank=rank, world_size=4)
    now = 0.0
    for step in range(steps + 1):
        start = now
        work = [("aten::mm", "gemm", gemm_us), *[("aten::copy_", "copy_kernel", 100.0)] * copies]
        work += [(extra, "extra_kernel", 700.0)] if extra else []
        at = now
        for name, kernel, length in work:
            args = {"Input Dims": [[8, 8]], "Input type": ["float"]} if shapes else {}
            made.op(name, at, 8, **args)
            made.launched(kernel, at=at + 2, start=now + 10, dur=length)
            at, now = at + 9, now + length
        now += 20 + (lengths[step % len(lengths)] if lengths else 0)
        made.step(step, start, now - start)
    return made


def test_more_calls() -> None:
    found = diff(job_of(training()), job_of(training(copies=12)))
    assert found.verdict == (
        "Steps take 1.00 ms longer (+82%); 1.00 ms of it is the device work of aten::copy_, called 12 times a step "
        "instead of 2."
    )
    assert (found.step_before_ns, found.step_after_ns, found.step_change_ns) == (1_220_000, 2_220_000, 1_000_000)
    assert found.clear
    assert found.ranks == (0,)
    assert found.notices == ()
    assert rows(found, "diff_kernels")["copy_kernel"] == {
        "name": "copy_kernel",
        "class": "copy",
        "status": "slower",
        "before_count": 2.0,
        "after_count": 12.0,
        "before_ns": 200_000,
        "after_ns": 1_200_000,
        "change_ns": 1_000_000,
        "by_count_ns": 1_000_000,
        "by_length_ns": 0,
        "step_share": 1.0,
    }
    assert rows(found, "diff_kernels")["gemm"]["status"] == "same"
    copy = rows(found, "diff_operators")["aten::copy_"]
    assert (copy["before_calls"], copy["after_calls"], copy["device_change_ns"]) == (2.0, 12.0, 1_000_000)
    assert (copy["before_host_ns"], copy["after_host_ns"]) == (16_000, 96_000)
    summary = rows(found, "diff_summary")
    assert summary["step"]["change_ns"] == 1_000_000
    assert summary["compute"]["step_share"] == 1.0
    counts = rows(found, "diff_counts")
    assert counts["kernels"] == {"figure": "kernels", "before": 3.0, "after": 13.0, "change": 10.0}
    assert counts["operator calls"]["change"] == 10.0


def test_longer_calls() -> None:
    found = diff(job_of(training()), job_of(training(gemm_us=1500)))
    assert found.verdict == (
        "Steps take 500 µs longer (+41%); 500 µs of it is the device work of aten::mm, 1.50 ms a call instead of "
        "1.00 ms."
    )
    gemm = rows(found, "diff_kernels")["gemm"]
    assert (gemm["by_count_ns"], gemm["by_length_ns"], gemm["status"]) == (0, 500_000, "slower")
    back = diff(job_of(training(gemm_us=1500)), job_of(training()))
    assert back.verdict == (
        "Steps take 500 µs less (-29%); 500 µs of it is the device work of aten::mm, 1.00 ms a call instead of 1.50 ms."
    )
    assert rows(back, "diff_kernels")["gemm"]["status"] == "faster"


def test_added_and_gone() -> None:
    found = diff(job_of(training()), job_of(training(extra="aten::sort")))
    assert found.verdict == (
        "Steps take 700 µs longer (+57%); 700 µs of it is the device work of aten::sort, which is new (once a step)."
    )
    assert rows(found, "diff_kernels")["extra_kernel"]["status"] == "added"
    back = diff(job_of(training(extra="aten::sort")), job_of(training()))
    assert back.verdict == (
        "Steps take 700 µs less (-36%); 700 µs of it is the device work of aten::sort, which is gone (once a step "
        "before)."
    )
    assert rows(back, "diff_operators")["aten::sort"]["status"] == "gone"


def test_the_same_twice() -> None:
    found = diff(job_of(training()), job_of(training()))
    assert found.verdict == "Steps take as long as before: 1.22 ms against 1.22 ms, within their spread."
    assert not found.clear
    assert {row["status"] for row in found.tables["diff_operators"].to_rows()} == {"same"}
    assert {row["step_share"] for row in found.tables["diff_kernels"].to_rows()} == {None}


def test_steps_that_differ_as_much_by_themselves() -> None:
    noisy = (0.0, 900.0, 100.0, 700.0)
    found = diff(job_of(training(lengths=noisy)), job_of(training(lengths=(500.0, 1000.0, 0.0, 400.0))))
    assert not found.clear
    found = diff(job_of(training(lengths=noisy)), job_of(training(gemm_us=4000, lengths=noisy)))
    assert found.clear


def test_a_device_that_waits_longer() -> None:
    found = diff(job_of(training()), job_of(training(lengths=(600.0,))))
    assert found.verdict == (
        "Steps take 600 µs longer (+49%); 600 µs of it while the device waits for the host, and no single operator "
        "explains it."
    )


def on_host(*, loads: float = 1, loop: float = 1, mm: float = 10) -> MadeTrace:
    """A process without a device; milliseconds of each step."""
    made = MadeTrace()
    for step in range(5):
        length = loads + loop + mm
        at = step * length * 1000
        made.step(step, at, length * 1000)
        made.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, loads * 1000)
        made.op("aten::mm", at + loads * 1000, mm * 1000)
        made.python("train.py(9): tidy", at + (loads + mm) * 1000, loop * 1000)
    return made


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"loads": 21}, "Steps take 20.0 ms longer (+167%); 20.0 ms of it in the DataLoader."),
        ({"loop": 21}, "Steps take 20.0 ms longer (+167%); 20.0 ms of it in train.py(9): tidy."),
        (
            {"mm": 4, "loop": 3},
            "Steps take 4.00 ms less (-33%); 6.00 ms less is aten::mm, 4.00 ms a call instead of 10.0 ms.",
        ),
        (
            {"loads": 11, "mm": 6},
            (
                "Steps take 6.00 ms longer (+50%); 10.0 ms longer in the DataLoader, partly offset by 4.00 ms less in "
                "compute."
            ),
        ),
    ],
)
def test_a_process_without_a_device(change: dict[str, float], verdict: str) -> None:
    assert diff(job_of(on_host()), job_of(on_host(**change))).verdict == verdict


def test_few_steps_and_other_ranks_are_said() -> None:
    found = diff(job_of(training(steps=2)), job_of(training(rank=1, copies=3)))
    assert found.ranks == ()
    assert found.notices == (
        "The first has only 2 usable steps: the variation between steps is unknown.",
        "No rank is in both: the means over all ranks of each are compared.",
    )
    found = diff(job_of(training(rank=1), training(rank=2)), job_of(training(rank=2, copies=3), training(rank=3)))
    assert found.ranks == (2,)
    assert found.notices == ("Rank 2 is compared; the others are in only one of the two.",)
    assert rows(found, "diff_kernels")["copy_kernel"]["change_ns"] == 100_000


def test_a_trace_without_steps() -> None:
    before, after = MadeTrace(), MadeTrace()
    before.launched("gemm", at=0, start=10, dur=100)
    after.launched("gemm", at=0, start=10, dur=300)
    found = diff(job_of(before), job_of(after))
    assert found.verdict.startswith("The trace takes 200 µs longer (+182%); 200 µs of it is gemm")
    assert found.notices[0] == "The first has no profiler steps: its whole trace counts as one step."


def test_nothing_at_all() -> None:
    found = diff(analyze_job([]), analyze_job([]))
    assert (found.step_before_ns, found.step_after_ns, found.clear) == (0, 0, False)
    assert "diff_kernels" not in found.tables


def test_shapes_are_compared_where_both_have_them() -> None:
    found = diff(job_of(training(shapes=True)), job_of(training(shapes=True, copies=3)))
    copy = next(row for row in found.tables["diff_shapes"].to_rows() if row["operator"] == "aten::copy_")
    assert (copy["input_dims"], copy["before_calls"], copy["after_calls"]) == ("[[8, 8]]", 2.0, 3.0)
    assert "diff_shapes" not in diff(job_of(training(shapes=True)), job_of(training())).tables


def test_memory() -> None:
    before, after = training(), training()
    for made, peak in ((before, 3000), (after, 5000)):
        made.memory(5, peak, peak, 2 * peak)
    memory = rows(diff(job_of(before), job_of(after)), "diff_memory")
    assert memory["peak allocated"] == {
        "figure": "peak allocated",
        "before_bytes": 3000,
        "after_bytes": 5000,
        "change_bytes": 2000,
    }
    assert memory["peak reserved"]["change_bytes"] == 4000
    assert "diff_memory" not in diff(job_of(before), job_of(training())).tables


# -- bookkeeping ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(10**15), 10**15), max_size=30), st.integers(1, 50))
def test_parts_add_up_to_the_whole(totals: list[int], count: int) -> None:
    parts = per_step(totals, count)
    assert sum(parts) == sum(totals) // count
    for part, total in zip(parts, totals, strict=True):
        assert abs(Fraction(total, count) - part) <= 1


def with_kernels(analysis: RankAnalysis, limit: int, totals: dict[str, tuple[int, int]]) -> RankAnalysis:
    ordered = sorted(totals.items(), key=lambda item: (-item[1][1], item[0]))
    table = table_of(
        "kernels",
        "",
        ("name", "class", "count", "total_ns"),
        [(name, "other", count, total_ns) for name, (count, total_ns) in ordered],
        limit=limit,
    )
    return replace(analysis, tables={**analysis.tables, "kernels": table})


KERNELS = st.dictionaries(st.sampled_from("abcdefghij"), st.tuples(st.integers(1, 50), st.integers(0, 10**7)))
BASE = analyze_rank(training().trace(), 0)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(KERNELS, min_size=1, max_size=3), st.lists(KERNELS, min_size=1, max_size=3), st.integers(1, 8))
def test_changes_of_kernels_add_up(
    before: list[dict[str, tuple[int, int]]], after: list[dict[str, tuple[int, int]]], limit: int
) -> None:
    sides = [
        Side(analyses=tuple(with_kernels(replace(BASE, rank=at), limit, totals) for at, totals in enumerate(ranks)))
        for ranks in (before, after)
    ]
    found = changes(*sides, "kernels", ("name", "class"), "count", ("total_ns",))
    whole = [sum(total_ns for totals in ranks for _, total_ns in totals.values()) for ranks in (before, after)]
    steps = [side.rank_steps for side in sides]
    assert sum(each.before_ns[0] for each in found) == whole[0] // steps[0]
    assert sum(each.after_ns[0] for each in found) == whole[1] // steps[1]
    assert sum(each.change_ns[0] for each in found) == whole[1] // steps[1] - whole[0] // steps[0]
    counts = [sum(count for totals in ranks for count, _ in totals.values()) for ranks in (before, after)]
    assert sum(each.before_count for each in found) == pytest.approx(counts[0] / steps[0], abs=0.02)
    names = [{name for totals in ranks for name in totals} for ranks in (before, after)]
    for each in found:
        name = each.label[0]
        if each.status == "added":
            assert name in names[1] - names[0]
        elif each.status == "gone":
            assert name in names[0] - names[1]
        elif name != OTHERS and each.status != "unlisted":
            assert name in names[0] & names[1]


# -- a real pair ----------------------------------------------------------------------------------------------------


def kernels_by_hand(path: Path, last: int) -> tuple[Counter[str], Counter[str]]:
    """Counts and microseconds of kernels that were launched before the last profiler step began."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    step = next(
        each for each in events if each.get("name") == f"ProfilerStep#{last}" and each["cat"] != "gpu_user_annotation"
    )
    launches = {
        each["args"]["correlation"]: each["ts"]
        for each in reversed(events)
        if each.get("cat") in ("cuda_runtime", "cuda_driver") and each["args"].get("correlation", 0) > 0
    }
    count: Counter[str] = Counter()
    took: Counter[str] = Counter()
    for each in events:
        if each.get("cat") == "kernel" and launches.get(each["args"]["correlation"], 0) < step["ts"]:
            count[each["name"]] += 1
            took[each["name"]] += each["dur"]
    return count, took


@pytest.mark.soak  # near: made-up pairs, above
def test_a_real_pair(
    shared_data: Path,
    real_window: Callable[[Path], Window],
    real_analysis: Callable[[Path, int], RankAnalysis],
) -> None:
    folder = shared_data / "traces" / "hta_trace_diff"
    paths = [next((folder / side).glob("*.json.gz")) for side in ("control", "test")]
    before, after = (analyze_job([real_analysis(path, real_window(path).trace.meta.rank or 0)]) for path in paths)
    found = diff(before, after)
    assert found.verdict == (
        "Steps take 48.9 ms longer (+64%); 28.6 ms of it is the device work of CompiledFunctionBackward, which is new "
        "(once a step), and 18.1 ms is the device work of aten::copy_, called 872 times a step instead of 74."
    )
    assert found.notices == (
        "No rank is in both: the means over all ranks of each are compared.",
        "The devices differ: NVIDIA A100-PG509-200 before, Tesla V100-SXM2-16GB after.",
    )
    summary = rows(found, "diff_summary")
    parts = ("compute", "exposed communication", "exposed copies", "idle", "outside")
    assert sum(summary[part]["change_ns"] for part in parts) == summary["step"]["change_ns"] == found.step_change_ns
    (old_count, old_us), (new_count, new_us) = (kernels_by_hand(path, 1014) for path in paths)
    kernels = rows(found, "diff_kernels")
    assert kernels.keys() == old_count.keys() | new_count.keys()
    for name, row in kernels.items():
        assert (row["before_count"], row["after_count"]) == (old_count[name] / 5, new_count[name] / 5)
        assert abs(row["before_ns"] - old_us[name] * 200) <= 1
        assert abs(row["after_ns"] - new_us[name] * 200) <= 1
        assert row["by_count_ns"] + row["by_length_ns"] == row["change_ns"]
    assert sum(row["change_ns"] for row in kernels.values()) == (sum(new_us.values()) - sum(old_us.values())) * 200
    copies = rows(found, "diff_copies")
    assert (copies["DtoD"]["before_count"], copies["DtoD"]["after_count"]) == (3.0, 775.4)
