"""Jobs that hang or die, with the truth about them, and healthy ones that look as if they did.

What ``make hangs`` runs; tests/hangs_real runs those that are ``quick``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.records.hang import HangRecord
from stepscope.store.file_io import read_jsonl
from stepscope.store.live.failures import read_hangs

__all__ = ["CALM", "FAULTS", "FORKED_RANKS", "SCRIPTS", "CalmCase", "FaultCase", "Told", "command", "line_of", "told"]

SCRIPTS = Path(__file__).resolve().parent / "jobs"
FORKED_RANKS = SCRIPTS.parents[1] / "src" / "stepscope" / "demo" / "ranks.py"
TITLES = {
    "skip": "skipped collective",
    "other": "other collective",
    "shape": "other shape, gloo waits",
    "dtype": "other dtype, gloo waits",
    "shape_abort": "other shape, gloo aborts",
    "dtype_abort": "other dtype, gloo aborts",
    "sleep": "sleep",
    "loader": "stuck DataLoader",
    "worker": "stuck worker process",
    "worker_stop": "stopped worker process",
    "deadlock": "deadlock over two groups",
    "stop": "SIGSTOP",
    "gil_lock": "C call waits with the GIL held",
    "gil_sleep": "C call sleeps with the GIL held",
    "gil_busy": "C call computes with the GIL held",
    "recv": "unmatched recv",
    "kill": "SIGKILL",
    "exception": "exception",
    "memory": "out of memory, MemoryError",
    "kernel_memory": "out of memory, killed by the kernel",
    "exit": "exit without cleanup",
}


@dataclass(frozen=True, kw_only=True)
class FaultCase:
    fault: str
    """Of hang_job.py."""
    ranks: int
    kinds: tuple[str, ...]
    """Each of them is right."""
    culprits: tuple[int, ...] = (1,)
    line: bool = True
    """Whether the line can be had: a process that is stopped or gone says nothing."""
    dies: bool = False
    quick: bool = False

    @property
    def id(self) -> str:
        return f"{self.fault}-{self.ranks}"

    @property
    def title(self) -> str:
        return TITLES[self.fault]

    @property
    def victims(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.ranks)) - set(self.culprits)))

    def script(self) -> list[str]:
        return [str(SCRIPTS / "hang_job.py"), "--fault", self.fault]


@dataclass(frozen=True, kw_only=True)
class CalmCase:
    do: str
    """Of calm_job.py."""
    ranks: int = 2
    args: tuple[str, ...] = ()
    seconds: float | None = None
    """How long the long things of it take in ``make hangs``."""

    @property
    def id(self) -> str:
        return f"{self.do.replace(',', '+')}-{self.ranks}"

    def script(self, seconds: float | None) -> list[str]:
        long = ["--seconds", str(seconds)] if seconds is not None else []
        return [str(SCRIPTS / "calm_job.py"), "--do", self.do, *long, *self.args]


def _both(fault: str, *kinds: str, quick: Sequence[int] = (2,), **more: Any) -> list[FaultCase]:
    return [FaultCase(fault=fault, ranks=ranks, kinds=kinds, quick=ranks in quick, **more) for ranks in (2, 4)]


MISSING, MISMATCH = "hang_missing_collective", "hang_mismatch"

FAULTS: tuple[FaultCase, ...] = (
    *_both("skip", MISSING),
    *_both("other", MISMATCH),
    *_both("shape", MISMATCH),
    *_both("dtype", MISMATCH, quick=()),
    *_both("shape_abort", MISMATCH, dies=True, line=False, quick=()),
    *_both("dtype_abort", MISMATCH, dies=True, line=False, quick=()),
    *_both("sleep", MISSING, quick=()),
    *_both("loader", "hang_input"),
    *_both("worker", "hang_input", quick=()),
    *_both("worker_stop", "hang_input", line=False, quick=()),
    FaultCase(fault="deadlock", ranks=2, kinds=("hang_deadlock",), culprits=(0, 1)),
    FaultCase(fault="deadlock", ranks=4, kinds=("hang_deadlock",), culprits=(0, 1, 2, 3), quick=True),
    *_both("stop", "hang_host", line=False),
    *_both("gil_lock", "hang_host"),
    *_both("gil_sleep", "hang_host", quick=()),
    *_both("gil_busy", "hang_host", quick=()),
    *_both("recv", MISSING, quick=(4,)),
    *_both("kill", "rank_crashed", dies=True, line=False, quick=()),
    *_both("exception", "rank_crashed", dies=True),
    *_both("memory", "rank_crashed", dies=True, quick=()),
    *_both("kernel_memory", "rank_crashed", dies=True, line=False, quick=()),
    *_both("exit", "rank_crashed", dies=True, line=False, quick=()),
)

CALM: tuple[CalmCase, ...] = (
    CalmCase(do="plain"),
    CalmCase(do="plain", ranks=4),
    CalmCase(do="evaluate", seconds=20),
    CalmCase(do="evaluate_quietly", seconds=20),
    CalmCase(do="figures", seconds=20),
    CalmCase(do="run_program", seconds=20),
    CalmCase(do="evaluate_everywhere", seconds=20),
    CalmCase(do="checkpoint", seconds=30),
    CalmCase(do="save_checkpoint", seconds=30),
    CalmCase(do="compute", seconds=20),
    CalmCase(do="copy_data", seconds=20),
    CalmCase(do="compiled"),
    CalmCase(do="first_batch", seconds=8),
    CalmCase(do="prepare", seconds=20),
    CalmCase(do="uneven"),
    CalmCase(do="uneven", ranks=4),
    CalmCase(do="workers"),
    CalmCase(do="epochs"),
    CalmCase(do="accumulate"),
    CalmCase(do="fsdp"),
    CalmCase(do="fsdp", ranks=4),
    CalmCase(do="tensor_parallel"),
    CalmCase(do="mesh", ranks=4),
    CalmCase(do="join"),
    CalmCase(do="ends_apart", seconds=20),
    CalmCase(do="two_nets"),
    CalmCase(do="pipeline", ranks=4),
    CalmCase(do="asynchronous"),
    CalmCase(do="big_exchange"),
)


def command(
    case: FaultCase | CalmCase,
    *,
    folder: Path,
    options: Sequence[str] = (),
    seconds: float | None = None,
    forked: bool = False,
) -> list[str]:
    """What runs a case; its run goes into ``folder``/runs, its marks into ``folder``/marks.

    By torchrun, or ``forked``, which starts in half the time.
    """
    script = case.script() if isinstance(case, FaultCase) else case.script(seconds)
    run = [sys.executable, "-m", "stepscope", "run", "--dir", str(folder / "runs"), "--name", case.id, *options]
    launcher = [str(FORKED_RANKS)] if forked else ["--nproc-per-node"]
    return [*run, *launcher, str(case.ranks), *script, "--marks", str(folder / "marks")]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a run says about how it went."""

    kind: str = ""
    """Of the first hang, or else of the finding that says what ended it; empty: nothing did."""
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    at: tuple[str, ...] = ()
    """``hang_job.py:98`` of each culprit whose line is known."""
    title: str = ""
    wall_ns: int = 0
    """When it was told."""
    hangs: int = 0
    not_hangs: tuple[str, ...] = ()
    """Why the watchdog, having looked, said nothing."""
    record: HangRecord | None = None


