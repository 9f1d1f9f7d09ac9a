"""``python -m stepscope.agent --run-dir RUN --session FOLDER``: started by the launcher, with a pipe as its input."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stepscope.agent.process import tend
from stepscope.errors import StepscopeError


def main() -> int:
    parser = argparse.ArgumentParser(prog="stepscope.agent", description="Drain rings and sample this node.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--session", type=Path, required=True)
    parser.add_argument("--interval", type=float, default=0.2, help="seconds between looks at the rings")
    args = parser.parse_args()
    try:
        return tend(args.run_dir, args.session, interval_s=args.interval)
    except StepscopeError as error:
        print(f"stepscope: agent: {error}", file=sys.stderr)
        return error.exit_code


sys.exit(main())
