"""To which module backward belongs: real traces, with and without recomputation, and compiled; and made ones.

``data/backward/backward.py`` recorded the real ones with torch 2.13: its layers differ in width, so that the shapes of
an operator say which module it is of.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.traces import MadeTrace

from stepscope.traces.host.operators import modules_of, modules_table, operator_times
from stepscope.traces.model.columns import Trace
from stepscope.traces.model.window import Window, window_of
from stepscope.traces.reading.files import read_trace

DATA = Path(__file__).parent / "data"
BACKWARD = DATA / "backward"
CASES = ("checkpoint", "reentrant", "several", "compiled")


def tree_of(trace: Trace) -> tuple[Window, Any]:
    window = window_of(trace)
    tree = modules_of(window, operator_times(window))
    assert tree is not None
    return window, tree


def table_rows(trace: Trace) -> list[tuple[str | int, ...]]:
    window = window_of(trace)
    times = operator_times(window)
    tree = modules_of(window, times)
    return [] if tree is None else list(modules_table(window, times, tree).rows)


def places(name: str, *operators: str, backward: bool) -> Counter[tuple[str, str, str]]:
    """Count operators by name, the shape of their first tensor, and module."""
    window, tree = tree_of(read_trace(BACKWARD / f"{name}.json.gz"))
    trace, side = window.trace, window.host.side
    found: Counter[tuple[str, str, str]] = Counter()
    for row in window.host.ops.tolist():
        if trace.name(row) in operators and bool(tree.backward[row]) is backward:
            dims = json.loads(trace.text(int(trace.ops.dims[side[row]])))[0]
            of = int(tree.of[row])
            found[trace.name(row), "x".join(map(str, dims)), tree.path(of) if of >= 0 else "none"] += 1
    return found


@pytest.mark.parametrize(
    "path", sorted([*BACKWARD.glob("*.gz"), *(DATA / "h200").glob("*.gz"), DATA / "compiled_2_13.json.gz"]), ids=str
)
def test_the_link_is_torchs_own(path: Path) -> None:
    """The profiler draws an arrow from each forward operator that made an autograd node to that node."""
    window = window_of(read_trace(path), keep_last=True)
    trace, slices = window.trace, window.trace.slices
    arrows = trace.flows
    ops = window.host.ops.tolist()
    at = {}
    for row in ops:
        at[int(slices.thread[row]), int(slices.start_ns[row]), trace.name(row).startswith("autograd::")] = row
    ends = zip(arrows.to_thread.tolist(), arrows.to_ns.tolist(), strict=True)
    found = [int(window.host.created_by[at.get((*end, False), at.get((*end, True), -1))]) for end in ends]
    assert len(found) > 2
    assert slices.thread[found].tolist() == arrows.from_thread.tolist()
    assert slices.start_ns[found].tolist() == arrows.from_ns.tolist()


@pytest.mark.parametrize(("name", "calls"), [("checkpoint", 1), ("reentrant", 1), ("several", 4)])
def test_each_operator_of_backward_belongs_to_the_module_that_made_it(name: str, calls: int) -> None:
    """Also where a module is shared, and where forward runs several times before, or again in, backward."""
    made = ("TBackward0", "NativeLayerNormBackward0", "ScaledByBackward", "ReluBackward0", "PowBackward0")
    assert places(name, *made, backward=True) == {
        ("TBackward0", "31x37", "Net_0/Block_0/Linear_0"): calls,
        ("TBackward0", "37x41", "Net_0/Block_1/Linear_1"): calls,
        ("TBackward0", "41x41", "Net_0/Linear_2"): 2 * calls,
        ("NativeLayerNormBackward0", "64x37", "Net_0/Block_0/LayerNorm_0"): calls,
        ("NativeLayerNormBackward0", "64x41", "Net_0/Block_1/LayerNorm_1"): calls,
        ("ScaledByBackward", "64x37", "Net_0/Block_0/Scale_0"): calls,
        ("ScaledByBackward", "64x41", "Net_0/Block_1/Scale_1"): calls,
        ("ReluBackward0", "64x41", "Net_0"): calls,
        ("PowBackward0", "64x41", "Net_0"): calls,
    }


@pytest.mark.parametrize(("name", "repeats"), [("checkpoint", True), ("reentrant", True), ("several", False)])
def test_what_is_computed_again_belongs_to_backward_of_its_module(name: str, repeats: bool) -> None:
    places_of = {
        ("aten::layer_norm", "64x37", "Net_0/Block_0/LayerNorm_0"),
        ("aten::layer_norm", "64x41", "Net_0/Block_1/LayerNorm_1"),
        ("ScaledBy", "64x37", "Net_0/Block_0/Scale_0"),
        ("ScaledBy", "64x41", "Net_0/Block_1/Scale_1"),
    }
    repeated = dict.fromkeys(places_of, 1) if repeats else {}
    assert places(name, "aten::layer_norm", "ScaledBy", backward=True) == repeated
    assert set(places(name, "aten::layer_norm", "ScaledBy", backward=False)) == places_of


@pytest.mark.parametrize("name", CASES)
def test_accumulated_gradients_belong_to_no_layer(name: str) -> None:
    """Within a checkpoint with ``use_reentrant``, they are a part of what its caller's backward does."""
    window, tree = tree_of(read_trace(BACKWARD / f"{name}.json.gz"))
    engine = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    found: dict[str, set[str]] = {engine: set(), "torch::autograd::AccumulateGrad": set()}
    for row in window.host.ops.tolist():
        if window.trace.name(row) in found:
            of = int(tree.of[row])
            found[window.trace.name(row)].add(tree.path(of) if of >= 0 else "none")
    places = {"none", "Net_0"} if name == "reentrant" else {"none"}
    assert found == {engine: places, "torch::autograd::AccumulateGrad": places}


