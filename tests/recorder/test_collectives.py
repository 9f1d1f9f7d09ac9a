"""Collectives on real ranks over gloo: exact counts and bytes by step and group; the training does not notice."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.records.collectives import FLAG_ASYNC, FLAG_WAITED, OPS

JOB = Path(__file__).with_name("comm_job.py")
PAIR = ("explicit", "handles", "pairs", "coalesced", "wrong", "ddp", "fsdp", "tensor", "functional")
FOUR = ("mesh", "groups")
LATER, WAITED = FLAG_ASYNC, FLAG_WAITED

pytestmark = pytest.mark.ranks

Found = list[dict[str, Any]]
"""What the job left, by rank."""


def run(folder: Path, *jobs: str) -> Callable[[int], Callable[[str], Found]]:
    """``jobs`` such as ``2:ddp,fsdp``; what they left is found by the number of ranks, then by name."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(JOB), str(folder), *jobs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

    def found(world: int, job: str) -> Found:
        return [json.loads((folder / str(world) / f"{job}.{rank}.json").read_text()) for rank in range(world)]

    return lambda world: functools.partial(found, world)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Callable[[str], Found]]:
    """All ranks are forks of one process that has loaded torch."""
    return run(tmp_path_factory.mktemp("ran"), f"2:{','.join(PAIR)},outside", f"4:{','.join(FOUR)}")


@pytest.fixture(scope="module")
def pair(ran: Callable[[int], Callable[[str], Found]]) -> Callable[[str], Found]:
    return ran(2)


@pytest.fixture(scope="module")
def four(ran: Callable[[int], Callable[[str], Found]]) -> Callable[[str], Found]:
    return ran(4)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    return run(tmp_path_factory.mktemp("compiled"), "2:compiled")(2)


def sums(rank: dict[str, Any], step: int = 2) -> list[list[Any]]:
    """Operation, group, flags, count and bytes; without times."""
    return [row[:5] for row in rank["steps"][step]["sums"]]


@pytest.mark.parametrize("job", [*PAIR, *FOUR])
def test_the_script_does_not_notice(pair: Callable[[str], Found], four: Callable[[str], Found], job: str) -> None:
    assert_unnoticed((four if job in FOUR else pair)(job))


def assert_unnoticed(ranks: Found) -> None:
    for found in ranks:
        assert found["recorded"] == found["bare"] == found["again"]
        assert found["restored"] is True
        assert (found["failures"], found["lost"], found["torn"]) == (0, 0, 0)
        assert len(found["steps"]) == 4


@pytest.mark.parametrize("job", ["explicit", "coalesced", "fsdp", "tensor", "functional", "mesh", "groups"])
def test_torch_itself_counts_as_many(pair: Callable[[str], Found], four: Callable[[str], Found], job: str) -> None:
    for found in (four if job in FOUR else pair)(job):
        ours = [sum(row[3] for row in step["sums"] if row[0] not in ("send", "recv")) for step in found["steps"]]
        assert ours == found["flight"]


@pytest.mark.parametrize("job", ["explicit", "pairs", "coalesced", "wrong", "fsdp", "tensor", "functional", *FOUR])
def test_all_time_in_waits_belongs_to_a_collective(
    pair: Callable[[str], Found], four: Callable[[str], Found], job: str
) -> None:
    for found in (four if job in FOUR else pair)(job):
        for step in found["steps"]:
            assert step["comm_ns"] == sum(row[5] for row in step["sums"]) > 0
            assert all(row[6] >= row[5] for row in step["sums"])
            for _, _, flags, _, _, start, exposed, end in step["calls"]:
                assert bool(flags & WAITED) == bool(end)
                assert not end or end - start >= exposed


