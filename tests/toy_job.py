"""As ``tests/support/jobs/job.py``, with some of its options and its words, but without torch: it starts at once.

For what happens around a job, where it does not matter how a step comes about.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import stepscope

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--pause-ms", type=float, default=0.0, help="after each step")
args = parser.parse_args()
for step in range(args.steps):
    with stepscope.step():
        time.sleep(0.001)
    sys.stdout.write(f"rank {os.environ.get('RANK', '0')} step {step} loss {(1.0 / (1 + step)).hex()}\n")
    sys.stdout.flush()
    time.sleep(args.pause_ms / 1e3)
