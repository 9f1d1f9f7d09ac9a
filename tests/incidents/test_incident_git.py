"""Commits and files between the commits of two runs, from a real repository; nothing of the repository is run."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from made_incidents import commit, git

from stepscope.incidents.git import MOST_COMMITS, git_changes
from stepscope.incidents.inputs import FileChange


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    return folder


def test_commits_and_changed_lines_between_two_commits(repository: Path) -> None:
    before = commit(repository, "First", train="a\nb\n", data="x\n")
    middle = commit(repository, "Second \x1b[31mred", train="a\nc\nd\n")
    (repository / "picture.bin").write_bytes(b"\0\1")
    after = commit(repository, "Third")
    found = git_changes(repository, before, after)
    assert [(each.hash, each.author, each.subject) for each in found.commits] == [
        (after, "Ada", "Third"),
        (middle, "Ada", "Second \\x1b[31mred"),
    ]
    assert (found.commit_count, found.backward, found.problem) == (2, False, "")
    assert found.files == (
        FileChange(path="train.py", added=2, removed=1),
        FileChange(path="picture.bin", added=None, removed=None),
    )
    assert (found.added, found.removed, found.file_count) == (2, 1, 2)


def test_an_older_commit_in_the_later_run(repository: Path) -> None:
    old = commit(repository, "Old", train="a\n")
    new = commit(repository, "New", train="b\n")
    found = git_changes(repository, new, old)
    assert found.backward and [each.hash for each in found.commits] == [new]


def test_very_many_commits_are_counted_and_only_some_listed(repository: Path) -> None:
    first = commit(repository, "0", train="0")
    stream = [f"reset refs/heads/many\nfrom {first}\n\n"]
    for number in range(40):
        about = "commit refs/heads/many\ncommitter A <a@b.c> 1700000000 +0000\ndata 1\nx\n"
        stream.append(f"{about}M 100644 inline f{number}\ndata 1\ny\n\n")
    git(repository, "fast-import", "--quiet", stdin="".join(stream))
    found = git_changes(repository, first, git(repository, "rev-parse", "many"))
    assert (len(found.commits), found.commit_count, found.file_count) == (MOST_COMMITS, 40, 40)


@pytest.mark.parametrize("case", ["gone", "no repository", "other repository", "not a commit", "an option"])
def test_why_nothing_is_known(repository: Path, tmp_path: Path, case: str) -> None:
    known = commit(repository, "First", train="a\n")
    folder, before = {
        "gone": (tmp_path / "gone", "1" * 40),
        "no repository": (tmp_path, "1" * 40),
        "other repository": (repository, "1" * 40),
        "not a commit": (repository, git(repository, "rev-parse", "HEAD^{tree}")),
        "an option": (repository, "--output=/tmp/stolen"),
    }[case]
    found = git_changes(folder, before, known)
    assert found.problem and found.commits == () and found.files == ()


def test_programs_in_the_configuration_of_the_repository_never_run(repository: Path, tmp_path: Path) -> None:
    before = commit(repository, "First", train="a\n")
    (repository / ".gitattributes").write_text("*.py diff=evil filter=evil\n")
    after = commit(repository, "Second", train="b\n")
    ran = tmp_path / "ran"
    evil = tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\necho $0 $@ >> {ran}\n")
    evil.chmod(evil.stat().st_mode | stat.S_IXUSR)
    for name in (
        *("core.fsmonitor", "core.pager", "core.sshCommand", "core.editor", "core.alternateRefsCommand"),
        *("diff.external", "diff.evil.command", "diff.evil.textconv", "filter.evil.smudge", "filter.evil.clean"),
        *("gpg.program", "log.showSignature", "pager.log", "pager.diff", "core.gitProxy"),
    ):
        git(repository, "config", name, "true" if name == "log.showSignature" else str(evil))
    hooks = repository / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for hook in ("post-checkout", "reference-transaction", "post-index-change", "pre-auto-gc"):
        (hooks / hook).write_text(evil.read_text())
        (hooks / hook).chmod(0o755)
    found = git_changes(repository, before, after)
    assert (found.problem, found.commit_count) == ("", 1)
    assert not ran.exists()


def test_a_git_that_never_answers_is_given_up(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = commit(repository, "First", train="a\n")
    slow = tmp_path / "bin"
    slow.mkdir()
    (slow / "git").write_text("#!/bin/sh\nexec sleep 600\n")
    (slow / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(slow), prepend=":")
    assert "did not answer" in git_changes(repository, "1" * 40, known, timeout_s=0.05).problem
