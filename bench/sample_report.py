"""The sample reports: real runs of the gallery as pages that open offline, without the traces of this machine.

    make sample-report                          # writes docs/sample-report.html, the one that is in the repository
    python bench/sample_report.py hang a.html   # the report of the hang

The job runs in namespaces of its own (``unshare``), with another host name and without the machine's other processes,
which a finding would name; then ``stepscope report --html --redact`` leaves out paths, users and logs.
"""

from __future__ import annotations

import argparse
import base64
import getpass
import gzip
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPSCOPE = (sys.executable, "-m", "stepscope")
HOST = "localhost"
"""torchrun must be able to resolve it; the page has ``host-1``."""
SAMPLES = {
    "straggler": ("Rank 2 is", "--nproc-per-node", "4", "four_ranks.py"),
    "hang": ("Rank 1 called barrier", "--on-hang", "abort", "--nproc-per-node", "2", "hang.py"),
}
"""How the verdict begins, options and script."""
APART = ("unshare", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", f'hostname {HOST} && exec "$@"', "sh")
DATA = re.compile(rb'id="stepscope-data">([^<]*)<')
MOST_BYTES = 1_000_000


def make(name: str, target: Path) -> None:
    verdict, *options, script = SAMPLES[name]
    with tempfile.TemporaryDirectory() as folder:
        run = (*STEPSCOPE, "run", "--dir", folder, "--name", name, *options, str(ROOT / "examples/gallery" / script))
        subprocess.run((*APART, *run), check=False)  # an aborted job fails
        subprocess.run((*STEPSCOPE, "report", f"{folder}/{name}", "--html", str(target), "--redact"), check=True)
        private = [folder, str(ROOT), str(Path.home()), socket.gethostname(), getpass.getuser() + "@"]
    found = [text for text in private if text.encode() in documents(target)]
    if found:
        sys.exit(f"{target} contains {', '.join(found)}")
    if verdict.encode() not in documents(target):
        sys.exit(f"{target} has no verdict {verdict!r}: the machine was too busy, or the run failed")
    size = target.stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"{target} has {size:,} bytes; the limit is {MOST_BYTES:,}")
    print(f"{target}: {size:,} bytes")


def documents(page: Path) -> bytes:
    """The data inside the page, as text."""
    data = page.read_bytes()
    match = DATA.search(data)
    if match is None:
        sys.exit(f"{page} contains no data")
    return gzip.decompress(base64.b64decode(match[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sample", nargs="?", choices=SAMPLES, default="straggler")
    parser.add_argument("target", nargs="?", type=Path, default=ROOT / "docs" / "sample-report.html")
    args = parser.parse_args()
    make(args.sample, args.target)


if __name__ == "__main__":
    main()
