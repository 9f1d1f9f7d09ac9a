"""The API of a hub, called in this process without a socket: an assistant gets what the page shows.

    api = HubApi(Runs.of_folder(Path("runs")))
    document = await api.get("/api/v1/runs/night/findings")
    await api.close()

A request takes the same way as one of the page, through the application in ``hub/app.py``: parameters are checked and
unknown ones refused there.  One event loop uses it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.types import Message

from stepscope.hub.api.auth import Readers
from stepscope.hub.app import make_app
from stepscope.hub.runs import Runs

__all__ = ["FilePart", "HubApi", "RequestError"]

_LIST = "/api/v1/runs"
_PAGE = 1000
"""The most runs that one request lists."""


class RequestError(Exception):
    """A question that cannot be answered; its text says why, and what to do instead."""

    def __init__(self, why: str, *, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class FilePart:
    data: bytes
    offset: int
    size: int
    """Of the whole file."""


class HubApi:
    def __init__(self, runs: Runs, *, changes: bool = False) -> None:
        """``changes``: runs may be labeled, silenced, and their incidents acknowledged."""
        self._runs = runs
        self._token = secrets.token_hex(16)
        self._app = make_app(runs, Readers(self._token), changes=changes)
        self.heavy = asyncio.Semaphore(1)
        """For work that takes a whole run into memory."""

    async def get(self, path: str, **parameters: object) -> dict[str, Any]:
        """Return a document.  RequestError, with the hub's reason, if not available."""
        _, body = await self._request("GET", path, parameters)
        document: dict[str, Any] = msgspec.json.decode(body)
        return document

    async def post(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        _, body = await self._request("POST", path, {}, msgspec.json.encode(document))
        answer: dict[str, Any] = msgspec.json.decode(body)
        return answer

    async def file(self, run: str, path: str, **parameters: object) -> FilePart:
        headers, body = await self._request("GET", f"{_LIST}/{run}/files/{path}", parameters)
        return FilePart(data=body, offset=int(headers[b"x-stepscope-offset"]), size=int(headers[b"x-stepscope-size"]))

    async def runs(self) -> Sequence[Mapping[str, Any]]:
        """Return all runs, newest first."""
        rows: list[Mapping[str, Any]] = []
        while True:
            page = await self.get(_LIST, first=len(rows), limit=_PAGE)
            rows += page["runs"]
            if not page["runs"] or len(rows) >= page["total"]:
                return rows

    async def run_id(self, name: str | None) -> str:
        """Return the ID of a run by its ID, its name or that of its folder; without one, of the newest.

        An active run counts as newer than any that is over.
        """
        if name is not None and ("/" in name or not name.isprintable()):
            raise RequestError(f"{name[:80]!r} is not the name of a run; list_runs shows all runs", status=404)
        rows = await self.runs()
        if not rows:
            raise RequestError("there are no runs yet; record one with `stepscope run`", status=404)
        if name is None:
            return str(next((row for row in rows if row["status"] == "running"), rows[0])["id"])
        if any(row["id"] == name for row in rows):
            return name
        found = [str(row["id"]) for row in rows if name in (row["name"], str(row["id"]).partition("~")[0])]
        if len(found) > 1:
            raise RequestError(f"{len(found)} runs are named {name}; use an ID: {', '.join(found[:8])}", status=404)
        if not found:
            newest = ", ".join(str(row["id"]) for row in rows[:5])
            raise RequestError(f"there is no run named {name[:80]}; the newest are {newest}", status=404)
        return found[0]

    async def run_dir(self, run: str) -> Path:
        """Return the folder of a run with that ID."""
        path = await self._runs.where(run)
        if path is None:
            raise RequestError("there is no such run", status=404)
        return path

    async def close(self) -> None:
        await self._runs.close()

    async def _request(
        self, method: str, path: str, parameters: Mapping[str, object], body: bytes = b""
    ) -> tuple[dict[bytes, bytes], bytes]:
        query = urlencode({name: _word(value) for name, value in parameters.items() if value is not None})
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(errors="surrogatepass"),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [
                (b"host", b"localhost"),
                (b"authorization", f"Bearer {self._token}".encode()),
                (b"content-type", b"application/json"),
            ],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
        }
        status, headers, parts = 500, {}, []

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], dict(message["headers"])
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        answer = b"".join(parts)
        if status >= 400:
            raise RequestError(_reason(answer), status=status)
        return headers, answer


def _word(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _reason(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return "internal error in the hub"
