"""Of a run with more steps than fit into memory, the ranks that matter: the worst by each phase, and an even sample.

Which are worst is asked of the parts (``store/parts.py``) by SQL: the median of each phase and of the whole step, over
some of the steps where there are very many.  The rank that waits least is as interesting as those that work longest,
since it is the one that the others wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.records.phases import COMM
from stepscope.records.sql_paths import unglobbed
from stepscope.store.columns import BUILTIN_COLUMNS
from stepscope.store.parts import part_steps
from stepscope.store.positions import Sealed

__all__ = ["MOST_STEPS", "Choice", "choose", "is_too_large"]

MOST_STEPS = 3_000_000
"""Steps of all ranks that are loaded as they are: 256 bytes each, and as much again while they are put together."""
RANKS = 512
WORST = 24
"""By each measure."""
_ASKED_ROWS = 2_000_000
"""Steps that are looked at to find them."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    rings: dict[str, frozenset[bytes]]
    """By spool."""
    notice: str


def is_too_large(sealed: Sealed) -> bool:
    """To be loaded as a whole."""
    return sealed.steps > MOST_STEPS


def choose(run_dir: Path, sealed: Sealed) -> Choice | None:
    """The rings to load; None: all of them."""
    if not is_too_large(sealed):
        return None
    names = {
        ring.number: (spool.name, ident) for spool in sealed.spools.values() for ident, ring in spool.rings.items()
    }
    numbers = [number for number in sorted(names) if number >= 0]
    chosen = _worst(part_steps(run_dir, sealed.parts), sealed.steps, most=RANKS // 2)
    spare = RANKS - len(chosen)
    chosen |= set(_evenly([number for number in numbers if number not in chosen], spare))
    rings: dict[str, set[bytes]] = {}
    for number in chosen & set(numbers):
        spool, ident = names[number]
        rings.setdefault(spool, set()).add(ident)
    notice = (
        f"This run has {sealed.steps:,} steps of {len(numbers):,} ranks on other nodes: {len(chosen):,} of them were "
        f"looked at, the slowest by each phase and an even sample; stepscope sql sees all."
    )
    return Choice(rings={spool: frozenset(own) for spool, own in rings.items()}, notice=notice)


def _worst(paths: Sequence[Path], steps: int, *, most: int) -> set[int]:
    """By each measure in turn, until there are enough."""
    import duckdb

    if not paths:
        return set()
    every = max(1, steps // _ASKED_ROWS)
    files = ", ".join(map(unglobbed, paths))
    table = f"read_parquet([{files}], union_by_name = true)"
    with duckdb.connect(config={"threads": 2}) as con:
        con.execute("SET enable_progress_bar = false")
        there = {row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()}
        measures = [name for name in BUILTIN_COLUMNS if name in there]
        waiting = BUILTIN_COLUMNS[COMM] if BUILTIN_COLUMNS[COMM] in there else "0"
        medians = ", ".join(
            [f"median(wall_ns - {waiting}) AS work", "median(wall_ns) AS wall_ns"]
            + [f"median({name}) AS {name}" for name in measures]
        )
        con.execute(
            f"CREATE TABLE m AS SELECT ring, {medians} FROM {table} WHERE step % {every} = 0 AND step > 0 GROUP BY ring"
        )
        asked = [
            f"SELECT ring FROM m ORDER BY {name} DESC, ring LIMIT {WORST}" for name in ("work", "wall_ns", *measures)
        ]
        found: list[list[tuple[Any, ...]]] = [con.execute(query).fetchall() for query in asked]
    chosen: set[int] = set()
    for place in range(WORST):
        for rows in found:
            if place < len(rows) and len(chosen) < most:
                chosen.add(int(rows[place][0]))
    return chosen


def _evenly(numbers: Sequence[int], count: int) -> Iterable[int]:
    if len(numbers) <= count:
        return numbers
    return [numbers[place * len(numbers) // count] for place in range(count)]
