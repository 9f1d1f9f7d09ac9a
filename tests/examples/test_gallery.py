"""The gallery of faults: each script gets the verdict that docs/gallery.md shows, and its fixed variant does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, kw_only=True)
class Fault:
    script: str
    """Without ``.py``."""
    kind: str
    ranks: int = 1
    """How many."""
    blamed: tuple[int, ...] = ()
    phase: str | None = None
    text: str = ""
    """Part of the finding: the line of code, the step or the setting that it names."""
    quick: bool = False
    """In ``make test``."""
    is_timed: bool = False
    """A busy machine may hide it."""


FAULTS = (
    Fault(
        script="slow_rank",
        is_timed=True,
        kind="compute_straggler",
        ranks=2,
        blamed=(0,),
        phase="forward",
        text="check_features",
    ),
    Fault(script="slow_loader", kind="input_bound", phase="input", text="Readings.__getitem__"),
    Fault(
        script="slow_loader_one_rank",
        kind="input_straggler",
        ranks=2,
        blamed=(1,),
        phase="input",
        text="Documents.read",
        quick=True,
    ),
    Fault(script="hang", kind="hang_mismatch", ranks=2, blamed=(1,), phase="comm", text="called barrier at hang.py"),
    Fault(script="leak", kind="memory_creep", text="Host memory grows by "),
    Fault(script="nan", kind="loss_nan", text="The loss is NaN from", quick=True),
    Fault(script="desync", kind="replica_desync", ranks=2, blamed=(0, 1), text="all 2 layers"),
    Fault(
        script="low_overlap",
        is_timed=True,
        kind="low_overlap",
        ranks=2,
        phase="comm",
        text="DistributedDataParallel(bucket_cap_mb=",
    ),
    Fault(
        script="slow_checkpoint",
        is_timed=True,
        kind="between_steps",
        phase="checkpoint",
        text="save, slow_checkpoint.py",
    ),
    Fault(script="wrong_batch_size", kind="uneven_batches", ranks=3, blamed=(0,), text="batches of 384 samples"),
    Fault(
        script="four_ranks",
        is_timed=True,
        kind="compute_straggler",
        ranks=4,
        blamed=(2,),
        phase="forward",
        text="Rank 2 is",
    ),
    Fault(script="finetune_text", kind="memory_creep", text="Host memory grows by"),
)


PASSING_SHARE = 0.05
"""What ranks on a small machine may differ by for a while, and is only information."""


@pytest.fixture
def record(run_stepscope: Callable[..., Any], root: Path, forked_ranks: Path) -> Callable[..., dict[str, Any]]:
    def run(fault: Fault, *words: str, code: int = 0) -> dict[str, Any]:
        launcher = (forked_ranks, str(fault.ranks)) if fault.ranks > 1 else ()
        script = root / "examples" / "gallery" / f"{fault.script}.py"
        options = ("--hang-after", "5", "--on-hang", "abort") if fault.script == "hang" else ()
        done = run_stepscope(
            "run", "--quiet", *options, *launcher, script, *words, env={"OMP_NUM_THREADS": "1"}, timeout_s=300.0
        )
        assert done.code == code, done.stderr[-3000:]
        summary: dict[str, Any] = json.loads((done.run_dir / "summary.json").read_text())
        return summary

    return run


def findings(summary: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [finding for finding in summary["findings"] if finding["kind"] == kind]


def cases(*, fixed: bool) -> list[Any]:
    marks = {
        fault.script: [pytest.mark.soak] * (fixed or not fault.quick) + [pytest.mark.alone] * fault.is_timed
        for fault in FAULTS
    }
    return [pytest.param(fault, id=fault.script, marks=marks[fault.script]) for fault in FAULTS]


@pytest.mark.ranks
@pytest.mark.parametrize("fault", cases(fixed=False))
def test_the_fault_is_found(record: Callable[..., dict[str, Any]], fault: Fault) -> None:
    summary = record(fault, code=1 if fault.script == "hang" else 0)
    found, *_ = findings(summary, fault.kind)  # on two cores a passing difference may follow, as information
    assert (tuple(found["ranks"]), found["phase"]) == (fault.blamed, fault.phase), found["title"]
    assert fault.text in f"{found['title']} {' '.join(found['advice'])}"


@pytest.mark.ranks
@pytest.mark.parametrize("fault", cases(fixed=True))
def test_the_fix_removes_it(record: Callable[..., dict[str, Any]], fault: Fault) -> None:
    left = findings(record(fault, "--fixed"), fault.kind)
    assert [each for each in left if each["severity"] != "info" or each["cost"].get("share", 0.0) > PASSING_SHARE] == []


def test_every_script_is_tested_and_shown(root: Path) -> None:
    scripts = {path.stem for path in (root / "examples" / "gallery").glob("*.py")}
    assert scripts == {fault.script for fault in FAULTS}
    page = (root / "docs" / "gallery.md").read_text()
    assert {name for name in scripts if f"examples/gallery/{name}.py" not in page} == set()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.script)
def test_scripts_know_nothing_of_us(root: Path, fault: Fault) -> None:
    assert "import stepscope" not in (root / "examples" / "gallery" / f"{fault.script}.py").read_text()
