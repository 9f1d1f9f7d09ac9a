"""SQL over the parts of a run that is too large to be loaded: every step of every rank, read as it is asked for.

``ranks`` has all of them as well.  Phases of the user's own are ``slot_9_ns`` …, by the slot that each rank gave them;
device times and collectives are there for the ranks that were loaded only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepscope.errors import FrameError
from stepscope.records.phases import BACKWARD, COMM
from stepscope.records.sql_paths import unglobbed
from stepscope.store.columns import BUILTIN_COLUMNS, PLAIN
from stepscope.store.journal import read_journal
from stepscope.store.nodes import clock_offsets, read_nodes
from stepscope.store.parts import PHASE_COLUMNS, part_steps, rest_path
from stepscope.store.positions import Sealed
from stepscope.store.spools import briefly
from stepscope.store.tables import make_table
from stepscope.wire.blocks import ring_id
from stepscope.wire.frames import read_frame

__all__ = ["add_parts", "ranks_in_parts"]

_EXPOSED = "ddp_exposed_ns"
_WALL = ("anchor_wall_ns", "ended_wall_ns")
_RINGS = {"ring": "BIGINT", "rank": "BIGINT", "attempt": "BIGINT"}


def add_parts(con: Any, run_dir: Path, sealed: Sealed, rows: list[dict[str, Any]]) -> list[Path]:
    """Make ``steps``, a table of the ranks here, a view of these and of all in parts; the files it reads.

    ``rows``: as ``ranks_in_parts`` gives them; how many steps each has is added.
    """
    paths = [path.absolute() for path in part_steps(run_dir, sealed.parts)]
    files = ", ".join(map(unglobbed, paths))
    table = f"read_parquet([{files}], union_by_name = true)"
    there = {row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()}
    counts = dict(con.execute(f"SELECT ring, count(*) FROM {table} GROUP BY ring").fetchall())
    for row in rows:
        row["steps"] = counts.get(row["ring"], 0)
    make_table(con, "rings", _RINGS, rows)
    columns = {name: f"coalesce(p.{name}, 0)" if name in there else "0" for name in (*PLAIN, *PHASE_COLUMNS)}
    if _EXPOSED in there:
        waited = (
            f"least(coalesce(lead(p.{_EXPOSED}) OVER (PARTITION BY p.ring ORDER BY p.step), p.{_EXPOSED}, 0), "
            f"coalesce(p.{BUILTIN_COLUMNS[BACKWARD]}, 0))"
        )
        columns[BUILTIN_COLUMNS[BACKWARD]] += f" - {waited}"
        columns[BUILTIN_COLUMNS[COMM]] += f" + {waited}"
    own = [name for name in PHASE_COLUMNS[len(BUILTIN_COLUMNS) :] if name not in there]
    chosen = ", ".join(f"{value} AS {name}" for name, value in columns.items() if name not in own)
    con.execute("ALTER TABLE steps RENAME TO steps_here")
    con.execute(
        f"CREATE VIEW steps AS SELECT * FROM steps_here UNION ALL BY NAME "
        f"SELECT r.rank, r.attempt, {chosen} FROM {table} p JOIN rings r USING (ring)"
    )
    return paths


def ranks_in_parts(run_dir: Path, sealed: Sealed) -> list[dict[str, Any]]:
    """Each ring in parts: its number and what its sidecar last said, flat, its times by the hub's clock."""
    offsets = clock_offsets(read_nodes(run_dir))
    found: dict[int, tuple[Any, dict[str, Any]]] = {}
    for spool, raw, heard, key in _sidecars(run_dir, sealed):
        position = sealed.spools[spool].rings.get(ring_id(key)) if spool in sealed.spools else None
        if position is not None and position.number >= 0:
            before = found.get(position.number)
            if before is None or heard > before[0]:
                times = {name: raw[name] and raw[name] - offsets.get(spool, 0) for name in _WALL}
                found[position.number] = (heard, {**raw, **raw["identity"], **times, "ring": position.number})
    return [row for _, row in found.values()]


def _sidecars(run_dir: Path, sealed: Sealed) -> Iterator[tuple[str, dict[str, Any], Any, str]]:
    for number in sealed.parts:
        for received in read_journal(rest_path(run_dir, number)):
            try:
                frame = read_frame(received.raw)
                for part in frame.parts:
                    if part.kind == "rings":
                        for key, heard, raw in briefly(part):
                            yield frame.head.spool, raw, heard, key
            except FrameError:
                continue
