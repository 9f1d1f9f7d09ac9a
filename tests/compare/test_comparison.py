"""The document of a comparison: what moved, where, and what else differs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster, slow_at

from stepscope.comparison.comparison import Limits, compare_inputs, gate_inputs, percent_text
from stepscope.comparison.inputs import Input, Measured, input_of_run
from stepscope.comparison.statistics import Series
from stepscope.comparison.text import comparison_page, render_comparison, render_markdown
from stepscope.errors import CompareError
from stepscope.reports.summary import summarize

END = {"exit_code": 0, "status": "finished", "wall_ns": 1_700_000_100_000_000_000}


def input_of(name: str, *, meta: Mapping[str, Any] | None = None, **more: Any) -> Input:
    cluster = Cluster(**{"ranks": 4, "steps": 200, "name": name, "meta": {"end": END, **(meta or {})}, **more})
    run = cluster.run()
    return input_of_run(run, summarize(run))


def everywhere(phase: str, ms: float, ranks: int = 4) -> tuple[Any, ...]:
    return tuple(slow_at(rank, phase, ms) for rank in range(ranks))


@pytest.fixture(scope="module")
def baselines() -> list[Input]:
    return [input_of(f"base{seed}", seed=seed) for seed in range(3)]


# -- verdict and cause ------------------------------------------------------------------------------------------------


def test_equal_runs_are_the_same(baselines: Sequence[Input]) -> None:
    found = compare_inputs([*baselines, *(input_of(f"base{seed}", seed=seed) for seed in (3, 4, 5))], input_of("same"))
    assert found["verdict"] == "same"
    assert abs(found["change"]) < 0.003
    assert found["like_for_like"]
    assert found["cause"] is None
    assert found["needed"] is None
    assert found["title"] == "same is as fast as 6 baselines, within 1%."
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer", "mine"])
def test_the_phase_that_moved_on_all_ranks_is_named(baselines: Sequence[Input], phase: str) -> None:
    found = compare_inputs(baselines, input_of("slow", seed=9, faults=everywhere(phase, 2.0)))
    assert found["verdict"] == "slower"
    assert found["change"] == pytest.approx(0.05, abs=0.005)
    assert (found["cause"]["phase"], found["cause"]["ranks"]) == (phase, [])
    assert found["cause"]["text"] == f"{phase} takes {found['cause']['change_ms']:.2f} ms longer on all ranks."
    assert [row["phase"] for row in found["phases"] if row["real"]] == [phase]


@pytest.mark.parametrize("rank", [0, 3])
def test_the_rank_that_moved_is_named_with_its_phase(baselines: Sequence[Input], rank: int) -> None:
    found = compare_inputs(baselines, input_of("slow", seed=9, faults=(slow_at(rank, "forward", 4.0),)))
    assert found["verdict"] == "slower"
    assert (found["cause"]["phase"], found["cause"]["ranks"]) == ("forward", [rank])
    assert found["cause"]["text"].startswith(f"Rank {rank} takes ")
    assert found["cause"]["text"].endswith(" longer in forward; the other ranks wait.")
    assert found["ranks"]["moved"] == [rank]
    assert found["ranks"]["skew_ms"]["after"] > 10 * found["ranks"]["skew_ms"]["before"]


def test_slower_communication_is_not_blamed_on_a_rank(baselines: Sequence[Input]) -> None:
    found = compare_inputs(baselines, input_of("slow", seed=9, comm_ms=4.0))
    assert found["verdict"] == "slower"
    assert (found["cause"]["phase"], found["cause"]["ranks"]) == ("comm", [])
    assert "beyond the wait for slower ranks" in found["cause"]["text"]


def test_a_gain_is_named_as_well(baselines: Sequence[Input]) -> None:
    before = input_of("before", seed=9, faults=(slow_at(1, "backward", 5.0),))
    found = compare_inputs([before], baselines[0])
    assert found["verdict"] == "faster"
    assert (found["cause"]["phase"], found["cause"]["ranks"]) == ("backward", [1])
    assert found["cause"]["text"].endswith(" less in backward.")
    assert [row["kind"] for row in found["findings"]["gone"]] == ["compute_straggler"]


def test_no_rank_is_named_where_waiting_was_not_measured() -> None:
    before = input_of("before", seed=1, comm_measured=False)
    found = compare_inputs(
        [before], input_of("after", seed=2, comm_measured=False, faults=(slow_at(1, "forward", 4.0),))
    )
    assert found["verdict"] == "slower"
    assert not found["ranks"]["compared"]
    assert found["cause"] is None, "backward is longer on all but one rank, because they wait there"


def test_device_times_are_compared_where_both_have_them() -> None:
    before = input_of("before", seed=1, device_timed=True)
    after = input_of("after", seed=2, device_timed=True, faults=everywhere("backward", 3.0))
    found = compare_inputs([before], after)
    assert found["clock"] == "device"
    assert found["cause"]["phase"] == "backward"
    mixed = compare_inputs([input_of("host", seed=1)], after)
    assert mixed["clock"] == "host"


def test_one_process_has_no_ranks_to_name() -> None:
    before = input_of("before", seed=1, ranks=1)
    found = compare_inputs([before], input_of("after", seed=2, ranks=1, faults=everywhere("forward", 3.0, 1)))
    assert found["cause"]["text"].endswith("longer.")
    assert found["cause"]["phase"] == "forward"


def test_uneven_runs_cannot_be_told_apart() -> None:
    before = input_of("before", seed=1, noise=0.3, drift=0.2)
    found = compare_inputs([before], input_of("after", seed=2, noise=0.3, drift=0.2))
    assert found["verdict"] == "cannot_tell"
    low, high = found["interval"]
    assert low < -0.01
    assert high > 0.01
    assert found["needed"] is not None


def numbers_of(name: str, times_ms: Sequence[float]) -> Input:
    values = np.array(times_ms) * 1e6
    run = Series(numbers=np.arange(len(values)), values=values)
    return Input(
        name=name, path=name, kind="numbers", measured={"given": Measured(clock="given", run=run)}, steady=len(values)
    )


def test_percentiles_are_of_all_steps_and_decide_nothing() -> None:
    even = [100.0] * 97
    before = [numbers_of("one", [*even, 101, 110, 120, 130]), numbers_of("two", [*even, 101, 110, 124, 130])]
    found = compare_inputs(before, numbers_of("after", [*even, 101, 150, 160, 170]))
    assert found["percentiles_ms"] == {
        "p50": {"before": 100.0, "after": 100.0},
        "p90": {"before": 100.0, "after": 100.0},
        "p99": {"before": 122.0, "after": 160.0},
    }
    words = "p50 100 ms → 100 ms", "p90 100 ms → 100 ms", "p99 122 ms → 160 ms"
    assert f"            {' · '.join(words)}" in render_comparison(found).splitlines()
    assert f"- percentiles: {', '.join(words)}" in render_markdown(found).splitlines()
    sides = {side["title"]: side["items"] for side in comparison_page(found)["verdict"]["sides"]}
    assert sides["percentiles"] == [[" · ".join(words), ""]]


def test_percentiles_need_enough_steps() -> None:
    def names(before: Input, after: Input) -> list[str]:
        return list(compare_inputs([before], after)["percentiles_ms"])

    long = numbers_of("long", [100.0] * 100)
    assert names(long, numbers_of("b", [100.0] * 99)) == ["p50", "p90"]
    assert names(numbers_of("a", [100.0] * 19), long) == ["p50"]
    assert names(replace(numbers_of("a", [1.0] * 100), unit="throughput"), replace(long, unit="throughput")) == []


# -- context ----------------------------------------------------------------------------------------------------------


def changed(found: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {row["name"]: (row["before"], row["after"]) for row in found["context"]}


def test_what_differs_is_said_first_and_makes_it_another_job() -> None:
    facts = {"model": {"class": "Net", "parameters": 1000}, "loader": {"batch_size": 8, "num_workers": 2}}
    more = {"model": {"class": "Net", "parameters": 2000}, "loader": {"batch_size": 8, "num_workers": 0}}
    git = {"git": {"commit": "abc", "branch": "main", "dirty": False}}
    dirty = {"git": {"commit": "def", "branch": "main", "dirty": True}, "environment": {"NCCL_ALGO": "Ring"}}
    before = input_of("before", seed=1, ranks=2, facts=facts, meta=git)
    after = input_of("after", seed=2, ranks=4, facts=more, meta=dirty)
    found = compare_inputs([before], after)
    assert not found["like_for_like"]
    assert changed(found) == {
        "world_size": (2, 4),
        "model.parameters": (1000, 2000),
        "git.commit": ("abc", "def"),
        "git.dirty": (False, True),
        "loader.num_workers": (2, 0),
        "environment.NCCL_ALGO": (None, "Ring"),
    }
    assert [row["matters"] for row in found["context"]] == [True, True, False, False, False, False]
    assert found["title"].endswith(", but this does not compare like with like.")
    for text in (render_comparison(found, width=100), render_markdown(found)):
        first = text.splitlines()[0]
        assert "world size 2 → 4; parameters 1,000 → 2,000" in first.replace("\\", "")


def test_of_two_commands_the_words_that_differ_are_shown() -> None:
    words = ["python", "/a/very/long/path/to/some/training/script/train.py", "--lr", "0.1", "--steps", "9"]
    before = input_of("before", seed=1, meta={"command": words})
    after = input_of("after", seed=2, meta={"command": [*words[:3], "0.2", *words[4:], "--compile"]})
    found = compare_inputs([before], after)
    assert found["like_for_like"]
    assert "command --lr 0.1 → --lr 0.2 --compile" in render_comparison(found)


def test_what_was_not_recorded_is_no_difference(baselines: Sequence[Input]) -> None:
    bare = replace(baselines[0], context={}, name="bare", path="bare")
    found = compare_inputs([bare], input_of("after", seed=5))
    assert found["like_for_like"]
    assert "world_size" not in changed(found)


# -- memory, communication, findings ----------------------------------------------------------------------------------


def test_memory_is_compared_with_the_largest_baseline(baselines: Sequence[Input]) -> None:
    before = [
        replace(baseline, memory={"device_peak": size}) for baseline, size in zip(baselines, (90, 100, 95), strict=True)
    ]
    after = replace(input_of("after", seed=9), memory={"device_peak": 120, "rss_peak": 5})
    assert compare_inputs(before, after)["memory"] == {"device_peak": {"before": 100, "after": 120, "change": 0.2}}


def test_exchanges_are_listed_before_and_after(baselines: Sequence[Input]) -> None:
    row = {"group": "data", "op": "all_reduce", "count": 1.0, "bytes": 1000.0, "exposed_ms": 2.0}
    before = replace(baselines[0], communication=[row])
    after = replace(input_of("after", seed=9), communication=[{**row, "bytes": 2000.0}])
    found = compare_inputs([before], after)
    assert found["communication"][0]["bytes"] == {"before": 1000.0, "after": 2000.0}
    assert "all_reduce (data) 1.0 KiB → 2.0 KiB per step" in render_comparison(found)


def test_new_findings_are_those_that_no_baseline_has(baselines: Sequence[Input]) -> None:
    found = compare_inputs(baselines, input_of("slow", seed=9, faults=(slow_at(2, "forward", 8.0),)))
    assert [row["kind"] for row in found["findings"]["new"]] == ["compute_straggler"]
    assert found["findings"]["gone"] == []


# -- gate -------------------------------------------------------------------------------------------------------------


def gated(baselines: Sequence[Input], after: Input, **limits: Any) -> Mapping[str, Any]:
    result: Mapping[str, Any] = gate_inputs(baselines, after, Limits(**{"slowdown": 0.02, **limits}))["gate"]
    return result


def test_a_gate_passes_what_is_certainly_below_the_limit(baselines: Sequence[Input]) -> None:
    gate = gated(baselines, input_of("same", seed=9))
    assert (gate["result"], gate["exit_code"]) == ("pass", 0)
    assert gate["text"] == "Pass: same is not more than 2% slower."


def test_a_gate_fails_what_is_certainly_above_it(baselines: Sequence[Input]) -> None:
    gate = gated(baselines, input_of("slow", seed=9, faults=everywhere("forward", 3.0)))
    assert (gate["result"], gate["exit_code"]) == ("regression", 1)
    assert gate["text"].startswith("Regression: slow is ")
    assert gate["text"].endswith(" slower; the limit is 2%.")


def test_a_gate_does_not_guess_in_between(baselines: Sequence[Input]) -> None:
    gate = gated(baselines, input_of("slow", seed=9, faults=everywhere("forward", 0.8)))
    assert (gate["result"], gate["exit_code"]) == ("cannot_tell", 2)
    assert "would settle it" in gate["text"] or "too uneven" in gate["text"]


def test_another_job_does_not_pass(baselines: Sequence[Input]) -> None:
    gate = gated(baselines, input_of("small", seed=9, ranks=2))
    assert (gate["result"], gate["exit_code"]) == ("cannot_tell", 2)
    assert gate["text"] == "Cannot tell: world size changed, so steps cannot be compared."


def test_limits_on_memory(baselines: Sequence[Input]) -> None:
    before = [replace(baseline, memory={"device_peak": 1 << 30}) for baseline in baselines]
    after = replace(input_of("after", seed=9), memory={"device_peak": int(1.1 * (1 << 30))})
    assert gated(before, after, memory=0.2)["result"] == "pass"
    gate = gated(before, after, memory=0.05)
    assert gate["result"] == "regression"
    assert gate["text"] == "Regression: device memory 1.0 GiB → 1.1 GiB (+10%); the limit is 5% more."
    assert gated(baselines, after, memory=0.05)["result"] == "cannot_tell", "it is not known for the baselines"


def test_new_findings_fail_a_gate_that_forbids_them(baselines: Sequence[Input]) -> None:
    after = input_of("slow", seed=9, faults=(slow_at(2, "forward", 8.0),))
    gate = gated(baselines, after, slowdown=0.9, new_findings=False)
    assert gate["result"] == "regression"
    assert gate["text"].startswith("Regression: 1 new finding: Rank 2 is ")
    assert gated(baselines, after, slowdown=0.9)["result"] == "pass"
    with pytest.raises(CompareError, match="--no-new-findings needs runs of Stepscope"):
        gated([replace(baseline, findings=None) for baseline in baselines], after, new_findings=False)


def test_stalls_that_recur_do_not_pass(baselines: Sequence[Input]) -> None:
    """Four steps take a quarter of the time; that all others are as before is no pass."""
    stalls = tuple(
        slow_at(rank, "forward", 600.0, range(step, step + 1)) for step in (30, 80, 120, 160) for rank in range(4)
    )
    assert gated(baselines, input_of("stalls", seed=9, faults=stalls))["result"] != "pass"


# -- for people -------------------------------------------------------------------------------------------------------


def test_text_fits_the_width_and_says_where(baselines: Sequence[Input]) -> None:
    found = compare_inputs(baselines, input_of("slow", seed=9, faults=everywhere("forward", 2.0)))
    for width in (60, 80, 120):
        text = render_comparison(found, width=width)
        assert max(map(len, text.splitlines())) <= width
    assert text.splitlines()[0] == f"▲ slow is {percent_text(found['change'], signed=False)} slower than 3 baselines."
    assert "on all ranks" in text
    assert "as 3 baselines show" in text


def test_names_cannot_inject_anything(baselines: Sequence[Input]) -> None:
    name = "x<script>|`*_\x1b[31m"
    found = compare_inputs(baselines, replace(input_of("slow", seed=9), name=name))
    assert "<script>" not in render_markdown(found)
    assert "\x1b" not in render_comparison(found) + render_markdown(found) + str(comparison_page(found))


def test_the_page_shows_the_phases_before_and_after(baselines: Sequence[Input]) -> None:
    found = compare_inputs(baselines, input_of("slow", seed=9, faults=everywhere("forward", 2.0)))
    page = comparison_page(found)
    assert page["name"] == "slow and 3 baselines"
    assert (page["verdict"]["look"], page["verdict"]["title"]) == ("warning", found["title"])
    bars, phases = page["parts"][:2]
    assert (bars["form"], bars["title"]) == ("bars", "Where the time of a step goes")
    assert [row["label"] for row in bars["rows"]] == ["before", "after"]
    moved = {part[0]: part[1] for part in bars["rows"][1]["parts"]}["forward"]
    assert moved - {part[0]: part[1] for part in bars["rows"][0]["parts"]}["forward"] == pytest.approx(2.0, abs=0.3)
    assert [row[0] for row in phases["tables"][0]["rows"]][:2] == ["input", "forward"]
    json.dumps(page, allow_nan=False)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0511, "+5.1%"), (-0.0023, "-0.23%"), (0.0, "0.00%"), (0.02, "+2%"), (2.324, "+232%"), (-0.00001, "0.00%")],
)
def test_percentages(share: float, text: str) -> None:
    assert percent_text(share) == text


def test_every_key_of_the_document_is_documented(root: Path, baselines: Sequence[Input]) -> None:
    found = gate_inputs(baselines, input_of("slow", seed=9), Limits(slowdown=0.02))
    page = (root / "docs" / "compare-reference.md").read_text()
    matches = set(re.findall(r"`(\w+)`", page.partition("## The document")[2]))
    parts = [found, *(found[name] for name in ("gate", "noise", "compared", "ranks", "candidate"))]
    parts += [found["phases"][0], found["ranks"]["rows"][0], found["gate"]["checks"][0]]
    assert {name for part in parts for name in part} - matches == set()


def test_three_times_as_long_is_slower_however_uneven_the_steps_are() -> None:
    """A busy machine: steps scatter by a third and wander, and there is one baseline."""
    slow = input_of("slow", seed=9, steps=80, noise=0.35, faults=everywhere("forward", 60.0))
    found = compare_inputs([input_of("base", seed=3, steps=80, noise=0.35)], slow)
    assert found["verdict"] == "slower"
    assert found["interval"][0] > 0.2
    back = compare_inputs([slow], input_of("base", seed=3, steps=80, noise=0.35))
    assert back["verdict"] == "faster"
    assert -1 < back["interval"][0] < back["interval"][1] < 0


def test_runs_on_a_machine_that_others_used_are_assumed_to_differ() -> None:
    busy = {"kind": "cpu_saturated", "severity": "warning", "title": "Other processes use 1.5 of 2 cores.", "ranks": []}
    shared = {**busy, "evidence": {"cpu_percent": 100.0, "own_cpu_percent": 20.0}, "cost": {}}
    own = {**busy, "evidence": {"cpu_percent": 100.0, "own_cpu_percent": 98.0}, "cost": {}}
    base, slow = input_of("base", seed=3), input_of("slow", seed=9, faults=everywhere("forward", 2.0))
    assert compare_inputs([base], slow)["verdict"] == "slower"
    assert compare_inputs([base], replace(slow, findings=[own]))["verdict"] == "slower"
    found = compare_inputs([base], replace(slow, findings=[shared]))
    assert found["verdict"] == "cannot_tell"
    assert found["notices"][-1] == (
        "Other processes used much of the machine of slow, so equal runs are assumed to differ by 8% at least, "
        "unless several baselines show otherwise."
    )
