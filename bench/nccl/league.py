"""``python -m nccl.league``: run jobs on NCCL with a fault each, and hold the verdicts and prices against the truth.

Jobs start up side by side and take turns for their steps, so that the GPU belongs to one of them at a time.  What was
recorded and measured is kept case by case (``--keep``): the next call runs what is missing, and ``--rejudge`` asks the
rules of today about the runs of yesterday, without a GPU.

The exit code is 0 when enough of the faults are right and no healthy run is accused, 1 when not, and 2 when the league
cannot run here.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from fakes.cut import cut
from gpu.__main__ import machine
from job_process import end_job

from nccl.cases import CASES, CPU, CUDA, Case, fault_ms, fault_text
from nccl.score import Judged, Price, Seen, good_enough, judge, render
from nccl.shared_gpu import mps
from stepscope.diagnosis import build_window
from stepscope.diagnosis.engine.view import view_of
from stepscope.records.series import RunData
from stepscope.reports import summarize
from stepscope.store.load import open_run

__all__ = ["healthy_ms_of", "look_at", "main", "price_of"]

JOB = Path(__file__).resolve().parent / "job.py"
SOURCE = Path(__file__).resolve().parents[2] / "src"
MEASURED = "measured.json"
STRETCH = 10
"""Steps whose means are compared, for the error of a mean over many …"""
FIRST_MEASURED, SETTLED, MOST_CLEAN = 30, 10, 200
"""… from here on, and so long after the fault's end: as job.py measures."""
TIMEOUT_S = 300.0
"""Of one job, its wait at the gate included."""
NOT_KEPT = ("logs", "report.html", "summary.txt")
CLEARED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")

