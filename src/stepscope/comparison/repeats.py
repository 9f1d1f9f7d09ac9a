"""Other runs of the baseline: in its folder there are often some, and each shows how far runs of this job differ.

A run counts as a repeat of the baseline

- if it has the same command, number of ranks and commit, and nothing that was recorded about it differs (settings,
  environment, machine, uncommitted files); or
- if it has a tag of the baseline that the run to compare does not have, and does the same work on the same machine.

If the first also holds for the run to compare, nothing that was recorded says on which side of the change a run is.
Then only those on the other side of the baseline in time are repeats of it, and only if their steps take about as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.comparison.comparison import compare_inputs, differences, differs_in_what_matters
from stepscope.comparison.inputs import Input, read_input
from stepscope.comparison.statistics import ASSUMED_AT_MOST, Series
from stepscope.errors import StepscopeError
from stepscope.records.text import count_text
from stepscope.store.catalog import RunEntry, list_runs, run_entry
from stepscope.store.paths import META

__all__ = ["MOST_BASELINES", "compare_with_repeats", "read_repeats", "repeats_text"]

MOST_BASELINES = 5
"""More say little that is new, and each takes the time and memory of a whole run."""
MOST_READ = 8
"""Runs that are read to find them."""


def compare_with_repeats(
    baselines: Sequence[Input], candidate: Input, *, only: bool = False, unfinished: bool = False
) -> dict[str, Any]:
    """Compare ``candidate`` with its baselines; if there is one, with its repeats too, unless ``only``."""
    repeats = read_repeats(baselines[0], [candidate]) if len(baselines) == 1 and not only else []
    document = compare_inputs([*baselines, *repeats], candidate, unfinished=unfinished)
    if repeats:
        document["notices"].insert(0, f"{repeats_text(baselines[0], repeats)} (--only compares without them).")
    return document


def read_repeats(baseline: Input, candidates: Sequence[Input]) -> list[Input]:
    """Read the repeats of a baseline next to it, the nearest in time first; empty if an input is not a run.

    ``candidates``: all that are compared with it; with several, a repeat must be one for each of them.
    """
    paths = [Path(source.path) for source in (baseline, *candidates)]
    if not all((path / META).is_file() for path in paths):
        return []
    first, *lasts = (run_entry(path) for path in paths)
    resolved = {path.resolve() for path in paths}
    entries, _ = list_runs(paths[0].resolve().parent)
    others = [
        entry
        for entry in entries
        if entry.path.resolve() not in resolved
        and entry.status == "finished"
        and all(_may_be(entry, first, last) for last in lasts)
    ]
    others.sort(key=lambda entry: abs(entry.created_wall_ns - first.created_wall_ns))
    found: list[Input] = []
    for entry in others[:MOST_READ]:
        try:
            read = read_input(entry.path)
        except (StepscopeError, OSError):
            continue
        compared = zip(lasts, candidates, strict=True)
        if _is_usable(read, baseline) and all(_is_repeat(entry, read, (first, baseline), pair) for pair in compared):
            found.append(read)
        if len(found) == MOST_BASELINES - 1:
            break
    return found


def _may_be(entry: RunEntry, first: RunEntry, last: RunEntry) -> bool:
    """Whether it is worth reading."""
    return _alike(entry, first) or bool(_own_tags(first, last) & set(entry.labels.tags))


def _is_usable(read: Input, baseline: Input) -> bool:
    """Whether it has about as many steps, on the same clocks."""
    return not read.bad and read.steady >= baseline.steady / 2 and set(baseline.clocks) <= set(read.clocks)


def _is_repeat(entry: RunEntry, read: Input, base: tuple[RunEntry, Input], compared: tuple[RunEntry, Input]) -> bool:
    (first, baseline), (last, candidate) = base, compared
    if _own_tags(first, last) & set(entry.labels.tags):
        return not differs_in_what_matters(read, baseline)
    if not _alike(entry, first) or differences(read, baseline):
        return False
    if not _alike(last, first) or differences(candidate, baseline):
        return True
    apart = (entry.created_wall_ns < first.created_wall_ns) != (last.created_wall_ns < first.created_wall_ns)
    return apart and abs(_mean(read) / _mean(baseline) - 1) <= ASSUMED_AT_MOST


def _mean(source: Input) -> float:
    run = source.on(source.clocks[0]).run
    return float(run.values.mean()) if isinstance(run, Series) else run.mean


def _own_tags(first: RunEntry, last: RunEntry) -> set[str]:
    return set(first.labels.tags) - set(last.labels.tags)


def _alike(first: RunEntry, two: RunEntry) -> bool:
    return (first.command, first.ranks, first.commit, first.dirty) == (two.command, two.ranks, two.commit, two.dirty)


def repeats_text(baseline: Input, repeats: Sequence[Input]) -> str:
    """The sentence that says that they are used."""
    names = ", ".join(repeat.name for repeat in repeats)
    return (
        f"{count_text(len(repeats), 'more run')} of {baseline.name} in its folder ({names}) "
        f"{'is used as a baseline' if len(repeats) == 1 else 'are used as baselines'}, too"
    )
