"""Ask the hub's application in this process: no socket, no server, and no second way to compute anything."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.types import ASGIApp, Message

from stepscope.errors import NotARun
from stepscope.hub.api.readers import Readers
from stepscope.hub.app import make_app
from stepscope.hub.open_run import OpenRun
from stepscope.hub.runs import Runs
from stepscope.records.series import RunData

__all__ = ["Asker", "Known", "Reply", "opened"]


@dataclass(frozen=True, kw_only=True)
class Reply:
    headers: Mapping[str, str]
    data: bytes


class Asker:
    """The questions of one reader about one run."""

    def __init__(self, app: ASGIApp, token: str, run: OpenRun) -> None:
        self._app = app
        self._token = token
        self.run = run

    async def document(self, resource: str, **params: object) -> dict[str, Any]:
        """Of the run; ``resource`` empty: about the run itself.  Empty when it was refused."""
        reply = await self.reply(resource, "application/json", **params)
        found: dict[str, Any] = {} if reply is None else msgspec.json.decode(reply.data)
        return found

    async def reply(self, resource: str, accept: str, **params: object) -> Reply | None:
        """None when it was refused."""
        path = f"/api/v1/runs/{self.run.name}{'/' if resource else ''}{resource}"
        return await self.ask(path, accept, {name: value for name, value in params.items() if value is not None})

    async def ask(self, path: str, accept: str, params: Mapping[str, object]) -> Reply | None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": urlencode({name: str(value) for name, value in params.items()}).encode(),
            "headers": [(b"authorization", f"Bearer {self._token}".encode()), (b"accept", accept.encode())],
            "client": None,
            "server": None,
        }
        status, headers, parts = 500, {}, []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return Reply(headers=headers, data=b"".join(parts)) if status == 200 else None


@dataclass(frozen=True, kw_only=True)
class Known:
    """A run that is over and that somebody has read already."""

    data: RunData
    summary: Mapping[str, Any]


@asynccontextmanager
async def opened(run_dir: Path, known: Known | None = None) -> AsyncIterator[Asker]:
    """NotARun when it cannot be opened."""
    run_dir, token = run_dir.resolve(), secrets.token_urlsafe(32)
    runs = Runs.of_folder(run_dir) if known is None else Runs.of_past(run_dir, known.data, known.summary)
    try:
        run = await runs.open(run_dir.name)
        if run is None:
            raise NotARun(f"{run_dir} is not a run, or cannot be read")
        yield Asker(make_app(runs, Readers(token)), token, run)
    finally:
        await runs.close()
