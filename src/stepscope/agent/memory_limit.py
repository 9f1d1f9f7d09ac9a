"""How much memory a process may use: that of the machine, or less where a cgroup says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["memory_of"]


def memory_of(pid: int, root: Path = Path("/"), machine: int | None = None) -> int:
    """Bytes.  A limit of any of the cgroups around the process counts."""
    total = psutil.virtual_memory().total if machine is None else machine
    return min((total, *_limits(pid, root)))


def _limits(pid: int, root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc" / str(pid) / "cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            folder, name = top, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = top / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be that of the host, and the limit lies at the top.
        inside = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(inside) + 1):
            try:
                text = folder.joinpath(*inside[:depth], name).read_text(errors="replace").strip()
            except OSError:
                continue
            if text.isdecimal():
                yield int(text)
