"""Archived runs and catalogs on the local disk.

    $XDG_CACHE_HOME/stepscope/archive/ADDRESS/
        catalog.json               the facts about all runs, and when they were last compared with the archive
        runs/DIGEST/NAME/          a run, as far as its files were needed; complete files only
        runs/DIGEST/.lock          locked by each process that reads it

``ADDRESS`` is a hash of the archive's address.  Without ``XDG_CACHE_HOME`` it is ``~/.cache``.  Only this user can read
it.  A file is compared with its checksum while it is written, under another name; a file that is there is right.
Because ``DIGEST`` stands for the contents of the run, a cached file never becomes stale.

The runs together take at most ``STEPSCOPE_ARCHIVE_CACHE`` (5 GB): before one is fetched, those that were not used for
the longest time are removed, except those in use.  The run itself may be larger.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from stepscope.archive.catalog import Catalog, CatalogObject, read_catalog
from stepscope.archive.location import ArchiveUrl
from stepscope.archive.manifest import ArchivedFile, Manifest, read_archived_run
from stepscope.archive.s3_reader import S3Reader, S3ReaderError, s3_reader
from stepscope.archive.storage import Storage, StoredObject
from stepscope.archive.upload import read_manifest
from stepscope.errors import ArchiveError, ArchiveMissing, UsageError
from stepscope.records.files import private_folder
from stepscope.records.text import Progress, bytes_text, did_you_mean, no_progress
from stepscope.store.catalog import RunEntry
from stepscope.store.file_io import read_document, run_bytes, write_bytes
from stepscope.store.paths import ARCHIVED, META, SUMMARY

__all__ = ["ENV_CACHE", "FRESH_S", "Archive", "cache_folder"]

ENV_CACHE = "STEPSCOPE_ARCHIVE_CACHE"
CACHE_BYTES = 5 << 30
SPARE_BYTES = 64 << 20
"""Of the disk, which stay free."""
FRESH_S = 60.0
"""A list this old is shown without asking the archive: loading a storage's library takes longer than the list."""
MOST_CATALOG_BYTES = 512 << 20
READERS = 4
MOST_IN_USE = 8
"""Runs that a process keeps from being removed: more than a hub has open."""
LOCK_TRIES, LOCK_PAUSE_S = 500, 0.01
"""Another process that removes a run holds its lock until the folder has another name."""
FOR_LISTS = (META, SUMMARY)
_SIZE = re.compile(r"(\d{1,12})([KMGT]?)", re.IGNORECASE)
_UNITS = "KMGT"


def cache_folder(environ: Mapping[str, str]) -> Path:
    folder = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".cache")
    return Path(folder) / "stepscope" / "archive"


def cache_limit(environ: Mapping[str, str]) -> int:
    """Bytes; UsageError if the variable is not a size."""
    text = environ.get(ENV_CACHE, "").strip()
    match = _SIZE.fullmatch(text)
    if text and match is None:
        raise UsageError(f"{ENV_CACHE} must be a size such as 10G or 500M, not {text!r}")
    return int(match[1]) << 10 * (_UNITS.find(match[2].upper()) + 1 if match[2] else 0) if match else CACHE_BYTES


