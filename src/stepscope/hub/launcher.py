"""The run's launcher, as its hub sees it: the settings that it gave, and what it reports through a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.agent.job_context import Control
from stepscope.hub.transport import TlsFiles
from stepscope.store.documents import HubFile

__all__ = ["UNSAID", "HubSettings", "Launcher"]

UNSAID = "unfinished"
"""The status of a run whose launcher died."""


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    run_dir: Path
    fd: int
    nnodes: int = 1
    name: str = ""
    """The requested name of the run; the actual one may differ."""
    certificate: Path | None = None
    key: Path | None = None

    @property
    def several(self) -> bool:
        """Whether other nodes send their data to this hub."""
        return self.nnodes > 1

    def tls(self, about: HubFile) -> TlsFiles | None:
        if self.certificate is None or self.key is None:
            return None
        return TlsFiles(certificate=self.certificate, key=self.key, fingerprint=bytes.fromhex(about.fingerprint))


class Launcher:
    """On standard input the launcher reports how the job ended; end of file means that the launcher died."""

    def __init__(self) -> None:
        self._control = Control(0)
        self._news: asyncio.Event | None = None
        self.stopped = False
        """Whether the hub has to exit at once (SIGTERM)."""

    def listen(self) -> None:
        """Take reports in the running event loop; call it again in each loop."""
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        if not self._control.closed:
            os.set_blocking(self._control.fd, False)
            loop.add_reader(self._control.fd, self._hear)

    @property
    def end(self) -> Mapping[str, Any] | None:
        """How the job ended; None while it runs."""
        return self._control.end

    @property
    def gone(self) -> bool:
        """Whether the launcher died before the job ended."""
        return self._control.closed and self._control.end is None

    async def news(self, timeout_s: float) -> None:
        """Wait until something is reported, or the time is over."""
        if self._news is not None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout_s)
            self._news.clear()

    def wake(self) -> None:
        """End the wait for news."""
        if self._news is not None:
            self._news.set()

    def report(self, word: Mapping[str, Any]) -> None:
        """Report to the launcher, if it is there."""
        try:
            os.write(1, json.dumps(word).encode() + b"\n")
        except OSError:
            pass

    def _hear(self) -> None:
        self._control.feed()
        if self._control.closed:
            asyncio.get_running_loop().remove_reader(self._control.fd)
        self.wake()

    def _stop(self) -> None:
        self.stopped = True
        self.wake()
