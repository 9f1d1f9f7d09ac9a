"""What the recorder's hooks add to a step, in Python and in C (``STEPSCOPE_C_HOOKS=1``), inside one process.

Rounds of three steps in random order: without hooks, with those in Python, with those in C.  As in ``hook_costs.py``
nothing is patched back and forth: a step calls the hooks of its kind itself.  Each kind has its own recorder and ring.
There is no agent; layers, losses and gradients are not read, and steps in which a check is due are not counted: they
cost the same either way, and by time (a loss every 20 ms), so with three kinds taking turns each would pay three times
as often as in a run.

    python bench/hot_path.py
    python bench/hot_path.py --rounds 3000 --workload deep
    python bench/hot_path.py --device cuda --workload transformer
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]
os.environ |= {"OMP_NUM_THREADS": "1", "STEPSCOPE_LAYERS": "off"}

import loop  # noqa: E402
import torch  # noqa: E402
from hook_costs import typical  # noqa: E402

from stepscope.recorder.guard import ImportWatch, failures  # noqa: E402
from stepscope.recorder.hooks import native  # noqa: E402
from stepscope.recorder.instrumentation import Instrumentation  # noqa: E402
from stepscope.recorder.recorder import Recorder  # noqa: E402

WARM_STEPS = 150
"""Until the model is found and the checks of the first steps are over."""
NONE, PYTHON, C = "no hooks", "Python", "C"
ROWS = ((PYTHON, NONE), (C, NONE), (PYTHON, C))
Lap = tuple[float, float]
"""Main-thread CPU and wall-clock time of one step, µs."""


class Hooks(NamedTuple):
    """What a step calls, hooked or not."""

    recorder: Any
    take: Any
    copy: Any
    model: Any
    backward: Any
    optimizer: tuple[dict[int, Any], ...] = ({}, {})


class Training:
    """The training loop of ``loop.py`` with hooks of several kinds."""

    def __init__(self, workload: str, device: str, folder: Path) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._device = torch.device(device)
        self._net, batch = loop.build(workload)
        self._net.to(self._device)
        kind = torch.optim.SGD if workload in loop.MLPS else torch.optim.AdamW
        self._optimizer = kind(self._net.parameters(), lr=1e-3)
        self._loss_of = torch.nn.CrossEntropyLoss()
        self._losses: dict[str, Any] = {}
        pinned = device == "cuda"
        dataset = loop.OneBatch(10**9, batch)
        self._batches = iter(torch.utils.data.DataLoader(dataset, batch_size=None, pin_memory=pinned))
        optimizers: Any = sys.modules["torch.optim.optimizer"]
        self._tables = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
        in_c = native.recorder_class()
        if in_c is None:
            raise SystemExit("the hooks in C were not built: no C compiler")
        self.hooks = {NONE: self._installed(None)}
        self.hooks |= {name: self._made(kind, folder / name) for name, kind in ((PYTHON, Recorder), (C, in_c))}

    def _installed(self, recorder: Any) -> Hooks:
        calls = type(self._batches).__next__, torch.Tensor.to, type(self._net).__call__, torch.autograd.backward
        return Hooks(recorder, *calls, tuple(dict(table) for table in self._tables))

    def _made(self, kind: type[Recorder], folder: Path) -> Hooks:
        """Install hooks as in any process, train until the model is known, and take them out of torch."""
        folder.mkdir()
        recorder = kind(folder, folder)
        installed = Instrumentation(recorder, torch, ImportWatch())
        for _ in range(WARM_STEPS):
            x, y = (tensor.to(self._device, non_blocking=True) for tensor in next(self._batches))
            self._optimizer.zero_grad()
            self._loss_of(self._net(x), y).backward()
            self._optimizer.step()
        made = self._installed(recorder)
        installed._patches.undo()
        for table in self._tables:
            table.clear()
        return made

    def round(self) -> dict[str, Lap]:
        """A step of each kind, in random order, none of which has a check due."""
        while True:
            laps = {}
            for name in random.sample(list(self.hooks), len(self.hooks)):
                hooks = self.hooks[name]
                quiet = hooks.recorder is None or hooks.recorder._attend_at > hooks.recorder.step
                lap = self._step(name, hooks)
                if quiet:
                    laps[name] = lap
            if len(laps) == len(self.hooks):
                return laps

    def _step(self, name: str, hooks: Hooks) -> Lap:
        for table, hooked in zip(self._tables, hooks.optimizer, strict=True):
            table.clear()
            table.update(hooked)
        if hooks.recorder is not None:
            hooks.recorder._ended_ns = time.perf_counter_ns()  # or the steps of the others would be part of this one
        _, take, copy, model, backward, _ = hooks
        batches, net, optimizer, loss_of = self._batches, self._net, self._optimizer, self._loss_of
        device = self._device
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        x, y = take(batches)
        x, y = copy(x, device, non_blocking=True), copy(y, device, non_blocking=True)
        optimizer.zero_grad()
        # As in any script, the loss lives until the next one of its kind: its graph is freed within a step.
        self._losses[name] = loss = loss_of(model(net, x), y)
        backward(loss)
        optimizer.step()
        if device.type == "cuda":
            loss.item()  # a step ends with what the device did in it
        wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        return cpu / 1e3, wall / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="1", help="transformer, or a size of loop.py (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3000, help="of three steps (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as folder:
        training = Training(args.workload, args.device, Path(folder))
        rounds = [training.round() for _ in range(args.rounds)]
        steps = {name: hooks.recorder.step for name, hooks in training.hooks.items() if hooks.recorder is not None}
    cpu, wall = (statistics.median(laps[NONE][at] for laps in rounds) for at in (0, 1))
    where = torch.cuda.get_device_name() if args.device == "cuda" else "a CPU"
    print(f"{args.workload} on {where}: a step takes {wall:,.0f} µs without hooks, {cpu:,.0f} µs of CPU; {_load()}")
    print(f"  {'µs a step':36}{'CPU':>8}  {'95% interval':16}{'wall':>8}  {'95% interval':16}")
    for name, other in ROWS:
        line = f"  {f'{name} over {other}':36}"
        for at in (0, 1):
            low, middle, high = typical([laps[name][at] - laps[other][at] for laps in rounds])
            line += f"{middle:>+8.1f}  {f'({low:+.1f} to {high:+.1f})':16}"
        print(line.rstrip())
    print(f"{args.rounds} rounds; steps recorded: {steps}; failures of hooks: {failures()}")


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
