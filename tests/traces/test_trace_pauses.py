"""Garbage collections and holes of the main thread."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.traces import MadeTrace
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.findings import analyze_job
from stepscope.traces.host.stalls import Pause, PythonStop, holes_table, pauses_of
from stepscope.traces.model.window import Window, window_of
from stepscope.traces.rank_analysis import analyze_rank, host_figures


def test_collections_that_were_asked_for_or_not() -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 5)
    made.python("<built-in function collect>", 10, 50)
    made.python("Python GC", 11, 48)
    made.python("Python GC", 100, 20)
    made.op("gc (dynamo_timed)", 200, 20)
    assert pauses_of(window_of(made.trace())) == (
        Pause(kind="gc", start_ns=10_000, dur_ns=50_000),
        Pause(kind="gc", start_ns=100_000, dur_ns=20_000),
    )
    assert pauses_of(window_of(MadeTrace().trace())) == ()


def found_in(window: Window) -> list[tuple[object, ...]]:
    table = holes_table(window)
    return [] if table is None else list(table.rows)


def test_holes_with_what_is_around_them() -> None:
    made = MadeTrace()
    made.step(1, 0, 40_000)
    made.python("train.py(31): augment", 1_500, 9_000)
    made.op("aten::add", 0, 1_000)
    made.op("aten::mul", 11_000, 1_000)
    made.runtime("cudaLaunchKernel", 16_000, 1_000)
    made.annotation("evaluate", 17_000, 22_000)
    made.op("aten::sum", 30_000, 9_000)
    assert found_in(window_of(made.trace())) == [
        (1, 17_000_000, 13_000_000, "evaluate", None, "cudaLaunchKernel", "aten::sum"),
        (1, 1_000_000, 10_000_000, "train.py(31): augment", "train.py(31): augment", "aten::add", "aten::mul"),
    ]


def test_waiting_for_backward_is_no_hole() -> None:
    made = MadeTrace()
    made.step(1, 0, 40_000)
    made.op("aten::mm", 0, 1_000, **{"Sequence number": 3})
    made.op("MmBackward0", 1_000, 38_000, tid=9, **{"Sequence number": 3, "Fwd thread id": 1})
    assert found_in(window_of(made.trace())) == []


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 20)), max_size=8))
def test_random_holes(pieces: list[tuple[int, int]]) -> None:
    """In milliseconds; two steps that touch, a third that is left out."""
    made = MadeTrace()
    for number in range(3):
        made.step(number, number * 40_000, 40_000)
    for start, length in pieces:
        made.op("aten::mm", start * 1000, length * 1000)
    window = window_of(made.trace())
    ran = [(start, start + length) for start, length in pieces if start < 80]
    expected = []
    for number in range(2) if ran else ():
        free = [all(not start <= at < end for start, end in ran) for at in range(number * 40, number * 40 + 40)]
        length = 0
        for at, is_free in enumerate([*free, False]):
            if is_free:
                length += 1
            elif length:
                expected.append((number, (number * 40 + at - length) * 1_000_000, length * 1_000_000))
                length = 0
    found = sorted(row[:3] for row in found_in(window))  # type: ignore[type-var]
    assert found == [each for each in expected if each[2] > 5_000_000]


# -- Stretches in which the main thread runs Python, or sleeps --------------------------------------------------------


LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def with_a_loop() -> MadeTrace:
    made = MadeTrace()
    for step in range(5):
        at = step * 100_000
        made.step(step, at, 100_000)
        made.annotation(LOADER, at, 3_000)
        made.python("train.py(31): step", at + 3_000, 97_000)
        made.op("aten::mm", at + 3_000, 50_000)
        made.python("train.py(9): tidy", at + 53_000, 40_000)
        made.python("<built-in function sleep>", at + 94_000, 5_000)
        made.op("aten::add", at + 93_000, 1_000)
        made.op("aten::add", at + 99_000, 1_000)
    return made


def test_stops_by_place() -> None:
    assert host_figures(window_of(with_a_loop().trace())).stops == (
        PythonStop(place="train.py(9): tidy", call=None, count=4, total_ns=160_000_000),
        PythonStop(place="train.py(31): step", call="sleep", count=4, total_ns=20_000_000),
    )


def test_what_stepscope_does_is_not_the_users_python() -> None:
    """Its functions are on the stack above the user's; a label that it opened is not a place, either."""
    made = MadeTrace()
    for step in range(5):
        at = step * 100_000
        made.annotation(f"stepscope.step {step}", at, 100_000)
        made.op("aten::mm", at, 50_000)
        made.python("ck.py(7): step", at + 50_000, 40_000)
        made.python("/venv/lib/python3.11/site-packages/stepscope/recorder/model.py(407): names", at + 51_000, 13_000)
        made.python("stepscope/recorder/hooks/forward.py(30): timed", at + 65_000, 24_000)
        made.python("stepscope/recorder/stacks.py(80): read", at + 65_000, 2_000)
        made.python("<built-in method sleep of module>", at + 65_000, 2_000)
        made.op("aten::add", at + 64_000, 1_000)
        made.op("aten::add", at + 67_000, 1_000)
        made.python("ck.py(9): tidy", at + 68_000, 20_000)
        made.op("aten::add", at + 88_000, 4_000)
    figures = host_figures(window_of(made.trace()))
    assert [(stop.place, stop.call, stop.total_ns) for stop in figures.stops] == [
        ("ck.py(9): tidy", None, 80_000_000),
        (None, None, 32_000_000),
    ]


