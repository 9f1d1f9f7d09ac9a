"""``deploy/container/Dockerfile``: what it copies is all that a build of Stepscope reads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import stepscope


def copied(root: Path) -> list[str]:
    """Files and folders that the Dockerfile copies out of the repository."""
    text = (root / "deploy" / "container" / "Dockerfile").read_text()
    lines = re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
    return [name for line in lines for name in line.split()[:-1]]


def tracked(root: Path, *paths: str) -> set[str]:
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.splitlines() if (root / name).is_file()}


def test_a_wheel_can_be_built_from_what_is_copied(root: Path, tmp_path: Path) -> None:
    """Without a network: no page, and no isolated environment."""
    source = tmp_path / "source"
    for name in tracked(root, *copied(root)):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, source / name)
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    words += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    without = {"STEPSCOPE_NO_PAGE": "1", "STEPSCOPE_PURE_PYTHON": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, env=without)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"stepscope-{stepscope.__version__}-py3-none-any.whl"
    built = set(zipfile.ZipFile(wheel).namelist())
    assert {name.removeprefix("src/") for name in tracked(root, "src")} <= built


def test_the_build_context_has_what_is_copied(root: Path) -> None:
    lines = (root / "deploy" / "container" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == set(copied(root))
