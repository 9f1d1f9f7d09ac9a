"""What is left in memory by runs that died, and what is not theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepscope.cli.commands import doctor
from stepscope.records.run_clock import process_start_ticks
from stepscope.store.create import create_run

GONE = 2**22 + 1
"""No process has this pid."""


def test_sessions_that_nobody_uses_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "session_root", lambda: tmp_path)
    here, ticks = os.getpid(), process_start_ticks(os.getpid())
    used = {"0123456789abcdef": "", f"{here}-{ticks}": "agent.lock", "with-ring": f"{here}.ring"}
    stale = {f"{here}-{ticks + 1}": "agent.lock", f"{GONE}-1": "", "fedcba": f"{GONE}.ring"}
    for name, file in {**used, **stale}.items():
        (tmp_path / name).mkdir()
        if file:
            (tmp_path / name / file).touch()
    (found,) = (check for check in doctor.checks(tmp_path) if "of crashed runs" in check.what)
    assert (found.state, found.what) == ("weak", f"3 sessions of crashed runs left in {tmp_path}")
    for name in stale:
        for path in (tmp_path / name).iterdir():
            path.unlink()
        (tmp_path / name).rmdir()
    assert [check for check in doctor.checks(tmp_path) if "of crashed runs" in check.what] == []


def test_what_is_kept_and_who_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_DEBUG": "INFO", "API_TOKEN": "x", "NCCL_PASSWORD": "y", "RANK": "0"})
    runs = tmp_path / "runs"
    for name, mode in (("closed", 0o700), ("open", 0o755), ("team", 0o750)):
        create_run(runs, name, ["x"], sessions=tmp_path / "sessions", mode=mode)
    kept, new, shared = doctor.privacy_checks(runs)
    assert kept.what == (
        "stored in run.json: user, host, working directory, the command with secrets as [redacted], "
        "and 2 of 4 environment variables: NCCL_DEBUG, RANK"
    )
    assert new.what == (
        f"only you can read a new run in {runs} (folders 0700, files 0600), unless you share it with `run --share`"
    )
    assert (shared.state, shared.what) == ("weak", f"other users can read 2 run(s) in {runs}: open, team")
    for name in ("open", "team"):
        (runs / name).chmod(0o700)
    assert len(list(doctor.privacy_checks(runs))) == 2


def test_a_page_that_could_not_be_built(tmp_path: Path, small_page: Path) -> None:
    assert [check for check in doctor.checks(tmp_path) if check.what.startswith("no page")] == []
    (small_page / "index.html").unlink()
    (small_page / "unbuilt.txt").write_text("npm ci: no network\n")
    (found,) = (check for check in doctor.checks(tmp_path) if check.what.startswith("no page"))
    assert (found.state, found.what) == ("weak", "no page and no report.html")
    assert found.advice == (
        "the page was not built (npm ci: no network); run `make page` in a checkout, "
        "or install Stepscope again with a network"
    )


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.13.0+cpu", "good"), ("2.10.0", "good"), ("3.0.0a1", "good"), ("2.9.1+cu128", "weak"), ("1.13.1", "bad")],
)
def test_torch_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, state: str) -> None:
    installed = tmp_path / f"torch-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = (check for check in doctor.checks(tmp_path) if check.what.startswith("torch "))
    assert (found.state, found.what) == (state, f"torch {version}")
    assert ("2.10" in found.advice) == (state != "good")
