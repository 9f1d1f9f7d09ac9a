"""The session is ours alone; a run's folder is taken once."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from stepscope.errors import RingNoSpace
from stepscope.records.files import make_session, take_folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_can_enter_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    earlier = os.umask(umask)
    try:
        session = make_session(tmp_path / "base", "one")
    finally:
        os.umask(earlier)
    assert session == tmp_path / "base" / "one"
    assert (mode(session.parent), mode(session)) == (0o700, 0o700)


def test_a_base_that_others_may_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir(mode=0o755)
    make_session(tmp_path / "base", "one")
    assert mode(tmp_path / "base") == 0o700


def test_a_base_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base").chmod(0o777)
    with pytest.raises(RingNoSpace, match="is not a private folder of this user"):
        make_session(tmp_path / "base", "one")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(RingNoSpace, match="is not a private folder of this user"):
        make_session(tmp_path / "link", "one")
    (tmp_path / "file").touch()
    with pytest.raises(RingNoSpace, match="cannot be used"):
        make_session(tmp_path / "file", "one")


def test_a_session_is_joined_only_on_purpose(tmp_path: Path) -> None:
    session = make_session(tmp_path, "one")
    assert make_session(tmp_path, "one", exist_ok=True) == session
    with pytest.raises(RingNoSpace, match="cannot be used"):
        make_session(tmp_path, "one")


def test_a_folder_is_taken_once(tmp_path: Path) -> None:
    taken = [take_folder(tmp_path / "runs", "mine") for _ in range(3)]
    assert [path.name for path in taken] == ["mine", "mine-2", "mine-3"]
    assert all(path.is_dir() for path in taken)
