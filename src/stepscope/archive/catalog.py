"""The catalog of an archive: the facts about all its runs in a few objects.

Manifests are the truth, but a thousand of them are a thousand requests.  So whoever archives a run also writes an
entry, an object of a kilobyte.  When there are ``MANY_ENTRIES`` of them, whoever wrote the last one puts them into a
pack.  Packs are never changed: their name is the SHA-256 of their contents.  When there are ``MANY_PACKS``, the small
ones become one.

No locks are needed.  An entry or pack is deleted only after a pack with its contents was written and read back, and
a run that is in several objects counts once.  Two machines that do this at once make two packs with the same runs.  A
reader that finds an object gone lists again.  Without permission to delete, everything stays readable.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepscope.archive.manifest import ArchivedRun, read_archived_run
from stepscope.archive.storage import ObjectReader, Storage, StoredObject, key_of
from stepscope.errors import ArchiveError

__all__ = ["CATALOG", "Catalog", "CatalogObject", "compact", "entry_key", "read_catalog", "write_entry"]

CATALOG = ".stepscope"
ENTRIES = f"{CATALOG}/entries"
PACKS = f"{CATALOG}/packs"
MANY_ENTRIES = 32
MANY_PACKS = 8
MOST_ENTRY_BYTES = 1 << 20
MOST_PACK_BYTES = 64 << 20
MOST_UNPACKED_BYTES = 128 << 20
"""Of all packs together: about 100,000 runs."""
PACK_BYTES = 32 << 20
"""Of a pack that we write, unpacked."""
MOST_OBJECTS = 100_000
MOST_READ_BYTES = 256 << 20
"""Of all objects that one list reads."""
TRIES = 4


@dataclass(frozen=True, kw_only=True)
class CatalogObject:
    """An entry or a pack, read and checked."""

    stored: StoredObject
    runs: tuple[ArchivedRun, ...]
    unpacked_bytes: int


@dataclass(kw_only=True)
class Catalog:
    objects: dict[str, CatalogObject] = field(default_factory=dict)
    """By key."""
    problems: list[str] = field(default_factory=list)
    unpacked_bytes: int = 0

    def runs(self) -> dict[str, ArchivedRun]:
        """By name; of several versions of a run the one that was archived last."""
        found: dict[str, ArchivedRun] = {}
        for part in self.objects.values():
            for run in part.runs:
                known = found.get(run.name)
                if known is None or (known.archived_wall_ns, known.digest) < (run.archived_wall_ns, run.digest):
                    found[run.name] = run
        return found

    def packed(self) -> set[str]:
        """Keys of the entries that are in packs."""
        packs = (part.runs for key, part in self.objects.items() if key.startswith(f"{PACKS}/"))
        return {entry_key(run) for runs in packs for run in runs}


def entry_key(run: ArchivedRun) -> str:
    return f"{ENTRIES}/{key_of(run.name)}@{run.digest[:32]}.json"


def read_catalog(
    storage: ObjectReader, known: Catalog | None = None, *, most_bytes: int = MOST_UNPACKED_BYTES
) -> Catalog:
    """Read what is not ``known`` yet, ``most_bytes`` of JSON; what cannot be read is a problem of the result."""
    objects = dict(known.objects) if known is not None else {}
    for _ in range(TRIES):
        found = storage.find(CATALOG)
        catalog = Catalog(objects={key: part for key, part in objects.items() if found.get(key) == part.stored})
        catalog.unpacked_bytes = sum(part.unpacked_bytes for part in catalog.objects.values())
        packs = {key: about for key, about in found.items() if key.startswith(f"{PACKS}/")}
        missing = _add(catalog, storage, packs, most_bytes)
        packed = catalog.packed()
        entries = {key: about for key, about in found.items() if key.startswith(f"{ENTRIES}/") and key not in packed}
        for key in [key for key in catalog.objects if key in packed]:
            del catalog.objects[key]
        missing |= _add(catalog, storage, entries, most_bytes)
        objects = catalog.objects
        if not missing:
            return catalog
    catalog.problems.append(f"{storage.url} is being changed; the list may not be complete")
    return catalog


def _add(catalog: Catalog, storage: ObjectReader, found: Mapping[str, StoredObject], most_bytes: int) -> set[str]:
    """Read objects into the catalog; return those that are gone."""
    wanted: dict[str, int] = {}
    total = 0
    for key, about in sorted(found.items()):
        most = MOST_PACK_BYTES if key.startswith(f"{PACKS}/") else MOST_ENTRY_BYTES
        if key in catalog.objects:
            continue
        if about.size > most or total + about.size > MOST_READ_BYTES or len(wanted) >= MOST_OBJECTS:
            catalog.problems.append(f"{storage.url}/{key} is too large and was left out")
            continue
        total += about.size
        wanted[key] = about.size
    data = storage.read_many(wanted)
    for key, content in data.items():
        try:
            runs, size = _runs_of(key, content, most_bytes - catalog.unpacked_bytes)
            catalog.unpacked_bytes += size
        except (ValueError, LookupError, TypeError, RecursionError, zlib.error, OSError, EOFError):
            catalog.problems.append(f"{storage.url}/{key} is damaged and was left out")
            continue
        catalog.objects[key] = CatalogObject(stored=found[key], runs=runs, unpacked_bytes=size)
    return {key for key, size in wanted.items() if size and key not in data}


def _runs_of(key: str, content: bytes, most: int) -> tuple[tuple[ArchivedRun, ...], int]:
    if key.startswith(f"{PACKS}/"):
        if key != _pack_key(content):
            raise ValueError("its name does not match its contents")
        text = _unpacked(content, most)
        return tuple(read_archived_run(json.loads(line)) for line in text.split(b"\n") if line), len(text)
    run = read_archived_run(json.loads(content))
    if entry_key(run) != key:
        raise ValueError("it is the entry of another run")
    return (run,), len(content)


def _unpacked(content: bytes, most: int) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    text = unpacker.decompress(content, max(most, 1))
    if not unpacker.eof:
        raise ValueError("it is cut off, or too large")
    return text


def _pack_key(content: bytes) -> str:
    return f"{PACKS}/{hashlib.sha256(content).hexdigest()}.json.gz"


def write_entry(storage: Storage, run: ArchivedRun, catalog: Catalog) -> None:
    """Make a run visible in lists, unless it is in the catalog."""
    known = catalog.runs().get(run.name)
    if known is not None and known.digest == run.digest:
        return
    storage.write(entry_key(run), _line(run))


def _line(run: ArchivedRun) -> bytes:
    return json.dumps(run.to_dict(), separators=(",", ":"), sort_keys=True).encode()


def compact(
    storage: Storage, catalog: Catalog, *, many_entries: int = MANY_ENTRIES, many_packs: int = MANY_PACKS
) -> bool:
    """Put entries into a pack if there are many; return whether that was done."""
    entries = [key for key in catalog.objects if key.startswith(f"{ENTRIES}/")]
    packs = [
        key
        for key, part in catalog.objects.items()
        if key.startswith(f"{PACKS}/") and part.unpacked_bytes < PACK_BYTES // many_packs
    ]
    merged = packs[:many_packs] if len(packs) >= many_packs else []
    if len(entries) < many_entries and not merged:
        return False
    content = _pack(run for key in (*entries, *merged) for run in catalog.objects[key].runs)
    key = _pack_key(content)
    if key not in catalog.objects:
        storage.write(key, content)
    if storage.read(key, MOST_PACK_BYTES) != content:
        raise ArchiveError(f"{storage.url}/{key} was not stored as it was sent; nothing was deleted")
    storage.delete([old for old in (*entries, *merged) if old != key])
    return True


def _pack(runs: Iterable[ArchivedRun]) -> bytes:
    lines: dict[str, Any] = {}
    for run in runs:
        lines[entry_key(run)] = _line(run)
    text = b"".join(lines[key] + b"\n" for key in sorted(lines))
    return gzip.compress(text, mtime=0)
