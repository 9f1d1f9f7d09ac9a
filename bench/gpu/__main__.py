"""``python -m gpu``: run every case bare and under Stepscope, and print what differs.

The exit code is 1 when anything differs, and 2 when the matrix cannot be run here.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.cases import CASES, Case

if TYPE_CHECKING:
    from gpu.compare import Comparison
    from gpu.runner import Outcome

__all__ = ["main"]

NEEDED = (
    *("torch", "numpy", "psutil", "duckdb", "msgspec", "zlib_ng", "zstandard"),
    *("starlette", "uvicorn", "httptools", "uvloop", "cryptography", "pynvml", "stepscope"),
)
"""What Stepscope and the runner import; the live view's packages are not needed."""
PACKAGES = ("torch", "transformers", "accelerate", "pytorch-lightning", "numpy", "duckdb")
TAIL_LINES = 25


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", metavar="GLOB", help="cases by name, such as 'ddp/*' or 'plain/eval,hf/*'")
    parser.add_argument("--subset", action="store_true", help="the cases that together take 8 minutes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: over gloo, to try the runner")
    parser.add_argument("--jobs", type=int, default=4, help="cases that run at the same time (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="recorded runs of each case (default: 1)")
    parser.add_argument(
        "--bare", type=int, default=4, metavar="N", help="bare runs to compare with when losses differ (default: 4)"
    )
    parser.add_argument("--layers", choices=("off", "sampled", "every"), help="as of stepscope run")
    parser.add_argument(
        "--hooks", choices=("default", "python", "c", "both"), default="default", help="both: a recorded run with each"
    )
    parser.add_argument("--minutes", type=float, help="start no case after so many minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep output and runs there")
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    return parser


@dataclass(frozen=True, kw_only=True)
class Row:
    """One recorded run of a case beside its bare run, as it is shown and saved."""

    name: str
    ranks: int
    result: str
    """ok, DIFFERS, BARE FAILS, unclear, or not run."""
    note: str = ""
    bare_code: int | None = None
    our_code: int | None = None
    losses: int = 0
    losses_same: bool | None = None
    their_steps: str = ""
    our_steps: str = ""
    added: tuple[str, ...] = ()
    own_lines: tuple[str, ...] = ()
    bare_s: float = 0.0
    our_s: float = 0.0
    verdict: str = ""
    title: str = ""
    status: str = ""
    differences: tuple[str, ...] = ()
    details: str = ""
    """The tails of both runs, where they differ."""

    @property
    def failed(self) -> bool:
        return self.result in ("DIFFERS", "BARE FAILS")


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    cases = _chosen(args.only, subset=args.subset)
    if args.list:
        for case in cases:
            print(f"{case.name:26} {case.ranks or 1}  {case.script} {' '.join(case.args)}")
        return 0
    problem = f"no case is called {args.only}" if not cases else ""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        problem = f"{sys.executable} cannot import {', '.join(missing)}; GPU_PYTHON=… names another interpreter"
    about = machine() if not problem else {}
    if about and args.device == "cuda" and about["versions"]["nccl"] is None:
        problem = "torch finds no GPU here; --device cpu tries the runner"
    if problem:
        print(f"gpu: {problem}", file=sys.stderr)
        return 2
    matrix = _Matrix(args, cases, about)
    try:
        if args.keep:
            rows = matrix.play(args.keep)
        else:
            with tempfile.TemporaryDirectory(prefix="stepscope-gpu-", ignore_cleanup_errors=True) as folder:
                rows = matrix.play(Path(folder))
    except KeyboardInterrupt:
        return 130
    print(render(rows))
    return 1 if any(row.failed for row in rows) else 0


def _chosen(only: str | None, *, subset: bool) -> list[Case]:
    patterns = only.split(",") if only else ["*"]
    return [
        case
        for case in CASES
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns) and (case.subset or not subset)
    ]


