"""The circles in a wait-for graph, against a search that tries every path."""

from __future__ import annotations

from hang_jobs import Job
from hypothesis import given
from hypothesis import strategies as st

from stepscope.hangs.case import case_of
from stepscope.hangs.wait_graph import Wait, WaitGraph, circles
from stepscope.records.hang import WaitingIn

RANKS = 7
GRAPHS = st.dictionaries(
    st.integers(0, RANKS - 1), st.lists(st.integers(0, RANKS - 1), unique=True, max_size=4), max_size=RANKS
)
CALL = WaitingIn(group="0", op="all_reduce")


def graph_of(edges: dict[int, list[int]]) -> WaitGraph:
    return WaitGraph(
        Wait(waiters=(rank,), missing=tuple(other for other in others if other != rank), call=CALL)
        for rank, others in edges.items()
    )


def reached(graph: WaitGraph, start: int) -> set[int]:
    found: set[int] = set()
    queue = [start]
    while queue:
        rank = queue.pop()
        after = {other for wait in graph.waits if rank in wait.waiters for other in wait.missing}
        queue += after - found
        found |= after
    return found


@given(GRAPHS)
def test_a_circle_are_the_ranks_that_reach_each_other(edges: dict[int, list[int]]) -> None:
    graph = graph_of(edges)
    ways = {rank: reached(graph, rank) for rank in range(RANKS)}
    circles = {
        tuple(sorted(other for other in range(RANKS) if other in ways[rank] and rank in ways[other]))
        for rank in range(RANKS)
        if rank in ways[rank]
    }
    circle = graph.circle()
    assert circle == min(circles, default=())
    steps = graph.cycle(circle[0]) if circle else ()
    assert [step[0] for step in steps] == [step[1] for step in (*steps[-1:], *steps[:-1])], "each waits for the next"
    assert {step[0] for step in steps} <= set(circle)
    assert set(graph.ends) == {rank for rank in range(RANKS) if rank in graph.missing and not ways[rank]}


def test_a_thousand_that_wait_for_one_are_one_wait() -> None:
    case = case_of(Job(ranks=1000).alone(7).evidence())
    assert [(len(wait.waiters), wait.missing) for wait in case.graph.waits] == [(999, (7,))]
    assert (case.absent, case.graph.circle(), case.graph.ends) == (frozenset(), (), (7,))


def test_a_chain_as_long_as_a_job_is_no_recursion() -> None:
    edges = {rank: (rank + 1,) for rank in range(20_000)}
    assert circles(edges) == []
    edges[20_000] = (0,)
    assert [len(ranks) for ranks in circles(edges)] == [20_001]
