"""What is measured, each in a separate process: ``python -m stepscope.node_check.loads NAME SECONDS WHERE PARENT``.

Each prints one line of JSON: ``rates``, of short rounds, and how long the process itself was kept from running, because
that says whether a low rate is the node's or comes from its neighbors. A separate process can be killed if a driver
or a file system never answers, and leaves no context on a GPU. The file of the disk test has no name, so nothing is
left if it is killed. It does not outlive the process that started it (PARENT).

Rates of processors and memory are per second of CPU time: other programs make a test take longer, but hardly slower
per second that it runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.agent.sampling.off_cpu import run_delay_ns

__all__ = ["LOADS", "main"]

BLOCK = 1 << 20
ARRAY_BYTES = 64 << 20
"""Larger than the caches that a core can use."""
FILE_BYTES = 512 << 20
ROUND_BYTES = 16 << 20
MATRIX = 8192
MESSAGE_BYTES = 16 << 20
LEAST_FREE_BYTES = 2 << 30
"""Space below which the disk is not measured."""
PR_SET_PDEATHSIG = 1


def processor(seconds: float, core: str) -> dict[str, Any]:
    """Checksums on one core, in GB per second of CPU time."""
    os.sched_setaffinity(0, {int(core)})
    block = bytes(BLOCK)

    def work() -> float:
        digest = hashlib.sha256()
        for _ in range(16):
            digest.update(block)
        return 16 * BLOCK / 1e9

    return _rounds(seconds, work)


def memory(seconds: float, _where: str) -> dict[str, Any]:
    """Copies of a large array, in GB read and written per second of CPU time."""
    import numpy as np

    source, target = np.ones(ARRAY_BYTES, np.uint8), np.zeros(ARRAY_BYTES, np.uint8)

    def work() -> float:
        np.copyto(target, source)
        return 2 * ARRAY_BYTES / 1e9

    work()
    return _rounds(seconds, work)


def disk(seconds: float, folder: str) -> dict[str, Any]:
    """Write and sync, then read back from the disk, in GB per second. Any call may block on a dead mount."""
    try:
        folder = str(Path(folder).resolve())
        if shutil.disk_usage(folder).free < LEAST_FREE_BYTES:
            return {"skipped": "less than 2 GiB are free"}
    except OSError as error:
        return {"skipped": error.strerror or "the folder cannot be read"}
    with tempfile.TemporaryFile(dir=folder, prefix=".stepscope-probe-") as file:
        fd = file.fileno()
        block = os.urandom(ROUND_BYTES)

        def write() -> float:
            os.pwrite(fd, block, at["write"] % FILE_BYTES)
            os.fdatasync(fd)
            at["write"] += ROUND_BYTES
            return ROUND_BYTES / 1e9

        def read() -> float:
            place = at["read"] % min(at["write"], FILE_BYTES)
            os.posix_fadvise(fd, place, ROUND_BYTES, os.POSIX_FADV_DONTNEED)
            os.pread(fd, ROUND_BYTES, place)
            at["read"] += ROUND_BYTES
            return ROUND_BYTES / 1e9

        at = {"write": 0, "read": 0}
        written = _rounds(seconds / 2, write, by_wall=True)
        return {**written, "read_rates": _rounds(seconds / 2, read, by_wall=True)["rates"]}


def gpu(seconds: float, _where: str) -> dict[str, Any]:
    """Each GPU in turn: matrix products in TFLOP/s, copies in GB/s. Nothing without torch or a GPU."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    devices = []
    each = seconds / torch.cuda.device_count() / 2
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index), torch.inference_mode():
            a = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.float16)
            b, c = torch.randn_like(a), torch.empty_like(a)

            def multiply(a: Any = a, b: Any = b, c: Any = c) -> float:
                torch.matmul(a, b, out=c)
                torch.cuda.synchronize()
                return 2 * MATRIX**3 / 1e12

            source = torch.ones(1 << 30, device="cuda", dtype=torch.uint8)
            target = torch.empty_like(source)

            def copy(source: Any = source, target: Any = target) -> float:
                target.copy_(source)
                torch.cuda.synchronize()
                return float(2 * source.numel() / 1e9)

            for warm in (multiply, copy):
                warm()
            rates = [statistics.median(_rounds(each, work, by_wall=True)["rates"]) for work in (multiply, copy)]
            devices.append({"tflops": rates[0], "memory_gb_s": rates[1], "name": torch.cuda.get_device_name(index)})
            del a, b, c, source, target
            torch.cuda.empty_cache()
    return {"gpus": devices}


def links(seconds: float, _where: str) -> dict[str, Any]:
    """Under torchrun: what every rank receives from the one before it, in GB/s; ``rates`` by rank that receives."""
    import torch
    import torch.distributed as dist

    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        device = "cuda" if on_gpus else "cpu"
        out = torch.ones(MESSAGE_BYTES, dtype=torch.uint8, device=device)
        into = torch.empty_like(out)

        def exchange() -> None:
            sent = dist.P2POp(dist.isend, out, (rank + 1) % world)
            received = dist.P2POp(dist.irecv, into, (rank - 1) % world)
            for request in dist.batch_isend_irecv([sent, received]):
                request.wait()
            if on_gpus:
                torch.cuda.synchronize()

        exchange()
        began = time.perf_counter()
        exchange()
        # All ranks make as many rounds: rank 0 decides how many fit.
        rounds = torch.tensor([max(3, min(200, int(seconds / (time.perf_counter() - began))))], device=device)
        dist.broadcast(rounds, 0)
        rates = []
        for _ in range(int(rounds)):
            dist.barrier()
            began = time.perf_counter()
            exchange()
            rates.append(MESSAGE_BYTES / 1e9 / (time.perf_counter() - began))
        everywhere: list[Any] = [None] * world
        dist.all_gather_object(everywhere, (os.uname().nodename, statistics.median(rates)))
        return {"rates": [rate for _, rate in everywhere], "hosts": [host for host, _ in everywhere]}
    finally:
        dist.destroy_process_group()


LOADS: dict[str, Callable[[float, str], dict[str, Any]]] = {
    "processor": processor,
    "memory": memory,
    "disk": disk,
    "gpu": gpu,
    "links": links,
}


def _rounds(seconds: float, work: Callable[[], float], *, by_wall: bool = False) -> dict[str, Any]:
    """Call ``work``, which returns how much it did, until the time is over; at least three times."""
    clock = time.perf_counter if by_wall else time.thread_time
    delay_ns = run_delay_ns(os.getpid()) or 0
    began, cpu = time.perf_counter(), time.thread_time()
    rates: list[float] = []
    done = 0.0
    while time.perf_counter() - began < seconds or len(rates) < 3:
        round_began = clock()
        amount = work()
        done += amount
        rates.append(amount / max(clock() - round_began, 1e-9))
    return {
        "rates": rates,
        "done": done,
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.thread_time() - cpu,
        "waited_s": ((run_delay_ns(os.getpid()) or 0) - delay_ns) / 1e9,
    }


def main() -> None:
    name, seconds, where, parent = sys.argv[1:5]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return  # it ended before this process could ask for the signal
    print(json.dumps(LOADS[name](float(seconds), where)))


if __name__ == "__main__":
    main()
