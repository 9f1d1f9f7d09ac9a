"""How often a comparison is wrong, and how small a change it finds: on repeated runs of real jobs, and on runs of ours.

    python -m compare                          # with the data in ../shared/data/series, and 20 pairs made here
    python -m compare --pairs 0 --data DIR     # the recorded series only
    python -m compare --tune                   # the half from which the constants were learned, too
    python -m compare --intervals 0.9          # if all intervals were narrower by a tenth

Two sources.  Repeated MLPerf runs: each job was run 5 to 10 times, so pairs of runs differ by chance alone.  Tests of
Megatron-LM ran once each; a series is cut into blocks that go to two halves in turn (ABBA), which stand for two runs.

The jobs are divided by a hash of their names: constants were learned from one half, and the held-out half checks them.
A slowdown is *findable* where the noise of the job allows it: if an ideal test that knew the spread of the job's pairs
would find it in 95% of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from compare.pairs import KINDS, record_pairs
from stepscope.comparison.inputs import without_warmup
from stepscope.comparison.statistics import Change, Judgment, Series, Verdict, judge, verdict_of

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "series"
EFFECTS = (0.01, 0.02, 0.03, 0.05)
FINDABLE = 2.576 + 1.645
"""Spreads of pairs: 99% confidence on both sides, and 95% power."""
PAIRS_PER_JOB = 24
BLOCK = 5
LENGTHS = (10, 20, 40, 500, 2000)


@dataclass(frozen=True, kw_only=True)
class Case:
    job: str
    baselines: tuple[Series, ...]
    candidate: Series


def held_out(job: str) -> bool:
    return bool(hashlib.sha256(job.encode()).digest()[0] & 1)


def mlperf_jobs(folder: Path) -> dict[str, list[Series]]:
    raw = json.loads((folder / "mlperf_v5_throughput.json").read_text())
    return {job: [_steady(1.0 / np.array(run, np.float64)) for run in runs] for job, runs in raw.items()}


def megatron_jobs(folder: Path) -> dict[str, Series]:
    raw = json.loads((folder / "megatron_iteration.json").read_text())
    return {job: _steady(np.array(one["iteration_time_ms"], np.float64)) for job, one in raw.items()}


def _steady(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Series:
    return without_warmup(np.arange(len(values)), values)[0]


def pairs_of(jobs: dict[str, list[Series]], baselines: int, *, held: bool) -> list[Case]:
    """Combinations of runs of one job, chosen by a fixed seed."""
    cases = []
    for job, runs in jobs.items():
        if held_out(job) != held or len(runs) <= baselines:
            continue
        chance = random.Random(f"{job} {baselines}")
        for _ in range(PAIRS_PER_JOB):
            *before, after = chance.sample(range(len(runs)), baselines + 1)
            cases.append(Case(job=job, baselines=tuple(runs[at] for at in before), candidate=runs[after]))
    return cases


def halves_of(jobs: dict[str, Series], length: int, *, held: bool) -> list[Case]:
    """Each series as two runs of the given length, one way and the other."""
    cases = []
    for job, series in jobs.items():
        if held_out(job) != held:
            continue
        first = np.isin(np.arange(len(series.values)) // BLOCK % 4, (0, 3))
        one, other = (series.values[part][:length] for part in (first, ~first))
        if len(one) == len(other) == length:
            runs = [Series(numbers=np.arange(length), values=values) for values in (one, other)]
            cases += [Case(job=job, baselines=(runs[at],), candidate=runs[1 - at]) for at in (0, 1)]
    return cases


def slowed(series: Series, effect: float, *, tenth: bool = False) -> Series:
    """All steps slower, or every tenth by ten times as much."""
    factor = np.ones(len(series.values))
    if tenth:
        factor[::10] += 10 * effect
    else:
        factor += effect
    return replace(series, values=series.values * factor)


def verdict_with(judgment: Judgment, intervals: float) -> Verdict:
    """The verdict if the interval were so many times as wide."""
    change = judgment.change
    if intervals == 1:
        return judgment.verdict
    ratio = 1 + change.change
    low, high = (ratio * ((1 + end) / ratio) ** intervals - 1 for end in (change.low, change.high))
    return verdict_of(replace(change, low=low, high=high))


def score(title: str, cases: Sequence[Case], *, by_within: bool, intervals: float = 1.0) -> bool:
    """Print one line of the table; whether the figures are within the targets."""
    if not cases:
        return True
    plain = [judge(case.baselines, case.candidate) for case in cases]
    spread = _spread_by_job(cases, [one.change for one in plain])
    equal = [verdict_with(one, intervals) for one in plain]
    called = {name: _share(one == name for one in equal) for name in ("slower", "faster", "same")}
    cells, wrong = [], 0
    good = called["slower"] <= 0.01 or len(cases) < 100
    for effect in EFFECTS:
        verdicts = [verdict_with(judge(case.baselines, slowed(case.candidate, effect)), intervals) for case in cases]
        findable = [
            at
            for at, case in enumerate(cases)
            if FINDABLE * (plain[at].change.within if by_within else spread[case.job]) <= effect
        ]
        wrong += sum(verdicts[at] == "faster" for at in findable)
        found = _share(verdicts[at] == "slower" for at in findable)
        cells.append(f"{found:>5.0%} of {len(findable):>4}")
    tenth = [judge(case.baselines, slowed(case.candidate, 0.05, tenth=True)).verdict for case in cases]
    print(
        f"{title:<34}{len(cases):>6}{called['slower']:>8.1%}{called['faster']:>8.1%}{called['same']:>7.0%}  "
        + "  ".join(cells)
        + f"{_share(one == 'slower' for one in tenth):>7.0%}{wrong:>7}",
        flush=True,
    )
    return good and not wrong


def _spread_by_job(cases: Sequence[Case], changes: Sequence[Change]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for case, change in zip(cases, changes, strict=True):
        found.setdefault(case.job, []).append(change.change)
    return {job: math.sqrt(float(np.mean(np.square(values)))) for job, values in found.items()}


def _share(hits: Iterable[bool]) -> float:
    known = list(hits)
    return sum(known) / len(known) if known else float("nan")


def league_of_series(folder: Path, *, tune: bool, intervals: float = 1.0) -> bool:
    repeated, single = mlperf_jobs(folder), megatron_jobs(folder)
    good = True
    for held in (False, True) if tune else (True,):
        print(f"\n{'held-out half' if held else 'half from which the constants were learned'}")
        effects = "  ".join(f"{'+' + format(effect, '.0%') + ' found':>13}" for effect in EFFECTS)
        print(f"{'':<34}{'pairs':>6}{'slower':>8}{'faster':>8}{'same':>7}  {effects}{'tenth':>7}{'wrong':>7}")
        for count in (1, 2, 3, 5):
            title = f"MLPerf, {count} baseline{'' if count == 1 else 's'}"
            good &= score(title, pairs_of(repeated, count, held=held), by_within=False, intervals=intervals)
        for words, low, high in (("5 or 6 points", 0, 6), ("7 to 20 points", 7, 20), ("40 to 120 points", 21, 10**6)):
            chosen = {job: runs for job, runs in repeated.items() if low <= _longest(runs) <= high}
            good &= score(
                f"MLPerf, 3 baselines, {words}", pairs_of(chosen, 3, held=held), by_within=False, intervals=intervals
            )
        for length in LENGTHS:
            score(
                f"Megatron halves, {length} steps",
                halves_of(single, length, held=held),
                by_within=True,
                intervals=intervals,
            )
    print(
        "\nslower, faster, same: what equal runs were called (no more than 1% may be called slower)."
        "\nfound: of the pairs in which a slowdown of that size is findable.  tenth: every tenth step slower by half."
        "\nwrong: slower runs called faster, where findable."
    )
    return good


def _longest(runs: Sequence[Series]) -> int:
    return max(int(run.numbers[-1]) + 1 for run in runs)


def league_of_pairs(count: int, steps: int, baselines: int, keep: Path | None) -> bool:
    print(f"\nruns made here: 2 ranks on gloo, {steps} steps, {baselines} baselines", flush=True)
    wrong: dict[str, int] = dict.fromkeys(KINDS, 0)
    seen: dict[str, list[Verdict]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as made:
        for pair in record_pairs(count, steps, baselines, keep or Path(made)):
            low, high = pair.document["interval"]
            print(
                f"  {pair.kind:<7}{pair.document['change']:>+8.1%}  [{low:+.1%}, {high:+.1%}]  {pair.called}"
                f"{'   WRONG' if pair.wrong else ''}",
                flush=True,
            )
            wrong[pair.kind] += pair.wrong
            seen[pair.kind].append(pair.document["verdict"])
    for kind, verdicts in seen.items():
        counts = ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts))
        print(f"{kind:<7} {counts or 'none'}; {wrong[kind]} wrong")
    return not any(wrong.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the recorded series")
    parser.add_argument("--tune", action="store_true", help="also score the half from which constants were learned")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of runs to make here; 0: none")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--baselines", type=int, default=3)
    parser.add_argument("--intervals", type=float, default=1.0, help="score as if they were so many times as wide")
    parser.add_argument("--keep", type=Path, help="keep the runs made here in this folder")
    args = parser.parse_args()
    good = True
    if (args.data / "mlperf_v5_throughput.json").is_file():
        good = league_of_series(args.data, tune=args.tune, intervals=args.intervals)
    else:
        print(f"no recorded series in {args.data}; skipping them (--data names their folder)")
    if args.pairs:
        good &= league_of_pairs(args.pairs, args.steps, args.baselines, args.keep)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
