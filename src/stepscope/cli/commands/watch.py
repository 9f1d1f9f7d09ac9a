"""``stepscope watch``: follow a run on the terminal, on this machine or through a hub elsewhere."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from stepscope.cli.arguments import RUN_HELP, locate_run
from stepscope.cli.launch.live_view import why_no_screen
from stepscope.errors import HubError, UsageError
from stepscope.records.text import say

if TYPE_CHECKING:
    from stepscope.terminal.feed import Feed, RunAddress

__all__ = ["LocalRun"]

HELP = "watch a run in the terminal, live or afterwards"
EPILOG = """\
examples:
  stepscope watch                            the newest active run in runs/, else the newest
  stepscope watch runs/NAME                  this run
  stepscope watch https://node0:29555        the run of a remote hub, with --token-file or STEPSCOPE_TOKEN
  stepscope watch http://host:7070 NAME      one of the runs of `stepscope serve`
  stepscope watch --plain | tee log          plain lines; the default without a terminal

Keys: arrows and Enter select a rank, s sorts, f freezes, l shows the output, ? lists all keys, q quits.
"""
TRIES = 3
"""Attempts to reach the hub that a run names, before we read its files ourselves."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "stepscope watch [options] [RUN | URL [RUN]]"
    parser.add_argument("where", metavar="RUN|URL", nargs="?", help=f"{RUN_HELP}, or the address of a hub")
    parser.add_argument("run_id", metavar="RUN", nargs="?", help="run to show (default: the newest on the hub)")
    parser.add_argument(
        "--token-file", metavar="FILE", type=Path, help="file with the reader's token, for a remote hub"
    )
    parser.add_argument(
        "--fingerprint",
        metavar="SHA256",
        default="",
        help="fingerprint of that hub's certificate, if it is self-signed",
    )
    parser.add_argument("--plain", action="store_true", help="print plain lines (the default without a terminal)")


def run(args: argparse.Namespace) -> int:
    feed = _elsewhere(args) if _is_url(args.where) else _here(args)
    plain = args.plain
    if not plain and (why := _no_view()):
        say(f"{why}; using plain lines")
        plain = True
    feed.start()
    try:
        return _in_lines(feed) if plain else _on_screen(feed)
    finally:
        feed.close()


def _is_url(text: str | None) -> bool:
    return text is not None and text.startswith(("http://", "https://"))


def _elsewhere(args: argparse.Namespace) -> Feed:
    """Feed from a hub's URL; it may be the URL of the page, but without the token."""
    from stepscope.terminal.feed import Feed, RunAddress, fingerprint_from, token_from

    url, _, fragment = args.where.partition("#")
    path, _, parameters = fragment.removeprefix("/").partition("?")
    if "token=" in parameters:
        raise UsageError("that link contains the token, and other users can see command lines; use --token-file")
    named = unquote(path.removeprefix("run/")) if path.startswith("run/") else ""
    place = RunAddress(
        url=url,
        token=token_from(args.token_file),
        run=args.run_id or named,
        fingerprint=fingerprint_from(args.fingerprint),
    )
    return Feed(lambda: place)


def _here(args: argparse.Namespace) -> Feed:
    from stepscope.terminal.feed import Feed

    if args.run_id is not None:
        raise UsageError(f"{args.where} is not the URL of a hub; only a URL can be followed by a run ({args.run_id})")
    if args.token_file is not None or args.fingerprint:
        raise UsageError("--token-file and --fingerprint are for a remote hub; specify its URL")
    local = LocalRun(locate_run(None if args.where is None else Path(args.where), prefer_live=True))
    return Feed(local.where, end=local.close)


class LocalRun:
    """Address of a run on this machine: its own hub while it has one, else a private hub."""

    def __init__(self, run_dir: Path) -> None:
        from stepscope.store.documents import read_meta
        from stepscope.terminal.feed import PrivateHub

        read_meta(run_dir)  # raises NotARun before anything is started
        self._run_dir = run_dir
        self._private = PrivateHub(run_dir)
        self._tries = 0

    def where(self) -> RunAddress:
        from stepscope.store.catalog import is_active
        from stepscope.store.documents import read_hub_file
        from stepscope.terminal.feed import address_from_hub_file

        about = read_hub_file(self._run_dir)
        if about is not None and self._tries < TRIES and is_active(self._run_dir):
            self._tries += 1
            return address_from_hub_file(about, self._run_dir.resolve().name)
        if about is None and self._tries and is_active(self._run_dir):
            raise HubError("the job has ended; its summary is being written")
        return self._private.place()

    def close(self) -> None:
        self._private.close()


def _no_view() -> str:
    """Why there can be no view; empty if there can."""
    if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):
        return "not a terminal"
    return why_no_screen()


def _in_lines(feed: Feed) -> int:
    from stepscope.terminal.plain import watch_plain

    watch_plain(feed, lambda line: print(line, flush=True))
    return 0


def _on_screen(feed: Feed) -> int:
    from stepscope.terminal.app import WatchApp

    app = WatchApp(feed)
    app.run(mouse=False)
    return app.return_code or 0
