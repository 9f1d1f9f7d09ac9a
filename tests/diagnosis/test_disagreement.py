"""Ranks that died of a collective they did not agree on: the dumps name who, where nobody's words do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death
from fakes.traffic import Exchange, Traffic

from stepscope.diagnosis import build_window, diagnose
from stepscope.records.finding import Finding
from stepscope.records.series import RankError, RunData

GLOO = "[pair.cc:534] Connection closed by peer [127.0.0.1]:3312."
VERDICT: dict[str, Any] = {
    "healthy": False,
    "kind": "hang_mismatch",
    "title": "Rank 2 diverged from the others at collective 9 of default_pg: another size.",
    "culprits": [2],
    "victims": [0, 1],
    "undecidable": False,
    "waiting_in": {"group": "0", "description": "default_pg", "sequence": 9, "op": "all_reduce", "sizes": "[1024]"},
    "reasons": [
        {
            "rank": 2,
            "reason": "called all_reduce [2048] where the others called all_reduce [1024]",
            "at": {"file": "/job/train.py", "line": 41, "function": "train"},
        }
    ],
    "cycle": [],
    "evidence": ["There is no dump of rank 0."],
}


def raised(rank: int, type_name: str = "RuntimeError", message: str = GLOO, *, at_s: float = 1.0) -> RankError:
    wall_ns = ANCHOR_WALL_NS + int(at_s * 1e9)
    return RankError(rank=rank, pid=1000 + rank, type=type_name, message=message, wall_ns=wall_ns)


def a_run(*errors: RankError, verdict: dict[str, Any] = VERDICT, codes: dict[int, int] | None = None) -> RunData:
    deaths = tuple(Death(rank=rank, step=20, state="exception") for rank in {error.rank for error in errors} if rank)
    deaths += tuple(Death(rank=rank, step=20) for rank in codes or {})
    launcher = (replace(raised(0, "ChildFailedError", ""), rank=None, exit_codes=codes),) if codes else ()
    run = Cluster(ranks=3, steps=20, deaths=deaths, errors=(*errors, *launcher)).run()
    return replace(run, flight=verdict)


def found_in(run: RunData) -> list[Finding]:
    return [finding for finding in diagnose(run, build_window(run)) if finding.kind[:4] in ("hang", "rank")]


def test_the_one_that_differed_leads_and_the_deaths_follow() -> None:
    found, crash = found_in(a_run(raised(1), raised(2, at_s=1.1)))
    assert (found.kind, found.severity, found.ranks) == ("hang_mismatch", "critical", (2,))
    assert found.title == VERDICT["title"]
    assert found.steps == (20, 20)
    assert found.advice[0] == "Begin at train.py:41 in train."
    assert (found.evidence["op"], found.evidence["sequence"], found.evidence["victims"]) == ("all_reduce", 9, [0, 1])
    assert (crash.kind, crash.severity) == ("rank_crashed", "info")


def test_one_that_native_code_ended_may_belong_to_it() -> None:
    found, crash = found_in(a_run(raised(1), raised(2), codes={0: -6}))
    assert (found.kind, found.ranks) == ("hang_mismatch", (2,))
    assert crash.ranks == (0,)


@pytest.mark.parametrize(
    ("errors", "codes"),
    [
        ((raised(1, "ValueError", "bad"), raised(2)), None),
        ((raised(1), raised(2)), {0: -9}),
        ((raised(1), raised(2)), {0: 7}),
        ((), {0: -6}),
    ],
)
def test_a_cause_of_its_own_goes_before(errors: tuple[RankError, ...], codes: dict[int, int] | None) -> None:
    (found,) = found_in(a_run(*errors, codes=codes))
    assert (found.kind, found.severity) == ("rank_crashed", "critical")


def test_a_missing_call_is_believed_only_if_nobody_went_without_a_word() -> None:
    verdict = {**VERDICT, "kind": "hang_missing_collective"}
    assert [finding.kind for finding in found_in(a_run(raised(1), raised(2), verdict=verdict))] == [
        "hang_missing_collective",
        "rank_crashed",
    ]
    assert [f.kind for f in found_in(a_run(raised(1), raised(2), verdict=verdict, codes={0: -6}))] == ["rank_crashed"]


@pytest.mark.parametrize(
    "verdict",
    [{}, {**VERDICT, "kind": None, "healthy": True}, {**VERDICT, "kind": "rank_crashed"}, {**VERDICT, "culprits": []}],
)
def test_nothing_is_told_that_the_dumps_do_not_say(verdict: dict[str, Any]) -> None:
    assert [finding.kind for finding in found_in(a_run(raised(1), raised(2), verdict=verdict))] == ["rank_crashed"]


def test_nccls_watchdog_aborts_the_rank_that_waited_and_the_one_it_waited_for_is_named() -> None:
    """No rank left a word: SIGABRT, and SIGTERM from the launcher. The watchdog had the recorders written down."""
    title = "Rank 2 has not called all_reduce 9 of default_pg; ranks 0 and 1 wait in it."
    verdict = {**VERDICT, "kind": "hang_missing_collective", "title": title, "nccl_dumps": [0, 1, 2]}
    found, crash = found_in(a_run(verdict=verdict, codes={0: -6, 1: -15, 2: -15}))
    assert (found.kind, found.severity, found.ranks) == ("hang_missing_collective", "critical", (2,))
    assert found.title == (
        "Rank 2 had not called all_reduce 9 of default_pg; ranks 0 and 1 waited in it. NCCL's watchdog aborted rank 0."
    )
    assert found.evidence["told_by"][0] == (
        "NCCL's watchdog, or its heartbeat monitor, wrote the dumps of ranks 0–2 and aborted rank 0."
    )
    assert (crash.kind, crash.severity, crash.ranks) == ("rank_crashed", "info", (0,))


def test_a_killed_rank_whose_recorder_was_never_read_is_told() -> None:
    """As on an H200: the agent had not yet read what rank 1's device did; rank 0 lost its peer and was ended."""
    even = Traffic(
        mesh={"dp": 2}, exchanges=(Exchange(dimension="dp", mb=8.0, ms=1.0),), noise=0.0, work_ms=0.0, backend="nccl"
    )
    launcher = replace(raised(0, "ChildFailedError", ""), rank=None, exit_codes={0: -15, 1: -9})
    deaths = (Death(rank=0, step=30), Death(rank=1, step=30))
    job = Cluster(ranks=2, steps=30, device_timed=True, traffic=replace(even, device=True), deaths=deaths)
    read, unread = (replace(job, errors=(launcher,), traffic=replace(even, device=on)).run() for on in (True, False))
    (found,) = found_in(replace(read, ranks=(read.ranks[0], unread.ranks[1])))
    assert (found.kind, found.severity, found.ranks) == ("rank_crashed", "critical", (1,))
    assert found.title == "Rank 1 was killed by SIGKILL (in step 30, in backward)."


