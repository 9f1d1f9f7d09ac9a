"""CUDA graphs, with a class in place of torch's: what a capture and a replay look like to the hooks."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.recorder import guard
from stepscope.recorder.guard import failsafe
from stepscope.records.steps import BUILTIN_PHASES, FIRST_USER_SLOT, FLAG_COMPILED, FLAG_REPLAYED, GRAPH_PHASE
from tests.recorder.conftest import forgive_failures


class Graph:
    """A capture records what to call; nothing of a model is in it."""

    capturing = False
    fails = False

    def __init__(self) -> None:
        self.replays = 0

    def capture_begin(self, pool: object = None) -> str:
        type(self).capturing = True
        return "begun"

    def capture_end(self) -> str:
        type(self).capturing = False
        return "ended"

    def replay(self) -> str:
        self.replays += 1
        if self.fails:
            raise RuntimeError("an illegal memory access was encountered")
        return "replayed"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[type[Graph]]:
    graph = type("Graph", (), dict(vars(Graph)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: graph.capturing)
    before = dict(vars(graph))
    yield graph
    assert {name: vars(graph)[name] for name in ("replay", "capture_begin", "capture_end")} == {
        name: before[name] for name in ("replay", "capture_begin", "capture_end")
    }


@pytest.fixture
def recorded(stand_in: type[Graph], request: pytest.FixtureRequest) -> Any:
    """Instrumented after the stand-in is there, and taken out before it goes."""
    return request.getfixturevalue("recording")


def make() -> tuple[Any, Any]:
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def capture(graph: Any, what: Callable[[], None]) -> None:
    assert graph.capture_begin(pool=None) == "begun"
    what()
    assert graph.capture_end() == "ended"


def flags(recorded: Any) -> list[int]:
    return [int(flag) & (FLAG_COMPILED | FLAG_REPLAYED) for flag in recorded.steps()["flags"]]


def test_a_replay_with_an_optimizer_step_in_it_is_a_step_and_its_capture_is_none(recorded: Any) -> None:
    model, optimizer = make()
    train(model, optimizer, 3)
    graph = torch.cuda.CUDAGraph()
    capture(graph, lambda: train(model, optimizer))
    for _ in range(300):
        assert graph.replay() == "replayed"
    assert graph.replays == 300
    assert flags(recorded) == [0, 0, 0, FLAG_COMPILED | FLAG_REPLAYED, *[FLAG_REPLAYED] * 299]
    row = recorded.steps()["phase_ns"][200]
    spent = {slot for slot, ns in enumerate(row) if ns}
    assert spent <= {BUILTIN_PHASES.index("other"), FIRST_USER_SLOT}
    assert row[FIRST_USER_SLOT] > 0
    assert recorded.recorder.slot_of(GRAPH_PHASE) == FIRST_USER_SLOT


def test_a_graph_without_an_optimizer_step_is_no_step(recorded: Any) -> None:
    model, optimizer = make()
    train(model, optimizer, 2)
    graph = torch.cuda.CUDAGraph()
    capture(graph, lambda: model(torch.ones(2, 4)).sum().backward())
    for _ in range(3):
        graph.replay()
        optimizer.step()
    assert flags(recorded) == [0, 0, FLAG_COMPILED, 0, 0]


def test_eager_steps_go_on_between_replays(recorded: Any) -> None:
    model, optimizer = make()
    train(model, optimizer, 1)
    graph = torch.cuda.CUDAGraph()
    capture(graph, lambda: train(model, optimizer))
    graph.replay()
    train(model, optimizer, 1)
    graph.replay()
    assert flags(recorded) == [0, FLAG_COMPILED | FLAG_REPLAYED, 0, FLAG_REPLAYED]


def test_a_graph_that_is_captured_anew_is_what_it_is_now(recorded: Any) -> None:
    model, optimizer = make()
    train(model, optimizer, 1)
    graph = torch.cuda.CUDAGraph()
    capture(graph, lambda: train(model, optimizer))
    graph.replay()
    capture(graph, lambda: None)
    graph.replay()
    train(model, optimizer, 1)
    assert flags(recorded) == [0, FLAG_COMPILED | FLAG_REPLAYED, FLAG_COMPILED]


def test_two_graphs_of_a_gan_are_one_step(recorded: Any) -> None:
    """As without graphs: the optimizer that was seen last closes."""
    parts = [make(), make()]
    for _ in range(2):
        for part in parts:
            train(*part)
    graphs = []
    for part in parts:
        graph = torch.cuda.CUDAGraph()
        capture(graph, lambda part=part: train(*part))
        graphs.append(graph)
    for _ in range(5):
        for graph in graphs:
            graph.replay()
    # The first step of all is that of the first optimizer, when the second had not been seen.
    assert len(recorded.steps()) == 3 + 5
    assert flags(recorded)[3:] == [FLAG_COMPILED | FLAG_REPLAYED, *[FLAG_REPLAYED] * 4]


def test_a_capture_that_fails_leaves_nothing_behind(recorded: Any, stand_in: Any) -> None:
    model, optimizer = make()
    train(model, optimizer, 1)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    optimizer.step()
    graph.capture_end()  # what torch's context manager does as the exception goes through it
    train(model, optimizer, 2)
    assert len(recorded.steps()) == 3


def test_a_capture_that_nobody_ended_is_over_when_the_stream_says_so(recorded: Any, stand_in: Any) -> None:
    model, optimizer = make()
    train(model, optimizer, 1)
    torch.cuda.CUDAGraph().capture_begin()
    train(model, optimizer, 1)  # captured
    stand_in.capturing = False  # an exception went through, and the script began anew
    train(model, optimizer, 5)
    assert len(recorded.steps()) == 6


def test_a_stream_that_cannot_be_asked_whether_it_captures_does_not_reach_the_script(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's errors come up wherever CUDA is asked next."""
    model, optimizer = make()
    train(model, optimizer, 1)
    torch.cuda.CUDAGraph().capture_begin()

    def broken() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(recorded.recorder, "_is_capturing", failsafe(broken))
    failures = guard.failures()
    train(model, optimizer, 3)
    assert len(recorded.steps()) == 4
    assert guard.failures() == failures + 1
    forgive_failures(failures)


