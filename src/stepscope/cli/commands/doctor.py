"""``stepscope doctor``: check whether Stepscope works on this machine, and what it cannot see."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepscope import __version__
from stepscope.errors import UsageError
from stepscope.page.assets import explain_unbuilt, is_built
from stepscope.recorder.hooks import native
from stepscope.records.files import PRIVATE
from stepscope.records.paths import session_root
from stepscope.records.redaction import REDACTED, kept_environment
from stepscope.records.text import count_text, printable
from stepscope.ring.layout import DEFAULT_CAPACITY, HEADER_BYTES, WORD_BYTES
from stepscope.store.liveness import process_alive
from stepscope.store.paths import META

__all__ = ["checks", "privacy_checks"]

HELP = "check this machine: what Stepscope can and cannot measure here"

MOST_NAMED = 5
OLDEST_TORCH = (2, 10)
"""The oldest version that the tests run with."""
NO_COMPILER = "no C compiler was found when Stepscope was installed; install gcc, then Stepscope again"
GLYPH = {"good": "✔", "weak": "▲", "bad": "✖"}


@dataclass(frozen=True, kw_only=True)
class Check:
    state: Literal["good", "weak", "bad"]
    what: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="folder of runs to check (default: runs)")


def run(args: argparse.Namespace) -> int:
    found = list(checks(args.dir))
    for check in found:
        print(printable(f"{GLYPH[check.state]} {check.what}"))
        if check.advice:
            print(printable(f"    {check.advice}"))
    return 1 if any(check.state == "bad" for check in found) else 0


def checks(runs: Path) -> Iterator[Check]:
    yield Check(state="good", what=f"stepscope {__version__}, Python {sys.version.split()[0]}, {sys.platform}")
    yield _torch()
    if not is_built():
        yield Check(state="weak", what="no page and no report.html", advice=explain_unbuilt())
    if importlib.util.find_spec("stepscope.traces.reading.native_scan") is None:
        yield Check(
            state="weak",
            what="traces are read by Python alone, at less than half the speed",
            advice=NO_COMPILER,
        )
    if native.are_wanted() and importlib.util.find_spec("stepscope.recorder.hooks.native_hooks") is None:
        yield Check(state="weak", what="all hooks are in Python, at twice the cost of those in C", advice=NO_COMPILER)
    yield _shared_memory()
    yield from _stale_sessions()
    yield _runs(runs)
    yield from privacy_checks(runs)
    yield _alerts()
    yield _gpu()
    yield _pidfd()
    yield from _injection()


def _torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check(
            state="bad",
            what=f"torch is not installed for {sys.executable}",
            advice="install Stepscope in the same environment as torch",
        )
    version = importlib.metadata.version("torch")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) >= OLDEST_TORCH:
        return Check(state="good", what=f"torch {version}")
    oldest = ".".join(map(str, OLDEST_TORCH))
    if int(numbers[1]) < OLDEST_TORCH[0]:
        return Check(state="bad", what=f"torch {version}", advice=f"Stepscope needs torch {oldest} or later")
    return Check(
        state="weak",
        what=f"torch {version}",
        advice=f"Stepscope is tested with torch {oldest} and later; use one of these",
    )


def _shared_memory() -> Check:
    root = session_root().parent
    needed = HEADER_BYTES + DEFAULT_CAPACITY * WORD_BYTES
    free = shutil.disk_usage(root).free
    what = f"{root}: {free / 2**20:,.0f} MiB free; a rank's ring takes {needed / 2**20:.0f} MiB"
    if free < 8 * needed:
        return Check(
            state="weak",
            what=what,
            advice="rings that do not fit are kept in the run directory (docker: --shm-size=1g)",
        )
    return Check(state="good", what=what)


def _stale_sessions() -> Iterator[Check]:
    root = session_root()
    stale = (
        [session for session in root.glob("*") if session.is_dir() and not _in_use(session)] if root.is_dir() else []
    )
    if stale:
        yield Check(
            state="weak",
            what=f"{count_text(len(stale), 'session')} of crashed runs left in {root}",
            advice="`stepscope report RUN` adds them to their run; sessions without a run can be deleted",
        )


def _in_use(session: Path) -> bool:
    pids = [int(ring.stem) for ring in session.glob("*.ring") if ring.stem.isdigit()]
    if pids:
        return any(process_alive(pid, 0) for pid in pids)
    # A session of `stepscope.init()` is named after its process; any other may be about to get its first ring.
    pid, _, ticks = session.name.partition("-")
    return not (pid.isdigit() and ticks.isdigit()) or process_alive(int(pid), int(ticks))


def _runs(runs: Path) -> Check:
    folder = next(parent for parent in (runs.absolute(), *runs.absolute().parents) if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        what = f"{folder} is not writable" if folder.is_dir() else f"{folder} is not a folder"
        return Check(state="bad", what=what, advice="choose another folder with --dir")
    return Check(
        state="good",
        what=f"runs are stored in {runs.absolute()} ({shutil.disk_usage(folder).free / 2**30:,.0f} GiB free)",
    )


def privacy_checks(runs: Path) -> Iterator[Check]:
    """What a run records about its user, and who can read it."""
    names = list(kept_environment(os.environ))
    variables = f": {', '.join(names)}" if names else ""
    yield Check(
        state="good",
        what=f"stored in run.json: user, host, working directory, the command with secrets as {REDACTED}, and "
        f"{len(names)} of {len(os.environ)} environment variables{variables}",
        advice="output and tracebacks are stored unchanged in logs/ and errors/; "
        "to share a report: `stepscope report RUN --html FILE --redact`",
    )
    yield Check(
        state="good",
        what=f"only you can read a new run in {runs.absolute()} "
        f"(folders {PRIVATE:04o}, files {PRIVATE & 0o666:04o}), unless you share it with `run --share`",
    )
    shared = sorted(path.parent.name for path in runs.glob(f"*/{META}") if _others_can_read(path.parent))
    if shared:
        more = f" and {len(shared) - MOST_NAMED} more" if len(shared) > MOST_NAMED else ""
        yield Check(
            state="weak",
            what=f"other users can read {len(shared)} run(s) in {runs}: {', '.join(shared[:MOST_NAMED])}{more}",
            advice="`chmod -R go= RUN` makes a run private",
        )


def _others_can_read(run_dir: Path) -> bool:
    try:
        return bool(run_dir.stat().st_mode & 0o055)
    except OSError:
        return False


def _alerts() -> Check:
    """Whether a job that is started here would send alerts; says where a secret is, never what it is."""
    from stepscope.alerts.settings import receiver_text
    from stepscope.alerts.settings_files import load_settings

    try:
        settings = load_settings(Path.cwd(), (), os.environ)
    except UsageError as error:
        return Check(state="bad", what=f"alerts: {error}")
    if not settings.sends:
        return Check(state="good", what="alerts are sent nowhere; `stepscope run --alert slack` changes that")
    names = "; ".join(f"{name} ({receiver_text(receiver)})" for name, receiver in settings.receivers.items())
    return Check(
        state="good", what=f"alerts are sent to {names}", advice="`stepscope alerts check` tries to reach them"
    )


def _gpu() -> Check:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Check(state="weak", what="no NVIDIA driver: no GPU metrics, host times only")
    count = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    return Check(state="good", what=f"{count} NVIDIA GPU(s) visible through NVML")


def _pidfd() -> Check:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return Check(state="weak", what="no pidfd: the exit of a rank is detected by polling, up to 0.2 s late")
    return Check(state="good", what="the exit of a rank is detected immediately (pidfd)")


def _injection() -> Iterator[Check]:
    if sys.flags.ignore_environment:
        yield Check(state="bad", what="Python ignores PYTHONPATH here", advice="do not start the job with -E or -I")
    elif importlib.util.find_spec("sitecustomize") is not None:
        yield Check(state="good", what="you have a sitecustomize module; it runs after Stepscope's")
