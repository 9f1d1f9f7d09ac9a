from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import Network, why_not


@pytest.fixture(autouse=True)
def _can() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)


ECHO = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 7777))
print("ready", flush=True)
while True:
    data, where = server.recvfrom(100)
    server.sendto(data, where)
"""
ASK = """
import socket, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(float(sys.argv[2]))
began = time.monotonic()
client.sendto(b"hello", (sys.argv[1], 7777))
try:
    client.recvfrom(100)
    print(time.monotonic() - began)
except TimeoutError:
    print("lost")
"""


def test_hosts_have_names_and_reach_one_another_until_they_are_cut_and_again_when_healed() -> None:
    with Network(2, names=("alpha",)) as (first, second):
        assert (first.name, second.name) == ("alpha", "host1")
        assert [host.run(["uname", "-n"]).strip() for host in (first, second)] == ["alpha", "host1"]
        server = first.start([sys.executable, "-c", ECHO, first.address], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        assert first.pids() == [server.pid]

        def ask(timeout_s: float) -> str:
            return second.run([sys.executable, "-c", ASK, first.address, str(timeout_s)]).strip()

        assert float(ask(10)) > 0
        first.slow(delay_ms=30)
        assert float(ask(10)) >= 0.06
        first.cut()
        assert ask(0.2) == "lost"
        first.heal()
        first.heal()
        assert float(ask(10)) > 0
        server.stdout.close()
    assert server.wait(10) == -9


def mine() -> set[str]:
    return {path.name for path in Path("/run/netns").iterdir() if path.name.startswith(f"st{os.getpid()}n")}


def test_two_networks_of_one_process_do_not_know_each_other_and_leave_nothing() -> None:
    with Network(1) as (here,), Network(1) as (there,):
        assert here.address == there.address
        assert here.run(["ip", "-br", "address"]) and there.pids() == []
        assert len(mine()) == 4
    assert mine() == set()
