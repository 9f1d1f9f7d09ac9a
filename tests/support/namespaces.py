"""Hosts on one machine: network namespaces joined by a bridge, whose network can be cut, slowed down and healed.

    with Network(3) as (first, second, third):
        server = first.start([sys.executable, "server.py"])
        second.slow(delay_ms=20, loss_percent=5)
        second.run([sys.executable, "client.py", first.address])
        second.cut()
        second.heal()

Each host has a hostname, a loopback and one address of its own; the bridge stands in a namespace of its own too, so
nothing of the machine's network is touched or needed, and every test may use the same addresses at the same time.  What
a host was told to run is its own process (``Popen.pid`` is the command's), in the namespace's network and under its
hostname; files, memory and clocks are the machine's.

A host that is slowed down hangs on a bridge of its own, joined to the others' by ``scripts/cable.py``: a process, so
that it works where the kernel has no netem.  Needs root, ``ip`` (Debian: iproute2) and a kernel with veth, bridge and
tun: ``why_not`` says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Host", "Network", "why_not"]

_numbers = itertools.count()
_DEVICE = "eth0"
_BRIDGE = "bridge"
_CABLE = Path(__file__).with_name("cable.py")
_PATIENCE_S = 10.0
"""How long processes that were told to end in a namespace may take."""


@functools.cache
def why_not() -> str | None:
    """Why there can be no such network here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        return f"there is no {' and no '.join(missing)}"
    try:
        with Network(1) as (host,):
            host.slow(delay_ms=1)
    except (subprocess.CalledProcessError, RuntimeError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', error)}".strip()
    return None


class Host:
    """One namespace; made by ``Network``."""

    def __init__(self, name: str, address: str, *, namespace: str, switch: str, number: int) -> None:
        self.name = name
        """Its hostname."""
        self.address = address
        self.namespace = namespace
        self._switch = switch
        self._port = f"port{number}"
        """The switch's end of its cable."""
        self._detour = f"bridge{number}"
        self._near, self._far = f"near{number}", f"far{number}"
        self._cable: subprocess.Popen[str] | None = None

    def command(self, command: Sequence[str]) -> list[str]:
        """The same command, to be run on this host by whoever starts processes."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.namespace, *named, *command]

    def start(self, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(self.command(command), **how)

    def run(self, command: Sequence[str], *, timeout_s: float = 60.0) -> str:
        """What it printed; CalledProcessError, TimeoutExpired."""
        return subprocess.run(
            self.command(command), check=True, capture_output=True, text=True, timeout=timeout_s
        ).stdout

    def slow(self, *, delay_ms: float = 0.0, loss_percent: float = 0.0, rate_mbit: float = 0.0) -> None:
        """On each way, in and out, instead of whatever was told before: a round trip takes twice the delay more."""
        if self._cable is None:
            self._cable = self._lay_cable()
        self._say(self._cable, f"{delay_ms / 1e3} {loss_percent / 100} {rate_mbit * 1e6}\n", "ok")
        _batch(self._switch, f"link set dev {self._port} master {self._detour}", f"link set dev {self._far} up")

    def cut(self) -> None:
        """Nothing comes in or goes out, and nobody is told: the cable is in, the packets are gone."""
        self._leave_cable()
        _batch(self._switch, f"link set dev {self._port} nomaster")

    def heal(self) -> None:
        self._leave_cable()
        _batch(self._switch, f"link set dev {self._port} master {_BRIDGE}")

    def pids(self) -> list[int]:
        """Of everything that runs there."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]

    def make(self) -> None:
        _batch(
            self.namespace,
            "link set dev lo up",
            f"link add name {_DEVICE} type veth peer name {self._port} netns {self._switch}",
            f"address add {self.address}/24 dev {_DEVICE}",
            f"link set dev {_DEVICE} up",
            f"route add default dev {_DEVICE}",
        )
        _batch(self._switch, f"link set dev {self._port} up")
        self.heal()

    def close(self) -> None:
        if self._cable is not None:
            self._cable.kill()
            self._cable.communicate()
            self._cable = None

    def _lay_cable(self) -> subprocess.Popen[str]:
        taps = (self._near, self._far)
        _batch(
            self._switch, f"link add name {self._detour} type bridge", *(f"tuntap add {tap} mode tap" for tap in taps)
        )
        command = ["ip", "netns", "exec", self._switch, sys.executable, "-S", "-E", str(_CABLE), *taps]
        cable = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._say(cable, "", "ready")
        except RuntimeError:
            cable.kill()
            cable.communicate()
            raise
        masters = zip(taps, (self._detour, _BRIDGE), strict=True)
        _batch(
            self._switch,
            *(f"link set dev {tap} master {master}" for tap, master in masters),
            *(f"link set dev {device} up" for device in (self._near, self._detour)),
        )
        return cable

    def _leave_cable(self) -> None:
        if self._cable is not None:
            _batch(self._switch, f"link set dev {self._far} down")  # the bridge forgets who was behind it

    def _say(self, cable: subprocess.Popen[str], line: str, answer: str) -> None:
        assert cable.stdin is not None and cable.stdout is not None
        cable.stdin.write(line)
        cable.stdin.flush()
        if (text := cable.stdout.readline().strip()) != answer:
            raise RuntimeError(f"the cable of {self.name} does not work: {text or 'it ended'}")


class Network:
    """``with Network(2) as (a, b)``: that many hosts on one bridge, gone with all their processes at the end."""

    def __init__(self, hosts: int, *, names: Sequence[str] = (), subnet: str = "10.77.0") -> None:
        """``names``: hostnames, ``host0`` and so on unless told."""
        prefix = f"st{os.getpid()}n{next(_numbers)}"
        self._switch = f"{prefix}-switch"
        self.hosts = tuple(
            Host(
                names[k] if k < len(names) else f"host{k}",
                f"{subnet}.{k + 1}",
                namespace=f"{prefix}-{k}",
                switch=self._switch,
                number=k,
            )
            for k in range(hosts)
        )
        self._made: list[str] = []

    def __enter__(self) -> tuple[Host, ...]:
        try:
            self._make()
        except (subprocess.CalledProcessError, RuntimeError):
            self.close()
            raise
        return self.hosts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs on the hosts, then removes them."""
        for host in self.hosts:
            host.close()
        for namespace in reversed(self._made):
            deadline = time.monotonic() + _PATIENCE_S
            while (pids := _run("ip", "netns", "pids", namespace).split()) and time.monotonic() < deadline:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), 9)
                time.sleep(0.01)
            _run("ip", "netns", "del", namespace)
        self._made.clear()

    def _make(self) -> None:
        for name in (self._switch, *(host.namespace for host in self.hosts)):
            _run("ip", "netns", "add", name)
            self._made.append(name)
        _batch(self._switch, f"link add name {_BRIDGE} type bridge", f"link set dev {_BRIDGE} up")
        for host in self.hosts:
            host.make()


def _batch(namespace: str, *commands: str) -> None:
    _run("ip", "-n", namespace, "-batch", "-", said="\n".join(commands) + "\n")


def _run(*command: str, said: str | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, input=said).stdout
