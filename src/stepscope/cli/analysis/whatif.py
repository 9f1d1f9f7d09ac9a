"""``stepscope whatif``: how fast a job would be without its stragglers, and what causes them."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from stepscope.cli.output import progress_bar

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "replay an operation-level trace without its stragglers"
EPILOG = """\
The trace is a Parquet table with a row per operation: step, rank, dp_rank, stage, optype, seq_id, start_ts, duration;
the meta file has one `name: value` per line: dp_size, pp_size … (docs/whatif.md describes both).

examples:
  stepscope whatif trace.parquet --meta meta.yaml           what slows down the job, and by how much
  stepscope whatif trace.parquet --meta meta.yaml --json    the result as JSON
"""
WIDEST = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", type=Path, help="Parquet file with the operations")
    parser.add_argument("--meta", metavar="META", type=Path, required=True, help="YAML file with the shape of the job")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    # numpy and DuckDB are loaded only now: `stepscope --help` must not wait for them.
    from stepscope.reports.whatif import render_whatif, whatif_document
    from stepscope.whatif.operations import read_meta, read_trace
    from stepscope.whatif.replay import analyze

    shape = read_meta(args.meta)
    with progress_bar("replaying") as progress:
        found = analyze(read_trace(args.trace, shape), progress=progress)
    if args.json:
        print(json.dumps(whatif_document(found), indent=2, allow_nan=False))
    else:
        width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
        print(render_whatif(found, width=width), end="")
    return 0
