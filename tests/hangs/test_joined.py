"""Hosts that each see their own ranks stand still, judged as one; and what is known of those that say nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hang_jobs import LOOP, Job, stack

from stepscope.hangs.evidence import EvidenceFile
from stepscope.hangs.judge import judge
from stepscope.hangs.multi_host import Elsewhere, GoneRank, SeenHang, SilentHost, join_hangs
from stepscope.hangs.report import finding_of, hang_lines
from stepscope.hangs.thresholds import LOST_HOST_S
from stepscope.records.hang import HangRecord

S = 10**9
LOADING = stack(("train.py", 88, "load"), LOOP)


def seen(job: Job, host: str, ranks: range, *, at_s: float = 100.0, number: int = 1, **more: Any) -> SeenHang:
    """What the watchdog of this host makes of its part of the job, having stood still since then."""
    whole = job.evidence()
    own = replace(whole, host=host, ranks=tuple(rank for rank in whole.ranks if rank.rank in ranks))
    stopped_ns = round(at_s * S)
    answer = judge(own, number=number, declared_wall_ns=stopped_ns + 12 * S, stopped_wall_ns=stopped_ns)
    record = answer if isinstance(answer, HangRecord) else None
    excuse = "" if isinstance(answer, HangRecord) else answer.reason
    ended = {name: more.pop(name) for name in ("over", "over_wall_ns", "action") if name in more}
    file = EvidenceFile(
        number=number,
        stopped_wall_ns=stopped_ns,
        gathered_wall_ns=stopped_ns + 12 * S,
        evidence=own,
        excuse=excuse,
        over_wall_ns=None if record else ended.get("over_wall_ns"),
    )
    return SeenHang(record=replace(record, **ended) if record else None, file=file, **more)


def eight() -> Job:
    return Job(ranks=8, sequence=12).alone(5, LOADING)


def test_the_culprit_is_named_wherever_it_is() -> None:
    here, there = seen(eight(), "a", range(4)), seen(eight(), "b", range(4, 8), at_s=100.4)
    assert here.record is not None and here.record.undecidable
    (hang,) = join_hangs([here, there])
    assert (hang.kind, [culprit.rank for culprit in hang.culprits]) == ("hang_missing_collective", [5])
    assert hang.victims == (0, 1, 2, 3, 4, 6, 7)
    assert hang.title == (
        "Rank 5 on b never called all_reduce number 12 of default_pg: it is blocked at train.py:88; "
        "ranks 0–4, 6 and 7 wait for it."
    )
    assert (hang.host, hang.number, hang.hosts) == ("b", 1, ("a", "b"))
    assert [(part.host, part.kind) for part in hang.parts] == [("a", "rank_lost"), ("b", "hang_missing_collective")]
    assert (hang.stopped_wall_ns, hang.declared_wall_ns) == (round(100.4 * S), round(112.4 * S))
    assert {rank.rank: rank.host for rank in hang.ranks} == {rank: "ab"[rank // 4] for rank in range(8)}
    assert HangRecord.from_dict(hang.to_dict()) == hang
    assert finding_of(hang).evidence["hosts"] == ["a", "b"]
    text = "\n".join(hang_lines(hang, 100))
    assert "culprit   rank 5 on b has not called all_reduce number 12 of default_pg" in text
    assert "all threads of all ranks: hangs/a-1.json, hangs/b-1.json" in text


def test_one_host_alone_says_what_it_said() -> None:
    here = seen(eight(), "a", range(4))
    assert join_hangs([here]) == [here.record]
    assert join_hangs([replace(here, file=None)]) == [here.record]
    assert join_hangs([]) == []


def test_records_without_evidence_stay() -> None:
    here, there = seen(eight(), "a", range(4)), seen(eight(), "b", range(4, 8))
    assert join_hangs([here, replace(there, file=None)]) == [here.record, there.record]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"at_s": 300.0}, id="later, when the first was over"),
        pytest.param({"attempt": 1}, id="of another attempt"),
    ],
)
def test_two_standstills_are_not_joined(other: dict[str, Any]) -> None:
    here = seen(eight(), "a", range(4), over="recovered", over_wall_ns=200 * S)
    there = seen(eight(), "b", range(4, 8), **other)
    assert join_hangs([here, there]) == [here.record, there.record]


def test_worlds_of_different_sizes_are_not_joined() -> None:
    here, there = seen(eight(), "a", range(4)), seen(Job(ranks=2).alone(1), "b", range(2))
    assert join_hangs([here, there]) == [here.record, there.record]


def test_each_of_several_standstills_has_its_own_hosts() -> None:
    first = [seen(eight(), host, ranks, over="recovered", over_wall_ns=150 * S) for host, ranks in HALVES]
    second = [seen(eight(), host, ranks, at_s=200.0, number=2) for host, ranks in HALVES]
    hangs = join_hangs([*second, *first])
    assert [(hang.over, [(part.host, part.number) for part in hang.parts]) for hang in hangs] == [
        ("recovered", [("a", 1), ("b", 1)]),
        (None, [("a", 2), ("b", 2)]),
    ]


HALVES = (("a", range(4)), ("b", range(4, 8)))


def test_hosts_of_the_same_name_are_two() -> None:
    parts = [seen(eight(), "node", ranks, spool=spool) for spool, (_, ranks) in zip("xy", HALVES, strict=True)]
    (hang,) = join_hangs(parts)
    assert [culprit.rank for culprit in hang.culprits] == [5]


def test_who_is_excused_elsewhere_excuses_all() -> None:
    """Rank 5 compiles, so that its own host sees no hang; the others only see that they wait."""
    compiling = stack(("torch/_inductor/compile_fx.py", 1, "compile_fx"), LOOP)
    job = Job(ranks=8).alone(5, compiling, cpu_share=1.0, process_state="R")
    here, there = seen(job, "a", range(4)), seen(job, "b", range(4, 8))
    assert there.record is None and there.file is not None and there.file.excuse.startswith("Rank 5 compiles")
    (hang,) = join_hangs([here, there])
    assert here.record is not None
    excused = "With the ranks of b it is not a hang: Rank 5 compiles at train.py:80."
    assert hang == replace(here.record, evidence=(excused,))
    old = replace(there, file=replace(there.file, gathered_wall_ns=-(10**12)))
    assert join_hangs([here, old]) == [here.record]
    went_on = replace(there, file=replace(there.file, stopped_wall_ns=0, over_wall_ns=90 * S))
    assert join_hangs([here, went_on]) == [here.record]


def test_how_it_ended_is_what_the_worst_of_them_say() -> None:
    here = seen(eight(), "a", range(4), over="ended", over_wall_ns=150 * S, action="asked the launcher to end the job")
    there = seen(eight(), "b", range(4, 8), over="aborted", over_wall_ns=149 * S)
    (hang,) = join_hangs([here, there])
    assert (hang.over, hang.over_wall_ns) == ("aborted", 150 * S)
    assert hang.action == "asked the launcher to end the job"


def gone(rank: int, ended: str = "", **more: Any) -> GoneRank:
    fields = {"host": "b", "pid": 1000 + rank, "attempt": 0, "ended_wall_ns": 99 * S, "step": 7, **more}
    return GoneRank(rank=rank, ended=ended, **fields)


def test_a_host_whose_ranks_are_all_gone_has_no_watchdog_that_would_tell() -> None:
    here = seen(Job(ranks=8), "a", range(4))
    endings = dict.fromkeys(range(4, 8), "raised E: Connection closed") | {6: "raised ValueError: bad"}
    dead = [gone(rank, ended) for rank, ended in endings.items()]
    (hang,) = join_hangs([here], Elsewhere(gone=dead))
    assert (hang.kind, [culprit.rank for culprit in hang.culprits]) == ("rank_crashed", [6])
    assert hang.title.startswith("Rank 6 on b raised ValueError: bad in step 7; ranks 0–3 wait for it")
    of_another = [replace(rank_error, attempt=1) for rank_error in dead]
    after = [replace(rank_error, ended_wall_ns=500 * S) for rank_error in dead]
    assert join_hangs([here], Elsewhere(gone=of_another)) == join_hangs([here], Elsewhere(gone=after)) == [here.record]


def silent(heard_s: float, host: str = "b", ranks: range = range(4, 8), attempt: int = 0) -> SilentHost:
    return SilentHost(host=host, ranks=tuple(ranks), attempt=attempt, heard_wall_ns=round(heard_s * S))


def test_a_host_that_was_lost_is_to_blame() -> None:
    here = seen(Job(ranks=8, sequence=12), "a", range(4))
    (hang,) = join_hangs([here], Elsewhere(silent=[silent(98.0)]))
    assert (hang.kind, hang.undecidable) == ("rank_lost", False)
    assert hang.title == (
        "Host b (ranks 4–7) has been silent for more than 14 s; ranks 0–3 wait for them in all_reduce number 12 "
        "of default_pg."
    )
    assert [culprit.rank for culprit in hang.culprits] == [4, 5, 6, 7]
    assert (hang.host, hang.hosts) == ("a", ("a", "b"))
    assert finding_of(hang).advice == ("Check that host and its connection: power, kernel log, network.",)
    assert HangRecord.from_dict(hang.to_dict()) == hang


def test_a_host_that_is_heard_of_or_not_waited_for_is_not_to_blame() -> None:
    here = seen(Job(ranks=8), "a", range(4))
    for other in (silent(112.1 - LOST_HOST_S), silent(98.0, attempt=1), silent(98.0, ranks=range(20, 24))):
        (hang,) = join_hangs([here], Elsewhere(silent=[other]))
        assert (hang.kind, hang.undecidable, hang.culprits) == ("rank_lost", True, ())
    sleeping = seen(Job(ranks=8).alone(1), "a", range(4))
    (hang,) = join_hangs([sleeping], Elsewhere(silent=[silent(98.0)]))
    assert [culprit.rank for culprit in hang.culprits] == [1]


def test_several_hosts_that_were_lost() -> None:
    here = seen(Job(ranks=16), "a", range(4))
    lost = [silent(90.0 + at, host, range(4 + 2 * at, 6 + 2 * at)) for at, host in enumerate("bcdef")]
    (hang,) = join_hangs([here], Elsewhere(silent=lost))
    who = "Hosts b, c, d and 2 more have been silent for more than 18 s"
    assert hang.title.startswith(f"{who}; ranks 0–3 wait for them")
    assert len(hang.culprits) == 10


def test_of_very_many_hosts_those_that_know_something_are_heard() -> None:
    job = Job(ranks=24).alone(23)
    (hang,) = join_hangs((seen(job, f"h{rank:03d}", range(rank, rank + 1)) for rank in range(24)), most_hosts=8)
    assert [culprit.rank for culprit in hang.culprits] == [23]
    assert (hang.host, len(hang.parts), len(hang.ranks)) == ("h023", 24, 8)
