"""Jobs that never ran: who is accused, and who is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from example_counts import examples
from fakes.dumps import Call, FlightJob, frames_at, stack_text, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.flight.decode import decode_dump
from stepscope.flight.stacks import parse_threads
from stepscope.hangs.judge import judge_dumps

C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def verdict(job: FlightJob, ranks: Sequence[int] | None = None, *, active_only: bool = False, **more: Any) -> Any:
    have = range(job.world) if ranks is None else ranks
    dumps = [decode_dump(job.document(rank, active_only=active_only), source="", rank=rank) for rank in have]
    return SimpleNamespace(**judge_dumps(dumps, **more))


def blamed(found: Any) -> tuple[str, list[int], int]:
    return found.kind, found.culprits, found.sequence


sizes = st.integers(3, 16)


@st.composite
def jobs(draw: st.DrawFn, smallest: int = 3) -> tuple[FlightJob, dict[int, list[Call]], int, int]:
    """A job, the programs of its ranks, a rank, and a call of the last step but one."""
    world = draw(st.integers(smallest, 16))
    job = FlightJob(world, backend=draw(st.sampled_from(["gloo", "nccl"])), ring=draw(st.sampled_from([2000, 40, 7])))
    count = draw(st.integers(3, 20))
    return (
        job,
        {r: steps(count) for r in range(world)},
        draw(st.integers(0, world - 1)),
        draw(st.integers(3, 3 * count - 4)),
    )


@given(jobs(smallest=2), st.data())
def test_healthy_ones_are_left_alone_whatever_the_rings_reach(made: Any, data: st.DataObject) -> None:
    job, programs, _, _ = made
    job.run(programs)
    documents = {}
    for rank in range(job.world):
        job.ring = data.draw(st.sampled_from([2000, 30, 5]))
        documents[rank] = job.document(rank)
    order = data.draw(st.permutations(range(job.world)))
    found = judge_dumps([decode_dump(documents[rank], source="", rank=rank) for rank in order])
    assert [found[key] for key in ("healthy", "kind", "culprits", "undecidable")] == [True, None, [], False]


@given(jobs())
def test_a_rank_that_stops_calling(made: Any) -> None:
    job, programs, rank, at = made
    job.run(programs, until={rank: at})
    found = verdict(job)
    assert blamed(found) == ("hang_missing_collective", [rank], at + 1)
    assert found.victims == [other for other in range(job.world) if other != rank]
    assert (found.first_divergence["sequence"], found.first_divergence["ranks"]) == (at + 1, [rank])


@given(jobs())
def test_a_skipped_collective(made: Any) -> None:
    job, programs, rank, at = made
    del programs[rank][at]
    job.run(programs)
    found = verdict(job)
    assert blamed(found) == ("hang_missing_collective", [rank], at + 1)


@given(jobs(), st.sampled_from(["reduce", "broadcast"]))
def test_another_operation(made: Any, op: str) -> None:
    job, programs, rank, at = made
    programs[rank][at] = replace(programs[rank][at], op=op, site=frames_at(99))
    job.run(programs)
    found = verdict(job)
    assert blamed(found) == ("hang_mismatch", [rank], at + 1)
    assert found.first_divergence["differs"] == "operation"


@given(jobs(), st.sampled_from(["size", "dtype"]))
def test_another_size_or_type(made: Any, what: str) -> None:
    job, programs, rank, at = made
    at -= at % 3  # the reduction of that step
    changed = {"size": 1000} if what == "size" else {"dtype": "Half"}
    programs[rank][at] = replace(programs[rank][at], **changed)
    job.run(programs)
    found = verdict(job)
    assert blamed(found) == ("hang_mismatch", [rank], at + 1)
    assert found.first_divergence["differs"] == what


@given(jobs(), st.integers(1, 3))
def test_an_extra_collective_that_nobody_notices_at_first(made: Any, more: int) -> None:
    """The same operation and size from another line: it takes the place of the others' next one, and all goes on."""
    job, programs, rank, at = made
    job.ring = 2000
    at -= at % 3
    same = [Call(op="all_reduce"), Call(op="all_gather", size=256), Call(op="barrier", size=0)][:more]
    programs[rank][at:at] = [replace(call, site=frames_at(77, function="metrics")) for call in same]
    job.run(programs)
    found = verdict(job)
    assert blamed(found) == ("hang_mismatch", [rank], at + 1)
    assert found.first_divergence["differs"] == "call site"
    assert (found.reasons[0]["at"]["line"], found.reasons[0]["at"]["function"]) == (77, "metrics")


