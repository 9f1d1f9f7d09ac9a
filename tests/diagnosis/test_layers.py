"""Findings from samples of layers: bad, exploding, vanishing and missing gradients, unequal replicas, slow layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from fakes.cluster import Cluster, slow_at
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_samples import (
    Fault,
    Values,
    frozen,
    joined,
    lost,
    model,
    sampled,
    scaled,
    set_values,
    trail,
    without_learning,
)

from stepscope.diagnosis import diagnose
from stepscope.records.collectives import COMM_ROW, OPS
from stepscope.records.finding import Finding
from stepscope.records.layers import LayerRecords
from stepscope.records.series import RunData

KINDS = (
    "nan_gradients",
    "loss_nan",
    "exploding_gradients",
    "vanishing_gradients",
    "dead_layer",
    "unused_parameters",
    "replica_desync",
)
BLOCKS = tuple(f"layers.{at}.{part}" for at in range(4) for part in ("attention", "mlp"))
NET = model("embed", *BLOCKS, "head")
CLUSTERS = {ranks: Cluster(ranks=ranks, steps=20).run() for ranks in (1, 2, 3, 4)}


def found_in(layers: LayerRecords, *, ranks: int = 4, run: RunData | None = None) -> list[Finding]:
    run = CLUSTERS[ranks] if run is None else run
    return [found for found in diagnose(replace(run, layers=layers)) if found.kind in KINDS]


def noted(run: RunData, losses: dict[int, Any], name: str = "loss") -> RunData:
    pid = run.ranks[0].identity.pid
    events = [
        {"event": "note", "rank": 0, "pid": pid, "step": step, "values": {name: value}, "wall_ns": 1}
        for step, value in losses.items()
    ]
    return replace(run, events=tuple(events))


def at_once(*faults: Fault) -> Fault:
    def fault(rank: int, step: int, values: Values) -> None:
        for part in faults:
            part(rank, step, values)

    return fault


# -- replica_desync ---------------------------------------------------------------------------------------------------


def test_a_flipped_bit_stays_in_its_layer() -> None:
    flip = set_values("layers.2.mlp", since=350, ranks=[2], checksum="flipped")
    (found,) = found_in(sampled(NET, ranks=4, faults=[flip]))
    assert (found.kind, found.severity, found.ranks, found.steps) == ("replica_desync", "critical", (2,), (400, 900))
    assert (
        found.title == "Rank 2 has different weights from its peers in layers.2.mlp from a step between 300 and 400 on."
    )
    evidence = {key: found.evidence[key] for key in ("layer", "layers_differing", "layers_compared", "cause")}
    assert evidence == {"layer": "layers.2.mlp", "layers_differing": 1, "layers_compared": 10, "cause": "local"}
    assert (found.evidence["first_step"], found.evidence["last_equal_step"]) == (400, 300)
    assert found.evidence["equal_ranks"] == [[0, 1, 3], [2]]
    assert "flipped bit" in found.advice[1]
    assert found.cost["share"] == 0


def test_a_step_is_exact_if_the_one_before_was_sampled() -> None:
    flip = set_values("embed", since=17, ranks=[0], checksum="flipped")
    (found,) = found_in(sampled(NET, ranks=3, steps=range(40), faults=[flip]), ranks=3)
    assert found.title == "Rank 0 has different weights from its peers in embed from step 17 on."


def differ_on(*ranks: int, since: int = 0) -> Fault:
    """Other weights in every layer, on each of the ranks for itself."""

    def fault(rank: int, step: int, values: Values) -> None:
        if rank in ranks and step >= since:
            values.checksum = [None if own is None else f"{own} of {rank}" for own in values.checksum]

    return fault


@pytest.mark.parametrize(
    ("since_60", "named"),
    [
        pytest.param(lambda _: 10.0 * 1.001**38, (0, 1), id="rank 0 goes back to the weights of step 25"),
        pytest.param(lambda norm: norm * 2, (0,), id="rank 0 changes its weights"),
    ],
)
def test_of_two_ranks_the_one_that_trains_on_is_not_named(since_60: Any, named: tuple[int, ...]) -> None:
    def fault(rank: int, step: int, values: Values) -> None:
        values.weight_norm = [None if norm is None else 10.0 * 1.001**step for norm in values.weight_norm]
        if rank == 0 and step > 60:
            values.weight_norm = [None if norm is None else since_60(norm) for norm in values.weight_norm]
            values.checksum = [None if own is None else f"{own} of {rank}" for own in values.checksum]

    (found,) = found_in(sampled(NET, ranks=2, steps=(1, 13, 37, 73), faults=[fault]), run=Cluster(ranks=2).run())
    assert (found.kind, found.ranks, found.evidence["last_equal_step"]) == ("replica_desync", named, 37)


def exchanging(every: int, size: int, *, ranks: int = 2, steps: int = 60, **facts: Any) -> RunData:
    """A run with 1,000 parameters that all-reduces ``size`` bytes in every so many steps; 0: never."""
    run = Cluster(ranks=ranks, steps=steps).run()
    rows = np.zeros(len(range(every, steps, every)) if every else 0, np.dtype(COMM_ROW))
    rows["step"], rows["op"], rows["bytes"] = range(every, steps, every) if every else [], OPS.index("all_reduce"), size
    about = {"model": {"parameters": 1000, "dtype": "float32", "class": "Net"}, **facts}
    return replace(run, ranks=tuple(replace(rank, facts=about, comm=rows) for rank in run.ranks))


def test_weights_that_are_averaged_now_and_then_differ_in_between_by_design() -> None:
    """Local SGD: no comparison ever finds them equal, because a step follows each average."""
    layers = sampled(NET, ranks=2, steps=range(11, 60, 13), faults=[differ_on(1)])
    assert found_in(layers, run=exchanging(8, 4000)) == []
    for every, size in ((1, 4000), (8, 40), (50, 4000)):
        assert [finding.kind for finding in found_in(layers, run=exchanging(every, size))] == ["replica_desync"], (
            every,
            size,
        )


def test_averaging_now_and_then_is_longer_by_design() -> None:
    """Local SGD: neither jitter nor a stall, as long as the averages are alike; without the exchange it is."""
    averaging = tuple(slow_at(rank, "comm", 60.0, range(8, 60, 8)) for rank in (0, 1))
    long = Cluster(ranks=2, steps=60, comm_ms=0.0, faults=averaging).run()
    for size, kinds in ((4000, set()), (40, {"jitter"})):
        own = [
            replace(rank, facts=of.facts, comm=of.comm)
            for rank, of in zip(long.ranks, exchanging(8, size).ranks, strict=True)
        ]
        assert {"jitter", "stall"} & {each.kind for each in diagnose(replace(long, ranks=tuple(own)))} == kinds


def test_ranks_that_exchanged_nothing_yet_may_average_later() -> None:
    twice, often = (sampled(NET, ranks=2, steps=steps, faults=[differ_on(1)]) for steps in ((11, 37), (11, 37, 59)))
    assert found_in(twice, run=exchanging(0, 0)) == []
    assert [finding.kind for finding in found_in(often, run=exchanging(0, 0))] == ["replica_desync"]
    assert [finding.kind for finding in found_in(twice, run=exchanging(0, 0, steps=120))] == ["replica_desync"]


SPLIT = {"loader": {"distributed_sampler": True}}


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (exchanging(0, 0, **SPLIT), True),
        (exchanging(10, 4, **SPLIT), True),
        (exchanging(0, 0), False),  # nothing says that they train one model
        (exchanging(20, 4000, **SPLIT), False),  # averaged
        (exchanging(0, 0, **SPLIT, ddp={"bucket_mb": 25.0}), False),
        (exchanging(0, 0, **SPLIT, fsdp={"version": 2}), False),
        (exchanging(0, 0, **SPLIT, frameworks=["deepspeed"]), False),
        (exchanging(0, 0, ranks=1, **SPLIT), False),
    ],
)
def test_ranks_that_split_the_data_must_exchange_something(run: RunData, found: bool) -> None:
    kinds = [finding.kind for finding in diagnose(run)]
    assert ("no_gradient_exchange" in kinds) is found
    assert (kinds[0] == "no_gradient_exchange") is found


def test_a_rank_without_exchange_differs_everywhere() -> None:
    (found,) = found_in(sampled(NET, ranks=4, faults=[differ_on(3, since=500)]))
    assert (
        found.title
        == "Rank 3 has different weights from its peers in all 10 layers from a step between 400 and 500 on."
    )
    assert (found.ranks, found.evidence["cause"], found.evidence["layer"]) == ((3,), "sync", "embed")
    assert "no_sync()" in found.advice[2]


def test_different_from_the_start() -> None:
    (found,) = found_in(sampled(NET, ranks=4, faults=[differ_on(0, 1, 2, 3)]))
    assert (
        found.title
        == "All 4 ranks have different weights in all 10 layers already at step 0, the first that was compared."
    )
    assert (found.ranks, found.evidence["cause"], found.evidence["last_equal_step"]) == ((), "start", None)


def test_of_two_ranks_both_are_named() -> None:
    (found,) = found_in(sampled(NET, ranks=2, faults=[differ_on(1, since=200)]), ranks=2)
    assert found.title == ("Ranks 0 and 1 have different weights in all 10 layers from a step between 100 and 200 on.")
    assert found.ranks == (0, 1)


def test_of_two_ranks_the_one_whose_weights_jumped_is_named() -> None:
    flip = set_values("head", since=200, ranks=[1], checksum="flipped", weight_norm=5e3)
    (found,) = found_in(sampled(NET, ranks=2, faults=[flip]), ranks=2)
    assert found.ranks == (1,)
    assert found.title == "Rank 1 has different weights from the other rank in head from a step between 100 and 200 on."


def test_halves_of_the_job_differ() -> None:
    (found,) = found_in(sampled(NET, ranks=4, faults=[set_values("head", since=1, ranks=[1, 3], checksum="b")]))
    assert found.title == (
        "The weights of ranks 0 and 2 differ from those of ranks 1 and 3 in head from a step between 0 and 100 on."
    )
    assert found.ranks == ()


def test_a_part_that_is_not_exchanged() -> None:
    layers = ("layers.2.attention", "layers.2.mlp", "layers.3.attention", "layers.3.mlp", "head")
    (found,) = found_in(
        sampled(NET, ranks=3, faults=[set_values(*layers, since=600, ranks=[1], checksum="b")]), ranks=3
    )
    assert found.title == (
        "Rank 1 has different weights from its peers in 5 of 10 layers, the first of them layers.2.attention, "
        "from a step between 500 and 600 on."
    )
    assert found.evidence["cause"] == "part"


def test_a_rank_that_skipped_one_step_is_not_just_counted_differently() -> None:
    def skips(rank: int, step: int, values: Values) -> None:
        if rank == 1 and step >= 10:
            sums = [own.partition(".")[0] for own in values.checksum if own]
            older = f"{step - 1}" if step == 10 else f"{step} without 10"
            values.checksum = [None if own is None else f"{sums.pop(0)}.{older}" for own in values.checksum]

    (found,) = found_in(sampled(NET, ranks=3, steps=range(30), faults=[skips]), ranks=3)
    assert (found.ranks, found.evidence["first_step"]) == ((1,), 10)


def test_two_groups_of_replicas_are_compared_among_themselves() -> None:
    def sharded(rank: int, step: int, values: Values) -> None:
        values.group = f"tp={rank % 2}"
        values.checksum = [None if own is None else f"{own} {rank % 2}" for own in values.checksum]

    flip = set_values("head", since=300, ranks=[3], checksum="flipped", weight_norm=99.0)
    (found,) = found_in(sampled(NET, ranks=4, faults=[sharded, flip]))
    assert (found.ranks, found.evidence["group"]) == ((3,), "tp=1")


def test_a_rank_that_is_seldom_sampled_is_not_healed_by_the_others() -> None:
    flip = set_values("head", since=200, ranks=[3], checksum="flipped")

    def seldom(rank: int, step: int, values: Values) -> None:
        values.missing = rank == 3 and step > 400

    (found,) = found_in(sampled(NET, ranks=4, faults=[flip, seldom]))
    assert (found.ranks, found.steps) == ((3,), (200, 400))


# -- nan_gradients ----------------------------------------------------------------------------------------------------


def test_nan_in_backward_of_one_rank() -> None:
    layers = sampled(NET, ranks=4, steps=range(40, 60), faults=[lost("layers.1.mlp", since=50, ranks=[1])])
    (found,) = found_in(layers)
    assert (found.kind, found.severity, found.ranks, found.steps) == ("nan_gradients", "critical", (1,), (50, 59))
    assert found.title == "Gradients and weights became NaN at step 50, first in layers.1.mlp on rank 1, in backward."
    assert (found.evidence["layer"], found.evidence["began_in"], found.evidence["first_step"]) == (
        "layers.1.mlp",
        "backward",
        50,
    )
    assert found.advice[1] == (
        "The gradient was bad when it reached layers.1.mlp: look at what forward() does with its output."
    )


def test_infinite_in_forward_of_all_ranks() -> None:
    fault = lost("layers.2.attention", since=50, forward=True, value=math.inf)
    (found,) = found_in(sampled(NET, ranks=4, steps=range(40, 60), faults=[fault]))
    assert found.title == "Gradients and weights became infinite at step 50, first in layers.2.attention, in forward."
    assert found.ranks == ()


def test_a_sampled_step_that_began_with_numbers_is_exact() -> None:
    """Only then do some ranks, or later layers alone, show it."""
    for fault in (lost("layers.2.mlp", since=300, ranks=[2]), lost("layers.2.mlp", since=300, forward=True)):
        (found,) = found_in(sampled(NET, ranks=4, faults=[fault]))
        assert "at step 300, first in layers.2.mlp" in found.title
        assert found.evidence["layer_good_step"] == 200


def test_no_layer_is_accused_of_weights_that_were_lost_before() -> None:
    fault = lost("layers.2.mlp", since=250, ranks=[2])
    (found,) = found_in(sampled(NET, ranks=4, faults=[fault]))
    assert found.title == "Gradients and weights became NaN between steps 200 and 300."
    assert (found.ranks, found.evidence["layer"], found.severity) == ((), None, "critical")
    assert "--layers every" in found.advice[1]


def test_nor_is_the_layer_that_is_called_first() -> None:
    """It need not be the first in the tree."""
    fault = lost("layers.2.mlp", since=250, ranks=[2], called_first="layers.0.mlp")
    for steps in (range(0, 1000, 100), range(0, 301, 100)):
        (found,) = found_in(sampled(NET, ranks=4, steps=steps, faults=[fault]))
        assert found.title == "Gradients and weights became NaN between steps 200 and 300."


def test_nor_the_last_one_if_nobody_looked_at_forward() -> None:
    def only_backward(rank: int, step: int, values: Values) -> None:
        if values.nonfinite_forward is not None:
            values.nonfinite_forward, values.nonfinite_backward = None, values.at("head")

    faults = [lost("layers.2.mlp", since=250), only_backward]
    (found,) = found_in(sampled(NET, ranks=4, faults=faults))
    assert found.evidence["layer"] is None


def test_the_layer_joins_the_loss() -> None:
    fault = lost("layers.3.mlp", since=49, ranks=[1])
    run = noted(CLUSTERS[4], {step: "nan" if step >= 50 else 2.5 for step in range(60)})
    (found,) = found_in(sampled(NET, ranks=4, steps=range(60), faults=[fault]), run=run)
    assert (found.kind, found.severity, found.ranks, found.steps) == ("loss_nan", "critical", (1,), (50, 59))
    assert found.title == (
        "The loss is NaN from step 50 on; it was 2.5 at step 49; "
        "first in layers.3.mlp on rank 1, in backward, at step 49."
    )
    assert found.evidence["layer"] == "layers.3.mlp"
    assert found.evidence["last_good"] == 2.5
    (unknown,) = found_in(sampled(NET, ranks=4, steps=range(0, 80, 20), faults=[fault]), run=run)
    assert unknown.title == "The loss is NaN from step 50 on; it was 2.5 at step 49."
    assert unknown.evidence["layer"] is None
    late = lost("head", since=55, forward=True)
    (unknown,) = found_in(sampled(NET, ranks=4, steps=range(60), faults=[late]), run=run)
    assert (unknown.kind, unknown.evidence["layer"]) == ("loss_nan", None), "the loss was lost before the layer"


def test_gradients_alone_show_the_layer_of_a_compiled_model() -> None:
    compiled = replace(NET, compiled=True)

    def hooks_are_gone(rank: int, step: int, values: Values) -> None:
        values.nonfinite_forward = values.nonfinite_backward = None
        values.forward_us = [None] * len(values.forward_us)

    faults = [lost("layers.1.mlp", since=50, ranks=[1]), hooks_are_gone]
    (found,) = found_in(sampled(compiled, ranks=4, steps=range(40, 60), faults=faults))
    assert found.title == "Gradients and weights became NaN at step 50, first in layers.1.mlp, in backward."
    (found,) = found_in(sampled(compiled, ranks=4, steps=range(0, 100, 10), faults=faults))
    assert found.title == "Gradients and weights became NaN between steps 40 and 50."


# -- NaN between two samples ------------------------------------------------------------------------------------------


def seen_losses(run: RunData, first_bad: dict[int, int], steps: int = 80) -> RunData:
    """What the recorder saw of the loss of each rank, which is NaN from a step on."""
    events = [
        {
            "event": "seen",
            "rank": rank,
            "pid": run.ranks[rank].identity.pid,
            "step": step,
            "values": {"loss": "nan" if step >= bad else 2.5},
            "wall_ns": 1,
        }
        for rank, bad in first_bad.items()
        for step in range(steps)
    ]
    return replace(run, events=tuple(events))


EVERYTHING = ("embed", *BLOCKS, "head")
UP_TO = EVERYTHING[: EVERYTHING.index("layers.2.mlp") + 1]
"""Those before the layer that has NaN in backward, and itself."""
COMPUTED = (
    "Usual causes: log(0), a division by 0, the gradient of a root at 0, a bad sample, fp16 without a GradScaler."
)


def found_by(trails: list[Any], first_bad: dict[int, int]) -> Finding:
    ranks = len(first_bad)
    layers = sampled(NET, ranks=ranks, steps=(11, 37))
    (found,) = found_in(replace(layers, trails=tuple(trails)), run=seen_losses(CLUSTERS[ranks], first_bad))
    assert (found.kind, found.severity) == ("loss_nan", "critical")
    return found


@pytest.mark.parametrize("clipped", [False, True])
def test_nan_in_backward_between_samples_has_its_step_layer_and_rank(clipped: bool) -> None:
    """Also if it is known of the first rank only by what clipping computed after the exchange."""
    reduced = UP_TO if clipped else None
    trails = [
        trail(NET, 57 if clipped else 58, 0, local=() if clipped else EVERYTHING, reduced=reduced, good=56),
        trail(NET, 57, 1, local=UP_TO, reduced=reduced, good=56),
    ]
    found = found_by(trails, {0: 58, 1: 58})
    assert found.title == (
        "The loss is NaN from step 58 on; it was 2.5 at step 57; "
        "first in layers.2.mlp on rank 1, in backward, at step 57."
    )
    assert (found.ranks, found.evidence["layer"], found.evidence["began_in"]) == ((1,), "layers.2.mlp", "backward")
    assert found.advice[1] == (
        "The gradient was bad when it reached layers.2.mlp: look at what forward() does with its output."
    )
    assert found.advice[-1] == COMPUTED


def test_the_weights_after_it_show_the_layer_if_few_gradients_were_looked_at() -> None:
    trails = [
        trail(NET, 57, 1, own=math.nan, good_some=56),
        trail(NET, 58, 0, own=math.nan, weights=UP_TO, good_some=57),
        trail(NET, 58, 1, own=math.nan, weights=UP_TO),
    ]
    found = found_by(trails, {0: 58, 1: 58})
    assert found.title.endswith("first in layers.2.mlp on rank 1, in backward, at step 57.")
    clipped = [
        replace(entry, weight_norm=(math.nan,) * len(NET.modules)) if entry.step == 58 else entry for entry in trails
    ]
    found = found_by(clipped, {0: 58, 1: 58})
    assert found.title.endswith("it was 2.5 at step 57; first on rank 1, in backward, at step 57.")
    assert found.evidence["layer"] is None


def test_a_few_weights_show_no_layer() -> None:
    """On a GPU the norms of four weights are kept: the layer may be between two of them."""
    last = max(at for at, module in enumerate(NET.modules) if module.elements)
    few = tuple(math.nan if at == 1 else 1.0 if at == last else None for at in range(len(NET.modules)))
    trails = [replace(trail(NET, 58, rank, weights=()), weight_norm=few) for rank in range(2)]
    found = found_by(trails, {0: 58, 1: 58})
    assert found.title == "The loss is NaN from step 58 on; it was 2.5 at step 57; first in backward, at step 57."
    found = found_by([trail(NET, 57, 1, own=math.nan, good_some=56), *trails], {0: 58, 1: 58})
    assert found.title.endswith("it was 2.5 at step 57; first on rank 1, in backward, at step 57.")
    assert found.evidence["layer"] is None


@pytest.mark.parametrize(
    ("known", "bad", "origin"),
    [
        (("embed", "layers.1.attention", "layers.2.attention"), ("embed", "layers.1.attention"), "in layers.1"),
        (("embed", "layers.0.mlp", "layers.2.mlp"), ("embed", "layers.0.mlp"), "in layers.0.mlp to layers.2.attention"),
        (("embed", "layers.0.mlp"), ("embed", "layers.0.mlp"), "in layers.0.mlp to head"),
    ],
)
def test_a_few_gradients_show_between_which_layers_it_began(
    known: tuple[str, ...], bad: tuple[str, ...], origin: str
) -> None:
    few = tuple(math.nan if module.name in bad else 1.0 if module.name in known else None for module in NET.modules)
    found = found_by([replace(trail(NET, 57, 1, good_some=56), local_norm=few), trail(NET, 58, 0)], {0: 58, 1: 58})
    assert found.title.endswith(f"first {origin} on rank 1, in backward, at step 57.")
    assert found.advice[1] == "With --layers every from that checkpoint on, the samples show the layer."


def test_clipping_shows_the_layer_if_few_gradients_show_the_rank() -> None:
    few = tuple(
        math.nan if module.name == "embed" else 1.0 if module.name == "head" else None for module in NET.modules
    )
    trails = [
        replace(trail(NET, 57, 1, reduced=UP_TO, good=56), local_norm=few),
        trail(NET, 57, 0, reduced=UP_TO, good=56),
    ]
    found = found_by(trails, {0: 58, 1: 58})
    assert found.title.endswith("first in layers.2.mlp on rank 1, in backward, at step 57.")


def test_the_weights_alone_show_the_layer_but_no_rank() -> None:
    """Steps are too short for a look at gradients, but the loss was read at once."""
    found = found_by([trail(NET, 58, rank, weights=UP_TO) for rank in range(2)], {0: 58, 1: 58})
    assert found.title.endswith("first in layers.2.mlp, in backward, at step 57.")
    assert found.ranks == ()
    found = found_by([trail(NET, 58, rank, weights=EVERYTHING) for rank in range(2)], {0: 58, 1: 58})
    assert found.title == "The loss is NaN from step 58 on; it was 2.5 at step 57."


def test_nan_in_forward_between_samples() -> None:
    trails = [
        trail(NET, 57, 1, local=EVERYTHING, weights=(), good=56, forward="layers.1.mlp"),
        trail(NET, 58, 0, local=EVERYTHING, weights=EVERYTHING, good=57),
    ]
    found = found_by(trails, {0: 58, 1: 57})
    assert found.title == (
        "The loss of rank 1 is NaN from step 57 on, and that of the others from step 58; it was 2.5 at step 56; "
        "first in layers.1.mlp on rank 1, in forward, at step 57."
    )
    assert found.ranks == (1,)
    assert found.advice[-1] == COMPUTED
    (unknown,) = [replace(entry, nonfinite_forward=None) for entry in trails[:1]]
    found = found_by([unknown, trails[1]], {0: 58, 1: 57})
    assert found.title.endswith("; first on rank 1, in forward, at step 57.")


@pytest.mark.parametrize("some", [False, True])
def test_nan_that_the_update_put_into_the_weights(some: bool) -> None:
    good = {"good_some": 57} if some else {"good": 57}
    trails = [trail(NET, 58, rank, local=EVERYTHING, weights=EVERYTHING, **good) for rank in range(2)]  # type: ignore[arg-type]
    found = found_by(trails, {0: 58, 1: 58})
    assert found.title == (
        "The loss is NaN from step 58 on; it was 2.5 at step 57; "
        "the update of step 57 made the weights NaN, its gradients were finite."
    )
    assert (found.ranks, found.evidence["began_in"], found.evidence["layer"]) == ((), "update", None)
    assert found.advice[1].startswith("Its gradients were finite: check the learning rate of that step")
    assert not any(COMPUTED in line for line in found.advice)


def test_a_sampled_update_that_spoils_the_weights() -> None:
    def spoiled(rank: int, step: int, values: Values) -> None:
        if step >= 50:
            values.weight_norm = [None if own is None else math.nan for own in values.weight_norm]
        if step > 50:
            values.grad_norm = [None if own is None else math.nan for own in values.grad_norm]
            values.nonfinite_forward = values.at("embed")

    (found,) = found_in(sampled(NET, ranks=4, steps=range(40, 60), faults=[spoiled]))
    assert found.title == "The update of step 50 made the weights NaN, its gradients were finite."
    assert found.evidence["began_in"] == "update"


def test_nan_that_passed_before_is_not_the_origin() -> None:
    trails = [
        trail(NET, 30, 0, local=("head",), good=29),
        trail(NET, 57, 1, local=UP_TO, good=56),
        trail(NET, 57, 0, local=UP_TO, good=56),
    ]
    found = found_by(trails, {0: 58, 1: 58})
    assert found.title.endswith("first in layers.2.mlp, in backward, at step 57.")
    healthy = replace(sampled(NET, ranks=2, steps=(11, 37)), trails=tuple(trails))
    assert found_in(healthy, run=seen_losses(CLUSTERS[2], {0: 80, 1: 80})) == []


def test_a_loss_that_was_lost_before_any_norm_is_the_first_sign() -> None:
    found = found_by([trail(NET, 60, rank, local=EVERYTHING, good=40) for rank in range(2)], {0: 58, 1: 58})
    assert found.title == "The loss is NaN from step 58 on; it was 2.5 at step 57."
    assert found.evidence["first_step"] == 58


def skipped_since(step_from: int, step_to: int = 1 << 40, *, forward: str = "") -> Fault:
    def fault(rank: int, step: int, values: Values) -> None:
        if step_from <= step < step_to:
            values.grad_norm = [None if own is None else math.inf for own in values.grad_norm]
            values.skipped = True
            values.nonfinite_backward = values.at("head")
            if forward:
                values.nonfinite_forward = values.at(forward)

    return fault


def test_a_scaler_that_skips_every_step() -> None:
    (found,) = found_in(sampled(NET, ranks=4, faults=[skipped_since(300, forward="layers.1.mlp")]))
    assert (found.kind, found.severity, found.steps) == ("nan_gradients", "warning", (300, 900))
    assert found.title == (
        "No update was applied in the last 7 sampled steps, from step 300 on: gradients are infinite, "
        "first in layers.1.mlp, in forward."
    )


def test_one_of_two_models_is_named() -> None:
    generator, critic = model("net.0", "net.1", kind="Generator"), model("net.0", "net.1", "net.2", kind="Critic")
    fault = lost("net.1", since=300, forward=True)
    layers = joined(sampled(generator, ranks=2), sampled(critic, ranks=2, faults=[fault]))
    (found,) = found_in(layers, ranks=2)
    assert found.title == "Gradients and weights became NaN at step 300, first in net.1 of Critic, in forward."


# -- exploding_gradients ----------------------------------------------------------------------------------------------

LONG = range(0, 3000, 100)


def test_exploding_gradients() -> None:
    faults = [scaled(lambda step: 1.0 if step < 2000 else 1e4)]
    (found,) = found_in(sampled(NET, ranks=2, steps=LONG, faults=faults), ranks=2)
    assert (found.kind, found.severity, found.ranks, found.steps) == (
        "exploding_gradients",
        "warning",
        (),
        (2000, 2900),
    )
    assert found.evidence["layer"] is None
    before, after = found.evidence["before"], found.evidence["after"]
    times = f"{after / before:,.0f}"
    assert found.title == (
        f"The norm of the gradients is {times} times what it was: {after:.3g} instead of {before:.3g} "
        "from step 2,000 on."
    )
    assert 8000 < after / before < 12500


def test_an_explosion_that_grows_step_by_step() -> None:
    grows = scaled(lambda step: 2.0 ** max(0, (step - 1500) / 100))
    (found,) = found_in(sampled(NET, ranks=2, steps=LONG, faults=[grows]), ranks=2)
    assert found.evidence["first_step"] in range(2100, 2400)


def test_the_layer_that_explodes_is_named() -> None:
    faults = [
        scaled(lambda _: 0.01, "layers.1.mlp"),
        scaled(lambda step: 1.0 if step < 2000 else 1e4, "layers.1.mlp"),
    ]
    (found,) = found_in(sampled(NET, ranks=2, steps=LONG, faults=faults), ranks=2)
    assert found.title.startswith("The norm of the gradients of layers.1.mlp is ")
    assert (found.evidence["layer"], found.evidence["first_step"]) == ("layers.1.mlp", 2000)


def test_a_loss_that_still_falls_clears_large_gradients() -> None:
    layers = sampled(NET, ranks=2, steps=LONG, faults=[scaled(lambda step: 1.0 if step < 2000 else 1e4)])
    falling = noted(CLUSTERS[2], {step: 9.0 - step / 1000 for step in range(0, 3000, 10)})
    assert found_in(layers, ranks=2, run=falling) == []
    rising = noted(CLUSTERS[2], {step: 1.0 + (step >= 2000) * 1.0 + step % 7 / 1000 for step in range(0, 3000, 10)})
    (found,) = found_in(layers, ranks=2, run=rising)
    assert found.kind == "exploding_gradients"
    assert found.title.endswith("; the loss jumped from 1.003 to 2.003 at step 2,000.")


# -- vanishing_gradients ----------------------------------------------------------------------------------------------


def deep(decay: float, layers: int = 20) -> tuple[Any, Fault]:
    """Each layer passes on a part of the gradient."""
    tree = model(*(f"net.{at}" for at in range(layers)))

    def fault(rank: int, step: int, values: Values) -> None:
        for at in range(layers):
            place = values.at(f"net.{at}")
            values.grad_norm[place] = (values.grad_norm[place] or 0.0) * decay ** (layers - 1 - at)

    return tree, fault


def test_vanishing_gradients() -> None:
    tree, fault = deep(0.25)
    (found,) = found_in(sampled(tree, ranks=2, faults=[fault]), ranks=2)
    assert (found.kind, found.severity, found.ranks, found.steps) == ("vanishing_gradients", "warning", (), (100, 900))
    assert (found.evidence["layer"], found.evidence["last_layer"], found.evidence["layers"]) == ("net.0", "net.4", 5)
    assert found.title.startswith("Gradients vanish before they reach the first 5 layers (net.0 to net.4): ")


@pytest.mark.parametrize("decay", [0.9, 0.7, 0.5])
def test_gradients_that_become_smaller_from_layer_to_layer_do_not_vanish(decay: float) -> None:
    tree, fault = deep(decay)
    assert found_in(sampled(tree, ranks=2, faults=[fault]), ranks=2) == []


# -- dead_layer, unused_parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 1e-8, 1e-5, 1e-4])
@pytest.mark.parametrize("steps", [range(0, 1000, 100), range(40)])
def test_a_layer_whose_gradient_is_always_zero(decay: float, steps: range) -> None:
    (found,) = found_in(
        sampled(NET, ranks=2, steps=steps, faults=[without_learning("layers.1.mlp", decay=decay)]), ranks=2
    )
    assert (found.kind, found.severity, found.ranks) == ("dead_layer", "warning", ())
    count = sum(1 for step in steps if step >= 5)
    assert found.title == (
        f"Layer layers.1.mlp gets a gradient of exactly zero in all {count} sampled steps: "
        "1,024 parameters never learn."
    )
    assert found.evidence["layer"] == "layers.1.mlp"


def test_all_layers_before_a_detach() -> None:
    dead = [without_learning(name) for name in ("embed", *BLOCKS[:4])]
    (found,) = found_in(sampled(NET, ranks=2, faults=dead), ranks=2)
    assert found.title == (
        "3 layers (embed, layers.0 and layers.1) get a gradient of exactly zero in all 9 sampled steps: "
        "5,120 parameters never learn."
    )
    assert found.evidence["layers"] == ["embed", "layers.0", "layers.1"]


def test_parameters_that_never_get_a_gradient_are_a_remark() -> None:
    run = CLUSTERS[2]
    layers = sampled(NET, ranks=2, faults=[frozen("layers.0.mlp"), frozen("head")])
    findings = diagnose(replace(run, layers=layers))
    assert findings[0].kind == "healthy"
    (found,) = [finding for finding in findings if finding.kind in KINDS]
    assert (found.kind, found.severity) == ("unused_parameters", "info")
    assert found.title == (
        "2,048 trainable parameters never got a gradient in 9 sampled steps: those of layers.0.mlp and head."
    )


def test_a_layer_that_is_dead_on_all_shards() -> None:
    def shards(*dead: int) -> LayerRecords:
        parts = []
        for rank in range(3):
            tree = model("embed", *BLOCKS, "head", identity=f"shard {rank}", replicated=False)
            faults = [without_learning("embed")] if rank in dead else []
            parts.append(sampled(tree, ranks=[rank], faults=[*faults, set_values("head", checksum=None)]))
        return joined(*parts)

    (found,) = found_in(shards(0, 1, 2), ranks=3)
    assert (found.kind, found.evidence["layer"], found.evidence["parameters"]) == ("dead_layer", "embed", 3072)
    assert found_in(shards(0, 1), ranks=3) == []


# -- healthy runs -----------------------------------------------------------------------------------------------------

GENERATOR, CRITIC = model("net.0", "net.1", kind="Generator"), model("net.0", "net.1", kind="Critic", identity="critic")
EXPERTS = tuple(f"moe.experts.{at}" for at in range(8))
BRANCHES = tuple(f"block.branches.{at}.ffn" for at in range(8))
SPARSE = model("embed", "gate", *EXPERTS, "head")
UNNAMED = model("embed", "gate", *BRANCHES, "head")
LORA = model("base.0", "lora_A.0", "lora_B.0", "base.1", "lora_A.1", "lora_B.1", frozen=("base.0", "base.1"))


def idle(names: tuple[str, ...], *, always: tuple[str, ...] = (), missing: bool = False) -> Fault:
    """Each expert gets tokens in some steps only, and some of them in none of those that are sampled."""

    def fault(rank: int, step: int, values: Values) -> None:
        for at, name in enumerate(names):
            if name in always or (step // 100 + at) % 3 == 0:
                values.grad_norm[values.at(name)] = None if missing else 0.0

    return fault


def alternating(*names: str, value: float | None) -> Fault:
    """Trained in the steps that are not sampled."""
    return set_values(*names, grad_norm=value, update_ratio=0.0)


def warm_up(rank: int, step: int, values: Values) -> None:
    scaled(lambda at: 0.02 + min(at, 1000) / 1000)(rank, step, values)


def missing_at(rank: int, step: int, values: Values) -> None:
    values.missing = rank == 2 and step % 200 == 0


def infinite_masks(rank: int, step: int, values: Values) -> None:
    values.nonfinite_forward = values.at("layers.0.attention")


def own_scaler(rank: int, step: int, values: Values) -> None:
    """As DeepSpeed does it: nothing says that the step was skipped."""
    if step in (0, 100, 900):
        values.grad_norm = [None if own is None else math.inf for own in values.grad_norm]
        values.nonfinite_backward = values.at("head")


def averaged(rank: int, step: int, values: Values) -> None:
    """Local SGD: the replicas differ, and are averaged every 400 steps."""
    if step % 400:
        differ_on(*range(4))(rank, step, values)


def lora_starts(rank: int, step: int, values: Values) -> None:
    if step < 2:
        set_values("lora_A.0", "lora_A.1", grad_norm=0.0)(rank, step, values)


def zero_gates(rank: int, step: int, values: Values) -> None:
    """Closed at first: the gradients behind them begin at next to nothing and grow."""
    scaled(lambda at: 1e-12 * 1.5**at, "embed", *BLOCKS[:4])(rank, step, values)


def tensor_parallel(rank: int, step: int, values: Values) -> None:
    values.group = f"tp={rank % 2}"
    values.checksum = [None if own is None else f"{own} {rank % 2}" for own in values.checksum]


def independent(rank: int, step: int, values: Values) -> None:
    differ_on(*range(4))(rank, step, values)


def spiky(rank: int, step: int, values: Values) -> None:
    scaled(lambda at: 1e4 if at % 700 == 0 else 1.0)(rank, step, values)


def shifted(rank: int, step: int, values: Values) -> None:
    """A rank that counts one step more."""
    if rank == 1:
        values.checksum = [None if own is None else f"{own.partition('.')[0]}.{step + 1}" for own in values.checksum]


HEALTHY: dict[str, Callable[[], LayerRecords]] = {
    "nothing sampled": lambda: LayerRecords(models={}, samples=()),
    "one sample": lambda: sampled(NET, ranks=4, steps=[0]),
    "plain": lambda: sampled(NET, ranks=4, steps=LONG),
    "every step": lambda: sampled(NET, ranks=4, steps=range(300)),
    "skipped steps of mixed precision": lambda: sampled(
        NET, ranks=4, faults=[skipped_since(0, 300), skipped_since(900)]
    ),
    "a scaler that begins too high": lambda: sampled(NET, ranks=4, steps=range(20), faults=[skipped_since(0)]),
    "a scaler of its own": lambda: sampled(NET, ranks=4, faults=[own_scaler]),
    "masks that are infinite": lambda: sampled(NET, ranks=4, faults=[infinite_masks]),
    "masks that are infinite, and a skipped step": lambda: sampled(
        NET, ranks=4, faults=[skipped_since(900), infinite_masks]
    ),
    "a GAN of two models": lambda: joined(
        sampled(GENERATOR, ranks=4), sampled(CRITIC, ranks=4, faults=[scaled(lambda step: 1.0 + step / 100)])
    ),
    "a GAN in one module, zero gradients": lambda: sampled(
        NET, ranks=4, faults=[alternating("embed", *BLOCKS[:4], value=0.0)]
    ),
    "a GAN in one module, no gradients": lambda: sampled(
        NET, ranks=4, faults=[alternating("embed", *BLOCKS[:4], value=None)]
    ),
    "frozen layers": lambda: sampled(
        model("embed", *BLOCKS, "head", frozen=("embed", *BLOCKS[:6])),
        ranks=4,
    ),
    "idle experts": lambda: sampled(SPARSE, ranks=4, faults=[idle(EXPERTS, always=EXPERTS[3:4])]),
    "idle experts without gradients": lambda: sampled(
        SPARSE, ranks=4, faults=[idle(EXPERTS, always=EXPERTS[3:4], missing=True)]
    ),
    "idle branches of another name": lambda: sampled(
        UNNAMED, ranks=4, faults=[idle(BRANCHES, always=BRANCHES[3:4]), set_values(BRANCHES[3], checksum="same")]
    ),
    "experts that each rank has for itself": lambda: sampled(
        SPARSE, ranks=4, faults=[set_values(*EXPERTS, ranks=[rank], checksum=f"{rank}") for rank in range(4)]
    ),
    "adapters that each rank has for itself": lambda: sampled(
        NET, ranks=4, faults=[set_values("head", ranks=[rank], checksum=f"{rank}") for rank in range(4)]
    ),
    "norms that grow in the warm-up": lambda: sampled(NET, ranks=4, steps=LONG, faults=[warm_up]),
    "norms that fall": lambda: sampled(NET, ranks=4, steps=LONG, faults=[scaled(lambda step: 100.0 / (1 + step))]),
    "a step in the norms": lambda: sampled(
        NET, ranks=4, steps=LONG, faults=[scaled(lambda step: 1 + 49.0 * (step > 1500))]
    ),
    "single large norms": lambda: sampled(NET, ranks=4, steps=LONG, faults=[spiky]),
    "small, then large as at the start": lambda: sampled(
        NET, ranks=4, steps=LONG, faults=[scaled(lambda step: 1e-5 if 300 < step < 2000 else 1.0)]
    ),
    "LoRA": lambda: sampled(LORA, ranks=4, steps=range(40), faults=[lora_starts]),
    "gates that begin closed": lambda: sampled(NET, ranks=4, steps=range(60), faults=[zero_gates]),
    "FSDP": lambda: sampled(replace(NET, replicated=False), ranks=4, faults=[independent]),
    "tensor parallelism": lambda: sampled(NET, ranks=4, faults=[tensor_parallel]),
    "embeddings with mostly zero gradients": lambda: sampled(
        NET, ranks=4, faults=[set_values("embed", zero_share=0.999, grad_norm=1e-4, update_ratio=1e-6)]
    ),
    "a tiny learning rate": lambda: sampled(
        NET, ranks=4, faults=[set_values("embed", *BLOCKS, "head", update_ratio=1e-9, weight_norm=10.0)]
    ),
    "a rank without some samples": lambda: sampled(NET, ranks=4, faults=[missing_at]),
    "other steps on each rank": lambda: joined(
        *(sampled(NET, ranks=[rank], steps=[*range(0, 900, 100), 901 + rank]) for rank in range(4))
    ),
    "an attempt that failed before": lambda: joined(
        sampled(NET, ranks=4, faults=[lost("head", since=300), differ_on(1)], attempt=0),
        sampled(NET, ranks=4, attempt=1),
    ),
    "local SGD": lambda: sampled(NET, ranks=4, steps=range(0, 1700, 100), faults=[averaged]),
    "a rank that counts its steps differently": lambda: sampled(NET, ranks=4, steps=range(60), faults=[shifted]),
    "no checksums": lambda: sampled(NET, ranks=4, faults=[set_values("embed", *BLOCKS, "head", checksum=None)]),
    "weights on some ranks not yet known": lambda: sampled(
        NET, ranks=4, faults=[set_values(*BLOCKS, ranks=[1], checksum=None, weight_norm=None)]
    ),
    "a teacher that follows its student without checksums": lambda: sampled(
        NET,
        ranks=1,
        faults=[set_values("embed", *BLOCKS[:4], grad_norm=None, update_ratio=1e-7, checksum=None, weight_norm=10.0)],
    ),
    "one optimizer with momentum for two losses in turn": lambda: sampled(
        NET,
        ranks=1,
        steps=LONG,
        faults=[
            set_values("embed", *BLOCKS[:4], grad_norm=0.0, update_ratio=1e-6),
            set_values(*BLOCKS[4:], "head", update_ratio=1e-6),
        ],
    ),
    "a teacher that follows its student": lambda: sampled(
        NET, ranks=4, faults=[set_values("embed", *BLOCKS[:4], grad_norm=None, update_ratio=None)]
    ),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("variant", HEALTHY)
def test_healthy_runs_raise_nothing(variant: str) -> None:
    run = CLUSTERS[4]
    if variant == "an attempt that failed before":
        run = Cluster(ranks=4, steps=20, attempt=1).run()
    assert [found.title for found in found_in(HEALTHY[variant](), run=run)] == []


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_healthy_runs_drawn_at_random_raise_nothing(data: st.DataObject) -> None:
    names = data.draw(
        st.lists(st.from_regex(r"[a-c](\.[0-3]){0,2}", fullmatch=True), min_size=1, max_size=12, unique=True)
    )
    names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    frozen_names = data.draw(st.sets(st.sampled_from(names)))
    tree = model(*names, frozen=frozen_names, replicated=data.draw(st.booleans()))
    every = data.draw(st.sampled_from([1, 10, 100]))
    steps = range(0, every * data.draw(st.integers(1, 40)), every)
    ups = {name: data.draw(st.floats(1e-3, 1e3)) for name in names}
    absent = data.draw(st.sets(st.tuples(st.integers(0, 3), st.sampled_from(steps)), max_size=5))
    overflows = data.draw(st.sets(st.sampled_from(steps), max_size=3))

    def noise(rank: int, step: int, values: Values) -> None:
        for name, factor in ups.items():
            own = values.grad_norm[values.at(name)]
            values.grad_norm[values.at(name)] = None if own is None else own * factor
        if step in overflows and every > 1:
            values.skipped = True
            values.grad_norm = [None if own is None else math.inf for own in values.grad_norm]
        values.missing = (rank, step) in absent

    layers = sampled(tree, ranks=4, steps=steps, faults=[noise], seed=data.draw(st.integers(0, 9)))
    assert [found.title for found in found_in(layers)] == []


# -- properties -------------------------------------------------------------------------------------------------------


def permuted(layers: LayerRecords, order: list[int]) -> LayerRecords:
    samples = [replace(sample, rank=order[sample.rank]) for sample in layers.samples]
    samples.sort(key=lambda sample: (sample.attempt, sample.step, sample.rank))
    return LayerRecords(models=layers.models, samples=tuple(samples))


@settings(max_examples=examples(60), deadline=None)
@given(
    order=st.permutations(range(4)),
    ranks=st.sets(st.integers(0, 3), min_size=1, max_size=4),
    name=st.sampled_from(["embed", "layers.1.mlp", "head"]),
    kind=st.sampled_from(["flip", "sync", "nan", "forward"]),
    every=st.sampled_from([1, 100]),
)
def test_permuted_ranks_permute_the_verdict(
    order: list[int], ranks: set[int], name: str, kind: str, every: int
) -> None:
    since = 5 * every
    fault = {
        "flip": set_values(name, since=since, ranks=ranks, checksum="flipped"),
        "sync": differ_on(*ranks, since=since),
        "nan": lost(name, since=since, ranks=ranks),
        "forward": lost(name, since=since, ranks=ranks, forward=True),
    }[kind]
    layers = sampled(NET, ranks=4, steps=range(0, 10 * every, every), faults=[fault])
    before, after = found_in(layers), found_in(permuted(layers, list(order)))
    assert [finding.kind for finding in before] == [finding.kind for finding in after]
    for entry, other in zip(before, after, strict=True):
        assert sorted(order[rank] for rank in entry.ranks) == sorted(other.ranks)
        assert (entry.steps, entry.severity, entry.evidence["layer"]) == (
            other.steps,
            other.severity,
            other.evidence["layer"],
        )


# -- slow layers ------------------------------------------------------------------------------------------------------


def slow_run(steps: int = 400, **cluster: Any) -> RunData:
    return Cluster(ranks=4, steps=steps, faults=(slow_at(3, "forward", 10.0),), **cluster).run()


def slow_forward(name: str, ms: float, *, rank: int = 3) -> Fault:
    """It takes longer, and so do the modules that contain it."""

    def fault(own: int, step: int, values: Values) -> None:
        if own != rank:
            return
        for part in {"", *(".".join(name.split(".")[:depth]) for depth in range(1, 1 + len(name.split("."))))}:
            values.forward_us[values.at(part)] = (values.forward_us[values.at(part)] or 0.0) + ms * 1e3

    return fault


def straggler(run: RunData, layers: LayerRecords) -> Finding:
    (found,) = [finding for finding in diagnose(replace(run, layers=layers)) if finding.kind == "compute_straggler"]
    return found


def test_a_slow_rank_loses_its_time_in_a_layer() -> None:
    run = slow_run()
    layers = sampled(NET, ranks=4, steps=range(0, 400, 100), faults=[slow_forward("layers.3.mlp", 10.1)])
    found = straggler(run, layers)
    assert found.ranks == (3,)
    assert (
        " slower than its peers in forward, mostly in layers.3.mlp (11.1 ms instead of 1.00 ms), every step; "
        in found.title
    )
    evidence = {key: found.evidence[key] for key in ("layer", "layer_ms", "layer_peers_ms", "layer_steps")}
    assert evidence == {"layer": "layers.3.mlp", "layer_ms": 11.1, "layer_peers_ms": 1.0, "layer_steps": 3}
    assert found.advice[0].startswith("Compare what layers.3.mlp does on rank 3: ")


def test_in_backward_it_may_be_a_function_between_layers() -> None:
    """Those of autograd count as part of the layer before them."""
    run = Cluster(ranks=4, steps=400, faults=(slow_at(3, "backward", 10.0),)).run()

    def fault(rank: int, step: int, values: Values) -> None:
        at = values.at("layers.3.mlp")
        values.backward_us[at] = (values.backward_us[at] or 0.0) + 10.1e3 * (rank == 3)

    found = straggler(run, sampled(NET, ranks=4, steps=range(0, 400, 100), faults=[fault]))
    assert " slower than its peers in backward, mostly in or right after layers.3.mlp (" in found.title
    assert found.advice[0].startswith("Compare what layers.3.mlp does on rank 3, and what runs after it in backward: ")


def test_a_layer_with_half_of_the_time_is_not_said_to_have_most_of_it() -> None:
    numbered = model("0", "1", "2")  # the names in an nn.Sequential
    faults = [slow_forward("0", 5.2), slow_forward("1", 4.9)]
    found = straggler(slow_run(), sampled(numbered, ranks=4, steps=range(0, 400, 100), faults=faults))
    assert " in forward, 51% of it in layer 0 (6.20 ms instead of 1.00 ms), every step; " in found.title
    assert found.advice[0].startswith("Compare what layer 0 does on rank 3: ")


def test_a_list_of_modules_which_nothing_calls_hides_no_layer() -> None:
    faults = [slow_forward("layers.3.mlp", 10.1), set_values("layers", forward_us=None)]
    found = straggler(slow_run(), sampled(NET, ranks=4, steps=range(0, 400, 100), faults=faults))
    assert found.evidence["layer"] == "layers.3.mlp"


def test_no_layer_is_named_that_does_not_explain_the_time() -> None:
    run = slow_run()
    plain = straggler(run, LayerRecords(models={}, samples=()))
    steps = range(0, 400, 100)
    spread = [slow_forward(name, 1.0) for name in (*BLOCKS, "head")]
    device = set_clock("device")
    for faults in (
        [],
        spread,
        [slow_forward("head", 4.0)],
        [slow_forward("head", 10.0, rank=1)],
        [slow_forward("head", 10.0), device],
    ):
        found = straggler(run, sampled(NET, ranks=4, steps=steps, faults=faults))
        assert (found.title, found.evidence.get("layer")) == (plain.title, None)
    only_one = sampled(NET, ranks=4, steps=[0, 100], faults=[slow_forward("head", 10.0)])
    assert straggler(run, only_one).title == plain.title


def set_clock(clock: str) -> Fault:
    def fault(rank: int, step: int, values: Values) -> None:
        values.clock = clock

    return fault
