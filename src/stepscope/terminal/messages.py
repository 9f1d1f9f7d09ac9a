"""Server-sent events: from the bytes of a stream to messages.  Pure.

A message is a block of ``name: value`` lines that an empty line ends.  The bytes may be cut anywhere.  A block that is
longer than ``MOST_BYTES`` is none of ours: it is dropped as it comes, and the reader is told that something is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MOST_BYTES", "Message", "Messages"]

MOST_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Message:
    event: str
    data: bytes = b""
    id: str = ""


class Messages:
    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._pieces: list[bytes] = []
        self._held = 0
        self._passing = False
        self.dropped = 0
        """Blocks that were too long."""

    def feed(self, piece: bytes) -> list[Message]:
        """The messages that are whole now."""
        piece = piece.replace(b"\r", b"")  # a proxy may end lines in its own way
        tail = self._pieces[-1][-1:] if self._pieces else b""
        if b"\n\n" not in piece and not (tail == b"\n" and piece.startswith(b"\n")):
            self._hold(piece)
            return []
        *blocks, rest = (b"".join(self._pieces) + piece).split(b"\n\n")
        self._pieces, self._held = [], 0
        found: list[Message] = []
        for block in blocks:
            if self._passing or len(block) > self._most:
                self._passing = False
                self.dropped += 1
            elif message := _message(block):
                found.append(message)
        self._hold(rest)
        return found

    def _hold(self, piece: bytes) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held > self._most:
            self._passing = True
            # The last byte alone can be half of the block's end.
            self._pieces, self._held = [piece[-1:]], 1


def _message(block: bytes) -> Message | None:
    """None for a comment, a ``retry``, or anything else that is no event."""
    event, data, number = "", b"", ""
    for line in block.split(b"\n"):
        name, colon, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not colon:
            continue
        if name == b"event":
            event = value.decode("ascii", "replace")
        elif name == b"data":
            data += b"\n" + value if data else value
        elif name == b"id" and b"\0" not in value:
            number = value.decode("ascii", "replace")
    return Message(event=event, data=data, id=number) if event else None
