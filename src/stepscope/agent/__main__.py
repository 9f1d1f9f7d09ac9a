"""``python -m stepscope.agent --run-dir RUN --session FOLDER``: started by the launcher, with a pipe as its input."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from stepscope.agent.loop import Agent
from stepscope.errors import StepscopeError


def main() -> int:
    parser = argparse.ArgumentParser(prog="stepscope.agent", description="Drain rings and sample this node.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--session", type=Path, required=True)
    parser.add_argument("--interval", type=float, default=0.2, help="seconds between looks at the rings")
    args = parser.parse_args()
    try:
        agent = Agent(args.run_dir, args.session, interval_s=args.interval)
    except StepscopeError as error:
        print(f"stepscope: agent: {error}", file=sys.stderr)
        return error.exit_code
    if agent.run() == "orphaned":
        os.execv(sys.executable, [sys.executable, "-m", "stepscope", "report", "--quiet", str(args.run_dir)])
    return 0


sys.exit(main())
