"""Whether the processes of a run are still there.

A process is known by its pid and its start time, since pids are used again.  Of processes on other machines, and in
other containers, all that is known is when they were last heard of (``store/lease.py``).
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from stepscope.errors import RingError
from stepscope.records import run_clock
from stepscope.ring import RingReader
from stepscope.ring.writer import process_start_ticks
from stepscope.store.jsonl import read_jsonl
from stepscope.store.lease import SILENT_S, is_local, read_lease
from stepscope.store.meta import read_meta
from stepscope.store.nodes import NodeInfo, read_nodes
from stepscope.store.paths import EVENTS
from stepscope.store.session import ring_files
from stepscope.store.sidecar import read_sidecars

__all__ = [
    "agent_alive",
    "launcher_alive",
    "node_silent",
    "process_alive",
    "processes_alive",
]

REMOTE_SILENCE_S = SILENT_S
"""A process on another machine that was not heard of for so long counts as gone."""


def process_alive(pid: int, start_ticks: int) -> bool:
    """Whether that very process still runs; a zombie does not.  ``start_ticks`` 0 = unknown."""
    if pid <= 0:
        return False
    proc = Path("/proc/self/stat")
    if not proc.exists():
        return _signal_reaches(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    if stat.rpartition(b")")[2].split()[0] in (b"Z", b"X"):
        return False
    return not start_ticks or process_start_ticks(pid) == start_ticks


def processes_alive(run_dir: Path) -> bool:
    """Whether a rank, the agent or a launcher that has yet to say how it ended still runs.

    The caller's own process does not count.
    """
    meta = read_meta(run_dir)
    if not is_local(meta):
        lease = read_lease(run_dir)
        return lease is not None and lease.age_s() < REMOTE_SILENCE_S and meta.get("sealed") is not True
    here, now_ns = platform.node(), run_clock.now_of(meta)
    if meta.get("end") is None and _launcher_pid(meta) != os.getpid() and launcher_alive(meta):
        return True
    for sidecar in read_sidecars(run_dir)[0].values():
        if sidecar.ended_wall_ns is not None:
            continue
        if sidecar.identity.host == here:
            if _other_alive(sidecar.pid, sidecar.start_ticks):
                return True
        elif meta.get("end") is None and now_ns - sidecar.heard_wall_ns < REMOTE_SILENCE_S * 1e9:
            return True
    others = [node for node in read_nodes(run_dir) if node.spool != meta.get("spool")]
    if meta.get("end") is None and not all(node.bye is not None or node_silent(node, now_ns) for node in others):
        return True
    for path in ring_files(run_dir, meta):
        try:
            reader = RingReader(path)
        except (RingError, OSError):
            continue
        header = reader.header()
        reader.close()
        if _other_alive(header.pid, header.start_ticks):
            return True
    return agent_alive(read_jsonl(run_dir / EVENTS)[0]) is True


def node_silent(node: NodeInfo, now_ns: int) -> bool:
    """Whether another node was not heard of for so long that it counts as gone, by the run's clock."""
    return now_ns - node.heard_wall_ns >= REMOTE_SILENCE_S * 1e9


def agent_alive(events: list[dict[str, Any]]) -> bool | None:
    """Of the agent that started last: True it runs, False it died, None it ended in order (or never started)."""
    last = next((e for e in reversed(events) if e.get("event") in ("agent_start", "agent_end")), None)
    if last is None or last["event"] == "agent_end":
        return None
    if last.get("host") != platform.node():
        return False
    return _other_alive(_integer(last.get("pid")), _integer(last.get("start_ticks")))


def launcher_alive(meta: dict[str, Any]) -> bool:
    launcher = meta.get("launcher")
    if not isinstance(launcher, dict) or not is_local(meta):
        return False
    return process_alive(_launcher_pid(meta), _integer(launcher.get("start_ticks")))


def _launcher_pid(meta: dict[str, Any]) -> int:
    launcher = meta.get("launcher")
    return _integer(launcher.get("pid")) if isinstance(launcher, dict) else 0


def _other_alive(pid: int, start_ticks: int) -> bool:
    return pid != os.getpid() and process_alive(pid, start_ticks)


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0


def _signal_reaches(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
