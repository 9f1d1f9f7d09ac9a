"""A healthy job that looks as if it had stopped: long evaluations, checkpoints, compilers, uneven ranks.

Knows nothing of Stepscope.  ``--do`` names what happens, in that order; ``--seconds`` how long each long thing takes.

    torchrun --nproc-per-node 2 calm_job.py --do evaluate,checkpoint --seconds 30

Most of it happens after step ``--step``, on rank 0 alone, while the other ranks wait for it in a barrier.  ``stall`` is
no part of a healthy job: rank 1 sleeps for so long and comes back.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from calm_loops import LOOPS
from hang_parts import WIDTH, Job, options
from torch import nn

CHUNK_S = 0.1


class SlowDisk:
    """A file on a disk that takes so long for each write, however small: what torch.save may be given."""

    def __init__(self, file, write_s):
        self.file, self.write_s = file, write_s

    def write(self, data):
        time.sleep(self.write_s)
        return self.file.write(data)

    def flush(self):
        self.file.flush()


class CalmJob(Job):
    def __init__(self, args):
        super().__init__(args)
        self.long_s = args.seconds

    def until(self):
        """As often as it takes to fill the time."""
        end = time.monotonic() + self.long_s
        turn = 0
        while time.monotonic() < end:
            yield turn
            turn += 1

    # -- on rank 0, after a step ------------------------------------------------------------------------------------

    def evaluate(self):
        """Batches without gradients."""
        self.net.eval()
        total, x = 0.0, torch.randn(2048, WIDTH)
        with torch.no_grad():
            for _ in self.until():
                total += self.net(x).sum().item()
        self.net.train()
        return total

    def evaluate_quietly(self):
        """In plain Python, which nothing of torch sees."""
        return self.figures()

    def figures(self):
        """The same under a name that says nothing."""
        best = 0
        for turn in self.until():
            best = max(best, sum((turn * number) % 7 for number in range(20_000)))
        return best

    def run_program(self):
        """A program of its own, as for a tokenizer or a game."""
        code = f"import time\nend = time.monotonic() + {self.long_s}\nwhile time.monotonic() < end: sum(range(10_000))"
        subprocess.run([sys.executable, "-S", "-c", code], check=True)

    def checkpoint(self):
        layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)))
        writes = 40 + 80  # at least: a header, the data and the padding of each tensor
        with tempfile.TemporaryFile() as file:
            torch.save(layers.state_dict(), SlowDisk(file, self.long_s / writes))

    def save_checkpoint(self):
        """Written by hand, a piece at a time."""
        weights = {name: tensor.tolist() for name, tensor in self.net.state_dict().items()}
        with tempfile.NamedTemporaryFile("w") as file:
            for _ in self.until():
                json.dump(weights, file)
                file.flush()
                os.fsync(file.fileno())
                time.sleep(CHUNK_S)

    def compute(self):
        """One call into C that takes long and lets the others run."""
        big = torch.randn(700, 700)
        for _ in self.until():
            big = torch.linalg.qr(big).Q

    def copy_data(self):
        """Reads and writes without an end in sight."""
        block = os.urandom(1 << 16)
        with tempfile.NamedTemporaryFile() as file:
            for _ in self.until():
                file.write(block)
                file.seek(0)
                file.read()
                file.seek(0)
                time.sleep(0.02)

    # -- on all ranks -------------------------------------------------------------------------------------------------

    def evaluate_everywhere(self):
        self.evaluate()

    def stall(self):
        """What a shared disk does at night: one rank stands still, and then it goes on."""
        if self.rank == 1:
            self.mark("stall")
            # stops: stall
            time.sleep(self.long_s)

    # -- before the first step ----------------------------------------------------------------------------------------

    def prepare(self):
        """Rank 0 makes the data, the others wait."""
        if self.rank == 0:
            self.figures()
        self.meet()

    def compiled(self):
        """What the compiler makes of a net takes a while, at the first step."""
        self.net = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        self.net.append(nn.Linear(WIDTH, 1))
        self.data_parallel()
        self.model = torch.compile(self.model)

    def meet(self):
        if self.ranks > 1:
            dist.barrier()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def train(self, doings):
        """Steps, and what is to be done after one of them."""
        early = {"prepare": self.prepare, "compiled": self.compiled}
        slow = self.long_s if "first_batch" in doings else 0.0
        uneven = "uneven" in doings
        self.data_parallel()
        for doing in doings:
            early.get(doing, lambda: None)()
        batches = self.loader(lambda batch: time.sleep(slow if batch == 0 else 0.0), 2 * ("workers" in doings))
        for step, batch in enumerate(batches):
            if step == self.args.steps:
                break
            if uneven:
                time.sleep((self.rank * 7 + step * 3) % 10 / 10)
            self.say(step, self.step(batch))
            if step == self.args.step:
                for doing in doings:
                    self.after_step(doing)

    def after_step(self, doing):
        if doing in ALONE and self.rank == 0:
            self.mark(doing)
            ALONE[doing](self)
        elif doing in TOGETHER:
            TOGETHER[doing](self)
        self.meet()


ALONE = {
    "evaluate": CalmJob.evaluate,
    "evaluate_quietly": CalmJob.evaluate_quietly,
    "figures": CalmJob.figures,
    "run_program": CalmJob.run_program,
    "checkpoint": CalmJob.checkpoint,
    "save_checkpoint": CalmJob.save_checkpoint,
    "compute": CalmJob.compute,
    "copy_data": CalmJob.copy_data,
}
TOGETHER = {"evaluate_everywhere": CalmJob.evaluate_everywhere, "stall": CalmJob.stall}
EARLY = ("plain", "prepare", "compiled", "first_batch", "uneven", "workers")


def main():
    parser = options(__doc__)
    choices = (*EARLY, *ALONE, *TOGETHER, *LOOPS)
    parser.add_argument("--do", default="plain", metavar="NAME,…", help=", ".join(choices))
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--step", type=int, default=5, help="after which the long things happen")
    args = parser.parse_args()
    doings = args.do.split(",")
    if unknown := set(doings) - set(choices):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    job = CalmJob(args)
    if doings[0] in LOOPS:
        LOOPS[doings[0]](job)
    else:
        job.train(doings)
    job.end()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
