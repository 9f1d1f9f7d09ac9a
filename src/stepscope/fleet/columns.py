"""The catalog's records as arrays, which the analysis works on: rows of runs, and of runs on hosts.

Hosts, jobs and series are numbers here; ``names`` of ``Fleet`` says what they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.fleet.record import CAUSES, PHASES, hours_column

__all__ = ["ATTRIBUTES", "UNKNOWN", "Fleet", "GpuEvent", "read_fleet"]

UNKNOWN = -1
"""In a column of numbers of names: none."""
ATTRIBUTES = ("image", "driver", "file_system", "torch", "python", "platform", "stepscope", "commit")
"""What may differ between two runs of a series."""

TEXTS = (("job", "series"), ("team", "user"), ATTRIBUTES)
"""Columns of ``runs`` that are read as numbers of names; those that are read together have few combinations."""
NUMBERS = ("ranks", "step_ms", *(f"{phase}_ms" for phase in PHASES), *map(hours_column, CAUSES))

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def _floats() -> Floats:
    return np.zeros(0)


def _integers() -> Integers:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class GpuEvent:
    run: int
    """Its place among the runs."""
    host: str
    gpu_index: int | None
    gpu_uuid: str | None
    gpu_name: str | None
    event: str
    throttled_share: float | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Runs in the order of their start.  Times that are not known are NaN."""

    ids: Sequence[str] = ()
    started_ns: Integers = field(default_factory=_integers)
    ranks: Integers = field(default_factory=_integers)
    job: Integers = field(default_factory=_integers)
    series: Integers = field(default_factory=_integers)
    """Runs of the same command with as many ranks on the same devices."""
    team: Integers = field(default_factory=_integers)
    user: Integers = field(default_factory=_integers)
    step_ms: Floats = field(default_factory=_floats)
    phases_ms: Mapping[str, Floats] = field(default_factory=dict)
    hours: Floats = field(default_factory=lambda: np.zeros((0, len(CAUSES))))
    """GPU hours by run and cause; NaN: not known."""
    attributes: Mapping[str, Integers] = field(default_factory=dict)
    """By run, numbers of names."""
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By column: job, series, team, user, host, device and the attributes."""

    host_run: Integers = field(default_factory=_integers)
    """Rows of runs on hosts, in the order of the runs: the run's place, and the rest by row."""
    host: Integers = field(default_factory=_integers)
    host_position: Integers = field(default_factory=_integers)
    """In the run: hosts are counted in the order of their first rank."""
    host_ranks: Integers = field(default_factory=_integers)
    host_device: Integers = field(default_factory=_integers)
    host_work_ms: Floats = field(default_factory=_floats)
    """What the host's slowest rank works in a step, without waiting for peers."""
    host_gpu: Integers = field(default_factory=_integers)
    """The GPU of that rank."""

    phase_of: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """By run and host: the phase in which a finding says that it is slow."""
    gpu_events: Sequence[GpuEvent] = ()
    gpus: int = 0
    """Different GPUs, as far as they are known."""
    active: int = 0
    """Runs that are still active."""
    unread: int = 0
    """Runs without hours: without a summary, or of unknown duration."""

    def renamed(self, name: Callable[[str], str]) -> Fleet:
        """The same with other IDs of the runs."""
        return replace(self, ids=[name(id_) for id_ in self.ids])


Execute = Callable[..., Any]


def read_fleet(execute: Execute, keys: Sequence[str] | None, since_wall_ns: int | None) -> Fleet:
    """Read the fleet with a connection's ``execute``; ``keys``: only runs of these folders."""
    clauses, values = ["true"], list[Any]()
    if keys is not None:
        clauses.append(f"number IN (SELECT number FROM files WHERE folder IN ({', '.join('?' * len(keys)) or 'NULL'}))")
        values += keys
    if since_wall_ns is not None:
        clauses.append("started_wall_ns >= ?")
        values.append(since_wall_ns)
    execute(
        "CREATE TEMP TABLE chosen AS SELECT number, row_number() OVER (ORDER BY started_wall_ns, run) - 1 AS place "
        f"FROM runs WHERE {' AND '.join(clauses)}",
        values,
    )
    try:
        return _read(execute)
    finally:
        execute("DROP TABLE IF EXISTS chosen")
        execute("DROP TABLE IF EXISTS named")


