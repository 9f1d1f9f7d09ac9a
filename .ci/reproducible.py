"""Build the wheel and the source distribution twice, under different conditions, and compare the bytes.

    python .ci/reproducible.py            # with the page that was built here
    python .ci/reproducible.py --page     # each time builds the page, too (downloads its packages)

The two builds have different folders, umasks, time zones, languages and dates of files.  Needs hatchling.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATIC = "src/stepscope/page/static"
CONDITIONS: dict[str, tuple[int, str, str, float]] = {
    "first": (0o022, "UTC", "C", 0.0),
    "second/folder": (0o077, "Asia/Tokyo", "C.UTF-8", 86_400.0),
}
"""By folder: umask, time zone, language, age of the files in seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="build the page each time")
    parser.add_argument("--dist", type=Path, help="folder to keep the built files in")
    args = parser.parse_args()
    if not args.page and not (ROOT / STATIC / "index.html").is_file():
        sys.exit("there is no built page; run `make page`, or add --page")
    with tempfile.TemporaryDirectory(prefix="stepscope-reproducible-") as folder:
        sources = snapshot(Path(folder) / "sources", args.page)
        builds = [build(Path(folder) / name, sources, name) for name in CONDITIONS]
        if args.dist:
            shutil.copytree(builds[0], args.dist, dirs_exist_ok=True)
        first, second = ({path.name: checksum(path) for path in sorted(built.iterdir())} for built in builds)
    for name in sorted({*first, *second}):
        same = first.get(name) == second.get(name)
        print(f"{'same' if same else 'DIFFERENT'}  {first.get(name, '-')[:16]}  {second.get(name, '-')[:16]}  {name}")
    sys.exit(first != second)


def snapshot(folder: Path, page: bool) -> Path:
    """Copy what git knows or would add, and the page if it is not to be built."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    built = [] if page else [str(path.relative_to(ROOT)) for path in (ROOT / STATIC).rglob("*")]
    for name in [*filter(None, listed.stdout.split("\0")), *built]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def build(folder: Path, sources: Path, condition: str) -> Path:
    """Build both files in a copy and return the folder that they are in."""
    umask, zone, language, age_s = CONDITIONS[condition]
    before = os.umask(umask)
    try:
        shutil.copytree(sources, folder, copy_function=shutil.copyfile)
        now = time.time()
        for path in folder.rglob("*"):
            os.utime(path, (now - age_s, now - age_s))
        environment = {"SOURCE_DATE_EPOCH": "1700000000", **os.environ, "TZ": zone, "LC_ALL": language}
        command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", "built"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not (folder / STATIC / "index.html").is_file():
            sys.exit(done.stdout + done.stderr)
    finally:
        os.umask(before)
    return folder / "built"


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
