"""A frame: everything a node has to say at one time, in parts.  One POST on the network, one record in the hub's inbox.

    0    4s   magic  b"STFR"
    4    u16  version
    6    u16  zero
    8    u32  crc32 of everything after it
    12   u32  bytes of the header
    16   ...  header: JSON, see ``FrameHead``
         ...  the parts' payloads, one after the other

Parts, by kind:

    rings    zlib of a JSON list of sidecars (``steps/KEY.json``): who a ring is; ahead of its first block, and again
             when something of it changed
    steps    a block (``wire/blocks.py``)
    lines    zlib of whole lines of ``events.jsonl``, ``samples.jsonl`` or ``stacks.jsonl``, from ``offset`` on
    log      zlib of bytes of ``logs/NAME.log``, from ``offset`` on
    file     zlib of the whole of a small file: ``errors/*.json``, ``hangs/*``, ``flight/*.json``

Every part says where it belongs (a sequence number, an offset, a name), so that a frame that comes twice changes
nothing, and one that comes too early is told where to begin.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from stepscope.errors import FrameError
from stepscope.wire.limits import FILE_BYTES, FRAME_BYTES, HEAD_BYTES, INFLATED_BYTES, LINES_BYTES, PARTS

__all__ = [
    "FRAME_MAGIC",
    "LINE_FILES",
    "Frame",
    "FrameHead",
    "Part",
    "PartKind",
    "inflate_part",
    "may_be_named",
    "pack_frame",
    "part_of",
    "read_frame",
]

FRAME_MAGIC = b"STFR"
VERSION = 1
HEAD = struct.Struct("<4sHHII")
_CRC_END = 12

PartKind = Literal["rings", "steps", "lines", "log", "file"]
LINE_FILES = ("events.jsonl", "samples.jsonl", "stacks.jsonl")
_NAMES = {
    "lines": re.compile("|".join(re.escape(name) for name in LINE_FILES)),
    "log": re.compile(r"logs/[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}\.log"),
    "file": re.compile(r"(?:errors|hangs|flight)/[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}\.(?:json|txt)"),
}
_MOST = {"rings": LINES_BYTES, "lines": LINES_BYTES, "log": LINES_BYTES, "file": FILE_BYTES, "steps": INFLATED_BYTES}
_SPOOL = re.compile(r"[0-9a-f]{16,64}")
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Part:
    kind: PartKind
    data: bytes
    """As it travels."""
    size: int
    """Unpacked, in bytes; of a block, the same as it travels."""
    name: str = ""
    """Of the file, as it is called in the sender's run directory; empty for rings and steps."""
    offset: int = 0
    """In that file, of lines and logs."""


