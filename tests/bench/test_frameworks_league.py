"""The league of frameworks: its matrix, the lines of its faults, and its scoring."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from frameworks.__main__ import main
from frameworks.cases import CASES, FAULTS, FRAMEWORKS, Case, command, expected_of, fault_lines
from frameworks.score import Judged, good_enough, judge, render

BY_NAME = {case.name: case for case in CASES}
DATA = BY_NAME["fsdp2/data-one"]
EVERYWHERE = BY_NAME["fsdp2/callback-all"]
HEALTHY = BY_NAME["fsdp2/healthy-1"]
FILE, LINE = next(iter(fault_lines(DATA)))
HOOK_FILE, HOOK_LINE = next(iter(fault_lines(EVERYWHERE)))


def finding(kind: str = "input_straggler", **more: Any) -> dict[str, Any]:
    whole = {"kind": kind, "severity": "critical", "title": f"Rank 1 is slow ({FILE}:{LINE}).", "ranks": [1]}
    return {**whole, "phase": "input", "evidence": {}, "advice": [], **more}


def between(**more: Any) -> dict[str, Any]:
    return finding("between_steps", **{"ranks": [], "title": f"Mostly in {HOOK_FILE}:{HOOK_LINE}.", **more})


def problems(case: Case, *findings: dict[str, Any], **more: Any) -> tuple[str, ...]:
    summary = {"findings": list(findings), "status": "finished", "world_size": case.framework.ranks, **more}
    return judge(case, summary, exit_code=0).problems


def test_the_matrix_has_what_was_asked_for() -> None:
    assert len(BY_NAME) == len(CASES)
    names = {framework.name for framework in FRAMEWORKS}
    assert names == {"hf", "lightning", "accelerate", "deepspeed", "ray", "fsdp2", "tp", "pp", "dp-tp"}
    assert set(FAULTS) == {"data", "collate", "forward", "callback", "evaluation", "checkpoint"}
    assert Counter((case.framework.name, case.fault, case.who) for case in CASES if not case.healthy) == {
        (name, fault, who): 1 for name in names for fault in FAULTS for who in ("one", "all")
    }
    assert Counter(case.framework.name for case in CASES if case.healthy) == dict.fromkeys(names, 2)
    assert all(case.culprit is None or 0 <= case.culprit < case.framework.ranks for case in CASES)


@pytest.mark.few(30)
@pytest.mark.parametrize("case", [case for case in CASES if not case.healthy], ids=lambda case: case.name)
def test_every_fault_is_in_a_line_of_its_job(case: Case) -> None:
    assert fault_lines(case)
    assert Path(command(case)[-3]).is_file()
    assert command(case)[-2:] == ["--fault", case.fault_text]
    expected = expected_of(case)
    assert expected is not None
    assert expected.kinds
    assert expected.why


@pytest.mark.parametrize(
    ("findings", "wrong"),
    [
        ([finding()], ()),
        ([finding(title="Rank 1 is slow.", evidence={"place": {"at": f"jobs/{FILE}:{LINE + 2}"}})], ()),
        ([finding(title="Rank 1 is slow.")], ("line",)),
        ([finding(title=f"{FILE}:{LINE + 3}")], ("line",)),
        ([finding(title=f"other.py:{LINE}")], ("line",)),
        ([finding("compute_straggler")], ("kind",)),
        ([finding(ranks=[0])], ("rank",)),
        ([finding(ranks=[0, 1])], ("rank",)),
        ([], ("kind", "rank", "line")),
        # What is true of a busy machine neither leads nor counts.
        ([finding("cpu_saturated", ranks=[]), finding()], ()),
        ([finding("jitter", ranks=[]), finding()], ("kind", "rank")),
        ([finding(), finding("jitter", ranks=[1])], ()),
        ([finding(), finding("jitter", ranks=[0])], ("also blames jitter r0",)),
        ([finding(), finding("jitter", ranks=[0], severity="info")], ()),
        ([finding(), finding("rank_lost", ranks=[])], ("also blames rank_lost",)),
    ],
)
def test_a_fault_on_one_rank_is_judged_by_kind_rank_and_line(findings: list[Any], wrong: tuple[str, ...]) -> None:
    assert problems(DATA, *findings) == wrong


def test_a_fault_on_all_ranks_blames_nobody() -> None:
    assert problems(EVERYWHERE, between()) == ()
    assert problems(EVERYWHERE, between(ranks=[0, 1])) == ()
    assert problems(EVERYWHERE, between(ranks=[1])) == ("rank",)
    assert problems(EVERYWHERE, between(), finding("jitter", ranks=[1])) == ("also blames jitter r1",)


def test_a_function_of_the_framework_is_as_good_as_a_line() -> None:
    case = BY_NAME["hf/checkpoint-one"]
    said = between(ranks=[0], title="Mostly in transformers/trainer.py:2590 in _save_checkpoint.")
    assert problems(case, said) == ()
    assert problems(case, {**said, "title": "Mostly in transformers/trainer.py:2590 in evaluate."}) == ("line",)


def test_equal_work_everywhere_is_healthy() -> None:
    case = BY_NAME["fsdp2/forward-all"]
    assert problems(case, finding("healthy", ranks=[], severity="info")) == ()
    assert problems(case, finding("change_point", ranks=[], severity="info")) == ()
    assert problems(case, finding("cpu_saturated", ranks=[])) == ()
    assert problems(case, finding("comm_bound", ranks=[])) == ("kind",)


def test_a_healthy_run_must_not_be_accused() -> None:
    assert problems(HEALTHY, finding("comm_bound", ranks=[]), finding("jitter", severity="info")) == ()
    assert problems(HEALTHY, finding("jitter", ranks=[1])) == ("accused: jitter r1",)
    assert problems(HEALTHY, finding("rank_lost", ranks=[0, 1])) == ("accused: rank_lost",)


def test_a_run_that_failed_is_wrong() -> None:
    assert problems(HEALTHY, status="failed") == ("status failed",)
    assert problems(HEALTHY, world_size=1) == ("1 ranks",)
    assert judge(HEALTHY, {}, exit_code=None).problems == ("killed", "status None", "None ranks")


def rows(right: int, wrong: int, *, healthy_wrong: bool = False) -> list[Judged]:
    faults = [Judged(name=f"hf/{n}", framework="hf", healthy=False) for n in range(right)]
    faults += [Judged(name=f"tp/{n}", framework="tp", healthy=False, problems=("line",)) for n in range(wrong)]
    calm = Judged(name="hf/h", framework="hf", healthy=True, problems=("accused",) if healthy_wrong else ())
    return [*faults, calm]


def test_95_percent_of_the_faults_and_every_healthy_run_must_be_right() -> None:
    assert good_enough(rows(19, 1))
    assert not good_enough(rows(18, 1))
    assert not good_enough(rows(19, 0, healthy_wrong=True))
    text = render(rows(19, 1))
    assert "faults: 19 of 20 right (95.0%; needed: 95%)" in text
    assert "hf: 20 of 20 right" in text
    assert "tp: 0 of 1 right" in text


def test_the_command_lists_its_cases_and_knows_when_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "tp/data-*"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["tp/data-one", "tp/data-all"]
    assert main(["--only", "nothing/*"]) == 2


def test_a_wait_of_ray_itself_is_set_aside() -> None:
    """It blames nobody and is true; what was done to the run must still be found."""
    case = BY_NAME["ray/callback-all"]
    file, line = next(iter(fault_lines(case)))
    place = "ray.train.report: ray/train/context.py:517 in TrainContext.report, from ray_job.py:57"
    wait = finding("stall", title=f"Steps 40 and 60 took long, mostly in {place}.", ranks=[], evidence={"place": place})
    fault = between(title=f"Mostly in {file}:{line}.")
    assert problems(case, wait, fault) == ()
    assert problems(case, wait) == ("kind", "line")
    assert "rank" in problems(case, {**wait, "ranks": [1]}, fault)
    assert "kind" in problems(EVERYWHERE, wait, between())
