"""What sampled steps show of real models on the CPU, and that nothing of it remains on them."""

from __future__ import annotations

import copy
import errno
import gc
import io
import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from clock import FakeClock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_modes import noting_modes

import stepscope
from stepscope.recorder import bootstrap, device, guard
from stepscope.recorder.device import StreamMarks
from stepscope.recorder.instrumentation import Instrumentation
from stepscope.recorder.layers import sampled_step, sampler
from stepscope.recorder.layers import tree as trees
from stepscope.recorder.layers.autograd_graph import AutogradGraph
from stepscope.recorder.layers.sampled_step import Scalars
from stepscope.recorder.layers.sampler import Schedule
from stepscope.recorder.layers.tree import ModuleTree
from stepscope.records.paths import ENV_LAYERS
from stepscope.records.steps import FLAG_SAMPLED
from stepscope.store.load import open_run
from tests.recorder.conftest import Layers, forgive_failures

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("nothing_is_compiled_yet"),
]

FLOAT = 4
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, steps: int, *, lr: float = 0.1, x: torch.Tensor = X) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return optimizer


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


# -- Memory -----------------------------------------------------------------------------------------------------------


def test_bytes_of_a_known_model_with_adamw(layers: Layers) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()
    parameters = {"0": (32 + 4) * FLOAT, "1": 8 * FLOAT, "3": 8 * FLOAT}
    assert layers.by_name("parameters") == parameters
    assert layers.by_name("gradients") == parameters
    tensors = {"0": 2, "1": 2, "3": 1}  # AdamW has two of the same size for each, and a counter
    assert layers.by_name("optimizer") == {name: 2 * size + tensors[name] * FLOAT for name, size in parameters.items()}
    assert layers.by_name("buffers") == {"1": 2 * 4 * FLOAT + 8}
    rows = len(X)
    # Each tensor counts once, for the module that saved it first: the last layer needs what ReLU has saved.
    assert layers.by_name("activations") == {
        "0": rows * 8 * FLOAT,  # the batch
        "1": rows * 4 * FLOAT + 2 * 4 * FLOAT,  # its input, mean and deviation
        "2": rows * 4 * FLOAT,
    }
    model_tree, _ = layers.last()
    assert [(module.name, module.type, module.parent, module.elements) for module in model_tree.modules] == [
        ("", "Sequential", -1, 0),
        ("0", "Linear", 0, 36),
        ("1", "BatchNorm1d", 0, 8),
        ("2", "ReLU", 0, 0),
        ("3", "Linear", 0, 8),
    ]


def three_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 2, bias=False))


def peaks(layers: Layers) -> dict[str, tuple[int, str | None]]:
    tree, sample = layers.last()
    return {phase: (size, None if at is None else tree.modules[at].name) for phase, (size, at) in sample.peaks.items()}


def test_the_peak_of_each_phase_is_added_up(layers: Layers) -> None:
    train(three_layers(), 3)
    first, second, third = 8 * 16 * FLOAT, 16 * 16 * FLOAT, 16 * 2 * FLOAT
    held = first + second + third
    batch, wide, narrow = len(X) * 8 * FLOAT, len(X) * 16 * FLOAT, len(X) * 2 * FLOAT
    assert layers.by_name("activations") == {"0": batch, "1": wide, "2": wide, "": narrow}  # the loss needs the output
    assert peaks(layers) == {
        "forward": (held + batch + 2 * wide + narrow, "2"),
        # At the second layer: two inputs are left; the gradient that comes in, and the two that it computes; and the
        # gradient of the third layer.
        "backward": (held + batch + wide + wide + (wide + second) + third, "1"),
        "optimizer": (2 * held, None),
    }


def test_gradients_that_were_there_before_count_from_the_start(layers: Layers) -> None:
    model = three_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(2):
            model(X).square().mean().backward()
        optimizer.step()
    held = FLOAT * (8 * 16 + 16 * 16 + 16 * 2)
    kept = FLOAT * len(X) * (8 + 16 + 16 + 2)
    flowing = FLOAT * (len(X) * 16 * 2 + 16 * 16)  # at the second layer, where 2 + 16 of the 42 columns are free again
    assert peaks(layers) == {
        "forward": (2 * held + kept, "2"),
        "backward": (2 * held + kept - FLOAT * len(X) * (2 + 16) + flowing, "1"),
        "optimizer": (2 * held, None),
    }


def test_of_several_micro_batches_the_one_that_needs_most_counts(layers: Layers) -> None:
    model = three_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            model(X).square().mean().backward()
        optimizer.step()
    held = FLOAT * (8 * 16 + 16 * 16 + 16 * 2)
    # Not the first one, before which there are no gradients.
    assert peaks(layers)["forward"] == (2 * held + FLOAT * len(X) * (8 + 16 + 16 + 2), "2")


class TenMicrosecondsApart:
    """Marks on a stream, and what it takes from one to the next."""

    complete = True

    def __init__(self) -> None:
        self.count = 0

    def start(self, device: int | None) -> None:
        assert device == 1
        self.count = 0

    def mark(self) -> int:
        self.count += 1
        return self.count - 1

    def passed(self) -> bool:
        return True

    def read(self) -> list[float]:
        return [10.0 * at for at in range(self.count)]


