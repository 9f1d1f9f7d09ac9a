"""Where the cost of recording goes: hooks are switched off and on from step to step, inside one training process.

A hook costs what it costs between kernels, on cold caches, so none is timed in a loop of its own.  And a shared machine
drifts by more than all hooks cost, within a second and from process to process, so the steps are compared in pairs: one
with all hooks beside one without some, in random order, some thousand times.  Nothing is patched back and forth, which
would cost the interpreter what it has learnt: a step without a hook calls the original itself.

    python bench/hook_costs.py                     # starts itself under stepscope run, with a real agent
    python bench/hook_costs.py --device cpu --workload 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "trimmed", "typical"]

HERE = Path(__file__).resolve().parent
WARM_STEPS = 150
"""Until the model is found and the device is timed at its usual rate."""
HOOKS = ("input", "h2d", "forward", "backward", "optimizer")
RESAMPLES = 500
FAR = 1 << 60
"""No such step comes."""

Lap = tuple[float, float]
"""Main-thread CPU and wall-clock time of one step, µs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="transformer", help="transformer, or a size of loop.py (1, 5, 20, deep)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pairs", type=int, default=1000, help="of steps, for each hook (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single step there")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        _measure(args)
        return
    inherited = [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, inherited)), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as work:
        command = [sys.executable, "-m", "stepscope", "run", "--quiet", "--dir", work, sys.executable, __file__]
        raise SystemExit(subprocess.call([*command, *sys.argv[1:], "--inside"], env=environment))


def _measure(args: argparse.Namespace) -> None:
    import loop
    import torch

    training = Training(torch, loop, args)
    training.warm_up()
    found: dict[str, list[tuple[Lap, Lap]]] = {}
    for name, without in (("all hooks together", HOOKS), *((name, (name,)) for name in HOOKS)):
        found[name] = [training.pair(without) for _ in range(args.pairs)]
    share = dict.fromkeys(found, 1.0)
    for name, (pairs, each) in training.now_and_then(args.pairs).items():
        found[name], share[name] = pairs, each
    found |= training.gradients(args.pairs)
    share = {name: share.get(name, 1.0) for name in found}
    _report(found, share, args, training.device_name)
    if args.json:
        args.json.write_text(json.dumps({"device": training.device_name, "share": share, "pairs": found}))


