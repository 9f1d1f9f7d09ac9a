"""What an archived run consists of, and the facts that a list shows of it.

``manifest.json`` is JSON:

    schema, kind     1, "stepscope-run"
    name             of the run's folder
    digest           SHA-256 of the list of files as compact JSON; also the folder of the objects
    archived_wall_ns when it was copied
    run              the facts that ``stepscope list`` shows
    files            one row per file: name, size, stored, sha256, and extents of a file with holes

A log whose middle was dropped is a sparse file: its object has the bytes outside of the holes (``stored`` of them), and
``extents`` says where they belong, as pairs of offset and length.  SHA-256 is that of the object.

A manifest may come from anyone.  A name that leaves the folder of the run, a file that would be a folder as well, a
size beyond reason or a wrong digest make it invalid as a whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.archive.location import ArchiveUrl
from stepscope.archive.storage import key_of
from stepscope.errors import ArchiveError, UsageError
from stepscope.records.finding import SEVERITIES
from stepscope.records.text import checked_name
from stepscope.store.catalog import Labels, RunEntry
from stepscope.store.liveness import LEASE
from stepscope.store.paths import ARCHIVED, HUB

__all__ = [
    "MANIFEST",
    "MOST_MANIFEST_BYTES",
    "NOT_ARCHIVED",
    "ArchivedFile",
    "ArchivedRun",
    "Manifest",
    "digest_of",
    "entry_of_facts",
    "read_archived_run",
    "run_facts",
]

MANIFEST = "manifest.json"
SCHEMA = 1
KIND = "stepscope-run"
MOST_MANIFEST_BYTES = 16 << 20
NOT_ARCHIVED = (HUB, LEASE, ARCHIVED)
"""A token, a sign of life, and where a copy came from: none of them belongs to a finished run."""
MOST_FILES = 20_000
MOST_EXTENTS = 4096
MOST_SIZE = 1 << 40
"""Of one file, holes included, and of all that is stored of a run."""
DEEPEST = 8
LONGEST_NAME = 240
"""Of a part of a file's name in bytes; a file system allows 255, and a file is first written under a longer name."""
LONGEST_TEXT = 4096
LONGEST_WORD = 1000
MOST_WORDS = 200
MOST_METRICS = 200
"""A list shows little of these, and a thousand runs are listed in one go."""
LARGEST = 1 << 62
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class ArchivedFile:
    name: str
    """In the run's folder, with slashes."""
    size: int
    stored: int
    """Bytes of the object: the size without holes."""
    sha256: str
    extents: tuple[tuple[int, int], ...] = ()
    """Offset and length of what is stored; empty: all of the file."""

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"name": self.name, "size": self.size, "stored": self.stored, "sha256": self.sha256}
        return {**row, "extents": [list(pair) for pair in self.extents]} if self.extents else row


@dataclass(frozen=True, kw_only=True)
class ArchivedRun:
    """One line of a list; also in the catalog."""

    name: str
    digest: str
    stored: int
    """Bytes of all objects."""
    archived_wall_ns: int
    facts: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": KIND,
            "name": self.name,
            "digest": self.digest,
            "stored": self.stored,
            "archived_wall_ns": self.archived_wall_ns,
            "run": dict(self.facts),
        }

    def entry(self, url: ArchiveUrl, folder: Path) -> RunEntry:
        """The run as ``list`` shows it; ``folder``: where its copy on this disk is or would be."""
        return entry_of_facts(self.facts, self.name, folder, url=str(url.run(self.name)))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    run: ArchivedRun
    files: tuple[ArchivedFile, ...]

    @property
    def stored(self) -> int:
        return sum(file.stored for file in self.files)

    def key(self, file: ArchivedFile) -> str:
        return f"{key_of(self.run.name)}/{self.run.digest[:32]}/{key_of(file.name)}"

    def encode(self) -> bytes:
        document = {**self.run.to_dict(), "files": [file.to_dict() for file in self.files]}
        return json.dumps(document, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, name: str) -> Manifest:
        """The manifest of the run of that name; ArchiveError with the reason if it is invalid."""
        try:
            document = json.loads(data)
            run = read_archived_run(document)
            rows = document["files"]
            _require(run.name == name, "it belongs to another run")
            _require(isinstance(rows, list) and len(rows) <= MOST_FILES, "it has too many files")
            files = tuple(map(_file, rows))
            _require(digest_of(files) == run.digest, "its digest does not match its files")
            _require(sum(file.stored for file in files) == run.stored <= MOST_SIZE, "its size is not possible")
            _check_names([file.name for file in files])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            why = str(error) if type(error) is _Invalid else "it is not valid"
            raise ArchiveError(f"the manifest of {name} cannot be used: {why}") from None
        return cls(run=run, files=files)


class _Invalid(ValueError):
    pass


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise _Invalid(why)


def digest_of(files: Sequence[ArchivedFile]) -> str:
    rows = [file.to_dict() for file in files]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


