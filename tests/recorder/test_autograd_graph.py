"""What the autograd graph says before backward: bytes by module, FLOPs, and the peak, worked out by hand."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_modes import noting_modes

from stepscope.recorder.layers import autograd_graph
from stepscope.recorder.layers.autograd_graph import AutogradGraph
from stepscope.recorder.layers.tree import ModuleTree
from tests.recorder.conftest import Layers, process_group

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

FLOAT = 4
ROWS = 6
X = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))


def graph_of(*parameters: torch.Tensor) -> AutogradGraph:
    return AutogradGraph(torch, parameters, (), "cpu")


def train(model: nn.Module, loss: Callable[[], torch.Tensor], steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def flops(layers: Layers) -> int | None:
    found: int | None = layers.lines()[-1].get("work", {}).get("flops")
    return found


# -- A transformer ----------------------------------------------------------------------------------------------------

BATCH, LENGTH, HEADS, WIDTH, WORDS = 2, 4, 2, 8, 10


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(WORDS, WIDTH), Block(), nn.Linear(WIDTH, WORDS, bias=False)
        self.kind = kind

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        repeated = None if self.kind == "plain" else self.kind == "reentrant"
        return self.head(self.block(x) if repeated is None else checkpoint(self.block, x, use_reentrant=repeated))  # type: ignore[no-any-return]


TOKENS = BATCH * LENGTH
HIDDEN = TOKENS * WIDTH * FLOAT
ANSWERS = torch.zeros(TOKENS, dtype=torch.int64)
FORWARD_FLOPS = (
    2 * TOKENS * (WIDTH * 3 * WIDTH + WIDTH * WIDTH + 2 * WIDTH * 4 * WIDTH + WIDTH * WORDS)
    + 2 * BATCH * HEADS * LENGTH * LENGTH * (WIDTH // HEADS) * 2
)


def words() -> torch.Tensor:
    return torch.arange(TOKENS).view(BATCH, LENGTH)


def of_words(model: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: functional.cross_entropy(model(words()).flatten(0, 1), ANSWERS)


def test_every_tensor_of_a_transformer_counts_once(layers: Layers) -> None:
    model = Transformer()
    train(model, of_words(model))
    assert layers.by_name("activations") == {
        "embed": TOKENS * 8,  # the words
        "block.norm_1": HIDDEN + 2 * TOKENS * FLOAT,  # its input, mean and deviation
        "block.attention.qkv": HIDDEN,
        # Queries, keys and values are views of one tensor; the output; the logarithms of the sums.
        "block.attention": 3 * HIDDEN + HIDDEN + BATCH * HEADS * LENGTH * FLOAT,
        # The output of attention is transposed in memory as ``out`` needs it: it is not copied.
        "block.norm_2": HIDDEN + 2 * TOKENS * FLOAT,
        "block.mlp.0": HIDDEN,
        "block.mlp.1": 4 * HIDDEN,
        "block.mlp.2": 4 * HIDDEN,
        "head": HIDDEN,
        # Logarithms of the softmax, the answers, and a weight for all of them; the logits are gone.
        "": TOKENS * WORDS * FLOAT + TOKENS * 8 + FLOAT,
    }
    assert flops(layers) == 3 * FORWARD_FLOPS
    assert layers.lines()[-1]["work"] == {"flops": 3 * FORWARD_FLOPS, "samples": BATCH, "tokens": TOKENS}


@pytest.mark.parametrize("kind", ["reentrant", "again"])
def test_checkpointing_keeps_the_input_and_nothing_is_computed_for_us(layers: Layers, kind: str) -> None:
    model = Transformer(kind)
    calls: list[int] = []
    model.block.mlp[1].register_forward_hook(lambda *_: calls.append(1))
    train(model, of_words(model))
    assert len(calls) == 2 * 3  # forward, and once more in backward
    rest = {
        "embed": TOKENS * 8,
        "head": HIDDEN,
        "": TOKENS * WORDS * FLOAT + TOKENS * 8 + FLOAT,
    }
    if kind == "reentrant":  # the node that computes again is the model's
        rest[""] += HIDDEN
    else:
        rest["block"] = HIDDEN
    assert layers.by_name("activations") == rest
    assert flops(layers) == (None if kind == "reentrant" else 3 * FORWARD_FLOPS)


# -- What is saved ----------------------------------------------------------------------------------------------------


def test_memory_changed_in_place_and_views_of_it_count_once() -> None:
    weight = torch.randn(8, 4, requires_grad=True)
    graph = graph_of(weight)
    hidden = (X @ weight).relu_()
    parts = hidden.view(2, -1).split(6, dim=1)
    graph.walk((parts[0].sigmoid() * parts[1]).sum())
    half = ROWS * 4 * FLOAT // 2
    # The batch; ReLU's result with all its views; the sigmoid.
    assert graph.activations() == {-1: ROWS * 8 * FLOAT + ROWS * 4 * FLOAT + half}


def test_parameters_buffers_and_what_is_elsewhere_do_not_count() -> None:
    weight = torch.randn(8, requires_grad=True)
    buffer = torch.randn(ROWS, 8)
    graph = AutogradGraph(torch, (weight,), (buffer,), "cpu")
    graph.walk((weight * buffer).sum())
    assert graph.known and graph.activations() == {}
    elsewhere = AutogradGraph(torch, (weight,), (), "cuda")
    elsewhere.walk((weight * X).sum())
    assert elsewhere.activations() == {}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, int, None]:
        ctx.save_for_backward(x, None, x.sign())
        return x * x, 3, None

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, _, _ = ctx.saved_tensors
        return 2 * x * gradients[0]


def test_what_a_function_of_the_script_saves_counts(layers: Layers) -> None:
    class Squared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Square.apply(x)[0]  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(8, 4), Squared())
    train(model, lambda: model(X).sum())
    assert layers.by_name("activations") == {"0": ROWS * 8 * FLOAT, "1": 2 * ROWS * 4 * FLOAT}
    assert flops(layers) is None, "it might be a matrix product"


def test_a_graph_that_was_freed_in_part_is_read_as_far_as_it_is_there() -> None:
    weight, other = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    squared = Square.apply(weight)[0].exp()
    squared.sum().backward()
    graph = graph_of(weight, other)
    graph.walk((squared * other).sum())
    assert graph.activations() == {-1: 8 * FLOAT}


def test_hooks_of_the_script_see_what_they_saw_without_us(layers: Layers) -> None:
    seen: list[str] = []

    def pack(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        seen.append(f"pack {tuple(tensor.shape)}")
        return "packed", tensor

    def unpack(packed: tuple[str, torch.Tensor]) -> torch.Tensor:
        seen.append(f"unpack {tuple(packed[1].shape)}")
        return packed[1]

    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))

    def loss() -> torch.Tensor:
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return model(X).sum()  # type: ignore[no-any-return]

    train(model, loss)
    saved = [(ROWS, 8), (ROWS, 4), (ROWS, 4), (4, 2)]
    assert sorted(seen) == sorted([f"{what} {shape}" for shape in saved for what in ("pack", "unpack")])
    # What is packed may be somewhere else; only what is still there counts.
    assert layers.by_name("activations") == {"": ROWS * 8 * FLOAT, "1": ROWS * 4 * FLOAT}
    assert flops(layers) == 2 * 2 * ROWS * 8 * 4 + 3 * 2 * ROWS * 4 * 2


@pytest.mark.parametrize("moved", [False, True])
def test_tensors_that_the_script_moves_away_do_not_count(layers: Layers, moved: bool) -> None:
    """On a CPU ``save_on_cpu`` keeps the tensors themselves, so arrays take its place."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    away = torch.autograd.graph.saved_tensors_hooks(lambda one: one.detach().numpy().copy(), torch.from_numpy)

    def loss() -> torch.Tensor:
        batch = X.clone()
        with away if moved else torch.autograd.graph.save_on_cpu():
            out = model(batch)
        return out.square().sum()  # type: ignore[no-any-return]

    train(model, loss)
    there = {"": (ROWS * 2 + ROWS * 8) * FLOAT, "1": ROWS * 4 * FLOAT}
    assert layers.by_name("activations") == ({"": ROWS * 2 * FLOAT} if moved else there)
    assert flops(layers) == 2 * 2 * ROWS * 8 * 4 + 3 * 2 * ROWS * 4 * 2


