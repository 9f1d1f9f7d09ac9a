"""Findings about the loss that a script noted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster, Death, slow_at

from stepscope.diagnosis import diagnose
from stepscope.records.finding import Finding
from stepscope.records.series import RunData, note_event, noted_health
from stepscope.reports import render_text, summarize

STEPS = 200
RANDOM = np.random.default_rng(5)
FALLING = 2.0 + np.exp(-np.arange(STEPS) / 40) + RANDOM.normal(0, 0.05, STEPS)


def noted(values: Mapping[int, Any], *, rank: int = 0, name: str = "loss", run: RunData) -> list[dict[str, Any]]:
    pid = next(series.identity.pid for series in run.ranks if series.rank == rank)
    return [
        {"event": "note", "rank": rank, "pid": pid, "step": step, "values": {name: value}, "wall_ns": 1}
        for step, value in values.items()
    ]


def losses(*curves: Mapping[int, Any], name: str = "loss", ranks: int = 2) -> list[Finding]:
    run = Cluster(ranks=ranks, steps=STEPS).run()
    events = [event for rank, curve in enumerate(curves) for event in noted(curve, rank=rank, name=name, run=run)]
    return [
        found
        for found in diagnose(replace(run, events=tuple(events)))
        if found.kind in ("loss_nan", "loss_spike", "nan_gradients")
    ]


def falling(**changed: Any) -> dict[int, Any]:
    return {step: float(value) for step, value in enumerate(FALLING)} | {int(at): to for at, to in changed.items()}


def since(step: int, value: Any) -> dict[int, Any]:
    return falling(**{str(at): value for at in range(step, STEPS)})


@pytest.mark.parametrize(
    ("value", "word"), [("nan", "NaN"), (math.nan, "NaN"), ("inf", "infinite"), ("-inf", "infinite")]
)
def test_a_loss_that_is_no_number_any_more_is_the_verdict(value: Any, word: str) -> None:
    (found,) = losses(since(150, value))
    assert (found.kind, found.severity, found.ranks, found.steps) == ("loss_nan", "critical", (), (150, 199))
    assert found.title == f"The loss is {word} from step 150 on; it was {FALLING[149]:.4g} at step 149."
    assert found.evidence["first_step"] == 150
    assert found.cost["share"] == 0
    run = Cluster(ranks=2, steps=STEPS).run()
    first = diagnose(replace(run, events=tuple(noted(since(150, value), run=run))))[0]
    assert first.kind == "loss_nan", "before anything that is only slow"


def test_the_rank_is_named_when_the_others_have_numbers() -> None:
    (found,) = losses(falling(), since(150, "nan"))
    assert found.ranks == (1,)
    assert found.title.startswith("The loss of rank 1 is NaN from step 150 on")


def test_the_last_value_alone_is_a_warning() -> None:
    (found,) = losses(falling(**{"199": "nan"}))
    assert (found.severity, found.steps) == ("warning", (199, 199))
    assert "is NaN at step 199, the last one noted;" in found.title


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("val_loss", {step: 2.0 if step % 50 == 0 else "nan" for step in range(STEPS)}),  # noted between evaluations
        ("eval/loss", dict.fromkeys(range(STEPS), "nan")),  # none yet
        ("best_val_loss", {0: "inf", 50: "inf", 100: "inf", 150: "inf"}),
        ("best_loss", dict.fromkeys(range(100), "inf")),
        ("test_loss", {50: 1.9, 100: "nan", 150: "nan"}),
    ],
)
def test_an_evaluation_that_has_no_number_yet_is_no_finding(name: str, values: dict[int, Any]) -> None:
    assert losses(values, name=name) == []


def test_an_evaluation_that_is_no_number_any_more_is_information_while_the_training_loss_is_finite() -> None:
    lost = {step: 2.0 if step < 100 else "nan" for step in range(0, STEPS, 10)}
    (found,) = losses(lost, name="val_loss")
    assert (found.kind, found.severity, found.steps) == ("loss_nan", "warning", (100, 190))
    run = Cluster(ranks=1, steps=STEPS).run()
    events = (*noted(falling(), run=run), *noted(lost, name="val_loss", run=run))
    (found,) = [found for found in diagnose(replace(run, events=events)) if found.kind == "loss_nan"]
    assert (found.severity, found.evidence["first_step"]) == ("info", 100)
    assert found.title.startswith("The loss 'val_loss' is NaN from step 100 on; it was 2 at step 90")


def test_one_that_a_scaler_skips_is_a_remark_and_many_are_a_warning() -> None:
    (found,) = losses(falling(**{"20": "inf"}))
    assert (found.severity, found.title) == (
        "info",
        "The loss was infinite in one noted value, first at step 20; the values after it are numbers.",
    )
    (found,) = losses(falling(**{str(step): "nan" for step in range(0, 190, 10)}))
    assert (found.severity, found.steps) == ("warning", (0, 180))


def test_a_jump_that_stays_is_a_spike() -> None:
    jumped = {step: value + (4.0 if step >= 120 else 0.0) for step, value in falling().items()}
    (found,) = losses(jumped, name="train/loss")
    assert (found.kind, found.severity, found.steps) == ("loss_spike", "warning", (120, 199))
    assert found.title.startswith("The loss 'train/loss' jumped from 2.")
    assert found.title.endswith(" at step 120 and has not come back in 79 steps.")
    assert losses(jumped, name="eval_loss") == []


@pytest.mark.parametrize(
    ("rates", "named"),
    [
        ({100: 3e-4, 118: 3e-4, 119: 0.9, 150: 0.9}, True),
        ({100: 3e-4, 119: 2e-3}, False),  # not by much
        ({50: 3e-4, 60: 0.9, 119: 0.9}, False),  # long before
        ({119: 3e-4, 121: 0.9}, False),  # after it
        ({118: 0.0, 119: 0.9}, False),  # begins
        ({116: 0.9, 117: 3e-4, 118: 0.9, 119: 3e-4, 120: 0.9}, False),  # two optimizers
        ({}, False),
    ],
)
@pytest.mark.parametrize("name", ["lr", "train/learning_rate"])
def test_a_learning_rate_that_rose_just_before_is_named(rates: dict[int, float], named: bool, name: str) -> None:
    run = Cluster(ranks=1, steps=STEPS).run()
    jumped = {step: value + (4.0 if step >= 120 else 0.0) for step, value in falling().items()}
    events = (*noted(jumped, run=run), *seen(rates, name=name, run=run))
    (found,) = (finding for finding in diagnose(replace(run, events=events)) if finding.kind == "loss_spike")
    rose = "; the learning rate rose from 0.0003 to 0.9 at step 119."
    assert found.title.endswith(f" and has not come back in 79 steps{rose if named else '.'}")
    expected = {"before": 3e-4, "after": 0.9, "step": 119} if named else None
    assert found.evidence.get("learning_rate") == expected
    assert (found.advice[0] == "Check the learning rate's schedule first: it rose just before.") is named


def test_rates_of_two_names_or_of_an_earlier_attempt_are_not_compared() -> None:
    run = Cluster(ranks=1, steps=STEPS).run()
    jumped = {step: value + (4.0 if step >= 120 else 0.0) for step, value in falling().items()}
    low, high = seen({118: 3e-4}, name="d/lr", run=run), seen({119: 0.9}, name="g/lr", run=run)
    earlier = [{**event, "pid": 1, "values": {"g/lr": 3e-4}} for event in low]
    events = (*noted(jumped, run=run), *low, *high, *earlier)
    (found,) = (finding for finding in diagnose(replace(run, events=events)) if finding.kind == "loss_spike")
    assert "learning_rate" not in found.evidence


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(8))
def test_healthy_losses_raise_nothing(seed: int) -> None:
    """A falling loss, one that comes back, a GAN's, heavy tails, a loss that drifts up, and one of few values."""
    draw = np.random.default_rng(seed)
    back = np.where((np.arange(STEPS) >= 100) & (np.arange(STEPS) < 130), FALLING + 9.0, FALLING)
    gan = 0.7 + 0.4 * np.sin(np.arange(STEPS) / 9) + draw.normal(0, 0.1, STEPS)
    tails = np.abs(draw.standard_cauchy(STEPS))
    drifting = 1.0 + np.arange(STEPS) * 0.01 + draw.normal(0, 0.02, STEPS)
    for curve in (FALLING, back, gan, tails, drifting, FALLING[:40], np.zeros(STEPS)):
        assert losses({step: float(value) for step, value in enumerate(curve)}) == []


