"""What ``stepscope run`` computes before the script's first line: CPU time, which other load hardly changes.

python bench/startup.py
python bench/startup.py --other OTHER_CHECKOUT --repeats 15     # in turns with another version

The launcher counts until it starts the script, the rank until its first line, less the same in a bare process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
LAUNCHER = """
import os, sys, time

def spawn(*_args, **_options):
    print(time.process_time(), flush=True)
    os._exit(0)

os.posix_spawn = spawn
sys.argv = ["stepscope", "run", "--quiet", "--dir", sys.argv[1], "train.py", "--lr", "0.1"]
from stepscope.cli.main import main
main()
"""
FIRST_LINE = "import time; print(time.process_time())"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, metavar="FOLDER", help="a checkout to measure as well")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    sources = {"this": HERE.parent / "src"} | ({} if args.other is None else {"other": args.other.resolve() / "src"})
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    for repeat in range(args.repeats + 1):
        for name in sources if repeat % 2 else reversed(sources):
            row = _measure(sources[name])
            if repeat:  # the first one compiles
                rows[name].append(row)
    for name, measured in rows.items():
        print(f"{name}: {sources[name]}")
        for what, values in (
            ("launcher", [launcher for launcher, _ in measured]),
            ("rank adds", [rank for _, rank in measured]),
            ("together", [sum(row) for row in measured]),
        ):
            print(f"  {what:10}{statistics.median(values):7.0f} ms ({min(values):.0f} to {max(values):.0f})")


def _measure(source: Path) -> tuple[float, float]:
    """Milliseconds of the launcher, and what a rank adds."""
    with (
        tempfile.TemporaryDirectory(prefix="stepscope-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="stepscope-bench-", dir="/dev/shm") as session,
    ):
        work = Path(folder)
        (work / "train.py").write_text(FIRST_LINE)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STEPSCOPE_")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPATH"] = str(source)
        launcher = _cpu_ms(["-c", LAUNCHER, str(work / "runs")], environment, work)
        bare = _cpu_ms(["train.py"], environment, work)
        inside = {
            "PYTHONPATH": str(source / "stepscope" / "recorder" / "inject"),
            "STEPSCOPE_RUN_DIR": str(work),
            "STEPSCOPE_SESSION": session,
        }
        return launcher, _cpu_ms(["train.py"], environment | inside, work) - bare


def _cpu_ms(words: list[str], environment: dict[str, str], work: Path) -> float:
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=work, capture_output=True, text=True, check=True
    )
    return float(done.stdout) * 1e3


if __name__ == "__main__":
    main()
