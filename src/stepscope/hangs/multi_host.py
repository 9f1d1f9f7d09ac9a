"""Hangs that several hosts saw, joined into one and judged again with the evidence of all.

    for record in join_hangs(seen): …

A watchdog sees only the ranks of its host. If its ranks wait for ranks on other hosts, it can only report that. The
evidence of each watchdog (``hangs/evidence.py``) is collected at the hub, or in the run's folder, and judged again as
if all ranks were on one host, so that the culprit is named wherever it is. A host whose watchdog found an excuse (it
compiles) counts as well: then it was not a hang for the others either, and their records say so. Pure; all times are on
one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from stepscope.flight.wording import listed, one_line
from stepscope.hangs.evidence import Evidence, EvidenceFile, LostHost, RankEvidence
from stepscope.hangs.excuses import NotAHang
from stepscope.hangs.judge import judge
from stepscope.hangs.thresholds import LOST_HOST_S, STALE
from stepscope.records.hang import HangPart, HangRecord

__all__ = ["Elsewhere", "GoneRank", "SeenHang", "SilentHost", "join_hangs"]

HOSTS_JUDGED = 256
"""Maximum at once; informative hosts come first, since most only wait."""
REASON_CHARS = 160
HOSTS_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class SeenHang:
    """A hang as one host saw it; either half may be missing."""

    record: HangRecord | None = None
    file: EvidenceFile | None = None
    attempt: int = 0
    """Attempt of the job: ranks of different attempts do not wait for each other."""
    spool: str = ""
    """The sender it came from: hosts may have the same name."""

    @property
    def host(self) -> str:
        return self.file.evidence.host if self.file else self.record.host if self.record else ""

    @property
    def stopped_wall_ns(self) -> int:
        return self.file.stopped_wall_ns if self.file else self.record.stopped_wall_ns if self.record else 0

    @property
    def over_wall_ns(self) -> int | None:
        return self.record.over_wall_ns if self.record else self.file.over_wall_ns if self.file else None


@dataclass(frozen=True, kw_only=True)
class GoneRank:
    """A rank whose process is known to be gone, on any host."""

    rank: int
    host: str
    pid: int
    attempt: int
    ended: str
    """As in ``RankEvidence``."""
    ended_wall_ns: int
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class SilentHost:
    """A host that did not sign off, and the time of its last message."""

    host: str
    ranks: tuple[int, ...]
    attempt: int
    heard_wall_ns: int


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Other knowledge about ranks that no watchdog reported."""

    gone: Sequence[GoneRank] = ()
    silent: Sequence[SilentHost] = ()


@dataclass(kw_only=True)
class _Standstill:
    seen: list[SeenHang] = field(default_factory=list)
    senders: set[tuple[str, str]] = field(default_factory=set)
    ends_ns: float = float("inf")

    def takes(self, other: SeenHang) -> bool:
        """Whether it is the same hang: on another host, in the same world of ranks, and at the same time."""
        first = self.seen[0]
        if first.file is None or other.file is None or (other.host, other.spool) in self.senders:
            return False
        same = other.file.evidence.world_size == first.file.evidence.world_size and other.attempt == first.attempt
        return same and other.stopped_wall_ns <= self.ends_ns

    def add(self, other: SeenHang) -> None:
        self.seen.append(other)
        self.senders.add((other.host, other.spool))
        if other.over_wall_ns is not None:
            self.ends_ns = min(self.ends_ns, other.over_wall_ns)


def join_hangs(
    seen: Iterable[SeenHang], elsewhere: Elsewhere | None = None, *, most_hosts: int = HOSTS_JUDGED
) -> list[HangRecord]:
    """The hangs of a run by time: joined if several hosts saw them, the others unchanged."""
    found: list[HangRecord] = []
    for standstill in _standstills(seen):
        found += _records_of(standstill.seen, elsewhere or Elsewhere(), most_hosts)
    return sorted(found, key=lambda hang: (hang.stopped_wall_ns, hang.host, hang.number))


def _standstills(seen: Iterable[SeenHang]) -> list[_Standstill]:
    groups: dict[tuple[int, int], list[_Standstill]] = {}
    found: list[_Standstill] = []
    for hang in sorted(seen, key=lambda hang: (hang.stopped_wall_ns, hang.host)):
        near = groups.setdefault((hang.attempt, hang.file.evidence.world_size if hang.file else 0), [])
        # Only the last few can still be ongoing: each host is in one at a time.
        for standstill in near[-2:]:
            if standstill.takes(hang):
                standstill.add(hang)
                break
        else:
            fresh = _Standstill()
            fresh.add(hang)
            near.append(fresh)
            found.append(fresh)
    return found


