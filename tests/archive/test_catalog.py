"""The catalog: complete with entries, packs, or both, whoever changes it meanwhile."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.archive.catalog import Catalog, compact, entry_key, read_catalog, write_entry
from stepscope.archive.location import ArchiveUrl
from stepscope.archive.manifest import ArchivedRun
from stepscope.archive.storage import Storage, StoredObject


def run(number: int, *, version: int = 0) -> ArchivedRun:
    digest = hashlib.sha256(f"{number}-{version}".encode()).hexdigest()
    facts = {"created_wall_ns": number, "status": "finished"}
    return ArchivedRun(name=f"run-{number}", digest=digest, stored=1, archived_wall_ns=version + 1, facts=facts)


def add(storage: Storage, *runs: ArchivedRun) -> None:
    for each in runs:
        write_entry(storage, each, Catalog())


def names(storage: Storage) -> list[str]:
    catalog = read_catalog(storage)
    assert catalog.problems == []
    return sorted(catalog.runs())


def kinds(storage: Storage) -> list[str]:
    return sorted(key.split("/")[1] for key in storage.find(".stepscope"))


def test_entries_become_a_pack_and_packs_become_one(storage: Storage) -> None:
    everything = []
    for number in range(12):
        add(storage, run(number))
        everything.append(f"run-{number}")
        compact(storage, read_catalog(storage), many_entries=3, many_packs=3)
        assert names(storage) == sorted(everything)
    assert kinds(storage) == ["entries", "entries", "packs"]


def test_a_version_that_was_archived_later_wins(storage: Storage) -> None:
    add(storage, run(1), run(1, version=1), run(2, version=1), run(2))
    compact(storage, read_catalog(storage), many_entries=2)
    assert {each.archived_wall_ns for each in read_catalog(storage).runs().values()} == {2}


def test_a_run_in_the_catalog_gets_no_second_entry(storage: Storage) -> None:
    add(storage, run(1))
    compact(storage, read_catalog(storage), many_entries=1)
    write_entry(storage, run(1), read_catalog(storage))
    assert kinds(storage) == ["packs"]


def test_two_machines_compact_at_once(storage: Storage) -> None:
    add(storage, *map(run, range(4)))
    first, second = read_catalog(storage), read_catalog(storage)
    add(storage, run(4))
    assert compact(storage, first, many_entries=2)
    assert compact(storage, second, many_entries=2)
    assert names(storage) == [f"run-{number}" for number in range(5)]
    assert kinds(storage) == ["entries", "packs"]


def test_a_pack_that_disappears_while_it_is_read(url: ArchiveUrl) -> None:
    storage = Storage(url)
    for number in range(3):
        add(storage, run(number))
        compact(storage, read_catalog(storage), many_entries=1, many_packs=99)

    class Overtaken(Storage):
        merged = False

        def read_many(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
            if not self.merged:
                self.merged = True
                compact(storage, read_catalog(storage), many_packs=2)
            return super().read_many(sizes)

    assert names(Overtaken(url)) == ["run-0", "run-1", "run-2"]


def test_without_permission_to_delete(url: ArchiveUrl) -> None:
    class Undeletable(Storage):
        def delete(self, keys: Sequence[str]) -> None:
            pass

    storage = Undeletable(url)
    for number in range(9):
        add(storage, run(number))
        compact(storage, read_catalog(storage), many_entries=2, many_packs=3)
    assert names(storage) == [f"run-{number}" for number in range(9)]
    catalog = read_catalog(storage)
    assert not compact(storage, catalog, many_entries=2, many_packs=99)  # what is packed is not packed again


def test_only_what_is_new_is_read(url: ArchiveUrl) -> None:
    requested: list[str] = []

    class Watched(Storage):
        def read_many(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
            requested.extend(sizes)
            return super().read_many(sizes)

    storage = Watched(url)
    add(storage, *map(run, range(3)))
    known = read_catalog(storage)
    requested.clear()
    add(storage, run(3))
    assert sorted(read_catalog(storage, known).runs()) == [f"run-{number}" for number in range(4)]
    assert requested == [entry_key(run(3))]


PACK = ".stepscope/packs"


@pytest.mark.parametrize("what", ["name", "cut", "bomb", "foreign", "text"])
def test_damaged_objects_are_reported_and_the_others_listed(storage: Storage, what: str) -> None:
    add(storage, run(1))
    line = json.dumps(run(2).to_dict()).encode() + b"\n"
    content = gzip.compress(line, mtime=0)
    if what == "cut":
        content = content[:-9]
    elif what == "bomb":
        content = gzip.compress(bytes(4 << 20), 1)
    elif what == "text":
        content = b"no gzip"
    elif what == "foreign":
        content = gzip.compress(json.dumps({**run(2).to_dict(), "name": "../../x"}).encode())
    digest = "0" * 64 if what == "name" else hashlib.sha256(content).hexdigest()
    storage.write(f"{PACK}/{digest}.json.gz", content)
    catalog = read_catalog(storage, most_bytes=1 << 20)
    assert list(catalog.runs()) == ["run-1"]
    assert [problem.partition(digest)[2] for problem in catalog.problems] == [".json.gz is damaged and was left out"]


def test_what_a_killed_writer_left_is_no_object(storage: Storage) -> None:
    """Before an object of ``file://`` has its name it is a hidden file next to it."""
    add(storage, run(1))
    (Path(storage.url.path) / ".stepscope" / "entries" / ".0011223344556677.tmp").write_bytes(b"{")
    assert names(storage) == ["run-1"]
    assert list(storage.find("")) == [entry_key(run(1))]


