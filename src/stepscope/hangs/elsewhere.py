"""Ranks that wait for ranks nothing is known of here: on hosts that were lost, or that nobody was asked about."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.flight.wording import ranks_text
from stepscope.hangs.evidence import LostHost
from stepscope.hangs.reasons import unanswered
from stepscope.hangs.situation import Ruling, Situation
from stepscope.hangs.waits import waits_of
from stepscope.hangs.words import collective_text, listed, more_than_text
from stepscope.records.hang import Culprit

__all__ = ["rule_elsewhere"]

HOSTS_SHOWN = 3


def rule_elsewhere(situation: Situation) -> Ruling | None:
    elsewhere = waits_of(situation).elsewhere
    if not elsewhere or not situation.waiting:
        return None
    lost = [one for one in situation.evidence.lost if elsewhere & set(one.ranks)]
    if lost:
        return _unheard(situation, lost)
    shared = situation.shared(situation.waiting)
    verb = "waits" if len(situation.waiting) == 1 else "wait"
    here = f"All {len(situation.ranks):,} ranks" if len(situation.waiting) == len(situation.ranks) > 1 else None
    who = here or ranks_text(situation.waiting, start=True)
    hosts = len(set(situation.evidence.hosts.values()))
    where = f"{hosts} hosts" if hosts > 1 else situation.evidence.host
    title = (
        f"{who} on {where} {verb} in {collective_text(shared)} for {ranks_text(elsewhere)} "
        "on other hosts: which of them holds the job up cannot be told from here."
    )
    return Ruling(
        kind="rank_lost",
        title=title,
        victims=situation.waiting,
        undecidable=True,
        collective=shared,
        evidence=unanswered(situation),
    )


def _unheard(situation: Situation, lost: Sequence[LostHost]) -> Ruling:
    """Hosts that the hub hears nothing of, and whose ranks the others wait for."""
    guilty = {rank: one.host for one in lost for rank in one.ranks}
    names = [one.host for one in lost[:HOSTS_SHOWN]]
    names += [f"{len(lost) - HOSTS_SHOWN} more"] if len(lost) > HOSTS_SHOWN else []
    who = f"Host {names[0]} ({ranks_text(guilty)}) has" if len(lost) == 1 else f"Hosts {listed(names)} have"
    silent = more_than_text(min(one.silent_s for one in lost))
    return Ruling(
        kind="rank_lost",
        title=f"{who} not been heard of for {silent}{situation.wait_for(guilty)}.",
        culprits=tuple(
            Culprit(rank=rank, reason=f"is on host {host}, of which nothing was heard any more")
            for rank, host in sorted(guilty.items())
        ),
        victims=situation.waiting,
        collective=situation.shared(situation.waiting),
        evidence=("Nothing came from its agent either: the machine is gone, or the way to it.",),
    )
