"""Hangs on NCCL as an H200 had them, judged again from what the watchdog gathered there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from h200_hangs import recorded_evidence, write_nccl_dumps

from stepscope.hangs.judge import NotAHang, judge
from stepscope.records.hang import HangRecord
from stepscope.store.live.failures import read_flights

MISSING = "hang_missing_collective"


def judged(case: str) -> HangRecord | NotAHang:
    known = recorded_evidence(case)
    instants = {"declared_wall_ns": known.gathered_wall_ns, "stopped_wall_ns": known.stopped_wall_ns}
    return judge(known.evidence, number=1, **instants)


def hang(case: str) -> HangRecord:
    found = judged(case)
    assert isinstance(found, HangRecord), found
    return found


@pytest.mark.parametrize(
    ("case", "kind", "rank", "line", "victims", "title"),
    [
        (
            "sleep",
            MISSING,
            1,
            157,
            (0,),
            (
                "Rank 1 never called all_reduce number 82 of default_pg: it sleeps at hang_job.py:157 "
                "(time.sleep(FOREVER_S)); rank 0 waits for it."
            ),
        ),
        (
            "sleep_4",
            MISSING,
            2,
            157,
            (0, 1, 3),
            (
                "Rank 2 never called all_reduce number 82 of default_pg: it sleeps at hang_job.py:157 "
                "(time.sleep(FOREVER_S)); ranks 0, 1 and 3 wait for it."
            ),
        ),
        (
            "fsdp_sleep",
            MISSING,
            1,
            157,
            (0,),
            (
                "Rank 1 never called all_reduce number 338 of default_pg: it sleeps at hang_job.py:157 "
                "(time.sleep(FOREVER_S)); rank 0 waits for it."
            ),
        ),
        (
            "lock",
            MISSING,
            1,
            163,
            (0,),
            (
                "Rank 1 never called all_reduce number 82 of default_pg: it is blocked at hang_job.py:163 "
                "(lock.acquire()); rank 0 waits for it."
            ),
        ),
        (
            "recv",
            MISSING,
            1,
            146,
            (0,),
            (
                "Rank 1 never called all_reduce number 82 of default_pg: it waits in irecv at hang_job.py:146 "
                "(dist.recv(torch.empty(8, device=self.device), src=(self.ran…)."
            ),
        ),
        (
            "skipped",
            MISSING,
            1,
            116,
            (0,),
            (
                "Rank 1 at hang_job.py:116 (dist.barrier()) left out the call that rank 0 made (all_reduce [1048576] "
                "Float), and called all_reduce [262656] Float (number 82 of default_pg); rank 0 waits for it."
            ),
        ),
        (
            "fsdp_skip",
            MISSING,
            1,
            116,
            (0,),
            (
                "Rank 1 at hang_job.py:116 (dist.barrier()) left out the call that rank 0 made (all_reduce [1048576] "
                "Float), and called all_gather [131328] Float (number 338 of default_pg); rank 0 waits for it."
            ),
        ),
        (
            "sigstop",
            "hang_host",
            1,
            None,
            (0,),
            "Rank 1 is stopped (SIGSTOP); rank 0 waits for it in all_reduce number 65 of default_pg.",
        ),
        (
            "endless_kernel",
            "hang_device",
            1,
            97,
            (0,),
            (
                "Rank 1: its device has not started all_reduce number 82 of default_pg, which all ranks called, and "
                "does not finish what comes before; rank 0 waits for it."
            ),
        ),
        (
            "other_op",
            "hang_mismatch",
            1,
            None,
            (0,),
            (
                "Rank 1 called all_gather [1048576] Float where rank 0 called all_reduce [1048576] Float (number 82 of "
                "default_pg); rank 0 waits for it."
            ),
        ),
    ],
)
def test_hangs(case: str, kind: str, rank: int, line: int | None, victims: tuple[int, ...], title: str) -> None:
    found = hang(case)
    (culprit,) = found.culprits
    assert (found.kind, culprit.rank, found.victims, found.undecidable) == (kind, rank, victims, False)
    assert (culprit.at.line if culprit.at is not None else None) == line
    assert found.title == title


def test_a_call_that_differed_and_ended_stops_nccl_much_later() -> None:
    """The ranks agree at number 184, in which they stand; at 82 they did not. Nobody's device has stopped."""
    found = hang("other_op")
    assert found.evidence == (
        "According to the Flight Recorders of ranks 0 and 1.",
        (
            "Collective 82 still completed, because NCCL does not check that calls match. After it the ranks were out "
            "of step, until they hung in all_reduce number 184 of default_pg."
        ),
    )
    assert found.collective is not None
    assert (found.collective.op, found.collective.sequence) == ("all_reduce", 184)
    assert [there.waiting_in.sequence for there in found.ranks if there.waiting_in is not None] == [184, 185]


def test_without_the_calls_before_it_cannot_be_told_who_was_wrong() -> None:
    """Two ranks, and recorders that reach back to number 82 and no further: both are named."""
    known = recorded_evidence("other_op").evidence
    ranks = tuple(replace(rank, flight=_from(rank.flight, 82)) for rank in known.ranks)
    found = judge(replace(known, ranks=ranks), number=1, declared_wall_ns=2, stopped_wall_ns=1)
    assert isinstance(found, HangRecord)
    assert (found.kind, [culprit.rank for culprit in found.culprits], found.undecidable) == (
        "hang_mismatch",
        [0, 1],
        True,
    )
    assert found.title == (
        "Number 82 of default_pg is not the same call: rank 0 called all_reduce [1048576] Float and rank 1 called "
        "all_gather [1048576] Float."
    )


def _from(flight: bytes, first: int) -> bytes:
    dump = json.loads(flight)
    dump["entries"] = [row for row in dump["entries"] if row["collective_seq_id"] >= first]
    return json.dumps(dump).encode()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("long_kernel", "Rank 0 makes progress in its collectives."),
        (
            "slow_evaluation",
            (
                "Rank 0 waits for its device at hang_job.py:191 (net(torch.randn(BATCH, WIDTH, device=self.device))"
                ".sum().it…)."
            ),
        ),
        ("late_init", "Rank 0 prepares its first step."),
    ],
)
def test_no_hangs(case: str, reason: str) -> None:
    found = judged(case)
    assert isinstance(found, NotAHang), found
    assert (found.reason, found.check_again_s) == (reason, 10.0)


def test_what_nccls_watchdog_wrote_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    """Rank 0 was aborted after its timeout; its dump and that of rank 1, which slept, are all there is."""
    write_nccl_dumps("nccl_timeout", tmp_path / "flight")
    verdict, problems = read_flights(tmp_path, {}, since_ns=0)
    assert problems == []
    assert (verdict["kind"], verdict["culprits"], verdict["victims"]) == (MISSING, [1], [0])
    assert verdict["title"] == (
        "Rank 1 never called all_reduce number 82 of default_pg: it made no further call; rank 0 waits for it."
    )
    assert verdict["nccl_dumps"] == [0, 1]
    assert verdict["first_divergence"]["call_sites"][0]["at"]["line"] == 128
