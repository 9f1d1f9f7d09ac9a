"""Copy a finished run into an archive.

1. The files of the run are listed and hashed.  What identifies the copy is a digest of their names and contents.
2. Each file is written to ``NAME/DIGEST/FILE`` and read back; what an earlier attempt left there is used if its
   contents are right.
3. The manifest is written, read back, and from then on the run exists.
4. An entry in the catalog makes it appear in lists.

A copy that is interrupted anywhere before step 3 is invisible, and the next attempt continues it.  Two machines that
archive the same run write the same bytes to the same keys; of two different runs with one name the second is refused,
and neither writes into the folder of the other.

Nothing is deleted here except, with ``replace``, the objects of an earlier version of the same run.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stepscope.archive.catalog import compact, read_catalog, write_entry
from stepscope.archive.manifest import (
    MANIFEST,
    MOST_EXTENTS,
    MOST_MANIFEST_BYTES,
    NOT_ARCHIVED,
    ArchivedFile,
    ArchivedRun,
    Manifest,
    digest_of,
    run_facts,
)
from stepscope.archive.storage import CHUNK_BYTES, Storage, StoredObject, key_of
from stepscope.errors import ArchiveError, ArchiveMissing, RunError
from stepscope.records.files import open_file
from stepscope.records.text import Progress, checked_name, no_progress
from stepscope.store.catalog import delete_run, run_entry
from stepscope.store.documents import awaits_delivery, load_summary, read_meta
from stepscope.store.liveness import is_local, processes_alive, read_lease
from stepscope.store.locks import is_stage_committed

__all__ = ["Archived", "archive_run", "delete_archived", "file_digest", "read_manifest", "verify_run"]

WRITERS = 4
LEASED_S = 600.0
DEEPEST = 6

_Stamps = Mapping[str, tuple[int, int, int]]
_Seek = Callable[[int, int, int], int]


@dataclass(frozen=True, kw_only=True)
class Archived:
    manifest: Manifest
    present: bool
    """It had been archived before, with the same contents."""
    stamps: _Stamps
    """State of the local files when they were hashed."""


def archive_run(
    storage: Storage,
    run_dir: Path,
    *,
    replace: bool = False,
    progress: Progress = no_progress,
    lseek: _Seek = os.lseek,
) -> Archived:
    """Copy a sealed run; RunError if it cannot be archived now, ArchiveError if that fails.

    ``replace``: an earlier version of the same run is replaced.  ``lseek``: finds the holes of files.
    """
    name = checked_name(run_dir.resolve().name)
    _require_finished(run_dir)
    earlier = storage.find(key_of(name))
    stamps, files = _hash(run_dir, lseek)
    local = Manifest(
        run=ArchivedRun(
            name=name,
            digest=digest_of(files),
            stored=sum(file.stored for file in files),
            archived_wall_ns=time.time_ns(),
            facts=run_facts(run_entry(run_dir)),
        ),
        files=files,
    )
    _require_readable(run_dir, local)
    there = read_manifest(storage, name) if f"{key_of(name)}/{MANIFEST}" in earlier else None
    present = there is not None and there.run.digest == local.run.digest
    if there is not None and not present:
        _refuse_other(storage, there, local, replace=replace)
    if present and there is not None:
        local = there
    else:
        _copy(storage, run_dir, local, earlier, progress)
        if _stamps_of(run_dir) != stamps:
            raise RunError(f"{run_dir} changed while it was copied and was not archived; try again")
        _write_manifest(storage, local, replaces=there)
    _list(storage, local.run)
    return Archived(manifest=local, present=present, stamps=stamps)


def delete_archived(storage: Storage, run_dir: Path, archived: Archived, *, progress: Progress = no_progress) -> None:
    """Delete the local run after all of its copy was read and compared; otherwise RunError or ArchiveError."""
    entry = run_entry(run_dir)
    if entry.labels.tags:
        raise RunError(f"{run_dir} was not deleted: it has the tag {entry.labels.tags[0]}")
    lease = read_lease(run_dir)
    if lease is not None and not is_local(read_meta(run_dir)) and lease.age_s() < LEASED_S:
        raise RunError(f"{run_dir} was not deleted: another machine wrote it {lease.age_s():.0f} s ago")
    there = read_manifest(storage, archived.manifest.run.name)
    if there is None or there.run.digest != archived.manifest.run.digest:
        raise ArchiveError(f"{run_dir} was not deleted: {storage.url} no longer has the same run")
    try:
        verify_run(storage, there, progress=progress)
    except ArchiveError as error:
        raise ArchiveError(f"{run_dir} was not deleted: {error}") from None

    def changed() -> str | None:
        return None if _stamps_of(run_dir) == archived.stamps else "it changed since it was copied"

    delete_run(run_dir, watch=False, unless=changed)


def verify_run(storage: Storage, manifest: Manifest, *, progress: Progress = no_progress) -> None:
    """Read all objects of a run and compare checksums; ArchiveError for the first that differs."""
    done = 0

    def check(file: ArchivedFile) -> int:
        if file_digest(storage, manifest, file) != file.sha256:
            raise ArchiveError(f"{storage.url}/{manifest.key(file)} is damaged: its checksum differs")
        return file.stored

    with ThreadPoolExecutor(WRITERS) as pool:
        for stored in pool.map(check, manifest.files):
            done += stored
            progress(done, max(manifest.stored, 1))


def file_digest(storage: Storage, manifest: Manifest, file: ArchivedFile) -> str:
    hasher = hashlib.sha256()
    for piece in storage.pieces(manifest.key(file), file.stored):
        hasher.update(piece)
    return hasher.hexdigest()


def read_manifest(storage: Storage, name: str) -> Manifest | None:
    """The manifest of an archived run; None if there is no such run."""
    try:
        data = storage.read(f"{key_of(name)}/{MANIFEST}", MOST_MANIFEST_BYTES)
    except ArchiveMissing:
        return None
    return Manifest.decode(data, name)


# -- the local run ----------------------------------------------------------------------------------------------------


def _require_finished(run_dir: Path) -> None:
    meta = read_meta(run_dir)
    if processes_alive(run_dir):  # its launcher may be the one that archives it
        raise RunError(f"{run_dir} is still active; archive it when it is over")
    if isinstance(meta.get("hub"), dict):
        raise RunError(f"{run_dir} is only the data of one node; `stepscope send {run_dir}` delivers it to the run")
    if awaits_delivery(meta):
        raise RunError(f"the team's hub does not have all of {run_dir} yet; `stepscope send {run_dir}` delivers it")
    if meta.get("sealed") is not True or is_stage_committed(run_dir) or load_summary(run_dir) is None:
        raise RunError(f"{run_dir} was not finalized; run `stepscope report {run_dir}` first")


def _require_readable(run_dir: Path, manifest: Manifest) -> None:
    """RunError, before anything is copied, if readers would refuse the manifest."""
    data = manifest.encode()
    try:
        Manifest.decode(data, manifest.run.name)
        if len(data) > MOST_MANIFEST_BYTES:
            raise ArchiveError(f"the names of its files take {len(data):,} bytes; at most {MOST_MANIFEST_BYTES:,} fit")
    except ArchiveError as error:
        raise RunError(
            f"{run_dir} cannot be archived: {error}; move files that Stepscope did not write out of this folder, "
            "or put them into one file"
        ) from None


def _walk(run_dir: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Names and states of the files to archive, in order."""
    folders = [(run_dir, "", 0)]
    while folders:
        folder, prefix, depth = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = f"{prefix}{entry.name}"
                about = entry.stat(follow_symlinks=False)
                if name in NOT_ARCHIVED or entry.name.startswith("."):
                    continue
                if stat.S_ISDIR(about.st_mode) and depth < DEEPEST:
                    folders.append((Path(entry.path), f"{name}/", depth + 1))
                elif stat.S_ISREG(about.st_mode):
                    yield name, about
                else:
                    raise RunError(f"{run_dir} cannot be archived: {name} in it is not a regular file or folder")


