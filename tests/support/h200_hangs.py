"""Hangs on NCCL as an H200 had them (``tests/hangs/data/h200``), and what its worker servers would answer again."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from worker_server_stand_in import EMPTY, Behave, replaying

from stepscope.agent.flight_reader import ACTIVE, FLIGHT, NCCL_FLIGHT, NEEDS_GIL
from stepscope.hangs.evidence import EvidenceFile, RankEvidence, evidence_from_dict
from stepscope.records.hang import ThreadStack

NOTHING = ["  <no Python frame>"]
DATA = Path(__file__).resolve().parents[1] / "hangs" / "data" / "h200"


def raw(case: str) -> Any:
    return json.loads(gzip.decompress((DATA / f"{case}.json.gz").read_bytes()))


def recorded_evidence(case: str) -> EvidenceFile:
    return evidence_from_dict(raw(case))


def write_nccl_dumps(case: str, folder: Path) -> None:
    """As NCCL's watchdog writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, dump in enumerate(raw(case)["dumps"]):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


def answers_of(rank: RankEvidence) -> Behave:
    """The worker server of that rank: both looks at its recorder, and its stacks."""
    return replaying(
        {
            FLIGHT: EMPTY,
            NCCL_FLIGHT: rank.flight,
            NCCL_FLIGHT + ACTIVE: rank.flight_later,
            NEEDS_GIL: traceback_of(rank.threads).encode(),
        }
    )


def traceback_of(threads: Iterable[ThreadStack]) -> str:
    """As faulthandler writes it; the main thread comes last."""
    parts = []
    for number, thread in enumerate(threads, 1):
        lines = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in thread.frames]
        parts.append("\n".join([f"Thread 0x{number:016x} (most recent call first):", *(lines or NOTHING)]))
    return "\n\n".join(parts) + "\n"
