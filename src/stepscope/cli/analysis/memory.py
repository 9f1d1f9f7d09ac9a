"""``stepscope memory``: which layers hold the memory and take the time, from the sampled steps of a run."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from stepscope.cli.arguments import RUN_HELP, count, locate_run, whole_number
from stepscope.cli.output import progress_bar
from stepscope.errors import RunError, UsageError
from stepscope.records.text import printable

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "show which layers use the memory and time of a run"
EPILOG = """\
examples:
  stepscope memory                         the newest run in runs/: its fullest rank, its last sample
  stepscope memory runs/NAME --rank 3      one rank
  stepscope memory NAME --step 500         the last sample up to step 500
  stepscope memory NAME --depth 6          deeper into the modules
  stepscope memory NAME --sort time        the modules that take longest first
  stepscope memory NAME --json             the document (docs/schema.md)

`stepscope run` samples layers unless it is given `--layers off`.
"""
HINT = "they begin at step 11, unless the run used `--layers off`"
DEPTH = 3
WIDEST = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", type=Path, nargs="?", help=RUN_HELP)
    parser.add_argument("--rank", type=whole_number, metavar="R", help="rank to show (default: the fullest)")
    parser.add_argument(
        "--step", type=whole_number, metavar="N", help="the last sample up to this step (default: the last sample)"
    )
    parser.add_argument(
        "--depth",
        type=count("levels"),
        default=DEPTH,
        metavar="D",
        help=f"levels of modules to show (default: {DEPTH})",
    )
    parser.add_argument(
        "--sort",
        choices=("bytes", "time", "name"),
        default="bytes",
        metavar="ORDER",
        help="order of modules: bytes (default), time, or name",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    from stepscope.reports.layers import choose_sample, layers_document, render_layers
    from stepscope.store.load import load_run

    run_dir = locate_run(args.path)
    with progress_bar("reading the run") as tell:
        records = load_run(run_dir, samples=False, progress=tell).data.layers
    if not records:
        raise RunError(f"{run_dir} has no layer samples; {HINT}")
    sample = choose_sample(records, rank=args.rank, step=args.step)
    if sample is None:
        from stepscope.flight.wording import spans_text

        ranks = sorted({sample.rank for sample in records.of_memory})
        raise UsageError(f"rank {args.rank} has no layer samples; ranks with samples: {spans_text(ranks)}")
    document = layers_document(records, sample)
    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
        print(printable(render_layers(document, width=width, depth=args.depth, sort=args.sort), keep="\n"), end="")
    return 0
