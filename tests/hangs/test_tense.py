"""A standstill that is over, in the past tense: the judge's verbs and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hang_jobs import Job, stack

from stepscope.hangs.report import PAST, past_if_over, past_text, past_title
from stepscope.records.collectives import ProcessGroup
from stepscope.records.hang import HangPart

OWN = ProcessGroup(slot=1, name="1", description="undefined", size=2, ranks=(0, 1))


@pytest.mark.parametrize(
    ("now", "then"),
    [
        (
            "Ranks 0 and 1 wait for each other: rank 0 in all_reduce number 41 of group 1 and rank 1 in all_reduce.",
            "Ranks 0 and 1 waited for each other: rank 0 in all_reduce number 41 of group 1 and rank 1 in all_reduce.",
        ),
        (
            "Rank 1 never called all_reduce of default_pg: it sleeps at train.py:41 (time.sleep(9)); rank 0 waits.",
            "Rank 1 never called all_reduce of default_pg: it slept at train.py:41 (time.sleep(9)); rank 0 waited.",
        ),
        (
            "The job hangs for an unknown reason: what ranks 1 and 2 do is unknown.",
            "The job hung for an unknown reason: what ranks 1 and 2 did was unknown.",
        ),
        (
            "Rank 1 answers requests that need no Python, and none that do: its GIL is held.",
            "Rank 1 answered requests that needed no Python, and none that did: its GIL was held.",
        ),
        ("is on host is, of which nothing was heard", "was on host is, of which nothing was heard"),
        (
            "Rank 1 has been silent for 11 s and uses 0%.",
            "Rank 1 had been silent for 11 s and used 0%.",
        ),
        ("reads or writes files", "read or wrote files"),
        # What is not the judge's: code, names, files.
        ("waits for a lock at wait.py:3, in wait", "waited for a lock at wait.py:3, in wait"),
        ("waits in wait of is at has.py:7 (is = wait(do))", "waited in wait of is at has.py:7 (is = wait(do))"),
        (
            "sleeps at a.py:41 (x() if wait else is_(do); has = y(z) if is); rank 0 waits for it in send",
            "slept at a.py:41 (x() if wait else is_(do); has = y(z) if is); rank 0 waited for it in send",
        ),
        ("at a.py:41 (y = wait() is None) has not called it", "at a.py:41 (y = wait() is None) had not called it"),
        ("sleeps at a.py:412 (wait(is, (do …); it waits", "slept at a.py:412 (wait(is, (do …); it waited"),
        ("sleeps at a.py:7 (wait(); it waits", "slept at a.py:7 (wait(); it waited"),
        ("sleeps at a.py:7 (wait(is, (do", "slept at a.py:7 (wait(is, (do"),
        (
            "is at a.py:7 (wait(a)); is at b.py:8 (is_()); it does",
            "was at a.py:7 (wait(a)); was at b.py:8 (is_()); it did",
        ),
    ],
)
def test_only_the_verbs_of_the_judge(now: str, then: str) -> None:
    assert past_text(now) == then
    assert past_text(then) == then  # what is past twice is past once


def test_of_a_death_only_who_waited() -> None:
    """Its title has what an exception said."""
    title = "Rank 1 raised ValueError: it waits; has is do in step 5; ranks 0 and 2–9 wait for it in all_reduce of dp."
    assert past_title("rank_crashed", title) == title.replace("9 wait for", "9 waited for")
    crashed = replace(Job().at(1, alive=False, ended="raised ValueError: it is so").hang(), over="ended")
    past = past_if_over(crashed)
    assert past.title.endswith("; ranks 0, 2 and 3 waited for it in all_reduce of default_pg.")
    assert (past.culprits, past.evidence) == (crashed.culprits, crashed.evidence)


def test_while_it_lasts_nothing_changes() -> None:
    record = Job().alone(1).hang()
    assert past_if_over(record) is record
    assert past_if_over(record, over=True).title == (
        "Rank 1 never called all_reduce of default_pg: it slept at train.py:41 (time.sleep(999)); "
        "ranks 0, 2 and 3 waited for it."
    )


def test_all_of_a_record() -> None:
    job = Job(ranks=2)
    record = job.at(0, collective=job.waits(group=OWN)).hang()
    part = HangPart(host="b", number=1, kind="hang_device", title="The device of rank 1 stands still.")
    flight = {"kind": "hang_deadlock", "title": "Ranks 0 and 1 wait for each other in a circle.", "world": 2}
    past = past_if_over(replace(record, over="ended", parts=(part,), flight=flight))
    assert past.title == (
        "Ranks 0 and 1 waited for each other: rank 0 in all_reduce of group 1 and rank 1 in all_reduce of default_pg."
    )
    assert past.cycle == (
        "rank 0 waited for rank 1 in group 1 (all_reduce)",
        "rank 1 waited for rank 0 in default_pg (all_reduce)",
    )
    assert [culprit.reason for culprit in past.culprits] == [
        "waited in all_reduce of group 1 at train.py:59 (dist.all_reduce(loss))",
        "waited in all_reduce of default_pg at train.py:59 (dist.all_reduce(loss))",
    ]
    assert past.parts[0].title == "The device of rank 1 stood still."
    assert past.flight == {**flight, "title": "Ranks 0 and 1 waited for each other in a circle."}


IN_LOADER = stack(("torch/utils/data/dataloader.py", 1275, "_try_get_data"), ("train.py", 30, "epoch"))


@pytest.mark.parametrize(
    "fields",
    [
        {"process_state": "T"},
        {"process_state": "t"},
        {"gil_held": True},
        {"process_state": "D"},
        {"threads": IN_LOADER, "workers": ()},
        {"threads": (), "silent_s": 900.0},
        {"threads": stack(("socket.py", 7, "recv"))},
        {"phase": "checkpoint", "silent_s": 900.0},
        {"phase": "eval", "silent_s": 900.0},
        {"alive": False},
    ],
)
def test_no_verb_of_the_judge_is_left(fields: dict[str, Any]) -> None:
    job = Job(ranks=2, silent_s=900.0, lines={}).alone(1).at(1, **fields)
    past = past_if_over(replace(job.hang(), over="ended"))
    sentences = [past.title, *past.cycle, *(culprit.reason for culprit in past.culprits), *past.evidence]
    present = re.compile(rf"\b({'|'.join(PAST)})\b")
    if past.kind == "rank_crashed":
        assert sentences[0] == "Rank 1 is gone in step 7; rank 0 waited for it in all_reduce of default_pg."
    else:
        assert [line for line in sentences if present.search(line)] == []
