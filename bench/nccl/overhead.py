"""What recording costs a job on NCCL: two ranks, DDP and FSDP2, bare and under Stepscope.

    PYTHONPATH=src:bench python -m nccl.overhead --json overhead.json

Two processes that do the same differ by up to 20% on a shared machine, and a process differs from itself a few seconds
later.  So a round has a bare and a recorded job that live at the same time and take turns, a block of steps each; while
one has its turn, the other sleeps.  What recording adds is the median of the differences between neighboring blocks;
every round starts new processes, and the spread is that of the rounds.

The kinds of job, from least to most:

- ``bare``: no Stepscope, no timing by NCCL;
- ``timed``: bare, with ``TORCH_NCCL_ENABLE_TIMING``;
- ``hooks``: under ``stepscope run``, without that timing and without the agent's reading of Flight Recorders;
- ``unread``: with the timing, without the reading;
- ``recorded``: all of it, which is what users have;
- ``python_hooks``: the same with hooks in Python;
- ``layers_off``: the same without layers, losses and gradients.

A step is short and all Python, where every microsecond shows.  With ``--work 1.5`` every layer also keeps its device
busy for 1.5 ms in forward and twice that in backward, as in the league: the device is then what a step waits for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from job_process import end_job

__all__ = ["added", "main"]

SOURCE = Path(__file__).resolve().parents[2] / "src"
BENCH = Path(__file__).resolve().parents[1]
RANKS = 2
TIMING = "TORCH_NCCL_ENABLE_TIMING"
KINDS = {
    "bare": {"STEPSCOPE": "0"},
    "timed": {"STEPSCOPE": "0", TIMING: "1"},
    "hooks": {TIMING: "0", "STEPSCOPE_SERVER": "0"},
    "unread": {TIMING: "1", "STEPSCOPE_SERVER": "0"},
    "recorded": {TIMING: "1"},
    "python_hooks": {TIMING: "1", "STEPSCOPE_C_HOOKS": "0"},
    "layers_off": {TIMING: "1", "STEPSCOPE_LAYERS": "off"},
}
"""And the environment variables that make them."""
SKIPPED = 3
"""First steps of a block, in which caches are cold."""
TURN_TIMEOUT_S = 120.0
END_S = 20.0
"""For the end of a job that has had all of its turns."""
POLL_S = 0.002
FIGURES = {
    "cpu_us": "main thread's CPU, µs a step",
    "process_us": "whole process's CPU, µs a step",
    "mean_us": "wall, mean, µs a step",
    "median_us": "wall, median, µs a step",
    "call_cpu_us": "main thread's CPU, µs a collective",
    "call_us": "wall, µs a collective",
}

Block = dict[str, float]
"""The figures of one block of steps."""
Round = dict[str, list[Block]]
"""The blocks of each kind of job."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="ddp,fsdp2", help="default: %(default)s")
    parser.add_argument("--kinds", default="bare,recorded", help=f"of {', '.join(KINDS)} (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of new processes (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=8, help="measured in each process (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=25, help="in a block (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=150, help="steps before the first block (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=100, help="single collectives after each block")
    parser.add_argument("--work", type=float, default=0.0, metavar="MS", help="of the device in every layer's forward")
    parser.add_argument("--ahead", type=int, default=2, help="rounds that start up meanwhile (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-mps", action="store_true", help="let ranks share a GPU in time slices")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every block there")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        _train_in_turns(args)
        return
    from gpu.__main__ import machine

    from nccl.shared_gpu import mps

    with (
        mps(ranks=RANKS, wanted=args.device == "cuda" and not args.no_mps) as (environment, words),
        tempfile.TemporaryDirectory(prefix="stepscope-bench-", ignore_cleanup_errors=True) as folder,
    ):
        print(f"{args.rounds} rounds of {args.blocks} blocks of {args.steps} steps, {RANKS} ranks, {words}")
        found = _Referee(args, Path(folder), environment).play()
    for strategy, rounds in found.items():
        print(_table(strategy, rounds))
    if args.json:
        about = {"schema": 1, **machine(), "device": args.device, "sharing": words, "steps": args.steps}
        args.json.write_text(json.dumps({**about, "rounds": found}, indent=1) + "\n")


def added(rounds: Sequence[Round], kind: str, figure: str) -> tuple[float, float, float]:
    """What that kind of job adds to a bare one: the lowest, the median and the highest of the rounds."""
    by_round = [
        statistics.median(other[figure] - bare[figure] for bare, other in zip(each["bare"], each[kind], strict=True))
        for each in rounds
    ]
    return min(by_round), statistics.median(by_round), max(by_round)


def _table(strategy: str, rounds: Sequence[Round]) -> str:
    kinds = [kind for kind in rounds[0] if kind != "bare"]
    lines = [f"{strategy:38}{'bare':>10}" + "".join(f"{f'{kind} adds':>16}  {'(rounds)':20}" for kind in kinds)]
    for figure, words in FIGURES.items():
        bare = statistics.median(block[figure] for each in rounds for block in each["bare"])
        line = f"  {words:36}{bare:>10,.1f}"
        for kind in kinds:
            low, middle, high = added(rounds, kind, figure)
            line += f"{middle:>+16,.1f}  {f'({low:+,.1f} to {high:+,.1f})':20}"
        lines.append(line.rstrip())
    return "\n".join(lines)


# -- who has its turn -----------------------------------------------------------------------------------------------


class _Referee:
    """Starts the jobs of a round some rounds ahead, and gives each its turn by writing its name into a file."""

    def __init__(self, args: argparse.Namespace, folder: Path, environment: Mapping[str, str]) -> None:
        self._args, self._folder = args, folder
        path = os.pathsep.join(filter(None, [str(SOURCE), str(BENCH), os.environ.get("PYTHONPATH", "")]))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPSCOPE")}
        kept.pop(TIMING, None)
        self._environment = {**kept, **environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._kinds = [kind for kind in KINDS if kind in {"bare", *args.kinds.split(",")}]
        self._jobs: dict[str, subprocess.Popen[bytes]] = {}

    def play(self) -> dict[str, list[Round]]:
        strategies = self._args.strategies.split(",")
        rounds = [f"{strategy}-{number}" for number in range(self._args.rounds) for strategy in strategies]
        found: dict[str, list[Round]] = {strategy: [] for strategy in strategies}
        try:
            for number, name in enumerate(rounds):
                for coming in rounds[number : number + 1 + self._args.ahead]:
                    self._start(coming)
                found[name.partition("-")[0]].append(self._play(name, number))
            for job in self._jobs.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(END_S)
        finally:
            for job in self._jobs.values():
                end_job(job)
        return found

    def _start(self, round_name: str) -> None:
        for kind in self._kinds:
            name = f"{round_name}-{kind}"
            if name in self._jobs:
                continue
            command = [sys.executable]
            if "STEPSCOPE" not in KINDS[kind]:
                # Waiting for its turn is no hang.
                command += ["-m", "stepscope", "run", "--quiet", "--no-html", "--hang-after", "600"]
                command += ["--dir", str(self._folder / "runs"), "--name", name, sys.executable]
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(Path(__file__))]
            for option in ("blocks", "steps", "warm", "calls", "work", "device"):
                command += [f"--{option}", str(getattr(self._args, option))]
            command += ["--strategies", round_name.partition("-")[0], "--inside", str(self._folder), "--name", name]
            with (self._folder / f"{name}.log").open("wb") as log:
                self._jobs[name] = subprocess.Popen(
                    command,
                    env={**self._environment, **KINDS[kind]},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def _play(self, round_name: str, number: int) -> Round:
        """The first block of each warms up."""
        for block in range(self._args.blocks + 1):
            kinds = self._kinds if (block + number) % 2 else self._kinds[::-1]
            for kind in kinds:
                self._turn(f"{round_name}-{kind}", block)
        return {kind: json.loads((self._folder / f"{round_name}-{kind}.json").read_text()) for kind in self._kinds}

    def _turn(self, name: str, block: int) -> None:
        _write(self._folder / "turn", f"{name}:{block}")
        deadline_s = time.monotonic() + TURN_TIMEOUT_S
        while _read(self._folder / f"{name}.done") != str(block):
            if self._jobs[name].poll() not in (None, 0) or time.monotonic() > deadline_s:
                log = (self._folder / f"{name}.log").read_text(errors="replace")
                raise SystemExit(f"{name} did not finish block {block}\n{log[-3000:]}")
            time.sleep(POLL_S)


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# -- the job --------------------------------------------------------------------------------------------------------


def _train_in_turns(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from nccl import job

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = job.join(rank, world, args.device)
    width = job.WIDTH[args.device]
    nothing = job.Fault("none", rank, 0)
    if args.work:
        nothing.measure_clock()
        nothing.cycles_per_ms *= args.work / job.FORWARD_MS
    gate = job.Gate(None, rank, world)
    total = args.warm + args.blocks * args.steps
    samples = job.Samples(total, 1024 if args.device == "cuda" else 32, width, nothing)
    net = job.shard(job.Net(nothing, width).to(device), args.strategies, world)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    batches = iter(torch.utils.data.DataLoader(samples, batch_size=None, pin_memory=args.device == "cuda"))
    small = torch.ones(256, device=device)
    wait_for_device = torch.cuda.synchronize if args.device == "cuda" else lambda: None

    def step() -> None:
        x = next(batches).to(device, non_blocking=True)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    blocks: list[Block] = []
    for number in range(args.blocks + 1):
        if rank == 0:
            while _read(args.inside / "turn") != f"{args.name}:{number}":
                time.sleep(POLL_S)
        gate.follow()
        steps = args.steps if number else args.warm
        for _ in range(SKIPPED):
            step()
        wait_for_device()
        block = _timed(step, steps - SKIPPED, wait_for_device)
        calls = _timed(lambda: dist.all_reduce(small), args.calls, wait_for_device)
        if number:
            blocks.append({**block, "call_cpu_us": calls["cpu_us"], "call_us": calls["mean_us"]})
        gate.gather()
        if rank == 0:
            if number == args.blocks:
                _write(args.inside / f"{args.name}.json", json.dumps(blocks))
            _write(args.inside / f"{args.name}.done", str(number))
    dist.destroy_process_group()


def _timed(act: Any, times: int, wait_for_device: Any) -> Block:
    """Do it so many times; the device may lag behind but for the end."""
    laps = []
    process_ns, thread_ns = time.process_time_ns(), time.thread_time_ns()
    began_ns = last_ns = time.perf_counter_ns()
    for _ in range(times):
        act()
        now_ns = time.perf_counter_ns()
        laps.append(now_ns - last_ns)
        last_ns = now_ns
    thread_ns = time.thread_time_ns() - thread_ns  # without the wait for the device, which spins
    wait_for_device()
    whole_ns = time.perf_counter_ns() - began_ns
    process_ns = time.process_time_ns() - process_ns
    return {
        "cpu_us": thread_ns / times / 1e3,
        "process_us": process_ns / times / 1e3,
        "mean_us": whole_ns / times / 1e3,
        "median_us": statistics.median(laps) / 1e3,
    }


if __name__ == "__main__":
    main()
