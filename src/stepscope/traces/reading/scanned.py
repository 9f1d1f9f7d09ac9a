"""What the optional scanner in C (``native_scan.c``) found in a piece of text, to columns.

The scanner reads pieces of ordinary events without a Python object per event, and leaves all others to
``kineto_events.py``. Both ways lead to the same columns, down to the numbers of strings and threads: those are given in
the order in which the reader in Python meets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.columns import Ints, TraceBuilder, kind_of
from stepscope.traces.model.native_parts import PURE, native_part
from stepscope.traces.reading.kineto_events import UNREADABLE, Metadata

__all__ = ["PURE", "Batch", "Scanned", "Scanner", "or_missing", "scanner_function", "text_codes"]

METADATA = msgspec.json.Decoder(Metadata)
STRING = msgspec.json.Decoder(str)
PLACE: Any = msgspec.json.Decoder(int | str)

Scan = Callable[[bytes, Mapping[bytes, int], Mapping[bytes, int]], Any]


def scanner_function() -> Scan | None:
    """Return the scanner, or None if it was not built or is switched off."""
    module = native_part("stepscope.traces.reading.native_scan")
    return None if module is None else module.scan


class _Kinds(dict[bytes, int]):
    """Kinds by category as written."""

    def __missing__(self, category: bytes) -> int:
        kind = self[category] = int(kind_of(category.decode()))
        return kind


class _Matches(dict[bytes, int]):
    """Whether a name, as written, matches."""

    def __init__(self, matches: Callable[[str], object]) -> None:
        super().__init__()
        self._matches = matches

    def __missing__(self, name: bytes) -> int:
        answer = self[name] = int(bool(self._matches(_text(name))))
        return answer


class Scanner:
    def __init__(self, scan: Scan, with_settings: Callable[[str], object]) -> None:
        """``with_settings`` tests an operator's name: its FLOPs need more than its shapes."""
        self._scan = scan
        self._kinds = _Kinds()
        self._settings = _Matches(with_settings)

    def __call__(self, text: bytes) -> Scanned | None:
        """Scan a JSON array; None if anything in it is unusual."""
        found = self._scan(text, self._kinds, self._settings)
        if found is None:
            return None
        events, columns, texts = found
        ends = np.frombuffer(columns.pop("metadata", (b"", ""))[0], np.int64).tolist()
        try:
            metadata = [METADATA.decode(text[start:end]) for start, end in zip(ends[::2], ends[1::2], strict=True)]
        except UNREADABLE:
            return None
        return Scanned(len(text), events, columns, texts, metadata)


class Scanned:
    """One piece: its columns, and the texts that codes in them stand for."""

    def __init__(
        self, size: int, events: int, columns: dict[str, Any], texts: dict[str, list[bytes]], metadata: list[Any]
    ) -> None:
        self.size = size
        self.events = events
        """Their number, of all kinds."""
        self.metadata: list[Metadata] = metadata
        self.columns: dict[str, tuple[bytes, str]] = columns
        """Values and their type, by name."""
        self.texts = texts
        """Of each column of codes, in the order in which they first appear."""

    @property
    def slices(self) -> int:
        return len(self.columns["kind"][0]) if "kind" in self.columns else 0

    def places(self, column: str) -> list[tuple[int | str, int | str]]:
        """Return the distinct pid and tid of a column of threads, as in the file."""
        apart = [text.split(b"\0") for text in self.texts.get(column, ())]
        return [(PLACE.decode(pid), PLACE.decode(tid)) for pid, tid in apart]


RAW: Final = ("concrete", "dims", "types", "ranks")
"""Columns of JSON texts; those of the other strings are quoted in the file."""
ORDER: Final = (
    *("name", "concrete", "dims", "types", "stack", "module"),
    *("collective", "group", "description", "ranks", "dtype"),
)
"""Columns of strings, as the reader in Python meets them in a piece."""
THREADS: Final = ("thread", "memory_thread", "arrow_thread")


class TextCodes(dict[bytes, int]):
    """Codes of strings by their text as written; one form for all columns that have it."""

    def __init__(self, builder: TraceBuilder, text_of: Callable[[bytes], str]) -> None:
        super().__init__()
        self._strings = builder.strings
        self._text_of = text_of

    def __missing__(self, raw: bytes) -> int:
        code = self[raw] = self._strings[self._text_of(raw)]
        return code


def text_codes(builder: TraceBuilder) -> dict[str, TextCodes]:
    """By column."""
    quoted, raw = TextCodes(builder, _text), TextCodes(builder, bytes.decode)
    return {name: raw if name in RAW else quoted for name in ORDER}


class Batch:
    """Consecutive pieces. Only their texts are looked up piece by piece: numpy's calls cost more than what they do."""

    def __init__(self, text_codes: dict[str, TextCodes], thread_of: Callable[[int | str, int | str], int]) -> None:
        self._text_codes = text_codes
        self._thread_of = thread_of
        self._pieces: list[Scanned] = []
        self._codes: dict[str, list[int]] = {name: [] for name in (*ORDER, *THREADS)}
        """Of the texts of all pieces; for strings, those of each piece follow a −1, which stands for a missing text."""
        self._before: dict[str, list[int]] = {name: [] for name in (*ORDER, *THREADS)}
        """Where the texts of each piece begin among them."""
        self.places: list[tuple[int | str, int | str]] = []
        """Pid and tid of the texts of ``thread``."""

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, piece: Scanned) -> None:
        self._pieces.append(piece)
        for name in ORDER:
            codes = self._codes[name]
            codes.append(-1)
            self._before[name].append(len(codes))
            codes += map(self._text_codes[name].__getitem__, piece.texts.get(name, ()))
        for name in THREADS:
            codes = self._codes[name]
            self._before[name].append(len(codes))
            places = piece.places(name)
            codes += [self._thread_of(pid, tid) for pid, tid in places]
            if name == "thread":
                self.places += places

    def columns(self) -> dict[str, NDArray[Any]]:
        """Join the columns; those of codes have the trace's numbers, and rows count the slices of the batch."""
        joined = {}
        kinds = {name: each[1] for piece in self._pieces for name, each in piece.columns.items()}
        for name, kind in kinds.items():
            parts = [piece.columns.get(name, (b"", ""))[0] for piece in self._pieces]
            values = joined[name] = np.frombuffer(b"".join(parts), kind)
            lengths = [len(part) // values.itemsize for part in parts]
            if name.endswith("_row"):
                before = np.cumsum([0, *[piece.slices for piece in self._pieces]])[:-1]
                joined[name] = values + np.repeat(before, lengths)
            elif name in self._codes:
                at = values + np.repeat(self._before[name], lengths)
                joined[name] = np.array(self._codes[name], np.int32)[at]
        if "thread" in kinds:
            parts = [piece.columns.get("thread", (b"", ""))[0] for piece in self._pieces]
            lengths = [len(part) // 4 for part in parts]
            joined["place"] = np.frombuffer(b"".join(parts), np.int32) + np.repeat(self._before["thread"], lengths)
        return joined


def _text(raw: bytes) -> str:
    """Return the string that is written like this between quotes."""
    return STRING.decode(b'"' + raw + b'"') if b"\\" in raw else raw.decode()


def or_missing(values: Ints, limit: int) -> Ints:
    """Return −1 instead of values that are negative or not below the limit."""
    return np.where((values >= 0) & (values < limit), values, -1)
