"""Critical findings that were shown while a run was active, and what became of them in the final result.

The run's history of findings (``records/finding_history.py``) says when a finding became critical, was still shown but
no longer critical, or was no longer shown.  A finding that was critical in most of the run must be in the final result;
if it is not, the summary says why.  Runs recorded before there was a history have events with the same information.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.diagnosis.engine.window import Window
from stepscope.diagnosis.hysteresis import AT_ONCE
from stepscope.judge import thresholds
from stepscope.records.finding import Finding
from stepscope.records.finding_history import FindingEpisode
from stepscope.records.series import RunData
from stepscope.records.text import share_text

__all__ = ["Withdrawn", "find_withdrawn"]

OPENED, CHANGED, RESOLVED = "finding_opened", "finding_changed", "finding_resolved"


@dataclass(frozen=True, kw_only=True)
class Withdrawn:
    kind: str
    ranks: tuple[int, ...]
    phase: str | None
    title: str
    """As it was last shown."""
    steps: tuple[int, int]
    """From the step at which it became critical to the last one at which it was."""
    shown_steps: int
    reason: str

    @property
    def text(self) -> str:
        first, last = self.steps
        shown = f"{self.title.rstrip('.')} (shown as critical in steps {first} to {last} while the run was active)"
        return f"Withdrawn: {shown}, because {self.reason}."

    @property
    def document(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "ranks": list(self.ranks),
            "phase": self.phase,
            "title": self.title,
            "steps": list(self.steps),
            "shown_steps": self.shown_steps,
            "reason": self.reason,
            "text": self.text,
        }


@dataclass
class _Shown:
    """One finding by kind, ranks and phase."""

    title: str
    first: int
    last: int
    steps: int = 0
    since: int | None = None
    """The step at which it became critical, while it is."""


def find_withdrawn(run: RunData, window: Window, findings: Sequence[Finding]) -> list[Withdrawn]:
    """Findings that were critical in most of the last attempt's steps and are not among ``findings`` as a warning."""
    if not len(window.steps):
        return []
    last_step = int(window.steps[-1])
    found = []
    for (kind, ranks, phase), shown in _shown(
        [*run.events, *_as_events(run.history)], window.attempt, last_step
    ).items():
        if shown.steps < thresholds.SHOWN_SHARE * len(window.steps) or any(
            finding.severity != "info" and (finding.kind, finding.ranks) == (kind, ranks) for finding in findings
        ):
            continue
        found.append(
            Withdrawn(
                kind=kind,
                ranks=ranks,
                phase=phase,
                title=shown.title,
                steps=(shown.first, shown.last),
                shown_steps=shown.steps,
                reason=_reason(kind, ranks, phase, shown, findings, last_step),
            )
        )
    return found


Key = tuple[str, tuple[int, ...], str | None]


def _as_events(history: Sequence[FindingEpisode]) -> Iterator[dict[str, Any]]:
    """Yield the history in the form of the events of earlier versions; hangs and crashes have records of their own."""
    for change in history:
        finding = change.finding
        if finding.get("kind") not in AT_ONCE:
            critical = finding.get("severity") == "critical"
            what = RESOLVED if not change.open else OPENED if critical else CHANGED
            yield {**finding, "event": what, "step": change.step, "attempt": change.attempt}


def _shown(events: Sequence[Mapping[str, Any]], attempt: int, last_step: int) -> dict[Key, _Shown]:
    found: dict[Key, _Shown] = {}
    for event in events:
        what, step = event.get("event"), event.get("step")
        if what not in (OPENED, CHANGED, RESOLVED) or event.get("attempt", attempt) != attempt:
            continue
        ranks = event.get("ranks")
        if not isinstance(step, int) or not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
            continue
        phase = event.get("phase")
        key = (str(event.get("kind")), tuple(ranks), phase if isinstance(phase, str) else None)
        if what != OPENED and key not in found:
            continue  # it was never critical
        own = found.setdefault(key, _Shown(title="", first=step, last=step))
        own.title = str(event.get("title") or own.title)
        if what == OPENED:
            own.since = step if own.since is None else own.since
        elif own.since is not None:
            own.steps, own.last, own.since = own.steps + step - own.since, step, None
    for own in found.values():
        if own.since is not None:
            own.steps, own.last = own.steps + last_step - own.since + 1, last_step
    return found


def _reason(
    kind: str, ranks: tuple[int, ...], phase: str | None, shown: _Shown, findings: Sequence[Finding], last_step: int
) -> str:
    """Why the final result does not have it; the most specific that is known."""
    warned = [finding for finding in findings if finding.severity != "info"]
    same = next((finding for finding in findings if (finding.kind, finding.ranks) == (kind, ranks)), None)
    crowded = next((finding for finding in warned if finding.kind == "cpu_saturated"), None)
    if same is not None and crowded is not None:
        return f"other processes explain it ({crowded.title.rstrip('.')})"
    if same is not None:
        share = share_text(same.cost.get("share") or 0.0)
        return f"over the whole run it costs {share} of the training time, too little to warn of"
    instead = [
        each for each in warned if (ranks and set(each.ranks) & set(ranks)) or (not ranks and each.phase == phase)
    ]
    if instead:
        return f"the whole run shows another cause: {instead[0].title.rstrip('.')}"
    if last_step - shown.last >= thresholds.RELEASE_STEPS:
        return f"it was over after step {shown.last} and does not show in the run as a whole"
    if crowded is not None:
        return f"over the whole run it is not certain, and {_lowered(crowded.title.rstrip('.'))}"
    return "over the whole run it cannot be distinguished from chance"


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
