"""``stepscope key``: change the key that the nodes of your jobs share, while the jobs run."""

from __future__ import annotations

import argparse
import os

from stepscope.records.text import say
from stepscope.wire.handshake import retire_key, rotate_key

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "change the key that hub and agents share, without stopping a job"
EPILOG = """\
examples:
  stepscope key rotate     create a new key; the old one still works
  stepscope key retire     stop accepting the old key

The key is in ~/.config/stepscope/key.  Running hubs and agents reload it.  If your nodes do not share your home
folder, copy the file after each of the two commands: first to the node with the hub, then to the others.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("rotate", "retire"))


def run(args: argparse.Namespace) -> int:
    if args.action == "rotate":
        path = rotate_key(os.environ)
        say(f"{path} has a new key, and the old one still works; copy the file to nodes that do not share this folder")
        say("when all nodes have it, retire the old key with `stepscope key retire`")
    else:
        path = retire_key(os.environ)
        say(f"{path} now has only the new key; copy the file to nodes that do not share this folder")
    return 0
