"""A finished run of small files, and archives of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from stepscope.archive.location import ArchiveUrl, parse_url
from stepscope.archive.storage import Storage
from stepscope.store.create import create_run
from stepscope.store.documents import end_run, read_meta, save_summary, write_meta

SUMMARY = {
    "schema": 1,
    "status": "finished",
    "status_text": "finished",
    "world_size": 4,
    "steps": {"total": 12_000},
    "step_time": {"p50_ms": 123.456},
    "verdict": {"kind": "straggler", "severity": "critical", "title": "Rank 2 is slow in forward"},
}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """``make_run("night")``: a run that is over, without steps."""

    def make(name: str = "night", *, folder: str = "runs", created_s: int = 1_700_000_000) -> Path:
        run_dir = create_run(tmp_path / folder, name, ["x"], environ={}, sessions=tmp_path / "sessions").run_dir
        meta = {**read_meta(run_dir), "created_wall_ns": created_s * 10**9, "launcher": None}
        write_meta(run_dir, meta)
        end_run(run_dir, exit_code=0, status="finished", wall_ns=(created_s + 60) * 10**9)
        write_meta(run_dir, {**read_meta(run_dir), "sealed": True})
        save_summary(run_dir, SUMMARY, "a summary\n")
        (run_dir / "logs" / "rank-0.log").write_text("line\n" * 1000)
        (run_dir / "steps.parquet").write_bytes(bytes(range(256)) * 64)
        shutil.rmtree(run_dir / "rings", ignore_errors=True)
        return run_dir

    return make


@pytest.fixture
def run_dir(make_run: Callable[..., Path]) -> Path:
    return make_run()


@pytest.fixture
def url(tmp_path: Path) -> ArchiveUrl:
    return parse_url(f"file://{tmp_path}/store")


@pytest.fixture
def storage(url: ArchiveUrl) -> Storage:
    return Storage(url)


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}
