"""``stepscope list``."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from stepscope.store.create import create_run
from stepscope.store.documents import end_run, read_meta, save_summary, write_meta

SUMMARY = {
    "schema": 1,
    "status": "crashed",
    "status_text": "killed (SIGKILL)",
    "status_severity": "critical",
    "world_size": 4,
    "steps": {"total": 12_000},
    "step_time": {"p50_ms": 123.456},
    "verdict": {"kind": "straggler", "title": "Rank 2 is slow in forward"},
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, created_s in (("old", 1_700_000_000), ("new", 1_700_003_600)):
        run_dir = create_run(tmp_path / "runs", name, ["x"], sessions=tmp_path / "s").run_dir
        write_meta(run_dir, {**read_meta(run_dir), "created_wall_ns": created_s * 10**9})
        end_run(run_dir, exit_code=1, status="failed")
    save_summary(tmp_path / "runs" / "old", SUMMARY, "")
    return tmp_path / "runs"


def when(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def test_a_table_newest_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["list", str(runs)]) == 0
    assert capsys.readouterr().out == (
        "run  started           status            ranks   steps  median step  verdict\n"
        "───  ────────────────  ────────────────  ─────  ──────  ───────────  ─────────────────────────\n"
        f"new  {when(1_700_003_600)}  failed\n"
        f"old  {when(1_700_000_000)}  killed (SIGKILL)      4  12,000       123 ms  Rank 2 is slow in forward\n"
    )


def test_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["list", "--json", str(runs)]) == 0
    new, old = json.loads(capsys.readouterr().out)
    assert old == {
        "name": "old",
        "path": str(runs / "old"),
        "created_wall_ns": 1_700_000_000 * 10**9,
        "status": "crashed",
        "status_text": "killed (SIGKILL)",
        "status_severity": "critical",
        "ranks": 4,
        "steps": 12_000,
        "median_step_ms": 123.456,
        "verdict": "Rank 2 is slow in forward",
        "severity": None,
    }
    assert (new["status"], new["ranks"], new["verdict"]) == ("failed", None, "")


def test_a_damaged_run_does_not_hide_the_others(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "bad").mkdir()
    (runs / "bad" / "run.json").write_text('{"sch')
    (runs / "old" / "summary.json").write_text('{"steps": 3, "step_time": [], "verdict": 4, "status": null}')
    assert run_command(["list", str(runs)]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"stepscope: {runs}/bad/run.json is damaged or cut off: it is not valid JSON\n"
    assert len(shown.out.splitlines()) == 4


def test_nothing_to_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"No runs in {tmp_path} yet.\n"
    assert run_command(["list", "--json", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_before_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert run_command(["list"]) == 0
    assert capsys.readouterr().out == "No runs in runs yet.\n"


def test_the_verdict_is_cut_to_the_terminal(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: True)
        patch.setenv("COLUMNS", "84")
        assert run_command(["list", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 84
    assert lines[-1].endswith("  Rank 2 is slow…")


def test_a_run_is_listed_under_its_folders_name(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "old").rename(runs / "moved")
    assert run_command(["list", str(runs)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("moved  ")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        run_command(["list", str(tmp_path / "none")])
