"""What Stepscope says of a run against what was done to it.  Pure functions.

A fault is *right* when the first finding about the job has the right kind, names the right rank (or none, where all
ranks have it) and the line that loses the time, and no other finding that warns blames another rank.  A healthy run is
right when no finding that warns blames a rank, or says that one died or hung.  Findings about the machine are set
aside: on a busy one they are true.  So are those about a wait of the framework itself that blame nobody.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frameworks.cases import OWN_WAITS, Case, expected_of, fault_lines

__all__ = ["NEEDED", "Judged", "good_enough", "judge", "names_line", "places_in", "render"]

NEEDED = 0.95
"""Share of the faults that must be right."""
NEAR = 2
"""Lines that a finding's line may be off: a statement may have several."""

OF_MACHINE = frozenset({"cpu_saturated", "ram_pressure"})

Finding = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Judged:
    name: str
    framework: str
    healthy: bool
    problems: tuple[str, ...] = ()
    """Why it is not right."""
    kind: str = ""
    """Of the first finding, and what else it says:"""
    ranks: tuple[int, ...] = ()
    phase: str | None = None
    places: tuple[str, ...] = ()
    title: str = ""
    others: tuple[str, ...] = ()
    """Other findings: kind, with ranks where they blame any; those that do not warn in brackets."""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return not self.problems


def judge(case: Case, summary: Mapping[str, Any], *, exit_code: int | None, seconds: float = 0.0) -> Judged:
    findings = [finding for finding in summary.get("findings") or () if not _set_aside(case, finding)]
    first: Finding = findings[0] if findings else {}
    ranks = case.framework.ranks
    problems = []
    if exit_code != 0:
        problems.append("killed" if exit_code is None else f"exit code {exit_code}")
    if summary.get("status") != "finished":
        problems.append(f"status {summary.get('status')}")
    if summary.get("world_size") != ranks:
        problems.append(f"{summary.get('world_size')} ranks")
    problems += _of_healthy(findings, ranks) if case.healthy else _of_fault(case, findings, first)
    return Judged(
        name=case.name,
        framework=case.framework.name,
        healthy=case.healthy,
        problems=tuple(problems),
        kind=first.get("kind", ""),
        ranks=tuple(first.get("ranks") or ()),
        phase=first.get("phase"),
        places=tuple(f"{file}:{line}" for file, line in places_in(first)),
        title=first.get("title", ""),
        others=tuple(_word(finding, ranks) for finding in findings[1:]),
        seconds=round(seconds, 1),
    )


def _set_aside(case: Case, finding: Finding) -> bool:
    wait = OWN_WAITS.get(case.framework.name)
    place = (finding.get("evidence") or {}).get("place")
    return finding["kind"] in OF_MACHINE or bool(
        wait and isinstance(place, str) and place.startswith(f"{wait}:") and not finding.get("ranks")
    )


def _of_healthy(findings: Sequence[Finding], ranks: int) -> list[str]:
    return [f"accused: {_word(finding, ranks)}" for finding in findings if _blames(finding, ranks) or _ends(finding)]


def _of_fault(case: Case, findings: Sequence[Finding], first: Finding) -> list[str]:
    expected = expected_of(case)
    assert expected is not None
    ranks = case.framework.ranks
    blamed = sorted(first.get("ranks") or ())
    problems = []
    # A run of which nothing is warned, but of the machine, is as good as one that is called healthy.
    kinds = {first.get("kind")} | (set() if any(map(_warns, findings)) else {"healthy"})
    if not kinds & expected.kinds:
        problems.append("kind")
    if case.culprit is None:
        if 0 < len(blamed) < ranks:
            problems.append("rank")
    elif blamed != [case.culprit]:
        problems.append("rank")
    if expected.line and not names_line(first, fault_lines(case), expected.functions):
        problems.append("line")
    own = [] if case.culprit is None else [case.culprit]
    false = [each for each in findings[1:] if _ends(each) or (_blames(each, ranks) and list(each["ranks"]) != own)]
    return problems + [f"also blames {_word(each, ranks)}" for each in false]


def _warns(finding: Finding) -> bool:
    return finding["severity"] in ("warning", "critical")


def _blames(finding: Finding, ranks: int) -> bool:
    return _warns(finding) and 0 < len(finding.get("ranks") or ()) < ranks


def _ends(finding: Finding) -> bool:
    """Whether it says that a rank died or the job hung."""
    return str(finding.get("kind")).startswith(("rank_crashed", "rank_lost", "hang_"))


def _said(finding: Finding) -> str:
    """Everything in it that a reader may find a place in."""
    return json.dumps([finding.get("title"), finding.get("evidence"), finding.get("advice")])


def places_in(finding: Finding) -> list[tuple[str, int]]:
    """File names and lines that it names, each once."""
    found = re.findall(r"([\w-]+\.py):(\d+)", _said(finding))
    return list(dict.fromkeys((file, int(line)) for file, line in found))


def names_line(finding: Finding, lines: frozenset[tuple[str, int]], functions: Sequence[str]) -> bool:
    near = any(file == right and abs(line - at) <= NEAR for file, line in places_in(finding) for right, at in lines)
    return near or any(re.search(rf"\b{re.escape(name)}\b", _said(finding)) for name in functions)


def _word(finding: Finding, ranks: int) -> str:
    own = finding.get("ranks") or ()
    word = str(finding["kind"]) + (f" r{'+'.join(map(str, own))}" if 0 < len(own) < ranks else "")
    return word if finding["severity"] in ("warning", "critical") else f"({word})"


# -- all of them ----------------------------------------------------------------------------------------------------


def share_right(judged: Sequence[Judged]) -> float:
    return sum(each.right for each in judged) / len(judged) if judged else 1.0


def good_enough(judged: Sequence[Judged]) -> bool:
    """Enough of the faults are right, and so is every healthy run."""
    faults = [each for each in judged if not each.healthy]
    return share_right(faults) >= NEEDED and all(each.right for each in judged if each.healthy)


def render(judged: Sequence[Judged]) -> str:
    """A table for each framework, and the share that is right."""
    heading = ("case", "verdict", "rank", "phase", "place", "seconds", "right", "other findings")
    parts = []
    for framework in dict.fromkeys(each.framework for each in judged):
        own = [each for each in judged if each.framework == framework]
        table = [heading, *map(_cells, own)]
        widths = [max(len(line[at]) for line in table) for at in range(len(heading))]
        parts += [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
        ]
        parts += [f"{framework}: {_right(own)}", ""]
    faults = [each for each in judged if not each.healthy]
    healthy = [each for each in judged if each.healthy]
    parts.append(f"faults: {_right(faults)} ({share_right(faults):.1%}; needed: {NEEDED:.0%})")
    parts.append(f"healthy: {sum(not each.right for each in healthy)} of {len(healthy)} accused or failed")
    return "\n".join(parts)


def _right(judged: Sequence[Judged]) -> str:
    return f"{sum(each.right for each in judged)} of {len(judged)} right"


def _cells(row: Judged) -> tuple[str, ...]:
    return (
        row.name.partition("/")[2],
        row.kind or "–",
        "+".join(map(str, row.ranks)) or "–",
        row.phase or "–",
        " ".join(row.places[:2]) or "–",
        f"{row.seconds:.0f}",
        "yes" if row.right else ", ".join(row.problems),
        " ".join(row.others),
    )
