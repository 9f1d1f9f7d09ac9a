"""Every fault that stops a job, injected into real ones, and healthy jobs that look like it: who is named, and when.

    python bench/hangs.py                        # all, with the threshold that users have: half an hour
    python bench/hangs.py --only skip,stop,evaluate --hang-after 2

The time is that from the fault, as the job itself wrote it down, to the verdict; of a rank that dies, to the summary.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hang_cases import CALM, FAULTS, CalmCase, FaultCase, Told, command, line_of, told
from job_process import finish_job

TIMEOUT_S = 240.0
GROUP_BYTES = 256 << 20
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Row:
    case: FaultCase | CalmCase
    told: Told
    code: int | None
    seconds: float | None
    """From the fault to the verdict."""
    skipped: str = ""

    @property
    def right(self) -> bool:
        case, told = self.case, self.told
        if isinstance(case, CalmCase):
            return not told.kind and self.code == 0
        blamed = told.kind in case.kinds and told.culprits == case.culprits
        waiting = case.dies or len(case.culprits) == case.ranks or told.victims == case.victims
        return blamed and waiting and (case.dies or not case.line or line_of(case.fault) in told.at)


def run(case: FaultCase | CalmCase, *, after_s: float | None, keep: Path) -> Row:
    folder = keep / case.id
    folder.mkdir(parents=True)
    options = ["--on-hang", "abort"] + (["--hang-after", str(after_s)] if after_s is not None else [])
    long_s = case.seconds if isinstance(case, CalmCase) else None
    words = command(case, folder=folder, options=options, seconds=long_s)
    with limited_group(isinstance(case, FaultCase) and case.fault == "kernel_memory") as group:
        if group == Path():
            return Row(case=case, told=Told(), code=None, seconds=None, skipped="no right to make a control group")
        words += ["--cgroup", str(group)] if group else []
        code = finish_job(words, folder / "log", limit_s=TIMEOUT_S)
    found = told(folder / "runs" / case.id)
    marks = folder / "marks"
    began_ns = json.loads(marks.read_text().splitlines()[0])["wall_ns"] if marks.exists() else 0
    seconds = (found.wall_ns - began_ns) / 1e9 if found.wall_ns and began_ns else None
    return Row(case=case, told=found, code=code, seconds=seconds)


@contextmanager
def limited_group(wanted: bool) -> Iterator[Path | None]:
    """A control group that may have little memory; an empty path when none can be made here."""
    if not wanted:
        yield None
        return
    try:
        group = _make_group()
    except OSError:
        yield Path()
        return
    try:
        yield group
    finally:
        group.rmdir()


def _make_group() -> Path:
    """By whichever version of control groups rules memory here; OSError when we may not."""
    name = f"stepscope-{os.getpid()}"
    if (V1 / "memory.limit_in_bytes").exists():
        group, limit = V1 / name, "memory.limit_in_bytes"
    else:
        (V2 / "cgroup.subtree_control").write_text("+memory")
        group, limit = V2 / name, "memory.max"
    group.mkdir()
    try:
        (group / limit).write_text(str(GROUP_BYTES))
    except OSError:
        group.rmdir()
        raise
    return group


def fault_line(row: Row) -> str:
    case, found = row.case, row.told
    assert isinstance(case, FaultCase)
    if row.skipped:
        return f"| {case.title} | {case.ranks} | {row.skipped} | | | |"
    ranks = ", ".join(map(str, found.culprits)) or "–"
    seconds = f"{row.seconds:.1f} s" if row.seconds is not None else "–"
    at = ", ".join(sorted(set(found.at))) or "–"
    verdict = f"`{found.kind}`" if found.kind else "nothing"
    return (
        f"| {case.title} | {case.ranks} | {verdict} | {ranks} | {at} | {seconds} |{'' if row.right else ' **wrong**'}"
    )


def calm_line(row: Row) -> str:
    case, found = row.case, row.told
    assert isinstance(case, CalmCase)
    looks = found.not_hangs[-1] if found.not_hangs else "had no reason to look"
    verdict = f"`{found.kind}`" if found.kind else "nothing"
    how_long = f", {case.seconds:g} s" if case.seconds else ""
    name = case.do.replace("_", " ").replace(",", ", ")
    return f"| {name}{how_long} | {case.ranks} | {verdict} | {looks} |{'' if row.right else ' **wrong**'}"


def report(rows: list[Row], *, after_s: float | None) -> str:
    faults = [row for row in rows if isinstance(row.case, FaultCase)]
    calm = [row for row in rows if isinstance(row.case, CalmCase)]
    ran = [row for row in faults if not row.skipped]
    slowest = max((row.seconds for row in ran if row.seconds is not None), default=0.0)
    where = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    how = f"load {os.getloadavg()[1]:.1f}; --hang-after {after_s or 'default'}"
    lines = [f"{where}, {time.strftime('%d %B %Y')}; {how}.", ""]
    if faults:
        right = sum(row.right for row in ran)
        lines += [f"{right} of {len(ran)} faults named rightly; the slowest after {slowest:.1f} s.", ""]
        lines += ["| injected | ranks | verdict | ranks named | line | after |", "|---|---|---|---|---|---|"]
        lines += [*map(fault_line, faults), ""]
    if calm:
        lines += [f"{sum(row.right for row in calm)} of {len(calm)} healthy jobs left alone.", ""]
        lines += ["| healthy | ranks | told | the watchdog |", "|---|---|---|---|", *map(calm_line, calm)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of faults or healthy jobs, or of cases (skip-4), with commas")
    parser.add_argument("--hang-after", type=float, help="seconds; default: that of stepscope run")
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--table", type=Path, help="also write the result there, as Markdown")
    args = parser.parse_args()
    wanted = set(filter(None, args.only.split(",")))
    cases: list[FaultCase | CalmCase] = [*FAULTS, *CALM]
    if wanted:
        cases = [case for case in cases if {case.id, case.id.rsplit("-", 1)[0]} & wanted]
    rows = []
    with tempfile.TemporaryDirectory(prefix="stepscope-hangs-") as folder:
        for case in cases:
            rows.append(run(case, after_s=args.hang_after, keep=args.keep or Path(folder)))
            print((fault_line if isinstance(case, FaultCase) else calm_line)(rows[-1]), flush=True)
    text = report(rows, after_s=args.hang_after)
    print(f"\n{text}")
    if args.table:
        args.table.write_text(text)
    return 0 if all(row.right or row.skipped for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
