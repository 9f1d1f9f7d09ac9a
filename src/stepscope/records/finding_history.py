"""The history of a run's findings: each episode of one, from the first evaluation that showed it until it was over.

The run's hub appends one line to ``finding-history.jsonl`` whenever an episode begins, changes or ends; the last line
of an episode is its state.  Alerts, incidents, the page, the summary and the API read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from stepscope.records.dataclass_json import decoded, encoded

__all__ = ["ENDED", "RESTARTED", "EpisodeChange", "FindingEpisode", "changes_of", "episode_line", "episodes_of"]

EpisodeChange = Literal["opened", "changed", "resolved"]
ENDED = "the run ended"
RESTARTED = "the job was restarted"
"""Reasons for the end of an episode."""
MOST_LINES = 100_000
"""That are read; the hub writes fewer."""


@dataclass(frozen=True, kw_only=True)
class FindingEpisode:
    number: int
    """Counts from 1 in each run."""
    change: EpisodeChange
    """What the last line reported; an episode that was not resolved is open."""
    finding: dict[str, Any]
    """The finding as last shown, in the form of ``summary.json``."""
    attempt: int
    first_step: int
    first_wall_ns: int
    """When and at which step it was first shown."""
    step: int
    wall_ns: int
    """When and at which step it last changed; if resolved, when it was over."""
    why: str = ""
    """Why it is over, if another reason than that it no longer holds: the run ended, the job was restarted."""

    @property
    def open(self) -> bool:
        return self.change != "resolved"


def episode_line(episode: FindingEpisode) -> dict[str, Any]:
    """Return the line of ``finding-history.jsonl``."""
    return {"schema": 1, **encoded(episode)}


def changes_of(lines: Iterable[object]) -> tuple[FindingEpisode, ...]:
    """Return the changes in these lines, in order; lines that are not valid, and those beyond a limit, are skipped."""
    found: list[FindingEpisode] = []
    for line in islice(lines, MOST_LINES):
        with suppress(ValueError):
            found.append(decoded(FindingEpisode, line))
    return tuple(found)


def episodes_of(changes: Iterable[FindingEpisode]) -> tuple[FindingEpisode, ...]:
    """Return the last state of each episode, in order of numbers."""
    found = {change.number: change for change in changes}
    return tuple(found[number] for number in sorted(found))
