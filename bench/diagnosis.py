"""How long diagnosing takes, and how much memory: 1,024 ranks of 1,000 steps, with a slow rank, samples and facts.

    python bench/diagnosis.py --ranks 64,1024 --steps 1000 --repeats 5
    python bench/diagnosis.py --ranks 1024 --traffic        # with the collectives of a mesh, eight ranks wide

Each size runs in a process of its own.  ``window`` aligns the steps, ``rules`` asks all families; memory is the peak of
the process above what it held when the run had been loaded.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
SLOW_MS = 3.0
MESH_COLUMNS = 8


def measure(ranks: int, steps: int, repeats: int, *, traffic: bool) -> dict[str, float]:
    from fakes.cluster import Cluster, slow_at
    from fakes.samples import with_samples
    from fakes.traffic import Exchange, Traffic

    from stepscope.diagnosis import build_window, diagnose

    culprit = ranks // 2
    cluster = Cluster(
        ranks=ranks, steps=steps, hosts=max(1, ranks // 8), faults=(slow_at(culprit, "backward", SLOW_MS),)
    )
    if traffic:
        exchanges = (
            Exchange(dimension="tp", count=6, ms=0.2),
            Exchange(dimension="tp", op="all_gather", count=2, ms=0.2),
            Exchange(dimension="dp", op="reduce_scatter", count=2, ms=0.4),
        )
        mesh = {"dp": ranks // MESH_COLUMNS, "tp": MESH_COLUMNS}
        cluster = replace(cluster, traffic=Traffic(mesh=mesh, exchanges=exchanges, work_ms=0.02))
    run = with_samples(cluster, rss_mb=2000.0)
    held_mb = _peak_mb()
    windows, rules = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        window = build_window(run)
        built = time.perf_counter()
        found = diagnose(run, window)
        windows.append(built - began)
        rules.append(time.perf_counter() - built)
        del window
    if found[0].ranks != (culprit,):
        raise SystemExit(f"wrong verdict: {found[0].title}")
    return {
        "window_s": statistics.median(windows),
        "rules_s": statistics.median(rules),
        "held_mb": held_mb,
        "peak_mb": _peak_mb(),
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,1024")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--traffic", action="store_true", help="ranks exchange something: ten collectives a step")
    parser.add_argument("--one", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.steps, args.repeats, traffic=args.traffic)))
        return
    print(f"{'ranks':>7} {'steps':>6} {'window':>9} {'rules':>9} {'together':>9} {'run':>9} {'peak':>9}")
    for ranks in map(int, args.ranks.split(",")):
        command = [sys.executable, __file__, "--one", str(ranks), "--steps", str(args.steps)]
        command += ["--repeats", str(args.repeats), *(["--traffic"] if args.traffic else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment())
        one = json.loads(done.stdout)
        together = one["window_s"] + one["rules_s"]
        print(
            f"{ranks:>7,} {args.steps:>6,} {one['window_s']:>7.2f} s {one['rules_s']:>7.2f} s {together:>7.2f} s "
            f"{one['held_mb']:>6.0f} MB {one['peak_mb']:>6.0f} MB"
        )


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(SOURCE), "OPENBLAS_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
