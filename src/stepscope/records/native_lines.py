"""Lines that native code prints on its way out: which of a log's lines they are, and whose where ranks share a file.

NCCL puts host, process and thread before each of its lines; torch's C++ puts ``[rank3]:`` before what it logs, and
names the rank in the errors of its watchdog.  What glibc, the C++ runtime and the CUDA driver print says nothing of
whose it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["is_native", "labelled_pid", "labelled_rank", "last_native_lines", "plain_line", "without_escapes"]

LONGEST_LINE = 300
MOST_LINES = 12
_NCCL = re.compile(r"^\S+:(?P<pid>\d+):\d+ \[-?\d+\](?: [\d.:-]+)? (?:\S+:\d+ )?NCCL (?P<level>[A-Z]+) ")
_TORCH = re.compile(r"^\[rank(?P<rank>\d+)\]:\s?\[[A-Z]\d{4} ")
_TORCH_RANK = re.compile(r"\[PG .{0,200}?\bRank (?P<rank>\d+)\]")
_TELLING = re.compile(
    r"""
    (?P<bare>                                  # may come right behind a progress bar, whose line has no end yet
        terminate\ called\ (?:after|without|recursively)\b
        | (?:malloc|free|realloc|calloc|munmap_chunk|mremap_chunk|sysmalloc|tcache_\w+)\(\):[ ]
        | double\ free\ or\ corruption\b
        | corrupted\ (?:size\ vs|double-linked|unsorted)
        | Fatal\ glibc\ error\b
        | \*\*\*\ (?:stack\ smashing|buffer\ overflow|longjmp)
        | Fatal\ Python\ error:[ ]           # faulthandler
    )
    | \bNCCL\ (?:WARN|ERROR)\b
    | ^(?:\[rank\d+\]:\s?)?\[[EF]\d{4}[ ]      # torch's C++: an error, or fatal
    | ^(?:libc\+\+abi:\ |\s*what\(\):)         # the C++ runtime
    | \bAssertion\ [`'].*\ failed              # assert() of C, and of a CUDA kernel
    | ^\*\*\*\ (?:SIG[A-Z]+|Aborted\ at)[ ]    # glog
    | ^==\d+==\ ?ERROR:[ ]                     # sanitizers
    """,
    re.VERBOSE,
)
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_SECRET = re.compile(
    r"(?i)((?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|credential|authorization)\w*['\"]?\s*[=:]\s*['\"]?)"
    r"(?:bearer\s+|basic\s+)?[^\s'\",;]+"
)
_USER_IN_URL = re.compile(r"(://)[^/\s@]+@")
_NUMBERS = re.compile(r"\d+")


def is_native(line: str) -> bool:
    """Whether native code is known to print such a line when something is wrong."""
    return _TELLING.search(line) is not None


def labelled_pid(line: str) -> int | None:
    """The process that one of NCCL's lines names."""
    found = _NCCL.match(line)
    return int(found["pid"]) if found else None


def labelled_rank(line: str) -> int | None:
    """The rank that a line of torch's C++ names; what Python logs carries another label."""
    found = _TORCH.match(line) or (_TORCH_RANK.search(line) if is_native(line) else None)
    return int(found["rank"]) if found else None


def last_native_lines(lines: Iterable[str], most: int = MOST_LINES) -> tuple[str, ...]:
    """The last ones, made plain; lines that differ by numbers alone (one for each thread of a kernel) are told once."""
    kinds: dict[str, tuple[str, int]] = {}
    for line in lines:
        text = line.rstrip().rpartition("\r")[2]
        found = _TELLING.search(text)
        if found is None:
            continue
        text = plain_line(text[found.start() :] if found["bare"] else text)
        kind = _NUMBERS.sub("0", text)
        first, times = kinds.pop(kind, (text, 0))
        kinds[kind] = first, times + 1
    told = list(kinds.values())[-most:]
    return tuple(text if times == 1 else f"{text} (and {times - 1:,} more like it)" for text, times in told)


def without_escapes(line: str) -> str:
    """A line without colours and whatever else a terminal obeys."""
    return _ESCAPES.sub("", line)


def plain_line(line: str) -> str:
    """One line of bounded length, without what a terminal would obey and without what reads like a password."""
    text = without_escapes(line).strip()
    text = "".join(char if char.isprintable() else "?" for char in text)
    text = _USER_IN_URL.sub(r"\1…@", _SECRET.sub(r"\1…", text))
    return text if len(text) <= LONGEST_LINE else text[: LONGEST_LINE - 1] + "…"
