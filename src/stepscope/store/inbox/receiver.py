"""Receive frames: take each one once, whole or not at all, and put its files into the run directory.

The hub's side of the wire: take each frame once, whole or not at all, and remember it over restarts.

    inbox = Inbox(run_dir)                      # recovers what it has from the journals there
    inbox.introduce(spool, node=1, host="b")    # at join
    accepted = inbox.accept(read_frame(raw), raw)

The positions of every sender are worked out from the journals (and from what is kept beside each part that a journal
was sealed into), so they are exactly what is on disk, whatever killed the hub.  A frame is compared with them, the
files in it are written to their places (which changes nothing if done twice), then it is appended to the journal, and
only then it counts.  A sender removes its copy when its last frame (the one with a bye) is answered, so by then
everything it ever sent is synced: the journals, its logs and whole files, and the folders they are in.  One per run, in
the hub process, used by one thread.
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
from pathlib import Path
from typing import Any

from stepscope.errors import HubError
from stepscope.records import run_clock
from stepscope.records.files import file_mode, folder_mode
from stepscope.records.paths import FLIGHT, HANGS
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
from stepscope.store.live.logs import bound_log, log_share
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.locks import LockBusy, take_lock
from stepscope.store.paths import INBOX
from stepscope.wire.frames import Frame, FrameHead, pack_frame
from stepscope.wire.handshake import Positions

__all__ = ["Accepted", "Gap", "Inbox", "ReceivedFiles", "signed_file"]


# -- received ---------------------------------------------------------------------------------------------------------
# Where the files of other nodes go in the hub's run directory, and how they are written there.
#
#     errors/PID.json       → errors/HOST-PID.json
#     hangs/HOST-N.json     → the same
#     flight/rank_N.json    → the same; what came last counts, whoever sent it
#     logs/main.log         → logs/nodeK.main.log
#     logs/rank-N.log       → the same
#
# A name that is taken by another sender, or by a process of this host, gets the host in it and, if need be, the
# sender's spool.  Who has which name is written down (``inbox/places.jsonl``) before it is used: after a restart the
# hub goes on with the same files.  Names come checked (``wire/frames.py``); all the same nothing is written outside
# these four folders, and no link is followed.

PLACES = "places.jsonl"
_PLACE = re.compile(r"(?:errors|hangs|logs)/[A-Za-z0-9_.-]{1,250}")
_SPOOL_CHARS = 8
_NEW = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class ReceivedFiles:
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


# -- inbox ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """What of a frame was new."""

    new_rings: tuple[RingSidecar, ...] = ()
    """Who began to send, or has something new to say of itself."""
    blocks: tuple[BlockRows, ...] = ()
    lines: dict[str, list[bytes]] = field(default_factory=dict)
    """By file (``events.jsonl``, ``samples.jsonl``, ``stacks.jsonl``), without their ends."""
    duplicate_parts: int = 0
    """Parts that were there already, at least in part."""

    @property
    def rows(self) -> int:
        return sum(len(block.slots) for block in self.blocks)


class Inbox:
    """What other nodes sent to a run.  ``journal_bytes``: when the next journal is begun."""

    def __init__(
        self, run_dir: Path, *, journal_bytes: int = JOURNAL_BYTES, clock: Callable[[], int] = run_clock.wall_ns
    ) -> None:
        """OSError when what is there cannot be read, or nothing can be written; HubError when somebody else does."""
        self._run_dir = run_dir
        self._journal_bytes = journal_bytes
        self._clock = clock
        (run_dir / INBOX).mkdir(exist_ok=True)
        self._lock = _lock(run_dir)
        self._nodes = {node.spool: _Account(node) for node in read_nodes(run_dir)}
        self._current = {one.about.node: name for name, one in self._nodes.items() if not one.about.replaced_by}
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
        """A node joined, or joined again."""
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
        """Gap when something before it is missing, FrameError when a part is none, OSError when the disk refuses.

        After any of these everything is as before.
        """
        head = frame.head
        spool = self._spools.get(head.spool) or Spool(head.spool)
        found = compare(spool, frame)
        account = self._account(head.spool, head.node)
        now = self._clock()
        says_bye = head.bye is not None and account.about.bye is None
        if found.parts or says_bye:
            kept = pack_frame(head, found.parts) if found.cut else raw
            self._write(head, found, kept, now, account)
            advance_spool(spool, found)
            self._spools[head.spool] = spool
        elif head.bye is not None:
            # Its bye is here already, but perhaps a hub was killed before it had synced what came before.
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
            account.count(rows=accepted.rows, size=len(kept))
        account.duplicates += found.old_parts
        return accepted

    def refuse(self, spool: str) -> None:
        """Count a frame that somebody we know should not have sent."""
        if spool in self._nodes:
            self._nodes[spool].refused += 1

    def nodes(self) -> list[NodeInfo]:
        """All that ever sent something or joined."""
        return [account.info() for account in self._nodes.values()]

    def save_nodes(self, *, refused: Mapping[str, int] | None = None) -> None:
        """``nodes.json``; every few seconds is enough.  OSError when there is no room."""
        write_nodes(self._run_dir, self.nodes(), refused=refused)

    def close(self) -> None:
        self._journal.close()
        os.close(self._lock)

    @property
    def journal(self) -> int:
        """The number of the journal that is being written; those before it can be sealed (``store/inbox/parts.py``)."""
        return int(self._journal.path.stem)

    def _account(self, spool: str, node: int) -> _Account:
        account = self._nodes.get(spool)
        if account is None:
            now = self._clock()
            account = _Account(NodeInfo(node=node, host=f"node{node}", spool=spool, joined_wall_ns=now))
            self._nodes[spool] = account
        return account

    def _write(self, head: FrameHead, found: Compared, kept: bytes, now: int, account: _Account) -> None:
        logs: list[tuple[str, int]] = []
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
            self._journal.append(kept, wall_ns=now, durable=head.bye is not None)
        except OSError:
            for place, offset in logs:
                cut_at(self._run_dir, place, offset)
            raise

    def _bound_log(self, place: str, begin: int, end: int) -> None:
        """Of a log of weeks the beginning and the end stay; looked at now and then, as it grows."""
        share = log_share(self._places.logs)
        if begin // (share // 4) != end // (share // 4):
            with suppress(OSError):  # it is tried again when the log has grown
                bound_log(self._run_dir / place, share)

    def _place(self, head: FrameHead, name: str, account: _Account) -> str:
        return self._places.of(head.spool, name, node=head.node, host=account.about.host)

    def _rotate(self) -> None:
        """The full journal is synced before it is let go: later only the open one can be."""
        self._journal.sync()
        number = int(self._journal.path.stem) + 1
        journal = JournalWriter(journal_path(self._run_dir, number), 0)
        self._journal.close()
        self._journal = journal

    def _sync(self, head: FrameHead, account: _Account, names: Sequence[str]) -> None:
        """Everything of a sender outside the journals, and the folders of all; OSError when the disk refuses.

        ``names`` as the sender calls its files; lines (``events.jsonl``) are in the journals.
        """
        places = {self._place(head, name, account) for name in names if "/" in name}
        for place in sorted(places):
            with suppress(FileNotFoundError):  # removed by the user meanwhile
                fsync_file(self._run_dir / place)
        for folder in sorted({place.partition("/")[0] for place in places}):
            fsync_folder(self._run_dir / folder)
        with suppress(FileNotFoundError):
            fsync_file(self._run_dir / INBOX / PLACES)
        fsync_folder(self._run_dir / INBOX)
        fsync_folder(self._run_dir)

    def _hear(self, head: FrameHead, wall_ns: int) -> None:
        self._account(head.spool, head.node).heard(head, wall_ns)


def _lock(run_dir: Path) -> int:
    """Held as long as this process lives: two hubs would write one journal."""
    try:
        return take_lock(run_dir / INBOX)
    except LockBusy:
        raise HubError(f"another hub receives for {run_dir}, or it is being sealed") from None


@dataclass(slots=True)
class _Account:
    """A node's figures while they change."""

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
