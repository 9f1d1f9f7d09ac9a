"""The tree of modules."""

from __future__ import annotations

from fakes.traces import MadeTrace

from stepscope.traces.host.operators import LIMIT, modules_of, modules_table, operator_times
from stepscope.traces.model.tables import Table
from stepscope.traces.model.window import window_of


def table_of(made: MadeTrace) -> Table | None:
    window = window_of(made.trace())
    times = operator_times(window)
    tree = modules_of(window, times)
    return None if tree is None else modules_table(window, times, tree)


def test_calls_device_work_and_backward() -> None:
    made = MadeTrace()
    for at in (0, 1000):
        made.python("nn.Module: Net_0", at, 100)
        made.python("net.py(3): forward", at + 1, 98)
        made.python("nn.Module: Linear_0", at + 2, 30)
        made.op("aten::addmm", at + 5, 20, **{"Sequence number": at})
        made.launched("gemm", at=at + 6, start=at + 200, dur=40)
        made.python("nn.Module: Linear_1", at + 40, 30)
        made.op("aten::addmm", at + 45, 20, **{"Sequence number": at + 1})
        made.launched("gemm", at=at + 46, start=at + 240, dur=30)
        made.op("aten::sum", at + 80, 5)
        made.launched("sum", at=at + 81, start=at + 270, dur=3)
        for number, start in ((1, 300), (0, 330)):
            engine = {"Sequence number": at + number, "Fwd thread id": 1}
            made.op("AddmmBackward0", at + start, 20, tid=9, **engine)
            made.op("aten::mm", at + start + 1, 10, tid=9)
            made.launched("gemm_nt", at=at + start + 2, start=at + start + 50, dur=7 + number, tid=9)
    table = table_of(made)
    assert table is not None
    assert table.columns[4:] == ("host_ns", "backward_host_ns", "device_ns", "backward_device_ns")
    assert table.rows == (
        ("Net_0", "Net", 0, 2, 200_000, 80_000, 146_000, 30_000),
        ("Net_0/Linear_0", "Linear", 1, 2, 60_000, 40_000, 80_000, 14_000),
        ("Net_0/Linear_1", "Linear", 1, 2, 60_000, 40_000, 60_000, 16_000),
    )


def test_of_one_that_is_called_from_two_places() -> None:
    made = MadeTrace()
    made.python("nn.Module: Net_0", 0, 100)
    made.python("nn.Module: Head_0", 10, 20)
    made.python("nn.Module: Act_0", 12, 5)
    made.python("nn.Module: Act_0", 50, 7)
    table = table_of(made)
    assert table is not None
    assert [(row[0], row[3], row[4]) for row in table.rows] == [
        ("Net_0", 1, 100_000),
        ("Net_0/Head_0", 1, 20_000),
        ("Net_0/Head_0/Act_0", 1, 5_000),
        ("Net_0/Act_0", 1, 7_000),
    ]


def test_of_very_many_the_heaviest_are_kept_with_all_they_are_in() -> None:
    made = MadeTrace()
    made.python("nn.Module: Net_0", 0, 10_000_000)
    for number in range(LIMIT + 100):
        made.python(f"nn.Module: Block_{number}", 10 + number * 100, 50 + number % 7)
        made.python(f"nn.Module: Leaf_{number}", 11 + number * 100, 40 if number < 3 else 1)
    table = table_of(made)
    assert table is not None
    assert len(table.rows) == LIMIT
    assert table.left_out == 2 * (LIMIT + 100) + 1 - LIMIT
    paths = {row[0] for row in table.rows}
    assert all(path.rsplit("/", 1)[0] in paths for path in paths)


def test_hierarchies_of_torchscript() -> None:
    made = MadeTrace()
    inner = {"Module Hierarchy": "SELF(Net)::forward.fc1(Linear)::forward"}
    made.op("aten::linear", 0, 10, **inner)
    made.op("aten::addmm", 2, 6, **inner)
    made.launched("gemm", at=3, start=50, dur=9)
    made.op("aten::sum", 20, 4, **{"Module Hierarchy": "SELF(Net)::forward"})
    table = table_of(made)
    assert table is not None
    assert table.rows == (
        ("SELF", "Net", 0, 1, 14_000, 0, 9_000, 0),
        ("SELF/fc1", "Linear", 1, 1, 10_000, 0, 9_000, 0),
    )


def test_no_modules() -> None:
    made = MadeTrace()
    made.python("train.py(1): <module>", 0, 10)
    made.op("aten::mm", 1, 2)
    assert table_of(made) is None
    assert table_of(MadeTrace()) is None
