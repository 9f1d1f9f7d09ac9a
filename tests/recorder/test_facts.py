"""Facts about live objects, from real loops, as a reader of the ring sees them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from stepscope.recorder import facts, guard, model
from stepscope.recorder import model as model_module
from stepscope.recorder.facts import LiveObjects
from stepscope.recorder.model import ModelWalk
from stepscope.recorder.process_groups import mesh_facts
from stepscope.ring import RingState
from tests.recorder.conftest import Recording, forgive_failures

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.tied = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


PARAMETERS = 8 * 8 + 8 + 8 + 8 + 8 * 3 + 3


def dataset(size: int = 40) -> TensorDataset:
    return TensorDataset(torch.randn(size, 8))


def train(model: nn.Module, data: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in data:
        optimizer.zero_grad()
        model(x).float().sum().backward()
        optimizer.step()


def test_a_plain_loop(recording: Recording) -> None:
    model = Net()
    train(model, DataLoader(dataset(), batch_size=4, shuffle=True), torch.optim.AdamW(model.parameters(), fused=True))
    assert recording.facts() == {
        "global_step": {"by": "optimizer", "first": 0},
        "loader": {
            "num_workers": 0,
            "pin_memory": False,
            "prefetch_factor": None,
            "persistent_workers": False,
            "batch_size": 4,
            "sampler": "RandomSampler",
            "dataset": "TensorDataset",
            "distributed_sampler": False,
            "set_epoch_missing": False,
            "length": 10,
            "drop_last": False,
            "last_batch": 4,
            "epochs": 0,
        },
        "model": {
            "class": "Net",
            "parameters": PARAMETERS,
            "modules": 6,
            "batchnorm": 1,
            "sync_batchnorm": 0,
            "compiled": False,
            "dtype": "float32",
        },
        "optimizer": {"class": "AdamW", "fused": True, "foreach": None, "tensors": 6},
        "autocast": None,
        "threads": torch.get_num_threads(),
        "gc": {"enabled": gc.isenabled(), "thresholds": list(gc.get_threshold())},
    }


def test_a_single_step_is_enough(recording: Recording) -> None:
    train(Net(), DataLoader(dataset(4), batch_size=4))
    found = recording.facts()
    assert (found["model"]["class"], found["loader"]["sampler"]) == ("Net", "SequentialSampler")
    assert found["optimizer"] == {"class": "SGD", "fused": None, "foreach": None, "tensors": 6}


def test_workers(recording: Recording) -> None:
    loader = DataLoader(dataset(24), 4, num_workers=2, pin_memory=True, prefetch_factor=3, persistent_workers=True)
    train(Net(), loader)
    found = recording.facts()["loader"]
    names = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "length")
    assert [found[name] for name in names] == [2, True, 3, True, 6]


class Endless(IterableDataset[Any]):
    asked = False

    def __len__(self) -> int:
        Endless.asked = True
        return 10**9

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield (torch.randn(8),)


def test_the_length_of_an_iterable_dataset_is_not_asked_for(recording: Recording) -> None:
    data = iter(DataLoader(Endless(), batch_size=4))
    train(Net(), [next(data) for _ in range(4)])
    found = recording.facts()["loader"]
    assert (found["dataset"], found["length"], found["sampler"]) == ("Endless", None, "_InfiniteConstantSampler")
    assert not Endless.asked


class Counted(TensorDataset):
    """A dataset, and a loader, of the script, that note when their code is run."""

    calls: ClassVar[list[str]] = []

    def __len__(self) -> int:
        Counted.calls.append("len")
        return super().__len__()


class OwnLoader(DataLoader[Any]):
    @property
    def drop_last(self) -> bool:
        Counted.calls.append("drop_last")
        return False

    @drop_last.setter
    def drop_last(self, value: bool) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        Counted.calls.append(name)
        raise AttributeError(name)


def test_of_a_loader_of_the_script_only_the_length_of_its_dataset_is_called_and_once(recording: Recording) -> None:
    def epoch() -> Counter[str]:
        Counted.calls.clear()
        for _ in loader:
            pass
        return Counter(Counted.calls)

    loader = OwnLoader(Counted(*dataset(10).tensors), batch_size=4)
    first, second = epoch(), epoch()
    assert first - second == {"len": 1}
    train(Net(), loader)
    found = recording.facts()["loader"]
    assert [found[name] for name in ("length", "last_batch", "drop_last", "batch_size")] == [3, 2, False, 4]


class Bucketed(BatchSampler):
    pass


def test_a_batch_sampler_of_the_scripts_own(recording: Recording) -> None:
    data = dataset(16)
    train(Net(), DataLoader(data, batch_sampler=Bucketed(RandomSampler(data), 4, False)))
    found = recording.facts()["loader"]
    assert (found["sampler"], found["batch_size"], found["length"]) == ("RandomSampler", 4, None)


def test_the_training_loader_is_told_from_that_of_the_evaluation(recording: Recording) -> None:
    model = Net()
    training, evaluation = DataLoader(dataset(), 4, shuffle=True), DataLoader(dataset(16), 8)
    for loader in (evaluation, training, evaluation, training):
        if loader is training:
            train(model, loader)
        else:
            with torch.no_grad():
                for (x,) in loader:
                    model(x)
    assert recording.facts()["loader"]["length"] == 10


def test_a_new_loader_each_epoch(recording: Recording) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in (4, 8):
        for (x,) in DataLoader(dataset(16), size, shuffle=True):  # gone when its iterator is made
            train(model, [(x,)], optimizer)
            with torch.no_grad():
                model(next(iter(DataLoader(dataset(6), 2)))[0])
        recording.recorder.objects.update_facts(recording.recorder.step)
        assert recording.recorder.objects.facts["loader"]["batch_size"] == size


# -- set_epoch --------------------------------------------------------------------------------------------------------


def epochs(number: int, *, told: bool, peeks: bool = False, shuffle: bool = True) -> None:
    data = dataset(24)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0, shuffle=shuffle)
    loader, model = DataLoader(data, batch_size=4, sampler=sampler), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if peeks:
        next(iter(loader))
    for epoch in range(number):
        if told:
            sampler.set_epoch(epoch)
        train(model, loader, optimizer)
        if peeks:
            next(iter(loader))


@pytest.mark.parametrize(
    ("how", "missing"),
    [
        ({"number": 2, "told": False}, True),
        ({"number": 1, "told": False}, False),
        ({"number": 3, "told": True}, False),
        ({"number": 1, "told": True, "peeks": True}, False),
        ({"number": 3, "told": True, "peeks": True}, False),
        ({"number": 3, "told": False, "shuffle": False}, False),
    ],
    ids=str,
)
def test_set_epoch(recording: Recording, how: dict[str, Any], missing: bool) -> None:
    epochs(**how)
    recording.recorder.set_state(RingState.EXITED)
    found = recording.facts()["loader"]
    assert found["distributed_sampler"] is True
    assert found["set_epoch_missing"] is missing


def test_an_iterator_each_step_is_no_epoch(recording: Recording) -> None:
    data = dataset(24)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        train(model, [next(iter(loader))], optimizer)
    recording.recorder.set_state(RingState.EXITED)
    assert recording.facts()["loader"]["set_epoch_missing"] is False


# -- model and optimizer ----------------------------------------------------------------------------------------------


def test_sync_batchnorm_is_counted_apart(recording: Recording) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Identity())
    model[3].rarely = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4))
    train(model, DataLoader(dataset(), 4))
    found = recording.facts()["model"]
    assert (found["class"], found["batchnorm"], found["sync_batchnorm"]) == ("Sequential", 2, 1)


def test_the_largest_of_several_models_and_optimizers(recording: Recording) -> None:
    critic, generator = nn.Linear(8, 1).double(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    optimizers = [torch.optim.SGD(critic.parameters(), lr=0.1), torch.optim.Adam(generator.parameters(), foreach=False)]
    for _ in range(6):
        x = torch.randn(4, 8, dtype=torch.double)
        critic(generator(x).detach()).mean().backward()
        optimizers[0].step()
        critic(generator(x)).mean().backward()
        optimizers[1].step()
    found = recording.facts()
    assert (found["model"]["class"], found["model"]["dtype"]) == ("Sequential", "float64")
    assert found["optimizer"] == {"class": "Adam", "fused": None, "foreach": False, "tensors": 4}
    assert "loader" not in found


def test_steps_with_borders_of_the_users(recording: Recording) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    recording.recorder.begin()
    for _ in range(4):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        recording.recorder.end_step()
    assert recording.facts()["optimizer"]["class"] == "Adam"


def test_a_compiled_model_is_its_own_class(recording: Recording) -> None:
    train(torch.compile(Net(), backend="eager"), DataLoader(dataset(), 4))  # type: ignore[arg-type]
    found = recording.facts()["model"]
    assert (found["class"], found["compiled"], found["parameters"]) == ("Net", True, PARAMETERS)


class Casting(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Decorated(Net):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float()


@pytest.mark.parametrize("kind", [Net, Casting, Decorated])
def test_autocast(recording: Recording, kind: type[Net]) -> None:
    model = kind()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind is Net):
        train(model, DataLoader(dataset(), 4))
    assert recording.facts()["autocast"] == "bfloat16"
    assert recording.facts()["model"]["dtype"] == "float32"


def test_narrow_parameters_are_no_autocast(recording: Recording) -> None:
    model = nn.Linear(8, 3).bfloat16()
    train(model, [(torch.randn(4, 8).bfloat16(),)] * 4)
    assert (recording.facts()["autocast"], recording.facts()["model"]["dtype"]) == (None, "bfloat16")


def test_an_autocast_that_is_off_is_none() -> None:
    wrapped = torch.autocast("cpu", torch.bfloat16, enabled=False)(nn.Linear(2, 2).forward)
    module = nn.Linear(2, 2)
    module.forward = wrapped  # type: ignore[method-assign]
    assert model.autocast_seen_in(module, "float32", "float32") is None


def test_the_objects_are_free_to_go(recording: Recording) -> None:
    model = Net()
    loader = DataLoader(dataset(), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, loader, optimizer)
    references = [weakref.ref(each) for each in (model, loader, optimizer, model.body)]
    optimizer.zero_grad()
    del model, loader, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    recording.recorder.objects.update_facts(100)
    assert recording.recorder.objects.facts["model"]["class"] == "Net"


def test_facts_are_looked_at_now_and_then_only(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[int] = []
    update = LiveObjects.update_facts
    monkeypatch.setattr(
        LiveObjects, "update_facts", lambda self, step, by: requests.append(step) or update(self, step, by)
    )
    train(Net(), [(torch.randn(2, 8),)] * 1100)
    assert requests == [1, 3, 100, 1024]


# -- large models, and faults -----------------------------------------------------------------------------------------


def test_a_large_model_is_counted_over_some_steps(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "WALK_NS", 0)
    monkeypatch.setattr(model_module, "MODULES_AT_ONCE", 10)
    model = nn.Sequential(nn.Linear(8, 8), *[nn.Identity() for _ in range(50)])
    train(model, [(torch.randn(2, 8),)] * 4)
    assert "model" not in recording.facts()
    train(model, [(torch.randn(2, 8),)] * 5)
    assert recording.facts()["model"]["modules"] == 52
    assert recording.recorder._check_at == 9


def test_a_model_that_goes_while_it_is_counted() -> None:
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(40)])
    walk = ModelWalk(model)
    walk.go_on(lambda: 1, 0)
    assert walk.facts is None
    del model
    walk.go_on(lambda: 1, 2)
    assert walk.facts == {}


class Stubborn(nn.Module):
    """Fails when it is looked at from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 3))
        self.asked = 0

    @property
    def _compiled_call_impl(self) -> Any:
        self.asked += 1
        if self.asked > 100:
            raise RuntimeError("no")
        return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class OddSampler(RandomSampler):
    """Its class has the name of a module of torch, so its length is taken, and the dataset's raises."""

    def __len__(self) -> int:
        raise RuntimeError("no")


