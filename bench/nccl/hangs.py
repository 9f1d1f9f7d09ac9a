"""Every way in which a job on NCCL stops, and healthy jobs that look like it: what Stepscope says, and when.

    PYTHONPATH=src:bench python -m nccl.hangs --jobs 4 --json out.json --keep DIR
    PYTHONPATH=src:bench python -m nccl.hangs --device cpu --only sleep,skip      # on gloo

Each case is ``nccl/hang_job.py`` under ``stepscope run --on-hang abort``.  The time is that from the fault, as the job
itself wrote it down, to the verdict; of a rank that dies, to the summary.  ``--keep`` gets an archive per case with
what tests replay: the evidence that the watchdog gathered, the dumps of the Flight Recorders, the events, the summary.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hang_cases import Told, told
from job_process import finish_job

JOB = Path(__file__).with_name("hang_job.py")
LIMIT_S = 150.0
LOG_BYTES = 64 << 10
MISSING, MISMATCH = "hang_missing_collective", "hang_mismatch"
KEPT = ("hangs", "flight", "events.jsonl", "summary.json", "findings.json", "errors")
NO_DEVICE = "needs a GPU"


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    do: str
    kinds: tuple[str, ...] = ()
    """Each of them is right; empty: it is no hang."""
    on_host: tuple[str, ...] = ()
    """… on gloo, where that is something else."""
    rank: int = 1
    """Of the fault, which is to be named."""
    line: bool = True
    """Whether the line can be told: a process that is stopped or gone says nothing."""
    ranks: int = 2
    args: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    within_s: float = 20.0
    cuda_only: bool = False
    says: str = ""
    """What the verdict has to mention."""

    @property
    def calm(self) -> bool:
        return not self.kinds


FSDP = ("--strategy", "fsdp2")
CASES: tuple[Case, ...] = (
    Case(name="endless_kernel", do="kernel", kinds=("hang_device",), cuda_only=True, within_s=80.0, line=False),
    Case(
        name="nccl_timeout",
        do="sleep",
        kinds=(MISSING,),
        args=("--timeout", "15"),
        options=("--hang-after", "100"),
        within_s=30.0,
        cuda_only=True,
        says="NCCL's watchdog",
    ),
    Case(
        name="nccl_abort",
        do="sleep",
        kinds=(MISSING,),
        args=("--timeout", "15"),
        options=("--hang-after", "0"),
        within_s=90.0,
        line=False,
        cuda_only=True,
        says="NCCL's watchdog",
    ),
    Case(name="long_kernel", do="long_kernel", cuda_only=True),
    Case(name="slow_checkpoint", do="checkpoint", rank=0),
    Case(name="slow_evaluation", do="evaluate", rank=0),
    Case(name="late_init", do="late_init"),
    Case(name="skipped", do="skip", kinds=(MISSING, MISMATCH), line=False),
    # On NCCL a sum of two sizes ends, with wrong numbers, and so does the job; gloo waits, or aborts.
    Case(name="other_size", do="size", on_host=(MISMATCH,)),
    # NCCL ends this one, too, and stands still a hundred calls later, when the host has long left the line.
    Case(name="other_op", do="op", kinds=(MISMATCH,), on_host=(MISMATCH, MISSING), line=False),
    Case(name="recv", do="recv", kinds=(MISSING,)),
    Case(name="sleep", do="sleep", kinds=(MISSING,)),
    Case(name="sleep_4", do="sleep", kinds=(MISSING,), ranks=4, rank=2),
    Case(name="lock", do="lock", kinds=(MISSING,)),
    Case(name="sigstop", do="stop", kinds=("hang_host",), line=False),
    Case(name="killed", do="kill", kinds=("rank_crashed",), line=False),
    Case(name="fsdp_sleep", do="sleep", kinds=(MISSING,), args=FSDP),
    Case(name="fsdp_skip", do="skip", kinds=(MISSING, MISMATCH), args=FSDP, line=False),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    case: Case
    told: Told
    text: str
    """All that the verdict says."""
    code: int | None
    seconds: float | None
    """From the fault to the verdict."""
    took_s: float
    right: bool


def run(case: Case, args: argparse.Namespace, folder: Path) -> Row:
    folder.mkdir(parents=True)
    began_s = time.monotonic()
    variables = {"STEPSCOPE_KEEP_EVIDENCE": "1", "TORCH_NCCL_ENABLE_TIMING": "0" if args.no_timing else "1"}
    code = finish_job(_command(case, args, folder), folder / "log", limit_s=LIMIT_S, variables=variables)
    run_dir = folder / "runs" / case.name
    found = told(run_dir) if run_dir.exists() else Told()
    marks = folder / "marks"
    began_ns = json.loads(marks.read_text().splitlines()[0])["wall_ns"] if marks.exists() else 0
    seconds = (found.wall_ns - began_ns) / 1e9 if found.wall_ns and began_ns else None
    text = _text(found, run_dir)
    if args.keep:
        _keep(args.keep, case, run_dir, folder / "log")
    return Row(
        case=case,
        told=found,
        text=text,
        code=code,
        seconds=seconds,
        took_s=time.monotonic() - began_s,
        right=_right(case, found, text, code, seconds),
    )


def _right(case: Case, found: Told, text: str, code: int | None, seconds: float | None) -> bool:
    if case.calm:
        return not found.kind and code == 0
    named = found.kind in case.kinds and found.culprits == (case.rank,)
    lined = not case.line or bool(set(found.at) & lines_of(case.do))
    return named and lined and case.says in text and seconds is not None and seconds <= case.within_s


def lines_of(do: str) -> set[str]:
    """Where the host of a rank that does this may stand: two lines from the mark on, or in the wait that follows."""
    lines = JOB.read_text().splitlines()
    marks = [number + 1 for number, line in enumerate(lines, 1) if line.strip() == f"# stops: {do}"]
    return {f"{JOB.name}:{number + more}" for number in marks for more in (0, 1)} | {
        f"{JOB.name}:{number}" for number, line in enumerate(lines, 1) if line.strip() == "torch.cuda.synchronize()"
    }


def _text(found: Told, run_dir: Path) -> str:
    if found.record is not None:
        return json.dumps({"title": found.title, "evidence": found.record.evidence})
    path = run_dir / "summary.json"
    return path.read_text() if path.exists() else ""


def _command(case: Case, args: argparse.Namespace, folder: Path) -> list[str]:
    stepscope = [sys.executable, "-m", "stepscope", "run", "--dir", str(folder / "runs"), "--name", case.name]
    options = ["--on-hang", "abort", *case.options, "--nproc-per-node", str(case.ranks)]
    job = [str(JOB), "--do", case.do, "--device", args.device, "--rank", str(case.rank), *case.args]
    return [*stepscope, *options, *job, "--marks", str(folder / "marks")]


def _keep(keep: Path, case: Case, run_dir: Path, log: Path) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    with tarfile.open(keep / f"{case.name}.tar.gz", "w:gz") as archive:
        for name in KEPT:
            if (run_dir / name).exists():
                archive.add(run_dir / name, arcname=f"{case.name}/{name}")
        end = log.with_name("log.end")
        end.write_bytes(log.read_bytes()[-LOG_BYTES:])
        archive.add(end, arcname=f"{case.name}/log")


def line(row: Row) -> str:
    case, found = row.case, row.told
    at = ", ".join(sorted(set(found.at))) or "–"
    ranks = ", ".join(map(str, found.culprits)) or "–"
    after = f"{row.seconds:.1f} s" if row.seconds is not None and not case.calm else "–"
    verdict = f"`{found.kind}`" if found.kind else "nothing"
    looks = f" ({found.not_hangs[-1]})" if case.calm and found.not_hangs else ""
    code = row.code if row.code is not None else f"killed after {LIMIT_S:.0f} s"
    return (
        f"| {case.name} | {case.ranks} | {verdict}{looks} | {ranks} | {at} | {after} | {code} | "
        f"{'right' if row.right else '**wrong**'} |"
    )


def as_dict(row: Row) -> dict[str, Any]:
    found = row.told
    return {
        "case": row.case.name,
        "calm": row.case.calm,
        "kind": found.kind,
        "culprits": list(found.culprits),
        "victims": list(found.victims),
        "at": list(found.at),
        "title": found.title,
        "not_hangs": list(found.not_hangs),
        "exit_code": row.code,
        "seconds": row.seconds,
        "took_s": round(row.took_s, 1),
        "right": row.right,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of cases, with commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--no-timing", action="store_true", help="without TORCH_NCCL_ENABLE_TIMING")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--keep", type=Path, help="folder for an archive per case")
    args = parser.parse_args()
    wanted = set(filter(None, args.only.split(",")))
    cases = [case for case in CASES if not wanted or case.name in wanted]
    if args.device == "cpu":
        cases = [replace(case, kinds=case.on_host or case.kinds) for case in cases if not case.cuda_only]
    saying = threading.Lock()
    print("| case | ranks | verdict | ranks named | line | after | exit code | |\n|---|---|---|---|---|---|---|---|")

    def one(case: Case, folder: Path) -> Row:
        row = run(case, args, folder / case.name)
        with saying:
            print(line(row), flush=True)
            if not row.right:
                print(f"    {row.told.title or 'nothing was said'}", flush=True)
        return row

    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stepscope-nccl-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(lambda case: one(case, Path(folder)), cases))
    took_s = time.monotonic() - began_s
    right = sum(row.right for row in rows)
    print(f"\n{right} of {len(rows)} right, in {took_s:.0f} s; {platform.machine()}, {os.cpu_count()} cores.")
    if args.json:
        args.json.write_text(json.dumps({"rows": [as_dict(row) for row in rows], "took_s": round(took_s, 1)}, indent=1))
    return 0 if right == len(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
