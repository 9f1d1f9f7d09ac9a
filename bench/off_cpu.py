"""Real ranks that are kept from running, by neighbors, a quota, page faults or a slow disk: is the cause named?

python bench/off_cpu.py                       # every case once, then ten healthy jobs beside other load
python bench/off_cpu.py --cases quota disk --healthy 0

The quota and the slow disk need cgroups of version 1 that root may create (blkio throttles the disk of --folder). Page
faults come from a mapped file on that slow disk, because few machines have swap to spare.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine_load import BURNER, machine_load

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
JOB = HERE / "jobs" / "off_cpu_job.py"
RANKS = 2
HURT = 1
CGROUPS = Path("/sys/fs/cgroup")
CASES = {"neighbors": "cores", "quota": "quota", "faults": "mapped_file", "disk": "disk"}
"""And the cause that each must have."""
DISK_BYTES_S = 4_000_000


@contextlib.contextmanager
def cgroup(folder: Path, settings: dict[str, str]) -> Iterator[Path]:
    folder.mkdir()
    try:
        for name, value in settings.items():
            (folder / name).write_text(value)
        yield folder
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (folder.parent / "cgroup.procs").write_text(pid)
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)


@contextlib.contextmanager
def before_others() -> Iterator[Path]:
    """Give the jobs and their neighbors the processors before all other programs of the machine."""
    name = f"stepscope-bench-{os.getpid()}"
    with cgroup(CGROUPS / "cpu" / name, {"cpu.shares": "200000"}) as folder:
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        yield folder


def rank_pid(pids: Path, rank: int) -> int:
    while True:
        for path in pids.iterdir():
            pid, _, number = path.name.partition("-")
            if int(number) == rank:
                return int(pid)
        time.sleep(0.05)


def record(folder: Path, name: str, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
    pids = folder / f"pids-{name}"
    pids.mkdir()
    command = [sys.executable, "-m", "stepscope", "run", "--quiet", "--dir", str(folder / "runs")]
    command += ["--name", name, "--nproc-per-node", str(RANKS), str(JOB), "--pids", str(pids), *options]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)
    return job, pids


def run_case(case: str, folder: Path, steps: int, own: Path) -> None:
    """Record a job that suffers from it; ``own``: the cgroup that all of this is in."""
    data = folder / "data"
    if not data.exists():
        data.write_bytes(os.urandom(64 << 20))
        with data.open("rb") as file:
            os.fsync(file.fileno())
    how = {"disk": "disk", "faults": "faults"}.get(case, "none")
    options = ("--steps", str(steps), "--hurt", str(HURT), "--how", how, "--file", str(data), "--megabytes", "0.25")
    with contextlib.ExitStack() as stack:
        job, pids = record(folder, case, *options)
        pid = rank_pid(pids, HURT)
        if case == "neighbors":
            os.sched_setaffinity(pid, {0})
            os.sched_setaffinity(rank_pid(pids, 0), {1})
            for _ in range(3):
                burner = subprocess.Popen(["taskset", "-c", "0", sys.executable, "-S", "-c", BURNER])
                stack.callback(burner.wait)
                stack.callback(burner.kill)
        elif case == "quota":
            quota = stack.enter_context(cgroup(own / "quota", {"cpu.cfs_quota_us": "15000"}))
            (quota / "cgroup.procs").write_text(str(pid))
        else:
            device = folder.stat().st_dev
            limit = {"blkio.throttle.read_bps_device": f"{os.major(device)}:{os.minor(device)} {DISK_BYTES_S}"}
            slow = stack.enter_context(cgroup(CGROUPS / "blkio" / own.name, limit))
            (slow / "cgroup.procs").write_text(str(pid))
        job.wait()


def findings_of(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "summary.json").read_text())["findings"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--healthy", type=int, default=10, help="jobs without a fault, every second one beside load")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="where to keep runs and data (default: a temporary folder)")
    args = parser.parse_args()
    named = accused = 0
    with tempfile.TemporaryDirectory() as made, before_others() as own:
        folder = args.folder or Path(made)
        folder.mkdir(exist_ok=True)
        for case in args.cases:
            run_case(case, folder, args.steps, own)
            found = [row for row in findings_of(folder / "runs" / case) if row["ranks"] == [HURT]]
            causes = [row["evidence"].get("cause") for row in found]
            named += CASES[case] in causes
            print(f"{case}: {'named' if CASES[case] in causes else 'NOT NAMED'}; load {os.getloadavg()[0]:.1f}")
            for row in found:
                print(f"    {row['severity']} {row['kind']}: {row['title']}")
        for number in range(args.healthy):
            load = ("none", "one", "all", "bursts")[number % 4]
            with machine_load(load):
                record(folder, f"healthy-{number}", "--steps", str(args.steps))[0].wait()
            found = findings_of(folder / "runs" / f"healthy-{number}")
            causes = [row for row in found if "cause" in row["evidence"]]
            wrong = [row for row in causes if row["kind"] != "cpu_saturated"]
            accused += bool(wrong)
            print(f"healthy beside {load}: {found[0]['kind']}, causes {[row['title'] for row in causes]}")
    print(f"{named} of {len(args.cases)} causes named, {accused} of {args.healthy} healthy jobs with a wrong cause")


if __name__ == "__main__":
    main()
