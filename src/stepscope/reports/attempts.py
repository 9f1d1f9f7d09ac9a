"""The attempts of an elastic job in the summary: rows of ``summary.json``, and from those the section of its text.

Only where there are several.  What an attempt cost is what is known: how long it ran, and how long it then took until
the next one made a step.  What of its steps has to be made again depends on the script's checkpoints and is not said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from stepscope.diagnosis.attempts import Attempt, attempts_of
from stepscope.diagnosis.crashes import Failure, failures_in, tell
from stepscope.records.series import ALIVE, RankSeries, RunData
from stepscope.records.units import count_text, duration_text

__all__ = ["attempt_items", "attempts_table"]

HOSTS_LISTED = 64
HOSTS_NAMED = 3
SHOWN = 8
"""In the text; of more the last ones."""
JOINED = "joined"


def attempts_table(run: RunData) -> list[dict[str, Any]]:
    """One row an attempt, in order; none where there was only one."""
    attempts = attempts_of(run)
    if len(attempts) < 2:
        return []
    return [_row(run, one, after) for one, after in zip_longest(attempts, attempts[1:])]


def attempt_items(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Per attempt its number and what there is to say of it."""
    items = [(str(row["attempt"]), _line(row)) for row in rows[-SHOWN:]]
    left = len(rows) - SHOWN
    return [("", f"… {count_text(left, 'earlier attempt')} in summary.json"), *items] if left > 0 else items


def _row(run: RunData, attempt: Attempt, after: Attempt | None) -> dict[str, Any]:
    numbers = [int(series.steps["step"][at]) for series in attempt.series if len(series.steps) for at in (0, -1)]
    hosts = sorted({series.identity.host for series in attempt.series})
    began_ns = min((series.anchor_wall_ns for series in attempt.series), default=None)
    ended_ns = max((ended for series in attempt.series if (ended := _ended_ns(series)) is not None), default=None)
    starts = [_first_step_ns(series) for series in after.series if len(series.steps)] if after else []
    next_ns = min(starts, default=None)
    return {
        "attempt": attempt.number,
        "world_size": attempt.world_size,
        "ranks": len(attempt.series),
        "hosts": hosts[:HOSTS_LISTED],
        "host_count": len(hosts),
        "first_step": min(numbers, default=None),
        "last_step": max(numbers, default=None),
        "began_wall_ns": began_ns,
        "ended_wall_ns": ended_ns,
        "seconds": _seconds(began_ns, ended_ns),
        "pause_s": _seconds(ended_ns, next_ns),
        "end": _end(run, attempt, after),
    }


def _line(row: Mapping[str, Any]) -> str:
    hosts = row["hosts"]
    on = f" on {row['host_count']} hosts" if row["host_count"] > 1 else f" on {hosts[0]}" if hosts else ""
    if not row["ranks"]:
        parts = ["nothing of it was recorded"]
    else:
        first, last = row["first_step"], row["last_step"]
        steps = "no step" if last is None else f"step {first}" if first == last else f"steps {first}–{last}"
        parts = [f"{count_text(row['ranks'], 'rank')}{on}, {steps}"]
        if row["seconds"] is not None:
            parts[0] += f" in {duration_text(row['seconds'])}"
    parts += [row["end"]] if row["end"] else []
    if row["pause_s"] is not None:
        parts.append(f"{duration_text(row['pause_s'])} until the next one's first step")
    return "; ".join(parts)


def _end(run: RunData, attempt: Attempt, after: Attempt | None) -> str | None:
    """How it ended, without a full stop; None: it still runs."""
    failures = failures_in(run, attempt)
    began_it = [failure for failure in failures if not failure.victim and not failure.taken]
    told = _told(failures, attempt) + _where(attempt, began_it) if failures else "ended in order"
    alive = sorted({series.identity.host for series in attempt.series if series.state in ALIVE})
    if any(map(_is_known, began_it)) or (after is None and not alive):
        return told
    if after is None:
        return None
    if alive:
        return f"{_hosts(alive)} not heard of any more"
    missed = any(failure.taken and failure.type for failure in failures)  # who vanished was missed by the others
    change = _membership(attempt, after)
    return told if began_it and missed and not change.endswith(JOINED) else change or told


def _is_known(failure: Failure) -> bool:
    return bool(failure.type or failure.signal or failure.oom_killed or failure.exit_code)


def _told(failures: Sequence[Failure], attempt: Attempt) -> str:
    if all(failure.victim for failure in failures):
        return "its ranks were ended"
    text = tell(failures, attempt)
    return text[0].lower() + text[1:]


def _where(attempt: Attempt, failures: Sequence[Failure]) -> str:
    """The host of those that began it, where there are several hosts."""
    hosts = {series.rank: series.identity.host for series in attempt.series}
    guilty = {hosts[failure.rank] for failure in failures if failure.rank in hosts}
    return f" on {guilty.pop()}" if len(set(hosts.values())) > 1 and len(guilty) == 1 else ""


def _membership(attempt: Attempt, after: Attempt) -> str:
    """What changed about the hosts, or else about the number of ranks; empty when nothing did."""
    before, then = ({series.identity.host for series in one.series} for one in (attempt, after))
    joined, left = sorted(then - before), sorted(before - then)
    if joined and left:
        return f"{_hosts(left)} replaced by {_hosts(joined, verb=False)}"
    if joined or left:
        return f"{_hosts(joined or left, verb=False)} {JOINED if joined else 'left'}"
    if attempt.series and after.series and attempt.world_size != after.world_size:
        return f"started again with {count_text(after.world_size or 0, 'rank')}"
    return ""


def _hosts(hosts: Sequence[str], *, verb: bool = True) -> str:
    named = f"host {hosts[0]}" if len(hosts) == 1 else f"hosts {', '.join(hosts[:HOSTS_NAMED])}"
    more = f" and {len(hosts) - HOSTS_NAMED} more" if len(hosts) > HOSTS_NAMED else ""
    return f"{named}{more}{(' was' if len(hosts) == 1 else ' were') if verb else ''}"


def _ended_ns(series: RankSeries) -> int | None:
    """When it was gone, else when its last step ended; None: it runs, or was never seen to do anything."""
    if series.ended_wall_ns:
        return series.ended_wall_ns
    if series.state in ALIVE or not len(series.steps):
        return None
    return _wall_ns(series, int(series.steps["start_ns"][-1]) + int(series.steps["wall_ns"][-1]))


def _first_step_ns(series: RankSeries) -> int:
    return _wall_ns(series, int(series.steps["start_ns"][0]))


def _wall_ns(series: RankSeries, mono_ns: int) -> int:
    return mono_ns - series.anchor_mono_ns + series.anchor_wall_ns


def _seconds(since_ns: int | None, until_ns: int | None) -> float | None:
    if since_ns is None or until_ns is None or until_ns < since_ns:
        return None
    return round((until_ns - since_ns) / 1e9, 3)
