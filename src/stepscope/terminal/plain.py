"""The view without a terminal: a line every few seconds, and one whenever something is found, lost or over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from stepscope.errors import HubError, HubMissing, HubRefused
from stepscope.hangs.report import past_title
from stepscope.records.text import count_text, ms_text
from stepscope.reports.layout import MARKS
from stepscope.terminal.documents import Snapshot, still_s, usual_wall_ns, usual_words
from stepscope.terminal.drawing import finding_line, news_line, plain, still_words
from stepscope.terminal.feed import Feed

__all__ = ["PlainView", "watch_plain"]

LOOK_S = 0.5
STEP_EVERY_S = 5.0
PRINTED = ("hub_lost", "hang_over")
"""Events that deserve a line although they are not critical."""
LAST_WORD_S = 30.0
"""How long to wait for the summary of a finished run."""


def watch_plain(feed: Feed, say: Callable[[str], None]) -> None:
    """Print until the run is over; raises HubError if the run cannot be read."""
    view, over_s = PlainView(), 0.0
    while True:
        known = feed.now
        for line in view.lines(known, time.monotonic(), feed.wall_ns()):
            say(line)
        if known.link in ("refused", "missing"):
            raise (HubRefused if known.link == "refused" else HubMissing)(known.why)
        if known.link == "lost" and known.run is None:
            raise HubError(known.why)
        over_s = over_s + LOOK_S if known.over else 0.0
        if known.final or over_s > LAST_WORD_S:
            return
        time.sleep(LOOK_S)


class PlainView:
    """Remembers what was printed so far."""

    def __init__(self) -> None:
        self._begun = self._lost = self._still = self._ended = False
        self._found: dict[tuple[str, tuple[int, ...]], tuple[str, str]] = {}
        self._hang = self._past = ""
        """Title of the last hang, without its full stop, in the present and in the past tense. The finding does not
        repeat what the event has said.
        """
        self._event = 0
        self._step = -1
        self._step_s = float("-inf")

    def lines(self, known: Snapshot, now_s: float, now_wall_ns: int) -> Iterator[str]:
        run, status = known.run, known.status
        if run is None or status is None:
            return
        step = known.step
        if not self._begun:
            self._begun = True
            yield news_line(step, f"{plain(run.name or run.id)}: {status.words}, {count_text(status.ranks, 'rank')}")
        lost = known.link == "lost"
        if lost != self._lost:
            self._lost = lost
            yield news_line(step, f"○ {known.why}; retrying" if lost else "● connected to the hub again")
        yield from self._events(known)
        yield from self._findings(known)
        still = still_s(known, now_wall_ns)
        if still is not None and not self._still:
            yield news_line(step, f"○ {still_words(still)}")
        self._still = still is not None
        if known.steps and step != self._step and (now_s - self._step_s >= STEP_EVERY_S or known.over):
            self._step, self._step_s = step, now_s
            yield news_line(step, _step_words(known))
        if known.final and not self._ended:
            self._ended = True
            yield news_line(step, f"{plain(run.name or run.id)}: {status.words}")

    def _events(self, known: Snapshot) -> Iterator[str]:
        for event in known.events:
            if event.number > self._event:
                self._event = event.number
                if event.event == "hang":
                    self._hang = plain(event.title).removesuffix(".")
                    self._past = past_title(event.kind, self._hang)
                    if any(self._of_hang(title) for _, title in self._found.values()):
                        continue
                if event.severity == "critical" or event.event in PRINTED:
                    mark = MARKS.get(event.severity, MARKS["info"])
                    yield news_line(known.step, f"{mark} {plain(event.sentence)}")

    def _findings(self, known: Snapshot) -> Iterator[str]:
        if known.findings is None:
            return
        now = {(one.kind, tuple(one.ranks)): (one.severity, plain(one.title)) for one in known.findings.findings}
        for key, (severity, title) in now.items():
            if (key not in self._found or self._found[key][0] != severity) and not self._of_hang(title):
                yield finding_line(known.step, severity, title)
        # Findings of a finished run replace those made during the run: nothing is withdrawn.
        for key, (severity, title) in self._found.items():
            if key not in now and not known.over:
                yield finding_line(known.step, severity, title, withdrawn=True)
        self._found = now

    def _of_hang(self, title: str) -> bool:
        return bool(self._hang) and title.startswith((self._hang, self._past))


def _step_words(known: Snapshot) -> str:
    slowest = known.slowest
    words = f"{ms_text(usual_wall_ns(known) / 1e6)} a step ({usual_words(known)})"
    if slowest is not None and slowest.rank and slowest.total > 1 and slowest.mean_ns.get("work"):
        words += f"; rank {slowest.rank[0]} works longest, {ms_text(slowest.mean_ns['work'][0] / 1e6)}"
    return words
