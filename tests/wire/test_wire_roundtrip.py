"""Blocks, frames and the handshake: what was written is read, and nothing else is."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import FrameError, UsageError
from stepscope.records.files import key_path
from stepscope.records.steps import SLOT_BYTES
from stepscope.wire.frames import (
    FrameHead,
    PartKind,
    RingRows,
    inflate_part,
    pack_block,
    pack_frame,
    part_of,
    read_block,
    read_frame,
    ring_id,
    rows_of,
)
from stepscope.wire.handshake import (
    Join,
    Peer,
    Positions,
    Welcome,
    load_keys,
    read_join,
    read_welcome,
    sign,
    signed,
    write_join,
    write_welcome,
)

KEY = b"k" * 32
SPOOL = "ab" * 16
numbers = st.integers(0, (1 << 63) - 1)
slots = st.binary(min_size=SLOT_BYTES - 4, max_size=SLOT_BYTES - 4).map(lambda body: bytes(4) + body)
rings = st.builds(
    RingRows,
    ring=st.binary(min_size=16, max_size=16),
    after_seq=numbers,
    last_seq=numbers,
    slots=st.lists(slots, max_size=4),
    lost=st.integers(0, 1000),
    torn=st.integers(0, 1000),
    live_step=numbers,
    live_since_ns=numbers,
    live_phase=st.integers(0, 15),
    state=st.integers(0, 4),
)


@given(st.lists(rings, max_size=4))
def test_a_block_reads_back(parts: list[RingRows]) -> None:
    assert rows_of(read_block(pack_block(parts))) == parts


@given(st.data())
def test_a_damaged_block_is_refused_or_whole(data: st.DataObject) -> None:
    packed = bytearray(pack_block([RingRows(ring=ring_id("a"), after_seq=0, last_seq=1, slots=[bytes(SLOT_BYTES)])]))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        block = read_block(bytes(packed))
    except FrameError:
        return
    assert len(block.bodies) == block.rows * (SLOT_BYTES - 4)


def test_a_frame_reads_back() -> None:
    head = FrameHead(node=3, spool=SPOOL, sent_wall_ns=7, offset_ns=-5, rtt_ns=9, bye={"exit_code": 0})
    parts = [
        part_of("rings", b"[]"),
        part_of("steps", pack_block([])),
        part_of("lines", b'{"a":1}\n', name="events.jsonl", offset=40),
        part_of("log", b"hello", name="logs/rank-3.log", offset=1),
        part_of("file", b"{}", name="errors/12.json"),
    ]
    frame = read_frame(pack_frame(head, parts))
    assert frame.head == head
    assert [inflate_part(part) for part in frame.parts] == [b"[]", pack_block([]), b'{"a":1}\n', b"hello", b"{}"]
    assert [(part.name, part.offset) for part in frame.parts[2:]] == [
        ("events.jsonl", 40),
        ("logs/rank-3.log", 1),
        ("errors/12.json", 0),
    ]


@pytest.mark.parametrize(
    "name", ["../run.json", "errors/../../x.json", "logs/../a.log", "events.jsonl.x", "run.json", "errors/.a.json", ""]
)
def test_a_part_goes_nowhere_else(name: str) -> None:
    kind: PartKind = "log" if name.startswith("logs") else "lines" if name.endswith("l") or ".x" in name else "file"
    allowed = {"log": "logs/a.log", "lines": "events.jsonl", "file": "flight/a.json"}
    part = part_of(kind, b"x", name=allowed[kind])
    head = FrameHead(node=0, spool=SPOOL, sent_wall_ns=0)
    whole = pack_frame(head, [part])
    (length,) = struct.unpack_from("<I", whole, 12)
    document = json.loads(whole[16 : 16 + length])
    document["parts"][0]["name"] = name
    text = json.dumps(document).encode()
    rest = struct.pack("<I", len(text)) + text + part.data
    with pytest.raises(FrameError):
        read_frame(whole[:8] + struct.pack("<I", zlib.crc32(rest)) + rest)


def test_a_bomb_is_not_inflated() -> None:
    bomb = zlib.compress(bytes(200 << 20), 9)
    part = part_of("lines", b"x", name="events.jsonl")
    with pytest.raises(FrameError, match="declared length"):
        inflate_part(type(part)(kind="lines", data=bomb, size=100, name="events.jsonl"))


def test_joining_proves_the_key_and_the_certificate() -> None:
    join = Join(run="r", node=1, nnodes=2, host="b", spool=SPOOL, nonce="cd" * 16, probe_port=99, meta={"a": 1})
    body, proof = write_join(join, KEY, b"cert")
    assert read_join(body, proof, KEY, b"cert") == join
    assert read_join(body, proof, b"x" * 32, b"cert") is None
    assert read_join(body, proof, KEY, b"another") is None
    assert read_join(body + b" ", proof, KEY, b"cert") is None
    welcome = Welcome(
        run="r-2",
        token="t",
        positions=Positions(rings={"b-1-ff": 12}, files={"events.jsonl": 7}),
        probe_key="ee" * 16,
        next_s=0.5,
        peers=(Peer(node=0, host="a", address="10.0.0.1", port=5),),
    )
    body, proof = write_welcome(welcome, join.nonce, KEY, b"cert")
    assert read_welcome(body, proof, join.nonce, KEY, b"cert") == welcome
    for key, nonce, certificate in ((b"x", join.nonce, b"cert"), (KEY, "00" * 16, b"cert"), (KEY, join.nonce, b"x")):
        with pytest.raises(FrameError, match="key"):
            read_welcome(body, proof, nonce, key, certificate)


def test_the_key_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    key = load_keys(environ)
    assert load_keys(environ) == key
    assert key_path(environ).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in key_path(environ).parent.iterdir()] == ["key"]
    key_path(environ).chmod(0o644)
    with pytest.raises(UsageError, match="other users can read"):
        load_keys(environ)
    assert load_keys({"HOME": str(tmp_path), "STEPSCOPE_KEY": "s" * 16}) != key
    with pytest.raises(UsageError, match="too short"):
        load_keys({"STEPSCOPE_KEY": "short"})


def test_words_of_a_proof_do_not_run_into_one_another() -> None:
    assert sign(KEY, "a", b"bc", b"d") != sign(KEY, "a", b"b", b"cd")
    assert not signed(KEY, "ü", "a")
