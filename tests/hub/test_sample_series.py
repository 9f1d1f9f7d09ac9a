"""Samples as curves."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stepscope.hub.api.samples import sample_series
from stepscope.hub.live.lines import Lines, of_kind


def test_the_mean_of_reasons_is_the_share_of_the_time_that_there_was_any() -> None:
    reasons: list[Any] = [[], ["sw_thermal_slowdown"], ["hw_slowdown", "power"], [], None, "odd"]
    lines = [
        {"kind": "gpu", "node": "a", "index": 0, "wall_ns": at, "throttle_reasons": reason}
        for at, reason in enumerate(reasons)
    ]
    said = sample_series(
        lines, kind="gpu", fields=("throttle_reasons",), span_ns=(None, None), bins=1, statistic="mean", most=4
    )
    assert said["series"] == [{"node": "a", "index": 0, "values": {"throttle_reasons": [0.5]}}]


def test_of_a_node_that_said_much_the_past_is_thinned_by_source() -> None:
    lines = Lines(most_of_node=100)
    said = [
        json.dumps({"wall_ns": at, "kind": kind, "pid": pid}).encode()
        for at in range(200)
        for kind, pid in (("host", None), ("process", 1), ("process", 2))
    ]
    for first in range(0, len(said), 30):
        lines.put("samples.jsonl", said[first : first + 30], node="0", offset_ns=0)
    lines.put("samples.jsonl", [b'{"wall_ns": 1}'] * 3, node="1", offset_ns=0)
    kept = lines.parsed("samples.jsonl", nodes=["0"])
    assert len(kept) <= 100
    for kind, pid in (("host", None), ("process", 1), ("process", 2)):
        own = [row["wall_ns"] for row in kept if (row["kind"], row["pid"]) == (kind, pid)]
        assert own == sorted(set(own))
        assert own[-10:] == list(range(190, 200)), "the newest are all there"
        assert own[0] < 40, "and some of the oldest"
    assert len(lines.parsed("samples.jsonl", nodes=["1"])) == 3


def test_those_that_came_thinned_stay_until_the_others_are_as_far_apart() -> None:
    lines = Lines(most_of_node=400)
    for at in range(200):
        document = {"wall_ns": at * 60 * 10**9, "kind": "host", "span_s": 60}
        lines.put("samples.jsonl", [json.dumps(document).encode()], node="0", offset_ns=0)
    for at in range(2000):
        document = {"wall_ns": (12_000 + at) * 10**9, "kind": "host"}
        lines.put("samples.jsonl", [json.dumps(document).encode()], node="0", offset_ns=0)
    kept = [row["wall_ns"] // 10**9 for row in lines.parsed("samples.jsonl", nodes=["0"])]
    apart = [after - before for before, after in itertools.pairwise(kept)]
    assert len(kept) <= 400
    assert sum(at < 12_000 for at in kept) > 80, "the hours before are as dense as the older of the last minutes"
    assert max(apart) <= 280, "and nowhere is a hole"
    assert apart[-100:] == [1] * 100


def test_a_thinned_sample_counts_for_its_time_and_shows_its_extremes() -> None:
    over = {"samples": 60, "mean": {"power_w": 100.0}, "max": {"power_w": 500.0}, "min": {"power_w": 50.0}}
    coarse = {"kind": "gpu", "node": "a", "index": 0, "wall_ns": 0, "power_w": 90.0, "span_s": 60, "over": over}
    fine = [{"kind": "gpu", "node": "a", "index": 0, "wall_ns": at * 10**9, "power_w": 200.0} for at in range(60, 80)]

    def shown(statistic: Any) -> Any:
        document = {"kind": "gpu", "fields": (), "span_ns": (None, None), "bins": 1, "most": 4}
        return sample_series([coarse, *fine], statistic=statistic, **document)["series"][0]["values"]

    assert shown("mean") == {"power_w": [(60 * 100 + 20 * 200) / 80]}
    assert shown("max") == {"power_w": [500.0]}
    assert shown("min") == {"power_w": [50.0]}
    assert shown("last") == {"power_w": [200.0]}


def test_thinned_lines_make_room_in_their_order() -> None:
    """Whoever has to go first is the oldest that is there, whatever was thinned before."""
    lines = Lines(most_of_node=10, most_bytes=30 * (20 + 64))
    for at in range(100):
        lines.put("samples.jsonl", [b'{"wall_ns":%10d}' % at], node=str(at % 4), offset_ns=0)
    kept = [lines.parsed("samples.jsonl", nodes=[str(node)]) for node in range(4)]
    assert [own[-1]["wall_ns"] for own in kept] == [96, 97, 98, 99]
    assert sum(map(len, kept)) <= 35


@given(st.lists(st.binary(max_size=12) | st.sampled_from([b"[]", b'{"pid": []}', b'{"kind":"gpu"}']), max_size=60))
def test_anything_may_be_thinned(drawn: list[bytes]) -> None:
    lines = Lines(most_of_node=8)
    for line in drawn:
        lines.put("samples.jsonl", [line], node="0", offset_ns=0)
    raw = list(lines.raw("samples.jsonl", ["0"]))
    assert len(raw) <= max(8, lines.most_of_node)
    assert of_kind(raw, "gpu", (None, None), 1000) == [one for one in raw if one[1] == b'{"kind":"gpu"}']


def test_of_very_many_of_a_kind_every_nth_of_each() -> None:
    raw = [("0", json.dumps({"wall_ns": at, "kind": "gpu", "index": at % 3}).encode(), 5) for at in range(3000)]
    chosen = of_kind(raw, "gpu", (95, 2000), 100)
    walls = [json.loads(line)["wall_ns"] for _, line, _ in chosen]
    assert walls == sorted(walls)
    assert (walls[0], walls[-1]) == (100, 2005), "on the hub's clock"
    assert {at % 3 for at in walls} == {0, 1, 2}
    assert 100 <= len(walls) <= 100 + 3 * 120
    assert of_kind(raw, "host", (None, None), 100) == []
