"""The ledger of a run: parts add up to its wall time, over all attempts and whatever happened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death, slow_at
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.goodput import PARTS, Ledger, ledger_of
from stepscope.goodput.accounts import SumsByRing, sums_of
from stepscope.goodput.jobs import JobRun, job_document, jobs_of
from stepscope.goodput.ledger import Resumption, lost_steps
from stepscope.records.hang import HangRecord
from stepscope.records.series import RankSeries, RunData
from stepscope.reports.goodput_text import advice_view, goodput_lines, goodput_view, job_lines

SECOND = 10**9
PHASES = {"forward": 40.0, "backward": 50.0, "optimizer": 9.0, "other": 1.0}


def cluster(**more: Any) -> Cluster:
    """Steps of 0.1 s, the first one 1 s longer; the recording begins a second after the run."""
    settled: dict[str, Any] = {"ranks": 2, "noise": 0.0, "comm_ms": 0.0, "phases_ms": PHASES, "warmup_ms": 1000.0}
    return Cluster(**(settled | more))


def moved(ranks: tuple[RankSeries, ...], by_s: float, **more: Any) -> tuple[RankSeries, ...]:
    by_ns = round(by_s * SECOND)
    later = (
        replace(
            each,
            anchor_wall_ns=each.anchor_wall_ns + by_ns,
            ended_wall_ns=None if each.ended_wall_ns is None else each.ended_wall_ns + by_ns,
        )
        for each in ranks
    )
    return tuple(replace(each, **more) for each in later)


def ended_at(run: RunData, at_s: float, **more: Any) -> RunData:
    """``at_s``: seconds after the recording of the first attempt began."""
    end = {"status": "finished", "exit_code": 0, "wall_ns": ANCHOR_WALL_NS + round(at_s * SECOND), **more}
    return replace(run, meta={**run.meta, "end": end})


def parts_of(run: RunData, **more: Any) -> dict[str, float]:
    ledger = ledger_of(run, **more)
    assert ledger is not None
    assert sum(ledger.parts.values()) == pytest.approx(ledger.seconds, abs=0.002)
    return {part: seconds for part, seconds in ledger.parts.items() if seconds}


def ledger(run: RunData) -> Ledger:
    found = ledger_of(run)
    assert found is not None
    return found


def test_the_parts_of_a_run_without_a_restart() -> None:
    """100 steps of 0.1 s; an evaluation of 2 s, a checkpoint of 1 s, a stall of 3 s; then 5 s to the end."""
    faults = [
        slow_at(rank, phase, ms, range(at, at + 1))
        for rank in (0, 1)
        for phase, ms, at in (("eval", 2000.0, 30), ("checkpoint", 1000.0, 60), ("forward", 3000.0, 80))
    ]
    run = ended_at(cluster(steps=100, faults=tuple(faults)).run(), 22.0)
    ranks = moved(run.ranks, 0.0, ended_wall_ns=ANCHOR_WALL_NS + 20 * SECOND)
    assert parts_of(replace(run, ranks=ranks)) == pytest.approx(
        {
            "start_up": 1.0,
            "compile": 1.0,
            "training": 10.0,
            "evaluation": 2.0,
            "checkpoint": 1.0,
            "stalls": 3.0,
            "shutdown": 5.0,
        },
        abs=0.02,
    )


def test_start_up_is_split_into_its_stages() -> None:
    """The process began 0.7 s before its recording did, torch was imported 0.4 s later, the group took 0.2 s."""
    run = ended_at(cluster(steps=20, warmup_ms=0.0).run(), 3.0)
    anchor = run.ranks[0].anchor_mono_ns
    times = {"imported_ns": anchor - round(0.3 * SECOND), "joined_ns": anchor + round(0.2 * SECOND)}
    later = tuple(
        replace(
            each,
            identity=replace(each.identity, **times),
            anchor_mono_ns=anchor - SECOND,
            anchor_wall_ns=each.anchor_wall_ns,
        )
        for each in run.ranks
    )
    shifted = tuple(
        replace(
            each,
            identity=replace(
                each.identity, imported_ns=anchor - round(1.3 * SECOND), joined_ns=anchor - round(0.8 * SECOND)
            ),
        )
        for each in later
    )
    events = [{"event": "rank_start", "rank": r, "pid": 1000 + r, "host": "node0", "age_s": 0.7} for r in (0, 1)]
    run = replace(run, ranks=shifted, events=tuple(events))
    parts = parts_of(run)
    assert parts["imports"] == pytest.approx(0.4)
    assert parts["process_group"] == pytest.approx(0.2)
    assert parts["start_up"] == pytest.approx(0.3 + 0.3 + 0.8)
    (attempt,) = ledger(run).attempts
    assert attempt.until_first_step == {"launch": 0.3, "imports": 0.4, "process_group": 0.2, "setup": 1.1}


def restarted(*attempts: dict[str, Any]) -> RunData:
    """One attempt every 20 s; each dies 1 s after its last step."""
    series: list[RankSeries] = []
    for number, more in enumerate(attempts):
        facts = {"global_step": {"by": "optimizer", "first": more["first"]}} if "first" in more else {}
        saves = [slow_at(0, "checkpoint", 10.0, range(at, at + 1)) for at in more.get("saves", ())]
        made = cluster(steps=more["steps"], attempt=number, faults=tuple(saves), warmup_ms=0.0, facts=facts)
        last = number == len(attempts) - 1
        gone = ANCHOR_WALL_NS + round((more["steps"] * 0.1 + 1 + 20 * number) * SECOND)
        series += moved(made.series(), 20.0 * number, state="exited" if last else "vanished", ended_wall_ns=gone)
    return ended_at(replace(cluster(steps=1).run(), ranks=tuple(series)), 20.0 * len(attempts))


def test_three_restarts_add_up_and_lost_steps_are_counted_by_the_script() -> None:
    run = restarted(
        {"steps": 50, "first": 0}, {"steps": 40, "first": 30}, {"steps": 10, "first": 60}, {"steps": 80, "first": 60}
    )
    found = ledger(run)
    assert found.seconds == 81.0
    assert [attempt.lost_steps for attempt in found.attempts] == [20, 10, 10, 0]
    assert {attempt.lost_by for attempt in found.attempts[:3]} == {"counter"}
    assert found.parts["training"] == pytest.approx(14.0, abs=0.01)
    assert found.parts["lost"] == pytest.approx(4.0 + 3 * 0.3, abs=0.01)  # and up to three steps for each death
    assert found.parts["restart"] == pytest.approx(14.0 + 15.0 + 18.0, abs=0.01)
    assert found.goodput == pytest.approx(14.0 / 81.0, abs=0.001)
    document = found.to_dict()
    assert (document["restarts"], document["lost_steps"], document["estimated"]) == (3, 40, False)
    lines = goodput_lines(document, width=80)
    assert lines[0] == "goodput: 17% of 1 min 21 s was useful training; 3 restarts, 40 steps lost and repeated"
    assert "attempt 0: 20 steps lost and repeated, known from the script's own step count" in lines
    assert max(map(len, lines[1:])) <= 80


@pytest.mark.parametrize(
    ("attempts", "lost"),
    [
        ([Resumption(steps=50, unsaved=None), Resumption(steps=9, unsaved=None)], [(50, "no_checkpoint"), (0, "")]),
        ([Resumption(steps=50, unsaved=7), Resumption(steps=9, unsaved=None)], [(7, "checkpoint"), (0, "")]),
        ([Resumption(steps=50, unsaved=7), Resumption(steps=0, unsaved=None)], [(0, ""), (0, "")]),
        (
            [
                Resumption(steps=50, unsaved=7, first=0),
                Resumption(steps=5, unsaved=None, first=40),
                Resumption(steps=5, unsaved=None, first=10),
            ],
            [(40, "counter"), (5, "counter"), (0, "")],
        ),
        (
            [Resumption(steps=50, unsaved=None, first=0, per_step=2.0), Resumption(steps=5, unsaved=None, first=80)],
            [(10, "counter"), (0, "")],
        ),
    ],
)
def test_lost_steps(attempts: list[Resumption], lost: list[Any]) -> None:
    assert lost_steps(attempts) == lost


def test_checkpoints_say_what_was_lost_if_nothing_counts() -> None:
    found = ledger(restarted({"steps": 50, "saves": (19, 39)}, {"steps": 60}))
    assert [(attempt.lost_steps, attempt.lost_by) for attempt in found.attempts] == [(10, "checkpoint"), (0, "")]
    assert found.to_dict()["estimated"]


def test_a_hang_is_a_part_of_its_own() -> None:
    """Two ranks stop after 5 s and are killed at 30 s."""
    made = cluster(steps=50, warmup_ms=0.0, deaths=(Death(rank=0, step=50), Death(rank=1, step=50)))
    ranks = moved(made.series(), 0.0, ended_wall_ns=ANCHOR_WALL_NS + 30 * SECOND)
    hang = HangRecord(
        number=1, host="node0", kind="hang_unknown", title="It hangs.", declared_wall_ns=ANCHOR_WALL_NS + 15 * SECOND,
        stopped_wall_ns=ANCHOR_WALL_NS + 5 * SECOND, threshold_s=10.0, over="aborted",
    )  # fmt: skip
    run = ended_at(replace(made.run(), ranks=ranks, hangs=(hang,)), 31.0, status="failed")
    assert parts_of(run) == pytest.approx({"start_up": 1.0, "training": 5.0, "hang": 25.0, "shutdown": 1.0}, abs=0.02)


@pytest.mark.parametrize("over", ["ended", "aborted", ""])
def test_a_hang_ends_with_its_attempt(over: Any) -> None:
    """The first attempt makes 5 s of steps, hangs, and is gone at 15 s; the second hangs for a second, and recovers."""
    run = restarted({"steps": 50, "first": 0}, {"steps": 60, "first": 50})
    first, second = (tuple(each for each in run.ranks if each.identity.attempt == number) for number in (0, 1))
    gone = tuple(replace(each, ended_wall_ns=ANCHOR_WALL_NS + 15 * SECOND) for each in first)
    common: dict[str, Any] = {"host": "node0", "kind": "hang_unknown", "title": "It hangs.", "threshold_s": 10.0}
    hangs = (
        HangRecord(
            number=1, declared_wall_ns=ANCHOR_WALL_NS + 15 * SECOND, stopped_wall_ns=ANCHOR_WALL_NS + 5 * SECOND,
            over=over, over_wall_ns=ANCHOR_WALL_NS + 500 * SECOND if over else None, **common,
        ),
        HangRecord(
            number=2, declared_wall_ns=ANCHOR_WALL_NS + 22 * SECOND, stopped_wall_ns=ANCHOR_WALL_NS + 21 * SECOND,
            over="recovered", over_wall_ns=ANCHOR_WALL_NS + 22 * SECOND, **common,
        ),
    )  # fmt: skip
    found = ledger(replace(run, ranks=(*gone, *second), hangs=hangs))
    assert [attempt.parts["hang"] for attempt in found.attempts] == pytest.approx([10.0, 1.0], abs=0.02)
    assert found.attempts[1].parts["training"] == pytest.approx(5.0, abs=0.02)


def test_an_active_run_ends_now() -> None:
    """40 steps of 0.1 s; the next one has taken 2 s so far, which is a stall from three steps on."""
    run = cluster(steps=50, warmup_ms=0.0, unfinished={0: 40, 1: 40}).run()
    ranks = tuple(replace(each, ended_wall_ns=None) for each in run.ranks)
    now_ns = ANCHOR_WALL_NS + 6 * SECOND
    parts = parts_of(replace(run, ranks=ranks), now_ns=now_ns)
    assert parts == pytest.approx({"start_up": 1.0, "training": 4.3, "stalls": 1.7}, abs=0.02)
    (evaluating,) = {replace(each, live_phase=each.phase_names.index("eval")) and "evaluation" for each in ranks}
    ranks = tuple(replace(each, live_phase=each.phase_names.index("eval")) for each in ranks)
    assert parts_of(replace(run, ranks=ranks), now_ns=now_ns)[evaluating] == pytest.approx(2.0, abs=0.01)


def test_runs_without_steps_and_attempts_that_left_only_an_error() -> None:
    run = ended_at(replace(cluster(steps=1).run(), ranks=()), 7.0)
    assert parts_of(run) == {"start_up": 8.0}
    assert ledger_of(replace(run, meta={"name": "x"})) is None


@settings(max_examples=examples(80), deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(0, 60), st.floats(-5.0, 30.0), st.booleans()), min_size=1, max_size=4),
    st.floats(-1.0, 100.0),
)
def test_parts_add_up_whatever_the_clocks_say(
    seed: int, attempts: list[tuple[int, float, bool]], until_s: float
) -> None:
    series: list[RankSeries] = []
    for number, (steps, at_s, dies) in enumerate(attempts):
        made = Cluster(
            ranks=2, steps=steps + 1, seed=seed, attempt=number, noise=0.3, tail=0.05,
            deaths=(Death(rank=0, step=steps // 2 + 1),) if dies else (),
            faults=(slow_at(0, "checkpoint", 70.0, range(3, 60, 20)),),
        )  # fmt: skip
        series += moved(made.series(), at_s)
    found = ledger(ended_at(replace(Cluster(ranks=1, steps=1).run(), ranks=tuple(series)), until_s))
    assert sum(found.parts.values()) == pytest.approx(found.seconds, abs=0.002)
    assert min(found.parts.values()) >= 0
    assert tuple(found.parts) == PARTS
    assert sum(attempt.seconds for attempt in found.attempts) == pytest.approx(found.seconds, abs=0.01)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_the_hub_adds_up_the_same_sums_as_they_come(seed: int, sizes: list[int]) -> None:
    made = Cluster(
        ranks=2, steps=sum(sizes), seed=seed, tail=0.05, compile_steps=(7,) if sum(sizes) > 7 else (),
        faults=(slow_at(1, "checkpoint", 9.0, range(5, 300, 31)), slow_at(0, "eval", 50.0, range(9, 300, 40))),
    )  # fmt: skip
    sums, table = SumsByRing(), [series.steps for series in made.series()]
    at = 0
    for size in sizes:
        rows = [steps.part(slice(at, at + size)) for steps in table]
        rings = np.repeat([3, 8], size)
        columns = {name: np.concatenate([part[name] for part in rows]) for name in ("wall_ns", "start_ns", "flags")}
        columns |= {
            f"phase:{name}": np.concatenate([part.phase(name) for part in rows]) for name in ("eval", "checkpoint")
        }
        sums.add(rings, columns)
        at += size
    for ring, steps in zip((3, 8), table, strict=True):
        whole, grown = sums_of(steps), sums.of(ring)
        assert grown.stalled_ns == pytest.approx(whole.stalled_ns, rel=1e-5)
        assert grown == replace(
            whole,
            **{
                name: pytest.approx(getattr(whole, name))
                for name in ("plain_ns", "started_ns", "eval_ns", "checkpoint_ns")
            },
            stalled_ns=grown.stalled_ns,
        )
    assert sums.of(4).steps == sums.of(99).steps == 0


def test_runs_of_one_job_count_together() -> None:
    first = ledger(restarted({"steps": 50, "first": 0})).to_dict()
    second = ledger(restarted({"steps": 80, "first": 40})).to_dict()
    began = ANCHOR_WALL_NS

    def run(name: str, at_s: float, status: str, document: dict[str, Any], job: str = "a") -> JobRun:
        return JobRun(
            name=name, job=(job,), created_wall_ns=began + round(at_s * SECOND), status=status, ledger=document
        )

    runs = [
        run("one", 0, "failed", first),
        run("two", 100, "finished", second),
        run("other", 30, "failed", first, "b"),
        run("three", 300, "failed", first),
    ]
    jobs = jobs_of(runs)
    assert [[each.name for each in job] for job in jobs] == [["other"], ["one", "two"], ["three"]]
    document = job_document(jobs[1])
    assert (document["seconds"], document["between_runs_s"], document["restarts"]) == (42.0, 79.0, 1)
    assert document["lost_steps"] == 10
    assert document["parts"]["training"] == pytest.approx(12.0, abs=0.01)
    assert sum(document["parts"].values()) == pytest.approx(42.0, abs=0.002)
    rows = job_lines([document], {each.name: {**each.ledger, "status": each.status} for each in runs})
    assert [row[:2] for row in rows] == [
        ("job of 2 runs (+1 min 19 s between)", "finished"),
        ("  one", "failed"),
        ("  two", "finished"),
    ]


@pytest.mark.parametrize(
    "damage",
    [None, [], {}, {"attempts": 3}, {"parts": {"training": "long"}}, {"parts": {"training": float("nan")}}],
    ids=str,
)
def test_a_damaged_ledger_is_not_drawn(damage: Any) -> None:
    whole = ledger(restarted({"steps": 50}, {"steps": 40})).to_dict()
    view = goodput_view(whole)
    assert view is not None
    assert [each["name"] for each in view["attempts"]] == ["attempt 0", "attempt 1"]
    assert goodput_view({**whole, **damage} if damage else damage) is None
    assert advice_view(damage) is None
