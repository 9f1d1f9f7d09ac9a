"""How often a history of runs reports a change where there is none, and how well it finds one: runs of real jobs.

    PYTHONPATH=bench python -m compare.history            # the half of the jobs that taught nothing
    PYTHONPATH=bench python -m compare.history --tune     # also the half from which constants were learned

Each MLPerf job was run 5 to 10 times.  A history of 20 runs has all runs of a job in random order, then all of them in
another order, until there are 20; the same run never follows itself.  Each run becomes a summary, as ``stepscope
history`` reads it: mean, median and 90th percentile of its steady points.

A change is *findable* where the job's own noise allows it: if an ideal test that knew the spread of the job's runs, and
looked at every place, would find it in 95% of the histories.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from compare.__main__ import DATA, held_out, mlperf_jobs
from stepscope.comparison.history import HistoryPoint, history_document
from stepscope.comparison.inputs import summary_input
from stepscope.comparison.statistics import CONFIDENCE, Level, Series
from stepscope.records.text import count_text

RUNS = 20
HISTORIES_PER_JOB = 24
STEPS = (0.02, 0.05)
DRIFT = 0.003
FIRST, LAST = 3, RUNS - 3
"""A step begins with one of these runs: both sides of it have at least three."""
NEAR = 1
"""A step is found at the right place if it is reported at most so many runs from there."""
FALSE_AT_MOST = 0.01


@dataclass(frozen=True, kw_only=True)
class History:
    job: str
    runs: tuple[int, ...]
    """By time: which run of the job."""
    step_at: int
    """Where a step begins, if there is one."""


def histories_of(jobs: dict[str, list[Series]], *, held: bool) -> list[History]:
    """Orders of the runs of each job, chosen by a fixed seed."""
    found = []
    for job, runs in jobs.items():
        if held_out(job) != held:
            continue
        chance = random.Random(f"history {job}")
        for _ in range(HISTORIES_PER_JOB):
            order = _order(len(runs), chance)
            found.append(History(job=job, runs=order, step_at=chance.randint(FIRST, LAST)))
    return found


def _order(count: int, chance: random.Random) -> tuple[int, ...]:
    order: list[int] = []
    while len(order) < RUNS:
        turn = chance.sample(range(count), count)
        if not order or turn[0] != order[-1]:
            order += turn
    return tuple(order[:RUNS])


def level_of_run(run: Series) -> Level:
    """What is left of a run in its summary."""
    p50, p90 = np.percentile(run.values, (50, 90))
    times = {"mean_ms": float(run.values.mean()), "p50_ms": float(p50), "p90_ms": float(p90)}
    said = {"schema": 1, "step_time": times, "steps": {"steady": len(run.values)}}
    level = summary_input(Path("summary.json"), said).on("host").run
    assert isinstance(level, Level)
    return level


def points_of(history: History, levels: Sequence[Level], factors: Sequence[float]) -> list[HistoryPoint]:
    """The runs with their times multiplied, as the points of ``stepscope history``."""
    return [
        HistoryPoint(
            id=f"run-{place}",
            name=f"run-{place}",
            path=Path(f"run-{place}"),
            created_wall_ns=place,
            level=Level(**{**vars(levels[run]), "mean": levels[run].mean * factor}),
            settings={},
        )
        for place, (run, factor) in enumerate(zip(history.runs, factors, strict=True))
    ]


def spread_of_runs(levels: Sequence[Level]) -> float:
    return float(np.std(np.log([level.mean for level in levels]), ddof=1))


def is_findable(effect: float, spread: float, at: int) -> bool:
    needed = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / (RUNS - 1)) + NormalDist().inv_cdf(0.95)
    return needed * spread * math.sqrt(1 / at + 1 / (RUNS - at)) <= math.log1p(effect)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a history with a step reports."""

    at_place: bool
    """A slowdown at the right run, or next to it."""
    in_range: bool
    """The right run is in the reported range."""
    slower: bool
    elsewhere: int
    """Changes at other places."""
    wrong: bool
    """Whether it is called faster as a whole."""


