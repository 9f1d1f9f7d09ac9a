"""``python -m league``: run what is asked for, keep the results, print the table.

Results are kept case by case: a league that was broken off goes on where it stopped, and ``--rejudge`` asks the rules
of today about the runs of yesterday.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from machine_load import LOADS

from league.cases import CASES
from league.runner import Outcome, can_run, judge_again, run_stepscope, run_traceml
from league.score import judge, total
from league.synthetic import CELLS, play
from league.table import Scored, render
from league.truth import Case, Claim, claim_of

__all__ = ["main"]

Results = dict[str, dict[str, Any]]
BUSY_SHARE = 0.25
"""With more of the machine than this in other hands, whoever says that its CPUs are busy is right."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="league", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases by their id, such as 'uneven/2/*'")
    parser.add_argument("--tools", default="stepscope,traceml", help="default: %(default)s")
    parser.add_argument("--traceml-python", metavar="PATH", help="interpreter of an environment that has TraceML 0.5.0")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each case (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/league"), help="results and runs (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="run again what has a result already")
    parser.add_argument("--rejudge", action="store_true", help="run nothing; diagnose the kept runs again")
    parser.add_argument(
        "--synthetic", type=int, default=0, metavar="SEEDS", help="made-up runs instead, so many a cell"
    )
    parser.add_argument(
        "--load",
        default="none",
        metavar="KINDS",
        help=f"other programs beside the job, each of these in turn: {', '.join(LOADS)} (default: %(default)s)",
    )
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    loads = args.load.split(",")
    if unknown := set(loads) - set(LOADS):
        print(f"league: no such load: {', '.join(sorted(unknown))} ({', '.join(LOADS)})", file=sys.stderr)
        return 2
    if args.synthetic:
        scored = {_beside("stepscope, synthetic", load): synthetic(args.only, args.synthetic, load) for load in loads}
        _save(args.out / "synthetic.json", {"seeds": args.synthetic, "totals": _totals(scored)})
        print(render(scored))
        return 0
    cases = [case for case in CASES if fnmatch.fnmatch(case.id, args.only) and case.device == args.device]
    if args.list:
        for case in cases:
            print(f"{case.id:36} {' '.join(case.args)}")
        return 0
    tools = [tool for tool in args.tools.split(",") if tool != "traceml" or args.traceml_python]
    if "traceml" in args.tools.split(",") and not args.traceml_python:
        print("TraceML is left out: --traceml-python names no interpreter that has it.", file=sys.stderr)
    try:
        results = _play_all(cases, tools, loads, args)
    except KeyboardInterrupt:
        print(f"\nBroken off; what was run is kept in {args.out} and not run again.", file=sys.stderr)
        return 130
    scored = {_beside(tool, load): _scored(cases, results, tool, load) for tool in tools for load in loads}
    _save(args.out / "results.json", {"cases": results, "totals": _totals(scored)})
    print(render(scored))
    return 0


def _beside(tool: str, load: str) -> str:
    return tool if load == "none" else f"{tool}, load {load}"


def _key(case: Case, repeat: int, load: str) -> str:
    """``place/1/input#0``, ``place/1/input#0@bursts``."""
    return f"{case.id}#{repeat}" + ("" if load == "none" else f"@{load}")


def _play_all(cases: Sequence[Case], tools: Sequence[str], loads: Sequence[str], args: argparse.Namespace) -> Results:
    path = args.out / "results.json"
    kept: Results = json.loads(path.read_text())["cases"] if path.exists() else {}
    jobs = [
        (case, repeat, tool, load)
        for repeat in range(args.repeat)
        for case in cases
        for tool in tools
        for load in loads
    ]
    for number, (case, repeat, tool, load) in enumerate(jobs, start=1):
        key = _key(case, repeat, load)
        reason = can_run(case, args.device)
        if reason:
            print(f"[{number}/{len(jobs)}] {key} {tool}: not run, {reason}", file=sys.stderr)
            continue
        before = kept.get(key, {}).get(tool, {"problem": "not run"})
        stale = before["problem"] or kept[key].get("args") != list(case.args)
        if not (args.fresh or stale or (args.rejudge and tool == "stepscope")):
            continue
        folder = str(repeat) if load == "none" else f"{repeat}-{load}"
        outcome = _play(case, tool, load, args.out / "kept" / folder, args, before)
        if outcome is None:
            continue
        if kept.get(key, {}).get("args") != list(case.args):
            kept[key] = {"args": list(case.args), "ranks": case.ranks}
        kept[key][tool] = outcome.to_dict()
        said = outcome.problem or _said(outcome.claims)
        if outcome.foreign_cpu > BUSY_SHARE:
            said += f"   ({outcome.foreign_cpu:.0%} of the CPUs were busy with other things)"
        print(f"[{number}/{len(jobs)}] {key} {tool} {outcome.seconds:.0f} s: {said}", file=sys.stderr, flush=True)
        _save(path, {"cases": kept})
    return kept


def _play(
    case: Case, tool: str, load: str, keep: Path, args: argparse.Namespace, before: Mapping[str, Any]
) -> Outcome | None:
    if tool == "traceml":
        return None if args.rejudge else run_traceml(case, keep, args.traceml_python, load)
    if args.rejudge:
        ended = Outcome(seconds=before.get("seconds", 0.0), foreign_cpu=before.get("foreign_cpu", 0.0))
        return judge_again(case, keep, ended)
    return run_stepscope(case, keep, load)


def _totals(tools: Mapping[str, Sequence[Scored]]) -> dict[str, Any]:
    """Of the cases just asked for: the counts behind the table, and what was not right."""
    return {
        tool: {
            **asdict(total([each.judged for each in scored])),
            "not_right": sorted({each.id for each in scored if not each.judged.perfect}),
        }
        for tool, scored in tools.items()
    }


def _save(path: Path, content: Mapping[str, Any]) -> None:
    """As a whole or not at all: the league may be broken off at any time."""
    machine = {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()}
    document = {"schema": 1, "date": time.strftime("%Y-%m-%d"), "machine": machine, **content}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(document, indent=1) + "\n")
    fresh.replace(path)