def test_one_of_each(pair: Callable[[str], Found]) -> None:
    for rank in pair("explicit"):
        assert rank["groups"] == [[0, "0", "default_pg", "world", "gloo", [0, 1], 2]]
        for step in range(4):
            assert sums(rank, step) == [
                ["all_reduce", 0, WAITED, 1, 24],
                ["all_gather", 0, WAITED, 2, 96],
                ["reduce_scatter", 0, WAITED, 2, 96],
                ["broadcast", 0, WAITED, 1, 24],
                ["reduce", 0, WAITED, 1, 24],
                ["gather", 0, WAITED, 1, 48],
                ["scatter", 0, WAITED, 1, 48],
                ["all_to_all", 0, WAITED, 1, 48],
                ["barrier", 0, WAITED, 2, 0],
            ]
            assert [call[3] for call in rank["steps"][step]["calls"]] == list(range(12))


def test_handles(pair: Callable[[str], Found]) -> None:
    both = LATER | WAITED
    for rank in pair("handles"):
        assert sums(rank, 0) == [
            ["all_reduce", 0, both, 2, 52],
            ["broadcast", 0, both, 1, 400],
            ["all_gather", 0, LATER, 1, 8000],
        ]
        for step in (1, 2, 3):
            assert sums(rank, step) == [
                ["all_reduce", 0, both, 2, 52],
                ["broadcast", 0, both, 1, 400],
                ["all_gather", 0, both, 1, 8000],
            ]
            calls = rank["steps"][step]["calls"]
            assert [call[:5] for call in calls] == [
                ["all_reduce", 0, both, 0, 40],
                ["broadcast", 0, both, 1, 400],
                ["all_gather", 0, LATER, 2, 8000],
                ["all_reduce", 0, LATER, 3, 12],
            ]
            assert calls[0][7] > calls[1][7]  # the first was waited for last


def test_sends_and_recvs(pair: Callable[[str], Found]) -> None:
    for number, rank in enumerate(pair("pairs")):
        for step in range(4):
            counted = {row[0]: row[3:5] for row in sums(rank, step)}
            assert counted == (
                {"send": [4, 80], "recv": [3, 60]} if number == 0 else {"send": [3, 60], "recv": [4, 80]}
            )
            flags = [call[2] for call in rank["steps"][step]["calls"]]
            assert flags == [WAITED] * 3 + [LATER | WAITED] * 4
            assert [call[3] for call in rank["steps"][step]["calls"]] == list(range(7))
        op, _, size, _, waiting, peer = rank["last"]
        assert (OPS[op], size, waiting, peer) == ("recv", 20, False, 1 - number)


def test_a_coalescing_block_is_one(pair: Callable[[str], Found]) -> None:
    for rank in pair("coalesced"):
        assert sums(rank)[0] == ["all_reduce", 0, WAITED, 1, 24]
        assert [row[0] for row in sums(rank)] == ["all_reduce", "all_gather"]


def test_what_fails_fails_as_without_us(pair: Callable[[str], Found]) -> None:
    for rank in pair("wrong"):
        heard, mode, total = rank["recorded"][0]
        assert heard[:1] == ["TypeError"]
        assert len(heard) == 6
        assert mode[:1] == ["ones"]  # and what else that torch does, as without us
        assert total == 8.0
        dense = [call[4] for call in rank["steps"][1]["calls"] if call[0] == "all_reduce"]
        assert dense == [0, 0, 0, 0, 0, 8, 16, 64, 8]


def test_ddp_s_own_are_not_seen(pair: Callable[[str], Found]) -> None:
    for rank in pair("ddp"):
        assert sums(rank) == [["all_reduce", 0, WAITED, 1, 4]]
        assert rank["flight"][2] == 2


