"""Files and folders of a run: who may read them, how they are opened, created and replaced, and their paths in SQL.

Only its owner may read a run, unless ``run --share`` opened it.  The mode of the run directory decides; everything
created in it gets the same permissions.  Standard library only: training processes load this.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from stepscope.errors import RingNoSpace
from stepscope.records.text import numbered

__all__ = [
    "PRIVATE",
    "SHARED_WITH",
    "file_mode",
    "folder_mode",
    "is_remote",
    "key_path",
    "make_session",
    "open_file",
    "private_folder",
    "replaced",
    "run_umask",
    "sql_input_path",
    "sql_output_path",
    "take_folder",
    "umask_of",
    "write_private",
]


# -- Permissions ------------------------------------------------------------------------------------------------------

SHARED_WITH = {"group": 0o750, "all": 0o755}
PRIVATE = 0o700


def folder_mode(run_dir: Path) -> int:
    """Mode of a folder in the run directory; only its owner ever writes there."""
    try:
        return PRIVATE | (stat.S_IMODE(run_dir.stat().st_mode) & 0o055)
    except OSError:
        return PRIVATE


def file_mode(run_dir: Path) -> int:
    return folder_mode(run_dir) & 0o644


def umask_of(run_dir: Path) -> int:
    """For a process that writes nothing but this run: the agent, the run's hub."""
    return 0o777 & ~folder_mode(run_dir)


@contextmanager
def run_umask(run_dir: Path) -> Iterator[None]:
    """Create everything in this process with the run's mode.  Not for use in a training process."""
    before = os.umask(umask_of(run_dir))
    try:
        yield
    finally:
        os.umask(before)


# -- Opening ----------------------------------------------------------------------------------------------------------
# A run may come from anyone: a pipe in place of a file would block us forever, a device never ends, and a link shows
# files of the reader to the reader's colleagues.  Every reader of a run directory or a session opens files here.

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
RUN_FILE = "run.json"


def open_file(path: Path, *, buffering: int = -1, links: bool = False) -> BinaryIO:
    """Open a file for reading, without waiting; OSError if it is missing or not a regular file.

    A run contains no links: neither the file nor its folder in the run may be one.  A link to the run directory itself
    is accepted.  ``links``: accept them, for a file that the user named.
    """
    try:
        fd = os.open(path, _READ if links else _READ | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.EINVAL, "a link, which a run does not contain", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    folder = path.parent
    if not links and folder.is_symlink() and (folder.parent / RUN_FILE).exists():
        os.close(fd)
        raise OSError(errno.EINVAL, "its folder is a link, which a run does not contain", str(path))
    return open(path, "rb", buffering, opener=lambda *_: fd)


# -- Run and session folders ------------------------------------------------------------------------------------------
# Both are created by the launcher of a run, or by ranks that were started without ``stepscope run``.
#
# The session is the folder of the rings on one node: in memory, and closed to other users.  Another user may have
# created a folder under ``/dev/shm`` or ``/tmp`` to read or change what we write there, so the base is used only if we
# are its sole owner.

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def take_folder(root: Path, wanted: str, *, mode: int = PRIVATE) -> Path:
    """Create the first free folder of NAME, NAME-2, NAME-3 …; concurrent callers get different folders.

    ``mode`` applies regardless of the umask: the contents are private unless the owner says otherwise.
    """
    root.mkdir(parents=True, exist_ok=True)
    for name in numbered(wanted):
        folder = root.resolve() / name
        try:
            folder.mkdir(mode=PRIVATE)
        except FileExistsError:
            continue
        if mode != PRIVATE:
            folder.chmod(mode)
        break
    return folder


OWN_FOLDER = "stepscope"
"""The name of this user's folders in ``~/.config``, ``~/.local/state`` and ``~/.cache``."""


def key_path(environ: Mapping[str, str]) -> Path:
    """The usual file of the key; the user's other secrets are next to it."""
    folder = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".config")
    return Path(folder) / OWN_FOLDER / "key"


