"""Every figure of the device's work, computed a second time: from the events of the file, one by one, without numpy."""

from __future__ import annotations

import gzip
import itertools
import json
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import astuple, dataclass
from decimal import Decimal
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.device.figures import device_figures
from stepscope.traces.device.work import idle_of, temporal_of
from stepscope.traces.model.kernel_names import kernel_class
from stepscope.traces.model.tables import Table
from stepscope.traces.model.window import window_of
from stepscope.traces.rank_analysis import device_tables
from stepscope.traces.reading.kineto import read_kineto

SORTS = {"kernel": "kernel", "gpu_memcpy": "copy", "memcpy": "copy", "gpu_memset": "copy", "memset": "copy"}
CALLS = ("cuda_runtime", "cuda_driver", "runtime")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaFree", "cudaMemcpy")


@dataclass(eq=False)
class Piece:
    """Device work."""

    start: int
    end: int
    name: str
    kind: str
    stream: str
    args: dict[str, Any]
    call: Any = None

    @property
    def dur(self) -> int:
        return self.end - self.start


@dataclass(eq=False)
class Call:
    start: int
    end: int
    name: str
    thread: Any
    correlation: int


def nanoseconds(value: Any) -> int:
    return value * 1000 if isinstance(value, int) else int((Decimal(value) * 1000).to_integral_value())


class Plain:
    """What counts in a document, as lists of plain values."""

    def __init__(self, document: dict[str, Any]) -> None:
        events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
        self.origin = min(
            (nanoseconds(e["ts"]) for e in document["traceEvents"] if "ts" in e and e["ph"] in "Xi"), default=0
        )
        devices = {self._device(event) for event in events if event["cat"].lower() in SORTS}
        work, self.calls, host, steps = [], [], [], {}
        for event in events:
            start = nanoseconds(event["ts"])
            end = start + max(nanoseconds(event.get("dur", 0)), 0)
            category, args, name = event["cat"].lower(), event.get("args", {}), event["name"]
            if category in SORTS:
                kind = "comm" if category == "kernel" and "nccl" in name.lower() else SORTS[category]
                place = str(args.get("stream", event["tid"]))
                stream = f"{self._device(event)}:{place}" if len(devices) > 1 else place
                work.append(Piece(start, end, name, kind, stream, args))
            elif category in CALLS:
                self.calls.append(Call(start, end, name, (event["pid"], event["tid"]), args.get("correlation", -1)))
            elif name.startswith("ProfilerStep#") and category != "gpu_user_annotation":
                steps[int(name.split("#")[1])] = (start, end)
            host += [(start, end)] * (category in (*CALLS, "cpu_op", "operator", "user_annotation", "python_function"))
        self.calls.sort(key=lambda call: (call.start, -call.end))
        by_correlation: dict[int, Call] = {}
        for call in self.calls:
            by_correlation.setdefault(call.correlation, call)
        for piece in work:
            correlation = piece.args.get("correlation", -1)
            piece.call = by_correlation.get(correlation) if correlation > 0 else None
        self.steps = sorted((*times, number) for number, times in steps.items())
        if len(self.steps) > 1:
            last = self.steps.pop()[0]
            work = [piece for piece in work if piece.call is None or piece.call.start < last]
            self.calls = [call for call in self.calls if call.start < last]
        elif not self.steps and (host or work):
            times = [*host, *((piece.start, piece.end) for piece in work)]
            self.steps = [(min(start for start, _ in times), max(end for _, end in times), 0)]
        self.work = sorted(work, key=lambda piece: (piece.start, -piece.end))
        stepped = [each.start for each in work if each.call and self._step_at(each.call.start) is not None]
        self.first_launched = min(stepped, default=0) if steps else 0

    @staticmethod
    def _device(event: dict[str, Any]) -> int:
        return int(event.get("args", {}).get("device", event["pid"]))

    def step_of(self, piece: Piece) -> int | None:
        began = piece.call.start if piece.call else piece.start
        if not piece.call and piece.start < self.first_launched:
            return None
        return self._step_at(began)

    def _step_at(self, began: int) -> int | None:
        return next((number for start, end, number in self.steps if start <= began < end), None)


