"""Keeps a run within its disk limit: thins samples with age, shortens logs, and stops samples at the limit.

Steps are always written, and nothing here stops the job.

always               each log keeps its beginning and its end (``store/live/logs.py``); samples are thinned with age
from 80 % on         one warning; logs share an eighth of the limit; all samples but the last minutes are reduced to
                     one per ten minutes, and later to one per hour
at the limit         no more samples are recorded until there is room again; steps, events, errors and stacks still are
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from stepscope.agent.journal import Journal
from stepscope.records.files import open_file
from stepscope.records.text import bytes_text, say
from stepscope.store import file_io
from stepscope.store.file_io import NEARLY_FULL, file_size, record_in, run_bytes
from stepscope.store.live.logs import ALL_BYTES, bound_logs
from stepscope.store.live.sample_files import (
    Coarsener,
    SampleSegment,
    rotate_samples,
    sample_segments,
    samples_end,
    superseded_segments,
)
from stepscope.store.paths import SAMPLES

__all__ = ["SEGMENT_S", "DiskKeeper", "SampleClaim", "SampleKeeper", "claim_of"]


# -- Sample thinning --------------------------------------------------------------------------------------------------
# Thins the samples of a run with age, so that a run of weeks stays small. ``store/live/sample_files.py`` has the files.
#
#     the last hour or two     all of them
#     the day before           one per minute from each source
#     the 30 days before       one per ten minutes
#     older                    one per hour
#
# Age counts in segments of an hour on the monotonic clock, so a jump of the wall clock thins nothing too early. The
# work is done in small pieces between two looks at the rings.
#
# A hub that receives the samples takes precedence: a segment that it has in part stays unchanged until it has the rest
# (``SampleClaim``). Segments that it has not begun to receive may be thinned. They are then sent thinned, as they would
# have become there.

SEGMENT_S = 3600.0
SEGMENT_BYTES = 64 << 20
"""A segment ends when it is this old or this large: a node with very many processes has shorter ones."""
LINES_AT_ONCE = 1000
"""Lines processed between two looks at the rings: a few milliseconds."""
THINNING_CHECK_S = 10.0
"""Interval between checks for work."""


class _ThinningRate(NamedTuple):
    span_s: int
    newest: int
    """How many segments stay at this rate."""
    group: int
    """How many older segments are merged at a time."""
    then_s: int
    """The rate of the merged segment."""


RATES = (
    _ThinningRate(span_s=0, newest=1, group=1, then_s=60),
    _ThinningRate(span_s=60, newest=24, group=24, then_s=600),
    _ThinningRate(span_s=600, newest=30, group=30, then_s=3600),
)


SMALL_RATES = (
    _ThinningRate(span_s=0, newest=0, group=1, then_s=600),
    _ThinningRate(span_s=60, newest=0, group=1, then_s=600),
    _ThinningRate(span_s=600, newest=6, group=24, then_s=3600),
)
"""Rates for a run that is close to its disk limit."""
SMALL_SEGMENT_S = 600.0
"""Length of a segment in that case."""


class SampleClaim:
    """Which samples a hub has, and which may be on their way there. Used by two threads."""

    def __init__(self, begun: int = 0) -> None:
        """``begun``: an earlier agent may have sent anything up to there."""
        self.lock = threading.Lock()
        self._sent = 0
        self._begun = begun

    def reading(self, end: int) -> None:
        """Note that samples up to there are about to be read and sent."""
        with self.lock:
            self._begun = max(self._begun, end)

    def sent(self, end: int) -> None:
        """Note that the hub has everything up to there, and no more."""
        self._sent = end

    def free(self) -> None:
        """Note that nothing is sent, because the hub reads the run directory itself."""
        self._sent = 1 << 62

    def state(self, segment: SampleSegment) -> Literal["sent", "unsent", "partly"]:
        if segment.end <= self._sent:
            return "sent"
        return "unsent" if segment.begin >= self._begun else "partly"


class SampleKeeper:
    """Rotates and thins samples. Used only by the agent's loop, which is the only writer of samples."""

    def __init__(
        self, run_dir: Path, claim: SampleClaim | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir = run_dir
        self._claim = claim or SampleClaim()
        self._clock = clock
        self._begun_s = self._checked_s = clock()
        self._work: Iterator[None] | None = None
        self._rates, self._segment_s = RATES, SEGMENT_S

    def save_space(self) -> None:
        """Keep as little as possible of finished segments from now on."""
        self._rates, self._segment_s = SMALL_RATES, SMALL_SEGMENT_S

    def check(self) -> None:
        """Do a small piece of the pending work. Raise OSError if a write fails; it is retried later."""
        if self._work is not None:
            try:
                if next(self._work, self) is self:
                    self._work = None
            except OSError:
                self._work = None
                raise
            return
        now_s = self._clock()
        if now_s - self._checked_s < THINNING_CHECK_S:
            return
        self._checked_s = now_s
        if now_s - self._begun_s >= self._segment_s or file_size(self._run_dir / SAMPLES) >= SEGMENT_BYTES:
            rotate_samples(self._run_dir)
            self._begun_s = now_s
        for left in superseded_segments(self._run_dir):
            left.path(self._run_dir).unlink(missing_ok=True)
        due = self._due()
        if due is not None:
            self._work = self._thin(*due)

    @property
    def busy(self) -> bool:
        return self._work is not None

    def _due(self) -> tuple[Sequence[SampleSegment], int] | None:
        there = sample_segments(self._run_dir)
        for rate in self._rates:
            own = [stretch for stretch in there if stretch.span_s == rate.span_s]
            for state, alike in itertools.groupby(own[: max(len(own) - rate.newest, 0)], self._claim.state):
                group = list(alike)[: rate.group]
                gapless = all(earlier.end == after.begin for earlier, after in itertools.pairwise(group))
                if state != "partly" and len(group) == rate.group and gapless:
                    return group, rate.then_s
        return None

    def _thin(self, group: Sequence[SampleSegment], span_s: int) -> Iterator[None]:
        thin = SampleSegment(group[0].begin, group[-1].end, span_s)
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
        if len(data) > thin.end - thin.begin:  # few samples save nothing, and positions must stay valid
            for segment in group:
                with open_file(segment.path(self._run_dir)) as file:
                    raw.append(file.read())
            data = b"".join(raw)
        with self._claim.lock:
            if any(self._claim.state(segment) == "partly" for segment in group):
                return  # the hub began to receive it in the meantime
            file_io.write_bytes(thin.path(self._run_dir), data, durable=True)
        for segment in group:
            segment.path(self._run_dir).unlink(missing_ok=True)


def claim_of(run_dir: Path) -> SampleClaim:
    """Return a claim for an agent that starts, or that continues after another one."""
    return SampleClaim(samples_end(run_dir))


def _wall_ns(sample: dict[str, object]) -> int:
    wall_ns = sample.get("wall_ns")
    return wall_ns if isinstance(wall_ns, int) else 0


# -- Disk limit -------------------------------------------------------------------------------------------------------

DISK_CHECK_S = 20.0
_ROOM_AGAIN = 0.95
"""Share of the limit below which samples are recorded again."""
_LOG_SHARE = 8


class DiskKeeper:
    """Enforces the disk limit. Used only by the agent's loop."""

    def __init__(
        self,
        run_dir: Path,
        limit: int,
        *,
        journal: Journal,
        samples: SampleKeeper,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``limit`` is in bytes; 0 means no limit."""
        self._run_dir = run_dir
        self._limit = limit
        self._journal = journal
        self._samples = samples
        self._clock = clock
        self._checked_s = clock()
        self._logs_whole = False
        self._nearly = False
        self._reported_full = False

    def check(self) -> None:
        """Check the disk space occasionally. Raise OSError if a write fails; it is retried later."""
        self._samples.check()
        now_s = self._clock()
        if now_s - self._checked_s < DISK_CHECK_S:
            return
        self._checked_s = now_s
        self._bound_logs()
        if self._limit:
            self._compare(run_bytes(self._run_dir))

    def _bound_logs(self) -> None:
        if self._logs_whole:
            return
        most = max(self._limit // _LOG_SHARE, 1) if self._nearly else ALL_BYTES
        if not bound_logs(self._run_dir, all_bytes=min(most, ALL_BYTES)):
            self._logs_whole = True
            message = "this file system cannot drop the middle of a long log; logs are kept in full"
            self._journal.event("warning", message=message)

    def _compare(self, used: int) -> None:
        if used >= NEARLY_FULL * self._limit and not self._nearly:
            self._nearly = True
            self._samples.save_space()
            self._warn(
                f"the run uses {bytes_text(used)} of the {bytes_text(self._limit)} that --max-disk allows: from now on "
                "logs are shortened and past samples reduced to one per ten minutes; all steps are kept"
            )
        if used >= self._limit:
            self._journal.samples_wanted = False
            if not self._reported_full:
                self._reported_full = True
                self._warn(
                    f"the run uses all of the {bytes_text(self._limit)} that --max-disk allows: no more samples are "
                    "recorded; steps still are, and the job continues"
                )
        elif used < _ROOM_AGAIN * self._limit:
            self._journal.samples_wanted = True

    def _warn(self, message: str) -> None:
        self._journal.event("warning", message=message)
        say(message)
