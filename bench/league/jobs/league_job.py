"""A job with the faults one asks for, or with none: what ``make league`` runs under every tool.

Knows nothing of Stepscope; alone, or data-parallel under torchrun; on CPU or with ``--device cuda``.  Its phases are
mostly sleep, so that four ranks share two cores without getting into each other's way.  How a fault is written stands
in plan.py:  league_job.py --steps 80 --fault forward:2:30:from=40
"""

import argparse
import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
from pieces import SIDE, DeviceWait, Images, Net, SlowFile, SlowSGD, pause, spin
from plan import Fault, Plan
from torch import nn
from torch.utils.data import DataLoader

EVAL_BATCHES = 5
FRAGMENTS = 40


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--base", default="2,12,18,4", help="ms of input, forward, backward, optimizer")
    parser.add_argument("--noise", type=float, default=0.025, help="of the base, relative")
    parser.add_argument("--fault", type=Fault, action="append", default=[], metavar="PHASE:RANKS:MS[:WHEN]")
    parser.add_argument("--lengths", type=float, default=0.0, help="spread of the work per rank and step, relative")
    parser.add_argument("--groups", type=int, default=1, help="stages; each has more work than the one before it")
    parser.add_argument("--leak", default="0:all", metavar="MB:RANKS", help="host memory kept at each step")
    parser.add_argument("--cache-mb", type=float, default=0.0, help="host memory taken at each step of the first third")
    parser.add_argument("--device-leak-mb", type=float, default=0.0, help="device memory kept at each step")
    parser.add_argument("--device-hold", default="0:all", metavar="MB:RANKS", help="device memory held from the start")
    parser.add_argument("--fragment", action="store_true", help="leave holes in the device memory")
    parser.add_argument("--gradient-mb", type=float, default=0.0, help="gradients that cost nothing but their exchange")
    parser.add_argument("--net", choices=tuple(SIDE), default="small")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epoch", type=int, default=0, help="pictures per epoch; 0: one epoch is the whole run")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--no-loader", action="store_true", help="make the batches in the loop")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--autocast", action="store_true", help="forward in bfloat16")
    parser.add_argument("--compile", metavar="BACKEND")
    parser.add_argument("--busy", action="store_true", help="phases keep the core instead of sleeping")
    parser.add_argument("--traceml", action="store_true", help="with the two lines that TraceML asks a script for")
    return parser.parse_args()


def traced(wanted):
    """What to put around each step."""
    if not wanted:
        return lambda model: contextlib.nullcontext()
    import traceml_ai

    traceml_ai.init(mode="auto")
    return traceml_ai.trace_step


class Ballast(nn.Module):
    """A model with parameters beside it that are only ever exchanged."""

    def __init__(self, net, megabytes):
        super().__init__()
        self.net = net
        self.ballast = nn.Parameter(torch.zeros(int(megabytes * 262_144)))

    def forward(self, x):
        return self.net(x) + self.ballast[0]