def of_csr() -> torch.Tensor:
    return torch.eye(ROWS).to_sparse_csr() @ (X @ WEIGHT)


def of_sparse() -> torch.Tensor:
    return torch.sparse.mm(torch.eye(ROWS).to_sparse(), X @ WEIGHT)


def of_nested() -> torch.Tensor:
    nested = torch.nested.nested_tensor([X[:2], X[2:]])
    return torch.nested.to_padded_tensor(functional.linear(nested, WEIGHT.t()), 0.0)


def of_jagged() -> torch.Tensor:
    nested = torch.nested.nested_tensor([X[:2], X[2:]], layout=torch.jagged)
    return functional.linear(nested, WEIGHT.t()).sin().values()  # type: ignore[no-any-return]


def of_nothing() -> torch.Tensor:
    return X[:0] @ WEIGHT


def of_vmap() -> torch.Tensor:
    return torch.func.vmap(lambda row: (row @ WEIGHT).sin())(X)


def of_recurrent() -> torch.Tensor:
    return nn.LSTM(4, 4)(X @ WEIGHT)[0]  # type: ignore[no-any-return]


WEIGHT = torch.randn(8, 4, requires_grad=True)
MM = 2 * 2 * ROWS * 8 * 4


@pytest.mark.parametrize(
    ("make", "kept", "counted"),
    [
        (of_csr, ROWS * 8 * FLOAT, None),
        (of_sparse, ROWS * 8 * FLOAT, MM),
        (of_nested, None, None),
        (of_jagged, None, None),
        (of_nothing, ROWS * 8 * FLOAT, 0),  # what it is a part of
        (of_vmap, None, MM),
        (of_recurrent, None, None),
    ],
)
def test_unusual_tensors_are_no_obstacle(
    make: Callable[[], torch.Tensor], kept: int | None, counted: int | None
) -> None:
    graph = graph_of(WEIGHT)
    graph.walk(make().sum())
    assert graph.known
    if kept is not None:
        assert graph.activations().get(-1, 0) == kept
    else:
        assert graph.activations()[-1] >= ROWS * 8 * FLOAT
    assert graph.flops() == ({} if counted is None else {-1: counted})
    assert graph.peak(0)[0] >= graph.activations().get(-1, 0)


