"""The logs of a run: copied from files that ranks print to, bounded in size, and searched for known lines.

A process whose descriptors 1 or 2 are regular files reports them in ``outputs/PID.json`` (``recorder/output.py``) and
keeps writing to them.  The agent copies what is new, from outside:

    a file of one process       all of it goes into that process's log: output of native code and children, in order
    a file that ranks share     lines of NCCL and torch's C++ that name their rank go into that rank's log; other lines
                                that native code is known to print when it dies go into the job's, ``main.log``
    our own file in memory      like the first; memory that was copied is returned to the system

The position in each file is kept next to the notes, so that a new agent can continue after one that died.  When the run
is over, the first process that opens it copies the rest and removes the folder.  The job never notices any of this.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import re
import shutil
import stat
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.errors import NotARun
from stepscope.records.files import file_mode, open_file
from stepscope.records.paths import PRINTED_SUFFIX, log_of_rank, log_path, outputs_folder
from stepscope.records.series import RankError, RankSeries
from stepscope.store.documents import read_meta
from stepscope.store.file_io import read_document, write_json
from stepscope.store.liveness import session_of

__all__ = [
    "OutputCopier",
    "bound_log",
    "bound_logs",
    "copy_rest",
    "data_at",
    "is_native",
    "labeled_pid",
    "labeled_rank",
    "last_native_lines",
    "log_share",
    "plain_line",
    "punch_hole",
    "read_last_line",
    "read_native",
    "read_training_log",
    "timer_line",
    "training_line",
    "training_summary",
]


# -- log limits -------------------------------------------------------------------------------------------------------
# Bound the logs of a run: each log keeps its beginning and its end, and the middle is freed.
#
#     0 … FIRST        as printed; the last bytes are a line that says what was dropped
#     FIRST … -LAST    a hole: it takes no space and reads as zeros
#     -LAST …          as printed, including the error at the end
#
# Writers and readers of a log need not know: no byte changes its position, the file is never renamed, cut or locked,
# and a process can keep appending while the hole is made (``fallocate`` with ``FALLOC_FL_PUNCH_HOLE``).  A file system
# without that support (NFS before 4.2, some FUSE ones) keeps logs whole; ``bound_logs`` then returns False.

EACH_BYTES = 64 << 20
"""Approximate limit per log if there are few …"""
ALL_BYTES = 4 << 30
"""… limit for all logs of a run …"""
LEAST_BYTES = 1 << 20
"""… and minimum per log."""
_FIRST_PART = 16
"""One sixteenth of what is kept is the beginning."""
_ALIGNED = 1 << 16
"""The largest block size of any file system; aligned holes leave no zeros at either end."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_WIDTH = 120
PunchHole = Callable[[int, int, int], bool]
"""Frees bytes of a descriptor from an offset on; see ``punch_hole``."""


