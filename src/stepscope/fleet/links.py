"""Pairs of hosts between which the exchange is slow, and hosts whose network is slow with every partner.

The exchange of a run is what even its least waiting rank waits: late ranks do not lengthen it.  It is compared with the
median of the runs of the same job on as many hosts.  A run with a slow exchange implicates each host and each pair of
hosts in it; a slow link shows because nearly all runs with that pair are slow, and runs with only one of the two are
not.  Runs of one command on the same hosts show the same thing: together they are one trial, slow if most of them are.
The candidate that explains most is taken, its slow trials are set aside, and the rest is searched again, so that a
host that often met a bad link is not suspected with it.  A host is a candidate only if no other host is in all of its
slow trials.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.fleet.chance import ALPHA, corrected, group_medians, group_spreads, least_chance
from stepscope.fleet.columns import Fleet
from stepscope.fleet.hours import known_hours, rounded_hours
from stepscope.fleet.record import CAUSES
from stepscope.records.text import percent_text

__all__ = ["link_rows"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

LEAST_RATIO = 1.15
"""A run's exchange is slow if it takes this many times as long as usual,"""
TIMES_SPREAD = 4.0
"""and by this many times what runs of the job usually differ by."""
LEAST_MS = 0.05
FEWEST_ALIKE = 8
"""Runs of a job on as many hosts, to know what is usual."""
FEWEST_SLOW = 3
LEAST_SLOW_SHARE = 0.3
"""Of the runs with a slow link: a pair may be in a job without being neighbors."""
MOST_PAIRED_HOSTS = 48
"""In runs on more hosts, only neighbors are pairs."""
MOST_ROWS = 20
TRAINING = [list(CAUSES).index(cause) for cause in ("useful", "slow_rank", "input", "exchange")]


def link_rows(fleet: Fleet, limit: int) -> list[dict[str, Any]]:
    ratio, usable, slow = _slow_exchange(fleet)
    if not slow.any():
        return []
    trial = _trials(fleet, usable)
    first = usable & (trial == np.arange(len(trial)))
    size = np.bincount(trial[usable], minlength=len(trial))
    slow_trial = first & (np.bincount(trial[slow], minlength=len(trial)) * 2 > size)
    member, candidate, pairs = _candidates(fleet, first)
    hosts = len(fleet.names["host"])
    rate = _rates(fleet, first, slow_trial)
    tested = max(len(pairs) + hosts, 1)
    rows: list[dict[str, Any]] = []
    left = first.copy()
    while len(rows) < MOST_ROWS:
        found = _best(member, candidate, left, slow_trial, rate, (hosts, len(pairs)))
        if found is None:
            break
        number, own, count, positives, mean = found
        chance = least_chance(positives, count, mean)
        if corrected(chance, tested) > ALPHA:
            break
        names = [number] if number < hosts else list(divmod(int(pairs[number - hosts]), hosts))
        compared = np.flatnonzero(usable & np.isin(trial, own))
        runs = compared[slow[compared] & slow_trial[trial[compared]]]
        rows.append(_row(fleet, names, compared, runs, ratio, mean, corrected(chance, tested), chance, limit))
        left[own[slow_trial[own]]] = False
    return rows


def _trials(fleet: Fleet, usable: Flags) -> Integers:
    """By run, the first usable run of the same command on the same hosts: their exchange is no independent evidence."""
    edges = np.searchsorted(fleet.host_run, np.arange(len(fleet.ids) + 1)) * fleet.host.itemsize
    hosts = fleet.host[np.lexsort((fleet.host, fleet.host_run))].tobytes()
    first: dict[tuple[int, bytes], int] = {}
    trial = np.arange(len(fleet.ids))
    runs = np.flatnonzero(usable)
    keys = zip(fleet.series[runs].tolist(), edges[runs].tolist(), edges[runs + 1].tolist(), strict=True)
    trial[runs] = [
        first.setdefault((series, hosts[begin:end]), run)
        for run, (series, begin, end) in zip(runs.tolist(), keys, strict=True)
    ]
    return trial


def _slow_exchange(fleet: Fleet) -> tuple[Floats, Flags, Flags]:
    """By run: how many times its exchange is the usual one, whether that is known, and whether it is slow."""
    exchange = fleet.phases_ms.get("exchange", np.zeros(0))
    count = np.bincount(fleet.host_run, minlength=len(fleet.ids))
    known = np.isfinite(exchange) & (exchange > LEAST_MS) & (count > 1)
    runs = np.flatnonzero(known)
    ratio = np.ones(len(fleet.ids))
    usable, slow = np.zeros(len(fleet.ids), np.bool_), np.zeros(len(fleet.ids), np.bool_)
    if not len(runs):
        return ratio, usable, slow
    group = np.unique(fleet.series[runs] * 65536 + np.minimum(count[runs], 65535), return_inverse=True)[1]
    level = np.log(exchange[runs])
    excess = level - group_medians(level, group)
    enough = np.bincount(group)[group] >= FEWEST_ALIKE
    slow[runs] = excess > np.maximum(math.log(LEAST_RATIO), TIMES_SPREAD * group_spreads(excess, group))
    ratio[runs] = np.exp(excess)
    usable[runs] = enough
    return ratio, usable, slow & usable


def _rates(fleet: Fleet, usable: Flags, slow: Flags) -> tuple[Integers, Integers, Integers]:
    """By run its job; by job its runs and how many of them are slow."""
    jobs = len(fleet.names["job"])
    return fleet.job, np.bincount(fleet.job[usable], minlength=jobs), np.bincount(fleet.job[slow], minlength=jobs)


