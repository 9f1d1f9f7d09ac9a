"""Run one public program once, bare or recorded, with another load beside it or none."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from job_process import finish_job

from public.cases import REPOSITORIES, Program

__all__ = ["LOADS", "Outcome", "burners", "commit_of", "problem_of", "run_program"]

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
LIMIT_S = 600.0
"""Of one run: several times what the slowest takes beside a full load."""
LOADS = ("none", "one", "all", "bursts")
BURN = "while True: sum(range(20_000))"
BURST = """
import time
while True:
    end = time.monotonic() + 2
    while time.monotonic() < end:
        sum(range(20_000))
    time.sleep(3)
"""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
    "NO_COLOR": "1",
    "WANDB_MODE": "disabled",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int | None
    """None: it ran past its limit and was killed."""
    seconds: float
    text: str
    """Standard output and standard error, without our own lines."""
    summary: dict[str, Any]
    """Empty for a bare run."""


def commit_of(checkout: Path) -> str:
    """The commit that is checked out there; "" where that is unknown."""
    marker = checkout / ".commit"
    if marker.is_file():
        return marker.read_text().strip()
    words = ["git", "-C", str(checkout), "rev-parse", "--show-toplevel", "HEAD"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = result.stdout.split()
    return lines[1] if result.returncode == 0 and Path(lines[0]) == checkout.resolve() else ""


def problem_of(program: Program, checkouts: Path) -> str:
    """Why it cannot run here; "" when it can."""
    repository = REPOSITORIES[program.repository]
    checkout = checkouts / program.repository
    if not checkout.is_dir():
        return f"no checkout {checkout}; expected {repository.address} at {repository.commit[:12]}"
    missing = [package for package in program.needs if not _installed(package)]
    return f"not installed: {', '.join(missing)} (requirements/public.txt)" if missing else ""


@cache
def _installed(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


@cache
def _needs_standin() -> bool:
    """Whether the installed torchvision cannot be imported as it is."""
    if not _installed("torchvision"):
        return False
    result = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False)
    return result.returncode != 0


@contextlib.contextmanager
def burners(load: str) -> Iterator[None]:
    """Processes that use one core, all cores, or all cores two seconds of five."""
    count = {"none": 0, "one": 1}.get(load, os.cpu_count() or 1)
    words = [sys.executable, "-c", BURST if load == "bursts" else BURN]
    processes = [subprocess.Popen(words) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_program(
    program: Program, checkouts: Path, folder: Path, *, recorded: bool, fault: str = "", load: str = "none"
) -> Outcome:
    """Run it to its end; ``folder`` then holds its data, its output (``log``) and, recorded, ``runs/job``."""
    shutil.rmtree(folder, ignore_errors=True)
    checkout = (checkouts / program.repository).resolve()
    # Nothing that one run compiled helps the next: the recorded run compiles with our hooks in place.
    own = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), **_paths(program, checkout)}
    variables = {**QUIET, **own, **program.variables}
    _write_data(program, folder, variables)
    for name in program.links:
        (folder / "work" / name).symlink_to(checkout / name)
    words = [*program.launcher]
    if recorded:
        # Spelled out, because the job's own PYTHONPATH must not decide which Stepscope records it.
        words = [sys.executable, "-m", "stepscope", "run", "--quiet", "--no-html", "--name", "job"]
        words += ["--dir", str(folder / "runs"), *program.launcher]
    alterations = [name for name in (program.alteration, fault) if name]
    words += [str(HERE / "altered.py"), ",".join(alterations)] if alterations else []
    words += program.script.split() if program.script.startswith("-m ") else [str(checkout / program.script)]
    words += program.args.split()
    began_s = time.monotonic()
    with burners(load):
        code = finish_job(
            words,
            folder / "log",
            limit_s=LIMIT_S,
            variables=variables,
            cwd=folder / "work",
        )
    path = folder / "runs" / "job" / "summary.json"
    lines = (folder / "log").read_text(errors="replace").splitlines()
    outcome = Outcome(
        code=code,
        seconds=time.monotonic() - began_s,
        text="\n".join(line for line in lines if not line.startswith("stepscope")),
        summary=json.loads(path.read_text()) if path.exists() else {},
    )
    (folder / "outcome.json").write_text(json.dumps({**asdict(outcome), "summary": {}}))
    return outcome


def _write_data(program: Program, folder: Path, variables: Mapping[str, str]) -> None:
    """Written once for all runs of a program beside this one."""
    source = folder.parent / f"data-{program.name}"
    if not source.exists():
        (source / "work").mkdir(parents=True)
        path = os.pathsep.join([str(HERE.parent), variables["PYTHONPATH"]])
        words = [sys.executable, "-m", "public.data", program.name, str(source)]
        subprocess.run(words, env={**os.environ, **variables, "PYTHONPATH": path}, check=True)
    shutil.copytree(source, folder)


def _paths(program: Program, checkout: Path) -> dict[str, str]:
    folders = [str(SOURCE), *(str(checkout / name) for name in program.import_path)]
    if _needs_standin():
        folders.append(str(HERE / "standin"))
    return {"PYTHONPATH": os.pathsep.join(folders)}
