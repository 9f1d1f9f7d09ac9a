"""Norms that are kept of the last steps show where NaN began, in a step that was not sampled."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clock import FakeClock
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_modes import noting_modes

from stepscope.recorder import guard
from stepscope.recorder.instrumentation import Instrumentation
from stepscope.recorder.layers.gradient_trail import GradientTrail
from stepscope.records.layers import LayerSample, ModelTree
from stepscope.records.paths import ENV_LAYERS
from tests.recorder.conftest import Layers

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("nothing_is_compiled_yet"),
]

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
BAD_STEP = 20
"""Samples are taken in steps 11 and 37."""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few gradients can be afforded."""
    monkeypatch.setattr(GradientTrail, "_affordable", lambda self, most_ns: "few")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 8)
        self.bad = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.bad == "forward":
            hidden = hidden * math.nan
        if self.bad == "backward":
            hidden = BadBackward.apply(hidden)
        return x + self.down(torch.relu(hidden))


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.nan


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)], nn.Linear(8, 2))


def train(
    model: Any,
    clock: FakeClock,
    *,
    bad: str = "",
    clip: bool = False,
    steps: int = BAD_STEP + 3,
    step_ns: int = 100_000_000,
) -> list[float]:
    """In one step, block 2 makes NaN, or the update does."""
    inner = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        clock.advance(step_ns)
        inner[2].bad = bad if step == BAD_STEP else ""
        optimizer.param_groups[0]["lr"] = math.inf if bad == "update" and step == BAD_STEP else 0.01
        loss = model(X).square().mean()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trails(layers: Layers) -> tuple[ModelTree, list[LayerSample]]:
    records = layers.records()
    (model,) = records.models.values()
    return model, list(records.trails)


def bad_names(model: ModelTree, norms: tuple[float | None, ...]) -> list[str]:
    return [
        module.name for module, norm in zip(model.modules, norms, strict=True) if norm is not None and norm - norm != 0
    ]


BEFORE_IT = ["0.up", "0.down", "1.up", "1.down", "2.up"]


def test_gradients_that_the_optimizer_gets(sampled: Layers, clock: FakeClock) -> None:
    train(blocks(), clock, bad="backward")
    model, (first, after) = trails(sampled)
    assert (first.step, first.good_step, after.step) == (BAD_STEP, BAD_STEP - 1, BAD_STEP + 1)
    assert bad_names(model, first.grad_norm) == BEFORE_IT
    assert bad_names(model, after.weight_norm) == BEFORE_IT
    assert not any(norm is not None for norm in first.local_norm)


def test_norms_that_clipping_computes_are_kept_in_steps_of_any_length(
    sampled: Layers, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradientTrail, "_read_norms", None)  # would fail
    train(blocks(), clock, bad="backward", clip=True, step_ns=1_000_000, steps=70)
    model, found = trails(sampled)
    assert (found[0].step, found[0].good_step) == (BAD_STEP, BAD_STEP - 1)
    assert bad_names(model, found[0].grad_norm) == BEFORE_IT
    assert torch.stack is gradient_trail_originals()[1]
    assert torch._foreach_norm is gradient_trail_originals()[0]


def gradient_trail_originals() -> tuple[Any, Any]:
    return torch._C._VariableFunctions._foreach_norm, torch._C._VariableFunctions.stack


def test_gradients_of_this_rank_before_ddp_exchanges_them(sampled: Layers, clock: FakeClock, alone: None) -> None:
    train(DistributedDataParallel(blocks()), clock, bad="backward", clip=True)
    model, (first, *_) = trails(sampled)
    assert (first.step, first.good_step) == (BAD_STEP, BAD_STEP - 1)
    assert bad_names(model, first.local_norm) == bad_names(model, first.grad_norm) == BEFORE_IT


