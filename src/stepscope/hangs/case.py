"""The input of every rule about a hang: the evidence, what each rank does, and who waits for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stepscope.flight.dump import OF_GLOO
from stepscope.flight.wording import collective_text, ranks_text
from stepscope.hangs.activity import WAITING, Doing, doing_from_dump, doing_of
from stepscope.hangs.alignment import Divergence, Group
from stepscope.hangs.evidence import Evidence, RankEvidence
from stepscope.hangs.recorded import Recorded, read_recorders
from stepscope.hangs.wait_graph import Wait, WaitGraph, is_p2p
from stepscope.records.hang import Culprit, HangKind, WaitingIn

__all__ = ["Case", "Verdict", "case_of"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Who blocks the job, and why; ``hangs/report.py`` and ``hangs/flight_document.py`` present it."""

    kind: HangKind
    title: str
    """One sentence with its full stop."""
    culprits: tuple[Culprit, ...] = ()
    """If undecidable: the ranks one of which is to blame."""
    victims: tuple[int, ...] = ()
    undecidable: bool = False
    suspects: tuple[int, ...] = ()
    """If undecidable and there is nothing to say about each of them: ranks one of which may be to blame."""
    collective: WaitingIn | None = None
    """The call in which the victims wait."""
    cycle: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    divergence: tuple[Group, Divergence] | None = None
    """Where the ranks made different calls, if that is the reason."""
    place: tuple[Group, int] | None = None
    """The group and number of the call in question, if no rank is missing in it."""


@dataclass(frozen=True)
class Case:
    evidence: Evidence
    ranks: Mapping[int, RankEvidence]
    """By rank, in order."""
    doings: Mapping[int, Doing]
    recorded: Recorded

    @cached_property
    def graph(self) -> WaitGraph:
        """Who waits for whom: from files as recorded, for live ranks by what their hosts do."""
        return self.recorded.graph if self.evidence.from_files else WaitGraph(_host_waits(self))

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """Ranks that wait for others, in a collective or on a device that waits."""
        return tuple(rank for rank, doing in self.doings.items() if doing.state in WAITING)

    @cached_property
    def absent(self) -> frozenset[int]:
        """Ranks that others wait for, or may wait for, and about which nothing is known here."""
        return self.graph.missing - self.ranks.keys()

    @property
    def single(self) -> bool:
        return self.evidence.world_size <= 1 and len(self.ranks) <= 1

    @cached_property
    def members(self) -> dict[str, frozenset[int]]:
        """The ranks of each group by name, as far as any rank reports them; a single rank is not a group."""
        found: dict[str, set[int]] = {name: set(ranks) for name, ranks in self.recorded.members.items()}
        for rank in self.ranks.values():
            last = (rank.collective.group,) if rank.collective is not None and rank.collective.group else ()
            for group in (*rank.groups, *last):
                # A group too large to list its ranks: use the ranks that report to be in it.
                everybody = group.size and group.size == self.evidence.world_size
                listed = group.ranks or (range(group.size) if everybody else (rank.rank,))
                found.setdefault(group.name, set()).update(listed)
        return {name: frozenset(ranks) for name, ranks in found.items() if len(ranks) > 1}

    def members_of(self, call: WaitingIn) -> frozenset[int]:
        """The members of the group, or all ranks if it is unknown."""
        return self.members.get(call.group) or frozenset(range(max(self.evidence.world_size, 0)))

    @property
    def dumps_were_taken_while_running(self) -> bool:
        """Whether the waits are those of a running job, and nothing else indicates a stop."""
        recorded = self.recorded
        stacks = any(rank.threads for rank in self.ranks.values() if rank.rank in recorded.dumps)
        dumpless = len(recorded.dumps) < len(recorded.world)
        return recorded.in_progress and not (stacks or recorded.failures or dumpless)

    def who(self, ranks: Iterable[int]) -> str:
        """The subject of a sentence."""
        ranks = sorted(ranks)
        if self.single:
            return "The process"
        if len(ranks) > 2 and len(ranks) == len(self.ranks) == self.evidence.world_size:
            return f"All {len(ranks):,} ranks"
        return f"{ranks_text(ranks, start=True)}{self.on_host(ranks)}"

    def on_host(self, ranks: Iterable[int]) -> str:
        """`` on node7``, if several hosts are known and these ranks are on one of them."""
        known = self.evidence.hosts
        own = {known.get(rank, "") for rank in ranks}
        return f" on {own.pop()}" if len(set(known.values())) > 1 and len(own) == 1 and "" not in own else ""

    def victims_of(self, guilty: Collection[int]) -> tuple[int, ...]:
        blamed = set(guilty)
        return tuple(rank for rank in self.waiting if rank not in blamed)

    def shared(self, ranks: Iterable[int]) -> WaitingIn | None:
        """The collective that most of these wait in; in a tie, that of the lowest rank."""
        waits = [(rank, self.doings[rank].waiting_in) for rank in ranks if rank in self.doings]
        known = [call for _, call in sorted(waits) if call is not None]
        named = [call for call in known if call.op or call.group] or known
        return Counter(named).most_common(1)[0][0] if named else None

    def call_missing(self, guilty: Collection[int], victims: Sequence[int]) -> WaitingIn | None:
        """The call in which the victims wait for the culprits."""
        telling = self.graph.most_telling(guilty) if self.evidence.from_files else None
        return telling.call if telling is not None else self.shared(victims)

    def wait_text(self, guilty: Collection[int], *, named: bool = True) -> str:
        """``; ranks 0, 2, 3 wait for it in all_reduce number 7 of default_pg``; empty if no rank waits."""
        victims = self.victims_of(guilty)
        if not victims:
            return ""
        call = self.call_missing(guilty, victims)
        where = f" in {collective_text(call)}" if named and call is not None and (call.op or call.group) else ""
        verb = "waits" if len(victims) == 1 else "wait"
        return f"; {ranks_text(victims)} {verb} for {'it' if len(guilty) == 1 else 'them'}{where}"


