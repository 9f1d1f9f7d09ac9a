"""What grows is named: the container, the line that made it, and what it holds."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch_modes import noting_modes

from stepscope.recorder.layers import growth
from stepscope.recorder.layers.growth import GrowthWatch

MB = 1 << 20
KEPT_BY_MODULE: list[bytes] = []


@pytest.fixture(autouse=True)
def only_this_module_is_the_script() -> Iterator[None]:
    """A worker has loaded all test modules: visiting them in each count takes ten times as long as the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "is_library", lambda names: names.get("__name__") != __name__)
        yield


class Memory:
    """Grows by a number of bytes a step; looks are a second apart."""

    def __init__(self, per_step: int, step_s: float = 0.1) -> None:
        self.per_step = per_step
        self.step = 0
        self.watch = GrowthWatch(
            now_s=lambda: self.step * step_s,
            used=lambda: 100 * MB + self.per_step * self.step,
            clock_ns=lambda: 0,
        )

    def train(self, steps: int, each: Callable[[int], object]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(steps):
            each(self.step)
            found |= self.watch.check(self.step) or {}
            self.step += 1
        return found


def tensor() -> torch.Tensor:
    return torch.empty(512, 512)


def test_a_list_is_named_with_the_line_that_made_it() -> None:
    kept = []
    line = sys._getframe().f_lineno - 1
    found = Memory(MB).train(200, lambda _: kept.append(tensor()))
    assert found["growing"] == {
        "holder": f"kept, a list made at test_growth.py:{line}",
        "per_step": 1.0,
        "element": "float32 [512, 512]",
        "element_bytes": MB,
        "graph": False,
        "from": 64,
        "to": 80,
    }


def test_long_steps_are_looked_at_more_often() -> None:
    kept = []
    found = Memory(MB, step_s=0.5).train(110, lambda _: kept.append(tensor()))["growing"]
    assert (found["per_step"], found["from"], found["to"]) == (1.0, 40, 48)


def test_a_tensor_with_its_graph_explains_more_than_its_size() -> None:
    kept: list[torch.Tensor] = []
    weight = torch.ones(4, requires_grad=True)
    log: list[int] = []

    def each(step: int) -> None:
        kept.append(weight.sum())
        log.append(step)

    found = Memory(MB).train(300, each)["growing"]
    assert found["holder"].startswith("kept, a list")
    assert (found["graph"], found["element_bytes"]) == (True, 4)


def test_attributes_dicts_and_variables_of_modules_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "KEPT_BY_MODULE", [])

    class Trainer:
        def __init__(self) -> None:
            self.seen: dict[int, torch.Tensor] = {}

    trainer = Trainer()
    found = Memory(MB).train(300, lambda step: trainer.seen.__setitem__(step, tensor()))["growing"]
    assert found["holder"] == "Trainer.seen, a dict"

    global KEPT_BY_MODULE
    KEPT_BY_MODULE = []
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

    found = Memory(MB).train(200, each)["growing"]
    assert found == {
        "holder": f"total in test_a_sum_that_keeps_all_graphs_is_named (test_growth.py:{line})",
        "per_step": 0.0,
        "element": "",
        "element_bytes": 0,
        "graph": True,
        "from": 64,
        "to": 80,
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
    kept: list[torch.Tensor] = []
    batch: torch.Tensor | None = tensor()
    gone = weakref.ref(batch)
    assert "growing" in Memory(MB).train(400, lambda _: kept.append(tensor()))
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
        self.watch = GrowthWatch(
            now_s=lambda: self.step / 10,
            used=lambda: 20_000 * MB + self.step // 100 * 100 * MB,
            clock_ns=lambda: 0,
        )

    def train(self, each: Callable[[int], object]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for self.step in range(1_500):
            each(self.step)
            found |= self.watch.check(self.step) or {}
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
        "per_step": round(2 / 208, 4),
        "element": f"float32 [{25 * MB}]",
        "element_bytes": 100 * MB,
        "graph": False,
        "from": 400,
        "to": 608,
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
    assert (found["element"], found["per_step"]) == (f"float32 [{25 * MB}]", 0.0139)
    assert "list" not in found["holder"]


def test_elements_of_a_tuple_are_described() -> None:
    kept: list[Any] = []
    found = Memory(2 * MB).train(300, lambda step: kept.extend([(step, tensor())] * 2))["growing"]
    assert (found["element"], found["per_step"]) == ("tuple with float32 [512, 512]", 2.0)


@pytest.mark.parametrize("per_step", [0, 10_000])
def test_nothing_is_counted_where_memory_does_not_grow(per_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "ContainerWalk", lambda **_: pytest.fail("counted"))
    kept: list[torch.Tensor] = []
    assert "growing" not in Memory(per_step).train(2_000, lambda _: kept.append(tensor()))


def test_a_small_log_is_not_the_leak() -> None:
    log: list[int] = []
    assert Memory(MB).train(400, log.append) == {}


def test_what_does_not_grow_is_not_named() -> None:
    full: deque[torch.Tensor] = deque([tensor()] * 100, maxlen=100)
    fixed = [tensor()] * 100

    def each(step: int) -> None:
        full.append(tensor())
        fixed[step % 100] = tensor()
        list(range(1_000))

    assert Memory(MB).train(400, each) == {}


def test_counts_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = 0
    original = growth.ContainerWalk

    def counted(**options: Any) -> Any:
        nonlocal counts
        counts += 1
        return original(**options)

    monkeypatch.setattr(growth, "ContainerWalk", counted)
    Memory(MB).train(20_000, lambda _: None)
    assert 0 < counts <= growth.MOST_COUNTS


def test_looks_become_rarer_where_steps_are_short() -> None:
    step = 0
    watch = GrowthWatch(now_s=lambda: step / 10_000, used=lambda: 0)
    looks = []
    for step in range(100_000):
        if step >= watch.due_at:
            looks.append(step)
            watch.check(step)
    assert len(looks) < 40


# -- what a count may do ----------------------------------------------------------------------------------------------


class Slow:
    """A clock by which each reading takes a hundredth of a slice."""

    def __init__(self) -> None:
        self.readings = 0

    def __call__(self) -> int:
        self.readings += 1
        return self.readings * growth.SLICE_NS // 100


def test_a_count_goes_on_in_later_steps_and_stays_below_its_share_of_the_time() -> None:
    kept: list[torch.Tensor] = []
    step, clock = 0, Slow()
    watch = GrowthWatch(now_s=lambda: step * 1.0, used=lambda: 100 * MB + step * MB, clock_ns=clock)
    found: dict[str, Any] = {}
    counted: list[int] = []
    for step in range(2_000):
        kept.append(tensor())
        before = clock.readings
        found |= watch.check(step) or {}
        if watch.counted:
            counted.append(step)
            assert clock.readings - before <= 103
        if "growing" in found:
            break
    assert found["growing"]["holder"].startswith("kept, a list made at test_growth.py:")
    assert len(counted) > 10
    # It begins only while it is below its share, and then takes a slice at most.
    assert clock.readings * growth.SLICE_NS // 100 <= growth.MOST_COST * step * 1e9 + 2 * growth.SLICE_NS


def test_elements_are_not_visited_but_counted() -> None:
    rows = [[number] for number in range(100_000)]
    kept: list[torch.Tensor] = []
    memory = Memory(MB)
    seen = 0
    original = growth._Count.container

    def container(self: Any, *args: Any) -> None:
        nonlocal seen
        seen += 1
        original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth._Count, "container", container)
        assert "growing" in memory.train(200, lambda _: kept.append(tensor()))
    assert len(rows) == 100_000
    assert seen < 100_000


def test_a_leak_in_every_second_step_is_named_within_a_hundred_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the steps of a job that holds 64 MiB more every second step; gc.freeze() hides nothing from a count."""
    kept: list[torch.Tensor] = []
    monkeypatch.setitem(globals(), "KEPT_BY_MODULE", kept)
    gc.freeze()
    others: list[list[int]] = [[] for _ in range(20)]  # what also gets longer, and faster

    def each(step: int) -> None:
        for other in others:
            other.extend(range(4))
        if step % 2:
            kept.append(torch.empty(16 * MB))

    found = Memory(32 * MB, step_s=0.05).train(100, each)["growing"]
    assert (found["element"], found["per_step"]) == (f"float32 [{16 * MB}]", 0.5)
    assert found["holder"].startswith("kept, a list")


def hostile(seen: list[str]) -> Any:
    """An object whose class, and whose class's class, note everything that is called on them, and raise."""

    def noting(name: str) -> Any:
        def called(*_: Any, **__: Any) -> Any:
            seen.append(name)
            raise RuntimeError(name)

        return called

    noted = (
        "__len__",
        "__eq__",
        "__hash__",
        "__iter__",
        "__getitem__",
        "__bool__",
        "__repr__",
        "__str__",
        "__sizeof__",
    )
    names = {name: noting(name) for name in (*noted, "__getattr__", "__getattribute__", "__instancecheck__")}
    meta = type("Meta", (type,), {**names, "__subclasscheck__": noting("__subclasscheck__")})
    properties = {
        name: property(noting(name)) for name in ("__class__", "shape", "dtype", "nbytes", "device", "grad_fn")
    }
    return type.__call__(meta, "Hostile", (), {**names, **properties})


def test_no_code_of_the_script_is_run() -> None:
    seen: list[str] = []
    cls = hostile(seen)
    new = object.__new__
    kept: list[Any] = []
    single = new(cls)
    by_name = {"inside": [single]}
    many = Memory(MB).train(200, lambda _: kept.append((new(cls), tensor())))["growing"]
    alone = Memory(MB).train(200, lambda _: kept.append(new(cls)))
    assert seen == []
    assert many["element"] == "tuple with float32 [512, 512]"
    assert alone == {}
    assert len(by_name) == 1


def test_subclasses_of_containers_and_tensors_run_nothing() -> None:
    seen: list[str] = []

    class Log(list[Any]):
        def __len__(self) -> int:
            seen.append("len")
            return 0

        def __getitem__(self, at: Any) -> Any:
            seen.append("item")
            raise IndexError

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append("function")
            return super().__torch_function__(function, *args, **kwargs)

    log, elements = Log(), [torch.empty(512, 512).as_subclass(Own) for _ in range(200)]
    seen.clear()
    found = Memory(MB).train(200, lambda step: log.append((elements[step], tensor())))["growing"]
    assert found["holder"].startswith("log, a Log made at test_growth.py:")
    assert found["element"] == "tuple with float32 [512, 512]"
    assert seen == []


def test_modes_of_the_script_see_nothing() -> None:
    seen: list[str] = []
    functions, operations = noting_modes(seen)
    weight = torch.ones(4, requires_grad=True)
    tensors = [weight.sum() for _ in range(200)]
    kept: list[torch.Tensor] = []
    with operations, functions:
        found = Memory(MB).train(200, lambda step: kept.append(tensors[step]))["growing"]
    assert (found["graph"], seen) == (True, [])


def test_locals_of_the_script_stay_as_they_are() -> None:
    """Up to Python 3.12 reading ``f_locals`` writes into the dict that ``locals()`` has returned."""
    kept: list[torch.Tensor] = []
    rate = 0.1
    config = locals()
    before = dict(config)
    later = "a batch"
    assert "growing" in Memory(MB).train(200, lambda _: kept.append(tensor()))
    assert config == before
    assert (rate, later, "later" in config) == (0.1, "a batch", False)


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
    assert 1 < times <= growth.MOST_PUBLISHED
    assert "device" not in told["floors"]


@pytest.mark.parametrize(("world_size", "most"), [(64, growth.MOST_PUBLISHED), (65, 3), (1025, 0)])
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
    assert 0 < len(higher) <= growth.MOST_PUBLISHED
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
