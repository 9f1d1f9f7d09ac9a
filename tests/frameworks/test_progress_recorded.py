"""Step numbers, epochs and evaluations under the real frameworks agree with what their loggers wrote.

Each job trains two epochs and then resumes for two more, bare and recorded, with gradients accumulated over 4 batches,
on one rank and on two.  What it prints is the same to the bit.  A checkpoint that was written while recording has
nothing of ours, and a bare job resumes from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from stepscope.records.identity import epochs_of, logged_steps

pytestmark = [pytest.mark.long, pytest.mark.ranks]
JOBS = Path(__file__).parent
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
LIMIT_S = 240.0
Run = Callable[..., Any]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
HF = ["eval_short", "eval_whole", "test"]
LIGHTNING = [("sanity_check", 1), ("validate", 4), ("predict", 1)]


def command(framework: str, folder: Path, epochs: int, ranks: int, *, resume: bool) -> list[str]:
    """Without the interpreter."""
    launcher = TORCHRUN if ranks > 1 and framework != "lightning" else ()
    own = [str(ranks)] if framework == "lightning" else []
    words = [str(JOBS / f"progress_{framework}.py"), str(folder), str(epochs), *own]
    return [*launcher, *words, *(["resume"] if resume else [])]


def skip_without(package: str) -> None:
    """Without importing it: Lightning changes the environment."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def result_of(done: Any) -> dict[str, Any]:
    assert done.code == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("framework", ["hf", "lightning", "accelerate"])
def test_numbers_agree_with_the_frameworks_logs(
    framework: str, ranks: int, tmp_path: Path, run_stepscope: Run, run_python: Run
) -> None:
    skip_without({"hf": "transformers"}.get(framework, framework))
    bare, recorded = tmp_path / "bare", tmp_path / "recorded"
    for epochs, resume in ((2, False), (4, True)):
        words = command(framework, bare, epochs, ranks, resume=resume)
        expected = result_of(run_python(*words, env=ENVIRONMENT, timeout_s=LIMIT_S))
        words = command(framework, recorded, epochs, ranks, resume=resume)
        done = run_stepscope("run", "--quiet", sys.executable, *words, env=ENVIRONMENT, timeout_s=LIMIT_S)
        assert result_of(done) == expected
        summary = json.loads((done.run_dir / "summary.json").read_text())
        check(framework, summary, expected, epochs=epochs, resume=resume)
    assert [path for path in recorded.rglob("*") if path.is_file() and b"stepscope" in path.read_bytes().lower()] == []
    last = command(framework, recorded, 5, ranks, resume=True)
    result_of(run_python(*last, env=ENVIRONMENT, timeout_s=LIMIT_S))


def check(framework: str, summary: dict[str, Any], expected: dict[str, Any], *, epochs: int, resume: bool) -> None:
    facts, steps = summary["facts"], summary["steps"]["total"]
    assert [row["hook_failures"] for row in summary["ranks"]] == [0] * len(summary["ranks"])
    assert not any("Stepscope" in name or "stepscope" in name for name in expected["callbacks"])
    last = summary["metrics"]["loss"]
    logged = expected["logged"]
    assert logged_steps(facts, last["step"], last["step"]) == (logged[-1][0],) * 2
    if len(summary["ranks"]) == 1:  # the summary has the mean over the ranks, a logger what rank 0 has
        assert last["last"] == pytest.approx(logged[-1][1], rel=1e-5)
    behind = {"hf": 1, "lightning": 0, "accelerate": 1}[framework] + (steps if resume else 0)
    assert logged_steps(facts, 0, steps - 1) == (behind, behind + steps - 1)
    if framework == "accelerate":
        return
    assert epochs_of(facts, 0, steps - 1) == (epochs - 2, epochs - 1)
    evaluated = [(row["name"], row["count"]) for row in facts["evaluations"]]
    if framework == "lightning":
        assert evaluated == [row for row in LIGHTNING if not (resume and row[0] == "sanity_check")]
    else:
        assert [name for name, _ in evaluated] == HF
        first, last_step = behind - 1, behind - 1 + steps
        often = last_step // 5 - first // 5 + (last_step % 5 > 0)  # every five steps, and after the last
        assert {count for name, count in evaluated if name != "test"} == {often}
    assert all(0 < row["ms"] < 60_000 and row["after"] <= steps for row in facts["evaluations"])


def test_torchtitan_by_what_it_logs(tmp_path: Path, run_stepscope: Run) -> None:
    """Its requirements contradict those of the other frameworks: ``pip install torchtitan`` elsewhere."""
    skip_without("torchtitan")
    done = run_stepscope(
        "run", "--quiet", sys.executable, str(JOBS / "progress_torchtitan.py"), "103", "121", timeout_s=LIMIT_S
    )
    assert done.code == 0, done.stderr[-3000:]
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert [row["hook_failures"] for row in summary["ranks"]] == [0]
    assert summary["facts"]["progress"] == {"by": "torchtitan", "numbers": [[0, 103]], "epochs": []}
    log = summary["training_log"]
    assert (log["framework"], log["iteration"], log["step"]) == ("torchtitan", 120, 18)
    assert log["figures"]["tokens_per_second"]["last"] > 0


def test_one_setting_leaves_everything_out(tmp_path: Path, run_stepscope: Run) -> None:
    skip_without("transformers")
    words = command("hf", tmp_path / "out", 1, 1, resume=False)
    off = {**ENVIRONMENT, "STEPSCOPE_FRAMEWORKS": "0"}
    done = run_stepscope("run", "--quiet", sys.executable, *words, env=off, timeout_s=LIMIT_S)
    result_of(done)
    facts = json.loads((done.run_dir / "summary.json").read_text())["facts"]
    assert facts["global_step"] == {"by": "transformers", "first": 0}
    assert not {"progress", "evaluations"} & set(facts)