def together(work: list[Piece], since: int | None = None, until: int | None = None) -> Counter[frozenset[str]]:
    """How long which kinds ran at once, instant by instant."""
    edges = sorted({time for piece in work for time in (piece.start, piece.end)})
    begins, ends = defaultdict(list), defaultdict(list)
    for piece in work:
        if piece.dur:
            begins[piece.start].append(piece.kind)
            ends[piece.end].append(piece.kind)
    running: Counter[str] = Counter()
    out: Counter[frozenset[str]] = Counter()
    for time, following in itertools.pairwise(edges):
        running.update(begins[time])
        running.subtract(ends[time])
        start, end = max(time, since or time), min(following, until or following)
        out[frozenset(kind for kind, count in running.items() if count)] += max(end - start, 0)
    out.pop(frozenset(), None)
    return out


def temporal(work: list[Piece]) -> tuple[int, ...]:
    if not work:
        return (0,) * 8
    span = max(piece.end for piece in work) - min(piece.start for piece in work)
    times = together(work)

    def during(*kinds: str) -> int:
        return sum(length for which, length in times.items() if which >= set(kinds))

    hidden = during("kernel", "comm")
    exposed_memory = times[frozenset({"copy"})]
    comm = during("comm")
    busy = sum(times.values())
    return span, span - busy, during("kernel"), comm, during("copy"), hidden, comm - hidden, exposed_memory


