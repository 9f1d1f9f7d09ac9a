"""TOML with the line of each key, for error messages: the standard library's parser reports lines for syntax only."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["KeyPath", "TomlError", "key_lines", "parse_toml"]

KeyPath = tuple[str | int, ...]
"""Keys from the top; a number is a place in an array."""

_AT_LINE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_HEADER = re.compile(r"[ \t]*(\[\[?)")
_KEY_PART = re.compile(r'[ \t]*(?:([A-Za-z0-9_-]+)|"((?:[^"\\\n]|\\.)*)"|\'([^\'\n]*)\')[ \t]*')
_SKIPPED = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}|'  # a text may end with one or two of its own quotes
    r"'''(?:[^']|'(?!''))*'{3,5}|"
    r'"(?:[^"\\\n]|\\.)*"|'
    r"'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]+")


class TomlError(ValueError):
    """Not TOML; ``line`` is where."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.line = line


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a document; TomlError also for one that is nested too deeply."""
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        found = _AT_LINE.search(message)
        last = max(1, len(text.rstrip().splitlines()))
        line = int(found[1]) if found is not None and found[1] else last
        raise TomlError(_AT_LINE.sub("", message), line) from None
    except (RecursionError, ValueError) as error:  # a number of thousands of digits, a date that is not one
        raise TomlError("nested too deeply" if isinstance(error, RecursionError) else str(error), 1) from None
    return document


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line of each key and table of a valid document."""
    return dict(_Scanner(text).keys())


class _Scanner:
    """Walks through a document that a parser accepted, so it need not check anything but only know what is a key."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._arrays: dict[KeyPath, int] = {}
        """Number of tables so far in each array of tables."""

    def keys(self) -> Iterator[tuple[KeyPath, int]]:
        table: KeyPath = ()
        while True:
            self._skip()
            if self._at >= len(self._text):
                return
            line = self._line()
            header = _HEADER.match(self._text, self._at)
            if header is not None:
                self._at = header.end()
                table = self._table(self._dotted(), array=header[1] == "[[")
                self._at = self._text.find("]" * len(header[1]), self._at) + len(header[1])
                yield table, line
            else:
                yield from self._pair(table)

    def _pair(self, table: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        """``a.b = value`` at the present place; every part of a dotted key is on this line."""
        line = self._line()
        parts = self._dotted()
        if not parts:  # not possible in a valid document; do not stay here forever
            self._at += 1
            return
        for end in range(1, len(parts) + 1):
            yield (*table, *parts[:end]), line
        self._at += 1  # the equals sign
        yield from self._value((*table, *parts))

    def _value(self, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        self._skip()
        start = self._text[self._at : self._at + 1]
        if start == "[":
            self._at += 1
            yield from self._array(path)
        elif start == "{":
            self._at += 1
            while not self._closed("}"):
                yield from self._pair(path)
        else:
            found = _STRING.match(self._text, self._at) or _SCALAR.match(self._text, self._at)
            self._at = found.end() if found is not None else self._at + 1

    def _array(self, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        place = 0
        while not self._closed("]"):
            yield (*path, place), self._line()
            yield from self._value((*path, place))
            place += 1

    def _closed(self, end: str) -> bool:
        """Whether an array or inline table ends here; skips blanks and commas."""
        self._skip()
        while self._text[self._at : self._at + 1] == ",":
            self._at += 1
            self._skip()
        if self._at >= len(self._text) or self._text[self._at] == end:
            self._at += 1
            return True
        return False

    def _table(self, parts: KeyPath, *, array: bool) -> KeyPath:
        """The path of a table with this header; an array of tables on the way means its last table."""
        path: KeyPath = ()
        for place, part in enumerate(parts):
            path = (*path, part)
            if array and place == len(parts) - 1:
                self._arrays[path] = self._arrays.get(path, 0) + 1
            if path in self._arrays:
                path = (*path, self._arrays[path] - 1)
        return path

    def _dotted(self) -> KeyPath:
        parts: list[str | int] = []
        while (found := _KEY_PART.match(self._text, self._at)) is not None:
            self._at = found.end()
            basic = found[2]
            parts.append(_unescaped(basic) if basic is not None else found[1] or found[3] or "")
            if self._text[self._at : self._at + 1] != ".":
                break
            self._at += 1
        return tuple(parts)

    def _skip(self) -> None:
        found = _SKIPPED.match(self._text, self._at)
        self._at = found.end() if found is not None else self._at

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    return next(iter(parse_toml(f'"{text}" = 0')))
