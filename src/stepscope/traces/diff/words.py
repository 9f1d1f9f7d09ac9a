"""What changed between two traces, in one sentence: by how much, where, and what explains most of it.

A part may change by more than the step does, since others make up for some of it; it is not called a part of the change
then.  A process without a device waits for none: what grows between its operators is loading, Python, or a wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.records.short_names import fitted, short_name
from stepscope.records.units import ms_text
from stepscope.traces.diff.sides import OTHERS, Part
from stepscope.traces.diff.tables import Change

__all__ = ["Changes", "verdict_of_diff"]

LEADS_SHARE = 0.2
"""Of the change of the step that one operator must explain to be named."""
LEADS = 2
"""So many are named."""
OTHER_CALLS = 0.05
"""By how much the number of calls must differ to be what is told."""
HOST, DEVICE = 0, 1
NAME_CHARS = 60
EXPLAINS_SHARE = 0.5
"""Of what the host takes longer that loading, or Python in one place, must explain to be named."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Per step of a rank."""

    step: Part
    parts: list[Part]
    kernels: list[Change]
    operators: list[Change]
    loading: Part
    stops: list[Part]
    """Python that ran for long, by place."""
    on_device: bool

    @property
    def sign(self) -> int:
        return 1 if self.step.change_ns > 0 else -1


def verdict_of_diff(changes: Changes, *, clear: bool, stepped: bool) -> str:
    step = changes.step
    what = "Steps take" if stepped else "The trace takes"
    if not clear:
        after, before = ms_text(step.after_ns / 1e6), ms_text(step.before_ns / 1e6)
        return f"{what} as long as before: {after} against {before}, within their spread."
    longer = f"{ms_text(abs(step.change_ns) / 1e6)} {_more(changes.sign)}"
    percent = f" ({step.change_ns / step.before_ns:+.0%})" if step.before_ns else ""
    return f"{what} {longer}{percent}; {_because(changes)}."


def _because(changes: Changes) -> str:
    sign = changes.sign
    changed = {part.name: part.change_ns * sign for part in changes.parts}
    # What a step has outside of the device's span is the host's, too.
    waiting = changed.pop("idle") + changed.pop("outside")
    part = max(changed, key=lambda name: changed[name])
    if waiting > changed[part]:
        return _of_host(changes, waiting)
    if part == "exposed communication":
        at, of, of_whom = HOST, "", [each for each in changes.kernels if each.label[1] == "communication"]
    elif any(change.after_ns[DEVICE] or change.before_ns[DEVICE] for change in changes.operators):
        at, of, of_whom = DEVICE, "the device work of ", changes.operators
    else:
        at, of, of_whom = HOST, "", changes.kernels if changes.on_device else changes.operators
    leads = _leads(of_whom, at, sign, abs(changes.step.change_ns))
    if not leads:
        return (
            f"{_amount(changes, changed[part])}in {part}, and no single operator explains it{_made_up(changes, part)}"
        )
    return _told(changes, leads, at, of)


def _of_host(changes: Changes, waiting_ns: int) -> str:
    """``waiting_ns``: how much longer no operator or no device worked, or less."""
    sign = changes.sign
    stops = sorted(changes.stops, key=lambda each: -each.change_ns * sign)
    for place in (changes.loading, *stops[:1]):
        if place.change_ns * sign >= EXPLAINS_SHARE * waiting_ns:
            amount = _amount(changes, min(place.change_ns * sign, waiting_ns))
            return f"{amount}in {place.name}{_made_up(changes, 'idle')}"
    # Without a device the time of operators is computing, and explains no waiting.
    leads = _leads(changes.operators, HOST, sign, abs(changes.step.change_ns)) if changes.on_device else []
    if leads:
        return _told(changes, leads, HOST, "the host in ")
    where = "while the device waits for the host" if changes.on_device else "while no operator runs"
    return f"{_amount(changes, waiting_ns)}{where}, and no single operator explains it{_made_up(changes, 'idle')}"


def _told(changes: Changes, leads: list[Change], at: int, of: str) -> str:
    first, *others = (f"is {of}{_named(lead)}{_how(lead, at)}" for lead in leads)
    told = f"{_amount(changes, abs(leads[0].change_ns[at]))}{first}"
    return told + "".join(
        f", and {ms_text(abs(lead.change_ns[at]) / 1e6)} {other}" for lead, other in zip(leads[1:], others, strict=True)
    )


def _amount(changes: Changes, amount_ns: int) -> str:
    """``12 ms of it``, or if it is more than all of it ``12 ms longer``."""
    within = amount_ns <= abs(changes.step.change_ns)
    return f"{ms_text(amount_ns / 1e6)} {'of it' if within else _more(changes.sign)} "


def _made_up(changes: Changes, part: str) -> str:
    """What went the other way, where the part changed by more than the step did."""
    sign = changes.sign
    own = next(each.change_ns * sign for each in changes.parts if each.name == part)
    least = min(changes.parts, key=lambda each: each.change_ns * sign)
    if own <= abs(changes.step.change_ns) or least.change_ns * sign >= 0:
        return ""
    return f", partly made up by {ms_text(abs(least.change_ns) / 1e6)} {_more(-sign)} in {least.name}"


def _more(sign: int) -> str:
    return "longer" if sign > 0 else "less"


def _leads(changes: list[Change], at: int, sign: int, change_ns: int) -> list[Change]:
    """The few that explain most of the change, each a good part of it."""
    named = [each for each in changes if each.label[0] != OTHERS]
    most = sorted(named, key=lambda each: -each.change_ns[at] * sign)[:LEADS]
    return [each for each in most if each.change_ns[at] * sign >= LEADS_SHARE * change_ns]


def _named(lead: Change) -> str:
    return fitted(short_name(lead.label[0]), NAME_CHARS)


def _how(lead: Change, at: int) -> str:
    if lead.status == "added":
        return f", which is new ({_times(lead.after_count)} a step)"
    if lead.status == "gone":
        return f", which is gone ({_times(lead.before_count)} a step before)"
    if abs(lead.after_count - lead.before_count) > OTHER_CALLS * lead.before_count:
        return f", called {_times(lead.after_count)} a step instead of {lead.before_count:,.0f}"
    if not lead.before_count or not lead.after_count:
        return ""
    each = (lead.after_ns[at] / lead.after_count, lead.before_ns[at] / lead.before_count)
    return f", {ms_text(each[0] / 1e6)} a call instead of {ms_text(each[1] / 1e6)}"


def _times(count: float) -> str:
    return f"{count:,.0f} times" if count >= 1.5 else "once" if count >= 0.95 else f"{count:.2f} times"