@pytest.mark.parametrize("codes", [{0: -9, 1: -15}, {0: 7, 1: -15}])
def test_another_death_is_not_the_watchdogs(codes: dict[int, int]) -> None:
    verdict = {**VERDICT, "kind": "hang_missing_collective", "nccl_dumps": [0, 1, 2]}
    assert [finding.kind for finding in found_in(a_run(verdict=verdict, codes=codes))] == ["rank_crashed"]


# -- Ranks that died of a collective they did not agree on: the odd one is named, not the one that was aborted --------


MIB = 1 << 20
LOST = "Connection closed by peer [127.0.0.1]:3312"


def died(ranks: int, sizes: dict[int, int], *, aborted: int = 0, code: int = -6, **calls: Any) -> RunData:
    """In step 40 rank 0 was aborted and the others lost their connection; all had called all_reduce of 4 MiB before."""
    traffic = Traffic(mesh={"dp": ranks}, exchanges=(Exchange(dimension="dp", mb=4.0),))
    lost = [
        RankError(rank=r, pid=1000 + r, type="RuntimeError", message=LOST, wall_ns=ANCHOR_WALL_NS + 10**9)
        for r in range(ranks)
        if r != aborted
    ]
    codes = {rank: code if rank == aborted else 1 for rank in range(ranks)}
    launcher = RankError(rank=None, pid=99, type="ChildFailedError", message="", exit_codes=codes)
    deaths = [
        Death(rank=r, step=40, state="vanished" if r == aborted else "exception", phase="comm") for r in range(ranks)
    ]
    run = Cluster(ranks=ranks, steps=50, traffic=traffic, deaths=tuple(deaths), errors=(*lost, launcher)).run()
    by_rank = {series.rank: series for series in run.ranks}
    ends = [
        {
            "event": "rank_end",
            "rank": rank,
            "pid": by_rank[rank].identity.pid,
            "collective": {"op": "all_reduce", "group": by_rank[rank].groups[1].name, "bytes": size, **calls},
        }
        for rank, size in sizes.items()
    ]
    return replace(run, events=tuple(ends))


