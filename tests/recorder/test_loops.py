"""Training loops as people write them, each on the real torch, each accounted for to the nanosecond."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from clock import FakeClock
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stepscope.records.steps import FLAG_COMPILED, FLAG_EPOCH_START, FLAG_FIRST, FLAG_SKIPPED, OTHER
from tests.recorder.conftest import Recording

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


def batches(number: int, size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(number * size, 8), torch.zeros(number * size, dtype=torch.long)), size)


def train(model: nn.Module, data: Any, optimizer: torch.optim.Optimizer) -> None:
    loss_of = nn.CrossEntropyLoss()
    for x, y in data:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


def test_the_plain_loop(recording: Recording) -> None:
    model = Net()
    train(model, batches(10), torch.optim.SGD(model.parameters(), lr=0.1))
    steps = recording.steps()
    assert len(steps) == 10
    for phase in ("input", "forward", "backward", "optimizer"):
        assert (recording.phase(phase) > 0).all(), phase
    for phase in ("comm", "eval", "checkpoint", "h2d"):
        assert (recording.phase(phase) == 0).all(), phase
    assert (steps["micro_batches"] == 1).all()
    assert (steps["forwards"] == 1).all()
    assert list(steps["batches"]) == [2] + [1] * 9  # making the iterator is a wait for input too
    assert steps["flags"][0] & (FLAG_FIRST | FLAG_EPOCH_START) == FLAG_FIRST | FLAG_EPOCH_START
    assert (steps["flags"][4:] == 0).all()


def test_after_the_search_only_roots_are_timed_and_torch_is_its_own_again(recording: Recording) -> None:
    model = Net()
    train(model, batches(6), torch.optim.SGD(model.parameters(), lr=0.1))
    assert "__call__" in vars(Net)
    assert "__call__" not in vars(nn.Linear)
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_gradient_accumulation_counts_micro_batches(recording: Recording) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, (x, _) in enumerate(batches(12), start=1):
        model(x).sum().backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    steps = recording.steps()
    assert list(steps["micro_batches"]) == [4, 4, 4]
    assert list(steps["batches"]) == [5, 4, 4]


def test_two_models_and_two_optimizers(recording: Recording) -> None:
    generator, critic = nn.Linear(8, 8), Net()
    optimizers = [torch.optim.Adam(critic.parameters()), torch.optim.Adam(generator.parameters())]
    for x, _ in batches(10):
        critic(generator(x).detach()).mean().backward()
        optimizers[0].step()
        critic(generator(x)).mean().backward()
        optimizers[1].step()
    steps = recording.steps()
    assert len(steps) == 11  # the first critic step could not know that a generator would follow
    assert (steps["micro_batches"][2:] == 2).all()
    assert (steps["forwards"][4:] == 4).all()


@pytest.mark.parametrize("keeps", [{}, {"create_graph": True}, {"retain_graph": True}])
def test_autograd_grad_is_backward_unless_it_keeps_the_graph(recording: Recording, keeps: dict[str, bool]) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches(6):
        parameters = list(model.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(model(x).sum(), parameters, **keeps), strict=True
        ):
            parameter.grad = gradient.detach()
        optimizer.step()
    assert list(recording.steps()["micro_batches"]) == [0 if keeps else 1] * 6
    assert ((recording.phase("backward") > 0) == (not keeps)).all()


def test_autograd_grad_inside_of_a_model_is_forward(recording: Recording) -> None:
    class Energy(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            (force,) = torch.autograd.grad(super().forward(x).sum(), x)
            return super().forward(x + force)

    model = Energy()
    train(model, batches(6), torch.optim.SGD(model.parameters(), lr=0.1))
    assert (recording.steps()["micro_batches"] == 1).all()


def test_parameters_updated_by_hand_in_marked_steps(recording: Recording) -> None:
    model = Net()
    for x, _ in batches(6):
        recording.recorder.begin()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(model(x).sum(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        recording.recorder.end_step()
    assert list(recording.steps()["micro_batches"]) == [1] * 6
    assert (recording.phase("forward") > 0).all()


def test_grad_scaler_skips_are_steps_that_say_so(recording: Recording) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, (x, _) in enumerate(batches(6)):
        optimizer.zero_grad()
        loss = model(x).sum() * (float("inf") if number == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    flags = recording.steps()["flags"]
    assert [bool(flag & FLAG_SKIPPED) for flag in flags] == [False, False, False, True, False, False]


def test_lbfgs_closures_count_as_forward_and_backward(recording: Recording) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(4, 8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    steps = recording.steps()
    assert len(steps) == 4
    assert (steps["micro_batches"] >= 2).all()
    assert (recording.phase("forward")[1:] > 0).all()
    assert (recording.phase("optimizer") > 0).all()


def test_a_loop_without_dataloader_and_without_modules_still_has_steps(recording: Recording) -> None:
    weight = torch.zeros(8, 3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(30):
        (torch.randn(4, 8) @ weight).sum().backward()
        optimizer.step()
    assert len(recording.steps()) == 30
    assert (recording.phase("backward") > 0).all()
    assert (recording.phase("forward") == 0).all()


def test_forward_called_by_name(recording: Recording) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches(8):
        model.forward(x).sum().backward()
        optimizer.step()
    assert (recording.steps()["forwards"][4:] == 1).all()
    assert (recording.phase("forward")[4:] > 0).all()


def test_forward_called_by_name_can_still_be_scripted(recording: Recording) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches(6):
        model.forward(x).sum().backward()
        optimizer.step()
    scripted = torch.jit.script(model)
    x = torch.randn(2, 8)
    assert torch.equal(scripted(x), model(x))


def test_a_scripted_model_is_timed(recording: Recording) -> None:
    model: Any = torch.jit.script(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches(8):
        model(x).sum().backward()
        optimizer.step()
    assert (recording.steps()["forwards"][4:] == 1).all()
    assert (recording.phase("forward")[4:] > 0).all()


def test_another_model_later_is_found_again(recording: Recording) -> None:
    first, second = Net(), nn.Bilinear(8, 8, 3)
    for model, call in ((first, first), (second, lambda x: second(x, x))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, _ in batches(8):
            call(x).sum().backward()
            optimizer.step()
    assert list(recording.steps()["forwards"]) == [1] * 16  # a new loader is a reason to look


def test_another_model_later_is_found_without_a_loader_too(recording: Recording) -> None:
    first, second = Net(), nn.Bilinear(8, 8, 3)
    for model, call in ((first, first), (second, lambda x: second(x, x))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            call(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    forwards = recording.steps()["forwards"]
    assert list(forwards[1:8]) == [1] * 7
    assert forwards[8] == 0  # the step in which the old root was missed
    assert list(forwards[9:]) == [1] * 7


def test_evaluation_and_its_input_are_not_training(recording: Recording) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, batches(5), optimizer)
    model.eval()
    with torch.no_grad():
        for x, _ in batches(5):
            model(x)
    for x, _ in batches(2):  # eval mode, gradients forgotten
        model(x)
    model.train()
    train(model, batches(2), optimizer)
    steps = recording.steps()
    assert list(steps["forwards"]) == [1] * 7
    evaluation = recording.phase("eval")
    assert evaluation[5] > 0
    assert (evaluation[[0, 1, 2, 3, 4, 6]] == 0).all()
    assert steps["batches"][5] > 5


def test_fine_tuning_in_eval_mode_is_training(recording: Recording) -> None:
    model = Net().eval()
    train(model, batches(6), torch.optim.SGD(model.parameters(), lr=0.1))
    assert (recording.phase("forward") > 0).all()
    assert (recording.phase("eval") == 0).all()


def test_a_model_left_in_eval_mode_is_trained_all_the_same(recording: Recording) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, batches(5), optimizer)
    model.eval()  # for an evaluation, after which the script forgets train()
    train(model, batches(5), optimizer)
    forward, evaluation = recording.phase("forward") > 0, recording.phase("eval") > 0
    assert list(forward[5:]) == [False, True, True, True, True]  # the first such step shows that it trains
    assert list(evaluation[5:]) == [True, False, False, False, False]


def test_saving_is_a_checkpoint(recording: Recording) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, batches(3), optimizer)
    torch.save(model.state_dict(), io.BytesIO())
    train(model, batches(2), optimizer)
    assert [bool(spent) for spent in recording.phase("checkpoint")] == [False, False, False, True, False]


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_recomputes_inside_backward(recording: Recording, reentrant: bool) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches(6):
        checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).sum().backward()
        optimizer.step()
    assert (recording.steps()["micro_batches"] == 1).all()
    assert (recording.steps()["forwards"] <= 1).all()


@pytest.mark.parametrize(("step_ms", "every_step"), [(1, False), (50, True)])
def test_what_is_compiled_later_is_found_in_its_step_without_checking_each_short_one(
    clocked: Recording, clock: FakeClock, nothing_is_compiled_yet: None, step_ms: int, every_step: bool
) -> None:
    class Figures:
        every_step = False
        steps: ClassVar[list[int]] = []

        def words(self) -> list[int]:
            self.steps.append(clocked.recorder.step - 1)
            return []

    class Compiling(Net):
        def forward(self, x: torch.Tensor) -> Any:
            step = clocked.recorder.step
            clock.advance(step_ms * 1_000_000)
            if step in (2, 300):
                torch._dynamo.utils.counters["stats"]["unique_graphs"] += 1
                clock.advance(40_000_000)
            return super().forward(x)

    clocked.recorder.watch_backward(Figures())
    model = Compiling()
    train(model, batches(400), torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(np.flatnonzero(clocked.steps()["flags"] & FLAG_COMPILED)) == [2, 300]
    checked = [step for step in Figures.steps if step > 100]
    assert 300 in checked
    assert len(checked) == 299 if every_step else len(checked) < 30
    torch._dynamo.reset()


def test_a_compiled_model_is_timed_and_its_graph_is_whole(recording: Recording) -> None:
    torch._dynamo.reset()
    model = torch.compile(Net(), backend="eager", fullgraph=True)
    train(model, batches(8), torch.optim.SGD(model.parameters(), lr=0.1))
    steps = recording.steps()
    assert steps["flags"][0] & FLAG_COMPILED
    assert not (steps["flags"][1:] & FLAG_COMPILED).any()
    assert (recording.phase("forward") > 0).all()
    torch._dynamo.reset()


def test_a_model_timed_before_it_is_compiled_keeps_a_whole_graph(recording: Recording) -> None:
    torch._dynamo.reset()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, batches(5), optimizer)
    train(torch.compile(model, backend="eager", fullgraph=True), batches(5), optimizer)  # type: ignore[arg-type]
    assert len(recording.steps()) == 10
    assert (recording.phase("forward")[6:] > 0).all()
    torch._dynamo.reset()


def test_a_compiled_optimizer_step_still_ends_steps(recording: Recording) -> None:
    torch._dynamo.reset()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for x, _ in batches(5):
        model(x).sum().backward()
        step()
    assert len(recording.steps()) == 5
    torch._dynamo.reset()


def test_copies_and_pickles_of_a_model_carry_nothing_of_ours(recording: Recording) -> None:
    model = Net()
    train(model, batches(6), torch.optim.SGD(model.parameters(), lr=0.1))
    assert not any("stepscope" in repr(value) for value in vars(model).values())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.head.weight.zero_()
        twin.head.bias.zero_()
    x = torch.randn(2, 8)
    assert torch.equal(twin(x), torch.zeros(2, 3))
    assert not torch.equal(model(x), torch.zeros(2, 3))
    # The class lives in a test module that pickle cannot import; a stock class goes all the way.
    stock = nn.Sequential(nn.Linear(8, 3))
    train(stock, batches(6), torch.optim.SGD(stock.parameters(), lr=0.1))
    data = pickle.dumps(stock)
    assert b"stepscope" not in data
    assert torch.equal(pickle.loads(data)(x), stock(x))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for _ in range(24):
            yield torch.randn(8), 0


@pytest.mark.parametrize("workers", [0, 1])
def test_iterable_datasets_with_and_without_workers(recording: Recording, workers: int) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, DataLoader(Stream(), 4, num_workers=workers), optimizer)
    assert len(recording.steps()) == 6
    assert (recording.phase("input") > 0).all()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_stateful_dataloader_of_torchdata(recording: Recording, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, 8), torch.zeros(24, dtype=torch.long))
    train(model, stateful.StatefulDataLoader(data, 4, num_workers=workers), optimizer)
    steps = recording.steps()
    assert list(steps["batches"]) == [2] + [1] * 5
    assert (recording.phase("input") > 0).all()


def test_modules_used_as_transforms_are_input_not_forward(recording: Recording) -> None:
    class Transformed(TensorDataset):
        transform = nn.Linear(8, 8)

        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return self.transform(x).detach(), y

    model = Net()
    data = Transformed(torch.randn(24, 8), torch.zeros(24, dtype=torch.long))
    train(model, DataLoader(data, 4), torch.optim.SGD(model.parameters(), lr=0.1))
    assert (recording.steps()["forwards"] == 1).all()


def test_an_exception_in_the_loop_leaves_the_ledger_straight(recording: Recording) -> None:
    class Failing(torch.optim.SGD):
        fail = False

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise RuntimeError("bad step")
            return super().step(closure)

    model = Net()
    optimizer = Failing(model.parameters(), lr=0.1)
    for number, (x, _) in enumerate(batches(10)):
        optimizer.fail = number == 4
        try:
            if number == 6:
                model(torch.randn(3, 5))  # wrong shape: raises inside forward
            model(x).sum().backward()
            optimizer.step()
        except RuntimeError:
            optimizer.zero_grad()
    steps = recording.steps()
    assert len(steps) == 8
    assert recording.recorder.ledger.phase == OTHER


def test_a_process_that_only_infers_makes_no_ring(recording: Recording) -> None:
    model = Net()
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(2, 8))
    assert recording.recorder.ring is None


class Failing(torch.optim.SGD):
    """Raises in its n-th step."""

    def __init__(self, parameters: Any, at: int) -> None:
        super().__init__(parameters, lr=0.1)
        self._left = at

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self._left -= 1
        if not self._left:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().step(closure)


@pytest.mark.parametrize("same", [True, False])
def test_a_step_that_raises_does_not_end_the_recording(recording: Recording, same: bool) -> None:
    """A batch that does not fit, and a second try: with the same optimizer, or with a new model and a new one."""
    model = Net()
    optimizer = Failing(model.parameters(), at=4)
    with pytest.raises(torch.OutOfMemoryError):
        train(model, batches(10), optimizer)
    if not same:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[assignment]
    train(model, batches(20), optimizer)
    assert len(recording.steps()) == 3 + 20
    assert recording.recorder.ledger.phase == OTHER


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer inside its own step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


def test_an_optimizer_inside_another_is_one_step_also_after_one_that_raised(recording: Recording) -> None:
    model = Net()
    with pytest.raises(torch.OutOfMemoryError):
        train(model, batches(5), Lookahead(Failing(model.parameters(), at=3)))
    train(model, batches(6), Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert len(recording.steps()) == 2 + 6


def test_optimizers_of_other_threads_do_not_touch_the_steps_of_the_one_that_trains(recording: Recording) -> None:
    model, other = Net(), Net()
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    train(model, batches(2), mine)
    inside, go_on = threading.Event(), threading.Event()

    def halfway(*_: Any) -> None:
        inside.set()
        assert go_on.wait(60)

    theirs.register_step_pre_hook(halfway)
    thread = threading.Thread(target=theirs.step)
    thread.start()
    assert inside.wait(60)
    train(model, batches(30), mine)  # while the other one is in its step
    go_on.set()
    thread.join()
    train(model, batches(3), mine)
    assert len(recording.steps()) == 35


def test_a_note_after_the_optimizer_belongs_to_the_step_that_ended(recording: Recording) -> None:
    """Also a second one, and after the learning rate has changed; before the optimizer it is the current step."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for x, y in batches(4):
        recording.recorder.note(b"batch taken")
        recording.recorder.note(b"and its size")
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        recording.recorder.note(b"backward done")
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        float(loss.item())
        recording.recorder.note(b"step done")
        recording.recorder.note(b"again")
    assert recording.noted_steps() == [step for step in range(4) for _ in range(5)]
