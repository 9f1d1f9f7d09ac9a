"""What ``diagnose`` promises of any run: an answer, in order, that JSON can hold."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import replace

import pytest
from example_counts import examples
from fakes.cluster import Cluster, Death, Fault, slow_at
from fakes.records import timed_at
from fakes.samples import with_samples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepscope.diagnosis import build_window, diagnose
from stepscope.diagnosis.engine.view import view_of
from stepscope.diagnosis.rulebook import RULES
from stepscope.judge import thresholds
from stepscope.records.finding import SEVERITIES, Finding
from stepscope.records.series import RankError

KINDS = {kind for rule in RULES for kind in rule.kinds} | {
    "rank_crashed",
    "compute_bound",
    "healthy",
    "insufficient_data",
}
TOO_FEW = (
    "Only 4 steady steps to judge by (1 of 5 set aside as warm-up): "
    "bottlenecks and stragglers cannot be separated from noise."
)
PHASES = ("input", "h2d", "forward", "backward", "optimizer", "other", "eval", "checkpoint", "mine")


def of(cluster: Cluster) -> list[Finding]:
    return diagnose(cluster.run())


def verdict(cluster: Cluster) -> Finding:
    """The first finding of a run; it is alone but for the remark that the job computes."""
    first, *rest = of(cluster)
    assert {finding.kind for finding in rest} <= {"compute_bound"}
    return first


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    ranks, steps = draw(st.integers(0, 6)), draw(st.integers(0, 40))
    rank = st.integers(0, max(ranks - 1, 0))
    phases = draw(st.dictionaries(st.sampled_from(PHASES), st.floats(0, 50), max_size=6))
    faults = st.builds(slow_at, rank, st.sampled_from(PHASES), st.floats(0, 100))
    deaths = st.builds(
        lambda rank, step, state: Death(rank=rank, step=step, state=state),
        rank,
        st.integers(0, steps),
        st.sampled_from(("vanished", "exception", "exited")),
    )
    errors = st.builds(
        lambda rank, kind, codes: RankError(rank=rank, pid=1000, type=kind, message=kind, exit_codes=codes),
        st.none() | rank,
        st.sampled_from(("ValueError", "ChildFailedError", "KeyboardInterrupt", "")),
        st.dictionaries(rank, st.integers(-70, 300), max_size=2),
    )
    several = ranks > 0
    running = draw(st.booleans())
    return Cluster(
        ranks=ranks,
        steps=steps,
        phases_ms=phases,
        noise=draw(st.sampled_from((0.0, 0.05, 0.5))),
        tail=draw(st.sampled_from((0.0, 0.1))),
        seed=draw(st.integers(0, 99)),
        comm_measured=draw(st.booleans()),
        synchronized=draw(st.booleans()),
        device_timed=draw(st.booleans()),
        warmup_steps=draw(st.integers(0, 3)),
        compile_steps=tuple(draw(st.lists(st.integers(0, max(steps - 1, 0)), max_size=3))) if steps else (),
        epoch_every=draw(st.sampled_from((0, 5))),
        faults=tuple(draw(st.lists(faults, max_size=2))) if several else (),
        deaths=tuple(draw(st.lists(deaths, max_size=2, unique_by=lambda d: d.rank))) if several else (),
        missing=draw(st.dictionaries(rank, st.lists(st.integers(0, 40), max_size=5), max_size=2)),
        unfinished=draw(st.dictionaries(rank, st.integers(0, steps), max_size=3)) if running else {},
        errors=tuple(draw(st.lists(errors, max_size=2))),
    )


@settings(max_examples=examples(120))
@given(clusters())
@example(Cluster(ranks=1, steps=1, phases_ms={}, comm_measured=False, synchronized=False))  # no phase at all
def test_any_run_gets_an_answer(cluster: Cluster) -> None:
    findings = of(cluster)
    assert findings
    assert {finding.kind for finding in findings} <= KINDS
    for finding in findings:
        json.dumps(finding.to_dict(), allow_nan=False)
        assert finding.severity in SEVERITIES
        assert finding.title.endswith(".")
        assert 0 < finding.confidence <= 1
        assert set(finding.cost) - {"up_to"} == {"share", "seconds", "rank_hours", "if_fixed"}
        assert 0 <= finding.cost["share"] <= 1
        assert set(finding.ranks) <= set(range(max(cluster.ranks, 1) + 1))
        if finding.kind == "healthy":
            assert finding.evidence["large"] == (finding.cost["share"] >= thresholds.LARGE_SHARE)
    kinds = [finding.kind for finding in findings]
    if "insufficient_data" in kinds:
        assert kinds == ["insufficient_data"]
    assert ("healthy" in kinds) == (kinds[0] == "healthy")
    if kinds[0] == "healthy":
        assert {finding.severity for finding in findings} == {"info"}
    assert "compute_bound" not in kinds or kinds[0] == "healthy"


def test_the_most_severe_then_the_most_costly_comes_first() -> None:
    phases = {"input": 9.0, "forward": 10.0, "backward": 20.0, "optimizer": 5.0}
    findings = of(
        Cluster(
            ranks=4, steps=80, phases_ms=phases, faults=(slow_at(1, "forward", 40.0),), deaths=(Death(rank=3, step=70),)
        )
    )
    assert [(finding.kind, finding.severity) for finding in findings] == [
        ("rank_crashed", "critical"),
        ("compute_straggler", "critical"),
        ("input_bound", "warning"),
    ]


def test_without_any_step_the_advice_is_for_updates_by_hand() -> None:
    (found,) = of(Cluster(ranks=1, steps=0))
    assert found.advice == (
        "A step ends when the step() of a torch optimizer returns, and none did.",
        'If parameters are updated by hand, put "with stepscope.step():" around the body of the training loop.',
    )


@pytest.mark.parametrize(
    ("cluster", "title"),
    [
        (Cluster(ranks=0, steps=0), "Nothing was recorded: the recorder was not loaded in any training process."),
        (Cluster(ranks=2, steps=0), "No training step was recorded, so nothing can be said about speed."),
        (
            Cluster(ranks=1, steps=1),
            "No steady step to judge by (1 of 1 set aside as warm-up): bottlenecks cannot be separated from noise.",
        ),
        (
            Cluster(ranks=1, steps=2),
            "Only 1 steady step to judge by (1 of 2 set aside as warm-up): bottlenecks cannot be separated from noise.",
        ),
        (
            Cluster(ranks=2, steps=5),
            TOO_FEW,
        ),
        (
            Cluster(ranks=2, steps=30, unfinished={0: 30}, missing={0: range(0, 30, 2), 1: range(1, 30, 2)}),
            "No step is complete on all ranks yet, so ranks cannot be compared.",
        ),
    ],
)
def test_too_little_is_said_plainly(cluster: Cluster, title: str) -> None:
    (found,) = of(cluster)
    assert (found.kind, found.severity, found.title) == ("insufficient_data", "info", title)


def test_a_job_that_was_reached_and_did_not_train() -> None:
    run = Cluster(ranks=0, steps=0).run()
    (found,) = diagnose(run, build_window(run), reached=True)
    assert found.title == "Nothing was recorded: no process with the recorder loaded trained a PyTorch model."


@pytest.mark.parametrize(("ranks", "than"), [(2, "slower than the other rank in"), (4, "slower than its peers in")])
def test_two_ranks_are_not_peers(ranks: int, than: str) -> None:
    found = of(Cluster(ranks=ranks, steps=100, faults=(slow_at(1, "forward", 30.0),)))
    assert than in found[0].title
    assert ("peers" in " ".join((found[0].title, *found[0].advice))) == (ranks > 2)


def test_a_script_that_gave_up_is_quoted() -> None:
    end = {"exit_code": 2, "status": "failed", "wall_ns": 1}
    run = replace(Cluster(ranks=0, steps=0, meta={"end": end}).run(), last_line="train.py: error: no --lr")
    (found,) = diagnose(run, build_window(run), reached=True)
    assert (found.kind, found.severity) == ("insufficient_data", "critical")
    assert found.title == "The script ended with exit code 2 before it trained: train.py: error: no --lr"


def test_compiling_all_the_time_is_named() -> None:
    (found,) = of(Cluster(ranks=1, steps=20, compile_steps=tuple(range(20))))
    assert found.kind == "insufficient_data"
    assert "torch.compile" in found.advice[0]


def test_a_healthy_run_names_its_largest_opportunity() -> None:
    found = verdict(Cluster(ranks=2, steps=60, noise=0.001, comm_ms=4.0))
    assert found.title == (
        "No bottleneck found. Apart from training, most time goes to waiting for peers or the network: "
        "4.00 ms of 42.0 ms per step."
    )
    assert (found.kind, found.evidence["opportunity"]) == ("healthy", "waiting for peers or the network")


def train(**more: float) -> dict[str, float]:
    return {"input": 2.0, "forward": 10.0, "backward": 20.0, "optimizer": 5.0, **more}


def stop(phase: str, ms: float, *steps: int) -> tuple[Fault, ...]:
    return tuple(slow_at(0, phase, ms, range(step, step + 1)) for step in steps)


def test_time_that_looks_at_every_step_take_is_not_the_jobs() -> None:
    run = Cluster(ranks=1, phases_ms=train(inside=63.0), sampled_steps=tuple(range(100))).run()
    assert "wait_heavy" not in {finding.kind for finding in diagnose(run)}


@pytest.mark.parametrize(
    ("cluster", "kind", "phase", "title"),
    [
        (
            Cluster(ranks=1, phases_ms=train(other=63.0)),
            "between_steps",
            "other",
            "62% of the training time passes between steps: 63.0 ms each time.",
        ),
        (
            Cluster(ranks=1, phases_ms=train(inside=63.0)),
            "wait_heavy",
            "other",
            "62% of the training time lies inside the step but outside all phases: 63.0 ms of every step.",
        ),
        (
            Cluster(ranks=2, comm_ms=37.0),
            "comm_bound",
            "comm",
            "All ranks wait for the exchange: 37.0 ms of every step, 49% of the training time.",
        ),
        (
            Cluster(ranks=1, phases_ms={"input": 0.4, "forward": 0.6}),
            "healthy",
            "input",
            "40% of the step is spent waiting for input: 400 µs of 1.00 ms.",
        ),
        (
            Cluster(ranks=2, faults=stop("eval", 1000.0, 30, 60, 90)),
            "between_steps",
            "eval",
            "44% of the training time is evaluation on rank 0: 1.00 s each in 3 of 99 steps.",
        ),
        (
            Cluster(ranks=1, phases_ms=train(), faults=stop("eval", 2000.0, 50)),
            "between_steps",
            "eval",
            "35% of the training time is evaluation: 2.00 s in 1 of 99 steps.",
        ),
        (
            Cluster(ranks=1, phases_ms=train(), faults=tuple(slow_at(0, "optimizer", 30.0) for _ in range(1))),
            "optimizer_bound",
            "optimizer",
            "The optimizer takes 35.0 ms of every step, 52% of the training time.",
        ),
        (
            Cluster(ranks=1, phases_ms=train(h2d=9.0)),
            "h2d_bound",
            "h2d",
            "Copies to the device take 9.00 ms of every step, 20% of the training time.",
        ),
        (
            Cluster(ranks=2, phases_ms=train(validate=20.0)),
            "between_steps",
            "validate",
            "34% of the training time is the phase 'validate': 20.0 ms of every step.",
        ),
        (
            Cluster(ranks=1, phases_ms=train(log=4.0, validate=19.0)),
            "between_steps",
            "validate",
            "32% of the training time is the phase 'validate': 19.0 ms of every step; with 'log' it is 38%.",
        ),
        (
            Cluster(ranks=1, phases_ms=train(other=60.0), faults=stop("checkpoint", 500.0, 30, 60)),
            "between_steps",
            "other",
            "55% of the training time passes between steps: 60.0 ms each time; with checkpointing it is 64%.",
        ),
    ],
)
def test_where_the_time_goes_is_told_plainly(cluster: Cluster, kind: str, phase: str | None, title: str) -> None:
    found = verdict(replace(cluster, noise=0.0))
    assert (found.kind, found.phase, found.title) == (kind, phase, title)
    assert (found.severity == "info") == (kind == "healthy")
    assert found.advice


def test_an_evaluation_is_a_warning_only_if_it_takes_much() -> None:
    for ms, severity in ((250.0, "info"), (500.0, "warning"), (1000.0, "critical")):
        found = verdict(Cluster(ranks=1, noise=0.0, phases_ms=train(), faults=stop("eval", ms, 30, 60)))
        assert (found.kind, found.phase, found.severity) == ("between_steps", "eval", severity)


def test_a_teacher_in_every_step_is_part_of_training_and_no_warning() -> None:
    found = verdict(Cluster(ranks=1, noise=0.0, phases_ms=train(eval=20.0)))
    assert (found.kind, found.phase, found.severity) == ("between_steps", "eval", "info")
    assert found.title == "35% of the training time is inference without gradients: 20.0 ms of every step."


def test_the_price_of_several_phases_comes_with_advice_on_each() -> None:
    found = verdict(Cluster(ranks=1, noise=0.0, phases_ms=train(log=4.0, validate=19.0, tiny=0.1)))
    assert found.title == (
        "32% of the training time is the phase 'validate': 19.0 ms of every step; with 'log' and 'tiny' it is 38%."
    )
    assert found.cost["share"] == round(sum(found.evidence["shares"].values()), 4) == 0.3844
    assert found.advice == tuple(
        f"Do {name!r} less often, in a background thread, or during the next step's computation."
        for name in ("validate", "log")
    )


def test_evaluation_and_checkpoints_do_not_make_slow_steps() -> None:
    found = verdict(Cluster(ranks=2, noise=0.001, comm_ms=0.0, faults=stop("checkpoint", 300.0, 50)))
    assert found.title == (
        "No bottleneck found. Apart from training, most time goes to checkpointing: 300 ms in 1 of 99 steps."
    )
    assert found.evidence["opportunities"]["a few slow steps"] < 0.01
    assert found.evidence["opportunities"]["waiting for whichever rank is slowest"] < 0.01


def test_a_run_that_only_computes_says_so() -> None:
    found = verdict(Cluster(ranks=1, steps=60, noise=0.001, phases_ms={"forward": 10.0, "backward": 20.0}))
    assert found.title == "No bottleneck found; forward, backward and optimizer take nearly all of the step."


def test_a_thousand_ranks_fit() -> None:
    """The right answer, and no more memory than a few copies of one phase: time is measured in bench/."""
    run = Cluster(ranks=1024, steps=200, faults=(slow_at(777, "forward", 3.0),)).run()
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (found,) = diagnose(run)
    grown_kb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) // (
        1024 if sys.platform == "darwin" else 1
    )
    assert (found.ranks, found.phase) == ((777,), "forward")
    assert len(found.evidence["median_ms_by_rank"]) == 1
    assert grown_kb < 100_000


@pytest.mark.parametrize(("own_percent", "severity"), [(30.0, "info"), (98.0, "warning")])
def test_on_a_crowded_machine_a_change_is_a_symptom(own_percent: float, severity: str) -> None:
    """Others took the CPUs from step 60 on; were they the job's own, the change would be its own matter."""
    host = {"cpu_percent": 99.0, "own_cpu_percent": own_percent, "procs_running": 26, "cpu_count": 16}
    cluster = Cluster(
        ranks=2, steps=120, faults=tuple(slow_at(rank, "forward", 12.0, range(60, 120)) for rank in range(2))
    )
    run = with_samples(cluster, host=host, process={"cpu_percent": 100.0})
    found = {finding.kind: finding.severity for finding in diagnose(run)}
    assert found["change_point"] == severity
    assert (found["cpu_saturated"] == "warning") == (severity == "info")


