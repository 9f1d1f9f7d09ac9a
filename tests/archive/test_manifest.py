"""Manifests that may come from anyone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.archive.manifest import ArchivedFile, ArchivedRun, Manifest, digest_of, run_facts
from stepscope.errors import ArchiveError
from stepscope.store.catalog import run_entry

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def made(*files: ArchivedFile, name: str = "night", **facts: Any) -> Manifest:
    stored = sum(file.stored for file in files)
    run = ArchivedRun(name=name, digest=digest_of(files), stored=stored, archived_wall_ns=1, facts=facts)
    return Manifest(run=run, files=files)


def file(name: str = "run.json", size: int = 10, stored: int | None = None, **more: Any) -> ArchivedFile:
    return ArchivedFile(name=name, size=size, stored=size if stored is None else stored, sha256=EMPTY, **more)


def test_what_is_written_is_read() -> None:
    manifest = made(file(), file("logs/ä.log", 100, 20, extents=((0, 5), (50, 15))), file("hole", 100, 0), status="x")
    assert Manifest.decode(manifest.encode(), "night") == manifest
    assert manifest.key(manifest.files[1]) == f"night/{manifest.run.digest[:32]}/logs/%C3%A4.log"


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/../../x", "a//b", "", ".", "..", ".archived.json", ".lock", "hub.json", "lease.json",
     "a\0b", "x" * 250, "/".join("abcdefghij")],
)  # fmt: skip
def test_names_that_leave_the_run_or_are_reserved(name: str) -> None:
    with pytest.raises(ArchiveError, match="cannot be a file of a run"):
        Manifest.decode(made(file(name)).encode(), "night")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([file("a"), file("a")], "listed twice"),
        ([file("a"), file("a/b")], "is in a file"),
        ([file(size=-1), file("b", 2)], "size is not possible"),
        ([file(size=1 << 50)], "size is not possible"),
        ([file(size=10, stored=5)], "does not match the parts"),
        ([file(size=10, stored=8, extents=((0, 4), (2, 4)))], "overlap"),
        ([file(size=10, stored=8, extents=((4, 8),))], "behind the end"),
        ([file(f"f{n}", 1 << 40) for n in range(2)], "its size is not possible"),
    ],
)
def test_files_that_cannot_be(files: list[ArchivedFile], why: str) -> None:
    with pytest.raises(ArchiveError, match=why):
        Manifest.decode(made(*files).encode(), "night")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema": 2}, "schema 2"),
        ({"kind": "x"}, "not written by Stepscope"),
        ({"name": "other"}, "another run"),
        ({"name": "../x"}, "its name"),
        ({"digest": "0" * 64}, "does not match its files"),
        ({"digest": "../../x"}, "its digest is not valid"),
        ({"stored": 11}, "its size"),
        ({"files": {}}, "too many files"),
        ({"run": []}, "no facts"),
        ({"archived_wall_ns": "1"}, "a number"),
    ],
)
def test_documents_that_cannot_be(change: dict[str, Any], why: str) -> None:
    document = {**json.loads(made(file()).encode()), **change}
    with pytest.raises(ArchiveError, match=why):
        Manifest.decode(json.dumps(document).encode(), "night")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
ROWS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["a", "../a", "a/b", "x/../y", "/a", "logs/x.log", "a\\..\\b"]) | st.text(max_size=12),
        "size": st.integers(-2, 1 << 42) | JSON,
        "stored": st.integers(-2, 1 << 42) | JSON,
        "sha256": st.just(EMPTY) | JSON,
    },
    optional={"extents": st.lists(st.tuples(st.integers(-1, 9), st.integers(-1, 9)), max_size=3) | JSON},
)


@settings(max_examples=examples(400), deadline=None)
@given(rows=st.lists(ROWS, max_size=4) | JSON, facts=st.dictionaries(st.text(max_size=8), JSON, max_size=3) | JSON)
def test_foreign_manifests_are_refused_or_stay_in_their_folder(rows: Any, facts: Any) -> None:
    document = {**json.loads(made(file()).encode()), "files": rows, "run": facts}
    try:
        files = [ArchivedFile(**{**row, "extents": tuple(map(tuple, row.get("extents", ())))}) for row in rows]
        document |= {"digest": digest_of(files), "stored": sum(each.stored for each in files)}
    except (TypeError, ValueError, AttributeError, UnicodeEncodeError):
        pass
    try:
        manifest = Manifest.decode(json.dumps(document).encode(), "night")
    except ArchiveError:
        return
    root = Path("/cache/runs/x")
    for each in manifest.files:
        inside = Path(f"{root}/{each.name}")
        assert inside.is_relative_to(root) and ".." not in inside.parts and inside != root
        assert 0 <= each.stored <= each.size <= 1 << 40


KNOWN = (
    "created_wall_ns", "status", "status_text", "status_severity", "ranks", "steps", "median_step_ms", "verdict",
    "severity", "cost_share", "duration_s", "host", "command", "commit", "branch", "metrics", "tags", "note",
    "shown_name", "recorded_name",
)  # fmt: skip


@settings(max_examples=examples(400), deadline=None)
@given(facts=st.dictionaries(st.sampled_from(KNOWN), JSON, max_size=8))
def test_foreign_facts_make_a_line_of_a_list(facts: dict[str, Any]) -> None:
    from stepscope.archive.location import parse_url
    from stepscope.cli.commands.list import ORDERS, _table

    run = made(file(), **facts).run
    entry = run.entry(parse_url("s3://bucket/x"), Path("/cache/night"))
    json.dumps(entry.to_dict(), allow_nan=False)
    assert "night" in _table([entry], 80)
    for order in ORDERS.values():
        assert sorted([entry, entry], key=order)


def test_facts_return_as_they_were(make_run: Callable[..., Path]) -> None:
    from dataclasses import replace

    from stepscope.archive.location import parse_url
    from stepscope.store.catalog import change_labels

    run_dir = make_run()
    change_labels(run_dir, name="nice", note="a note", add=["baseline"])
    before = run_entry(run_dir)
    run = made(file(), **json.loads(json.dumps(run_facts(before)))).run
    entry = run.entry(parse_url("s3://bucket/x"), run_dir)
    assert entry == replace(before, url="s3://bucket/x/night")
