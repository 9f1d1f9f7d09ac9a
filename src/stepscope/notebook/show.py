"""``stepscope.show()``: a run's page in the cell of a notebook, the data inside; its summary where there is no cell."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from stepscope.cli.located import located
from stepscope.errors import UsageError
from stepscope.notebook.cells import frame_of_page, in_notebook, put, told_above
from stepscope.records.messages import printable
from stepscope.records.places import helper_command, helper_environment
from stepscope.store.paths import META, REPORT_FILE, SUMMARY

__all__ = ["show"]

TIMEOUT_S = 300.0
HEIGHT = 900
HINT = "If nothing is below, the notebook is not trusted yet or cannot show frames; `{making}` makes a file of it."


def show(run: str | os.PathLike[str] | None = None, *, height: int = HEIGHT) -> None:
    """Show a run: a folder, or the name of one in ``runs/``; the newest there if none is named.

    In a notebook its page, which works without a network and stays in the notebook's file (a few hundred kilobytes to
    3 MB); anywhere else its summary as text.  What has to be computed is computed in a process of its own.
    """
    try:
        run_dir = located(None if run is None else Path(run))
    except UsageError as error:
        print(printable(f"stepscope: {error}"))
        return
    if not (run_dir / META).is_file():
        print(printable(f"stepscope: {run_dir} is not a run"))
        return
    page = _page(run_dir) if in_notebook() else None
    if page is None:
        print(_text(run_dir), end="")
        return
    frame = frame_of_page(page, title=f"Stepscope: {run_dir.name}", height=height)
    words = f"Stepscope: {run_dir}"
    put(told_above(frame, link="", words=words, hint=HINT.format(making=f"stepscope report {run_dir} --html")), words)


def _page(run_dir: Path) -> str | None:
    """The one that lies in the run, unless there is a newer summary; else one made now.  None: it cannot be made."""
    kept = run_dir / REPORT_FILE
    try:
        if kept.stat().st_mtime_ns >= (run_dir / SUMMARY).stat().st_mtime_ns:
            return kept.read_text()
    except OSError:
        pass  # it goes on, or was killed, or is of a time before there was this file
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        made = Path(folder, REPORT_FILE)
        done = _stepscope("report", "--quiet", str(run_dir), "--html", str(made))
        if done.returncode == 0:
            return made.read_text()
        print(done.stderr.strip() or "stepscope: the page cannot be made", file=sys.stderr)
    return None


def _text(run_dir: Path) -> str:
    done = _stepscope("report", "--no-color", str(run_dir))
    return done.stdout if done.returncode == 0 else done.stderr


def _stepscope(*words: str) -> subprocess.CompletedProcess[str]:
    command = helper_command("stepscope", *words)
    try:
        return subprocess.run(
            command,
            env=helper_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", f"stepscope: {error}\n")