def test_other_names_and_other_events_are_not_losses() -> None:
    assert losses(since(100, "nan"), name="lr") == []
    assert noted_health({"event": "rank_end", "values": {"loss": 1.0}}) == {}
    assert noted_health({"event": "note", "values": "loss"}) == {}
    odd = {"Loss/train": 2, "loss": "nan", "my_loss": True, "loss2": 10**400, "lossy": "no", "loss3": None}
    assert str(noted_health({"event": "note", "values": odd})) == "{'Loss/train': 2.0, 'loss': nan}"


def test_notes_of_an_earlier_attempt_do_not_count() -> None:
    run = Cluster(ranks=2, steps=STEPS).run()
    events = [{**event, "pid": 1} for event in noted(since(100, "nan"), run=run)]
    assert not any(found.kind == "loss_nan" for found in diagnose(replace(run, events=tuple(events))))


@pytest.mark.parametrize("name", ["grad_norm", "train/grad-norm"])
def test_gradients_that_are_no_numbers_any_more(name: str) -> None:
    """HF's Trainer hides NaN in its loss, but not in the gradient norm; the first steps of a GradScaler are normal."""
    (found,) = losses(since(150, "nan"), name=name)
    assert (found.kind, found.severity, found.steps) == ("nan_gradients", "critical", (150, 199))
    called = "The gradient norm" if name == "grad_norm" else f"The gradient norm {name!r}"
    assert found.title == f"{called} is NaN from step 150 on; it was {FALLING[149]:.4g} at step 149."
    (found,) = losses(falling(**{"0": "inf", "1": "inf"}), name=name)
    assert (found.kind, found.severity) == ("nan_gradients", "info")
    jumped = {step: value + (4.0 if step >= 120 else 0.0) for step, value in falling().items()}
    assert losses(jumped, name=name) == [], "a norm may jump"


