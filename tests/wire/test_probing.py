from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.wire.probing import PACKET_BYTES, Packet, pack_packet, probed_by, read_packet

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PACKETS = st.builds(
    Packet,
    kind=st.sampled_from(["question", "answer"]),
    asks=U32,
    asked=U32,
    boot=st.binary(min_size=16, max_size=16),
    number=U64,
    dwell_ns=U64,
)
KEY = b"k" * 32


@given(PACKETS)
def test_a_packet_comes_back_as_it_was(packet: Packet) -> None:
    data = pack_packet(packet, KEY)
    assert len(data) == PACKET_BYTES == 64
    assert read_packet(data, KEY) == packet
    assert read_packet(data, b"another") is None


@given(PACKETS, st.integers(0, 64 * 8 - 1))
def test_no_bit_may_differ(packet: Packet, bit: int) -> None:
    data = bytearray(pack_packet(packet, KEY))
    data[bit // 8] ^= 1 << bit % 8
    assert read_packet(bytes(data), KEY) is None


@given(st.binary(max_size=80))
def test_fuzz_packets(data: bytes) -> None:
    assert read_packet(data, KEY) is None


def test_in_a_small_job_everybody_asks_everybody() -> None:
    assert probed_by(3, [5, 3, 9]) == [5, 9]
    assert probed_by(3, [5, 9]) == [5, 9]
    assert probed_by(0, range(16)) == list(range(1, 16))
    assert probed_by(0, []) == []


@pytest.mark.parametrize("count", [17, 18, 100, 1000, 12_500])
def test_in_a_large_job_eight_are_asked_asking_is_mutual_and_anybody_is_near(count: int) -> None:
    nodes = list(range(100, 100 + count))
    sample = nodes if count <= 100 else nodes[:: count // 50]
    for node in sample:
        asked = probed_by(node, nodes)
        assert 6 <= len(asked) <= 8 and node not in asked
        assert {node - 1, node + 1} & set(asked)
        assert all(node in probed_by(other, nodes) for other in asked)
    if count <= 1000:
        ways = {node: probed_by(node, nodes) for node in nodes}
        reached, ring = {nodes[0]}, {nodes[0]}
        for _ in range(4 * round(count**0.25) + 4):
            ring = set(itertools.chain.from_iterable(ways[node] for node in ring)) - reached
            reached |= ring
        assert len(reached) == count
