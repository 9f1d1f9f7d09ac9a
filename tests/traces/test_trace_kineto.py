"""What of an event becomes which column, whatever its form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.traces import MadeTrace

from stepscope.traces.model.columns import Kind, Trace, kind_of
from stepscope.traces.reading.kineto import read_kineto
from stepscope.traces.reading.kineto_events import LATEST_NS, ns_of_text


def read(*events: Any, **header: Any) -> Trace:
    return read_kineto([json.dumps({**header, "traceEvents": list(events)}).encode()], "made")


def event(**fields: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 2, "ts": 10, "dur": 5, "args": {}, **fields}


def without(name: str) -> dict[str, Any]:
    fields = event()
    del fields[name]
    return fields


def read_text(text: str) -> Trace:
    return read_kineto([('{"traceEvents": [' + text + "]}").encode()], "made")


@pytest.mark.parametrize(
    ("text", "time_ns"),
    [
        (b"0", 0),
        (b"12", 12_000),
        (b"-3", -3_000),
        (b"-0.500", -500),
        (b"12.001", 12_001),
        (b"12.5", 12_500),
        (b'"12.5"', 12_500),
        (b"1700000000000000.123", 1_700_000_000_000_000_123),
        (b"1712867402348256.077", 1_712_867_402_348_256_077),
        (b"1.5e3", 1_500_000),
        (b"1.7123456789E15", 1_712_345_678_900_000_000),
        (b"1e-9", 0),
        (b"0.0005", 0),
        (b"0.0015", 2),
        (b"1e999999999999", LATEST_NS + 1),
        (b"1e-999999999999", 0),
        (b"9999999999999999999999", LATEST_NS + 1),
        (b"", LATEST_NS + 1),
        (b"null", LATEST_NS + 1),
        (b'"NaN"', LATEST_NS + 1),
        (b'"soon"', LATEST_NS + 1),
        (b"[1]", LATEST_NS + 1),
    ],
)
def test_times_as_text(text: bytes, time_ns: int) -> None:
    assert ns_of_text(text) == time_ns


@pytest.mark.parametrize(
    "start", ["1712867402348256.077", "8796093022207.999", "9999999999999.001", "4458676456914.077"]
)
def test_one_event_alone_is_exact(start: str) -> None:
    """A double has lost the decimals of the largest, so nothing of it shows that there were any."""
    trace = read_text(f'{{"ph": "X", "name": "a", "ts": {start}, "dur": 1.001}}')
    assert trace.meta.origin_ns == int(start.replace(".", ""))
    assert trace.slices.dur_ns.tolist() == [1001]


def test_times_of_all_forms_in_one_piece() -> None:
    forms = ["1712867402348256.077", "1712867402348256", '"1712867402348257.5"', "1.712867402348258e15"]
    trace = read_text(",".join(f'{{"ph": "X", "name": "{n}", "ts": {form}}}' for n, form in enumerate(forms)))
    assert trace.meta.origin_ns == 1_712_867_402_348_256_000
    assert [(trace.name(row), int(trace.slices.start_ns[row])) for row in range(4)] == [
        ("1", 0),
        ("0", 77),
        ("2", 1500),
        ("3", 2000),
    ]


@pytest.mark.parametrize("name", ["cat", "name", "pid", "tid", "dur", "args"])
def test_what_may_be_missing(name: str) -> None:
    for odd in (without(name), event(**{name: None})):
        trace = read(odd)
        assert len(trace) == 1
        assert trace.meta.problems == ()
        assert trace.name(0) == ("" if name == "name" else "a")
        assert trace.slices.dur_ns.tolist() == [0 if name == "dur" else 5000]
        assert trace.slices.kind.tolist() == [Kind.OTHER if name == "cat" else Kind.OP]


def test_without_a_time_it_is_left_out() -> None:
    for odd in (without("ts"), event(ts=None), event(ts="soon"), event(ts=1e300), event(ts=10**30), event(dur=1e300)):
        trace = read(event(name="b"), odd)
        assert [trace.name(row) for row in range(len(trace))] == ["b"]
        assert "left out 1 event: no usable time" in trace.meta.problems


def test_a_negative_duration_is_none() -> None:
    trace = read(event(dur=-3))
    assert trace.slices.dur_ns.tolist() == [0]
    assert trace.meta.problems == ("counted 1 event with a negative duration as zero",)


def test_numbers_of_odd_types() -> None:
    args = {"correlation": 12.0, "External id": "34", "stream": "7", "device": 1.0, "bytes": 8e3, "other": {"a": [1]}}
    trace = read(event(cat="gpu_memcpy", ts="10.5", dur="2.25", args=args), event())
    assert trace.meta.problems == ()
    row = int(trace.copies.row[0])
    assert (int(trace.slices.dur_ns[row]), int(trace.slices.correlation[row])) == (2250, 12)
    assert (int(trace.slices.external[row]), int(trace.slices.stream[row]), int(trace.slices.device[row])) == (34, 7, 1)
    assert trace.copies.bytes.tolist() == [8000]


def test_fields_that_make_no_sense_are_not_used() -> None:
    args = {"correlation": [1], "External id": 3.5, "device": True, "stream": 2**32 - 1, "graph id": 2**70}
    trace = read(event(cat="kernel", pid=3, tid="stream 9", args=args))
    assert trace.meta.problems == ("ignored fields of the wrong type in 1 event",)
    slices = trace.slices
    assert (slices.correlation[0], slices.external[0], slices.device[0], slices.stream[0]) == (-1, -1, 3, -1)
    assert trace.kernels.graph.tolist() == [-1]


def test_numbers_beyond_64_bits_are_none() -> None:
    trace = read(event(args={"correlation": 2**64 - 1, "External id": 5, "Sequence number": 2**80}))
    assert (trace.slices.correlation.tolist(), trace.slices.external.tolist()) == ([-1], [5])


def test_of_keys_that_stand_twice_the_last_counts() -> None:
    args = '"args": {"correlation": 1, "correlation": 2}'
    trace = read_text('{"ph": "M", "ph": "X", "name": "a", "name": "b", "ts": 1, "dur": 1, ' + args + "}")
    assert (trace.name(0), trace.slices.correlation.tolist()) == ("b", [2])


def test_ranges_become_slices() -> None:
    trace = read(
        {"ph": "B", "name": "outer", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 10},
        {"ph": "B", "name": "other thread", "cat": "cpu_op", "pid": 1, "tid": 2, "ts": 11},
        {"ph": "B", "name": "inner", "cat": "kernel", "pid": 1, "tid": 1, "ts": 12.5, "args": {"stream": 4}},
        {"ph": "E", "pid": 1, "tid": "1", "ts": 14.125},
        {"ph": "E", "pid": 1, "tid": 1, "ts": 20, "args": {"correlation": 5}},
        {"ph": "E", "pid": 1, "tid": 1, "ts": 21},
        {"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 0, "dur": 1},
    )
    found = [(trace.name(r), int(trace.slices.start_ns[r]), int(trace.slices.dur_ns[r])) for r in range(len(trace))]
    assert found == [("x", 0, 1000), ("outer", 10_000, 10_000), ("inner", 12_500, 1625)]
    assert trace.slices.correlation.tolist() == [-1, 5, -1]
    assert trace.slices.stream.tolist() == [-1, -1, 4]
    assert trace.meta.problems == ("left out 2 range starts and ends without their other half",)


def test_a_range_over_pieces_with_exact_times() -> None:
    text = b'[{"ph": "B", "name": "a", "ts": 1712867402348256.077}, {"ph": "s", "cat": "ac2g"}, '
    text += b'{"ph": "E", "ts": 1712867402348999.078}]'
    for size in (20, 60, 500):
        trace = read_kineto([text[at : at + size] for at in range(0, len(text), size)], "made")
        assert trace.slices.dur_ns.tolist() == [743_001]


def test_threads_are_the_same_however_they_are_spelt() -> None:
    trace = read(
        event(tid="17"),
        event(tid=17),
        {"ph": "M", "name": "thread_name", "pid": "1", "tid": "17", "args": {"name": "t"}},
    )
    assert trace.slices.thread.tolist() == [0, 0]
    assert [(thread.pid, thread.tid, thread.name) for thread in trace.threads] == [(1, 17, "t")]


def test_arrows_from_forward_to_backward() -> None:
    made = MadeTrace()
    made.op("a", 0, 5)
    made.forward_backward(7, 1, 10)
    made.forward_backward(8, 2, 11)
    made.events.append({"ph": "s", "id": "0x9", "cat": "fwdbwd", "ts": 3, "pid": 4000, "tid": 4000})
    made.events.append({"ph": "f", "id": "0x9", "cat": "fwdbwd", "ts": 12, "pid": 4000, "tid": 4001})
    made.events.append({"ph": "f", "id": 99, "cat": "fwdbwd", "ts": 12, "pid": 4000, "tid": 4001})
    made.events.append({"ph": "f", "id": 8, "cat": "ac2g", "ts": 13, "pid": 4000, "tid": 4001})
    flows = made.trace().flows
    assert sorted(zip(flows.from_ns.tolist(), flows.to_ns.tolist(), strict=True)) == [
        (1000, 10_000),
        (2000, 11_000),
        (3000, 12_000),
    ]


def test_what_the_file_says_of_itself() -> None:
    trace = read(
        event(pid=77),
        distributedInfo={"rank": "3", "world_size": 8, "backend": "nccl", "pg_config": [{"pg_name": "0"}, 5]},
        deviceProperties=[{"name": "GPU"}],
        hostname="node",
        with_stack=1,
    )
    meta = trace.meta
    assert (meta.rank, meta.world_size, meta.backend, meta.host, meta.pid) == (3, 8, "nccl", "node", 77)
    assert (meta.groups, meta.devices, meta.with_stack) == (({"pg_name": "0"},), ({"name": "GPU"},), True)


def test_categories_of_all_times_and_vendors() -> None:
    expected = {
        Kind.OP: ["cpu_op", "Operator"],
        Kind.ANNOTATION: ["user_annotation"],
        Kind.PYTHON: ["python_function", "Python"],
        Kind.RUNTIME: ["Runtime", "cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "xpu_driver"],
        Kind.KERNEL: ["Kernel", "kernel", "mtia_ccp_events"],
        Kind.MEMCPY: ["Memcpy", "gpu_memcpy"],
        Kind.MEMSET: ["Memset", "gpu_memset"],
        Kind.SYNC: ["cuda_sync", "xpu_sync"],
        Kind.DEVICE_ANNOTATION: ["gpu_user_annotation"],
        Kind.OVERHEAD: ["overhead"],
        Kind.OTHER: ["Trace", "cuda_profiler_range", "cuda_event", "mtia_counters", "collective_comm", "", None],
    }
    expected[Kind.RUNTIME] += ["mtia_runtime", "glow_runtime", "privateuse1_runtime", "privateuse1_driver", "hpu_op"]
    assert {kind: [kind_of(name) for name in names] for kind, names in expected.items()} == {
        kind: [kind] * len(names) for kind, names in expected.items()
    }
