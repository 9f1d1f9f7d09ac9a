"""``stepscope incident``: the incidents of a run, or everything about one of them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from stepscope.cli.arguments import RUN_HELP, count, locate_run
from stepscope.errors import RunUnwritable
from stepscope.records.files import write_private
from stepscope.records.text import printable, say

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "show the incidents of a run, or everything recorded around one of them"
EPILOG = """\
examples:
  stepscope incident                       the incidents of the newest run in runs/
  stepscope incident NAME                  the incidents of a run, one line each
  stepscope incident NAME 2                everything about the second: onset, impact, logs, samples, stacks, commits
  stepscope incident NAME 2 --markdown     the same for GitHub, Slack or mail
  stepscope incident NAME 2 --json         the same as data (docs/incidents.md)
  stepscope incident NAME 2 --markdown -o incident.md
  stepscope incident NAME 2 --markdown --redact     to share: without hosts, users, paths and values

Every statement names its source: a file of the run, a rule, or a command. Times are UTC.
"""
WIDEST = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", type=Path, nargs="?", help=RUN_HELP)
    parser.add_argument(
        "number", metavar="N", type=count("as the number"), nargs="?", help="number of the incident (default: list all)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON document")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to a file that only you can read")
    parser.add_argument(
        "--redact",
        action="store_true",
        help="replace host names, users, paths, addresses and command-line values, also in log lines",
    )
    parser.add_argument("--no-color", action="store_true", help="no colors, even on a terminal")


def run(args: argparse.Namespace) -> int:
    # numpy and the store's engine are loaded only now: `stepscope --help` must not wait for them.
    from stepscope.incidents.document import incident_document, incidents_document
    from stepscope.incidents.text import incident_markdown, incident_text, incidents_markdown, incidents_text

    path, number = args.path, args.number
    if number is None and path is not None and str(path).isdigit() and not path.exists():
        path, number = None, int(str(path))  # `stepscope incident 2`: of the newest run
    run_dir = locate_run(path)
    many = number is None
    document = (
        incidents_document(run_dir, redact=args.redact)
        if many
        else incident_document(run_dir, number, redact=args.redact)
    )
    if args.json:
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    elif args.markdown:
        text = incidents_markdown(document) if many else incident_markdown(document)
    else:
        color = args.output is None and sys.stdout.isatty() and not args.no_color and not os.environ.get("NO_COLOR")
        width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
        text = (incidents_text if many else incident_text)(document, width=width, color=color)
    if args.redact:
        say("redacted except for exception messages, source lines and names that you chose; read it before you send it")
    if args.output is None:
        print(text, end="")
        return 0
    try:
        write_private(args.output, text)
    except OSError as error:
        raise RunUnwritable(f"cannot write {printable(str(args.output))}: {error.strerror}") from error
    say(f"{args.output}: {len(text.encode()) / 1e3:.0f} kB")
    return 0
