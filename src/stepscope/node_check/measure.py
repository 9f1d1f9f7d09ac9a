"""Run the loads one after the other within a time limit, and sum them up as one result.

Every load is a process group that is killed when its time is over or when the check itself ends, so a check cannot
outlast its limit by more than a moment, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from stepscope.agent.sampling.off_cpu import CgroupQuota

__all__ = ["LONGEST_S", "measure_node"]

LONGEST_S = 120.0
START_S = 20.0
"""How long a process may take to start (loading torch from a network file system), beyond the time of its load."""
SHARES = {"processor": 0.4, "memory": 0.2, "disk": 0.3, "gpu": 0.6, "links": 0.3}
"""Of the time that the user gives, at most; GPU and links are seldom there."""
LEAST_FREE_BYTES = 2 << 30
"""Space below which the disk is not measured."""


def measure_node(seconds: float, folder: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the result; figures that could not be measured are left out, with the reason in ``skipped``."""
    deadline = time.monotonic() + min(seconds + START_S, LONGEST_S)
    first = _is_first_of_node(environ)
    result: dict[str, Any] = {
        "version": 1,
        "host": platform.node(),
        "kind": _kind(),
        "wall_s": round(time.time(), 3),
        "figures": {},
        "skipped": {},
    }
    if int(environ.get("WORLD_SIZE", "1")) > 1:
        _add(result, "links", seconds, folder, deadline)  # first: the ranks of other nodes are waiting
    if first:
        result |= _processors(seconds, deadline, result)
        for name in ("memory", "disk", "gpu"):
            _add(result, name, seconds, folder, deadline)
    return result


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


def _processors(seconds: float, deadline: float, result: dict[str, Any]) -> dict[str, Any]:
    """All cores at once, as many as a quota lets run, and what kept them from running."""
    quota = CgroupQuota(os.getpid())
    cores = sorted(os.sched_getaffinity(0))
    allowed = quota.sample().get("cpu_quota")
    used = cores if allowed is None else cores[: max(1, int(allowed))]
    before, began = psutil.cpu_times(), time.monotonic()
    own = os.times()
    rows = [row for row in _run([("processor", str(core)) for core in used], seconds * 0.4, deadline) if row]
    spent, took_s, after = os.times(), time.monotonic() - began, psutil.cpu_times()
    throttled = quota.sample().get("throttled", 0.0)
    if not rows:
        result["skipped"]["processor"] = "no answer within its time"
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


def _add(result: dict[str, Any], name: str, seconds: float, folder: Path, deadline: float) -> None:
    figures, skipped = result["figures"], result["skipped"]
    if name == "disk" and (reason := _why_no_disk(folder)):
        skipped[name] = reason
        return
    if name == "gpu" and not _has_gpu():
        return
    (row,) = _run([(name, str(folder))], seconds * SHARES[name], deadline)
    if row is None:
        skipped[name] = "no answer within its time"
    elif name == "gpu":
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


def _why_no_disk(folder: Path) -> str:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or "the folder cannot be read"
    return "less than 2 GiB are free" if free < LEAST_FREE_BYTES else ""


def _has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists()


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


# -- processes --------------------------------------------------------------------------------------------------------


def _run(loads: Sequence[tuple[str, str]], seconds: float, deadline: float) -> list[dict[str, Any] | None]:
    """Run loads side by side; None for one that fails or takes too long."""
    limit = min(time.monotonic() + seconds + START_S, deadline)
    children: list[subprocess.Popen[str]] = []
    try:
        for name, where in loads:
            command = [sys.executable, "-m", "stepscope.node_check.loads", name, str(seconds), where]
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
        return [_answer(child, limit) for child in children]
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


def _answer(child: subprocess.Popen[str], limit: float) -> dict[str, Any] | None:
    try:
        text, _ = child.communicate(timeout=max(limit - time.monotonic(), 0.1))
        answer = json.loads(text)
    except (subprocess.TimeoutExpired, ValueError):
        return None
    return answer if isinstance(answer, dict) and child.returncode == 0 else None
