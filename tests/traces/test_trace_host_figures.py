"""All figures and tables of the host's side together: on real traces, on hardly anything, on nonsense."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path

from fakes.traces import MadeTrace

from stepscope.traces.model.window import Window, window_of
from stepscope.traces.rank_analysis import host_figures, host_tables


def check(window: Window) -> None:
    """What must hold of any trace."""
    figures = host_figures(window)
    steps_ns = sum(step.end_ns - step.start_ns for step in window.steps)
    assert len(figures.loading_by_step) == len(window.steps)
    assert sum(figures.loading_by_step) == figures.loading_ns
    assert all(place.count > 0 and place.wait_ns >= 0 for place in figures.syncs)
    assert all(pause.dur_ns >= 0 for pause in figures.pauses)
    assert 0 <= figures.loading_ns <= steps_ns
    tables = host_tables(window)
    assert len({table.name for table in tables}) == len(tables)
    for table in tables:
        assert table.rows
        for row in table.rows:
            assert len(row) == len(table.columns)
            assert all(value is None or type(value) in (int, float, str) for value in row), (table.name, row)
            for column, value in zip(table.columns, row, strict=True):
                if value is not None and column.endswith(("_ns", "_bytes", "_share", "calls", "count")):
                    assert value >= 0, (table.name, column)
    assert len(pickle.dumps((figures, tables))) < 2_000_000


def test_real_traces(shared_data: Path, real_window: Callable[[Path], Window]) -> None:
    for folder in sorted((shared_data / "traces").iterdir()):
        for path in sorted(folder.rglob("*.json.gz"))[:2]:
            check(real_window(path))


def test_nothing_at_all() -> None:
    window = window_of(MadeTrace().trace())
    check(window)
    assert host_tables(window) == []


def test_device_work_alone() -> None:
    made = MadeTrace()
    made.kernel("gemm", 10, 5)
    window = window_of(made.trace())
    check(window)
    assert host_tables(window) == []


def test_steps_alone() -> None:
    made = MadeTrace()
    made.step(1, 0, 10)
    made.step(2, 10, 0)
    window = window_of(made.trace(), keep_last=True)
    check(window)
    assert host_tables(window) == []


def test_nonsense_holds_together() -> None:
    names = [
        "aten::mm",
        "aten::item",
        "Torch-Compiled Region: 0/1",
        "x (dynamo_timed)",
        "ProfilerStep#3",
        "enumerate(DataLoader)#",
    ]
    names += [
        "nn.Module: A_0",
        "train.py(3): f",
        "Python GC",
        "cudaDeviceSynchronize",
        "cudaMemcpyAsync",
        "aten::linear",
    ]
    categories = ["cpu_op", "user_annotation", "python_function", "cuda_runtime", "gpu_memcpy", "kernel", "weird", None]
    for seed in range(150):
        chance = random.Random(seed)
        made = MadeTrace()
        for _ in range(chance.randrange(1, 120)):
            made.add(
                chance.choice(categories),
                chance.choice(names),
                chance.randrange(0, 20_000),
                chance.choice([0, 1, 5, 300, 9_000, -4]),
                tid=chance.choice([4000, 1, "7"]),
                args={
                    "correlation": chance.randrange(-1, 9),
                    "External id": chance.randrange(0, 9),
                    "Sequence number": chance.randrange(-1, 5),
                    "Fwd thread id": chance.randrange(0, 3),
                    "Input Dims": chance.choice([[], [[2, 3], [3, 4]], [[]], [["x"], 3]]),
                    "Call stack": chance.choice(["", "train.py(1): f;", ";;", "torch/x.py(1): f"]),
                },
            )
        for at in range(chance.randrange(0, 9)):
            made.memory(at * 999, chance.randrange(-9, 9), chance.randrange(0, 99), 100, address=chance.randrange(1, 4))
        check(window_of(made.trace()))


def test_memory_backend_and_data_parallel() -> None:
    made = MadeTrace(header={"deviceProperties": [{"id": 0, "name": "NVIDIA A100", "totalGlobalMem": 1 << 35}]})
    made.annotation("DistributedDataParallel.forward", 0, 10)
    made.memory(1, 10, 100, 400, address=1)
    made.memory(2, 10, 110, 300, address=2)
    figures = host_figures(window_of(made.trace()))
    assert (figures.peak_allocated_bytes, figures.reserved_at_peak_bytes, figures.peak_reserved_bytes) == (
        110,
        300,
        400,
    )
    assert figures.device_memory_bytes == 1 << 35
    assert figures.ddp_backend == "nccl"
    assert not figures.uses_data_parallel


def test_the_backend_shows_by_the_names_too() -> None:
    made = MadeTrace(rank=None)
    made.annotation("DistributedDataParallel.forward", 0, 10)
    made.annotation("gloo:all_reduce", 2, 3)
    assert host_figures(window_of(made.trace())).ddp_backend == "gloo"
    made = MadeTrace(rank=None)
    made.python("nn.Module: DataParallel_0", 0, 10)
    figures = host_figures(window_of(made.trace()))
    assert figures.uses_data_parallel
    assert figures.ddp_backend is None
