"""Which user of this machine is at the other end of a TCP connection, from the kernel's own table.  Linux only.

Both ends of a connection within one machine are in ``/proc/net/tcp`` (or ``tcp6``), each with the user who made it.
"""

from __future__ import annotations

import sys
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

__all__ = ["peer_uid"]

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ESTABLISHED = "01"
"""Only then is the user known: what is being closed belongs to nobody, which is written as root."""


def peer_uid(host: str, port: int, own_port: int, tables: tuple[Path, ...] = TABLES) -> int | None:
    """Of whoever is connected from there to our port.

    -1: nobody of this machine is, or not any more.  None: this system does not tell.
    """
    wanted, told = _plain(ip_address(host.partition("%")[0])), False
    for table in tables:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) < 8 or not fields[1].endswith(f":{port:04X}"):
                told = told or (len(fields) > 7 and fields[1].endswith(f":{own_port:04X}"))
                continue
            told = True
            if fields[2].endswith(f":{own_port:04X}") and fields[3] == ESTABLISHED and _address(fields[1]) == wanted:
                return int(fields[7])
    return -1 if told else None


def _address(field: str) -> IPv4Address | IPv6Address:
    """Words of four bytes in the machine's own order."""
    raw = bytes.fromhex(field.partition(":")[0])
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return _plain(ip_address(raw))


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
