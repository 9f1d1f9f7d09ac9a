"""Real jobs over gloo that hang or die: the kind, exactly the ranks that did it, their lines, and who waits.

The cases that are ``quick``; ``make hangs`` runs all of them and measures how long it takes until they are named.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hang_cases import FAULTS, FaultCase, line_of

from stepscope.hangs.report import past_if_over

pytestmark = [pytest.mark.faults, pytest.mark.ranks]

LONG = ("shape-2", "loader-2", "stop-2", "recv-4", "gil_lock-2", "other-2", "exception-2", "deadlock-4")
"""In ``make soak``: each takes twenty seconds and differs little from one that is always run."""

BY_TORCHRUN = ("shape-2", "deadlock-4")
"""As most are started.  The others are about their ranks alone, which are forked: torch is loaded once then."""


def _cases(*, dies: bool) -> list[Any]:
    chosen = [case for case in FAULTS if case.quick and case.dies is dies]
    return [pytest.param(case, id=case.id, marks=[pytest.mark.soak] if case.id in LONG else []) for case in chosen]


RunCase = Callable[..., Any]


def alone(text: str) -> str:
    """Without the line breaks of a narrow terminal."""
    return " ".join(text.split())


@pytest.mark.parametrize("case", _cases(dies=False))
def test_hangs(case: FaultCase, run_case: RunCase) -> None:
    ran = run_case(case, "--hang-after", "2", "--on-hang", "abort", torchrun=case.id in BY_TORCHRUN)
    reported = ran.reported
    assert reported.kind in case.kinds, reported.title
    assert (reported.culprits, reported.hangs, ran.code) == (case.culprits, 1, 1), reported.title
    assert reported.record.over == "aborted"
    if len(case.culprits) < case.ranks:
        assert reported.victims == case.victims
    if case.line:
        assert set(reported.at) == {line_of(case.fault)}
        assert line_of(case.fault) in alone(ran.stderr)
        assert line_of(case.fault) in alone((ran.run_dir / "summary.txt").read_text())
    if "deadlock" in reported.kind:
        assert len(reported.record.cycle) == case.ranks
    # The same everywhere: terminal, event, findings while it ran, summary.
    assert reported.title in alone(ran.stderr)
    (event,) = ran.events("hang")
    assert (event["kind"], tuple(event["culprits"]), event["title"]) == (
        reported.kind,
        reported.culprits,
        reported.title,
    )
    for findings in (json.loads((ran.run_dir / "findings.json").read_text())["findings"], ran.summary["findings"]):
        assert (findings[0]["kind"], tuple(findings[0]["ranks"])) == (reported.kind, reported.culprits)
        assert findings[0]["severity"] == "critical"
    assert ran.summary["verdict"]["title"] == past_if_over(reported.record).title  # which is over, and told in the past
    # That we ended its ranks is no finding.
    assert [finding for finding in ran.summary["findings"] if finding["kind"] == "rank_crashed"] == []


@pytest.mark.parametrize("case", _cases(dies=True))
def test_dies(case: FaultCase, run_case: RunCase) -> None:
    ran = run_case(case, "--hang-after", "2", "--on-hang", "abort")
    assert ran.code == 1
    assert ran.reported.kind in case.kinds, ran.reported.title
    assert ran.reported.culprits == case.culprits, ran.reported.title
    assert ran.summary["verdict"]["title"] == ran.reported.title
    text = alone((ran.run_dir / "summary.txt").read_text())
    assert text.startswith(f"✖ {ran.reported.title}")
    if case.line:
        file, _, number = line_of(case.fault).partition(":")
        assert f'{file}", line {number}, in' in text