def test_time_between_steps_and_a_change_of_it_are_not_charged_twice() -> None:
    """15 ms between any two steps, 24 more from step 140 on and 20 more for a while: together what passes there."""
    phases_ms = {"forward": 15.0, "backward": 25.0, "other": 15.0}
    faults = (slow_at(0, "other", 24.0, range(140, 180)), slow_at(0, "other", 20.0, range(83, 103)))
    run = Cluster(ranks=1, steps=180, phases_ms=phases_ms, faults=faults).run()
    view = view_of(build_window(run))
    outside = float(view.phase("other").sum() / view.step_ns.sum())
    found = {finding.kind: finding for finding in diagnose(run) if finding.phase == "other"}
    assert set(found) == {"between_steps", "change_point", "throughput_drop"}
    assert sum(finding.cost["share"] for finding in found.values()) == pytest.approx(outside, abs=0.02)
    assert found["between_steps"].title.endswith("passes between steps: 15.0 ms each time.")


def test_an_idle_gpu_is_a_symptom_of_what_costs_time() -> None:
    cluster = Cluster(ranks=1, steps=200, device_timed=True, phases_ms={"input": 60.0, "forward": 10.0})
    found = {finding.kind: finding.severity for finding in diagnose(with_samples(cluster, gpu={"util_percent": 15}))}
    assert found == {"input_bound": "critical", "low_gpu_utilization": "info"}


def test_where_a_host_may_wait_for_its_device_nothing_is_said_without_device_times() -> None:
    """A copy, or a value that is printed, waits for all that the device has to do before: the model, most of all."""
    run = Cluster(ranks=1, phases_ms=train(h2d=9.0), device_timed=True).run()
    assert diagnose(run)[0].kind == "h2d_bound"
    untimed = replace(run, ranks=tuple(timed_at(rank, slice(0)) for rank in run.ranks))
    assert not {"h2d_bound", "wait_heavy", "between_steps"} & {finding.kind for finding in diagnose(untimed)}
