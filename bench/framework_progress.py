"""What the hooks on frameworks cost: µs per epoch and per evaluation; no step is hooked.

    .venv/bin/python bench/framework_progress.py

Stands in for the loop of a Trainer: the hooked methods do nothing, bare and hooked in turn.  Facts of the size of
a real run (450 bytes) are written along.  Medians of ``ROUNDS`` rounds, with the middle half of them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stepscope.recorder.frameworks.hugging_face import _epoch_begins
from stepscope.recorder.frameworks.progress import Progress
from stepscope.recorder.recorder import Recorder
from stepscope.records.steps import FLAG_EXPLICIT

ROUNDS, CALLS = 41, 100
FACTS: dict[str, Any] = {
    "frameworks": ["transformers", "accelerate"],
    "loader": {"num_workers": 4, "pin_memory": True, "sampler": "RandomSampler", "dataset": "Texts", "length": 51200},
    "model": {"class": "GPT2LMHeadModel", "parameters": 124_439_808, "modules": 164, "dtype": "float32"},
    "optimizer": {"class": "AdamW", "fused": True, "foreach": None, "tensors": 148},
    "gc": {"enabled": True, "thresholds": [700, 10, 10]},
}


def nothing(*args: Any, **kwargs: Any) -> None: ...


def measured(call: Callable[[], object], between: Callable[[], object]) -> float:
    """µs per call."""
    took_ns = 0
    for _ in range(CALLS):
        between()
        began_ns = time.perf_counter_ns()
        call()
        took_ns += time.perf_counter_ns() - began_ns
    return took_ns / CALLS / 1e3


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        recorder = Recorder(Path(folder), Path(folder))
        recorder.begin()
        state = SimpleNamespace(global_step=0, epoch=0.0)

        def step() -> None:
            recorder.end_step(FLAG_EXPLICIT)
            state.global_step += 1
            state.epoch += 1.0

        def progress() -> Progress:
            recorder.objects.facts = dict(FACTS)
            return Progress(recorder)

        rows: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            epoch = progress().before(nothing, _epoch_begins)
            evaluation = progress().evaluation(nothing, lambda *_: "eval")
            state.global_step = recorder.step
            calls: dict[str, Callable[[], object]] = {
                "bare": partial(nothing, None, None, state, None),
                "epoch": partial(epoch, None, None, state, None),
                "evaluation": partial(evaluation, None),
            }
            for name, call in calls.items():
                rows.setdefault(name, []).append(measured(call, step))
        for name, each in rows.items():
            low, _, high = statistics.quantiles(each, n=4)
            print(f"{name:12} {statistics.median(each):7.1f} µs  ({low:.1f}–{high:.1f})")


if __name__ == "__main__":
    main()