@given(sizes, st.integers(2, 10), st.data())
def test_lines_that_always_differ_are_no_fault(world: int, count: int, data: st.DataObject) -> None:
    """Rank 0 broadcasts from another line than the rest receive from; somebody else then stops."""
    job = FlightJob(world)
    calls_of_step = [Call(op="broadcast", site=frames_at(20)), *steps(1)]
    programs = dict.fromkeys(range(world), calls_of_step * count)
    programs[0] = [Call(op="broadcast", site=frames_at(19)), *steps(1)] * count
    rank = data.draw(st.integers(1, world - 1))
    at = data.draw(st.integers(1, 4 * count - 1))
    job.run(programs, until={rank: at})
    found = verdict(job)
    assert blamed(found) == ("hang_missing_collective", [rank], at + 1)


@given(sizes, st.integers(1, 8), st.data())
def test_many_asleep_are_all_named_with_their_stacks(world: int, count: int, data: st.DataObject) -> None:
    job = FlightJob(world)
    asleep = data.draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=world - 1))
    at = data.draw(st.integers(0, 3 * count - 1))
    job.run({rank: steps(count) for rank in range(world)}, until=dict.fromkeys(asleep, at))
    stacks = {rank: parse_threads(stack_text(("/job/data.py", 7, "load"))) for rank in asleep}
    found = verdict(job, stacks=stacks)
    assert (found.kind, found.culprits) == ("hang_missing_collective", sorted(asleep))
    assert {reason["at"]["line"] for reason in found.reasons} == {7}


@given(st.integers(4, 16), st.integers(1, 6), st.data())
def test_ranks_without_a_dump_are_the_suspects(world: int, count: int, data: st.DataObject) -> None:
    job = FlightJob(world)
    gone = data.draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=world // 4))
    at = data.draw(st.integers(1, 3 * count - 1))
    job.run({rank: steps(count) for rank in range(world)}, until=dict.fromkeys(gone, at))
    found = verdict(job, [rank for rank in range(world) if rank not in gone])
    assert (found.kind, found.culprits, found.undecidable) == ("rank_lost", sorted(gone), False)
    unread = verdict(job, [rank for rank in range(world) if rank not in gone], unreadable=gone)
    assert (unread.kind, unread.culprits, unread.undecidable) == ("hang_unknown", [], True)
    assert unread.suspects == sorted(gone)


