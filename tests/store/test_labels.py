"""Name, tags and note of a run; deleting a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rings import write_steps

from stepscope.errors import NotARun, RunError, RunUnwritable, UsageError
from stepscope.store.catalog import Labels, change_labels, checked_tag, delete_run, list_runs, read_labels
from stepscope.store.create import RunPaths
from stepscope.store.documents import end_run, read_meta, write_meta
from stepscope.store.locks import take_lock


def ended(paths: RunPaths) -> Path:
    """The run, over, and without its launcher, which is this process."""
    write_meta(paths.run_dir, {**read_meta(paths.run_dir), "launcher": None})
    end_run(paths.run_dir, exit_code=0, status="finished")
    return paths.run_dir


def test_labels_are_changed_one_by_one(paths: RunPaths) -> None:
    run_dir = paths.run_dir
    assert read_labels(run_dir) == Labels()
    assert change_labels(run_dir, add=["bf16", "baseline", "bf16"]).tags == ("bf16", "baseline")
    change_labels(run_dir, name=" Before ", note="two\nlines")
    assert change_labels(run_dir, add=["new"], remove=["bf16", "other"]) == Labels(
        name="Before", tags=("baseline", "new"), note="two\nlines"
    )
    assert change_labels(run_dir, tags=["only"], name="", note="") == Labels(tags=("only",))
    assert json.loads((run_dir / "labels.json").read_text()) == {"schema": 1, "name": "", "tags": ["only"], "note": ""}
    assert (run_dir / "labels.json").stat().st_mode & 0o077 == 0
    assert not list(run_dir.glob(".labels*"))


@pytest.mark.parametrize("tag", ["", "a b", "a,b", "-x", "+x", "a\n", "x" * 41, "\x1b[31m"])
def test_what_cannot_be_a_tag(paths: RunPaths, tag: str) -> None:
    with pytest.raises(UsageError, match="is not a valid tag"):
        checked_tag(tag)
    with pytest.raises(UsageError):
        change_labels(paths.run_dir, add=["good", tag])
    assert read_labels(paths.run_dir) == Labels()


@pytest.mark.parametrize(
    "change",
    [
        {"name": "x" * 201},
        {"name": "a\nb"},
        {"note": "x" * 2001},
        {"note": "\x07"},
        {"add": [f"t{i}" for i in range(33)]},
    ],
)
def test_labels_are_bounded(paths: RunPaths, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        change_labels(paths.run_dir, **change)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2, "name": "x"}', '{"schema": 1, "name": 3, "tags": 4}'])
def test_a_file_that_is_no_labels_says_nothing(paths: RunPaths, text: str) -> None:
    (paths.run_dir / "labels.json").write_text(text)
    assert read_labels(paths.run_dir) == Labels()


def test_what_a_stranger_wrote_is_bounded(paths: RunPaths) -> None:
    document = {"schema": 1, "name": "n" * 500, "tags": [*(f"t{i}" for i in range(50)), "t1", 3, "a b"], "note": 7}
    (paths.run_dir / "labels.json").write_text(json.dumps(document))
    found = read_labels(paths.run_dir)
    assert (len(found.name), len(found.tags), found.note) == (200, 32, "")


def test_only_a_run_of_ours_is_labeled(paths: RunPaths, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotARun):
        change_labels(tmp_path / "folder", add=["x"])
    (paths.run_dir / "link").symlink_to("/etc/passwd")
    with pytest.raises(RunUnwritable, match="cannot be labeled: link in it is not a regular file"):
        change_labels(paths.run_dir, add=["x"])


def test_the_list_shows_labels_as_soon_as_they_change(paths: RunPaths) -> None:
    run_dir = ended(paths)
    known: Any = {}
    (run_dir / "summary.json").write_text('{"status": "finished"}')
    assert list_runs(run_dir.parent, known=known)[0][0].labels == Labels()
    change_labels(run_dir, name="shown", add=["x"])
    (entry,) = list_runs(run_dir.parent, known=known)[0]
    assert (entry.name, entry.path.name, entry.labels.tags) == ("shown", run_dir.name, ("x",))


def test_a_run_that_is_over_is_deleted_with_its_session(paths: RunPaths) -> None:
    run_dir = ended(paths)
    assert paths.session.is_dir()
    delete_run(run_dir)
    assert list(run_dir.parent.iterdir()) == []
    assert not paths.session.exists()


def test_an_active_run_is_not_deleted(paths: RunPaths, rings: Any, drain: Any) -> None:
    with pytest.raises(RunError, match="was not deleted: it is still active"):
        delete_run(paths.run_dir)  # its launcher is this process
    ring = rings(0)
    write_steps(ring, 3)
    drain(ring)
    assert (paths.run_dir / "run.json").is_file()


def test_a_run_whose_launcher_still_concludes_it_is_not_deleted(paths: RunPaths) -> None:
    end_run(paths.run_dir, exit_code=0, status="finished")
    with pytest.raises(RunError, match="it is still active"):
        delete_run(paths.run_dir)


def test_a_run_that_another_process_works_on_is_not_deleted(paths: RunPaths) -> None:
    run_dir = ended(paths)
    for folder in (run_dir, run_dir / "inbox"):
        folder.mkdir(exist_ok=True)
        lock = take_lock(folder)
        try:
            with pytest.raises(RunError, match="another process is working on it"):
                delete_run(run_dir)
        finally:
            os.close(lock)
    delete_run(run_dir)
    assert not run_dir.exists()


def test_a_run_of_another_machine_is_deleted_if_it_is_sealed(paths: RunPaths) -> None:
    run_dir = ended(paths)
    elsewhere = {"host": "elsewhere", "boot": "1", "pid_namespace": "2"}
    write_meta(run_dir, {**read_meta(run_dir), "place": elsewhere, "host": "elsewhere"})
    (run_dir / "lease.json").unlink()
    with pytest.raises(RunError, match="it was recorded on elsewhere and never finished"):
        delete_run(run_dir, watch=False)
    write_meta(run_dir, {**read_meta(run_dir), "sealed": True})
    delete_run(run_dir, watch=False)
    assert not run_dir.exists()


def test_what_is_not_a_run_of_ours_is_not_deleted(paths: RunPaths, tmp_path: Path) -> None:
    run_dir = ended(paths)
    (tmp_path / "link").symlink_to(run_dir)
    (tmp_path / "folder").mkdir()
    (run_dir / "pipe").symlink_to("/etc/passwd")
    for path, why in ((tmp_path / "link", "is a link"), (tmp_path / "folder", "no run.json"), (run_dir, "pipe in it")):
        with pytest.raises(RunError, match=why):
            delete_run(path)
    assert run_dir.is_dir()


def test_data_that_was_not_sent_is_not_deleted(paths: RunPaths) -> None:
    run_dir = ended(paths)
    write_meta(run_dir, {**read_meta(run_dir), "hub": {"url": "https://node0:1"}})
    with pytest.raises(RunError, match="`stepscope send` delivers it"):
        delete_run(run_dir)


def test_what_a_killed_process_left_of_a_run_is_not_listed_and_is_removed(paths: RunPaths) -> None:
    run_dir = ended(paths)
    left = run_dir.with_name(".deleted-0123")
    left.mkdir()
    (left / "run.json").write_text((run_dir / "run.json").read_text())
    assert [entry.path for entry in list_runs(run_dir.parent)[0]] == [run_dir]
    delete_run(run_dir)
    assert list(run_dir.parent.iterdir()) == []
