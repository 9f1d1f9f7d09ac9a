"""What torch.compile leaves in a trace: a real one of torch 2.13, made by hand ones."""

from __future__ import annotations

from pathlib import Path

from fakes.traces import MadeTrace

from stepscope.traces.host.stalls import compiling_of, compiling_table
from stepscope.traces.model.window import window_of
from stepscope.traces.reading.files import read_trace

REAL = Path(__file__).parent / "data" / "compiled_2_13.json.gz"
"""Five steps of which the first is not traced: a function with a graph break, and one that is called with tensors of a
new length from the fourth on, each of which is compiled."""


def test_a_real_trace() -> None:
    window = window_of(read_trace(REAL))
    found = compiling_of(window)
    assert [step.number for step in window.steps] == [1, 2, 3]
    assert found.graph_breaks == 1
    assert found.recompiles == 1
    assert [name for name, _ in found.compiled] == ["2/1"]
    assert found.compiled[0][1] == found.compile_ns == 51_441_780
    assert {name: (entered, inside) for name, entered, _, inside in found.regions} == {
        "Torch-Compiled Region: 0/0": (3, 0),
        "Torch-Compiled Region: 1/0": (3, 3),
        "Torch-Compiled Region: 2/0": (2, 0),
        "Torch-Compiled Region: 2/1": (1, 0),
    }
    everything = compiling_of(window_of(read_trace(REAL), keep_last=True))
    assert everything.recompiles == 2
    assert [name for name, _ in everything.compiled] == ["2/1", "2/2"]
    assert sum(spent_ns for _, spent_ns in everything.compiled) == everything.compile_ns
    assert compiling_table(found) is not None


def test_a_compilation_that_is_not_marked_shows_by_its_region() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    for at, number in ((10, "5/0"), (20, "5/1"), (30, "5/0"), (40, "6/0"), (50, "7/3")):
        made.op(f"Torch-Compiled Region: {number}", at, 5)
    found = compiling_of(window_of(made.trace()))
    assert found.recompiles == 1, "what 7/3 replaced was before the trace"
    assert found.graph_breaks == 0
    assert len(found.regions) == 4


def test_old_names_and_python_functions() -> None:
    made = MadeTrace()
    made.step(1, 0, 300)
    made.op("Torch-Compiled Region", 10, 50)
    made.op("Torch-Compiled Region", 20, 10)
    made.op("Torch-Compiled Region", 40, 10)
    made.python("torch/_dynamo/convert_frame.py(500): _compile", 100, 80)
    made.python("torch/_inductor/compile_fx.py(9): compile_fx", 120, 30)
    found = compiling_of(window_of(made.trace()))
    assert (found.compile_ns, found.graph_breaks, found.recompiles) == (80_000, 2, 0)


def test_breaks_are_of_the_step_with_the_most() -> None:
    made = MadeTrace()
    for number, count in ((1, 1), (2, 3), (3, 2), (4, 9)):
        made.step(number, number * 100, 90)
        made.op("Torch-Compiled Region: 0/0", number * 100 + 1, 80)
        for at in range(count):
            made.op(f"Torch-Compiled Region: {at + 1}/0", number * 100 + 2 + at * 5, 3)
    assert compiling_of(window_of(made.trace())).graph_breaks == 3


def test_nothing_compiled() -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 10)
    found = compiling_of(window_of(made.trace()))
    assert (found.compile_ns, found.graph_breaks, found.recompiles, found.regions) == (0, 0, 0, ())
    assert compiling_table(found) is None
    assert compiling_table(compiling_of(window_of(MadeTrace().trace()))) is None