def test_the_values_of_a_jagged_tensor_count() -> None:
    graph = graph_of(WEIGHT)
    nested = torch.nested.nested_tensor([X[:2], X[2:]], layout=torch.jagged)
    graph.walk((functional.linear(nested, WEIGHT.t()).sin()).values().sum())
    offsets = nested.offsets().untyped_storage().nbytes()
    # The batch, what the sine got, and where the parts begin.
    assert graph.activations()[-1] >= ROWS * 8 * FLOAT + ROWS * 4 * FLOAT + offsets


def test_backward_of_nothing_and_of_several_tensors() -> None:
    graph = graph_of(WEIGHT)
    graph.walk(None)
    graph.walk([torch.ones(2, requires_grad=True)])
    assert not graph.known and graph.flops() == {}
    graph.walk([(X @ WEIGHT).sum(), (X @ WEIGHT).sum()])
    assert graph.flops() == {-1: 2 * MM * 3 // 3}
    assert graph.activations() == {-1: ROWS * 8 * FLOAT}


# -- FLOPs ------------------------------------------------------------------------------------------------------------


def rand(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, requires_grad=grad)


OPERATIONS: dict[str, Callable[[], torch.Tensor]] = {
    "mm": lambda: rand(3, 5) @ rand(5, 7),
    "mm, one gradient": lambda: rand(3, 5, grad=False) @ rand(5, 7),
    "addmm": lambda: torch.addmm(rand(7), rand(3, 5), rand(5, 7)),
    "addmm, one gradient": lambda: torch.addmm(rand(7), rand(3, 5), rand(5, 7, grad=False)),
    "linear": lambda: functional.linear(rand(2, 3, 5), rand(7, 5), rand(7)),
    "bmm": lambda: torch.bmm(rand(2, 3, 5), rand(2, 5, 7)),
    "bmm, one gradient": lambda: torch.bmm(rand(2, 3, 5, grad=False), rand(2, 5, 7)),
    "bmm, the other": lambda: torch.bmm(rand(2, 3, 5), rand(2, 5, 7, grad=False)),
    "baddbmm": lambda: torch.baddbmm(rand(2, 3, 7), rand(2, 3, 5), rand(2, 5, 7)),
    "einsum": lambda: torch.einsum("bik,bkj->bij", rand(2, 3, 5), rand(2, 5, 7)),
    "conv1d": lambda: functional.conv1d(rand(2, 4, 9), rand(6, 4, 3), padding=1),
    "conv2d": lambda: functional.conv2d(rand(2, 4, 9, 9), rand(6, 4, 3, 3), rand(6), stride=2),
    "conv2d of the batch": lambda: functional.conv2d(rand(2, 4, 9, 9, grad=False), rand(6, 4, 3, 3)),
    "conv_transpose2d": lambda: functional.conv_transpose2d(rand(2, 4, 5, 5), rand(4, 6, 3, 3), stride=2),
    "attention of matrices": lambda: nn.MultiheadAttention(8, 2)(rand(5, 3, 8), rand(5, 3, 8), rand(5, 3, 8))[0],
}


@pytest.mark.parametrize("what", OPERATIONS)
@pytest.mark.parametrize("hooked", [False, True])
def test_flops_are_those_of_torch(what: str, hooked: bool) -> None:
    """Also where checkpointing or the script has packed what is saved."""
    graph = graph_of()
    packed = torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: packed[0])
    with FlopCounterMode(display=False) as counter:
        with packed if hooked else nullcontext():
            loss = OPERATIONS[what]().sum()
        graph.walk(loss)
        loss.backward()
    assert graph.flops() == {-1: counter.get_total_flops()}


