"""A year of a simulated cluster: what is found in it, what is suspected wrongly, and what that costs.

    python bench/fleet.py                     # 20,000 runs on 200 hosts: 5 minutes on an idle machine
    python bench/fleet.py --seeds 20          # more years for the accuracy
    python bench/fleet.py --runs 2000 --seeds 2

Accuracy: for each seed a year with 5 slow hosts of different kinds and strength, 3 slow links and 2 image changes, and
the same year without any (``fakes/fleet.py``).  Cost: the runs of one year are written as folders; then, in processes
of their own, the catalog is built, updated without any change, updated after 20 runs changed, and the document is made.
Wall-clock and CPU time are given: the first depends on what else runs on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fakes.fleet import FleetYear, MadeRun

from stepscope.fleet.catalog import RunCatalog, fleet_of
from stepscope.fleet.document import fleet_document, suspect_hosts
from stepscope.fleet.record import RunRecord, record_of

CHANGED = 20
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--only", choices=("accuracy", "cost"))
    parser.add_argument("--folder", type=Path, help="where runs were written before, or will be (default: temporary)")
    parser.add_argument("--step", nargs=2, metavar=("WHAT", "STATE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(run_step(args.step[0], Path(args.step[1]), args.folder)))
        return
    if args.only != "cost":
        measure_accuracy(args.runs, args.seeds)
    if args.only != "accuracy":
        with tempfile.TemporaryDirectory(prefix="stepscope-fleet-") as name:
            measure_cost(args.folder or Path(name) / "runs", Path(name) / "state", args.runs, args.repeats)
    print(f"load average: {os.getloadavg()[0]:.1f}")


# -- accuracy ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Score:
    found: tuple[int, int, int]
    """Hosts, links, changes."""
    false: tuple[int, int, int]


def measure_accuracy(runs: int, seeds: int) -> None:
    print(f"{runs:,} runs per year; hosts, links and changes found, and false ones")
    scores, healthy = [], []
    for seed in range(seeds):
        year = FleetYear(seed=seed, count=runs, ranks_per_host=2)
        scores.append(score_of(year))
        healthy.append(score_of(replace(year, bad_hosts=(), bad_links=(), image_changes=())))
        print(f"  seed {seed}: found {scores[-1].found}, false {scores[-1].false}; healthy: false {healthy[-1].false}")
    year = FleetYear()
    for at, (what, of) in enumerate(
        (("hosts", len(year.bad_hosts)), ("links", len(year.bad_links)), ("changes", len(year.image_changes)))
    ):
        found = sum(score.found[at] for score in scores)
        false = sum(score.false[at] for score in (*scores, *healthy))
        print(f"  {what}: {found} of {of * seeds} found, {false} false in {2 * seeds} years")
    suspected = sum(score.found[0] + score.false[0] for score in (*scores, *healthy))
    wrong = sum(score.false[0] for score in (*scores, *healthy))
    healthy_hosts = (2 * year.hosts - len(year.bad_hosts)) * seeds
    print(f"  false suspects: {wrong} of {suspected} suspects, and of {healthy_hosts:,} healthy hosts")


def score_of(year: FleetYear) -> Score:
    document = fleet_document(fleet_of(map(record, year.runs())), generated_wall_ns=0)
    hosts = set(suspect_hosts(document))
    bad = {year.host_name(each.host) for each in year.bad_hosts}
    links = {tuple(row["hosts"]) for row in document["links"] if row["kind"] == "slow_link"}
    slow = {(year.host_name(each.hosts[0]), year.host_name(each.hosts[1])) for each in year.bad_links}
    images = {each.image for each in year.image_changes}
    changes = [_image(row) for row in document["changes"]]
    return Score(
        found=(len(hosts & bad), len(links & slow), len(images & set(changes))),
        false=(len(hosts - bad), len(links - slow), sum(image not in images for image in changes)),
    )


def _image(row: dict[str, Any]) -> str:
    return next((each["after"] for each in row["what"] if each["name"] == "image"), "")


def record(made: MadeRun) -> RunRecord:
    facts = {
        "created_wall_ns": made.meta["created_wall_ns"],
        "command": made.meta["command"],
        "host": made.meta["host"],
        "commit": made.meta["git"]["commit"],
        "status": made.summary["status"],
        "tags": list(made.tags),
    }
    return record_of(made.name, facts, made.meta, made.summary)


# -- cost -------------------------------------------------------------------------------------------------------------


def measure_cost(folder: Path, state: Path, runs: int, repeats: int) -> None:
    if not folder.exists():
        FleetYear(seed=1, count=runs).write(folder)
    size = sum(file.stat().st_size for file in folder.glob("*/*.json"))
    print(f"{runs:,} run folders with {size / 1e6:,.0f} MB of JSON; median (lowest to highest)")
    found: dict[str, list[dict[str, float]]] = {}
    for repeat in range(repeats):
        own = state / str(repeat)
        for what in ("build", "update", "update after 20 changes", "document"):
            if what.endswith("changes"):
                for path in sorted(folder.iterdir())[repeat * CHANGED : (repeat + 1) * CHANGED]:
                    os.utime(path / "summary.json")
            found.setdefault(what, []).append(_measured(what, own, folder))
    for what, rows in found.items():
        parts = [f"{name} {_spread([row[name] for row in rows])}" for name in ("wall_s", "cpu_s", "peak_mb")]
        print(f"  {what}: {', '.join(parts)}")
    path = next((state / "0").rglob("*.duckdb"))
    print(f"  catalog file: {path.stat().st_size / 1e6:.0f} MB")


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _measured(what: str, state: Path, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--step", what, str(state), "--folder", str(folder)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def run_step(what: str, state: Path, folder: Path) -> dict[str, float]:
    """One step in this process; the imports are not counted."""
    import duckdb  # noqa: F401

    catalog = RunCatalog(state / "fleet" / "catalog.duckdb")
    began_s, cpu_s = time.monotonic(), time.process_time()
    if what == "document":
        document = fleet_document(catalog.fleet(["bench"]), generated_wall_ns=0)
        json.dumps(document)
    else:
        update = catalog.update({"bench": folder})
        expected = {"build": update.runs, "update": 0}.get(what, CHANGED)
        assert (update.read, update.problems) == (expected, []), (update.read, update.problems[:3])
    return {
        "wall_s": time.monotonic() - began_s,
        "cpu_s": time.process_time() - cpu_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    main()
