"""Stretches in which the main thread runs Python, or sleeps."""

from __future__ import annotations

import numpy as np
from fakes.traces import MadeTrace
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.findings import analyze_job
from stepscope.traces.host.stalls import PythonStop
from stepscope.traces.model.window import window_of
from stepscope.traces.rank_analysis import analyze_rank, host_figures

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
