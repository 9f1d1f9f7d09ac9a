"""Hangs in the summary: their rows, documented, and the section of its page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster
from hang_jobs import Job, worker

from stepscope.records.hang import HangRecord
from stepscope.records.series import RunData
from stepscope.reports import render_text, summarize


def hung(*hangs: HangRecord) -> RunData:
    meta = {"end": {"exit_code": 143, "status": "failed", "wall_ns": ANCHOR_WALL_NS + 90 * 10**9}}
    return replace(Cluster(ranks=4, steps=60, meta=meta).run(), hangs=hangs)


def sleeping(**fields: Any) -> HangRecord:
    times = {"stopped_wall_ns": ANCHOR_WALL_NS, "declared_wall_ns": ANCHOR_WALL_NS + 12 * 10**9}
    job = Job(ranks=4, step=60, sequence=7).alone(1, workers=(worker(),))
    return replace(job.hang(), **{**times, "over": "ended", "over_wall_ns": ANCHOR_WALL_NS + 80 * 10**9, **fields})


def test_the_page_of_a_run_that_hung(golden: Callable[[Path, str], None]) -> None:
    golden(Path(__file__).parent / "golden" / "hang.txt", render_text(summarize(hung(sleeping()))))


def test_a_rank_that_only_the_watchdog_saw_go() -> None:
    gone = replace(Job(ranks=4, step=60).alone(1, (), alive=False).hang(), over="ended", over_wall_ns=1)
    text = render_text(summarize(hung(gone)))
    assert text.startswith("✖ Rank 1 is gone in step 60; ranks 0, 2 and 3 waited for it in all_reduce of")


def test_rows_have_all_but_the_long_parts() -> None:
    row = summarize(hung(sleeping()))["hangs"][0]
    assert row["file"] == "hangs/node0-1.json"
    assert {"ranks", "flight", "schema"} & set(row) == set()
    assert json.loads(json.dumps(row, allow_nan=False)) == row


@pytest.mark.parametrize(
    ("over", "alive", "standing"),
    [
        (None, True, ["waits in all_reduce", "hung", "waits in all_reduce", "waits in all_reduce"]),
        ("ended", True, [None] * 4),
        (None, False, [None] * 4),
    ],
)
def test_ranks_that_stand_still_are_told_as_such(over: str | None, alive: bool, standing: list[str | None]) -> None:
    unfinished = dict.fromkeys(range(4), 60) if alive else {}
    run = replace(Cluster(ranks=4, steps=60, unfinished=unfinished).run(), hangs=(sleeping(over=over),))
    rows = summarize(run, alive=True)["ranks"]
    assert [row["standing"] for row in rows] == standing
    assert {row["state"] for row in rows} == {"running" if alive else "exited"}


def test_several_are_counted() -> None:
    many = [sleeping(number=number, over="recovered") for number in range(1, 6)]
    text = render_text(summarize(hung(*many)))
    assert "The job hung 5 times" in text
    assert "  … and 2 more in hangs/" in text


@pytest.mark.parametrize("width", (60, 80, 120))
def test_it_fits(width: int) -> None:
    lines = render_text(summarize(hung(sleeping())), width=width).splitlines()
    assert max(map(len, lines)) <= width


def names_in(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(name for inner in value.values() for name in names_in(inner))}
    return {name for inner in value for name in names_in(inner)} if isinstance(value, list) else set()


def test_every_key_is_in_the_docs(root: Path) -> None:
    documented = set(re.findall(r"`([a-z0-9_]+)`", (root / "docs/schema.md").read_text()))
    record = replace(sleeping(), flight={})
    assert names_in(record.to_dict()) - documented == set()
    findings = summarize(hung(record))["findings"][:1]
    assert names_in(findings) - documented == set()


def test_while_it_stands_the_time_is_that_of_now() -> None:
    hang = sleeping(over=None, over_wall_ns=None)
    cluster = Cluster(ranks=4, steps=60, unfinished=dict.fromkeys(range(4), 60))
    run = replace(cluster.run(), hangs=(hang,))
    summary = summarize(run, alive=True)
    now = render_text(summary, now_wall_ns=ANCHOR_WALL_NS + 62 * 10**9)
    assert "\nThe job is hung\n" in now
    assert "since     no progress for 1 min 2 s in step 60; a step usually takes 250 ms\n" in now
    assert " · 60 steps (0–59) in 1 min 3 s · hung\n" in now
    # Of one that nobody looks after any more, only what was seen is said.
    then = render_text(summary)
    assert "\nThe job hung\n" in then
    assert "since     no progress for 12 s in step 60 when this was written;" in then