def lead(run: RunData) -> Finding:
    return diagnose(run, build_window(run))[0]


def test_of_many_the_odd_one() -> None:
    found = lead(died(4, {0: 4 * MIB, 1: 8 * MIB, 2: 4 * MIB, 3: 4 * MIB}))
    assert (found.kind, found.ranks, found.severity) == ("hang_mismatch", (1,), "critical")
    assert found.title == (
        "Rank 1 called all_reduce with 8.0 MiB where ranks 0, 2 and 3 called it with 4.0 MiB; "
        "the library aborted rank 0 in step 40."
    )
    assert (found.evidence["victims"], found.evidence["undecidable"]) == ([0, 2, 3], False)


@pytest.mark.parametrize("odd", (0, 1))
def test_of_two_the_one_that_called_something_new(odd: int) -> None:
    found = lead(died(2, {odd: 8 * MIB, 1 - odd: 4 * MIB}))
    assert (found.kind, found.ranks) == ("hang_mismatch", (odd,))


def test_of_two_that_both_did_neither_is_picked_out() -> None:
    found = lead(died(2, {0: 16 * MIB, 1: 8 * MIB}))
    assert (found.kind, found.ranks) == ("hang_mismatch", (0, 1))
    assert found.title.startswith("Rank 0 called all_reduce with 16 MiB and rank 1 called it with 8.0 MiB; ")
    assert found.evidence["undecidable"] is True


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ({0: 4 * MIB, 1: 4 * MIB}, {}),  # they agree
        ({0: 4 * MIB}, {}),  # nothing is known of the other
        ({0: 4 * MIB, 1: 8 * MIB}, {"op": "broadcast"}),  # sizes may differ
        ({0: 4 * MIB, 1: 8 * MIB}, {"bytes": "many"}),
        ({0: 4 * MIB, 1: 8 * MIB}, {"code": -11}),  # no abort: what they called has nothing to do with it
    ],
)
def test_otherwise_who_died_leads(sizes: dict[int, int], more: dict[str, Any]) -> None:
    found = lead(died(2, sizes, **more))
    assert (found.kind, found.ranks) == ("rank_crashed", (0,))


@pytest.mark.parametrize(("code", "reported"), [(-6, True), (-9, False)])
def test_where_calls_agree_an_abort_still_names_its_own(code: int, reported: bool) -> None:
    """What DDP calls in C++ is in no ring, and the library's own words are not in the run."""
    found = lead(died(2, {0: 4 * MIB, 1: 4 * MIB}, code=code))
    call = {"op": "all_reduce", "group": "mesh_dp", "bytes": 4 * MIB}
    assert (found.kind, found.evidence["last_call"]) == ("rank_crashed", call if reported else None)
    advice = "Its last call was all_reduce of mesh_dp with 4.0 MiB: look for a branch that only some ranks take, "
    assert [line for line in found.advice if "last call" in line] == (
        [f"{advice}there or just before."] if reported else []
    )
