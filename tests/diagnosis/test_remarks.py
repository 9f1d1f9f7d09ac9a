"""Remarks about settings: what is said in which case, and that nothing is said in all the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import Cluster

from stepscope.diagnosis import build_window, diagnose
from stepscope.diagnosis.engine.settings import remarks_on
from stepscope.diagnosis.rules.memory import PRESSURE_ADVICE
from stepscope.judge.advice import advice_for
from stepscope.reports.finding_text import price_text

LOADER = {
    "batch_size": 32,
    "sampler": "DistributedSampler",
    "distributed_sampler": True,
    "set_epoch_missing": False,
    "length": 10,
    "drop_last": False,
    "last_batch": 32,
    "epochs": 0,
}
DDP = {"find_unused_parameters": False, "static_graph": False, "batchnorm": 0, "tensors": 600}
PEERS = [[0, 4, 1]]


def remarks_of(job: Cluster, *facts: Mapping[str, Any], backend: str = "gloo") -> list[str]:
    """``facts``: by rank; else those of the job."""
    run = job.run()
    ranks = [replace(rank, identity=replace(rank.identity, backend=backend)) for rank in run.ranks]
    if facts:
        ranks = [replace(rank, facts=dict(own)) for rank, own in zip(ranks, facts, strict=True)]
    return remarks_on(build_window(replace(run, ranks=tuple(ranks))))


def job(ranks: int = 4, **parts: Mapping[str, Any]) -> Cluster:
    facts = {"loader": LOADER, "ddp": DDP, "peers": PEERS, **parts}
    return Cluster(ranks=ranks, steps=61, noise=0.0, facts=facts)


def test_nothing_is_said_of_a_job_that_is_set_up_well() -> None:
    assert remarks_of(job()) == []
    assert remarks_of(Cluster()) == []


def test_set_epoch() -> None:
    assert remarks_of(job(loader={**LOADER, "set_epoch_missing": True})) == [
        (
            "DistributedSampler.set_epoch() is not called: every epoch has the same order. "
            "Call it with the epoch number before each epoch."
        )
    ]


# -- BatchNorm --------------------------------------------------------------------------------------------------------


def test_batchnorm_of_few_samples() -> None:
    assert remarks_of(job(loader={**LOADER, "batch_size": 4, "last_batch": 4}, ddp={**DDP, "batchnorm": 53})) == [
        (
            "53 BatchNorm layers under DDP take their statistics from 4 samples each step, those of one rank. It "
            "costs no time, but so few make training noisier: SyncBatchNorm.convert_sync_batchnorm() (on GPUs) takes "
            "all 16, GroupNorm needs none."
        )
    ]
    (line,) = remarks_of(job(loader={**LOADER, "batch_size": 1, "last_batch": 1}, ddp={**DDP, "batchnorm": 1}))
    assert line.startswith("1 BatchNorm layer under DDP takes its statistics from 1 sample each step, ")


@pytest.mark.parametrize(
    "parts",
    [
        {"ddp": {**DDP, "batchnorm": 53}},  # 32 samples are enough
        {"loader": {**LOADER, "batch_size": 16, "last_batch": 16}, "ddp": {**DDP, "batchnorm": 53}},
        {"loader": {**LOADER, "batch_size": None}, "ddp": {**DDP, "batchnorm": 53}},
        {
            "loader": {**LOADER, "batch_size": 4, "last_batch": 4},
            "model": {"batchnorm": 53},
        },  # none of them in training
        {"loader": {**LOADER, "batch_size": 4, "last_batch": 4}, "ddp": {**DDP, "batchnorm": 3}, "peers": [[0, 1, 1]]},
    ],
    ids=["enough", "just-enough", "unknown", "frozen", "one-peer"],
)
def test_batchnorm_that_is_well(parts: dict[str, Any]) -> None:
    assert remarks_of(job(**parts)) == []


# -- find_unused_parameters -------------------------------------------------------------------------------------------

SEARCHING = {**DDP, "find_unused_parameters": True, "iterations": 1000, "unused": "none"}


def test_a_search_for_unused_parameters_that_finds_none() -> None:
    # A step of 39 ms.
    assert remarks_of(job(ddp=SEARCHING)) == [
        (
            "find_unused_parameters=True is not needed: all parameters took part in each of the first 1,000 backward "
            "passes. It costs a walk over the graph (up to 1.50 ms, 4% of the step) and one more all-reduce in every "
            "step: drop it."
        )
    ]


@pytest.mark.parametrize(
    "ddp",
    [
        {**SEARCHING, "unused": "same"},
        {**SEARCHING, "unused": "varying"},
        {**SEARCHING, "iterations": 89},
        {**SEARCHING, "tensors": 100},  # a quarter of a millisecond
        {**SEARCHING, "find_unused_parameters": False},
        {key: value for key, value in SEARCHING.items() if key not in ("iterations", "unused")},
    ],
    ids=["same", "varying", "too-early", "cheap", "off", "unknown"],
)
def test_a_search_that_is_needed_or_cheap(ddp: dict[str, Any]) -> None:
    assert remarks_of(job(ddp=ddp)) == []


def test_a_search_that_one_rank_needs() -> None:
    alike = {"loader": LOADER, "ddp": SEARCHING}
    assert remarks_of(job(), alike, alike, alike, {**alike, "ddp": {**SEARCHING, "unused": "varying"}}) == []
    assert remarks_of(job(), alike, alike, alike, {}) == []


# -- the last batch ---------------------------------------------------------------------------------------------------

SHORT = {**LOADER, "last_batch": 3}


def epochs(loader: Mapping[str, Any], *, every: int = 10, **more: Any) -> Cluster:
    facts = {"loader": loader, "ddp": DDP, "peers": PEERS, "model": {"compiled": "compile_steps" in more}}
    return Cluster(steps=61, noise=0.0, facts=facts, epoch_every=every, epoch_input_ms=0.0, **more)


def test_compiling_for_the_last_batch() -> None:
    assert remarks_of(epochs(SHORT, compile_steps=(9,), compile_ms=2400.0)) == [
        (
            "The last batch of an epoch has 3 samples instead of 32: compiling for that shape took 2.40 s, in step 9. "
            "drop_last=True skips it."
        )
    ]


def test_short_epochs_that_end_in_a_short_batch() -> None:
    assert remarks_of(epochs(SHORT)) == [
        (
            "Every epoch of 10 batches ends with a batch of 3 samples instead of 32, whose step takes 39.0 ms "
            "(39.0 ms for a full batch). drop_last=True or longer epochs save up to 9% of the time."
        )
    ]


@pytest.mark.parametrize(
    "cluster",
    [
        epochs({**LOADER, "drop_last": True, "last_batch": None}),
        epochs(LOADER),
        epochs({**LOADER, "last_batch": None}),
        epochs({**SHORT, "length": 20}),  # two batches a step
        epochs({**LOADER, "last_batch": 30}),
        epochs(SHORT, every=0),  # the first epoch is not over
        epochs(LOADER, compile_steps=(9,), compile_ms=2400.0),
        epochs({**LOADER, "last_batch": 30}, compile_steps=(4,), compile_ms=2400.0),  # not for the last batch
        replace(epochs(SHORT), facts={"loader": SHORT}, ranks=1),
    ],
    ids=[
        "dropped",
        "full",
        "unknown",
        "accumulated",
        "nearly-full",
        "first",
        "compiled-full",
        "compiled-before",
        "one",
    ],
)
def test_last_batches_that_cost_nothing(cluster: Cluster) -> None:
    assert remarks_of(cluster) == []


# -- epochs of different length ---------------------------------------------------------------------------------------


def lengths(*batches: int | None, **more: Any) -> list[dict[str, Any]]:
    return [{"loader": {**LOADER, "length": batch, **more}, "ddp": DDP} for batch in batches]


def test_epochs_of_different_length() -> None:
    assert remarks_of(job(), *lengths(100, 100, 99, 100)) == [
        (
            "Rank 2 has 99 batches per epoch, others up to 100: the others will wait for a collective that never "
            "comes, unless all stop together. Give every rank the same number (DistributedSampler does), or use "
            "torch.distributed.algorithms.Join."
        )
    ]
    assert remarks_of(job(), *lengths(1200, 999, 999, 1100))[0].startswith(
        "Ranks 1 and 2 have 999 batches per epoch, others up to 1,200: "
    )


@pytest.mark.parametrize(
    "facts",
    [
        lengths(100, 100, 100, 100),
        lengths(100, 100, 99, None),
        lengths(100, 100, 50, 100),  # 61 steps went well
        lengths(100, 100, 99, 100, epochs=1),
        [{"loader": {**LOADER, "length": 100 + rank}} for rank in range(4)],  # no collective waits for them
        [{"loader": {**LOADER, "length": 100 + rank, "batch_size": 32 - rank}, "ddp": DDP} for rank in range(4)],
    ],
    ids=["equal", "unknown", "handled", "epochs", "independent", "sizes"],
)
def test_epochs_that_end_together(facts: list[dict[str, Any]]) -> None:
    assert remarks_of(job(), *facts) == []


# -- the end ----------------------------------------------------------------------------------------------------------

OPEN: dict[str, Any] = {"process_group_open": True}
CLOSED: dict[str, Any] = {"process_group_open": False}
ENDING = (
    " exited without torch.distributed.destroy_process_group(): torch warns about it, and NCCL may hang or abort "
    "at exit. Call it at the end of the script."
)


@pytest.mark.parametrize(
    ("facts", "who"),
    [
        ([OPEN] * 4, "All ranks"),
        ([OPEN, CLOSED, CLOSED, OPEN], "Ranks 0 and 3"),
        ([CLOSED, {}, OPEN, CLOSED], "Rank 2"),
    ],
)
def test_a_process_group_that_is_left_open(facts: list[dict[str, Any]], who: str) -> None:
    assert remarks_of(Cluster(), *facts, backend="cpu:gloo,cuda:nccl") == [who + ENDING]


def test_process_groups_that_are_none_the_worse() -> None:
    assert remarks_of(Cluster(), *[OPEN] * 4, backend="gloo") == []
    assert remarks_of(Cluster(), *[CLOSED] * 4, backend="nccl") == []
    assert remarks_of(Cluster(), *[{}] * 4, backend="nccl") == []
    assert remarks_of(Cluster(ranks=1), OPEN, backend="nccl") == ["The process" + ENDING]


def test_a_single_process_is_not_told_to_shard_over_ranks() -> None:
    less_state = "An optimizer with less state (8-bit Adam, Adafactor) also frees memory."
    shard = "Optimizer state and gradients can be sharded over the ranks (FSDP, ZeroRedundancyOptimizer)."
    for several, sharded, second in ((False, False, less_state), (True, False, shard), (True, True, less_state)):
        assert advice_for(PRESSURE_ADVICE, how="", several=several, sharded=sharded)[1] == second


@pytest.mark.parametrize(
    ("frameworks", "begins"),
    [
        ([], 'Put "with stepscope.phase(name):" around parts of what comes after optimizer.step()'),
        (["accelerate"], 'Put "with stepscope.phase(name):" around parts of what comes after optimizer.step()'),
        (["transformers", "accelerate"], "The Trainer runs the loop: put"),
        (["lightning"], "Lightning's Trainer runs the loop: put"),
    ],
)
def test_nobody_is_told_to_change_a_loop_that_is_not_theirs(frameworks: list[str], begins: str) -> None:
    slow = Cluster(
        ranks=1,
        phases_ms={"forward": 10.0, "backward": 20.0, "optimizer": 5.0, "other": 30.0},
        facts={"frameworks": frameworks},
    ).run()
    found = next(finding for finding in diagnose(slow) if finding.phase == "other")
    assert any(line.startswith(begins) for line in found.advice), found.advice


def test_the_gain_of_a_bound_is_an_upper_bound_and_says_so() -> None:
    bound = Cluster(ranks=1, phases_ms={"input": 40.0, "forward": 20.0, "backward": 20.0, "other": 1.0}).run()
    found = diagnose(bound)[0]
    price = price_text(found.cost)
    assert found.kind == "input_bound"
    assert price is not None
    assert price.startswith("at most 49% of the time (")
    assert ", at most 1.9" in price
