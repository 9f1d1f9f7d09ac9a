"""The table of rules: what a newcomer reads there is what happens."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes.cluster import Cluster, slow_at
from rule_table import PAGES, current_page

from stepscope.diagnosis import build_window, diagnose
from stepscope.diagnosis.crowding import BOTTLENECKS, UNEVEN
from stepscope.diagnosis.engine.view import cost_of, view_of
from stepscope.diagnosis.rulebook import CHAIN, RULES, RecordedJob, available
from stepscope.judge import thresholds
from stepscope.judge.chain import Claim, Claims, Need, Rule, Scope
from stepscope.records.finding import Finding

SLOW_LOADER = Cluster(ranks=4, steps=120, phases_ms={"input": 20.0, "forward": 18.0, "backward": 30.0, "other": 1.0})


@pytest.mark.parametrize(("late_ms", "leads"), [(10.0, "input_bound"), (15.0, "compute_straggler")])
def test_a_rank_slow_in_forward_and_a_loader_slow_on_all_ranks_are_two_findings(late_ms: float, leads: str) -> None:
    """The example in the docstring of the rulebook: no relation connects them; the upper bound counts half."""
    run = Cluster(ranks=4, steps=120, phases_ms=SLOW_LOADER.phases_ms, faults=(slow_at(2, "forward", late_ms),)).run()
    found = {finding.kind: finding for finding in diagnose(run)}
    assert found["compute_straggler"].ranks == (2,)
    assert found["input_bound"].ranks == ()
    assert next(kind for kind in found if kind in ("compute_straggler", "input_bound")) == leads
    assert {found[kind].severity for kind in ("compute_straggler", "input_bound")} == {"warning"}


def test_every_bottleneck_of_all_ranks_may_be_the_wait_for_a_processor() -> None:
    """A kind that is forgotten in crowding.py stays a warning where the others become information."""
    (bounds,) = (rule for rule in RULES if rule.name == "bounds")
    (outside,) = (rule for rule in RULES if rule.name == "outside phases")
    assert {*bounds.kinds, *outside.kinds} - BOTTLENECKS.keys() - set(UNEVEN) == set()


def test_a_rule_is_added_through_the_chain() -> None:
    """docs/recipes.md: a function, a line in the table, its thresholds."""

    def find_odd_steps(job: RecordedJob, claims: Claims) -> Sequence[Claim]:
        saved_ns = np.where(job.view.steps % 2 == 1, 0.5 * claims.left_ns, 0.0)
        title = "Odd steps are too long."
        cost = cost_of(job.view, saved_ns)
        finding = Finding(kind="odd_steps", severity="warning", title=title, steps=job.view.span, cost=cost)
        return [Claim(finding=finding, explained_ns=saved_ns)]

    odd = Rule(
        name="odd steps",
        kinds=("odd_steps",),
        find=find_odd_steps,
        scope=Scope(steps="some"),
        needs=frozenset({Need.STEPS}),
    )
    run = Cluster(ranks=2, steps=60).run()
    findings = diagnose(run, chain=CHAIN.with_rule(odd, before="slow steps"))
    assert findings[0].kind == "odd_steps"
    assert "healthy" not in {finding.kind for finding in findings}
    few = diagnose(Cluster(ranks=2, steps=6).run(), chain=CHAIN.with_rule(odd))
    assert [finding.kind for finding in few] == ["insufficient_data"]


def clusters() -> Iterator[Cluster]:
    phases = ("input", "forward", "optimizer", "other")
    for phase in phases:
        yield Cluster(ranks=4, steps=100, faults=(slow_at(1, phase, 20.0),))
        yield Cluster(ranks=4, steps=100, faults=(slow_at(1, phase, 60.0, range(9, 100, 10)),))
        everywhere = tuple(slow_at(rank, phase, 40.0, range(50, 100)) for rank in range(4))
        yield Cluster(ranks=4, steps=100, faults=everywhere)
    yield SLOW_LOADER


@pytest.mark.parametrize("cluster", [*clusters()])
def test_rules_claim_what_they_declare(cluster: Cluster) -> None:
    run = cluster.run()
    view = view_of(build_window(run))
    claims = CHAIN.run(RecordedJob(run=run, view=view), available(view))
    assert claims.all
    for rule in RULES:
        for claim in claims.of(rule.name):
            assert claim.finding.kind in rule.kinds, rule.name
            if rule.scope.phases == ():
                assert not claim.explained_ns.any(), rule.name
            elif rule.scope.phases is not None:
                assert claim.finding.phase in rule.scope.phases, rule.name
            if rule.scope.ranks == "all":
                assert claim.finding.ranks == (), rule.name


def test_relations_and_thresholds_name_what_exists() -> None:
    names, kinds = {rule.name for rule in RULES}, {kind for rule in RULES for kind in rule.kinds}
    assert len(names) == len(RULES)
    for rule in RULES:
        assert set(rule.thresholds) <= set(thresholds.__all__)
        for relation in rule.relations:
            assert set(relation.kinds) <= kinds
            assert set(relation.rules) <= names


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_in_the_docs_are_current(page: str, root: Path) -> None:
    assert (root / page).read_text() == current_page(page), "run make rule-table"


SAYS_HOW_MUCH_IS_SHOWN = ("_SHOWN", "_LISTED", "_NAMED", "_TOLD", "_AT_MOST")
NO_VERDICT = {
    "CHUNK", "COMMAND_SHOWN", "EXACT_LOSSES", "FEW", "FLOOR_UNIT", "FOLD_STEPS", "GBIT_BYTES", "LARGEST",
    "LINES_AT_ONCE", "LISTED", "LOOKED_AT", "MAD_TO_SIGMA", "MANY_RANKS", "MEAN_TO_SIGMA", "MEDIAN_ERROR", "MIB",
    "MOST_ADVICE", "MOST_SLICES", "MOST_TENSORS", "OP_CODES", "POINTS", "SELDOM", "SHELL_SIGNAL_BASE",
    "SHORTEST_SLICE_NS",
}  # fmt: skip
"""Constants of mathematics, units, and limits on work and text."""


def test_every_number_that_decides_a_verdict_is_in_thresholds(root: Path) -> None:
    found = set()
    for path in sorted((root / "src/stepscope/diagnosis").rglob("*.py")):
        for line in ast.parse(path.read_text()).body:
            value = line.value if isinstance(line, ast.Assign) else None
            if isinstance(value, ast.Constant) and type(value.value) in (int, float):
                found |= {target.id for target in line.targets if isinstance(target, ast.Name)}
    shown = {name for name in found if name.endswith(SAYS_HOW_MUCH_IS_SHOWN)}
    assert found - shown <= NO_VERDICT


def test_every_threshold_has_a_reason(root: Path) -> None:
    body = ast.parse((root / "src/stepscope/judge/thresholds.py").read_text()).body
    assigned = [at for at, line in enumerate(body) if isinstance(line, ast.Assign)][:-1]  # the last one is __all__
    groups = [at for at in assigned if at + 1 not in assigned]  # several in a row share their reason
    assert all(isinstance(body[at + 1], ast.Expr) for at in groups)