@dataclass(frozen=True, kw_only=True)
class FrameHead:
    node: int
    """Number of the node, as its launcher was told."""
    spool: str
    """The sender's run directory, by the random name it was given when it was made: offsets are within it."""
    sent_wall_ns: int
    """By the sender's clock."""
    offset_ns: int | None = None
    """What the sender's clock is ahead of the hub's, as far as round trips so far tell …"""
    rtt_ns: int | None = None
    """… and the round trip that told it: half of it is how far off the offset may be."""
    bye: Mapping[str, Any] | None = None
    """In a node's last frame, how its part of the job ended: ``{"exit_code": 0, "status": "finished"}``."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    head: FrameHead
    parts: tuple[Part, ...]


def part_of(kind: PartKind, raw: bytes, *, name: str = "", offset: int = 0) -> Part:
    """Packed; a block is packed already."""
    data = raw if kind == "steps" else zlib.compress(raw, 1)
    return Part(kind=kind, data=data, size=len(raw), name=name, offset=offset)


def may_be_named(kind: PartKind, name: str) -> bool:
    """Whether a part of this kind may bring a file of this name; one of rings or steps has none."""
    pattern = _NAMES.get(kind)
    return pattern.fullmatch(name) is not None if pattern else name == ""


def inflate_part(part: Part) -> bytes:
    """FrameError when it is not what it says; a block comes as it is."""
    if part.kind == "steps":
        return part.data
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(part.data, part.size + 1)
    except zlib.error as error:
        raise FrameError(f"a part ({part.kind}) cannot be unpacked") from error
    if len(raw) != part.size or not unpacker.eof or unpacker.unused_data:
        raise FrameError(f"a part ({part.kind}) is not as long as it says")
    return raw


def pack_frame(head: FrameHead, parts: Sequence[Part]) -> bytes:
    """ValueError when it is more than a frame may hold."""
    said = {
        "node": head.node,
        "spool": head.spool,
        "sent_wall_ns": head.sent_wall_ns,
        "offset_ns": head.offset_ns,
        "rtt_ns": head.rtt_ns,
        "bye": None if head.bye is None else dict(head.bye),
        "parts": [_told(part) for part in parts],
    }
    text = json.dumps(said, separators=(",", ":")).encode()
    rest = b"".join([struct.pack("<I", len(text)), text, *(part.data for part in parts)])
    if len(parts) > PARTS or len(text) > HEAD_BYTES or len(rest) + _CRC_END > FRAME_BYTES:
        raise ValueError("a frame is larger than it may be")
    return struct.pack("<4sHHI", FRAME_MAGIC, VERSION, 0, zlib.crc32(rest)) + rest


def read_frame(data: bytes) -> Frame:
    """FrameError for anything but a whole frame of this version within the limits; parts are still packed."""
    if len(data) < HEAD.size or data[:4] != FRAME_MAGIC:
        raise FrameError("not a frame")
    _, version, _, crc, length = HEAD.unpack_from(data)
    if version != VERSION:
        raise FrameError(f"a frame of version {version}; this Stepscope reads version {VERSION}")
    if len(data) > FRAME_BYTES or length > HEAD_BYTES or HEAD.size + length > len(data):
        raise FrameError("a frame is larger than it may be, or cut off")
    if zlib.crc32(memoryview(data)[_CRC_END:]) != crc:
        raise FrameError("a frame was damaged on its way")
    try:
        said = json.loads(data[HEAD.size : HEAD.size + length])
    except (ValueError, RecursionError) as error:
        raise FrameError("a frame's header is no JSON") from error
    if not isinstance(said, dict) or not isinstance(said.get("parts"), list) or len(said["parts"]) > PARTS:
        raise FrameError("a frame's header is not of ours")
    parts, at, inflated = [], HEAD.size + length, 0
    for told in said["parts"]:
        part = _part(told, data, at)
        at += len(part.data)
        inflated += part.size
        if inflated > INFLATED_BYTES:
            raise FrameError("a frame would be larger unpacked than it may be")
        parts.append(part)
    if at != len(data):
        raise FrameError("a frame's parts do not fill it")
    return Frame(head=_head(said), parts=tuple(parts))


def _told(part: Part) -> dict[str, Any]:
    named = {"name": part.name, "offset": part.offset} if part.name else {}
    return {"kind": part.kind, "bytes": len(part.data), "size": part.size, **named}


def _part(told: object, data: bytes, at: int) -> Part:
    if not isinstance(told, dict) or told.get("kind") not in get_args(PartKind):
        raise FrameError("a part of a kind that is not known")
    kind: PartKind = told["kind"]
    length, size, offset = (_number(told, key) for key in ("bytes", "size", "offset"))
    name = told.get("name", "")
    if not isinstance(name, str) or not may_be_named(kind, name):
        raise FrameError(f"a part ({kind}) of a name that it may not have")
    if size > _MOST[kind] or at + length > len(data) or (kind == "steps" and size != length):
        raise FrameError(f"a part ({kind}) is larger than it may be")
    return Part(kind=kind, data=data[at : at + length], size=size, name=name, offset=offset)


def _head(said: dict[str, Any]) -> FrameHead:
    spool, bye = said.get("spool"), said.get("bye")
    if not isinstance(spool, str) or not _SPOOL.fullmatch(spool) or not (bye is None or isinstance(bye, dict)):
        raise FrameError("a frame's header is not of ours")
    return FrameHead(
        node=_number(said, "node"),
        spool=spool,
        sent_wall_ns=_number(said, "sent_wall_ns"),
        offset_ns=_signed(said.get("offset_ns")),
        rtt_ns=_signed(said.get("rtt_ns")),
        bye=bye,
    )


def _number(said: Mapping[str, Any], key: str) -> int:
    value = said.get(key, 0)
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise FrameError(f"{key} of a frame is none")
    return value


def _signed(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or abs(value) > _LARGEST:
        raise FrameError("a clock's offset in a frame is none")
    return value
