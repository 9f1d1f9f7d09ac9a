"""The verdict on a node from its figures, its past and its peers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from example_counts import seeds

from stepscope.node_check import judge

FIGURES = {"processor": 1.5, "memory": 12.0, "disk_write": 0.8}


def result(host: str = "n1", state: str = "fit", **changes: Any) -> dict[str, Any]:
    figures = FIGURES | changes.pop("figures", {})
    calm = {"waited": 0.0, "throttled": 0.0, "stopped": 0.0, "stolen": 0.0, "others": 0.01}
    return {"version": 1, "host": host, "kind": "CPU, 8 cores", "state": state, "figures": figures, **calm, **changes}


PAST = [result() for _ in range(6)]
PEERS = [result(f"n{number}") for number in range(2, 6)]


def test_a_node_like_its_past_and_peers_is_fit() -> None:
    verdict = judge(result(), PAST, PEERS)
    assert (verdict.state, verdict.title, verdict.reasons) == ("fit", "n1 is fit.", ())


def test_the_first_check_has_nothing_to_compare_with() -> None:
    verdict = judge(result(figures={"memory": 0.1}), PAST[:4], PEERS[:2])
    assert verdict.title == "n1 is fit so far; there is too little to compare it with."
    assert [row.usual for row in verdict.rows] == [None, None, None]


def test_what_is_below_the_past_is_named_with_how_much() -> None:
    verdict = judge(result(figures={"memory": 6.0}), PAST, [])
    assert verdict.state == "unfit"
    assert verdict.title == "n1 is unfit: copies in memory: 6 GB/s, 50% below its past (6 checks) (12 GB/s)."
    assert verdict.to_dict()["compared"][1] == {
        "name": "memory",
        "value": 6.0,
        "usual": 12.0,
        "against": "its past (6 checks)",
        "low": True,
    }


def test_what_was_always_low_shows_beside_peers() -> None:
    slow = [result(figures={"processor": 0.9}) for _ in range(6)]
    verdict = judge(result(figures={"processor": 0.9}), slow, PEERS)
    assert verdict.title == "n1 is unfit: speed of a core: 0.9 GB/s, 40% below 4 peers (1.5 GB/s)."


def test_nodes_of_another_kind_and_unfit_results_are_no_reference() -> None:
    slow = result(figures={"memory": 6.0})
    other = [{**each, "kind": "CPU, 64 cores"} for each in PEERS]
    assert judge(slow, [{**each, "state": "unfit"} for each in PAST], other).state == "fit"
    assert judge(slow, [{**each, "host": "n9"} for each in PAST], []).state == "fit"


def test_figures_that_scatter_need_a_larger_difference() -> None:
    past = [result(figures={"memory": value}) for value in (8.0, 10.0, 12.0, 14.0, 16.0, 18.0)]
    assert judge(result(figures={"memory": 6.0}), past, []).state == "fit"


def test_a_busy_node_is_not_accused() -> None:
    low = {"figures": {"memory": 6.0}}
    verdict = judge(result(**low, others=0.3), PAST, PEERS)
    busy = "n1 is busy with other programs (they use 30% of its processors)"
    assert (verdict.state, verdict.title) == ("busy", f"{busy}; whether it is fit cannot be decided.")
    assert judge(result(**low, waited=0.2), PAST, PEERS).state == "busy"
    calm = judge(result(others=0.3), PAST, PEERS)
    assert calm.title == f"{busy}; no fault was found."


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"throttled": 0.4, "cpu_quota": 0.5}, "its CPU quota of 0.5 CPUs is used up 40% of the time"),
        ({"stopped": 0.4}, "processes are stopped 40% of the time"),
        ({"stolen": 0.3, "stopped": 0.3}, "the hypervisor takes 30% of the processors' time"),
    ],
)
def test_a_node_that_keeps_processes_from_running_is_unfit_at_once(changes: dict[str, Any], reason: str) -> None:
    for others in (0.0, 0.8):
        verdict = judge(result(**changes, others=others), [], [])
        assert (verdict.state, verdict.title) == ("unfit", f"n1 is unfit: {reason}.")


@pytest.mark.seeds
def test_healthy_nodes_pass() -> None:
    """Rates that scatter by 4%, and a disk by 12%, beside 30 results of the past and 20 peers."""
    wrong = 0
    for seed in seeds(8):
        random = np.random.default_rng(seed)
        made = [
            result(
                f"n{node}",
                figures={
                    "processor": 1.5 * random.normal(1, 0.04),
                    "memory": 12 * random.normal(1, 0.04),
                    "disk_write": 0.8 * random.normal(1, 0.12),
                },
            )
            for node in [1] * 80 + list(range(2, 22))
        ]
        wrong += sum(judge(each, made[50:80], made[80:]).state != "fit" for each in made[:50])
    assert wrong == 0