def test_flops_of_convolutions_in_groups() -> None:
    """FlopCounterMode counts backward of them as if there were no groups."""
    graph = graph_of()
    graph.walk(functional.conv2d(rand(2, 4, 9, 9), rand(6, 2, 3, 3), groups=2, dilation=2).sum())
    assert graph.flops() == {-1: 3 * 2 * (2 * 6 * 5 * 5) * (2 * 3 * 3)}
    graph = graph_of()
    graph.walk(functional.conv_transpose2d(rand(2, 4, 5, 5), rand(4, 3, 3, 3), groups=2).sum())
    assert graph.flops() == {-1: 3 * 2 * (2 * 4 * 5 * 5) * (3 * 3 * 3)}


@pytest.mark.parametrize("length", [5, 9])
@pytest.mark.parametrize("hooked", [False, True])
def test_attention_is_two_products_and_four_in_backward(length: int, hooked: bool) -> None:
    """FlopCounterMode does not know the kernel of the CPU, and counts what others compute twice."""
    query, key, value = rand(2, 3, 5, 8), rand(2, 3, length, 8), rand(2, 3, length, 8)
    graph = graph_of()
    packed = torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: packed[0])
    with packed if hooked else nullcontext():
        out = functional.scaled_dot_product_attention(query, key, value)
    assert out.grad_fn is not None and out.grad_fn.name().startswith("ScaledDotProduct")
    graph.walk(out.sum())
    product = 2 * 2 * 3 * 5 * length * 8
    assert graph.flops() == {-1: 2 * product + 4 * product}


@pytest.mark.parametrize("micro_batches", [1, 3, 4, 9])
def test_flops_grow_with_micro_batches(layers: Layers, micro_batches: int) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            model(X).sum().backward()
        optimizer.step()
    once = 2 * (2 * ROWS * 8 * 4) + 3 * (2 * ROWS * 4 * 2)
    assert layers.lines()[-1]["work"] == {"flops": micro_batches * once, "samples": micro_batches * ROWS}


