"""What ranks write besides their dumps: faulthandler stacks, Python tracebacks, torchtitan logs. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from stepscope.records.hang import Frame, StackGroup, ThreadStack

__all__ = [
    "TRACEBACK_FRAME",
    "FailureText",
    "RankLog",
    "failure_in",
    "group_stacks",
    "is_hook_file",
    "is_stacks",
    "is_titan_log",
    "is_user_file",
    "lost_peer",
    "main_thread",
    "parse_frame",
    "parse_threads",
    "read_titan_log",
    "short_traceback",
    "site_frame",
    "user_frame",
]


# -- faulthandler stacks ----------------------------------------------------------------------------------------------
# The text may come from an untrusted file, so lines that are not in faulthandler's format are skipped.

MAX_THREADS = 1024
MAX_FRAMES = 256
"""Maximum for one thread; faulthandler stops at 100."""

_HEAD = re.compile(
    r"(?:(?P<current>Current thread|Thread) 0x(?P<number>[0-9a-fA-F]{1,16})(?: \[(?P<name>[^\n]*)\])?|Stack)"
    r" \(most recent call first\):"
)
_FRAME = re.compile(r'  File "([^\n]*)", line ([0-9]{1,9}|\?\?\?) in ([^\n]*)')
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
_OUTERMOST = ("<module>", "_run_module_as_main")
_NOT_USER_FILE = re.compile(
    r"""(?:^|/)(?:site-packages|dist-packages)/        # installed
      | ^<                                             # <frozen runpy>, <string>
      | (?:^|/)lib(?:64)?/python\d[\d.]*/              # the standard library
      | (?:^|/)python\d+\.zip/
      | (?:^|/)torch/(?:distributed|nn|autograd|utils|optim|multiprocessing|cuda|fx|jit|_\w+)(?:/|\.py)
      | (?:^|/)stepscope/(?:recorder|agent|cli|flight|hangs|ring|records)/""",
    re.VERBOSE,
)
_HOOK_FILE = re.compile(r"(?:^|/)stepscope/recorder/(?:hooks/)?\w+\.py$")


def is_hook_file(file: str) -> bool:
    """Whether the file is one of our hooks, through which a call of the script passes."""
    return _HOOK_FILE.search(file) is not None


def is_stacks(text: str) -> bool:
    return any(_HEAD.fullmatch(line) for line in text.splitlines())


def parse_threads(text: str, *, trains: int = 0) -> tuple[ThreadStack, ...]:
    """The threads in the order of the text; at most one is ``main``: the one numbered ``trains``, if any.

    Functions are without their classes, which only a handler in Python writes: bare names show what is blocked where.
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
    """The innermost frame of user code in the main thread."""
    main = main_thread(threads)
    return next((frame for frame in main.frames if is_user_file(frame.file)), None) if main else None


def site_frame(site: Sequence[Frame]) -> Frame | None:
    """The line of a call site that is useful to the user: the innermost one of user code."""
    return next((frame for frame in site if is_user_file(frame.file)), site[0] if site else None)


def is_user_file(file: str) -> bool:
    """Whether the file is user code: not installed, not Python's, not torch's, not ours."""
    return bool(file) and _NOT_USER_FILE.search(file) is None


def group_stacks(stacks: Mapping[int, tuple[ThreadStack, ...]]) -> tuple[StackGroup, ...]:
    """Group ranks at the same place; the smallest groups, which are the outliers, first."""
    alike: dict[object, list[int]] = {}
    for rank in sorted(stacks):
        alike.setdefault(_likeness(stacks[rank]), []).append(rank)
    return tuple(
        StackGroup(ranks=tuple(ranks), threads=stacks[ranks[0]])
        for ranks in sorted(alike.values(), key=lambda ranks: (len(ranks), ranks))
    )


def _likeness(threads: tuple[ThreadStack, ...]) -> object:
    """The main thread's position, to the line; for other threads the function, since helpers move while they wait."""
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
    """Undo faulthandler's escapes of non-ASCII characters."""
    return _ESCAPE.sub(_character, text)


def _character(escape: re.Match[str]) -> str:
    code = int(escape.group(1) or escape.group(2) or escape.group(3), 16)
    printable = code < 0x110000 and chr(code).isprintable()
    return chr(code) if printable else escape.group()


# -- tracebacks -------------------------------------------------------------------------------------------------------
# A traceback for people to read: the frames of libraries in one line, ours left out.

