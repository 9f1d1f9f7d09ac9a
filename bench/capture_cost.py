"""What a capture costs: the time of steps before, inside and after it, in one training process.

Each round has as many steps before a window as after it, so that the two can be compared in pairs on a machine that
drifts.  The first round is shown by itself: CUPTI starts in it.  The training loop is that of ``loop.py``; the process
is its own agent, which takes each trace away.

    python bench/capture_cost.py                       # starts itself under stepscope run
    python bench/capture_cost.py --device cuda --workload transformer --rounds 8
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Training", "main"]

HERE = Path(__file__).resolve().parent
SETTLING_STEPS = 60
WARMUP, STEPS = 2, 6
LONGEST_WAIT_STEPS = 20_000
"""For the rank to see the order: it reads the request word about twice a second."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Milliseconds."""

    before_ms: float
    """Median step before the window …"""
    after_ms: float
    warmup_ms: tuple[float, ...]
    inside_ms: float
    """Median of the profiled steps, without start, stop and writing."""
    pause_ms: float
    """How much longer than usual the steps around the profiled ones took: start, warm-up, stop and writing."""
    start_ms: float
    stop_ms: float
    write_ms: float
    trace_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="transformer", help="transformer, large, or a size of loop.py (1, 5, 20)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=6, help="captures with each setting (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="before and after each window (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round there")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        _measure(args)
        return
    inherited = [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, inherited)), "OMP_NUM_THREADS": "1"}
    environment |= {"STEPSCOPE_LAYERS": "off"}
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as work:
        command = [sys.executable, "-m", "stepscope", "run", "--quiet", "--no-hub", "--dir", work]
        raise SystemExit(
            subprocess.call([*command, sys.executable, __file__, *sys.argv[1:], "--inside"], env=environment)
        )


class Training:
    """The loop, and the ring of this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        import loop
        import torch

        from stepscope.recorder import bootstrap

        recorder = bootstrap.current()
        if recorder is None:
            raise SystemExit("this process is not recorded")
        self.recorder = recorder
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._device = torch.device(args.device)
        self.device_name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        self._model, (x, y) = loop.build(args.workload)
        self._model.to(self._device)
        self._batch = x.to(self._device), y.to(self._device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._loss = torch.nn.CrossEntropyLoss()

    def step(self) -> float:
        """One step, and the device's work in it; milliseconds."""
        begun_ns = time.perf_counter_ns()
        x, y = self._batch
        loss = self._loss(self._model(x), y)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss.item()
        return (time.perf_counter_ns() - begun_ns) / 1e6

    def capture(self, number: int, **options: Any) -> tuple[list[float], dict[str, Any]]:
        """Train until a capture is over: the milliseconds of the steps from its start on, and its report."""
        from stepscope.records.capture import CaptureOrder
        from stepscope.records.dataclass_json import encoded
        from stepscope.records.paths import CAPTURE_SUFFIX, CAPTURED_SUFFIX, TRACE_SUFFIX
        from stepscope.ring import announce_request

        assert self.recorder.ring is not None
        ring = self.recorder.ring.path
        captures: Any = self.recorder.captures
        order = CaptureOrder(
            id=f"round-{number}", ranks=(self.recorder.identity.rank,), at_step=0, steps=STEPS, warmup=WARMUP, **options
        )
        captured = ring.with_suffix(CAPTURED_SUFFIX)
        captured.unlink(missing_ok=True)
        ring.with_suffix(CAPTURE_SUFFIX).write_text(json.dumps(encoded(order)))
        announce_request(ring)
        inside: list[float] = []
        for _ in range(LONGEST_WAIT_STEPS):
            taken_ms = self.step()
            if captures.busy or inside:
                inside.append(taken_ms)
            if inside and not captures.busy:
                break
        report: dict[str, Any] = json.loads(captured.read_bytes())
        if report["state"] != "written":
            raise SystemExit(f"the capture failed: {report['problem']}")
        ring.with_suffix(TRACE_SUFFIX).unlink()
        return inside, report

    def round(self, number: int, steps: int, **options: Any) -> Round:
        before = [self.step() for _ in range(steps)]
        inside, report = self.capture(number, **options)
        after = [self.step() for _ in range(steps)]
        usual_ms = statistics.median(before)
        # The warm-up begins at the end of the first of these steps; stop and writing are in the last.
        profiled = inside[1 + WARMUP : 1 + WARMUP + STEPS]
        return Round(
            before_ms=usual_ms,
            after_ms=statistics.median(after),
            warmup_ms=tuple(inside[1 : 1 + WARMUP]),
            inside_ms=statistics.median(profiled),
            pause_ms=sum(inside) - sum(profiled) - usual_ms * (len(inside) - len(profiled)),
            start_ms=report["start_ms"],
            stop_ms=report["stop_ms"],
            write_ms=report["write_ms"],
            trace_bytes=report["trace_bytes"],
        )


def _measure(args: argparse.Namespace) -> None:
    training = Training(args)
    for _ in range(SETTLING_STEPS):
        training.step()
    settings: dict[str, dict[str, bool]] = {
        "operators": {"stacks": False},
        "with stacks": {"stacks": True},
        "all": {"stacks": True, "memory": True, "shapes": True},
    }
    found: dict[str, list[Round]] = {}
    number = 0
    for name, options in settings.items():
        for _ in range(args.rounds + (not found)):
            number += 1
            found.setdefault(name if found or number > 1 else "first start", []).append(
                training.round(number, args.steps, **options)
            )
            if number == 1:
                found.setdefault(name, [])
    print(f"{args.workload} on {training.device_name}: {args.rounds} captures of {STEPS} steps each, median ms")
    heads = ("step before", "after", "after/before", "inside", "start", "stop", "write", "paused", "trace MB")
    print(f"  {'':14}" + "".join(f"{head:>13}" for head in heads))
    for name, rounds in found.items():
        ratios = [each.after_ms / each.before_ms - 1 for each in rounds]
        cells = [
            *(f"{_median(rounds, field):.3f}" for field in ("before_ms", "after_ms")),
            f"{100 * statistics.median(ratios):+.1f}%",
            *(f"{_median(rounds, field):.2f}" for field in ("inside_ms", "start_ms", "stop_ms", "write_ms")),
            f"{_median(rounds, 'pause_ms'):.1f}",
            f"{_median(rounds, 'trace_bytes') / 1e6:.2f}",
        ]
        print(f"  {name:14}" + "".join(f"{cell:>13}" for cell in cells))
        low, high = min(ratios), max(ratios)
        print(
            f"  {'':14}after/before: {100 * low:+.1f}% to {100 * high:+.1f}%; first warm-up step {_warmup(rounds)} ms"
        )
    if args.json:
        args.json.write_text(json.dumps({name: [asdict(each) for each in rounds] for name, rounds in found.items()}))


def _median(rounds: list[Round], field: str) -> float:
    return float(statistics.median(getattr(each, field) for each in rounds))


def _warmup(rounds: list[Round]) -> str:
    return f"{statistics.median(each.warmup_ms[0] for each in rounds):.2f}"


if __name__ == "__main__":
    main()
