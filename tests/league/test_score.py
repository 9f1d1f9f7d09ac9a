from __future__ import annotations

import pytest
from league.score import Totals, judge, names_fault, total
from league.truth import Claim, Truth, claim_of

SLOW_RANK = Truth(
    kinds=frozenset({"compute_straggler", "drift"}),
    ranks=(2,),
    phases=frozenset({"forward"}),
    also_true=frozenset({"throughput_drop"}),
)


def claim(kind: str, severity: str = "warning", **more: object) -> Claim:
    return claim_of({"kind": kind, "severity": severity, **more})


def test_all_right() -> None:
    judged = judge(SLOW_RANK, [claim("compute_straggler", ranks=[2], phase="forward")], 4)
    assert (judged.found, judged.rank, judged.phase, judged.step, judged.period) == (True, True, True, None, None)
    assert (judged.warned, judged.false, judged.perfect) == (1, (), True)


def test_the_wrong_rank_is_found_and_false() -> None:
    judged = judge(SLOW_RANK, [claim("compute_straggler", ranks=[1], phase="forward", title="r1")], 4)
    assert (judged.found, judged.rank, judged.phase, judged.perfect) == (True, False, True, False)
    assert judged.false == ("compute_straggler: r1",)


def test_the_best_claim_answers() -> None:
    wrong = claim("drift", ranks=[2], phase="backward")
    judged = judge(SLOW_RANK, [wrong, claim("compute_straggler", "info", ranks=[2], phase="forward")], 4)
    assert (judged.rank, judged.phase, judged.perfect) == (True, True, True)


@pytest.mark.parametrize(
    ("made", "false"),
    [
        (claim("throughput_drop"), 0),
        (claim("throughput_drop", ranks=[0, 1, 2, 3]), 0),
        (claim("throughput_drop", ranks=[2]), 0),
        (claim("throughput_drop", ranks=[2, 3]), 0),
        (claim("throughput_drop", ranks=[1]), 1),
        (claim("input_bound"), 1),
        (claim("input_bound", "info"), 0),
    ],
)
def test_consequences_are_true_and_info_is_never_false(made: Claim, false: int) -> None:
    judged = judge(SLOW_RANK, [made], 4)
    assert (judged.found, len(judged.false)) == (False, false)


def test_one_rank_is_not_asked_for() -> None:
    assert judge(SLOW_RANK, [claim("drift", ranks=[0], phase="forward")], 1).rank is None


@pytest.mark.parametrize(
    ("steps", "right"), [((41, 41), True), ((38, 90), True), ((43, 43), False), ((0, 79), False), (None, False)]
)
def test_step(steps: tuple[int, int] | None, right: bool) -> None:
    truth = Truth(kinds=frozenset({"stall"}), step=40)
    assert judge(truth, [claim("stall", steps=steps)], 1).step is right


@pytest.mark.parametrize(("evidence", "right"), [({"period_steps": 10}, True), ({"period": 20}, False), ({}, False)])
def test_period(evidence: dict[str, int], right: bool) -> None:
    truth = Truth(kinds=frozenset({"jitter"}), period=10)
    assert judge(truth, [claim("jitter", evidence=evidence)], 1).period is right


def test_the_step_of_the_evidence_goes_before_the_range() -> None:
    assert claim("stall", steps=[0, 79], evidence={"step": 40}).steps == (40, 40)


def test_a_claim_survives_its_own_form() -> None:
    made = claim("jitter", ranks=[1], phase="input", steps=[3, 9], evidence={"period_steps": 10}, title="t")
    assert claim_of(made.to_dict()) == made


def test_a_healthy_run() -> None:
    healthy = Truth(also_true=frozenset({"compute_bound"}))
    assert judge(healthy, [claim("healthy", "info")], 2).perfect
    assert judge(healthy, [], 2).perfect
    warned = judge(healthy, [claim("input_bound", title="t")], 2)
    assert (warned.perfect, warned.false) == (False, ("input_bound: t",))


def test_naming_the_fault_includes_its_rank() -> None:
    assert names_fault(SLOW_RANK, [claim("drift", ranks=[2])], 4)
    assert not names_fault(SLOW_RANK, [claim("drift", ranks=[3])], 4)
    assert not names_fault(SLOW_RANK, [claim("stall", ranks=[2])], 4)


def test_totals() -> None:
    runs = [
        judge(SLOW_RANK, [claim("drift", ranks=[2], phase="forward"), claim("input_bound")], 4),
        judge(SLOW_RANK, [], 4),
        judge(Truth(), [claim("stall")], 4),
        judge(Truth(), [claim("healthy", "info")], 4),
    ]
    assert total(runs) == Totals(
        runs=4,
        perfect=1,
        precision=(1, 3),
        recall=(1, 2),
        rank=(1, 1),
        phase=(1, 1),
        step=(0, 0),
        period=(0, 0),
        healthy_warned=(1, 2),
    )