def test_on_a_gpu_layers_have_device_times_and_the_allocator_is_read_once(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the allocator, and one for events on the stream."""
    model = three_layers()
    train(model, 2)
    on_the_cpu = peaks(layers)
    read: list[int] = []

    def stats(index: int) -> dict[str, Any]:
        read.append(index)
        return {"allocated_bytes": {"all": {"current": 15, "peak": 50}}}

    def graph(torch: Any, parameters: Any, buffers: Any, device_type: str, **kwargs: Any) -> AutogradGraph:
        assert device_type == "cuda"
        return AutogradGraph(torch, parameters, buffers, "cpu", **kwargs)

    monkeypatch.setattr(sampled_step, "_device_index", lambda trees: 1)
    monkeypatch.setattr(sampled_step, "_on_one_gpu", lambda trees: True)
    monkeypatch.setattr(sampled_step, "AutogradGraph", graph)
    monkeypatch.setattr(layers.sampler, "_reading", (Scalars(torch), TenMicrosecondsApart()))  # used again and again
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", stats, raising=False)
    train(model, 1)  # the step after the next one is the first that begins with it
    assert read == []
    train(model, 1)
    assert read == [1]
    _, sample = layers.last()
    assert (sample.device_bytes, sample.device_peak) == (15, 50)
    assert peaks(layers) == on_the_cpu
    assert sample.clock == "device"
    # Between two marks of each layer; of the model 10 marks, without three intervals in which our hook is at work.
    assert layers.by_name("forward_us") == {"": 70.0, "0": 10.0, "1": 10.0, "2": 10.0}
    assert layers.by_name("backward_us") == {"0": 10.0, "1": 10.0, "2": 10.0}
    assert set(layers.by_name("host_forward_us")) == {"", "0", "1", "2"}
    assert set(layers.by_name("host_backward_us")) == {"0", "1", "2"}


def test_an_output_that_is_a_view_or_changed_in_place_counts_once(layers: Layers) -> None:
    train(nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Identity(), nn.Linear(4, 2)), 3)
    rows = len(X)
    # The batch, ReLU's output, which the last layer gets as a view of a view, and the output, which the loss needs.
    assert layers.by_name("activations") == {"0": rows * 8 * FLOAT, "1": rows * 4 * FLOAT, "": rows * 2 * FLOAT}


def test_memory_that_is_used_again_counts_for_the_layer_that_uses_it_now(layers: Layers) -> None:
    wide = 1 << 15  # freed memory of this size is used at once by whoever asks for as much

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(wide))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.by

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scale()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x)  # backward does not need what ``inner`` returned

    train(nn.Sequential(nn.Linear(8, wide), *(Residual() for _ in range(6)), nn.Linear(wide, 2)), 3)
    assert "6.inner" in layers.by_name("activations")


def test_micro_batches_add_their_times_but_not_their_activations(layers: Layers) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        for _ in range(4):
            model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(calls) == 12
    rows = len(X)
    assert layers.by_name("activations") == {"0": rows * 8 * FLOAT, "1": rows * 4 * FLOAT, "": rows * 2 * FLOAT}


class Recurrent(nn.Module):
    def __init__(self, *, batch_first: bool, turned: bool = False) -> None:
        super().__init__()
        self.embed, self.turned = nn.Embedding(9, 4), turned
        self.cells = nn.GRU(4, 4, batch_first=batch_first)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.cells(self.embed(tokens.t() if self.turned else tokens))[0]
        return found


def test_samples_and_tokens_are_those_that_the_model_is_given(layers: Layers) -> None:
    def work(call: Callable[[Any], torch.Tensor], model: nn.Module) -> dict[str, int]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            call(model).square().mean().backward()
            optimizer.step()
        found = layers.last()[1].work
        assert found is not None
        return {name: number for name, number in found.plain().items() if name != "flops"}

    text = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    tokens = torch.zeros(3, 5, dtype=torch.int64)
    assert work(lambda model: model(tokens), text) == {"samples": 3, "tokens": 15}
    assert work(lambda model: model(X), two_layers()) == {"samples": 6}
    # Layers that put the sequence first show in which order the model was given its input.
    assert work(lambda model: model(tokens), Recurrent(batch_first=False)) == {"samples": 5, "tokens": 15}
    assert work(lambda model: model(tokens), Recurrent(batch_first=True)) == {"samples": 3, "tokens": 15}
    assert work(lambda model: model(tokens), Recurrent(batch_first=False, turned=True)) == {"samples": 3, "tokens": 15}
    # The parts of a model one after the other: the same samples twice.
    model = two_layers()
    layers.sampler.watch(model, activations=True, gradients=True)
    assert work(lambda model: model[2](model[0](X)), model) == {}


# -- Gradients and weights --------------------------------------------------------------------------------------------


def test_norms_zeros_and_updates_are_those_of_torch(layers: Layers) -> None:
    model = two_layers()
    with torch.no_grad():
        model[0].bias[:2] = -100.0  # two of four units never fire: their gradients are zero
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in model[0].parameters()]
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    first = list(model[0].parameters())
    grads = torch.cat([one.grad.flatten() for one in first if one.grad is not None])
    weights = torch.cat([one.detach().flatten() for one in first])
    old = torch.cat([one.flatten() for one in before])
    assert layers.by_name("grad_norm")["0"] == pytest.approx(grads.norm().item(), rel=1e-3)
    assert layers.by_name("weight_norm")["0"] == pytest.approx(weights.norm().item(), rel=1e-3)
    share = (grads == 0).float().mean().item()
    assert share >= 0.5
    assert layers.by_name("zero_share")["0"] == pytest.approx(share, rel=1e-3)
    ratio = ((weights - old).norm() / old.norm()).item()
    assert layers.by_name("update_ratio")["0"] == pytest.approx(ratio, rel=1e-3)


def test_frozen_layers_have_no_gradients(layers: Layers) -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    train(model, 3)
    tree, sample = layers.last()
    assert [module.trainable for module in tree.modules] == [0, 0, 0, 10]
    assert set(layers.by_name("grad_norm")) == {"2"}
    assert set(layers.by_name("weight_norm")) == {"0", "2"}
    assert set(layers.by_name("update_ratio")) == {"2"}
    assert sample.memory["gradients"][1] == 0


def test_gradients_that_are_gone_when_the_step_ends_are_unknown(layers: Layers) -> None:
    model = two_layers()

    class Freeing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            self.zero_grad()
            return result

    optimizer = Freeing(model.parameters(), lr=0.1)
    for _ in range(3):
        model(X).square().mean().backward()
        optimizer.step()
    assert layers.by_name("grad_norm") == {}
    assert layers.by_name("gradients") == {}
    assert set(layers.by_name("update_ratio")) == {"0", "2"}


def test_a_skipped_step_says_so_and_a_scaled_gradient_is_divided(layers: Layers) -> None:
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for at in range(4):
        optimizer.zero_grad()
        loss = model(X).square().mean() * (float("inf") if at == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    skipped = [sample.skipped for sample in layers.records().samples]
    assert skipped == [False, True, False]
    plain = copy.deepcopy(model)
    plain.load_state_dict(model.state_dict())
    grads = [parameter.grad for parameter in model[0].parameters() if parameter.grad is not None]
    scale = 512.0  # halved after the step that overflowed
    norm = torch.cat([grad.flatten() for grad in grads]).norm().item()
    assert layers.by_name("grad_norm")["0"] == pytest.approx(norm / scale, rel=1e-3)


def test_narrow_gradients_do_not_overflow_in_their_norm(layers: Layers) -> None:
    model = nn.Sequential(nn.Linear(8, 64)).to(torch.bfloat16)
    train(model, 3, lr=0.0, x=(1e3 * X).to(torch.bfloat16))
    grads = [parameter.grad.float().flatten() for parameter in model.parameters() if parameter.grad is not None]
    assert layers.by_name("grad_norm") == {"0": pytest.approx(torch.cat(grads).norm().item(), rel=1e-2)}


# -- NaN --------------------------------------------------------------------------------------------------------------


class Poison(nn.Module):
    """Makes NaN out of finite input, in forward or in backward, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.forward_bad = False
        self.backward_bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        if self.forward_bad:
            y = y + (y - y) / (y - y)
        return _BadBackward.apply(y) if self.backward_bad else y


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")


def poisoned() -> tuple[nn.Sequential, Poison]:
    bad = Poison()
    return nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 4), bad), nn.ReLU(), nn.Linear(4, 2)), bad


