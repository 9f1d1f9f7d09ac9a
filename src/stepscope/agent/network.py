"""What the kernel counts of this node's network: bytes, errors and drops of its interfaces, TCP's retransmits,
InfiniBand's ports.

Two small reads of ``/proc`` a second, about a tenth of a millisecond.  ``/proc/self/net`` is the network namespace that
the agent, and so the job, lives in: a container counts its own.  What costs more is read only now and then:
InfiniBand's counters are asked of the adapter's firmware one by one, and the kernel sums up some two hundred numbers
for the one with TCP's timeouts.  What is not told is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["NetworkSampler"]

Counts = dict[str, int]

LOOPBACK = "lo"
TCP = {"tcp_out_ps": "OutSegs", "tcp_retrans_ps": "RetransSegs", "tcp_errors_ps": "InErrs"}
TCP_MORE = {"tcp_timeouts_ps": "TCPTimeouts"}
DEV_COLUMNS = {"rx_bps": (0,), "tx_bps": (8,), "errors_ps": (2, 10), "drops_ps": (3, 11)}
"""In a line of ``/proc/net/dev``; received first, then sent."""
IB_COLUMNS = {
    "ib_rx_bps": ("port_rcv_data",),
    "ib_tx_bps": ("port_xmit_data",),
    "ib_errors_ps": ("symbol_error", "port_rcv_errors", "port_xmit_discards", "local_link_integrity_errors"),
    "ib_link_downed_ps": ("link_downed", "link_error_recovery"),
    "ib_xmit_wait_ps": ("port_xmit_wait",),
}
IB_WORDS = ("ib_rx_bps", "ib_tx_bps")
IB_WORD_BYTES = 4
"""A port counts its data in words."""
SELDOM_S = 10.0
"""From one look at link speeds, TCP's timeouts and InfiniBand's ports to the next."""
MBIT_BYTES = 125_000


class NetworkSampler:
    """Keeps the counters of the sample before; rates are per second since then."""

    def __init__(
        self,
        proc: Path = Path("/proc/self/net"),
        sysfs: Path = Path("/sys/class"),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = proc
        self._sysfs = sysfs
        self._now = now
        self._devices: dict[str, Counts] = {}
        self._moved: Counts = {}
        """Bytes since the start, by device: the one that moved most is the one whose speed counts."""
        self._tcp: Counts = {}
        self._tcp_more: Counts = {}
        self._ports: dict[str, Counts] = {}
        self._at_s = self._seldom_s = now()
        self._seldom: dict[str, float] = {}
        self.sample()
        self._look_seldom(self._at_s)

    def sample(self) -> dict[str, float]:
        """In bytes and events per second; speeds of links in bytes per second too."""
        now = self._now()
        seconds, self._at_s = now - self._at_s, now
        if now - self._seldom_s >= SELDOM_S:
            self._look_seldom(now)
        return {
            **{f"net_{name}": _rate(count, seconds) for name, count in self._since_devices().items()},
            **{name: _rate(count, seconds) for name, count in self._since_tcp().items()},
            **self._seldom,
        }

    # -- interfaces -----------------------------------------------------------------------------------------------

    def _since_devices(self) -> Counts:
        """Summed over the devices; one that came in between has counted nothing yet, as far as we know."""
        counts = self._read_devices()
        totals = dict.fromkeys(DEV_COLUMNS, 0)
        for device, now in counts.items():
            before = self._devices.get(device, now)
            since = _since(before, now)
            for name, count in since.items():
                totals[name] += count
            self._moved[device] = self._moved.get(device, 0) + since["rx_bps"] + since["tx_bps"]
        self._devices = counts
        return totals

    def _read_devices(self) -> dict[str, Counts]:
        found = {}
        for line in _read(self._proc / "dev").splitlines()[2:]:
            device, _, rest = line.partition(":")
            device, fields = device.strip(), rest.split()
            if device != LOOPBACK and len(fields) >= 16 and all(field.isdecimal() for field in fields):
                found[device] = {name: sum(int(fields[at]) for at in columns) for name, columns in DEV_COLUMNS.items()}
        return found

    def _speed(self) -> dict[str, float]:
        """Of the device that moved most so far; one that is down, or virtual, has none."""
        for device in sorted(self._devices, key=lambda name: -self._moved.get(name, 0)):
            mbit = _read(self._sysfs / "net" / device / "speed").strip()
            if mbit.isdecimal() and int(mbit) > 0:
                return {"net_speed_bps": float(int(mbit) * MBIT_BYTES)}
        return {}

    # -- TCP ------------------------------------------------------------------------------------------------------

    def _since_tcp(self) -> Counts:
        before, self._tcp = self._tcp, _named(_read(self._proc / "snmp"), "Tcp: ", TCP)
        return _since(before, self._tcp)

    def _since_tcp_more(self) -> Counts:
        before, self._tcp_more = self._tcp_more, _named(_read(self._proc / "netstat"), "TcpExt: ", TCP_MORE)
        return _since(before, self._tcp_more)

    # -- now and then ---------------------------------------------------------------------------------------------

    def _look_seldom(self, now_s: float) -> None:
        seconds, self._seldom_s = now_s - self._seldom_s, now_s
        timeouts = {name: _rate(count, seconds) for name, count in self._since_tcp_more().items()}
        self._seldom = {**timeouts, **self._speed(), **self._ports_since(seconds)}

    def _ports_since(self, seconds: float) -> dict[str, float]:
        counts: dict[str, Counts] = {}
        speeds = []
        for port in sorted((self._sysfs / "infiniband").glob("*/ports/*")):
            files = {file for names in IB_COLUMNS.values() for file in names}
            told = {file: _read(port / "counters" / file).strip() for file in files}
            counts[str(port)] = {file: int(text) for file, text in told.items() if text.isdecimal()}
            gbit = _read(port / "rate").partition(" ")[0]
            speeds += [float(gbit) * 1000 * MBIT_BYTES] if gbit.replace(".", "", 1).isdecimal() else []
        before, self._ports = self._ports, counts
        if not any(counts.values()):
            return {}
        rates = dict.fromkeys(IB_COLUMNS, 0.0)
        for port_name, now in counts.items():
            since = _since(before.get(port_name, now), now)
            for name, files_of in IB_COLUMNS.items():
                times = IB_WORD_BYTES if name in IB_WORDS else 1
                rates[name] += _rate(sum(since.get(file, 0) for file in files_of) * times, seconds)
        return {**rates, **({"ib_speed_bps": sum(speeds)} if speeds else {})}


def _read(path: Path) -> str:
    """Empty when there is none, or it does not answer (a link that is down has no speed)."""
    try:
        with path.open("rb", buffering=0) as file:
            return (file.read() or b"").decode("ascii", errors="replace")
    except OSError:
        return ""


def _named(text: str, prefix: str, wanted: Mapping[str, str]) -> Counts:
    """From a line of names and one of values, as ``/proc/net/snmp`` has them."""
    start = text.find(prefix)
    if start < 0:
        return {}
    names, _, rest = text[start:].partition("\n")
    values = rest.partition("\n")[0]
    if not values.startswith(prefix):
        return {}
    told = dict(zip(names.split(), values.split(), strict=False))
    return {name: int(told[key]) for name, key in wanted.items() if told.get(key, "").isdecimal()}


def _since(before: Mapping[str, int], now: Mapping[str, int]) -> Counts:
    """A counter that began anew counted what it now says at the least; nobody knows more, and it is left at nothing."""
    return {name: max(count - before.get(name, count), 0) for name, count in now.items()}


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 1) if seconds > 0 else 0.0
