"""Everything a ruling may look at, and the form in which it answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from stepscope.flight.wording import ranks_text
from stepscope.hangs.activity import WAITING, Doing, doing_of
from stepscope.hangs.evidence import Evidence, RankEvidence
from stepscope.hangs.recorders import Recorders
from stepscope.hangs.words import collective_text
from stepscope.records.hang import Culprit, HangKind, WaitingIn

__all__ = ["Ruling", "Situation", "situation_of"]


@dataclass(frozen=True, kw_only=True)
class Ruling:
    kind: HangKind
    title: str
    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    undecidable: bool = False
    collective: WaitingIn | None = None
    cycle: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Situation:
    evidence: Evidence
    ranks: Mapping[int, RankEvidence]
    """By rank, in order."""
    doings: Mapping[int, Doing]
    recorders: Recorders

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """Those that wait for others, in a collective or on a device that does."""
        return tuple(rank for rank, doing in self.doings.items() if doing.state in WAITING)

    @property
    def single(self) -> bool:
        return self.evidence.world_size <= 1 and len(self.ranks) <= 1

    @cached_property
    def members(self) -> dict[str, frozenset[int]]:
        """The ranks of each group, by its name, as far as any rank has told; one alone is no group."""
        found: dict[str, set[int]] = {name: set(ranks) for name, ranks in self.recorders.members.items()}
        for rank in self.ranks.values():
            last = (rank.collective.group,) if rank.collective is not None and rank.collective.group else ()
            for group in (*rank.groups, *last):
                # Of a group too large for its ranks to be told: those that say they are in it.
                everybody = group.size and group.size == self.evidence.world_size
                told = group.ranks or (range(group.size) if everybody else (rank.rank,))
                found.setdefault(group.name, set()).update(told)
        return {name: frozenset(ranks) for name, ranks in found.items() if len(ranks) > 1}

    def members_of(self, waiting: WaitingIn) -> frozenset[int]:
        """Where the group is not known: the whole world."""
        return self.members.get(waiting.group) or frozenset(range(max(self.evidence.world_size, 0)))

    def who(self, ranks: Iterable[int]) -> str:
        """At the beginning of a sentence."""
        ranks = sorted(ranks)
        if self.single:
            return "The process"
        if len(ranks) > 2 and len(ranks) == len(self.ranks) == self.evidence.world_size:
            return f"All {len(ranks):,} ranks"
        return f"{ranks_text(ranks, start=True)}{self.on_host(ranks)}"

    def on_host(self, ranks: Iterable[int]) -> str:
        """`` on node7``, where several hosts are known and these ranks are on one of them."""
        known = self.evidence.hosts
        own = {known.get(rank, "") for rank in ranks}
        return f" on {own.pop()}" if len(set(known.values())) > 1 and len(own) == 1 and "" not in own else ""

    def shared(self, ranks: Iterable[int]) -> WaitingIn | None:
        """The collective that most of these wait in; of equally many that of the lowest rank."""
        waits = [(rank, self.doings[rank].waiting_in) for rank in ranks if rank in self.doings]
        known = [wait for _, wait in sorted(waits) if wait is not None]
        named = [wait for wait in known if wait.op or wait.group] or known
        return Counter(named).most_common(1)[0][0] if named else None

    def wait_for(self, culprits: Iterable[int], *, named: bool = True) -> str:
        """``; ranks 0, 2, 3 wait for it in all_reduce number 7 of default_pg``; empty when nobody waits."""
        guilty = set(culprits)
        victims = [rank for rank in self.waiting if rank not in guilty]
        if not victims:
            return ""
        shared = self.shared(victims)
        where = f" in {collective_text(shared)}" if named and shared is not None and (shared.op or shared.group) else ""
        verb = "waits" if len(victims) == 1 else "wait"
        return f"; {ranks_text(victims)} {verb} for {'it' if len(guilty) == 1 else 'them'}{where}"


def situation_of(evidence: Evidence, recorders: Recorders) -> Situation:
    # Of two processes that claim a rank the one that lives counts.
    ranks = {rank.rank: rank for rank in sorted(evidence.ranks, key=lambda one: (one.rank, one.alive))}
    doings = {number: doing_of(rank, evidence, recorders) for number, rank in ranks.items()}
    alive = [doing for doing in doings.values() if doing.state != "gone"]
    if len(alive) > 1 and all(doing.state == "gil" for doing in alive):
        # A call that keeps the GIL while it waits: where all are in it, that tells nobody apart.
        doings |= {
            number: doing_of(rank, evidence, recorders, mind_gil=False)
            for number, rank in ranks.items()
            if doings[number].state == "gil" and doings[number].waiting_in is not None
        }
    return Situation(evidence, ranks, doings, recorders)
