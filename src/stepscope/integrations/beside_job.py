"""The process that exports a run while its job runs (``stepscope run --to``); the launcher starts and ends it.

    python -m stepscope.integrations.beside_job --run-dir RUN --to tensorboard:logs --to wandb

Standard input: one line when the run is over and its summary is written, or nothing if the launcher died.  Standard
output: one JSON line at the end, what became of each destination.  What libraries print goes to ``logs/export.log``.
A tool that hangs is left alone ``ANSWERS_WITHIN_S`` after the end, so that the launcher does not wait for it; one that
works may take ``WORKS_AT_MOST_S``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stepscope.assistant.hub_api import HubApi, RequestError
from stepscope.hub.runs import Runs
from stepscope.integrations.exporter import Outcome, export, parse_destinations, tool_defaults
from stepscope.integrations.run_feed import RunFeed
from stepscope.records.dataclass_json import encoded
from stepscope.records.files import file_mode

__all__ = ["main"]

NICE = 10
EVERY_S = 10.0
ENDING_S = 0.5
"""Between two looks at a run that is about to be over."""
ENDS_WITHIN_S = 60.0
"""How long after the launcher's last word a run may take to be over; then what was written is all."""
FIRST_STEP_S = 1.0
"""Between two looks at a run that has not begun."""
ANSWERS_WITHIN_S = 20.0
"""How long a call of a tool may wait when the run is over …"""
WORKS_AT_MOST_S = 50.0
"""… and how long it may take in all; the launcher waits for ``EXPORTER_END_S`` (cli/launch/helpers.py)."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="stepscope.integrations.beside_job", description="Export a run while it runs."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--to", action="append", required=True)
    parser.add_argument("--page", default="")
    args = parser.parse_args(arguments)
    os.nice(NICE)
    heard = _own_output(args.run_dir)
    outcomes = asyncio.run(_follow(args.run_dir, args.to, args.page))
    with suppress(BrokenPipeError):  # the launcher died
        os.write(heard, json.dumps({"exported": [encoded(outcome) for outcome in outcomes]}).encode() + b"\n")
    if any(outcome.hangs for outcome in outcomes):
        sys.stdout.flush()
        os._exit(0)  # what a library runs at exit would hang, too
    return 0


def _own_output(run_dir: Path) -> int:
    """Send what libraries print to a log; return the descriptor of the launcher's pipe."""
    heard = os.dup(1)
    path = run_dir / "logs" / "export.log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, file_mode(run_dir))
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    return heard


async def _follow(run_dir: Path, words: Sequence[str], page: str) -> tuple[Outcome, ...]:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def heard() -> None:
        loop.remove_reader(0)
        ended.set()

    loop.add_reader(0, heard)
    left_s = ENDS_WITHIN_S

    async def wait() -> None:
        nonlocal left_s
        if ended.is_set():
            left_s -= ENDING_S
            if left_s <= 0:
                raise TimeoutError("the run did not end")
            await asyncio.sleep(ENDING_S)
            return
        with suppress(asyncio.TimeoutError):  # until Python 3.10 another class than TimeoutError
            await asyncio.wait_for(ended.wait(), EVERY_S)

    api = HubApi(Runs.of_folder(run_dir))
    try:
        feed = await _begun(api, run_dir, ended)
        if feed is None:
            return ()
        destinations = parse_destinations(words)
        os.environ.update(tool_defaults(destinations, os.environ))
        return await export(
            feed,
            destinations,
            run_dir=run_dir,
            page=page,
            wait=wait,
            tell=lambda text: print(text, flush=True),
            patience_s=ANSWERS_WITHIN_S,
            longest_s=WORKS_AT_MOST_S,
        )
    finally:
        await api.close()


async def _begun(api: HubApi, run_dir: Path, ended: asyncio.Event) -> RunFeed | None:
    """The run, once something of it is recorded; None if nothing ever was."""
    feed = RunFeed(api, run_dir.name)
    while True:
        with suppress(RequestError):
            await feed.about()
            return feed
        if ended.is_set():
            return None
        with suppress(asyncio.TimeoutError):  # until Python 3.10 another class than TimeoutError
            await asyncio.wait_for(ended.wait(), FIRST_STEP_S)


if __name__ == "__main__":
    sys.exit(main())