@pytest.mark.parametrize("times", [2, 9])
def test_a_graph_that_is_kept_counts_once(times: int) -> None:
    assert times < autograd_graph.MOST_WALKS or times > autograd_graph.MOST_WALKS
    graph = graph_of(WEIGHT)
    loss = (X @ WEIGHT).sum()
    for _ in range(times):
        graph.walk(loss)
        loss.backward(retain_graph=True)
    WEIGHT.grad = None
    assert graph.flops() == {-1: MM}


def test_a_graph_that_is_too_large_is_left_alone(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    nodes = 9  # of the loss 2, of each layer AddmmBackward, TBackward and two parameters; ReLU … minus what is shared

    def kept(most: int) -> dict[str, int]:
        monkeypatch.setattr(autograd_graph, "MOST_NODES", most)
        train(model, lambda: model(X).sum())
        return layers.by_name("activations")

    assert kept(nodes + 1) == {"0": ROWS * 8 * FLOAT, "1": ROWS * 4 * FLOAT}
    assert flops(layers) == 2 * (2 * ROWS * 8 * 4) + 3 * (2 * ROWS * 4 * 2)
    assert kept(5) == {}
    assert flops(layers) is None
    assert layers.last()[1].peaks == {}
    assert layers.by_name("forward_us")


# -- The peak ---------------------------------------------------------------------------------------------------------


def test_the_peak_of_one_product() -> None:
    weight = rand(8, 4)
    graph = graph_of(weight)
    graph.walk((X @ weight).sum())
    batch, out, gradient = ROWS * 8 * FLOAT, ROWS * 4 * FLOAT, 8 * 4 * FLOAT
    # ``sum`` passes its gradient on expanded, which we take for memory of its own; the product has that, the batch
    # and the new gradient.
    assert graph.peak(0) == (batch + out + gradient, -1)
    assert graph.peak(0) == (batch + out + gradient, -1)  # asking changes nothing


def test_a_gradient_that_is_passed_on_is_not_counted_twice() -> None:
    weight = rand(4, 8)
    graph = graph_of(weight)
    graph.walk((X @ weight.t()).sum())
    # TBackward hands over what MmBackward computed.
    assert graph.peak(0)[0] == (ROWS * 8 + ROWS * 4 + 8 * 4) * FLOAT


def test_a_residual_keeps_one_gradient_for_both_ways() -> None:
    weight = rand(8, 8)
    start = rand(ROWS, 8)
    graph = graph_of(weight, start)
    hidden = start.sin()
    graph.walk((hidden + hidden @ weight).sum())
    size, gradient = ROWS * 8 * FLOAT, 8 * 8 * FLOAT
    # At the product: what it saved, the gradient that both ways have, the one for its input, which is added to the
    # other one, and the one for the weight.
    assert graph.peak(0) == (size + size + size + gradient, -1)


def test_what_is_computed_again_counts_where_it_is() -> None:
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU())
    graph = graph_of(*model.parameters())
    graph.walk(checkpoint(model, X, use_reentrant=False).sum())
    plain, repeated = graph.peak(0), graph.peak(1000)
    assert repeated[0] == plain[0] + 1000


def test_gradients_that_exist_are_not_made_again() -> None:
    weight = rand(8, 4)
    weight.grad = torch.zeros(8, 4)
    graph = graph_of(weight)
    graph.walk((X @ weight).sum(), 8 * 4 * FLOAT)
    # The new one exists until it is added.
    assert graph.peak(0)[0] == (ROWS * 8 + ROWS * 4 + 8 * 4) * FLOAT
    assert graph.gradients_before == 8 * 4 * FLOAT


