"""Files that are no traces, or are broken: one clear line, or everything that can be used; never anything else."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from example_counts import ALL, examples
from fakes.traces import MadeTrace
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepscope.errors import TraceError
from stepscope.traces.model.columns import Trace
from stepscope.traces.reading import kineto_events as text_module
from stepscope.traces.reading.files import blocks_of, read_trace
from stepscope.traces.reading.kineto import read_kineto

MIB = 1 << 20


def made(operators: int = 20) -> MadeTrace:
    trace = MadeTrace(rank=3, world_size=4, header={"deviceProperties": [{"id": 0, "name": "GPU"}]})
    for at in range(operators):
        trace.op("aten::mm", 100 * at, 50.125, **{"Input Dims": [[2, 3], [3, 4]], "Sequence number": at})
        trace.launched("gemm {a}, {b}", at=100 * at + 1, start=100 * at + 20, dur=30)
    return trace


def read_all(text: bytes, size: int = 256) -> Trace:
    return read_kineto([text[at : at + size] for at in range(0, len(text), size)], "made")


def refused(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t ", "contains only whitespace"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "is HTML, not a trace"),
        (b"hello", "is not JSON"),
        (b"\x00\x01\x02\xff" * 100, "is not JSON"),
        (b"[1, 2, 3]", "is a JSON list, but not of events"),
        (b"{}", "is not a trace: there is no list of traceEvents in it"),
        (b'{"a": [1, 2], "b": "traceEvents"}', "is not a trace: there is no list of traceEvents in it"),
        (b'{"traceEvents": 5}', "is not a trace: there is no list of traceEvents in it"),
        (b'{"traceEvents": [', "has no readable event: its event list is not closed"),
        (b'{"traceEvents": [{"ph": "X", "na', "has no readable event: it ends in the middle of an event"),
        (b"[", "is cut off before its first event"),
        (b"PK\x03\x04" + b"x" * 100, "is a zip archive: unpack it first"),
        (b"SQLite format 3\x00" + b"x" * 100, "is an SQLite database"),
        (b"BZh91AY", "is compressed with bzip2: decompress it first (bunzip2)"),
        (gzip.compress(b"hello", mtime=0), "is not JSON"),
        (gzip.compress(b'{"traceEvents": [{}', mtime=0)[:-12], None),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, message: str | None) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    error = refused(path)
    assert message is None or error == message


def test_what_is_no_file(tmp_path: Path) -> None:
    assert refused(tmp_path) == "a folder, not a regular file"
    assert refused(tmp_path / "none.json") == "No such file or directory"
    os.mkfifo(tmp_path / "pipe.json")
    assert refused(tmp_path / "pipe.json") == "a pipe or device, not a regular file"
    assert "nsys export" in refused(tmp_path / "a.nsys-rep")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_must_not_be_read(tmp_path: Path) -> None:
    path = made().write(tmp_path / "a.json")
    path.chmod(0)
    assert refused(path) == "Permission denied"


def test_an_empty_list_is_a_trace() -> None:
    for text in (b'{"traceEvents": []}', b'{"a": 1, "traceEvents":\n[\n]\n, "b": 2}', b"[]", b" [ ] "):
        for size in (1, 2, 7, 100):
            trace = read_all(text, size)
            assert (len(trace), trace.meta.truncated, trace.meta.problems) == (0, None, ())


def test_a_header_after_the_events() -> None:
    document = {"traceEvents": made().events, "x": [{"a": [{}]}, {"b": 1}], "distributedInfo": {"rank": 2}}
    for size in (50, 1000, 10**6):
        trace = read_all(json.dumps(document).encode(), size)
        assert (trace.meta.rank, len(trace), trace.meta.problems) == (2, 60, ())


def test_the_word_in_other_places() -> None:
    events = json.dumps(made().events)
    header = '"note": "\\"traceEvents\\": [", "inner": {"traceEvents": [{"ph": "X"}]}, "distributedInfo": {"rank": 1}'
    trace = read_all(f'{{{header}, "traceEvents": {events}}}'.encode())
    assert (trace.meta.rank, len(trace), trace.meta.problems) == (1, 60, ())


def test_a_mark_of_byte_order_and_blanks() -> None:
    assert len(read_all(b"\xef\xbb\xbf  \n" + made().text(), 1)) == 60


def test_concatenated_members_are_one_file(tmp_path: Path) -> None:
    text = made().text()
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(text[:500]) + b"\0" * 30 + gzip.compress(text[500:]))
    trace = read_trace(path)
    assert (len(trace), trace.meta.problems) == (60, ())
    path.write_bytes(zstandard.compress(text[:500]) + zstandard.compress(text[500:]))
    assert len(read_trace(path)) == 60


def test_something_follows_the_packed_data(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(made().text()) + b"garbage")
    trace = read_trace(path)
    assert (len(trace), trace.meta.truncated) == (60, None)
    assert trace.meta.problems == ("other data follows the compressed data; everything before is used",)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_packed_data_cut_at_every_byte(tmp_path: Path, pack: Any) -> None:
    packed = pack(made(8).text())
    path = tmp_path / "a.json.gz"
    most = 0
    for end in range(0, len(packed), 3):
        path.write_bytes(packed[:end])
        try:
            trace = read_trace(path)
        except TraceError as error:
            assert str(error).startswith(str(path))
            continue
        assert trace.meta.problems
        assert len(trace) >= most
        most = len(trace)
    assert most > 0 or pack is zstandard.compress  # one block of it, which is all or nothing


@pytest.mark.seeds  # every seventh byte in `make test`
def test_text_cut_at_every_byte() -> None:
    text = made(3).text()
    whole = read_all(text)
    read = 0
    for end in range(0, len(text), 1 if ALL else 7):
        try:
            trace = read_all(text[:end], 700)
        except TraceError:
            assert read == 0
            continue
        assert trace.meta.truncated
        assert trace.meta.rank == 3
        assert len(trace) >= read
        assert [trace.name(row) for row in range(len(trace))] == [whole.name(row) for row in range(len(trace))]
        read = len(trace)
    assert read == 9


def test_a_bare_list_needs_no_end() -> None:
    text = json.dumps(made().events).encode()[:-1]
    assert read_all(text).meta.truncated is None
    assert read_all(text + b",").meta.truncated is None
    assert read_all(text[:-1]).meta.truncated == "it ends in the middle of an event"


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4), st.integers(1, 3000), st.booleans())
def test_bytes_replaced_by_others(at: int, by: bytes, size: int, insert: bool) -> None:
    text = made().text()
    at %= len(text)
    try:
        trace = read_all(text[:at] + by + text[at + (0 if insert else len(by)) :], size)
    except TraceError:
        return
    assert len(trace) <= 61


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_bytes_of_packed_data_replaced_by_others(tmp_path_factory: Any, at: int, by: int) -> None:
    packed = bytearray(gzip.compress(made().text(), mtime=0))
    packed[at % len(packed)] = by
    path = tmp_path_factory.mktemp("a") / "a.json.gz"
    path.write_bytes(packed)
    try:
        read_trace(path)
    except TraceError:
        pass


json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = ["ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "args"]
arg_names = ["External id", "correlation", "stream", "device", "bytes", "Input Dims", "Call stack", "Sequence number"]
arg_names += ["Collective name", "graph id", "Bytes", "Addr", "blocks per SM", "name", "Python parent id", "Seq"]
likely = st.sampled_from(["X", "B", "E", "i", "M", "s", "f", "[memory]", "thread_name", "fwdbwd", "kernel", "cpu_op"])
wild_args = st.dictionaries(st.sampled_from(arg_names), json_values | st.integers(-(2**70), 2**70), max_size=6)
wild = st.dictionaries(st.sampled_from(fields), likely | json_values | wild_args | st.floats(0, 1e6), max_size=9)


@settings(max_examples=examples(150), deadline=None)
@example(events=[{"ph": {"External id": float("inf")}}, None], header=None, size=5)
@example(events=[{"ph": {"a": {}, "b": float("inf")}}, 'a: "b"', 5], header=None, size=500)
@given(st.lists(wild | st.none() | st.integers() | st.text(max_size=5), max_size=8), json_values, st.integers(5, 500))
def test_events_with_any_fields(events: list[Any], header: Any, size: int) -> None:
    document = {"distributedInfo": header, "deviceProperties": header, "traceEvents": [{}, *events], "hostname": header}
    trace = read_all(json.dumps(document).encode(), size)  # NaN and Infinity are written as such
    assert trace.meta.truncated is None
    assert (trace.slices.dur_ns >= 0).all()
    assert (trace.slices.start_ns >= 0).all()


@settings(max_examples=examples(100), deadline=None)
@given(json_values, st.integers(1, 100))
def test_any_json(document: Any, size: int) -> None:
    try:
        read_all(json.dumps(document).encode(), size)
    except TraceError:
        pass


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=300), st.sampled_from([b"", b"{", b"[{", b'{"traceEvents": [', b'{"traceEvents": [{']))
def test_any_bytes(noise: bytes, start: bytes) -> None:
    try:
        read_all(start + noise, 64)
    except TraceError:
        pass


def test_one_broken_event_costs_only_itself() -> None:
    parts = [json.dumps(event) for event in made().events]
    for broken in (
        '{"ph": "X", "name": "a" "b"}',
        '{"ph": }',
        '{"ph": "X", "ts": 1, "args": {"a": [{]}}',
        "5",
        '"}, {"',
    ):
        text = ('{"traceEvents": [' + ",\n".join([*parts[:30], broken, *parts[30:]]) + "]}").encode()
        trace = read_all(text)
        assert len(trace) == 60
        assert trace.meta.truncated is None
        (problem,) = trace.meta.problems
        assert " 1 event" in problem


def test_nearly_valid_events_are_mended() -> None:
    parts = [json.dumps(event) for event in made().events]
    odd = [
        '{"ph": "X", "cat": "Memcpy", "name": "a", "ts": 5, "dur": 0, "args": {"bytes": 7, "memory bandwidth": inf}}',
        '{"ph": "X", "cat": "Memcpy", "name": "b", "ts": 6, "dur": 1, "args": {"x": N/A, "bytes": 8, "y": [-nan]}}',
        '{"ph": "X", "cat": "cpu_op", "name": "C:\\Users\\q", "ts": 7, "dur": 1}',
        '{"ph": "X", "cat": "cpu_op", "name": "raw\ttab", "ts": 8, "dur": 1}',
        '{"ph": "X", "cat": "cpu_op", "name": "half \\ud83d pair \\ud83d\\ude00", "ts": 9, "dur": 1}',
    ]
    text = ('{"traceEvents": [' + ",\n".join([*parts[:30], *odd, *parts[30:]]) + "]}").encode()
    for size in (100, 1000, 10**6):
        trace = read_all(text, size)
        names = {trace.name(row) for row in range(len(trace))}
        assert names >= {"a", "b", "C:\\Users\\q", "raw\ttab", "half � pair 😀"}
        assert sorted(trace.copies.bytes.tolist()) == [7, 8]
        assert len(trace) == 65


def test_names_that_are_no_text() -> None:
    text = made().text().replace(b"aten::mm", b"aten::\xff\xfe")
    trace = read_all(text, 10**6)
    assert len(trace) == 60
    assert {trace.name(row) for row in range(60)} == {"aten::��", "cudaLaunchKernel", "gemm {a}, {b}"}


def test_a_nesting_without_end() -> None:
    deep = b"[" * 100_000
    trace = read_all(made().text()[:-2].rsplit(b"]", 1)[0] + b',{"ph": "X", "args": {"a": ' + deep, 10**6)
    assert len(trace) == 60
    with pytest.raises(TraceError):
        read_all(b'{"a": ' + deep, 10**6)


def bomb(filling: bytes, size: int, before: bytes = b"") -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    packed = [packer.compress(before), *(packer.compress(filling) for _ in range(size // len(filling)))]
    return b"".join(packed) + packer.flush()


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("filling", "before"),
    [
        (b"\0" * MIB, b""),
        (b" " * MIB, b""),
        (b" " * MIB, b'{"traceEvents": ['),
        (b"x" * MIB, b'{"a": "'),
        (b"x" * MIB, b'{"traceEvents": [{"name": "'),
        (b"[" * MIB, b""),
        (b'{"a": ' * (MIB // 6), b""),
        (b'{"a": ' * (MIB // 6), b'{"traceEvents": ['),
        (b"}, {" * (MIB // 4), b'{"traceEvents": [{'),
        (b"{}, " * (MIB // 4), b'{"traceEvents": ['),
        (b"1, " * (MIB // 3), b'{"traceEvents": ['),
        (b'"traceEvents": [' * (MIB // 16), b'{"a": "'),
        (b'{"a": 1}, ' * (MIB // 10), b'{"traceEvents": [{"args": ['),
    ],
)
def test_a_bomb_is_left_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filling: bytes, before: bytes) -> None:
    """Limits are made small, so that it shows in little time that they are kept."""
    monkeypatch.setattr(text_module, "LONGEST_HEAD", 2 * MIB)
    monkeypatch.setattr(text_module, "LONGEST_EVENT", MIB)
    monkeypatch.setattr("stepscope.traces.reading.kineto.LONGEST_NOTHING", MIB)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(bomb(filling, 16 * MIB, before))
    requested = 0

    def counted(*args: Any) -> Iterator[bytes]:
        nonlocal requested
        for block in blocks_of(*args):
            requested += len(block)
            yield block

    monkeypatch.setattr("stepscope.traces.reading.files.blocks_of", counted)
    refused(path)
    assert requested <= 8 * MIB


def test_packed_well_is_no_bomb(tmp_path: Path) -> None:
    """The same event over and over packs 200 to 1 and better."""
    event = json.dumps({"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 2}).encode()
    path = tmp_path / "a.json.gz"
    packed = bomb((event + b",\n") * 1000, 8 * MIB, b'{"traceEvents": [')
    assert 150 * len(packed) < 8 * MIB
    path.write_bytes(packed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = read_trace(path)
    assert len(trace) > 80_000
    assert trace.meta.truncated == "its event list is not closed"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_noise_of_any_size() -> None:
    noise = random.Random(5)
    for size in (1, 10, 1000, 100_000):
        with pytest.raises(TraceError):
            read_all(noise.randbytes(size).replace(b"{", b"").replace(b"[", b"").strip() or b"x", 4096)