def _file(row: Any) -> ArchivedFile:
    sizes = row["size"], row["stored"]
    _require(all(type(size) is int and 0 <= size <= MOST_SIZE for size in sizes), "a size is not possible")
    _require(isinstance(row["sha256"], str) and bool(_HEX.fullmatch(row["sha256"])), "a checksum is not valid")
    _require(isinstance(row["name"], str), "a name is not text")
    extents = row.get("extents", [])
    _require(isinstance(extents, list) and len(extents) <= MOST_EXTENTS, "a file has too many parts")
    end = stored = 0
    for offset, length in extents:
        _require(type(offset) is int and type(length) is int and offset >= end and length > 0, "parts overlap")
        end, stored = offset + length, stored + length
    _require(end <= row["size"], "a part is behind the end of its file")
    holes = bool(extents) or (row["stored"] == 0 < row["size"])
    _require(row["stored"] == (stored if holes else row["size"]), "a size does not match the parts of its file")
    return ArchivedFile(
        name=row["name"],
        size=row["size"],
        stored=row["stored"],
        sha256=row["sha256"],
        extents=tuple((offset, length) for offset, length in extents),
    )


def _check_names(names: Sequence[str]) -> None:
    known = set(names)
    _require(len(known) == len(names), "a file is listed twice")
    for name in names:
        parts = name.split("/")
        plain = all(part not in ("", ".", "..") and len(part.encode()) <= LONGEST_NAME for part in parts)
        _require(plain and "\0" not in name and len(parts) <= DEEPEST, f"{name[:80]!r} cannot be a file of a run")
        _require(not parts[0].startswith(".") and name not in NOT_ARCHIVED, f"{name[:80]!r} cannot be a file of a run")
        folders = ("/".join(parts[:count]) for count in range(1, len(parts)))
        _require(not known.intersection(folders), f"{name[:80]!r} is in a file")


# -- facts ------------------------------------------------------------------------------------------------------------


def run_facts(entry: RunEntry) -> dict[str, Any]:
    """What a list shows of a run, as it is stored."""
    facts = {key: value for key, value in entry.to_dict().items() if key not in ("path", "name")}
    facts["command"] = [word[:LONGEST_WORD] for word in facts["command"][:MOST_WORDS]]
    facts["metrics"] = dict(list(facts["metrics"].items())[:MOST_METRICS])
    return {**facts, "healthy": entry.healthy, "shown_name": entry.labels.name, "recorded_name": entry.name}


def read_archived_run(document: Any) -> ArchivedRun:
    """Check the head of a manifest or a line of the catalog; ValueError, LookupError or TypeError if it is invalid."""
    _require(isinstance(document, dict) and document["kind"] == KIND, "it was not written by Stepscope")
    _require(document["schema"] == SCHEMA, f"it has schema {document['schema']!r:.20}; this Stepscope reads {SCHEMA}")
    name, digest, facts = document["name"], document["digest"], document["run"]
    try:
        checked_name(name if isinstance(name, str) else "")
    except UsageError:
        raise _Invalid("its name cannot be that of a run") from None
    _require(isinstance(digest, str) and bool(_HEX.fullmatch(digest)), "its digest is not valid")
    numbers = document["stored"], document["archived_wall_ns"]
    _require(all(type(number) is int and 0 <= number < LARGEST for number in numbers), "a number is not possible")
    _require(isinstance(facts, dict), "it has no facts")
    return ArchivedRun(name=name, digest=digest, stored=numbers[0], archived_wall_ns=numbers[1], facts=facts)


def entry_of_facts(facts: Mapping[str, Any], name: str, folder: Path, *, url: str = "") -> RunEntry:
    """The run of these facts (``run_facts``) and of this folder; whatever is missing or not valid is left out."""
    command, tags, metrics = facts.get("command"), facts.get("tags"), facts.get("metrics")
    severity = _text(facts, "severity")
    shown = _text(facts, "shown_name")
    return RunEntry(
        name=shown or _text(facts, "recorded_name") or name,
        path=folder,
        url=url,
        created_wall_ns=int(_number(facts, "created_wall_ns") or 0),
        status=_text(facts, "status") or "unfinished",
        status_text=_text(facts, "status_text") or _text(facts, "status") or "unfinished",
        status_severity=next((known for known in SEVERITIES if known == facts.get("status_severity")), "info"),
        ranks=_whole(facts, "ranks"),
        steps=_whole(facts, "steps"),
        median_step_ms=_number(facts, "median_step_ms"),
        verdict=_text(facts, "verdict"),
        severity=severity or None,
        healthy=facts.get("healthy") is True,
        cost_share=_number(facts, "cost_share"),
        duration_s=_number(facts, "duration_s"),
        host=_text(facts, "host"),
        user=_text(facts, "user"),
        command=tuple(str(word)[:LONGEST_WORD] for word in command[:MOST_WORDS]) if isinstance(command, list) else (),
        commit=_text(facts, "commit"),
        branch=_text(facts, "branch"),
        dirty=facts.get("dirty") is True,
        metrics=_metrics(metrics),
        labels=Labels(
            name=shown,
            tags=tuple(tag[:40] for tag in tags[:32] if isinstance(tag, str)) if isinstance(tags, list) else (),
            note=_text(facts, "note"),
        ),
    )


def _metrics(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, dict):
        return {}
    return {
        key[:LONGEST_TEXT]: number
        for key in list(metrics)[:MOST_METRICS]
        if (number := _number(metrics, key)) is not None
    }


def _text(facts: Mapping[str, Any], name: str) -> str:
    value = facts.get(name)
    return value[:LONGEST_TEXT] if isinstance(value, str) else ""


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -LARGEST < value < LARGEST and math.isfinite(value) else None


def _whole(facts: Mapping[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return value if type(value) is int and 0 <= value < LARGEST else None
