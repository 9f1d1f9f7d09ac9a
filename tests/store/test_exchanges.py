"""Collectives from slots to tables: only what was recorded, each once, the same before and after sealing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import NotARun
from stepscope.records.collectives import FLAG_ASYNC, FLAG_DEVICE, FLAG_WAITED, MAX_GROUPS, OPS, ProcessGroup
from stepscope.records.steps import (
    COLLECTIVE,
    COLLECTIVE_ENTRIES,
    COLLECTIVE_ENTRY,
    COMM_ENTRIES,
    COMM_ENTRY,
    COMM_RECORD,
    ENTRIES_HEAD,
    SLOT_BYTES,
    STEP,
    STEP_SLOT,
)
from stepscope.ring import RingBatch
from stepscope.store.create import RunPaths
from stepscope.store.documents import end_run
from stepscope.store.live.ring_files import RingSidecar, guess_sidecar
from stepscope.store.load import open_run
from stepscope.store.rank_series import collective_rows, comm_rows
from stepscope.store.sealed import seal
from stepscope.store.sealed.sql import query

ALL_REDUCE, ALL_GATHER, BARRIER = OPS.index("all_reduce"), OPS.index("all_gather"), OPS.index("barrier")
GROUPS = (
    ProcessGroup(slot=0, name="0", description="default_pg", kind="world", backend="gloo", ranks=(0, 1), size=2),
    ProcessGroup(slot=3, name='t"p\x00', description="mesh_tp", kind="tensor", ranks=(1,), size=1),
)


def step_slot(step: int, seq: int = 1) -> bytes:
    return STEP_SLOT.pack(STEP, 0, seq, step, step * 100, 90, 90, *[0] * 15, *[0] * 3, 1, 1, 0, 0, 1, 0, 0, 0)


def record(kind: int, step: int, entries: Iterable[bytes], *, count: int | None = None, seq: int = 1) -> bytes:
    body = list(entries)
    head = ENTRIES_HEAD.pack(kind, 0, seq, step, len(body) if count is None else count)
    return (head + b"".join(body)).ljust(SLOT_BYTES, b"\0")


def summed(group: int, op: int, count: int = 1, size: int = 8, exposed_ns: int = 5, span_ns: int = 6) -> bytes:
    return COMM_ENTRY.pack(op, group, FLAG_WAITED, count, size, exposed_ns, span_ns)


def single(group: int, op: int, nth: int, start_ns: int = 7, flags: int = FLAG_ASYNC) -> bytes:
    return COLLECTIVE_ENTRY.pack(op, group, flags, nth, 16, start_ns, 3, start_ns + 9)


def table(*slots: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(slots), np.uint8).reshape(-1, SLOT_BYTES)


STEPS = np.array([0, 2, 3], np.uint64)


def test_sums_come_by_step_group_and_operation() -> None:
    late = record(COMM_RECORD, 2, [summed(1, BARRIER, 4, 0), summed(0, ALL_REDUCE)])
    rows = comm_rows(table(late, step_slot(2), record(COMM_RECORD, 0, [summed(0, ALL_GATHER, 2, 64, 11, 12)])), STEPS)
    assert rows is not None
    assert rows.tolist() == [
        (0, 0, ALL_GATHER, FLAG_WAITED, 2, 64, 11, 12),
        (2, 0, ALL_REDUCE, FLAG_WAITED, 1, 8, 5, 6),
        (2, 1, BARRIER, FLAG_WAITED, 4, 0, 5, 6),
    ]


def test_single_ones_keep_the_order_of_their_calls() -> None:
    slots = table(
        record(COLLECTIVE, 3, [single(0, ALL_REDUCE, 0, 40)]),
        record(COLLECTIVE, 0, [single(1, ALL_REDUCE, 0, 10), single(0, ALL_REDUCE, 0, 11)]),
        record(COLLECTIVE, 0, [single(1, ALL_GATHER, 1, 12)]),
    )
    rows = collective_rows(slots, STEPS)
    assert rows is not None
    assert rows[["step", "group", "nth", "start_ns", "end_ns"]].tolist() == [
        (0, 1, 0, 10, 19),
        (0, 0, 0, 11, 20),
        (0, 1, 1, 12, 21),
        (3, 0, 0, 40, 49),
    ]


def test_what_was_read_twice_counts_once() -> None:
    sums = record(COMM_RECORD, 2, [summed(0, ALL_REDUCE)], seq=5)
    more = record(COMM_RECORD, 2, [summed(0, ALL_GATHER)], seq=5)
    each = record(COLLECTIVE, 2, [single(0, ALL_REDUCE, 0), single(0, ALL_REDUCE, 1)], seq=5)
    slots = table(sums, more, each, each, more, sums)
    found, ones = comm_rows(slots, STEPS), collective_rows(slots, STEPS)
    assert found is not None and found["op"].tolist() == [ALL_REDUCE, ALL_GATHER]
    assert ones is not None and ones["nth"].tolist() == [0, 1]


def test_steps_that_were_not_recorded_groups_and_operations_that_nobody_has() -> None:
    slots = table(
        record(COMM_RECORD, 1, [summed(0, ALL_REDUCE)]),
        record(COMM_RECORD, 1 << 63, [summed(0, ALL_REDUCE)]),
        record(COMM_RECORD, 2, [summed(MAX_GROUPS, ALL_REDUCE), summed(MAX_GROUPS - 1, len(OPS)), summed(0, 255, 2)]),
    )
    rows = comm_rows(slots, STEPS)
    assert rows is not None
    assert rows[["step", "group", "op", "count"]].tolist() == [(2, 0, 0, 2), (2, MAX_GROUPS - 1, 0, 1)]
    assert collective_rows(slots, STEPS) is None
    assert comm_rows(table(step_slot(0)), STEPS) is None
    assert comm_rows(slots, STEPS[:0]) is None


@pytest.mark.parametrize("count", [COMM_ENTRIES, COMM_ENTRIES + 1, (1 << 64) - 1])
def test_a_record_holds_no_more_than_it_has_room_for(count: int) -> None:
    entries = [summed(group, ALL_REDUCE) for group in range(COMM_ENTRIES)]
    rows = comm_rows(table(record(COMM_RECORD, 2, entries, count=count)), STEPS)
    assert rows is not None
    assert rows["group"].tolist() == list(range(COMM_ENTRIES))


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([STEP, COMM_RECORD, COLLECTIVE, 0, 65535]),
            st.sampled_from([0, 1, 2, 3, 1 << 40, (1 << 64) - 1]),
            st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1)),
            st.binary(min_size=SLOT_BYTES - ENTRIES_HEAD.size, max_size=SLOT_BYTES - ENTRIES_HEAD.size),
        ),
        max_size=12,
    )
)
def test_any_bytes_give_rows_in_order_without_repeats(slots: list[tuple[int, int, int, bytes]]) -> None:
    rows = table(*(ENTRIES_HEAD.pack(kind, 0, 1, step, count) + body for kind, step, count, body in slots))
    for found, last, room in (
        (comm_rows(rows, STEPS), "op", COMM_ENTRIES),
        (collective_rows(rows, STEPS), "nth", COLLECTIVE_ENTRIES),
    ):
        if found is None:
            continue
        assert 0 < len(found) <= room * len(slots)
        assert set(found["step"].tolist()) <= set(STEPS.tolist())
        assert found["group"].max() < MAX_GROUPS
        assert found["op"].max() < len(OPS)
        keys = found[["step", "group", last]].tolist()
        assert len(set(keys)) == len(keys)
        assert found["step"].tolist() == sorted(found["step"].tolist())


@pytest.fixture
def run(paths: RunPaths, rings: Any, drain: Callable[..., Any]) -> Path:
    """Rank 0 with both kinds of rows, rank 1 with steps alone, rank 2 with sums alone."""
    for rank, records in (
        (
            0,
            [
                record(COMM_RECORD, 0, [summed(0, ALL_REDUCE, 2, 1 << 20, 5_000, 6_000), summed(3, ALL_GATHER)]),
                record(COLLECTIVE, 0, [single(0, ALL_REDUCE, 0, 10**14), single(3, ALL_GATHER, 0, 10**14 + 5, 7)]),
                record(COMM_RECORD, 1, [summed(0, ALL_REDUCE, 2, (1 << 64) - 1)]),
                record(COMM_RECORD, 9, [summed(0, ALL_REDUCE)]),
            ],
        ),
        (1, []),
        (2, [record(COMM_RECORD, 1, [summed(5, BARRIER)])]),
    ):
        ring = rings(rank)
        if rank == 0:
            ring.ring.set_groups(GROUPS)
        slots = [step_slot(0), step_slot(1), *records]
        drain(ring, ended=8).append(RingBatch(slots=slots, last_seq=9, lost=0, torn=0))
    end_run(paths.run_dir, exit_code=0, status="finished", wall_ns=9)
    return paths.run_dir


def rows_of(run_dir: Path) -> list[Any]:
    return [
        (rank.groups, *(None if rows is None else rows.tolist() for rows in (rank.comm, rank.collectives)))
        for rank in open_run(run_dir).ranks
    ]


def test_a_run_reads_the_same_before_and_after_it_is_sealed(run: Path) -> None:
    before = rows_of(run)
    assert before[0][0] == GROUPS
    assert [len(rows) if rows else rows for _, rows, _ in before] == [3, None, 1]
    assert before[0][2] == [
        (0, 0, ALL_REDUCE, FLAG_ASYNC, 0, 16, 10**14, 3, 10**14 + 9),
        (0, 3, ALL_GATHER, 7, 0, 16, 10**14 + 5, 3, 10**14 + 14),
    ]
    seal.seal(run)
    assert rows_of(run) == before
    assert (run / "comm.parquet").exists()
    assert (run / "collectives.parquet").exists()


def test_a_run_without_collectives_has_no_tables_of_them(paths: RunPaths, rings: Any, drain: Any) -> None:
    drain(rings(0), ended=8).append(RingBatch(slots=[step_slot(0)], last_seq=9, lost=0, torn=0))
    seal.seal(paths.run_dir)
    assert rows_of(paths.run_dir) == [((), None, None)]
    assert not list(paths.run_dir.glob("co*.parquet"))


def test_a_run_sealed_before_there_were_collectives_still_opens(run: Path) -> None:
    seal.seal(run)
    about = json.loads((run / "ranks.json").read_text())
    for rank in about["ranks"]:
        for key in ("groups", "comm", "collectives"):
            del rank[key]
    (run / "ranks.json").write_text(json.dumps(about))
    for name in ("comm.parquet", "collectives.parquet"):
        (run / name).unlink()
    assert rows_of(run) == [((), None, None)] * 3


@pytest.mark.parametrize("name", ["comm.parquet", "collectives.parquet"])
def test_a_table_that_is_gone_or_too_short_is_said_in_one_line(run: Path, name: str) -> None:
    seal.seal(run)
    whole = (run / name).read_bytes()
    (run / name).unlink()
    with pytest.raises(NotARun, match="part of it is missing"):
        open_run(run)
    (run / name).write_bytes(whole[:-9])
    with pytest.raises(NotARun, match=f"{name} is damaged"):
        open_run(run)
    duckdb.sql(f"COPY (SELECT 0 AS step, 0 AS bytes LIMIT 0) TO '{run / name}' (FORMAT parquet)")
    with pytest.raises(NotARun, match=r"ranks\.json is damaged"):
        open_run(run)


@pytest.mark.parametrize("wrong", [-1, "2", 10**9, [1]], ids=str)
def test_counts_of_another_hand(run: Path, wrong: Any) -> None:
    seal.seal(run)
    about = json.loads((run / "ranks.json").read_text())
    about["ranks"][1]["comm"] = wrong
    (run / "ranks.json").write_text(json.dumps(about))
    with pytest.raises(NotARun, match=r"ranks\.json is damaged"):
        open_run(run)


@pytest.mark.parametrize("groups", [None, 7, {}, [[0, "a"]], [[99, "a", "", "world", "", 1, []]]], ids=str)
def test_a_sidecar_with_groups_of_another_hand_still_names_its_rank(groups: Any) -> None:
    about = guess_sidecar("node-7-a")
    raw = {**about.to_dict(), "groups": groups}
    assert RingSidecar.from_dict(json.loads(json.dumps(raw))) == about


def test_a_sidecar_keeps_groups_of_any_size() -> None:
    wide = ProcessGroup(slot=63, name="w", kind="data", ranks=tuple(range(5000)), size=5000)
    about = replace(guess_sidecar("node-7-a"), groups=(*GROUPS, wide))
    assert RingSidecar.from_dict(json.loads(json.dumps(about.to_dict()))) == about


def test_the_tables_can_be_asked_by_name(run: Path) -> None:
    ask = 'select rank, step, "group", kind, op, "count", bytes, exposed_ns, span_ns from comm order by all'
    expected = (
        (0, 0, "0", "world", "all_reduce", 2, 1 << 20, 5_000, 6_000),
        (0, 0, 't"p\\x00', "tensor", "all_gather", 1, 8, 5, 6),
        (0, 1, "0", "world", "all_reduce", 2, -1, 5, 6),
        (2, 1, "", "", "barrier", 1, 8, 5, 6),
    )
    assert query(run, ask).rows == expected
    seal.seal(run)
    assert query(run, ask).rows == expected
    each = query(run, "select nth, op, slot, start_ns, end_ns - start_ns, flags from collectives order by start_ns")
    assert each.rows == ((0, "all_reduce", 0, 10**14, 9, FLAG_ASYNC), (0, "all_gather", 3, 10**14 + 5, 9, 7))


def test_the_tables_are_there_when_nothing_was_seen(paths: RunPaths) -> None:
    assert query(paths.run_dir, "select count(*), sum(bytes) from comm").rows == ((0, None),)
    assert query(paths.run_dir, "select count(nth) from collectives").rows == ((0,),)


# -- times of the device --------------------------------------------------------------------------------------------


def on_device(group: int, op: int, span_ns: int) -> bytes:
    return COMM_ENTRY.pack(op, group, FLAG_DEVICE, 1, 8, 0, span_ns)


def test_where_the_device_tells_its_times_the_host_is_not_counted_too() -> None:
    """Of the same step, group and operation; whichever came first, and though the agent gave the group another slot."""
    slots = [
        *(step_slot(step) for step in range(3)),
        record(COMM_RECORD, 0, [summed(0, ALL_REDUCE), summed(0, BARRIER)]),
        record(COMM_RECORD, 1, [on_device(62, ALL_REDUCE, 70), on_device(62, ALL_REDUCE, 70)]),
        record(COMM_RECORD, 1, [summed(0, ALL_REDUCE)]),
        record(COMM_RECORD, 2, [summed(0, ALL_REDUCE)]),
        record(COMM_RECORD, 0, [on_device(62, ALL_REDUCE, 60)]),
    ]
    two_slots = (GROUPS[0], replace(GROUPS[0], slot=62))
    rows = comm_rows(table(*slots), np.arange(3), two_slots)
    assert rows is not None
    assert [(row["step"], row["group"], OPS[row["op"]], row["flags"], row["span_ns"]) for row in rows] == [
        (0, 0, "all_reduce", FLAG_DEVICE, 60),
        (0, 0, "barrier", FLAG_WAITED, 6),
        (1, 0, "all_reduce", FLAG_DEVICE, 70),
        (2, 0, "all_reduce", FLAG_WAITED, 6),
    ]


def test_a_number_of_the_device_is_not_one_of_the_host() -> None:
    def call(op: int, nth: int, flags: int) -> bytes:
        return COLLECTIVE_ENTRY.pack(op, 0, flags, nth, 8, 100, 0, 105)

    slots = [
        step_slot(0),
        record(COLLECTIVE, 0, [call(ALL_GATHER, 0, FLAG_WAITED), call(ALL_REDUCE, 1, FLAG_WAITED)]),
        record(COLLECTIVE, 0, [call(ALL_REDUCE, 0, FLAG_DEVICE), call(ALL_REDUCE, 1, FLAG_DEVICE)]),
    ]
    rows = collective_rows(table(*slots), np.arange(1), GROUPS)
    assert rows is not None
    assert [(OPS[row["op"]], row["nth"], row["flags"]) for row in rows] == [
        ("all_gather", 0, FLAG_WAITED),
        ("all_reduce", 0, FLAG_DEVICE),
        ("all_reduce", 1, FLAG_DEVICE),
    ]
