"""The files of this repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def committed_files(root: Path) -> list[Path]:
    """Tracked files and those about to be; skips where there is no git."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [root / name for name in listing.stdout.decode().split("\0") if name and (root / name).is_file()]
