"""The form of facts: what is right stays, what is wrong goes, and ten thousand ranks fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.records.identity import FACTS_FORM, MAX_ITEMS, checked_facts, pack_facts, rank_runs

RIGHT: dict[str, Any] = {
    "peers": [[0, 4, 2]],
    "pipeline": True,
    "frameworks": ["transformers", "accelerate"],
    "global_step": {"by": "transformers", "first": 500},
    "loader": {"num_workers": 2, "pin_memory": True, "prefetch_factor": None, "sampler": "RandomSampler", "length": 9},
    "ddp": {"bucket_mb": 25.0, "gradient_mb": 3, "static_graph": False},
    "fsdp": {"version": 2, "units": 5, "largest_share": 0.25, "strategy": "full_shard", "backward_prefetch": None},
    "model": {"class": "Net", "parameters": 5, "compiled": True},
    "optimizer": {"class": "Adam", "fused": None, "foreach": True, "tensors": 3},
    "autocast": "bfloat16",
    "mesh": {"names": ["dp", "tp"], "shape": [2, 2]},
    "growing": {
        "holder": "kept, a list made at train.py:88",
        "per_step": 1.0,
        "element": "float32 [128, 256]",
        "element_bytes": 131072,
        "graph": False,
        "from": 200,
        "to": 250,
    },
    "process_group_open": True,
    "threads": 2,
    "gc": {"enabled": True, "thresholds": [700, 10, 10]},
    "cudnn_benchmark": False,
    "tf32": True,
    "floors": {"step": [0, 50], "host": [10, 20], "device": [1, 2], "epochs": 3, "epoch_steps": [0, 20, 40]},
    "progress": {"by": "transformers", "numbers": [[0, 501], [40, 1]], "epochs": [[0, 12]]},
    "evaluations": [{"name": "eval_long", "count": 3, "ms": 1250.5, "after": 60}],
    "malloc": {"step": [16, 80], "free": [1600, 4000], "resident": [5000, 8000]},
}


def ranks_in(runs: list[list[int]]) -> list[int]:
    return [start + step * at for start, count, step in runs for at in range(count)]


def test_what_is_right_stays() -> None:
    assert checked_facts(RIGHT) == RIGHT
    assert set(RIGHT) == set(FACTS_FORM)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("threads", value) for value in (-1, True, 2.0, "2", None, 1 << 70, float("nan"))],
        *[("ddp", {"bucket_mb": value}) for value in (float("nan"), float("inf"), -1.0, "25", 10**400)],
        *[("peers", value) for value in ([], [1], [[1, 2]], [[0, 0, 1]], [[0, 1, 0]], [[0, 1, 1]] * 65, {"a": 1})],
        *[("model", {"class": value}) for value in ("", "x" * 121, 3, ["Net"])],
        *[("loader", value) for value in (3, [], None, {}, {"num_workers": True}, {"pin_memory": 1})],
        ("gc", {"enabled": 1, "thresholds": 3}),
        *[("progress", value) for value in ({"numbers": [[0]]}, {"epochs": [[0, -1]]}, [[0, 1]])],
        *[("evaluations", [{"name": "eval", "count": 1, "ms": value, "after": 0}]) for value in (-1, None, "2")],
        *[("evaluations", value) for value in ([{"name": "eval"}], {"name": "eval"}, [None])],
    ],
    ids=str,
)
def test_what_is_wrong_goes(key: str, value: Any) -> None:
    assert checked_facts({**RIGHT, key: value}) == {name: right for name, right in RIGHT.items() if name != key}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from([*FACTS_FORM["loader"], *FACTS_FORM]), children)
    ),
    max_leaves=8,
)


@given(raw=JSON | st.dictionaries(st.sampled_from([*FACTS_FORM]), JSON))
def test_anything_becomes_facts_that_stay_the_same(raw: Any) -> None:
    facts = checked_facts(raw)
    assert checked_facts(json.loads(json.dumps(facts, allow_nan=False))) == facts
    assert len(pack_facts(facts, 40)) <= 40


def test_the_least_important_goes_first() -> None:
    whole = pack_facts(RIGHT, 4000)
    assert json.loads(whole) == RIGHT
    assert json.loads(pack_facts(RIGHT, len(whole) - 1)) == {key: RIGHT[key] for key in list(RIGHT)[:-1]}
    assert json.loads(pack_facts(RIGHT, 30)) == {"peers": [[0, 4, 2]]}
    assert pack_facts(RIGHT, 5) == b"{}"


@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        ([3], [[3, 1, 1]]),
        (range(10_000), [[0, 10_000, 1]]),
        (range(3, 10_000, 8), [[3, 1250, 8]]),
        ([6, 4, 2, 0], [[0, 4, 2]]),
        ([0, 1, 4, 5], [[0, 2, 1], [4, 2, 1]]),
        ([0, 5, 6, 7], [[0, 2, 5], [6, 2, 1]]),
    ],
)
def test_runs(ranks: Any, runs: list[list[int]]) -> None:
    assert rank_runs(ranks, own=ranks[0]) == runs
    assert ranks_in(runs) == sorted(ranks)


def test_of_an_irregular_set_the_own_run_stays() -> None:
    scattered = [number * number for number in range(1000)]
    own = scattered[777]
    runs = rank_runs(scattered, own)
    assert len(runs) == 1
    assert own in ranks_in(runs)
    assert set(ranks_in(runs)) <= set(scattered)


@given(ranks=st.sets(st.integers(0, 1000), min_size=1, max_size=MAX_ITEMS))
def test_runs_are_the_ranks(ranks: set[int]) -> None:
    assert ranks_in(rank_runs(ranks, own=min(ranks))) == sorted(ranks)
