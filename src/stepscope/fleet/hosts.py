"""Hosts that were the slow one more often than chance explains.

In each run a host is compared with the other hosts of the same run, by the work of its slowest rank: jobs need not be
alike, and what slows all hosts does not count.

- A place in a job may have more work (rank 0 writes checkpoints; a pipeline's stages differ).  So the median of all
  hosts that had the same place is subtracted: in runs of the same command, because a number in it (how often to save)
  may decide how much more, or, where fewer than ``FEWEST_AT_PLACE`` are known, in runs of the same job.  Where fewer
  of the job are known, or one host had the place most of the time, the two cannot be separated: then all runs of the
  host at that place of the job together are one trial.
- A host is *the slow one* of a run if it is the slowest there, by ``LEAST_SHARE`` of its work and by ``TIMES_SPREAD``
  times what hosts of that job usually differ by.
- By chance every host of a run is equally likely to be the slow one, if there is one.  How often there is one is taken
  from runs of the same job without the host.  So noisy jobs raise no suspicion, and neither does one bad run.
- A host is a suspect if its number of slow runs is that unlikely among all hosts that were tested (Bonferroni): a fleet
  without faults has a suspect with a probability of at most ``ALPHA``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.fleet.chance import (
    ALPHA,
    corrected,
    group_medians,
    group_spreads,
    least_chance,
    median_interval,
    middle_excess,
)
from stepscope.fleet.columns import Fleet
from stepscope.fleet.hours import known_hours, rounded_hours
from stepscope.fleet.record import CAUSES
from stepscope.records.text import count_text, percent_text

__all__ = ["host_rows"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

LEAST_SHARE = 0.01
"""A smaller difference costs too little to act on."""
TIMES_SPREAD = 4.0
FEWEST_AT_PLACE = 4
MOST_AT_PLACE = 0.5
"""Of the runs of a place in a job, on one host."""
LEAST_SPREAD = 0.002
FEWEST_FOR_SPREAD = 24
"""Hosts in runs of a job, to know what they usually differ by."""
FEWEST_SLOW = 3
"""Slow runs of a suspect, whatever their probability."""
TIMES_EXPECTED = 2.0
"""A suspect was slow so many times as often as expected: a tiny but certain excess is not worth a node."""
REPAIRED = 0.01
"""If so few slow runs at the end are less likely than this, over all moments, the host was repaired."""
FEWEST_FAST = 5
LAST = 5
MOST_ROWS = 100
TRAINING = [list(CAUSES).index(cause) for cause in ("useful", "slow_rank", "input", "exchange")]


def host_rows(fleet: Fleet, limit: int) -> list[dict[str, Any]]:
    """Rows of ``hosts`` in the document, suspects first."""
    trials = _trials(fleet)
    if not len(trials["host"]):
        return []
    tests = _tests(fleet, trials)
    tested = sum(test["trials"] > 0 for test in tests)
    training = known_hours(fleet)[:, TRAINING].sum(axis=1)
    rows = [_row(fleet, trials, test, training, tested, limit) for test in tests if test["slow"]]
    rows.sort(key=lambda row: (not row["suspect"], -row["gpu_hours_lost"] if row["suspect"] else row["p_value"]))
    return rows[:MOST_ROWS]


# -- trials -----------------------------------------------------------------------------------------------------------


def _trials(fleet: Fleet) -> dict[str, NDArray[Any]]:
    """Hosts in runs in which they can be compared with others: the run, the excess, and whether it was the slow one."""
    usable = np.isfinite(fleet.host_work_ms) & (fleet.host_work_ms > 0)
    # Only hosts with as many ranks on the same devices are alike.
    kinds = len(fleet.names.get("device", ())) + 1
    group = (fleet.host_run * 4096 + np.minimum(fleet.host_ranks, 4095)) * kinds + fleet.host_device
    rows = np.flatnonzero(usable)
    work, own = np.log(fleet.host_work_ms[rows]), group[rows]
    excess = middle_excess(work, own)
    rows, own, excess = rows[np.isfinite(excess)], own[np.isfinite(excess)], excess[np.isfinite(excess)]
    run, host = fleet.host_run[rows], fleet.host[rows]
    job = fleet.job[run]
    hosts = len(fleet.names["host"])
    excess, separable = _without_place(excess, fleet.series[run], job, fleet.host_position[rows], host, hosts)
    slow = _is_slow(excess, own, job)
    _, group_of_row, sizes = np.unique(own, return_inverse=True, return_counts=True)
    return {
        "row": rows,
        "run": run,
        "host": host,
        "job": job,
        "position": fleet.host_position[rows],
        "peers": sizes[group_of_row],
        "excess": excess,
        "separable": separable,
        "slow": slow,
    }


def _without_place(
    excess: Floats, series: Integers, job: Integers, position: Integers, host: Integers, hosts: int
) -> tuple[Floats, Flags]:
    at = np.minimum(position, 65535)
    in_series, in_job = series * 65536 + at, job * 65536 + at
    _, own, sizes = np.unique(in_series, return_inverse=True, return_counts=True)
    many = sizes[own] >= FEWEST_AT_PLACE
    place = np.unique(np.where(many, 2 * in_series + 1, 2 * in_job), return_inverse=True)[1]
    count = np.bincount(place)[place]
    _, pair, times = np.unique(place * hosts + host, return_inverse=True, return_counts=True)
    separable = (count >= FEWEST_AT_PLACE) & (times[pair] <= MOST_AT_PLACE * count)
    usual = group_medians(excess, place)
    return np.where(separable, excess - usual, excess), np.asarray(separable, np.bool_)


def _is_slow(excess: Floats, group: Integers, job: Integers) -> Flags:
    # Jobs that are hardly known share a spread.
    count = np.bincount(job) if len(job) else np.zeros(0, int)
    kind = np.where(count[job] >= FEWEST_FOR_SPREAD, job, -1)
    limit = np.maximum(LEAST_SHARE, TIMES_SPREAD * np.maximum(group_spreads(excess, kind), LEAST_SPREAD))
    by_excess = np.lexsort((-excess, group))
    slowest = np.zeros(len(excess), np.bool_)
    if len(excess):
        slowest[by_excess[np.r_[True, np.diff(group[by_excess]) != 0]]] = True
    return np.asarray(slowest & (excess > np.log1p(limit)), np.bool_)


# -- tests ------------------------------------------------------------------------------------------------------------


def _tests(fleet: Fleet, trials: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
    """By host: trials, how many were slow, how many would be by chance, and its rows."""
    host, run, job, slow = (trials[name] for name in ("host", "run", "job", "slow"))
    jobs, runs = len(fleet.names["job"]), len(fleet.ids)
    compared, has_slow = np.zeros(runs, np.bool_), np.zeros(runs, np.bool_)
    compared[run] = True
    has_slow[run[slow]] = True
    job_runs = np.bincount(fleet.job[compared], minlength=jobs)
    job_slow = np.bincount(fleet.job[has_slow], minlength=jobs)
    order = np.lexsort((run, host))
    edges = np.searchsorted(host[order], np.arange(len(fleet.names["host"]) + 1))
    tests = []
    for number in range(len(fleet.names["host"])):
        own = order[edges[number] : edges[number + 1]]
        if not len(own):
            continue
        with_runs = np.bincount(job[own], minlength=jobs)
        with_slow = np.bincount(job[own], weights=has_slow[run[own]], minlength=jobs)
        rate = (job_slow - with_slow + 1) / (job_runs - with_runs + 2)
        chance = rate[job[own]] / trials["peers"][own]
        count, positives, mean = _counted(trials, own, chance)
        without = int((job_runs - with_runs)[with_runs > 0].sum())
        tests.append(
            {
                "host": number,
                "rows": own,
                "trials": count,
                "positives": positives,
                "mean": mean,
                "slow": int(slow[own].sum()),
                "without": float((job_slow - with_slow)[with_runs > 0].sum()) / without if without else None,
                "p": least_chance(positives, count, mean),
            }
        )
    return tests


def _counted(trials: dict[str, NDArray[Any]], own: Integers, chance: Floats) -> tuple[int, int, float]:
    """Trials, slow ones and their expected number; runs that cannot be separated from the place in the job are one."""
    slow, separable = trials["slow"][own], trials["separable"][own]
    count, positives, mean = int(separable.sum()), int(slow[separable].sum()), float(chance[separable].sum())
    rest = np.flatnonzero(~separable)
    if len(rest):
        place = trials["job"][own][rest] * 65536 + trials["position"][own][rest]
        _, group, sizes = np.unique(place, return_inverse=True, return_counts=True)
        share = np.bincount(group, weights=slow[rest]) / sizes
        count += len(sizes)
        positives += int((share > 0.5).sum())
        mean += float((np.bincount(group, weights=chance[rest]) / sizes).sum())
    return count, positives, mean


# -- rows -------------------------------------------------------------------------------------------------------------


def _row(
    fleet: Fleet, trials: dict[str, NDArray[Any]], test: dict[str, Any], training: Floats, tested: int, limit: int
) -> dict[str, Any]:
    """``training``: hours by run."""
    own, number = test["rows"], test["host"]
    slow = trials["slow"][own]
    chosen = own[slow]
    runs = trials["run"][chosen]
    shares = _step_shares(fleet, trials["row"][chosen], trials["excess"][chosen], runs)
    median, low, high = median_interval(shares)
    chance = corrected(test["p"], tested)
    unlikely = chance <= ALPHA and test["positives"] >= FEWEST_SLOW
    significant = unlikely and test["positives"] >= TIMES_EXPECTED * test["mean"]
    usual = test["mean"] / test["trials"] if test["trials"] else 0.0
    since = _repaired(slow, usual) if significant else None
    phases = Counter(phase for run in runs.tolist() if (phase := fleet.phase_of.get((run, number))))
    uuids = [
        fleet.names["gpu"][gpu] for gpu, _ in Counter(fleet.host_gpu[trials["row"][chosen]].tolist()).most_common(8)
    ]
    row = {
        "host": fleet.names["host"][number],
        "suspect": bool(significant and since is None),
        "repaired_wall_ns": None if since is None else int(fleet.started_ns[trials["run"][own[since]]]),
        "kind": "slow_host",
        "compared_runs": len(own),
        "slow_runs": int(slow.sum()),
        "expected_slow_runs": round(test["mean"], 2),
        "last_runs": min(LAST, len(slow)),
        "last_slow_runs": int(slow[-LAST:].sum()),
        "slow_share_without": None if test["without"] is None else round(test["without"], 4),
        "slowdown_share": round(median, 4),
        "slowdown_low_share": round(low, 4),
        "slowdown_high_share": round(high, 4),
        "phase": phases.most_common(1)[0][0] if phases else None,
        "jobs": len(np.unique(trials["job"][chosen])),
        "confidence": round(1 - chance, 6),
        "p_value": float(f"{test['p']:.3g}"),
        "gpu_hours_lost": rounded_hours((shares * training[runs]).sum()),
        "first_slow_wall_ns": int(fleet.started_ns[runs[0]]),
        "last_slow_wall_ns": int(fleet.started_ns[runs[-1]]),
        "gpu_uuids": [uuid for uuid in uuids if uuid],
        "run_count": len(runs),
        "runs": [fleet.ids[run] for run in runs[::-1][:limit].tolist()],
    }
    return {**row, "title": _title(row)}


def _step_shares(fleet: Fleet, rows: Integers, excess: Floats, runs: Integers) -> Floats:
    """Of the step, how much the host's excess work takes."""
    extra_ms = fleet.host_work_ms[rows] * -np.expm1(-excess)
    step_ms = fleet.step_ms[runs]
    return np.clip(extra_ms / np.where(np.isfinite(step_ms) & (step_ms > 0), step_ms, np.inf), 0.0, 1.0)


