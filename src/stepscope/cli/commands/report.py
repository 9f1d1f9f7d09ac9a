"""``stepscope report``: the summary of a run, in whatever state it is."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from stepscope.cli.arguments import RUN_HELP, locate_run
from stepscope.errors import RunError, UsageError
from stepscope.records.redaction import REDACTED
from stepscope.records.text import printable, say
from stepscope.store.documents import read_meta
from stepscope.store.paths import META, REDACTED_FILE, REPORT_FILE

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "show the summary of a run: finished, killed or still running"
EPILOG = """\
examples:
  stepscope report                       the newest run in runs/
  stepscope report runs/NAME             the summary, as at the end of `stepscope run`
  stepscope report runs/NAME --json      the document of summary.json (docs/schema.md)
  stepscope report NAME --command        only the job's command, to paste into a shell
  stepscope report --follow              print findings as they appear, while the run is active
  stepscope report runs/NAME --html      write report.html into the run: its page as a single file
  stepscope report NAME --html a.html    the same, in another file; also for an active run
  stepscope report NAME --html --redact  to share: without hosts, users, paths and values (docs/security.md)

A finished run is sealed and its summary is saved in it; if the run is not writable, the summary is only shown.
"""
WIDEST = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", type=Path, nargs="?", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="print summary.json instead of text")
    parser.add_argument(
        "--command",
        dest="command_line",
        action="store_true",
        help="print only the job's command, to paste into a shell",
    )
    parser.add_argument("--follow", action="store_true", help="print findings as they appear, while the run is active")
    parser.add_argument(
        "--html",
        metavar="FILE",
        nargs="?",
        const="",
        help="write the page as a single file (default: report.html in the run)",
    )
    parser.add_argument(
        "--redact",
        action="store_true",
        help="replace host names, users, paths, addresses and command-line values in the output and in the page; "
        f"the page contains no logs and is {REDACTED_FILE} in the run unless --html names a file",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing; still write the files")
    parser.add_argument("--no-color", action="store_true", help="no colors, even on a terminal")


def run(args: argparse.Namespace) -> int:
    # numpy and the store's engine are loaded only now: `stepscope --help` must not wait for them.
    from stepscope.cli.finalize import finalize_run

    color = sys.stdout.isatty() and not args.no_color and not os.environ.get("NO_COLOR")
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    path, html = _paths(args.path, args.html)
    run_dir = locate_run(path)
    if args.command_line:
        if args.redact:
            raise UsageError(
                "--command and --redact cannot be used together: the command may contain what --redact removes"
            )
        return _print_command(run_dir)
    if args.follow:
        from stepscope.cli.finalize import follow_run

        follow_run(run_dir)
    usual = run_dir / (REDACTED_FILE if args.redact else REPORT_FILE)
    page = None if html is None else Path(html) if html else usual
    summary, text = finalize_run(run_dir, color=color, width=width, quiet=args.quiet, html=page, redact=args.redact)
    if args.quiet:
        return 0
    if page is not None:
        say(f"{page}: {page.stat().st_size / 1e6:.1f} MB, opens in any browser")
    if args.redact:
        say("redacted except for exception messages, source lines and names that you chose; read it before you send it")
    print(json.dumps(summary, indent=2, allow_nan=False) if args.json else text, end="" if not args.json else "\n")
    return 0


def _print_command(run_dir: Path) -> int:
    command = read_meta(run_dir).get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    if not words:
        raise RunError(f"{run_dir} does not contain its command")
    if any(REDACTED in word for word in words):
        say(f"values that may be secrets were not recorded; replace {REDACTED}")
    print(printable(shlex.join(words)))
    return 0


def _paths(path: Path | None, html: str | None) -> tuple[Path | None, str | None]:
    """The run and the file; ``--html RUN`` means the run, since no page is named like one."""
    if html and path is None and (Path(html) / META).is_file():
        return Path(html), ""
    if html and Path(html).is_dir():
        raise UsageError(f"--html {html} is a folder; name a file in it")
    return path, html
