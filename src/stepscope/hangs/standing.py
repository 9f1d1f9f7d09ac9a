"""What a rank is at while the job stands still: its process still runs, and "running" would say nothing of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from stepscope.records.hang import HangRecord, RankThere

__all__ = ["HUNG", "standing_of"]

HUNG = "hung"
"""Of a rank that holds the others up, or is in no collective and nobody can be blamed."""


def standing_of(hangs: Iterable[HangRecord]) -> dict[int, str]:
    """By rank: ``hung``, ``waits in all_reduce`` or ``waits``; of the hangs that go on, and of ranks that live."""
    found: dict[int, str] = {}
    for hang in hangs:
        if hang.over is None:
            guilty, victims = {culprit.rank for culprit in hang.culprits}, set(hang.victims)
            found |= {rank.rank: _standing(rank, guilty, victims) for rank in hang.ranks if rank.alive}
    return found


def _standing(rank: RankThere, guilty: Collection[int], victims: Collection[int]) -> str:
    if rank.rank in guilty:
        return HUNG
    if rank.waiting_in is not None and rank.waiting_in.op:
        return f"waits in {rank.waiting_in.op}"
    return "waits" if rank.rank in victims else HUNG
