"""Where the files of other nodes go in the hub's run directory, and how they are written there.

    errors/PID.json       → errors/HOST-PID.json
    hangs/HOST-N.json     → the same
    flight/rank_N.json    → the same; what came last counts, whoever sent it
    logs/main.log         → logs/nodeK.main.log
    logs/rank-N.log       → the same

A name that is taken by another sender, or by a process of this host, gets the host in it and, if need be, the sender's
spool.  Who has which name is written down (``inbox/places.jsonl``) before it is used: after a restart the hub goes on
with the same files.  Names come checked (``wire/frames.py``); all the same nothing is written outside these four
folders, and no link is followed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepscope.records.modes import file_mode, folder_mode
from stepscope.records.naming import host_in_name
from stepscope.records.places import FLIGHT, HANGS
from stepscope.store.jsonl import append_jsonl, read_jsonl, write_all
from stepscope.store.paths import INBOX

__all__ = ["PLACES", "Places", "append_at", "cut_at", "replace_whole", "signed_file"]

PLACES = "places.jsonl"
_PLACE = re.compile(r"(?:errors|hangs|logs)/[A-Za-z0-9_.-]{1,250}")
_SPOOL_CHARS = 8
_NEW = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Places:
    """Which file of which sender is which of ours."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path = run_dir / INBOX / PLACES
        self._given: dict[tuple[str, str], str] = {}
        for line in read_jsonl(self._path)[0]:
            spool, name, place = (str(line.get(key)) for key in ("spool", "name", "place"))
            if _PLACE.fullmatch(place):
                self._given[spool, name] = place
        self._taken = set(self._given.values())
        self.logs = sum(place.startswith("logs/") for place in self._taken)
        """How many logs there are."""

    def of(self, spool: str, name: str, *, node: int, host: str) -> str:
        """The path, inside the run, of the file that a sender calls ``name``.  OSError when there is no room."""
        known = self._given.get((spool, name))
        if known is not None:
            return known
        folder, _, plain = name.partition("/")
        if folder == FLIGHT:
            return name
        stem, dot, suffix = plain.rpartition(".")
        place = next(
            place
            for place in (f"{folder}/{found}{dot}{suffix}" for found in _stems(folder, stem, spool, node, host))
            if self._is_free(place)
        )
        self._path.parent.mkdir(exist_ok=True)
        append_jsonl(self._path, [{"spool": spool, "name": name, "place": place}])
        self._given[spool, name] = place
        self._taken.add(place)
        self.logs += folder == "logs"
        return place

    def _is_free(self, place: str) -> bool:
        return place not in self._taken and not os.path.lexists(self._run_dir / place)


def _stems(folder: str, stem: str, spool: str, node: int, host: str) -> Iterator[str]:
    where = host_in_name(host)
    if folder == "errors":
        yield f"{where}-{stem}"
    elif folder == "logs" and not stem.startswith("rank-"):
        yield f"node{node}.{stem}"
        yield f"node{node}.{stem}.{where}"
    else:
        # A watchdog here names its files likewise, and does not look whether somebody sent one of that name.
        if folder != HANGS or host != platform.node():
            yield stem
        yield f"{stem}.{where}"
    yield f"{stem}.{where}.{spool[:_SPOOL_CHARS]}"
    number = 2
    while True:
        yield f"{stem}.{where}.{spool[:_SPOOL_CHARS]}.{number}"
        number += 1


def append_at(run_dir: Path, place: str, data: bytes, offset: int) -> None:
    """Bytes of a log where they belong; OSError when there is no room, and then the log is as long as before."""
    with _folder(run_dir, place) as (folder, name):
        fd = os.open(name, _NEW, file_mode(run_dir), dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(f"{place} is no plain file")
            try:
                if data.count(0) == len(data):
                    os.ftruncate(fd, offset + len(data))  # what the sender dropped takes no room here either
                else:
                    write_all(fd, data, offset)
            except OSError:
                os.ftruncate(fd, offset)
                raise
        finally:
            os.close(fd)


def cut_at(run_dir: Path, place: str, offset: int) -> None:
    """Take back what ``append_at`` added."""
    with suppress(OSError), _folder(run_dir, place) as (folder, name):
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
        try:
            os.ftruncate(fd, offset)
        finally:
            os.close(fd)


def replace_whole(run_dir: Path, place: str, data: bytes) -> None:
    """A small file, in place of what was there: the old bytes or the new ones, never some of each."""
    with _folder(run_dir, place) as (folder, name):
        beside = f".{name[:100]}.{os.getpid()}.tmp"
        fd = os.open(beside, _NEW | os.O_TRUNC, file_mode(run_dir), dir_fd=folder)
        try:
            try:
                write_all(fd, data, 0)
            finally:
                os.close(fd)
            os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):
                os.unlink(beside, dir_fd=folder)
            raise


def signed_file(name: str, data: bytes, *, spool: str, host: str) -> bytes:
    """An error or a hang with the name of its sender in it, whose clock its times are by."""
    if not name.startswith(("errors/", f"{HANGS}/")):
        return data
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return json.dumps({"host": host, **said, "spool": spool}).encode() if isinstance(said, dict) else data


@contextmanager
def _folder(run_dir: Path, place: str) -> Iterator[tuple[int, str]]:
    """A folder of the run, made if need be and held open: nobody can put a link in its place.  And the name in it."""
    folder, _, name = place.partition("/")
    with suppress(FileExistsError):
        (run_dir / folder).mkdir(mode=folder_mode(run_dir))
    fd = os.open(run_dir / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd, name
    finally:
        os.close(fd)
