"""Several recorders of one rank: one document, one dump, and the same names of groups on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hang_jobs import entry, flight, nccl, nccl_entry

from stepscope.errors import DumpError
from stepscope.flight.dump import combined, with_same_groups
from stepscope.flight.read import read_dump, read_paths
from stepscope.hangs.judge import judge_dumps

EMPTY = b'{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}'
IDLE_NCCL = nccl()["flight"].replace(b', "entries": []', b"")
NCCL = nccl(nccl_entry(2, state="started"), before=1)["flight"]
GLOO = flight(entry(3, "gloo:barrier"))
NO_CALLS = b'{"pg_config":{"":{"desc":"","name":"","ranks":"[0]"}},"pg_status":{},"version":"2.10"}'


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((), b""),
        ((b"", b""), b""),
        ((EMPTY, EMPTY), EMPTY),
        ((EMPTY, NO_CALLS), NO_CALLS),
        ((NCCL, EMPTY), NCCL),
        ((NCCL, NO_CALLS), NCCL),
        ((b"", GLOO), GLOO),
        ((EMPTY, GLOO), GLOO),
        ((IDLE_NCCL, GLOO), b'{"recorders":[%b,%b]}' % (IDLE_NCCL, GLOO)),
        ((NCCL, GLOO), b'{"recorders":[%b,%b]}' % (NCCL, GLOO)),
    ],
)
def test_what_is_not_used_is_left_out(answers: tuple[bytes, ...], expected: bytes) -> None:
    assert combined(*answers) == expected


def test_a_group_of_two_backends_is_two() -> None:
    dump = read_dump(combined(NCCL, GLOO), rank=0)
    assert {key: list(trace.sequences) for key, trace in dump.groups.items()} == {
        ("0", "default_pg"): [1, 2],
        ("0", "default_pg (gloo)"): [1, 2, 3],
    }
    assert dump.members == {("0", "default_pg"): (0, 1), ("0", "default_pg (gloo)"): (0, 1)}
    names = {key: [dump.operations[number].name for number in trace.operations] for key, trace in dump.groups.items()}
    assert names["0", "default_pg"] == ["all_reduce", "all_reduce"]
    assert names["0", "default_pg (gloo)"] == ["all_reduce", "all_reduce", "barrier"]


def test_a_group_of_gloo_alone_keeps_its_name() -> None:
    dump = read_dump(combined(NCCL, flight(entry(1, "gloo:barrier", group=("3", "offload")))), rank=0)
    assert set(dump.groups) == {("0", "default_pg"), ("3", "offload")}


def test_a_rank_whose_other_recorder_did_not_answer_has_the_same_groups() -> None:
    dumps = with_same_groups([read_dump(combined(NCCL, GLOO), rank=0), read_dump(GLOO, rank=1)])
    assert set(dumps[1].groups) == {("0", "default_pg (gloo)")}
    alone = [read_dump(GLOO, rank=0), read_dump(GLOO, rank=1)]
    assert with_same_groups(alone) == alone


def test_the_two_halves_are_judged_each_for_itself() -> None:
    """Rank 1 has not come to gloo's barrier; NCCL's calls have all ended."""
    ended = nccl(before=2)["flight"]
    late = flight(entry(2, "gloo:barrier", retired=True))
    found = judge_dumps([read_dump(combined(ended, GLOO), rank=0), read_dump(combined(ended, late), rank=1)])
    judged = [found[key] for key in ("kind", "culprits", "description", "sequence")]
    assert judged == ["hang_missing_collective", [1], "default_pg (gloo)", 3]


def test_such_files_are_read(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank_{rank}.json").write_bytes(combined(NCCL, GLOO))
    reading = read_paths([tmp_path], jobs=1)
    assert ([dump.rank for dump in reading.dumps], reading.problems) == ([0, 1], ())


@pytest.mark.parametrize("parts", [[], [3], [{}], [{"entries": 3}], [{"recorders": []}]])
def test_anything_else_is_no_dump(parts: list[Any]) -> None:
    with pytest.raises(DumpError):
        read_dump(json.dumps({"recorders": parts}).encode())
