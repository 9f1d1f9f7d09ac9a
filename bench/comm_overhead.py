"""What seeing collectives costs: loops of two ranks over gloo, bare and under Stepscope, in turns.

The price per collective is the slope over loops with none, some and many of them in a step; the price per step is what
is left without any.  The promise: at most 30 µs per step and 5 µs per collective.

python bench/comm_overhead.py --repeats 7
python bench/comm_overhead.py --workloads explicit-0,explicit-32 --steps 500
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["added", "main", "slope"]

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
RANKS = 2
WORKLOADS = ("explicit-0", "explicit-8", "explicit-32", "ddp-0", "fsdp-0")
FIGURES = ("cpu_us", "wall_us")

Row = dict[str, Any]
Rows = dict[str, list[tuple[Row, Row]]]
"""By workload, a pair for each repeat: bare, and under Stepscope."""


def run_once(workload: str, *, recorded: bool, args: argparse.Namespace) -> Row:
    kind, _, collectives = workload.partition("-")
    work = Path(tempfile.mkdtemp(prefix="stepscope-bench-"))
    out = work / "result.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    script = [HERE / "comm_loop.py", "--kind", kind, "--collectives", collectives, "--out", out]
    script += ["--steps", args.steps, "--warm", args.warm]
    tool = [sys.executable, "-m", "stepscope", "run", "--quiet", "--dir", work / "runs"] if recorded else []
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    try:
        command = [str(part) for part in (*tool, *launch, *script)]
        done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, check=False)
        if done.returncode or not out.exists():
            raise SystemExit(f"{workload} failed ({done.returncode})\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        row: Row = json.loads(out.read_text())
        return row
    finally:
        shutil.rmtree(work)


def measure(workloads: list[str], args: argparse.Namespace) -> Rows:
    """Every repeat runs each workload both ways, one after the other; every other repeat the other way round."""
    rows: Rows = {workload: [] for workload in workloads}
    for repeat in range(args.repeats):
        for workload in workloads:
            order = (False, True) if repeat % 2 == 0 else (True, False)
            by_way = {recorded: run_once(workload, recorded=recorded, args=args) for recorded in order}
            rows[workload].append((by_way[False], by_way[True]))
    return rows


def added(pairs: list[tuple[Row, Row]], figure: str) -> float:
    """The median of the differences within repeats: slow spells of the machine cancel out."""
    return float(statistics.median(recorded[figure] - bare[figure] for bare, recorded in pairs))


def slope(rows: Rows, figure: str) -> float | None:
    """What one collective more in a step adds: the least squares line through what is added at each number of them."""
    points = [(int(name.partition("-")[2]), added(pairs, figure)) for name, pairs in rows.items() if "explicit" in name]
    if len({number for number, _ in points}) < 2:
        return None
    return float(statistics.linear_regression(*zip(*points, strict=True)).slope)


def show(rows: Rows, args: argparse.Namespace) -> None:
    print(f"{args.steps} steps x {args.repeats} repeats, {RANKS} ranks, load {os.getloadavg()[0]:.1f}")
    print(f"  {'':14}" + "".join(f"{name:>14}{'adds':>10}" for name in FIGURES))
    for workload, pairs in rows.items():
        cells = "".join(
            f"{statistics.median(b[f] for b, _ in pairs):>14,.1f}{added(pairs, f):>+10,.1f}" for f in FIGURES
        )
        same = len({row["loss"] for pair in pairs for row in pair}) == 1
        print(f"  {workload:14}{cells}   losses {'bit-identical' if same else 'DIFFER'}")
    price = slope(rows, "cpu_us")
    if price is not None:
        print(f"  per collective, call and wait: {price:+.2f} µs of the main thread's CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="KIND-COLLECTIVES, … (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warm", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single result there")
    args = parser.parse_args()
    rows = measure(args.workloads.split(","), args)
    show(rows, args)
    if args.json:
        about = {"schema": 1, "date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count(), "rows": rows}
        args.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
