"""What Stepscope says of a run against what was done to it and what that cost.  Pure functions.

A fault is *right* when one finding has the right kind, rank and phase and promises what the job really gains without
the fault, and no finding that warns blames another rank.  A fault that costs next to nothing, because it is hidden
behind communication, makes a healthy run.  A healthy run is right when no finding that warns blames a rank; in one with
a hidden fault it may, for next to nothing.  Findings that blame nobody in particular are shown and not judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nccl.cases import Case

__all__ = ["Judged", "Price", "Seen", "blames", "good_enough", "judge", "promised_ms", "render"]

TOLERANCE, TOLERANCE_MS = 0.1, 0.3
"""Of the measured difference; the larger counts …"""
NOISE, MOST_NOISE = 2.0, 0.2
"""… or so many standard errors of the measured difference itself, but never more than this share of it: nobody can
promise it better than it is known."""
HIDDEN_SHARE = 0.03
"""Of the step: a fault that costs less is hidden."""
NEEDED = 0.95
"""Share of the cases that must be right."""

Finding = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What Stepscope says."""

    findings: Sequence[Finding]
    """As in summary.json."""
    hit_share: float = 1.0
    """Of the steps that the findings' costs are means over, how many the fault hit."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """What was measured: means over steps, by the job's own clock."""

    with_ms: float
    without_ms: float
    error_ms: float = 0.0
    """The standard error of their difference."""

    @property
    def cost_ms(self) -> float:
        return self.with_ms - self.without_ms

    @property
    def hidden(self) -> bool:
        return self.cost_ms < HIDDEN_SHARE * self.with_ms

    @property
    def tolerance_ms(self) -> float:
        noise_ms = min(NOISE * self.error_ms, MOST_NOISE * self.cost_ms)
        return max(TOLERANCE * self.cost_ms, TOLERANCE_MS, noise_ms)

    @property
    def next_to_nothing_ms(self) -> float:
        return max(TOLERANCE_MS, HIDDEN_SHARE * self.with_ms, NOISE * self.error_ms)

    def fits(self, promised: float | None) -> bool:
        return promised is not None and abs(promised - self.cost_ms) <= self.tolerance_ms


@dataclass(frozen=True, kw_only=True)
class Judged:
    name: str
    healthy: bool
    """Also because its fault was hidden."""
    right: bool
    problems: tuple[str, ...] = ()
    """Why it is not."""
    hidden: bool = False
    accused: bool = False
    """Whether a rank of a healthy run is blamed."""
    kind: str = ""
    ranks: tuple[int, ...] = ()
    phase: str | None = None
    promised_ms: float | None = None
    fault_ms: float = 0.0
    with_ms: float | None = None
    without_ms: float | None = None
    healthy_ms: float | None = None
    """The median of the configuration's healthy runs."""
    others: tuple[str, ...] = ()
    """Other findings: kind, with ranks where they blame any; those that do not warn in brackets."""


def promised_ms(finding: Finding, hit_share: float) -> float | None:
    """What a finding says that each step with the fault would be shorter by."""
    cost = finding.get("cost") or {}
    share, fixed_ms = cost.get("share"), (cost.get("if_fixed") or {}).get("step_ms")
    if share is None or fixed_ms is None or hit_share <= 0:
        return None
    # All of it, or more: then nothing would be left of a step.
    return float(fixed_ms * share / (1 - share) / hit_share) if share < 1 else float("inf")


def blames(finding: Finding, ranks: int) -> bool:
    return finding["severity"] in ("warning", "critical") and 0 < len(finding.get("ranks") or ()) < ranks


def judge(case: Case, seen: Seen, price: Price, *, fault_ms: float = 0.0, healthy_ms: float | None = None) -> Judged:
    hidden = not case.healthy and price.hidden
    healthy = case.healthy or hidden
    if healthy:
        problems = _accusations(case, seen, price if hidden else None)
        shown = next((finding for finding in seen.findings if blames(finding, case.ranks)), None)
    else:
        problems, shown = _of_fault(case, seen, price)
    listed = [finding for finding in seen.findings if finding is not shown and finding["kind"] != "healthy"]
    return Judged(
        name=case.name,
        healthy=healthy,
        right=not problems,
        problems=tuple(problems),
        hidden=hidden,
        accused=healthy and bool(problems),
        kind=shown["kind"] if shown else "",
        ranks=tuple(shown.get("ranks") or ()) if shown else (),
        phase=shown.get("phase") if shown else None,
        promised_ms=_rounded(promised_ms(shown, seen.hit_share)) if shown else None,
        fault_ms=fault_ms,
        with_ms=price.with_ms,
        without_ms=None if case.healthy else price.without_ms,
        healthy_ms=healthy_ms,
        others=tuple(_word(finding, case.ranks) for finding in listed),
    )


