"""``flight/``: what the ranks' Flight Recorders and stacks said when it mattered; ``stepscope flight`` reads it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.records.places import FLIGHT
from stepscope.store import atomic

__all__ = ["NCCL_DUMPS", "keep_flights", "nccl_dumped", "read_flights"]

OURS = re.compile(r"rank_\d+\.json|stacks_\d+\.txt")
NCCLS = re.compile(r"nccl_trace_rank_(\d{1,7})")
"""What NCCL's watchdog wrote before it ended a process."""
NCCL_DUMPS = "nccl_dumps"
SAME_MOMENT_S = 30.0
MAX_BYTES = 64 << 20
"""Of all dumps: a second or two.  Who has more asks ``stepscope flight`` itself."""


def keep_flights(run_dir: Path, answers: Mapping[int, bytes], stacks: Mapping[int, str] | None = None) -> None:
    """The answers (JSON) and the stacks (as faulthandler wrote them) by rank; OSError when there is no room.

    They take the place of what was kept before: what ranks said at different times must not be compared.  What a rank
    wrote itself when it died a moment ago stays.
    """
    files = {f"rank_{rank}.json": answer for rank, answer in answers.items()}
    files |= {f"stacks_{rank}.txt": text.encode() for rank, text in (stacks or {}).items()}
    if not files:
        return
    folder = run_dir / FLIGHT
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if OURS.fullmatch(path.name) and path.name not in files and _age_s(path) > SAME_MOMENT_S:
            path.unlink(missing_ok=True)
    for name, data in files.items():
        atomic.write_bytes(folder / name, data)


def read_flights(run_dir: Path, errors: Mapping[int, str], *, since_ns: int) -> tuple[dict[str, Any], list[str]]:
    """The verdict on what was kept since then, as the document of ``stepscope flight --json``, and notices.

    ``errors``: the tracebacks that ranks left, which belong to it.  Empty where fewer than two ranks said anything:
    there is nothing to compare.  ``nccl_dumps`` are the ranks of which NCCL's watchdog wrote one.
    """
    from stepscope.flight.judge import judge
    from stepscope.flight.read import read_paths

    folder = run_dir / FLIGHT
    watchdogs = nccl_dumped(run_dir, since_ns=since_ns)
    files = [path for path in sorted(folder.glob("*")) if OURS.fullmatch(path.name) and _written_ns(path) >= since_ns]
    kept = {int(path.stem.removeprefix("rank_")) for path in files if path.suffix == ".json"}
    files = [path for path in files if not (path.suffix == ".json" and int(path.stem[5:]) in watchdogs)]
    files += watchdogs.values()
    if len(kept | watchdogs.keys()) < 2:
        return {}, []
    if sum(path.stat().st_size for path in files) > MAX_BYTES:
        return {}, [f"{FLIGHT}/ is large and was not looked at: stepscope flight {folder} does."]
    reading = read_paths(files, jobs=1)
    if not reading.dumps:
        return {}, []
    verdict = judge(
        reading.dumps,
        stacks=reading.stacks,
        errors=errors,
        unreadable=reading.unreadable,
        problems=reading.problems,
    )
    return {**verdict.to_dict(), NCCL_DUMPS: sorted(watchdogs)}, []


def nccl_dumped(run_dir: Path, *, since_ns: int) -> dict[int, Path]:
    """By rank, what NCCL's watchdog wrote since then."""
    found = {}
    for path in sorted((run_dir / FLIGHT).glob("*")):
        name = NCCLS.fullmatch(path.name)
        if name and _written_ns(path) >= since_ns:
            found[int(name[1])] = path
    return found


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _age_s(path: Path) -> float:
    return (time.time_ns() - _written_ns(path)) / 1e9
