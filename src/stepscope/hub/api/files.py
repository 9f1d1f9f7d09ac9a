"""The files of a run that readers may have, complete or in pieces (a log from its end, or from an offset)."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.api.responses import ApiError, Body, json_body
from stepscope.store.live.logs import data_at
from stepscope.store.paths import META

__all__ = ["RESOURCES", "read_piece"]


# -- file access ------------------------------------------------------------------------------------------------------
# Readers may have logs, errors, hangs, dumps, events and summaries, and nothing else.
#
# A path is checked against a list of forms before the file system is touched, and is then opened part by part without
# following links: a run directory may contain what strangers put there.  Large files are read in pieces; a log may be
# requested from its end.

MOST_BYTES = 4 << 20
"""The limit for one answer."""
MOST_FILES = 10_000
"""The limit for one folder in a list."""
FOLDERS = ("logs", "errors", "hangs", "flight")
PLAIN = ("events.jsonl", "findings.json", "nodes.json", "summary.json", "summary.txt")
"""Without ``run.json``: its public part is in the answer about the run."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,160}\.(?:log|json|txt)")
_TYPES = {"json": "application/json", "jsonl": "application/x-ndjson"}


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    path: str
    """Within the run, with slashes."""
    size: int
    changed_wall_ns: int


@dataclass(frozen=True, kw_only=True)
class FilePiece:
    data: bytes
    offset: int
    size: int
    """The size of the whole file when it was read."""


def allowed(path: str) -> bool:
    folder, slash, name = path.partition("/")
    if not slash:
        return path in PLAIN
    return folder in FOLDERS and _NAME.fullmatch(name) is not None


def media_type_of(path: str) -> str:
    """Return the media type; all other text is plain: the output of a rank is never shown as a page."""
    return _TYPES.get(path.rpartition(".")[2], "text/plain; charset=utf-8")


def list_files(run_dir: Path) -> list[FileEntry]:
    found: list[FileEntry] = []
    for name in PLAIN:
        entry = _entry(run_dir / name, name)
        found += [entry] if entry else []
    for folder in FOLDERS:
        if (run_dir / folder).is_symlink():
            continue
        try:
            names = sorted(path.name for path in (run_dir / folder).iterdir())[:MOST_FILES]
        except OSError:
            continue
        for name in names:
            path = f"{folder}/{name}"
            entry = _entry(run_dir / folder / name, path) if allowed(path) else None
            found += [entry] if entry else []
    return found


def read_piece(run_dir: Path, path: str, *, offset: int | None, tail: int | None, most: int) -> FilePiece | None:
    """Read from ``offset``, or the last ``tail`` bytes starting at a line, if they contain a line end.

    Gaps that a long log dropped (``store/live/logs.py``) are skipped: the piece then begins, or ends, at existing
    data.  None: the file does not exist or may not be read.
    """
    fd = _open(run_dir, path) if allowed(path) else None
    if fd is None:
        return None
    try:
        size = os.fstat(fd).st_size
        if tail is not None:
            at, _ = data_at(fd, max(size - min(tail, most), 0))
            data = os.pread(fd, min(size - at, most), at)
            if at and b"\n" in data:
                cut = data.index(b"\n") + 1
                data, at = data[cut:], at + cut
            return FilePiece(data=data, offset=at, size=size)
        at, end = data_at(fd, min(offset or 0, size))
        return FilePiece(data=os.pread(fd, min(most, end - at), at), offset=at, size=size)
    except OSError:
        return None
    finally:
        os.close(fd)


def _open(run_dir: Path, path: str) -> int | None:
    """Open a regular file without following links within the run."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    *folders, name = path.split("/")
    opened: list[int] = []
    try:
        opened.append(os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for folder in folders:
            opened.append(os.open(folder, flags | os.O_DIRECTORY, dir_fd=opened[-1]))
        fd = os.open(name, flags, dir_fd=opened[-1])
    except OSError:
        return None
    finally:
        for folder_fd in opened:
            os.close(folder_fd)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _entry(path: Path, name: str) -> FileEntry | None:
    try:
        about = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(about.st_mode):
        return None
    return FileEntry(path=name, size=about.st_size, changed_wall_ns=about.st_mtime_ns)


# -- resources --------------------------------------------------------------------------------------------------------


async def _list(asked: Asked) -> Mapping[str, Any]:
    found = await asyncio.to_thread(list_files, asked.run.path)
    return {"files": [asdict(entry) for entry in found]}


async def _file(asked: Asked) -> Body:
    path = asked.request.path_params["path"]
    if path == META:
        return Body(data=json_body(asked.run.context()), media_type=media_type_of(META), headers={})
    offset, tail, most = (asked.values[name] for name in ("offset", "tail", "most"))
    if offset is not None and tail is not None:
        raise ApiError(400, "use either offset or tail, not both")
    piece = await asyncio.to_thread(read_piece, asked.run.path, path, offset=offset, tail=tail, most=most)
    if piece is None:
        raise ApiError(404, "there is no such file")
    place = {"X-Stepscope-Offset": str(piece.offset), "X-Stepscope-Size": str(piece.size)}
    return Body(data=piece.data, media_type=media_type_of(path), headers=place)


RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/files",
        about="The readable files of a run, with their sizes.",
        answer=_list,
    ),
    Resource(
        path="/api/v1/runs/{run}/files/{path:path}",
        about="A file, or part of it. X-Stepscope-Offset is where the part begins, X-Stepscope-Size is the size of the "
        "file. To follow a log, repeat the request with offset = offset + length of the response.",
        answer=_file,
        parameters=(
            Parameter(name="offset", about="first byte"),
            Parameter(name="tail", about="number of bytes at the end, starting with a whole line", most=MOST_BYTES),
            Parameter(name="most", about="maximum bytes per response", default=MOST_BYTES, least=1, most=MOST_BYTES),
        ),
        media_types=("application/json", "application/x-ndjson", "text/plain"),
        path_parameters={"path": "path as listed by /files"},
    ),
)
