"""The live model: who is waited for, attempts, documents, bounds."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from clock import FakeClock
from fakes.cluster import Cluster, slow_at
from fakes.records import records_of, timed_at
from hub_feed import FedRows, sidecar_of, taken_of

from stepscope.diagnosis.engine.view import view_of
from stepscope.diagnosis.engine.window import build_window
from stepscope.hub.api.steps import rank_series
from stepscope.hub.live.lines import Lines, Noted
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.step_arrays import Planes
from stepscope.hub.past_run import past_run
from stepscope.records.series import RankSeries
from stepscope.records.steps import NOTE, NOTE_SLOT, SLOT_BYTES
from stepscope.reports import summarize
from stepscope.store.live.ring_files import RingSidecar


def introduce(live: LiveRun, series: tuple[RankSeries, ...], node: str = "0") -> None:
    for one in series:
        live.ring(RingSidecar.from_dict(sidecar_of(one, state="running")), node=node)


def test_a_step_is_complete_when_every_live_rank_has_made_it() -> None:
    clock = FakeClock()
    series = Cluster(ranks=3, steps=30).series()
    live = LiveRun(clock=lambda: clock() / 1e9)
    introduce(live, series)
    live.rows(taken_of(series[:2], range(10)))
    live.rows(taken_of(series[2:], range(4)))
    live.tick()
    assert live.frontier == 3
    assert live.steps()["last"][-1] == 3
    clock.advance(11 * 10**9)
    live.rows(taken_of(series[:2], range(10, 12)))
    live.tick()
    assert live.frontier == 11
    assert live.steps()["ranks"][4:] == [2] * 8
    live.rows(taken_of(series[2:], range(4, 12)))  # heard again: what came late counts
    live.tick()
    assert live.steps()["ranks"] == [3] * 12


def test_what_is_digested_again_is_told_once_more_and_whoever_made_a_step_has_started() -> None:
    series = Cluster(ranks=2, steps=30).series()
    live = LiveRun()
    for one in series:
        live.ring(RingSidecar.from_dict(sidecar_of(one, state="starting")), node="0")
    live.rows(taken_of(series[1:], range(7), state="starting"))  # the other has no step here yet: not waited for
    live.tick()
    assert (live.steps()["ranks"], live.steps_redone(0)) == ([1] * 7, None)
    live.rows(taken_of(series[:1], range(5)))
    live.tick()
    redone = live.steps_redone(0)
    assert redone is not None
    assert redone["first"] == redone["last"] == [0, 1, 2, 3, 4]
    assert redone == {name: _first_of(values, 5) for name, values in live.steps().items()}
    assert redone["ranks"] == [2] * 5
    of_both = np.mean([one.steps["wall_ns"][:5] for one in series], axis=0)
    assert redone["mean_ns"]["wall"] == pytest.approx(of_both.tolist(), abs=16)  # float32
    assert live.steps_redone(live.redigests) is None
    assert live.info()["states"] == {"running": 2}
    assert live.ranks()["state"] == ["running", "running"]


def _first_of(values: object, count: int) -> object:
    if isinstance(values, dict):
        return {name: own[:count] for name, own in values.items()}
    return values[:count] if isinstance(values, list) and len(values) == 7 else values


def test_a_rank_that_ended_is_not_waited_for() -> None:
    series = Cluster(ranks=3, steps=30).series()
    live = LiveRun()
    introduce(live, series)
    live.rows(taken_of(series, range(5)))
    live.ring(RingSidecar.from_dict(sidecar_of(series[1], state="vanished")), node="0")
    live.rows(taken_of([series[0], series[2]], range(5, 9)))
    live.tick()
    assert live.frontier == 8
    assert live.info()["states"] == {"running": 2, "vanished": 1}
    assert live.ranks()["state"] == ["running", "vanished", "running"]


def test_repeated_rows_count_once_and_strangers_not_at_all() -> None:
    series = Cluster(ranks=2, steps=20).series()
    live = LiveRun()
    introduce(live, series[:1])
    live.rows(taken_of(series, range(10)))
    live.rows(taken_of(series[:1], range(5, 12)))
    live.tick()
    info = live.info()
    assert (info["rows"], info["rows_repeated"], info["rows_unknown"]) == (12, 5, 10)
    assert live.map.count[0].sum() == 12


def test_numbers_that_nobody_can_have_made_are_passed_over() -> None:
    series = Cluster(ranks=1, steps=4).series()
    rows, _ = records_of(series[0])
    rows["step"][2] = (1 << 64) - 1
    live = LiveRun()
    introduce(live, series)
    table = taken_of(series, range(4)).table
    table["rows"] = 4
    live.rows(FedRows(slots=rows.view(np.uint8).reshape(4, 256), table=table))
    live.tick()
    assert live.steps()["first"] == [0, 1, 3]


def test_another_attempt_begins_anew_and_the_first_stays_in_the_registry() -> None:
    live = LiveRun()
    first = Cluster(ranks=4, steps=20).series()
    introduce(live, first)
    live.rows(taken_of(first, range(20)))
    live.tick()
    second = Cluster(ranks=3, steps=20, attempt=1, seed=1).series()
    introduce(live, second)
    live.rows(taken_of(first, range(20)))  # comes too late to be of interest
    live.rows(taken_of(second, range(7)))
    live.tick()
    info = live.info()
    assert (info["attempt"], info["ranks"], info["rings"], info["step"]) == (1, 3, 7, 6)
    assert live.steps()["first"] == list(range(7))
    assert live.ranks()["rank"] == [0, 1, 2]


def test_two_that_claim_a_rank_are_told_apart() -> None:
    from dataclasses import replace

    series = Cluster(ranks=2, steps=5).series()
    double = replace(series[0], identity=replace(series[0].identity, pid=77))
    helper = replace(series[0], identity=replace(series[0].identity, pid=78))
    live = LiveRun()
    introduce(live, (*series, double, helper))
    live.rows(taken_of([*series, double], range(5)))
    live.tick()
    assert live.ranks()["rank"] == [0, 1, 2]
    assert live.ranks()["pid"] == [1000, 1001, 77]
    assert live.info()["step"] == 4


def test_phases_of_users_are_one_by_name_whatever_their_slot() -> None:
    series = list(Cluster(ranks=2, steps=4, phases_ms={"forward": 5.0, "loss": 2.0, "tokens": 1.0}).series())
    names = list(series[1].phase_names)
    names[9], names[10] = names[10], names[9]
    series[1] = replace(series[1], phase_names=tuple(names))
    live = LiveRun()
    introduce(live, tuple(series))
    live.rows(taken_of(series, range(4)))
    means = live.ranks()["mean_ns"]
    assert np.allclose(means["loss"], 2e6, rtol=0.1)
    assert np.allclose(means["tokens"], 1e6, rtol=0.1)


def test_means_of_ranks_leave_warm_up_out_as_the_summary_does() -> None:
    run = Cluster(ranks=1, steps=40, faults=(slow_at(0, "forward", 900.0, steps=range(1)),)).run()
    means, phases = past_run(run).ranks()["mean_ns"], summarize(run)["phases"]
    shares = {name: means[name][0] / means["wall"][0] for name in phases}
    assert shares == pytest.approx({name: row["share"] for name, row in phases.items()}, abs=1e-4)


def test_the_clock_is_the_one_of_the_findings_and_ranks_have_means_on_it() -> None:
    """On a device the host of every rank waits alike; only device times show which one works longest."""
    slow = Cluster(ranks=4, steps=40, device_timed=True, faults=(slow_at(2, "forward", 30.0),)).run()
    live = past_run(slow)
    assert view_of(build_window(slow)).clock == live.info()["clock"] == "device"
    ranks = live.ranks(order="device:work", limit=2)
    assert ranks["rank"][0] == 2
    more, usual = ranks["device_mean_ns"]["forward"]
    assert more - usual == pytest.approx(30e6, rel=0.02)
    few = tuple(timed_at(rank, slice(5)) for rank in slow.ranks)
    seldom = replace(slow, ranks=few)
    assert view_of(build_window(seldom)).clock == past_run(seldom).info()["clock"] == "host"
    assert past_run(Cluster(ranks=2, steps=40).run()).info()["clock"] == "host"
    assert past_run(Cluster(ranks=2, steps=40).run()).ranks()["device_mean_ns"] == {}


def test_a_rank_over_its_steps_has_device_means_of_the_timed_steps_alone() -> None:
    run = Cluster(ranks=1, steps=40, noise=0.0, device_timed=True).run()
    live = past_run(replace(run, ranks=tuple(timed_at(rank, slice(None, None, 8)) for rank in run.ranks)))
    forward = rank_series(live, 0, 0, None, 10)["steps"]["device_ns"]["forward"]
    assert [value is not None for value in forward] == [True, False] * 5
    assert forward[2] == pytest.approx(run.ranks[0].steps.device("forward")[8], rel=1e-6)


def test_ranks_are_ordered_and_paged() -> None:
    series = Cluster(ranks=30, steps=5, noise=0.3).series()
    live = LiveRun()
    introduce(live, series)
    live.rows(taken_of(series, range(5)))
    work = live.ranks(order="work")["mean_ns"]["work"]
    assert work == sorted(work, reverse=True)
    assert live.ranks(first=10, limit=3)["rank"] == [10, 11, 12]
    assert live.ranks(chosen=(4, 29))["rank"] == [4, 29]
    assert live.ranks()["total"] == 30


def test_an_empty_run_has_documents_too() -> None:
    live = LiveRun(name="empty")
    live.tick()
    for document in (live.info(), live.ranks(), live.steps(), live.findings()):
        json.dumps(document)
    assert live.steps()["first"] == []
    assert live.events() == []


def test_steps_far_apart_get_a_stride() -> None:
    clock = FakeClock()
    series = Cluster(ranks=100, steps=300).series()
    live = LiveRun(clock=lambda: clock() / 1e9, planes=Planes(most_steps=32))
    introduce(live, series)
    for first in range(0, 240, 60):
        live.rows(taken_of(series[:50], range(first, first + 60)))
        live.tick()
        live.rows(taken_of(series[50:], range(first, first + 60)))
        clock.advance(6 * 10**9)
        live.rows(taken_of(series[:50], range(first + 60, first + 61)))
        live.tick()
    live.rows(taken_of(series[:50], range(240, 300)))
    clock.advance(6 * 10**9)
    live.tick()
    assert live.planes.stride == 4
    live.rows(taken_of(series[50:], range(240, 300)))
    live.tick()
    steps = live.steps(bins=1000)
    assert steps["last"][-1] == 296
    assert steps["ranks"][-7:] == [100] * 7


def test_lines_are_bounded_shifted_and_parsed_when_asked_for() -> None:
    lines = Lines(events=3, most_bytes=1000)
    said = [json.dumps({"event": "note", "wall_ns": 1000 + n}).encode() for n in range(5)]
    lines.put("events.jsonl", [*said, b"no json", b"[1]"], node="1", offset_ns=100)
    assert [(event["number"], event["wall_ns"]) for event in lines.events(0)] == [(3, 902), (4, 903), (5, 904)]
    assert [event["number"] for event in lines.events(4)] == [5]
    assert lines.bad == 2
    for n in range(100):
        line = json.dumps({"kind": "host", "wall_ns": n}).encode()
        lines.put("samples.jsonl", [line], node=str(n % 2), offset_ns=0)
    found = lines.parsed("samples.jsonl")
    assert 5 < len(found) < 15
    assert {line["wall_ns"] for line in found} == set(range(100 - len(found), 100))
    assert [line["wall_ns"] for line in lines.parsed("samples.jsonl", nodes=["1"], limit=2)] == [97, 99]
    assert lines.dropped == 100 - len(found)


def test_readers_wait_for_a_change() -> None:
    async def main() -> tuple[int, int]:
        live = LiveRun()
        same = await live.changed(live.version, 0.01)
        asyncio.get_running_loop().call_later(0.01, live.touch)
        return same, await live.changed(live.version, 60.0)

    assert asyncio.run(main()) == (0, 1)


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_any_bytes_do_no_harm(seed: int) -> None:
    """What an agent that has the key sends is believed to be slots, whatever is in them."""
    random = np.random.default_rng(seed)
    series = Cluster(ranks=4, steps=4).series()
    live = LiveRun()
    introduce(live, series)
    with np.errstate(all="ignore"):
        for _ in range(60):
            taken = taken_of(series, range(4))
            slots = taken.slots.copy()
            slots[random.random(slots.shape) < 0.2] = random.integers(256)
            slots[:, 4] = random.integers(0, 7, len(slots))
            slots[:, 5] = 0
            live.rows(FedRows(slots=slots, table=taken.table))
            live.tick()
        for document in (live.info(), live.ranks(), live.steps()):
            json.dumps(document)


def test_a_restart_that_no_launcher_counted_is_another_attempt() -> None:
    from dataclasses import replace

    first = Cluster(ranks=3, steps=10).series()
    later = [
        replace(
            one,
            identity=replace(one.identity, pid=one.identity.pid + 500),
            anchor_wall_ns=(one.ended_wall_ns or 0) + 10**10,
        )
        for one in first
    ]
    live = LiveRun()
    introduce(live, first)
    live.rows(taken_of(first, range(10)))
    live.tick()
    for one in first:
        live.ring(RingSidecar.from_dict(sidecar_of(one, state="exception")), node="0")
    introduce(live, tuple(later))
    live.rows(taken_of(later, range(4)))
    live.tick()
    info = live.info()
    assert (info["attempt"], info["ranks"], info["rings"], info["step"]) == (1, 3, 6, 3)
    assert live.ranks()["rank"] == [0, 1, 2]
    assert live.ranks()["attempt"] == [1, 1, 1]


def test_what_the_recorder_saw_is_a_curve_unless_the_script_notes_that_name() -> None:
    noted = Noted()
    slots = [
        NOTE_SLOT.pack(NOTE, 0, 1, step, len(text), text)
        for step, text in ((3, b'{"~loss":2,"~grad_norm":0.5}'), (4, b'{"~loss":"nan"}'))
    ]
    noted.take(np.frombuffer(b"".join(slots), np.uint8).reshape(-1, 256), [(0, 77)] * 2)
    assert [(curve["name"], curve["step"], curve["value"]) for curve in noted.curves(0, 9, 10)] == [
        ("loss", [3], [2.0]),
        ("grad_norm", [3], [0.5]),
    ]
    assert [(event["event"], event["values"]) for event in noted.seen] == [
        ("seen", {"loss": 2, "grad_norm": 0.5}),
        ("seen", {"loss": "nan"}),
    ]
    assert not noted.health
    noted.add(5, {"loss": 9.0})
    assert [(curve["name"], curve["value"]) for curve in noted.curves(0, 9, 10)] == [
        ("grad_norm", [0.5]),
        ("loss", [9.0]),
    ]


def test_noted_numbers_are_curves_in_bounded_memory() -> None:
    noted = Noted(room=4)
    for step in range(10):
        for rank in range(2):
            noted.add(step, {"loss": 10.0 * step + rank})
    (loss,) = noted.curves(0, 9, 100)
    assert loss == {"name": "loss", "step": [0, 4, 8], "value": [15.5, 55.5, 85.5]}
    assert noted.curves(5, 9, 1) == [{"name": "loss", "step": [4], "value": [65.5]}]
    for number in range(40):
        noted.add(0, {f"metric {number}": 1.0})
    assert len(noted.curves(0, 9, 1)) == 24
    assert noted.left_out


def test_notes_of_a_run_are_the_same_live_and_over() -> None:
    run = Cluster(ranks=2, steps=4).run()
    pid = run.ranks[0].identity.pid
    loss: dict[int, dict[str, Any]] = {0: {"loss": 1.0}, 2: {"loss": 1 / 3}, 3: {"loss": "nan", "lr": "nan"}}
    notes = [{"event": "note", "rank": 0, "pid": pid, "step": step, "values": values} for step, values in loss.items()]
    other = {"event": "note", "rank": 0, "pid": -1, "step": 0, "values": {"loss": 99.0}}
    past = past_run(replace(run, events=(*notes, other))).noted.curves(0, 3, 10)
    live = Noted()
    slots = b"".join(NOTE_SLOT.pack(NOTE, 0, 1, note["step"], *_text(note["values"])) for note in notes)
    live.take(np.frombuffer(slots, np.uint8).reshape(-1, SLOT_BYTES), [(0, pid)] * len(notes))
    assert list(live.health) == notes, "the rules see also what is no number"
    assert past == live.curves(0, 3, 10) == [{"name": "loss", "step": [0, 2], "value": [1.0, 1 / 3]}]


def _text(values: dict[str, Any]) -> tuple[int, bytes]:
    text = json.dumps(values).encode()
    return len(text), text
