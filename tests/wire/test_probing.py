from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepscope.agent.sampling.probes import PACKET_BYTES, Packet, pack_packet, read_packet

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PACKETS = st.builds(
    Packet,
    kind=st.sampled_from(["question", "answer"]),
    sender=U32,
    target=U32,
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
