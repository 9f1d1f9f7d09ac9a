"""The highest step rate that is recorded without a dropped step, with a real agent draining.

Runs ``paced.py`` under ``stepscope run`` at each rate and counts what lies in the run directory afterwards.

python bench/throughput.py --rates 1000,5000,10000 --seconds 10
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"


def run_at(kind: str, rate: float, seconds: float) -> dict[str, Any]:
    """One run: steps made, steps stored, steps lost."""
    work = Path(tempfile.mkdtemp(prefix="stepscope-bench-"))
    out = work / "result.json"
    script = [HERE / "paced.py", "--kind", kind, "--rate", rate, "--seconds", seconds, "--out", out]
    command = [sys.executable, "-m", "stepscope", "run", "--dir", work / "runs", *script]
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [str(part) for part in command], env=environment, cwd=work, capture_output=True, text=True, check=False
        )
        if done.returncode or not out.exists():
            raise SystemExit(f"the run failed ({done.returncode})\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        made = json.loads(out.read_text())
        (run_dir,) = (path.parent for path in work.rglob("run.json"))
        return {"kind": kind, "asked": rate, **made, **stored_in(run_dir)}
    finally:
        shutil.rmtree(work)


def stored_in(run_dir: Path) -> dict[str, int]:
    """What the run directory holds, read as any report would."""
    sys.path.insert(0, str(SOURCE))
    from stepscope.store.load import open_run

    ranks = open_run(run_dir).ranks
    return {
        "stored": sum(len(series.steps) for series in ranks),
        "lost": sum(series.lost for series in ranks),
        "torn": sum(series.torn for series in ranks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1000,2000,5000,10000", help="steps per second (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    runs = [("ring", float(rate)) for rate in args.rates.split(",")] + [("torch", 0.0)]
    results = []
    print(f"\n  {'kind':8}{'asked/s':>12}{'made/s':>12}{'steps':>12}{'stored':>12}{'lost':>8}{'torn':>8}")
    for kind, rate in runs:
        result = run_at(kind, rate, args.seconds)
        results.append(result)
        asked = f"{rate:,.0f}" if rate else "all it can"
        counts = f"{result['steps']:>12,}{result['stored']:>12,}{result['lost']:>8,}{result['torn']:>8,}"
        print(f"  {kind:8}{asked:>12}{result['rate']:>12,.0f}{counts}", flush=True)
    whole = [result["rate"] for result in results if result["stored"] == result["steps"]]
    print(f"  highest rate without a dropped step: {max(whole, default=0):,.0f} a second")
    if args.json:
        args.json.write_text(json.dumps({"schema": 1, "seconds": args.seconds, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
