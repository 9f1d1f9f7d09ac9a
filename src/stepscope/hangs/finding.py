"""A hang as a finding: the same sentence in the terminal, in ``findings.json`` and in the summary.

Evidence: ``number`` and ``host`` (which name its file), ``hosts`` (that were judged together), ``culprits`` (``rank``,
``reason``, ``file``, ``line``, ``function``), ``victims``, ``undecidable``, ``group``, ``sequence``, ``op`` and
``sizes`` of the collective they wait in, ``cycle``, ``stopped_wall_ns`` (when the last rank was heard of), ``stood_s``
(from then until it was over, or declared), ``threshold_s``, ``over``, ``action``, ``told_by`` (sentences).
"""

from __future__ import annotations

from typing import Any

from stepscope.hangs.advice import advice_for
from stepscope.hangs.tense import told_of
from stepscope.hangs.words import group_text, more_than_text, seconds_text
from stepscope.records.finding import Finding
from stepscope.records.hang import HangRecord

__all__ = ["finding_of", "steps_of", "stood_s", "title_of"]

SURE = 0.95
UNSURE = 0.6
RANKS_LISTED = 64
"""Culprits whose reasons are in the evidence; the record has all."""


def finding_of(record: HangRecord, *, over: bool = False) -> Finding:
    """Of a job that came back: the ``stall`` that it was.  ``over``: as of ``told_of``."""
    record = told_of(record, over=over)
    back = record.over == "recovered"
    seconds = stood_s(record)
    there = {rank.rank: rank for rank in record.ranks}
    of_culprits = [there[culprit.rank] for culprit in record.culprits if culprit.rank in there]
    phases = {rank.phase for rank in of_culprits}
    return Finding(
        kind="stall" if back else record.kind,
        severity="warning" if back else "critical",
        title=title_of(record),
        ranks=tuple(sorted({culprit.rank for culprit in record.culprits})),
        phase=phases.pop() or None if len(phases) == 1 else None,
        steps=steps_of(record),
        cost={
            "share": 0.0,
            "seconds": round(seconds, 3),
            "rank_hours": round(seconds * len(record.ranks) / 3600, 4),
            "if_fixed": None,
        },
        evidence=_evidence(record, seconds),
        advice=advice_for(record),
        confidence=UNSURE if record.undecidable else SURE,
    )


def title_of(record: HangRecord) -> str:
    """The record's, with the time it took where nothing else in it says that something is wrong: nobody waits."""
    seconds, record = stood_s(record), told_of(record)
    if record.over == "recovered":
        then = record.title.replace(" never called ", " had not called ", 1)
        return f"The job stood still for {seconds_text(seconds)} and came back. {then}"
    if record.victims or record.kind not in ("hang_host", "hang_input"):
        return record.title
    # Told once and read for as long as it lasts: of one that goes on only what stays true.
    ended = record.over is not None
    nothing = f"happened for {seconds_text(seconds)}" if ended else f"has happened for {more_than_text(seconds)}"
    return f"{record.title.removesuffix('.')}; nothing {nothing}."


def steps_of(record: HangRecord) -> tuple[int, int] | None:
    """The first and the last of the steps that were under way when it stopped; of ranks that are part of it."""
    part = {*(culprit.rank for culprit in record.culprits), *record.victims}
    known = [rank for rank in record.ranks if rank.step is not None]
    steps = [rank.step for rank in [one for one in known if one.rank in part] or known if rank.step is not None]
    return (min(steps), max(steps)) if steps else None


def stood_s(record: HangRecord) -> float:
    """How long nothing happened, as far as it is known yet."""
    until_ns = record.over_wall_ns if record.over_wall_ns is not None else record.declared_wall_ns
    return max(until_ns - record.stopped_wall_ns, 0) / 1e9


def _evidence(record: HangRecord, seconds: float) -> dict[str, Any]:
    waiting = record.collective
    return {
        "number": record.number,
        "host": record.host,
        "hosts": list(record.hosts),
        "culprits": [
            {
                "rank": culprit.rank,
                "reason": culprit.reason,
                "file": culprit.at.file if culprit.at else None,
                "line": culprit.at.line if culprit.at else None,
                "function": culprit.at.function if culprit.at else None,
            }
            for culprit in record.culprits[:RANKS_LISTED]
        ],
        "victims": list(record.victims),
        "undecidable": record.undecidable,
        "group": group_text(waiting) or None if waiting else None,
        "sequence": waiting.sequence if waiting else None,
        "op": waiting.op or None if waiting else None,
        "sizes": waiting.sizes or None if waiting else None,
        "cycle": list(record.cycle),
        "stopped_wall_ns": record.stopped_wall_ns,
        "stood_s": round(seconds, 3),
        "threshold_s": record.threshold_s,
        "over": record.over,
        "action": record.action or None,
        "told_by": list(record.evidence),
    }