def _candidates(fleet: Fleet, usable: Flags) -> tuple[Integers, Integers, Integers]:
    """Runs and the candidates in them: first hosts by number, then pairs, by their place among all pairs."""
    hosts = len(fleet.names["host"])
    rows = np.flatnonzero(usable[fleet.host_run])
    run, host = fleet.host_run[rows], fleet.host[rows]
    edges = np.searchsorted(run, np.arange(len(fleet.ids) + 1))
    sizes = np.diff(edges)
    pair_runs: list[Integers] = []
    pair_codes: list[Integers] = []
    for size in np.unique(sizes[sizes > 1]).tolist():
        first, second = np.triu_indices(size, 1)
        if size > MOST_PAIRED_HOSTS:
            first, second = np.arange(size), (np.arange(size) + 1) % size
        runs = np.flatnonzero(sizes == size)
        own = host[edges[runs][:, None] + np.arange(size)]
        left, right = own[:, first], own[:, second]
        pair_codes.append((np.minimum(left, right) * hosts + np.maximum(left, right)).ravel())
        pair_runs.append(np.repeat(runs, len(first)))
    if not pair_codes:
        return run, host, np.zeros(0, np.int64)
    pairs, place, times = np.unique(np.concatenate(pair_codes), return_inverse=True, return_counts=True)
    often = times >= FEWEST_SLOW
    number = np.cumsum(often) - 1
    tested = often[place]
    member = np.concatenate([run, np.concatenate(pair_runs)[tested]])
    candidate = np.concatenate([host, hosts + number[place][tested]])
    return member, candidate, pairs[often]


def _best(
    member: Integers,
    candidate: Integers,
    left: Flags,
    slow: Flags,
    rate: tuple[Integers, Integers, Integers],
    candidates: tuple[int, int],
) -> tuple[int, Integers, int, int, float] | None:
    """The candidate that explains most: its number, trials, how many, how many are slow, and how many would be.

    ``candidates``: the number of hosts, and of pairs.
    """
    job, job_runs, job_slow = rate
    hosts, everyone = candidates[0], sum(candidates)
    inside = left[member]
    runs, own = member[inside], candidate[inside]
    count = np.bincount(own, minlength=everyone)
    positives = np.bincount(own, weights=slow[runs], minlength=everyone)
    usual = ((job_slow + 1) / (job_runs + 2))[job[runs]]
    mean = np.bincount(own, weights=usual, minlength=everyone)
    worth = (positives >= FEWEST_SLOW) & (positives >= LEAST_SLOW_SHARE * count) & (positives > mean)
    seen, expected = positives / np.maximum(count, 1), mean / np.maximum(count, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = positives * np.log(seen / expected) + np.where(
            seen < 1, (count - positives) * np.log((1 - seen) / (1 - expected)), 0.0
        )
    gain = np.where(worth, np.nan_to_num(gain, nan=-1.0), -1.0)
    while worth.any():
        number = int(np.argmax(gain))
        chosen = np.sort(runs[own == number])
        if number >= hosts or _is_alone(runs, own, hosts, chosen[slow[chosen]]):
            break
        worth[number], gain[number] = False, -1.0
    else:
        return None
    # Without the candidate's own runs: they must not count as usual.
    without = np.bincount(job[chosen], minlength=len(job_runs))
    without_slow = np.bincount(job[chosen], weights=slow[chosen], minlength=len(job_runs))
    base = (job_slow - without_slow + 1) / (job_runs - without + 2)
    return number, chosen, len(chosen), int(slow[chosen].sum()), float(base[job[chosen]].sum())


def _is_alone(runs: Integers, own: Integers, hosts: int, slow_runs: Integers) -> bool:
    """Whether only one host is in all of these runs."""
    inside = (own < hosts) & np.isin(runs, slow_runs)
    return int((np.bincount(own[inside], minlength=hosts) == len(slow_runs)).sum()) == 1


def _row(
    fleet: Fleet,
    numbers: list[int],
    own: Integers,
    runs: Integers,
    ratio: Floats,
    mean: float,
    chance: float,
    p_value: float,
    limit: int,
) -> dict[str, Any]:
    names = [fleet.names["host"][number] for number in numbers]
    times = float(np.median(ratio[runs]))
    exchange, step = fleet.phases_ms["exchange"][runs], fleet.step_ms[runs]
    extra = np.clip(exchange * (1 - 1 / ratio[runs]) / np.where(step > 0, step, np.inf), 0.0, 1.0)
    hours = known_hours(fleet)[runs][:, TRAINING].sum(axis=1)
    both = f"{names[0]} and {names[1]} are in the same run" if len(names) == 2 else f"{names[0]} is in the run"
    share = percent_text(float(np.nan_to_num(extra).mean()))
    return {
        "hosts": names,
        "kind": "slow_link" if len(names) == 2 else "slow_network",
        "title": f"The exchange takes {times:.1f} times as long when {both} ({len(runs):,} of {len(own):,} runs), "
        f"{share} of each step.",
        "compared_runs": len(own),
        "slow_runs": len(runs),
        "expected_slow_runs": round(mean, 2),
        "exchange_ratio": round(times, 3),
        "confidence": round(1 - chance, 6),
        "p_value": float(f"{p_value:.3g}"),
        "gpu_hours_lost": rounded_hours(np.nansum(extra * hours)),
        "last_slow_wall_ns": int(fleet.started_ns[runs[-1]]),
        "run_count": len(runs),
        "runs": [fleet.ids[run] for run in runs[::-1][:limit].tolist()],
    }