def _accusations(case: Case, seen: Seen, price: Price | None) -> list[str]:
    """Of a healthy run; ``price``: of one whose fault was hidden."""
    problems = []
    for finding in seen.findings:
        if not blames(finding, case.ranks):
            continue
        promised = promised_ms(finding, seen.hit_share)
        if price is None or promised is None or promised > price.next_to_nothing_ms:
            problems.append(f"accused: {_word(finding, case.ranks)}")
    return problems


def _of_fault(case: Case, seen: Seen, price: Price) -> tuple[list[str], Finding | None]:
    """What is wrong with the best finding, and that finding."""
    best: tuple[list[str], Finding] | None = None
    for finding in seen.findings:
        if finding["kind"] in case.kinds and finding.get("ranks"):
            wrong = _wrong(case, finding, price, promised_ms(finding, seen.hit_share))
            if best is None or len(wrong) < len(best[0]):
                best = wrong, finding
    if best is None:
        instead = next((finding for finding in seen.findings if blames(finding, case.ranks)), None)
        return ["kind" if instead else "not found"], instead
    problems, finding = best
    others = [each for each in seen.findings if each is not finding and blames(each, case.ranks)]
    false = [each for each in others if list(each["ranks"]) != [case.culprit]]
    return problems + [f"also blames {_word(each, case.ranks)}" for each in false], finding


def _wrong(case: Case, finding: Finding, price: Price, promised: float | None) -> list[str]:
    answers = {
        "rank": list(finding["ranks"]) == [case.culprit],
        "phase": finding.get("phase") in case.phases,
        "price": price.fits(promised),
    }
    return [name for name, right in answers.items() if not right]


def _word(finding: Finding, ranks: int) -> str:
    own = finding.get("ranks") or ()
    word = finding["kind"] + (f" r{'+'.join(map(str, own))}" if 0 < len(own) < ranks else "")
    return word if finding["severity"] in ("warning", "critical") else f"({word})"


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 3)


# -- all of them ----------------------------------------------------------------------------------------------------


def good_enough(judged: Sequence[Judged]) -> bool:
    """Enough of the faults are right, and no healthy run is accused."""
    faults = [each for each in judged if not each.healthy]
    return _share(faults) >= NEEDED and not any(each.accused or not each.right for each in judged if each.healthy)


def _share(judged: Sequence[Judged]) -> float:
    return sum(each.right for each in judged) / len(judged) if judged else 1.0


def _right(judged: Sequence[Judged]) -> str:
    return f"{sum(each.right for each in judged)} of {len(judged)}"


def render(judged: Sequence[Judged]) -> str:
    figures = ("promised", "measured", "with", "without", "healthy")
    heading = ("case", "fault", "verdict", "rank", "phase", *figures, "right", "other findings")
    table = [heading, *map(_cells, judged)]
    widths = [max(len(line[at]) for line in table) for at in range(len(heading))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    faults = [each for each in judged if not each.healthy]
    healthy = [each for each in judged if each.healthy]
    hidden = sum(each.hidden for each in healthy)
    counts = {
        "faults": f"{_right(faults)} right ({_share(faults):.1%}; needed: {NEEDED:.0%})",
        "healthy": f"{sum(each.accused for each in healthy)} of {len(healthy)} accused",
        "hidden": f"{hidden} of the healthy have a fault that costs less than {HIDDEN_SHARE:.0%} of the step",
        "all": f"{_right(judged)} right",
    }
    lines += ["", *(f"{name}: {words}" for name, words in counts.items())]
    return "\n".join(lines)


def _cells(row: Judged) -> tuple[str, ...]:
    cost = row.with_ms - row.without_ms if row.with_ms is not None and row.without_ms is not None else None
    verdict = "hidden" if row.hidden else ", ".join(row.problems) if not row.right else "yes"
    if row.hidden and not row.right:
        verdict = f"hidden; {', '.join(row.problems)}"
    return (
        row.name,
        _ms(row.fault_ms or None),
        row.kind or "–",
        "+".join(map(str, row.ranks)) or "–",
        row.phase or "–",
        _ms(row.promised_ms),
        _ms(cost),
        _ms(row.with_ms),
        _ms(row.without_ms),
        _ms(row.healthy_ms),
        verdict,
        " ".join(row.others),
    )


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