def _stamps_of(run_dir: Path) -> _Stamps:
    return {name: (about.st_mtime_ns, about.st_size, about.st_ino) for name, about in _walk(run_dir)}


def _hash(run_dir: Path, lseek: _Seek) -> tuple[_Stamps, tuple[ArchivedFile, ...]]:
    try:
        stamps = _stamps_of(run_dir)
        with ThreadPoolExecutor(WRITERS) as pool:
            return stamps, tuple(pool.map(lambda name: _hash_file(run_dir, name, lseek), sorted(stamps)))
    except UnicodeEncodeError:
        raise RunError(f"{run_dir} cannot be archived: the name of a file in it is not UTF-8") from None
    except OSError as error:
        raise RunError(f"{run_dir} cannot be archived: {error.strerror} ({error.filename})") from None


def _hash_file(run_dir: Path, name: str, lseek: _Seek) -> ArchivedFile:
    name.encode()
    with open_file(run_dir / name) as file:
        size = os.fstat(file.fileno()).st_size
        extents = _extents(file, size, lseek)
        hasher = hashlib.sha256()
        stored = 0
        for piece in _stored_pieces(file, extents):
            hasher.update(piece)
            stored += len(piece)
    whole = extents == ((0, size),) or size == 0
    return ArchivedFile(
        name=name, size=size, stored=stored, sha256=hasher.hexdigest(), extents=() if whole else extents
    )


