"""Round trips between agents, over real sockets; and everything that may come to their port."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import until

from stepscope.agent.sampling import probes as module
from stepscope.agent.sampling.probes import PACKET_BYTES, Packet, ProbeLimits, Probes, pack_packet, read_packet
from stepscope.wire.handshake import Peer

KEY = "5e" * 32
SECRET = bytes.fromhex(KEY)
PATIENCE_S = 30.0


def peer(node: int, port: int, address: str = "127.0.0.1") -> Peer:
    return Peer(node=node, host=f"host{node}", address=address, port=port)


@pytest.fixture
def make() -> Iterator[Callable[..., Probes]]:
    made: list[Probes] = []

    def prober(number: int, **how: Any) -> Probes:
        made.append(Probes(f"host{number}", number, ask_s=0.01, **how))
        return made[-1]

    yield prober
    for probes in made:
        probes.close()


@pytest.fixture
def outsider() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.bind(("127.0.0.1", 0))
        connection.settimeout(PATIENCE_S)
        yield connection


def port_of(outsider: socket.socket) -> int:
    return int(outsider.getsockname()[1])


def question(number: int, *, sender: int = 7, target: int = 0, boot: bytes = bytes(16)) -> bytes:
    return pack_packet(Packet(kind="question", sender=sender, target=target, boot=boot, number=number), SECRET)


def test_agents_measure_the_way_to_each_other(make: Callable[..., Probes]) -> None:
    nodes = [make(0), make(1), make(2, address="127.0.0.1")]
    peers = [peer(number, node.port) for number, node in enumerate(nodes)]
    for node in nodes:
        node.peers(peers, KEY)
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def all_pairs() -> bool:
        for node in nodes:
            for line in node.last_samples():
                lines.setdefault((line["node"], line["peer"]), []).append(line)
        return len(lines) == 6

    until(all_pairs)
    for (_, other), of_pair in lines.items():
        for line in of_pair:
            assert line["kind"] == "probe"
            assert (line["peer_node"], line["lost"]) == (int(other[-1]), 0)
            assert 0 <= line["rtt_us_min"] <= line["rtt_us_p50"] <= line["rtt_us_max"] < 1e6 * PATIENCE_S
    assert all(node.ignored == {"foreign": 0, "replayed": 0} for node in nodes)
    assert nodes[0].notice() is None


def test_lines_come_every_few_seconds_and_not_at_once(make: Callable[..., Probes]) -> None:
    first, other = make(0), make(1)
    first.peers([peer(1, other.port)], KEY)
    other.peers([peer(0, first.port)], KEY)
    until(other.last_samples)
    assert other.samples() == []


def test_what_is_never_answered_is_lost(make: Callable[..., Probes], outsider: socket.socket) -> None:
    prober = make(0, limits=ProbeLimits(patience_s=0.05, blocked_s=0.0))
    prober.peers([peer(1, port_of(outsider))], KEY)
    (line,) = until(prober.last_samples)
    assert line["lost"] == line["sent"] > 0
    assert "rtt_us_min" not in line
    assert prober.notice() == "no agent on another node answers probes; UDP may be blocked, so round trips are unknown"
    assert prober.notice() is None  # once


def test_the_time_a_question_lay_about_is_not_the_networks(
    make: Callable[..., Probes], outsider: socket.socket
) -> None:
    prober = make(0)
    prober.peers([peer(1, port_of(outsider))], KEY)
    data, where = outsider.recvfrom(100)
    time.sleep(0.3)
    packet = read_packet(data, SECRET)
    assert packet is not None
    answer = Packet(kind="answer", sender=0, target=1, boot=packet.boot, number=packet.number, dwell_ns=299_000_000)
    outsider.sendto(pack_packet(answer, SECRET), where)
    (line,) = until(prober.last_samples)
    assert line["rtt_us_min"] < 299_000


def test_an_answer_says_how_long_it_took_and_is_as_long_as_the_question(
    make: Callable[..., Probes], outsider: socket.socket
) -> None:
    prober = make(0)
    prober.peers([], KEY)
    outsider.sendto(question(1), ("127.0.0.1", prober.port))
    data = outsider.recv(1000)
    answer = read_packet(data, SECRET)
    assert answer is not None
    assert len(data) == PACKET_BYTES == len(question(1)) == 64
    assert (answer.kind, answer.sender, answer.target, answer.number) == ("answer", 7, 0, 1)
    assert 0 < answer.dwell_ns < PATIENCE_S * 1e9


def test_only_what_is_signed_and_new_is_answered(make: Callable[..., Probes], outsider: socket.socket) -> None:
    prober = make(0)
    prober.peers([], KEY)
    there = ("127.0.0.1", prober.port)
    right = question(5)
    foreign = [b"", b"x", bytes(64), right[:-1], right + b"\0", right[:-1] + bytes([right[-1] ^ 1]), bytes(9000)]
    foreign += [pack_packet(Packet(kind="question", sender=7, target=0, boot=bytes(16), number=9), b"another key")]
    for data in foreign:
        outsider.sendto(data, there)
    until(lambda: prober.ignored["foreign"] == len(foreign))
    seen_before = [right, question(4), question(6, target=3)]  # again, older, another's
    stray = pack_packet(Packet(kind="answer", sender=0, target=7, boot=bytes(16), number=1), SECRET)
    for data in (right, *seen_before, stray, question(6)):
        outsider.sendto(data, there)
    numbers = [read_packet(outsider.recv(1000), SECRET) for _ in range(2)]
    assert [packet.number for packet in numbers if packet] == [5, 6]
    assert prober.ignored == {"foreign": len(foreign), "replayed": len(seen_before) + 1}
    outsider.settimeout(0.05)
    with pytest.raises(TimeoutError):
        outsider.recv(1000)


def test_an_agent_that_came_again_counts_anew(make: Callable[..., Probes], outsider: socket.socket) -> None:
    prober = make(0)
    prober.peers([], KEY)
    for boot in (b"a" * 16, b"b" * 16):
        outsider.sendto(question(1, boot=boot), ("127.0.0.1", prober.port))
        assert read_packet(outsider.recv(1000), SECRET) is not None


def test_answers_that_were_not_asked_of_them_count_for_nothing(
    make: Callable[..., Probes], outsider: socket.socket
) -> None:
    prober = make(0)
    prober.peers([peer(1, port_of(outsider))], KEY)
    data, where = outsider.recvfrom(100)
    packet = read_packet(data, SECRET)
    assert packet is not None
    for wrong in ({"target": 2}, {"boot": b"z" * 16}, {"number": packet.number + 1000}):
        document = {"kind": "answer", "sender": 0, "target": 1, "boot": packet.boot, "number": packet.number, **wrong}
        outsider.sendto(pack_packet(Packet(**document), SECRET), where)
    until(lambda: prober.ignored["replayed"] == 3)
    assert prober.last_samples() == []
    right = Packet(kind="answer", sender=0, target=1, boot=packet.boot, number=packet.number)
    for _ in range(2):
        outsider.sendto(pack_packet(right, SECRET), where)
    until(lambda: prober.ignored["replayed"] == 4)
    assert sum(line["sent"] - line["lost"] for line in prober.last_samples()) == 1


def test_a_flood_is_left_to_the_kernel_and_what_was_measured_in_it_is_thrown_away(
    make: Callable[..., Probes], outsider: socket.socket
) -> None:
    prober = make(0, limits=ProbeLimits(taken_per_s=20))
    prober.peers([peer(1, port_of(outsider))], KEY)
    for _ in range(300):
        outsider.sendto(bytes(64), ("127.0.0.1", prober.port))
    until(lambda: prober.ignored["foreign"] >= 20)
    until(lambda: prober._crowded)
    assert prober.last_samples() == []
    assert prober.ignored["foreign"] < 300


def test_peers_that_cannot_be_asked_are_passed(make: Callable[..., Probes], outsider: socket.socket) -> None:
    prober = make(0)
    wrong = [peer(2, 0), peer(3, 9, "not an address"), peer(4, 9, "224.0.0.1"), peer(0, 9)]
    prober.peers([*wrong, peer(1, port_of(outsider))], "no key")
    prober.peers([*wrong, peer(1, port_of(outsider))], KEY)
    for _ in range(3):
        packet = read_packet(outsider.recv(1000), SECRET)
        assert packet is not None and packet.target == 1


def test_ipv6_where_there_is_any(make: Callable[..., Probes]) -> None:
    first = make(0)
    try:
        other = make(1, address="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    if not other.port or first._socket is None or first._socket.family != socket.AF_INET6:
        pytest.skip("no IPv6 here")
    first.peers([peer(1, other.port, "::1")], KEY)
    other.peers([peer(0, first.port, "::1")], KEY)
    assert until(first.last_samples)[0]["lost"] == 0


def test_no_socket_no_probes() -> None:
    probes = Probes("host0", 0, address="203.0.113.7")
    assert probes.port == 0
    probes.peers([peer(1, 9)], KEY)
    assert probes.samples() == probes.last_samples() == []
    assert probes.notice() is None
    probes.close()


def test_the_kernels_stamp_is_read_and_anything_else_is_none() -> None:
    stamp = struct.pack("@ll", 5, 7)
    assert module._arrived_ns([(socket.SOL_SOCKET, 35, stamp)]) == 5_000_000_007
    assert module._arrived_ns([(socket.SOL_SOCKET, 35, b"short"), (1, 2, stamp)]) is None
