"""The node check on this machine: how often it calls a healthy node unfit, and whether it finds a throttled one.

python bench/probe.py --healthy 50 --seconds 3

Every second healthy check runs beside other load. The throttled node is a cgroup with a quota (version 1, made by root)
and, where those cannot be made, processes that are stopped half of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from machine_load import machine_load
from off_cpu import before_others, cgroup

__all__ = ["main"]

LOADS = ("none", "one", "none", "all", "none", "bursts")


def probe(folder: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stepscope", "probe", "--seconds", str(seconds), "--disk", str(folder)]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def answer(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate()
    return process.returncode, text.partition("\n")[0]


def stop_half_of_the_time(process: subprocess.Popen[str]) -> None:
    """Stop the loads, not the command that waits for them."""
    while process.poll() is None:
        for number, pause_s in ((signal.SIGSTOP, 0.1), (signal.SIGCONT, 0.1)):
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.send_signal(number)
            time.sleep(pause_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--healthy", type=int, default=50)
    parser.add_argument("--throttled", type=int, default=5, help="checks with a quota, and as many that are stopped")
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        verdicts: Counter[str] = Counter()
        for number in range(args.healthy):
            load = LOADS[number % len(LOADS)]
            with machine_load(load):
                code, text = answer(probe(folder, args.seconds))
            verdicts[f"{load}: {'busy' if 'busy' in text else 'fit' if code == 0 else 'UNFIT'}"] += 1
            if code:
                print(f"healthy beside {load}: {text}")
        print(f"healthy, load {os.getloadavg()[0]:.1f}: {dict(verdicts)}", flush=True)
        with before_others() as own:
            found = 0
            with cgroup(own / "quota", {"cpu.cfs_quota_us": "50000"}) as quota:
                for _ in range(args.throttled):
                    process = probe(folder, args.seconds)
                    (quota / "cgroup.procs").write_text(str(process.pid))
                    code, text = answer(process)
                    found += code == 3
                    print(f"quota: {code} {text}")
            for _ in range(args.throttled):
                process = probe(folder, args.seconds)
                stop_half_of_the_time(process)
                code, text = answer(process)
                found += code == 3
                print(f"stopped: {code} {text}")
        print(f"{found} of {2 * args.throttled} throttled checks found")


if __name__ == "__main__":
    main()
