"""How long `stepscope compare` takes for two large runs: reading, comparing and writing the text.

PYTHONPATH=bench python -m compare.speed --ranks 1024 --steps 1000
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fakes.cluster import Cluster, slow_at
from made_runs import record

from stepscope.cli.finalize import finalize_run


def make(folder: Path, ranks: int, steps: int) -> list[Path]:
    """Two finished runs with their summaries; in the second, one rank is slower."""
    found = []
    for name, faults in (("before", ()), ("after", (slow_at(ranks // 2, "backward", 2.0),))):
        cluster = Cluster(ranks=ranks, steps=steps, hosts=max(1, ranks // 8), seed=len(name), faults=faults)
        path = record(folder, name, cluster.run())
        finalize_run(path, quiet=True)
        found.append(path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "runs"
        folder.mkdir()
        paths = make(folder, args.ranks, args.steps)
        times = []
        for _ in range(args.repeats):
            began_s = time.perf_counter()
            command = [sys.executable, "-m", "stepscope", "compare", *map(str, paths)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            times.append(time.perf_counter() - began_s)
    print(text)
    print(f"{args.ranks:,} ranks x {args.steps:,} steps, twice: {', '.join(f'{took:.2f} s' for took in times)}")


if __name__ == "__main__":
    main()
