"""The hangs of a run as they are told: those that several hosts saw judged as one, on the hub's clock.

Beside what the watchdogs wrote (``store/hangs.py``) it takes what the run itself knows: which ranks are gone, and which
nodes the hub heard nothing of any more (``nodes.json``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stepscope.hangs.joined import Elsewhere, GoneRank, SeenHang, SilentHost, join_hangs
from stepscope.hangs.kept import KeptEvidence
from stepscope.records.hang import HangRecord
from stepscope.records.series import RankError, RankSeries
from stepscope.store.hangs import read_evidence, read_hangs
from stepscope.store.nodes import NodeInfo, read_nodes

__all__ = ["elsewhere_of", "read_standstills", "seen_hangs"]

WORDS = {"exited": "exited in order"}
LONGEST_MESSAGE = 300

Attempts = Mapping[tuple[str, int], int]
"""By host and pid."""


def read_standstills(
    run_dir: Path, ranks: Sequence[RankSeries], errors: Sequence[RankError]
) -> tuple[tuple[HangRecord, ...], tuple[str, ...]]:
    """In order of time, and the names of files that could not be read."""
    records, bad = read_hangs(run_dir)
    evidence, worse = read_evidence(run_dir) if records else ((), ())
    if not evidence:
        return records, (*bad, *worse)
    nodes = read_nodes(run_dir)
    attempts = {(series.identity.host, series.identity.pid): series.identity.attempt for series in ranks}
    seen = seen_hangs(records, evidence, attempts, nodes)
    return tuple(join_hangs(seen, elsewhere_of(ranks, errors, nodes))), (*bad, *worse)


def seen_hangs(
    records: Iterable[HangRecord], evidence: Iterable[KeptEvidence], attempts: Attempts, nodes: Iterable[NodeInfo]
) -> list[SeenHang]:
    """Each record with its evidence, and evidence that made no record, on the hub's clock."""
    ahead_ns = {node.host: node.offset_ns or 0 for node in nodes}
    by_name = {(record.host, record.number): _shifted(record, ahead_ns.get(record.host, 0)) for record in records}
    found = []
    for kept in evidence:
        host = kept.evidence.host
        of_it = [attempts[host, rank.pid] for rank in kept.evidence.ranks if (host, rank.pid) in attempts]
        found.append(
            SeenHang(
                record=by_name.pop((host, kept.number), None),
                kept=_kept_shifted(kept, ahead_ns.get(host, 0)),
                attempt=max(of_it, default=0),
            )
        )
    return [*found, *(SeenHang(record=record) for record in by_name.values())]


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


def _shifted(record: HangRecord, ahead_ns: int) -> HangRecord:
    if not ahead_ns:
        return record
    return replace(
        record,
        declared_wall_ns=record.declared_wall_ns - ahead_ns,
        stopped_wall_ns=record.stopped_wall_ns - ahead_ns,
        over_wall_ns=None if record.over_wall_ns is None else record.over_wall_ns - ahead_ns,
    )


def _kept_shifted(kept: KeptEvidence, ahead_ns: int) -> KeptEvidence:
    return replace(
        kept,
        stopped_wall_ns=kept.stopped_wall_ns - ahead_ns,
        gathered_wall_ns=kept.gathered_wall_ns - ahead_ns,
        over_wall_ns=None if kept.over_wall_ns is None else kept.over_wall_ns - ahead_ns,
    )
