"""The history of findings of a live run: when each was first shown, changed, and was over.

The run's own hub writes ``finding-history.jsonl``; a hub that only reads runs of others writes nothing.  An episode
begins when a finding is shown as a warning or worse, and ends when it is no longer shown, whatever its severity was
last.  A hub that is started again reads the file and continues: open episodes keep their numbers, and the hysteresis
(``diagnosis/hysteresis.py``) begins with the findings that were shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.diagnosis.hysteresis import Watched
from stepscope.records import run_clock
from stepscope.records.dataclass_json import decoded
from stepscope.records.finding import Finding
from stepscope.records.finding_history import RESTARTED, FindingEpisode, episode_line, episodes_of
from stepscope.store.documents import read_finding_history
from stepscope.store.file_io import append_jsonl
from stepscope.store.paths import FINDING_HISTORY

__all__ = ["FindingHistory"]

MOST_EPISODES = 1000
MOST_CHANGES = 50
"""Of one episode.  A finding that comes and goes in every window must not fill the disk."""
MUCH_COST = 1.5
"""The cost changed if it is this many times what was last written, or falls by as much …"""
MUCH_SHARE = 0.05
"""… and by this share of the training time."""

Key = tuple[str, tuple[int, ...], str | None]


class FindingHistory:
    def __init__(self, run_dir: Path, *, wall_ns: Callable[[], int] = run_clock.wall_ns) -> None:
        self._path = run_dir / FINDING_HISTORY
        self._wall_ns = wall_ns
        before = episodes_of(read_finding_history(run_dir))
        self._open: dict[Key, FindingEpisode] = {}
        for episode in before:
            if episode.open and (finding := _finding(episode)) is not None:
                self._open[_key(finding)] = episode
        self._written: dict[int, FindingEpisode] = {episode.number: episode for episode in self._open.values()}
        """By number of an open episode, as it was last written."""
        self._last = max((episode.number for episode in before), default=0)
        self._changes: Counter[int] = Counter()
        self._unwritten: list[dict[str, Any]] = []

    @property
    def open(self) -> tuple[FindingEpisode, ...]:
        """The open episodes, in order of numbers, each with its finding as shown now."""
        return tuple(sorted(self._open.values(), key=lambda episode: episode.number))

    def watched(self, *, step: int, attempt: int) -> tuple[Watched, ...]:
        """What the hysteresis begins with at ``step``: the findings of this attempt that were shown before a restart.

        They count as found just now, since it is not known when an evaluation last found them.
        """
        own = [episode for episode in self._open.values() if episode.attempt == attempt]
        return tuple(
            Watched(finding=finding, first_step=episode.first_step, last_step=step, severe_step=step, shown=True)
            for episode in own
            if (finding := _finding(episode)) is not None
        )

    def note(self, shown: Sequence[Finding], *, step: int, attempt: int) -> tuple[FindingEpisode, ...]:
        """Compare what is shown now with what was before; return the episodes that began, changed or ended."""
        wall_ns = self._wall_ns()
        changed: list[FindingEpisode] = []
        now = {_key(finding): finding for finding in shown}
        for key, episode in list(self._open.items()):
            if episode.attempt > attempt:
                now.pop(key, None)  # the model has not caught up after a restart of the hub
            elif episode.attempt < attempt:
                changed.append(self._resolved(key, step=episode.step, wall_ns=wall_ns, why=RESTARTED))
            elif key not in now:
                changed.append(self._resolved(key, step=step, wall_ns=wall_ns))
            else:
                changed += self._followed(key, now.pop(key), step=step, wall_ns=wall_ns)
        for key, finding in now.items():
            if finding.severity != "info" and self._last < MOST_EPISODES:
                changed.append(self._begun(key, finding, step=step, wall_ns=wall_ns, attempt=attempt))
        self._unwritten += [episode_line(episode) for episode in changed]
        self.flush()
        return tuple(changed)

    def conclude(self, *, step: int, why: str) -> tuple[FindingEpisode, ...]:
        """End all open episodes."""
        wall_ns = self._wall_ns()
        changed = [
            self._resolved(key, step=max(step, self._open[key].step), wall_ns=wall_ns, why=why) for key in [*self._open]
        ]
        self._unwritten += [episode_line(episode) for episode in changed]
        self.flush()
        return tuple(changed)

    def flush(self) -> None:
        """Write what a full disk refused before, if that is possible now."""
        if self._unwritten:
            with suppress(OSError):
                append_jsonl(self._path, self._unwritten)
                self._unwritten.clear()

    def _begun(self, key: Key, finding: Finding, *, step: int, wall_ns: int, attempt: int) -> FindingEpisode:
        self._last += 1
        episode = FindingEpisode(
            number=self._last,
            change="opened",
            finding=finding.to_dict(),
            attempt=attempt,
            first_step=step,
            first_wall_ns=wall_ns,
            step=step,
            wall_ns=wall_ns,
        )
        self._open[key] = self._written[episode.number] = episode
        return episode

    def _followed(self, key: Key, finding: Finding, *, step: int, wall_ns: int) -> list[FindingEpisode]:
        """Take over the finding as it is shown now; a change is one of its severity, a capture that explains it,
        or a large one of its cost.
        """
        episode = replace(self._open[key], finding=finding.to_dict())
        self._open[key] = episode
        written = self._written[episode.number].finding
        same = written["severity"] == finding.severity and _capture(written) == _capture(episode.finding)
        if same and not _much(_share(written), _share(episode.finding)):
            return []
        if self._changes[episode.number] >= MOST_CHANGES:
            return []
        self._changes[episode.number] += 1
        episode = replace(episode, change="changed", step=step, wall_ns=wall_ns)
        self._open[key] = self._written[episode.number] = episode
        return [episode]

    def _resolved(self, key: Key, *, step: int, wall_ns: int, why: str = "") -> FindingEpisode:
        episode = self._open.pop(key)
        del self._written[episode.number]
        self._changes.pop(episode.number, None)
        return replace(episode, change="resolved", step=step, wall_ns=wall_ns, why=why)


def _key(finding: Finding) -> Key:
    return finding.kind, finding.ranks, finding.phase


def _finding(episode: FindingEpisode) -> Finding | None:
    try:
        return decoded(Finding, episode.finding)
    except ValueError:
        return None


def _share(finding: dict[str, Any]) -> float:
    share = finding["cost"].get("share")
    return float(share) if isinstance(share, int | float) else 0.0


def _capture(finding: dict[str, Any]) -> str:
    """The id of the capture that explains it."""
    capture = finding["evidence"].get("capture")
    return str(capture.get("id", "")) if isinstance(capture, dict) else ""


def _much(before: float, now: float) -> bool:
    low, high = sorted((before, now))
    return high - low >= MUCH_SHARE and high >= MUCH_COST * low
