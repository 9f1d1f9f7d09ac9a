"""``stepscope compare`` and ``stepscope gate``: what people, scripts and CI see."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes.cluster import Cluster, slow_at
from made_runs import record

from stepscope.cli.main import run_command
from stepscope.errors import CompareError, CompareTooShort, NotARun, UsageError

SLOW = tuple(slow_at(rank, "forward", 4.0) for rank in range(2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs in ``runs/``: three baselines, one as fast, one slower, one short."""
    root = tmp_path_factory.mktemp("compare") / "runs"
    root.mkdir()
    for seed, name in enumerate(("base1", "base2", "base3", "same")):
        record(root, name, Cluster(ranks=2, steps=150, seed=seed).run())
    record(root, "slow", Cluster(ranks=2, steps=150, seed=9, faults=SLOW).run())
    record(root, "short", Cluster(ranks=2, steps=6, seed=9).run())
    return root.parent


@pytest.fixture
def here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(runs)
    return runs


def numbers(path: Path, level: float, seed: int) -> Path:
    values = level * (1 + np.random.default_rng(seed).normal(0, 0.005, 60))
    path.write_text("step,step_ms\n" + "".join(f"{at},{value:.4f}\n" for at, value in enumerate(values)))
    return path


BASELINES = ("base1", "base2", "base3")


# -- compare ----------------------------------------------------------------------------------------------------------