OddSampler.__module__ = "torch.utils.data.odd"


def test_what_fails_is_told_once_and_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    before = guard.failures()
    objects = LiveObjects()
    model = Stubborn()
    model.asked = 100
    objects.meet_root(model, None, "float32")
    data = dataset(8)
    loader = DataLoader(data, 4, sampler=OddSampler(data))
    for step in range(5):
        objects.meet_loader(loader, step)
        assert objects.update_facts(step) is False
    assert guard.failures() == before + 1
    assert objects.facts["threads"] == torch.get_num_threads()
    assert "loader" not in objects.facts
    assert objects.facts["model"]["class"] == "Stubborn"  # what it defines itself is not asked
    forgive_failures(before)
    capfd.readouterr()


# -- meshes -----------------------------------------------------------------------------------------------------------


class Mesh:
    """As much of a DeviceMesh as is asked for."""

    def __init__(self, ranks: torch.Tensor, names: tuple[str, ...] | None, rank: int, root: Mesh | None = None) -> None:
        self.mesh, self.mesh_dim_names, self._rank, self._root = ranks, names, rank, root
        self.ndim, self.shape = ranks.ndim, tuple(ranks.shape)

    def get_rank(self) -> int:
        return self._rank

    def get_coordinate(self) -> list[int] | None:
        found = (self.mesh == self._rank).nonzero()
        return found[0].tolist() if len(found) else None

    def _get_root_mesh(self) -> Mesh:
        return self._root or self


