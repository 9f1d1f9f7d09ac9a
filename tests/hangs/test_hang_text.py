"""A hang as people read it, at 80 and at 120 columns."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
from hang_jobs import LOOP, Job, stack

from stepscope.flight.wording import collective_text, listed, one_line, place_text
from stepscope.hangs.report import hang_lines, hang_state_by_rank
from stepscope.records.hang import Frame, WaitingIn


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