@given(st.integers(2, 4), st.sampled_from(["gloo", "nccl"]))
def test_groups_in_two_orders_lock_each_other(side: int, backend: str) -> None:
    """Rows and columns of a mesh; some ranks call their row first, some their column."""
    world = side * side
    job = FlightJob(world, backend=backend)
    rows = {r: f"r{r // side}" for r in range(world)}
    columns = {r: f"c{r % side}" for r in range(world)}
    for number in range(side):
        job.add_group(f"r{number}", "mesh_dp", [r for r in range(world) if r // side == number])
        job.add_group(f"c{number}", "mesh_tp", [r for r in range(world) if r % side == number])
    programs = {}
    for rank in range(world):
        both = [Call(group=rows[rank]), Call(group=columns[rank])]
        first = rank // side == rank % side
        programs[rank] = both * 2 + (both if first else both[::-1])
    job.run(programs)
    found = verdict(job)
    assert found.kind == "hang_deadlock"
    assert len(found.cycle) == len({sentence.split()[1] for sentence in found.cycle}) >= 3
    ring = [(int(s.split()[1]), int(s.split()[5])) for s in found.cycle]
    assert all(a[1] == b[0] for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)), "each waits for the next"


@given(st.integers(2, 4), st.integers(2, 4), st.data())
def test_the_root_is_found_through_groups(rows: int, columns: int, data: st.DataObject) -> None:
    """One rank sleeps; its row waits for it, and through the columns everybody else."""
    world = rows * columns
    job = FlightJob(world)
    for number in range(rows):
        job.add_group(f"1{number}", "mesh_tp", range(number * columns, (number + 1) * columns))
    for number in range(columns):
        job.add_group(f"2{number}", "mesh_dp", range(number, world, columns))
    step = {r: [Call(group=f"1{r // columns}"), Call(group=f"2{r % columns}", size=64)] for r in range(world)}
    rank = data.draw(st.integers(0, world - 1))
    job.run({r: step[r] * 8 for r in range(world)}, until={rank: data.draw(st.integers(2, 7))})
    found = verdict(job)
    assert (found.kind, found.culprits) == ("hang_missing_collective", [rank])
    assert found.victims == [r for r in range(world) if r != rank]


@given(jobs())
def test_dumps_of_active_ones_only(made: Any) -> None:
    """NCCL, as its watchdog dumps by default: whoever sleeps shows nothing at all."""
    _, programs, rank, at = made
    job = FlightJob(len(programs), backend="nccl")
    job.run(programs, until={rank: at})
    found = verdict(job, active_only=True)
    assert blamed(found) == ("hang_missing_collective", [rank], at + 1)


@given(jobs(), st.integers(1, 3))
def test_a_device_that_stopped(made: Any, back: int) -> None:
    """Its peers saw the end of what it still shows as pending."""
    _, programs, rank, _ = made
    job = FlightJob(len(programs), backend="nccl")
    job.run(programs)
    for entry in job.entries[rank][-back:]:
        entry.ended_ns = None
    found = verdict(job)
    assert (found.kind, found.culprits) == ("hang_device", [rank])


def test_all_came_and_nothing_ends() -> None:
    job = FlightJob(4, backend="nccl")
    job.run({rank: steps(2) for rank in range(4)})
    for rank in range(4):
        job.entries[rank][-1].ended_ns = None
    found = verdict(job)
    assert (found.healthy, found.kind, found.undecidable, found.suspects) == (False, "hang_device", True, [0, 1, 2, 3])


@pytest.mark.parametrize("ahead", [0, 2])
def test_one_rank_ahead_is_a_job_at_work(ahead: int) -> None:
    job = FlightJob(4)
    job.run({rank: steps(3) for rank in range(4)}, until={rank: 6 for rank in range(4) if rank != ahead})
    found = verdict(job)
    assert (found.healthy, found.kind, found.culprits) == (True, None, [])
    assert f"Rank {ahead} had reached all_reduce number 7 of default_pg before the others" in found.evidence[0]
    asleep = {rank: parse_threads(stack_text(("/job/data.py", 7, "load"))) for rank in range(4) if rank != ahead}
    assert verdict(job, stacks=asleep).culprits == [rank for rank in range(4) if rank != ahead], "unless stacks say so"


def test_two_ranks_that_disagree_cannot_be_told_apart() -> None:
    job = FlightJob(2)
    job.run({0: [Call(site=())], 1: [Call(op="barrier", size=0, site=())]})
    found = verdict(job)
    assert (found.kind, found.culprits, found.undecidable, found.suspects) == ("hang_mismatch", [], True, [0, 1])


def test_the_first_time_the_one_that_is_further_on_went_past() -> None:
    job = FlightJob(2)
    job.run({0: [Call(site=frames_at(1))], 1: [Call(op="barrier", size=0, site=frames_at(2))]})
    found = verdict(job)
    assert (found.kind, found.culprits, found.victims) == ("hang_missing_collective", [1], [0])
    assert found.title == (
        "Rank 1 left out the call that rank 0 made (all_reduce [1024] Float at train.py:1 in step), and called "
        "barrier at train.py:2 in step (number 1 of default_pg); rank 0 waits for it."
    )


@given(st.integers(0, 1), st.integers(3, 8), st.data())
def test_two_ranks_with_a_past_can(rank: int, count: int, data: st.DataObject) -> None:
    """What came next every time before is what the other one does."""
    job = FlightJob(2)
    programs = {0: steps(count), 1: steps(count)}
    at = data.draw(st.integers(6, 3 * count - 2))
    del programs[rank][at]
    job.run(programs)
    found = verdict(job)
    assert blamed(found) == ("hang_missing_collective", [rank], at + 1)


@given(st.integers(0, 1), st.integers(1, 8), st.data())
def test_of_two_ranks_the_one_that_has_not_come(rank: int, count: int, data: st.DataObject) -> None:
    job = FlightJob(2)
    job.run({0: steps(count), 1: steps(count)}, until={rank: data.draw(st.integers(0, 3 * count - 1))})
    assert verdict(job).culprits == [rank]


def test_input_and_p2p_by_stacks() -> None:
    job = FlightJob(4)
    job.run({rank: steps(2) for rank in range(4)}, until={1: 3})
    loader = ("/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 725, "__next__")
    reading = {1: parse_threads(stack_text(("/job/data.py", 5, "__iter__"), loader, ("/job/train.py", 9, "main")))}
    found = verdict(job, stacks=reading)
    assert (found.kind, found.culprits) == ("hang_input", [1])
    assert (found.reasons[0]["at"]["file"], found.reasons[0]["at"]["line"]) == ("/job/data.py", 5)
    inside = {1: parse_threads(stack_text((C10D, 2799, "recv"), ("/job/train.py", 9, "main")))}
    found = verdict(job, stacks=inside)
    assert (found.kind, found.culprits) == ("hang_missing_collective", [1])
    assert "it waits in recv" in found.reasons[0]["reason"]


def test_send_and_recv_alone() -> None:
    """gloo records neither; all that can be told is who stands in one."""
    job = FlightJob(2)
    job.run({rank: steps(1) for rank in range(2)})
    found = verdict(job, stacks={1: parse_threads(stack_text((C10D, 2799, "recv")))})
    assert (found.kind, found.undecidable, found.suspects) == ("hang_unknown", True, [1])


def test_the_first_true_failure_leads() -> None:
    job = FlightJob(4)
    job.run({rank: steps(2) for rank in range(4)}, until={2: 4})
    lost = (
        "Traceback (most recent call last):\n  File ...\nRuntimeError: [pair.cc:553] Connection closed by peer [::1]:9"
    )
    own = 'Traceback (most recent call last):\n  File "/job/train.py", line 3, in <module>\nValueError: no such key'
    found = verdict(job, errors={0: lost, 2: own, 3: lost})
    assert (found.kind, found.culprits, found.victims) == ("rank_crashed", [2], [0, 1, 3])
    assert found.title == (
        "Rank 2 raised ValueError: no such key; ranks 0, 1 and 3 wait for it in all_gather number 5 of default_pg."
    )
    gone = verdict(job, [0, 1, 3], errors={0: lost, 3: lost})
    assert (gone.kind, gone.culprits, gone.victims) == ("rank_crashed", [2], [0, 1, 3])


def test_what_gloo_gave_up_counts_as_waiting() -> None:
    """After a failure gloo retires what it was in: nothing is pending any more, yet somebody did not come."""
    job = FlightJob(3)
    job.run({rank: steps(2) for rank in range(3)}, until={1: 4})
    for rank in (0, 2):
        job.entries[rank][-1].ended_ns = 1
    lost = "Traceback (most recent call last):\nRuntimeError: Connection reset by peer"
    assert verdict(job).healthy
    found = verdict(job, errors={0: lost, 2: lost})
    assert (found.culprits, found.sequence, found.victims) == ([1], 5, [0, 2])


@settings(max_examples=examples(30))
@given(jobs(), st.randoms())
def test_the_order_of_dumps_means_nothing(made: Any, order: Any) -> None:
    job, programs, rank, at = made
    job.run(programs, until={rank: at})
    dumps = [decode_dump(job.document(r), source="", rank=r) for r in range(job.world)]
    before = judge_dumps(dumps)
    order.shuffle(dumps)
    assert judge_dumps(dumps) == before


@given(st.integers(4, 12), st.integers(4, 10), st.data())
def test_a_difference_that_passed_is_not_why_it_stands(world: int, count: int, data: st.DataObject) -> None:
    """Once, long ago, one rank asked for less, and it went well; now it sleeps."""
    job = FlightJob(world)
    rank = data.draw(st.integers(0, world - 1))
    job.run({r: steps(count) for r in range(world)}, until={rank: 3 * count - 1})
    job.entries[rank][0].call = replace(job.entries[rank][0].call, size=7)
    found = verdict(job)
    assert blamed(found) == ("hang_missing_collective", [rank], 3 * count)


@given(st.integers(3, 12), st.integers(4, 12), st.data())
def test_a_host_that_runs_ahead(world: int, count: int, data: st.DataObject) -> None:
    """NCCL: calls do not wait, so the others have many pending when one stops."""
    job = FlightJob(world, backend="nccl")
    program = [replace(call, waits=False) for call in steps(count)]
    rank = data.draw(st.integers(0, world - 1))
    at = data.draw(st.integers(0, 3 * count - 1))
    job.run(dict.fromkeys(range(world), program), until={rank: at})
    found = verdict(job, active_only=data.draw(st.booleans()))
    assert blamed(found) == ("hang_missing_collective", [rank], at + 1)
