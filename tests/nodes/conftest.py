"""Several hosts, as network namespaces on one machine, that run one job together."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from namespaces import Host, Network, why_not

PATIENCE_S = 120.0
NAME = "job"


class Node:
    """One host's ``stepscope run``: the same line everywhere, but for the number of the node."""

    def __init__(self, host: Host, rank: int, folder: Path) -> None:
        self.host = host
        self.rank = rank
        self.folder = folder
        """Its working directory: no host sees another's."""
        self.process: subprocess.Popen[str] | None = None

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / (NAME if self.rank == 0 else f"{NAME}.node{self.rank}")

    def pids(self, module: str) -> list[int]:
        """Of the processes on this host that run a module of ours."""
        found = []
        for pid in self.host.pids():
            try:
                words = psutil.Process(pid).cmdline()
            except psutil.Error:
                continue
            if module in words:
                found.append(pid)
        return found

    def kill(self, module: str) -> int:
        (pid, *_) = self.pids(module)
        os.kill(pid, signal.SIGKILL)
        return pid

    def steps(self) -> int:
        """How many the ranks of this host have printed."""
        log = self.folder / "out.txt"
        return len(re.findall(r" step \d+ loss ", log.read_text())) if log.exists() else 0

    def losses(self) -> list[str]:
        return sorted(re.findall(r"rank \d+ step \d+ loss \S+", (self.folder / "out.txt").read_text()))

    def stderr_text(self) -> str:
        return (self.folder / "err.txt").read_text()


class Cluster:
    """All nodes of one job."""

    def __init__(self, hosts: tuple[Host, ...], folder: Path, script: Path) -> None:
        self._script = script
        self._home = folder / "home"
        """The key that the hosts share."""
        self._home.mkdir()
        self.nodes = [Node(host, rank, folder / host.name) for rank, host in enumerate(hosts)]
        for node in self.nodes:
            node.folder.mkdir()

    def start(
        self,
        *job: str,
        ranks: int = 1,
        options: tuple[str, ...] = (),
        environment: Mapping[int, dict[str, str]] | None = None,
    ) -> None:
        """``environment``: by node, more of it."""
        for node in self.nodes:
            master = self.nodes[0].host.address
            line = [
                "--nnodes",
                str(len(self.nodes)),
                "--node-rank",
                str(node.rank),
                "--master-addr",
                master,
                "--name",
                NAME,
            ]
            command = [sys.executable, "-m", "stepscope", "run", *line, *options, "--nproc-per-node", str(ranks)]
            extra = (environment or {}).get(node.rank, {})
            ours = {name: value for name, value in os.environ.items() if name != "STEPSCOPE_KEY"}
            # No name server is there to answer torch, which asks one for every host's name, again and again.
            resolver = {"RES_OPTIONS": "timeout:1 attempts:1"}
            ours |= {"HOME": str(self._home), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **resolver, **extra}
            with (node.folder / "out.txt").open("w") as out, (node.folder / "err.txt").open("w") as err:
                node.process = node.host.start(
                    [*command, str(self._script), *job], cwd=node.folder, env=ours, stdout=out, stderr=err, text=True
                )

    def until(self, what: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, self.stderr_text()
            assert any(node.process is not None and node.process.poll() is None for node in self.nodes), (
                self.stderr_text()
            )
            time.sleep(0.05)

    def wait(self) -> list[int]:
        """The exit codes."""
        codes = []
        for node in self.nodes:
            assert node.process is not None
            codes.append(node.process.wait(PATIENCE_S))
        return codes

    def stderr_text(self) -> str:
        return "\n".join(f"--- {node.host.name}\n{node.stderr_text()}" for node in self.nodes)

    @property
    def run_dir(self) -> Path:
        return self.nodes[0].run_dir

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]
        return [event for event in events if event["event"] in kinds]


@pytest.fixture
def cluster(tmp_path: Path, job: Path) -> Iterator[Callable[..., Cluster]]:
    """``cluster(3)``: so many hosts, each with a folder of its own; they train by ``job``, or another ``script``."""
    if (why := why_not()) is not None:
        pytest.skip(why)
    networks: list[Network] = []

    def make(hosts: int, script: Path = job) -> Cluster:
        network = Network(hosts)
        networks.append(network)
        return Cluster(network.__enter__(), tmp_path, script)

    yield make
    for network in networks:
        network.close()
