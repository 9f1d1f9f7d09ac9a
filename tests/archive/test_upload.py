"""Copies of runs: complete or invisible, and nothing local is deleted before its copy is right."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from stepscope.archive.cache import Archive
from stepscope.archive.location import ArchiveUrl
from stepscope.archive.manifest import Manifest
from stepscope.archive.storage import CHUNK_BYTES, Storage
from stepscope.archive.upload import archive_run, delete_archived, read_manifest, verify_run
from stepscope.errors import ArchiveError, RunError
from stepscope.store.catalog import change_labels
from stepscope.store.documents import read_meta, write_meta


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def listed(url: ArchiveUrl, environ: Mapping[str, str]) -> list[str]:
    return [entry.path.name for entry in Archive(url, environ).entries(fresh_s=0)[0]]


def stored_manifest(storage: Storage, name: str = "night") -> Manifest:
    manifest = read_manifest(storage, name)
    assert manifest is not None
    return manifest


def test_a_run_returns_as_it_was(storage: Storage, run_dir: Path, environ: Mapping[str, str]) -> None:
    (run_dir / "hub.json").write_text('{"token": "secret"}')
    archived = archive_run(storage, run_dir)
    assert not archived.present
    (run_dir / "hub.json").unlink()
    (run_dir / "lease.json").unlink(missing_ok=True)
    assert contents(Archive(storage.url, environ).run("night")) == contents(run_dir)
    assert listed(storage.url, environ) == ["night"]
    assert archive_run(storage, run_dir).present


def test_odd_names_and_holes_survive(
    storage: Storage, make_run: Callable[..., Path], environ: Mapping[str, str]
) -> None:
    run_dir = make_run("odd näme #1%?*@")
    (run_dir / "logs" / "a b#?[*]%2F@~ü.log").write_bytes(b"x")
    size = 64 << 20
    with (run_dir / "logs" / "long.log").open("wb") as log:
        log.write(b"begin\n" * 1000)
        log.seek(size - 4096)
        log.write(b"end\n" * 1024)
    with (run_dir / "empty-but-large").open("wb") as hole:
        hole.truncate(size)
    archived = archive_run(storage, run_dir)
    copy = Archive(storage.url, environ).run(run_dir.name)
    assert contents(copy) == {name: data for name, data in contents(run_dir).items() if name != "lease.json"}
    if (run_dir / "logs" / "long.log").stat().st_blocks * 512 < size:  # this file system has holes
        assert archived.manifest.stored < 1 << 20
        assert (copy / "logs" / "long.log").stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_that_reports_no_holes(
    storage: Storage, run_dir: Path, environ: Mapping[str, str], code: int
) -> None:
    """Only ENXIO means that a hole is left: any other error must not turn a file into an empty one."""

    def lseek(fd: int, position: int, how: int) -> int:
        if how in (os.SEEK_DATA, os.SEEK_HOLE):
            raise OSError(code, os.strerror(code))
        return os.lseek(fd, position, how)

    archived = archive_run(storage, run_dir, lseek=lseek)
    assert all(file.stored == file.size for file in archived.manifest.files)
    copy = contents(Archive(storage.url, environ).run("night"))
    assert copy["steps.parquet"] == (run_dir / "steps.parquet").read_bytes()


def test_large_files_are_copied_in_pieces(storage: Storage, run_dir: Path, environ: Mapping[str, str]) -> None:
    (run_dir / "steps.parquet").write_bytes(os.urandom(1024) * (2 * CHUNK_BYTES // 1024 + 1))
    archive_run(storage, run_dir)
    copy = Archive(storage.url, environ).run("night")
    assert (copy / "steps.parquet").read_bytes() == (run_dir / "steps.parquet").read_bytes()


def test_another_run_of_that_name_is_refused(storage: Storage, make_run: Callable[..., Path]) -> None:
    archive_run(storage, make_run())
    other = make_run(folder="elsewhere", created_s=1_700_000_001)
    with pytest.raises(RunError, match="already has another run named night"):
        archive_run(storage, other, replace=True)
    verify_run(storage, stored_manifest(storage))


def test_a_changed_run_is_replaced_on_request_only(storage: Storage, run_dir: Path, environ: Mapping[str, str]) -> None:
    before = archive_run(storage, run_dir).manifest
    change_labels(run_dir, note="looked at")
    with pytest.raises(RunError, match=r"night with other contents \(labels.json\); --replace"):
        archive_run(storage, run_dir)
    after = archive_run(storage, run_dir, replace=True).manifest
    assert (Archive(storage.url, environ).run("night") / "labels.json").is_file()
    assert [entry.labels.note for entry in Archive(storage.url, environ).entries()[0]] == ["looked at"]
    folders = {key.split("/")[1] for key in storage.find("night")}
    assert folders == {"manifest.json", after.run.digest[:32]} and before.run.digest != after.run.digest


@pytest.mark.parametrize("what", ["unsealed", "spool", "link", "summary"])
def test_runs_that_cannot_be_archived(storage: Storage, run_dir: Path, what: str) -> None:
    if what == "unsealed":
        write_meta(run_dir, {**read_meta(run_dir), "sealed": False})
    elif what == "spool":
        write_meta(run_dir, {**read_meta(run_dir), "hub": {"url": "x"}})
    elif what == "link":
        (run_dir / "logs" / "secret").symlink_to("/etc/passwd")
    else:
        (run_dir / "summary.json").unlink()
    with pytest.raises(RunError):
        archive_run(storage, run_dir)
    assert storage.find("") == {}


def test_a_run_whose_manifest_nobody_could_read_is_refused_before_the_copy(storage: Storage, run_dir: Path) -> None:
    (run_dir / "logs" / ("x" * 250)).write_text("")
    with pytest.raises(RunError, match="cannot be a file of a run; move files that Stepscope did not write out of"):
        archive_run(storage, run_dir)
    assert storage.find("") == {}


# -- interruptions ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a kill: no code of ours handles it."""


