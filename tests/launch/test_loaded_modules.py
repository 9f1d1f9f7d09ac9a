"""What is loaded before a script's first line: every module there delays the start of each run and each rank.

Add a module to these lists only if the script cannot start without it; else import it later, in the function that uses
it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

LAUNCHER = """
    agent agent.hangs agent.hangs.on_hang alerts alerts.settings_places cli cli.arguments cli.commands cli.commands.run
    cli.launch cli.launch.command cli.launch.helpers cli.launch.record cli.main cli.streams errors hangs
    hangs.thresholds page page.links recorder recorder.identity records records.files records.paths records.redaction
    records.run_clock records.steps records.text store store.create store.documents store.file_io store.liveness
    store.paths store.user_runs
"""
"""Ours, without the package's name."""
NOT_IN_LAUNCHER = """
    asyncio email http importlib.metadata logging multiprocessing numpy duckdb platform random secrets ssl statistics
    subprocess sysconfig tempfile
"""
RANK = """
    recorder recorder.bootstrap recorder.failure recorder.guard recorder.identity recorder.output recorder.variables
    records records.files records.paths records.run_clock records.text errors
"""
NOT_IN_RANK = f"{NOT_IN_LAUNCHER} dataclasses hashlib importlib.abc inspect mmap shutil socket torch"
NOT_IN_RANK = NOT_IN_RANK.replace("sysconfig", "")  # loaded on purpose: see recorder/bootstrap.py

LAUNCHES = """
import os
import sys

def spawn(*_args, **_options):
    sys.stdout.write("\\n".join(sys.modules))
    sys.stdout.flush()
    os._exit(0)

os.posix_spawn = spawn
sys.argv = ["stepscope", "run", "--name", "loaded", "train.py"]
from stepscope.cli.main import main
main()
"""

FIRST_LINE = """
import sys
before = list(sys.modules)
print(*before, sep="\\n")
"""


def ours(names: set[str]) -> set[str]:
    return {name.partition(".")[2] for name in names if name.startswith("stepscope.")}


def test_what_the_launcher_loads_before_it_starts_the_script(run_python: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = run_python("-c", LAUNCHES)
    assert done.code == 0, done.stderr
    loaded = set(done.stdout.split())
    assert ours(loaded) == set(LAUNCHER.split())
    assert loaded & set(NOT_IN_LAUNCHER.split()) == set()


def test_what_a_rank_loads_before_its_first_line(
    run_stepscope: Callable[..., Any], script: Callable[..., Path]
) -> None:
    done = run_stepscope("run", "--quiet", script(FIRST_LINE), env={"STEPSCOPE_WHOLE_TORCH": "1"})
    assert done.code == 0, done.stderr
    loaded = set(done.stdout.split())
    assert ours(loaded) == set(RANK.split())
    assert loaded & set(NOT_IN_RANK.split()) == set()
