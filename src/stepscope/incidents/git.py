"""Commits and changed files between the commits of two runs, read from the repository in which the run was started.

The folder and the commits come from ``run.json``, which may come from anyone, so git only reads objects: it compares
two commits and never the working tree, and everything in a repository's configuration that can start a program (hooks,
pagers, file-system monitors, external diffs, signature checks, fetching of missing objects) is switched off.  Each
command has a time limit, and git itself refuses repositories of other users.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

from stepscope.incidents.inputs import Commit, FileChange, GitChanges
from stepscope.records.text import count_text, printable

__all__ = ["MOST_COMMITS", "MOST_FILES", "git_changes"]

TIMEOUT_S = 5.0
MOST_BYTES = 256 << 10
MOST_COMMITS = 30
MOST_FILES = 40
LONGEST_SUBJECT = 200
_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_NO_PROGRAMS = (
    *("-c", "core.fsmonitor=false"),
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.pager=cat"),
    *("-c", "core.alternateRefsCommand="),
    *("-c", "core.attributesFile=/dev/null"),
    *("-c", "diff.external="),
    *("-c", "log.showSignature=false"),
    *("-c", "gpg.program=false"),
    *("-c", "maintenance.auto=false"),
    *("-c", "protocol.allow=never"),
)
_SECRET_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_EXTERNAL_DIFF")
"""Left out: they would make git read another repository, or start a program."""


class _Unreadable(Exception):
    """Git did not answer; the text is the reason."""


def git_changes(folder: Path, before: str, after: str, *, timeout_s: float = TIMEOUT_S) -> GitChanges:
    """Return what lies between two commits, or why that is unknown."""
    if not _HASH.fullmatch(before) or not _HASH.fullmatch(after):
        return GitChanges(before=before[:64], after=after[:64], problem="the recorded commit is not a commit")
    found = GitChanges(before=before, after=after)
    if before == after:
        return found
    if not folder.is_dir():
        return replace(found, problem=f"{folder} no longer exists")
    try:
        for commit in (before, after):
            if _git(folder, timeout_s, "cat-file", "-t", commit).strip() != "commit":
                raise _Unreadable(f"commit {commit[:10]} is not there")
        span, backward = f"{before}..{after}", False
        count = _count(folder, timeout_s, span)
        if not count:
            span, backward = f"{after}..{before}", True
            count = _count(folder, timeout_s, span)
        commits = _commits(folder, timeout_s, span)
        changes = _files(folder, timeout_s, before, after)
    except _Unreadable as error:
        return replace(found, problem=str(error))
    return replace(
        found,
        commits=commits,
        commit_count=count,
        backward=backward and count > 0,
        files=tuple(changes[:MOST_FILES]),
        file_count=len(changes),
        added=sum(change.added or 0 for change in changes),
        removed=sum(change.removed or 0 for change in changes),
    )


def _count(folder: Path, timeout_s: float, span: str) -> int:
    text = _git(folder, timeout_s, "rev-list", "--count", span).strip()
    return int(text) if text.isdigit() and len(text) < 10 else 0


def _commits(folder: Path, timeout_s: float, span: str) -> tuple[Commit, ...]:
    form = "--format=%H%x00%ct%x00%an%x00%s%x00"
    words = ("log", "--no-show-signature", "--no-color", "--no-decorate", f"--max-count={MOST_COMMITS}", form, span)
    found = []
    for line in _git(folder, timeout_s, *words).split("\n"):
        parts = line.split("\0")
        if len(parts) == 5 and parts[1].isdigit():
            author, subject = (printable(text)[:LONGEST_SUBJECT] for text in parts[2:4])
            found.append(Commit(hash=parts[0], wall_s=int(parts[1]), author=author, subject=subject))
    return tuple(found)


def _files(folder: Path, timeout_s: float, before: str, after: str) -> list[FileChange]:
    """The files that differ, those with most changed lines first."""
    words = ("diff", "--numstat", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "-z", before, after)
    found = []
    for entry in _git(folder, timeout_s, *words, "--").split("\0"):
        added, _, rest = entry.partition("\t")
        removed, _, path = rest.partition("\t")
        if path:
            lines = [int(text) if text.isdigit() and len(text) < 12 else None for text in (added, removed)]
            found.append(FileChange(path=printable(path)[:LONGEST_SUBJECT], added=lines[0], removed=lines[1]))
    return sorted(found, key=lambda change: (-(change.added or 0) - (change.removed or 0), change.path))


def _git(folder: Path, timeout_s: float, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in _SECRET_VARIABLES}
    environment |= {
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "",
        "LC_ALL": "C",
    }
    try:
        process = subprocess.Popen(
            ["git", "--no-pager", "--no-replace-objects", *_NO_PROGRAMS, *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        raise _Unreadable(f"git could not be started: {error.strerror}") from None
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise _Unreadable(f"git did not answer within {count_text(round(timeout_s), 'second')}") from None
    if process.returncode != 0:
        raise _Unreadable(f"{folder} is not a repository with these commits, or git refuses to read it")
    return output[:MOST_BYTES].decode(errors="replace")
