"""How long ``stepscope list`` takes for an archive of many runs on a real S3 server that answers after 20 ms.

    python bench/archive.py                 # 1,000 runs: about eight minutes, most of it to archive them
    python bench/archive.py --runs 100

A small real run is recorded, copied under other names, and each copy archived, without the delay.  Then ``list`` is
started as a user would: cold (nothing of the archive on this disk), warm (the same again), and old (the list on this
disk is over a minute old, so the archive is asked what is new).  The kinds take turns.  Time is that of the whole
command, from start to exit; CPU time is that of its process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fakes.object_store import S3Server, Wire, s3_server

from stepscope.archive.location import parse_url
from stepscope.archive.storage import Storage
from stepscope.archive.upload import archive_run

URL = "s3://bench/team"
DELAY_S = 0.02
SCRIPT = "import stepscope, time\nfor _ in range(50):\n    with stepscope.step():\n        time.sleep(0.001)\n"
STEPSCOPE = [sys.executable, "-m", "stepscope"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stepscope-archive-") as name:
        folder = Path(name)
        with s3_server(folder / "server") as server, Wire(server.port) as wire:
            os.environ.update(server.variables())
            took_s = fill(folder, args.runs)
            print(f"{args.runs:,} runs archived in {took_s:.0f} s; objects of the catalog: {catalog_text()}")
            wire.delay_s = DELAY_S
            measure(folder, server, wire, args.runs, args.repeats)


def fill(folder: Path, runs: int) -> float:
    """Record a run and archive copies of it; return how long the archiving took."""
    import s3fs

    s3fs.S3FileSystem().mkdir("bench")
    (folder / "job.py").write_text(SCRIPT)
    run = [*STEPSCOPE, "run", "--no-hub", "--no-html", "--quiet", "--name", "first", "job.py"]
    subprocess.run(run, cwd=folder, check=True)
    began_s = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        storages = [Storage(parse_url(URL)) for _ in range(3)]
        for _ in pool.map(lambda number: _archive_copy(folder, number, storages[number % 3]), range(runs)):
            pass
    return time.monotonic() - began_s


def _archive_copy(folder: Path, number: int, storage: Storage) -> None:
    copy = folder / "runs" / f"train-{number:04}"
    shutil.copytree(folder / "runs" / "first", copy)
    meta = json.loads((copy / "run.json").read_text())
    meta |= {"name": copy.name, "created_wall_ns": meta["created_wall_ns"] - number * 10**12}
    (copy / "run.json").write_text(json.dumps(meta))
    archive_run(storage, copy)
    shutil.rmtree(copy)


def catalog_text() -> str:
    found = Storage(parse_url(URL)).find(".stepscope")
    packs = [about.size for key, about in found.items() if "/packs/" in key]
    return f"{len(packs)} packs with {sum(packs):,} bytes, {len(found) - len(packs)} entries"


def measure(folder: Path, server: S3Server, wire: Wire, runs: int, repeats: int) -> None:
    environment = {**os.environ, **server.variables(wire.port), "XDG_CACHE_HOME": str(folder / "cache")}
    found: dict[str, list[tuple[float, float, int]]] = {"cold": [], "warm": [], "old": []}
    for _ in range(repeats):
        for kind, row in found.items():
            if kind == "cold":
                shutil.rmtree(folder / "cache", ignore_errors=True)
            elif kind == "old":
                (path,) = (folder / "cache").rglob("catalog.json")
                path.write_text(json.dumps({**json.loads(path.read_text()), "checked_s": 0}))
            requests = len(wire.requests)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            began_s = time.monotonic()
            listing = subprocess.run([*STEPSCOPE, "list", URL], env=environment, capture_output=True, check=True)
            took_s = time.monotonic() - began_s
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert len(listing.stdout.splitlines()) == runs + 2
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            row.append((took_s, cpu_s, len(wire.requests) - requests))
    print(
        f"list of {runs:,} runs, {DELAY_S * 1e3:.0f} ms per request, {repeats} times each: median (lowest to highest)"
    )
    for kind, row in found.items():
        walls, cpus, requests_of = zip(*row, strict=True)
        wall = f"{statistics.median(walls):.2f} s ({min(walls):.2f} to {max(walls):.2f})"
        print(f"  {kind}  {wall}, CPU {statistics.median(cpus):.2f} s, {max(requests_of)} requests")
    print(f"load average: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
