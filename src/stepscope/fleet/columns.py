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

TEXTS = ("job", "series", "team", "user", *ATTRIBUTES)
NUMBERS = ("ranks", "step_ms", *(f"{phase}_ms" for phase in PHASES), *map(hours_column, CAUSES))
"""Columns of ``runs`` that become arrays."""

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
    # The window copies all columns that it passes on, so it numbers only the runs.
    columns = ("number", "run", "started_wall_ns", "status", "gpu_hours", *TEXTS, *NUMBERS)
    execute(
        f"CREATE TEMP TABLE chosen AS SELECT {', '.join(map(_quoted, columns))}, place FROM runs JOIN ("
        "SELECT number, row_number() OVER (ORDER BY started_wall_ns, run) - 1 AS place "
        f"FROM runs WHERE {' AND '.join(clauses)}) USING (number)",
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
    for name in TEXTS:
        numbered[name], names[name] = _numbered(execute, f"SELECT {_quoted(name)} AS text, place FROM chosen")
    plain = execute(f"SELECT run, started_wall_ns, {', '.join(NUMBERS)} FROM chosen ORDER BY place").fetchnumpy()
    rows = "FROM run_hosts h JOIN chosen c USING (number)"
    order = "(c.place * 65536 + h.position)"
    host, names["host"] = _numbered(execute, f"SELECT h.host AS text, {order} AS place {rows}")
    device, names["device"] = _numbered(execute, f"SELECT h.device AS text, {order} AS place {rows}")
    gpu, names["gpu"] = _numbered(execute, f"SELECT coalesce(h.gpu_uuid, '') AS text, {order} AS place {rows}")
    hosts = execute(
        f"SELECT c.place AS run, h.position AS position, h.ranks AS ranks, h.work_ms AS work_ms {rows} ORDER BY {order}"
    ).fetchnumpy()
    counts = execute(
        "SELECT count(*) FILTER (status IN ('running', 'unfinished')), count(*) FILTER (gpu_hours IS NULL) FROM chosen"
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
        host=host,
        host_position=_whole(hosts["position"]),
        host_ranks=_whole(hosts["ranks"]),
        host_device=device,
        host_work_ms=_filled(hosts["work_ms"]),
        host_gpu=gpu,
        phase_of=_phases(execute, names["host"]),
        gpu_events=_events(execute),
        gpus=gpus[0],
        active=counts[0],
        unread=counts[1],
    )


def _numbered(execute: Execute, query: str) -> tuple[Integers, list[str]]:
    """The values of a column as numbers in the order of ``place``, and the names of these numbers."""
    execute(
        "CREATE OR REPLACE TEMP TABLE named AS SELECT text, row_number() OVER (ORDER BY text) - 1 AS number "
        f"FROM (SELECT DISTINCT text FROM ({query}))"
    )
    names = [row[0] or "" for row in execute("SELECT text FROM named ORDER BY number").fetchall()]
    numbers = execute(f"SELECT number FROM ({query}) JOIN named USING (text) ORDER BY place").fetchnumpy()["number"]
    return _whole(numbers), names


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
