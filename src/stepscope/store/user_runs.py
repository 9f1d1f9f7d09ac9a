"""Where this user's runs are, and the hub that serves all of them (``stepscope serve --all``):

    $XDG_STATE_HOME/stepscope/folders/TAG.json    a folder that contains runs, and the host that last wrote one there
    $XDG_STATE_HOME/stepscope/hubs/HOST.json      address and token of the user's hub on that host, while it runs

Without ``XDG_STATE_HOME`` it is ``~/.local/state``.  Only the user can read these files, and files of others are
ignored.  Each folder has its own file, so that launchers that start at the same time need no lock.  A home
directory may be shared by many hosts: a folder that does not exist here is forgotten only by the host that named it.

The launcher imports it: keep it light.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepscope.records.files import private_folder
from stepscope.records.run_clock import process_start_ticks
from stepscope.records.text import host_in_name
from stepscope.store.file_io import read_document
from stepscope.store.liveness import Place, process_alive

__all__ = [
    "MANY_RUNS",
    "UserHub",
    "add_folder",
    "announced",
    "find_user_hub",
    "folder_tag",
    "known_folders",
    "run_id",
    "split_run_id",
    "state_path",
]

MANY_RUNS = 1000
"""Of a folder, from which on loading the catalog of a fleet is faster than reading them."""
MOST_FOLDERS = 256
"""The folders that were not used for the longest time are forgotten first."""
FOLDERS_BYTES = 64 << 10
FOLDERS_SCHEMA = 1
_TAG_CHARS = 10
_BEFORE_TAG = "~"


def state_path(environ: Mapping[str, str]) -> Path:
    folder = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".local" / "state")
    return Path(folder) / "stepscope"


# -- run IDs ----------------------------------------------------------------------------------------------------------
# Runs in two folders may have the same name, and a link must keep its meaning when the second one appears.  The ID of a
# run among all runs of a user is therefore its name and a tag of its folder: ``night~3fa9c1d204``.


def run_id(run_dir: Path) -> str:
    """Return the ID of a run in a folder as ``add_folder`` or ``known_folders`` returned it."""
    return f"{run_dir.name}{_BEFORE_TAG}{_tag(run_dir.parent)}"


def split_run_id(text: str) -> tuple[str, str]:
    """Return the name of the run and the tag of its folder."""
    name, _, tag = text.rpartition(_BEFORE_TAG)
    return name, tag


def folder_tag(folder: Path) -> str:
    """Return what represents a folder in the IDs of its runs."""
    return _tag(folder.resolve())


def _tag(folder: Path) -> str:
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:_TAG_CHARS]


# -- folders ----------------------------------------------------------------------------------------------------------


def add_folder(folder: Path, environ: Mapping[str, str], *, most: int = MOST_FOLDERS) -> Path:
    """Remember a folder of runs, ``most`` of all; return its path for ``run_id``.  OSError if that cannot be done."""
    folder = folder.resolve()
    place = _private_folder(state_path(environ) / "folders") / f"{_tag(folder)}.json"
    document = {"folder": os.fspath(folder), "host": os.uname().nodename}
    if _read(place) == document:
        os.utime(place)
    else:
        _write(place, document)
    files = _files(place.parent)
    for _, path in files[: max(0, len(files) - most)]:
        path.unlink(missing_ok=True)
    return folder


def known_folders(environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the folders of this user's runs that exist, by tag; the last used is last."""
    found: dict[str, Path] = {}
    for _, path in _files(state_path(environ) / "folders"):
        document = _read(path) or {}
        folder = Path(str(document.get("folder", "")))
        if not folder.is_absolute() or _tag(folder) != path.stem:
            continue
        if folder.is_dir():
            found[path.stem] = folder
        elif document.get("host") == os.uname().nodename:
            with suppress(OSError):
                path.unlink()
    return found


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Return the files and when they were last written, oldest first; none if others could have put them there."""
    try:
        if not _is_ours(folder.stat()):
            return []
        return sorted((path.stat().st_mtime_ns, path) for path in folder.glob("[0-9a-f]*.json"))
    except OSError:
        return []  # removed meanwhile, or never made


# -- the user's hub ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UserHub:
    """A hub on this host that serves all runs of this user."""

    url: str
    token: str
    """For readers."""
    token_file: str = ""
    """Where users find it."""
    fingerprint: str = ""
    """SHA-256 of the certificate in hexadecimal; empty without TLS."""


def find_user_hub(environ: Mapping[str, str]) -> UserHub | None:
    """Return the user's hub on this host if it runs."""
    document = _read(_hub_path(environ)) or {}
    texts = {name: document.get(name) for name in ("url", "token", "token_file", "fingerprint")}
    pid, start_ticks = document.get("pid"), document.get("start_ticks")
    if document.get("place") != Place.here().to_dict() or not all(isinstance(text, str) for text in texts.values()):
        return None
    if type(pid) is not int or type(start_ticks) is not int or not process_alive(pid, start_ticks):
        return None
    return UserHub(**{name: str(text) for name, text in texts.items()})


@contextmanager
def announced(hub: UserHub, environ: Mapping[str, str]) -> Iterator[None]:
    """Let launchers find this process as the user's hub.  OSError if the file cannot be written."""
    path, pid = _hub_path(environ), os.getpid()
    _private_folder(path.parent)
    process = {"pid": pid, "start_ticks": process_start_ticks(pid), "place": Place.here().to_dict()}
    _write(path, {**asdict(hub), **process})
    try:
        yield
    finally:
        if (_read(path) or {}).get("pid") == pid:
            with suppress(OSError):
                path.unlink()


def _hub_path(environ: Mapping[str, str]) -> Path:
    return state_path(environ) / "hubs" / f"{host_in_name(os.uname().nodename)}.json"


# -- private files ----------------------------------------------------------------------------------------------------


def _private_folder(folder: Path) -> Path:
    """Make a folder that only this user can enter; OSError if it belongs to others."""
    private_folder(folder)
    if not _is_ours(folder.stat()):
        raise PermissionError(f"{folder} belongs to another user, or others can write to it")
    return folder


def _is_ours(about: os.stat_result) -> bool:
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


def _read(path: Path) -> dict[str, Any] | None:
    """Return a document; None if it is missing, invalid, or could have been written by others."""
    try:
        if not _is_ours(path.stat()):
            return None
        document = json.loads(read_document(path, most=FOLDERS_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.pop("schema", None) != FOLDERS_SCHEMA:
        return None
    return document


def _write(path: Path, document: Mapping[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump({"schema": FOLDERS_SCHEMA, **document}, file)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
