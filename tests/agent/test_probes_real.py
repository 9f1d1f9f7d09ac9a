"""Agents on real hosts (network namespaces): one whose network is bad is named by the rule, once healed it is not."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster
from namespaces import Host, Network, why_not

from stepscope.diagnosis.findings import diagnose
from stepscope.records.finding import Finding

AGENT = """
import json, sys
from stepscope.agent.sampling.probes import Probes
from stepscope.wire.handshake import Peer
number = int(sys.argv[1])
probes = Probes(f"node{number}", number, ask_s=0.01)
print(probes.port, flush=True)
peers = [Peer(**one) for one in json.loads(sys.stdin.readline())]
probes.peers(peers, "7a" * 32)
for line in sys.stdin:
    print(json.dumps(probes.last_samples()), flush=True)
probes.close()
"""
EVERY_S = 0.2


class Agents:
    """One on each host; what they know is fetched from all at the same time, as often as asked for."""

    def __init__(self, hosts: tuple[Host, ...]) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._started = [
            host.start([sys.executable, "-c", AGENT, str(number)], **pipes) for number, host in enumerate(hosts)
        ]
        peers = [
            {"node": number, "host": f"node{number}", "address": host.address, "port": int(self._read(number))}
            for number, host in enumerate(hosts)
        ]
        for number in range(len(hosts)):
            self._write(number, json.dumps(peers))

    def fetch(self, times: int) -> list[list[dict[str, Any]]]:
        """By round, the lines of all."""
        rounds = []
        for _ in range(times):
            threading.Event().wait(EVERY_S)
            for number in range(len(self._started)):
                self._write(number, "")
            rounds.append([line for number in range(len(self._started)) for line in json.loads(self._read(number))])
        return rounds

    def close(self) -> None:
        for process in self._started:
            process.communicate()

    def _write(self, number: int, line: str) -> None:
        stdin = self._started[number].stdin
        assert stdin is not None
        stdin.write(line + "\n")
        stdin.flush()

    def _read(self, number: int) -> str:
        stdout = self._started[number].stdout
        assert stdout is not None
        line: str = stdout.readline()
        return line


def judged(rounds: list[list[dict[str, Any]]]) -> list[Finding]:
    """By a run of as many hosts, whose steps went on meanwhile."""
    cluster = Cluster(ranks=3, hosts=3, steps=100, phases_ms={"forward": 100.0, "backward": 200.0})
    wall_ns = [ANCHOR_WALL_NS + int((1 + index) * EVERY_S * 1e9) for index in range(len(rounds))]
    lines = [{**line, "wall_ns": at} for at, told in zip(wall_ns, rounds, strict=True) for line in told if line["sent"]]
    return [one for one in diagnose(replace(cluster.run(), samples=tuple(lines))) if one.kind == "slow_network"]


@pytest.fixture
def hosts() -> Any:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Network(3) as made:
        yield made


@pytest.mark.soak  # near: test_probes.py, and tests/diagnosis/test_network_rules.py
def test_the_slow_and_the_lossy_host_are_named_and_the_healed_one_is_not(hosts: tuple[Host, ...]) -> None:
    agents = Agents(hosts)
    assert judged(agents.fetch(8)) == []
    hosts[1].slow(delay_ms=10)
    (slow,) = judged(agents.fetch(8))
    assert (slow.evidence["hosts"], slow.evidence["what"], slow.ranks) == (["node1"], "latency", (1,))
    assert slow.evidence["rtt_us"] >= 20_000 > 10 * slow.evidence["others_rtt_us"]
    assert slow.severity == "info"
    hosts[1].heal()
    agents.fetch(1)
    assert judged(agents.fetch(8)) == []
    hosts[2].slow(loss_percent=15)
    (lossy,) = judged(agents.fetch(35))
    assert (lossy.evidence["hosts"], lossy.evidence["what"]) == (["node2"], "loss")
    assert 0.1 < lossy.evidence["loss_share"] < 0.5
    assert lossy.evidence["others_loss_share"] < 0.05
    agents.close()