def test_calls_are_those_of_the_script() -> None:
    for name, calls in (("checkpoint", 1), ("reentrant", 1), ("several", 4)):
        rows = table_rows(read_trace(BACKWARD / f"{name}.json.gz"))
        assert {row[0]: row[3] for row in rows} == {
            **dict.fromkeys(("Net_0", "Net_0/Block_0", "Net_0/Block_1"), calls),
            **{
                f"Net_0/Block_{block}/{kind}_{block}": calls
                for block in (0, 1)
                for kind in ("Linear", "LayerNorm", "Scale")
            },
            "Net_0/Linear_2": 2 * calls,
        }


def test_compiled_blocks() -> None:
    """What is compiled has no modules in it: the region stands for them, in the module that was called."""
    made = ("CompiledFunctionBackward", "TBackward0", "ReluBackward0")
    assert places("compiled", *made, backward=True) == {
        ("CompiledFunctionBackward", "64x37", "Net_0/Block_0/Torch-Compiled Region: 0/0"): 1,
        ("CompiledFunctionBackward", "64x41", "Net_0/Block_1/Torch-Compiled Region: 0/1"): 1,
        ("TBackward0", "41x41", "Net_0/Linear_0"): 2,
        ("ReluBackward0", "64x41", "Net_0"): 1,
    }
    rows = table_rows(read_trace(BACKWARD / "compiled.json.gz"))
    assert [row[:4] for row in rows] == [
        ("Net_0", "Net", 0, 1),
        ("Net_0/Block_0", "Block", 1, 1),
        ("Net_0/Block_0/Torch-Compiled Region: 0/0", "compiled region", 2, 1),
        ("Net_0/Block_1", "Block", 1, 1),
        ("Net_0/Block_1/Torch-Compiled Region: 0/1", "compiled region", 2, 1),
        ("Net_0/Linear_0", "Linear", 1, 2),
    ]


def test_compiled_code_without_stacks_on_a_gpu() -> None:
    """The region has all of its kernels, those of its backward too, which autograd launched on another thread."""
    window, tree = tree_of(read_trace(DATA / "h200" / "compiled.json.gz"))
    trace, work = window.trace, window.device_rows
    assert tree.name == ["Torch-Compiled Region: 0/0"]
    found: Counter[tuple[str, int]] = Counter()
    for row, owner in zip(work.tolist(), window.owner[work].tolist(), strict=True):
        if trace.name(row).startswith(("triton_", "nvjet_")) and owner >= 0:
            found[trace.name(int(window.owner[row])).split("_")[0], int(tree.of[owner])] += 1
    assert set(found) == {("triton", 0), ("aten::addmm", 0), ("aten::mm", 0)}
    ((path, kind, depth, calls, *_, device_ns, backward_device_ns),) = table_rows(trace)
    assert (path, kind, depth, calls) == ("Torch-Compiled Region: 0/0", "compiled region", 0, 3)
    assert (device_ns, backward_device_ns) == (8_207_409, 16_628_895)


def engine(made: MadeTrace, name: str, start: float, dur: float, number: int) -> None:
    about = {"Sequence number": number, "Fwd thread id": 1}
    made.op(f"autograd::engine::evaluate_function: {name}", start, dur, tid=9, **about)
    made.op(name, start + 1, dur - 2, tid=9, **about)


