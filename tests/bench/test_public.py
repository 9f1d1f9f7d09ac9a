"""Public programs bare and recorded: which there are, the data written for them, and how their runs are judged."""

from __future__ import annotations

import pickle
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from public import data
from public.__main__ import main
from public.cases import FAULTS, PROGRAMS, REPOSITORIES
from public.runner import Outcome, problem_of
from public.score import judge, judge_fault, render, steps_of, values_of

BY_NAME = {program.name: program for program in PROGRAMS}
MNIST, HOGWILD, ACTOR_CRITIC = BY_NAME["mnist"], BY_NAME["hogwild"], BY_NAME["actor_critic"]
LINES = "Train Epoch: 1 [0/1600 (0%)]\tLoss: 2.310000\nTest set: Average loss: 0.1234, Accuracy: 1/2"


def finding(kind: str, severity: str = "warning", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "severity": severity, "title": f"A {kind}.", "ranks": [], "evidence": {}, **more}


def outcome(text: str = LINES, *findings: dict[str, Any], code: int = 0, steps: tuple[int, ...] = (75,)) -> Outcome:
    ranks = [{"rank": rank, "steps": count, "hook_failures": 0} for rank, count in enumerate(steps)]
    summary = {"status": "finished" if code == 0 else "failed", "ranks": ranks, "findings": list(findings)}
    return Outcome(code=code, seconds=1.0, text=text, summary=summary)


BARE = replace(outcome(), summary={})


def test_every_program_has_a_repository_with_a_commit_and_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(PROGRAMS)
    assert {program.repository for program in PROGRAMS} == set(REPOSITORIES)
    assert all(re.fullmatch(r"[0-9a-f]{40}", each.commit) for each in REPOSITORIES.values())
    assert {fault.program for fault in FAULTS} <= set(BY_NAME)
    assert len(FAULTS) == 6


def test_without_checkouts_it_says_what_is_expected_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "nanoGPT: https://github.com/karpathy/nanoGPT at 3adf61e154c3" in capsys.readouterr().out
    assert main(["--checkouts", str(tmp_path), "--only", "mnist"]) == 2
    skipped = f"skipping mnist: no checkout {tmp_path / 'examples'}; expected https://github.com/pytorch/examples"
    assert skipped in capsys.readouterr().err
    (tmp_path / "examples").mkdir()
    missing = replace(MNIST, needs=("no_such_package",))
    assert problem_of(missing, tmp_path) == "not installed: no_such_package (requirements/public.txt)"


def test_the_same_output_and_steps_are_right() -> None:
    row = judge(MNIST, BARE, outcome(), load="none")
    assert (row.problems, row.steps, row.output, row.verdict) == ((), "75", "2 values identical", "healthy")
    assert values_of(MNIST, LINES) == ["2.310000", "0.1234"]


def test_other_numbers_are_wrong_unless_two_bare_runs_differ_as_well() -> None:
    other = outcome(LINES.replace("0.1234", "0.1235"))
    assert judge(MNIST, BARE, other, BARE, load="none").problems == (
        "output differs: value 1: 0.1235 instead of 0.1234",
    )
    repeated = replace(BARE, text=LINES.replace("0.1234", "0.1233"))
    assert judge(MNIST, BARE, other, repeated, load="none").problems == ()


@pytest.mark.parametrize(
    ("recorded", "problem"),
    [
        (outcome(steps=(74,)), "rank 0 made 75 steps, recorded 74"),
        (outcome(steps=(75, 75)), "2 ranks recorded instead of 1"),
        (outcome(code=1), "exit code 1 instead of 0"),
        (replace(outcome(), summary={}), "no summary"),
        (outcome(LINES, finding("imbalance")), "accused: imbalance: A imbalance."),
    ],
)
def test_what_is_wrong_is_named(recorded: Outcome, problem: str) -> None:
    assert problem in judge(MNIST, BARE, recorded, load="none").problems


def test_findings_that_are_true_of_the_program_or_of_the_machine_accuse_nobody() -> None:
    found = (finding("input_bound"), finding("cpu_saturated"), finding("imbalance", "info"))
    row = judge(MNIST, BARE, outcome(LINES, *found), load="one")
    assert (row.problems, row.verdict) == ((), "input_bound: A input_bound.")
    assert render([row]).endswith("1 of 1 right; 0 accused")


def test_a_finding_may_be_expected_with_a_word_of_its_title() -> None:
    evaluates = outcome(LINES, finding("between_steps", title="13% of the time is evaluation."))
    assert judge(MNIST, BARE, evaluates, load="none").accused == ()
    assert judge(MNIST, BARE, outcome(LINES, finding("between_steps")), load="none").accused != ()


def test_the_order_of_ranks_does_not_count() -> None:
    text = "7\tTrain Epoch: 1 [640/1600 (40%)]\n8\tTrain Epoch: 1 [0/1600 (0%)]"
    assert values_of(HOGWILD, text) == ["1 [0/1600", "1 [640/1600"]


def test_a_program_may_print_its_number_of_steps() -> None:
    assert steps_of(ACTOR_CRITIC, "Episode 1\tLast\nEpisode 12\tLast") == 12
    assert steps_of(ACTOR_CRITIC, "") is None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_right_with_its_kind_rank_words_and_exit_code(fault: Any) -> None:
    text = f"altered.py:30 step 12 torch.save: the injected fault of make public {fault.words}"
    kind = min(fault.kinds)
    right = finding(kind, title=text, ranks=[] if fault.rank is None else [fault.rank])
    assert judge_fault(fault, outcome("", right, code=fault.code), load="none").problems == ()
    assert judge_fault(fault, outcome("", finding("jitter"), right, code=fault.code), load="none").problems != ()


def test_mnist_files_have_the_format_of_the_originals(tmp_path: Path) -> None:
    data.write_mnist(tmp_path, train=20, test=10)
    raw = (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").read_bytes()
    assert struct.unpack(">4i", raw[:16]) == (2051, 20, 28, 28)
    assert len(raw) == 16 + 20 * 28 * 28
    labels = (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").read_bytes()
    assert (struct.unpack(">2i", labels[:8]), len(labels)) == ((2049, 10), 18)


def test_texts_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        data.write_token_files(tmp_path / name, characters=1000)
        data.write_text_corpus(tmp_path / f"{name}-text", train_lines=3)
    assert (tmp_path / "one" / "train.bin").read_bytes() == (tmp_path / "two" / "train.bin").read_bytes()
    meta = pickle.loads((tmp_path / "one" / "meta.pkl").read_bytes())
    assert np.fromfile(tmp_path / "one" / "train.bin", dtype=np.uint16).max() < meta["vocab_size"]
    train = (tmp_path / "one-text" / "train.txt").read_text()
    assert [len(line.split()) for line in train.splitlines()] == [20, 20, 20]
    assert train == (tmp_path / "two-text" / "train.txt").read_text()