class _Matrix:
    """Runs the cases, several at a time, and saves the results as they come."""

    def __init__(self, args: argparse.Namespace, cases: Sequence[Case], about: dict[str, Any]) -> None:
        self._args = args
        self._cases = cases
        self._began_s = time.monotonic()
        self._rows: dict[str, list[Row]] = {}
        self._lock = threading.Lock()
        self._about = about

    def play(self, folder: Path) -> list[Row]:
        """All rows, in the order of the cases."""
        by_length = sorted(self._cases, key=lambda case: not case.slow)
        with ThreadPoolExecutor(self._args.jobs) as pool:
            try:
                for future in [pool.submit(self._play, case, folder) for case in by_length]:
                    future.result()
            except BaseException:
                from gpu.runner import end_processes

                pool.shutdown(wait=False, cancel_futures=True)
                end_processes()
                raise
        return self._sorted()

    def _play(self, case: Case, folder: Path) -> None:
        reason = self._why_not(case)
        rows = [not_run(case, reason)] if reason else play_case(case, self._args, folder / case.name)
        with self._lock:
            self._rows[case.name] = rows
            for row in rows:
                told = row.note or "; ".join(row.differences)
                times = f" {row.bare_s:.0f} s / {row.our_s:.0f} s" if row.our_s else ""
                print(f"[{len(self._rows)}/{len(self._cases)}] {row.name}: {row.result}{times} {told}", file=sys.stderr)
            if self._args.json:
                self._save(self._args.json)

    def _why_not(self, case: Case) -> str:
        minutes = (time.monotonic() - self._began_s) / 60
        if self._args.minutes is not None and minutes > self._args.minutes:
            return f"out of time after {self._args.minutes:g} minutes"
        if self._args.device == "cpu" and case.cuda_only:
            return f"no GPU: {case.cuda_only}"
        missing = [name for name in case.needs if importlib.util.find_spec(name) is None]
        return f"{missing[0]} is not installed" if missing else ""

    def _sorted(self) -> list[Row]:
        return [row for case in self._cases for row in self._rows.get(case.name, [])]

    def _save(self, path: Path) -> None:
        """As a whole or not at all: the matrix may be stopped at any time."""
        seconds = round(time.monotonic() - self._began_s, 1)
        rows = [asdict(row) for row in self._sorted()]
        document = {"schema": 1, **self._about, "seconds": seconds, "counts": counts(self._sorted()), "rows": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(document, indent=1) + "\n")
        fresh.replace(path)


def not_run(case: Case, reason: str) -> Row:
    return Row(name=case.name, ranks=case.ranks or 1, result="not run", note=reason)


def play_case(case: Case, args: argparse.Namespace, folder: Path) -> list[Row]:
    """One bare run, ``--repeat`` recorded ones, and more bare ones when they differ.

    A job whose losses differ in one run of five looks as if recording changed them: so several bare runs are compared
    with each other before a difference counts.
    """
    # What these import is known to be here by now.
    from gpu.compare import compare, why_broken
    from gpu.runner import run_case

    def run(name: str, *, recorded: bool, hooks: str = "default") -> Outcome:
        place = folder / name
        return run_case(case, device=args.device, folder=place, recorded=recorded, layers=args.layers, hooks=hooks)

    bare = run("bare", recorded=False)
    broken = why_broken(case, bare)
    if broken:
        details = _tail("bare", bare)
        seconds = round(bare.seconds, 1)
        failed = Row(name=case.name, ranks=case.ranks or 1, result="BARE FAILS", note=broken, details=details)
        return [replace(failed, bare_code=bare.code, bare_s=seconds)]
    others: list[Outcome] = []
    rows = []
    kinds = ("python", "c") if args.hooks == "both" else (args.hooks,)
    for number, hooks in itertools.product(range(args.repeat), kinds):
        recorded = run(f"recorded{number}-{hooks}", recorded=True, hooks=hooks)
        found = compare(case, bare, recorded)
        while (found.added or not found.losses_same) and not found.unstable and len(others) < args.bare - 1:
            others.append(run(f"bare{len(others) + 1}", recorded=False))
            found = compare(case, bare, recorded, others)
        if others:
            found = compare(case, bare, recorded, others)
        name = case.name if args.repeat == 1 else f"{case.name}#{number}"
        name += f" ({hooks})" if args.hooks == "both" else ""
        rows.append(_row(case, name, bare, recorded, found))
    return rows