def test_a_call_that_is_repeated_joins_the_one_next_to_what_it_is_in() -> None:
    """Of two parents with a child of one name, that is the nearer; Python's own time in it counts, too."""
    made = MadeTrace()
    for at, block in ((0, "Block_0"), (100, "Block_1")):
        made.python(f"nn.Module: {block}", at, 90)
        made.python("nn.Module: Act_0", at + 10, 30)
        made.op("aten::gelu", at + 20, 10, **{"Sequence number": at})
    for start, number in ((300, 100), (500, 0)):
        engine(made, "GeluBackward0", start, 100, number)
        made.python("nn.Module: Act_0", start + 10, 40, tid=9)
        made.op("aten::gelu", start + 20, 10, tid=9, **{"Sequence number": 7})
        made.launched("gelu", at=start + 21, start=start + 50, dur=5 if number else 6, tid=9)
    assert table_rows(made.trace()) == [
        ("Block_0", "Block", 0, 1, 90_000, 100_000, 0, 6_000),
        ("Block_0/Act_0", "Act", 1, 1, 30_000, 100_000, 0, 6_000),
        ("Block_1", "Block", 0, 1, 90_000, 100_000, 0, 5_000),
        ("Block_1/Act_0", "Act", 1, 1, 30_000, 100_000, 0, 5_000),
    ]


def test_a_repeated_call_whose_forward_is_not_in_the_trace() -> None:
    made = MadeTrace()
    made.op("CheckpointFunction", 0, 10, **{"Sequence number": 3})
    engine(made, "CheckpointFunctionBackward", 100, 60, 3)
    made.python("nn.Module: Block_4", 110, 40, tid=9)
    made.python("nn.Module: Linear_4", 120, 20, tid=9)
    assert table_rows(made.trace()) == [
        ("Block_4", "Block", 0, 0, 0, 40_000, 0, 0),
        ("Block_4/Linear_4", "Linear", 1, 0, 0, 20_000, 0, 0),
    ]


def test_labels_of_layers_without_stacks() -> None:
    """``stepscope run --nvtx --layers every``, or a sampled step in which a profiler is active."""
    made = MadeTrace()
    made.annotation("stepscope.layer GPT", 0, 100)
    made.annotation("stepscope.layer layers.0", 10, 50)
    made.annotation("stepscope.layer layers.0.mlp", 20, 30)
    made.op("aten::addmm", 25, 20, **{"Sequence number": 1})
    made.launched("gemm", at=26, start=200, dur=40)
    engine(made, "AddmmBackward0", 300, 20, 1)
    made.launched("gemm_nt", at=305, start=330, dur=9, tid=9)
    rows = table_rows(made.trace())
    assert rows == [
        ("GPT", "layer", 0, 1, 100_000, 20_000, 40_000, 9_000),
        ("GPT/layers.0", "layer", 1, 1, 50_000, 20_000, 40_000, 9_000),
        ("GPT/layers.0/mlp", "layer", 2, 1, 30_000, 20_000, 40_000, 9_000),
    ]
    _, tree = tree_of(made.trace())
    assert tree.full_name == ["GPT", "layers.0", "layers.0.mlp"]


def test_ranges_of_layers_in_backward_for_nsight() -> None:
    """An Nsight report has no sequence numbers: the ranges say which module backward runs."""
    made = MadeTrace()
    for number, name in enumerate(("up", "down")):
        made.annotation(f"stepscope.layer {name}", number * 50, 40)
    made.annotation("stepscope.layer down backward", 200, 30, tid=9)
    made.launched("gemm_nt", at=210, start=215, dur=9, tid=9)
    made.op("aten::mm", 209, 5, tid=9)
    made.annotation("stepscope.layer up backward", 230, 20, tid=9)
    made.annotation("stepscope.layer gone backward", 250, 10, tid=9)
    assert table_rows(made.trace()) == [
        ("up", "layer", 0, 1, 40_000, 20_000, 0, 0),
        ("down", "layer", 0, 1, 40_000, 30_000, 0, 9_000),
        ("gone", "layer", 0, 0, 0, 10_000, 0, 0),
    ]


def test_a_recording_that_begins_in_backward_has_each_labeled_layer_once() -> None:
    made = MadeTrace()
    made.annotation("stepscope.layer layers.0.mlp backward", 0, 20, tid=9)
    made.annotation("stepscope.layer layers.0", 100, 50)
    made.annotation("stepscope.layer layers.0.mlp", 110, 30)
    made.annotation("stepscope.layer layers.0.mlp backward", 200, 20, tid=9)
    assert table_rows(made.trace()) == [
        ("layers.0", "layer", 0, 1, 50_000, 40_000, 0, 0),
        ("layers.0/mlp", "layer", 1, 1, 30_000, 40_000, 0, 0),
    ]


def test_a_second_backward_belongs_to_the_first_forward() -> None:
    """With ``create_graph``, autograd's operators make nodes themselves."""
    made = MadeTrace()
    made.python("nn.Module: Square_0", 0, 50)
    made.op("aten::pow", 10, 20, **{"Sequence number": 5})
    engine(made, "PowBackward0", 100, 40, 5)
    made.op("aten::mul", 110, 10, tid=9, **{"Sequence number": 6})
    made.op("MulBackward0", 200, 30, tid=9, **{"Sequence number": 6, "Fwd thread id": 2})
    window, tree = tree_of(made.trace())
    assert np.unique(tree.of[window.host.ops]).tolist() == [0]
