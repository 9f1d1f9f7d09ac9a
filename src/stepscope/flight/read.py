"""Read dumps, stacks, errors and logs from files of any name, and find out which rank each belongs to.

This is the only part of ``flight`` with I/O. A few processes read the files concurrently and each sends back a
``Dump``, a small fraction of the file's size. If one crashes on a file, only that file is lost.
"""

from __future__ import annotations

import gc
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import takewhile
from multiprocessing import get_context
from pathlib import Path, PurePath

from stepscope.errors import DumpError, UsageError
from stepscope.flight.decode import MAX_BYTES, WORTH_A_SCAN, decode_dump, load_plain, quick_dump
from stepscope.flight.dump import MAX_RANK, Dump
from stepscope.flight.stacks import RankLog, is_stacks, is_titan_log, parse_threads, read_titan_log
from stepscope.records.files import open_file
from stepscope.records.hang import ThreadStack
from stepscope.records.paths import FLIGHT
from stepscope.records.text import Progress, no_progress

__all__ = ["Reading", "ranks_by_name", "read_dump", "read_paths"]


# -- rank of a file ---------------------------------------------------------------------------------------------------
# A dump rarely contains its rank; torch puts it into the file's name, at a place that the user chooses. The groups come
# first: a rank is a member of all groups in its dump, and if only one rank is, that is it. Next is the number in the
# name that differs between files, preferably after ``rank``, else the last one. Folders count if they differ.

_NUMBER = re.compile(r"\d{1,9}")
_AFTER_RANK = re.compile(r"rank[^0-9a-z]{0,2}(\d{1,9})", re.IGNORECASE)
_SUFFIXES = re.compile(r"(?:\.(?:pkl|pickle|json|txt|dump|trace|bin|pt))+$", re.IGNORECASE)


def rank_by_groups(dump: Dump) -> int | None:
    common: set[int] | None = None
    for ranks in dump.members.values():
        common = set(ranks) if common is None else common & set(ranks)
    return common.pop() if common is not None and len(common) == 1 else None


def ranks_by_name(names: Sequence[str]) -> Mapping[str, int]:
    """The rank in each name, for names that contain one."""
    folders = [PurePath(name).parent.parts for name in names]
    shared = sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False)))
    stems = {name: _SUFFIXES.sub("", "/".join(PurePath(name).parts[shared:])) for name in names}
    after = {name: _last(_AFTER_RANK.findall(stem)) for name, stem in stems.items()}
    if len(_distinct(after)) == len(names):
        return _distinct(after)
    fields = {name: _NUMBER.findall(stem) for name, stem in stems.items()}
    widest = max((len(found) for found in fields.values()), default=0)
    for place in range(1, widest + 1):
        chosen = {name: _last(found[-place:][:1] if len(found) >= place else ()) for name, found in fields.items()}
        distinct = _distinct(chosen)
        if len(distinct) == len(names):
            return distinct
    last = {name: after[name] if after[name] is not None else _last(found) for name, found in fields.items()}
    return {name: rank for name, rank in last.items() if rank is not None}


def _distinct(ranks: Mapping[str, int | None]) -> dict[str, int]:
    """One name per rank."""
    by_rank = {rank: name for name, rank in ranks.items() if rank is not None}
    return {name: rank for rank, name in by_rank.items()}


def _last(numbers: Sequence[str]) -> int | None:
    return int(numbers[-1]) if numbers and int(numbers[-1]) < MAX_RANK else None


# -- reading ----------------------------------------------------------------------------------------------------------

MAX_FILES = 65536
RUN_FILE = "run.json"
"""In the folder of every recorded run."""
MAX_DEPTH = 4
TEXT_BYTES = 1 << 20
"""Bytes read from the end of a log or an error file."""
WORTH_A_POOL = 1 << 22
"""Bytes; for less, starting processes takes longer than reading."""
QUOTED = 100


