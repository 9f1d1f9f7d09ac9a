"""Receive frames: accept each one once, completely or not at all, and put its files into the run directory.

    inbox = Inbox(run_dir)                      # recovers its state from the journals
    inbox.introduce(spool, node=1, host="b")    # at join
    accepted = inbox.accept(read_frame(raw), raw)

Every sender's positions are derived from the journals (and from ``positions.json`` for journals that were sealed into
parts), so they always match the disk, however the hub was killed.  A frame is compared with them, its files are written
(which is idempotent), and it is appended to the journal; only then it counts.  A sender removes its copy when its last
frame (the one with a bye) is answered, so by then everything it ever sent is synced: the journals, its logs and whole
files, and their folders.  One inbox per run, in the hub process, used by one thread.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from stepscope.errors import FrameError, HubError
from stepscope.records import run_clock
from stepscope.records.files import file_mode, folder_mode
from stepscope.records.paths import CAPTURES, FLIGHT, HANGS
from stepscope.records.text import host_in_name
from stepscope.store.documents import NodeInfo, read_nodes, write_nodes
from stepscope.store.file_io import append_jsonl, fsync_file, fsync_folder, read_jsonl, write_all
from stepscope.store.inbox.journal import (
    JOURNAL_BYTES,
    BlockRows,
    Compared,
    Gap,
    JournalWriter,
    Spool,
    advance_spool,
    compare,
    journal_path,
    recover,
)
from stepscope.store.live.logs import ALL_BYTES, bound_log, log_share
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.locks import LockBusy, take_lock
from stepscope.store.paths import INBOX
from stepscope.wire.frames import Frame, FrameHead, pack_frame
from stepscope.wire.handshake import Positions

__all__ = ["Accepted", "Gap", "Inbox", "ReceivedFiles", "signed_file"]


# -- received files ---------------------------------------------------------------------------------------------------
# Where files from other nodes go in the hub's run directory, and how they are written.
#
#     errors/PID.json       → errors/HOST-PID.json
#     hangs/HOST-N.json     → the same
#     flight/rank_N.json    → the same; the last to arrive counts, whichever node sent it
#     logs/main.log         → logs/nodeK.main.log
#     logs/rank-N.log       → the same
#     captures/ID/rank-N.…  → the same: the trace of a capture
#
# If another sender or a local process has taken a name, the host is added and, if necessary, the sender's spool.  Names
# are recorded (``inbox/places.jsonl``) before they are used, so a restarted hub continues with the same files.  Names
# arrive checked (``wire/frames.py``); even so, nothing is written outside these five folders, and no link is followed.

PLACES = "places.jsonl"
_PLACE = re.compile(r"(?:(?:errors|hangs|logs)|captures/[A-Za-z0-9][A-Za-z0-9-]{0,63})/[A-Za-z0-9_.-]{1,250}")
MOST_TRACE_BYTES = 2 << 30
"""Limit for the trace of one rank."""
_LOGS = "logs/"
_SPOOL_CHARS = 8
_NEW = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class ReceivedFiles:
    """Maps each sender's files to files of this run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path = run_dir / INBOX / PLACES
        self._given: dict[tuple[str, str], str] = {}
        for line in read_jsonl(self._path)[0]:
            spool, name, place = (str(line.get(key)) for key in ("spool", "name", "place"))
            if _PLACE.fullmatch(place):
                self._given[spool, name] = place
        self._taken = set(self._given.values())
        self.logs = sum(place.startswith(_LOGS) for place in self._taken)
        """The number of logs."""

    def of(self, spool: str, name: str, *, node: int, host: str) -> str:
        """Return the path, inside the run, of the file that a sender calls ``name``.  OSError if the disk is full."""
        known = self._given.get((spool, name))
        if known is not None:
            return known
        folder, _, plain = name.rpartition("/")
        if folder == FLIGHT:
            return name
        stem, dot, suffix = plain.partition(".") if folder.startswith(CAPTURES) else plain.rpartition(".")
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
        # A local watchdog uses the same names and does not check whether a received file has one of them.
        if folder != HANGS or host != platform.node():
            yield stem
        yield f"{stem}.{where}"
    yield f"{stem}.{where}.{spool[:_SPOOL_CHARS]}"
    number = 2
    while True:
        yield f"{stem}.{where}.{spool[:_SPOOL_CHARS]}.{number}"
        number += 1