_TRACEBACK_HEAD = "Traceback (most recent call last):"
_TRACEBACK_FRAME = re.compile(r'  File "(?P<file>.+)", line \d+(?:, in .+)?')
_PACKAGE = re.compile(r"-packages/([^/]+)")
_OWN_FILE = re.compile(r"(?:^|/)stepscope/(?:recorder|cli|agent|hub|ring|records)/")
PYTHON = "Python"
"""How the line that replaces frames names the standard library."""


def short_traceback(text: str, message: str = "") -> str:
    """A traceback in which "… 7 frames in torch" replaces frames of libraries; our own are left out.

    The last frame stays, whoever it belongs to: there the exception was raised.  ``message``: left out at the end
    together with the type, for readers that show it elsewhere.  Exception groups are returned unchanged.
    """
    lines = text.rstrip().splitlines()
    if any(line.lstrip().startswith(("+ Exception Group", "| ")) for line in lines):
        return text
    found: list[str] = []
    frames: list[tuple[str, list[str]]] | None = None
    for line in lines:
        if frames is not None and (frame := _TRACEBACK_FRAME.fullmatch(line)):
            frames.append((frame["file"], [line]))
        elif frames and line.startswith("  "):
            frames[-1][1].append(line)
        else:
            found += _without_libraries(frames or ())
            frames = [] if line.endswith(_TRACEBACK_HEAD) else None
            found.append(line)
    found += _without_libraries(frames or ())
    if message and len(found) > 1 and found[-1].partition(": ")[2] == message:
        found.pop()
    return "\n".join(found)


def _without_libraries(frames: Sequence[tuple[str, list[str]]]) -> list[str]:
    shown_frames = [frame for frame in frames[:-1] if not _OWN_FILE.search(frame[0])] + list(frames[-1:])
    lines: list[str] = []
    left: list[str] = []
    for place, (file, shown) in enumerate(shown_frames):
        if place < len(shown_frames) - 1 and not is_user_file(file):
            left.append(_package(file))
            continue
        lines += [*_left_out(left), *shown]
        left = []
    return lines


def _left_out(packages: Sequence[str]) -> list[str]:
    if not packages:
        return []
    *others, last = dict.fromkeys(packages)
    whose = f"{', '.join(others)} and {last}" if others else last
    return [f"  … {len(packages)} {'frame' if len(packages) == 1 else 'frames'} in {whose}"]


def _package(file: str) -> str:
    if found := _PACKAGE.search(file):
        return found[1].removesuffix(".py")
    return "torch" if "/torch/" in f"/{file}" else PYTHON


# -- failures ---------------------------------------------------------------------------------------------------------
# The text that a rank wrote when it failed: its own fault, or only a report of a peer's.

OF_THE_NETWORK = ("DistBackendError", "DistNetworkError", "DistStoreError")
"""Exceptions that torch.distributed raises if a peer or the connection to it is gone."""
OF_PYTHON = ("OSError", "ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError")
"""Exceptions that torch's native code never raises: without a traceback they come from the script."""

PEER_LOST = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "connection closed",
    "connection was closed",
    "socket closed",
    "remote process exited",
    "ncclremoteerror",
    "nccl communicator was aborted",
    "heartbeat",
    "timed out waiting",
    "timeout waiting",
    "wait timeout",
    "failed to recv",
    "failed to connect",
    "read timeout",
    "read error",
    "write timeout",
    "nccl watchdog",
    "peer process",
    "application timeout caused pair closure",
)
"""How the death of a peer reads in the ranks that talked to it (gloo, NCCL, TCPStore)."""
DISAGREED = ("op.preamble.length", "watchdog caught collective operation timeout", "collective operation timeout")
"""How a collective fails on which ranks did not agree, or that a rank did not join."""
NATIVE = ("gloo", "nccl", "c10d", "tcpstore", "pair.cc", "pair closure", *DISAGREED)
"""Words that only the libraries below a collective write."""
FROM_A_WORKER = re.compile(r"Caught \w+ in ")
"""How torch begins the message of an exception that a DataLoader worker, or a replica, raised first."""
CHAINED = re.compile(r"\n(?:The above exception was the direct cause|During handling of the above exception).*\n")
TRACEBACK_FRAME = re.compile(r'^[^\S\n]*(?:\[rank\d+\]:)?[\s|]*File "(.+?)", line \d+', re.MULTILINE)
COLLECTIVE_FILE = re.compile(
    r"[/\\]torch[/\\](?:distributed[/\\](?!checkpoint)|nn[/\\]parallel[/\\]distributed|autograd[/\\]|_ops\.py)"
    r"|[/\\]stepscope[/\\]recorder[/\\](?:hooks[/\\])?(?:calls|collectives|ddp|functional|waiting)\.py"
)
"""Files of the innermost frame when a collective fails: the call into native code is there."""
STOPPED = ("KeyboardInterrupt", "SignalException", "SystemExit")
MESSAGE_SHOWN = 200

