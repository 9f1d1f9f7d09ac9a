"""``stepscope demo``: four ranks on this machine, one of them slow, and the verdict that names it."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from stepscope.cli.arguments import amount, count
from stepscope.cli.launch.record import JobOptions, record
from stepscope.errors import UsageError

__all__ = ["HELP", "add_arguments", "run"]

HELP = "run a demo: four gloo ranks on this machine, one of them slow"

SCRIPTS = Path(__file__).parents[2] / "demo"
SCRIPT, LAUNCHER = SCRIPTS / "slow_rank.py", SCRIPTS / "ranks.py"
"""A custom launcher that loads torch once. Under torchrun five processes load it, which takes twice as long."""
RANKS = 4
SLOW_RANK = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument("--steps", type=count("steps"), metavar="N", default=100, help="training steps (default: 100)")
    parser.add_argument(
        "--phase",
        choices=("input", "forward", "backward", "optimizer"),
        default="forward",
        help=f"phase in which rank {SLOW_RANK} is slow (default: forward)",
    )
    parser.add_argument(
        "--slow-ms",
        type=amount("milliseconds"),
        metavar="MS",
        default=30.0,
        help="delay in ms per step (default: 30; 0 = none)",
    )
    parser.add_argument("--live", action="store_true", help="show the run live in the terminal")


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"the demo needs torch, which is not installed for {sys.executable}")
    print(
        f"{RANKS} ranks train a small model on this machine for {args.steps} steps; "
        f"rank {SLOW_RANK} is slowed by {args.slow_ms:g} ms per step in {args.phase}.\n"
        "The script does not use Stepscope. All ranks wait for the slowest one, so their steps take the same time.\n"
        "Starting them takes a few seconds.\n",
        file=sys.stderr,
    )
    command = [
        sys.executable, str(LAUNCHER), str(RANKS), str(SCRIPT), "--steps", str(args.steps),
        "--slow-rank", str(SLOW_RANK), "--slow-phase", args.phase, "--slow-ms", str(args.slow_ms),
    ]  # fmt: skip
    return record(JobOptions(command=command, root=args.dir, name="demo", live=args.live))
