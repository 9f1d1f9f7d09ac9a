"""``stepscope tag``: give a run a name, tags and a note, whether it is active or finished."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stepscope.cli.arguments import locate_run
from stepscope.records.text import printable
from stepscope.store.catalog import Labels, change_labels, read_labels

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "give a run tags, a note or another name"
EPILOG = """\
examples:
  stepscope tag night                              show the name, the tags and the note
  stepscope tag night baseline bf16                add two tags
  stepscope tag night --remove bf16                remove one
  stepscope tag night --name "before the new loader" --note "2 workers per rank"
  stepscope tag night --note ""                    remove the note

The folder of the run keeps its name, which all commands use.  `stepscope list --tag baseline` lists the runs with a
tag; `stepscope run --tag baseline …` sets it when a run begins.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory, or the name of one in runs/")
    parser.add_argument("tags", metavar="TAG", nargs="*", help="tags to add: words without spaces and commas")
    parser.add_argument("--remove", metavar="TAG", action="append", default=[], help="remove a tag; may be repeated")
    parser.add_argument("--name", metavar="TEXT", help="show this name in lists; empty: the folder's name again")
    parser.add_argument("--note", metavar="TEXT", help="set the note; empty: remove it")
    parser.add_argument("--json", action="store_true", help="print the labels as JSON")


def more_words(args: argparse.Namespace, words: list[str]) -> None:
    """Tags may also follow the options."""
    args.tags += words


def run(args: argparse.Namespace) -> int:
    run_dir = locate_run(args.run_dir)
    if args.tags or args.remove or args.name is not None or args.note is not None:
        labels = change_labels(run_dir, name=args.name, note=args.note, add=args.tags, remove=args.remove)
    else:
        labels = read_labels(run_dir)
    print(json.dumps(labels.to_dict(), indent=2) if args.json else _text(run_dir, labels))
    return 0


def _text(run_dir: Path, labels: Labels) -> str:
    rows = (("run", str(run_dir)), ("name", labels.name), ("tags", " ".join(labels.tags)), ("note", labels.note))
    lines = [f"{head}  {printable(text, keep=chr(10))}" for head, text in rows if text]
    return "\n".join(lines if len(lines) > 1 else [*lines, "no name, tags or note yet"])