def _repaired(slow: Flags, usual: float) -> int | None:
    """Since which of its runs the host is as fast as others; None: it is not.

    ``usual``: the share of slow runs by chance.  Slow runs after that would be too few if it were as slow as before.
    """
    count = len(slow)
    total = np.cumsum(slow)
    best, since = REPAIRED / max(count, 1), None
    for cut in range(FEWEST_SLOW, count - FEWEST_FAST + 1):
        before, after = int(total[cut - 1]), int(total[-1] - total[cut - 1])
        left = count - cut
        if before < FEWEST_SLOW or after > TIMES_EXPECTED * usual * left:
            continue
        chance = least_chance(left - after, left, left * (1 - before / cut))
        if chance < best:
            best, since = chance, cut
    return since


def _title(row: dict[str, Any]) -> str:
    if not row["suspect"] and row["repaired_wall_ns"] is None:
        often = f"{row['slow_runs']:,} of {count_text(row['compared_runs'], 'run')}"
        return f"{row['host']} was the slow host in {often}; {row['expected_slow_runs']:.1f} by chance."
    where = f" in {row['phase']}" if row["phase"] else ""
    recent = f"{row['last_slow_runs']} of its last {count_text(row['last_runs'], 'run')}"
    if row["last_slow_runs"] * 2 < row["last_runs"] or row["repaired_wall_ns"]:
        recent = f"{row['slow_runs']:,} of {count_text(row['compared_runs'], 'run')}"
    text = f"{row['host']} was the slowest host{where} in {recent}, {percent_text(row['slowdown_share'])} each"
    if row["slow_share_without"] is None:
        return f"{text}."
    without = (
        "were not"
        if row["slow_share_without"] < 0.005
        else f"had a slow host in {percent_text(row['slow_share_without'])}"
    )
    return f"{text}; runs of these jobs without it {without}."