def _records_of(seen: Sequence[SeenHang], elsewhere: Elsewhere, most_hosts: int) -> list[HangRecord]:
    records = [hang.record for hang in seen if hang.record is not None]
    declared_ns = max((record.declared_wall_ns for record in records), default=0)
    judged = sorted((hang for hang in seen if _counts(hang, declared_ns)), key=_says_little)[:most_hosts]
    if not records or not judged:
        return records
    evidence = _evidence(sorted(judged, key=lambda hang: hang.host), elsewhere, declared_ns)
    if len(judged) < 2 and {*evidence.hosts.values()} <= {judged[0].host} and not evidence.lost:
        return records
    stopped_ns = max(hang.stopped_wall_ns for hang in judged)
    number = records[0].number
    answer = judge(evidence, number=number, declared_wall_ns=declared_ns, stopped_wall_ns=stopped_ns)
    if isinstance(answer, NotAHang):
        return [_with_excuse(record, evidence, answer) for record in records]
    return [_as_one(answer, records, evidence)]


def _counts(hang: SeenHang, declared_ns: int) -> bool:
    if hang.file is None or hang.record is not None:
        return hang.file is not None
    return declared_ns - hang.file.gathered_wall_ns <= STALE * hang.file.evidence.threshold_s * 1e9


def _says_little(hang: SeenHang) -> bool:
    """Whether its watchdog only saw its own ranks wait."""
    return hang.record is not None and hang.record.undecidable


def _evidence(judged: Sequence[SeenHang], elsewhere: Elsewhere, declared_ns: int) -> Evidence:
    parts = [hang.file.evidence for hang in judged if hang.file is not None]
    attempt = judged[0].attempt
    ranks: dict[int, RankEvidence] = {}
    hosts: dict[int, str] = {}
    for part in parts:
        for rank in part.ranks:
            if rank.rank not in ranks or (rank.alive and not ranks[rank.rank].alive):
                ranks[rank.rank], hosts[rank.rank] = rank, part.host
    for gone in elsewhere.gone:
        if gone.attempt == attempt and gone.rank not in ranks and gone.ended_wall_ns <= declared_ns:
            ranks[gone.rank], hosts[gone.rank] = _gone(gone, declared_ns), gone.host
    lost = []
    for silent in elsewhere.silent:
        silent_s = (declared_ns - silent.heard_wall_ns) / 1e9
        missing = tuple(sorted(set(silent.ranks) - set(ranks)))
        if silent.attempt == attempt and missing and silent_s >= LOST_HOST_S:
            lost.append(LostHost(host=silent.host, ranks=missing, silent_s=silent_s))
    usual = sorted(part.step_s for part in parts if part.step_s is not None)
    return Evidence(
        host=parts[0].host,
        world_size=parts[0].world_size,
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        threshold_s=max(part.threshold_s for part in parts),
        step_s=usual[len(usual) // 2] if usual else None,
        source_lines={place: text for part in reversed(parts) for place, text in part.source_lines.items()},
        hosts=hosts,
        lost=tuple(lost),
    )


def _gone(rank: GoneRank, declared_ns: int) -> RankEvidence:
    silent_s = round(max(declared_ns - rank.ended_wall_ns, 0) / 1e9, 1)
    return RankEvidence(rank=rank.rank, pid=rank.pid, alive=False, ended=rank.ended, step=rank.step, silent_s=silent_s)


def _with_excuse(record: HangRecord, evidence: Evidence, answer: NotAHang) -> HangRecord:
    """With all hosts together it was not a hang: a rank was working, perhaps for too long."""
    hosts = sorted({*evidence.hosts.values()} - {record.host})
    note = f"With the ranks of {listed(hosts[:HOSTS_NAMED])} it is not a hang: {one_line(answer.reason, REASON_CHARS)}"
    return replace(record, evidence=(*record.evidence, note))


def _as_one(answer: HangRecord, records: Sequence[HangRecord], evidence: Evidence) -> HangRecord:
    guilty = [evidence.hosts.get(culprit.rank, "") for culprit in answer.culprits]
    lead = next((record for host in guilty for record in records if record.host == host), records[0])
    over: dict[str, Literal["recovered", "ended", "aborted"]] = {r.over: r.over for r in records if r.over is not None}
    ends = [record.over_wall_ns for record in records if record.over_wall_ns is not None]
    return replace(
        answer,
        host=lead.host,
        number=lead.number,
        over=over.get("aborted") or over.get("ended") or over.get("recovered"),
        over_wall_ns=max(ends, default=None),
        action=next((record.action for record in records if record.action), ""),
        hosts=tuple(sorted({*evidence.hosts.values(), *(hang.host for hang in evidence.lost)})),
        parts=tuple(
            HangPart(host=record.host, number=record.number, kind=record.kind, title=record.title) for record in records
        ),
    )
