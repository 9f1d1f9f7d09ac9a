"""Which of several files stands for a rank, and which rank a file stands for that does not say.

A folder often holds several recordings of the same job (``schedule(repeat=3)``), so a rank several files: the latest
counts, of every rank.  A file that names no rank gets the lowest number that no other has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from stepscope.records.units import count_text, named_ranks
from stepscope.traces.columns import TraceMeta
from stepscope.traces.rank import RankAnalysis

__all__ = ["numbered", "one_per_rank"]


def one_per_rank(analyses: Sequence[RankAnalysis]) -> tuple[list[RankAnalysis], list[str]]:
    """By rank; and what was decided, in words."""
    ranks, notices = numbered([analysis.meta for analysis in analyses])
    found = {
        rank: analysis if analysis.rank == rank else replace(analysis, rank=rank)
        for rank, analysis in zip(ranks, analyses, strict=True)
        if rank is not None
    }
    return [found[rank] for rank in sorted(found)], notices


def numbered(metas: Sequence[TraceMeta]) -> tuple[list[int | None], list[str]]:
    """[traces]; the rank of each, None: left out; and what was decided, in words."""
    latest: dict[int, int] = {}
    for at, meta in enumerate(metas):
        if meta.rank is not None and (meta.rank not in latest or metas[latest[meta.rank]].origin_ns <= meta.origin_ns):
            latest[meta.rank] = at
    nameless = [at for at, meta in enumerate(metas) if meta.rank is None]
    free = (number for number in count() if number not in latest)
    given = dict(zip(free, nameless, strict=False))
    earlier = len(metas) - len(nameless) - len(latest)
    notices = []
    if earlier:
        notices.append(
            f"{count_text(earlier, 'file')} of an earlier recording of the same ranks left out: the latest count"
        )
    if given and len(latest) + len(given) > 1:
        files = "1 file names" if len(given) == 1 else f"{len(given)} files name"
        notices.append(f"{files} no rank: counted as {named_ranks(tuple(given)).lower()}")
    rank_at = {at: rank for rank, at in (latest | given).items()}
    return [rank_at.get(at) for at in range(len(metas))], notices