def append_at(run_dir: Path, place: str, data: bytes, offset: int) -> None:
    """Write bytes of a log at their offset; if the disk is full (OSError), the log keeps its old length."""
    with _folder(run_dir, place) as (folder, name):
        fd = os.open(name, _NEW, file_mode(run_dir), dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(f"{place} is not a regular file")
            try:
                if data.count(0) == len(data):
                    os.ftruncate(fd, offset + len(data))  # bytes that the sender dropped use no space here either
                else:
                    write_all(fd, data, offset)
            except OSError:
                os.ftruncate(fd, offset)
                raise
        finally:
            os.close(fd)


def cut_at(run_dir: Path, place: str, offset: int) -> None:
    """Undo ``append_at``."""
    with suppress(OSError), _folder(run_dir, place) as (folder, name):
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
        try:
            os.ftruncate(fd, offset)
        finally:
            os.close(fd)


def replace_whole(run_dir: Path, place: str, data: bytes) -> None:
    """Replace a small file atomically."""
    with _folder(run_dir, place) as (folder, name):
        temporary = f".{name[:100]}.{os.getpid()}.tmp"
        fd = os.open(temporary, _NEW | os.O_TRUNC, file_mode(run_dir), dir_fd=folder)
        try:
            try:
                write_all(fd, data, 0)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


def signed_file(name: str, data: bytes, *, spool: str, host: str) -> bytes:
    """Add the sender to an error or a hang: its times are by that sender's clock."""
    if not name.startswith(("errors/", f"{HANGS}/")):
        return data
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return json.dumps({"host": host, **document, "spool": spool}).encode() if isinstance(document, dict) else data


@contextmanager
def _folder(run_dir: Path, place: str) -> Iterator[tuple[int, str]]:
    """Open a folder of the run, made if necessary, so that no link can replace it; also yield the file's name."""
    *folders, name = place.split("/")
    fd = os.open(run_dir, _FOLDER)
    try:
        for folder in folders:
            with suppress(FileExistsError):
                os.mkdir(folder, folder_mode(run_dir), dir_fd=fd)
            inner = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd, name
    finally:
        os.close(fd)


# -- inbox ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The new contents of a frame."""

    new_rings: tuple[RingSidecar, ...] = ()
    """Rings that are new or have changed."""
    blocks: tuple[BlockRows, ...] = ()
    lines: dict[str, list[bytes]] = field(default_factory=dict)
    """By file (``events.jsonl``, ``samples.jsonl``, ``stacks.jsonl``), without line ends."""
    duplicate_parts: int = 0
    """Parts that had been received before, at least partly."""

    @property
    def rows(self) -> int:
        return sum(len(block.slots) for block in self.blocks)


class Inbox:
    """What other nodes sent to a run.

    ``journal_bytes``: the size at which the next journal begins.  ``log_bytes``: the limit for all logs together.
    ``trace_bytes``: the limit for the trace of one rank.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        journal_bytes: int = JOURNAL_BYTES,
        log_bytes: int = ALL_BYTES,
        trace_bytes: int = MOST_TRACE_BYTES,
        clock: Callable[[], int] = run_clock.wall_ns,
    ) -> None:
        """OSError if the existing data cannot be read or written; HubError if another process has the inbox."""
        self._run_dir = run_dir
        self._journal_bytes = journal_bytes
        self._log_bytes = log_bytes
        self._trace_bytes = trace_bytes
        self._clock = clock
        (run_dir / INBOX).mkdir(exist_ok=True)
        self._lock = _lock(run_dir)
        self._nodes = {node.spool: _Account(node) for node in read_nodes(run_dir)}
        self._current = {node.about.node: name for name, node in self._nodes.items() if not node.about.replaced_by}
        self._places = ReceivedFiles(run_dir)
        recovered = recover(run_dir, self._hear)
        self._spools = recovered.spools
        self._journal = JournalWriter(journal_path(run_dir, recovered.last), recovered.end)

    def positions(self, spool: str) -> Positions:
        known = self._spools.get(spool)
        return known.positions() if known is not None else Positions()

    def introduce(
        self, spool: str, *, node: int, host: str, address: str = "", meta: Mapping[str, Any] | None = None
    ) -> None:
        """Register a node that joined or rejoined."""
        now = self._clock()
        account = self._account(spool, node)
        about = account.about
        before = self._current.get(node, spool)
        if before != spool:
            self._nodes[before].about = replace(self._nodes[before].about, replaced_by=spool)
        self._current[node] = spool
        account.about = replace(
            about,
            node=node,
            host=host,
            address=address,
            meta=dict(meta or {}),
            joined_wall_ns=about.joined_wall_ns or now,
            heard_wall_ns=now,
            replaced_by="",
        )

    def accept(self, frame: Frame, raw: bytes) -> Accepted:
        """Accept a frame, completely or not at all.

        Gap if data before it is missing, FrameError if a part is invalid, OSError if the disk refuses.  After any of
        these, everything is as before.
        """
        head = frame.head
        spool = self._spools.get(head.spool) or Spool(head.spool)
        found = compare(spool, frame)
        account = self._account(head.spool, head.node)
        now = self._clock()
        says_bye = head.bye is not None and account.about.bye is None
        if found.parts or says_bye:
            new_data = pack_frame(head, found.parts) if found.cut else raw
            self._write(head, found, new_data, now, account)
            advance_spool(spool, found)
            self._spools[head.spool] = spool
        elif head.bye is not None:
            # The bye was received, but a hub may have been killed before it had synced the frames before it.
            self._sync(head, account, [*spool.positions().files])
            self._journal.sync()
        accepted = Accepted(
            new_rings=tuple(found.rings),
            blocks=tuple(found.blocks),
            lines=found.lines,
            duplicate_parts=found.old_parts,
        )
        account.heard(head, now)
        if found.parts or says_bye:
            account.count(rows=accepted.rows, size=len(new_data))
        account.duplicates += found.old_parts
        return accepted

    def refuse(self, spool: str) -> None:
        """Count a rejected frame of a known sender."""
        if spool in self._nodes:
            self._nodes[spool].refused += 1

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes that ever sent data or joined."""
        return [account.info() for account in self._nodes.values()]

    def save_nodes(self, *, refused: Mapping[str, int] | None = None) -> None:
        """Write ``nodes.json``; every few seconds is enough.  OSError if the disk is full."""
        write_nodes(self._run_dir, self.nodes(), refused=refused)

    def close(self) -> None:
        self._journal.close()
        os.close(self._lock)

    @property
    def journal(self) -> int:
        """The number of the journal that is being written; earlier ones can be sealed (``store/inbox/parts.py``)."""
        return int(self._journal.path.stem)

    def _account(self, spool: str, node: int) -> _Account:
        account = self._nodes.get(spool)
        if account is None:
            now = self._clock()
            account = _Account(NodeInfo(node=node, host=f"node{node}", spool=spool, joined_wall_ns=now))
            self._nodes[spool] = account
        return account

    def _write(self, head: FrameHead, found: Compared, new_data: bytes, now: int, account: _Account) -> None:
        logs: list[tuple[str, int]] = []
        if any(not name.startswith(_LOGS) and at + len(data) > self._trace_bytes for name, at, data in found.logs):
            raise FrameError("a trace is too large")
        try:
            for name, data in found.whole:
                signed = signed_file(name, data, spool=head.spool, host=account.about.host)
                replace_whole(self._run_dir, self._place(head, name, account), signed)
            for name, offset, data in found.logs:
                place = self._place(head, name, account)
                logs.append((place, offset))
                append_at(self._run_dir, place, data, offset)
                self._bound_log(place, offset, offset + len(data))
            if self._journal.end >= self._journal_bytes:
                self._rotate()
            if head.bye is not None:
                before = self._spools.get(head.spool)
                known = before.positions().files if before is not None else {}
                new = [*(name for name, _ in found.whole), *(name for name, _, _ in found.logs)]
                self._sync(head, account, [*known, *new])
            self._journal.append(new_data, wall_ns=now, durable=head.bye is not None)
        except OSError:
            for place, offset in logs:
                cut_at(self._run_dir, place, offset)
            raise

    def _bound_log(self, place: str, begin: int, end: int) -> None:
        """Keep the beginning and the end of a very long log; checked from time to time as it grows."""
        if not place.startswith(_LOGS):
            return
        share = log_share(self._places.logs, self._log_bytes)
        if begin // (share // 4) != end // (share // 4):
            with suppress(OSError):  # retried when the log has grown
                bound_log(self._run_dir / place, share)

    def _place(self, head: FrameHead, name: str, account: _Account) -> str:
        return self._places.of(head.spool, name, node=head.node, host=account.about.host)

    def _rotate(self) -> None:
        """Start the next journal.  The full one is synced first: later, only the open one can be."""
        self._journal.sync()
        number = int(self._journal.path.stem) + 1
        journal = JournalWriter(journal_path(self._run_dir, number), 0)
        self._journal.close()
        self._journal = journal

    def _sync(self, head: FrameHead, account: _Account, names: Sequence[str]) -> None:
        """Sync all of a sender's files outside the journals, and all folders; OSError if the disk refuses.

        ``names`` are the sender's names; lines (``events.jsonl``) are in the journals.
        """
        places = {self._place(head, name, account) for name in names if "/" in name}
        for place in sorted(places):
            with suppress(FileNotFoundError):  # removed by the user in the meantime
                fsync_file(self._run_dir / place)
        folders = {str(parent) for place in places for parent in PurePosixPath(place).parents}
        for folder in sorted(folders - {"."}):
            fsync_folder(self._run_dir / folder)
        with suppress(FileNotFoundError):
            fsync_file(self._run_dir / INBOX / PLACES)
        fsync_folder(self._run_dir / INBOX)
        fsync_folder(self._run_dir)

    def _hear(self, head: FrameHead, wall_ns: int) -> None:
        self._account(head.spool, head.node).heard(head, wall_ns)


def _lock(run_dir: Path) -> int:
    """Lock the inbox for the life of this process: two hubs must not write one journal."""
    try:
        return take_lock(run_dir / INBOX)
    except LockBusy:
        raise HubError(f"another hub is receiving {run_dir}, or it is being sealed") from None


@dataclass(slots=True)
class _Account:
    """The changing figures of a node."""

    about: NodeInfo
    frames: int = 0
    rows: int = 0
    size: int = 0
    duplicates: int = 0
    refused: int = 0
    head: FrameHead | None = None
    heard_wall_ns: int = 0

    def heard(self, head: FrameHead, wall_ns: int) -> None:
        if head.bye is not None and self.about.bye is None:
            self.about = replace(self.about, bye=dict(head.bye))
        if head.offset_ns is not None:
            self.head = head
        self.heard_wall_ns = max(wall_ns, self.heard_wall_ns)

    def count(self, *, rows: int, size: int) -> None:
        self.frames += 1
        self.rows += rows
        self.size += size

    def info(self) -> NodeInfo:
        about, head = self.about, self.head
        return replace(
            about,
            frames=about.frames + self.frames,
            rows=about.rows + self.rows,
            bytes=about.bytes + self.size,
            duplicates=about.duplicates + self.duplicates,
            refused=about.refused + self.refused,
            offset_ns=about.offset_ns if head is None else head.offset_ns,
            rtt_ns=about.rtt_ns if head is None else head.rtt_ns,
            heard_wall_ns=max(about.heard_wall_ns, self.heard_wall_ns),
        )