def merged(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, end in sorted(pair for pair in pairs if pair[1] > pair[0]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def within(start: int, end: int, spans: list[tuple[int, int]]) -> int:
    total = 0
    for other_start, other_end in spans[max(bisect_right(spans, (start, start)) - 1, 0) :]:
        if other_start >= end:
            break
        total += max(min(end, other_end) - max(start, other_start), 0)
    return total


def idle(plain: Plain, only: str | None = None) -> dict[str, tuple[int, int, int, int]]:
    """By stream, or as if all work were on ``only`` one."""
    spans = defaultdict(list)
    for call in plain.calls:
        if call.name in WAITS:
            spans[call.thread].append((call.start, call.end))
    for piece in plain.work:
        if piece.call and "-> Pageable" in piece.name:
            spans[piece.call.thread].append((piece.call.start, piece.call.end))
    waits = {thread: merged(pairs) for thread, pairs in spans.items()}
    out = {}
    for stream in {only or piece.stream for piece in plain.work}:
        host = kernel = other = sync = 0
        own = [piece for piece in plain.work if piece.stream == stream or only]
        until = own[0].end
        for piece in own[1:]:
            gap = max(piece.start - until, 0)
            if gap and piece.call and piece.call.start > until:
                host += gap
                sync += within(until, min(piece.call.start, piece.start), waits.get(piece.call.thread, []))
            elif gap < 30_000:
                kernel += gap
            else:
                other += gap
            until = max(until, piece.end)
        out[stream] = (host, kernel, other, sync)
        assert sum(out[stream][:3]) + sum(together(own).values()) == until - own[0].start
    return out


def check(document: dict[str, Any], text: bytes) -> None:
    plain = Plain(document)
    window = window_of(read_kineto([text], "trace.json"))
    tables = {table.name: table for table in device_tables(window)}
    assert astuple(temporal_of(window)) == temporal(plain.work)
    waits = idle(plain)
    assert {stream: astuple(each) for stream, each in idle_of(window).items()} == waits
    check_steps(plain, tables["temporal_steps"])
    check_types(plain, tables["kernel_types"])
    check_idle_tables(waits, tables["idle"], tables["idle_by_operator"])
    check_kernels(plain, tables["kernels"], tables["kernel_classes"], tables["short_kernels"])
    check_launches(plain, tables["launches"], tables["queue"], tables["queue_curve"])
    check_copies(plain, tables["copies"], tables["copy_bandwidth"])
    check_figures(plain, device_figures(window))
    joined = idle(plain, "all").get("all", (0, 0, 0, 0))
    assert astuple(device_figures(window).idle) == joined
    assert sum(joined[:3]) == temporal_of(window).idle_ns
    for table in tables.values():
        # Numbers of any kind, but plain and never negative.
        values = [value for row in table.rows for value in row]
        assert all(type(value) in (int, float, str, type(None)) for value in values)
        assert all(value >= 0 for value in values if isinstance(value, int | float))


def check_steps(plain: Plain, table: Table) -> None:
    expected = []
    for start, end, number in plain.steps:
        own = [piece for piece in plain.work if plain.step_of(piece) == number]
        figures = temporal(own)
        pace = max(end - start, figures[0])
        share = (figures[0] - figures[1]) / pace if pace else None
        expected.append((number, start - plain.origin, end - start, pace, share, len(own), *figures))
    assert list(table.rows) == expected


def check_types(plain: Plain, table: Table) -> None:
    words = {"computation": "kernel", "communication": "comm", "memory": "copy"}
    found = {frozenset(words[word] for word in row[0].split(" overlapping ")): row[1] for row in table.rows}
    assert len(found) == 7
    assert {which: length for which, length in found.items() if length} == +together(plain.work)


def check_idle_tables(waits: dict[str, tuple[int, int, int, int]], table: Table, by_operator: Table) -> None:
    rows = {row["stream"]: row for row in table.to_rows()}
    for stream, causes in waits.items():
        row = rows.pop(stream)
        assert (row["host_wait_ns"], row["kernel_wait_ns"], row["other_ns"], row["sync_ns"]) == causes
        assert row["idle_ns"] + row["busy_ns"] == row["span_ns"]
        assert row["idle_ns"] == sum(causes[:3])
        ended = [each for each in by_operator.to_rows() if each["stream"] == stream]
        if not by_operator.left_out:
            assert sum(each["host_wait_ns"] for each in ended) == causes[0]
            assert sum(each["sync_ns"] for each in ended) == causes[3]
    assert not rows


def check_kernels(plain: Plain, table: Table, classes: Table, short: Table) -> None:
    kernels = [piece for piece in plain.work if piece.kind != "copy"]
    computing, communicating = (
        merged([(piece.start, piece.end) for piece in kernels if piece.kind == kind]) for kind in ("kernel", "comm")
    )
    others = {"kernel": communicating, "comm": computing}
    by_name = defaultdict(list)
    for piece in kernels:
        by_name[piece.name].append(piece)
    assert len(table.rows) == len(by_name)
    total = sum(piece.dur for piece in kernels)
    for row in table.to_rows():
        own = by_name[row["name"]]
        durations = sorted(piece.dur for piece in own)
        middle = (durations[(len(own) - 1) // 2] + durations[len(own) // 2]) // 2
        assert (row["count"], row["total_ns"], row["median_ns"]) == (len(own), sum(durations), middle)
        assert (row["min_ns"], row["max_ns"]) == (durations[0], durations[-1])
        assert row["mean_ns"] == pytest.approx(fmean(durations), abs=0.5)
        assert row["deviation_ns"] == pytest.approx(pstdev(durations), abs=0.6)
        assert row["time_share"] == (sum(durations) / total if total else None)
        overlapped = sum(within(piece.start, piece.end, others[piece.kind]) for piece in own)
        assert (row["overlapped_ns"], row["exposed_ns"]) == (overlapped, sum(durations) - overlapped)
    sums: Counter[str] = Counter()
    for piece in kernels:
        sums[kernel_class(piece.name)] += piece.dur
    assert {row["class"]: row["total_ns"] for row in classes.to_rows()} == dict(sums)
    brief = [piece for piece in kernels if piece.dur < 10_000]
    assert sum(row["count"] for row in short.to_rows()) == len(brief) or short.left_out
    assert sum(row["call_ns"] for row in short.to_rows()) == sum(p.call.end - p.call.start for p in brief if p.call)
    assert sum(row["shorter_than_call"] for row in short.to_rows()) == sum(
        piece.dur < piece.call.end - piece.call.start for piece in brief if piece.call
    )


def first_work(plain: Plain) -> dict[Call, Piece]:
    launched: dict[Call, Piece] = {}
    for piece in plain.work:
        if piece.call:
            launched.setdefault(piece.call, piece)
    return launched


def check_launches(plain: Plain, table: Table, queue: Table, curve: Table) -> None:
    launched = first_work(plain)
    delays = defaultdict(list)
    for call, piece in launched.items():
        delays[call.name].append(max(piece.start - call.start, 0))
    rows = {row["call"]: row for row in table.to_rows()}
    assert set(rows) == set(delays)
    for name, own in delays.items():
        calls = [call.end - call.start for call in launched if call.name == name]
        row = rows[name]
        assert (row["count"], row["call_ns"], row["call_max_ns"]) == (len(own), sum(calls), max(calls))
        assert (row["delay_max_ns"], row["long_delays"]) == (max(own), sum(delay > 100_000 for delay in own))
        assert row["delay_median_ns"] == (sorted(own)[(len(own) - 1) // 2] + sorted(own)[len(own) // 2]) // 2
        assert row["slow_calls"] == sum(call > 50_000 for call in calls)
        assert row["work"] == sum(piece.call is not None and piece.call.name == name for piece in plain.work)
    assert len(curve.rows) <= 500
    for row in queue.to_rows():
        own = [(c.start, max(p.start, c.start)) for c, p in launched.items() if p.stream == row["stream"]]
        changes: Counter[int] = Counter()
        for start, end in own:
            changes[start] += 1
            changes[end] -= 1
        length, most, full, steps = 0, 0, 0, []
        for time, following in zip(sorted(changes), [*sorted(changes)[1:], None], strict=True):
            length += changes[time]
            most = max(most, length)
            full += (following - time) * (length >= 1000) if following else 0
            steps.append((time - plain.origin, length))
        assert (row["launches"], row["max_length"], row["full_ns"]) == (len(own), most, full)
        queued = sum(end - start for start, end in own)
        assert row["mean_length"] == (queued / row["span_ns"] if row["span_ns"] else None)
        points = [(start, most) for stream, start, most in curve.rows if stream == row["stream"]]
        if points:
            assert max(most for _, most in points) == row["max_length"]
        times = [time for time, _ in steps]
        for (start, greatest), (end, _) in itertools.pairwise(points):
            lengths = [length for _, length in steps[bisect_right(times, start) - 1 : bisect_left(times, end)]]
            assert greatest == max(lengths)


def check_copies(plain: Plain, table: Table, curve: Table) -> None:
    copies = [piece for piece in plain.work if piece.kind == "copy"]
    expected = defaultdict(list)
    for piece in copies:
        expected[piece.name].append((piece.dur, piece.args.get("bytes", -1)))
    found = Counter()
    for name, own in expected.items():
        sized = [size for _, size in own if size >= 0]
        timed = [(dur, size) for dur, size in own if dur and size >= 0]
        rate = sum(size for _, size in timed) / sum(dur for dur, _ in timed) if timed else None
        found[name.rpartition("(")[2].rstrip(")"), len(own), sum(sized), sum(dur for dur, _ in own), rate] += 1
    columns = ("memory", "count", "moved_bytes", "total_ns", "bandwidth_gbps")
    assert Counter(tuple(row[column] for column in columns) for row in table.to_rows()) == found
    assert len(curve.rows) <= 500
    assert sum(row["moved_bytes"] for row in curve.to_rows()) == sum(max(p.args.get("bytes", -1), 0) for p in copies)


def check_figures(plain: Plain, figures: Any) -> None:
    kernels = [piece for piece in plain.work if piece.kind != "copy"]
    brief = [piece.dur for piece in kernels if piece.dur < 10_000]
    assert (figures.kernel_count, figures.short_kernel_count, figures.short_kernel_ns) == (
        len(kernels), len(brief), sum(brief),
    )  # fmt: skip
    pageable = [piece for piece in plain.work if "Pageable" in piece.name]
    assert figures.pageable_copy_count == len(pageable)
    assert figures.pageable_copy_ns == sum(piece.dur for piece in pageable)
    assert figures.pageable_copy_bytes == sum(max(piece.args.get("bytes", 0), 0) for piece in pageable)
    assert figures.launch_count == len(first_work(plain))
    weighed = [(p.dur, p.args["est. achieved occupancy %"]) for p in kernels if "est. achieved occupancy %" in p.args]
    weight = sum(dur for dur, _ in weighed)
    expected = sum(dur * float(occupancy) for dur, occupancy in weighed) / weight / 100 if weight else None
    assert figures.occupancy == (pytest.approx(expected) if expected is not None else None)
    stepped = [piece.end for piece in plain.work if plain.step_of(piece) is not None]
    start, end = (plain.steps[0][0], max([*stepped, *(step[1] for step in plain.steps)])) if plain.steps else (0, 0)
    if end > start and plain.work:
        assert figures.utilization == sum(together(plain.work, start, end).values()) / (end - start)
        assert figures.sm_efficiency == pytest.approx(sm_efficiency(kernels, start, end))
    else:
        assert (figures.utilization, figures.sm_efficiency) == (None, None)


def sm_efficiency(kernels: list[Piece], start: int, end: int) -> float | None:
    changes: Counter[int] = Counter()
    known = [piece for piece in kernels if "blocks per SM" in piece.args]
    for piece in known:
        changes[min(max(piece.start, start), end)] += Decimal(piece.args["blocks per SM"])
        changes[min(max(piece.end, start), end)] -= Decimal(piece.args["blocks per SM"])
    times = sorted(changes)
    level, total = Decimal(0), Decimal(0)
    for time, following in itertools.pairwise(times):
        level += changes[time]
        total += min(level, Decimal(1)) * (following - time)
    return float(total / (end - start)) if known else None


FILES = (
    "hta_cp_alexnet", "hta_cp_event_sync", "hta_cp_event_sync_multi", "hta_cp_simple_add", "hta_nccl_data_1of2",
    "param_dlrm_8rank",
)  # fmt: skip
LARGE = ("kineto_resnet50_w0", "hta_df_index_resolver_1of2", "hta_trace_diff")


@pytest.mark.few(3)
@pytest.mark.parametrize("folder", [*FILES, *(pytest.param(folder, marks=pytest.mark.soak) for folder in LARGE)])
def test_real_files(shared_data: Path, folder: str) -> None:
    paths = sorted((shared_data / "traces" / folder).rglob("*.json.gz"))
    if not paths:
        pytest.skip(f"shared/data/traces/{folder} is not here")
    for path in paths:
        text = gzip.decompress(path.read_bytes())
        check(json.loads(text, parse_float=Decimal), text)


TIMES = st.integers(0, 800).map(lambda eighth: eighth / 8)
WORK = st.tuples(
    st.sampled_from(["gemm", "elementwise", "ncclDevKernel_AllReduce", "Memcpy HtoD (Pageable -> Device)",
            "Memcpy DtoH (Device -> Pageable)",
                     "Memcpy DtoD (Device -> Device)", "Memset (Device)"]),
    st.sampled_from([(0, 7), (0, 7), (0, 20), (1, 7)]),
    TIMES, TIMES, st.integers(0, 400).map(lambda eighth: eighth / 8), TIMES, st.integers(0, 2), st.booleans(),
)  # fmt: skip
WAIT = st.tuples(st.sampled_from([*WAITS, "cudaEventQuery"]), TIMES, TIMES, st.integers(0, 1))


@settings(max_examples=examples(60))
@given(st.lists(WORK, max_size=25), st.lists(WAIT, max_size=6), st.integers(0, 4), st.booleans())
def test_random_traces(work: list[Any], waits: list[Any], steps: int, said: bool) -> None:
    made = MadeTrace()
    for number in range(steps):
        made.step(number, number * 25, 20 + number)
    for number, (name, (device, stream), at, start, dur, call, linked, sized) in enumerate(work):
        category = (
            "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
        )
        args: dict[str, Any] = {"bytes": number * 1000} if sized and category != "kernel" else {}
        if said and category == "kernel":
            args |= {"est. achieved occupancy %": number % 100, "blocks per SM": 0.125 * (number % 12)}
        if linked:
            # Several pieces of work may share a call, as those of a graph do.
            correlation = number + 1 if linked == 1 else 1000 + number % 3
            made.runtime("cudaLaunchKernel", at, call, tid=4000 + number % 2, correlation=correlation)
            args["correlation"] = correlation
        made.kernel(name, start, dur, stream=stream, device=device, category=category, **args)
    for name, start, dur, thread in waits:
        made.runtime(name, start, dur, tid=4000 + thread)
        made.kernel("Stream Sync", start, dur, category="cuda_sync")
        made.kernel("ProfilerStep#1", start, dur, category="gpu_user_annotation")
    check(json.loads(made.text(), parse_float=Decimal), made.text())
