"""Every column against a plain reading by ``json`` and fractions, on made-up and on real files."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.model.columns import Kind, Trace, kind_of
from stepscope.traces.model.window import Window
from stepscope.traces.reading.files import read_trace
from stepscope.traces.reading.kineto import read_kineto

ON_DEVICE = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.SYNC, Kind.DEVICE_ANNOTATION)
REAL = [
    "hta_cp_alexnet",
    "hta_cp_event_sync",
    "hta_cp_event_sync_multi",
    "hta_cp_simple_add",
    "hta_nccl_data_1of2",
    "param_dlrm_8rank",
]
LARGE = ["hta_df_index_resolver_1of2", "hta_trace_diff", "kineto_resnet50_w0"]


def ns(value: Any) -> int:
    return round(Fraction(value) * 1000)


def thread_of(event: dict[str, Any]) -> tuple[Any, Any]:
    return tuple(int(v) if str(v).isdigit() else v for v in (event.get("pid", -1), event.get("tid", -1)))


def plain_slices(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """(start, duration, kind, name, thread, device, stream, correlation, external id), sorted."""
    out = []
    for event in events:
        if event.get("ph") != "X" or event.get("ts") is None:
            continue
        args, kind = event.get("args") or {}, kind_of(event.get("cat"))
        device = stream = -1
        if kind in ON_DEVICE:
            device, stream = args.get("device", -1), args.get("stream", -1)
            device = device if 0 <= device < 1024 else event["pid"]
            device = device if isinstance(device, int) and 0 <= device < 1024 else 0
            if not 0 <= stream < 2**31 - 1:
                tid = thread_of(event)[1]
                stream = tid if isinstance(tid, int) and 0 <= tid < 2**31 - 1 and stream < 0 else -1
        external = args.get("External id", -1)
        out.append(
            (
                ns(event["ts"]),
                max(0, ns(event.get("dur", 0))),
                int(kind),
                event.get("name", ""),
                thread_of(event),
                device,
                stream,
                args.get("correlation", -1),
                external if external >= 0 else args.get("external id", -1),
            )
        )
    return sorted(out, key=repr)


def our_slices(trace: Trace, base_ns: int = 0) -> list[tuple[Any, ...]]:
    slices = trace.slices
    origin_ns = trace.meta.origin_ns - base_ns
    return sorted(
        (
            (
                int(slices.start_ns[row]) + origin_ns,
                int(slices.dur_ns[row]),
                int(slices.kind[row]),
                trace.name(row),
                (trace.threads[slices.thread[row]].pid, trace.threads[slices.thread[row]].tid),
                int(slices.device[row]),
                int(slices.stream[row]),
                int(slices.correlation[row]),
                int(slices.external[row]),
            )
            for row in range(len(trace))
        ),
        key=repr,
    )


def plain_sides(events: list[dict[str, Any]]) -> dict[str, list[tuple[Any, ...]]]:
    """What stands in side tables, each entry with the start and name of its slice, sorted."""
    out: dict[str, list[tuple[Any, ...]]] = {name: [] for name in ("ops", "kernels", "copies", "pythons", "memory")}
    for event in events:
        args, kind = event.get("args") or {}, kind_of(event.get("cat"))
        if event.get("ph") == "i" and event.get("name") == "[memory]":
            names = ("Device Type", "Device Id", "Bytes", "Total Allocated", "Total Reserved")
            values = [args.get(name, 0 if name == "Bytes" else -1) for name in names]
            out["memory"].append((ns(event["ts"]), *values))
        if event.get("ph") != "X":
            continue
        key = (ns(event["ts"]), event["name"])
        if kind == Kind.KERNEL:
            out["kernels"].append((*key, args.get("graph id", -1), _rounded(args.get("est. achieved occupancy %"))))
        elif kind in (Kind.MEMCPY, Kind.MEMSET):
            out["copies"].append((*key, args.get("bytes", -1)))
        elif kind == Kind.PYTHON:
            out["pythons"].append((*key, args.get("Python id", -1)))
        elif kind in (Kind.OP, Kind.ANNOTATION):
            found = (
                args.get("Input Dims"),
                args.get("Input type"),
                args.get("Call stack") or None,
                args.get("Module Hierarchy") or None,
                args.get("Sequence number", -1),
                args.get("Fwd thread id", -1),
            )
            if found[0] is not None or found[2] or found[3] or found[4] >= 0:
                out["ops"].append((*key, *found))
    return {name: sorted(entries, key=repr) for name, entries in out.items()}


def our_sides(trace: Trace, base_ns: int = 0) -> dict[str, list[tuple[Any, ...]]]:
    origin_ns = trace.meta.origin_ns - base_ns

    def key(row: int) -> tuple[int, str]:
        return int(trace.slices.start_ns[row]) + origin_ns, trace.name(row)

    def text(code: int) -> Any:
        return json.loads(trace.text(code)) if code >= 0 else None

    ops, kernels, copies, pythons, memory = trace.ops, trace.kernels, trace.copies, trace.pythons, trace.memory
    out = {
        "ops": [
            (
                *key(row),
                text(ops.dims[at]),
                text(ops.types[at]),
                trace.text(ops.stack[at]) or None,
                trace.text(ops.module[at]) or None,
                int(ops.sequence[at]),
                int(ops.forward_thread[at]),
            )
            for at, row in enumerate(ops.row.tolist())
        ],
        "kernels": [
            (*key(row), int(kernels.graph[at]), _rounded(float(kernels.occupancy[at])))
            for at, row in enumerate(kernels.row.tolist())
        ],
        "copies": [(*key(row), int(copies.bytes[at])) for at, row in enumerate(copies.row.tolist())],
        "pythons": [(*key(row), int(pythons.id[at])) for at, row in enumerate(pythons.row.tolist())],
        "memory": [
            (
                int(memory.time_ns[at]) + origin_ns,
                int(memory.device_type[at]),
                int(memory.device[at]),
                int(memory.bytes[at]),
                int(memory.allocated[at]),
                int(memory.reserved[at]),
            )
            for at in range(len(memory.time_ns))
        ],
    }
    return {name: sorted(entries, key=repr) for name, entries in out.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None or value != value else round(value, 3)


def compare(text: bytes, trace: Trace) -> None:
    document = json.loads(text, parse_float=Fraction)
    events = document if isinstance(document, list) else document["traceEvents"]
    base_ns = 0 if isinstance(document, list) else document.get("baseTimeNanoseconds", 0)
    assert trace.meta.read_events == len(events)
    assert our_slices(trace, base_ns) == plain_slices(events)
    plain = json.loads(text)
    for event, exact in zip(plain if isinstance(plain, list) else plain["traceEvents"], events, strict=True):
        event["ts"] = exact.get("ts", 0)
    sides = plain_sides(plain if isinstance(plain, list) else plain["traceEvents"])
    assert our_sides(trace, base_ns) == sides
    starts = list(zip(trace.slices.start_ns.tolist(), (-trace.slices.dur_ns).tolist(), strict=True))
    assert starts == sorted(starts)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", REAL)
def test_real_files(shared_data: Path, name: str) -> None:
    for path in sorted((shared_data / "traces" / name).rglob("*.gz"))[:2]:
        trace = read_trace(path)
        assert trace.meta.problems == ()
        compare(gzip.decompress(path.read_bytes()), trace)


@pytest.mark.parametrize("name", [LARGE[-1], *(pytest.param(name, marks=pytest.mark.soak) for name in LARGE[:-1])])
def test_parts_of_large_real_files(shared_data: Path, name: str, real_window: Callable[[Path], Window]) -> None:
    """All of the file for the number of events; every 40th event of it, as a file of its own, exactly."""
    path = min((shared_data / "traces" / name).rglob("*.gz"))
    text = gzip.decompress(path.read_bytes())
    document = json.loads(text)
    assert real_window(path).trace.meta.read_events == len(document["traceEvents"])
    document["traceEvents"] = document["traceEvents"][::40]
    some = json.dumps(document).encode()
    compare(some, read_kineto([some], "some"))


def test_a_part_of_a_file_in_nanoseconds_since_1970(shared_data: Path) -> None:
    """Times as Kineto once wrote them, beyond what doubles can tell; it is needed in later blocks only."""
    path = min((shared_data / "traces" / "hta_nccl_data_1of2").rglob("*.gz"))
    document = json.loads(gzip.decompress(path.read_bytes()), parse_float=literal)
    document["traceEvents"] = document["traceEvents"][:6000]
    for event in document["traceEvents"][3000:]:
        if "ts" in event:
            whole, _, decimals = str(event["ts"]).strip("@").partition(".")
            event["ts"] = literal(f"{int(whole) + 1_700_000_000_000_000}.{decimals or '000'}")
    text = unquoted(json.dumps(document))
    compare(text, read_kineto([text[at : at + 100_000] for at in range(0, len(text), 100_000)], "some"))


def literal(text: str) -> str:
    """A number that is to be written just so."""
    return f"@{text}@"


def unquoted(text: str) -> bytes:
    return re.sub(r'"@(-?[\d.eE+-]+)@"', r"\1", text).encode()


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
times = st.one_of(
    st.integers(-(10**6), 10**9),
    st.integers(0, 2 * 10**15),
    st.integers(0, 10**15).map(lambda value: Fraction(value, 1000)),
    st.integers(17 * 10**17, 18 * 10**17).map(lambda value: Fraction(value, 1000)),
)


def written(value: Any) -> Any:
    """A fraction of thousandths, with three decimals."""
    if not isinstance(value, Fraction):
        return value
    return literal(f"{int(value)}.{int(value * 1000) % 1000:03d}")


categories = st.sampled_from(
    [
        "cpu_op",
        "Operator",
        "kernel",
        "Kernel",
        "gpu_memcpy",
        "cuda_runtime",
        "python_function",
        "user_annotation",
        "x",
        "",
    ]
)
some_args = st.fixed_dictionaries(
    {},
    optional={
        "External id": st.integers(0, 10**6),
        "external id": st.integers(0, 10**6),
        "correlation": st.integers(0, 10**6),
        "stream": st.integers(-1, 40),
        "device": st.integers(-1, 7),
        "bytes": st.integers(0, 10**12),
        "graph id": st.integers(0, 9),
        "est. achieved occupancy %": st.integers(0, 100),
        "Input Dims": st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
        "Input type": st.lists(names, max_size=3),
        "Call stack": names,
        "Module Hierarchy": names,
        "Sequence number": st.integers(0, 9),
        "Fwd thread id": st.integers(0, 9),
        "Python id": st.integers(0, 9),
        "other": st.lists(st.fixed_dictionaries({"a}, {": names}), max_size=3),
    },
)
slices = st.fixed_dictionaries(
    {"ph": st.just("X"), "name": names, "pid": st.integers(0, 5), "tid": st.integers(0, 5), "ts": times},
    optional={"cat": categories, "dur": st.integers(-5, 10**6), "args": some_args},
)
others = st.sampled_from(
    [
        {"ph": "i", "name": "[memory]", "ts": 5, "pid": 1, "tid": 1, "args": {"Bytes": 5, "Device Type": 1}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "x"}},
        {"ph": "s", "id": 1, "cat": "ac2g", "ts": 1, "pid": 1, "tid": 1},
        {"ph": "C", "name": "counter", "ts": 3, "args": {"a": 1}},
        {"name": "no phase", "ts": 1},
    ]
)


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(st.one_of(slices, slices, others), max_size=12),
    st.sampled_from([None, 1]),
    st.integers(20, 400),
    st.booleans(),
    st.booleans(),
)
def test_any_valid_trace(
    events: list[dict[str, Any]], indent: int | None, size: int, bare: bool, ascii_only: bool
) -> None:
    events = [{key: written(value) for key, value in event.items()} for event in events]
    document = events if bare else {"baseTimeNanoseconds": 5, "traceEvents": events, "trailer": [{"a": 1}, {"b": [{}]}]}
    text = unquoted(json.dumps(document, indent=indent, ensure_ascii=ascii_only))
    trace = read_kineto([text[at : at + size] for at in range(0, len(text), size)], "made")
    assert trace.meta.truncated is None
    compare(text, trace)
