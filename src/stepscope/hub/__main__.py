"""``python -m stepscope.hub --run-dir RUN --fd N``: the hub process, started by the launcher with a pipe as stdin."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.hub.launcher import HubSettings
from stepscope.hub.process import serve_run
from stepscope.records.text import say


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="stepscope.hub", description="Judge a run; serve it; receive data from other nodes."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the listening socket")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--name", default="", help="requested name of the run")
    parser.add_argument("--tls-cert", type=Path)
    parser.add_argument("--tls-key", type=Path)
    args = parser.parse_args()
    settings = HubSettings(
        run_dir=args.run_dir,
        fd=args.fd,
        nnodes=args.nnodes,
        name=args.name,
        certificate=args.tls_cert,
        key=args.tls_key,
    )
    try:
        return serve_run(settings)
    except StepscopeError as error:
        say(f"hub: {error}")
        return error.exit_code


sys.exit(main())
