"""From a fault to the finding that names its operator or line, in a job that nobody watches.

    python bench/captures.py                       # three times each: ten minutes
    python bench/captures.py --only operator --repeats 1
    python bench/captures.py --device cuda         # NCCL; two ranks may share a GPU

Four gloo ranks on this machine, or two on NCCL; one rank becomes slow in backward (matrix products) or in forward (a
line).  The times count from the fault, as the job wrote it down, to the wall-clock time of the line in
``finding-history.jsonl``: of the finding, and of its change to one that a capture explains; between them, to what the
capture's record says then.  Right is the rank, and the operator, kernel or line at fault.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import SOURCE
from job_process import end_job
from nccl.shared_gpu import mps

__all__ = ["Outcome", "main", "run_once"]

JOB = Path(__file__).resolve().parent / "jobs" / "capture_job.py"
RANKS = {"cpu": 4, "cuda": 2}
SLOW = {"cpu": 2, "cuda": 1}
EVERY_S = 0.1
PASSED = ("ordered", "profiling", "delivering", "analyzing", "done")
"""What is printed of the states of a capture, with the time when each was first seen."""
EXPECTED = {
    "cpu": {"operator": ("operator", "aten::mm"), "line": ("line", "sleep")},
    "cuda": {"operator": ("kernel", "gemm"), "line": ("line", "sleep")},
}
"""What differs, and a part of its name."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    fault: str
    device: str
    shown_s: float | None
    """From the fault to the finding; None: it was not shown."""
    deep_s: float | None
    """To the finding that a capture explains."""
    capture: dict[str, Any]
    """What the capture says, as in the finding's evidence."""
    ranks: tuple[int, ...]
    """Those that were captured."""
    title: str
    passed_s: dict[str, float]
    """From the fault to each state of the capture."""

    @property
    def right(self) -> bool:
        line = str(self.capture.get("line", ""))
        what, part = EXPECTED[self.device][self.fault]
        named = self.capture.get("what") == what and part in str(self.capture.get("name"))
        return named and self.capture.get("rank") == SLOW[self.device] and line == fault_line(self.fault)


def fault_line(fault: str) -> str:
    """``capture_job.py:40``: where the profiler places the function at fault."""
    lines = JOB.read_text().splitlines()
    number = next(at for at, text in enumerate(lines, 1) if text.endswith(f"# fault: {fault}"))
    # A decorated function begins at its decorator.
    return f"{JOB.name}:{number - lines[number - 2].strip().startswith('@')}"


def run_once(fault: str, device: str, folder: Path, variables: Mapping[str, str], limit_s: float) -> Outcome:
    marks = folder / "marks"
    run_dir = folder / "runs" / fault
    slow = SLOW[device]
    with _job(folder, fault, device, marks, variables):
        deadline_s = time.monotonic() + limit_s
        lines: list[dict[str, Any]] = []
        passed_s: dict[str, float] = {}
        while time.monotonic() < deadline_s and _first(lines, slow, deep=True) is None:
            time.sleep(EVERY_S)
            lines = _lines(run_dir / "finding-history.jsonl")
            for path in run_dir.glob("captures/*/capture.json"):
                passed_s.setdefault(_document(path)["state"], time.time())
    shown, deep = _first(lines, slow, deep=False), _first(lines, slow, deep=True)
    began_s = json.loads(marks.read_text())["wall_s"] if marks.exists() else float("nan")
    capture = deep["finding"]["evidence"]["capture"] if deep else {}
    record = _document(run_dir / "captures" / str(capture.get("id", "")) / "capture.json")
    return Outcome(
        fault=fault,
        device=device,
        shown_s=shown["wall_ns"] / 1e9 - began_s if shown else None,
        deep_s=deep["wall_ns"] / 1e9 - began_s if deep else None,
        capture=capture,
        ranks=tuple(record.get("order", {}).get("ranks", ())),
        title=(deep or shown or {"finding": {"title": ""}})["finding"]["title"],
        passed_s={state: at_s - began_s for state, at_s in passed_s.items()},
    )


@contextlib.contextmanager
def _job(folder: Path, fault: str, device: str, marks: Path, variables: Mapping[str, str]) -> Iterator[None]:
    words = [sys.executable, "-m", "stepscope", "run", "--quiet", "--dir", str(folder / "runs"), "--name", fault]
    words += ["--capture", "4"] if device == "cuda" else []  # a job on GPUs is captured only if that is chosen
    words += ["--nproc-per-node", str(RANKS[device]), str(JOB), "--fault", fault, "--marks", str(marks)]
    words += ["--rank", str(SLOW[device]), "--device", device]
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **variables, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as out:
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            yield
        finally:
            end_job(process)


def _first(lines: list[dict[str, Any]], slow: int, *, deep: bool) -> dict[str, Any] | None:
    """The first line about the slow rank; ``deep``: that a capture explains."""
    for line in lines:
        finding = line.get("finding") or {}
        if slow in finding.get("ranks", ()) and (not deep or "what" in finding["evidence"].get("capture", {})):
            return line
    return None


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # the last may be cut off
            found.append(json.loads(line))
    return found


def _document(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="operator,line")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one job (default: %(default)g)")
    args = parser.parse_args()
    outcomes = []
    heads = ("fault", "finding after", *PASSED, "deep finding after", "captured", "names", "")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    for fault in args.only.split(","):
        for _ in range(args.repeats):
            # A service for each job: the next one could not start beside clients of MPS that were killed.
            sharing = mps(ranks=RANKS[args.device], wanted=args.device == "cuda")
            with tempfile.TemporaryDirectory(prefix="captures-") as folder, sharing as (variables, _):
                outcome = run_once(fault, args.device, Path(folder), variables, args.limit)
            outcomes.append(outcome)
            states = (outcome.passed_s.get(state) for state in PASSED)
            times = ("–" if each is None else f"{each:.1f} s" for each in (outcome.shown_s, *states, outcome.deep_s))
            place = f"{outcome.capture.get('name', '–')}, {outcome.capture.get('line', '–')}"
            right = "right" if outcome.right else f"WRONG: {outcome.title}"
            print("|", " | ".join((fault, *times, str(outcome.ranks), place, right)), "|", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")
    return 0 if all(outcome.right for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
