"""One chain of rules, for runs and for traces: who may claim which time, and who wins when two claim the same.

A rule is a value.  It declares what it needs, what time it may claim, and what its claims do to those of other rules;
``find`` does the work.  The chain runs the rules in order, the most specific first, hands each the time that is left,
and applies the declared relations as soon as both sides exist.  Nothing else decides between two findings, so a list
of rules is also the table of who wins (``diagnosis/rulebook.py``; ``bench/rule_table.py`` prints it for the docs).

    chain = Chain(rules=(LATE_RANKS, SLOW_STEPS), time_ns=lambda view: view.step_ns)
    result = chain.run(view, available=frozenset({Need.STEPS}))
    result.claims          # all that remain, in the order of the rules
    result.of("slow steps")

Pure: no I/O, no clock, no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepscope.records.finding import Finding, as_remark

__all__ = ["Chain", "Claim", "Claims", "Need", "Relation", "Rule", "Scope", "unexplained"]

V = TypeVar("V")
"""What rules look at: a job's view."""
Floats = NDArray[np.float64]


# -- claims -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The result of a rule, for live runs and traces alike: a finding, and the time that it explains."""

    finding: Finding
    explained_ns: NDArray[Any]
    """By how much the time would be shorter without it, at most: each step of a live run, or the time for which each
    rank's device waits for the host in a trace.  Zeros: it explains no time."""
    recount: Callable[[Floats], Claim | None] | None = None
    """The same claim without time that another one has in its cost; None is returned if too little is left to report.
    Needed only where a relation "takes from" it."""


def unexplained(time_ns: NDArray[Any], claims: Iterable[Claim]) -> Floats:
    """What the claims leave of the time of each step or each rank; together they take no more than there is."""
    left = time_ns.astype(float)
    for claim in claims:
        left -= claim.explained_ns.clip(0, left.clip(0))
    return left


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What the rules have found so far, and the time that is left."""

    by_rule: Mapping[str, Sequence[Claim]]
    taking: frozenset[str]
    """Names of the rules whose claims later rules do not see."""
    time_ns: NDArray[Any]
    """All there is."""

    @property
    def all(self) -> list[Claim]:
        """In the order of the rules."""
        return [claim for claims in self.by_rule.values() for claim in claims]

    def of(self, *rules: str) -> list[Claim]:
        """Those of some rules, by name."""
        return [claim for rule in rules for claim in self.by_rule.get(rule, ())]

    def ranks(self, *rules: str, phase: str | None = None) -> set[int]:
        """Ranks that findings of these rules name; ``phase``: only those found in it."""
        found = (claim.finding for claim in self.of(*rules))
        return {rank for finding in found if phase in (None, finding.phase) for rank in finding.ranks}

    @cached_property
    def left_ns(self) -> Floats:
        """The time without what the rules that take it explain."""
        return unexplained(self.time_ns, self.of(*(rule for rule in self.by_rule if rule in self.taking)))


# -- rules ------------------------------------------------------------------------------------------------------------


class Need(Enum):
    """What a rule needs to say anything; without it the chain passes over the rule."""

    STEPS = "enough steps"
    RANKS = "several ranks"
    HOSTS = "several hosts"
    WAITING = "measured waiting"
    DEVICE_TIMES = "device times"
    HOST_TIMES = "times that are the host's own"
    COLLECTIVES = "collectives"
    SAMPLES = "samples of machines"
    LAYERS = "sampled layers"
    LOSSES = "losses"


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The time that a rule may claim."""

    phases: tuple[str, ...] | None = None
    """None: any phase; empty: no time at all."""
    ranks: Literal["late", "all", "any"] = "any"
    """``late``: what some ranks have more than their peers; ``all``: only what all ranks have."""
    steps: Literal["all", "some", "any"] = "any"
    """``some``: what some steps have more than the others; ``all``: what steps have all along."""


