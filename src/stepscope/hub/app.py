"""The hub's application: the page, the resources of the API, and the layers in front of them.

    SafeHeaders ─ ingest (agents, with their own tokens) ─ ReadersOnly ─ router

Every path that is not declared open (``api.auth.OPEN_PATHS``) needs the reader's token, even one that does not exist.
An internal error is answered with one line of JSON that reveals no internals.

``report.html`` is made here, too: a run is opened as the hub does, and the answers to all requests go into the page.

    size = write_copy(run_dir, run_dir / "report.html")

The event loop ends with the call.  The file is written completely or not at all.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from stepscope.errors import NotARun, RunError, RunUnwritable, StepscopeError
from stepscope.hub.api import alerts, captures, compare, fleet, incidents, samples, steps
from stepscope.hub.api import runs as run_resources
from stepscope.hub.api.auth import ONLY_RUN, Readers, ReadersOnly, session_routes
from stepscope.hub.api.resource import Parameter, Query, Resource, openapi, route_of
from stepscope.hub.api.responses import CONTENT_TYPE, ApiError, Body, SafeHeaders, failure, takes_gzip
from stepscope.hub.api.stream import MEDIA_TYPE, Streams
from stepscope.hub.api.traces import expect_traces, trace_resources
from stepscope.hub.open_run import OpenRun
from stepscope.hub.report_copy import MOST_BYTES, copy_of
from stepscope.hub.runs import Runs
from stepscope.hub.traces.desk import TraceDesk
from stepscope.page.assets import INDEX, Asset, explain_unbuilt, find_asset
from stepscope.records.series import RunData
from stepscope.records.text import Progress, no_progress
from stepscope.store import file_io
from stepscope.store.paths import REPORT_FILE

if TYPE_CHECKING:
    from stepscope.hub.ingest.endpoints import Agents
    from stepscope.hub.limits import Refusals

__all__ = ["KnownRun", "add_copy", "make_app", "make_copy", "resources_of", "write_copy"]

# -- page -------------------------------------------------------------------------------------------------------------
# ``/`` and ``/assets/…``: the page itself.  Open to all: it contains nothing from a run.

UNBUILT_PAGE = """\
Stepscope hub.

This is the hub of one or more training runs. It has no page to show: {reason}.

The HTTP API starts at /api/v1/runs; /api/v1/openapi.json lists it, and docs/api.md in Stepscope describes it. All
requests except this one need the reader's token:

    curl -H "Authorization: Bearer $(jq -r .token runs/NAME/hub.json)" URL/api/v1/runs