def test_the_layer_that_makes_nan_in_forward_is_named(layers: Layers) -> None:
    model, bad = poisoned()
    train(model, 3)
    assert layers.last()[1].nonfinite_forward is None
    bad.forward_bad = True
    train(model, 1)
    tree, sample = layers.last()
    assert tree.modules[sample.nonfinite_forward or 0].name == "1.1"


def test_the_layer_that_receives_nan_in_backward_first_is_named(layers: Layers) -> None:
    model, bad = poisoned()
    train(model, 3)
    assert layers.last()[1].nonfinite_backward is None
    bad.backward_bad = True
    train(model, 1)
    tree, sample = layers.last()
    assert sample.nonfinite_forward is None
    assert tree.modules[sample.nonfinite_backward or 0].name == "1.0"  # the one before it


def test_nan_in_the_batch_is_no_layers_fault_and_that_of_a_container_is(layers: Layers) -> None:
    train(two_layers(), 3, x=torch.full((6, 8), float("nan")))
    assert layers.last()[1].nonfinite_forward is None

    class Dividing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).detach() / 0.0)  # type: ignore[no-any-return]

    layers.sampler.watch(outer := nn.Sequential(Dividing()), activations=True, gradients=True)
    train(outer, 2)
    tree, sample = layers.last()  # of the second step: the first was begun before the model was named
    assert tree.modules[sample.nonfinite_forward or 0].name == "0"


def test_a_mask_of_minus_infinity_is_no_fault(layers: Layers) -> None:
    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros_like(x, dtype=torch.bool)
            mask[:, 0] = True
            return x.masked_fill(mask, -float("inf"))

    train(nn.Sequential(nn.Linear(8, 4), Mask(), nn.Softmax(dim=-1), nn.Linear(4, 2)), 3)
    assert layers.last()[1].nonfinite_forward is None


def test_values_whose_sum_overflows_are_finite(layers: Layers) -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    for _ in range(3):
        out = model(torch.full((64, 8), 1e37))
        assert out.isfinite().all() and not out.sum().isfinite()
        (out * 1e-37).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert layers.last()[1].nonfinite_forward is None


# -- Times ------------------------------------------------------------------------------------------------------------


def test_a_call_contains_its_children_and_backward_is_of_those_without(layers: Layers) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    train(model, 3)
    forward = layers.by_name("forward_us")
    assert set(forward) == {"", "0", "1", "1.0", "1.1", "2"}
    assert forward[""] >= forward["0"] + forward["1"] + forward["2"]
    assert forward["1"] >= forward["1.0"] + forward["1.1"]
    assert set(layers.by_name("backward_us")) == {"0", "1.0", "1.1", "2"}