@dataclass(frozen=True, kw_only=True)
class Relation(Generic[V]):
    """What the claims of a rule do to a claim of another rule, earlier or later in the chain."""

    effect: Literal["replaces", "lowers", "takes from"]
    """``replaces``: the other claim is dropped.  ``lowers``: it becomes information.  ``takes from``: both are
    reported, and the other one is counted without this one's time (``Claim.recount``)."""
    kinds: tuple[str, ...]
    """Of the other claim."""
    when: Callable[[V, Sequence[Claim], Claim], bool]
    """Takes the rule's own claims (at least one) and the other claim."""
    reason: str
    """In words, for the table."""
    rules: tuple[str, ...] = ()
    """Only claims of these rules, by name; empty: of any rule."""
    merge: Callable[[Claim, Claim], Claim] | None = None
    """What the own claim takes over from one that it replaces."""

    def concerns(self, rule: str, claim: Claim) -> bool:
        """Whether it is about this kind of claim of that rule."""
        return claim.finding.kind in self.kinds and (not self.rules or rule in self.rules)


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[V]):
    name: str
    kinds: tuple[str, ...]
    """Of the findings that it reports."""
    find: Callable[[V, Claims], Sequence[Claim]]
    """Takes what earlier rules found and left."""
    scope: Scope
    needs: frozenset[Need] = frozenset()
    takes: bool = True
    """Whether later rules see only what it leaves.  A rule about a level, such as the share of a phase, takes nothing:
    a later rule may find that the level changed."""
    relations: tuple[Relation[V], ...] = ()
    thresholds: tuple[str, ...] = ()
    """The most important ones, by name."""


# -- chain ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Chain(Generic[V]):
    rules: tuple[Rule[V], ...]
    time_ns: Callable[[V], NDArray[Any]]
    """The time that the rules share."""

    def run(self, view: V, available: frozenset[Need]) -> Claims:
        """Run every rule whose needs are met once, and settle what they claim."""
        found: dict[str, list[Claim]] = {}
        time_ns = self.time_ns(view)
        for rule in self.rules:
            if not rule.needs <= available:
                continue
            found[rule.name] = list(rule.find(view, self._claims(found, time_ns)))
            for other in self.rules:
                if other.name in found and other is not rule:
                    _settle(view, other, rule, found)
            for other in self.rules:
                if other.name in found and other is not rule:
                    _settle(view, rule, other, found)
        return self._claims(self._counted_once(view, found), time_ns)

    def with_rule(self, rule: Rule[V], *, before: str | None = None) -> Chain[V]:
        """The same chain with one more rule, at its end or before another one."""
        at = len(self.rules) if before is None else [each.name for each in self.rules].index(before)
        return replace(self, rules=(*self.rules[:at], rule, *self.rules[at:]))

    def _claims(self, found: Mapping[str, Sequence[Claim]], time_ns: NDArray[Any]) -> Claims:
        taking = frozenset(rule.name for rule in self.rules if rule.takes)
        return Claims(by_rule={name: tuple(claims) for name, claims in found.items()}, taking=taking, time_ns=time_ns)

    def _counted_once(self, view: V, found: Mapping[str, list[Claim]]) -> dict[str, list[Claim]]:
        """Count claims again from which others take, so that no time is in two costs."""
        counted: dict[str, list[Claim]] = {}
        for name, claims in found.items():
            counted[name] = []
            for claim in claims:
                takers = self._takers(view, name, claim, found) if claim.recount is not None else []
                if takers and claim.recount is not None:
                    left = claim.recount(np.sum([taker.explained_ns for taker in takers], axis=0))
                    counted[name] += [] if left is None else [left]
                else:
                    counted[name].append(claim)
        return counted

    def _takers(self, view: V, name: str, claim: Claim, found: Mapping[str, Sequence[Claim]]) -> list[Claim]:
        return [
            taker
            for rule in self.rules
            for relation in rule.relations
            if relation.effect == "takes from" and relation.concerns(name, claim)
            for taker in found.get(rule.name, ())
            if relation.when(view, [taker], claim)
        ]


def _settle(view: V, rule: Rule[V], other_rule: Rule[V], found: Mapping[str, list[Claim]]) -> None:
    """Apply a rule's relations to the claims of another rule; changes the lists of both."""
    own, others = found[rule.name], found[other_rule.name]
    for relation in rule.relations:
        if relation.effect == "takes from":
            continue
        for other in list(others):
            if not own or not relation.concerns(other_rule.name, other) or not relation.when(view, own, other):
                continue
            at = next(place for place, claim in enumerate(others) if claim is other)
            if relation.effect == "lowers":
                others[at] = replace(other, finding=as_remark(other.finding))
                continue
            del others[at]
            if relation.merge is not None:
                winner = next((n for n, claim in enumerate(own) if relation.when(view, [claim], other)), 0)
                own[winner] = relation.merge(own[winner], other)
