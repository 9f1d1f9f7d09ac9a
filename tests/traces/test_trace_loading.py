"""Waiting for data."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.traces import MadeTrace

from stepscope.traces.host.stalls import LOADER, loading_of, loading_table
from stepscope.traces.model.window import Window, window_of

NEXT = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def test_by_step_on_the_main_thread_only() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.step(2, 100, 100)
    made.step(3, 200, 100)
    made.annotation(NEXT, 10, 30)
    made.annotation(NEXT, 90, 30)
    made.annotation(NEXT, 50, 20, tid=99)
    window = window_of(made.trace())
    found = loading_of(window)
    assert found.by_step == (40_000, 20_000)
    assert found.total_ns == 60_000
    table = loading_table(window, found)
    assert table is not None
    assert table.rows == ((1, 40_000, 100_000, 0.4), (2, 20_000, 100_000, 0.2))


def test_nested_ones_count_once() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.annotation("[pl][profile][_TrainingEpochLoop].train_dataloader_next", 5, 40)
    made.annotation(NEXT, 10, 30)
    assert loading_of(window_of(made.trace())).total_ns == 40_000


def test_python_functions_tell_it_where_nothing_else_does() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.python("torch/utils/data/dataloader.py(720): __next__", 10, 30)
    assert loading_of(window_of(made.trace())).total_ns == 30_000


def test_nothing_is_loaded() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    window = window_of(made.trace())
    assert loading_table(window, loading_of(window)) is None
    assert loading_of(window_of(MadeTrace().trace())).by_step == ()


@pytest.mark.parametrize("name", ["enumerate(DataPipe)#Mapper", "enumerate(StatefulDataLoader)#X.__next__", NEXT])
def test_names_of_loaders(name: str) -> None:
    assert LOADER.search(name)


def test_a_real_trace(shared_data: Path, real_window: Callable[[Path], Window]) -> None:
    path = next((shared_data / "traces" / "kineto_resnet50_w0").glob("*.gz"))
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("ProfilerStep"))[:-1]
    loads = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("enumerate(DataLoader)")]
    expected = [sum(max(min(end, last) - max(start, first), 0) for start, end in loads) * 1000 for first, last in steps]
    assert list(loading_of(real_window(path)).by_step) == expected
