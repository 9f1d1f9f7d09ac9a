"""What looking at the layers costs: sampled steps beside steps that are not, inside one recorded training process.

As in ``hook_costs.py``, and for its reasons, steps are compared in pairs, side by side and in random order.  A sample
begins at the end of the step before it, so a pair is two steps of which the second is sampled, beside two that are not.

    python bench/layers.py                          # starts itself under stepscope run, with a real agent
    python bench/layers.py --width 256 --batch 16   # a larger model of as many modules
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

from hook_costs import trimmed, typical

from stepscope.recorder.layers.sampler import Schedule

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
WARM_STEPS = 60
FAR = 1 << 60
RUNS_S = {"a minute": 60.0, "an hour": 3600.0}
"""How long the runs are of which samples take a share.  Too small a share to be measured by stretches of seconds: the
recorder's schedule says how many samples there are, in steps that take what was measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64, help="of the model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single pair there, in µs")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        _measure(args)
        return
    inherited = [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, inherited)), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as work:
        command = [sys.executable, "-m", "stepscope", "run", "--quiet", "--no-html", "--dir", work]
        command += ["--layers", "sampled", sys.executable, __file__]
        raise SystemExit(subprocess.call([*command, *sys.argv[1:], "--inside"], env=environment))


def _measure(args: argparse.Namespace) -> None:
    training = Training(args)
    for _ in range(WARM_STEPS):
        training.step()
    training.hold()
    plain, attended, sampled = (
        training.unsampled(args.pairs),
        training.attended(args.pairs),
        training.sampled(args.pairs),
    )
    step_us = statistics.median(other for _, other in plain)
    modules = sum(1 for _ in training.model.modules())
    print(f"{modules} modules, {training.elements:,} parameters on {args.device}: a step takes {step_us:,.0f} µs")
    _report("a step that is not sampled", plain, step_us)
    _report("the same, where every step is attended to (DDP)", attended, step_us)
    _report("a sampled step", sampled, step_us)
    print(f"  a sampled step takes {trimmed([one / (other / 2) - 1 for one, other in sampled]):.2f} times a plain one")
    low, longer_us, high = typical([one - other for one, other in sampled])
    rates = {}
    for name, run_s in RUNS_S.items():
        rates[name] = [share_of_samples(step_us, cost_us, run_s) for cost_us in (low, longer_us, high)]
        least, share, most = (100 * rate for rate in rates[name])
        print(f"  at the default rate, of {name}: {share:.2f}% ({least:.2f} to {most:.2f})")
    parts = training.parts()
    print("  of a sampled step: " + ", ".join(f"{name} {us:,.0f} µs" for name, us in parts.items()))
    if args.json:
        pairs = {"plain": plain, "attended": attended, "sampled": sampled, "rates": rates}
        args.json.write_text(json.dumps({"step_us": step_us, "parts": parts, **pairs}))


