"""Which of several files stands for a rank, and which rank a file stands for that does not say.

A folder often holds several recordings of the same job (``schedule(repeat=3)``), so a rank several files: the latest
counts, of every rank.  A file that names no rank gets the lowest number that no other has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from stepscope.records.units import count_text, named_ranks
from stepscope.traces.rank import RankAnalysis

__all__ = ["one_per_rank"]


def one_per_rank(analyses: Sequence[RankAnalysis]) -> tuple[list[RankAnalysis], list[str]]:
    """By rank; and what was decided, in words."""
    latest: dict[int, RankAnalysis] = {}
    nameless = []
    for analysis in analyses:
        if analysis.meta.rank is None:
            nameless.append(analysis)
        elif analysis.rank not in latest or latest[analysis.rank].meta.origin_ns <= analysis.meta.origin_ns:
            latest[analysis.rank] = analysis
    earlier = len(analyses) - len(nameless) - len(latest)
    free = (number for number in count() if number not in latest)
    given = {number: replace(analysis, rank=number) for number, analysis in zip(free, nameless, strict=False)}
    found = latest | given
    notices = []
    if earlier:
        notices.append(
            f"{count_text(earlier, 'file')} of an earlier recording of the same ranks left out: the latest count"
        )
    if given and len(found) > 1:
        files = "1 file names" if len(given) == 1 else f"{len(given)} files name"
        notices.append(f"{files} no rank: counted as {named_ranks(tuple(given)).lower()}")
    return [found[rank] for rank in sorted(found)], notices