class Archive:
    """An archive through its cache.  ``run`` and ``entries`` may be called by several threads at once."""

    def __init__(
        self,
        url: ArchiveUrl,
        environ: Mapping[str, str],
        *,
        storage: Callable[[ArchiveUrl], Storage] = Storage,
        reader: Callable[[ArchiveUrl, Mapping[str, str]], S3Reader | None] = s3_reader,
        now_s: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
        flock: Callable[[int, int], None] = fcntl.flock,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        self.url = url
        self._limit = cache_limit(environ)
        self._root = cache_folder(environ) / hashlib.sha256(str(url).encode()).hexdigest()[:16]
        self._environ = environ
        self._make_storage = storage
        self._make_reader = reader
        self._storage: Storage | None = None
        self._now_s = now_s
        self._pause, self._flock = pause, flock
        self._free_bytes = free_bytes
        self._used: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def storage(self) -> Storage:
        if self._storage is None:
            self._storage = self._make_storage(self.url)
        return self._storage

    # -- lists --------------------------------------------------------------------------------------------------------

    def entries(self, *, fresh_s: float = FRESH_S) -> tuple[list[RunEntry], list[str]]:
        """The runs, newest first, and a line for each object that cannot be read."""
        known, checked_s = self._load_catalog()
        age_s = self._now_s() - checked_s
        if known is None or not 0 <= age_s < fresh_s:
            known = self._read_catalog(known)
            self._save_catalog(known)
        found = [run.entry(self.url, self._folder(run.digest, run.name)) for run in known.runs().values()]
        found.sort(key=lambda entry: (-entry.created_wall_ns, entry.path.name))
        return found, known.problems

    def _read_catalog(self, known: Catalog | None) -> Catalog:
        if self._storage is None and (reader := self._make_reader(self.url, self._environ)) is not None:
            with suppress(S3ReaderError), closing(reader):
                return read_catalog(reader, known)
        return read_catalog(self.storage, known)

    def forget_list(self) -> None:
        """Ask the archive next time: something was just added to it."""
        with suppress(OSError):
            (self._root / "catalog.json").unlink()

    def _load_catalog(self) -> tuple[Catalog | None, float]:
        try:
            document = json.loads(read_document(self._root / "catalog.json", most=MOST_CATALOG_BYTES))
            objects = {
                key: CatalogObject(
                    stored=StoredObject(size=part["size"], version=part["version"]),
                    runs=tuple(map(read_archived_run, part["runs"])),
                    unpacked_bytes=int(part["unpacked_bytes"]),
                )
                for key, part in document["objects"].items()
            }
            if document["url"] != str(self.url):
                return None, 0.0
            return Catalog(objects=objects, problems=list(document["problems"])), float(document["checked_s"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None, 0.0

    def _save_catalog(self, catalog: Catalog) -> None:
        """A list that cannot be kept is still a list."""
        objects = {
            key: {
                "size": part.stored.size,
                "version": part.stored.version,
                "unpacked_bytes": part.unpacked_bytes,
                "runs": [run.to_dict() for run in part.runs],
            }
            for key, part in catalog.objects.items()
        }
        document = {
            "url": str(self.url),
            "checked_s": self._now_s(),
            "problems": catalog.problems,
            "objects": objects,
        }
        with suppress(OSError):
            write_bytes(self._made(self._root) / "catalog.json", json.dumps(document, separators=(",", ":")).encode())

    def is_run(self) -> bool:
        """Whether the address is that of a run in an archive, instead of an archive."""
        if "/" not in self.url.path.strip("/") or self.entries()[0]:
            return False
        return read_manifest(self._make_storage(self.url.parent), self.url.name) is not None

    # -- runs ---------------------------------------------------------------------------------------------------------

    def run(self, name: str, *, only: Collection[str] | None = None, progress: Progress = no_progress) -> Path:
        """The folder of a run on this disk, with all of its files or ``only`` some; ArchiveError if that fails."""
        manifest = read_manifest(self.storage, name)
        if manifest is None:
            names = [entry.path.name for entry in self.entries()[0]]
            raise ArchiveMissing(f"no run named {name} in {self.url}{did_you_mean(name, names)}")
        return self._fetch(manifest, only, progress)

    def summaries(self, entries: Sequence[RunEntry], *, progress: Progress = no_progress) -> list[RunEntry]:
        """Fetch what a history needs of these runs; those of which that fails have no summary."""

        def fetch(entry: RunEntry) -> RunEntry:
            name = entry.path.name
            if not (entry.path / SUMMARY).is_file():
                with suppress(ArchiveError):
                    return replace(entry, path=self.run(name, only=FOR_LISTS))
            return entry

        found: list[RunEntry] = []
        with ThreadPoolExecutor(READERS) as pool:
            for entry in pool.map(fetch, entries):
                found.append(entry)
                progress(len(found), len(entries))
        return found

    def _folder(self, digest: str, name: str) -> Path:
        return Path(f"{self._root}/runs/{digest[:32]}/{name}")

    def _fetch(self, manifest: Manifest, only: Collection[str] | None, progress: Progress) -> Path:
        folder = self._folder(manifest.run.digest, manifest.run.name)
        try:
            self._use(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            wanted = [
                file
                for file in manifest.files
                if (only is None or file.name in only) and _size(folder / file.name) != file.size
            ]
            if wanted:
                self._make_room(sum(file.stored for file in wanted), folder.parent)
                origin = {"url": str(self.url.run(manifest.run.name)), "digest": manifest.run.digest}
                write_bytes(folder / ARCHIVED, json.dumps(origin).encode())
                self._fetch_files(manifest, wanted, folder, progress)
            os.utime(folder.parent)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "the disk is full" if full else f"{error.strerror} ({error.filename})"
            hint = "; set XDG_CACHE_HOME to a folder on another disk" if full else ""
            raise ArchiveError(f"{manifest.run.name} cannot be copied to {self._root}: {why}{hint}") from None
        return folder

    def _fetch_files(
        self, manifest: Manifest, wanted: Sequence[ArchivedFile], folder: Path, progress: Progress
    ) -> None:
        total, done = max(sum(file.stored for file in wanted), 1), 0
        with ThreadPoolExecutor(READERS) as pool:
            for stored in pool.map(lambda file: self._fetch_file(manifest, file, folder), wanted):
                done += stored
                progress(done, total)

    def _fetch_file(self, manifest: Manifest, file: ArchivedFile, folder: Path) -> int:
        path = folder / file.name
        for place in reversed([*path.relative_to(folder).parents][:-1]):
            (folder / place).mkdir(mode=0o700, exist_ok=True)
        spare = path.with_name(f".{os.urandom(6).hex()}")
        hasher = hashlib.sha256()
        fd = os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb", buffering=0) as target:
                os.ftruncate(target.fileno(), file.size)
                places = iter(file.extents or ((0, file.size),))
                offset, length = next(places)
                for piece in self.storage.pieces(manifest.key(file), file.stored):
                    hasher.update(piece)
                    view = memoryview(piece)
                    while view:
                        if not length:
                            offset, length = next(places)
                        written = os.pwrite(target.fileno(), view[:length], offset)
                        view, offset, length = view[written:], offset + written, length - written
            if hasher.hexdigest() != file.sha256:
                raise ArchiveError(f"{self.url}/{manifest.key(file)} is damaged: its checksum differs")
            spare.replace(path)
        finally:
            spare.unlink(missing_ok=True)
        return file.stored

    # -- space --------------------------------------------------------------------------------------------------------

    def _use(self, folder: Path) -> None:
        """Keep other processes from removing a run while this one reads it."""
        with self._lock:
            fd = self._used.pop(folder.name, -1)
            if fd >= 0 and not _is_lock_of(fd, folder):  # someone deleted the run although it is in use
                os.close(fd)
                fd = -1
            if fd < 0:
                fd = self._locked(folder)
            self._used[folder.name] = fd
            while len(self._used) > MOST_IN_USE:
                os.close(self._used.popitem(last=False)[1])

    def _locked(self, folder: Path) -> int:
        """Create the folder of a run, unless it exists, and lock it; wait while another process removes it."""
        for attempt in range(LOCK_TRIES):
            if attempt:
                self._pause(LOCK_PAUSE_S)
            try:
                fd = os.open(self._made(folder) / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # removed between the two
                continue
            try:
                self._flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            except OSError:  # a file system without locks
                return fd
            if _is_lock_of(fd, folder):
                return fd
            os.close(fd)
        raise BlockingIOError(errno.EAGAIN, "another process is removing it", str(folder))

    def close(self) -> None:
        """Let other processes remove what this one used."""
        with self._lock:
            while self._used:
                os.close(self._used.popitem()[1])

    def _make_room(self, needed: int, own: Path) -> None:
        runs = [path for path in self._root.parent.glob("*/runs/*") if path.is_dir() and path != own]
        sizes = {path: run_bytes(path) for path in runs}
        total = sum(sizes.values()) + run_bytes(own)
        for path in sorted(runs, key=_used_ns):
            if total + needed <= self._limit and self._free_bytes(self._root) >= needed + SPARE_BYTES:
                return
            if _remove(path, self._flock):
                total -= sizes[path]
        if (free := self._free_bytes(self._root)) < needed + SPARE_BYTES:
            raise OSError(errno.ENOSPC, f"{bytes_text(needed)} are needed and {bytes_text(free)} are free")

    def _made(self, folder: Path) -> Path:
        private_folder(self._root.parent)
        for place in (self._root, self._root / "runs", folder):
            place.mkdir(mode=0o700, exist_ok=True)
        return folder


def _used_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _is_lock_of(fd: int, folder: Path) -> bool:
    """Whether this is the folder's lock, and not that of an earlier folder of the same name, which was removed."""
    try:
        return os.path.samestat(os.fstat(fd), (folder / ".lock").lstat())
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _remove(folder: Path, flock: Callable[[int, int], None]) -> bool:
    """Remove a run from the cache unless a process reads it."""
    try:
        fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_lock_of(fd, folder):
            return False
        gone = folder.with_name(f".{folder.name}.{os.urandom(4).hex()}")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