def test_gradients_are_read_on_the_thread_of_autograd(sampled: Layers, clock: FakeClock, alone: None) -> None:
    """On a GPU backward ends on a thread of autograd, while the training thread waits for it."""
    ledger = sampled.recording.recorder.ledger
    training_thread = ledger.thread
    model = DistributedDataParallel(blocks())

    def move_to_another_thread(gradient: Any) -> None:
        ledger.thread = -1

    def move_back() -> None:
        ledger.thread = training_thread

    def around_backward(module: Any, args: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(move_to_another_thread)
            node = output.grad_fn
            node.register_prehook(lambda gradients: torch.autograd.Variable._execution_engine.queue_callback(move_back))

    model.register_forward_hook(around_backward)
    train(model, clock, bad="backward")
    tree, (first, *_) = trails(sampled)
    assert bad_names(tree, first.local_norm) == BEFORE_IT


def test_a_few_gradients_show_the_rank_and_the_weights_the_layer(
    sampled: Layers, clock: FakeClock, alone: None, few: None
) -> None:
    train(DistributedDataParallel(blocks()), clock, bad="backward")
    model, (first, after) = trails(sampled)
    assert (first.step, first.good_step, first.good_some_step) == (BAD_STEP, None, BAD_STEP - 1)
    assert bad_names(model, first.local_norm) == BEFORE_IT
    assert bad_names(model, after.weight_norm) == BEFORE_IT


def test_what_fsdp_gives_to_a_collective(sampled: Layers, clock: FakeClock, two_ranks: None) -> None:
    """The fake group returns zeros, so only what was given to it shows NaN."""
    model = blocks()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    train(model, clock, steps=BAD_STEP)
    trail = sampled.recording.recorder.trail
    assert isinstance(trail, GradientTrail)
    kinds = {kind for kind, _, _ in trail._steps[-1].parts}
    assert kinds == {"probe", "reduced"}
    assert sum(kind == "probe" for kind, _, _ in trail._steps[-1].parts) == 5


def test_the_layer_before_nan_in_forward(sampled: Layers, clock: FakeClock) -> None:
    train(blocks(), clock, bad="forward")
    model, (first, *_) = trails(sampled)
    assert (first.step, first.good_step) == (BAD_STEP, BAD_STEP - 1)
    assert bad_names(model, first.weight_norm) == []
    assert model.modules[first.nonfinite_forward or 0].name == "2.up"


def test_an_update_that_spoils_the_weights(sampled: Layers, clock: FakeClock) -> None:
    train(blocks(), clock, bad="update")
    model, (first, *_) = trails(sampled)
    assert (first.step, first.good_step) == (BAD_STEP + 1, BAD_STEP)
    assert len(bad_names(model, first.weight_norm)) == 9


def test_healthy_runs_write_nothing_and_a_scaler_may_skip_steps(sampled: Layers, clock: FakeClock) -> None:
    train(blocks(), clock)
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for at in range(30):
        clock.advance(100_000_000)
        scaler.scale(model(X).square().mean()).backward()
        if at % 7 == 3:
            model[1].up.weight.grad.fill_(math.inf)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert trails(sampled)[1] == []
    trail = sampled.recording.recorder.trail
    assert isinstance(trail, GradientTrail)
    assert [step.step for step in trail._steps if step.skipped] == [23 + at for at in range(30) if at % 7 == 3]


def test_a_script_that_stops_at_nan(sampled: Layers, clock: FakeClock) -> None:
    """The step in which it is seen never ends."""
    model = blocks()
    train(model, clock, bad="backward", steps=BAD_STEP + 1)
    clock.advance(100_000_000)
    model(X).square().mean().backward()
    assert trails(sampled)[1] == []
    sampled.recording.recorder._write_trail(at_end=True)
    (first, *_) = trails(sampled)[1]
    assert (first.step, first.good_step) == (BAD_STEP, BAD_STEP - 1)


def test_short_and_costly_steps_are_left_alone(
    sampled: Layers, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In short steps nothing is launched; looks that take too long are tried again now and then."""
    looks: list[int] = []
    original = GradientTrail._read_norms

    def slow(self: GradientTrail, *args: Any) -> None:
        scope = self._scope
        original(self, *args)
        looks.append(sampled.recording.recorder.step)
        self._host_ns[scope].append(300_000)

    monkeypatch.setattr(GradientTrail, "_read_norms", slow)
    monkeypatch.setattr(GradientTrail, "_cost_ns", lambda self, scope: max(self._host_ns[scope], default=0))
    train(blocks(), clock, step_ns=9_000_000, steps=100)
    assert looks == []
    train(blocks(), clock, step_ns=100_000_000, steps=200)
    assert 4 <= len(looks) <= 40
    looks.clear()
    train(blocks(), clock, step_ns=200_000_000, steps=200)
    assert len(looks) >= 130


def test_nothing_of_the_script_is_kept_or_seen(sampled: Layers, clock: FakeClock) -> None:
    model = blocks()
    train(model, clock, clip=True)
    model(X).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    assert [gradient() for gradient in gradients] == [None] * len(gradients)
    seen: list[str] = []
    for mode in noting_modes(seen):
        with mode:
            train(model, clock, steps=3)
    assert not [name for name in seen if "norm" in name or "stack" in name]


def test_losses_are_bit_identical(
    make_recorder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: FakeClock
) -> None:
    found = []
    for mode in ("off", "sampled"):
        monkeypatch.setenv(ENV_LAYERS, mode)
        recorder = make_recorder(now=clock)
        watch = guard.ImportWatch()
        instrumentation = Instrumentation(recorder, torch, watch)
        found.append([train(blocks(), clock, clip=clip, bad="backward") for clip in (False, True)])
        instrumentation.remove()
        watch.remove()
        guard.on_failure(None)
        for path in (tmp_path / "session").iterdir():
            path.unlink()
    assert json.dumps(found[0]) == json.dumps(found[1])  # NaN is not equal to itself


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    yield
    assert not dist.is_initialized()


# -- Whole jobs -------------------------------------------------------------------------------------------------------

JOB = """
    import json
    import math
    import sys
    import time

    import torch
    from torch import distributed as dist, nn

    fault, clip = sys.argv[1], "clip" in sys.argv[2:]

    class BadBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.nan

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 8)
            self.bad = ""

        def forward(self, x):
            hidden = self.up(x)
            if self.bad == "forward":
                hidden = hidden * math.nan
            if self.bad == "backward":
                hidden = BadBackward.apply(hidden)
            return x + self.down(torch.relu(hidden))

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(8, 2))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    losses = []
    for step in range(26):
        here = step == 20 and dist.get_rank() == 1
        net[2].bad = fault if here else ""
        optimizer.param_groups[0]["lr"] = math.inf if fault == "update" and step == 20 else 0.01
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item().hex())
        time.sleep(0.1)
    if dist.get_rank() == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()
