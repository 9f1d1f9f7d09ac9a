"""``errors/``: what dying processes wrote, under the ranks that they are shown as."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stepscope.records.series import RankError, RankSeries
from stepscope.store.reading import read_document

__all__ = ["Numbers", "read_errors"]


class Numbers:
    """The rank that each process is shown as.  Processes of different hosts may have the same pid."""

    def __init__(self, ranks: Iterable[RankSeries], here: str) -> None:
        """``here``: the host of those that do not say theirs."""
        self._here = here
        self._by_host: dict[tuple[str, int], int | None] = {}
        self._by_pid: dict[int, int | None] = {}
        for series in ranks:
            who, pid = (series.identity.host, series.identity.pid), series.identity.pid
            self._by_host[who] = None if who in self._by_host else series.rank
            self._by_pid[pid] = None if pid in self._by_pid else series.rank

    def of(self, pid: int, host: str | None = None) -> int | None:
        """None: nobody, or two processes had it one after the other."""
        who = (host or self._here, pid)
        return self._by_host[who] if who in self._by_host else self._by_pid.get(pid)

    def on(self, host: str) -> Callable[[int], int | None]:
        """The same for the pids of one host."""
        return lambda pid: self.of(pid, host)


def read_errors(run_dir: Path, numbers: Numbers, offsets: Mapping[str, int]) -> tuple[tuple[RankError, ...], list[str]]:
    """The errors in order of death, and a notice for each file that is none.

    ``offsets``: what the clocks of other nodes are ahead, by spool.
    """
    errors: list[RankError] = []
    notices: list[str] = []
    for file in sorted((run_dir / "errors").glob("*.json")):
        try:
            errors.append(_error_of(json.loads(read_document(file)), numbers, offsets))
        except (OSError, ValueError, RecursionError):
            notices.append(f"errors/{file.name} could not be read.")
    return tuple(sorted(errors, key=lambda error: error.wall_ns)), notices


def _error_of(raw: Any, numbers: Numbers, offsets: Mapping[str, int]) -> RankError:
    if not isinstance(raw, dict) or not isinstance(raw.get("pid"), int):
        raise ValueError("not an error of ours")  # noqa: TRY004  # like every other fault of the bytes
    rank, codes, step, host, wall_ns = (raw.get(key) for key in ("rank", "exit_codes", "step", "host", "wall_ns"))
    if isinstance(rank, int):
        shown = numbers.of(raw["pid"], host if isinstance(host, str) else None)
        rank = rank if shown is None else shown
    wall_ns = wall_ns if isinstance(wall_ns, int) else 0
    return RankError(
        rank=rank if isinstance(rank, int) else None,
        pid=raw["pid"],
        type=str(raw.get("type", "")),
        message=str(raw.get("message", "")),
        traceback=str(raw.get("traceback", "")),
        wall_ns=wall_ns and wall_ns - offsets.get(str(raw.get("spool")), 0),
        step=step if isinstance(step, int) else None,
        script=raw.get("script") is True,
        exit_codes={int(k): int(v) for k, v in codes.items()} if isinstance(codes, dict) else {},
    )
