"""What the agent spends on samples of the host and of its ranks, as a share of a core; also of two checkouts in turns.

python bench/host_sampler.py
python bench/host_sampler.py --other OTHER_CHECKOUT --repeats 9

The ranks are processes that sleep, with four children each. A second of the agent is one sample and four readings of
states; the seconds follow one another without pause, which changes neither what is read nor how often.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
AGENT = """
import sys, time
from pathlib import Path
from stepscope.agent.sampling.host import HostSampler

pids, seconds = [int(pid) for pid in sys.argv[2:]], int(sys.argv[1])
sampler = HostSampler("node")
for pid in pids:
    sampler.watch(pid)
ranks = [(pid, rank, Path("/nonexistent")) for rank, pid in enumerate(pids)]
read_states = getattr(sampler, "read_states", lambda: None)
sampler.sample(ranks)
began = time.process_time()
for _ in range(seconds):
    for _ in range(4):
        read_states()
    sampler.sample(ranks)
print((time.process_time() - began) / seconds)
"""
WITH_CHILDREN = """
import os, sys, time
for _ in range(4):
    if not os.fork():
        break
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, metavar="FOLDER", help="a checkout to measure as well")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=100, help="simulated, in each repeat")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    sources = {"this": HERE.parent / "src"} | ({} if args.other is None else {"other": args.other.resolve() / "src"})
    command = [sys.executable, "-c", WITH_CHILDREN]
    ranks = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(args.ranks)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            for _ in range(5):
                rank.stdout.readline()
        shares: dict[str, list[float]] = {name: [] for name in sources}
        for repeat in range(args.repeats):
            for name in sources if repeat % 2 else reversed(sources):
                shares[name].append(_measure(sources[name], args.seconds, [rank.pid for rank in ranks]))
    finally:
        for rank in ranks:
            rank.communicate()  # they end with their input
    print(f"{args.ranks} ranks with 4 children each; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, measured in shares.items():
        low, high = min(measured), max(measured)
        print(f"{name}: {statistics.median(measured):.3%} of a core ({low:.3%} to {high:.3%})")
    if "other" in shares:
        more = [this - other for this, other in zip(shares["this"], shares["other"], strict=True)]
        print(f"difference: {statistics.median(more):+.3%} of a core ({min(more):+.3%} to {max(more):+.3%})")


def _measure(source: Path, seconds: int, pids: list[int]) -> float:
    """CPU time per simulated second."""
    command = [sys.executable, "-c", AGENT, str(seconds), *map(str, pids)]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
