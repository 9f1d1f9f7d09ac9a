"""``python -m league``: what is run, kept, run again and left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from league import __main__ as command
from league import runner
from league.cases import CASES
from league.runner import Outcome, can_run
from league.truth import Case, Claim, claim_of

NAME = "healthy/1/padded"


class Played:
    """Stands for the real thing: remembers what it was asked for and answers as told."""

    def __init__(self) -> None:
        self.cases: list[str] = []
        self.answer = Outcome(claims=(claim_of({"kind": "healthy", "severity": "info"}),), seconds=3.0)

    def __call__(self, case: Case, *more: Any) -> Outcome:
        self.cases.append(case.id)
        return self.answer


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr(command, "run_stepscope", played)
    return played


def league(out: Path, *more: str) -> int:
    return command.main(["--only", NAME, "--out", str(out), *more])


def results(out: Path) -> Any:
    return json.loads((out / "results.json").read_text())


def test_goes_on_where_it_stopped(played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert league(tmp_path) == 0
    assert league(tmp_path) == 0
    assert played.cases == [NAME]
    assert results(tmp_path)["cases"][f"{NAME}#0"]["stepscope"]["claims"][0]["kinds"] == ["healthy"]
    assert results(tmp_path)["totals"]["stepscope"]["healthy_warned"] == [0, 1]
    assert league(tmp_path, "--repeat", "2") == 0
    assert league(tmp_path, "--fresh") == 0
    assert played.cases == [NAME] * 3
    printed = capsys.readouterr()
    assert "TraceML is left out" in printed.err
    assert "traceml" not in printed.out


def test_what_failed_is_run_again_and_not_judged(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played.answer = Outcome(seconds=1.0, problem="exit code 1")
    league(tmp_path)
    assert results(tmp_path)["totals"]["stepscope"]["runs"] == 0
    assert "exit code 1" in capsys.readouterr().err
    league(tmp_path)
    assert played.cases == [NAME] * 2


def test_other_arguments_are_another_case(played: Played, tmp_path: Path) -> None:
    league(tmp_path)
    kept = results(tmp_path)
    kept["cases"][f"{NAME}#0"]["args"] = ["--other"]
    (tmp_path / "results.json").write_text(json.dumps(kept))
    league(tmp_path)
    assert played.cases == [NAME] * 2
    assert results(tmp_path)["cases"][f"{NAME}#0"]["args"] == []


def test_judging_again_runs_nothing(played: Played, tmp_path: Path) -> None:
    league(tmp_path)
    league(tmp_path, "--rejudge")
    assert played.cases == [NAME]
    assert results(tmp_path)["cases"][f"{NAME}#0"]["stepscope"]["problem"] == "no run was kept"


@pytest.mark.parametrize(("share", "warned"), [(0.1, 1), (0.4, 0)])
def test_a_busy_machine_may_be_called_busy(played: Played, tmp_path: Path, share: float, warned: int) -> None:
    busy: tuple[Claim, ...] = (claim_of({"kind": "cpu_saturated", "severity": "warning"}),)
    played.answer = Outcome(claims=busy, foreign_cpu=share)
    league(tmp_path)
    assert len(results(tmp_path)["totals"]["stepscope"]["not_right"]) == warned


def test_an_interrupt_keeps_what_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(case: Case, keep: Path, load: str) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_stepscope", interrupted)
    assert league(tmp_path) == 130
    assert "Broken off" in capsys.readouterr().err


def test_two_hosts_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in CASES if case.id == "uneven/4/node-input")
    monkeypatch.setattr(runner.os, "geteuid", lambda: 1000)
    assert "root" in can_run(case, "cpu")
    monkeypatch.setattr(runner.os, "geteuid", lambda: 0)
    monkeypatch.setattr(runner.shutil, "which", lambda name: "/bin/" + name)
    assert can_run(case, "cpu") == ""
    assert can_run(case, "cuda") == "runs on cpu"