def _scored(cases: Sequence[Case], results: Results, tool: str, load: str) -> list[Scored]:
    scored = []
    by_id = {case.id: case for case in cases}
    for key, result in results.items():
        case, outcome = by_id.get(key.partition("#")[0]), result.get(tool)
        if (key.partition("@")[2] or "none") != load:
            continue
        if case is None or outcome is None or outcome["problem"]:
            continue
        claims = [claim_of(row) for row in outcome["claims"]]
        truth = case.truth
        if outcome["foreign_cpu"] > BUSY_SHARE or load != "none":
            truth = replace(truth, also_true=truth.also_true | {"cpu_saturated"})
        scored.append(
            Scored(
                id=case.id,
                judged=judge(truth, claims, case.ranks),
                said=_said(claims),
                detected_after=outcome["detected_after"],
                has_start=tool == "stepscope" and case.truth.start is not None,
            )
        )
    return scored


def synthetic(only: str, seeds: int, load: str = "none") -> list[Scored]:
    """All cells that match, with so many seeds each."""
    scored = []
    for cell in CELLS:
        if not fnmatch.fnmatch(cell.id, only):
            continue
        for seed in range(seeds):
            claims, after = play(cell, seed, load)
            truth = cell.truth
            if load != "none":
                truth = replace(truth, also_true=truth.also_true | {"cpu_saturated"})
            judged = judge(truth, claims, cell.cluster.ranks)
            name = f"{cell.id}#{seed}"
            has_start = cell.truth.start is not None
            scored.append(Scored(id=name, judged=judged, said=_said(claims), detected_after=after, has_start=has_start))
    return scored


def _said(claims: Sequence[Claim]) -> str:
    """In one line: kinds, with ranks and phase; what is less than a warning in brackets."""
    words = []
    for claim in claims:
        ranks = f" r{'+'.join(map(str, claim.ranks))}" if claim.ranks else ""
        word = f"{'|'.join(claim.kinds[:1])}{ranks}{f' in {claim.phase}' if claim.phase else ''}"
        words.append(word if claim.warned else f"({word})")
    return ", ".join(words) or "nothing"


if __name__ == "__main__":
    sys.exit(main())