class Job:
    """The model, its data and what is wrong with them, on one rank."""

    def __init__(self, args):
        self.args = args
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device(args.device)
        if args.device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.wait = DeviceWait() if args.device == "cuda" else spin if args.busy else time.sleep
        group = self._join()
        base = dict(zip(("input", "forward", "backward", "optimizer"), map(float, args.base.split(",")), strict=True))
        stage = self.rank * args.groups // self.ranks
        self.plan = Plan(
            base, args.fault, rank=self.rank, ranks=self.ranks, steps=args.steps, noise=args.noise,
            lengths=args.lengths, scale=1.0 + stage,
        )  # fmt: skip
        self.net = Net(args.net, self.wait)
        model = Ballast(self.net, args.gradient_mb) if args.gradient_mb else self.net
        self.model = model.to(self.device)
        if self.ranks > 1:
            self.model = nn.parallel.DistributedDataParallel(self.model, process_group=group)
            if any(fault.phase == "comm" for fault in args.fault):
                self.comm_s = 0.0
                self.model.register_comm_hook(None, self._slow_all_reduce)
        if args.compile:
            self.model = torch.compile(self.model, backend=args.compile)
        self.optimizer = SlowSGD(self.model.parameters(), lr=0.01)
        self.optimizer.wait = self.wait
        self.kept = []
        bulk_mb = max((fault.ms for fault in args.fault if fault.phase == "h2d"), default=0)
        self.bulk = torch.ones(int(bulk_mb * 262_144))
        self._hold()

    def _join(self):
        if self.ranks == 1:
            return None
        own_gpu = self.args.device == "cuda" and torch.cuda.device_count() >= self.ranks
        dist.init_process_group("nccl" if own_gpu else "gloo")
        if self.args.groups == 1:
            return None
        shape = (self.args.groups, self.ranks // self.args.groups)
        mesh = dist.init_device_mesh(self.args.device, shape, mesh_dim_names=("stage", "data"))
        return mesh["data"].get_group()

    def _slow_all_reduce(self, state, bucket):
        """The all-reduce takes longer on every rank alike, as over a slow network."""

        def arrive(future):
            pause(self.comm_s)
            return future.value()[0] / self.ranks

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(arrive)

    # -- memory ---------------------------------------------------------------------------------------------------

    def _hold(self):
        """Device memory that is there from the start, on some ranks."""
        if self.device.type != "cuda":
            return
        self.kept.append(self._device_mb(share_of(self.args.device_hold, self.rank)))

    def _device_mb(self, megabytes):
        return torch.ones(int(megabytes * 262_144), device=self.device)

    def _keep(self, step):
        megabytes = share_of(self.args.leak, self.rank)
        if step < self.args.steps / 3:
            megabytes += self.args.cache_mb
        if megabytes:
            self.kept.append(torch.ones(int(megabytes * 262_144)))
        if self.args.fragment and step < FRAGMENTS:
            # Each block is a little larger than the last, and what it leaves behind is pinned by a small one.
            self._device_mb(500 + 8 * step)
            self.kept.append(self._device_mb(12))
        if self.args.device_leak_mb:
            self.kept.append(self._device_mb(self.args.device_leak_mb))

    # -- the loop -------------------------------------------------------------------------------------------------

    def batches(self):
        """Pictures and labels for as long as anybody asks."""
        args, side = self.args, SIDE[self.args.net]
        if args.no_loader:
            while True:
                yield torch.randn(args.batch, 1, side, side), torch.randint(10, (args.batch,))
        length = args.epoch or args.batch * args.steps * args.accumulate
        pictures = Images(length, args.batch, self._input_s, side)
        loader = DataLoader(pictures, batch_size=args.batch, num_workers=args.workers, shuffle=bool(args.epoch))
        while True:
            yield from loader

    def _input_s(self, batch):
        return self.plan.seconds("input", batch // self.args.accumulate) / self.args.accumulate

    def train(self, around):
        loss_of = nn.CrossEntropyLoss()
        batches = self.batches()
        for step in range(self.args.steps):
            self._set(step)
            batch = next(batches)
            with around(self.model):
                pause(self.plan.seconds("early", step))
                self.optimizer.zero_grad()
                for _ in range(self.args.accumulate - 1):
                    with self.model.no_sync() if self.ranks > 1 else contextlib.nullcontext():
                        self._gradients(batch, loss_of, step)
                    batch = next(batches)
                loss = self._gradients(batch, loss_of, step)
                pause(self.plan.seconds("inside", step))
                self.optimizer.step()
            if self.args.groups > 1:
                dist.all_reduce(torch.ones(1, device=self.device))  # the stages wait for each other
            self._after(step)
            if self.rank == 0 and step % 25 == 0:
                print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)

    def _set(self, step):
        """What the phases of this step will take."""
        share = 1 / self.args.accumulate
        self.net.forward_s = self.plan.seconds("forward", step) * share
        self.net.backward_s = self.plan.seconds("backward", step) * share
        self.optimizer.pause_s = self.plan.seconds("optimizer", step)
        self.comm_s = self.plan.seconds("comm", step)

    def _gradients(self, batch, loss_of, step):
        pictures, labels = batch
        if megabytes := self.plan.fault_s("h2d", step) * 1000:
            self.bulk[: int(megabytes * 262_144)].to(self.device)
        pictures, labels = pictures.to(self.device), labels.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.autocast):
            loss = loss_of(self.model(pictures), labels) / self.args.accumulate
        loss.backward()
        return loss

    def _after(self, step):
        """What a loop does between steps."""
        pause(self.plan.seconds("between", step))
        self._keep(step)
        if seconds := self.plan.seconds("checkpoint", step):
            torch.save(self.net.state_dict(), SlowFile(seconds))
        if seconds := self.plan.seconds("eval", step):
            self.net.forward_s = seconds / EVAL_BATCHES
            pictures = torch.randn(self.args.batch, 1, SIDE[self.args.net], SIDE[self.args.net], device=self.device)
            self.model.eval()
            with torch.no_grad():
                for _ in range(EVAL_BATCHES):
                    self.model(pictures)
            self.model.train()


def share_of(text, rank):
    """Of ``MB:RANKS``, what this rank gets."""
    megabytes, _, ranks = text.partition(":")
    return float(megabytes) if ranks in ("", "all") or str(rank) in ranks.split("+") else 0.0


def main():
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    around = traced(args.traceml)
    job = Job(args)
    job.train(around)
    if job.ranks > 1:
        # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
        del job
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
