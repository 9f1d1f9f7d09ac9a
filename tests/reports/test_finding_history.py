"""The history of findings in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import Cluster

from stepscope.records.finding_history import FindingEpisode
from stepscope.reports import render_text, summarize
from stepscope.reports.finding_history import history_rows


def change(what: Any, step: int, *, number: int = 1, severity: str = "critical", why: str = "") -> FindingEpisode:
    title = "Rank 1 is slow."
    finding = {"kind": "compute_straggler", "severity": severity, "title": title, "ranks": [1], "phase": "forward"}
    return FindingEpisode(
        number=number,
        change=what,
        finding=finding,
        attempt=0,
        first_step=40,
        first_wall_ns=10_000_000_000,
        step=step,
        wall_ns=step * 1_000_000_000,
        why=why,
    )


@pytest.mark.parametrize(
    ("changes", "over", "text"),
    [
        ([change("opened", 40)], False, "Since step 40: critical."),
        (
            [change("opened", 40, severity="warning"), change("changed", 60)],
            False,
            "Since step 40: warning, then critical.",
        ),
        ([change("opened", 40), change("resolved", 130)], True, "Steps 40 to 130, 2 min: critical."),
        ([change("opened", 40)], True, "Steps 40 to 40, 30 s: critical. It ended because the run ended."),
        (
            [change("opened", 40), change("resolved", 100, severity="info", why="the job was restarted")],
            False,
            "Steps 40 to 100, 1 min 30 s: critical, then info. It ended because the job was restarted.",
        ),
    ],
)
def test_each_episode_says_from_when_to_when(changes: list[FindingEpisode], over: bool, text: str) -> None:
    (row,) = history_rows(changes, over=over)
    assert (row["text"], row["severity"], row["open"]) == (text, "critical", text.startswith("Since"))
    assert [own["step"] for own in row["changes"]] == [own.step for own in changes]


def test_the_summary_shows_what_was_over_before_the_end() -> None:
    run = replace(Cluster(ranks=2, steps=100).run(), history=(change("opened", 40), change("resolved", 60)))
    summary = summarize(run)
    assert [(row["number"], row["kind"], row["ranks"]) for row in summary["history"]] == [(1, "compute_straggler", [1])]
    text = render_text(summary, width=80)
    assert "Over before the end\n  · Rank 1 is slow. Steps 40 to 60, 50 s: critical.\n" in text


def test_what_lasted_to_the_end_is_not_shown_again() -> None:
    run = replace(Cluster(ranks=2, steps=100).run(), history=(change("opened", 40),))
    assert "Over before the end" not in render_text(summarize(run), width=80)
