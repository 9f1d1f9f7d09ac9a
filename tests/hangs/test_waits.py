"""The circles in a wait-for graph, against a search that tries every path."""

from __future__ import annotations

from hang_jobs import Job
from hypothesis import given
from hypothesis import strategies as st

from stepscope.hangs.activity import Node, circles, situation_of, waits_of
from stepscope.hangs.evidence import Recorders

RANKS = 7
GRAPHS = st.dictionaries(
    st.integers(0, RANKS - 1), st.lists(st.integers(0, RANKS - 1), unique=True, max_size=4), max_size=RANKS
)


def reached(edges: dict[Node, tuple[Node, ...]], start: Node) -> set[Node]:
    found: set[Node] = set()
    queue = list(edges.get(start, ()))
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue += edges.get(node, ())
    return found


@given(GRAPHS)
def test_circles_are_the_ranks_that_reach_each_other(graph: dict[int, list[int]]) -> None:
    edges: dict[Node, tuple[Node, ...]] = {
        ("", one): tuple(("", other) for other in others if other != one) for one, others in graph.items()
    }
    ways = {("", rank): reached(edges, ("", rank)) for rank in range(RANKS)}
    expected = {
        tuple(
            sorted(other for other in range(RANKS) if ("", other) in ways["", rank] and ("", rank) in ways["", other])
        )
        for rank in range(RANKS)
        if ("", rank) in ways["", rank]
    }
    assert circles(edges) == sorted(expected)


def test_a_thousand_that_wait_for_one_are_a_thousand_edges() -> None:
    situation = situation_of(Job(ranks=1000).alone(7).evidence(), Recorders())
    waits = waits_of(situation)
    assert sum(map(len, waits.edges.values())) == 1000
    assert waits.elsewhere == frozenset()
    assert circles(waits.edges) == []


def test_a_chain_as_long_as_a_job_is_no_recursion() -> None:
    edges: dict[Node, tuple[Node, ...]] = {("", rank): (("", rank + 1),) for rank in range(20_000)}
    assert circles(edges) == []
    edges["", 20_000] = (("", 0),)
    assert [len(ranks) for ranks in circles(edges)] == [20_001]
