"""``python -m stepscope.agent --run-dir RUN --session FOLDER``; the launcher starts it with a pipe as its stdin."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stepscope.agent.hangs.on_hang import HangPolicy
from stepscope.agent.loop import tend
from stepscope.errors import StepscopeError
from stepscope.records.text import say
from stepscope.store.documents import Destination


def main() -> int:
    parser = argparse.ArgumentParser(prog="stepscope.agent", description="Drain rings and sample this node.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--session", type=Path, required=True)
    parser.add_argument("--interval", type=float, default=0.2, help="seconds between reads of the rings")
    parser.add_argument(
        "--hang-after",
        type=float,
        default=HangPolicy.after_s,
        help="seconds without progress before a hang is reported; 0: off",
    )
    parser.add_argument("--on-hang", default=HangPolicy.action, help="report, abort, or a command")
    parser.add_argument(
        "--hub", metavar="URL", help="send all data to this hub; the key is STEPSCOPE_KEY or the user's key file"
    )
    parser.add_argument("--node", type=int, default=0, help="number of this node at the hub")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--run-name", default="", help="name of the run at the hub")
    parser.add_argument("--team-hub", metavar="URL", help="send a copy of a run on one node to the team's hub")
    parser.add_argument("--team-run", default="", help="name of the run there")
    args = parser.parse_args()
    policy = HangPolicy(after_s=args.hang_after, action=args.on_hang)
    name = args.run_name or args.run_dir.name
    hub = Destination(url=args.hub, run=name, node=args.node, nnodes=args.nnodes) if args.hub else None
    team = Destination(url=args.team_hub, run=args.team_run, node=1, nnodes=2) if args.team_hub else None
    try:
        return tend(args.run_dir, args.session, interval_s=args.interval, on_hang=policy, hub=hub, team=team)
    except StepscopeError as error:
        say(f"agent: {error}")
        return error.exit_code


sys.exit(main())