def _extents(file: BinaryIO, size: int, lseek: _Seek) -> tuple[tuple[int, int], ...]:
    """Where a file has data: all of it, unless it has holes."""
    found: list[tuple[int, int]] = []
    position = 0
    while position < size and len(found) < MOST_EXTENTS:
        try:
            begin = lseek(file.fileno(), position, os.SEEK_DATA)
            position = min(lseek(file.fileno(), begin, os.SEEK_HOLE), size)
        except OSError as error:
            # ENXIO: only a hole is left.  Anything else: this file system does not report holes, or cannot be read.
            return tuple(found) if error.errno == errno.ENXIO else ((0, size),)
        found.append((begin, position - begin))
    if position < size:
        begin = found.pop()[0]
        found.append((begin, size - begin))
    return tuple(found)


def _stored_pieces(file: BinaryIO, extents: tuple[tuple[int, int], ...]) -> Iterator[bytes]:
    for begin, length in extents:
        position, end = begin, begin + length
        while position < end:
            piece = os.pread(file.fileno(), min(CHUNK_BYTES, end - position), position)
            if not piece:
                raise RunError(f"{file.name} became shorter while it was copied; try again")
            yield piece
            position += len(piece)


# -- the copy ---------------------------------------------------------------------------------------------------------


def _refuse_other(storage: Storage, there: Manifest, local: Manifest, *, replace: bool) -> None:
    """Raise unless ``there`` is an earlier version of this run that may be replaced."""
    name = local.run.name
    begun = ("created_wall_ns", "host")
    if any(there.run.facts.get(fact) != local.run.facts.get(fact) for fact in begun):
        raise RunError(f"{storage.url} already has another run named {name}; rename the folder, or use another prefix")
    if not replace:
        before, after = ({file.name: file.sha256 for file in manifest.files} for manifest in (there, local))
        differing = sorted(file for file in {*before, *after} if before.get(file) != after.get(file))
        what = ", ".join(differing[:3]) + (", …" if len(differing) > 3 else "")
        raise RunError(f"{storage.url} has {name} with other contents ({what}); --replace archives this version")


def _copy(
    storage: Storage, run_dir: Path, manifest: Manifest, earlier: Mapping[str, StoredObject], progress: Progress
) -> None:
    """Write the objects that are not there, and read each back."""
    done = 0

    def copy(file: ArchivedFile) -> int:
        key = manifest.key(file)
        if key in earlier and earlier[key].size == file.stored and file_digest(storage, manifest, file) == file.sha256:
            return file.stored

        def pieces() -> Iterator[bytes]:
            with open_file(run_dir / file.name) as source:
                yield from _stored_pieces(source, file.extents or ((0, file.size),) * (file.stored > 0))

        storage.write_pieces(key, pieces, file.stored)
        if file_digest(storage, manifest, file) != file.sha256:
            raise ArchiveError(f"{storage.url}/{key} was not stored as it was sent; try again")
        return file.stored

    with ThreadPoolExecutor(WRITERS) as pool:
        for stored in pool.map(copy, manifest.files):
            done += stored
            progress(done, max(manifest.stored, 1))


def _write_manifest(storage: Storage, manifest: Manifest, *, replaces: Manifest | None) -> None:
    key = f"{key_of(manifest.run.name)}/{MANIFEST}"
    if replaces is None:
        storage.create(key, manifest.encode())
    else:
        storage.write(key, manifest.encode())
    there = read_manifest(storage, manifest.run.name)
    if there is None or there.run.digest != manifest.run.digest:
        raise ArchiveError(f"{storage.url} received another run named {manifest.run.name} at the same time")
    if replaces is not None:
        remaining = {manifest.key(file) for file in manifest.files}
        storage.delete([key for file in replaces.files if (key := replaces.key(file)) not in remaining])


def _list(storage: Storage, run: ArchivedRun) -> None:
    """Make the run appear in lists.  A run that is not in them can still be read by its name."""
    try:
        catalog = read_catalog(storage)
        write_entry(storage, run, catalog)
        compact(storage, catalog)
    except ArchiveError as error:
        raise ArchiveError(
            f"{run.name} was archived, but lists do not show it yet: {error}; archive it again"
        ) from None
