"""The events of a Chrome trace as pieces of text, each a JSON array: a file of any size in little memory.

A trace is ``{…header…, "traceEvents": [event, …], …trailer…}``, or the bare array.  The text arrives in blocks; each is
cut after the last event that is complete in it.  Where an event ends is guessed by ``}, {`` and proved by decoding: a
piece that was cut anywhere else is no valid JSON, whatever the nesting and the strings in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from stepscope.errors import TraceError

__all__ = ["EventText"]

Events = TypeVar("Events")

HEAD = re.compile(rb'"traceEvents"\s*:\s*\[')
BARE = re.compile(rb"\s*\[\s*(?=\{|\])")
BETWEEN = re.compile(rb"\}\s*,\s*\{")
END = re.compile(rb"\}\s*\]")
LONGEST_HEAD = 64 << 20
"""Without events until there, the file is none of ours."""
TRIES = 200
"""Guesses at where the last event of a block ends, before more text is waited for."""


class EventText(Generic[Events]):
    """Iterating gives decoded pieces; afterwards ``header`` and ``truncated`` say the rest."""

    def __init__(self, blocks: Iterable[bytes], decode: Callable[[bytes], Events]) -> None:
        self._blocks = iter(blocks)
        self._decode = decode
        self.header: dict[str, Any] = {}
        """What stands beside the events."""
        self.truncated: str | None = None
        self._before = b""

    def __iter__(self) -> Iterator[Events]:
        text = self._to_first_event()
        while True:
            block = next(self._blocks, None)
            if block is None:
                break
            text += block
            piece, text = self._complete(text)
            if piece is not None:
                yield piece
        yield from self._rest(text)

    def _to_first_event(self) -> bytes:
        text = b""
        for block in self._blocks:
            text += block
            bare = BARE.match(text)
            if bare:
                return text[bare.end() :]
            head = HEAD.search(text)
            if head and text.lstrip()[:1] == b"{":
                self._before = text[: head.start()]
                return text[head.end() :]
            if len(text) > LONGEST_HEAD:
                break
        if not text.strip():
            raise TraceError("is empty")
        raise TraceError("is no trace: there is no list of traceEvents in it")

    def _complete(self, text: bytes) -> tuple[Events | None, bytes]:
        """The complete events at the start of the text, and what is left of it."""
        end = len(text)
        for _ in range(TRIES):
            end = text.rfind(b"}", 0, end)
            if end < 0:
                break
            between = BETWEEN.match(text, end)
            if between is None:
                continue
            piece = self._try(text[: end + 1])
            if piece is not None:
                return piece, text[between.end() - 1 :]
        return None, text

    def _rest(self, text: bytes) -> Iterator[Events]:
        """The last events and the trailer, or as many events as a cut-off file still has."""
        if not text.strip().rstrip(b"]}, \n\r\t"):
            self._close(b"")
            return
        for end in END.finditer(text):
            piece = self._try(text[: end.start() + 1])
            if piece is not None:
                yield piece
                self._close(text[end.end() :])
                return
        self.truncated = "it ends in the middle of an event"
        self._close(b"")
        piece, _ = self._complete(text + b",{")
        if piece is not None:
            yield piece

    def _try(self, text: bytes) -> Events | None:
        try:
            return self._decode(b"[" + text + b"]")
        except msgspec.DecodeError:
            return None

    def _close(self, after: bytes) -> None:
        """Header and trailer together are an object without its events."""
        for end in (after, b"}"):
            try:
                header = msgspec.json.decode(self._before + b'"traceEvents":[]' + end)
            except msgspec.DecodeError:
                continue
            if isinstance(header, dict):
                self.header = header
                return