def _row(case: Case, name: str, bare: Outcome, recorded: Outcome, found: Comparison) -> Row:
    from gpu.compare import steps_of
    from gpu.runner import Recorded

    seen = recorded.recorded or Recorded()
    return Row(
        name=name,
        ranks=case.ranks or 1,
        result=found.result,
        note=found.unstable,
        bare_code=bare.code,
        our_code=recorded.code,
        losses=found.losses,
        losses_same=None if found.unstable else found.losses_same,
        their_steps=_listed(steps_of(recorded.stdout)),
        our_steps=_listed(seen.steps),
        added=tuple(found.added),
        own_lines=tuple(found.own_lines),
        bare_s=round(bare.seconds, 1),
        our_s=round(recorded.seconds, 1),
        verdict=seen.verdict,
        title=seen.title,
        status=seen.status,
        differences=tuple(found.differences),
        details="" if found.result == "ok" else f"{_tail('bare', bare)}\n{_tail('recorded', recorded)}",
    )


def _listed(steps: dict[int, int]) -> str:
    """One number where all ranks have the same."""
    return "/".join(map(str, dict.fromkeys(steps[rank] for rank in sorted(steps))))


def _tail(name: str, outcome: Outcome) -> str:
    lines = [f"--- {name}: {' '.join(outcome.command)}"]
    for stream, text in (("stderr", outcome.stderr), ("stdout", outcome.stdout)):
        lines += [f"--- {name}, {stream}:", *(line[:300] for line in text.splitlines()[-TAIL_LINES:])]
    return "\n".join(lines)


def counts(rows: Sequence[Row]) -> dict[str, int]:
    return {
        "passed": sum(row.result == "ok" for row in rows),
        "failed": sum(row.failed for row in rows),
        "skipped": sum(row.result == "not run" for row in rows),
        "unclear": sum(row.result == "unclear" for row in rows),
    }


def render(rows: Sequence[Row]) -> str:
    """What differs, then the table, then the counts."""
    parts = []
    for row in rows:
        if row.result in ("ok", "not run"):
            continue
        parts.append(f"=== {row.name}: {row.result}. {row.note}")
        parts += [f"  - {difference}" for difference in row.differences]
        parts += [f"  + {line[:300]}" for line in row.added[:TAIL_LINES]]
        parts += [row.details, ""]
    heading = ("case", "ranks", "exit", "losses", "steps", "stderr", "bare s", "ours s", "ratio", "verdict", "result")
    table = [heading, *map(_cells, rows)]
    widths = [max(len(line[at]) for line in table) for at in range(len(heading))]
    parts += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    found = counts(rows)
    unclear = f", {found['unclear']} unclear" if found["unclear"] else ""
    parts.append(f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped{unclear}")
    return "\n".join(parts)


def _cells(row: Row) -> tuple[str, ...]:
    if row.result == "not run":
        return (row.name, str(row.ranks), *([""] * 8), f"not run: {row.note}")
    if row.result == "BARE FAILS":
        return (row.name, str(row.ranks), str(row.bare_code), *([""] * 7), f"{row.result}: {row.note}")
    same = {True: "identical", False: "DIFFER", None: "?"}[row.losses_same]
    return (
        row.name,
        str(row.ranks),
        _both(row.bare_code, row.our_code),
        f"{row.losses} {same}",
        _both(row.their_steps or "–", row.our_steps or "–"),
        f"+{len(row.added)}" if row.added else "same",
        f"{row.bare_s:.1f}",
        f"{row.our_s:.1f}",
        f"{row.our_s / row.bare_s:.2f}" if row.bare_s else "–",
        row.verdict or "–",
        row.result,
    )


def _both(theirs: object, ours: object) -> str:
    return f"{'killed' if theirs is None else theirs} / {'killed' if ours is None else ours}"


def machine() -> dict[str, Any]:
    """Date, versions and the GPU."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions |= _of_torch()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "arch": platform.machine(),
        "versions": versions,
        "gpus": _gpus(),
    }


def _of_torch() -> dict[str, str | None]:
    """Asked in a process of its own, which may load CUDA."""
    code = (
        "import json, torch\n"
        "nccl = '.'.join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None\n"
        "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda, 'nccl': nccl}))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _gpus() -> list[str]:
    """Name, driver and memory of each; none where there is no nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()


if __name__ == "__main__":
    sys.exit(main())
