"""Wait for a job to get somewhere, then hurt it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import until

PATIENCE_S = 60.0


class Patient:
    """A ``stepscope run`` in the background, and what is known of its processes."""

    def __init__(self, commands: Any, process: subprocess.Popen[str]) -> None:
        self._commands = commands
        self.process = process
        self.printed = ""

    def wait_for(self, *texts: str) -> None:
        """Until the job has printed all of these."""
        assert self.process.stdout is not None
        while any(text not in self.printed for text in texts):
            # Not readline: it would take more than the line, which finish would then miss.
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                pytest.fail(f"it ended before it printed {texts}: {self.printed}\n{self.process.stderr.read()}")
            self.printed += chunk.decode()

    def run_dir(self) -> Path:
        found = self._commands.newest_run()
        assert found is not None
        return found

    def session(self) -> Path:
        return Path(json.loads((self.run_dir() / "run.json").read_text())["session"])

    def agent(self) -> int:
        """The pid of the agent that started last."""
        return self.events("agent_start")[-1]["pid"]

    def ranks(self) -> dict[int, int]:
        """pid by rank, as the agent has seen them."""
        return {event["rank"]: event["pid"] for event in self.events("rank_start")}

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir() / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        events = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [event for event in events if event["event"] == kind]

    def until(self, what: Callable[[], Any]) -> None:
        until(what, timeout_s=PATIENCE_S)

    def finish(self) -> Any:
        return self._commands.finish(self.process)

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run_dir() / "summary.json").read_text())
        return summary

    def leaves_nothing(self) -> None:
        """No process, no session in memory, no segment in the run."""
        self.until(lambda: not self._commands.survivors())
        meta = json.loads((self.run_dir() / "run.json").read_text())
        assert meta["sealed"] is True
        assert not Path(meta["session"]).exists()
        assert not (self.run_dir() / "steps").exists()


@pytest.fixture
def start(commands: Any) -> Callable[..., Patient]:
    """``start("run", job, "--steps", "9")``."""

    def begin(*arguments: str | Path, **how: Any) -> Patient:
        return Patient(commands, commands.start(*arguments, **how))

    return begin


@pytest.fixture
def alive() -> Callable[[int], bool]:
    def check(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return check
