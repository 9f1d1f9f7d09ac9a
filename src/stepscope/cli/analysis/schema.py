"""``stepscope schema``: the JSON schemas of what Stepscope writes and prints."""

from __future__ import annotations

import argparse
import json

from stepscope.cli.output import format_table
from stepscope.errors import UsageError
from stepscope.records.text import did_you_mean

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "print the JSON schema of a document, for tools that read it"
EPILOG = """\
examples:
  stepscope schema                         the names of all schemas
  stepscope schema summary > summary.json  the schema of summary.json (draft 2020-12)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="the document; without it, all names are listed")


def run(args: argparse.Namespace) -> int:
    from stepscope.schemas import SCHEMAS, json_schema

    if args.name is None:
        print(format_table(("name", "document"), [(name, about.title) for name, about in SCHEMAS.items()]))
        return 0
    if args.name not in SCHEMAS:
        raise UsageError(f"no schema named {args.name}{did_you_mean(args.name, SCHEMAS)}")
    print(json.dumps(json_schema(args.name), indent=2))
    return 0