class Training:
    """A model of 100 modules, whose sampler is told which steps to take."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from torch import nn

        from stepscope.recorder import bootstrap

        recorder: Any = bootstrap.current()
        if recorder is None or recorder.layers is None:
            raise SystemExit("this process is not recorded")
        torch.set_num_threads(1)
        torch.manual_seed(0)

        class Block(nn.Module):  # type: ignore[misc]
            def __init__(self, width: int) -> None:
                super().__init__()
                self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
                self.norm2, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()
                self.down = nn.Linear(4 * width, width)

            def forward(self, x: Any) -> Any:
                x = x + self.out(self.mix(self.norm(x)))
                return x + self.down(self.act(self.up(self.norm2(x))))

        blocks = [Block(args.width) for _ in range(12)]
        self.model = nn.Sequential(
            nn.Linear(32, args.width), *blocks, nn.LayerNorm(args.width), nn.Linear(args.width, 8)
        )
        self.model.to(args.device)
        self.elements = sum(one.numel() for one in self.model.parameters())
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._loss = nn.CrossEntropyLoss()
        self._x = torch.randn(args.batch, 16, 32, device=args.device)
        self._y = torch.randint(0, 8, (args.batch, 16), device=args.device)
        self._recorder = recorder
        self._sampler = recorder.layers
        self._wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss = self._loss(self.model(self._x).flatten(0, 1), self._y.flatten())
        loss.backward()
        self._optimizer.step()

    def hold(self) -> None:
        """Sample nothing until told to."""
        self._sampler._schedule = _Told()
        self._search()

    def _search(self) -> None:
        self._recorder._attend_at = 0

    def _timed(self, steps: int) -> float:
        self._wait()
        begun = time.perf_counter_ns()
        for _ in range(steps):
            self.step()
        self._wait()
        return (time.perf_counter_ns() - begun) / 1e3

    def unsampled(self, pairs: int) -> list[tuple[float, float]]:
        """With a sampler whose step is far away, and without one."""
        return [self._both(lambda: None, lambda: None, 1) for _ in range(pairs)]

    def attended(self, pairs: int) -> list[tuple[float, float]]:
        return [self._both(self._search, self._search, 1) for _ in range(pairs)]

    def sampled(self, pairs: int) -> list[tuple[float, float]]:
        """Two steps of which the second is sampled, and two that are not."""

        def due() -> None:
            self._sampler._schedule.next = self._recorder.step + 1
            self._search()

        return [self._both(due, lambda: None, 2) for _ in range(pairs)]

    def _both(self, before: Callable[[], None], before_other: Callable[[], None], steps: int) -> tuple[float, float]:
        laps = {}
        for on in random.sample((True, False), 2):
            self._recorder.layers = self._sampler if on else None
            (before if on else before_other)()
            laps[on] = self._timed(steps)
        self._recorder.layers = self._sampler
        return laps[True], laps[False]

    def parts(self, times: int = 50) -> dict[str, float]:
        """What the parts of a sample take, median, µs."""
        spent: dict[str, list[float]] = {"before": [], "hooks": [], "at the end": []}
        sampler = self._sampler
        begin, finish = sampler._begin, sampler.finish

        def timed_begin(*args: Any) -> Any:
            begun = time.perf_counter_ns()
            result = begin(*args)
            spent["before"].append((time.perf_counter_ns() - begun) / 1e3)
            return result

        def timed_finish(*args: Any) -> Any:
            step = sampler._step
            begun = time.perf_counter_ns()
            result = finish(*args)
            spent["at the end"].append((time.perf_counter_ns() - begun) / 1e3)
            spent["hooks"].append(step.own_ns / 1e3)
            return result

        sampler._begin, sampler.finish = timed_begin, timed_finish
        for _ in range(times):
            sampler._schedule.next = self._recorder.step + 1
            self._search()
            self.step()
            self.step()
        del sampler._begin, sampler.finish
        return {name: statistics.median(values) for name, values in spent.items()}


def share_of_samples(step_us: float, cost_us: float, run_s: float) -> float:
    """How much longer a run of such steps takes because of its samples."""
    now_ns = 0
    schedule = Schedule(every_step=False, now=lambda: now_ns)
    step, spent_us = 0, 0.0
    while True:
        now_ns += int(1e3 * ((schedule.next + 1 - step) * step_us + cost_us))
        if now_ns > 1e9 * run_s:
            return spent_us / (1e6 * run_s - spent_us)
        step, spent_us = schedule.next + 1, spent_us + cost_us
        schedule.sampled(schedule.next, int(1e3 * cost_us))


class _Told:
    """A schedule that samples only the step it is told."""

    next = FAR

    def sampled(self, step: int, cost_ns: int) -> None:
        self.next = FAR

    def usual_ns(self, begun_ns: int, step: int) -> int:
        return 0

    def suspect(self, step: int, why: str) -> bool:
        return False


def _report(name: str, pairs: Sequence[tuple[float, float]], step_us: float) -> None:
    low, middle, high = typical([one - other for one, other in pairs])
    print(f"  {name:50}{middle:>+9.1f} µs ({low:+.1f} to {high:+.1f}), {100 * middle / step_us:+.1f}% of a step")


if __name__ == "__main__":
    main()
