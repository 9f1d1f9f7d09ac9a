"""What it takes from ``.json.gz`` to all tables of a rank, beside HTA: CPU time, seconds, peak memory.

    python bench/traces.py --hta-python ~/hta/bin/python                       # 0.4 M and 2 M events; takes a while
    python bench/traces.py --events 50000                                     # ours alone, at another size
    python bench/traces.py --events 100000 --steps 10,100,1000 --ranks 1,2,4  # how it grows

Every run is a process of its own, the tools taking turns; the figures are medians.  CPU time is of all its processes,
after the imports (which are HTA's largest part at small sizes); memory is the largest process's peak.  HTA does what it
has of our tables: temporal breakdown, idle time, overlap, kernels, queue length, launches, memory bandwidth, user
annotations.  ``ours`` is everything to the verdict, ``tables`` only reading and the tables of each rank (HTA's extent,
and more), ``again`` opens a file that was read before, from the cache; ``python`` is ``ours`` without the scanner in C.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trace_copies import REAL, write_trace

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
LIMIT_S = 3600
TABLES = (
    "get_temporal_breakdown",
    "get_idle_time_breakdown",
    "get_comm_comp_overlap",
    "get_gpu_kernel_breakdown",
    "get_queue_length_summary",
    "get_cuda_kernel_launch_stats",
    "get_memory_bw_summary",
    "get_gpu_user_annotation_breakdown",
)
Row = dict[str, Any]


def ours(paths: list[Path], cache: Path | None) -> Row:
    import numpy.ma  # noqa: F401 - np.unique loads it, and pandas has loaded it before HTA begins

    from stepscope.traces.engine import Options, analyze_paths
    from stepscope.traces.findings import analyze_job
    from stepscope.traces.rank_analysis import RankAnalysis
    from stepscope.traces.reading.cache import Cache

    began = _now()
    found = analyze_paths(paths, Options(cache=None if cache is None else Cache(folder=cache)))
    analyses = [each for each in found if isinstance(each, RankAnalysis)]
    if len(analyses) != len(found):
        raise SystemExit(f"not all could be read: {found}")
    job = analyze_job(analyses)
    return {**_since(began), "verdict": job.verdict, "idle_ns": sum(each.temporal.idle_ns for each in analyses)}


def tables(paths: list[Path]) -> Row:
    """Of the same, what HTA has too: reading and the tables of each rank, without critical path, what-ifs, findings."""
    import numpy.ma  # noqa: F401 - see above

    from stepscope.traces.device.figures import device_figures
    from stepscope.traces.device.work import idle_of, temporal_of, work_of
    from stepscope.traces.model.window import window_of
    from stepscope.traces.rank_analysis import device_tables, host_facts, host_figures, host_tables
    from stepscope.traces.reading.files import read_trace

    began = _now()
    idle_ns = 0
    for path in paths:
        window = window_of(read_trace(path))
        work, facts = work_of(window), host_facts(window)
        idle_of(window, work), device_figures(window, work), host_figures(window, facts)
        device_tables(window, work), host_tables(window, facts)
        idle_ns += temporal_of(window).idle_ns
    return {**_since(began), "idle_ns": idle_ns}


def theirs(paths: list[Path]) -> Row:
    """By an interpreter that has HTA, and need not have Stepscope."""
    hta = importlib.import_module("hta.trace_analysis")
    began = _now()
    failed = []
    with contextlib.redirect_stdout(io.StringIO()):
        analysis = hta.TraceAnalysis(trace_files={n: str(path) for n, path in enumerate(paths)})
        for name in TABLES:
            function = getattr(analysis, name)
            takes = function.__code__.co_varnames[: function.__code__.co_argcount]
            options: dict[str, Any] = {"visualize": False} if "visualize" in takes else {}
            if "ranks" in takes:
                options["ranks"] = list(range(len(paths)))
            try:
                function(**options)
            except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
                failed.append(f"{name}: {type(error).__name__}")
    return {**_since(began), "failed": failed}


def _now() -> tuple[float, float]:
    return time.perf_counter(), _cpu_s()


def _cpu_s() -> float:
    """Of this process and those it started that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def _since(began: tuple[float, float]) -> Row:
    peak = max(_own_peak_kb(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    return {"wall_s": time.perf_counter() - began[0], "cpu_s": _cpu_s() - began[1], "peak_mb": peak / 1024}


def _own_peak_kb() -> int:
    """What ``getrusage`` says includes the process that started this one, up to then."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def run_once(python: str, tool: str, paths: list[Path], cache: Path | None = None) -> Row:
    command = [python, str(HERE / "traces.py"), "--measure", tool, *map(str, paths)]
    if cache is not None:
        command += ["--cache", str(cache)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEPSCOPE_PURE_PYTHON": "1" if tool == "python" else ""}
    if tool != "hta":
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{tool} failed\n{done.stderr[-4000:]}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def measure(paths: list[Path], args: argparse.Namespace) -> dict[str, Row]:
    """By tool, the medians over all repeats."""
    rows: dict[str, list[Row]] = {"ours": [], "python": [], "tables": [], "again": []}
    if args.hta_python:
        rows["hta"] = []
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as temporary:
        cache = Path(temporary)
        run_once(sys.executable, "ours", paths, cache)
        for _ in range(args.repeats):
            rows["ours"].append(run_once(sys.executable, "ours", paths))
            rows["python"].append(run_once(sys.executable, "python", paths))
            rows["tables"].append(run_once(sys.executable, "tables", paths))
            rows["again"].append(run_once(sys.executable, "again", paths, cache))
            if args.hta_python:
                rows["hta"].append(run_once(args.hta_python, "hta", paths))
    return {
        tool: {**each[-1]}
        | {name: statistics.median(row[name] for row in each) for name in ("wall_s", "cpu_s", "peak_mb")}
        | {"least_cpu_s": min(row["cpu_s"] for row in each), "most_cpu_s": max(row["cpu_s"] for row in each)}
        for tool, each in rows.items()
    }


def _cases(args: argparse.Namespace) -> list[tuple[int, int | None, int]]:
    """(events of a rank, steps, ranks)"""
    steps = [int(each) for each in args.steps.split(",")] if args.steps else [None]
    return [(events, each, ranks) for events in _ints(args.events) for each in steps for ranks in _ints(args.ranks)]


def _ints(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", default="400000,2000000", help="of each rank's file (default: %(default)s)")
    parser.add_argument("--steps", default="", help="profiler steps; without it as many as the trace has")
    parser.add_argument("--ranks", default="1", help="files (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hta-python", metavar="PATH", help="interpreter of an environment that has HTA; adds it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--measure", choices=("ours", "python", "tables", "again", "hta"), help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("paths", type=Path, nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        alone = {"hta": theirs, "tables": tables}
        print(json.dumps(alone[args.measure](args.paths) if args.measure in alone else ours(args.paths, args.cache)))
        return
    source = REAL.name if REAL.exists() else "made-up events"
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, {source}")
    results = [_case(*case, args) for case in _cases(args)]
    if args.json:
        machine = {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()}
        document = {"schema": 1, "date": time.strftime("%Y-%m-%d"), "machine": machine, "results": results}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


def _case(events: int, steps: int | None, ranks: int, args: argparse.Namespace) -> Row:
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as temporary:
        paths = [Path(temporary) / f"rank{rank}.json.gz" for rank in range(ranks)]
        count = sum(
            write_trace(path, events, steps=steps, rank=rank, world_size=ranks) for rank, path in enumerate(paths)
        )
        size = sum(path.stat().st_size for path in paths)
        print(f"\n{ranks} × {events:,} events, {steps or 'its own'} steps, {size / 1e6:.1f} MB packed")
        print("  tool        CPU s    least     most   µs/event        s   peak MB   B/event")
        found = measure(paths, args)
    for tool, row in found.items():
        print(
            f"  {tool:8} {row['cpu_s']:8.2f} {row['least_cpu_s']:8.2f} {row['most_cpu_s']:8.2f}"
            f" {row['cpu_s'] / count * 1e6:10.2f} {row['wall_s']:8.2f}"
            f" {row['peak_mb']:9.0f} {row['peak_mb'] * 2**20 / count:9.0f}"
        )
    for tool in ("ours", "python", "tables") if "hta" in found else ():
        own, other = found[tool], found["hta"]
        print(
            f"  HTA / {tool}: CPU {other['cpu_s'] / own['cpu_s']:.1f}, memory {other['peak_mb'] / own['peak_mb']:.1f}"
            + (f"; HTA failed at {', '.join(other['failed'])}" if other["failed"] else "")
        )
    return {"events": count, "ranks": ranks, "steps": steps, "packed_bytes": size, "tools": found}


if __name__ == "__main__":
    main()
