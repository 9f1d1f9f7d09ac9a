"""``stepscope send``: deliver later what a node could not deliver to its hub in time."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.agent.drain import drain_leftovers
from stepscope.agent.shipping.client import split_url
from stepscope.agent.shipping.sender import Sender
from stepscope.cli.arguments import run_path
from stepscope.cli.launch.team_hub import team_variables
from stepscope.cli.output import progress_bar
from stepscope.errors import HubError, RunError, UsageError
from stepscope.records.text import bytes_text, count_text, say
from stepscope.store.documents import TEAM_HUB, Destination, note_delivered, read_meta
from stepscope.store.liveness import clock_ahead_s, processes_alive, remove_session, sealing_barred, session_of
from stepscope.store.locks import writing_barred
from stepscope.store.paths import INBOX
from stepscope.wire.handshake import load_keys, team_environ

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "send the remaining data of a node to the run's hub"
EPILOG = """\
examples:
  stepscope send runs/NAME.node1                          to the run's own hub
  stepscope send runs/NAME.node1 --to https://HOST:29555  to `stepscope serve` on another machine

A node that cannot reach its hub keeps its data in a folder next to the runs.  This command sends what the hub does
not have, then removes the folder; a run that the team's hub has a copy of stays.  It can be interrupted and repeated at
any time.
"""
GIVE_UP_S = 30.0
"""Give up when the hub accepts nothing for this long."""
UNKNOWN_END = {"exit_code": None, "status": "unknown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", type=Path, help="folder of the node, such as runs/NAME.node1")
    parser.add_argument("--to", metavar="URL", help="send to this hub instead of the run's own")


def run(args: argparse.Namespace) -> int:
    run_dir = run_path(args.path)
    meta = read_meta(run_dir)
    to = _destination(run_dir, meta, args.to)
    split_url(to.url)
    team = Destination.from_meta(meta, TEAM_HUB) is not None and Destination.from_meta(meta) is None
    keys = _team_keys if team else load_keys
    keys()
    if (run_dir / INBOX).exists():
        raise UsageError(f"{run_dir} is the run of all nodes, not the folder of one node")
    if meta.get("sealed") is True:
        raise RunError(f"{run_dir} was sealed here and can no longer be sent; read it with `stepscope report`")
    if processes_alive(run_dir) and not clock_ahead_s(run_dir, meta):
        raise UsageError(f"{run_dir} is still being written; its agent is sending it")
    with progress_bar("checking whether it is still being written", None) as progress:
        barred = writing_barred(run_dir) or sealing_barred(run_dir, meta, progress=progress)
    if barred:
        raise RunError(f"{run_dir} cannot be sent from here: {barred}")
    _drain(run_dir, meta)
    sender = Sender(run_dir, to, keys, traces=not team)
    try:
        _deliver(sender, meta.get("end") or UNKNOWN_END)
    finally:
        sender.close()
    done = f"sent {bytes_text(sender.counts.sent_bytes)} in {count_text(sender.counts.frames, 'frame')} to {to.url}"
    if unsent := sender.unsent():
        say(f"{done}; {unsent}, so {run_dir} is kept")
        return RunError.exit_code
    if team:
        from stepscope.cli.finalize import finalize_run

        note_delivered(run_dir)
        finalize_run(run_dir)
    if Destination.from_meta(meta) is None:
        say(done)
        return 0
    try:
        shutil.rmtree(run_dir)
    except OSError as error:
        raise RunError(f"{done}, but {run_dir} cannot be removed: {error.strerror}") from error
    say(f"{done}; {run_dir} was removed")
    return 0


def _team_keys() -> tuple[bytes, ...]:
    return load_keys(team_environ({**os.environ, **team_variables(os.environ)}))


def _destination(run_dir: Path, meta: Mapping[str, Any], url: str | None) -> Destination:
    to = Destination.from_meta(meta) or Destination.from_meta(meta, TEAM_HUB)
    if to is None and url is None:
        raise UsageError(f"{run_dir} does not name its hub; specify one with --to URL")
    if to is None:
        return Destination(url=str(url), run=str(meta["name"]), node=0, nnodes=1)
    return to if url is None else replace(to, url=url)


def _drain(run_dir: Path, meta: Mapping[str, Any]) -> None:
    """Drain what an agent that died left in memory."""
    session = session_of(run_dir, meta) or run_dir / "rings"
    try:
        drain_leftovers(run_dir, session)
    except OSError as error:
        raise RunError(f"cannot write to {run_dir}: {error.strerror}") from error
    remove_session(session)


def _deliver(sender: Sender, end: Mapping[str, Any]) -> None:
    """Send everything; HubError if the hub is unreachable or accepts nothing, UsageError if it needs nothing."""
    turn = sender.turn(bye=end)
    if sender.trouble:
        raise HubError(sender.trouble)
    if sender.local:
        raise UsageError("this is the run itself, which its hub reads in place; there is nothing to send")
    total, frames, taken_s = sender.left_bytes(), 0, time.monotonic()
    with progress_bar("sending", bytes_text) as progress:
        while not turn.delivered:
            turn = sender.turn(bye=end)
            if sender.counts.frames > frames:
                frames, taken_s = sender.counts.frames, time.monotonic()
            elif time.monotonic() - taken_s > GIVE_UP_S:
                raise HubError(sender.trouble)
            progress(max(total - sender.left_bytes(), 0), total)
            if not turn.delivered:
                time.sleep(turn.wait_s)