def case_of(evidence: Evidence) -> Case:
    recorded = read_recorders(evidence)
    # If two processes claim a rank, the live one counts.
    ranks = {rank.rank: rank for rank in sorted(evidence.ranks, key=lambda rank: (rank.rank, rank.alive))}
    if evidence.from_files:
        return Case(
            evidence, ranks, {number: doing_from_dump(rank, recorded) for number, rank in ranks.items()}, recorded
        )
    doings = {number: doing_of(rank, evidence, recorded) for number, rank in ranks.items()}
    alive = [doing for doing in doings.values() if doing.state != "gone"]
    if len(alive) > 1 and all(doing.state == "gil" for doing in alive):
        # A call that holds the GIL while it waits: if all ranks are in it, it identifies no culprit.
        doings |= {
            number: doing_of(rank, evidence, recorded, mind_gil=False)
            for number, rank in ranks.items()
            if doings[number].state == "gil" and doings[number].waiting_in is not None
        }
    return Case(evidence, ranks, doings, recorded)


# -- waits of live ranks ----------------------------------------------------------------------------------------------
# A call waits for the members of its group that are not in a call of that group; a send or recv waits for its peer.


def _host_waits(case: Case) -> list[Wait]:
    waits: list[Wait] = []
    calls: dict[str, list[int]] = {}
    for rank in case.waiting:
        call = case.doings[rank].waiting_in
        if call is None:
            continue
        if not is_p2p(call):
            calls.setdefault(_queue_of(call), []).append(rank)
        elif call.peer is not None and not _answers(case, rank, call):
            waits.append(Wait(waiters=(rank,), missing=(call.peer,), call=call))
    for waiters in calls.values():
        call = case.doings[waiters[0]].waiting_in
        if call is not None:
            missing = tuple(sorted(other for other in case.members_of(call) if not _joined(case, other, call)))
            waits.append(Wait(waiters=tuple(waiters), missing=missing, call=call))
    return waits


def _joined(case: Case, rank: int, call: WaitingIn) -> bool:
    """Whether this rank waits in the same group, or may: the group is not always known."""
    own = _call_of(case, rank)
    return own is not None and not is_p2p(own) and (_queue_of(own) == _queue_of(call) or not (own.group and call.group))


def _answers(case: Case, rank: int, call: WaitingIn) -> bool:
    """Whether the peer of a send or recv is in the matching call."""
    other = _call_of(case, call.peer)
    if other is None or not is_p2p(other) or other.peer not in (rank, None):
        return False
    return ("send" in other.op) != ("send" in call.op)


def _call_of(case: Case, rank: int | None) -> WaitingIn | None:
    doing = case.doings.get(rank) if rank is not None else None
    return doing.waiting_in if doing is not None and doing.state in WAITING else None


def _queue_of(call: WaitingIn) -> str:
    """Its group, or gloo's half of a group that also has NCCL: calls in one half do not match calls in the other."""
    return f"{call.group}{OF_GLOO}" if call.description.endswith(OF_GLOO) else call.group
