"""``python -m stepscope.captures RUN/captures/ID``: analyze a capture and replace its ``capture.json``.

The run's hub starts it at low priority, with limits on its time and memory, and leaves the record alone until it ends.
With ``--wait`` it loads its modules and begins when it reads a line from standard input; without one it just ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepscope.captures.analyze import analyze_capture
from stepscope.store.captures import is_capture_id, write_capture

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    folder = Path(words[-1])
    if not is_capture_id(folder.name):
        print(f"{folder} is not the folder of a capture", file=sys.stderr)
        return 2
    if "--wait" in words[:-1] and not sys.stdin.buffer.readline():
        return 0
    record = replace(analyze_capture(folder), done_wall_ns=time.time_ns())
    write_capture(folder.parent.parent, record)
    return 0 if record.state == "done" else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
