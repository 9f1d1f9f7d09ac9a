"""``python -m stepscope.notebook``: the server behind ``stepscope.live()``, which starts it; not meant for users.

It prints one line, with its address and the token, to standard output, and serves until the training process is gone.
Unlike that of any other hub, its page may be shown in a frame: in a notebook on this machine or below the same address.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path

import uvloop

from stepscope.cli.launch.helpers import listen, url_of
from stepscope.errors import StepscopeError
from stepscope.hub.api.auth import Readers
from stepscope.hub.app import make_app
from stepscope.hub.runs import Runs
from stepscope.hub.server import Server
from stepscope.records.run_clock import process_start_ticks
from stepscope.store.documents import HubFile, read_hub_file, remove_hub_file, write_hub_file
from stepscope.store.paths import META

LOOK_S = 1.0
BEGIN_S = 20.0
"""How long the agent may take to make the run's folder."""
LINGER_S = 3.0
"""Time for viewers to receive the end of the run."""
LOOPBACK = "127.0.0.1"


def main() -> int:
    parser = argparse.ArgumentParser(prog="stepscope.notebook", description="Serve a notebook's run to the notebook.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--owner", type=int, required=True, help="PID of the training process")
    parser.add_argument("--owner-ticks", type=int, required=True, help="start time of that process, in clock ticks")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _await_run(args.run_dir)
        with listen(LOOPBACK, args.port) as listening:
            _serve(args.run_dir, listening, args.owner, args.owner_ticks)
    except (StepscopeError, OSError) as error:
        _say({"error": str(error)})
        return 1
    return 0


def _await_run(run_dir: Path) -> None:
    deadline = time.monotonic() + BEGIN_S
    while not (run_dir / META).is_file() and time.monotonic() < deadline:
        time.sleep(0.05)


def _serve(run_dir: Path, listening: socket.socket, owner: int, ticks: int) -> None:
    port, token = listening.getsockname()[1], secrets.token_urlsafe(32)
    about = HubFile(url=url_of(LOOPBACK, port, tls=False), token=token)
    ours = read_hub_file(run_dir) is None
    if ours:
        write_hub_file(run_dir, about)  # for `stepscope watch` and other tools, as in any run
    _say({"url": about.url, "port": port, "token": token, "pid": os.getpid()})
    try:
        uvloop.run(_until_gone(Runs.of_folder(run_dir), token, listening, owner, ticks))
    finally:
        if ours and read_hub_file(run_dir) == about:
            remove_hub_file(run_dir)


async def _until_gone(runs: Runs, token: str, listening: socket.socket, owner: int, ticks: int) -> None:
    server = Server(make_app(runs, Readers(token, port=listening.getsockname()[1]), framed=True), listening)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
    serving = asyncio.create_task(server.run())
    while not serving.done() and process_start_ticks(owner) == ticks:
        await asyncio.wait((serving,), timeout=LOOK_S)
    if server.connections:
        await asyncio.wait((serving,), timeout=LINGER_S)
    server.stop()
    await serving


def _say(word: dict[str, object]) -> None:
    """Print one message, then redirect standard output to /dev/null: nothing reads it any more."""
    os.write(1, json.dumps(word).encode() + b"\n")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.close(quiet)


if __name__ == "__main__":
    sys.exit(main())
