"""Claims against truth.  Pure functions.

A claim is *true* when its kind is one of the truth's (or a consequence that the truth lists) and it blames nobody else:
a straggler found on the wrong rank is false.  Precision is over claims of severity warning or worse, those of healthy
runs included; an ``info`` counts for recall and never against precision.  Rank, phase, step and period are asked of
faults that were found at all, of the best claim that names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from league.truth import Claim, Truth

__all__ = ["Judged", "Totals", "judge", "names_fault", "total"]

STEP_TOLERANCE = 2
"""What happens after a step's end may be booked to the next one."""
PERIOD_TOLERANCE = 1.0
OF_MACHINE = frozenset({"cpu_saturated"})
"""Where it is true, it may name any rank: other programs are on the core of one of them, whoever has the fault."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One run; None: not asked, or nothing found to ask about."""

    healthy: bool
    found: bool
    rank: bool | None
    phase: bool | None
    step: bool | None
    period: bool | None
    warned: int
    false: tuple[str, ...]
    """Titles of warned claims that are not true."""

    @property
    def perfect(self) -> bool:
        right = all(answer is not False for answer in (self.rank, self.phase, self.step, self.period))
        return not self.false and right and (self.healthy or self.found)


def judge(truth: Truth, claims: Sequence[Claim], ranks: int) -> Judged:
    naming = [claim for claim in claims if truth.kinds & set(claim.kinds)]
    best = max((_answers(truth, claim, ranks) for claim in naming), key=_points, default=(None,) * 4)
    warned = [claim for claim in claims if claim.warned]
    return Judged(
        healthy=truth.healthy,
        found=bool(naming),
        rank=best[0],
        phase=best[1],
        step=best[2],
        period=best[3],
        warned=len(warned),
        false=tuple(f"{'|'.join(c.kinds)}: {c.title}" for c in warned if not _is_true(truth, c, ranks)),
    )


def names_fault(truth: Truth, claims: Iterable[Claim], ranks: int) -> bool:
    """Whether the fault is named, with its rank where it has one."""
    return any(truth.kinds & set(claim.kinds) and _rank_right(truth, claim, ranks) is not False for claim in claims)


def _is_true(truth: Truth, claim: Claim, ranks: int) -> bool:
    kinds = set(claim.kinds)
    if kinds & truth.also_true & OF_MACHINE:
        return True
    if kinds & truth.kinds:
        return _rank_right(truth, claim, ranks) is not False
    # A consequence may concern more ranks than the culprit, but not others instead.
    includes = truth.ranks is None or not claim.ranks or set(truth.ranks) <= set(claim.ranks)
    return bool(kinds & truth.also_true) and includes


def _rank_right(truth: Truth, claim: Claim, ranks: int) -> bool | None:
    if truth.ranks is None or ranks == 1:
        return None
    return set(claim.ranks) == set(truth.ranks)


def _answers(truth: Truth, claim: Claim, ranks: int) -> tuple[bool | None, bool | None, bool | None, bool | None]:
    phase = step = period = None
    if truth.phases:
        phase = claim.phase in truth.phases
    if truth.step is not None:
        near = range(truth.step - STEP_TOLERANCE, truth.step + STEP_TOLERANCE + 1)
        step = claim.steps is not None and claim.steps[0] in near
    if truth.period is not None:
        period = claim.period is not None and abs(claim.period - truth.period) <= PERIOD_TOLERANCE
    return _rank_right(truth, claim, ranks), phase, step, period


def _points(answers: tuple[bool | None, ...]) -> tuple[bool, ...]:
    return tuple(answer is not False for answer in answers)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Each pair: how many are right, of how many."""

    runs: int
    perfect: int
    precision: tuple[int, int]
    recall: tuple[int, int]
    rank: tuple[int, int]
    phase: tuple[int, int]
    step: tuple[int, int]
    period: tuple[int, int]
    healthy_warned: tuple[int, int]
    """Of a fault that they do not have; a warning that the machine was busy, when it was, does not count."""


def total(judged: Sequence[Judged]) -> Totals:
    warned = sum(each.warned for each in judged)
    faulty = [each for each in judged if not each.healthy]
    healthy = [each for each in judged if each.healthy]
    return Totals(
        runs=len(judged),
        perfect=sum(each.perfect for each in judged),
        precision=(warned - sum(len(each.false) for each in judged), warned),
        recall=(sum(each.found for each in faulty), len(faulty)),
        rank=_count([each.rank for each in faulty]),
        phase=_count([each.phase for each in faulty]),
        step=_count([each.step for each in faulty]),
        period=_count([each.period for each in faulty]),
        healthy_warned=(sum(bool(each.false) for each in healthy), len(healthy)),
    )


def _count(answers: Iterable[bool | None]) -> tuple[int, int]:
    asked = [answer for answer in answers if answer is not None]
    return sum(asked), len(asked)