_LAST_LINE = re.compile(r"^(?:\[rank\d+\]:\s?)?([A-Za-z_][\w.]*)(?:: (.*))?$")


@dataclass(frozen=True, kw_only=True)
class FailureText:
    type: str
    message: str
    own: bool
    """Whether the failure began here, judging by the text."""


def failure_in(text: str) -> FailureText | None:
    """The exception at the end of the last traceback; None without a traceback."""
    at = text.rfind("Traceback (most recent call last)")
    if at < 0:
        return None
    frames = []
    for line in text[at:].splitlines()[1:]:
        if found := _LAST_LINE.match(line):
            break
        frames.append(line)
    else:
        return None
    kind, message = found[1].rpartition(".")[2], (found[2] or "").strip()
    taken = lost_peer(kind, message, "\n".join(frames)) or kind in STOPPED
    return FailureText(type=kind, message=message[:MESSAGE_SHOWN], own=not taken)


def lost_peer(kind: str, message: str, traceback: str = "") -> bool:
    """Whether an exception only says that a collective failed because of another rank.

    The words alone are not enough: a script that downloads its data also has connections refused and reset. So the
    exception, or one in its chain, must come from a collective.
    """
    if kind in OF_THE_NETWORK:
        return True
    low = f"{kind} {message}".lower()
    if not any(words in low for words in (*PEER_LOST, *DISAGREED)) or FROM_A_WORKER.match(message):
        return False
    innermost = [frames[-1] for part in CHAINED.split(traceback) if (frames := TRACEBACK_FRAME.findall(part))]
    if innermost and any(map(COLLECTIVE_FILE.search, innermost)):
        return True
    if any(words in low for words in NATIVE):
        return True
    return not innermost and kind not in OF_PYTHON


# -- torchtitan logs --------------------------------------------------------------------------------------------------
# torchtitan's structured logs: where each rank was when its log ends.
#
# One JSON object per line (``structured_logs/SOURCE.global_rank_N.….jsonl``): ``rank``, ``step``, ``log_type_name``
# with ``X_start``, ``X_end`` and ``X_error`` around a section of work, ``caller`` as ``file:line:function``.

MAX_OPEN = 64
MAX_TEXT = 400


@dataclass(frozen=True, kw_only=True)
class RankLog:
    rank: int
    step: int | None = None
    inside: tuple[str, ...] = ()
    """Sections that were started and not ended, the innermost last."""
    caller: str = ""
    error: str = ""
    time_us: int = 0


def is_titan_log(text: str) -> bool:
    return any("log_type_name" in row for row in _log_rows(text[:65536]))


def read_titan_log(text: str) -> RankLog | None:
    """Read the end of a log: the first and the last line may be cut."""
    rank, step, time_us = None, None, 0
    caller = error = ""
    inside: list[tuple[str, str]] = []
    for row in _log_rows(text):
        number = row.get("global_rank", row.get("rank"))
        if type(number) is not int or number < 0:
            continue
        rank = number
        step = row["step"] if type(row.get("step")) is int else step
        time_us = row["time_us"] if type(row.get("time_us")) is int else time_us
        name = row.get("log_type_name")
        where = row["caller"][:MAX_TEXT] if isinstance(row.get("caller"), str) else ""
        if not isinstance(name, str):
            continue
        if name.endswith("_start") and len(inside) < MAX_OPEN:
            inside.append((name.removesuffix("_start")[:MAX_TEXT], where))
        elif name.endswith("_end"):
            inside = _without_innermost(inside, name.removesuffix("_end")[:MAX_TEXT])
        elif name.endswith("_error"):
            error = row["message"][:MAX_TEXT] if isinstance(row.get("message"), str) else name
        caller = where
    if rank is None:
        return None
    return RankLog(
        rank=rank,
        step=step,
        inside=tuple(name for name, _ in inside),
        caller=inside[-1][1] if inside else caller,
        error=error,
        time_us=time_us,
    )


def _without_innermost(inside: list[tuple[str, str]], name: str) -> list[tuple[str, str]]:
    """Remove the innermost section of that name; one that began before the text is not in the list."""
    for place in range(len(inside) - 1, -1, -1):
        if inside[place][0] == name:
            return inside[:place] + inside[place + 1 :]
    return inside


def _log_rows(text: str) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
