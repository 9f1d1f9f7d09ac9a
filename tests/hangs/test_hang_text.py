"""A hang as people read it, at 80 and at 120 columns."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from typing import Any

import pytest
from hang_jobs import LOOP, Job, stack

from stepscope.flight.wording import collective_text, listed, one_line, place_text
from stepscope.hangs.report import PAST, hang_lines, hang_state_by_rank, past_if_over, past_text, past_title
from stepscope.records.collectives import ProcessGroup
from stepscope.records.hang import Frame, HangPart, WaitingIn


def shown(text: str) -> list[str]:
    return textwrap.dedent(text).strip("\n").splitlines()


@pytest.mark.soak  # near: tests/hangs/test_judge.py has a thousand, too
def test_one_that_sleeps_among_a_thousand() -> None:
    assert hang_lines(Job(ranks=1000, sequence=7).alone(1).hang(), 80) == shown(
        """
        Rank 1 never called all_reduce number 7 of default_pg: it sleeps at train.py:41
        (time.sleep(999)); ranks 0 and 2–999 wait for it.
          culprit   rank 1 has not called all_reduce number 7 of default_pg; it sleeps
                    at train.py:41 (time.sleep(999))
                    /job/train.py, line 41, in next_batch
          waiting   ranks 0 and 2–999 in all_reduce number 7 of default_pg, [512] Float
          evidence  Rank 1 has been silent for 11 s and uses 0% of a core.
          since     no progress for 12 s in step 7 when this was written; how it ended
                    is not known; a step usually takes 250 ms
          stacks    rank 1
                      job/train.py:41 in next_batch
                      job/train.py:80 in <module>
                    ranks 0 and 2–999
                      torch/distributed/distributed_c10d.py:3252 in all_reduce
                      job/train.py:59 in step
                      job/train.py:80 in <module>
                    all threads of all ranks: hangs/node0-1.json
        """
    )


def test_a_deadlock_at_120_columns() -> None:
    job = Job(ranks=2, lines={})
    hang = job.at(0, collective=job.waits("recv", peer=1)).at(1, collective=job.waits("recv", peer=0)).hang()
    assert hang_lines(hang, 120)[:7] == shown(
        """
        Ranks 0 and 1 wait for each other: rank 0 in recv from rank 1 and rank 1 in recv from rank 0.
          culprit   rank 0 waits in recv from rank 1 at train.py:59
                    /job/train.py, line 59, in step
                    rank 1 waits in recv from rank 0 at train.py:59
                    /job/train.py, line 59, in step
          cycle     rank 0 waits for rank 1 (recv)
                    rank 1 waits for rank 0 (recv)
        """
    )


def test_nobody_to_blame_is_said() -> None:
    lines = hang_lines(Job(ranks=2).hang(), 100, title=False)
    assert lines[0] == "  culprit   cannot be determined from what is known here"
    assert lines[1] == "  waiting   ranks 0 and 1 in all_reduce of default_pg"


def test_how_it_ended_and_what_was_done() -> None:
    hang = replace(Job(ranks=2).alone(1).hang(), over="aborted", over_wall_ns=130 * 10**9, action="asked the launcher")
    lines = hang_lines(hang, 120)
    assert "  since     it hung for 30 s in step 7, until the job was aborted; a step usually takes 250 ms" in lines
    assert "  done      asked the launcher" in lines
    assert any("in step 7, then continued" in line for line in hang_lines(replace(hang, over="recovered"), 100))


def test_many_kinds_of_stacks_are_cut() -> None:
    job = Job(ranks=12)
    for rank in range(12):
        job.alone(rank, stack(*[("train.py", rank + 1, f"f{depth}") for depth in range(9)], LOOP))
    lines = hang_lines(job.hang(), 80)
    assert lines[-1] == "            6 more kinds of stacks and all threads: hangs/node0-1.json"
    assert lines.count("              … 4 more") == 6
    assert "            … and 8 more places" in lines
    assert max(map(len, lines)) <= 80


def test_long_things_are_cut_not_wrapped_into_the_margin() -> None:
    hang = Job(ranks=2).alone(1, stack(("a" * 200 + ".py", 3, "f" * 200), LOOP)).hang()
    assert max(map(len, hang_lines(replace(hang, cycle=tuple("x" * 90 for _ in range(20))), 60))) <= 60


def test_places() -> None:
    frame = Frame(file="/job/train.py", line=41, function="step")
    assert place_text(None, {}) == ""
    assert place_text(frame, {}) == "train.py:41"
    assert place_text(frame, {("/job/train.py", 41): "   x =  f(y)"}) == "train.py:41 (x = f(y))"
    assert place_text(frame, {("/job/train.py", 41): "x" * 99}) == f"train.py:41 ({'x' * 59}…)"
    assert place_text(replace(frame, line=0), {}) == "train.py, in step"


def test_collectives() -> None:
    assert collective_text(None) == "a collective"
    assert collective_text(WaitingIn(group="")) == "a collective"
    assert collective_text(WaitingIn(group="3", op="barrier")) == "barrier of group 3"
    assert collective_text(WaitingIn(group="1", description="undefined", op="barrier")) == "barrier of group 1"
    assert collective_text(WaitingIn(group="3", description="tp", op="barrier", sequence=2)) == "barrier number 2 of tp"
    assert collective_text(WaitingIn(group="0", op="send", peer=4)) == "send to rank 4"
    assert collective_text(WaitingIn(group="0", op="recv", peer=4)) == "recv from rank 4"


def test_lists() -> None:
    assert [listed(parts) for parts in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
    assert one_line("a\n b\tc", 4) == "a b…"


def test_culprits_are_hung_though_they_wait_in_a_collective_themselves() -> None:
    job = Job()
    job.at(1, collective=job.waits("recv", peer=2)).at(2, collective=job.waits("recv", peer=1))
    job.at(3, collective=job.waits("recv", peer=1))
    hang = job.at(0, collective=job.waits("recv", peer=1)).hang()
    assert hang_state_by_rank([hang]) == {0: "waits in recv", 1: "hung", 2: "hung", 3: "waits in recv"}
    assert hang_state_by_rank([replace(hang, over="ended", over_wall_ns=1)]) == {}


def test_a_victim_waits_though_it_is_not_known_in_what() -> None:
    hang = Job().alone(1).hang()
    nowhere = tuple(replace(rank, waiting_in=None) for rank in hang.ranks)
    assert hang_state_by_rank([replace(hang, ranks=nowhere)]) == {0: "waits", 1: "hung", 2: "waits", 3: "waits"}
    assert hang_state_by_rank([replace(hang, ranks=nowhere, culprits=(), victims=())]) == dict.fromkeys(
        range(4), "hung"
    )


# -- A standstill that is over, in the past tense: the judge's verbs and nothing else ---------------------------------


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