def test_a_call_in_which_the_model_is_evaluated_is_not_counted(layers: Layers) -> None:
    class Counting(nn.Linear):
        pass

    model = nn.Sequential(Counting(8, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        with torch.no_grad():
            model(torch.full((6, 8), float("nan")))
        optimizer.step()
    assert layers.last()[1].nonfinite_forward is None


def test_a_forward_that_fails_does_not_confuse_the_next(layers: Layers) -> None:
    model = two_layers()
    train(model, 2)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(6, 5))
    with torch.no_grad():
        model(torch.full((6, 8), float("nan")))
    train(model, 1)
    assert layers.last()[1].nonfinite_forward is None
    assert set(layers.by_name("forward_us")) == {"", "0", "1", "2"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_counted_once(layers: Layers, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = (
                nn.Linear(8, 4),
                nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
                nn.Linear(4, 2),
            )
            self.calls = 0
            self.inner.register_forward_pre_hook(self._count)

        def _count(self, *_: Any) -> None:
            self.calls += 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.inner, self.first(x), use_reentrant=reentrant))  # type: ignore[no-any-return]

    model = Checkpointed()
    train(model, 3)
    assert model.calls == 6  # twice a step: once in backward
    forward, backward = layers.by_name("forward_us"), layers.by_name("backward_us")
    assert set(forward) == {"", "first", "inner", "inner.0", "inner.1", "last"}
    assert forward[""] >= forward["first"] + forward["inner"] + forward["last"]
    assert {"first", "last"} <= set(backward)
    # What is computed again is not kept, but the input for it is: by the node that computes it again, which is the
    # model's, or by that part of the model itself.
    batch, hidden, out = (6 * size * FLOAT for size in (8, 4, 2))
    kept = {"": out + hidden} if reentrant else {"": out, "inner": hidden}
    assert layers.by_name("activations") == {"first": batch, **kept, "last": hidden}


# -- Models -----------------------------------------------------------------------------------------------------------


def test_two_models_with_two_optimizers(layers: Layers) -> None:
    generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    critic = nn.Sequential(nn.Linear(8, 1))
    steps = [torch.optim.Adam(critic.parameters()), torch.optim.Adam(generator.parameters())]
    for _ in range(4):
        for at, optimizer in enumerate(steps):
            optimizer.zero_grad()
            fake = generator(X)
            loss = critic(fake.detach()).mean() if at == 0 else -critic(fake).mean()
            loss.backward()
            optimizer.step()
    records = layers.records()
    assert len(records.models) == 2
    last = [sample for sample in records.samples if sample.step == records.samples[-1].step]
    found = {records.models[sample.model].modules[1].elements: sample for sample in last}
    assert set(found) == {8 * 8 + 8, 8 + 1}
    for elements, sample in found.items():
        assert sample.memory["optimizer"][1] == 2 * elements * FLOAT + 2 * FLOAT
        assert sample.grad_norm[1] is not None


def test_shared_modules_tied_weights_and_lists(layers: Layers) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, 4, bias=False)
            self.act = nn.ReLU()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.again = self.blocks[0]
            self.head = nn.Linear(8, 4, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.act(self.embed(x))
            for block in (*self.blocks, self.again):
                y = self.act(block(y))
            return y @ self.head.weight

    train(Tied(), 3)
    assert layers.by_name("parameters") == {"embed": 32 * FLOAT, "blocks.0": 20 * FLOAT, "blocks.1": 20 * FLOAT}
    names = [module.name for module in layers.last()[0].modules]
    assert names == ["", "embed", "act", "blocks", "blocks.0", "blocks.1", "head"]
    assert set(layers.by_name("forward_us")) == {"", "embed", "act", "blocks.0", "blocks.1"}


def test_a_model_that_changes_is_described_again(layers: Layers) -> None:
    model = two_layers()
    train(model, 3)
    model.append(nn.Linear(2, 2))
    train(model, 2)
    records = layers.records()
    assert [len(tree.modules) for tree in records.models.values()] == [4, 5]
    assert [records.models[sample.model].modules[-1].name for sample in records.samples] == ["2", "2", "2", "3"]


def test_a_module_of_parameters_alone_and_other_outputs(layers: Layers) -> None:
    class Position(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8))

        def forward(self) -> torch.Tensor:
            return self.weight

    class Dictionary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.recurrent = Position(), nn.LSTM(8, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": self.recurrent(x + self.position())[0]}

    model = Dictionary()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(X[None])["out"].square().mean().backward()
        optimizer.step()
    assert model.position.weight._backward_hooks is None
    assert set(layers.by_name("forward_us")) == {"", "position", "recurrent"}
    assert set(layers.by_name("backward_us")) == {"recurrent"}


def test_parameters_without_a_shape_are_passed_over() -> None:
    tree = ModuleTree(nn.Sequential(nn.Linear(8, 4), nn.LazyLinear(3)), compiled=False)
    assert [row[3] for row in tree.rows] == [0, 36, 0]


def test_parameters_that_were_computed_have_no_gradient(layers: Layers) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    bias = torch.zeros(4, requires_grad=True)
    model[0]._parameters["bias"] = bias * 2  # as libraries for meta-learning do it
    optimizer = torch.optim.SGD([model[2].weight], lr=0.1)
    for _ in range(3):
        model(X).square().mean().backward(retain_graph=True)
        optimizer.step()
    assert layers.by_name("parameters") == {"0": 36 * FLOAT, "2": 10 * FLOAT}
    assert layers.by_name("gradients") == {"0": 32 * FLOAT, "2": 10 * FLOAT}


def test_very_large_models_show_their_upper_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MOST_NODES", 4)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)])
    tree = ModuleTree(model, compiled=False)
    assert [(row[0], row[3]) for row in tree.rows] == [("", 0), ("0", 144), ("1", 144), ("2", 144)]
    assert len(list(tree.parameters())) == 12
    monkeypatch.setattr(trees, "MOST_MODULES", 4)
    assert ModuleTree(model, compiled=False).nodes == []


@pytest.mark.soak
def test_compiled_models_have_no_times(layers: Layers) -> None:
    model = two_layers()
    compiled: Any = torch.compile(model, backend="eager")
    train(compiled, 4)
    tree, sample = layers.last()
    assert tree.compiled
    assert [module.name for module in tree.modules] == ["", "0", "1", "2"]
    assert sample.forward_us == sample.backward_us == (None,) * 4
    assert set(layers.by_name("grad_norm")) == {"0", "2"}
    rows = len(X)
    assert layers.by_name("activations") == {"": rows * (8 + 4 + 2) * FLOAT}  # no hook said which module saved what
    assert sample.peaks["forward"] == ((36 + 10) * FLOAT + rows * (8 + 4 + 2) * FLOAT, None)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1  # looking has not made it compile again
    torch._dynamo.reset()
    counters.clear()  # the other tests of this process have compiled nothing


@pytest.mark.soak
def test_a_model_may_be_compiled_as_one_graph_while_it_is_looked_at(layers: Layers) -> None:
    model = two_layers()
    train(model, 2)
    assert layers.sampler.sampling
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    train(compiled, 4)
    assert layers.last()[0].compiled
    counters = torch._dynamo.utils.counters
    assert counters["graph_break"] == {}
    torch._dynamo.reset()
    counters.clear()


# -- Replicas ---------------------------------------------------------------------------------------------------------


def test_checksums_of_replicas_show_a_single_bit(layers: Layers, alone: None) -> None:
    model = DistributedDataParallel(two_layers())
    train(model, 3, lr=0.0)
    tree, first = layers.last()
    assert tree.replicated
    assert first.checksum[0] is first.checksum[2] is None
    train(model, 1, lr=0.0)
    assert layers.last()[1].checksum == first.checksum
    weight = model.module[2].weight
    with torch.no_grad():
        weight.view(torch.int32)[1, 1] ^= 1
    train(model, 1, lr=0.0)
    flipped = layers.last()[1].checksum
    assert [changed == checksum for changed, checksum in zip(flipped, first.checksum, strict=True)] == [
        True,
        True,
        True,
        False,
    ]
    with torch.no_grad():
        weight.view(torch.int32)[1, 1] ^= 1
        model.module[0].bias += 1e-6
    train(model, 1, lr=0.0)
    nudged = layers.last()[1].checksum
    assert [changed == checksum for changed, checksum in zip(nudged, first.checksum, strict=True)] == [
        True,
        False,
        True,
        True,
    ]


def test_what_ddp_ignores_is_not_compared(layers: Layers, alone: None) -> None:
    model = two_layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    train(DistributedDataParallel(model), 3)
    assert set(layers.by_name("checksum")) == {"0"}


def test_only_what_is_replicated_is_compared(two_ranks: None) -> None:
    def looked_at(model: nn.Module) -> tuple[bool, str, list[int]]:
        tree = ModuleTree(model, compiled=False)
        return tree.replicated, tree.group, [row[3] for row in tree.rows]

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    assert looked_at(two_layers()) == (False, "", [0, 36, 0, 10])  # every rank may train for itself
    assert looked_at(DistributedDataParallel(two_layers())) == (True, "", [0, 36, 0, 10])
    assert looked_at(fully_shard(two_layers(), mesh=mesh)) == (False, "dp_shard=0", [0, 18, 0, 5])
    tensor = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    split = parallelize_module(two_layers(), tensor, {"0": ColwiseParallel(), "2": ColwiseParallel()})
    assert looked_at(split) == (False, "tp=0", [0, 18, 0, 5])
    flat = FullyShardedDataParallel(two_layers(), device_id=torch.device("cpu"))
    assert looked_at(flat) == (False, "", [23, 0, 0, 0])


def test_a_sharded_model_is_looked_at_without_gathering_it(layers: Layers, two_ranks: None) -> None:
    model = fully_shard(two_layers(), mesh=init_device_mesh("cpu", (2,)))
    train(model, 4)
    assert layers.by_name("parameters") == {"0": 18 * FLOAT, "2": 5 * FLOAT}
    assert layers.by_name("gradients") == {"0": 18 * FLOAT, "2": 5 * FLOAT}
    assert layers.by_name("checksum") == {}
    shard = torch.cat([parameter.to_local().flatten() for parameter in model[0].parameters()])
    assert layers.by_name("weight_norm")["0"] == pytest.approx(shard.norm().item(), rel=1e-3)


# -- No trace ---------------------------------------------------------------------------------------------------------


def pickled(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return pickle.dumps(model) + bytes(len(file.getvalue()))


def test_nothing_remains_on_the_model_or_in_torch(layers: Layers) -> None:
    order: list[str] = []
    model = two_layers()
    pristine = pickled(model)
    model[0].register_forward_pre_hook(lambda *_: order.append("before"))
    model[0].register_forward_hook(lambda *_: order.append("after 1"))
    model[0].register_forward_hook(lambda *_: order.append("after 2"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        order.clear()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert order == ["before", "after 1", "after 2"]
    layers.sampler.drop_step()
    modules: Any = torch.nn.modules.module
    assert not modules._has_any_global_hook()
    assert [len(one._forward_hooks) for one in model] == [2, 0, 0]
    assert [len(one._forward_pre_hooks) for one in model] == [1, 0, 0]
    assert all(parameter._backward_hooks is None for parameter in model.parameters())
    for one in model:
        one._forward_hooks.clear()
        one._forward_pre_hooks.clear()
    assert pickled(model) == pristine


def losses(mode: str, make: Callable[[], Any]) -> list[float]:
    """The losses of a training under the recorder, with dropout, so that a changed random state shows."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorder = make()
    os.environ[ENV_LAYERS] = mode
    watch = guard.ImportWatch()
    instrumentation = Instrumentation(recorder, torch, watch)
    found = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    instrumentation.remove()
    watch.remove()
    guard.on_failure(None)
    assert recorder.layers is None or mode == "every"
    return found


def test_losses_are_bit_identical(
    make_recorder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ENV_LAYERS, "off")
    failures = guard.failures()
    off = losses("off", make_recorder)
    for path in (tmp_path / "session").iterdir():
        path.unlink()
    assert losses("every", make_recorder) == off
    assert len(list((tmp_path / "session").glob("*.layers"))) == 1
    assert guard.failures() == failures


def test_the_scripts_modes_do_not_see_our_operations(layers: Layers) -> None:
    seen: list[str] = []
    model = two_layers()
    train(model, 2)
    for mode in noting_modes(seen):
        seen.clear()
        with mode:
            train(model, 2)
        assert not [name for name in seen if "norm" in name or "count_nonzero" in name or name in ("sum", "aten.sum")]
    assert layers.by_name("forward_us")


class Seen:
    """What code of the script was run: by a class of outputs, of containers, of tensors."""

    names: ClassVar[list[str]] = []

    class Output:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __getattr__(self, name: str) -> Any:
            Seen.names.append(name)
            raise AttributeError(name)

        @property
        def __class__(self) -> Any:
            Seen.names.append("__class__")
            return Seen.Output

    class Outputs(list[Any]):
        def __getitem__(self, at: Any) -> Any:
            Seen.names.append("__getitem__")
            return super().__getitem__(at)

    class Named(dict[str, Any]):
        def values(self) -> Any:
            Seen.names.append("values")
            return super().values()

    class Tensor(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Seen.names.append(getattr(function, "__name__", "?"))
            return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (Seen.Output, lambda output: vars(output)["tensor"]),
        (lambda tensor: Seen.Outputs([tensor]), lambda output: list.__getitem__(output, 0)),
        (lambda tensor: Seen.Named(tensor=tensor), lambda output: output["tensor"]),
    ],
)
def test_no_code_of_outputs_and_containers_is_run(
    layers: Layers, wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]
) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 2)
            self.batch_first = False

        def forward(self, given: Any) -> Any:
            return wrap(self.inner(unwrap(given)))

        def parameters(self, recurse: bool = True) -> Any:
            Seen.names.append("parameters")
            return super().parameters(recurse)

    model = Wrapped()
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.1)
    Seen.names.clear()
    for _ in range(3):
        optimizer.zero_grad()
        unwrap(model(wrap(X))).square().mean().backward()
        optimizer.step()
    assert Seen.names == []
    _, sample = layers.last()
    assert sample.work is not None
    assert sample.work.samples == 8  # the sequence comes first
    assert set(layers.by_name("backward_us")) == {"inner"}


def test_a_class_of_tensors_sees_only_what_the_script_does(layers: Layers) -> None:
    def seen(steps: int) -> list[str]:
        Seen.names.clear()
        train(model, steps, x=x)
        return list(Seen.names)

    model, x = two_layers(), X.as_subclass(Seen.Tensor)
    train(model, 2)
    sampled = seen(2)
    layers.sampler.withdraw()
    assert sampled == seen(2)


def test_a_dropped_step_keeps_nothing_alive_in_a_graph_of_the_script(layers: Layers) -> None:
    model = two_layers()
    train(model, 2)
    loss = model(X).square().mean()  # its graph has marks of the step in progress
    dropped = layers.sampler._step
    layers.sampler.drop_step()
    gc.collect()
    alive = [value for value in gc.get_referents(*gc.get_referents(dropped)) if isinstance(value, torch.Tensor)]
    loss.backward()
    assert alive == []


def test_a_graph_that_outlives_its_step_is_not_looked_at_again(layers: Layers) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    kept = []
    for _ in range(3):
        out = model[1](model[0](X))
        kept.append(out.mean())
        model[2](out).mean().backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    before = layers.records().samples
    for one in kept:
        one.backward()
    assert layers.records().samples == before


def test_a_forked_child_forgets_the_step_and_the_file(layers: Layers) -> None:
    train(two_layers(), 3)
    assert layers.sampler.sampling
    size = next((layers._session).glob("*.layers")).stat().st_size
    pid = os.fork()
    if not pid:
        left = True
        try:
            layers.recording.recorder.forget()
            modules: Any = torch.nn.modules.module
            left = bool(modules._has_any_global_hook()) or layers.sampler.sampling or layers.sampler._fd != -1
        finally:
            os._exit(left)
    assert os.waitpid(pid, 0)[1] == 0
    assert layers.sampler.sampling
    assert next((layers._session).glob("*.layers")).stat().st_size == size
    assert os.get_inheritable(layers.sampler._fd) is False


def test_a_file_that_cannot_be_written_ends_sampling(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_layers()
    train(model, 3)
    before = len(layers.records().samples)
    real = os.write
    ours = layers.sampler._fd
    failures = guard.failures()

    def write(fd: int, data: bytes) -> int:
        if fd == ours:
            raise OSError(errno.ENOSPC, "no space")
        return real(fd, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        train(model, 1)
    train(model, 3)
    assert len(layers.records().samples) == before
    assert not layers.sampler.sampling
    forgive_failures(failures)


# -- When -------------------------------------------------------------------------------------------------------------


def sampled_steps(step_ms: float, until_s: float, clock: FakeClock, *, cost_ms: float = 0.0) -> list[int]:
    schedule = Schedule(every_step=False, now=clock)
    found, at = [], 0
    while clock.now_ns < until_s * 1e9:
        clock.now_ns += int((schedule.next + 1 - at) * step_ms * 1e6)
        at = schedule.next + 1
        found.append(schedule.next)
        schedule.sampled(schedule.next, int(cost_ms * 1e6))
    return found


def test_slow_steps_are_sampled_one_in_a_hundred() -> None:
    assert sampled_steps(50.0, 30.0, FakeClock())[:5] == [11, 37, 137, 237, 337]


def test_fast_steps_are_sampled_every_two_seconds_and_later_every_minute() -> None:
    steps = sampled_steps(1.0, 4 * 3600.0, FakeClock())
    apart = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert all((step - 37) % 100 == 0 for step in steps[1:])
    assert 2_000 <= apart[5] <= 4_000
    assert 60_000 <= apart[-1] <= 120_000
    assert len(steps) < 1_000


def test_samples_that_take_long_are_taken_less_often() -> None:
    cheap = sampled_steps(50.0, 600.0, FakeClock(), cost_ms=50.0)
    dear = sampled_steps(50.0, 600.0, FakeClock(), cost_ms=500.0)
    assert len(dear) < len(cheap) / 3


@pytest.mark.parametrize("cost_ms", [5.0, 50.0, 500.0])
@pytest.mark.parametrize("until_s", [60.0, 3600.0])
def test_samples_take_a_500th_of_the_time(cost_ms: float, until_s: float) -> None:
    steps = sampled_steps(50.0, until_s, FakeClock(), cost_ms=cost_ms)
    assert steps[:6] == [11, 37, 137, 237, 337, 437], "what is wrong from the beginning is known soon"
    assert (len(steps) - 7) * cost_ms <= 0.002 * until_s * 1e3
    if until_s > 60.0 and cost_ms > 5.0:
        assert (len(steps) - 5) * cost_ms >= 0.4 * 0.002 * until_s * 1e3, "far fewer than could be taken"


def test_a_sample_costs_what_its_step_takes_longer() -> None:
    clock = FakeClock()
    schedule = Schedule(every_step=False, now=clock)
    assert schedule.usual_ns(clock.now_ns, 11) == 0
    clock.now_ns += 600_000_000
    schedule.sampled(11, 1_000_000)
    assert schedule.usual_ns(clock.now_ns + 25 * 50_000_000, 37) == 50_000_000
    assert schedule.usual_ns(clock.now_ns + 3 * 50_000_000, 15) == 0


def test_ranks_of_different_speed_have_steps_in_common() -> None:
    fast, slow = (set(sampled_steps(ms, 120.0, FakeClock())) for ms in (5.0, 6.5))
    assert len(fast & slow) > 10


def test_the_default_rate_installs_no_hook_in_other_steps(sampled: Layers, clock: FakeClock) -> None:
    model = two_layers()
    hooked = []
    modules: Any = torch.nn.modules.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in range(150):
        clock.now_ns += 50_000_000
        if modules._has_any_global_hook():
            hooked.append(at)
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert hooked == [11, 37, 137]
    assert [sample.step for sample in sampled.records().samples] == hooked
    steps = sampled.recording.steps()
    assert [int(row["step"]) for row in steps if row["flags"] & FLAG_SAMPLED] == hooked


@pytest.mark.parametrize(
    ("model", "begins"), [(nn.Linear(8, 2, device="meta"), False), (nn.ReLU(), False), (nn.Linear(8, 2), True)]
)
def test_only_models_on_the_cpu_or_a_gpu_are_sampled(layers: Layers, model: nn.Module, begins: bool) -> None:
    layers.sampler.after_step(0, lambda: [model], compiled=False, busy=False)
    assert layers.sampler.sampling is begins
    layers.sampler.drop_step()


def test_a_graph_capture_ends_the_look(layers: Layers) -> None:
    model = two_layers()
    train(model, 2)
    assert layers.sampler.sampling
    layers.recording.recorder.capture_starts(lambda: True)
    modules: Any = torch.nn.modules.module
    assert not modules._has_any_global_hook()
    layers.recording.recorder.capture_ends()


def test_watch_names_the_model_and_what_to_look_at(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "current", lambda: layers.recording.recorder)
    model = nn.Sequential(two_layers(), nn.Linear(2, 2))
    stepscope.watch(model[0], activations=False, gradients=False)
    train(model, 3)
    tree, sample = layers.last()
    assert [module.name for module in tree.modules] == ["", "0", "1", "2"]
    assert layers.by_name("activations") == {}
    assert layers.by_name("grad_norm") == {}
    assert sample.backward_us == (None,) * 4
    assert set(layers.by_name("forward_us")) == {"", "0", "1", "2"}


def test_the_wrapper_of_a_watched_model_says_that_it_is_replicated(layers: Layers, alone: None) -> None:
    model = two_layers()
    layers.sampler.watch(model, activations=True, gradients=True)
    train(DistributedDataParallel(model), 4)
    assert layers.last()[0].replicated
    assert [module.name for module in layers.last()[0].modules] == ["", "0", "1", "2"]


def test_watch_does_nothing_when_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "current", lambda: None)
    stepscope.watch(object())


# -- Without waiting for a device -------------------------------------------------------------------------------------


class DeviceTensor:
    """Stands in for a tensor on a GPU: its numbers arrive on the host when the test says so."""

    is_cpu = False
    device = "cuda:0"
    dtype = "float32"

    def __init__(self, numbers: list[float], ndim: int = 0) -> None:
        self.numbers = numbers
        self.ndim = ndim

    def __len__(self) -> int:
        return len(self.numbers)


class DeviceTorch:
    """As much of torch as copies numbers from a GPU; whatever waits for the device is missing."""

    def __init__(self) -> None:
        self.passed = False
        self.events = 0
        self.copied: list[list[float]] = []
        outer = self

        class Event:
            def __init__(self) -> None:
                outer.events += 1

            def record(self, stream: str) -> None:
                assert stream == "stream of cuda:0"

            def query(self) -> bool:
                return outer.passed

        class Cuda:
            pass

        self.cuda: Any = Cuda()
        self.cuda.Event = Event
        self.cuda.current_stream = lambda device: f"stream of {device}"

    def stack(self, tensors: list[DeviceTensor]) -> DeviceTensor:
        return DeviceTensor([tensor.numbers[0] for tensor in tensors], 1)

    def empty(self, size: int, *, dtype: str, pin_memory: bool) -> Any:
        assert pin_memory
        return Pinned(self, size)


class Pinned:
    def __init__(self, torch: DeviceTorch, size: int) -> None:
        self._torch = torch
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> Pinned:
        return Pinned(self._torch, part.stop)

    def copy_(self, source: DeviceTensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self._torch.copied.append(source.numbers)

    def tolist(self) -> list[float]:
        assert self._torch.passed, "read before it has arrived"
        return self._torch.copied[-1][: self._size]


def test_numbers_on_a_device_are_read_when_they_have_arrived() -> None:
    torch_there = DeviceTorch()
    scalars = Scalars(torch_there)
    for _ in range(3):
        scalars.start()
        norms, none = scalars.add([DeviceTensor([1.5]), DeviceTensor([2.5])]), scalars.add([])
        scalars.send()
        assert not scalars.arrived()
        torch_there.passed = True
        assert scalars.arrived()
        assert scalars.arrived()
        assert scalars.numbers(norms) == [1.5, 2.5]
        assert scalars.numbers(none) == []
        torch_there.passed = False
    assert torch_there.events == 1  # used again, never destroyed


def test_marks_on_a_stream_use_their_events_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            made.append(self)
            self.at = 0.0

        def record(self, stream: float) -> None:
            self.at = stream

        def query(self) -> bool:
            return self.at < 100.0

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    class Cuda:
        pass

    class Torch:
        cuda: Any = Cuda()

    clock = itertools.count(10.0)
    Torch.cuda.Event = Event
    Torch.cuda.current_stream = lambda device: next(clock) + 50.0 * device
    monkeypatch.setattr(device, "MOST_STREAM_MARKS", 3)
    marks = StreamMarks(Torch)
    marks.start(None)
    assert not marks.complete
    assert marks.passed()
    for _ in range(2):
        marks.start(0)
        assert [marks.mark() for _ in range(3)] == [0, 1, 2]
        assert marks.complete
        assert marks.passed()
        assert marks.read() == [0.0, 1000.0, 2000.0]
    assert len(made) == 3
    assert marks.mark() == 3
    assert not marks.complete  # too many
    marks.start(2)
    marks.mark()
    assert len(made) == 4  # an event stays on its device
    assert not marks.passed()


def test_layers_on_several_gpus_have_no_times_of_one_stream() -> None:
    assert not sampled_step._on_one_gpu([ModuleTree(two_layers(), compiled=False)])
    module_tree = ModuleTree(two_layers(), compiled=False)
    places = ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]

    class Elsewhere:
        def __init__(self, place: str) -> None:
            self.device = torch.device(place)

    module_tree.parameters = lambda: iter([(0, Elsewhere(place)) for place in places])  # type: ignore[method-assign]
    assert not sampled_step._on_one_gpu([module_tree])
    del places[2:]
    assert sampled_step._on_one_gpu([module_tree])


def test_samples_on_their_way_are_written_later_and_are_not_too_many(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "MOST_PENDING", 2)
    model = two_layers()
    optimizers = [train(model, 2)]  # one that is gone could have the id of the next
    before = len(layers.records().samples)
    with monkeypatch.context() as patched:
        patched.setattr(Scalars, "arrived", lambda _: False)
        optimizers.append(train(model, 3))
        assert len(layers.records().samples) == before
        assert not layers.sampler.sampling
    optimizers.append(train(model, 2))
    steps = [sample.step for sample in layers.records().samples]
    assert steps == [1, 2, 3, 6]


# -- A whole job ------------------------------------------------------------------------------------------------------

JOB = """
    import torch
    from torch import distributed as dist, nn

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())
    for step in range(10):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
        if step == 5 and dist.get_rank() == 1:
            with torch.no_grad():
                model.module[2].weight[0, 0] += 1e-6
    dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_a_job_of_two_ranks_ends_up_in_the_run(
    run_stepscope: Callable[..., Any], script: Callable[..., Path], forked_ranks: Path
) -> None:
    """A weight of rank 1 is nudged after step 5: its checksum differs from the next step on."""
    options = ("--layers", "every", "--quiet", "--no-hub")
    done = run_stepscope("run", *options, forked_ranks, "2", script(JOB, "train.py"))
    assert done.code == 0, done.stderr
    layers = open_run(done.run_dir).layers
    (model,) = layers.models.values()
    assert model.replicated
    assert [module.name for module in model.modules] == ["", "0", "1", "2"]
    by_rank = {rank: {sample.step: sample for sample in layers.samples if sample.rank == rank} for rank in range(2)}
    assert set(by_rank[0]) == set(by_rank[1]) == set(range(1, 10))
    differing = {
        step: [model.modules[at].name for at in range(4) if one.checksum[at] != by_rank[1][step].checksum[at]]
        for step, one in by_rank[0].items()
    }
    assert differing == {step: ["2"] if step > 5 else [] for step in range(1, 10)}
    last = by_rank[0][9]
    assert last.memory["optimizer"] == (0, 2 * 36 * FLOAT + 8, 0, 2 * 10 * FLOAT + 8)
    assert all(value is not None for value in last.forward_us)
    assert not list(done.run_dir.glob("rings/*"))
