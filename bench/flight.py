"""How long ``stepscope flight`` takes, and in how much memory, beside torch's own analyzer.

    python bench/flight.py [--ranks 128 1024] [--entries 2000] [--frames 10] [--torch]

Makes dumps of so many ranks in a temporary folder, as torch writes them: every frame of every entry a dictionary of its
own, long strings each time anew.  One rank has stopped calling; the others wait for it.  ``--torch`` also runs
``torch.distributed.flight_recorder.fr_trace`` on the smallest set, if it can be run here.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fakes.dumps import Call, FlightJob, frames_at

__all__ = ["main", "write_ranks"]

VARIANTS = 4
"""Rings that reach differently far back."""
CULPRIT = 5
TORCH_LIMIT_S = 600


def write_ranks(folder: Path, ranks: int, entries: int, frames: int) -> int:
    """Dumps of a job on NCCL in which one rank sleeps; the size of one of them."""
    job = FlightJob(2, backend="nccl", ring=entries)
    step = [Call(op=op, site=frames_at(40 + n, deep=frames - 4)) for n, op in enumerate(("all_reduce", "all_gather"))]
    job.run(dict.fromkeys(range(2), step * (entries // 2 + 5)), until={0: entries + 9 - VARIANTS})
    job.groups["0"] = ("default_pg", tuple(range(ranks)))
    waiting = []
    for variant in range(VARIANTS):
        job.ring = entries - variant
        waiting.append(pickle.dumps(job.document(1), protocol=2))
    job.ring = entries
    asleep = pickle.dumps(job.document(0), protocol=2)
    for rank in range(ranks):
        (folder / f"rank_{rank}").write_bytes(asleep if rank == CULPRIT % ranks else waiting[rank % VARIANTS])
    return len(waiting[0])


def measured(command: list[str], limit_s: float) -> tuple[float, float, float, str] | None:
    """Seconds, CPU seconds of all its processes, peak megabytes of the largest of them, and what it printed."""
    before, spent = time.perf_counter(), _cpu_s()
    with tempfile.TemporaryFile(mode="w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None
        seconds = time.perf_counter() - before
        out.seek(0)
        text = out.read()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return (seconds, _cpu_s() - spent, peak, text) if process.returncode == 0 else None


def _cpu_s() -> float:
    """Of children that have ended, and theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="How long `stepscope flight` takes.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--frames", type=int, default=10)
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    for number, ranks in enumerate(args.ranks):
        with tempfile.TemporaryDirectory() as temporary:
            size = write_ranks(Path(temporary), ranks, args.entries, args.frames)
            print(f"{ranks} ranks × {args.entries} entries × {args.frames} frames, {size / 1e6:.1f} MB each")
            ours = measured([sys.executable, "-m", "stepscope", "flight", temporary, "--json"], TORCH_LIMIT_S)
            if ours is None:
                raise SystemExit("  stepscope flight failed")
            told = json.loads(ours[3])
            print(f"  stepscope flight  {_line(ours)}  {told['kind']} {told['culprits']}")
            if args.torch and number == 0:
                _torch(temporary)


def _torch(folder: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder, "-p", "rank_"]
    theirs = measured(command, TORCH_LIMIT_S)
    if theirs is None:
        print("  torchfrtrace      failed, or was not done in time, or its tabulate is not installed")
    else:
        print(f"  torchfrtrace      {_line(theirs)}")


def _line(result: tuple[float, float, float, str]) -> str:
    seconds, cpu_s, peak_mb, _ = result
    return f"{seconds:6.2f} s  {cpu_s:6.2f} s CPU  {peak_mb:6.0f} MB a process"


if __name__ == "__main__":
    main()