def private_folder(folder: Path) -> Path:
    """Create a folder for files of this user, closed to others; OSError if it cannot be created.

    A folder named ``stepscope``, this one or the one it is in, is also closed if it exists: ``mkdir`` gives parents the
    umask's mode.
    """
    for place in (folder.parent, folder) if folder.parent.name == OWN_FOLDER else (folder,):
        place.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        about = place.stat()
        if place.name == OWN_FOLDER and about.st_uid == os.getuid() and about.st_mode & 0o077:
            with suppress(OSError):  # a read-only file system
                place.chmod(PRIVATE)
    return folder


def make_session(base: Path, name: str, *, exist_ok: bool = False) -> Path:
    """Create ``base/name``; RingNoSpace if ``base`` cannot be created or others can write to it."""
    session = base / name
    try:
        # One by one: the parents that ``mkdir(parents=True)`` creates get the umask's mode, not ours.
        base.mkdir(mode=PRIVATE, exist_ok=True)
        found = base.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS_MAY_WRITE:
            raise RingNoSpace(f"{base} is not a private folder of this user")
        if stat.S_IMODE(found.st_mode) != PRIVATE:
            base.chmod(PRIVATE)
        session.mkdir(mode=PRIVATE, exist_ok=exist_ok)
    except OSError as error:
        raise RingNoSpace(f"{base} cannot be used ({error.strerror})") from error
    return session


# -- Atomic replacement -----------------------------------------------------------------------------------------------
# A file is written under another name next to its destination, then renamed, so the old file stays until the new one is
# complete, whatever happens meanwhile.


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path with the same suffix; what is written there becomes ``path``.  Raises OSError.

    A link stays a link, and its target is replaced.  Anything but a regular file (``/dev/stdout``) is written to
    directly.
    """
    place = path.resolve()
    if place.exists() and not place.is_file():
        yield path
        return
    # In a separate folder that only we can enter, so that other users cannot put a link where we are about to write.
    import tempfile  # not in a training process, which loads this module

    folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=".stepscope-"))
    spare = folder / f"new{place.suffix}"
    try:
        yield spare
        spare.replace(place)
    finally:
        spare.unlink(missing_ok=True)
        folder.rmdir()


def write_private(path: Path, text: str) -> None:
    """Create or replace a file that only its owner can read, durably; all of it or nothing.  Raises OSError."""
    spare = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with os.fdopen(os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        spare.replace(path)
    finally:
        spare.unlink(missing_ok=True)


# -- Remote file systems ----------------------------------------------------------------------------------------------
# Whether a folder is on a file system that another machine or process serves, and that may therefore stop responding.

MOUNTS = "/proc/self/mountinfo"
REMOTE_FILE_SYSTEMS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "daos", "fuse", "glusterfs", "gpfs"),
    *("lustre", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "virtiofs", "wekafs"),
)
"""By the first part of their names: ``fuse.sshfs`` and everything else that runs outside the kernel are ``fuse``."""


def is_remote(folder: Path) -> bool:
    """Whether ``folder`` is on a remote file system; False also if unknown."""
    try:
        device = os.stat(folder).st_dev  # noqa: PTH116 - a rank's start waits for this
        number = f"{os.major(device)}:{os.minor(device)}"
        with open(MOUNTS, encoding="utf-8", errors="replace") as mounts:  # noqa: PTH123
            for line in mounts:
                about, _, kind = line.partition(" - ")
                if about.split(" ", 3)[2] == number:
                    return kind.split(" ", 1)[0].partition(".")[0] in REMOTE_FILE_SYSTEMS
    except (OSError, IndexError):
        pass
    return False


# -- SQL paths --------------------------------------------------------------------------------------------------------
# DuckDB treats ``*``, ``?`` and ``[`` in a path that it reads as a pattern.

_GLOB = str.maketrans({"*": "[*]", "?": "[?]", "[": "[[]"})


def sql_output_path(path: Path | str) -> str:
    """A path to write to."""
    return "'" + str(path).replace("'", "''") + "'"


def sql_input_path(path: Path | str) -> str:
    """A path to read from: this file and no other."""
    return sql_output_path(str(path).translate(_GLOB))
