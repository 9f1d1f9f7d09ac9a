"""How long diagnosing takes, and how much memory: 1,024 ranks of 1,000 steps, with a slow rank, samples and facts.

    python bench/diagnosis.py --ranks 64,1024 --steps 1000 --repeats 5
    python bench/diagnosis.py --ranks 1024 --traffic        # with the collectives of a mesh, eight ranks wide

One process writes the run, another reads it as ``stepscope report`` does and diagnoses it.  ``window`` aligns the
steps, ``rules`` asks all families; ``CPU`` is the time of both, which hardly depends on other programs.  ``run`` is the
memory of that process at its peak until it had read the run, ``peak`` until the end.  With ``--traffic`` one process
makes the run and diagnoses it, so its memory has all that making it took.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.records.series import RunData

RUN = "run"
SOURCE = Path(__file__).resolve().parents[1] / "src"
SLOW_MS = 3.0
MESH_COLUMNS = 8


def make(ranks: int, steps: int, *, traffic: bool) -> RunData:
    from fakes.cluster import Cluster, slow_at
    from fakes.samples import with_samples
    from fakes.traffic import Exchange, Traffic

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
    return with_samples(cluster, rss_mb=2000.0)


def write(folder: Path, ranks: int, steps: int) -> None:
    from made_runs import record

    record(folder, RUN, make(ranks, steps, traffic=False))


def measure(folder: Path, ranks: int, steps: int, repeats: int, *, traffic: bool) -> dict[str, float]:
    from stepscope.diagnosis import build_window, diagnose
    from stepscope.store.load import open_run

    run = make(ranks, steps, traffic=True) if traffic else open_run(folder / RUN)
    held_mb = _peak_mb()
    windows, rules, cpu = [], [], []
    for _ in range(repeats):
        began, cpu_began = time.perf_counter(), time.process_time()
        window = build_window(run)
        built = time.perf_counter()
        found = diagnose(run, window)
        windows.append(built - began)
        rules.append(time.perf_counter() - built)
        cpu.append(time.process_time() - cpu_began)
        del window
    if found[0].ranks != (ranks // 2,):
        raise SystemExit(f"wrong verdict: {found[0].title}")
    return {
        "window_s": statistics.median(windows),
        "rules_s": statistics.median(rules),
        "cpu_s": statistics.median(cpu),
        "least_cpu_s": min(cpu),
        "most_cpu_s": max(cpu),
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
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write(args.folder, args.one, args.steps)
        return
    if args.one:
        print(json.dumps(measure(args.folder, args.one, args.steps, args.repeats, traffic=args.traffic)))
        return
    print(f"{'ranks':>7} {'steps':>6} {'window':>9} {'rules':>9} {'together':>9} {'CPU':>19} {'run':>9} {'peak':>9}")
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as folder:
            command = [sys.executable, __file__, "--one", str(ranks), "--steps", str(args.steps)]
            command += ["--folder", str(Path(folder, "runs"))]
            if not args.traffic:
                subprocess.run([*command, "--write"], check=True, env=_environment())
            command += ["--repeats", str(args.repeats), *(["--traffic"] if args.traffic else [])]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment())
            figures = json.loads(done.stdout)
        together = figures["window_s"] + figures["rules_s"]
        spread = f"({figures['least_cpu_s']:.2f}–{figures['most_cpu_s']:.2f})"
        print(
            f"{ranks:>7,} {args.steps:>6,} {figures['window_s']:>7.2f} s {figures['rules_s']:>7.2f} s "
            f"{together:>7.2f} s {figures['cpu_s']:>5.2f} s {spread} "
            f"{figures['held_mb']:>6.0f} MB {figures['peak_mb']:>6.0f} MB"
        )


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(SOURCE), "OPENBLAS_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
