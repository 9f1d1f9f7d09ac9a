"""The run of W&B that a script writes itself, as its file on this disk says; nothing of it is changed.

``wandb/[offline-]run-TIME-ID/run-ID.wandb`` is a log of protocol buffers in the form of LevelDB's: after a head of 7
bytes, blocks of 32 KiB with pieces of records, each with its checksum (4 bytes), size (2) and kind (1): 1 is a whole
record, 2, 3 and 4 the first, middle and last piece of one.  The record of the run is among the first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from wandb.proto.wandb_internal_pb2 import Record

from stepscope.records.files import open_file

__all__ = ["OWN_JOB_TYPE", "ScriptRun", "find_script_run"]

OWN_JOB_TYPE = "stepscope"
"""Of runs that Stepscope writes."""
FILE_HEAD_BYTES = 7
BLOCK_BYTES = 32 << 10
PIECE_HEAD = struct.Struct("<IHB")
WHOLE, LAST = 1, 4
READ_BYTES = 1 << 20
"""Of a file; the record of the run comes first."""
MOST_FOLDERS = 200


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    id: str
    project: str
    entity: str = ""
    """Empty: the default of the user's key."""
    group: str = ""
    name: str = ""
    offline: bool = False

    @property
    def path(self) -> str:
        return "/".join(part for part in (self.entity, self.project, self.id) if part)


def find_script_run(folder: Path, since_wall_ns: int, environ: Mapping[str, str]) -> ScriptRun | None:
    """Return the first run that began since then below a folder, or ``WANDB_DIR``, or None."""
    parent = Path(environ.get("WANDB_DIR", "") or folder)
    paths = [path for place in ("wandb", ".wandb") for path in (parent / place).glob("*run-*/run-*.wandb")]
    recent = [path for path in sorted(paths)[-MOST_FOLDERS:] if path.stat().st_mtime_ns >= since_wall_ns]
    found = [run for path in recent if (run := _run_in(path)) is not None]
    return min(found, key=lambda each: each[0])[1] if found else None


def _run_in(path: Path) -> tuple[tuple[int, str], ScriptRun] | None:
    """The run of a file, with what orders it; None for one of our own, or one that cannot be read."""
    try:
        with open_file(path) as file:
            data = file.read(READ_BYTES)
    except OSError:
        return None
    for record in _records(data):
        if record.WhichOneof("record_type") == "run":
            run = record.run
            if run.job_type == OWN_JOB_TYPE or not run.run_id:
                return None
            about = ScriptRun(
                id=run.run_id,
                project=run.project or "uncategorized",
                entity=run.entity,
                group=run.run_group,
                name=run.display_name,
                offline=path.parent.name.startswith("offline-"),
            )
            return (run.start_time.ToNanoseconds(), run.run_id), about
    return None


def _records(data: bytes) -> Iterator[Record]:
    at, pieces = FILE_HEAD_BYTES, []
    while at + PIECE_HEAD.size <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < PIECE_HEAD.size:
            at += left
            continue
        _, size, kind = PIECE_HEAD.unpack_from(data, at)
        at += PIECE_HEAD.size + size
        pieces.append(data[at - size : at])
        if kind in (WHOLE, LAST):
            try:
                yield Record.FromString(b"".join(pieces))
            except DecodeError:
                return
            pieces = []
