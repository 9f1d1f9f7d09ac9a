"""Jobs of all kinds in one process, for ``test_native_hooks.py``, which runs them with hooks in Python and in C.

python native_job.py FOLDER    leaves FOLDER/NAME.RANK.json for each job: losses, and what was written to the ring
python native_job.py FOLDER compiled    the job whose models are compiled, which takes longer than all others together
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import stepscope
from stepscope.recorder import bootstrap, guard
from stepscope.records.steps import FLAG_SAMPLED
from stepscope.ring.layout import CODE_MASK, COLLECTIVE, DATA, STEP_ABOUT, TAG_MASK, TAG_SHIFT, VALUE_MASK

STEPS = 5
EXACT = (STEP_ABOUT, COLLECTIVE)
"""Data words whose values do not depend on times."""
STEP_SHIFT = 20


class Batches(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(4.0) * (index + 1)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01)


def _train(net: nn.Module, optimizer: Any, batches: Any = None, loss_of: Any = None) -> list[float]:
    losses = []
    for x in DataLoader(Batches(), batch_size=None) if batches is None else batches:
        optimizer.zero_grad()
        loss = net(x).square().mean() if loss_of is None else loss_of(net, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain() -> list[float]:
    net = _net()
    return _train(net, _sgd(net))


def accumulated() -> list[float]:
    net, losses = _net(), []
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(STEPS):
        for x in DataLoader(Batches(), batch_size=2):
            loss = net(x).mean()
            torch.autograd.backward(tensors=[loss])
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def several_optimizers() -> list[float]:
    first, second = _net(), nn.Linear(4, 1)
    optimizers = [_sgd(first), torch.optim.Adam(second.parameters())]
    losses = []
    for x in DataLoader(Batches(), batch_size=None):
        for net, optimizer in zip((first, second), optimizers, strict=True):
            losses += _train(net, optimizer, [x])
    return losses


def exceptions() -> list[float]:
    """Raised in forward, in backward, in a closure, in an optimizer, and by a loader."""
    net = _net()
    optimizer = _sgd(net)
    losses = _train(net, optimizer)

    def fail() -> Any:
        raise KeyError

    with contextlib.suppress(RuntimeError):
        net(torch.zeros(3))
    with contextlib.suppress(RuntimeError):
        torch.zeros(3).sum().backward()
    with contextlib.suppress(KeyError):
        optimizer.step(fail)
    groups, optimizer.param_groups = optimizer.param_groups, [{}]
    with contextlib.suppress(KeyError):
        optimizer.step()
    optimizer.param_groups = groups
    exhausted = iter(DataLoader(Batches(), batch_size=None))
    with contextlib.suppress(StopIteration):
        while True:
            next(exhausted)
    return losses + _train(net, optimizer)


def nested() -> list[float]:
    """A model that calls itself and another instance of its class, and evaluates inside."""

    class Tree(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.own = nn.Linear(4, 4)
            self.child = Tree(depth - 1) if depth else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                shift = self.own(x)
            return self.own(x) + shift + (self.child(x) if self.child is not None else 0)

    torch.manual_seed(0)
    net = Tree(3)
    other = Tree(1)
    optimizer = _sgd(net)
    losses = _train(net, optimizer)
    losses += _train(net, optimizer, loss_of=lambda net, x: (net(x) + other(x)).square().mean())
    net.eval()
    with torch.no_grad():
        net(torch.zeros(4))
    other(torch.zeros(4))
    net.train()
    return losses + _train(net, optimizer)


def closures() -> list[float]:
    """A closure, a closure by name, and a loop in a generator that the loop leaves early."""
    net = _net()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    x = torch.arange(4.0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(STEPS)]
    losses += [optimizer.step(closure=closure).item()]

    def steps() -> Iterator[float]:
        plain = _sgd(net)
        while True:
            yield from _train(net, plain, [x])

    made = steps()
    losses += [next(made) for _ in range(STEPS)]
    made.close()
    return losses


def workers() -> list[float]:
    net = _net()
    return _train(net, _sgd(net), DataLoader(Batches(), batch_size=None, num_workers=2))


def forked() -> list[float]:
    """A child trains as well, and another ends inside a forward that began in its parent."""
    net = _net()
    optimizer = _sgd(net)
    losses = _train(net, optimizer)
    pid = os.fork()
    if pid == 0:
        _leave("forked_child", lambda: _train(net, optimizer))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

    def fork_inside(_module: Any, _args: Any) -> None:
        if (child := os.fork()) == 0:
            return
        assert os.waitpid(child, 0)[1] == 0

    parent = os.getpid()
    handle = net.register_forward_pre_hook(fork_inside)
    net(torch.zeros(4)).sum().backward()
    optimizer.step()
    if os.getpid() != parent:
        os._exit(0)
    handle.remove()
    optimizer.zero_grad()
    return losses + _train(net, optimizer)


def threads() -> list[float]:
    """Another thread trains another model meanwhile."""
    net, other = _net(), _net()
    optimizer = _sgd(net)
    losses = _train(net, optimizer)
    thread = threading.Thread(target=lambda: losses.extend(_train(other, _sgd(other))))
    thread.start()
    thread.join()
    return losses + _train(net, optimizer)


def explicit_phases() -> list[float]:
    net = _net()
    optimizer = _sgd(net)
    losses = []
    for x in DataLoader(Batches(), batch_size=None):
        with stepscope.phase("mine"):
            losses += _train(net, optimizer, [x])
        with stepscope.phase("backward"), stepscope.phase("mine"):
            pass
    return losses


def checkpointed() -> list[float]:
    torch.manual_seed(0)
    inner = nn.Linear(4, 4)
    net = nn.Sequential(inner, nn.Linear(4, 1))

    def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden: Any = checkpoint(inner, x.requires_grad_(), use_reentrant=True)
        return net[1](hidden).square().mean()  # type: ignore[index,no-any-return]

    return _train(net, _sgd(net), loss_of=loss_of) + _train(net, _sgd(net))


def amp() -> list[float]:
    """A scaler that skips the steps with infinite gradients."""
    net = _net()
    optimizer = _sgd(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=2)
    losses = []
    for x in DataLoader(Batches(), batch_size=None):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x).float().square().mean() * 1e25
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def transformer() -> list[float]:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1), 2)
    optimizer = torch.optim.AdamW(encoder.parameters(), fused=False)
    losses = _train(encoder, optimizer, loss_of=lambda net, x: net(x.reshape(1, 1, 4)).square().mean())
    encoder.eval()
    with torch.inference_mode():
        losses.append(encoder(torch.ones(1, 1, 4)).sum().item())
    encoder.train()
    return losses + _train(encoder, optimizer, loss_of=lambda net, x: net(x.reshape(1, 1, 4)).square().mean())


def copied() -> list[float]:
    """Models and optimizers are copied, pickled, scripted, and restored while they are trained."""
    net = _net()
    optimizer = _sgd(net)
    losses = _train(net, optimizer)
    twin, again = copy.deepcopy((net, optimizer))
    losses += _train(twin, again)
    net, optimizer = pickle.loads(pickle.dumps((net, optimizer)))
    losses += _train(net, optimizer)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    net.load_state_dict(torch.load(file, weights_only=False).state_dict())
    scripted = torch.jit.script(net)
    return losses + _train(scripted, _sgd(scripted))


def compiled() -> list[float]:
    """Models and whole steps, and what dynamo made of them."""
    losses = []
    for fullgraph in (True, False):
        net = torch.compile(_net(), backend="eager", fullgraph=fullgraph)
        losses += _train(net, _sgd(net))  # type: ignore[arg-type]
    net = _net()
    optimizer = _sgd(net)
    losses += torch.compile(lambda: _train(net, optimizer), backend="eager")()
    forward = torch.compile(lambda x: net(x).sum(), backend="eager", fullgraph=True)
    losses += _train(net, optimizer, loss_of=lambda _, x: forward(x))

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def phases(x: torch.Tensor) -> torch.Tensor:
        with stepscope.phase("mine"):
            x = x + 1
        return x * 2

    losses += [step(x).item() for x in DataLoader(Batches(), batch_size=None)]
    losses += [phases(x).sum().item() for x in DataLoader(Batches(), batch_size=None)]
    counters: Any = torch._dynamo.utils.counters
    breaks = sum(counters["graph_break"].values())
    stats = counters["stats"]
    return [*losses, breaks, stats["unique_graphs"], stats["calls_captured"], sum(counters["frames"].values())]


def sampled() -> list[float]:
    """Each device mark, and a call with which a sampled backward begins."""
    recorder: Any = bootstrap.current()
    seen: list[float] = []

    class Device:
        def mark(self, ended: int, begun: int) -> None:
            seen.append(ended * 16 + begun)

    net = _net()
    optimizer = _sgd(net)
    seen += _train(net, optimizer)
    recorder.ledger.device = Device()
    seen += _train(net, optimizer)
    handle = net.register_forward_hook(lambda *_: setattr(recorder.ledger, "device", None))
    seen += _train(net, optimizer)
    handle.remove()
    recorder.ledger.before_backward = lambda args, kwargs: seen.append(len(args) * 10 + len(kwargs))
    seen += _train(net, optimizer)
    recorder.ledger.before_backward = None
    return seen + _train(net, optimizer)


def steps_marked_by_the_script() -> list[float]:
    net = _net()
    optimizer = _sgd(net)
    losses = []
    for x in DataLoader(Batches(), batch_size=None):
        with stepscope.step():
            losses += _train(net, optimizer, [x, x])
    return losses


def distributed() -> list[float]:
    net = nn.parallel.DistributedDataParallel(_net())
    optimizer = _sgd(net)
    losses = _train(net, optimizer)
    with net.no_sync():
        net(torch.zeros(4)).sum().backward()
    total = torch.tensor(losses)
    torch.distributed.all_reduce(total)
    return total.tolist() + _train(net, optimizer)


JOBS: tuple[Callable[[], list[float]], ...] = (
    plain, accumulated, several_optimizers, exceptions, nested, closures, workers, forked, threads, explicit_phases,
    checkpointed, amp, transformer, copied, sampled, steps_marked_by_the_script,
)  # fmt: skip
"""The last changes what ends a step."""


def _leave(name: str, job: Callable[[], list[float]]) -> None:
    """Run a job, and write what it did to a file."""
    recorder: Any = bootstrap.current()
    ledger = recorder.ledger
    at, rounds, step = ledger.at, ledger.rounds, recorder.step
    losses = job()
    assert ledger.rounds == rounds, "the ring is full"
    words = [_plain(word, step) for word in ledger.body[at if recorder.step >= step > 0 else 0 : ledger.at]]
    state = [ledger.phase, recorder.step - step, ledger.header[7] == ledger.written, guard.failures()]
    made = {"native": recorder.native is not None, "losses": [loss.hex() for loss in map(float, losses)]}
    path = Path(sys.argv[1], f"{name}.{os.environ.get('RANK', '0')}.json")
    path.write_text(json.dumps({**made, "words": words, "state": state}))


def _plain(word: int, first_step: int) -> Any:
    """A word without what differs from run to run."""
    if not word & DATA:
        return word & CODE_MASK
    tag, value = word >> TAG_SHIFT & TAG_MASK, word & VALUE_MASK
    if tag == STEP_ABOUT:
        value = (value - (first_step << STEP_SHIFT)) & ~FLAG_SAMPLED  # which memory being counted sets, by time
    return [tag, value if tag in EXACT else None]


def main() -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        _leave("distributed", distributed)
        torch.distributed.destroy_process_group()
        return
    for job in (compiled,) if "compiled" in sys.argv else JOBS:
        _leave(job.__name__, job)


if __name__ == "__main__":
    main()
