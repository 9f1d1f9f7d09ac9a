"""A data-parallel job that stops, or dies, in the way one asks for.  Knows nothing of Stepscope.

    torchrun --nproc-per-node 4 hang_job.py --fault skip --rank 1 --step 6

Every step ends with an all-reduce of what was counted and a barrier.  In step ``--step`` rank ``--rank`` does what
``--fault`` says; the line on which a rank then stands follows the comment ``stops: FAULT``, by which tests find it.
``--marks FILE`` gets a line when the fault begins, so that the time from there to a verdict can be measured.
"""

import ctypes
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from hang_parts import Job, options

COUNTS = 512
GRADIENTS = 1 << 21
"""So many that gloo sends them in pieces of one size: of another number of them it waits for the rest.  A few of
another size make gloo abort instead (``shape_abort``)."""
MEMORY = 1 << 30

LOADER_FAULTS = ("loader", "worker", "worker_stop")
SHARE_FAULTS = ("skip", "other", "shape", "dtype", "shape_abort", "dtype_abort")


class HangJob(Job):
    def __init__(self, args):
        super().__init__(args)
        self.data_parallel()
        self.fault = args.fault
        self.counts = torch.ones(GRADIENTS if args.fault in ("shape", "dtype") else COUNTS)
        # Made by all ranks, in one order.
        if args.fault == "deadlock" and self.ranks == 4:
            self.rows = [dist.new_group([0, 1], group_desc="tp"), dist.new_group([2, 3], group_desc="tp")]
            self.columns = [dist.new_group([0, 2], group_desc="dp"), dist.new_group([1, 3], group_desc="dp")]
        elif args.fault == "deadlock":
            self.rows, self.columns = [dist.new_group(group_desc="tp")], [dist.new_group(group_desc="dp")]

    def hit(self, step):
        return self.rank == self.args.rank and step == self.args.step

    def train(self):
        workers = 2 if self.fault in ("worker", "worker_stop") else 0
        before = self.before_batch if self.fault in LOADER_FAULTS else lambda batch: None
        for step, batch in enumerate(self.loader(before, workers)):
            if step == self.args.steps:
                break
            loss = self.step(batch)
            self.say(step, loss)
            if self.fault == "deadlock":
                self.two_groups(step)
            elif self.hit(step) and self.fault in HOST_FAULTS:
                self.mark(self.fault)
                HOST_FAULTS[self.fault](self)
            self.share(step)

    # -- collectives --------------------------------------------------------------------------------------------------

    def share(self, step):
        """Add up what the ranks counted, and meet."""
        hit = self.hit(step) and self.fault in SHARE_FAULTS
        if hit:
            self.mark(self.fault)
            SHARE[self.fault](self)
        else:
            dist.all_reduce(self.counts)
        # stops: skip
        dist.barrier()

    def other(self):
        # stops: other
        dist.all_gather([torch.empty(COUNTS) for _ in range(self.ranks)], self.counts)

    def shape(self):
        # stops: shape
        dist.all_reduce(torch.ones(2 * len(self.counts)))

    def dtype(self):
        # stops: dtype
        dist.all_reduce(self.counts.double())

    def two_groups(self, step):
        """Every rank meets its row and its column; some begin with the column."""
        across = 2 if self.ranks == 4 else 1
        row, column = self.rows[self.rank // across % len(self.rows)], self.columns[self.rank % len(self.columns)]
        hit = step == self.args.step and self.rank in ((1, 2) if self.ranks == 4 else (1,))
        if step == self.args.step:
            self.mark(self.fault)
        first, second = (row, column) if hit else (column, row)
        # stops: deadlock
        dist.all_reduce(self.counts, group=first)
        dist.all_reduce(self.counts, group=second)

    def receive(self):
        # stops: recv
        dist.recv(torch.empty(8), src=(self.rank + 1) % self.ranks)

    # -- input --------------------------------------------------------------------------------------------------------

    def before_batch(self, batch):
        """In the rank itself or, where there are workers, in the one whose turn it is."""
        if not self.hit(batch):
            return
        self.mark(self.fault)
        if self.fault == "worker_stop":
            # stops: worker_stop
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.fault == "worker":
            # stops: worker
            time.sleep(3600)
        else:
            read, _ = os.pipe()
            # stops: loader
            os.read(read, 1)

    # -- the host -----------------------------------------------------------------------------------------------------

    def sleep(self):
        # stops: sleep
        time.sleep(3600)

    def stop(self):
        # stops: stop
        os.kill(os.getpid(), signal.SIGSTOP)

    def gil_lock(self):
        """As an extension does that takes its lock twice, and the GIL with it."""
        mutex = ctypes.create_string_buffer(128)
        lock = ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex)
        # stops: gil_lock
        lock(mutex)

    def gil_sleep(self):
        # stops: gil_sleep
        ctypes.PyDLL(None).sleep(3600)

    def gil_busy(self):
        # stops: gil_busy
        re.match("(a+)+$", "a" * 64 + "b")

    # -- the end ------------------------------------------------------------------------------------------------------

    def kill(self):
        # stops: kill
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self):
        # stops: exception
        raise ValueError("told to raise")

    def leave(self):
        # stops: exit
        os._exit(7)

    def memory(self):
        """More than it may have."""
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY // 4, resource.RLIM_INFINITY))
        # stops: memory
        bytearray(MEMORY)

    def kernel_memory(self):
        """More than its control group may have: the kernel kills it.  Needs root; the folder is the caller's."""
        folder = self.args.cgroup
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        kept = bytearray(MEMORY)
        # stops: kernel_memory
        kept[:: resource.getpagesize()] = bytes(len(range(0, MEMORY, resource.getpagesize())))


SHARE = {
    "skip": lambda job: None,
    "other": HangJob.other,
    "shape": HangJob.shape,
    "shape_abort": HangJob.shape,
    "dtype": HangJob.dtype,
    "dtype_abort": HangJob.dtype,
}
HOST_FAULTS = {
    "recv": HangJob.receive,
    "sleep": HangJob.sleep,
    "stop": HangJob.stop,
    "gil_lock": HangJob.gil_lock,
    "gil_sleep": HangJob.gil_sleep,
    "gil_busy": HangJob.gil_busy,
    "kill": HangJob.kill,
    "exception": HangJob.fail,
    "exit": HangJob.leave,
    "memory": HangJob.memory,
    "kernel_memory": HangJob.kernel_memory,
}


def main():
    parser = options(__doc__)
    parser.add_argument("--fault", required=True, choices=(*SHARE, *LOADER_FAULTS, "deadlock", *HOST_FAULTS))
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--step", type=int, default=6)
    parser.add_argument("--cgroup", type=Path, help="of kernel_memory: a control group with a limit")
    job = HangJob(parser.parse_args())
    job.train()
    job.end()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