"""
CACHED_FOREVER = "public, max-age=31536000, immutable"


def page_routes() -> list[Route]:
    return [Route("/", _home), Route("/assets/{file}", _asset)]


async def _home(request: Request) -> Response:
    asset = find_asset(INDEX)
    if asset is None:
        return PlainTextResponse(UNBUILT_PAGE.format(reason=explain_unbuilt()))
    return _asset_response(request, asset, "no-cache")


async def _asset(request: Request) -> Response:
    asset = find_asset(f"assets/{request.path_params['file']}")
    return failure(404, "there is no such file") if asset is None else _asset_response(request, asset, CACHED_FOREVER)


def _asset_response(request: Request, asset: Asset, keeping: str) -> Response:
    packed = takes_gzip(request.headers)
    headers = {"Cache-Control": keeping, "Vary": "Accept-Encoding", **({"Content-Encoding": "gzip"} if packed else {})}
    return Response(asset.packed if packed else asset.data, headers=headers, media_type=asset.media_type)


# -- application ------------------------------------------------------------------------------------------------------


def make_app(
    runs: Runs,
    readers: Readers,
    ingest: Agents | None = None,
    *,
    streams: Streams | None = None,
    refusals: Refusals | None = None,
    framed: bool = False,
    changes: bool = False,
    requests: bool = False,
    desk: TraceDesk | None = None,
) -> ASGIApp:
    """``refusals``: what the server and ``ingest`` refused; ``framed``: the page may be embedded in a notebook.

    ``changes``: whoever has the hub's own token may label and delete runs, and everything that ``requests`` allows:
    acknowledge incidents, silence alerts, request captures.  Never for a page that others can embed.
    ``desk``: makes the views of traces.
    """
    if framed and (changes or requests):
        raise ValueError("a page that is embedded in another one must not change runs")
    streams = Streams() if streams is None else streams

    async def text() -> str:
        from stepscope.hub.api.metrics import metrics_text  # large; imported only when metrics are requested

        return await metrics_text(runs, readers, streams, ingest, refusals)

    desk = TraceDesk() if desk is None else desk
    resources = resources_of(streams, text, ingest=ingest is not None, changes=changes, requests=requests, desk=desk)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        expecting = asyncio.create_task(expect_traces(desk, runs))
        yield
        expecting.cancel()
        await asyncio.gather(expecting, return_exceptions=True)
        await desk.close()
        await runs.close()

    app: ASGIApp = Starlette(
        routes=[*page_routes(), *(route_of(one, runs) for one in resources), *session_routes(readers)],
        middleware=[Middleware(ReadersOnly, readers=readers, changes=changes, requests=requests)],
        exception_handlers={HTTPException: _refused, Exception: _fault},
        lifespan=lifespan,
    )
    if ingest is not None:
        from stepscope.hub.ingest.endpoints import in_front  # heavier than everything else imported here

        app = in_front(ingest, app)
    return SafeHeaders(app, framed=framed)


def resources_of(
    streams: Streams,
    metrics: Callable[[], Awaitable[str]],
    *,
    ingest: bool,
    changes: bool = False,
    requests: bool = False,
    desk: TraceDesk | None = None,
) -> tuple[Resource, ...]:
    """Return all declared resources; the session and the home page are not among them."""
    packing = asyncio.Lock()

    def stream(query: Query) -> Response:
        said = query.request.headers.get("last-event-id") or query.values["after"]
        return streams.open(query.run, partial(query.runs.open, query.run.id), said)

    async def report(query: Query) -> Body:
        name = query.run.name
        # A token for one run does not show what happened in others.
        others = query.request.scope.get("state", {}).get(ONLY_RUN) is None
        async with packing:  # a report of a large run takes seconds and memory: make one at a time
            try:
                data = await copy_of(query.run, wall_ns=time.time_ns(), others=others)
            except RunError as error:
                raise ApiError(503, str(error)) from error
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(f'{name}.html', safe='')}"}
        return Body(data=data, media_type="text/html; charset=utf-8", headers=headers)

    async def exposition(_query: Query) -> Body:
        return Body(data=(await metrics()).encode(), media_type=CONTENT_TYPE, headers={})

    def healthz(_asked: Query) -> Mapping[str, Any]:
        return {"status": "ok"}

    def described(_asked: Query) -> Mapping[str, Any]:
        return openapi(resources, ingest=ingest)

    resources = (
        Resource(path="/healthz", about="Whether the hub is running.", answer=healthz, open=True),
        Resource(
            path="/metrics",
            about="Metrics of the active and open runs and the hub, for Prometheus.",
            answer=exposition,
            media_types=("text/plain",),
        ),
        Resource(path="/api/v1/openapi.json", about="This description.", answer=described),
        *run_resources.RUN_RESOURCES,
        *(run_resources.CHANGE_RESOURCES if changes else ()),
        *((*alerts.CHANGE_RESOURCES, *captures.CAPTURE_CHANGES) if changes or requests else ()),
        *alerts.RESOURCES,
        *steps.RESOURCES,
        *steps.RANK_RESOURCES,
        *run_resources.FINDING_RESOURCES,
        *incidents.INCIDENT_RESOURCES,
        *captures.CAPTURE_RESOURCES,
        *samples.RESOURCES,
        compare.resource(),
        *compare.resources(),
        fleet.resource(),
        *trace_resources(TraceDesk() if desk is None else desk),
        *run_resources.FILE_RESOURCES,
        Resource(
            path="/api/v1/runs/{run}/report.html",
            about="The page of a run as a single file with its data inside, as a download.",
            answer=report,
            media_types=("text/html",),
        ),
        Resource(
            path="/api/v1/runs/{run}/stream",
            about="Server-sent events: reset, steps, events, findings, status, heartbeat, end. Last-Event-ID resumes.",
            answer=stream,
            parameters=(Parameter(name="after", about="same as Last-Event-ID", kind="text", default=""),),
            media_types=(MEDIA_TYPE,),
        ),
    )
    return resources


async def _refused(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    why = {404: "there is no such resource", 405: "method not allowed"}.get(status, "the request cannot be handled")
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return failure(status, why, headers=headers)


async def _fault(_request: Request, _error: Exception) -> Response:
    return failure(500, "internal error in the hub")


# -- report.html ------------------------------------------------------------------------------------------------------

M_ARENA_MAX = -8
"""As in ``malloc.h``."""


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """A finished run that was already read."""

    data: RunData
    summary: Mapping[str, Any]


@asynccontextmanager
async def opened(run_dir: Path, known: KnownRun | None = None) -> AsyncIterator[OpenRun]:
    """Open a run.  NotARun if it cannot be opened."""
    run_dir = run_dir.resolve()
    runs = Runs.of_folder(run_dir) if known is None else Runs.of_past(run_dir, known.data, known.summary)
    try:
        run = await runs.open(run_dir.name)
        if run is None:
            raise NotARun(f"{run_dir} is not a run, or cannot be read")
        yield run
    finally:
        await runs.close()


def write_copy(
    run_dir: Path, path: Path, *, known: KnownRun | None = None, redact: bool = False, progress: Progress = no_progress
) -> int:
    """Write a copy; return its size in bytes.

    ``known``: the run, if it was already read; ``redact``: see ``records/redaction.py``.  RunError if it cannot be
    written: not a run, page not built, disk full.
    """
    made = asyncio.run(_make(run_dir, MOST_BYTES, time.time_ns(), known, progress, redact=redact))
    try:
        file_io.write_bytes(path, made)
    except OSError as error:
        raise RunUnwritable(f"cannot write {path}: {error.strerror}") from error
    return len(made)


def add_copy(run_dir: Path, known: KnownRun, progress: Progress = no_progress) -> str:
    """Add ``report.html`` to a finished run; return why it could not be written, or an empty string.

    The other results of the run do not depend on it: any failure is only reported.
    """
    _give_back()
    made = asyncio.run(_outcome(_make(run_dir, MOST_BYTES, time.time_ns(), known, progress)))
    if not isinstance(made, bytes):
        return str(made) if isinstance(made, StepscopeError) else f"internal error: {made!r}"
    try:
        file_io.write_bytes(run_dir / REPORT_FILE, made)
    except OSError as error:
        return str(error.strerror)
    return ""


def make_copy(
    run_dir: Path, *, most_bytes: int = MOST_BYTES, wall_ns: int | None = None, progress: Progress = no_progress
) -> bytes:
    """Return the file as bytes; ``wall_ns``: the creation time that it states."""
    return asyncio.run(_make(run_dir, most_bytes, time.time_ns() if wall_ns is None else wall_ns, None, progress))


def _give_back() -> None:
    """Return memory freed after reading the run to the system: next to a job every megabyte counts, even at its end.

    Also prevent a separate heap for the thread that answers.
    """
    gc.collect()
    with suppress(AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(M_ARENA_MAX, 1)
        library.malloc_trim(0)


async def _outcome(making: Coroutine[Any, Any, bytes]) -> bytes | BaseException:
    return (await asyncio.gather(making, return_exceptions=True))[0]


async def _make(
    run_dir: Path, most_bytes: int, wall_ns: int, known: KnownRun | None, progress: Progress, *, redact: bool = False
) -> bytes:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # there is one request at a time
    rest = progress if known is not None else _after_half(progress)
    async with opened(run_dir, known) as run:
        return await copy_of(run, most_bytes=most_bytes, wall_ns=wall_ns, redact=redact, progress=rest)


def _after_half(progress: Progress) -> Progress:
    """Report the second half of the progress: opening a large run takes as much time as all the rest."""
    return lambda done, total: progress(total + done, 2 * total)
