"""The longest step of a leaking job with millions of small objects, bare and recorded, in turn.

A count of what grows must not take as long as the process is large.  The job keeps 5 million small lists, leaks 1 MB a
step, so that the recorder counts several times, and prints its longest step; Python's own garbage collector is off,
which would take longer than anything else.

    python bench/large_heap.py --pairs 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["main"]

JOB = """
import gc, json, sys, time
import torch

gc.disable()
held = [[number] for number in range(int(sys.argv[1]))]
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch, kept, times, own = torch.ones(8, 64), [], [], []
for step in range(int(sys.argv[2])):
    began, began_cpu = time.perf_counter(), time.thread_time()
    kept.append(torch.full((1 << 18,), 1.0))
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - began)
    own.append(time.thread_time() - began_cpu)
    time.sleep(0.02)
print(json.dumps({"longest_ms": 1e3 * max(times[20:]), "longest_cpu_ms": 1e3 * max(own[20:])}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=5_000_000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    source = str(Path(__file__).resolve().parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as work:
        job = Path(work) / "job.py"
        job.write_text(JOB)
        bare = [sys.executable, str(job), str(args.objects), str(args.steps)]
        recorded = [sys.executable, "-m", "stepscope", "run", "--quiet", "--dir", work, "--layers", "off", *bare]
        for pair in range(args.pairs):
            for name, command in (("bare", bare), ("recorded", recorded)):
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                figures = json.loads(done.stdout.splitlines()[-1])
                print(
                    f"{pair} {name:9} longest step {figures['longest_ms']:6.1f} ms, "
                    f"on the CPU {figures['longest_cpu_ms']:6.1f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
