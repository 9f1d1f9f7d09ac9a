"""``python -m stepscope.terminal --run-dir RUN``: the view of a job, which its launcher starts on the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from stepscope.errors import HubError
from stepscope.store.documents import read_hub_file
from stepscope.terminal.app import WatchApp
from stepscope.terminal.feed import Feed, RunAddress, address_from_hub_file


def main() -> int:
    parser = argparse.ArgumentParser(prog="stepscope.terminal", description="Show a running job on its own terminal.")
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir: Path = parser.parse_args().run_dir
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the job; the launcher ends us with SIGTERM

    def where() -> RunAddress:
        about = read_hub_file(run_dir)
        if about is None:
            raise HubError("the run no longer has a hub")
        return address_from_hub_file(about, run_dir.name)

    feed = Feed(where)
    feed.start()
    try:
        app = WatchApp(feed, beside_job=True)
        app.run(mouse=False)
        return app.return_code or 0
    finally:
        feed.close()


if __name__ == "__main__":
    sys.exit(main())
