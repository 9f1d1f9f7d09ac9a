"""The entries of a pickled dump read off its bytes, without making an object of each frame of each entry.

Unpickling takes most of the time of reading a dump, and most of that goes into frames: ten to twenty-five dictionaries
per entry, of a few different stacks in all.  torch writes every entry the same way, so entries that say the same differ
in a few bytes only, always at the same places: their numbers, and the numbers that the pickle gives to new objects (its
memo).  The first of them is unpickled and becomes a ``_Mould``; of what fits it only the numbers are taken.
Whatever does not look exactly as torch writes it makes ``quick_dump`` answer None, and the whole file is unpickled.

Numbers of the memo count up, by one with each object.  So they are all known from the first one of an entry, and taking
that one off each of them leaves the same for all entries that fit: a damaged one, which would make later entries mean
something else, is noticed.

A string that was written before is a number in the bytes, so one unpickler, which keeps its memo from one part to the
next, is given all parts that are unpickled, in the order of the file.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from stepscope.errors import DumpError
from stepscope.flight.build import Builder, Common, state_of
from stepscope.flight.decode import builder_for, finish_dump
from stepscope.flight.entries import Dump
from stepscope.flight.pickles import PlainUnpickler, memory_bounded

__all__ = ["quick_dump"]

SMALLEST = 1 << 16
"""Below, nothing is gained."""
LARGEST_ENTRY = 1 << 15
"""Entries of torch are smaller; also, nothing of that size nests deep enough to do harm."""

_ENTRIES = b"X\x07\x00\x00\x00entries"
_PUT = rb"(?:q.|r....)"
_PUT_OPS = ("BINPUT", "LONG_BINPUT")
_INT = rb"(K.|M..|J....|\x8a\x08.{8})"
_TIME = rb"(N|K.|M..|J....|\x8a\x08.{8})"
_FLAG = rb"([\x88\x89])"
_LIST = re.compile(rb"\]" + _PUT + rb"\(\}" + _PUT, re.DOTALL)
_BETWEEN = re.compile(rb"(?:e\()?\}" + _PUT, re.DOTALL)
"""From one entry to the next; a long list is written in parts."""
_WIDTHS = {b"K": "B", b"M": "H", b"J": "i", b"\x8a": "q"}
_NUMBERS = (1, 3, 4, 5, 7, 11, 12)
"""Groups of the pattern of an entry: record id, sequence numbers, op id, and the instants."""


class _Mould(NamedTuple):
    mask: int
    """The bits that must not differ, as a number …"""
    bits: int
    """… and what they are, when the number that the memo gets next is taken off at …"""
    puts: int
    """… each place where it gets one (there is a one there)."""
    objects: int
    """How many numbers the memo gets."""
    numbers: Callable[[bytes], tuple[int, ...]]
    """Of an entry: the five that each has, then when it started and ended, if it tells."""
    common: Common


def quick_dump(data: bytes, *, source: str, rank: int | None) -> Dump | None:
    """The same as unpickling and decoding, or None."""
    if len(data) < SMALLEST or data[:3] != b"\x80\x02}":
        return None
    try:
        with memory_bounded(len(data)):
            return _Scan(data).dump(source, rank)
    except (_Unlike, DumpError, pickle.UnpicklingError, EOFError, MemoryError, OverflowError):
        return None
    except (AttributeError, ImportError, LookupError, TypeError, ValueError):
        return None


class _Unlike(Exception):
    """Not as torch writes it."""


class _Scan:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._part = io.BytesIO()
        self._unpickler = PlainUnpickler(self._part)
        key = data.find(_ENTRIES)
        opening = _after_put(data, key + len(_ENTRIES)) if key >= 0 else -1
        begun = _LIST.match(data, opening) if opening >= 0 else None
        if begun is None:
            raise _Unlike
        self._first = begun.end()
        self._next = 0
        """The number that the memo gets next."""
        self._around: dict[str, Any] = self._unpickled(data[:opening] + b"]u.")
        self._counted(data[: self._first] + b".")
        self._builder: Builder = builder_for(self._around)
        self._with_frames = data[self._first + 1 :].startswith(_literal("frames"))
        self._entry = re.compile(self._pattern(), re.DOTALL)
        self._moulds: dict[int, list[_Mould]] = {}
        """By the length of the entry."""

    def dump(self, source: str, rank: int | None) -> Dump:
        data, moulds = self._data, self._moulds
        taken: dict[int, list[tuple[Common, tuple[int, ...]]]] = {}
        next_one = b"(" + (self._get("frames") + b"]" if self._with_frames else self._get("record_id"))
        at = self._first
        while (following := data.find(next_one, at + 1)) >= 0:
            entry = data[at:following]
            bits = int.from_bytes(entry, "little")
            for mould in moulds.get(len(entry), ()):
                if (bits - self._next * mould.puts) & mould.mask == mould.bits:
                    self._next += mould.objects
                    break
            else:
                mould = self._learned(entry, bits)
            taken.setdefault(id(mould.common.shape.columns), []).append((mould.common, mould.numbers(entry)))
            at = following
        for rows in taken.values():
            if not self._builder.add_many(rows[0][0].shape.columns, rows):
                raise _Unlike
        last = self._matched(data[at : at + LARGEST_ENTRY], whole=False)
        self._builder.add_row(self._unpickled(b"}" + last.group() + b"."))
        self._counted(data[at:])
        rest = data[at + last.end() :]
        if rest[:1] != b"e":
            raise _Unlike
        if rest != b"eu.":
            self._around.update(self._unpickled(b"}(" + rest[1:]))
        return finish_dump(self._around, self._builder, source=source, rank=rank)

    def _learned(self, entry: bytes, bits: int) -> _Mould:
        """From an entry like none before: what it means, and which of its bytes are but numbers."""
        found = self._matched(entry, whole=True)
        row = self._unpickled(b"}" + found.group() + b".")
        mask = bytearray(b"\xff" * len(entry))
        layout, at = "<", 0
        for group in _NUMBERS:
            start, end = found.span(group)
            if (kind := entry[start : start + 1]) != b"N":
                start += 2 if kind == b"\x8a" else 1
                layout += f"{start - at}x{_WIDTHS[kind]}"
                mask[start:end] = bytes(end - start)
                at = end
        lasted, until = found.span(8)
        mask[lasted:until] = bytes(until - lasted)
        same = int.from_bytes(mask, "little")
        begun = self._next
        places = self._counted(entry + b".")
        puts = sum(1 << 8 * place for place in places)
        shape = self._builder.known_shape(row)
        told = {"retired": found[13] == b"\x88", "started": found[11] != b"N", "ended": found[12] != b"N"}
        state = state_of(shape, row["state"], **told)
        common = Common(shape=shape, site=self._builder.site(row.get("frames")), state=state)
        mould = _Mould(
            mask=same,
            bits=bits - begun * puts & same,
            puts=puts,
            objects=len(places),
            numbers=struct.Struct(layout).unpack_from,
            common=common,
        )
        self._moulds.setdefault(len(entry), []).append(mould)
        return mould

    def _counted(self, part: bytes) -> list[int]:
        """Where in it the memo gets its numbers, which must be the next ones."""
        found = [
            (number, at + 1) for op, number, at in pickletools.genops(part) if op.name in _PUT_OPS and at is not None
        ]
        if [number for number, _ in found] != list(range(self._next, self._next + len(found))):
            raise _Unlike
        self._next += len(found)
        return [at for _, at in found]

    def _matched(self, entry: bytes, *, whole: bool) -> re.Match[bytes]:
        """``whole``: up to where the next one begins."""
        found = self._entry.match(entry) if len(entry) <= LARGEST_ENTRY else None
        if found is None or (whole and _BETWEEN.fullmatch(entry, found.end()) is None):
            raise _Unlike
        return found

    def _unpickled(self, part: bytes) -> Any:
        self._part.seek(0)
        self._part.truncate()
        self._part.write(part)
        self._part.seek(0)
        return self._unpickler.load()

    def _pattern(self) -> bytes:
        """An entry, from the mark that opens it to its end."""
        key = self._key
        lasted = b"(?:" + key("duration_ms") + b"G(.{8}))?" if _literal("duration_ms") in self._data else b"()"
        frames = key("frames") + rb"\](?:" + _PUT + rb")?\(.{0,30000}?ue" if self._with_frames else b""
        return b"".join(
            (
                rb"\(", frames, key("record_id"), _INT, b"(", key("pg_id"), b".{1,512}?)", key("collective_seq_id"),
                _INT, key("p2p_seq_id"), _INT, key("op_id"), _INT, b"(", key("profiling_name"), b".{1,512}?)",
                key("time_created_ns"), _INT, lasted, b"(.{1,8192}?)", key("state"), b"(.{1,32}?)",
                key("time_discovered_started_ns"), _TIME, key("time_discovered_completed_ns"), _TIME,
                key("retired"), _FLAG, b".{0,64}?u(?=[}e])",
            )
        )  # fmt: skip

    def _key(self, name: str) -> bytes:
        """A key: by its number, or in letters where it stands for the first time."""
        return b"(?:" + re.escape(self._get(name)) + b"|" + re.escape(_literal(name)) + _PUT + b")"

    def _get(self, name: str) -> bytes:
        at = self._data.find(_literal(name))
        put = self._data[at + 5 + len(name) :][:5] if at >= 0 else b""
        if put[:1] == b"q":
            return b"h" + put[1:2]
        if put[:1] != b"r":
            raise _Unlike
        return b"j" + put[1:5] if put[2:5] != b"\x00\x00\x00" else b"h" + put[1:2]


def _literal(name: str) -> bytes:
    return b"X" + len(name).to_bytes(4, "little") + name.encode()


def _after_put(data: bytes, at: int) -> int:
    return at + {b"q": 2, b"r": 5}.get(data[at : at + 1], 0)
