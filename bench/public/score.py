"""Compare a recorded run of a public program with a bare one, and judge what was found.  Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frameworks.score import OF_MACHINE

from public.cases import Fault, Program
from public.runner import Outcome

__all__ = ["Judged", "judge", "judge_fault", "render", "steps_of", "values_of"]

Finding = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Judged:
    name: str
    load: str
    problems: tuple[str, ...]
    """What differs, is missing or is wrong; empty: all is right."""
    steps: str = ""
    """Of the program and, where it differs, as recorded."""
    output: str = ""
    verdict: str = ""
    """The first finding that warns, or "healthy"."""
    others: tuple[str, ...] = ()
    accused: tuple[str, ...] = ()
    """Findings that warn and are not true of this program."""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return not self.problems


def values_of(program: Program, text: str) -> list[str]:
    """The numbers that the program prints, as text; sorted where several ranks print in any order."""
    found = [" ".join(match) if isinstance(match, tuple) else match for match in program.values.findall(text)]
    return sorted(found) if program.ranks > 1 else found


def steps_of(program: Program, text: str) -> int | None:
    """Optimizer steps of each rank; None where the program should print it and does not."""
    if isinstance(program.steps, int):
        return program.steps
    found = program.steps.findall(text)
    return int(found[-1]) if found else None


def judge(program: Program, bare: Outcome, recorded: Outcome, again: Outcome | None = None, *, load: str) -> Judged:
    """``again``: a second bare run, which shows whether the numbers change by themselves."""
    problems = [*_endings(bare, recorded), *_recorded_steps(program, recorded)]
    theirs, ours = values_of(program, bare.text), values_of(program, recorded.text)
    output = f"{len(theirs)} values identical"
    if not theirs:
        problems.append("the bare run prints no value")
    if len(theirs) != len(ours):
        problems.append(f"output differs: {_difference(theirs, ours)}")
    elif theirs != ours:
        same = program.repeatable and (again is None or values_of(program, again.text) == theirs)
        output = _difference(theirs, ours) if same else f"{len(ours)} values; two bare runs differ as well"
        if same:
            problems.append(f"output differs: {output}")
    findings = _about_the_job(recorded.summary)
    accused = [_word(finding) for finding in findings if _warns(finding) and not _expected(program, finding)]
    return Judged(
        name=program.name,
        load=load,
        problems=(*problems, *(f"accused: {word}" for word in accused)),
        steps=_steps_cell(program, recorded),
        output=output,
        verdict=_verdict(recorded.summary),
        others=tuple(_word(finding) for finding in findings[1:]),
        accused=tuple(accused),
        seconds=round(recorded.seconds, 1),
    )


def judge_fault(fault: Fault, recorded: Outcome, *, load: str) -> Judged:
    """Whether the first finding about the job is the injected one, with its rank and its words."""
    findings = _about_the_job(recorded.summary)
    first: Finding = findings[0] if findings else {}
    problems = []
    if recorded.code != fault.code:
        problems.append(f"exit code {recorded.code} instead of {fault.code}")
    if first.get("kind") not in fault.kinds:
        problems.append(f"kind {first.get('kind')} instead of {' or '.join(sorted(fault.kinds))}")
    if fault.rank is not None and list(first.get("ranks") or ()) != [fault.rank]:
        problems.append(f"ranks {first.get('ranks')} instead of {fault.rank}")
    if not re.search(fault.words, str(first)):
        problems.append(f"does not say {fault.words!r}")
    return Judged(
        name=fault.name,
        load=load,
        problems=tuple(problems),
        verdict=_verdict(recorded.summary),
        others=tuple(_word(finding) for finding in findings[1:]),
        seconds=round(recorded.seconds, 1),
    )


def _endings(bare: Outcome, recorded: Outcome) -> list[str]:
    problems = []
    if bare.code != 0:
        problems.append(f"the bare run exits with {bare.code}")
    if recorded.code != bare.code:
        problems.append(f"exit code {recorded.code} instead of {bare.code}")
    if not recorded.summary:
        return [*problems, "no summary"]
    if bare.code == 0 and recorded.summary["status"] != "finished":
        problems.append(f"status {recorded.summary['status']}")
    failures = sum(row.get("hook_failures") or 0 for row in recorded.summary["ranks"])
    return [*problems, f"{failures} failures inside our hooks"] if failures else problems


def _recorded_steps(program: Program, recorded: Outcome) -> list[str]:
    own = steps_of(program, recorded.text)
    rows = recorded.summary.get("ranks") or []
    if own is None:
        return ["the program prints no number of steps"]
    if len(rows) != program.ranks:
        return [f"{len(rows)} ranks recorded instead of {program.ranks}"]
    wrong = [row for row in rows if not own <= row["steps"] <= own + program.extra_steps]
    return [f"rank {row['rank']} made {own} steps, recorded {row['steps']}" for row in wrong]


def _steps_cell(program: Program, recorded: Outcome) -> str:
    own = steps_of(program, recorded.text)
    seen = {row["steps"] for row in recorded.summary.get("ranks") or []}
    ranks = f" × {program.ranks}" if program.ranks > 1 else ""
    return f"{own}{ranks}" if seen == {own} else f"{own}{ranks}, recorded {'/'.join(map(str, sorted(seen))) or 'none'}"


def _difference(theirs: Sequence[str], ours: Sequence[str]) -> str:
    for number, (left, right) in enumerate(zip(theirs, ours, strict=False)):
        if left != right:
            return f"value {number}: {right} instead of {left}"
    return f"{len(ours)} values instead of {len(theirs)}"


def _about_the_job(summary: Mapping[str, Any]) -> list[Finding]:
    """Findings about the machine are set aside: beside a load they are true."""
    return [finding for finding in summary.get("findings") or () if finding["kind"] not in OF_MACHINE]


def _expected(program: Program, finding: Finding) -> bool:
    pairs = [text.partition(":") for text in program.expected]
    return any(finding["kind"] == kind and word in finding["title"] for kind, _, word in pairs)


def _warns(finding: Finding) -> bool:
    return finding["severity"] in ("warning", "critical")


def _verdict(summary: Mapping[str, Any]) -> str:
    found = [finding for finding in summary.get("findings") or () if _warns(finding)]
    return f"{found[0]['kind']}: {found[0]['title']}" if found else "healthy"


def _word(finding: Finding) -> str:
    word = f"{finding['kind']}: {finding['title']}"
    return word if _warns(finding) else f"({word})"


def render(judged: Sequence[Judged]) -> str:
    """One block for each program, and the totals."""
    lines = []
    for row in judged:
        lines.append(f"{row.name} ({row.load}, {row.seconds:.0f} s): {'right' if row.right else 'WRONG'}")
        lines += [f"    {problem}" for problem in row.problems]
        lines += [f"    steps {row.steps}; {row.output}"] if row.output else []
        lines += [f"    {row.verdict}", *(f"    also {other}" for other in row.others)]
    wrong = sum(not row.right for row in judged)
    lines.append(f"{len(judged) - wrong} of {len(judged)} right; {sum(bool(row.accused) for row in judged)} accused")
    return "\n".join(lines)