def _read(execute: Execute) -> Fleet:
    names: dict[str, Sequence[str]] = {}
    numbered: dict[str, Integers] = {}
    runs = "FROM runs JOIN chosen USING (number)"
    for columns in TEXTS:
        own, own_names = _numbered(execute, {name: _quoted(name) for name in columns}, runs, "place")
        numbered |= own
        names |= own_names
    plain = execute(f"SELECT run, started_wall_ns, {', '.join(NUMBERS)} {runs} ORDER BY place").fetchnumpy()
    rows = "FROM run_hosts h JOIN chosen c USING (number)"
    order = "(c.place * 65536 + h.position)"
    on_hosts, host_names = _numbered(
        execute, {"host": "h.host", "device": "h.device", "gpu": "h.gpu_uuid"}, rows, order
    )
    names |= host_names
    hosts = execute(
        f"SELECT c.place AS run, h.position AS position, h.ranks AS ranks, h.work_ms AS work_ms {rows} ORDER BY {order}"
    ).fetchnumpy()
    counts = execute(
        f"SELECT count(*) FILTER (status IN ('running', 'unfinished')), count(*) FILTER (gpu_hours IS NULL) {runs}"
    ).fetchall()[0]
    gpus = execute("SELECT count(DISTINCT gpu_uuid) FROM run_hosts WHERE gpu_uuid IS NOT NULL").fetchall()[0]
    return Fleet(
        ids=plain["run"].tolist(),
        started_ns=_whole(plain["started_wall_ns"]),
        ranks=_whole(plain["ranks"]),
        **{name: numbered[name] for name in ("job", "series", "team", "user")},
        step_ms=_filled(plain["step_ms"]),
        phases_ms={phase: _filled(plain[f"{phase}_ms"]) for phase in PHASES},
        hours=np.stack([_filled(plain[hours_column(cause)]) for cause in CAUSES], axis=1),
        attributes={name: numbered[name] for name in ATTRIBUTES},
        names=names,
        host_run=_whole(hosts["run"]),
        host=on_hosts["host"],
        host_position=_whole(hosts["position"]),
        host_ranks=_whole(hosts["ranks"]),
        host_device=on_hosts["device"],
        host_work_ms=_filled(hosts["work_ms"]),
        host_gpu=on_hosts["gpu"],
        phase_of=_phases(execute, names["host"]),
        gpu_events=_events(execute),
        gpus=gpus[0],
        active=counts[0],
        unread=counts[1],
    )


def _numbered(
    execute: Execute, columns: Mapping[str, str], rows: str, place: str
) -> tuple[dict[str, Integers], dict[str, Sequence[str]]]:
    """The values of text columns as numbers in the order of ``place``, and the names of these numbers.

    ``columns``: expressions by name; they should depend on each other, because each combination is read once.
    """
    texts = ", ".join(f"coalesce({text}, '') AS {_quoted(name)}" for name, text in columns.items())
    execute(
        "CREATE OR REPLACE TEMP TABLE named AS SELECT *, row_number() OVER () - 1 AS combination "
        f"FROM (SELECT DISTINCT {texts} {rows})"
    )
    combinations = execute("SELECT * FROM named ORDER BY combination").fetchall()
    own = execute(
        f"SELECT combination FROM (SELECT {texts}, {place} AS place {rows}) "
        f"JOIN named USING ({', '.join(map(_quoted, columns))}) ORDER BY place"
    ).fetchnumpy()["combination"]
    numbers: dict[str, Integers] = {}
    names: dict[str, Sequence[str]] = {}
    for at, name in enumerate(columns):
        values = [row[at] for row in combinations]
        names[name] = sorted(set(values))
        number_of = {value: number for number, value in enumerate(names[name])}
        numbers[name] = np.array([number_of[value] for value in values], np.int64)[_whole(own)]
    return numbers, names


def _phases(execute: Execute, hosts: Sequence[str]) -> dict[tuple[int, int], str]:
    found: dict[tuple[int, int], str] = {}
    number_of = {name: number for number, name in enumerate(hosts)}
    rows = execute(
        "SELECT c.place, unnest(f.hosts), f.phase FROM run_findings f JOIN chosen c USING (number) "
        "WHERE f.phase IS NOT NULL AND f.kind LIKE '%straggler' AND len(f.hosts) <= 8 ORDER BY f.position DESC"
    ).fetchall()
    for run, host, phase in rows:
        if host in number_of:
            found[run, number_of[host]] = phase
    return found


def _events(execute: Execute) -> list[GpuEvent]:
    rows = execute(
        "SELECT c.place, g.host, g.gpu_index, g.gpu_uuid, g.gpu_name, g.event, g.throttled_share, g.reasons "
        "FROM run_gpus g JOIN chosen c USING (number) ORDER BY c.place"
    ).fetchall()
    return [
        GpuEvent(
            run=run,
            host=host,
            gpu_index=index,
            gpu_uuid=uuid,
            gpu_name=name,
            event=event,
            throttled_share=share,
            reasons=tuple(reasons or ()),
        )
        for run, host, index, uuid, name, event, share, reasons in rows
    ]


def _quoted(column: str) -> str:
    return f'"{column}"'


def _filled(column: Any) -> Floats:
    return np.ma.filled(np.ma.asarray(column, dtype=np.float64), np.nan)


def _whole(column: Any) -> Integers:
    return np.asarray(np.ma.filled(column, UNKNOWN), np.int64)
