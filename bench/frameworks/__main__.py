"""``python -m frameworks``: run every framework with every fault under Stepscope, and hold the verdicts against them.

The exit code is 0 when enough of the faults are right and no healthy run is accused, 1 when not, and 2 when the league
cannot run here.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.util
import json
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from gpu.__main__ import machine
from job_process import finish_job
from machine_load import LOADS, machine_load

from frameworks.cases import CASES, Case, command, expected_of
from frameworks.score import Judged, good_enough, judge, render
from stepscope.reports import summarize
from stepscope.store.load import open_run

__all__ = ["main"]

LIMIT_S = 240.0
"""Of one job: many times what it takes."""
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "RAY_TRAIN_ENABLE_STATE_TRACKING": "0"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="frameworks", description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--only", metavar="GLOB", default="*", help="cases by name, such as 'hf/*,*/data-one'")
    add("--list", action="store_true", help="print the cases with what should be found, and exit")
    add("--repeats", type=int, default=1, metavar="N", help="run every case N times")
    add("--busy", action="store_true", help="run two cases at once: each is then disturbed by the other")
    add("--load", default="none", choices=LOADS, help="other programs beside every job (default: %(default)s)")
    add("--keep", type=Path, metavar="DIR", help="keep what each run printed and recorded")
    add("--rejudge", type=Path, metavar="DIR", help="run nothing; ask today's rules about what --keep kept there")
    add("--json", type=Path, metavar="FILE", help="write every result there, after each case")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    patterns = args.only.split(",")
    cases = [case for case in CASES if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]
    if args.list:
        print("\n".join(map(_described, cases)))
        return 0
    if args.rejudge:
        return _rejudge(cases, args.rejudge)
    missing = sorted({case.framework.package for case in cases if not _installed(case.framework.package)})
    if missing:
        print(f"frameworks: not installed here: {', '.join(missing)}; make frameworks installs them", file=sys.stderr)
    cases = [case for case in cases if case.framework.package not in missing]
    if not cases:
        print(f"frameworks: no case to run for {args.only}", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        kept = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="frameworks-")))
        judged = _League(cases, kept, args).play()
    print(render(judged))
    return 0 if good_enough(judged) and not missing else 1


def _rejudge(cases: Sequence[Case], kept: Path) -> int:
    judged = []
    for case in cases:
        for repeat in range(len(list(kept.glob(f"{_folder_name(case)}-*")))):
            folder = kept / f"{_folder_name(case)}-{repeat + 1}" / "runs" / "job"
            if (folder / "summary.json").exists():
                summary = summarize(open_run(folder), logs=("main.log",))
                judged.append(judge(case, summary, exit_code=summary["exit_code"]))
    print(render(judged))
    return 0 if judged and good_enough(judged) else 1


def _folder_name(case: Case) -> str:
    return case.name.replace("/", "-")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _described(case: Case) -> str:
    expected = expected_of(case)
    if expected is None:
        return f"{case.name:28} nobody is accused"
    who = "nobody" if case.culprit is None else f"rank {case.culprit}"
    return f"{case.name:28} {' or '.join(sorted(expected.kinds))}, {who}: {expected.why}"


class _League:
    """Runs the cases and reports each as it ends."""

    def __init__(self, cases: Sequence[Case], folder: Path, args: argparse.Namespace) -> None:
        self._folder, self._args = folder, args
        self._cases = [(case, repeat) for repeat in range(args.repeats) for case in cases]
        self._done: dict[tuple[str, int], Judged] = {}
        self._lock = threading.Lock()

    def play(self) -> list[Judged]:
        with ThreadPoolExecutor(2 if self._args.busy else 1) as pool:
            list(pool.map(self._play, self._cases))
        return self._judged()

    def _play(self, what: tuple[Case, int]) -> None:
        case, repeat = what
        with machine_load(self._args.load):
            row = run(case, self._folder / f"{_folder_name(case)}-{repeat + 1}")
        if self._args.repeats > 1:
            row = replace(row, name=f"{row.name}#{repeat + 1}")
        with self._lock:
            self._done[case.name, repeat] = row
            told = "right" if row.right else f"{', '.join(row.problems)}: {row.title}"
            print(f"[{len(self._done)}/{len(self._cases)}] {row.name} ({row.seconds:.0f} s): {told}", file=sys.stderr)
            if self._args.json:
                self._save()

    def _judged(self) -> list[Judged]:
        """In the order of the matrix."""
        order = {case.name: number for number, case in enumerate(CASES)}
        return [self._done[key] for key in sorted(self._done, key=lambda key: (order[key[0]], key[1]))]

    def _save(self) -> None:
        judged = self._judged()
        document = {
            "schema": 1,
            **machine(),
            "host": platform.node(),
            "busy": self._args.busy,
            "load": self._args.load,
            "good_enough": good_enough(judged),
            "rows": [{**asdict(each), "right": each.right} for each in judged],
        }
        self._args.json.write_text(json.dumps(document, indent=1) + "\n")


def run(case: Case, folder: Path) -> Judged:
    """Run a case in ``folder``, which will hold ``runs/job`` and what was printed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [sys.executable, "-m", "stepscope", "run", "--quiet", "--no-html", "--name", "job", *command(case)]
    began_s = time.monotonic()
    code = finish_job(words, folder / "log", limit_s=LIMIT_S, variables=QUIET, cwd=folder)
    seconds = time.monotonic() - began_s
    path = folder / "runs" / "job" / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    return judge(case, summary, exit_code=code, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main())
