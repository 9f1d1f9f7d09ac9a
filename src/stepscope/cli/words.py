"""From the words after ``stepscope run`` to the command that starts the job."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from stepscope.errors import UsageError

__all__ = ["job_command", "split_job"]


def split_job(words: Sequence[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """Our own words and the job's, which begin at ``--``, ``-m`` or the first word that is no option of ours.

    ``options`` are those of ours that take a value.
    """
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--"):
        at += 2 if words[at] in options else 1
    return list(words[:at]), list(words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:])


def job_command(words: Sequence[str], nproc_per_node: str | None = None) -> list[str]:
    """A script, ``-m module`` or any launcher with its own arguments; UsageError for what cannot be started."""
    if not words:
        raise UsageError("nothing to run; try `stepscope run train.py`")
    first = words[0]
    if first == "-m":
        if len(words) == 1:
            raise UsageError("-m needs the name of a module")
    elif first.endswith(".py"):
        _check_script(Path(first))
    elif nproc_per_node is not None:
        raise UsageError(
            f"--nproc-per-node starts torchrun for a script; {first} is given its own processes by its own flags"
        )
    else:
        return [_executable(first), *words[1:]]
    if nproc_per_node is None:
        return [sys.executable, *words]
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"--nproc-per-node needs torch, and {sys.executable} has none")
    # Standalone: a free port of its own, so that two jobs on one machine do not meet.
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nproc_per_node, *words]


def _check_script(script: Path) -> None:
    if script.is_dir():
        raise UsageError(f"{script} is a folder, not a script")
    if not script.exists():
        raise UsageError(f"no such script: {script}")


def _executable(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        hint = f"; a script must end in .py, or be started as `python {name}`" if Path(name).is_file() else ""
        raise UsageError(f"cannot start {name}: not found, or not executable{hint}")
    return found