@dataclass(frozen=True, kw_only=True)
class Reading:
    dumps: tuple[Dump, ...] = ()
    stacks: Mapping[int, tuple[ThreadStack, ...]] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    """What a rank wrote when it failed."""
    logs: Mapping[int, RankLog] = field(default_factory=dict)
    unreadable: tuple[int, ...] = ()
    """Ranks with a file that should be a dump but is not."""
    problems: tuple[str, ...] = ()
    """Sentences: what could not be used, and why."""
    files: int = 0


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What one file turned out to be; one of the fields is set."""

    path: str
    dump: Dump | None = None
    stacks: tuple[ThreadStack, ...] = ()
    error: str = ""
    log: RankLog | None = None
    problem: str = ""
    """Why the file is unusable; ``-`` if that need not be reported."""


def read_dump(data: bytes, *, source: str = "", rank: int | None = None) -> Dump:
    """A dump of any version, pickled or JSON; DumpError for anything else. The rank is -1 if unknown."""
    if not data.strip():
        raise DumpError("it is empty")
    start = data.lstrip()[:1]
    if data[:1] == b"\x80":
        quick = quick_dump(data, source=source, rank=rank) if len(data) >= WORTH_A_SCAN else None
        if quick is not None:
            return quick
        raw = load_plain(data)
    elif start in (b"{", b"["):
        raw = _json(data)
    else:
        raise DumpError(_what(data))
    try:
        return decode_dump(raw, source=source, rank=rank)
    except (OverflowError, MemoryError, RecursionError) as error:
        raise DumpError(f"not a dump: {type(error).__name__}") from None


def read_paths(paths: Iterable[Path], *, progress: Progress = no_progress, jobs: int | None = None) -> Reading:
    """Everything usable in these files and folders. ``jobs``: processes to read with; by default as many as it pays."""
    files = _files(paths)
    found = list(_each(files, progress, jobs))
    by_name = ranks_by_name([file.path for file in found if file.dump or _about_dump(file)])
    dumps, doubles = _one_per_rank([_named(file.dump, file.path, by_name) for file in found if file.dump])
    stacked = ranks_by_name([file.path for file in found if file.stacks])
    failed = ranks_by_name([file.path for file in found if file.error])
    have = {dump.rank for dump in dumps}
    problems = [f"{_short(file.path)}: {file.problem}" for file in found if file.problem not in ("", "-")]
    return Reading(
        dumps=dumps,
        stacks={stacked[file.path]: file.stacks for file in found if file.path in stacked},
        errors={failed[file.path]: file.error for file in found if file.path in failed},
        logs=_logs(file.log for file in found),
        unreadable=tuple(sorted({by_name[o.path] for o in found if _about_dump(o) and o.path in by_name} - have)),
        problems=(*problems, *doubles),
        files=len(files),
    )


def _files(paths: Iterable[Path]) -> list[Path]:
    files: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            files.update(dict.fromkeys(_below(path, MAX_DEPTH)))
        elif path.exists():
            files[path] = None
        else:
            raise UsageError(f"no such file or folder: {path}")
        if len(files) > MAX_FILES:
            raise UsageError(f"more than {MAX_FILES} files; give the folder of one job")
    if not files:
        raise UsageError(
            "no dump found there: no files, or a run that has none, because it neither hung nor lost a rank"
        )
    return list(files)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / RUN_FILE).is_file():  # a recorded run keeps its dumps in one folder; its other files are not dumps
        folder = folder / FLIGHT
        if not folder.is_dir():
            return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if depth and not path.is_symlink():
                yield from _below(path, depth - 1)
        elif path.is_file() and not path.name.startswith("."):
            yield path


def _each(files: Sequence[Path], progress: Progress, jobs: int | None) -> Iterator[_Found]:
    workers = jobs if jobs is not None else min(len(os.sched_getaffinity(0)), 16)
    pooled = workers > 1 and len(files) > 1 and (jobs is not None or sum(_size(path) for path in files) > WORTH_A_POOL)
    results = _pooled(files, workers) if pooled else map(_read_file, files)
    for done, found in enumerate(results, 1):
        yield found
        progress(done, len(files))


def _pooled(files: Sequence[Path], workers: int) -> Iterator[_Found]:
    # A fork starts in a millisecond and inherits loaded modules, but not threads: with threads, spawn a new process.
    context = get_context("fork" if threading.active_count() == 1 else "spawn")
    done = 0
    while done < len(files):
        try:
            with ProcessPoolExecutor(workers, mp_context=context) as pool:
                for found in pool.map(_read_file, files[done:], chunksize=1 if workers == 1 else 2):
                    yield found
                    done += 1
        except BrokenProcessPool:
            if workers == 1:
                yield _Found(path=str(files[done]), problem="it crashes the process that reads it.")
                done += 1
            workers = 1  # one file at a time: the next failure identifies the file


def _read_file(path: Path) -> _Found:
    """Read one file, possibly in a worker process; never raises because of its content."""
    try:
        with open_file(path, links=True) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(1)
            plain = head == b"\x80" or path.suffix.lower() not in (".jsonl", ".log", ".txt", ".out", ".err")
            if plain and size <= MAX_BYTES:
                data = head + file.read()
            else:
                file.seek(max(size - TEXT_BYTES, 0))
                data = file.read(TEXT_BYTES)
        return _sorted(path, data)
    except OSError as error:
        return _Found(path=str(path), problem=f"cannot be read: {error.strerror}.")


def _sorted(path: Path, data: bytes) -> _Found:
    where = str(path)
    binary = data[:1] == b"\x80"
    text = "" if binary else data[-TEXT_BYTES:].decode(errors="replace")
    if path.suffix.lower() in (".jsonl", ".log") and is_titan_log(text):
        return _Found(path=where, log=read_titan_log(text))
    if not binary and data.lstrip()[:1] not in (b"{", b"["):
        if is_stacks(text):
            return _Found(path=where, stacks=parse_threads(text))
        if "Traceback (most recent call last)" in text:
            return _Found(path=where, error=text)
        if path.suffix.lower() in (
            ".log",
            ".txt",
            ".out",
            ".err",
            ".py",
            ".yaml",
            ".yml",
            ".toml",
            ".md",
            ".csv",
            ".sh",
        ):
            return _Found(path=where, problem="-")
    collecting = gc.isenabled()
    gc.disable()  # creates hundreds of thousands of objects, none of them garbage
    try:
        return _Found(path=where, dump=read_dump(data, source=where))
    except DumpError as error:
        return _Found(path=where, problem=f"{error}.")
    finally:
        if collecting:
            gc.enable()


def _json(data: bytes) -> object:
    try:
        raw: object = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else "damaged or cut off"
        raise DumpError(f"JSON that is {why}") from None
    return raw


def _what(data: bytes) -> str:
    """What a file contains instead: often a sentence from a server that had no dump."""
    text = data[: QUOTED * 4].decode(errors="replace").strip()
    if text.isprintable() and "\ufffd" not in text:
        return f"not a dump; it says “{text[:QUOTED]}”"
    return "not a dump: neither a pickle nor JSON"


def _about_dump(found: _Found) -> bool:
    """Whether the file was meant to be a dump."""
    return found.problem not in ("", "-")


def _named(dump: Dump | None, path: str, by_name: Mapping[str, int]) -> Dump:
    assert dump is not None
    if dump.rank >= 0:
        return dump
    rank = rank_by_groups(dump)
    return replace(dump, rank=by_name.get(path, -1) if rank is None else rank)


def _one_per_rank(dumps: list[Dump]) -> tuple[tuple[Dump, ...], list[str]]:
    """The latest dump of each rank; dumps without a rank get the free numbers, in the order of their names."""
    problems: list[str] = []
    latest: dict[int, Dump] = {}
    for dump in sorted(dumps, key=lambda dump: dump.source):
        if dump.rank < 0:
            continue
        other = latest.get(dump.rank)
        if other is not None:
            older, newer = sorted((other, dump), key=lambda found: found.newest_ns)
            problems.append(f"{_short(older.source)}: an older dump of rank {dump.rank} than {_short(newer.source)}.")
            latest[dump.rank] = newer
        else:
            latest[dump.rank] = dump
    nameless = [dump for dump in sorted(dumps, key=lambda dump: dump.source) if dump.rank < 0]
    free = (rank for rank in range(len(dumps)) if rank not in latest)
    for dump, rank in zip(nameless, list(free), strict=False):
        problems.append(f"{_short(dump.source)}: its rank is unknown; assuming rank {rank}.")
        latest[rank] = replace(dump, rank=rank)
    return tuple(latest[rank] for rank in sorted(latest)), problems


def _logs(logs: Iterable[RankLog | None]) -> dict[int, RankLog]:
    """The log of each rank that was written last."""
    latest: dict[int, RankLog] = {}
    for log in logs:
        if log is not None and (log.rank not in latest or log.time_us >= latest[log.rank].time_us):
            latest[log.rank] = log
    return latest


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _short(path: str) -> str:
    return Path(path).name
