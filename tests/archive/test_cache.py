"""Copies of archived runs on this disk: verified, private, bounded."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from stepscope.archive.cache import ENV_CACHE, FRESH_S, Archive, cache_folder
from stepscope.archive.location import ArchiveUrl
from stepscope.archive.storage import Storage
from stepscope.archive.upload import archive_run
from stepscope.errors import ArchiveError, ArchiveMissing, UsageError


class Counting(Storage):
    """Notes the keys of the objects that are read."""

    read_keys: list[str]

    def __init__(self, url: ArchiveUrl) -> None:
        super().__init__(url)
        self.read_keys = []

    def pieces(self, key: str, size: int) -> Iterator[bytes]:
        self.read_keys.append(key.split("/", 2)[2])
        return super().pieces(key, size)


def test_only_missing_files_are_fetched(url: ArchiveUrl, run_dir: Path, environ: Mapping[str, str]) -> None:
    archive_run(Storage(url), run_dir)
    archive = Archive(url, environ, storage=Counting)
    storage = archive.storage
    assert isinstance(storage, Counting)
    folder = archive.run("night", only=("summary.json", "run.json"))
    assert sorted(storage.read_keys) == ["run.json", "summary.json"]
    assert sorted(path.name for path in folder.iterdir()) == [".archived.json", "run.json", "summary.json"]
    storage.read_keys.clear()
    assert archive.run("night") == folder
    assert "steps.parquet" in storage.read_keys and "run.json" not in storage.read_keys
    storage.read_keys.clear()
    archive.run("night")
    assert storage.read_keys == []


def test_everything_is_private(url: ArchiveUrl, run_dir: Path, environ: Mapping[str, str]) -> None:
    archive_run(Storage(url), run_dir)
    archive = Archive(url, environ)
    archive.entries()
    archive.run("night")
    for path in [cache_folder(environ), *cache_folder(environ).rglob("*")]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_a_damaged_object_is_an_error_and_not_cached(
    url: ArchiveUrl, run_dir: Path, environ: Mapping[str, str], damage: str
) -> None:
    manifest = archive_run(Storage(url), run_dir).manifest
    (file,) = (file for file in manifest.files if file.name == "steps.parquet")
    path = Path(url.path) / manifest.key(file)
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:100] if damage == "cut" else data[:-1] + b"x")
    archive = Archive(url, environ)
    expected = {"changed": "its checksum differs", "cut": "is incomplete", "missing": "does not exist"}[damage]
    with pytest.raises(ArchiveError, match=expected):
        archive.run("night")
    path.write_bytes(data)
    folder = archive.run("night")
    assert (folder / "steps.parquet").read_bytes() == data
    assert [each.name for each in folder.iterdir() if each.name.startswith(".")] == [".archived.json"]


def test_a_disk_without_room(url: ArchiveUrl, run_dir: Path, environ: Mapping[str, str]) -> None:
    archive_run(Storage(url), run_dir)
    with pytest.raises(ArchiveError, match="the disk is full; set XDG_CACHE_HOME"):
        Archive(url, environ, free_bytes=lambda _: 1 << 20).run("night")
    assert Archive(url, environ).run("night").is_dir()


def test_runs_that_were_not_used_for_long_make_room(
    url: ArchiveUrl, make_run: Callable[..., Path], environ: Mapping[str, str]
) -> None:
    names = [f"run-{number}" for number in range(5)]
    for name in names:
        run_dir = make_run(name)
        (run_dir / "steps.parquet").write_bytes(os.urandom(100_000))
        archive_run(Storage(url), run_dir)
    small = {**environ, ENV_CACHE: "450K"}
    in_use = Archive(url, small)
    folders = {name: in_use.run(name) for name in names[:1]}
    for number, name in enumerate(names[1:], 1):
        other = Archive(url, small)  # another process: it does not keep the run
        folders[name] = other.run(name)
        other.close()
        os.utime(folders[name].parent, ns=(number, number))
    os.utime(folders["run-0"].parent, ns=(0, 0))
    remaining = [name for name in names if folders[name].is_dir()]
    assert remaining == ["run-0", "run-3", "run-4"]  # the first is the oldest, but in use
    in_use.close()


def make_room(url: ArchiveUrl, environ: Mapping[str, str], flock: Callable[[int, int], None] = fcntl.flock) -> None:
    """As another process that fetches the run ``large``, and removes every run that is not in use."""
    other = Archive(url, {**environ, ENV_CACHE: "1K"}, flock=flock)
    shutil.rmtree(other.run("large").parent)
    other.close()


@pytest.fixture
def two_runs(url: ArchiveUrl, make_run: Callable[..., Path]) -> None:
    for name in ("night", "large"):
        archive_run(Storage(url), make_run(name))


@pytest.mark.usefixtures("two_runs")
def test_a_run_that_another_process_is_removing_is_fetched_again(url: ArchiveUrl, environ: Mapping[str, str]) -> None:
    first = Archive(url, environ)
    folder = first.run("night")
    first.close()
    lock = os.open(folder.parent / ".lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    waits = 0

    def pause(_: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 2:
            shutil.rmtree(folder.parent)
            os.close(lock)

    in_use = Archive(url, environ, pause=pause)
    assert in_use.run("night") == folder
    assert waits == 2 and (folder / "steps.parquet").is_file()
    make_room(url, environ)
    assert (folder / "steps.parquet").is_file()
    in_use.close()
    make_room(url, environ)
    assert not folder.exists()


@pytest.mark.usefixtures("two_runs")
def test_a_run_that_was_deleted_is_fetched_and_in_use_again(url: ArchiveUrl, environ: Mapping[str, str]) -> None:
    in_use = Archive(url, environ)
    folder = in_use.run("night")
    shutil.rmtree(folder.parent)  # by the user
    assert in_use.run("night") == folder
    make_room(url, environ)
    assert (folder / "steps.parquet").is_file()
    in_use.close()


@pytest.mark.usefixtures("two_runs")
def test_a_run_that_replaced_the_one_to_remove_is_left_alone(url: ArchiveUrl, environ: Mapping[str, str]) -> None:
    """Between opening the lock and locking it, another process removed the run, and a third one fetched it again."""
    first, in_use = Archive(url, environ), Archive(url, environ)
    folder = first.run("night")
    first.close()
    replaced = False

    def overtaken(fd: int, how: int) -> None:
        nonlocal replaced
        if how & fcntl.LOCK_EX and not replaced:
            replaced = True
            shutil.rmtree(folder.parent)
            in_use.run("night")
        fcntl.flock(fd, how)

    make_room(url, environ, overtaken)
    assert replaced and (folder / "steps.parquet").is_file()
    in_use.close()


@pytest.mark.usefixtures("two_runs")
def test_a_removal_that_does_not_end(url: ArchiveUrl, environ: Mapping[str, str]) -> None:
    first = Archive(url, environ)
    folder = first.run("night")
    first.close()
    lock = os.open(folder.parent / ".lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ArchiveError, match=r"another process is removing it \(.*\)"):
            Archive(url, environ, pause=lambda _: None).run("night")
    finally:
        os.close(lock)


def test_a_limit_that_is_no_size(url: ArchiveUrl, environ: Mapping[str, str]) -> None:
    with pytest.raises(UsageError, match="must be a size such as 10G or 500M, not 'much'"):
        Archive(url, {**environ, ENV_CACHE: "much"})


def test_a_list_is_shown_for_a_minute(
    url: ArchiveUrl, make_run: Callable[..., Path], environ: Mapping[str, str]
) -> None:
    now_s = [1_000.0]

    def names() -> list[str]:
        def forbidden(_: ArchiveUrl) -> Storage:
            raise AssertionError("the archive was contacted")

        fresh = now_s[0] not in (1_000.0, 1_000.0 + FRESH_S)
        archive = Archive(url, environ, now_s=lambda: now_s[0], storage=forbidden if fresh else Storage)
        return [entry.path.name for entry in archive.entries()[0]]

    archive_run(Storage(url), make_run("first"))
    assert names() == ["first"]
    archive_run(Storage(url), make_run("second", created_s=1_700_000_001))
    now_s[0] += FRESH_S - 1
    assert names() == ["first"]
    now_s[0] += 1
    assert names() == ["second", "first"]
    now_s[0] += 1
    assert names() == ["second", "first"]
    Archive(url, environ).forget_list()
    now_s[0] = 1_000.0
    assert names() == ["second", "first"]


def test_a_damaged_list_on_disk_is_read_again(url: ArchiveUrl, run_dir: Path, environ: Mapping[str, str]) -> None:
    archive_run(Storage(url), run_dir)
    Archive(url, environ).entries()
    (catalog,) = cache_folder(environ).glob("*/catalog.json")
    for damaged in (b"", b"[]", b"{}", b'{"objects": []}', catalog.read_bytes()[:-10]):
        catalog.write_bytes(damaged)
        assert len(Archive(url, environ).entries()[0]) == 1


def test_the_nearest_name(url: ArchiveUrl, run_dir: Path, environ: Mapping[str, str]) -> None:
    archive_run(Storage(url), run_dir)
    with pytest.raises(ArchiveMissing, match=r"no run named nigth in .*; did you mean night"):
        Archive(url, environ).run("nigth")


def test_pipes_and_links_in_a_folder_are_no_objects(url: ArchiveUrl, run_dir: Path, environ: Mapping[str, str]) -> None:
    manifest = archive_run(Storage(url), run_dir).manifest
    path = Path(url.path) / manifest.key(manifest.files[0])
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ArchiveError, match="does not exist"):
        Archive(url, environ).run("night")