def test_compare_says_what_changed_and_where(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["compare", *BASELINES, "slow"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith("▲ slow is 10.")
    assert lines[0].endswith("% slower than 3 baselines.")
    assert lines[1].startswith("  where     forward takes ")
    assert lines[1].endswith(" ms longer on all ranks.")
    assert shown.err == "", "no progress where nobody looks"


def test_compare_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["compare", "base1", "slow", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "slower"
    assert document["change"] == pytest.approx(0.1, abs=0.01)
    low, high = document["interval"]
    assert 0 < low < document["change"] < high
    assert {"phases", "ranks", "context"} <= set(document)


def test_compare_as_markdown_and_page(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "compare.html"
    assert run_command(["compare", "base1", "slow", "--markdown", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("### ▲ slow is ")
    assert "| phase | before | after | change | |" in shown
    assert page.read_text().startswith("<!doctype html>")


def test_compare_reads_numbers_of_other_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = numbers(tmp_path / "a.csv", 100, 1), numbers(tmp_path / "b.csv", 108, 2)
    assert run_command(["compare", str(before), str(after), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "slower"


def test_one_input_is_not_enough(here: Path) -> None:
    with pytest.raises(UsageError, match="name at least two inputs"):
        run_command(["compare", "base1"])


def test_an_input_that_does_not_exist(here: Path) -> None:
    with pytest.raises(NotARun, match=r"no run named bse1: .*; did you mean base1"):
        run_command(["compare", "base1", "bse1"])


def test_a_page_does_not_replace_an_input(tmp_path: Path) -> None:
    before, after = numbers(tmp_path / "a.csv", 100, 1), numbers(tmp_path / "b.csv", 108, 2)
    with pytest.raises(UsageError, match="is an input file and would be overwritten"):
        run_command(["compare", str(before), str(after), "--html", str(after)])


# -- gate -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "first"),
    [
        ((*BASELINES, "same"), 0, "✔ Pass: same is not more than 2% slower."),
        ((*BASELINES, "slow"), 1, "✖ Regression: slow is "),
        (("base1", "same", "--max-slowdown", "0.5%"), 2, "▲ Cannot tell: same is "),
        ((*BASELINES, "same", "--max-memory", "5%"), 2, "▲ Cannot tell: the peak memory of these runs is not known."),
        ((*BASELINES, "same", "--no-new-findings"), 0, "✔ Pass: same is not more than 2% slower."),
    ],
)
def test_gate_exit_codes(
    here: Path, words: Sequence[str], code: int, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["gate", *words]) == code
    assert capsys.readouterr().out.startswith(first)


def test_gate_says_what_it_decided_in_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["gate", *BASELINES, "slow", "--json", "--max-slowdown", "3%"]) == 1
    gate = json.loads(capsys.readouterr().out)["gate"]
    assert (gate["result"], gate["exit_code"]) == ("regression", 1)
    assert [(check["name"], check["limit"]) for check in gate["checks"]] == [("slowdown", 0.03)]


@pytest.mark.parametrize(
    ("words", "error", "code"),
    [
        (("base1", "short"), CompareTooShort, 2),
        (("base1", "nowhere"), NotARun, 3),
        (("base1",), UsageError, 3),
        (("base1", "same", "--max-slowdown", "none"), UsageError, 3),
        (("base1", "same", "--max-slowdwn", "2%"), UsageError, 3),
        (("base1", "same", "--record"), UsageError, 3),
        (("base1", "base1"), CompareError, 3),
        (("base1", "../no.csv"), NotARun, 3),
    ],
)
def test_bad_input_never_passes(here: Path, words: Sequence[str], error: type[Exception], code: int) -> None:
    with pytest.raises(error) as raised:
        run_command(["gate", *words])
    assert raised.value.exit_code == code  # type: ignore[attr-defined]
    assert "\n" not in str(raised.value)


def test_other_commands_keep_their_exit_code_for_usage() -> None:
    with pytest.raises(UsageError) as raised:
        run_command(["compare", "--nonsense"])
    assert raised.value.exit_code == 2


# -- baselines by branch ----------------------------------------------------------------------------------------------


def test_baselines_are_kept_by_branch(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "baselines"
    record_to = ("--baselines", str(folder), "--branch", "feature/x", "--keep", "2", "--record")
    with pytest.raises(CompareError, match=r"no baselines of branch feature/x in .*; make one with --record"):
        run_command(["gate", "base1", *record_to[:4]])
    assert run_command(["gate", "base1", *record_to]) == 0
    assert "there was no baseline to compare it with" in capsys.readouterr().err
    assert run_command(["gate", "base2", *record_to, "--max-slowdown", "5%"]) == 0
    assert run_command(["gate", "slow", *record_to, "--max-slowdown", "5%"]) == 1, "a regression is not kept"
    assert run_command(["gate", "base3", *record_to, "--max-slowdown", "5%"]) == 0
    names = sorted(path.name.partition("-")[2] for path in (folder / "feature%2Fx").iterdir())
    assert names == ["base2.json", "base3.json"], "the newest two"


def test_a_baseline_is_not_compared_with_itself(here: Path, tmp_path: Path) -> None:
    """A job that CI repeats would pass against its own copy."""
    kept = ("--baselines", str(tmp_path))
    assert run_command(["gate", "base1", *kept, "--record"]) == 0
    with pytest.raises(CompareError, match="no baselines of branch main"):
        run_command(["gate", "base1", *kept])


def test_a_job_that_was_changed_begins_a_new_row(here: Path, tmp_path: Path, runs: Path) -> None:
    other = record(tmp_path, "wide", Cluster(ranks=3, steps=60).run())
    kept = ("--baselines", str(tmp_path / "kept"))
    assert run_command(["gate", "base1", *kept, "--record"]) == 0
    assert run_command(["gate", str(other), *kept]) == 2, "three ranks are not compared with two"
    assert run_command(["gate", str(other), *kept, "--record"]) == 0
    assert len(list((tmp_path / "kept" / "main").iterdir())) == 2


@pytest.mark.parametrize("branch", ["..", ".", "../../x", "a/b"])
def test_a_branch_cannot_leave_the_folder(here: Path, tmp_path: Path, branch: str) -> None:
    kept = tmp_path / "kept"
    assert run_command(["gate", "base1", "--baselines", str(kept), "--branch", branch, "--record"]) == 0
    (folder,) = kept.iterdir()
    assert len(list(folder.iterdir())) == 1