CUBE = torch.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("names", "peers"),
    [
        (("pp", "dp", "tp"), [[12, 12, 1]]),
        (("dp_replicate", "dp_shard", "pp"), [[2, 6, 4]]),
        (("dp", "ep", "fsdp"), [[0, 24, 1]]),
        (("dp", "cp", "fsdp"), [[0, 24, 1]]),
        (("replicate", "shard", "data_parallel"), [[0, 24, 1]]),
        (("pp", "ep", "tp"), [[12, 12, 1]]),
        (("pp", "ep", "stage"), [[14, 3, 4]]),
    ],
)
def test_peers_differ_in_dimensions_that_share_work_evenly(names: tuple[str, ...], peers: list[list[int]]) -> None:
    found = mesh_facts([Mesh(CUBE, names, 18)], sharded=False)
    assert found == {"mesh": {"names": list(names), "shape": [2, 3, 4]}, "peers": peers}


def test_a_mesh_cut_out_of_another_is_seen_as_a_whole() -> None:
    whole = Mesh(CUBE, ("pp", "dp", "tp"), 18)
    part = Mesh(CUBE[1], ("dp", "tp"), 18, whole)
    assert mesh_facts([part], sharded=False)["mesh"] == {"names": ["pp", "dp", "tp"], "shape": [2, 3, 4]}
    world = Mesh(torch.arange(24), ("world",), 18)
    part = Mesh(CUBE[1], ("dp", "tp"), 18, world)
    assert mesh_facts([part], sharded=False) == {
        "mesh": {"names": ["dp", "tp"], "shape": [3, 4]},
        "peers": [[12, 12, 1]],
    }


def test_dimensions_without_names_are_those_of_fsdp_or_unknown() -> None:
    mesh = Mesh(torch.arange(4), None, 1)
    assert mesh_facts([mesh], sharded=True) == {"mesh": {"names": [], "shape": [4]}, "peers": [[0, 4, 1]]}
    assert mesh_facts([mesh], sharded=False) == {"mesh": {"names": [], "shape": [4]}}
    assert "peers" not in mesh_facts([Mesh(torch.arange(4), ("dp",), 9)], sharded=True)
    assert mesh_facts([], sharded=True) == {}
