"""The merged timeline: read again it holds what the traces held, on one clock, and nothing overlaps in a track."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_ranks import slim_rank

from stepscope.traces.across_ranks.arrivals import match
from stepscope.traces.across_ranks.clocks import Clocks, clocks_of
from stepscope.traces.exports import SIDES, Bar, Track, collective_tracks, us, write_perfetto
from stepscope.traces.model.columns import Trace, side_columns
from stepscope.traces.model.window import launches_of
from stepscope.traces.reading.files import blocks_of
from stepscope.traces.reading.kineto import read_kineto

NAME = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"


def document(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def exact_ns(value: Any) -> int:
    return round(value * 1000)


def rows(trace: Trace, first_ns: int) -> Counter[Any]:
    """All slices with all that is known of them but their thread."""
    slices = trace.slices
    more: dict[int, list[Any]] = defaultdict(list)
    for side, keys in SIDES.items():
        table = side_columns(getattr(trace, side))
        for at, row in enumerate(table["row"].tolist()):
            for column in keys:
                value = table[column][at].item()
                if value >= 0:
                    is_text = column in TEXTS and (side, column) != ("pythons", "module")
                    more[row].append((side, column, trace.strings[value] if is_text else value))
    columns = (slices.kind, slices.device, slices.stream, slices.correlation, slices.external)
    return Counter(
        (
            *(trace.name(row), int(slices.start_ns[row]) + first_ns, int(slices.dur_ns[row])),
            *(int(column[row]) for column in columns),
            tuple(more[row]),
        )
        for row in range(len(trace))
    )


TEXTS = {"dims", "types", "concrete", "stack", "module", "op", "group", "description", "ranks", "dtype"}


def check(traces: dict[int, Trace], clocks: Clocks, out: Path) -> list[dict[str, Any]]:
    written = write_perfetto(iter(traces.items()), clocks, out)
    events = document(out)
    assert len(events) == written
    second = read_kineto(blocks_of(out), str(out))
    expected: Counter[Any] = Counter()
    for rank, trace in traces.items():
        expected += rows(trace, trace.meta.origin_ns - clocks.shifts[rank] - clocks.zero_ns)
    assert rows(second, second.meta.origin_ns) == expected
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((exact_ns(event["ts"]), exact_ns(event["dur"])))
    assert {pid for pid, _ in tracks} <= set(traces)
    for own in tracks.values():
        nest(own)
    arrows = Counter((event["ph"], event["cat"]) for event in events if event["ph"] in "sf")
    launched = sum(int((launches_of(trace) >= 0).sum()) for trace in traces.values())
    assert arrows["s", "ac2g"] == arrows["f", "ac2g"] == launched
    assert sum(event["ph"] == "C" for event in events) == sum(len(trace.memory.time_ns) for trace in traces.values())
    return events


def nest(slices: list[tuple[int, int]]) -> None:
    open_ends: list[int] = []
    for start, dur in sorted(slices, key=lambda each: (each[0], -each[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or open_ends[-1] >= start + dur
        open_ends.append(start + dur)


def test_times_are_exact() -> None:
    assert [us(ns) for ns in (0, 7, 1000, 1_234_567_890_123_456_789, -5)] == [
        *("0.000", "0.007", "1.000", "1234567890123456.789", "-0.005")
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "folder", ["param_dlrm_8rank", "hta_nccl_data_1of2", "hta_cp_alexnet", "hta_cp_event_sync_multi"]
)
def test_real_files(shared_data: Path, tmp_path: Path, folder: str) -> None:
    paths = sorted((shared_data / "traces" / folder).iterdir())[:3]
    traces = {rank: read_kineto(blocks_of(path), str(path)) for rank, path in enumerate(paths)}
    clocks = clocks_of([slim_rank(trace, rank) for rank, trace in traces.items()])
    events = check(traces, clocks, tmp_path / "out.json.gz")
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {f"rank {rank}" for rank in traces}


pieces = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.integers(0, 20),
        st.sampled_from(["cpu_op", "kernel", "cuda_runtime", "gpu_memcpy", "python_function", "weird"]),
        st.sampled_from([7, 8]),
        st.sampled_from([-1, 1, 2]),
    ),
    max_size=20,
)


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranks=st.lists(pieces, min_size=1, max_size=3))
def test_anything(tmp_path: Path, ranks: Any) -> None:
    traces = {}
    for rank, events in enumerate(ranks):
        made = MadeTrace(rank=rank)
        for start, dur, category, place, correlation in events:
            args = {"correlation": correlation, "External id": 3, "bytes": 5, "Python id": 2, "Seq": 1}
            args |= {"stream": place, "device": place - 7} if category in ("kernel", "gpu_memcpy") else {}
            args |= {"Input Dims": [[1, 2]], "Call stack": 'a "quoted";\n line'} if category == "cpu_op" else {}
            made.add(category, f"{category} é\u2028", 1000.125 + start, dur, tid=place, args=args)
        made.memory(1000, 100, 100, 200)
        traces[rank] = made.trace()
    clocks = clocks_of([slim_rank(trace, rank) for rank, trace in traces.items()])
    check(traces, clocks, tmp_path / "out.json")


def test_clocks_are_aligned_and_collectives_have_a_track(tmp_path: Path) -> None:
    made = [MadeTrace(rank=rank, world_size=2, header={"hostname": f"host{rank}"}) for rank in range(2)]
    for number in range(3):
        for rank in range(2):
            late, clock = 30 * rank, 5000 * rank
            made[rank].launched(NAME, at=100 * number + clock, start=100 * number + 20 + late + clock, dur=60 - late)
    traces = {rank: each.trace() for rank, each in enumerate(made)}
    analyses = [slim_rank(trace, rank) for rank, trace in traces.items()]
    found = match(analyses)
    assert found.clocks.shifts == {0: 0, 1: 5_000_000}
    tracks = collective_tracks(found)
    tracks.append(Track(rank=1, name="mine", bars=[Bar(name="b", start_ns=5_010_000, end_ns=5_011_001)]))
    write_perfetto(traces.items(), found.clocks, tmp_path / "out.json", tracks=tracks)
    events = document(tmp_path / "out.json")
    ends = defaultdict(set)
    for event in events:
        if event.get("cat") == "kernel":
            ends[exact_ns(event["ts"] + event["dur"])].add(event["pid"])
    assert sorted(ends.items()) == [(80_000, {0, 1}), (180_000, {0, 1}), (280_000, {0, 1})]
    ours = [event for event in events if event.get("cat") == "stepscope"]
    waits = [event for event in ours if event["name"] == "all_reduce: waits for rank 1"]
    assert [(event["pid"], event["ts"], event["dur"]) for event in waits] == [(0, 20, 30), (0, 120, 30), (0, 220, 30)]
    transfers = [event for event in ours if event["name"] == "all_reduce: transfer"]
    assert sorted((event["pid"], event["dur"]) for event in transfers) == [(0, 30)] * 3 + [(1, 30)] * 3
    assert [(event["ts"], event["dur"]) for event in ours if event["name"] == "b"] == [(10, 1.001)]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        *("rank 0 · host0", "rank 1 · host1")
    }


def test_collectives_at_a_time_are_on_tracks_of_their_own() -> None:
    made = [MadeTrace(header={"distributedInfo": {"rank": rank, "world_size": 2}, "hostname": "a"}) for rank in (0, 1)]
    for each in made:
        for place in range(3):
            each.kernel(NAME, 10 * place, 25, stream=20 + place)
    found = match([slim_rank(each.trace(), rank) for rank, each in enumerate(made)])
    names = [(track.rank, track.name, len(track.bars)) for track in collective_tracks(found)]
    name = "collectives: waiting and transfer"
    assert names == [(rank, name + more, 1) for rank in (0, 1) for more in ("", " (2)", " (3)")]
