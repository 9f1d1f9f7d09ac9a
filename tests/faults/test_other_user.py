"""A truly separate user of this machine, with the programs of the system; root only, since it takes another uid."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.cluster import Cluster
from made_runs import record

from stepscope.cli.finalize import finalize_run
from stepscope.hub.api.auth import ALL, ReaderTokens, tokens_path
from stepscope.records.files import make_session
from stepscope.store.create import create_run
from stepscope.store.documents import HubFile, end_run, write_hub_file
from stepscope.store.user_runs import UserHub, add_folder, announced
from stepscope.wire.handshake import load_keys

pytestmark = pytest.mark.faults

OTHER = 65534
"""``nobody``."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    if os.getuid() != 0:
        pytest.skip("only root can take another user's place")
    folder = Path(tempfile.mkdtemp(prefix="stepscope-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_other(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, words)), user=OTHER, group=OTHER, extra_groups=[], capture_output=True, text=True, cwd="/"
    )


def test_another_user_reads_nothing_of_ours(place: Path) -> None:
    before = os.umask(0o022)
    try:
        environ = {"HOME": str(place), "XDG_STATE_HOME": str(place / "state"), "XDG_CONFIG_HOME": str(place / "config")}
        run_dir = create_run(place / "runs", "a", ["x"], sessions=place / "sessions").run_dir
        write_hub_file(run_dir, HubFile(url="http://127.0.0.1:1", token="secret"))
        load_keys(environ)
        ReaderTokens(tokens_path(environ)).create("anna", ALL, now_s=0.0, seconds=1e10)
        add_folder(run_dir.parent, environ)
        make_session(place / "rings", "session")
        with announced(UserHub(url="http://127.0.0.1:1", token="secret"), environ):
            files = [path for path in place.rglob("*") if path.is_file()]
            assert len(files) >= 5, files
            for path in files:
                assert as_other("cat", path).returncode != 0, path
            for folder in (run_dir, place / "state" / "stepscope", place / "config" / "stepscope", place / "rings"):
                assert as_other("ls", folder).returncode != 0, folder
                assert as_other("touch", folder / "mine").returncode != 0, folder
    finally:
        os.umask(before)


def test_a_run_of_another_user_is_read_and_left_as_it_is(place: Path) -> None:
    run_dir = record(place / "runs", "theirs", Cluster(ranks=2, steps=30).run(), sealed=False)
    end_run(run_dir, exit_code=0, status="finished")
    for path in (run_dir, *run_dir.rglob("*")):
        os.chown(path, OTHER, OTHER)
    before = {str(path): (path.stat(), path.read_bytes() if path.is_file() else b"") for path in run_dir.rglob("*")}
    summary, _ = finalize_run(run_dir)
    assert any("belongs to another user" in notice for notice in summary["notices"])
    after = {str(path): (path.stat(), path.read_bytes() if path.is_file() else b"") for path in run_dir.rglob("*")}
    assert {name: (about.st_mtime_ns, about.st_ino, data) for name, (about, data) in before.items()} == {
        name: (about.st_mtime_ns, about.st_ino, data) for name, (about, data) in after.items()
    }


def test_a_shared_run_is_open_to_others_for_reading_only(place: Path) -> None:
    run_dir = create_run(place / "runs", "a", ["x"], sessions=place / "sessions", mode=0o755).run_dir
    assert as_other("cat", run_dir / "run.json").returncode == 0
    for words in (
        ("rm", "-f", run_dir / "run.json"),
        ("touch", run_dir / "x"),
        ("mkfifo", run_dir / "logs" / "main.log"),
    ):
        assert as_other(*words).returncode != 0, words
    write_hub_file(run_dir, HubFile(url="http://127.0.0.1:1", token="secret"))
    assert as_other("cat", run_dir / "hub.json").returncode != 0, "the token stays ours"
    assert stat.S_IMODE((run_dir / "hub.json").stat().st_mode) == 0o600
