"""From what was gathered about ranks that stand still to who holds them up, or to why that is no hang.

    answer = judge(evidence, number=1, declared_wall_ns=now, stopped_wall_ns=then)
    if isinstance(answer, NotAHang): look again in answer.look_again_s

Pure: the same evidence gives the same answer, and no evidence makes it raise.
"""

from __future__ import annotations

from typing import Any

from stepscope.flight.stacks import group_stacks, user_frame
from stepscope.flight.verdict import Verdict
from stepscope.hangs.evidence import Evidence
from stepscope.hangs.excuses import NotAHang, at_rest, excuse_of, under_way, unfinished
from stepscope.hangs.kinds import rule_certain, rule_waiting
from stepscope.hangs.recorders import read_recorders
from stepscope.hangs.situation import Situation, situation_of
from stepscope.hangs.words import one_line, place_text
from stepscope.records.decode import encoded
from stepscope.records.hang import HangRecord, RankThere, StackGroup

__all__ = ["NotAHang", "judge"]


def judge(evidence: Evidence, *, number: int, declared_wall_ns: int, stopped_wall_ns: int) -> HangRecord | NotAHang:
    recorders = read_recorders(evidence)
    situation = situation_of(evidence, recorders)
    rest = at_rest(evidence, situation.doings.values())
    if rest is not None:
        return rest
    ruling = rule_certain(situation)
    if ruling is None:
        excuse = (
            under_way(evidence, recorders)
            or excuse_of(evidence, situation.doings.values())
            or unfinished(evidence, recorders)
        )
        if excuse is not None:
            return excuse
        ruling = rule_waiting(situation)
    return HangRecord(
        number=number,
        host=evidence.host,
        kind=ruling.kind,
        title=ruling.title,
        declared_wall_ns=declared_wall_ns,
        stopped_wall_ns=stopped_wall_ns,
        threshold_s=evidence.threshold_s,
        step_s=evidence.step_s,
        culprits=ruling.culprits,
        victims=ruling.victims,
        undecidable=ruling.undecidable,
        collective=ruling.collective,
        cycle=ruling.cycle,
        evidence=ruling.evidence,
        ranks=tuple(_there(situation, rank) for rank in situation.ranks),
        stacks=_stacks(situation),
        flight=_flight(recorders.verdict),
    )


def _flight(verdict: Verdict | None) -> dict[str, Any]:
    """Without what the record has itself."""
    if verdict is None:
        return {}
    return {key: value for key, value in encoded(verdict.to_dict()).items() if key not in ("schema", "stacks")}


def _there(situation: Situation, number: int) -> RankThere:
    rank, doing = situation.ranks[number], situation.doings[number]
    return RankThere(
        rank=number,
        pid=rank.pid,
        alive=doing.state != "gone",
        step=rank.step,
        phase=rank.phase,
        since_s=rank.silent_s,
        process_state=rank.process_state,
        cpu_share=rank.cpu_share,
        gil_held=rank.gil_held,
        waiting_in=doing.waiting_in,
        at=doing.at,
        workers=tuple(_worker(situation, number)),
        host=situation.evidence.hosts.get(number, ""),
    )


def _worker(situation: Situation, number: int) -> list[dict[str, Any]]:
    lines = situation.evidence.source_lines
    rows = []
    for worker in situation.ranks[number].workers:
        where = place_text(user_frame(worker.threads), lines)
        rows.append(
            {
                "pid": worker.pid,
                "kind": worker.kind,
                "name": one_line(worker.name, 80),
                "state": worker.process_state,
                "cpu_share": worker.cpu_share,
                "at": where or None,
            }
        )
    return rows


def _stacks(situation: Situation) -> tuple[StackGroup, ...]:
    own = {number: rank.threads for number, rank in situation.ranks.items() if rank.threads}
    groups = list(group_stacks(own))
    workers: dict[tuple[Any, ...], set[int]] = {}
    for number, rank in situation.ranks.items():
        for worker in rank.workers:
            if worker.threads:
                workers.setdefault(worker.threads, set()).add(number)
    groups += [
        StackGroup(ranks=tuple(sorted(ranks)), threads=threads, workers_of=True) for threads, ranks in workers.items()
    ]
    return tuple(groups)
