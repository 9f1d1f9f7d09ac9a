"""Processes of ours beside the job: they find this Stepscope, and nothing that lies where they are started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from stepscope.records.paths import helper_command, helper_environment

PLANTED = ("argparse", "contextlib", "json", "runpy", "signal", "sitecustomize_not", "typing")


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with files named like modules of the standard library, which tell when they run."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w')\nraise SystemExit('planted')\n")
    return tmp_path


def started(folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = helper_environment(environ)
    environment.pop("PYTHONSAFEPATH", None)  # as for Python 3.10, which does not know it
    command = helper_command("stepscope", "--version")
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.few(2)
@pytest.mark.parametrize("path", [None, "", os.pathsep, f".{os.pathsep}./", "HERE", f"HERE{os.pathsep}"])
def test_files_in_the_working_directory_do_not_run(planted: Path, path: str | None) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environ["PYTHONPATH"] = path.replace("HERE", str(planted))
    done = started(planted, environ)
    assert (done.returncode, done.stderr, done.stdout.split()[0]) == (0, "", "stepscope")
    assert not list(planted.glob("ran-*"))


def test_pythonpath_is_kept_but_for_the_working_directory(tmp_path: Path) -> None:
    environment = helper_environment({"PYTHONPATH": os.pathsep.join(["", "/a", ".", "b"]), "OTHER": "x"})
    folders = environment["PYTHONPATH"].split(os.pathsep)
    assert (folders[:2], environment["OTHER"]) == (["/a", "b"], "x")
    (tmp_path / "made_up_tool.py").write_text("import sys; print(sys.argv[1:], __name__)")
    command = helper_command("made_up_tool", "one", "--two")
    done = subprocess.run(
        command, env=helper_environment({**os.environ, "PYTHONPATH": str(tmp_path)}), capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("['one', '--two'] __main__\n", "")