def test_wrong_numbers_come_before_anything_that_is_only_slow_and_after_what_stopped_the_job() -> None:
    run = Cluster(ranks=4, steps=STEPS, faults=(slow_at(2, "forward", 30.0),)).run()
    slow = diagnose(run)[0]
    assert (slow.kind, slow.severity) == ("compute_straggler", "critical")
    lost = replace(run, events=tuple(noted(since(150, "nan"), run=run)))
    assert [(found.kind, found.severity) for found in diagnose(lost)[:2]] == [
        ("loss_nan", "critical"),
        ("compute_straggler", "critical"),
    ]
    summary = summarize(lost)
    assert summary["verdict"]["title"].startswith("The loss is NaN from step 150 on")
    text = render_text(summary)
    assert text.index("The loss is NaN") < text.index("Rank 2 is")
    passing = replace(run, events=tuple(noted(falling(**{"20": "inf"}), run=run)))
    assert diagnose(passing)[0].kind == "compute_straggler"
    crashed = Cluster(
        ranks=4, steps=STEPS, faults=(slow_at(2, "forward", 30.0),), deaths=(Death(rank=1, step=190),)
    ).run()
    crashed = replace(crashed, events=(*crashed.events, *noted(since(150, "nan"), run=crashed)))
    assert [found.kind for found in diagnose(crashed)[:2]] == ["rank_crashed", "loss_nan"]


# -- what the recorder saw itself -------------------------------------------------------------------------------------


def seen(values: Mapping[int, Any], *, name: str, run: RunData) -> list[dict[str, Any]]:
    return [{**event, "event": "seen"} for event in noted(values, name=name, run=run)]


def test_a_loss_that_nobody_noted_has_the_exact_step() -> None:
    """Also if the script logs it now and then."""
    run = Cluster(ranks=2, steps=STEPS).run()
    rarely = {step: value for step, value in since(133, "nan").items() if step % 50 == 0}
    for own in ([], noted(rarely, run=run)):
        events = (*own, *seen(since(133, "nan"), name="loss", run=run))
        found = diagnose(replace(run, events=events))[0]
        assert (found.kind, found.evidence["first_step"], found.ranks) == ("loss_nan", 133, ())
        assert found.title == f"The loss is NaN from step 133 on; it was {FALLING[132]:.4g} at step 132."