def test_a_replay_that_fails_is_no_step_and_leaves_its_phase(recorded: Any, stand_in: Any) -> None:
    model, optimizer = make()
    train(model, optimizer, 2)
    graph = torch.cuda.CUDAGraph()
    capture(graph, lambda: train(model, optimizer))
    graph.replay()
    stand_in.fails = True
    with pytest.raises(RuntimeError, match="illegal memory"):
        graph.replay()
    assert recorded.recorder.ledger.phase == BUILTIN_PHASES.index("other")
    train(model, optimizer, 1)
    assert len(recorded.steps()) == 4


def test_without_a_free_slot_for_its_phase_a_replay_is_a_step_all_the_same(recorded: Any) -> None:
    model, optimizer = make()
    train(model, optimizer, 1)
    names = [recorded.recorder.slot_of(f"own {n}") for n in range(7)]
    graph = torch.cuda.CUDAGraph()
    capture(graph, lambda: train(model, optimizer))
    outer = recorded.recorder.ledger.enter(names[0])
    graph.replay()
    graph.replay()
    recorded.recorder.ledger.leave(outer)
    train(model, optimizer, 1)
    assert len(recorded.steps()) == 4


def test_own_step_borders_are_kept(recorded: Any) -> None:
    recorder = recorded.recorder
    model, optimizer = make()
    recorder.begin()
    train(model, optimizer, 1)
    graph = torch.cuda.CUDAGraph()
    capture(graph, lambda: train(model, optimizer))
    for _ in range(4):
        graph.replay()
        graph.replay()
        recorder.end_step()
    assert len(recorded.steps()) == 4


def test_graphs_and_optimizers_are_not_kept_alive(recorded: Any) -> None:
    model, optimizer = make()
    train(model, optimizer, 1)
    graph = torch.cuda.CUDAGraph()
    capture(graph, functools.partial(train, model, optimizer))
    graph.replay()
    del optimizer
    gc.collect()
    graph.replay()  # on behalf of an optimizer that is gone
    assert len(recorded.steps()) == 3
    gone = weakref.ref(graph)
    del graph
    gc.collect()
    assert gone() is None


def test_where_torch_has_no_graphs_nothing_is_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.recorder.guard import Patches
    from stepscope.recorder.hooks import compiled
    from stepscope.recorder.recorder import Recorder

    nothing = type("Graph", (), {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", nothing)
    compiled.install(Recorder(tmp_path, tmp_path), torch, Patches())
    assert "replay" not in vars(nothing)