class DyingStorage(Storage):
    """Dies at its n-th write; of an object that nobody reads yet it leaves the first half."""

    def __init__(self, url: ArchiveUrl, dies_at: int) -> None:
        super().__init__(url)
        self.writes = 0
        self._dies_at = dies_at

    def write(self, key: str, data: bytes) -> None:
        self._count()
        super().write(key, data)

    def write_pieces(self, key: str, pieces: Callable[[], Iterator[bytes]], size: int) -> None:
        try:
            self._count()
        except Killed:
            half = b"".join(pieces())[: size // 2]
            super().write_pieces(key, lambda: iter([half]), size // 2)
            raise
        super().write_pieces(key, pieces, size)

    def _count(self) -> None:
        self.writes += 1
        if self.writes >= self._dies_at:
            raise Killed


def test_interrupted_at_every_write(url: ArchiveUrl, run_dir: Path, environ: Mapping[str, str], tmp_path: Path) -> None:
    complete = DyingStorage(ArchiveUrl(scheme="file", path=f"{tmp_path}/complete"), 10**9)
    archive_run(complete, run_dir)
    assert complete.writes > 6
    for dies_at in range(1, complete.writes + 1):
        place = ArchiveUrl(scheme="file", path=f"{url.path}-{dies_at}")
        with pytest.raises(Killed):
            archive_run(DyingStorage(place, dies_at), run_dir)
        storage = Storage(place)
        # The last two writes are the manifest and the entry of the catalog.
        assert (read_manifest(storage, "night") is not None) == (dies_at == complete.writes)
        assert listed(place, environ) == []
        assert archive_run(storage, run_dir).present == (dies_at == complete.writes)
        assert listed(place, environ) == ["night"]
        verify_run(storage, stored_manifest(storage))


def test_two_machines_archive_a_run_at_once(url: ArchiveUrl, run_dir: Path, environ: Mapping[str, str]) -> None:
    barrier = threading.Barrier(2)
    failures: list[BaseException] = []

    class Waiting(Storage):
        def find(self, prefix: str) -> dict[str, object]:  # type: ignore[override]
            found = super().find(prefix)
            if prefix == "night":
                barrier.wait(60)  # neither has written anything yet
            return found  # type: ignore[return-value]

    def work() -> None:
        try:
            archive_run(Waiting(url), run_dir)
        except (ArchiveError, RunError, OSError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    verify_run(Storage(url), stored_manifest(Storage(url)))
    assert listed(url, environ) == ["night"]


def test_different_runs_of_one_name_at_once(
    url: ArchiveUrl, make_run: Callable[..., Path], environ: Mapping[str, str]
) -> None:
    """The second finds the manifest of the first when it writes its own."""
    runs = [make_run(), make_run(folder="elsewhere", created_s=1_700_000_001)]

    class Overtaken(Storage):
        def create(self, key: str, data: bytes) -> None:
            archive_run(Storage(self.url), runs[1])
            super().create(key, data)

    with pytest.raises(ArchiveError, match="received another run named night at the same time"):
        archive_run(Overtaken(url), runs[0])
    verify_run(Storage(url), stored_manifest(Storage(url)))
    assert contents(Archive(url, environ).run("night"))["run.json"] == (runs[1] / "run.json").read_bytes()


def test_a_storage_that_damages_objects(url: ArchiveUrl, run_dir: Path) -> None:
    class Damaging(Storage):
        def write_pieces(self, key: str, pieces: Callable[[], Iterator[bytes]], size: int) -> None:
            super().write_pieces(key, lambda: iter([b"".join(pieces()).replace(b"line", b"lime")]), size)

    with pytest.raises(ArchiveError, match="was not stored as it was sent"):
        archive_run(Damaging(url), run_dir)
    assert read_manifest(Storage(url), "night") is None


def test_a_run_that_changes_while_it_is_copied(url: ArchiveUrl, run_dir: Path) -> None:
    class Slow(Storage):
        def write_pieces(self, key: str, pieces: Callable[[], Iterator[bytes]], size: int) -> None:
            super().write_pieces(key, pieces, size)
            (run_dir / "labels.json").write_text("{}")

    with pytest.raises(RunError, match="changed while it was copied"):
        archive_run(Slow(url), run_dir)
    assert read_manifest(Storage(url), "night") is None


# -- deleting ---------------------------------------------------------------------------------------------------------


def test_a_run_is_deleted_after_its_copy_was_compared(storage: Storage, run_dir: Path) -> None:
    delete_archived(storage, run_dir, archive_run(storage, run_dir))
    assert not run_dir.exists()


def objects(storage: Storage) -> Sequence[str]:
    return sorted(key for key in storage.find("night") if not key.endswith("manifest.json"))


def test_nothing_is_deleted_if_an_object_is_damaged(storage: Storage, run_dir: Path) -> None:
    archived = archive_run(storage, run_dir)
    for key in objects(storage):
        path = Path(storage.url.path) / key
        before = path.read_bytes()
        for damaged in [before[:-1], before[:-1] + bytes([before[-1] ^ 1]), None] if before else [None]:
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            if before or damaged is not None:
                with pytest.raises(ArchiveError, match="was not deleted"):
                    delete_archived(storage, run_dir, archived)
            assert run_dir.is_dir()
            path.write_bytes(before)
    delete_archived(storage, run_dir, archived)
    assert not run_dir.exists()


@pytest.mark.parametrize("what", ["tag", "change", "manifest", "lease"])
def test_what_keeps_a_run_from_being_deleted(storage: Storage, run_dir: Path, what: str) -> None:
    if what == "tag":
        change_labels(run_dir, add=["baseline"])
    elif what == "lease":
        meta = read_meta(run_dir)
        write_meta(run_dir, {**meta, "host": "elsewhere", "place": {"host": "elsewhere", "boot": "x"}})
    archived = archive_run(storage, run_dir)
    if what == "change":
        (run_dir / "logs" / "rank-0.log").write_text("more")
    elif what == "manifest":
        storage.delete(["night/manifest.json"])
    elif what == "lease":
        from stepscope.store.liveness import LeaseKeeper

        LeaseKeeper(run_dir).renew()
    with pytest.raises((RunError, ArchiveError), match="was not deleted"):
        delete_archived(storage, run_dir, archived)
    assert run_dir.is_dir()
