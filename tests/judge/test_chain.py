"""The chain of rules: each sees what is left, and the declared relations decide between two claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepscope.judge.chain import Chain, Claim, Claims, Need, Relation, Rule, Scope
from stepscope.records.finding import Finding, Severity

Floats = NDArray[np.float64]


def claim(kind: str, *explained: float, severity: Severity = "warning") -> Claim:
    finding = Finding(kind=kind, severity=severity, title=kind, ranks=(3,) if kind == "late" else (), phase="forward")
    return Claim(finding=finding, explained_ns=np.array(explained))


def rule(
    name: str,
    *found: Claim,
    takes: bool = True,
    relations: tuple[Relation[Floats], ...] = (),
    seen: list[Floats] | None = None,
) -> Rule[Floats]:
    def find(_view: Floats, claims: Claims) -> Sequence[Claim]:
        if seen is not None:
            seen.append(claims.left_ns)
        return found

    kinds = tuple(each.finding.kind for each in found)
    return Rule(name=name, kinds=kinds, find=find, scope=Scope(), takes=takes, relations=relations)


def run(*rules: Rule[Floats], available: frozenset[Need] = frozenset()) -> Claims:
    return Chain(rules=rules, time_ns=lambda view: view).run(np.array([10.0, 10.0]), available)


def relation(effect: str, *kinds: str, covers: float = 0.0) -> Relation[Floats]:
    def when(_view: Floats, own: Sequence[Claim], other: Claim) -> bool:
        return sum(float(each.explained_ns.sum()) for each in own) >= covers * float(other.explained_ns.sum())

    return Relation(effect=effect, kinds=kinds, when=when, reason="")  # type: ignore[arg-type]


def test_each_rule_sees_what_those_before_it_leave() -> None:
    seen: list[Floats] = []
    level = rule("level", claim("bound", 5, 5), takes=False)
    result = run(
        rule("ranks", claim("late", 4, 0)), level, rule("steps", claim("slow", 7, 2), seen=seen), rule("end", seen=seen)
    )
    assert [left.tolist() for left in seen] == [[6.0, 10.0], [0.0, 8.0]]
    assert [each.finding.kind for each in result.all] == ["late", "bound", "slow"]
    assert result.ranks("ranks") == {3}
    assert result.ranks("ranks", phase="input") == set()


def test_a_rule_without_what_it_needs_does_not_run() -> None:
    needy = replace(rule("needy", claim("late", 1, 1)), needs=frozenset({Need.WAITING}))
    assert not run(needy).all
    assert run(needy, available=frozenset({Need.WAITING, Need.STEPS})).all


def test_relations_hold_whichever_rule_runs_first() -> None:
    strong = rule(
        "strong",
        claim("change", 6, 6),
        relations=(relation("replaces", "bound", covers=0.5), relation("lowers", "idle")),
    )
    weak, idle = rule("weak", claim("bound", 8, 8)), rule("idle", claim("idle", 0, 0))
    for order in ((strong, weak, idle), (weak, idle, strong)):
        found = {each.finding.kind: each.finding.severity for each in run(*order).all}
        assert found == {"change": "warning", "idle": "info"}
    assert len(run(strong, rule("weak", claim("bound", 80, 80))).all) == 2


def test_a_claim_takes_over_something_of_the_one_it_replaces() -> None:
    def merge(own: Claim, other: Claim) -> Claim:
        return replace(own, finding=replace(own.finding, title=f"{own.finding.title} of {other.finding.title}"))

    absorbs = replace(relation("replaces", "bound"), merge=merge)
    assert [
        each.finding.title
        for each in run(
            rule("weak", claim("bound", 8, 8)), rule("strong", claim("change", 6, 6), relations=(absorbs,))
        ).all
    ] == ["change of bound"]


def test_time_that_another_claim_takes_is_counted_once() -> None:
    def recount(taken_ns: Floats) -> Claim | None:
        left = np.maximum(np.array([8.0, 8.0]) - taken_ns, 0.0)
        return claim("bound", *left) if left.any() else None

    level = rule("level", replace(claim("bound", 8, 8), recount=recount), takes=False)
    for taken, left in ((3.0, [[5.0, 5.0], [3.0, 3.0]]), (8.0, [[8.0, 8.0]])):
        change = rule("change", claim("change", taken, taken), relations=(relation("takes from", "bound"),))
        assert [each.explained_ns.tolist() for each in run(level, change).all] == left


def test_a_rule_is_added_before_another() -> None:
    chain = Chain(rules=(rule("ranks"), rule("steps")), time_ns=lambda view: view)
    assert [each.name for each in chain.with_rule(rule("new"), before="steps").rules] == ["ranks", "new", "steps"]
    assert [each.name for each in chain.with_rule(rule("new")).rules] == ["ranks", "steps", "new"]