class Training:
    """The training loop of ``loop.py``, in which each hook can be gone around."""

    def __init__(self, torch: Any, loop: Any, args: argparse.Namespace) -> None:
        from stepscope.recorder import bootstrap

        recorder = bootstrap.current()
        if recorder is None:
            raise SystemExit("this process is not recorded")
        self._recorder: Any = recorder
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._device = torch.device(args.device)
        self.device_name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        self._model, batch = loop.build(args.workload)
        self._model.to(self._device)
        kind = torch.optim.SGD if args.workload in loop.MLPS else torch.optim.AdamW
        self._optimizer = kind(self._model.parameters(), lr=1e-3)
        self._parameters = list(self._model.parameters())
        self._loss = torch.nn.CrossEntropyLoss()
        self._batches = iter(torch.utils.data.DataLoader(loop.OneBatch(10**9, batch), batch_size=None))
        hooks: Any = sys.modules["torch.optim.optimizer"]
        self._tables = [hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks]
        self._hooks = [dict(table) for table in self._tables]
        self._patched = {
            "input": type(self._batches).__next__,
            "h2d": torch.Tensor.to,
            "forward": type(self._model).__call__,
            "backward": torch.autograd.backward,
        }
        self._torch = torch

    def warm_up(self) -> None:
        for _ in range(WARM_STEPS):
            self.step(())
        self._timer = self._recorder._device
        # Only now is the class of the model timed.
        self._patched["forward"] = type(self._model).__call__
        self._call = {name: (hooked, _original(hooked)) for name, hooked in self._patched.items()}

    def pair(self, without: tuple[str, ...]) -> tuple[Lap, Lap]:
        """A step with all hooks and one without some, side by side in random order; the device is not timed."""
        self._recorder._device = self._recorder.ledger.device = None
        kinds = [(), without]
        random.shuffle(kinds)
        laps = {kind: self.step(kind) for kind in kinds}
        return laps[()], laps[without]

    def now_and_then(self, pairs: int) -> dict[str, tuple[list[tuple[Lap, Lap]], float]]:
        """What is not done in every step: pairs of steps with and without it, and in how many steps it is done."""
        timer = self._timer
        if timer is None:
            return {}
        every, timer._every = timer._every, 2
        timer._reckon = lambda step: None
        timer.memory = tuple
        self._recorder._device = timer
        self._recorder._attend_at = 0
        found = {}
        for _ in range(4):
            self.step(())
        timed = []
        for _ in range(pairs):
            laps = {}
            for _ in range(2):
                is_timed = self._recorder.ledger.device is not None
                laps[is_timed] = self.step(())
            timed.append((laps[True], laps[False]))
        found[f"device times, in 1 of {every} steps"] = (timed, 1 / every)
        del timer.memory
        self._recorder.ledger.device = self._recorder._device = None
        reads = []
        for _ in range(pairs):
            kinds = [True, False]
            random.shuffle(kinds)
            laps = {}
            for read in kinds:
                laps[read] = self.step((), timer if read else None)
            reads.append((laps[True], laps[False]))
        found[f"device memory, in 1 of {every} steps"] = (reads, 1 / every)
        return found

    def gradients(self, pairs: int) -> dict[str, list[tuple[Lap, Lap]]]:
        """What ``layers/gradient_trail.py`` costs in a step that it looks at: steps with and without, side by side.

        In a run it looks at a step only if that is less than 0.2% of it.  Norms that clipping computes are kept always.
        """
        trail = self._recorder.trail
        if trail is None:
            return {}
        self._recorder._device = self._recorder.ledger.device = None
        clip = self._torch.nn.utils.clip_grad_norm_
        found: dict[str, list[tuple[Lap, Lap]]] = {}
        names = {"few": "a look at a few gradients", "all": "a look at all gradients", "none": "keeping clipped norms"}
        for scope, name in names.items():
            found[name] = []
            for _ in range(pairs):
                laps = {}
                for on in random.sample((True, False), 2):
                    looks = on and scope != "none"
                    trail.due, trail._scope, trail._begun = 0 if looks else FAR, scope, (self._recorder.step, 0)
                    clips = None if scope != "none" else clip if on else _original(clip)
                    laps[on] = self.step((), clip=clips)
                found[name].append((laps[True], laps[False]))
        trail.due = FAR
        return found

    def step(self, without: tuple[str, ...], memory: Any = None, clip: Any = None) -> Lap:
        recorder, ledger = self._recorder, self._recorder.ledger
        for table, kept in zip(self._tables, self._hooks, strict=True):
            table.clear()
            if "optimizer" not in without:
                table.update(kept)
        if "forward" in without:
            recorder.forward_seen = True  # or it would look for the model
        call = getattr(self, "_call", {})
        take, to, model, backward = (
            call[name][name in without] if call else self._patched[name]
            for name in ("input", "h2d", "forward", "backward")
        )
        device, net, batches, optimizer, loss_of = (
            self._device, self._model, self._batches, self._optimizer, self._loss
        )  # fmt: skip
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        x, y = take(batches)
        x, y = to(x, device), to(y, device)
        optimizer.zero_grad()
        loss = loss_of(model(net, x), y)
        backward(loss)
        if clip is not None:
            clip(self._parameters, 1.0)
        optimizer.step()
        if memory is not None:
            memory._memory_at = 0
            ledger.put(*memory.memory())
        wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        return cpu / 1e3, wall / 1e3


def _original(hooked: Callable[..., Any]) -> Callable[..., Any]:
    """What a hook stands for."""
    while hasattr(hooked, "__wrapped__"):
        hooked = hooked.__wrapped__
    return hooked


def _report(found: dict[str, list[tuple[Lap, Lap]]], share: dict[str, float], args: Any, device: str) -> None:
    whole = found["all hooks together"]
    cpu, wall = (statistics.median(other[at] for _, other in whole) for at in (0, 1))
    bare = f"a step takes {wall:,.0f} µs without hooks, {cpu:,.0f} µs of CPU"
    print(f"{args.workload} on {device}: {bare}; {args.pairs} pairs each")
    print(f"  {'adds, µs a step':36}{'CPU':>8}  {'95% interval':16}{'wall':>8}  {'95% interval':16}")
    for name, pairs in found.items():
        line = f"  {name:36}"
        for at in (0, 1):
            low, middle, high = (
                figure * share[name] for figure in typical([one[at] - other[at] for one, other in pairs])
            )
            line += f"{middle:>+8.1f}  {f'({low:+.1f} to {high:+.1f})':16}"
        print(line.rstrip())


def typical(differences: list[float]) -> tuple[float, float, float]:
    """Their mean without the tails (a step that was interrupted says nothing of a hook), and between what it lies."""
    means = sorted(trimmed(random.choices(differences, k=len(differences))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], trimmed(differences), means[int(0.975 * RESAMPLES)]


def trimmed(values: Sequence[float]) -> float:
    ordered = sorted(values)
    cut = len(ordered) // 10
    return statistics.fmean(ordered[cut : len(ordered) - cut])


if __name__ == "__main__":
    main()
