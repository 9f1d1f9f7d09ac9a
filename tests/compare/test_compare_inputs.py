"""What can be compared: runs in any state, summaries, stored baselines, and files of other tools, also broken ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster, Death, slow_at
from hypothesis import given
from hypothesis import strategies as st

from stepscope.comparison import inputs
from stepscope.comparison.comparison import compare_inputs
from stepscope.comparison.inputs import (
    Input,
    check_comparable,
    decode_baseline,
    encode_baseline,
    input_of_run,
    read_input,
)
from stepscope.comparison.statistics import Level, Series
from stepscope.errors import CompareError, CompareTooShort, StepscopeError
from stepscope.reports.summary import summarize

FINISHED = {"end": {"exit_code": 0, "status": "finished", "wall_ns": 1_700_000_100_000_000_000}}


def input_of(cluster: Cluster, *, alive: bool = False) -> Input:
    run = cluster.run()
    return input_of_run(run, summarize(run, alive=alive))


def job(name: str = "base", **more: Any) -> Cluster:
    return Cluster(**{"ranks": 2, "steps": 60, "name": name, "meta": FINISHED, **more})


def steps_of(side: Input) -> Series:
    run = side.on(side.clocks[0]).run
    assert isinstance(run, Series)
    return run


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_has_its_steady_steps_phases_and_ranks() -> None:
    side = input_of(job())
    measured = side.on("host")
    assert side.clocks == ("host",)
    assert (side.steady, side.warmup, side.bad) == (59, 1, False)
    assert steps_of(side).numbers.tolist() == list(range(1, 60))
    assert measured.ranks == (0, 1)
    np.testing.assert_allclose(measured.mean_ns.sum(axis=0), steps_of(side).values, rtol=1e-9)
    assert measured.rank_ns.shape == (len(measured.phases), 2, 8)


def test_a_run_that_failed_before_its_first_step_is_refused_in_words() -> None:
    """As one that ran out of memory at once, which a sweep must expect."""
    side = input_of(job("early", steps=0))
    assert (side.steady, side.on("host").phases, len(steps_of(side).values)) == (0, (), 0)
    with pytest.raises(CompareTooShort, match=r"cannot tell: early has 0 steady steps; at least 10 are needed"):
        check_comparable([input_of(job()), side], unfinished=True)


def test_device_times_come_first_where_the_findings_use_them() -> None:
    side = input_of(job(device_timed=True, backend="nccl"))
    assert side.clocks == ("device", "host")
    device, host = side.on("device"), side.on("host")
    assert (device.clock, host.clock) == ("device", "host")
    at = device.phases.index("forward")
    assert device.mean_ns[at].mean() > 5 * host.mean_ns[host.phases.index("forward")].mean()


def test_the_shortest_wait_is_what_communication_costs() -> None:
    measured = input_of(job(faults=(slow_at(1, "forward", 10.0),))).on("host")
    comm = measured.phases.index("comm")
    assert measured.common_ns[comm].mean() < 3e6 < measured.mean_ns[comm].mean()


def test_a_rank_that_died_is_in_the_steps_before() -> None:
    side = input_of(job(deaths=(Death(rank=1, step=40),), meta={}))
    assert side.bad
    assert np.isfinite(side.on("host").mean_ns).all()


@pytest.mark.parametrize(
    ("meta", "alive", "message"),
    [
        ({"end": {"exit_code": 1, "status": "failed", "wall_ns": 1}}, False, "base did not finish: exit code 1"),
        ({"end": None}, True, "base still runs"),
    ],
)
def test_runs_that_did_not_end_well_are_refused(meta: dict[str, Any], alive: bool, message: str) -> None:
    side = input_of(job(meta=meta, unfinished={0: 60, 1: 60} if alive else {}), alive=alive)
    with pytest.raises(CompareError, match=message):
        check_comparable([side])
    check_comparable([side], unfinished=True)


def test_an_interrupted_run_is_compared_and_mentioned() -> None:
    meta = {"end": {"exit_code": 130, "status": "interrupted", "wall_ns": 1}}
    side = input_of(job(meta=meta))
    check_comparable([side])
    assert side.notices == ("the run was interrupted; its steps up to then are compared",)


def test_too_few_steps_cannot_tell() -> None:
    with pytest.raises(CompareTooShort, match="cannot tell: base has 4 steady steps; at least 10 are needed") as raised:
        check_comparable([input_of(job(steps=5))])
    assert raised.value.exit_code == 2


def test_a_run_is_not_compared_with_itself() -> None:
    with pytest.raises(CompareError, match="base is both the baseline and the run"):
        check_comparable([input_of(job()), input_of(job())])


# -- summaries and baselines ------------------------------------------------------------------------------------------


def test_a_summary_alone_has_a_mean_and_a_spread(tmp_path: Path) -> None:
    run = job().run()
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summarize(run)))
    side = read_input(path)
    level = side.on("host").run
    assert isinstance(level, Level)
    assert side.kind == "summary"
    assert level.mean == pytest.approx(float(steps_of(input_of(job())).values.mean()), rel=1e-4)
    assert side.context["world_size"] == 2
    after = input_of(job("after", phases_ms={"forward": 80.0}))
    assert compare_inputs([side], after)["verdict"] == "slower"


def test_a_stored_baseline_gives_the_same_comparison(tmp_path: Path) -> None:
    before, after = input_of(job(seed=1)), input_of(job("after", seed=2, phases_ms={"forward": 40.0, "other": 1.0}))
    path = tmp_path / "base.json"
    path.write_text(json.dumps(encode_baseline(before)))
    stored = read_input(path)
    direct, repeated = compare_inputs([before], after), compare_inputs([stored], after)
    assert stored.kind == "baseline"
    for name in ("verdict", "change", "interval", "cause", "ranks", "findings", "memory"):
        assert repeated[name] == direct[name], name


@pytest.mark.parametrize(
    "damage",
    [
        {"clocks": []},
        {"clocks": [{"clock": "host"}]},
        {"name": None, "clocks": "x"},
        {"context": 3},
        {"memory": {"rss_peak": "much"}},
        {"communication": [3]},
        {"schema": 2},
    ],
)
def test_a_damaged_baseline_is_refused(damage: dict[str, Any]) -> None:
    good = encode_baseline(input_of(job()))
    with pytest.raises(CompareError, match=r"damaged|schema 2"):
        decode_baseline(Path("base.json"), {**good, **damage})


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    ["clock", "steps", "step_ns", "phases", "mean_ns", "common_ns", "ranks", "rank_ns", "comm_measured"]
                ),
                inner,
            )
        ),
    )
)
def test_any_clock_of_a_baseline_is_read_or_refused(raw: Any) -> None:
    good = encode_baseline(input_of(job(steps=12)))
    try:
        decode_baseline(Path("base.json"), {**good, "clocks": [raw]})
    except CompareError:
        pass


# -- numbers of other tools -------------------------------------------------------------------------------------------


def numbers(tmp_path: Path, text: str, name: str = "a.csv", **more: str) -> Input:
    path = tmp_path / name
    path.write_text(text)
    return read_input(path, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100\n101\n102\n99\n100\n", [100e9, 101e9, 102e9, 99e9, 100e9]),
        ("step,iteration_ms\n0,100\n1,101\n2,102\n3,99\n4,100\n", [100e6, 101e6, 102e6, 99e6, 100e6]),
        ("loss;step_time_s\n0.3;1\n0.2;1.1\n0.1;1\n0.1;1\n0.1;1\n", [1e9, 1.1e9, 1e9, 1e9, 1e9]),
        ("iteration-time 0.5\n".replace("iteration-time ", "") * 5, [0.5e9] * 5),
        ("[10, 10, 11, 10, 10]", [10e9, 10e9, 11e9, 10e9, 10e9]),
        ('{"iteration_time_ms": [10, 10, 11, 10, 10], "mem_bytes": "x"}', [10e6, 10e6, 11e6, 10e6, 10e6]),
        ('{"step_ms": 10}\n{"step_ms": 11}\n{"loss": 3}\n{"step_ms": 10}\n{"step_ms": 10}\n{"step_ms": 10}\n',
         [10e6, 11e6, 10e6, 10e6, 10e6]),
        (json.dumps({"log_history": [{"step": at, "step_time": took} for at, took in enumerate((2, 2.5, 2, 2, 2))]}),
         [2e9, 2.5e9, 2e9, 2e9, 2e9]),
    ],
)  # fmt: skip
def test_numbers_of_many_tools(tmp_path: Path, text: str, expected: list[float]) -> None:
    side = numbers(tmp_path, text)
    assert side.kind == "numbers"
    np.testing.assert_allclose(steps_of(side).values, expected)


def test_throughput_is_the_inverse_of_time(tmp_path: Path) -> None:
    fast = numbers(tmp_path, "tokens_per_second\n" + "1000\n" * 40, "fast.csv")
    slow = numbers(tmp_path, "tokens_per_second\n" + "900\n" * 40, "slow.csv")
    assert fast.unit == "throughput"
    document = compare_inputs([fast], slow)
    assert document["verdict"] == "slower"
    assert document["change"] == pytest.approx(1000 / 900 - 1, rel=1e-4)
    assert document["throughput"] == {"before": 1000.0, "after": 900.0}


def test_throughput_and_times_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="contains throughput and the others contain times"):
        check_comparable([numbers(tmp_path, "5\n" * 9), numbers(tmp_path, "5\n" * 9, "b.csv", unit="throughput")])


def test_numbers_have_a_warm_up_too(tmp_path: Path) -> None:
    side = numbers(tmp_path, "\n".join(["9000", "800", *(["100"] * 48)]))
    assert (side.steady, side.warmup) == (48, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("   \n", "is empty"),
        ("a,b\n1,2\n3,4\n", "several columns of numbers; name one with --column: a, b"),
        ("hello\nworld\n", "contains no column of numbers"),
        ("1\n2\nx\n4\n5\n6", "value 3 is not a number: 'x'"),
        ("1\n-2\n3\n4\n5\n6", "value 2 is not a valid step time: -2"),
        ("1\n0\n3\n4\n5\n6", "value 2 is not a valid step time: 0"),
        ("1\ninf\n3\n4\n5\n6", "value 2 is not a valid step time: inf"),
        ("[1, 2", "is not valid JSON"),
        ("[]", "contains no list of numbers"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"a": {"b": 1}}', "contains no column of numbers"),
    ],
)
def test_foreign_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CompareError, match=message) as raised:
        numbers(tmp_path, text)
    assert raised.value.exit_code == 3
    assert "\n" not in str(raised.value)


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="has no column 'c'; it has: a, b"):
        numbers(tmp_path, "a,b\n1,2\n", column="c")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('a\n"' + "x" * 200_000 + '"\n1\n', "is not CSV: field larger than field limit"),
        ("1" * 200_000 + "\n2\n", "is not CSV: field larger than field limit"),
        ("a\n1\x002\n3\n", "contains no column of numbers"),
        ("[" + "1" * 5000 + ", 2]", "is not valid JSON: Exceeds the limit"),
        ("[1e400, 1, 2, 3]", "value 1 is not a valid step time: inf"),
        ("1\n" * 20, "is too large for a table of steps"),
    ],
    ids=["field", "digits", "zero byte", "integer", "exponent", "rows"],
)
def test_tables_that_were_made_to_hurt_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setattr(inputs, "LARGEST_COUNT", 19)
    with pytest.raises(CompareError, match=message):
        numbers(tmp_path, text)


def test_a_pipe_is_not_waited_for_and_a_link_is_the_users_own(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(CompareError, match="cannot be read: not a regular file"):
        read_input(tmp_path / "pipe.csv")
    (tmp_path / "a.csv").write_text("5\n" * 9)
    (tmp_path / "link.csv").symlink_to("a.csv")
    assert read_input(tmp_path / "link.csv").kind == "numbers"


def test_binary_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"\xff\x00" * 100)
    with pytest.raises(CompareError, match="is not a text file"):
        read_input(path)


@given(st.text() | st.lists(st.sampled_from('0123456789.,;e-+\n\t [{}]":naif'), max_size=60).map("".join))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        side = read_input(path)
    except StepscopeError:
        return
    assert side.steady >= 0
    assert (steps_of(side).values > 0).all()


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=8)
            | st.dictionaries(
                st.sampled_from(["schema", "step_time", "phases", "steps", "run", "kind", "step", "a"]), inner
            )
        ),
        max_leaves=30,
    )
)
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, raw: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(raw))
    try:
        read_input(path)
    except StepscopeError as error:
        assert error.exit_code in (2, 3)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "status",
                "ranks",
                "facts",
                "findings",
                "memory",
                "communication",
                "run",
                "step_time",
                "steps",
                "world_size",
            ]
        ),
        st.none()
        | st.integers()
        | st.lists(st.integers() | st.dictionaries(st.sampled_from(["kind", "ops", "torch"]), st.integers()))
        | st.dictionaries(
            st.sampled_from(["mean_ms", "p50_ms", "p90_ms", "steady", "groups", "git", "command", "rss_peak"]),
            st.integers() | st.text() | st.lists(st.integers()),
        ),
    )
)
def test_a_summary_with_anything_in_it_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, more: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "other.json"
    good = {"schema": 1, "step_time": {"mean_ms": 3, "p50_ms": 3, "p90_ms": 4}, "phases": {}, "steps": {"steady": 50}}
    path.write_text(json.dumps({**good, **more}))
    try:
        read_input(path)
    except StepscopeError as error:
        assert error.exit_code in (2, 3)