def log_share(logs: int, all_bytes: int = ALL_BYTES) -> int:
    """Return how many bytes each of ``logs`` logs may take."""
    return max(LEAST_BYTES, min(EACH_BYTES, all_bytes // max(1, logs)))


def bound_logs(run_dir: Path, *, all_bytes: int = ALL_BYTES, punch: PunchHole | None = None) -> bool:
    """Bound all logs; return whether this file system supports it.  OSError for other failures."""
    try:
        names = [entry.name for entry in os.scandir(run_dir / "logs") if entry.name.endswith(".log")]
    except FileNotFoundError:
        return True
    share = log_share(len(names), all_bytes)
    return all(bound_log(run_dir / "logs" / name, share, punch=punch) for name in sorted(names))


def bound_log(path: Path, share: int, *, punch: PunchHole | None = None) -> bool:
    """Bound one log, as ``bound_logs`` does, once it is a quarter longer than its share."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return True
    # A file with a second name may also belong to another program.
    if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1 or about.st_blocks * 512 < share + share // 4:
        return True
    first = max(_ALIGNED, share // _FIRST_PART // _ALIGNED * _ALIGNED)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        end = (size - (share - first)) // _ALIGNED * _ALIGNED
        if end <= first:
            return True
        if not (punch or punch_hole)(fd, first, end - first):
            return False
        if os.fstat(fd).st_size >= size:  # it was not truncated in the meantime
            os.pwrite(fd, _line(end - first), first - _WIDTH)
        return True
    finally:
        os.close(fd)


def data_at(fd: int, offset: int) -> tuple[int, int]:
    """Return the first position from ``offset`` outside a hole, and the position of the next hole or the end."""
    try:
        begin = os.lseek(fd, offset, os.SEEK_DATA)
        return begin, os.lseek(fd, begin, os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return offset, offset


def _line(dropped: int) -> bytes:
    """Return the line about dropped bytes.  Its length is fixed, so that it overwrites the previous one."""
    text = f"[stepscope: {dropped:,} bytes of output were dropped here to limit the size of this log]"
    return b"\n" + text.encode().ljust(_WIDTH - 2)[: _WIDTH - 2] + b"\n"


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Free a part of a file; return False where the file system cannot, OSError for other failures."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    if fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV):
        return False
    raise OSError(code, os.strerror(code))


# -- native error lines -----------------------------------------------------------------------------------------------
# Lines that native code prints when it dies: how to recognize them, and their rank if ranks share a file.
#
# NCCL puts host, process and thread before each of its lines.  torch's C++ puts ``[rank3]:`` before what it logs, and
# names the rank in its watchdog's errors.  Lines of glibc, the C++ runtime and the CUDA driver name no process.

LONGEST_SHOWN_LINE = 300
MOST_NATIVE_LINES = 12
_NCCL = re.compile(r"^\S+:(?P<pid>\d+):\d+ \[-?\d+\](?: [\d.:-]+)? (?:\S+:\d+ )?NCCL (?P<level>[A-Z]+) ")
_TORCH = re.compile(r"^\[rank(?P<rank>\d+)\]:\s?\[[A-Z]\d{4} ")
_TORCH_RANK = re.compile(r"\[PG .{0,200}?\bRank (?P<rank>\d+)\]")
_NATIVE_ERROR = re.compile(
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
    return _NATIVE_ERROR.search(line) is not None


def labeled_pid(line: str) -> int | None:
    """Return the process that an NCCL line names."""
    found = _NCCL.match(line)
    return int(found["pid"]) if found else None


def labeled_rank(line: str) -> int | None:
    """Return the rank that a line of torch's C++ names; lines logged from Python carry another label."""
    found = _TORCH.match(line) or (_TORCH_RANK.search(line) if is_native(line) else None)
    return int(found["rank"]) if found else None


def last_native_lines(lines: Iterable[str], most: int = MOST_NATIVE_LINES) -> tuple[str, ...]:
    """Return the last lines, cleaned; lines that differ only in numbers (one per thread of a kernel) are shown once."""
    kinds: dict[str, tuple[str, int]] = {}
    for line in lines:
        text = line.rstrip().rpartition("\r")[2]
        found = _NATIVE_ERROR.search(text)
        if found is None:
            continue
        text = plain_line(text[found.start() :] if found["bare"] else text)
        kind = _NUMBERS.sub("0", text)
        first, times = kinds.pop(kind, (text, 0))
        kinds[kind] = first, times + 1
    groups = list(kinds.values())[-most:]
    return tuple(text if times == 1 else f"{text} (and {times - 1:,} more like it)" for text, times in groups)


def without_escapes(line: str) -> str:
    """Remove colors and other terminal escapes."""
    return _ESCAPES.sub("", line)


def plain_line(line: str) -> str:
    """Return one line of bounded length, without terminal escapes and without what looks like a password."""
    text = without_escapes(line).strip()
    text = "".join(char if char.isprintable() else "?" for char in text)
    text = _USER_IN_URL.sub(r"\1…@", _SECRET.sub(r"\1…", text))
    return text if len(text) <= LONGEST_SHOWN_LINE else text[: LONGEST_SHOWN_LINE - 1] + "…"


# -- output files -----------------------------------------------------------------------------------------------------

CHUNK = 1 << 16
MOST_AT_ONCE = 4 << 20
"""Limit per file and pass: the rings must not wait longer."""
LONGEST_LINE = 1 << 16
OUTPUT_POSITIONS = "positions"
"""Without a suffix, since it is not a note."""


class OutputCopier:
    """Copies output files into logs.  ``copy`` raises OSError if a log cannot be written; the next call retries.

    Positions are noted after the logs are written: nothing is lost if the agent is killed in between, but its successor
    copies that part once more.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = outputs_folder(run_dir)
        self._known: set[str] = set()
        self._sources: dict[str, _Source] = {}
        self._positions = _read_note(self._folder / OUTPUT_POSITIONS)

    def copy(self, *, last: bool = False) -> None:
        """Copy what is new; ``last``: all of it, including an unfinished line."""
        self._find_notes()
        before = dict(self._positions)
        try:
            for key, source in self._sources.items():
                try:
                    source.copy(last=last)
                finally:
                    self._positions[key] = source.position
        finally:
            if self._positions != before:
                write_json(self._folder / OUTPUT_POSITIONS, self._positions)
        for source in self._sources.values():
            source.give_back()

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources = {}

    def _find_notes(self) -> None:
        try:
            names = [entry.name for entry in os.scandir(self._folder) if entry.name.endswith(".json")]
        except OSError:
            return  # no folder: no process prints into a file
        for name in sorted(set(names) - self._known):
            self._known.add(name)
            note = _read_note(self._folder / name)
            for about in note.get("sources", ()):
                try:
                    self._add(note, about)
                except NotARun:
                    self._known.discard(name)  # run.json cannot be read now
                    break
                except (OSError, LookupError, TypeError, ValueError):
                    continue  # the file is already gone, or belongs to another user

    def _add(self, note: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        key = f"{about['dev']}:{about['ino']}"
        source = self._sources.get(key)
        if source is None:
            begin = self._positions.get(key, about["from"])
            spooled = self._is_spool(Path(str(about["path"])))
            fd = _open(note["pid"], about, os.O_RDWR if spooled else os.O_RDONLY)
            source = self._sources[key] = _Source(fd, int(begin), self._run_dir, spooled=spooled)
        log = self._run_dir / "logs" / Path(str(note["log"])).name
        if about["whole"] and source.whole is None:
            source.whole = log
        source.writers.append((int(note["pid"]), note["rank"], log))

    def _is_spool(self, path: Path) -> bool:
        """Whether it is our file in this run's session: no other file is ever emptied."""
        return path.suffix == PRINTED_SUFFIX and path.parent == session_of(self._run_dir, read_meta(self._run_dir))


class _Source:
    """A file that processes print into."""

    def __init__(self, fd: int, position: int, run_dir: Path, *, spooled: bool) -> None:
        self._fd = fd
        self._given_back = 0 if spooled else None
        self._job_log = log_path(run_dir, rank=None, attempt=0)
        self._begun = b""
        self.position = position
        """Position up to which it was copied; in shared files always at the end of a line."""
        self.whole: Path | None = None
        """The log that receives all of it."""
        self.writers: list[tuple[int, int | None, Path]] = []
        """Pid, rank and log."""

    def copy(self, *, last: bool) -> None:
        size = os.fstat(self._fd).st_size
        if size < self.position + len(self._begun):  # the file was truncated
            self.position, self._begun = 0, b""
        copied = 0
        while copied < MOST_AT_ONCE or last:
            data = os.pread(self._fd, CHUNK, self.position + len(self._begun))
            if not data:
                break
            self._take(data)
            copied += len(data)
        if last and self._begun:
            self._take_lines(self._begun)
            self.position, self._begun = self.position + len(self._begun), b""

    def give_back(self) -> None:
        """Free the copied whole pages of our own file in memory."""
        end = self.position // mmap.PAGESIZE * mmap.PAGESIZE
        if self._given_back is None or end <= self._given_back:
            return
        with suppress(OSError, ValueError):  # the file system does not support it
            with mmap.mmap(self._fd, end - self._given_back, offset=self._given_back) as pages:
                pages.madvise(mmap.MADV_REMOVE)
            self._given_back = end

    def close(self) -> None:
        os.close(self._fd)

    def _take(self, data: bytes) -> None:
        if self.whole is not None:
            _append(self.whole, data)
        if not self._shared():
            self.position += len(data)
            return
        lines, end, self._begun = (self._begun + data).rpartition(b"\n")
        if len(self._begun) > LONGEST_LINE:
            lines, self._begun = lines + end + self._begun, b""
            end = b""
        self._take_lines(lines + end)
        self.position += len(lines + end)

    def _shared(self) -> bool:
        """Whether processes other than the one whose log gets everything write here, too."""
        return any(log != self.whole for _, _, log in self.writers)

    def _take_lines(self, data: bytes) -> None:
        """Append native lines to the logs of the processes that they name."""
        found: dict[Path, list[bytes]] = {}
        for line in data.splitlines(keepends=True) if self._shared() else ():
            text = line.decode(errors="replace")
            log = self._whose(text)
            if log is not None and log != self.whole:
                found.setdefault(log, []).append(line if line.endswith(b"\n") else line + b"\n")
        for log, lines in found.items():
            _append(log, b"".join(lines))

    def _whose(self, line: str) -> Path | None:
        pid, rank = labeled_pid(line), labeled_rank(line)
        for who, number, log in reversed(self.writers):  # for a restarted rank, the last one
            if who == pid or (rank is not None and number == rank):
                return log
        return self._job_log if self.whole is None and is_native(line) else None


def copy_rest(run_dir: Path) -> None:
    """Copy what no agent copied of a finished run, and remove the notes; failures are ignored."""
    folder = outputs_folder(run_dir)
    if not folder.is_dir():
        return
    copier = OutputCopier(run_dir)
    try:
        copier.copy(last=True)
        shutil.rmtree(folder)
    except OSError:
        pass  # the directory is not writable: logs stay as they are
    finally:
        copier.close()


def _open(pid: int, about: Mapping[str, Any], access: int) -> int:
    """Open via the process while it exists: its file may have been removed, or have another name for us."""
    failure: OSError | None = None
    for path in (*(f"/proc/{pid}/fd/{fd}" for fd in about["fds"]), about["path"]):
        try:
            found = os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            failure = error
            continue
        info = os.fstat(found)
        if (info.st_dev, info.st_ino) == (about["dev"], about["ino"]):
            return found
        os.close(found)
    raise failure or FileNotFoundError(about["path"])


def _append(log: Path, data: bytes) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, file_mode(log.parent))
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def _read_note(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_document(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


# -- training lines ---------------------------------------------------------------------------------------------------
# Lines in which torchtitan and Megatron-LM report loss, speed and utilization.  Pure.
#
#     step: 10  loss:  7.1234  grad_norm:  1.2  memory:  1.90GiB(2.4%)  tps: 1,234  tflops: 12.34  mfu: 3.20%
#     iteration      100/    1000 | consumed samples: 6400 | elapsed time per iteration (ms): 123.4 | lm loss: 1.2E+00 |
#
# Both may begin with a time; torchtitan's may contain colors.  Missing fields are left out.  Megatron-LM also prints
# its timers, one per line: the minimum and maximum over the ranks, or only the maximum.
#
#     (min, max) time across ranks (ms):
#         forward-backward ...............................: (1201.20, 1210.90)

FIGURES = ("loss", "grad_norm", "tokens_per_second", "tflops", "mfu_percent", "iteration_ms")
"""What a line may report, in this order; speed is per device."""
_NUMBER = r"(-?[\d,]*\.?\d+(?:[eE][+-]?\d+)?|nan|inf)"
_TITAN = re.compile(r"\bstep:\s*(\d+)\s.*\btps:\s*[\d,]+")
_TITAN_FIGURES = {
    "loss": re.compile(rf"\bloss:\s*{_NUMBER}"),
    "grad_norm": re.compile(rf"\bgrad_norm:\s*{_NUMBER}"),
    "tokens_per_second": re.compile(rf"(?<!\w)tps:\s*{_NUMBER}"),
    "tflops": re.compile(rf"(?<!\w)tflops:\s*{_NUMBER}"),
    "mfu_percent": re.compile(rf"(?<!\w)mfu:\s*{_NUMBER}%"),
}
_MEGATRON = re.compile(r"\biteration\s+(\d+)/\s*(?:\d+|infinity)\s*\|(.*)")
_TIMER = re.compile(r"^\s{2,}([\w./ -]{1,80}?) \.{2,}: (?:([\d.]+)|\([\d.]+, ([\d.]+)\))\s*$")
MOST_TIMERS = 64
_MEGATRON_FIGURES = {
    "elapsed time per iteration (ms)": "iteration_ms",
    "throughput per GPU (TFLOP/s/GPU)": "tflops",
    "grad norm": "grad_norm",
    "tokens/sec/gpu": "tokens_per_second",
    "MFU": "mfu_percent",
}


@dataclass(frozen=True, kw_only=True)
class TrainingLine:
    framework: str
    iteration: int
    """As the framework counts: from 1, continuing after a resume."""
    figures: Mapping[str, float] = field(default_factory=dict)


def training_line(line: str) -> TrainingLine | None:
    """Parse a line of training figures; None if the line has none."""
    if "tps:" in line and "step:" in line:
        return _titan(without_escapes(line))
    return _megatron(without_escapes(line)) if "iteration" in line and "|" in line else None


def timer_line(line: str) -> tuple[str, float] | None:
    """Parse a timer line: its name, and its milliseconds on the slowest rank; None if the line is not a timer."""
    found = _TIMER.match(without_escapes(line)) if "..: " in line else None
    number = _number(found[2] or found[3]) if found is not None else None
    return None if found is None or number is None else (found[1], number)


def training_summary(lines: Iterable[TrainingLine], timers: Iterable[tuple[str, float]] = ()) -> dict[str, Any]:
    """Return the last value and the median of each figure and each timer; {} if there are no lines."""
    entries = list(lines)
    if not entries:
        return {}
    by_figure = {name: [line.figures[name] for line in entries if name in line.figures] for name in FIGURES}
    by_timer: dict[str, list[float]] = {}
    for name, ms in timers:
        if name in by_timer or len(by_timer) < MOST_TIMERS:
            by_timer.setdefault(name, []).append(ms)
    return {
        "framework": entries[-1].framework,
        "iteration": entries[-1].iteration,
        "lines": len(entries),
        "figures": {
            name: {"last": values[-1], "median": statistics.median(values)}
            for name, values in by_figure.items()
            if values
        },
        "timers_ms": {name: {"last": took[-1], "median": statistics.median(took)} for name, took in by_timer.items()},
    }


def _titan(line: str) -> TrainingLine | None:
    found = _TITAN.search(line)
    if found is None:
        return None
    matches = {name: pattern.search(line) for name, pattern in _TITAN_FIGURES.items()}
    numbers = {name: _number(match[1]) for name, match in matches.items() if match is not None}
    return TrainingLine(framework="torchtitan", iteration=int(found[1]), figures=_finite(numbers))


def _megatron(line: str) -> TrainingLine | None:
    found = _MEGATRON.search(line)
    if found is None or "elapsed time per iteration" not in line:
        return None
    values: dict[str, float | None] = {}
    for part in found[2].split("|"):
        name, _, value = part.strip().rpartition(":")
        number = _number(value.strip().partition("/")[0])
        if name in _MEGATRON_FIGURES:
            values[_MEGATRON_FIGURES[name]] = number
        elif name.endswith("loss") and "loss" not in values:  # ``lm loss``; there may be others after it
            values["loss"] = number
    return TrainingLine(framework="megatron", iteration=int(found[1]), figures=_finite(values))


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _finite(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Drop missing and non-finite values: JSON has no nan."""
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


# -- native errors per rank -------------------------------------------------------------------------------------------
# The last lines that native code printed in ranks that did not end well, from the tails of their logs.

NATIVE_TAIL_BYTES = 64 << 10
MOST_NATIVE_LOGS = 64
"""Logs that are searched: a fault that hits more ranks hits them alike."""


def read_native(
    path: Path, ranks: Sequence[RankSeries], errors: Iterable[RankError]
) -> dict[int | None, tuple[str, ...]]:
    """Return the lines of the last attempt by rank; None: from the job's log, of an unknown rank."""
    attempt = max((series.identity.attempt for series in ranks), default=0)
    ended = {series.rank for series in ranks if series.identity.attempt == attempt and series.state != "exited"}
    ended |= {error.rank for error in errors if error.rank is not None}
    found: dict[int | None, tuple[str, ...]] = {}
    for rank in sorted(ended)[:MOST_NATIVE_LOGS]:
        if lines := _last_lines(log_of_rank(path, rank=rank, attempt=attempt)):
            found[rank] = lines
    if ended and (lines := _last_lines(log_path(path, rank=None, attempt=0))):
        found[None] = lines
    return found


def read_last_line(path: Path) -> str:
    """Return the last line in the job's log, where a script explains why it gave up, or empty."""
    lines = map(plain_line, reversed(_tail(log_path(path, rank=None, attempt=0))))
    return next((line for line in lines if line), "")


def _last_lines(log: Path) -> tuple[str, ...]:
    return last_native_lines(_tail(log))


def _tail(log: Path) -> list[str]:
    try:
        with open_file(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - NATIVE_TAIL_BYTES))
            data = file.read(NATIVE_TAIL_BYTES)
    except OSError:
        return []
    return data.decode(errors="replace").split("\n")


# -- training log -----------------------------------------------------------------------------------------------------
# What torchtitan and Megatron-LM report about the training, from the tails of the logs.

TRAINING_TAIL_BYTES = 1 << 20
MOST_TRAINING_LOGS = 64
"""Logs that are searched; torchtitan prints on the first rank or on all, Megatron on the last."""


def read_training_log(path: Path, ranks: Sequence[RankSeries]) -> dict[str, Any]:
    """Summarize the last attempt from the first log that has figures, with our last ``step``; {} if no log has any."""
    attempt = max((series.identity.attempt for series in ranks), default=0)
    current = sorted((series for series in ranks if series.identity.attempt == attempt), key=lambda series: series.rank)
    chosen = dict.fromkeys([series.rank for series in (*current[:1], *current[-1:], *current[1:MOST_TRAINING_LOGS])])
    logs: list[tuple[int | None, Path]] = [(rank, log_of_rank(path, rank=rank, attempt=attempt)) for rank in chosen]
    for rank, log in (*logs, (None, log_path(path, rank=None, attempt=attempt))):
        lines = list(_tail_lines(log))
        summary = training_summary(
            (line for line in map(training_line, lines) if line is not None),
            (timer for timer in map(timer_line, lines) if timer is not None),
        )
        if summary:
            own = next((series for series in current if series.rank == rank), current[0] if current else None)
            step = int(own.steps["step"][-1]) if own is not None and len(own.steps) else None
            return {**summary, "rank": rank, "step": step}
    return {}


def _tail_lines(log: Path) -> Iterator[str]:
    try:
        with open_file(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TRAINING_TAIL_BYTES))
            data = file.read(TRAINING_TAIL_BYTES)
    except OSError:
        return
    yield from data.decode(errors="replace").splitlines()
