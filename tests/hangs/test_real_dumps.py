"""Real dumps of jobs with known faults: gloo of 2 and 4 ranks, Megatron of 16 on NCCL, NCCL on one GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepscope.flight.read import read_paths
from stepscope.hangs.judge import judge_dumps

KINDS = {
    "healthy_4": None,
    "ddp_ok_2": None,
    "fsdp2_tp_4": None,
    "skip_4": "hang_missing_collective",
    "diffcoll_4": "hang_mismatch",
    "shape_4": "hang_mismatch",
    "fsdp2_bad_4": "hang_mismatch",
    "sleep_4": "hang_missing_collective",
    "ddp_stuck_4": "hang_missing_collective",
    "sendrecv_4": "hang_missing_collective",
    "dataloader_4": "hang_input",
    "twopg_4": "hang_deadlock",
    "crash_4": "rank_crashed",
}


def document(*paths: Path, beside: bool = True) -> dict[str, Any]:
    """The verdict; without what lies beside the dumps if so asked."""
    read = read_paths(paths)
    if not beside:
        return judge_dumps(read.dumps)
    return judge_dumps(read.dumps, stacks=read.stacks, errors=read.errors, unreadable=read.unreadable)


@pytest.fixture(scope="module")
def flight(shared_data: Path) -> Path:
    folder = shared_data / "flight"
    if not folder.is_dir():
        pytest.skip("the captured dumps (shared/data/flight beside the checkout) are not here")
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_as_the_truth_has_it(flight: Path, name: str) -> None:
    truth = json.loads((flight / "TRUTH.json").read_text())[name]
    found = document(flight / name)
    assert (found["healthy"], found["kind"], found["undecidable"]) == (KINDS[name] is None, KINDS[name], False)
    if isinstance(truth, str):
        assert (found["culprits"], found["first_divergence"]) == ([], None)
        return
    if "culprit" in truth:
        assert found["culprits"] == truth["culprit"]
        assert found["victims"] == [rank for rank in range(4) if rank not in truth["culprit"]]
    if "seq" in truth:
        assert (found["sequence"], found["first_divergence"]["sequence"]) == (truth["seq"], truth["seq"])


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("crash_4", "dataloader_4")])
def test_the_dumps_alone_say_the_same(flight: Path, name: str) -> None:
    found, alone = document(flight / name), document(flight / name, beside=False)
    assert [alone[key] for key in ("kind", "culprits", "sequence")] == [
        found[key] for key in ("kind", "culprits", "sequence")
    ]


def test_a_circle_over_two_groups(flight: Path) -> None:
    found = document(flight / "twopg_4")
    ring = [tuple(map(int, re.findall(r"rank (\d)", sentence))) for sentence in found["cycle"]]
    assert ring == [(0, 2), (2, 3), (3, 1), (1, 0)]


def test_the_line_where_a_rank_left_the_path(flight: Path) -> None:
    found = document(flight / "fsdp2_bad_4")
    split = found["first_divergence"]
    assert (split["differs"], split["ranks"]) == ("call site", [1])
    assert [(side["ranks"], side["at"]["line"]) for side in split["call_sites"]] == [([0, 2, 3], 169), ([1], 168)]
    assert found["waiting_in"]["sequence"] == 24, "where the operations themselves differ at last"


@pytest.mark.parametrize(("name", "kind"), [("gpu_error", "hang_device"), ("lock_gil", "hang_missing_collective")])
def test_megatron(flight: Path, name: str, kind: str) -> None:
    folder = flight / f"megatron16_{name}_1st"
    faulty = json.loads((folder / "fault_injection.log").read_text().splitlines()[0].partition(": ")[2])
    found = document(folder)
    assert (found["kind"], found["culprits"], found["undecidable"]) == (kind, faulty, False)
    assert found["victims"] == [rank for rank in range(16) if rank not in faulty]


def test_one_gpu(flight: Path) -> None:
    for name in ("fr_rank_0", "frt_rank_0"):
        found = document(flight / "nccl_1gpu" / name)
        assert (found["healthy"], found["kind"], found["problems"]) == (True, None, [])
    found = document(flight / "nccl_1gpu" / "to_0")
    assert (found["kind"], found["culprits"], found["sequence"]) == ("hang_device", [0], 2)