def test_the_rank_where_it_began_is_named_although_all_have_it_a_step_later() -> None:
    run = Cluster(ranks=3, steps=STEPS).run()
    events: list[dict[str, Any]] = []
    for rank, step in ((0, 134), (1, 133), (2, 134)):
        events += [{**event, "event": "seen"} for event in noted(since(step, "nan"), rank=rank, run=run)]
    found = diagnose(replace(run, events=tuple(events)))[0]
    assert (found.kind, found.ranks, found.evidence["first_step"]) == ("loss_nan", (1,), 133)
    assert found.title == (
        "The loss of rank 1 is NaN from step 133 on, and that of the others from step 134; "
        f"it was {FALLING[132]:.4g} at step 132."
    )


def test_a_loss_that_the_script_notes_counts_for_jumps() -> None:
    """The script knows which of its losses belong together: the last backward may be of another task from there on."""
    run = Cluster(ranks=2, steps=STEPS).run()
    jumped = {step: value + (4.0 if step >= 120 else 0.0) for step, value in falling().items()}
    healthy, alone, *_ = diagnose(replace(run, events=tuple(seen(jumped, name="loss", run=run))))
    assert healthy.kind == "healthy"
    assert (alone.kind, alone.severity, alone.evidence["first_step"]) == ("loss_spike", "info", 120)
    both = (*seen(jumped, name="loss", run=run), *noted(falling(), name="train/loss", run=run))
    assert not any(found.kind == "loss_spike" for found in diagnose(replace(run, events=both)))


def test_norms_that_explode_before_they_are_clipped() -> None:
    run = Cluster(ranks=2, steps=STEPS).run()
    norms = {step: float(RANDOM.uniform(0.5, 1.5)) * (1000.0 if step >= 150 else 1.0) for step in range(STEPS)}
    found = diagnose(replace(run, events=tuple(seen(norms, name="grad_norm", run=run))))[0]
    assert (found.kind, found.severity, found.steps) == ("exploding_gradients", "warning", (150, 199))
    assert found.title.startswith("The gradient norm is ")
    assert found.title.endswith(" from step 150 on.")
    assert 500 < found.evidence["times"] < 2000
    better = (*seen(norms, name="grad_norm", run=run), *seen(falling(), name="loss", run=run))
    assert not any(found.kind == "exploding_gradients" for found in diagnose(replace(run, events=better)))
    short = {step: norm for step, norm in norms.items() if step < 165}
    assert diagnose(replace(run, events=tuple(seen(short, name="grad_norm", run=run))))[0].kind == "healthy"


def test_a_loss_that_is_not_read_in_every_step_became_nan_between_two_of_them() -> None:
    run = Cluster(ranks=1, steps=STEPS).run()
    values = {step: "nan" if step >= 60 else 1.0 for step in range(0, 100, 8)}
    found = diagnose(replace(run, events=tuple(seen(values, name="loss", run=run))))[0]
    assert found.title == "The loss is NaN from a step between 57 and 64 on; it was 1 at step 56."
    assert found.evidence["first_step"] == 64


def test_what_was_seen_is_shown_unless_the_script_notes_that_name() -> None:
    run = Cluster(ranks=2, steps=STEPS).run()
    events = [*seen({5: 1.5, 6: 2.5}, name="loss", run=run), *seen({6: 0.5}, name="grad_norm", run=run)]
    metrics = summarize(replace(run, events=tuple(events)))["metrics"]
    assert metrics == {"loss": {"last": 2.5, "step": 6}, "grad_norm": {"last": 0.5, "step": 6}}
    own = (*events, *noted({3: 9.0}, run=run))
    assert summarize(replace(run, events=own))["metrics"]["loss"] == {"last": 9.0, "step": 3}
    assert note_event({"~loss": 1, "~grad_norm": "nan"}) == {"event": "seen", "values": {"loss": 1, "grad_norm": "nan"}}
    assert note_event({"loss": 1, "~x": 2}) == {"event": "note", "values": {"loss": 1, "~x": 2}}
    assert note_event("text") == {"event": "note", "values": "text"}
