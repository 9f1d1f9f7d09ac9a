"""What people say about a run: a name, tags and a note, in ``labels.json``; and deleting a run for good.

The file is separate from everything that is recorded, so an active run and a sealed one are labeled in the same way.
Changes are serialized by the run's lock and replace the file as a whole.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import RunError, RunUnwritable, UsageError
from stepscope.records.text import Progress, no_progress
from stepscope.store import file_io
from stepscope.store.documents import read_meta
from stepscope.store.liveness import is_local, launcher_alive, processes_alive, sealing_barred, session_of
from stepscope.store.locks import LockBusy, locked, take_lock, writing_barred
from stepscope.store.paths import INBOX, LABELS, META

__all__ = ["Labels", "change_labels", "checked_tag", "delete_run", "read_labels"]


# -- labels -----------------------------------------------------------------------------------------------------------

SCHEMA = 1
MOST_BYTES = 64 << 10
MOST_TAGS = 32
MOST_NAME = 200
MOST_NOTE = 2000
WAIT_S = 10.0
"""A change waits this long for another process that holds the run's lock."""
_TAG = re.compile(r"[^\s,+-][^\s,]{0,39}")


@dataclass(frozen=True, kw_only=True)
class Labels:
    name: str = ""
    """Shown instead of the name of the run's folder; empty: not renamed."""
    tags: tuple[str, ...] = ()
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tags": list(self.tags)}


def checked_tag(text: str) -> str:
    """The tag; UsageError if it cannot be one."""
    if _TAG.fullmatch(text) is None or not text.isprintable():
        raise UsageError(f"{text!r} is not a valid tag: use 1 to 40 characters without spaces and commas")
    return text


def read_labels(run_dir: Path) -> Labels:
    """Return the labels of a run.  Whatever is missing or invalid is left out: the file may come from anyone."""
    try:
        said = json.loads(file_io.read_document(run_dir / LABELS, most=MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return Labels()
    if not isinstance(said, dict) or said.get("schema") != SCHEMA:
        return Labels()
    name, tags, note = said.get("name"), said.get("tags"), said.get("note")
    valid = [tag for tag in tags if isinstance(tag, str) and _TAG.fullmatch(tag)] if isinstance(tags, list) else []
    return Labels(
        name=name[:MOST_NAME] if isinstance(name, str) else "",
        tags=tuple(dict.fromkeys(valid))[:MOST_TAGS],
        note=note[:MOST_NOTE] if isinstance(note, str) else "",
    )


def change_labels(
    run_dir: Path,
    *,
    name: str | None = None,
    note: str | None = None,
    tags: Sequence[str] | None = None,
    add: Iterable[str] = (),
    remove: Iterable[str] = (),
    made_here: bool = False,
) -> Labels:
    """Change what is given, and return all labels.  An empty ``name`` or ``note`` removes it; ``tags`` replaces all.

    ``made_here``: this process made the folder (``writing_barred``).
    UsageError if a value is invalid; RunError if the folder is not a run, or must not be changed.
    """
    read_meta(run_dir)
    if barred := writing_barred(run_dir, made_here=made_here):
        raise RunUnwritable(f"{run_dir} cannot be labeled: {barred}")
    removed, added = set(remove), [checked_tag(tag) for tag in add]
    try:
        with locked(run_dir, wait_s=WAIT_S):
            before = read_labels(run_dir)
            kept = [tag for tag in (before.tags if tags is None else map(checked_tag, tags)) if tag not in removed]
            after = Labels(
                name=before.name if name is None else _checked_name(name),
                tags=tuple(dict.fromkeys([*kept, *added])),
                note=before.note if note is None else _checked_note(note),
            )
            if len(after.tags) > MOST_TAGS:
                raise UsageError(f"a run can have at most {MOST_TAGS} tags")
            if after != before:
                file_io.write_json(run_dir / LABELS, {"schema": SCHEMA, **after.to_dict()})
    except LockBusy:
        raise RunError(f"{run_dir} is being changed by another process; try again in a moment") from None
    except OSError as error:
        raise RunUnwritable(f"cannot write {run_dir / LABELS}: {error.strerror}") from error
    return after


def _checked_name(text: str) -> str:
    text = text.strip()
    if len(text) > MOST_NAME or not text.isprintable():
        raise UsageError(f"the name must be one line of at most {MOST_NAME} characters")
    return text


def _checked_note(text: str) -> str:
    text = text.strip()
    if len(text) > MOST_NOTE or not all(c.isprintable() or c == "\n" for c in text):
        raise UsageError(f"the note must be plain text of at most {MOST_NOTE:,} characters")
    return text


# -- deleting ---------------------------------------------------------------------------------------------------------
# Only a Stepscope run that is over, and that no process works on.  The folder is first renamed, which takes effect at
# once, and then removed; what a killed process left of it is removed by the next one.

_DELETED = ".deleted-"


def delete_run(run_dir: Path, *, watch: bool = True, progress: Progress = no_progress) -> None:
    """Delete a run and its session; RunError, and nothing is changed, if it is or may be in use.

    ``watch``: a run recorded on another machine that was never sealed is watched to see whether it is still recorded,
    which can take long; without it such a run is not deleted.
    """
    if run_dir.is_symlink():
        raise RunError(f"{run_dir} is a link and was not deleted")
    meta = read_meta(run_dir)
    why = writing_barred(run_dir) or _in_use(run_dir, meta, watch=watch, progress=progress)
    if why:
        raise RunError(f"{run_dir} was not deleted: {why}")
    try:
        with ExitStack() as held:
            held.enter_context(locked(run_dir, wait_s=0.0))
            if (run_dir / INBOX).is_dir():
                held.callback(os.close, take_lock(run_dir / INBOX))
            # Again, now that nobody else can begin to work on it.
            if why := _in_use(run_dir, read_meta(run_dir), watch=False, progress=progress, seen=True):
                raise RunError(f"{run_dir} was not deleted: {why}")
            session = session_of(run_dir, meta)
            folder = run_dir.resolve()
            gone = folder.with_name(f"{_DELETED}{secrets.token_hex(8)}")
            folder.rename(gone)
    except LockBusy:
        raise RunError(f"{run_dir} was not deleted: another process is working on it") from None
    except OSError as error:
        raise RunUnwritable(f"{run_dir} was not deleted: {error.strerror}") from error
    if session is not None and session != run_dir / "rings":
        shutil.rmtree(session, ignore_errors=True)
    for left in gone.parent.glob(f"{_DELETED}*"):
        if left.is_dir() and not left.is_symlink():
            with suppress(OSError):
                (left / META).unlink(missing_ok=True)
            shutil.rmtree(left, ignore_errors=True)


def _in_use(run_dir: Path, meta: dict[str, Any], *, watch: bool, progress: Progress, seen: bool = False) -> str | None:
    """Why a run must not be deleted now; ``seen``: a remote run was watched before."""
    if launcher_alive(meta) or processes_alive(run_dir):
        return "it is still active"
    if isinstance(meta.get("hub"), dict):
        return "it has data that its hub may not have yet; `stepscope send` delivers it"
    if seen or meta.get("sealed") is True or is_local(meta):
        return None
    if not watch:
        return f"it was recorded on {meta.get('host')} and never finished; use `stepscope delete`"
    return sealing_barred(run_dir, meta, progress=progress)
