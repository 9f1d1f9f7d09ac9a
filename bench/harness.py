"""Run the loop bare and under each tool, in fresh processes, taking turns, and pair the results.

Each repeat runs every tool once; every other repeat runs them in the opposite order.  What a tool adds is the median
over repeats of (tool − bare) within the repeat, so that slow spells of the machine cancel out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proctree import TreeWatch, adopt_orphans

__all__ = [
    "BareTool",
    "StepscopeTool",
    "Tool",
    "TraceMLTool",
    "add_tool_arguments",
    "measure",
    "print_size",
    "save",
    "tools_of",
    "traceml_command",
]

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
POLL_S = 0.1
SETTLE_S = 60.0
"""How long what a tool started may go on after its command has returned."""

Row = dict[str, Any]
PAIRED = (
    "wall_us",
    "cpu_us",
    "process_us",
    "mean_us",
    "p99_us",
    "rss_mb",
    "threads",
    "sockets",
    "first_line_ms",
    "first_step_ms",
)
ALONE = (
    "beside_procs",
    "beside_mb",
    "beside_end_mb",
    "beside_peaks_mb",
    "beside_cpu_s",
    "disk_running_b",
    "disk_sealed_b",
    "disk_total_b",
    "total_s",
)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """How to launch a script under something."""

    name: str
    python: str
    baseline: str
    """The name of the bare run, by the same interpreter, that this one is compared with."""
    loop_flags: tuple[str, ...] = ()

    def command(self, script: list[str], work: Path) -> list[str]:
        return [self.python, *script]

    def running_bytes(self, work: Path) -> int:
        """Step data on disk at this moment."""
        return _bytes_below(work)

    def sealed_bytes(self, work: Path) -> int:
        """Step data on disk when all is over."""
        return self.running_bytes(work)


class BareTool(Tool):
    pass


class StepscopeTool(Tool):
    def command(self, script: list[str], work: Path) -> list[str]:
        return [self.python, "-m", "stepscope", "run", "--dir", str(work), *script]

    def running_bytes(self, work: Path) -> int:
        return _bytes_below(work, lambda file: file.parent.name == "steps")

    def sealed_bytes(self, work: Path) -> int:
        return _bytes_below(work, lambda file: file.name == "steps.parquet")


class TraceMLTool(Tool):
    def command(self, script: list[str], work: Path) -> list[str]:
        return traceml_command(self.python, script, work)


def traceml_command(python: str, script: list[str], work: Path, *, ranks: int = 1) -> list[str]:
    """How TraceML starts a script; its files will be under ``work`` / "bench"."""
    aggregator, master = (str(port) for port in _free_ports(2))
    executable = Path(python).parent / "traceml"
    start = [str(executable)] if executable.exists() else [python, "-m", "traceml_ai.launcher.cli"]
    options = ["--run-name", "bench", "--logs-dir", str(work), "--nproc-per-node", str(ranks)]
    options += ["--aggregator-port", aggregator, "--master-port", master]
    return [*start, "run", script[0], *options, "--args", *script[1:]]


def add_tool_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tools", default="stepscope", help="bare,stepscope,traceml; bare always runs (default: %(default)s)"
    )
    parser.add_argument(
        "--traceml-python", metavar="PATH", help="interpreter of an environment that has TraceML; adds it"
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warm", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single result there")


def tools_of(args: argparse.Namespace) -> list[Tool]:
    """The tools asked for, each with a bare run by its own interpreter."""
    names = [name for name in args.tools.split(",") if name]
    unknown = set(names) - {"bare", "stepscope", "traceml"}
    if unknown:
        raise SystemExit(f"unknown tools: {', '.join(sorted(unknown))}")
    tools: list[Tool] = [BareTool(name="bare", python=sys.executable, baseline="bare")]
    if "stepscope" in names:
        tools.append(StepscopeTool(name="stepscope", python=sys.executable, baseline="bare"))
    if "traceml" in names or args.traceml_python:
        python, baseline = args.traceml_python or sys.executable, "bare"
        if python != sys.executable:
            baseline = "bare-traceml"
            tools.append(BareTool(name=baseline, python=python, baseline=baseline))
        tools.append(TraceMLTool(name="traceml", python=python, baseline=baseline, loop_flags=("--traceml",)))
    return tools


def measure(
    tools: Sequence[Tool], workload: str, args: argparse.Namespace, *, device: str = "cpu"
) -> dict[str, list[Row]]:
    """All repeats of one workload, by tool."""
    adopt_orphans()
    rows: dict[str, list[Row]] = {tool.name: [] for tool in tools}
    for repeat in range(args.repeats):
        for tool in tools if repeat % 2 == 0 else reversed(tools):
            rows[tool.name].append(_run_once(tool, workload, args, device))
    return rows


def _run_once(tool: Tool, workload: str, args: argparse.Namespace, device: str) -> Row:
    work = Path(tempfile.mkdtemp(prefix="stepscope-bench-"))
    out = work / "result.json"
    data = work / "data"
    data.mkdir()
    script = [str(HERE / "loop.py"), "--workload", workload, "--device", device, "--steps", str(args.steps)]
    script += ["--warm", str(args.warm), "--out", str(out), *tool.loop_flags]
    inherited = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, inherited))}
    # An installed package is compiled; the first run compiles a checkout, where that is not forbidden.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        with (work / "log").open("wb") as log:
            launched_ns = time.monotonic_ns()
            command = tool.command([*script, "--launched-ns", str(launched_ns)], data)
            process = subprocess.Popen(
                command, env=environment, cwd=work, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            watch, running_bytes = _watch(tool, process, out, data)
        if not out.exists():
            raise SystemExit(
                f"{tool.name}: the loop left no result\n{(work / 'log').read_text(errors='replace')[-4000:]}"
            )
        row: Row = json.loads(out.read_text())
        steps = args.steps + args.warm
        row |= watch.beside(int(out.with_suffix(".pid").read_text()))
        row["disk_running_b"] = running_bytes / steps
        row["disk_sealed_b"] = tool.sealed_bytes(data) / steps
        row["disk_total_b"] = _bytes_below(data) / steps
        row["total_s"] = (time.monotonic_ns() - launched_ns) / 1e9
        row["exit_code"] = process.returncode
        return row
    finally:
        shutil.rmtree(work)


def _watch(tool: Tool, process: subprocess.Popen[bytes], out: Path, data: Path) -> tuple[TreeWatch, int]:
    """Look from outside until nothing of the tool is left."""
    watch = TreeWatch()
    running_bytes = 0
    settle_until: float | None = None
    while True:
        if process.poll() is not None and settle_until is None:
            settle_until = time.monotonic() + SETTLE_S
        training = not out.exists() and settle_until is None
        running_bytes = max(running_bytes, tool.running_bytes(data))
        alive = watch.look(training=training)
        watch.reap()
        if settle_until is not None and (not alive or time.monotonic() > settle_until):
            if alive:
                print(f"  {tool.name}: {len(alive)} processes still run {SETTLE_S:g} s after its end", file=sys.stderr)
            return watch, running_bytes
        time.sleep(POLL_S)


def print_size(title: str, tools: Sequence[Tool], rows: dict[str, list[Row]]) -> None:
    """The medians of every tool, and what each adds to its bare run."""
    print(f"\n{title}   load {os.getloadavg()[0]:.1f}")
    columns = [tool for tool in tools if rows[tool.name]]
    added = {tool.name: added_by(tool, rows) for tool in columns if tool.name != tool.baseline}
    print("  " + " " * 16 + "".join(f"{name:>{width}}" for tool in columns for name, width in _headings(tool)))
    for name in (*PAIRED, *ALONE):
        cells = []
        for tool in columns:
            cells.append(f"{statistics.median(row[name] for row in rows[tool.name]):>14,.1f}")
            if tool.name in added:
                cells.append(
                    f"{added[tool.name][name]:>+14,.1f}{_spread(tool, rows, name):>20}" if name in PAIRED else " " * 34
                )
        print("  " + f"{name:16}" + "".join(cells).rstrip())
    losses = {row["loss"] for tool in tools for row in rows[tool.name]}
    print("  losses: " + ("bit-identical" if len(losses) == 1 else f"DIFFER: {sorted(losses)}"))
    if "traceml" in added and added.get("stepscope", {}).get("cpu_us", 0) > 0:
        ratio = added["traceml"]["cpu_us"] / added["stepscope"]["cpu_us"]
        print(f"  main-thread CPU added: traceml / stepscope = {ratio:.1f}")


def _headings(tool: Tool) -> list[tuple[str, int]]:
    """Of the columns, with their widths."""
    alone = tool.name == tool.baseline
    return [(tool.name, 14)] if alone else [(tool.name, 14), ("adds", 14), ("(least to most)", 20)]


def added_by(tool: Tool, rows: dict[str, list[Row]]) -> dict[str, float]:
    return {name: statistics.median(_differences(tool, rows, name)) for name in PAIRED}


def _spread(tool: Tool, rows: dict[str, list[Row]], name: str) -> str:
    differences = _differences(tool, rows, name)
    return f"({min(differences):+,.0f} to {max(differences):+,.0f})"


def _differences(tool: Tool, rows: dict[str, list[Row]], name: str) -> list[float]:
    """What the tool added in each repeat."""
    pairs = zip(rows[tool.name], rows[tool.baseline], strict=True)
    return [with_it[name] - bare[name] for with_it, bare in pairs]


def save(path: Path, tools: Sequence[Tool], results: dict[str, dict[str, list[Row]]], args: argparse.Namespace) -> None:
    """Everything that was measured, with the machine and the date."""
    document = {
        "schema": 1,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()},
        "settings": {"steps": args.steps, "warm": args.warm, "repeats": args.repeats},
        "rows": results,
        "added": {
            size: {tool.name: added_by(tool, rows) for tool in tools if tool.name != tool.baseline}
            for size, rows in results.items()
        },
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _bytes_below(folder: Path, counts: Callable[[Path], bool] = lambda file: True) -> int:
    """The size of all files below ``folder`` that count; files and folders may go away meanwhile."""
    total = 0
    # Not rglob(), which raises if a folder goes away while it is read; walk() leaves the folder out.
    for where, _, names in os.walk(folder):
        for path in (Path(where, name) for name in names):
            with contextlib.suppress(OSError):
                if counts(path):
                    total += path.stat().st_size
    return total


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
