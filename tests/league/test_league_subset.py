"""A small league in every test run: some real cases, and the made-up ones with a few seeds.

``SUBSET`` and ``SYNTHETIC`` hold what the rules get right; ``make league`` runs all of it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from league.__main__ import synthetic
from league.cases import CASES
from league.runner import run_stepscope
from league.score import judge
from summary_consistency import check_summaries

SUBSET = (
    "place/1/between-always",
    "healthy/1/tiny",
)
LONG = (
    "place/2/comm-always",
    "memory/1/host-leak",
    "time/1/input-once-40",
    "uneven/2/backward-always",
    "healthy/2/padded-2",
    "healthy/1/quickstart",
)
SYNTHETIC = (
    "healthy/*",
    "place/*",
    "time/1/*",
    "uneven/2/*-always",
    "uneven/2/*-once",
    "uneven/2/*-drift",
    "uneven/2/*-rotating",
    "effect10/4/*",
)
SEEDS = (1, pytest.param(3, marks=pytest.mark.soak))
"""Of each cell: the first alone, or three."""
BUSY = ("cpu_saturated", "jitter", "stall", "change_point", "throughput_drop")
"""True of a machine that does something else meanwhile, although nobody put it there."""
CASES_BY_ID = {case.id: case for case in CASES}


@pytest.mark.soak  # near: the synthetic cells below, and the examples, recorded
@pytest.mark.alone
@pytest.mark.ranks
@pytest.mark.parametrize("name", [*SUBSET, *LONG])
def test_real_case(name: str, tmp_path: Path) -> None:
    case = CASES_BY_ID[name]
    outcome = run_stepscope(case, tmp_path)
    assert outcome.problem == ""
    judged = judge(case.truth, outcome.claims, case.ranks)
    judged = replace(judged, false=tuple(title for title in judged.false if not title.startswith(BUSY)))
    assert judged.perfect, (judged, outcome.claims)
    # What the league asks is what the user was told.
    assert check_summaries(tmp_path) == []
    saved = json.loads(next(tmp_path.rglob("summary.json")).read_text())
    assert [finding["kind"] for finding in saved["findings"]] == [claim.kinds[0] for claim in outcome.claims]


@pytest.mark.few(4)
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("only", SYNTHETIC)
def test_synthetic_cells(only: str, seeds: int) -> None:
    scored = synthetic(only, seeds)
    assert scored
    assert [(each.id, each.said) for each in scored if not each.judged.perfect] == []
