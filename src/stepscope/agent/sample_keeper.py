"""Thin the samples of a run with age, so that a run of weeks stays small (``store/sample_segments.py`` has the files).

    the last hour or two     all of them
    the day before           one a minute of each source
    the 30 days before       one in ten minutes
    beyond                   one an hour

Age counts in segments of an hour by the monotonic clock, so a wall clock that jumps thins nothing too early.  The work
is done a little at a time between two looks at the rings.

A hub that is sent the samples has the last word: what it has in part stays as it is until it has the rest
(``SampleClaim``).  What it has not begun to receive may be thinned; it is sent thinned then, as it would have become
there.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from stepscope.store import atomic
from stepscope.store.coarse_samples import Coarsener
from stepscope.store.jsonl import record_in
from stepscope.store.paths import SAMPLES
from stepscope.store.reading import open_file
from stepscope.store.sample_segments import Segment, rotate, samples_end, segments, superseded

__all__ = ["SEGMENT_S", "SampleClaim", "SampleKeeper", "claim_of"]

SEGMENT_S = 3600.0
SEGMENT_BYTES = 64 << 20
"""A segment is over when it is this old or this large: a node with very many processes has shorter ones."""
LINES_AT_ONCE = 1000
"""Between two looks at the rings: some milliseconds."""
LOOK_S = 10.0
"""From one look for something to do to the next."""


class _Rate(NamedTuple):
    span_s: int
    newest: int
    """So many segments stay at this rate …"""
    group: int
    """… and of those before, so many at a time …"""
    then_s: int
    """… become one segment at this rate."""


RATES = (
    _Rate(span_s=0, newest=1, group=1, then_s=60),
    _Rate(span_s=60, newest=24, group=24, then_s=600),
    _Rate(span_s=600, newest=30, group=30, then_s=3600),
)


SMALL_RATES = (
    _Rate(span_s=0, newest=0, group=1, then_s=600),
    _Rate(span_s=60, newest=0, group=1, then_s=600),
    _Rate(span_s=600, newest=6, group=24, then_s=3600),
)
"""When the run takes nearly all the disk that it may …"""
SMALL_SEGMENT_S = 600.0
"""… and how long a segment is then."""


class SampleClaim:
    """What of the stream of samples a hub has, and what may be on its way there.  Used by two threads."""

    def __init__(self, begun: int = 0) -> None:
        """``begun``: an agent before us may have sent anything up to there."""
        self.lock = threading.Lock()
        self._sent = 0
        self._begun = begun

    def reading(self, end: int) -> None:
        """Samples up to there are about to be read, to be sent."""
        with self.lock:
            self._begun = max(self._begun, end)

    def sent(self, end: int) -> None:
        """The hub has all up to there, and no more."""
        self._sent = end

    def free(self) -> None:
        """Nothing is sent: the hub reads the run directory itself."""
        self._sent = 1 << 62

    def state(self, segment: Segment) -> Literal["sent", "unsent", "partly"]:
        if segment.end <= self._sent:
            return "sent"
        return "unsent" if segment.begin >= self._begun else "partly"


class SampleKeeper:
    """Used by the agent's loop alone, which is the only writer of samples."""

    def __init__(
        self, run_dir: Path, claim: SampleClaim | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir = run_dir
        self._claim = claim or SampleClaim()
        self._clock = clock
        self._begun_s = self._looked_s = clock()
        self._work: Iterator[None] | None = None
        self._rates, self._segment_s = RATES, SEGMENT_S

    def save_space(self) -> None:
        """From now on as little as can be of what is over."""
        self._rates, self._segment_s = SMALL_RATES, SMALL_SEGMENT_S

    def look(self) -> None:
        """Do a little of what there is to do.  OSError when the disk refuses: it is tried again later."""
        if self._work is not None:
            try:
                if next(self._work, self) is self:
                    self._work = None
            except OSError:
                self._work = None
                raise
            return
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        if now_s - self._begun_s >= self._segment_s or _size(self._run_dir / SAMPLES) >= SEGMENT_BYTES:
            rotate(self._run_dir)
            self._begun_s = now_s
        for left in superseded(self._run_dir):
            left.path(self._run_dir).unlink(missing_ok=True)
        due = self._due()
        if due is not None:
            self._work = self._thin(*due)

    @property
    def busy(self) -> bool:
        return self._work is not None

    def _due(self) -> tuple[Sequence[Segment], int] | None:
        there = segments(self._run_dir)
        for rate in self._rates:
            own = [one for one in there if one.span_s == rate.span_s]
            for state, alike in itertools.groupby(own[: max(len(own) - rate.newest, 0)], self._claim.state):
                group = list(alike)[: rate.group]
                gapless = all(one.end == after.begin for one, after in itertools.pairwise(group))
                if state != "partly" and len(group) == rate.group and gapless:
                    return group, rate.then_s
        return None

    def _thin(self, group: Sequence[Segment], span_s: int) -> Iterator[None]:
        thin = Segment(group[0].begin, group[-1].end, span_s)
        coarsener = Coarsener(span_s)
        raw: list[bytes] = []
        for segment in group:
            with open_file(segment.path(self._run_dir)) as file:
                while lines := list(itertools.islice(file, LINES_AT_ONCE)):
                    for line in lines:
                        record = record_in(line)
                        if record is not None:
                            coarsener.add(record)
                    yield
        samples = sorted(coarsener.samples(), key=_wall_ns)
        data = "".join(json.dumps(sample, separators=(",", ":")) + "\n" for sample in samples).encode()
        if len(data) > thin.end - thin.begin:  # of few samples nothing is saved, and positions must hold
            for segment in group:
                with open_file(segment.path(self._run_dir)) as file:
                    raw.append(file.read())
            data = b"".join(raw)
        with self._claim.lock:
            if any(self._claim.state(segment) == "partly" for segment in group):
                return  # the hub began to receive it meanwhile
            atomic.write_bytes(thin.path(self._run_dir), data, durable=True)
        for segment in group:
            segment.path(self._run_dir).unlink(missing_ok=True)


def claim_of(run_dir: Path) -> SampleClaim:
    """For an agent that begins, or goes on after another one."""
    return SampleClaim(samples_end(run_dir))


def _wall_ns(sample: dict[str, object]) -> int:
    wall_ns = sample.get("wall_ns")
    return wall_ns if isinstance(wall_ns, int) else 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
