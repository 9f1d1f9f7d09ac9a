"""Steps at a given pace; the script that ``throughput.py`` runs under Stepscope.

``ring`` writes step records straight into a ring of the run, so that the pace is exact and torch's own time is out of
the way; ``torch`` makes real optimizer steps, as fast as they go or at the pace asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.recorder.ledger import Ledger
from stepscope.records.identity import RankIdentity
from stepscope.records.paths import ENV_RUN_DIR, ENV_SESSION, ring_paths
from stepscope.records.steps import BACKWARD, FORWARD, INPUT, OPTIMIZER, OTHER
from stepscope.ring import RingState, RingWriter

__all__: list[str] = []

SPIN_NS = 300_000
"""Nearer to the next step than this, waiting is spinning: a sleep would overshoot."""


def ring_steps() -> tuple[Callable[[], None], Callable[[], None]]:
    """A function that records one step, and one that ends the ring in order."""
    session, run_dir = Path(os.environ[ENV_SESSION]), Path(os.environ[ENV_RUN_DIR])
    path, _ = ring_paths(session, run_dir, os.getpid())
    ring = RingWriter(path, RankIdentity(host=platform.node(), pid=os.getpid()))
    ring.set_state(RingState.RUNNING)
    ledger = Ledger(time.perf_counter_ns, lambda _phase: False)
    ledger.open(ring)
    number = 0

    def step() -> None:
        """The words of an ordinary loop: input, forward, backward and optimizer."""
        nonlocal number
        for phase in (INPUT, FORWARD, BACKWARD):
            ledger.leave(ledger.enter(phase))
        ledger.enter(OPTIMIZER)
        ledger.end_step(OTHER, number, 0)
        number += 1

    def end() -> None:
        ring.set_state(RingState.EXITED)
        ring.close()

    return step, end


def torch_steps() -> tuple[Callable[[], None], Callable[[], None]]:
    """One parameter, one optimizer: about the shortest step that torch can make."""
    import torch

    torch.set_num_threads(1)
    weight: Any = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=1e-3, foreach=False)

    def step() -> None:
        optimizer.step()

    return step, lambda: None


def pace(step: Callable[[], None], *, rate: float, seconds: float) -> tuple[int, float]:
    """Call ``step`` ``rate`` times a second (0: without waiting) for a while; how often, and how fast it went."""
    now = time.perf_counter_ns
    begin = now()
    end = begin + int(seconds * 1e9)
    count = 0
    while now() < end:
        step()
        count += 1
        if rate:
            due = begin + int(count * 1e9 / rate)
            rest_ns = due - now() - SPIN_NS
            if rest_ns > 0:
                time.sleep(rest_ns / 1e9)
            while now() < due:
                pass
    return count, count / ((now() - begin) / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["ring", "torch"], required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    step, end = ring_steps() if args.kind == "ring" else torch_steps()
    count, rate = pace(step, rate=args.rate, seconds=args.seconds)
    end()
    args.out.write_text(json.dumps({"steps": count, "rate": rate}))


if __name__ == "__main__":
    main()
