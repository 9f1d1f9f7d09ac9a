"""The stream of news, from bytes to messages, wherever the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stepscope.terminal.documents import Message, MessageDecoder

STREAM = (
    b"retry: 2000\n\n"
    b'event: reset\nid: 0.99.0.0\ndata: {"why":"first"}\n\n'
    b": a comment\n\n"
    b'event: heartbeat\ndata: {"wall_ns":1}\n\n'
    b"event: gone\r\ndata: one\r\ndata: two\r\n\r\n"
    b"event: begun\ndata: half of it"
)
EXPECTED = [
    Message(event="reset", data=b'{"why":"first"}', id="0.99.0.0"),
    Message(event="heartbeat", data=b'{"wall_ns":1}'),
    Message(event="gone", data=b"one\ntwo"),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    messages = MessageDecoder()
    found = [message for a, b in pairwise(edges) for message in messages.feed(STREAM[a:b])]
    assert found == EXPECTED


def test_byte_by_byte() -> None:
    messages = MessageDecoder()
    assert [message for at in range(len(STREAM)) for message in messages.feed(STREAM[at : at + 1])] == EXPECTED


def test_what_is_too_long_is_passed_over_and_counted() -> None:
    messages = MessageDecoder(most_bytes=64)
    long = b"event: steps\ndata: " + b"x" * 200 + b"\n\n"
    after = b"event: ok\ndata: 1\n\n"
    whole = messages.feed(long + after)
    pieces = [
        message for at in range(0, len(long + after), 7) for message in messages.feed((long + after)[at : at + 7])
    ]
    assert whole == pieces == [Message(event="ok", data=b"1")]
    assert messages.dropped == 2


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_whatever_comes_is_read_to_its_end(pieces: list[bytes]) -> None:
    messages = MessageDecoder(most_bytes=50)
    for piece in pieces:
        messages.feed(piece)
    messages.feed(b"\n\n")
    assert messages.feed(b"event: ok\n\n") == [Message(event="ok")]
