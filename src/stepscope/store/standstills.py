"""The hangs of a run as they are told: those that several hosts saw judged as one, on the hub's clock.

Beside what the watchdogs wrote (``store/hangs.py``) it takes what the run itself knows: which ranks are gone, and which
nodes the hub heard nothing of any more (``nodes.json``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from stepscope.hangs.joined import Elsewhere, GoneRank, SeenHang, SilentHost, join_hangs
from stepscope.hangs.kept import KeptEvidence
from stepscope.records.hang import HangRecord
from stepscope.records.series import RankError, RankSeries
from stepscope.store.hangs import read_evidence, read_records
from stepscope.store.nodes import NodeInfo, clock_offsets

__all__ = ["elsewhere_of", "read_standstills", "seen_hangs"]

WORDS = {"exited": "exited in order"}
LONGEST_MESSAGE = 300

Attempts = Mapping[tuple[str, int], int]
"""By host and pid."""


def read_standstills(
    run_dir: Path,
    ranks: Sequence[RankSeries],
    errors: Sequence[RankError],
    nodes: Sequence[NodeInfo],
) -> tuple[tuple[HangRecord, ...], tuple[str, ...]]:
    """In order of time, and the names of files that could not be read."""
    offsets = clock_offsets(nodes)
    records, bad = read_records(run_dir, offsets)
    evidence, worse = read_evidence(run_dir, offsets) if records else ([], ())
    if not evidence:
        return tuple(record for _, record in records), (*bad, *worse)
    attempts = {(series.identity.host, series.identity.pid): series.identity.attempt for series in ranks}
    seen = seen_hangs(records, evidence, attempts)
    return tuple(join_hangs(seen, elsewhere_of(ranks, errors, nodes))), (*bad, *worse)


def seen_hangs(
    records: Iterable[tuple[str, HangRecord]], evidence: Iterable[tuple[str, KeptEvidence]], attempts: Attempts
) -> list[SeenHang]:
    """Each record with its evidence, and evidence that made no record; both come with the spool they were in."""
    by_name = {(spool, record.host, record.number): record for spool, record in records}
    found = []
    for spool, kept in evidence:
        host = kept.evidence.host
        of_it = [attempts[host, rank.pid] for rank in kept.evidence.ranks if (host, rank.pid) in attempts]
        record = by_name.pop((spool, host, kept.number), None)
        found.append(SeenHang(record=record, kept=kept, attempt=max(of_it, default=0), spool=spool))
    return [*found, *(SeenHang(record=record, spool=spool) for (spool, _, _), record in by_name.items())]


def elsewhere_of(ranks: Sequence[RankSeries], errors: Sequence[RankError], nodes: Iterable[NodeInfo]) -> Elsewhere:
    """Which ranks are gone, and which hosts were not heard of to the end."""
    said = {error.pid: f"raised {error.type}: {error.message}"[:LONGEST_MESSAGE].rstrip(": ") for error in errors}
    gone = [
        GoneRank(
            rank=series.rank,
            host=series.identity.host,
            pid=series.identity.pid,
            attempt=series.identity.attempt,
            ended=WORDS.get(series.state) or said.get(series.identity.pid, ""),
            ended_wall_ns=series.ended_wall_ns,
            step=int(series.steps["step"][-1]) + 1 if len(series.steps) else None,
        )
        for series in ranks
        if series.ended_wall_ns is not None
    ]
    here: dict[tuple[str, int], list[int]] = {}
    for series in ranks:
        if series.ended_wall_ns is None:
            here.setdefault((series.identity.host, series.identity.attempt), []).append(series.rank)
    heard: dict[str, NodeInfo] = {}
    for node in nodes:
        if node.host not in heard or node.heard_wall_ns > heard[node.host].heard_wall_ns:
            heard[node.host] = node
    silent = [
        SilentHost(host=host, ranks=tuple(sorted(own)), attempt=attempt, heard_wall_ns=heard[host].heard_wall_ns)
        for (host, attempt), own in sorted(here.items())
        if host in heard and heard[host].bye is None
    ]
    return Elsewhere(gone=gone, silent=silent)