def test_an_entry_under_the_key_of_another_run(storage: Storage) -> None:
    storage.write(entry_key(run(1)), json.dumps(run(2).to_dict()).encode())
    catalog = read_catalog(storage)
    assert catalog.runs() == {} and len(catalog.problems) == 1


def test_objects_that_are_too_large_are_not_read(url: ArchiveUrl) -> None:
    class Large(Storage):
        def find(self, prefix: str) -> dict[str, StoredObject]:
            return {f"{PACK}/{'0' * 64}.json.gz": StoredObject(size=1 << 40, version="")}

        def read_many(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
            assert not sizes
            return {}

    assert "too large" in read_catalog(Large(url)).problems[0]


@settings(max_examples=examples(200), deadline=None)
@given(data=st.binary(max_size=200), damage=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4))
def test_foreign_bytes_are_never_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, damage: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    storage = Storage(ArchiveUrl(scheme="file", path=str(folder)))
    lines = bytearray(json.dumps(run(1).to_dict()).encode() + b"\n" + data)
    for place, value in damage:
        lines[place % len(lines)] = value
    for content in (gzip.compress(bytes(lines)), data):
        storage.write(f"{PACK}/{hashlib.sha256(content).hexdigest()}.json.gz", content)
    storage.write(".stepscope/entries/x.json", bytes(lines))
    catalog = read_catalog(storage)
    assert set(map(len, catalog.problems)) or catalog.runs()


def test_other_storages_behave_alike(make_run: Callable[..., Path], environ: Mapping[str, str]) -> None:
    """``memory://`` shares all code with ``file://`` but the replacement of whole files."""
    from stepscope.archive.cache import Archive
    from stepscope.archive.upload import archive_run

    url = ArchiveUrl(scheme="memory", path="shelf/team")
    storage = Storage(url)
    run_dir = make_run()
    try:
        assert Archive(url, environ).entries() == ([], [])
        assert not archive_run(storage, run_dir).present and archive_run(storage, run_dir).present
        archive: Any = Archive(url, environ)
        assert [entry.path.name for entry in archive.entries(fresh_s=0)[0]] == ["night"]
        assert (archive.run("night") / "run.json").read_bytes() == (run_dir / "run.json").read_bytes()
    finally:
        storage.delete(list(storage.find("")))
