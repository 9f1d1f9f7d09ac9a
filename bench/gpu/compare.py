"""Compare a bare run with a recorded one: exit code, losses, steps, standard error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpu.cases import Case
from gpu.runner import Outcome

__all__ = ["Comparison", "added_lines", "compare", "is_slow", "losses_of", "steps_of", "why_broken"]

Losses = dict[int, list[tuple[str, str]]]
"""By rank: what was measured (``loss 12``, ``eval 3``) and its value, bit by bit."""

# Not only at the beginning of a line: several ranks write to one file, and one may be in the middle of a line.
_REPORTED = re.compile(r"(loss|eval) (\d+) (\d+) (-?0x[\da-f.p+-]+|nan|-?inf)$", re.MULTILINE)
_COUNTED = re.compile(r"steps (\d+) (\d+)$", re.MULTILINE)
_NORMAL = (
    # Who else uses the GPU: other cases, at the same time.
    (re.compile(r"(?:Process \d+ has [\d.]+ [KMG]?i?B memory in use\. ?)+"), ""),
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"\S*/(?=[^/\s]*$|[^/\s]*\s)"), "PATH/"),
    (re.compile(r"0x[0-9a-fA-F]+"), "#"),
    (re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}"), "#"),
    (re.compile(r"\d+(?:[.,:\-+e]\d+)*"), "#"),
    (re.compile(r"\b(?:[KMGT]i?B|bytes|ms|us|s)\b"), "UNIT"),
    (re.compile(r"\s+"), " "),
)
_PROGRESS_BAR = re.compile(r"\d+%\|.*\|")
_RANK = re.compile(r"^\[?rank[\d#]+\]?: ?")
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception|Interrupt)\b")
OURS = "stepscope"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    differences: list[str] = field(default_factory=list)
    """One sentence each; empty: the runs are alike."""
    unstable: str = ""
    """How bare runs differ among themselves, so that the losses of the recorded one say nothing; empty: they don't."""
    losses: int = 0
    losses_same: bool = True
    added: list[str] = field(default_factory=list)
    """Lines that only the recorded run prints, and that are not ours."""
    own_lines: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        if self.differences:
            return "DIFFERS"
        return "unclear" if self.unstable else "ok"


def losses_of(stdout: str) -> Losses:
    found: Losses = {}
    for kind, rank, number, value in _REPORTED.findall(stdout):
        found.setdefault(int(rank), []).append((f"{kind} {number}", value))
    return found


def steps_of(stdout: str) -> dict[int, int]:
    """The job's own count of steps, by rank."""
    return {int(rank): int(count) for rank, count in _COUNTED.findall(stdout)}


def compare(case: Case, bare: Outcome, recorded: Outcome, others: Sequence[Outcome] = ()) -> Comparison:
    """``others``: more bare runs, which show what changes by itself."""
    differences = [*_endings_differ(case, bare, recorded), *_steps_differ(case, bare, recorded)]
    theirs, ours = losses_of(bare.stdout), losses_of(recorded.stdout)
    why = losses_differ(theirs, ours, cut=case.cut)
    changed = [each for each in others if losses_differ(theirs, losses_of(each.stdout), cut=case.cut)]
    unstable = f"{len(changed)} of {len(others)} other bare runs give different losses" if why and changed else ""
    if why and not unstable:
        differences.append(why)
    known = "\n".join(each.stderr for each in (bare, *others))
    added = added_lines(known, recorded.stderr, cut=case.cut, ranks=case.ranks)
    if added:
        differences.append(f"{len(added)} lines added to standard error")
    if not case.cut and not case.ranks:  # several ranks write into one another's lines
        known = "\n".join(each.stdout for each in (bare, *others))
        printed = added_lines(known, recorded.stdout, ours="")
        if printed:
            differences.append(f"{len(printed)} lines added to standard output")
            added += printed
    return Comparison(
        differences=differences,
        unstable=unstable,
        losses=sum(map(len, theirs.values())),
        losses_same=not why,
        added=added,
        own_lines=[line for line in recorded.stderr.splitlines() if line.startswith(OURS)],
    )


def why_broken(case: Case, bare: Outcome) -> str:
    """Why the bare run is not what the case means; "" when it is."""
    if bare.code is None:
        return f"the bare run did not end within {case.timeout_s:g} s"
    if bare.code not in case.exit_codes:
        return f"the bare run exits with {bare.code}, expected {' or '.join(map(str, case.exit_codes))}"
    if case.stderr_has not in bare.stderr:
        return f"the bare run does not print {case.stderr_has!r}"
    if not losses_of(bare.stdout):
        return "the bare run reports no loss"
    reported = len(steps_of(bare.stdout))
    if not reported or (not case.cut and reported != max(case.ranks, 1)):
        return "the bare run does not report the steps of every rank"
    return ""


