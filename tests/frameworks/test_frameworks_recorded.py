"""Every framework, bare and recorded: the same loss to the bit, as many steps as the framework counts, the fault named.

The jobs are those of ``make frameworks`` (bench/frameworks/jobs).  What needs torch alone is in ``make soak``;
what needs the frameworks, with a comparison to a bare run, in ``make long``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frameworks.cases import CASES, FRAMEWORKS, Case, command
from frameworks.score import judge

pytestmark = pytest.mark.ranks
BY_NAME = {case.name: case for case in CASES}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
LIMIT_S = 240.0


def words_of(case: Case) -> list[str]:
    """Without the interpreter: the fixtures bring their own."""
    return command(case)[1:]


def result_of(printed: str) -> tuple[int, str]:
    """Steps as the framework counted them, and the last loss."""
    found = re.findall(r"RESULT steps=(\d+) loss=(\S+)", printed)
    assert found, printed[-2000:]
    return int(found[0][0]), found[0][1]


def summary_of(done: Any) -> dict[str, Any]:
    assert done.code == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads((done.run_dir / "summary.json").read_text())
    return summary


@pytest.mark.soak  # near: the jobs of tests/recorder/comm_job.py, and the ddp example
@pytest.mark.parametrize("name", ["fsdp2", "tp", "pp"])
def test_healthy_parallel_jobs(name: str, run_stepscope: Callable[..., Any], forked_ranks: Path) -> None:
    case = BY_NAME[f"{name}/healthy-1"]
    script, *words = words_of(case)[-3:]
    done = run_stepscope("run", "--quiet", forked_ranks, str(case.framework.ranks), script, *words)
    summary = summary_of(done)
    steps, _loss = result_of(done.stdout)
    assert [row["steps"] for row in summary["ranks"]] == [steps] * case.framework.ranks
    assert [row["hook_failures"] for row in summary["ranks"]] == [0] * case.framework.ranks


@pytest.mark.long
@pytest.mark.parametrize("fault", ["healthy-1", "data-one"])
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_recorded_as_bare(
    framework: Any, fault: str, run_stepscope: Callable[..., Any], run_python: Callable[..., Any]
) -> None:
    pytest.importorskip(framework.package)
    case = BY_NAME[f"{framework.name}/{fault}"]
    bare = run_python(*words_of(case), env=ENVIRONMENT, timeout_s=LIMIT_S)
    assert bare.code == 0, bare.stderr[-3000:]
    done = run_stepscope("run", "--quiet", *command(case), env=ENVIRONMENT, timeout_s=LIMIT_S)
    summary = summary_of(done)
    steps, loss = result_of(done.stdout + done.stderr)
    assert (steps, loss) == result_of(bare.stdout + bare.stderr)
    assert [row["steps"] for row in summary["ranks"]] == [steps] * framework.ranks
    assert [row["hook_failures"] for row in summary["ranks"]] == [0] * framework.ranks
    found = judge(case, summary, exit_code=done.code)
    # Lines are the league's matter: here it is the kind and the rank.
    assert [problem for problem in found.problems if problem != "line"] == [], found


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tp", "pp", "dp-tp"])
def test_a_slow_forward_is_one_finding(name: str, run_stepscope: Callable[..., Any]) -> None:
    """Of the right kind and rank, whatever the ranks share: layers, a pipeline, or both layers and samples."""
    case = BY_NAME[f"{name}/forward-one"]
    done = run_stepscope("run", "--quiet", *command(case), env=ENVIRONMENT, timeout_s=LIMIT_S)
    found = [finding for finding in summary_of(done)["findings"] if finding["severity"] != "info"]
    late = [finding for finding in found if finding["kind"].endswith("straggler") or finding["kind"] == "imbalance"]
    kind = "imbalance" if name == "pp" else "compute_straggler"
    assert [(row["kind"], row["ranks"], row["phase"]) for row in late] == [(kind, [case.culprit], "forward")]
