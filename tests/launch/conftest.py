"""Two nodes on one machine: two launchers that see nothing of one another but the loopback."""

from __future__ import annotations

import json
import random
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

PATIENCE_S = 60.0
KEY = "a key of the tests alone"

TOY = """
import itertools, os, sys, time
import stepscope

for step in itertools.count():
    with stepscope.step(), stepscope.phase("work"):
        time.sleep(0.02)
    print("rank", os.environ.get("RANK", "0"), "step", step, flush=True)
    if os.path.exists(sys.argv[1]):
        break
"""
"""Trains until a file is there."""
OVER = "over"


class Nodes:
    """The launchers of one job of two nodes, by number; its ranks need no torch, and no one another."""

    def __init__(self, commands: Any, folder: Path) -> None:
        self._commands = commands
        self.folder = folder
        self.port = free_port()
        self.toy = folder / "toy.py"
        self.toy.write_text(TOY)
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self._printed: dict[int, str] = {}

    def start(self, node: int, *, options: tuple[str, ...] = (), over: str = OVER) -> None:
        """Node 0 records to ``0/two``, node 1 to ``1/two.node1``; its job lasts until ``over``."""
        line = ("--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--name", "two")
        where = ("--hub-port", str(self.port), "--dir", str(node))
        environment = {"STEPSCOPE_KEY": KEY, "RANK": str(node), "WORLD_SIZE": "2"}
        words = ("run", *line, *where, *options, "python3", str(self.toy), over)
        self.processes[node] = self._commands.start(*words, env=environment)
        self._printed[node] = ""

    def wait_for(self, node: int, text: str) -> None:
        """Until that node's job has printed it."""
        stream = self.processes[node].stdout
        assert stream is not None
        while text not in self._printed[node]:
            line = stream.readline()
            assert line, self.processes[node].stderr
            self._printed[node] += line

    def until(self, what: Callable[[], Any]) -> Any:
        return until(what, timeout_s=PATIENCE_S, why=self.errors_printed)

    def errors_printed(self) -> list[str]:
        """By those that are over."""
        over = [process for process in self.processes.values() if process.poll() is not None]
        return [one.stderr.read() for one in over if one.stderr is not None]

    def pids(self, module: str, run: str) -> list[int]:
        """Of the processes of ours that run a module for that run."""
        return [process.pid for process in self._commands.running(module, run)]

    def heard_of(self, node: int) -> bool:
        """Whether the hub has said so."""
        path = self.folder / "0" / "two" / "nodes.json"
        return path.exists() and any(
            row["node"] == node and row["rows"] for row in json.loads(path.read_text())["nodes"]
        )

    def over(self) -> None:
        """The jobs end."""
        (self.folder / OVER).touch()

    def finish(self, node: int) -> Any:
        return self._commands.finish(self.processes[node])

    def printed(self, node: int, done: Any) -> int:
        """How many steps its rank has printed, before and after that we looked."""
        return (self._printed[node] + done.stdout).count(" step ")

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.folder / "0" / "two" / "summary.json").read_text())
        return summary


def free_port() -> int:
    """Of those that the system gives to nobody by itself: one of these would be gone again by the time it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


@pytest.fixture
def port() -> Callable[[], int]:
    """A free one, each time."""
    return free_port


@pytest.fixture
def nodes(commands: Any, tmp_path: Path) -> Nodes:
    return Nodes(commands, tmp_path)
