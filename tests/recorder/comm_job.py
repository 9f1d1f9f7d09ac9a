"""Jobs that communicate, each run bare and recorded by the same ranks, for ``test_collectives.py`` to look at.

python comm_job.py FOLDER WORLD_SIZE:JOB,JOB …    leaves FOLDER/WORLD_SIZE/JOB.RANK.json
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepscope.recorder import bootstrap, guard
from stepscope.recorder.guard import ImportWatch
from stepscope.recorder.instrumentation import Instrumentation
from stepscope.records.collectives import OPS
from stepscope.records.steps import (
    COLLECTIVE,
    COLLECTIVE_ENTRY,
    COMM,
    COMM_ENTRY,
    COMM_RECORD,
    ENTRIES_HEAD,
    STEP,
    STEP_SLOT,
)
from stepscope.ring import RingReader

STEPS = 4
Step = Callable[[int], Any]


def explicit(rank: int, world: int) -> Step:
    """One of each that gloo has, 24 bytes of a rank in every one."""
    x, many = torch.arange(6.0), torch.arange(6.0 * world)
    parts = [torch.arange(6.0) for _ in range(world)]

    def step(_: int) -> Any:
        out = torch.zeros(6)
        dist.all_reduce(x.clone())
        dist.all_gather([torch.zeros(6) for _ in range(world)], x)
        dist.all_gather_into_tensor(torch.zeros(6 * world), x)
        dist.reduce_scatter_tensor(out, many)
        dist.reduce_scatter(out, parts)
        dist.broadcast(out, 0)
        dist.reduce(out, 0)
        dist.gather(x, parts if rank == 0 else None)
        dist.scatter(out, parts if rank == 0 else None)
        dist.all_to_all_single(torch.zeros(6 * world), many)
        dist.barrier()
        dist.monitored_barrier()
        return out.sum()

    return step


def handles(rank: int, world: int) -> Step:
    """Asynchronous ones: waited for in another order, in the next step, twice, or never."""
    left: list[Any] = []

    def step(_: int) -> Any:
        x, y, z = torch.ones(10), torch.ones(100), torch.ones(1000)
        first, second = dist.all_reduce(x, async_op=True), dist.broadcast(y, 0, async_op=True)
        for work in left:
            work.wait()
        left[:] = [dist.all_gather_into_tensor(torch.zeros(1000 * world), z, async_op=True)]
        second.wait()
        first.wait()
        first.wait()
        dist.all_reduce(torch.ones(3), async_op=True)
        return (x.sum() + y.sum()).item()

    return step


def pairs(rank: int, world: int) -> Step:
    """Sends and recvs between two, as a pipeline makes them."""
    other = 1 - rank

    def step(n: int) -> Any:
        x, y = torch.full((5,), float(n)), torch.zeros(5)
        if rank == 0:
            dist.send(x, 1)
            dist.recv(y, 1)
            dist.send(x, 1)
        else:
            dist.recv(y, 0)
            dist.send(x, 0)
            dist.recv(y)  # from anybody
        for work in [dist.isend(x, other), dist.irecv(y, other)]:
            work.wait()
        together = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
        for work in dist.batch_isend_irecv(together):
            work.wait()
        return y.sum()

    return step


def coalesced(rank: int, world: int) -> Step:
    def step(_: int) -> Any:
        tensors = [torch.ones(2), torch.ones(4)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, rank)
        return sum(tensor.sum() for tensor in tensors) + sum(gathered)

    return step


def wrong(rank: int, world: int) -> Step:
    """Calls that fail, as they fail without us, among some that do not; and unusual tensors."""

    class Log(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        seen: list[str]

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    group = dist.distributed_c10d._get_default_group()

    def step(_: int) -> Any:
        heard = []
        for bad in ((), ([],), ("x",), ([1],), (None,), ([torch.ones(2)], "opts"), ([torch.ones(2), torch.ones(2)],)):
            try:
                group.allreduce(*bad)
            except (RuntimeError, TypeError, ValueError) as error:
                heard.append(type(error).__name__)
        with suppress(ValueError, RuntimeError):
            dist.send(torch.ones(1), rank)
        sparse = torch.eye(4).to_sparse()
        dist.all_reduce(sparse)
        mode = Log()
        mode.seen = []
        with mode:
            dist.broadcast(torch.ones(2), 0)
        dist.all_reduce(nn.Parameter(torch.ones(2)).detach())
        return [heard, mode.seen, sparse.to_dense().sum().item()]

    return step


def net() -> Any:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def training(model: Any, x: Any) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(_: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def ddp(rank: int, world: int) -> Step:
    model = nn.parallel.DistributedDataParallel(net())
    train = training(model, torch.randn(8, 16) + rank)

    def step(n: int) -> Any:
        loss = train(n).detach()
        dist.all_reduce(loss)
        return loss

    return step


def fsdp(rank: int, world: int) -> Step:
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer)
    return training(model, torch.randn(8, 16) + rank)


def tensor(rank: int, world: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return training(model, torch.randn(8, 16).requires_grad_())


def mesh(rank: int, world: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(net(), grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=grid["dp"])
    return training(model, torch.randn(8, 16) + rank // 2)


def functional(rank: int, world: int) -> Step:
    import torch.distributed._functional_collectives as funcol

    group = dist.distributed_c10d._get_default_group()

    def step(_: int) -> Any:
        x = torch.arange(8.0).reshape(4, 2)
        reduced = funcol.all_reduce(x, "sum", group)
        view = reduced.view(8)
        gathered = funcol.all_gather_tensor(x, 1, group)  # waits within
        scattered = funcol.reduce_scatter_tensor(x, "sum", 0, group.group_name)
        several = funcol.all_reduce_coalesced([x, x], "sum", group)
        exchanged = funcol.all_to_all_single(x, None, None, group)
        total = view.sum() + gathered.sum() + scattered.sum() + several[0].sum() + several[1].sum() + exchanged.sum()
        return total + funcol.broadcast(x, 0, group).sum()

    return step


def compiled(rank: int, world: int) -> Step:
    """What dynamo makes of code that communicates: the same graphs, breaks and recompilations with us as without."""
    import torch._dynamo
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    group, line = dist.distributed_c10d._get_default_group(), init_device_mesh("cpu", (world,))

    def traced(x: Any) -> Any:
        y = funcol.all_gather_tensor(funcol.all_reduce(x * 2, "sum", group), 1, group)
        dist.all_reduce(y)
        shard = DTensor.from_local(y, line, [Shard(0)], run_check=False)
        return shard.redistribute(line, [Replicate()]).to_local().sum()

    def broken(x: Any) -> Any:
        y = x * 2
        dist.broadcast(y, 0)
        y = y + 1
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        return y.sum()

    whole = torch.compile(traced, backend="aot_eager", fullgraph=True)
    parts = torch.compile(broken, backend="aot_eager")
    model = torch.compile(nn.parallel.DistributedDataParallel(net()), backend="aot_eager")
    fitted = training(model, torch.randn(8, 16))

    def step(n: int) -> Any:
        x = torch.ones(4, 4)
        results = [float(each).hex() for each in (whole(x), parts(x), fitted(n))]
        told = {name: dict(counters[name]) for name in ("stats", "recompiles")}
        return [results, told, sum(counters["graph_break"].values())]

    return step


def groups(rank: int, world: int) -> Step:
    """Several groups, of which one is made anew under way."""
    rows = [dist.new_group(ranks, group_desc="TENSOR_MODEL_PARALLEL_GROUP") for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks, group_desc="DATA_PARALLEL_GROUP") for ranks in ([0, 2], [1, 3])]
    own, column = rows[rank // 2], columns[rank % 2]

    def step(n: int) -> Any:
        x = torch.ones(4)
        dist.all_reduce(x, group=own)
        dist.all_reduce(x, group=column)
        if n == 2:
            temporary = dist.new_group([0, 1, 2, 3])
            dist.all_reduce(x, group=temporary)
            dist.destroy_process_group(temporary)
        if rank % 2:
            dist.send(x, rank - 1, group=own)
        else:
            dist.recv(x, rank + 1, group=own)
        return x.sum()

    return step


def train(step: Step, after: Callable[[], object]) -> Iterator[Any]:
    for n in range(STEPS):
        result = step(n)
        yield result.item().hex() if isinstance(result, torch.Tensor) else result
        after()


def record(job: Callable[[int, int], Step], rank: int, world: int, folder: Path) -> dict[str, Any]:
    bare = list(train(_made(job, rank, world), lambda: None))
    before = _patched()
    folder.mkdir()
    recorder, watch = bootstrap.recorder_class()(folder, folder), ImportWatch()
    instrumentation = Instrumentation(recorder, torch, watch)
    step = _made(job, rank, world)
    recorder.begin()
    flight = [_flight()]

    def after() -> None:
        recorder.end_step()
        flight.append(_flight())

    losses = list(train(step, after))
    instrumentation.remove()
    watch.remove()
    left = _patched()
    repeated = list(train(_made(job, rank, world), lambda: None))
    return {
        "bare": bare,
        "recorded": losses,
        "again": repeated,
        "restored": left == before,
        "failures": guard.failures(),
        "flight": [later - earlier for earlier, later in itertools.pairwise(flight)],
        **read(next(folder.glob("*.ring"))),
    }


def _made(job: Callable[[int, int], Step], rank: int, world: int) -> Step:
    torch.manual_seed(0)
    return job(rank, world)


def _patched() -> dict[str, Any]:
    return {**vars(dist.ProcessGroup), "wait": vars(torch._C._distributed_c10d.Work)["wait"]}


def _flight() -> int:
    """Collectives that torch itself has counted; it has no sends and recvs."""
    dump = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))
    return max((entry["record_id"] for entry in dump.get("entries", ())), default=-1) + 1


def read(path: Path) -> dict[str, Any]:
    reader = RingReader(path)
    batch = reader.read(0)
    header, last = reader.header(), reader.last_collective()
    reader.close()
    steps: list[dict[str, Any]] = []
    for slot in batch.slots:
        kind, _, _, _, count = ENTRIES_HEAD.unpack_from(slot)
        if kind == STEP:
            steps.append({"sums": [], "calls": [], "comm_ns": STEP_SLOT.unpack(slot)[6 + COMM]})
        elif kind in (COMM_RECORD, COLLECTIVE):
            entry = COMM_ENTRY if kind == COMM_RECORD else COLLECTIVE_ENTRY
            rows = [entry.unpack_from(slot, ENTRIES_HEAD.size + n * entry.size) for n in range(count)]
            steps[-1]["sums" if kind == COMM_RECORD else "calls"] += [[OPS[op], *rest] for op, *rest in rows]
    groups = [[g.slot, g.name, g.description, g.kind, g.backend, g.ranks, g.size] for g in header.groups]
    return {"steps": steps, "groups": groups, "lost": batch.lost, "torn": batch.torn, "last": last}


def seen_from_outside(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Rank 0 waits in a collective that rank 1 does not call before it has seen that in rank 0's ring."""
    folder.mkdir()
    recorder, watch = bootstrap.recorder_class()(folder, folder), ImportWatch()
    instrumentation = Instrumentation(recorder, torch, watch)
    recorder.begin()
    dist.barrier()
    seen: Any = None
    if rank == 1:
        reader = RingReader(next(folder.with_name(folder.name.replace("1", "0")).glob("*.ring")))
        end = time.monotonic() + 60
        while (seen is None or not seen.waiting or OPS[seen.op] != "all_reduce") and time.monotonic() < end:
            time.sleep(0.01)
            seen = reader.last_collective()
        reader.close()
    dist.all_reduce(torch.ones(500))
    recorder.end_step()
    instrumentation.remove()
    watch.remove()
    return {"seen": seen}


ALL = (explicit, handles, pairs, coalesced, wrong, ddp, fsdp, tensor, mesh, functional, compiled, groups)
JOBS = {job.__name__: job for job in ALL}


def main(rank: int, where: Path, world: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where / 'meet'}", rank=rank, world_size=world)
    for name in names:
        at = where / f"{name}-{rank}"
        found = seen_from_outside(rank, world, at) if name == "outside" else record(JOBS[name], rank, world, at)
        (where / f"{name}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # What every rank would load for itself at its first step is most of what these jobs cost.
    import torch.distributed.fsdp
    from torch._dynamo import config  # noqa: F401 - the module itself: tests/support/job_startup has one in its place

    for words in sys.argv[2:]:
        size, _, names = words.partition(":")
        where = Path(sys.argv[1], size)
        where.mkdir()
        torch.multiprocessing.start_processes(
            main, args=(where, int(size), names.split(",")), nprocs=int(size), start_method="fork"
        )