def _endings_differ(case: Case, bare: Outcome, recorded: Outcome) -> list[str]:
    if recorded.code is None:
        return [f"the recorded run did not end within {case.timeout_s:g} s", *recorded.left]
    found = []
    if recorded.code != bare.code:
        found.append(f"exit code {recorded.code} instead of {bare.code}")
    if case.stderr_has not in recorded.stderr:
        found.append(f"the recorded run does not print {case.stderr_has!r}")
    if len(recorded.left) > len(bare.left):
        found.append(f"processes left behind: {'; '.join(recorded.left)}")
    if is_slow(bare, recorded):
        found.append(f"took {recorded.seconds:.0f} s instead of {bare.seconds:.0f} s")
    return found


def is_slow(bare: Outcome, recorded: Outcome) -> bool:
    """So much slower that something must have been waiting; cases run side by side, so less says nothing."""
    return recorded.seconds > 3 * bare.seconds and recorded.seconds > bare.seconds + 20


def _steps_differ(case: Case, bare: Outcome, recorded: Outcome) -> list[str]:
    theirs, seen = steps_of(recorded.stdout), recorded.recorded
    found = []
    if theirs != steps_of(bare.stdout):
        found.append(f"the job counts {_listed(theirs)} steps instead of {_listed(steps_of(bare.stdout))}")
    if seen is None or seen.problem:
        return [*found, seen.problem if seen is not None else "not recorded"]
    for rank, count in sorted(theirs.items()):
        ours = seen.steps.get(rank)
        if ours is None or not count <= ours <= count + case.extra_steps:
            found.append(f"rank {rank} made {count} steps, Stepscope has {ours}")
    if seen.captures < case.captures:
        found.append(f"{seen.captures} traces instead of {case.captures}")
    if seen.hook_failures:
        found.append(f"{seen.hook_failures} failures inside our hooks")
    return found


def losses_differ(theirs: Losses, ours: Losses, *, cut: bool) -> str:
    """The first difference, as a sentence; "" when there is none."""
    for rank in sorted({*theirs, *ours}):
        left, right = theirs.get(rank, []), ours.get(rank, [])
        if cut:
            shortest = min(len(left), len(right))
            left, right = left[:shortest], right[:shortest]
        if len(left) != len(right):
            return f"rank {rank} reports {len(right)} losses instead of {len(left)}"
        for (what, value), (_, other) in zip(left, right, strict=True):
            if value != other:
                return f"rank {rank}, {what}: {float.fromhex(other)!r} instead of {float.fromhex(value)!r}"
    return ""


def added_lines(bare: str, recorded: str, *, cut: bool = False, ranks: int = 0, ours: str = OURS) -> list[str]:
    """Lines that only the recorded run prints; numbers, paths and units do not count.

    ``ours``: how lines begin that we may add; "": none.

    ``cut``: the frames of tracebacks are left out, since they depend on the moment at which a job is stopped.  With
    several ranks so does what the others still get to print, and only the names of exceptions are compared.
    """
    known = {_normal(line) for line in _lines(bare, cut=cut)}
    if cut and ranks:
        known = {_exception(line) for line in known}
    found = []
    for line in _lines(recorded, cut=cut):
        told = _normal(line)
        if cut and ranks:
            told = _exception(told)
        if told and not (ours and line.startswith(ours)) and told not in known and line not in found:
            found.append(line)
    return found


def _lines(text: str, *, cut: bool) -> Iterator[str]:
    frame = False
    for line in text.replace("\r", "\n").splitlines():
        bare = _RANK.sub("", line)
        if not bare.strip() or _PROGRESS_BAR.search(bare):
            continue
        if cut:
            if bare.startswith("  File "):
                frame = True
                continue
            if frame and bare.startswith("    "):
                continue
            frame = False
        yield line


def _exception(line: str) -> str:
    """The exception that a line ends a traceback with; "" for another line."""
    match = _EXCEPTION.match(_RANK.sub("", line))
    return match.group() if match else ""


def _normal(line: str) -> str:
    for pattern, replacement in _NORMAL:
        line = pattern.sub(replacement, line)
    return line.strip()


def _listed(steps: dict[int, int]) -> str:
    return "/".join(str(count) for _, count in sorted(steps.items())) or "no"
