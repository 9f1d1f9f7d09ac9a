"""Loss, norm and learning rate of each step as the recorder sees them, and samples of layers after something odd."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clock import FakeClock
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stepscope.recorder import guard
from stepscope.recorder.device import Scalars
from stepscope.recorder.guard import ImportWatch, Patches
from stepscope.recorder.hooks import loss as hook
from stepscope.recorder.hooks.loss import StepValues
from stepscope.recorder.layers.sampler import LayerSampler, Schedule
from stepscope.recorder.ledger import Ledger
from tests.recorder.conftest import Recording

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """These loops take no time; others are looked at in every step if it takes 40 ms."""
    monkeypatch.setattr(hook, "SHORTEST_NS", 0)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


def rounded(*values: float) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def end(recording: Recording) -> dict[int, dict[str, Any]]:
    for ending in recording.recorder._ending:
        ending()
    return recording.seen()


# -- What is seen -----------------------------------------------------------------------------------------------------


def test_loss_and_norm_are_those_of_the_training(recording: Recording) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for _ in range(4):
        loss = model(X).square().mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seen = end(recording)
    assert list(seen) == [0, 1, 2, 3]
    assert [row["loss"] for row in seen.values()] == rounded(*losses)
    assert [row["grad_norm"] for row in seen.values()] == rounded(*norms)
    assert [row.get("lr") for row in seen.values()] == [None, 0.1, 0.1, 0.1]
    assert recording.notes() == []


def test_the_learning_rate_is_the_one_that_the_step_uses(recording: Recording) -> None:
    """Of the first group; the optimizer is not known before its first step."""
    model = two_layers()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 7.0}]
    optimizer = torch.optim.SGD(groups, lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(4):
        model(X).square().mean().backward()
        optimizer.step()
        scheduler.step()
    assert [row.get("lr") for row in end(recording).values()] == [None, *rounded(0.2, 0.1, 0.05)]


def test_short_steps_are_looked_at_every_10_ms_and_ranks_look_at_the_same_ones(
    clocked: Recording, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "SHORTEST_NS", 10_000_000)
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in range(96):
        clock.advance(3_000_000 if at < 48 else 12_000_000 if at < 60 else 900_000)
        model(X).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
    seen = end(clocked)
    assert [sorted(row) for row in seen.values()] == [
        ["grad_norm", "loss"],
        *[["grad_norm", "loss", "lr"]] * (len(seen) - 1),
    ]
    assert list(seen) == [0, 1, 2, *range(4, 49, 4), *range(50, 61), 64, 80]


def test_of_several_losses_the_last_counts_and_of_several_norms_all(recording: Recording) -> None:
    """Also with a backward inside another one, which is not the loss, and one that is given a gradient."""
    model, other = two_layers(), two_layers()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    checkpoint(model, X.clone().requires_grad_(), use_reentrant=True).mean().backward()  # type: ignore[no-untyped-call]
    last = other(X).sum()
    torch.autograd.backward([last])
    model(X).backward(torch.ones(6, 2))
    norms = [float(torch.nn.utils.clip_grad_norm_(one.parameters(), 1e9)) for one in (model, other)]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, math.inf)  # another kind of norm
    torch.nn.utils.get_total_norm([model[0].weight.grad])  # nothing is clipped
    optimizer.step()
    assert end(recording) == {0: {"loss": rounded(last.item())[0], "grad_norm": rounded(math.hypot(*norms))[0]}}


def test_a_norm_that_the_script_computed_itself(recording: Recording) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    optimizer.step()
    assert end(recording)[0]["grad_norm"] == rounded(float(norm))[0]


def test_a_scaler_changes_neither(recording: Recording) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses, norms = [], []
    for at in range(4):
        loss = model(X).square().mean()
        scaler.scale(loss).backward()
        if at == 2:
            model[0].weight.grad.fill_(math.inf)
        if at:  # at first, the script clips what is still scaled
            scaler.unscale_(optimizer)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    seen = end(recording)
    assert [row["loss"] for row in seen.values()] == rounded(*losses)
    assert [row.get("grad_norm") for row in seen.values()] == [None, rounded(norms[1])[0], None, rounded(norms[3])[0]]


def test_modes_and_odd_tensors_are_left_alone(recording: Recording) -> None:
    class Counting(TorchDispatchMode):
        calls: list[str] = []  # noqa: RUF012 - of this test only

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(str(func))
            return func(*args, **(kwargs or {}))

    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with Counting() as mode:
        weight.sum().backward()
    assert not any("item" in call or "_local_scalar" in call for call in mode.calls)
    optimizer.step()
    (weight * (1 + 0j)).sum().abs().backward()
    optimizer.step()
    assert [sorted(row) for row in end(recording).values()] == [["loss", "lr"]]


def test_sharded_models(recording: Recording, two_ranks: None) -> None:
    """Both return the norm over all ranks."""
    model = two_layers()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert end(recording)[0]["grad_norm"] == rounded(float(norm.full_tensor()))[0]
    wrapped = FullyShardedDataParallel(two_layers(), device_id=torch.device("cpu"))
    wrapped(X).sum().backward()
    norm = wrapped.clip_grad_norm_(1.0)
    optimizer.step()
    assert end(recording)[1]["grad_norm"] == rounded(float(norm))[0]


def test_losses_are_the_same_with_and_without(recording: Recording) -> None:
    def train() -> list[float]:
        model = two_layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        found = []
        for _ in range(5):
            loss = nn.functional.dropout(model(X), 0.5).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    seen = train()
    patched = torch.autograd.backward, torch.nn.utils.clip_grad_norm_
    try:
        torch.autograd.backward, torch.nn.utils.clip_grad_norm_ = (one.__wrapped__ for one in patched)  # type: ignore[attr-defined]
        assert train() == seen
    finally:
        torch.autograd.backward, torch.nn.utils.clip_grad_norm_ = patched


# -- What is stored ---------------------------------------------------------------------------------------------------


class Stub:
    """As much of a recorder as ``StepValues`` needs."""

    def __init__(self, rank: int = 0) -> None:
        self.step = 0
        self.capturing = False
        self.identity = SimpleNamespace(rank=rank)
        self.clock = FakeClock()
        self.ledger = Ledger(self.clock, lambda _phase: False)
        self.notes: list[tuple[int, bytes]] = []
        self.odd: list[str] = []
        self.when_forked = self.when_ending = lambda _callback: None
        self.suspect = self.odd.append
        self.optimizer: object = None

    def closing_optimizer(self) -> object:
        return self.optimizer

    def note_at(self, step: int, text: bytes) -> None:
        self.notes.append((step, text))


Made = Callable[[Stub], StepValues]


@pytest.fixture
def values_of() -> Iterator[Made]:
    patches, watch = Patches(), ImportWatch()
    yield lambda stub: StepValues(stub, torch, patches, watch, {})  # type: ignore[arg-type]
    patches.undo()
    watch.remove()


@pytest.mark.parametrize(
    ("rank", "first", "count"), [(0, [0, 1, 2, 3], 1024 + 4 * 512), (7, [0, 1, 2, 3], 3072), (8, [0, 64, 128, 192], 48)]
)
def test_long_runs_and_many_ranks_store_fewer_values(rank: int, first: list[int], count: int, values_of: Made) -> None:
    stub = Stub(rank)
    values = values_of(stub)
    for step in range(1 << 14):
        values._store(step, 1.0, None)
    assert [step for step, _ in stub.notes[:4]] == first
    assert len(stub.notes) == count


def test_the_first_value_that_is_no_number_is_stored_with_the_one_before(values_of: Made) -> None:
    stub = Stub(rank=100)
    values = values_of(stub)
    for step in range(1, 60):
        values._store(step, math.nan if 30 <= step < 40 else 2.0, 1.0)
    assert [step for step, _ in stub.notes] == [29, 30, 31, 32, 33, 39, 40]
    assert stub.notes[0][1] == b'{"~loss":2,"~grad_norm":1}'
    assert stub.notes[1][1] == b'{"~loss":"nan","~grad_norm":1}'


def test_values_on_a_device_are_copied_together_and_stored_when_they_have_arrived(
    monkeypatch: pytest.MonkeyPatch, values_of: Made
) -> None:
    """At most every 250 ms or 16 steps, never waited for, and dropped if too many are on their way."""
    stub = Stub()
    values = values_of(stub)
    stub.clock.now_ns = 1_000_000_000
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def step(number: int, loss: float, *norms: float, ms: int = 20, dtype: Any = torch.float32) -> None:
        stub.clock.advance(ms * 1_000_000)
        values._device_loss = torch.tensor([loss], dtype=dtype)
        values._device_norms = [torch.tensor(norm) for norm in norms]
        stub.step = number + 1
        values._step = number
        values._flush()

    with monkeypatch.context() as patched:
        patched.setattr(Scalars, "arrived", lambda _: False)
        step(0, 1.0, 2.0)  # the first is copied at once
        step(1, 1.125, 3.0, dtype=torch.bfloat16)
        step(2, 1.2, 3.0, 4.0)
        assert (values._made, len(values._uncopied), stub.notes) == (1, 2, [])
        step(3, math.inf, ms=250)
        assert (values._made, len(values._uncopied)) == (2, 0)
        for number in range(4, 4 + 16):
            step(number, 1.0, ms=1)
        assert (values._made, len(values._uncopied)) == (3, 0)
        for number in range(20, 40):
            step(number, 1.0, ms=250)
        assert (values._made, len(values._uncopied)) == (8, 0)
    values._receive()
    assert stub.notes[:4] == [
        (0, b'{"~loss":1,"~grad_norm":2}'),
        (1, b'{"~loss":1.125,"~grad_norm":3}'),
        (2, b'{"~loss":1.2,"~grad_norm":5}'),
        (3, b'{"~loss":"inf"}'),
    ]
    assert stub.odd == ["nonfinite"]
    assert len(stub.notes) == 4 + 16 + 5  # what came while eight were on their way is lost


def test_losses_that_may_not_be_read_cost_no_look_in_every_step(
    monkeypatch: pytest.MonkeyPatch, values_of: Made
) -> None:
    """Such as a vector."""
    monkeypatch.setattr(hook, "SHORTEST_NS", 20_000_000)
    stub = Stub()
    values = values_of(stub)
    looked = []
    for step in range(96):
        stub.step = step
        stub.clock.advance(1_000_000)
        if step >= values.due:
            looked.append(step)
            values.see((torch.ones(3),), {})
    assert looked == [0, 1, 2, 16, 17, 32, 33, 64, 65]
    assert stub.notes == []


def test_nothing_is_asked_of_a_device_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, values_of: Made
) -> None:
    """A question whether numbers have arrived would end the capture, and with it the script."""
    stub = Stub()
    values = values_of(stub)
    monkeypatch.setattr(values, "_receive", lambda: pytest.fail("asked"))
    values._under_way.append((Scalars(torch), []))
    stub.step, stub.capturing = 3, True
    values.see((torch.tensor(1.0),), {})
    assert values._loss is None
    # Not every capture is known to the recorder, but the stream knows.
    stub.capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    values.see((torch.tensor(1.0),), {})
    assert len(values._under_way) == 1


def test_a_forked_child_destroys_nothing_on_the_device(values_of: Made) -> None:
    values = values_of(Stub())
    held, current = torch.tensor(1.0), torch.tensor(2.0)
    alive = [weakref.ref(held), weakref.ref(current)]
    values._uncopied.append((0, held, [], None))
    values._device_loss = current
    del held, current
    values._forget_in_child()
    assert (values._uncopied, values._device_loss) == ([], None)
    assert all(one() is not None for one in alive)


def test_a_device_that_failed_is_no_news_at_the_end(monkeypatch: pytest.MonkeyPatch, values_of: Made) -> None:
    stub = Stub()
    values = values_of(stub)
    stub.ledger.thread = get_ident()
    asked = []

    def capturing() -> bool:
        asked.append(1)
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    failures = guard.failures()
    values._under_way.append((Scalars(torch), []))
    values._end()
    assert asked
    assert guard.failures() == failures


@pytest.mark.parametrize(("step_ms", "stride"), [(50, 1), (39, 4), (10, 16), (1, 128)])
def test_short_steps_on_a_device_are_looked_at_every_100_ms(
    monkeypatch: pytest.MonkeyPatch, values_of: Made, step_ms: int, stride: int
) -> None:
    monkeypatch.setattr(hook, "SHORTEST_NS", 40_000_000)
    stub = Stub()
    values = values_of(stub)
    values._on_device = True
    for step in range(1_024):
        stub.step = step
        stub.clock.advance(step_ms * 1_000_000)
        if step >= values.due:
            values.see((torch.ones(3),), {})
    assert values._stride == stride


def test_the_learning_rate_alone_is_stored_of_the_steps_that_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, values_of: Made
) -> None:
    """Where the loss is no number; it changes nothing about values that are not finite."""
    monkeypatch.setattr(hook, "SHORTEST_NS", 20_000_000)
    stub = Stub()
    values = values_of(stub)
    stub.optimizer = SimpleNamespace(param_groups=[{"lr": 0.25}])
    for step in range(40):
        stub.step = step
        stub.clock.advance(1_000_000)
        if step >= values.due:
            values.see((torch.ones(3),), {})
    assert stub.notes == [(step, b'{"~lr":0.25}') for step in (0, 1, 16)]
    values._store(2001, math.nan, None)
    values._store(2003, None, None, 0.5)
    values._store(2005, math.nan, None)
    assert [step for step, _ in stub.notes[-2:]] == [2001, 2005]


class Broken:
    reads = 0

    @property
    def param_groups(self) -> Any:
        self.reads += 1
        raise RuntimeError


def test_learning_rates_that_are_no_plain_numbers(values_of: Made) -> None:
    def seen(rate: Any) -> float | None:
        stub = Stub()
        values = values_of(stub)
        stub.optimizer = SimpleNamespace(param_groups=[{"lr": rate}])
        values.see((torch.ones(3),), {})
        return values._rate

    assert (seen(1), seen(torch.tensor(0.5)), seen(torch.tensor(0.5, device="meta")), seen("warm-up"), seen(None)) == (
        *(1.0, 0.5),
        *(None, None, None),
    )
    stub = Stub()
    values = values_of(stub)
    stub.optimizer = broken = Broken()
    for _ in range(3):
        values.see((torch.tensor(2.0),), {})
    assert (broken.reads, values._loss) == (1, 2.0)
    stub.optimizer = SimpleNamespace(param_groups=[])
    values_of(stub).see((torch.ones(3),), {})


# -- Samples after something odd --------------------------------------------------------------------------------------


def test_two_steps_after_something_odd_are_sampled_a_few_times() -> None:
    schedule = Schedule(every_step=False, now=FakeClock())
    found, odd = [], []
    for step in range(2000):
        if schedule.suspect(step, "skipped" if step < 1000 else "nonfinite"):
            odd.append(step)
        if step + 1 == schedule.next:
            found.append(step + 1)
            schedule.sampled(step + 1, 0)
    assert odd == [0, 40, 1000, 1040, 1080, 1120]
    assert [step for step in found if step - 1 in odd or step - 2 in odd] == [
        1, 2, 41, 42, 1001, 1002, 1041, 1042, 1081, 1082, 1121, 1122,
    ]  # fmt: skip
    assert {11, 37} < set(found), "the regular ones are as they were"
    assert not Schedule(every_step=True, now=FakeClock()).suspect(5, "slow")


@pytest.fixture
def sampled(clocked: Recording, clock: FakeClock) -> Recording:
    sampler = clocked.recorder.layers
    assert isinstance(sampler, LayerSampler)
    sampler._now = clock
    return clocked


def trained(recording: Recording, clock: FakeClock, steps: int, odd: dict[int, str]) -> list[int]:
    """The steps in which layers were sampled."""
    sampler: Any = recording.recorder.layers
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    found = []
    for at in range(steps):
        clock.advance(200_000_000 if odd.get(at) == "slow" else 50_000_000)
        if sampler.sampling:  # hooks would not show it: there are none once another test has compiled something
            found.append(at)
        optimizer.zero_grad()
        loss = model(X).square().mean()
        if odd.get(at) == "loss":
            (model(X).sum() * math.nan).backward()
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        if odd.get(at) == "note":
            recording.recorder.note(b'{"accuracy":"nan"}')
        if odd.get(at) == "skipped":
            model[0].weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
    return found


def test_a_bad_value_a_skipped_and_a_slow_step_are_followed_by_samples(sampled: Recording, clock: FakeClock) -> None:
    odd = {20: "loss", 65: "note", 110: "skipped", 160: "slow", 170: "slow"}
    assert trained(sampled, clock, 200, odd) == [11, 21, 22, 37, 66, 67, 111, 112, 137, 161, 162]


def test_memory_that_jumps_is_followed_by_samples(
    sampled: Recording, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = itertools.chain([1 << 30, (1 << 30) + (300 << 20)], itertools.repeat(1 << 30))
    monkeypatch.setattr(sampled.recorder._growth, "_read", lambda: (next(used), 0))
    monkeypatch.setattr(sampled.recorder._growth, "_now_s", lambda: clock.now_ns / 1e9)
    sampled.recorder._growth._read_s = 0.0
    assert trained(sampled, clock, 160, {}) == [11, 33, 34, 37, 137]
