"""What requests that change a run share: their bodies, and how an error in the run becomes an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from stepscope.errors import RunError, UsageError
from stepscope.hub.api.resource import Query
from stepscope.hub.api.responses import ApiError

__all__ = ["change_run", "read_body"]

BODY_BYTES = 16 << 10

T = TypeVar("T", bound=msgspec.Struct)
Result = TypeVar("Result")


async def change_run(query: Query, change: Callable[[Path], Result]) -> Result:
    """Call ``change`` with the run's directory, in a thread; ApiError if the run does not exist, or it refuses."""
    path = await query.runs.existing(query.request.path_params["run"])
    if path is None:
        raise ApiError(404, "there is no such run")
    try:
        return await asyncio.to_thread(change, path)
    except UsageError as error:
        raise ApiError(400, str(error)) from None
    except (RunError, OSError) as error:
        raise ApiError(409, str(error) if isinstance(error, RunError) else "the run cannot be read") from None


async def read_body(query: Query, kind: type[T], form: str) -> T:
    """The body of a request; ApiError if it is not of this kind, described by ``form``."""
    body = b""
    async for chunk in query.request.stream():
        body += chunk
        if len(body) > BODY_BYTES:
            raise ApiError(400, "the body is too long")
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.MsgspecError:
        raise ApiError(400, f"the body must be {form}") from None
