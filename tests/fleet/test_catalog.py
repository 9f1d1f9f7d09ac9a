"""The catalog: built from run folders, updated by what changed, shared by processes, never trusted if damaged."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.fleet import FleetYear, write_run

from stepscope.archive.cache import Archive
from stepscope.archive.location import parse_url
from stepscope.archive.storage import Storage
from stepscope.archive.upload import archive_run
from stepscope.errors import RunError, UsageError
from stepscope.fleet.catalog import RunCatalog
from stepscope.store.catalog import change_labels, list_runs

YEAR = FleetYear(seed=5, count=30, hosts=8, jobs=3, ranks_per_host=2)


@pytest.fixture(scope="module")
def made_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet") / "runs"
    YEAR.write(folder)
    return folder


@pytest.fixture
def runs(made_runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_runs, tmp_path / "runs"))


@pytest.fixture
def catalog(tmp_path: Path) -> RunCatalog:
    return RunCatalog(tmp_path / "state" / "stepscope" / "fleet" / "catalog.duckdb")


def counts(catalog: RunCatalog) -> tuple[Any, ...]:
    tables = ("files", "runs", "run_hosts", "run_findings")
    return catalog.query(f"SELECT {', '.join(f'(SELECT count(*) FROM {table})' for table in tables)}").rows[0]


def test_only_what_changed_is_read_again(catalog: RunCatalog, runs: Path) -> None:
    first = catalog.update({"here": runs})
    assert (first.runs, first.read, first.removed, first.problems) == (30, 30, 0, [])
    before = counts(catalog)
    assert before[:2] == (30, 30)
    second = catalog.update({"here": runs})
    assert (second.runs, second.read) == (30, 0)
    change_labels(runs / "run-00003", add=["team:blue"])
    shutil.rmtree(runs / "run-00004")
    changed = catalog.update({"here": runs})
    assert (changed.runs, changed.read, changed.removed) == (29, 1, 1)
    (row,) = catalog.query("SELECT run, team, tags FROM runs WHERE team = 'blue'").rows
    assert (row[0], row[1]) == ("run-00003~here", "blue")
    assert counts(catalog)[:2] == (29, 29)


def test_two_folders_are_kept_apart(catalog: RunCatalog, runs: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(runs, tmp_path / "other"))
    shutil.rmtree(other / "run-00000")
    catalog.update({"here": runs})
    catalog.update({"there": other})
    assert len(catalog.fleet().ids) == 59
    assert len(catalog.fleet(["there"]).ids) == 29
    assert catalog.query("SELECT count(*) FROM runs", keys=["here"]).rows == ((30,),)


def test_runs_since_a_moment(catalog: RunCatalog, runs: Path) -> None:
    catalog.update({"here": runs})
    everything = catalog.fleet()
    moment = int(everything.started_ns[20])
    later = catalog.fleet(since_wall_ns=moment)
    assert list(later.ids) == list(everything.ids[20:])
    assert later.started_ns.tolist() == sorted(later.started_ns.tolist())


def test_a_run_that_cannot_be_read_is_a_problem_until_it_changes(catalog: RunCatalog, runs: Path) -> None:
    (runs / "run-00001" / "run.json").write_text("{")
    problem = f"{runs / 'run-00001' / 'run.json'} is damaged or cut off: it is not valid JSON"
    assert catalog.update({"here": runs}).problems == [problem]
    second = catalog.update({"here": runs})
    assert (second.read, second.problems) == (0, [problem])
    made = next(made for made in YEAR.runs() if made.name == "run-00001")
    (runs / "run-00001" / "run.json").write_text(json.dumps(made.meta))
    assert catalog.update({"here": runs}).problems == []
    assert len(catalog.fleet().ids) == 30


def test_the_file_is_private_and_nobody_elses_is_trusted(catalog: RunCatalog, runs: Path) -> None:
    catalog.update({"here": runs})
    assert catalog.path.stat().st_mode & 0o777 == 0o600
    assert catalog.path.parent.stat().st_mode & 0o777 == 0o700
    catalog.path.chmod(0o644)
    assert catalog.fleet().ids == ()
    update = catalog.update({"here": runs})
    assert (update.rebuilt, update.read) == ("it is not a private file of this user", 30)
    assert catalog.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["cut", "noise", "empty"])
def test_a_damaged_catalog_is_made_again(catalog: RunCatalog, runs: Path, damage: str) -> None:
    catalog.update({"here": runs})
    data = catalog.path.read_bytes()
    content = {"cut": data[: len(data) // 3], "noise": os.urandom(4096), "empty": b""}[damage]
    catalog.path.write_bytes(content)
    update = catalog.update({"here": runs})
    assert update.read == 30
    assert len(catalog.fleet().ids) == 30


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("most_bytes", [0, 4096, 20_000])
def test_a_full_disk_is_reported_and_the_catalog_stays(catalog: RunCatalog, runs: Path, most_bytes: int) -> None:
    catalog.update({"here": runs})
    for number in range(30):
        os.utime(runs / f"run-{number:05}" / "run.json", (number, number))
    with full_disk(most_bytes), pytest.raises(RunError, match=r"catalog\.duckdb cannot be used: .*File too large"):
        catalog.update({"here": runs})
    assert len(catalog.fleet().ids) == 30
    update = catalog.update({"here": runs})
    assert (update.rebuilt, update.read) == ("", 30)


def test_a_full_disk_without_a_catalog_is_reported(catalog: RunCatalog, runs: Path) -> None:
    with full_disk(0), pytest.raises(RunError, match=r"catalog\.duckdb cannot be used: "):
        catalog.update({"here": runs})
    assert catalog.update({"here": runs}).read == 30


def test_a_catalog_of_another_version_is_made_again(catalog: RunCatalog, runs: Path) -> None:
    import duckdb

    catalog.update({"here": runs})
    with duckdb.connect(str(catalog.path)) as con:
        con.execute("UPDATE about SET version = 99")
    assert catalog.fleet().ids == ()
    assert catalog.update({"here": runs}).rebuilt == "it has version [(99,)]; this Stepscope has 1"
    assert len(catalog.fleet().ids) == 30


def test_queries_read_and_change_nothing(catalog: RunCatalog, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no catalog yet"):
        catalog.query("SELECT 1")
    catalog.update({"here": runs})
    catalog.query("DELETE FROM runs")
    assert len(catalog.fleet().ids) == 30
    with pytest.raises(UsageError, match="COPY is not allowed"):
        catalog.query(f"COPY runs TO '{tmp_path / 'out.csv'}'")
    with pytest.raises(UsageError, match="no_such_table"):
        catalog.query("SELECT * FROM no_such_table")


def _update(path: Path, runs: Path, key: str) -> None:
    RunCatalog(path).update({key: runs})


def test_several_processes_update_and_read_at_once(catalog: RunCatalog, runs: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_update, args=(catalog.path, runs, key)) for key in ("a", "b", "a")]
    for worker in workers:
        worker.start()
    seen = {len(catalog.fleet().ids) for _ in range(20)}
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert seen <= {0, 30, 60}
    assert len(catalog.fleet().ids) == 60


def test_a_lock_that_is_held_for_too_long_is_reported(catalog: RunCatalog, runs: Path) -> None:
    import fcntl

    catalog.update({"here": runs})
    with (catalog.path.parent / ".lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process is updating it; try again in a moment"):
            RunCatalog(catalog.path, wait_s=0.0).update({"here": runs})


def test_lists_are_the_same_with_what_the_catalog_knows(catalog: RunCatalog, runs: Path) -> None:
    catalog.update({"here": runs})
    known = catalog.entries("here", runs)
    assert len(known) == 30
    (runs / "run-00002" / "run.json").unlink()
    assert list_runs(runs, known=known) == list_runs(runs)


def test_archived_runs_are_in_the_catalog(catalog: RunCatalog, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    url = parse_url(f"file://{tmp_path / 'archive'}")
    storage = Storage(url)
    for name in ("run-00000", "run-00001"):
        archive_run(storage, runs / name)
    archive = Archive(url, {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert catalog.update({}, [archive]).read == 2
    assert catalog.update({}, [archive]).read == 0
    archive.close()
    fleet = catalog.fleet([str(url)])
    assert list(fleet.ids) == [f"{url}/run-00000", f"{url}/run-00001"]
    catalog.update({"here": runs})
    copies = catalog.query("SELECT gpu_hours, job FROM runs WHERE run LIKE '%run-00000%'").rows
    assert len(copies) == 2
    assert copies[0] == copies[1]


def test_active_runs_are_read_again(catalog: RunCatalog, runs: Path) -> None:
    made = replace(next(iter(YEAR.runs())), name="active")
    made.meta["end"] = None
    write_run(runs, made)
    (runs / "active" / "summary.json").unlink()
    assert catalog.update({"here": runs}).read == 31
    assert catalog.update({"here": runs}).read == 1
    fleet = catalog.fleet()
    assert (fleet.active, fleet.unread) == (1, 1)
