"""The line that stacks agree on: the user's own, a callback's, or the framework's with the line that called it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, slow_at

from stepscope.diagnosis import build_window, diagnose
from stepscope.diagnosis.engine.code_location import seen_at
from stepscope.diagnosis.engine.view import View, view_of
from stepscope.records.series import RunData

PACKAGES = "/venv/lib/python3.11/site-packages"
SCRIPT = ("/scripts/train.py", 36, "<module>")
TRAIN = (f"{PACKAGES}/transformers/trainer.py", 1643, "Trainer._inner_training_loop")
EVENT = (f"{PACKAGES}/transformers/trainer_callback.py", 545, "CallbackHandler.call_event")
CALLBACK = ("/scripts/train.py", 27, "Plot.on_step_end")
EVALUATE = (f"{PACKAGES}/transformers/trainer.py", 2953, "Trainer.evaluation_loop")
TORCH = (f"{PACKAGES}/torch/nn/modules/module.py", 1789, "Module._call_impl")
CLIP = (f"{PACKAGES}/deepspeed/runtime/zero/stage_1_and_2.py", 2684, "ZeroOptimizer.get_grad_norm_direct")

Frame = tuple[str, int, str]


def stack(*frames: Frame, rank: int = 0, step: int = 30, between: bool = True, phase: str = "other") -> dict[str, Any]:
    """Innermost first."""
    named = [{"file": file, "line": line, "function": function} for file, line, function in frames]
    about = {"rank": rank, "pid": 100 + rank, "step": step, "wall_ns": ANCHOR_WALL_NS + 10**9, "phase": phase}
    return {**about, "between": between, "frames": named}


def run_of(*stacks: dict[str, Any], cluster: Cluster | None = None) -> RunData:
    return replace((cluster or Cluster(ranks=2, steps=100)).run(), stacks=tuple(stacks))


def view(*stacks: dict[str, Any]) -> View:
    return view_of(build_window(run_of(*stacks)))


def test_a_callback_of_the_users_is_named_and_not_the_call_of_the_trainer() -> None:
    seen = view(*[stack(CALLBACK, EVENT, TRAIN, SCRIPT)] * 3)
    assert seen_at(seen) == "a callback: Plot.on_step_end, train.py:27"


def test_what_a_framework_does_comes_with_the_line_that_called_it() -> None:
    seen = view(stack(TORCH, EVALUATE, TRAIN, SCRIPT), stack(EVALUATE, TRAIN, SCRIPT))
    expected = "evaluation: transformers/trainer.py:2953 in Trainer.evaluation_loop, from train.py:36"
    assert seen_at(seen) == expected
    assert seen_at(view(*[stack(CLIP, SCRIPT)] * 2)) == (
        "gradient clipping: deepspeed/runtime/zero/stage_1_and_2.py:2684 in ZeroOptimizer.get_grad_norm_direct, "
        "from train.py:36"
    )


def test_nothing_is_named_on_which_the_stacks_do_not_agree() -> None:
    other = (TRAIN[0], 1911, TRAIN[2])
    third = (TRAIN[0], 1889, TRAIN[2])
    seen = view(stack(CALLBACK, EVENT, TRAIN, SCRIPT), stack(CLIP, other, SCRIPT), stack(EVALUATE, third, SCRIPT))
    assert seen_at(seen) == ""


def test_only_the_stacks_that_are_asked_for_count() -> None:
    seen = view(
        *[stack(CALLBACK, EVENT, TRAIN, SCRIPT, rank=1)] * 2,
        stack(CLIP, SCRIPT, rank=0, between=False),
        stack(CLIP, SCRIPT, rank=0, between=False, step=31),
    )
    assert seen_at(seen, (1,)) == "a callback: Plot.on_step_end, train.py:27"
    assert seen_at(seen, between=True) == "a callback: Plot.on_step_end, train.py:27"
    assert seen_at(seen, besides=(1,)).startswith("gradient clipping: ")
    assert seen_at(seen, steps={99}) == ""


def test_a_straggler_within_the_step_gets_its_line() -> None:
    line = ("/scripts/train.py", 27, "main")
    cluster = Cluster(ranks=2, steps=100, faults=(slow_at(1, "inside", 40.0),))
    first = diagnose(run_of(*[stack(line, SCRIPT, rank=1, between=False)] * 4, cluster=cluster))[0]
    assert (first.ranks, first.phase, first.evidence["place"]) == ((1,), "other", "main, train.py:27")
    assert "within the step but outside all phases (main, train.py:27) every step" in first.title


def test_a_straggler_between_the_model_and_backward_gets_its_line() -> None:
    """That time counts as forward (the loss), and the stacks taken in it are outside all phases."""
    line, later = ("/scripts/train.py", 11, "main"), ("/scripts/train.py", 14, "main")
    cluster = Cluster(ranks=2, steps=100, faults=(slow_at(1, "forward", 400.0, range(60, 100)),))
    stacks = [
        *[stack(line, SCRIPT, rank=1, step=step, between=False) for step in (70, 80)],
        *[stack(later, SCRIPT, rank=rank, step=step) for step in (71, 81, 90) for rank in (0, 1)],
    ]
    first = diagnose(run_of(*stacks, cluster=cluster))[0]
    assert (first.ranks, first.phase, first.evidence["place"]) == ((1,), "forward", "main, train.py:11")
    assert diagnose(run_of(*stacks[1:], cluster=cluster))[0].evidence["place"] is None


def test_periodic_work_is_one_finding_with_its_line() -> None:
    line = ("/scripts/train.py", 4, "env_step")
    cluster = Cluster(ranks=1, steps=200, faults=(slow_at(0, "inside", 40.0, range(0, 200, 4)),))
    (found,) = (
        finding
        for finding in diagnose(run_of(*[stack(line, SCRIPT, step=40, between=False)] * 3, cluster=cluster))
        if finding.kind != "compute_bound"
    )
    assert (found.kind, found.evidence["period"], found.evidence["place"]) == ("jitter", 4, "env_step, train.py:4")


def test_slow_steps_besides_a_checkpoint_are_not_said_to_be_in_it() -> None:
    steps = 80
    faults = (slow_at(0, "checkpoint", 400.0, range(0, steps, 5)), slow_at(0, "other", 118.0, range(0, steps, 10)))
    first, second = diagnose(Cluster(ranks=1, steps=steps, faults=faults).run())
    assert (first.kind, first.phase) == ("between_steps", "checkpoint")
    assert (second.kind, second.phase, second.evidence["period"]) == ("jitter", "other", 10)
    assert second.title.startswith("Every 10th step takes 118 ms longer besides checkpointing, outside model")


HOOK = ("/stepscope/recorder/ledger.py", 149, "Ledger.timed.<locals>.timed")
FETCH = (f"{PACKAGES}/torch/utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")
ITEM = ("/scripts/train.py", 12, "Data.__getitem__")
MODEL = ("/scripts/train.py", 22, "Net.forward")
SLOW = ("/scripts/train.py", 20, "Net.forward")
EVALUATED = ("/scripts/train.py", 50, "evaluate")
LOOP = (HOOK, SCRIPT)
"""What every stack within a phase ends with: our hook, and the line of the loop."""


def in_phase(phase: str, *frames: Frame, rank: int = 0, step: int = 30) -> dict[str, Any]:
    return stack(*frames, rank=rank, step=step, between=False, phase=phase)


def test_a_rank_that_is_late_in_input_gets_the_line_of_its_dataset() -> None:
    cluster = Cluster(ranks=2, steps=100, faults=(slow_at(1, "input", 40.0),))
    stacks = [in_phase("input", ITEM, FETCH, *LOOP, rank=1)] * 4
    first = diagnose(run_of(*stacks, cluster=cluster))[0]
    assert (first.kind, first.ranks) == ("input_straggler", (1,))
    assert first.evidence["place"] == "Data.__getitem__, train.py:12"
    assert " slower than the other rank in input (Data.__getitem__, train.py:12) every step; " in first.title
    assert first.advice[0].startswith("Look at Data.__getitem__, train.py:12: rank 1")


def test_a_wait_for_input_of_all_ranks_gets_its_line() -> None:
    cluster = Cluster(ranks=2, steps=100, faults=(slow_at(0, "input", 40.0), slow_at(1, "input", 40.0)))
    stacks = [in_phase("input", ITEM, FETCH, *LOOP, rank=rank) for rank in (0, 0, 1, 1)]
    first = diagnose(run_of(*stacks, cluster=cluster))[0]
    assert (first.kind, first.evidence["place"]) == ("input_bound", "Data.__getitem__, train.py:12")
    assert first.title.endswith(" of the training time, mostly in Data.__getitem__, train.py:12.")


def test_waiting_for_workers_has_no_line_of_the_users() -> None:
    waiting = (f"{PACKAGES}/torch/utils/data/dataloader.py", 1484, "_MultiProcessingDataLoaderIter._get_data")
    seen = view(*[in_phase("input", waiting, *LOOP)] * 4, in_phase("input", ITEM, FETCH, *LOOP))
    assert seen_at(seen, phase="input") == ""


def test_a_wait_for_workers_gets_the_line_of_the_workers() -> None:
    cluster = Cluster(ranks=2, steps=100, faults=(slow_at(0, "input", 40.0), slow_at(1, "input", 40.0)))
    stacks = [{**in_phase("input", ITEM, FETCH, rank=rank), "worker": True} for rank in (0, 0, 1, 1)]
    place = "Data.__getitem__, train.py:12, in a DataLoader worker"
    first = diagnose(run_of(*stacks, cluster=cluster))[0]
    assert (first.kind, first.evidence["place"]) == ("input_bound", place)
    assert first.title.endswith(f" of the training time, mostly in {place}.")
    cluster = Cluster(ranks=2, steps=100, faults=(slow_at(1, "input", 40.0),))
    late = diagnose(run_of(*stacks[2:], cluster=cluster))[0]
    assert (late.kind, late.ranks, late.evidence["place"]) == ("input_straggler", (1,), place)
    assert f" slower than the other rank in input ({place}) every step; " in late.title


def test_a_few_workers_at_work_do_not_explain_a_wait_in_which_most_are_idle() -> None:
    waiting = (f"{PACKAGES}/torch/utils/data/dataloader.py", 1484, "_MultiProcessingDataLoaderIter._get_data")
    working = {**in_phase("input", ITEM, FETCH), "worker": True}
    assert seen_at(view(*[in_phase("input", waiting, *LOOP)] * 4, working, working), phase="input") == ""


def test_a_dataset_from_a_library_gets_the_line_in_the_library() -> None:
    fetch = (f"{PACKAGES}/torch/utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")
    folder = (f"{PACKAGES}/torchvision/datasets/folder.py", 245, "DatasetFolder.__getitem__")
    decode = (f"{PACKAGES}/PIL/ImageFile.py", 390, "ImageFile.load")
    standard = ("/usr/lib/python3.11/random.py", 12, "random")
    decoding = {**in_phase("input", decode, folder, fetch), "worker": True}
    other = {**in_phase("input", standard, folder, fetch), "worker": True}
    assert seen_at(view(decoding, decoding, decoding, other), phase="input") == (
        "PIL/ImageFile.py:390 in ImageFile.load, in a DataLoader worker"
    )
    assert seen_at(view(decoding, other, other), phase="input") == (
        "torchvision/datasets/folder.py:245 in DatasetFolder.__getitem__, in a DataLoader worker"
    )
    only_torch = {**in_phase("input", standard, fetch), "worker": True}
    assert seen_at(view(*[only_torch] * 3), phase="input") == ""


def test_stacks_of_another_phase_say_nothing_of_this_one() -> None:
    seen = view(*[in_phase("input", ITEM, FETCH, *LOOP)] * 4)
    assert seen_at(seen, phase="input") == "Data.__getitem__, train.py:12"
    assert seen_at(seen) == seen_at(seen, phase="eval") == ""


def test_a_rank_that_is_late_in_forward_gets_the_line_that_its_peers_are_not_at() -> None:
    cluster = Cluster(ranks=2, steps=100, faults=(slow_at(1, "forward", 40.0),))
    usual = [in_phase("forward", TORCH, MODEL, TORCH, *LOOP, rank=rank) for rank in (0, 0, 0, 1)]
    slow = [in_phase("forward", SLOW, TORCH, *LOOP, rank=1)] * 4
    first = diagnose(run_of(*usual, *slow, cluster=cluster))[0]
    assert (first.kind, first.ranks, first.evidence["place"]) == (
        "compute_straggler",
        (1,),
        "Net.forward, train.py:20",
    )
    assert " in forward (Net.forward, train.py:20) every step; " in first.title


def test_a_rank_whose_whole_forward_is_slow_gets_no_line() -> None:
    cluster = Cluster(ranks=2, steps=100, faults=(slow_at(1, "forward", 40.0),))
    stacks = [in_phase("forward", TORCH, MODEL, TORCH, *LOOP, rank=rank) for rank in (0, 0, 1, 1, 1)]
    first = diagnose(run_of(*stacks, cluster=cluster))[0]
    assert (first.kind, first.ranks, first.evidence["place"]) == ("compute_straggler", (1,), None)


def test_nor_where_nothing_is_known_of_the_others_forward() -> None:
    """It takes a good part of their steps, and they were not asked."""
    cluster = Cluster(ranks=2, steps=100, faults=(slow_at(1, "forward", 40.0),))
    stacks = [in_phase("forward", TORCH, MODEL, TORCH, *LOOP, rank=1)] * 4
    assert diagnose(run_of(*stacks, cluster=cluster))[0].evidence["place"] is None


def test_a_hook_in_backward_is_named_and_not_the_line_that_calls_backward() -> None:
    hook = ("/scripts/train.py", 27, "clip")
    engine = (f"{PACKAGES}/torch/autograd/graph.py", 979, "_engine_run_backward")
    others = [in_phase("backward", engine, *LOOP)] * 3
    seen = view(*others, *[in_phase("backward", hook, engine, *LOOP, rank=1)] * 3)
    assert seen_at(seen, (1,), phase="backward") == "clip, train.py:27"
    assert seen_at(seen, (0,), phase="backward") == ""


def test_an_evaluation_gets_its_line() -> None:
    steps = range(10, 100, 20)
    cluster = Cluster(ranks=2, steps=100, faults=tuple(slow_at(rank, "eval", 900.0, steps) for rank in (0, 1)))
    stacks = [in_phase("eval", TORCH, HOOK, EVALUATED, SCRIPT, step=step) for step in steps]
    first = diagnose(run_of(*stacks, cluster=cluster))[0]
    assert (first.kind, first.phase) == ("between_steps", "eval")
    assert first.title.endswith(" in 5 of 99 steps, mostly in evaluate, train.py:50.")


def test_an_evaluation_seen_in_the_models_forward_is_no_forward_that_is_called_directly() -> None:
    steps = range(20, 100, 20)
    cluster = Cluster(ranks=2, steps=100, faults=tuple(slow_at(rank, "eval", 900.0, steps) for rank in (0, 1)))
    stacks = [in_phase("eval", MODEL, SCRIPT, step=step) for step in steps]
    first = diagnose(run_of(*stacks, cluster=cluster))[0]
    assert (first.kind, first.phase, first.severity) == ("between_steps", "eval", "critical")


def test_an_evaluation_that_takes_one_rank_far_longer_is_that_ranks() -> None:
    """The others evaluate too, each for a little while: the more there are, the more that is together."""
    steps = range(10, 100, 20)
    faults = [slow_at(rank, "eval", 900.0 if rank == 1 else 120.0, steps) for rank in range(8)]
    first = diagnose(run_of(cluster=Cluster(ranks=8, steps=100, faults=tuple(faults))))[0]
    assert (first.kind, first.phase, first.ranks) == ("between_steps", "eval", (1,))
    faults[2] = slow_at(2, "eval", 200.0, steps)
    first = diagnose(run_of(cluster=Cluster(ranks=8, steps=100, faults=tuple(faults))))[0]
    assert (first.kind, first.phase, first.ranks) == ("between_steps", "eval", ())


def test_a_stall_gets_its_line() -> None:
    report = (f"{PACKAGES}/ray/train/v2/_internal/execution/context.py", 517, "TrainContext.report")
    faults = tuple(slow_at(rank, "other", 2000.0, range(60, 61)) for rank in (0, 1))
    cluster = Cluster(ranks=2, steps=100, faults=faults)
    stacks = [stack(report, SCRIPT, rank=rank, step=60) for rank in (0, 1)]
    elsewhere = [stack(CALLBACK, SCRIPT, step=step) for step in range(10, 20)]
    first = diagnose(run_of(*stacks, *elsewhere, cluster=cluster))[0]
    place = "ray.train.report: ray/train/v2/_internal/execution/context.py:517 in TrainContext.report, from train.py:36"
    assert (first.kind, first.evidence["place"]) == ("stall", place)
    assert first.title.endswith(f", outside model and optimizer (other), mostly in {place}.")
    assert diagnose(run_of(*elsewhere, cluster=cluster))[0].evidence["place"] is None


def test_code_that_a_compiler_made_is_not_the_users() -> None:
    made = [("/tmp/torchinductor_me/ab/cab.py", 90, "call"), ("<eval_with_key>.7", 6, "forward")]
    seen = view(*[in_phase("input", *made, ITEM, FETCH, *LOOP)] * 3)
    assert seen_at(seen, phase="input") == "Data.__getitem__, train.py:12"


def test_a_change_names_the_line_of_the_phase_that_it_is_in() -> None:
    faults = tuple(slow_at(rank, "input", 30.0, range(50, 100)) for rank in (0, 1))
    stacks = [in_phase("input", ITEM, FETCH, *LOOP, rank=rank) for rank in (0, 0, 1, 1)]
    run = run_of(*stacks, cluster=Cluster(ranks=2, steps=100, faults=faults))
    (change,) = (finding for finding in diagnose(run) if finding.severity != "info")
    assert (change.kind, change.evidence["place"]) == ("change_point", "Data.__getitem__, train.py:12")
    assert change.title.endswith("in input, mostly in Data.__getitem__, train.py:12.")
    assert change.advice[0] == "Look at Data.__getitem__, train.py:12: the sampled stacks were there."


def test_a_line_is_named_where_the_others_hardly_ever_are_in_the_phase() -> None:
    """Stacks come in proportion to the time in a phase: ranks that spend a few percent in it have none."""
    cluster = Cluster(ranks=2, steps=100, faults=(slow_at(1, "forward", 100.0),))
    stacks = [in_phase("forward", SLOW, TORCH, *LOOP, rank=1)] * 4
    assert diagnose(run_of(*stacks, cluster=cluster))[0].evidence["place"] == "Net.forward, train.py:20"


def test_a_line_explains_an_excess_that_is_half_of_the_phase() -> None:
    """The rank is at the line half of the time; the other half is what every rank does."""
    cluster = Cluster(ranks=4, steps=100, faults=(slow_at(1, "forward", 12.0),))
    usual = [in_phase("forward", TORCH, MODEL, TORCH, *LOOP, rank=rank) for rank in (0, 2, 3) for _ in range(4)]
    slow = [in_phase("forward", SLOW, TORCH, *LOOP, rank=1)] * 3
    mixed = [in_phase("forward", TORCH, MODEL, TORCH, *LOOP, rank=1)] * 3
    found = diagnose(run_of(*usual, *slow, *mixed, cluster=cluster))[0]
    assert (found.ranks, found.evidence["place"]) == ((1,), "Net.forward, train.py:20")
    few = diagnose(run_of(*usual, *slow[:2], *mixed, *mixed, cluster=cluster))[0]
    assert few.evidence["place"] is None


def test_stalls_at_one_line_are_one_finding() -> None:
    """As where Ray's workers wait for their controller; without stacks each stall is told alone."""
    slow = {40: 900.0, 60: 1400.0}
    faults = [slow_at(rank, "other", ms, range(at, at + 1)) for at, ms in slow.items() for rank in (0, 1)]
    cluster = Cluster(ranks=2, steps=80, faults=tuple(faults))
    apart = diagnose(run_of(cluster=cluster))
    assert [(found.kind, found.steps) for found in apart] == [("stall", (60, 60)), ("stall", (40, 40))]
    stacks = [stack(CALLBACK, EVENT, TRAIN, SCRIPT, step=step, rank=rank) for step in (40, 60) for rank in (0, 0, 1, 1)]
    (found,) = diagnose(run_of(*stacks, cluster=cluster))
    assert (found.kind, found.severity, found.ranks, found.steps) == ("stall", "warning", (), (40, 60))
    assert found.title == (
        "Steps 40 and 60 took 900 ms and 1.40 s longer than usual, outside model and optimizer (other), "
        "mostly in a callback: Plot.on_step_end, train.py:27."
    )
    assert found.evidence["steps_longer"] == [40, 60]
    assert found.evidence["extra_ms"] == pytest.approx(2300, rel=0.02)
    assert found.cost["share"] == pytest.approx(sum(each.cost["share"] for each in apart), abs=2e-4)
    assert found.advice[1] == "It happened 2 times at this line."


def test_a_forward_that_is_called_directly_is_no_logging() -> None:
    """Hooks see calls of modules; ``model.forward(x)`` of a model without inner modules is none."""
    stacks = [stack(("/scripts/train.py", 12, "Layer.forward"), SCRIPT)] * 4
    cluster = Cluster(ranks=1, phases_ms={"backward": 10.0, "other": 20.0})
    first = next(finding for finding in diagnose(run_of(*stacks, cluster=cluster)) if finding.kind == "between_steps")
    assert (first.severity, first.phase) == ("info", "other")
    assert "of the training time is the model's forward, called directly:" in first.title
    assert first.title.endswith("mostly in Layer.forward, train.py:12.")
    assert [line.partition(",")[0] for line in first.advice] == ["Call the model"]
