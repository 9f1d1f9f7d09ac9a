"""What ranks write about their layers reaches the run once, whoever is killed, and takes no memory afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stepscope.agent import journal as journals
from stepscope.agent.drain import LayerLines, drain_leftovers
from stepscope.agent.journal import Journal
from stepscope.store.file_io import read_jsonl
from stepscope.store.paths import LAYERS

MODEL = {"kind": "model", "model": "ab12", "compiled": False, "replicated": True, "modules": [["", "Net", -1, 4, 4]]}


def sample(step: int, model: str = "ab12") -> dict[str, Any]:
    return {"kind": "sample", "step": step, "wall_ns": 5, "model": model, "forward_us": [1.5]}


def text(*records: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records)


def write(path: Path, *records: dict[str, Any]) -> None:
    """As a rank does it: one write, at the end."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, text(*records))
    os.close(fd)


def test_what_was_read_takes_no_memory_and_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "7.layers"
    lines = LayerLines(path)
    assert lines.read() == []
    many = [sample(step) for step in range(2000)]
    write(path, *many)
    full = path.stat().st_blocks
    assert b"".join(lines.read()) == text(*many)
    write(path, sample(2000))
    assert b"".join(lines.read()) == text(sample(2000))  # and now the others are free
    if path.stat().st_blocks == full:
        pytest.skip("this file system cannot free a part of a file")
    assert path.stat().st_blocks < full / 4
    assert b"".join(LayerLines(path).read()) == text(sample(2000))  # another agent, before that one was freed
    lines.read()
    assert LayerLines(path).read() == []


def test_a_line_that_is_not_finished_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "7.layers"
    path.write_bytes(text(sample(1)) + b'{"kind"')
    lines = LayerLines(path)
    assert len(lines.read()) == 1
    assert lines.read() == []
    path.write_bytes(text(sample(1), sample(2)))
    assert b"".join(lines.read()) == text(sample(2))


def test_a_model_is_described_once_whichever_rank_says_so(tmp_path: Path) -> None:
    for rank in range(2):
        journal = Journal(tmp_path)  # and whichever agent
        journal.layers(text(MODEL, sample(1)).splitlines(keepends=True), rank=rank, attempt=0, pid=40 + rank)
        journal.layers([*text(MODEL).splitlines(keepends=True), b"nonsense\n"], rank=rank, attempt=0, pid=40 + rank)
        assert not journal.takes_layers
        assert journal.flush()
        assert journal.takes_layers
    found, bad = read_jsonl(tmp_path / LAYERS)
    assert bad == 0
    assert found == [MODEL, *({"rank": rank, "attempt": 0, "pid": 40 + rank, **sample(1)} for rank in range(2))]


def test_a_large_file_grows_ever_more_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "DENSE_LAYERS_BYTES", 100 * len(text(sample(1000))))
    journal = Journal(tmp_path)
    journal.layers(text(*map(sample, range(10_000))).splitlines(keepends=True), rank=0, attempt=0, pid=40)
    journal.flush()
    steps = [record["step"] for record in read_jsonl(tmp_path / LAYERS)[0]]
    assert steps[:50] == list(range(50))
    assert len(steps) < 400
    assert steps[-1] > 9_000
    journal.samples_wanted = False  # the disk is full
    journal.layers(text(sample(37)).splitlines(keepends=True), rank=0, attempt=0, pid=40)
    assert journal.takes_layers


def test_the_agent_moves_them_and_takes_the_last_ones_of_a_killed_rank(stage: Any) -> None:
    agent, rank = stage.agent(), stage.rank(3)
    path = rank.path.with_suffix(".layers")
    write(path, MODEL, sample(1))
    stage.until(lambda: len(read_jsonl(stage.run_dir / LAYERS)[0]) == 2)
    agent.kill()
    write(path, sample(2))
    second = stage.agent()
    stage.until(lambda: len(read_jsonl(stage.run_dir / LAYERS)[0]) >= 3)
    write(path, sample(3))
    rank.kill()
    stage.until_event("rank_end")
    stage.until(lambda: not path.exists())
    second.end()
    found = [(one.rank, one.step) for one in stage.data().layers.samples]
    assert found == [(3, 1), (3, 2), (3, 3)]


def test_without_an_agent_the_last_ones_are_taken_when_the_run_is_finished(stage: Any) -> None:
    rank = stage.rank(1)
    rank.steps(3)
    write(rank.path.with_suffix(".layers"), MODEL, sample(1))
    rank.kill()
    drain_leftovers(stage.run_dir, stage.paths.session)
    assert not rank.path.with_suffix(".layers").exists()
    assert [(one.rank, one.step) for one in stage.data().layers.samples] == [(1, 1)]
