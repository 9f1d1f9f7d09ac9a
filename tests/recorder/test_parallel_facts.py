"""Facts about DDP and FSDP, from real modules of torch: a group of one rank, or one that only pretends to have two."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from stepscope.recorder import model as fsdp_module
from stepscope.recorder.model import ModelWalk
from stepscope.ring import RingState
from tests.recorder.conftest import Recording, process_group

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

WIDTH = 16
LAYER = WIDTH * WIDTH + WIDTH
CPU = torch.device("cpu")


@pytest.fixture
def pretended() -> Iterator[Any]:
    """A mesh of two ranks, of which this process is one and the other never needs to do anything."""
    with process_group(2):
        yield init_device_mesh("cpu", (2,))


def layers(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])


def train(model: nn.Module, steps: int = 5, batch: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(batch, WIDTH)).float().sum().backward()
        optimizer.step()


def walked(model: nn.Module) -> dict[str, Any]:
    model(torch.randn(2, WIDTH)).float().sum().backward()
    walk = ModelWalk(model)
    walk.go_on(lambda: 0, 1)
    assert walk.facts is not None
    return walk.facts


# -- FSDP2 ------------------------------------------------------------------------------------------------------------

PLAIN2 = {
    "version": 2,
    "units": 1,
    "parameters": 4 * LAYER,
    "largest_share": 1.0,
    "strategy": "full_shard",
    "resharded_units": 0,
    "param_dtype": "float32",
    "reduce_dtype": "float32",
    "cpu_offload": False,
    "forward_prefetch": False,
    "backward_prefetch": "implicit",
}


@pytest.mark.usefixtures("alone")
def test_fsdp2_in_a_loop(recording: Recording) -> None:
    model = layers()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (*model, model):
        fully_shard(layer, mp_policy=policy)
    train(model)
    found = recording.facts()
    shared = {"largest_share": 0.25, "resharded_units": 4, "param_dtype": "bfloat16"}
    assert found["fsdp"] == {**PLAIN2, "units": 4, **shared}
    assert (found["model"]["class"], found["model"]["parameters"]) == ("Sequential", 4 * LAYER)


def test_fsdp2_with_one_unit(pretended: Any) -> None:
    model = layers()
    fully_shard(model, mesh=pretended)
    assert walked(model)["fsdp"] == PLAIN2


def test_fsdp2_of_modules_that_share_a_unit(pretended: Any) -> None:
    model = layers(6)
    offload = CPUOffloadPolicy(pin_memory=False)
    fully_shard([model[0], model[1], model[2]], mesh=pretended, offload_policy=offload)
    fully_shard(model[3], mesh=pretended, reshard_after_forward=False, offload_policy=offload)
    fully_shard(model, mesh=pretended, offload_policy=offload)
    model[0].set_modules_to_forward_prefetch([model[3]])
    model[3].set_modules_to_backward_prefetch([model[0]])
    assert walked(model)["fsdp"] == {
        **PLAIN2,
        "units": 3,
        "parameters": 6 * LAYER,
        "largest_share": 0.5,
        "resharded_units": 1,
        "cpu_offload": True,
        "forward_prefetch": True,
        "backward_prefetch": "explicit",
    }


def test_what_is_not_sharded_is_no_unit(pretended: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(model[1], mesh=pretended)
    found = walked(model)
    assert (found["fsdp"]["units"], found["fsdp"]["parameters"]) == (1, LAYER)
    assert found["model"]["parameters"] == 2 * LAYER
    assert "fsdp" not in walked(layers())


def test_hybrid_sharding() -> None:
    model = layers()
    with process_group(4):
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        assert walked(model)["fsdp"]["strategy"] == "hybrid_shard"


class Renamed:
    """A state of a torch whose private names are others."""


@pytest.mark.parametrize("state", [None, Renamed()], ids=["none", "renamed"])
def test_without_torchs_private_names_the_rest_is_told(
    pretended: Any, monkeypatch: pytest.MonkeyPatch, state: object
) -> None:
    model = layers()
    fully_shard(model, mesh=pretended)
    monkeypatch.setattr(fsdp_module, "_state_of", lambda module: state)
    found = walked(model)
    assert "fsdp" not in found
    assert found["model"]["parameters"] == 4 * LAYER


def test_units_keep_nothing_alive(pretended: Any) -> None:
    model = layers()
    for layer in (*model, model):
        fully_shard(layer, mesh=pretended)
    model(torch.randn(2, WIDTH)).sum().backward()
    walk = ModelWalk(model)
    walk.go_on(lambda: 0, 1)
    gone = [weakref.ref(module) for module in model.modules()]
    del model, layer
    gc.collect()
    assert walk.facts is not None
    assert [reference() for reference in gone] == [None] * 5


# -- FSDP1 ------------------------------------------------------------------------------------------------------------

PLAIN1 = {**PLAIN2, "version": 1, "resharded_units": 1, "backward_prefetch": "backward_pre"}


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        (
            {
                "auto_wrap_policy": ModuleWrapPolicy({nn.Linear}),
                "use_orig_params": True,
                "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
                "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
                "forward_prefetch": True,
                "backward_prefetch": None,
            },
            {
                "units": 4,
                "largest_share": 0.25,
                "strategy": "shard_grad_op",
                "resharded_units": 0,
                "param_dtype": "bfloat16",
                "reduce_dtype": "bfloat16",
                "forward_prefetch": True,
                "backward_prefetch": None,
            },
        ),
        (
            {"sharding_strategy": ShardingStrategy.NO_SHARD, "backward_prefetch": BackwardPrefetch.BACKWARD_POST},
            {"strategy": "no_shard", "resharded_units": 0, "backward_prefetch": "backward_post"},
        ),
    ],
    ids=["plain", "all", "no_shard"],
)
def test_fsdp1(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    found = walked(FullyShardedDataParallel(layers(), device_id=CPU, **settings))
    assert found["fsdp"] == {**PLAIN1, **expected}
    assert (found["model"]["class"], found["model"]["parameters"]) == ("Sequential", 4 * LAYER)


@pytest.mark.usefixtures("pretended")
def test_fsdp1_on_the_cpu() -> None:
    walk = ModelWalk(FullyShardedDataParallel(layers(), device_id=CPU, cpu_offload=CPUOffload(offload_params=True)))
    assert walk.root() is None  # nobody holds it
    model = FullyShardedDataParallel(layers(), device_id=CPU, cpu_offload=CPUOffload(offload_params=True))
    walk = ModelWalk(model)
    walk.go_on(lambda: 0, 1)
    assert walk.facts is not None
    assert walk.facts["fsdp"]["cpu_offload"] is True


# -- DDP --------------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self, skips: range | tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._skips, self._calls = skips, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        y = self.first(x)
        return y if self._calls in self._skips else self.second(y)


@pytest.mark.few(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("skips", "unused"), [((), "none"), (range(1000), "same"), ((60,), "varying"), ((1,), "varying")], ids=str
)
def test_unused_parameters(recording: Recording, skips: Any, unused: str) -> None:
    train(DistributedDataParallel(Branching(skips), find_unused_parameters=True), steps=102)
    found = recording.facts()["ddp"]
    assert (found["unused"], found["tensors"]) == (unused, 4)
    assert found["iterations"] == 99


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "settings", [{}, {"find_unused_parameters": True, "static_graph": True}], ids=["off", "static"]
)
def test_nothing_is_said_of_unused_parameters_that_nobody_looks_for(
    recording: Recording, settings: dict[str, Any]
) -> None:
    train(DistributedDataParallel(layers(), **settings), steps=102)
    assert not {"unused", "iterations"} & set(recording.facts()["ddp"])


class FrozenBatchNorm(nn.Module):
    """As libraries have it: called so, and without statistics of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.usefixtures("alone")