Row = dict[str, Any]
"""Of one case in ``measured.json``: the fault, its steps, and what the job measured."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nccl.league", description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--only", metavar="GLOB", help="cases by name, such as 'tp/*,*/late-*', and the healthy runs that they need")
    add("--list", action="store_true", help="print the cases and exit")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: over gloo, to try the runner")
    add("--jobs", type=int, default=3, help="jobs that start up at the same time (default: %(default)s)")
    add("--no-mps", action="store_true", help="let ranks share a GPU in time slices")
    add("--steps", type=int, help="with a fault that lasts all the time (default: 200; cpu: 60)")
    add("--minutes", type=float, help="start no case after so many minutes")
    add("--keep", type=Path, metavar="DIR", help="keep runs and figures there, and run only what is not there yet")
    add("--fresh", action="store_true", help="with --keep: run again what is there")
    add("--rejudge", type=Path, metavar="DIR", help="run nothing; judge what --keep kept there")
    baseline = (
        "steps without the fault: of the same job, or of healthy runs of the configuration (default: %(default)s)"
    )
    add("--baseline", choices=("same", "healthy"), default="same", help=baseline)
    add("--json", type=Path, metavar="FILE", help="write every result there")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    cases = _chosen(args.only)
    if args.list:
        for case in cases:
            print(f"{case.name:32} {fault_text(case, case.size, CUDA)}")
        return 0
    if not cases:
        print(f"nccl.league: no case is called {args.only}", file=sys.stderr)
        return 2
    if args.rejudge:
        return _report(args.rejudge, cases, args)
    about = machine()
    if args.device == "cuda" and about["versions"]["nccl"] is None:
        print("nccl.league: torch finds no GPU here; --device cpu tries the runner", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nccl-league-")))
        ranks = max(case.ranks for case in cases)
        wanted = args.device == "cuda" and not args.no_mps
        environment, words = stack.enter_context(mps(ranks=ranks, wanted=wanted))
        print(f"{len(cases)} cases, {words}", file=sys.stderr)
        _League(cases, folder, args, environment, {**about, "mps": bool(environment), "sharing": words}).play()
        return _report(folder, cases, args)


def _chosen(only: str | None) -> list[Case]:
    """The cases that match, and the healthy ones of their configurations: a price needs them."""
    patterns = (only or "*").split(",")
    found = {case.name for case in CASES if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)}
    configurations = {case.configuration for case in CASES if case.name in found}
    return [case for case in CASES if case.name in found or (case.healthy and case.configuration in configurations)]


# -- running --------------------------------------------------------------------------------------------------------


class _League:
    """Runs the cases that have no result yet, and saves each result as it comes."""

    def __init__(
        self,
        cases: Sequence[Case],
        folder: Path,
        args: argparse.Namespace,
        environment: Mapping[str, str],
        about: Mapping[str, Any],
    ) -> None:
        self._cases, self._folder, self._args = cases, folder, args
        lengths = CUDA if args.device == "cuda" else CPU
        self._lengths = replace(lengths, steps=args.steps) if args.steps else lengths
        path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("STEPSCOPE") and name not in CLEARED
        }
        self._environment = {**kept, **environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._about = about
        self._rows: dict[str, Row] = {}
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._began_s = time.monotonic()

    def play(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if (self._folder / MEASURED).exists():
            self._rows = json.loads((self._folder / MEASURED).read_text())["cases"]
        missing = [
            case
            for case in self._cases
            if self._args.fresh or self._rows.get(case.name, {"problem": "not run"})["problem"]
        ]
        for case in missing:
            self._rows.pop(case.name, None)
        futures: dict[str, Future[None]] = {}
        with ThreadPoolExecutor(self._args.jobs) as pool:
            try:
                # Healthy ones come first, and a fault waits for those of its configuration: they say how long it lasts.
                for case in sorted(missing, key=lambda each: not each.healthy):
                    before = [
                        futures[each.name]
                        for each in missing
                        if each.healthy and not case.healthy and each.configuration == case.configuration
                    ]
                    futures[case.name] = pool.submit(self._play, case, before)
                for future in futures.values():
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._end()
                raise

    def _play(self, case: Case, before: Sequence[Future[None]]) -> None:
        for future in before:
            future.result()
        minutes = (time.monotonic() - self._began_s) / 60
        if self._args.minutes is not None and minutes > self._args.minutes:
            return
        healthy_ms = healthy_ms_of(self._rows, case)
        row: Row
        if not case.healthy and healthy_ms is None:
            row = {"problem": "no healthy run of its configuration"}
        else:
            row = self._run(case, fault_ms(case, healthy_ms or 0.0))
        with self._lock:
            self._rows[case.name] = row
            self._save()
            measured = {name: span["step_ms"] for name, span in row.get("measured", {}).items()}
            told = row["problem"] or " ".join(f"{name} {ms:.2f} ms" for name, ms in measured.items())
            seconds = time.monotonic() - self._began_s
            print(f"[{seconds:4.0f} s] {case.name} {row.get('fault', '')}: {told}", file=sys.stderr, flush=True)

    def _run(self, case: Case, ms: float) -> Row:
        name = case.name.replace("/", "-")
        runs = self._folder / "runs"
        shutil.rmtree(runs / name, ignore_errors=True)
        out, log = self._folder / f"{name}.json", self._folder / f"{name}.log"
        out.unlink(missing_ok=True)
        long = self._lengths
        steps = long.late_steps if case.late else long.steps
        text = fault_text(case, ms, long)
        command = [
            *(sys.executable, "-m", "stepscope", "run", "--quiet", "--no-html", "--dir", str(runs), "--name", name),
            # Waiting at the gate is no hang.
            *("--hang-after", str(TIMEOUT_S)),
            *("--nproc-per-node", str(case.ranks), str(JOB)),
            *("--strategy", case.strategy, "--device", self._args.device, "--fault", text),
            *("--steps", str(steps), "--clean", str(0 if case.healthy else long.clean), "--warm", str(long.warm)),
            *("--gate", str((self._folder / "gate").resolve()), "--out", str(out.resolve())),
        ]
        began_s = time.monotonic()
        problem = self._wait(command, log)
        row: Row = {
            "problem": problem,
            "fault": text,
            "fault_ms": ms,
            "from": long.late_from if case.late else 0,
            "steps": steps,
            "seconds": round(time.monotonic() - began_s, 1),
        }
        if not problem:
            row["measured"] = json.loads(out.read_text())
            log.unlink()
            for unwanted in NOT_KEPT:
                shutil.rmtree(runs / name / unwanted, ignore_errors=True)
                with contextlib.suppress(OSError):
                    (runs / name / unwanted).unlink()
        out.unlink(missing_ok=True)
        return row

    def _wait(self, command: Sequence[str], log: Path) -> str:
        """Empty, or why there is no result."""
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            with self._lock:
                self._running.add(process)
            try:
                code = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                end_job(process)
                return f"no end after {TIMEOUT_S:g} s"
            finally:
                with self._lock:
                    self._running.discard(process)
        if not code:
            return ""
        lines = log.read_text(errors="replace").strip().splitlines() or [""]
        error = next((line for line in lines if "Error" in line), lines[-1])
        return f"exit code {code}: {error.strip()[:200]} ({log.name})"

    def _end(self) -> None:
        with self._lock:
            running = list(self._running)
        for process in running:
            end_job(process)

    def _save(self) -> None:
        """As a whole or not at all: the league may be stopped at any time."""
        document = {"schema": 1, **self._about, "device": self._args.device, "cases": self._rows}
        fresh = self._folder / f"{MEASURED}.new"
        fresh.write_text(json.dumps(document, indent=1) + "\n")
        fresh.replace(self._folder / MEASURED)


# -- judging --------------------------------------------------------------------------------------------------------


def _report(folder: Path, cases: Sequence[Case], args: argparse.Namespace) -> int:
    """Judge what is kept there, and show it."""
    path = folder / MEASURED
    if not path.exists():
        print(f"nccl.league: {path} does not exist; --keep DIR makes it", file=sys.stderr)
        return 2
    document = json.loads(path.read_text())
    rows: dict[str, Row] = document.pop("cases")
    judged = [_judged(case, rows, folder, args.baseline) for case in cases if case.name in rows]
    print(render(judged))
    whose = "the same job" if args.baseline == "same" else "the healthy runs"
    print(f"{document['sharing']}; steps without the fault are those of {whose}")
    left = len(cases) - len(judged)
    if left:
        print(f"{left} cases were not run")
    right = good_enough(judged)
    if args.json:
        results = [asdict(each) for each in judged]
        args.json.write_text(json.dumps({**document, "good_enough": right, "not_run": left, "rows": results}, indent=1))
    return 0 if right and judged and (args.rejudge or not left) else 1


def _judged(case: Case, rows: Mapping[str, Row], folder: Path, baseline: str) -> Judged:
    row = rows[case.name]
    if row["problem"]:
        return Judged(name=case.name, healthy=case.healthy, right=False, problems=(row["problem"],))
    healthy_ms = healthy_ms_of(rows, case)
    run = open_run(folder / "runs" / case.name.replace("/", "-"))
    seen = look_at(run, first=row["from"], steps=row["steps"])
    price = price_of(row, healthy_ms if baseline == "healthy" else None)
    price = replace(price, error_ms=error_ms(run, row))
    return judge(case, seen, price, fault_ms=row["fault_ms"], healthy_ms=healthy_ms)


def healthy_ms_of(rows: Mapping[str, Row], case: Case) -> float | None:
    """The median step of the configuration's healthy runs, as far as they have run."""
    found = [
        rows[each.name]["measured"]["with"]["step_ms"]
        for each in CASES
        if each.healthy and each.configuration == case.configuration and "measured" in rows.get(each.name, {})
    ]
    return statistics.median(found) if found else None