@pytest.mark.parametrize("wrapper", ["hooks/collectives.py(400): wait", "ledger.py(169): timed"])
def test_what_the_users_code_calls_through_a_wrapper_is_its_own(wrapper: str) -> None:
    """The wrapper's own Python is not; a module that it calls is."""
    made = MadeTrace()
    for step in range(5):
        at = step * 100_000
        made.step(step, at, 100_000)
        made.op("aten::mm", at, 20_000)
        made.python("train.py(31): receive", at + 20_000, 79_000)
        made.python(f"stepscope/recorder/{wrapper}", at + 21_000, 78_000)
        made.python("<built-in method wait of PyCapsule object at 0x7f>", at + 21_000, 58_000)
        made.op("aten::add", at + 20_000, 1_000)
        made.op("aten::add", at + 79_000, 1_000)
        made.op("aten::add", at + 83_000, 1_000)
        made.python("nn.Module: Net_0", at + 84_000, 4_000)
        made.op("aten::add", at + 88_000, 12_000)
    trace = made.trace()
    assert [(stop.place, stop.call, stop.total_ns) for stop in host_figures(window_of(trace)).stops] == [
        ("train.py(31): receive", "wait", 232_000_000),
        ("train.py(31): receive", None, 16_000_000),
    ]
    (finding, *_) = analyze_job([analyze_rank(trace, 0)]).findings
    assert finding.kind == "host_python"
    assert "mostly in wait at train.py(31): receive" in finding.title


def test_collectives_are_no_stop() -> None:
    trace = with_a_loop().trace()
    rows = np.flatnonzero([name.endswith("tidy") for name in map(trace.name, range(len(trace)))]).astype(np.int32)
    (left,) = host_figures(window_of(trace), exchanged=rows).stops
    assert left.call == "sleep"


def test_the_rule() -> None:
    job = analyze_job([analyze_rank(with_a_loop().trace(), 0)])
    (finding,) = job.findings
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("host_python", "critical", 0.45)
    assert finding.title == (
        "The main thread runs no operator for 45.0 ms of each 100 ms step (45%), mostly in train.py(9): tidy: "
        "Python code, or a wait."
    )
    assert job.verdict == finding.title


def test_labels_of_the_recorder_are_no_places() -> None:
    """Without stacks, all that is known of a sleep is which step and phase it was in."""
    made = MadeTrace()
    for step in range(5):
        at = step * 100_000
        made.step(step, at, 100_000)
        made.annotation(f"stepscope.step {step}", at, 100_000)
        made.op("aten::mm", at, 20_000)
        made.annotation("stepscope.forward", at + 20_000, 70_000)
        made.op("aten::add", at + 99_000, 1_000)
    (finding,) = analyze_job([analyze_rank(made.trace(), 0)]).findings
    assert finding.kind == "host_python"
    assert "stepscope" not in finding.title + " ".join(finding.advice)
    assert finding.advice[0] == "Record the trace with with_stack=True to see the lines."
    assert {row[3] for row in found_in(window_of(made.trace()))} == {None}


def test_a_sleep_in_a_layer_is_named_by_the_layer() -> None:
    made = MadeTrace()
    for step in range(5):
        at = step * 100_000
        made.step(step, at, 100_000)
        made.op("aten::mm", at, 20_000)
        made.annotation("stepscope.layer decoder.0", at + 20_000, 79_000)
        made.annotation("stepscope.forward", at + 21_000, 77_000)
        made.op("aten::add", at + 99_000, 1_000)
    (stop,) = host_figures(window_of(made.trace())).stops
    assert stop.place == "decoder.0"


def test_built_in_methods_are_named_without_the_address_of_their_object() -> None:
    made = MadeTrace()
    for step in range(5):
        at = step * 100_000
        made.step(step, at, 100_000)
        made.op("aten::mm", at, 20_000)
        made.python("ck.py(7): <module>", at + 20_000, 79_000)
        made.python(
            "<built-in method run_backward of torch._C._EngineBase object at 0x7feef126fbf0>", at + 21_000, 77_000
        )
        made.op("aten::add", at + 99_000, 1_000)
    (finding,) = analyze_job([analyze_rank(made.trace(), 0)]).findings
    assert finding.evidence["stops"][0]["place"] == "run_backward at ck.py(7): <module>"


@given(st.lists(st.tuples(st.integers(0, 119), st.integers(0, 30), st.booleans()), max_size=10))
def test_random_stops(pieces: list[tuple[int, int, bool]]) -> None:
    """In units of half a millisecond; two steps that touch, a third that is left out."""
    made = MadeTrace()
    busy = set()
    for number in range(3):
        made.step(number, number * 20_000, 20_000)
    made.op("aten::mm", 0, 500)
    busy.add(0)
    for start, length, loads in pieces:
        (made.annotation if loads else made.op)(LOADER if loads else "aten::mm", start * 500, length * 500)
        # What begins in the step that is left out does not count.
        busy |= set(range(start, start + length)) if start < 80 else set()
    expected = run = 0
    for at in range(81):
        if at in (40, 80) or at in busy:
            expected += run if run > 2 else 0
            run = 0
        if at not in busy:
            run += 1
    assert sum(stop.total_ns for stop in host_figures(window_of(made.trace())).stops) == expected * 500_000
