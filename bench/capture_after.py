"""What a capture leaves behind: how long steps take after it, beside a process that captured nothing.

CUPTI, with which torch profiles a GPU, stays loaded after the profiler has ended.  A process differs from itself a few
seconds later by more than that may cost, so the processes of a round live at the same time and take turns, a block of
steps each, and each block is compared with the neighboring one of the process without captures.  That comparison before
the first capture is subtracted from those after it.

- ``none``: no capture;
- ``capture``: a capture after a third of the blocks, and another one after two thirds;
- ``teardown``: the same with ``TEARDOWN_CUPTI=1``, which makes torch unload CUPTI afterwards.

    python bench/capture_after.py --device cuda
    python bench/capture_after.py --workload 1 --rounds 1      # on a CPU
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from capture_cost import SETTLING_STEPS, Training
from job_process import end_job

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
KINDS = {"none": {}, "capture": {}, "teardown": {"TEARDOWN_CUPTI": "1"}}
"""And the environment variables that make them."""
SKIPPED = 5
"""First steps of a block, in which caches are cold."""
TURN_TIMEOUT_S = 120.0
POLL_S = 0.002
FIGURES = {"wall_us": "wall", "cpu_us": "CPU of the process"}

Block = dict[str, float]
"""Microseconds a step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="transformer", help="as of capture_cost.py")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="of new processes (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=10, help="before, between and after captures (default: 10)")
    parser.add_argument("--steps", type=int, default=40, help="in a block (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every block there")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        _train_in_turns(args)
        return
    kinds = args.kinds.split(",")
    rounds = []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="stepscope-bench-", ignore_cleanup_errors=True) as folder:
            rounds.append(_round(args, kinds, number, Path(folder)))
    usual = statistics.median(block["wall_us"] for each in rounds for block in each["none"])
    load = os.getloadavg()[0]
    print(f"{args.workload} on {args.device}, a step of {usual:,.0f} µs; {args.rounds} rounds; load {load:.1f}")
    for kind in kinds:
        for figure, name in FIGURES.items() if kind != "none" else ():
            for at, when in ((1, "after the first capture"), (2, "after the second")):
                changes = sorted(_change(each, kind, figure, at, args.blocks) for each in rounds)
                low, middle, high = (100 * each for each in (changes[0], statistics.median(changes), changes[-1]))
                print(f"  {kind:10}{name:20}{when:26}{middle:+6.1f}%  ({low:+.1f} to {high:+.1f})")
    if args.json:
        args.json.write_text(json.dumps({"device": args.device, "rounds": rounds}))


def _change(blocks: dict[str, list[Block]], kind: str, figure: str, at: int, count: int) -> float:
    """Of a step after a capture, as a share: compared with the process without captures, less the same before it."""
    ratios = [ours[figure] / theirs[figure] for ours, theirs in zip(blocks[kind], blocks["none"], strict=True)]
    before, after = ratios[:count], ratios[at * count : (at + 1) * count]
    return statistics.median(after) - statistics.median(before)


def _round(args: argparse.Namespace, kinds: list[str], number: int, folder: Path) -> dict[str, list[Block]]:
    jobs: dict[str, subprocess.Popen[bytes]] = {}
    path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]))
    try:
        for kind in kinds:
            command = [sys.executable, "-m", "stepscope", "run", "--quiet", "--no-hub", "--no-html"]
            command += ["--hang-after", "600", "--dir", str(folder / "runs"), "--name", kind]  # a turn is no hang
            command += [sys.executable, __file__, *sys.argv[1:], "--inside", str(folder), "--kind", kind]
            environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "STEPSCOPE_LAYERS": "off"}
            with (folder / f"{kind}.log").open("wb") as log:
                jobs[kind] = subprocess.Popen(
                    command,
                    env={**environment, **KINDS[kind]},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        for block in range(3 * args.blocks):
            for kind in kinds if (block + number) % 2 else kinds[::-1]:
                _turn(folder, kind, block, jobs[kind])
        return {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in kinds}
    finally:
        for job in jobs.values():
            end_job(job)


def _turn(folder: Path, kind: str, block: int, job: subprocess.Popen[bytes]) -> None:
    _write(folder / "turn", f"{kind}:{block}")
    deadline_s = time.monotonic() + TURN_TIMEOUT_S
    while _read(folder / f"{kind}.done") != str(block):
        if job.poll() not in (None, 0) or time.monotonic() > deadline_s:
            log = (folder / f"{kind}.log").read_text(errors="replace")
            raise SystemExit(f"{kind} did not finish block {block}, exit code {job.poll()}\n{log[-3000:]}")
        time.sleep(POLL_S)


def _train_in_turns(args: argparse.Namespace) -> None:
    training = Training(args)
    for _ in range(SETTLING_STEPS):
        training.step()
    blocks: list[Block] = []
    for number in range(3 * args.blocks):
        while _read(args.inside / "turn") != f"{args.kind}:{number}":
            time.sleep(POLL_S)
        if number in (args.blocks, 2 * args.blocks) and args.kind != "none":
            training.capture(number, stacks=True)
        for _ in range(SKIPPED):
            training.step()
        wall_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(args.steps):
            training.step()
        wall_ns, cpu_ns = time.perf_counter_ns() - wall_ns, time.process_time_ns() - cpu_ns
        blocks.append({"wall_us": wall_ns / 1e3 / args.steps, "cpu_us": cpu_ns / 1e3 / args.steps})
        if number == 3 * args.blocks - 1:
            _write(args.inside / f"{args.kind}.json", json.dumps(blocks))
        _write(args.inside / f"{args.kind}.done", str(number))


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    main()
