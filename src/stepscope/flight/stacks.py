"""Stacks as faulthandler writes them: text in, threads out; which line is the user's own; which ranks are alike.  Pure.

The text may come from a file somebody else wrote, so a line that is not one of faulthandler's is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath

from stepscope.records.hang import Frame, StackGroup, ThreadStack

__all__ = [
    "group_stacks",
    "is_ours",
    "is_stacks",
    "is_users",
    "main_thread",
    "parse_frame",
    "parse_threads",
    "user_frame",
]

MAX_THREADS = 1024
MAX_FRAMES = 256
"""Of one thread: faulthandler itself stops at 100."""

_HEAD = re.compile(
    r"(?:(?P<current>Current thread|Thread) 0x(?P<number>[0-9a-fA-F]{1,16})(?: \[(?P<name>[^\n]*)\])?|Stack)"
    r" \(most recent call first\):"
)
_FRAME = re.compile(r'  File "([^\n]*)", line ([0-9]{1,9}|\?\?\?) in ([^\n]*)')
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
_OUTERMOST = ("<module>", "_run_module_as_main")
_NOT_USERS = re.compile(
    r"""(?:^|/)(?:site-packages|dist-packages)/        # installed
      | ^<                                             # <frozen runpy>, <string>
      | (?:^|/)lib(?:64)?/python\d[\d.]*/              # the standard library
      | (?:^|/)python\d+\.zip/
      | (?:^|/)torch/(?:distributed|nn|autograd|utils|optim|multiprocessing|cuda|fx|jit|_\w+)(?:/|\.py)
      | (?:^|/)stepscope/(?:(?:recorder|agent|cli|flight|hangs|ring|records)/|testing/\w+\.py$)""",
    re.VERBOSE,
)
_OURS = re.compile(r"(?:^|/)stepscope/recorder/\w+\.py$")


def is_ours(file: str) -> bool:
    """Whether it is a hook of ours, through which a call of the script went."""
    return _OURS.search(file) is not None


def is_stacks(text: str) -> bool:
    return any(_HEAD.fullmatch(line) for line in text.splitlines())


def parse_threads(text: str, *, trains: int = 0) -> tuple[ThreadStack, ...]:
    """The threads in the order of the text; at most one of them is ``main``: the one numbered ``trains``, if any.

    Functions without their classes, which only a handler in Python writes: what is blocked where is told by bare names.
    """
    names: list[str] = []
    stacks: list[list[Frame]] = []
    training: int | None = None
    single = False
    for line in text.split("\n"):
        head = _HEAD.fullmatch(line)
        if head:
            if len(stacks) == MAX_THREADS:
                break
            if trains and head["number"] and int(head["number"], 16) == trains:
                training = len(stacks)
            names.append(_plain(head["name"] or ""))
            stacks.append([])
            single = head["current"] is None
        elif stacks and len(stacks[-1]) < MAX_FRAMES and (frame := parse_frame(line)) is not None:
            stacks[-1].append(replace(frame, function=frame.function.rpartition(".")[2]))
    main = training if training is not None else 0 if single and len(stacks) == 1 else _main(stacks)
    return tuple(
        ThreadStack(main=number == main, name=name, frames=tuple(frames))
        for number, (name, frames) in enumerate(zip(names, stacks, strict=True))
    )


def parse_frame(line: str) -> Frame | None:
    found = _FRAME.fullmatch(line)
    if found is None:
        return None
    file, number, function = found.groups()
    return Frame(file=_plain(file), line=int(number) if number.isdecimal() else 0, function=_plain(function))


def main_thread(threads: Iterable[ThreadStack]) -> ThreadStack | None:
    return next((thread for thread in threads if thread.main), None)


def user_frame(threads: Iterable[ThreadStack]) -> Frame | None:
    """The innermost frame of the main thread that is the user's own code."""
    main = main_thread(threads)
    return next((frame for frame in main.frames if is_users(frame.file)), None) if main else None


def is_users(file: str) -> bool:
    """Whether code in that file is the user's own: not installed, not Python's, not torch's, not ours."""
    return bool(file) and _NOT_USERS.search(file) is None


def group_stacks(stacks: Mapping[int, tuple[ThreadStack, ...]]) -> tuple[StackGroup, ...]:
    """Ranks at the same place together; the smallest groups, which are the odd ones, first."""
    alike: dict[object, list[int]] = {}
    for rank in sorted(stacks):
        alike.setdefault(_likeness(stacks[rank]), []).append(rank)
    return tuple(
        StackGroup(ranks=tuple(ranks), threads=stacks[ranks[0]])
        for ranks in sorted(alike.values(), key=lambda ranks: (len(ranks), ranks))
    )


def _likeness(threads: tuple[ThreadStack, ...]) -> object:
    """Where the main thread is, to the line; of the others only in which function: helpers move about as they wait."""
    main = main_thread(threads)
    others = sorted((t.frames[0].file, t.frames[0].function) for t in threads if not t.main and t.frames)
    return (main.frames if main else None, tuple(others))


def _main(stacks: list[list[Frame]]) -> int | None:
    """The thread that runs the script; faulthandler lists it last."""
    script = [number for number, frames in enumerate(stacks) if frames and frames[-1].function in _OUTERMOST]
    if script:
        return script[-1]
    others = [number for number, frames in enumerate(stacks) if frames and not _helper(frames[-1])]
    return others[-1] if others else None


def _helper(outermost: Frame) -> bool:
    return PurePosixPath(outermost.file).name == "threading.py"


def _plain(text: str) -> str:
    """Undo faulthandler's escapes of what is not ASCII."""
    return _ESCAPE.sub(_character, text)


def _character(escape: re.Match[str]) -> str:
    code = int(escape.group(1) or escape.group(2) or escape.group(3), 16)
    printable = code < 0x110000 and chr(code).isprintable()
    return chr(code) if printable else escape.group()
