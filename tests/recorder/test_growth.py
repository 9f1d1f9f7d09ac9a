"""What grows is named: the container, the line that made it, and what it holds."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepscope.recorder import growth
from stepscope.recorder.growth import GrowthWatch

MB = 1 << 20
KEPT_BY_MODULE: list[bytes] = []


@pytest.fixture(autouse=True)
def few_objects() -> None:
    """A count then visits what the test makes, and not what all tests before it have left."""
    gc.freeze()


class Memory:
    """Grows by a number of bytes a step; looks are a second apart."""

    def __init__(self, per_step: int, step_s: float = 0.1) -> None:
        self.per_step = per_step
        self.step = 0
        self.watch = GrowthWatch(now_s=lambda: self.step * step_s, used=lambda: 100 * MB + self.per_step * self.step)

    def train(self, steps: int, each: Callable[[int], object]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(steps):
            each(self.step)
            found |= self.watch.look(self.step) or {}
            self.step += 1
        return found


class Tensor:
    def __init__(self, graph: bool = False) -> None:
        self.dtype, self.shape, self.nbytes = "torch.float32", (512, 512), MB
        self.grad_fn = object() if graph else None


def test_a_list_is_named_with_the_line_that_made_it() -> None:
    kept = []
    line = sys._getframe().f_lineno - 1
    found = Memory(MB).train(400, lambda _: kept.append(Tensor()))
    assert found["growing"] == {
        "holder": f"kept, a list made at test_growth.py:{line}",
        "per_step": 1.0,
        "element": "float32 [512, 512]",
        "element_bytes": MB,
        "graph": False,
        "from": 200,
        "to": 250,
    }


def test_long_steps_are_looked_at_more_often() -> None:
    kept = []
    found = Memory(MB, step_s=0.5).train(110, lambda _: kept.append(Tensor()))["growing"]
    assert (found["per_step"], found["from"], found["to"]) == (1.0, 95, 103)


def test_a_tensor_with_its_graph_explains_more_than_its_size() -> None:
    kept: list[Tensor] = []
    log: list[int] = []

    def each(step: int) -> None:
        kept.append(Tensor(graph=True))
        kept[-1].nbytes = 4
        log.append(step)

    found = Memory(MB).train(300, each)["growing"]
    assert found["holder"].startswith("kept, a list")
    assert (found["graph"], found["element_bytes"]) == (True, 4)


def test_attributes_dicts_and_variables_of_modules_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # What there was when tests were collected is frozen (tests/conftest.py): the collector does not list it.
    monkeypatch.setitem(globals(), "KEPT_BY_MODULE", [])

    class Trainer:
        def __init__(self) -> None:
            self.seen: dict[int, Tensor] = {}

    trainer = Trainer()
    found = Memory(MB).train(300, lambda step: trainer.seen.__setitem__(step, Tensor()))["growing"]
    assert found["holder"] == "Trainer.seen, a dict"

    global KEPT_BY_MODULE
    KEPT_BY_MODULE = []  # the garbage collector does not list what was made while the tests were collected
    found = Memory(MB).train(300, lambda _: KEPT_BY_MODULE.append(bytes(MB)))["growing"]
    KEPT_BY_MODULE.clear()
    assert found["holder"] == "KEPT_BY_MODULE, a list"
    assert found["element"] == "bytes"


def test_a_sum_that_keeps_all_graphs_is_named() -> None:
    weight = torch.ones(4, requires_grad=True)
    other = [0.0]
    total = torch.zeros(())
    line = sys._getframe().f_lineno - 1

    def each(_: int) -> None:
        nonlocal total
        loss = (weight * 2).sum()
        loss.backward()
        total = total + loss
        other[0] += loss.item()

    found = Memory(MB).train(400, each)["growing"]
    assert found == {
        "holder": f"total in test_a_sum_that_keeps_all_graphs_is_named (test_growth.py:{line})",
        "per_step": 0.0,
        "element": "",
        "element_bytes": 0,
        "graph": True,
        "from": 200,
        "to": 250,
    }


def test_an_attribute_that_is_never_detached_is_named() -> None:
    class Loop:
        def __init__(self) -> None:
            self.state = torch.zeros(2)
            self.weight = torch.ones(2, requires_grad=True)

        def train(self) -> dict[str, Any]:
            return Memory(MB).train(400, self.step)

        def step(self, _: int) -> None:
            self.state = torch.tanh(self.weight * self.state + 1)

    assert Loop().train()["growing"]["holder"].startswith("self.state in train (test_growth.py:")


def test_a_look_keeps_no_variable_alive() -> None:
    """Up to Python 3.12 a frame keeps the values that its variables had when somebody asked for them."""
    kept: list[Tensor] = []
    batch: Tensor | None = Tensor()
    gone = weakref.ref(batch)
    assert "growing" in Memory(MB).train(400, lambda _: kept.append(Tensor()))
    assert batch is not None
    batch = None
    assert gone() is None
    assert len(kept) == 400


def test_variables_of_the_current_step_are_not_the_leak() -> None:
    weight = torch.ones(4, requires_grad=True)
    loss = torch.zeros(())
    state = torch.zeros(())

    def each(_: int) -> None:
        nonlocal loss, state
        loss = (weight * state).sum()
        loss.backward()
        state = loss.detach()

    assert "growing" not in Memory(MB).train(400, each)
    assert loss.grad_fn is not None


class Epochs:
    """Grows by a hundred megabytes every hundred steps."""

    def __init__(self) -> None:
        self.step = 0
        self.watch = GrowthWatch(now_s=lambda: self.step / 10, used=lambda: 20_000 * MB + self.step // 100 * 100 * MB)

    def train(self, each: Callable[[int], object]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for self.step in range(1_500):
            each(self.step)
            found |= self.watch.look(self.step) or {}
            if "growing" in found:
                break
        return found


def test_a_tensor_once_in_an_epoch_is_named() -> None:
    kept = []
    line = sys._getframe().f_lineno - 1

    def each(step: int) -> None:
        if step % 100 == 0:
            kept.append(torch.empty(25 * MB))

    assert Epochs().train(each)["growing"] == {
        "holder": f"kept, a list made at test_growth.py:{line}",
        "per_step": round(2 / 150, 4),
        "element": f"float32 [{25 * MB}]",
        "element_bytes": 100 * MB,
        "graph": False,
        "from": 650,
        "to": 800,
    }


def test_tensors_that_no_container_holds_are_described() -> None:
    class Link:
        def __init__(self, before: Link | None) -> None:
            self.before, self.value = before, torch.empty(25 * MB)

    last: list[Link | None] = [None]

    def each(step: int) -> None:
        if step % 100 == 0:
            last[0] = Link(last[0])

    found = Epochs().train(each)["growing"]
    assert (found["element"], found["per_step"]) == (f"float32 [{25 * MB}]", 0.0133)
    assert "list" not in found["holder"]


def test_elements_of_a_tuple_are_described() -> None:
    kept: list[Any] = []
    found = Memory(2 * MB).train(300, lambda step: kept.extend([(step, Tensor())] * 2))["growing"]
    assert (found["element"], found["per_step"]) == ("tuple with float32 [512, 512]", 2.0)


@pytest.mark.parametrize("per_step", [0, 10_000])
def test_nothing_is_counted_where_memory_does_not_grow(per_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "count_objects", lambda: pytest.fail("counted"))
    kept: list[Tensor] = []
    assert "growing" not in Memory(per_step).train(2_000, lambda _: kept.append(Tensor()))


def test_a_small_log_is_not_the_leak() -> None:
    log: list[int] = []
    assert Memory(MB).train(400, log.append) == {}


def test_what_does_not_grow_is_not_named() -> None:
    full: deque[Tensor] = deque([Tensor()] * 100, maxlen=100)
    fixed = [Tensor()] * 100

    def each(step: int) -> None:
        full.append(Tensor())
        fixed[step % 100] = Tensor()
        list(range(1_000))

    assert Memory(MB).train(400, each) == {}


def test_counts_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = 0
    original = growth.count_objects

    def counted() -> Any:
        nonlocal counts
        counts += 1
        return original()

    monkeypatch.setattr(growth, "count_objects", counted)
    Memory(MB).train(20_000, lambda _: None)
    assert 0 < counts <= growth.MOST_COUNTS


def test_looks_become_rarer_where_steps_are_short() -> None:
    step = 0
    watch = GrowthWatch(now_s=lambda: step / 10_000, used=lambda: 0)
    looks = []
    for step in range(100_000):
        if step >= watch.due_at:
            looks.append(step)
            watch.look(step)
    assert len(looks) < 40


def test_an_object_that_raises_is_survived() -> None:
    class Bad:
        @property
        def nbytes(self) -> int:
            raise RuntimeError("not now")

    kept: list[Any] = []
    assert Memory(MB).train(400, lambda _: kept.append(Bad())) == {}


# -- floors -----------------------------------------------------------------------------------------------------------


def test_the_whole_run_is_seen_in_few_stretches() -> None:
    floors = growth.MemoryFloors(0.0)
    told: dict[str, Any] = {}
    times = 0
    for step in range(5000):
        found = floors.add(step, step * 1.0, 1000 * MB + step * MB + 300 * MB * (step % 3 == 0), 0)
        times += bool(found)
        told |= found
    steps, host = told["floors"]["step"], told["floors"]["host"]
    assert (len(steps), steps[0]) == (len(host), 0)
    assert growth.LEAST_STRETCHES <= len(steps) <= growth.MOST_STRETCHES
    assert host == [(1000 * MB + (step + (step % 3 == 0)) * MB) // growth.UNIT for step in steps]
    assert 1 < times <= growth.MOST_TOLD
    assert "device" not in told["floors"]


@pytest.mark.parametrize(("world_size", "most"), [(64, growth.MOST_TOLD), (65, 3), (1025, 0)])
def test_large_jobs_tell_their_floors_less_often(world_size: int, most: int) -> None:
    floors = growth.MemoryFloors(0.0)
    floors.world_size = world_size
    times = sum(bool(floors.add(step, step * 1.0, step * step * MB, 0)) for step in range(5000))
    assert times == most


def test_floors_that_do_not_rise_are_not_told() -> None:
    floors = growth.MemoryFloors(0.0)
    for step in range(2000):
        assert floors.add(step, step * 1.0, 1000 * MB + 500 * MB * (step % 50 > 5), 7 * MB) == {}


def test_a_rise_that_is_over_is_told_too() -> None:
    floors = growth.MemoryFloors(0.0)
    found = [floors.add(step, step * 1.0, 1000 * MB + min(step, 400) * MB, 0) for step in range(3000)]
    *higher, over = [one["floors"]["host"] for one in found if one]
    assert 0 < len(higher) <= growth.MOST_TOLD
    assert all(host[-1] > host[len(host) // 2] for host in higher)
    assert over[-1] == over[len(over) * 3 // 4]


def test_epochs_are_counted_once() -> None:
    floors = growth.MemoryFloors(0.0)
    for step in (0, 0, 100, 200, 200, 300):
        floors.epoch_begins(step)
    told: dict[str, Any] = {}
    for step in range(400):
        told |= floors.add(step, step * 2.0, 0, 1000 * MB + step * MB)
    assert (told["floors"]["epochs"], told["floors"]["epoch_steps"]) == (4, [0, 100, 300])
    assert told["floors"]["device"][0] == 1000 * MB // growth.UNIT
