"""``run.json``: what was run and how it ended.

The launcher writes it when a run begins and when it ends, ``seal`` after that; each replaces the file as a whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from stepscope.errors import NotARun, RunUnwritable
from stepscope.records import run_clock
from stepscope.store import atomic
from stepscope.store.paths import META
from stepscope.store.reading import read_document

__all__ = ["SCHEMA", "RunStatus", "end_run", "read_meta", "write_meta"]

SCHEMA = 1

RunStatus = Literal["finished", "failed", "crashed", "interrupted"]


def read_meta(run_dir: Path) -> dict[str, Any]:
    """The whole of ``run.json``; NotARun when the folder is missing, foreign or damaged."""
    path = run_dir / META
    try:
        text = read_document(path)
    except (FileNotFoundError, NotADirectoryError):
        what = "is no run: it holds no run.json" if run_dir.is_dir() else "does not exist"
        raise NotARun(f"{run_dir} {what}") from None
    except OSError as error:
        raise NotARun(f"{path} cannot be read: {error.strerror}") from error
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError):
        raise NotARun(f"{path} is damaged or cut off: it is not JSON") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("name"), str) or not isinstance(meta.get("schema"), int):
        raise NotARun(f"{path} was not written by Stepscope")
    if meta["schema"] != SCHEMA:
        raise NotARun(f"{path} has schema {meta['schema']}; this Stepscope reads schema {SCHEMA}")
    return meta


def write_meta(run_dir: Path, meta: dict[str, Any]) -> None:
    try:
        atomic.write_json(run_dir / META, meta, durable=True)
    except OSError as error:
        raise RunUnwritable(f"cannot write {run_dir / META}: {error.strerror}") from error


def end_run(run_dir: Path, *, exit_code: int | None, status: RunStatus, wall_ns: int | None = None) -> None:
    """Say how the run ended; once said, it stays."""
    meta = read_meta(run_dir)
    if meta.get("end") is None:
        end = {"exit_code": exit_code, "status": status, "wall_ns": wall_ns or run_clock.now_of(meta)}
        write_meta(run_dir, {**meta, "end": end})
