"""``python -m public --checkouts DIR``: run public training programs bare and recorded, and compare.

The exit code is 0 when everything that could run is right, 1 when not, and 2 when nothing could run.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from gpu.__main__ import machine

from public.cases import FAULTS, PROGRAMS, REPOSITORIES, Program
from public.runner import LOADS, Outcome, commit_of, problem_of, run_program
from public.score import Judged, judge, judge_fault, render, values_of
from stepscope.reports import summarize
from stepscope.store.load import open_run

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="public", description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--checkouts", type=Path, metavar="DIR", help="folder with the repositories, each under its own name")
    add("--only", metavar="GLOB", default="*", help="programs and faults by name, such as 'mnist,accelerate_*,*/leak'")
    add("--list", action="store_true", help="print repositories, commits, programs and faults, and exit")
    add("--loads", default="none,one", metavar="NAMES", help=f"what runs beside them, of {', '.join(LOADS)}")
    add("--keep", type=Path, metavar="DIR", help="keep what each run printed and recorded")
    add("--rejudge", type=Path, metavar="DIR", help="run nothing; ask today's rules about what --keep kept there")
    add("--json", type=Path, metavar="FILE", help="write every result there, after each program")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.list:
        print("\n".join(_listing()))
        return 0
    loads = args.loads.split(",")
    if unknown := set(loads) - set(LOADS):
        print(f"public: no load {', '.join(sorted(unknown))}; there are {', '.join(LOADS)}", file=sys.stderr)
        return 2
    if args.rejudge:
        return _report(list(_rejudge(args.rejudge, args.only)))
    if not args.checkouts:
        print("public: no checkouts given (make public PUBLIC_CHECKOUTS=DIR).  Expected in that folder:", *_wanted())
        return 2
    with tempfile.TemporaryDirectory(prefix="public-") as temporary:
        judged = []
        for row in _play(args, args.keep or Path(temporary), loads):
            judged.append(row)
            verdict = "right" if row.right else "; ".join(row.problems)
            print(f"{row.name} ({row.load}, {row.seconds:.0f} s): {verdict}", file=sys.stderr)
            if args.json:
                _save(args.json, judged)
    return _report(judged)


def _report(judged: Sequence[Judged]) -> int:
    print(render(judged))
    if not judged:
        return 2
    return 0 if all(row.right for row in judged) else 1


def _wanted() -> list[str]:
    return [f"\n  {name}: {each.address} at {each.commit}" for name, each in REPOSITORIES.items()]


def _listing() -> Iterator[str]:
    yield "checkouts:" + "".join(_wanted())
    for program in PROGRAMS:
        yield f"{program.name:28} {program.repository}/{program.script}" + f"  ({program.note})" * bool(program.note)
    for fault in FAULTS:
        who = "" if fault.rank is None else f", rank {fault.rank}"
        yield f"{fault.name:28} {' or '.join(sorted(fault.kinds))}{who}"


def _chosen(name: str, only: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in only.split(","))


def _play(args: argparse.Namespace, folder: Path, loads: Sequence[str]) -> Iterator[Judged]:
    checkouts = args.checkouts.resolve()
    folder = folder.resolve()
    for program in _runnable([each for each in PROGRAMS if _chosen(each.name, args.only)], checkouts):
        for load in loads:
            yield _compared(program, checkouts, folder, load)
    faults = [each for each in FAULTS if _chosen(each.name, args.only)]
    able = {each.name: each for each in _runnable([_program(fault.program) for fault in faults], checkouts)}
    for fault in faults:
        if fault.program in able:
            own = folder / f"{fault.name.replace('/', '-')}-none"
            altered = run_program(able[fault.program], checkouts, own, recorded=True, fault=fault.alteration)
            yield judge_fault(fault, altered, load="none")


def _compared(program: Program, checkouts: Path, folder: Path, load: str) -> Judged:
    def run(kind: str) -> Outcome:
        own = folder / f"{program.name}-{load}-{kind}"
        return run_program(program, checkouts, own, recorded=kind == "recorded", load=load)

    bare, recorded = run("bare"), run("recorded")
    differ = program.repeatable and values_of(program, bare.text) != values_of(program, recorded.text)
    return judge(program, bare, recorded, run("again") if differ else None, load=load)


def _program(name: str) -> Program:
    return next(program for program in PROGRAMS if program.name == name)


def _runnable(programs: Sequence[Program], checkouts: Path) -> list[Program]:
    """Those that can run here; says why the others cannot, and which checkouts are not at the expected commit."""
    found = []
    for program in dict.fromkeys(each.name for each in programs):
        if problem := problem_of(_program(program), checkouts):
            print(f"public: skipping {program}: {problem}", file=sys.stderr)
        else:
            found.append(_program(program))
    for name in sorted({program.repository for program in found}):
        commit, expected = commit_of(checkouts / name), REPOSITORIES[name].commit
        if commit != expected:
            here = commit[:12] or "an unknown commit"
            print(f"public: {name} is at {here}; expected {expected[:12]}", file=sys.stderr)
    return found


def _rejudge(folder: Path, only: str) -> Iterator[Judged]:
    for program in PROGRAMS:
        for load in LOADS:
            bare, recorded = (folder / f"{program.name}-{load}-{kind}" for kind in ("bare", "recorded"))
            if _chosen(program.name, only) and (recorded / "outcome.json").exists():  # not broken off
                yield judge(program, _kept(bare), _kept(recorded), load=load)
    for fault in FAULTS:
        own = folder / f"{fault.name.replace('/', '-')}-none"
        if _chosen(fault.name, only) and (own / "outcome.json").exists():
            yield judge_fault(fault, _kept(own), load="none")


def _kept(folder: Path) -> Outcome:
    """What --keep kept of a run, with today's summary."""
    outcome = json.loads((folder / "outcome.json").read_text())
    run = folder / "runs" / "job"
    summary = summarize(open_run(run), logs=("main.log",)) if run.exists() else {}
    return Outcome(**{**outcome, "summary": summary})


def _save(path: Path, judged: Sequence[Judged]) -> None:
    rows = [{**asdict(row), "right": row.right} for row in judged]
    path.write_text(json.dumps({"schema": 1, **machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
