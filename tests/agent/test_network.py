"""What the kernel counts of the network, from a ``/proc`` and ``/sys`` of our making and from real namespaces."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from clock import FakeClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from namespaces import Network, why_not

from stepscope.agent.sampling.host import NetworkSampler


class Kernel(FakeClock):
    """A clock, and the files in which a kernel counts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(5_000_000_000)
        self.proc, self.sysfs = folder / "net", folder / "class"
        self.proc.mkdir()
        self.sysfs.mkdir()

    def __call__(self) -> float:  # type: ignore[override]
        return self.now_ns / 1e9

    def sampler(self) -> NetworkSampler:
        return NetworkSampler(self.proc, self.sysfs, self)

    def devices(self, **counts: tuple[int, int, int, int]) -> None:
        """Bytes received and sent, errors and drops; half of these on each side."""
        lines = ["Inter-| Receive | Transmit", " face |bytes packets errs drop fifo frame compressed multicast|bytes"]
        for name, (received, sent, errors, drops) in counts.items():
            first = [received, 1, errors - errors // 2, drops // 2, 0, 0, 0, 0]
            other = [sent, 1, errors // 2, drops - drops // 2, 0, 0, 0, 0]
            lines.append(f"{name:>6}: " + " ".join(map(str, [*first, *other])))
        (self.proc / "dev").write_text("\n".join(lines) + "\n")

    def tcp(self, out: int, again: int, errors: int, timeouts: int) -> None:
        (self.proc / "snmp").write_text(
            "Ip: Forwarding DefaultTTL\nIp: 2 64\n"
            "Tcp: RtoAlgorithm MaxConn OutSegs RetransSegs InErrs OutRsts\n"
            f"Tcp: 1 -1 {out} {again} {errors} 7\nUdp: InDatagrams\nUdp: 9\n"
        )
        (self.proc / "netstat").write_text(
            f"TcpExt: SyncookiesSent TCPTimeouts\nTcpExt: 0 {timeouts}\nIpExt: InNoRoutes\nIpExt: 3\n"
        )

    def speed(self, device: str, mbit: int) -> None:
        (self.sysfs / "net" / device).mkdir(parents=True, exist_ok=True)
        (self.sysfs / "net" / device / "speed").write_text(f"{mbit}\n")

    def port(self, name: str, **counters: int) -> None:
        folder = self.sysfs / "infiniband" / name / "ports" / "1"
        (folder / "counters").mkdir(parents=True, exist_ok=True)
        (folder / "rate").write_text("200 Gb/sec (4X HDR)\n")
        for counter, value in counters.items():
            (folder / "counters" / counter).write_text(f"{value}\n")

    def pass_s(self, seconds: float) -> None:
        self.advance(int(seconds * 1e9))


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_rates_are_of_the_time_since_and_the_loopback_is_no_network(kernel: Kernel) -> None:
    kernel.devices(lo=(5, 5, 0, 0), eth0=(1000, 2000, 10, 0), eth1=(0, 0, 0, 0))
    kernel.tcp(100, 5, 1, 0)
    sampler = kernel.sampler()
    kernel.pass_s(2.0)
    kernel.devices(lo=(10**9, 10**9, 9, 9), eth0=(5000, 2500, 13, 4), eth1=(200, 0, 0, 0))
    kernel.tcp(300, 25, 2, 0)
    assert sampler.sample() == {
        "net_rx_bps": 2100.0,
        "net_tx_bps": 250.0,
        "net_errors_ps": 1.5,
        "net_drops_ps": 2.0,
        "tcp_out_ps": 100.0,
        "tcp_retrans_ps": 10.0,
        "tcp_errors_ps": 0.5,
        "tcp_timeouts_ps": 0.0,
    }


def test_a_device_that_comes_goes_or_begins_anew_moves_nothing_by_that(kernel: Kernel) -> None:
    kernel.devices(eth0=(1000, 0, 0, 0), eth1=(7000, 0, 0, 0))
    sampler = kernel.sampler()
    kernel.pass_s(1.0)
    kernel.devices(eth0=(1500, 0, 0, 0), docker0=(10**12, 0, 0, 0))
    assert sampler.sample()["net_rx_bps"] == 500.0
    kernel.pass_s(1.0)
    kernel.devices(eth0=(20, 0, 0, 0), docker0=(10**12 + 30, 0, 0, 0))
    assert sampler.sample()["net_rx_bps"] == 30.0


def test_the_speed_is_that_of_the_device_that_moves_the_bytes(kernel: Kernel) -> None:
    kernel.devices(eth0=(0, 0, 0, 0), eth1=(0, 0, 0, 0), veth=(0, 0, 0, 0))
    kernel.speed("eth0", 1000)
    kernel.speed("eth1", 25_000)
    sampler = kernel.sampler()
    kernel.pass_s(11.0)
    kernel.devices(eth0=(10, 10, 0, 0), eth1=(10**6, 10**6, 0, 0), veth=(10**9, 0, 0, 0))
    sampler.sample()
    kernel.pass_s(11.0)
    assert sampler.sample()["net_speed_bps"] == 25e9 / 8
    kernel.speed("eth1", -1)  # down
    kernel.pass_s(11.0)
    assert sampler.sample()["net_speed_bps"] == 1e9 / 8


def test_timeouts_and_ports_are_looked_at_now_and_then(kernel: Kernel) -> None:
    kernel.devices()
    kernel.tcp(0, 0, 0, 100)
    for name in ("mlx5_0", "mlx5_1"):
        kernel.port(name, port_rcv_data=1000, port_xmit_data=0, symbol_error=5, link_downed=1, port_xmit_wait=0)
    sampler = kernel.sampler()
    kernel.tcp(0, 0, 0, 130)
    kernel.port("mlx5_1", port_rcv_data=6000, symbol_error=15, link_downed=2, port_xmit_wait=400)
    kernel.pass_s(9.0)
    assert sampler.sample()["tcp_timeouts_ps"] == 0.0
    kernel.pass_s(1.0)
    seen = sampler.sample()
    assert {name: value for name, value in seen.items() if name.startswith("ib_")} == {
        "ib_rx_bps": 2000.0,
        "ib_tx_bps": 0.0,
        "ib_errors_ps": 1.0,
        "ib_link_downed_ps": 0.1,
        "ib_xmit_wait_ps": 40.0,
        "ib_speed_bps": 2 * 200e9 / 8,
    }
    assert seen["tcp_timeouts_ps"] == 3.0


def test_what_the_kernel_does_not_tell_is_left_out(kernel: Kernel) -> None:
    sampler = kernel.sampler()
    kernel.pass_s(1.0)
    assert sampler.sample() == {"net_rx_bps": 0.0, "net_tx_bps": 0.0, "net_errors_ps": 0.0, "net_drops_ps": 0.0}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(), st.text(), st.text())
def test_fuzz_network_files(tmp_path: Path, dev: str, snmp: str, other: str) -> None:
    (tmp_path / "dev").write_text("a\nb\n eth0: " + dev, errors="replace")
    (tmp_path / "snmp").write_text("Tcp: OutSegs RetransSegs\nTcp: " + snmp, errors="replace")
    (tmp_path / "netstat").write_text("TcpExt: " + other, errors="replace")
    port = tmp_path / "infiniband" / "a" / "ports" / "1"
    (port / "counters").mkdir(parents=True, exist_ok=True)
    (port / "rate").write_text(other, errors="replace")
    (port / "counters" / "symbol_error").write_text(other, errors="replace")
    NetworkSampler(tmp_path, tmp_path).sample()


LOOK = """
import json, socket, sys
from stepscope.agent.sampling.host import NetworkSampler
now = [0.0]
sampler = NetworkSampler(now=lambda: now[0])
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(10):
    udp.sendto(bytes(1000), (sys.argv[1], 9))
now[0] = 1.0
print(json.dumps(sampler.sample()))
"""


def test_a_namespace_counts_its_own() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Network(2) as (first, second):
        seen = json.loads(first.run([sys.executable, "-c", LOOK, second.address]))
    assert 10_000 <= seen["net_tx_bps"] < 20_000  # ten packets, and whatever the kernel says about addresses
    assert seen["net_speed_bps"] > 0
    assert seen["tcp_out_ps"] == 0.0