def price_of(row: Row, healthy_ms: float | None) -> Price:
    """With the fault against without it: ``healthy_ms``, or else the same job's steps before and after the fault."""
    spans = row["measured"]
    clean = [spans[name] for name in ("before", "after") if name in spans]
    without_ms = spans["with"]["step_ms"]
    if healthy_ms is not None:
        without_ms = healthy_ms
    elif clean:
        without_ms = sum(span["step_ms"] * span["steps"] for span in clean) / sum(span["steps"] for span in clean)
    return Price(with_ms=spans["with"]["step_ms"], without_ms=without_ms)


def error_ms(run: RunData, row: Row) -> float:
    """The standard error of the difference between steps with and without the fault: from means over some steps each.

    Steps are not independent of each other, stretches of them nearly are.
    """
    walls = np.mean([series.steps["wall_ns"][: row["steps"] + SETTLED + MOST_CLEAN] for series in run.ranks], axis=0)
    hit, after = walls[max(FIRST_MEASURED, row["from"]) : row["steps"]], walls[row["steps"] + SETTLED :]
    errors = [_error_of_mean(part / 1e6) for part in (hit, after) if len(part) >= 2 * STRETCH]
    return float(np.sqrt(np.sum(np.square(errors))))


def _error_of_mean(steps_ms: Any) -> float:
    means = [float(part.mean()) for part in np.array_split(steps_ms, len(steps_ms) // STRETCH)]
    return float(statistics.stdev(means) / len(means) ** 0.5)


def look_at(run: RunData, *, first: int, steps: int) -> Seen:
    """Diagnose a run's first steps, as if it had ended with them; the fault began at step ``first``.

    The steps after those are without the fault and only there to be measured.
    """
    last = max((int(series.steps["step"][-1]) for series in run.ranks if len(series.steps)), default=-1)
    if last >= steps:
        part = cut(run, steps - 1)
        ranks = [
            replace(each, state=whole.state, ended_wall_ns=whole.ended_wall_ns)
            for each, whole in zip(part.ranks, run.ranks, strict=True)
        ]
        run = replace(part, meta=run.meta, ranks=tuple(ranks))
    view = view_of(build_window(run))
    hit = float(np.mean(view.steps >= first)) if len(view.steps) else 1.0
    return Seen(findings=summarize(run, logs=("main.log",))["findings"], hit_share=hit)


if __name__ == "__main__":
    sys.exit(main())
