"""What is missing of a run or worth knowing beside the findings, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from stepscope.diagnosis import Window
from stepscope.diagnosis.attempts import attempts_of
from stepscope.diagnosis.practices import remarks_on
from stepscope.diagnosis.samples import number, of_kind
from stepscope.diagnosis.window import last_attempt
from stepscope.records.phases import GRAPH_PHASE
from stepscope.records.series import RankSeries, RunData
from stepscope.records.slot import FLAG_REPLAYED
from stepscope.records.units import count_text, duration_text, named_ranks

__all__ = ["notices_of"]

HOST_ONLY = ("mps", "xpu")
WARNINGS_SHOWN = 20
GAP_S = 3.0
"""Samples come once a second; from here on some are missing."""
GAPS_SHOWN = 3


def notices_of(run: RunData, window: Window) -> list[str]:
    current = last_attempt(run.ranks)
    said = [str(event["message"]) for event in run.events if event.get("event") == "warning" and event.get("message")]
    notices = [_sentence(text) for text in (*run.notices, *list(dict.fromkeys(said))[:WARNINGS_SHOWN])]
    attempts = attempts_of(run)
    if current and attempts[-1].number > window.attempt:
        notices.append(
            f"Nothing of attempt {attempts[-1].number} was recorded; all figures are of attempt {window.attempt}."
        )
    notices += _missing(current, window)
    notices += _gaps(run)
    died = sum(event.get("event") == "hub_start" for event in run.events) - 1
    if died > 0:
        notices.append(f"The hub died {count_text(died, 'time')} and was started again; nothing is lost by that.")
    failures = sum(series.hook_failures for series in current)
    if failures:
        notices.append(
            f"{count_text(failures, 'time')} a hook of ours failed and was passed over; times may be missing."
        )
    devices = {series.identity.device for series in current if series.identity.device in HOST_ONLY}
    notices += [f"On {device} only host times are recorded, no device times." for device in sorted(devices)]
    return [*notices, *_replays(window), *remarks_on(window)]


def _replays(window: Window) -> Iterable[str]:
    count = int(((window.flags & FLAG_REPLAYED) > 0).any(axis=0).sum())
    if count:
        were = "was a replay" if count == 1 else "were replays"
        yield (
            f"{count:,} of {count_text(len(window.steps), 'step')} {were} of a CUDA graph: "
            f"what was captured (forward, backward, optimizer) is one phase there, {GRAPH_PHASE!r}."
        )


def _missing(current: Sequence[RankSeries], window: Window) -> Iterable[str]:
    idle = [series.rank for series in current if not len(series.steps)]
    if idle and len(idle) < len(current):
        verb = "is" if len(idle) == 1 else "are"
        yield f"{named_ranks(idle)} recorded no step and {verb} not compared."
    world = max((series.identity.world_size for series in current), default=0)
    if 0 < len(current) < world:
        yield f"Of {count_text(world, 'rank')} only {len(current)} left a recording here."
    running = any(series.state in ("starting", "running") for series in current)
    if window.left_out and not running:
        were = "was" if window.left_out == 1 else "were"
        yield f"{count_text(window.left_out, 'step')} {were} not complete on every live rank: left out of comparisons."


def _gaps(run: RunData) -> list[str]:
    """Stretches without samples between the first and the last of a host."""
    times: dict[str, list[tuple[float, float]]] = {}
    for line in of_kind(run.samples, "host"):
        wall_ns = number(line, "wall_ns")
        if wall_ns is not None:
            times.setdefault(str(line.get("node")), []).append((wall_ns, number(line, "span_s") or 0.0))
    starts = [number(event, "wall_ns") or 0.0 for event in run.events if event.get("event") == "agent_start"]
    found = []
    for node, at in sorted(times.items()):
        for (before, span_s), (after, _) in pairwise(sorted(at)):
            # One that stands for a minute is anywhere in its minute.
            if after - before > (GAP_S + 2 * span_s) * 1e9:
                restarted = any(before < start <= after for start in starts)
                why = "the agent was gone and started again" if restarted else "the agent did not get to it"
                seconds = duration_text((after - before) / 1e9)
                found.append(f"For {seconds} there are no samples of host {node}: {why}.")
    more = len(found) - GAPS_SHOWN
    return [*found[:GAPS_SHOWN], f"{count_text(more, 'further gap')} in the samples."] if more > 0 else found


def _sentence(text: str) -> str:
    """With a capital, unless it begins with a name, and a full stop."""
    text = " ".join(text.split())
    if text and text.split()[0].isalpha():
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."