def found_in(points: Sequence[HistoryPoint], at: int) -> Found:
    document = history_document(points)
    places = {point.id: place for place, point in enumerate(points)}
    changes = [(places[row["run"]], places[row["first"]], places[row["last"]], row) for row in document["changes"]]
    right = [one for one in changes if abs(one[0] - at) <= NEAR and one[3]["change"] > 0]
    return Found(
        at_place=bool(right),
        in_range=any(first <= at <= last and row["change"] > 0 for _, first, last, row in changes),
        slower=document["verdict"] == "slower",
        elsewhere=len(changes) - len(right),
        wrong=document["verdict"] == "faster",
    )


def score(jobs: dict[str, list[Series]], *, held: bool) -> bool:
    """Print the table of one half; whether false changes are within the target and none has a wrong sign."""
    levels = {job: [level_of_run(run) for run in runs] for job, runs in jobs.items()}
    spreads = {job: spread_of_runs(each) for job, each in levels.items()}
    histories = histories_of(jobs, held=held)
    print(f"\n{'held-out half' if held else 'half from which the constants were learned'}: {len(histories)} histories")
    steady = [history_document(points_of(one, levels[one.job], [1.0] * RUNS)) for one in histories]
    said = Counter(document["verdict"] for document in steady)
    false = said["slower"] + said["faster"]
    by_job = Counter(one.job for one, document in zip(histories, steady, strict=True) if document["changes"])
    print(
        f"no change       {false / len(histories):.1%} report one (of {count_text(len(by_job), 'job')}), "
        f"{said['same'] / len(histories):.0%} the same, {said['cannot_tell'] / len(histories):.0%} cannot tell; "
        f"{_share([bool(one['unusual']) for one in steady]):.0%} with an unusual run"
    )
    wrong = 0
    for effect in STEPS:
        rows = [found_in(points_of(one, levels[one.job], _step(effect, one.step_at)), one.step_at) for one in histories]
        findable = [
            row for one, row in zip(histories, rows, strict=True) if is_findable(effect, spreads[one.job], one.step_at)
        ]
        for title, chosen in (("all", rows), ("findable", findable)):
            print(
                f"step of {effect:+.0%}     {title:<9}{len(chosen):>5}: at its run ±{NEAR} "
                f"{_share([row.at_place for row in chosen]):.0%}, in the reported range "
                f"{_share([row.in_range for row in chosen]):.0%}, slower {_share([row.slower for row in chosen]):.0%}, "
                f"changes elsewhere {_share([row.elsewhere > 0 for row in chosen]):.1%}"
            )
        wrong += sum(row.wrong for row in findable)
    drifts = [
        history_document(points_of(one, levels[one.job], [(1 + DRIFT) ** at for at in range(RUNS)]))
        for one in histories
    ]
    wrong += sum(document["verdict"] == "faster" for document in drifts)
    print(
        f"drift {DRIFT:+.1%} each slower {_share([one['verdict'] == 'slower' for one in drifts]):.0%}, "
        f"as gradual {_share([one['shape'] == 'gradual' for one in drifts]):.0%}"
    )
    print(f"wrong sign      {wrong} (a findable step, or the drift, called faster)")
    return false <= FALSE_AT_MOST * len(histories) and not wrong


def _step(effect: float, at: int) -> list[float]:
    return [1.0] * at + [1 + effect] * (RUNS - at)


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the recorded series")
    parser.add_argument("--tune", action="store_true", help="also score the half from which constants were learned")
    args = parser.parse_args()
    if not (args.data / "mlperf_v5_throughput.json").is_file():
        raise SystemExit(f"no recorded series in {args.data} (--data names their folder)")
    jobs = mlperf_jobs(args.data)
    good = [score(jobs, held=held) for held in ((False, True) if args.tune else (True,))]
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
