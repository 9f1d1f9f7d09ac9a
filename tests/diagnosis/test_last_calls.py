"""Ranks that died of a collective they did not agree on: the odd one is named, not the one that was aborted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death
from fakes.traffic import Exchange, Traffic

from stepscope.diagnosis import build_window, diagnose
from stepscope.records.finding import Finding
from stepscope.records.series import RankError, RunData

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