class Wide(nn.Module):
    """A transformer whose tensors are large enough that nothing else matters."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(4))
        self.head = nn.Linear(64, 1000, bias=False)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return self.head(x).flatten(0, 1)  # type: ignore[no-any-return]


@pytest.mark.few(1)
@pytest.mark.parametrize(("again", "micro_batches", "within"), [(False, 1, 0.02), (False, 2, 0.02), (True, 1, 0.05)])
def test_the_peak_is_that_of_the_allocator(
    layers: Layers, tmp_path: Path, again: bool, micro_batches: int, within: float
) -> None:
    """Of the CPU's, whose allocations torch's profiler sees."""
    model = Wide(again)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, answers = torch.randn(8, 64, 64), torch.zeros(8 * 64, dtype=torch.int64)

    def step() -> None:
        for _ in range(micro_batches):
            functional.cross_entropy(model(batch), answers).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    memory = [
        event["args"] for event in sorted(events, key=lambda one: one.get("ts", 0)) if event["name"] == "[memory]"
    ]
    before = memory[0]["Total Allocated"] - memory[0]["Bytes"]
    real = max(row["Total Allocated"] for row in memory) - before
    _, sample = layers.last()
    held = sum(sample.memory["parameters"]) + batch.nbytes
    assert max(size for size, _ in sample.peaks.values()) - held == pytest.approx(real, rel=within)


# -- Several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_view", [False, True])
def test_the_buckets_of_ddp_are_in_every_peak(layers: Layers, as_view: bool) -> None:
    with process_group():
        inner = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 2, bias=False))
        model = DistributedDataParallel(inner, gradient_as_bucket_view=as_view)
        tree = ModuleTree(model, compiled=False)
        size = (32 + 8) * FLOAT
        assert (tree.bucket_bytes, tree.grads_in_buckets) == (size, as_view)
        train(model, lambda: model(X).sum(), 4)
        kept = ROWS * (8 + 4) * FLOAT
        peaks = {phase: peak for phase, (peak, _) in layers.last()[1].peaks.items()}
        assert layers.by_name("activations") == {"0": ROWS * 8 * FLOAT, "1": ROWS * 4 * FLOAT}
        assert peaks["forward"] == size + size + kept  # parameters, and gradients or what they are copied to
        assert peaks["optimizer"] == (2 if as_view else 3) * size


def test_what_fsdp_gathers_is_counted_apart(layers: Layers) -> None:
    with process_group():
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        for one in model[1:3]:
            fully_shard(one)
        fully_shard(model)
        weight = 8 * 8 * FLOAT
        # The two that the outermost group has, and four times the others' size.
        assert ModuleTree(model, compiled=False).gathered_bytes == 2 * weight + 4 * weight
        train(model, lambda: model(X).sum(), 4)
        assert layers.by_name("activations") == {str(at): ROWS * 8 * FLOAT for at in range(4)}
        assert layers.last()[1].peaks["forward"] == (4 * weight + 4 * ROWS * 8 * FLOAT + 6 * weight, 4)
        assert flops(layers) == (2 + 3 * 3) * 2 * ROWS * 8 * 8
        first = graph_of(*model.parameters())
        loss = model(X).sum()
        first.walk(loss)
        loss.backward()
        second = graph_of(*model.parameters())
        loss = model(X).sum()
        second.walk(loss, 4 * weight)
        loss.backward()
        hidden = ROWS * 8 * FLOAT
        assert first.activations() == second.activations() == {-1: 4 * hidden}
        flowing = hidden + hidden + weight  # what comes in, and what is computed for the input and the weight
        # First at the third layer of backward, behind which two gradients exist; then at the first, because what is
        # computed is added to gradients that were there before.
        assert first.peak(0)[0] == 2 * hidden + 2 * weight + flowing
        assert second.peak(0)[0] == 4 * hidden + flowing


@pytest.mark.parametrize("hooked", [False, True])
def test_of_tensor_parallelism_a_rank_counts_its_own_flops(hooked: bool) -> None:
    with process_group(2):
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        split = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        graph = graph_of(*split.parameters())
        packed = torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: packed[0])
        with packed if hooked else nullcontext():
            loss = split(X).sum()
        graph.walk(loss)
        assert graph.flops() == {-1: (2 * 2 * ROWS * 8 * 16 + 3 * 2 * ROWS * 16 * 4) // 2}
        if not hooked:
            # The batch, and this rank's half of what ReLU returned.
            assert graph.activations() == {-1: ROWS * 8 * FLOAT + ROWS * 8 * FLOAT}


# -- No trace ---------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_alive(layers: Layers) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, lambda: model(X).sum())
    outputs: list[weakref.ref[Any]] = []
    handle = model[1].register_forward_hook(lambda _module, _args, out: outputs.append(weakref.ref(out)))
    gc.collect()
    gc.disable()
    try:
        batch = X.clone()
        storage = weakref.ref(batch.untyped_storage())
        loss = model(batch).sum()
        outputs += [weakref.ref(loss), weakref.ref(batch)]
        del batch
        loss.backward()
        del loss
        assert [output() for output in outputs] == [None] * 3  # before the step is over
        assert storage() is None
        optimizer.step()
    finally:
        gc.enable()
    handle.remove()
    optimizer.zero_grad()
    removed = [weakref.ref(model), weakref.ref(model[0])]
    layers.sampler.forget()
    model, optimizer = nn.Sequential(), torch.optim.SGD([WEIGHT])
    gc.collect()
    assert [one() for one in removed] == [None] * 2


@pytest.mark.parametrize("kind", ["plain", "reentrant", "again"])
def test_losses_are_the_same_without_us(layers: Layers, kind: str) -> None:
    """With dropout inside of what is computed again, so that a changed random state would show."""

    def losses() -> list[float]:
        torch.manual_seed(1)
        model = Transformer(kind)
        model.block.mlp.append(nn.Dropout(0.3))
        seen: list[float] = []

        def loss() -> torch.Tensor:
            found = of_words(model)()
            seen.append(found.item())
            return found

        train(model, loss, 6)
        return seen

    with_us = losses()
    assert len(layers.records().samples) == 5
    layers.sampler.withdraw()
    assert losses() == with_us


def test_a_deep_graph_is_freed_without_trouble() -> None:
    graph = graph_of(WEIGHT)
    out = WEIGHT
    for _ in range(autograd_graph.MOST_NODES - 10):
        out = out.view(-1)
    graph.walk(out.sum())
    assert graph.known
    assert graph.peak(0)[0] >= WEIGHT.nbytes
    del graph


def test_a_graph_that_the_script_keeps_does_not_keep_our_figures(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[AutogradGraph]] = []
    original = AutogradGraph.__init__

    def init(self: AutogradGraph, *args: Any, **kwargs: Any) -> None:
        made.append(weakref.ref(self))
        original(self, *args, **kwargs)

    monkeypatch.setattr(AutogradGraph, "__init__", init)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    kept = []

    def loss() -> torch.Tensor:
        kept.append(model(X).sum())
        return kept[-1]

    train(model, loss, 5)
    gc.collect()
    assert len(made) == 5  # the last one is of the step in progress
    assert [one() is None for one in made] == [True] * 4 + [False]


def test_an_exception_in_forward_does_not_move_bytes_to_other_layers(layers: Layers) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 4), nn.Tanh()), nn.Linear(4, 2))

    def loss() -> torch.Tensor:
        with pytest.raises(RuntimeError, match="shapes"):
            model(X[:, :5])  # fails inside of "0.0"
        return model(X).exp().sum()  # type: ignore[no-any-return]

    train(model, loss)
    # The batch; of tanh; of exp, which is outside of the model.
    assert layers.by_name("activations") == {"0.0": ROWS * 8 * FLOAT, "0.1": ROWS * 4 * FLOAT, "": ROWS * 2 * FLOAT}


def test_modes_and_tensors_of_the_script_do_not_see_the_walk(layers: Layers) -> None:
    seen: list[str] = []
    functions, _ = noting_modes(seen)

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})

    model = nn.Linear(8, 4)

    def looked_at() -> list[str]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = model(X.as_subclass(Mine)).exp().sum()
        seen.clear()
        with functions:
            torch.autograd.backward(loss)
        optimizer.step()
        return list(seen)

    looked_at()
    looked_at()
    with_us = looked_at()
    layers.sampler.withdraw()
    looked_at()
    assert with_us == looked_at()