def test_fsdp(pair: Callable[[str], Found]) -> None:
    """Three layers, each gathered for forward and backward and scattered once."""
    parameters = [16 * 32 + 32, 32 * 32 + 32, 32 * 4 + 4]
    for rank in pair("fsdp"):
        assert sums(rank) == [
            ["all_gather", 0, WAITED, 6, 2 * 4 * sum(parameters)],
            ["reduce_scatter", 0, WAITED, 3, 4 * sum(parameters)],
        ]
        sizes = [call[4] // 4 for call in rank["steps"][2]["calls"] if call[0] == "reduce_scatter"]
        assert sizes == parameters[::-1]


def test_tensor_parallel(pair: Callable[[str], Found]) -> None:
    """The output of the second layer forward, the gradient of the input backward."""
    for rank in pair("tensor"):
        assert [row[:1] + row[3:] for row in sums(rank)] == [["all_reduce", 2, 8 * 32 * 4 + 8 * 16 * 4]]


def test_functional(pair: Callable[[str], Found]) -> None:
    for rank in pair("functional"):
        assert [row[:2] + row[3:] for row in sums(rank)] == [
            ["all_reduce", 0, 2, 32 + 64],
            ["all_gather", 0, 1, 64],
            ["reduce_scatter", 0, 1, 32],
            ["all_to_all", 0, 1, 32],
            ["broadcast", 0, 1, 32],
        ]
        assert all(call[7] for call in rank["steps"][2]["calls"])  # a view is as good as what it is a view of


@pytest.mark.soak
def test_dynamo_makes_the_same_graphs(compiled: Callable[[str], Found]) -> None:
    assert_unnoticed(compiled("compiled"))
    for rank in compiled("compiled"):
        _, told, breaks = rank["bare"][-1]
        assert told["stats"]["unique_graphs"] > 2
        assert breaks > 0


def test_a_mesh_of_two_by_two(four: Callable[[str], Found]) -> None:
    # Column- and row-wise halves of the first two layers, the whole of the third.
    parameters = [8 * 32 + 16, 16 * 32 + 32, 32 * 4 + 4]
    for number, rank in enumerate(four("mesh")):
        data, tensor = [number % 2, number % 2 + 2], [number // 2 * 2, number // 2 * 2 + 1]
        about = {row[0]: row[2:] for row in rank["groups"]}
        assert about == {0: ["mesh_dp", "data", "gloo", data, 2], 1: ["mesh_tp", "tensor", "gloo", tensor, 2]}
        assert [row[:2] + row[3:] for row in sums(rank)] == [
            ["all_gather", 0, 6, 2 * 4 * sum(parameters)],
            ["all_reduce", 1, 1, 8 * 32 * 4],
            ["reduce_scatter", 0, 3, 4 * sum(parameters)],
        ]


def test_groups_by_what_their_makers_called_them(four: Callable[[str], Found]) -> None:
    names = set()
    for number, rank in enumerate(four("groups")):
        row, column = [number // 2 * 2, number // 2 * 2 + 1], [number % 2, number % 2 + 2]
        assert [group[2:] for group in rank["groups"]] == [
            ["TENSOR_MODEL_PARALLEL_GROUP", "tensor", "gloo", row, 2],
            ["DATA_PARALLEL_GROUP", "data", "gloo", column, 2],
            ["undefined", "world", "gloo", [0, 1, 2, 3], 4],
        ]
        names.add((rank["groups"][0][1], tuple(row)))
        single = "send" if number % 2 else "recv"
        usual = [["all_reduce", 0, 1, 16], ["all_reduce", 1, 1, 16], [single, 0, 1, 16]]
        for step in range(4):
            with_third = [*usual[:2], ["all_reduce", 2, 1, 16], usual[2]]
            assert [row[:2] + row[3:] for row in sums(rank, step)] == (with_third if step == 2 else usual)
        assert rank["last"][5] == number + (-1 if number % 2 else 1)  # in the world, not in the group
    assert len(names) == 2  # ranks of one group agree on its name


def test_a_rank_that_waits_is_seen_from_outside(pair: Callable[[str], Found]) -> None:
    op, group, size, _, waiting, peer = pair("outside")[1]["seen"]
    assert (OPS[op], group, size, waiting, peer) == ("all_reduce", 0, 2000, True, None)