def told(run_dir: Path) -> Told:
    events = read_jsonl(run_dir / "events.jsonl")[0]
    quiet = tuple(str(event["reason"]) for event in events if event["event"] == "not_a_hang")
    hangs, _ = read_hangs(run_dir)
    if hangs:
        return Told(
            kind=hangs[0].kind,
            culprits=tuple(sorted(culprit.rank for culprit in hangs[0].culprits)),
            victims=tuple(sorted(hangs[0].victims)),
            at=tuple(f"{Path(c.at.file).name}:{c.at.line}" for c in hangs[0].culprits if c.at is not None),
            title=hangs[0].title,
            wall_ns=hangs[0].declared_wall_ns,
            hangs=len(hangs),
            not_hangs=quiet,
            record=hangs[0],
        )
    path = run_dir / "summary.json"
    found = json.loads(path.read_text())["findings"] if path.exists() else []
    stopped = [finding for finding in found if finding["kind"].startswith(("hang_", "rank_"))]
    if not stopped:
        return Told(not_hangs=quiet)
    return Told(
        kind=stopped[0]["kind"],
        culprits=tuple(stopped[0]["ranks"]),
        title=stopped[0]["title"],
        wall_ns=path.stat().st_mtime_ns,
        not_hangs=quiet,
    )


def line_of(fault: str) -> str:
    """``hang_job.py:98``, where a rank that does this stands."""
    for number, text in enumerate((SCRIPTS / "hang_job.py").read_text().splitlines(), 1):
        if text.strip() == f"# stops: {fault.removesuffix('_abort')}":
            return f"hang_job.py:{number + 1}"
    raise LookupError(fault)
