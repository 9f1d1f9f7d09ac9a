"""Run the loads one after the other within a time limit, and sum them up as one result.

Every load is a process group that is killed when its time is over or when the check itself ends, so a check cannot
outlast its limit by more than a moment, and nothing is left behind: if the check itself is killed, so are its loads
(``loads.py``). A process that the kernel cannot kill, because a driver or a file system does not answer, is not waited
for.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from stepscope.agent.sampling.off_cpu import CgroupQuota

__all__ = ["LONGEST_S", "measure_node"]

Answers = list[dict[str, Any] | None]
Run = Callable[[Sequence[tuple[str, str]], float, float], Answers]
"""Runs loads side by side: their names and places, how long each measures, and until when it may take."""

LONGEST_S = 120.0
START_S = 20.0
"""How long a process may take to start (loading torch from a network file system), beyond the time of its load."""
STARTS_S = 40.0
"""The same for all loads together."""
SHARES = {"processor": 0.4, "memory": 0.2, "disk": 0.3, "gpu": 0.6, "links": 0.3}
"""How the time is divided between the loads that this node has; links and GPU are rare."""
KILLED_S = 1.0
"""How long to wait for processes that were killed."""
LATE = "no answer within its time"
NO_TORCH = "there is no torch that can use it"


def measure_node(
    seconds: float,
    folder: Path,
    environ: Mapping[str, str],
    *,
    run: Run | None = None,
    now_s: Callable[[], float] = time.monotonic,
    has_gpu: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Return the result; figures that could not be measured are left out, with the reason in ``skipped``."""
    seconds = min(seconds, LONGEST_S - STARTS_S)
    gpu = (has_gpu or _has_gpu)()
    distributed = int(environ.get("WORLD_SIZE", "1")) > 1
    # Links first: the ranks of other nodes are waiting. Those that only help measure them as long as the first rank.
    names = [*(["links"] if distributed else []), "processor", "memory", "disk", *(["gpu"] if gpu else [])]
    whole = sum(SHARES[name] for name in names)
    check = _Check(
        seconds={name: seconds * SHARES[name] / whole for name in names},
        until_s=now_s() + seconds + STARTS_S,
        run=run or _run,
        now_s=now_s,
    )
    result: dict[str, Any] = {
        "version": 1,
        "host": platform.node(),
        "kind": _kind(),
        "wall_s": round(time.time(), 3),
        "figures": {},
        "skipped": {},
    }
    for name in names if _is_first_of_node(environ) else names[: int(distributed)]:
        if name == "processor":
            result |= _processors(check, result)
        else:
            _add(check, result, name, folder)
    return result


@dataclass(frozen=True, kw_only=True)
class _Check:
    """How the time of a check is divided."""

    seconds: Mapping[str, float]
    """By load, how long it measures."""
    until_s: float
    run: Run
    now_s: Callable[[], float]

    def answers(self, name: str, places: Sequence[str]) -> Answers:
        """Run a load once for each place, side by side; None for one that fails or takes too long."""
        took_s = self.seconds[name]
        return self.run([(name, place) for place in places], took_s, min(self.now_s() + took_s + START_S, self.until_s))


def _is_first_of_node(environ: Mapping[str, str]) -> bool:
    return environ.get("LOCAL_RANK", "0") == "0"


