"""Starts a script once per rank on this machine, as torchrun does, but loads torch once for all of them.

    python ranks.py 4 slow_rank.py --steps 100

Every rank is a fork of this process: on a machine with fewer cores than ranks they start in half the time.  When a rank
fails the others are ended, and its exit code is returned.  Does not use Stepscope.
"""

import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

PATIENCE_S = 5.0


def main():
    count, script, *words = int(sys.argv[1]), *sys.argv[2:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch._dynamo  # noqa: F401  # optimizers and DDP load it, and it takes as much time as torch itself

    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(world, MASTER_PORT=str(free_port()))
    ranks = [start(rank, script, words) for rank in range(count)]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: [os.kill(rank, number) for rank in ranks])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the ranks
    return wait(ranks)


def start(rank, script, words):
    """Start a process that is that rank; return its pid."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    process = multiprocessing.get_context("fork").Process(target=become, args=(script, words))
    process.start()  # not a bare fork: it ends as such processes do, and its exception is printed
    return process.pid


def become(script, words):
    sys.argv = [script, *words]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def wait(ranks):
    """Wait for all ranks, or until one fails; return the exit code, 128 + n for signal n."""
    while ranks:
        rank, status = os.wait()
        ranks.remove(rank)
        code = os.waitstatus_to_exitcode(status)
        if code:
            end(ranks)
            return code if code > 0 else 128 - code
    return 0


def end(ranks):
    deadline_s = time.monotonic() + PATIENCE_S
    for rank in ranks:
        os.kill(rank, signal.SIGTERM)
    while ranks:
        rank, _status = os.waitpid(-1, os.WNOHANG)
        if rank:
            ranks.remove(rank)
        elif time.monotonic() > deadline_s:
            for late in ranks:
                os.kill(late, signal.SIGKILL)
            deadline_s = float("inf")
        else:
            time.sleep(0.02)


def free_port():
    """A free port outside the ephemeral range: an ephemeral one could be taken before rank 0 binds it."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


if __name__ == "__main__":
    sys.exit(main())