"""
IN_BACKWARD = "The loss is NaN from step 21 on; it was {} at step 20; first in 2.up on rank 1, in backward, at step 20."
IN_FORWARD = (
    "The loss of rank 1 is NaN from step 20 on, and that of the others from step 21; it was {} at step 19; "
    "first in 2.up on rank 1, in forward, at step 20."
)
IN_UPDATE = (
    "The loss is NaN from step 21 on; it was {} at step 20; "
    "the update of step 20 made the weights NaN, its gradients were finite."
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("arguments", "title", "ranks", "advice"),
    [
        # Near: the trails of single processes above, and a job with NaN in tests/examples/test_gallery.py.
        pytest.param(
            ("backward",), IN_BACKWARD, [1], "The gradient was bad when it reached 2.up", marks=pytest.mark.soak
        ),
        pytest.param(("backward", "clip"), IN_BACKWARD, [1], "The gradient was bad", marks=pytest.mark.soak),
        pytest.param(("forward",), IN_FORWARD, [1], "The inputs of 2.up were finite", marks=pytest.mark.soak),
        pytest.param(("forward", "clip"), IN_FORWARD, [1], "The inputs of 2.up", marks=pytest.mark.soak),
        pytest.param(("update",), IN_UPDATE, [], "Its gradients were finite", marks=pytest.mark.soak),
        pytest.param(("update", "clip"), IN_UPDATE, [], "Its gradients were finite", marks=pytest.mark.soak),
    ],
)
def test_a_job_of_two_ranks(
    arguments: tuple[str, ...],
    title: str,
    ranks: list[int],
    advice: str,
    run_stepscope: Callable[..., Any],
    script: Callable[..., Path],
    forked_ranks: Path,
) -> None:
    """Step 20 is not sampled; in the step after it every rank has NaN."""
    done = run_stepscope("run", "--quiet", "--no-hub", forked_ranks, "2", script(JOB, "train.py"), *arguments)
    assert done.code == 0, done.stderr
    summary = json.loads((done.run_dir / "summary.json").read_text())
    (found,) = [finding for finding in summary["findings"] if finding["kind"] == "loss_nan"]
    assert found["title"] == title.format(f"{found['evidence']['last_good']:.4g}")
    assert found["ranks"] == ranks
    assert found["advice"][1].startswith(advice)


@pytest.mark.ranks
@pytest.mark.soak
def test_a_healthy_job_is_the_same_with_and_without(
    run_stepscope: Callable[..., Any], script: Callable[..., Path], forked_ranks: Path
) -> None:
    found = []
    for layers in ("off", "sampled"):
        options = ("--quiet", "--no-hub", "--layers", layers)
        done = run_stepscope("run", *options, forked_ranks, "2", script(JOB, "train.py"), "none", "clip")
        assert done.code == 0, done.stderr
        found.append(json.loads(done.stdout.strip().splitlines()[-1]))
        kinds = {finding["kind"] for finding in json.loads((done.run_dir / "summary.json").read_text())["findings"]}
        assert not kinds & {"loss_nan", "nan_gradients", "exploding_gradients", "loss_spike"}
    assert found[0] == found[1]
    assert len(found[0]) == 26
