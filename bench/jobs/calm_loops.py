"""Healthy loops of other kinds than plain data parallelism, each a function of the job.  Knows nothing of Stepscope."""

import time

import torch
import torch.distributed as dist
from hang_parts import BATCH, WIDTH
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

MICRO_BATCHES = 4


def accumulate(job):
    """Several backward passes to a step, only the last of which talks to the others."""
    job.data_parallel()
    batches = iter(job.loader())
    for step in range(job.args.steps):
        job.optimizer.zero_grad()
        for _ in range(MICRO_BATCHES - 1):
            with job.model.no_sync():
                gradients(job, next(batches))
            time.sleep(job.args.pause_ms / 1000)
        loss = gradients(job, next(batches))
        job.optimizer.step()
        job.say(step, loss)


def gradients(job, batch):
    x, y = batch
    loss = nn.functional.mse_loss(job.model(x), y)
    loss.backward()
    return loss.detach()


def fsdp(job):
    mesh = init_device_mesh("cpu", (job.ranks,), mesh_dim_names=("dp",))
    fully_shard(job.net[0], mesh=mesh)
    fully_shard(job.net, mesh=mesh)
    plain_steps(job)


def tensor_parallel(job):
    mesh = init_device_mesh("cpu", (job.ranks,), mesh_dim_names=("tp",))
    parallelize_module(job.net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    plain_steps(job)


def mesh(job):
    """Two by two: tensor parallel within a row, sharded over the columns."""
    both = init_device_mesh("cpu", (2, job.ranks // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(job.net, both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(job.net, mesh=both["dp"])
    plain_steps(job)


def plain_steps(job):
    job.model = job.net
    job.optimizer = torch.optim.SGD(job.net.parameters(), lr=0.01, foreach=False)
    for step, batch in zip(range(job.args.steps), job.loader(), strict=False):
        job.say(step, job.step(batch))


def join(job):
    """Each rank has more batches than the one before it."""
    job.data_parallel()
    steps = job.args.steps * (job.rank + 1)
    with Join([job.model]):
        for step, batch in zip(range(steps), job.loader(), strict=False):
            job.say(step, job.step(batch))


def ends_apart(job):
    """All train alike; rank 0 then has more to do than the others: its last evaluation."""
    job.data_parallel()
    for step, batch in zip(range(job.args.steps), job.loader(), strict=False):
        job.say(step, job.step(batch))
    job.end()
    job.ranks = 1
    if job.rank == 0:
        job.evaluate()


def epochs(job):
    """Short epochs, for each of which the workers are started anew."""
    job.data_parallel()
    for epoch in range(3):
        for step, batch in enumerate(job.loader(workers=2, length=4 * BATCH)):
            job.say(4 * epoch + step, job.step(batch))


def two_nets(job):
    """A GAN's loop: two optimizers, one stepped twice as often as the other."""
    job.data_parallel()
    judge = nn.Linear(WIDTH, 1)
    judge = nn.parallel.DistributedDataParallel(judge) if job.ranks > 1 else judge
    second = torch.optim.SGD(judge.parameters(), lr=0.01)
    for step, batch in zip(range(job.args.steps), job.loader(), strict=False):
        for _ in range(2):
            second.zero_grad()
            judge(batch[0]).mean().backward()
            second.step()
        job.say(step, job.step(batch))


def pipeline(job):
    """Activations go from rank to rank and gradients back; the last rank is the slow one."""
    stage = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for step in range(job.args.steps):
        x = torch.ones(BATCH, WIDTH)
        if job.rank:
            dist.recv(x, job.rank - 1)
        x.requires_grad_()
        out = stage(x)
        last = job.rank == job.ranks - 1
        slope = torch.ones_like(out)
        if last:
            time.sleep(0.3)
        else:
            dist.send(out.detach(), job.rank + 1)
            dist.recv(slope, job.rank + 1)
        out.backward(slope / slope.numel())
        if job.rank:
            dist.send(x.grad, job.rank - 1)
        optimizer.step()
        optimizer.zero_grad()
        job.say(step, out.detach().mean())


def asynchronous(job):
    """Collectives in flight while the rank computes, in two groups."""
    job.data_parallel()
    other = dist.new_group(group_desc="metrics")
    for step, batch in zip(range(job.args.steps), job.loader(), strict=False):
        first = dist.all_reduce(torch.ones(1 << 16), async_op=True)
        second = dist.all_reduce(torch.ones(1 << 10), group=other, async_op=True)
        loss = job.step(batch)
        second.wait()
        first.wait()
        kept = [None] * job.ranks
        dist.all_gather_object(kept, {"step": step, "rank": job.rank})
        job.say(step, loss)


def big_exchange(job):
    """Collectives that take seconds for their size."""
    job.data_parallel()
    many = torch.ones(1 << 25)
    for step, batch in zip(range(min(4, job.args.steps)), job.loader(), strict=False):
        loss = job.step(batch)
        for _ in range(4):
            dist.all_reduce(many)
        job.say(step, loss)


LOOPS = {
    loop.__name__: loop
    for loop in (
        *(accumulate, fsdp, tensor_parallel, mesh, join, ends_apart, epochs, two_nets, pipeline, asynchronous),
        big_exchange,
    )
}