def _kind() -> str:
    """Nodes with the same kind are compared: model of the processor and its number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()}, {os.cpu_count()} cores"


# -- processors -------------------------------------------------------------------------------------------------------


def _processors(check: _Check, result: dict[str, Any]) -> dict[str, Any]:
    """All cores at once, as many as a quota lets run, and what kept them from running."""
    quota = CgroupQuota(os.getpid())
    cores = sorted(os.sched_getaffinity(0))
    allowed = quota.sample().get("cpu_quota")
    used = cores if allowed is None else cores[: max(1, int(allowed))]
    before, began = psutil.cpu_times(), time.monotonic()
    own = os.times()
    rows = [row for row in check.answers("processor", [str(core) for core in used]) if row]
    spent, took_s, after = os.times(), time.monotonic() - began, psutil.cpu_times()
    throttled = quota.sample().get("throttled", 0.0)
    if not rows:
        result["skipped"]["processor"] = LATE
        return {}
    speeds = [statistics.median(row["rates"]) for row in rows]
    wall_s = sum(row["wall_s"] for row in rows)
    cpu_s, waited_s = sum(row["cpu_s"] for row in rows), sum(row["waited_s"] for row in rows)
    result["figures"] |= {
        "processor": _rounded(statistics.median(speeds)),
        "slowest_core": _rounded(min(speeds)),
        "all_cores": _rounded(sum(row["done"] / row["wall_s"] for row in rows)),
    }
    total = sum(after[:8]) - sum(before[:8])
    busy = total - sum(after[at] - before[at] for at in (3, 4))
    children_s = spent.children_user + spent.children_system - own.children_user - own.children_system
    waited = waited_s / wall_s
    by_quota = min(waited, throttled if throttled < 1 else 1.0)
    return {
        "cores": len(used),
        "cpu_quota": allowed,
        "waited": _rounded(max(waited - by_quota, 0.0)),
        "throttled": _rounded(by_quota),
        "stopped": _rounded(max(1 - (cpu_s + waited_s) / wall_s, 0.0)),
        "stolen": _rounded((after.steal - before.steal) / total if total > 0 else 0.0),
        "others": _rounded(max(busy - children_s, 0.0) / (took_s * (os.cpu_count() or 1))),
    }


# -- the rest ---------------------------------------------------------------------------------------------------------


def _add(check: _Check, result: dict[str, Any], name: str, folder: Path) -> None:
    figures, skipped = result["figures"], result["skipped"]
    (row,) = check.answers(name, [str(folder)])
    if row is None:
        skipped[name] = LATE
    elif "skipped" in row:
        skipped[name] = str(row["skipped"])
    elif name == "gpu":
        if not row.get("gpus"):
            skipped[name] = NO_TORCH
        for index, device in enumerate(row.get("gpus", ())):
            figures[f"gpu{index}_matmul"] = _rounded(device["tflops"])
            figures[f"gpu{index}_memory"] = _rounded(device["memory_gb_s"])
    elif name == "links":
        hosts = row["hosts"]
        result["links"] = [
            {"from": hosts[at - 1], "to": hosts[at], "from_rank": (at - 1) % len(hosts), "to_rank": at, "gb_s": rate}
            for at, rate in enumerate(row["rates"])
        ]
        figures["slowest_link"] = _rounded(min(row["rates"]))
    else:
        figures["disk_write" if name == "disk" else name] = _rounded(statistics.median(row["rates"]))
        if "read_rates" in row:
            figures["disk_read"] = _rounded(statistics.median(row["read_rates"]))
        waited = max(row["waited_s"] / row["wall_s"] - result.get("throttled", 0.0), 0.0)
        result["waited"] = max(result.get("waited", 0.0), _rounded(waited))


def _has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists()


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


# -- processes --------------------------------------------------------------------------------------------------------


def _run(loads: Sequence[tuple[str, str]], seconds: float, until_s: float) -> Answers:
    """Run loads side by side; None for one that fails or takes too long."""
    children: list[subprocess.Popen[str]] = []
    try:
        for name, where in loads:
            command = [sys.executable, "-m", "stepscope.node_check.loads", name, str(seconds), where, str(os.getpid())]
            children.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,
                )
            )
        return [_answer(child, until_s) for child in children]
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        killed_s = time.monotonic() + KILLED_S
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=max(killed_s - time.monotonic(), 0.0))


def _answer(child: subprocess.Popen[str], until_s: float) -> dict[str, Any] | None:
    try:
        text, _ = child.communicate(timeout=max(until_s - time.monotonic(), 0.1))
        answer = json.loads(text)
    except (subprocess.TimeoutExpired, ValueError):
        return None
    return answer if isinstance(answer, dict) and child.returncode == 0 else None