def test_batchnorm_under_ddp(recording: Recording) -> None:
    resting = nn.BatchNorm1d(WIDTH)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH), resting)
    inner.append(FrozenBatchNorm()).append(nn.GroupNorm(2, WIDTH))
    model = DistributedDataParallel(inner)
    resting.eval()
    train(model)
    assert recording.facts()["ddp"]["batchnorm"] == 2


def test_batchnorm_without_ddp(recording: Recording) -> None:
    train(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    assert "ddp" not in recording.facts()


# -- the data, and the end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "drop_last", "last_batch", "length"), [(44, False, 2, 6), (48, False, 4, 6), (44, True, None, 5)]
)
def test_the_last_batch(
    recording: Recording, samples: int, drop_last: bool, last_batch: int | None, length: int
) -> None:
    data = TensorDataset(torch.randn(samples, WIDTH))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=1)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=drop_last)
    model = layers(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        next(iter(loader))  # a look at a batch is no epoch
    recording.recorder.set_state(RingState.EXITED)
    found = recording.facts()["loader"]
    assert (found["drop_last"], found["last_batch"], found["length"]) == (drop_last, last_batch, length)
    assert found["epochs"] == 3


@pytest.mark.parametrize(
    ("state", "destroyed", "told"),
    [(RingState.EXITED, False, True), (RingState.EXITED, True, False), (RingState.EXCEPTION, False, None)],
    ids=["left", "destroyed", "failed"],
)
@pytest.mark.usefixtures("alone")
def test_the_process_group_at_the_end(
    recording: Recording, state: RingState, destroyed: bool, told: bool | None
) -> None:
    model = DistributedDataParallel(layers())
    train(model)
    assert "process_group_open" not in recording.facts()
    if destroyed:
        dist.destroy_process_group()
    recording.recorder.set_state(state)
    assert recording.facts().get("process_group_open") is told


def test_a_job_without_a_process_group_leaves_none_open(recording: Recording) -> None:
    train(layers())
    recording.recorder.set_state(RingState.EXITED)
    assert "process_group_open" not in recording.facts()
