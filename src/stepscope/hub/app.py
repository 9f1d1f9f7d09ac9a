"""The hub's application: the page, the resources of the API, and the layers in front of them.

    SafeHeaders ─ ingest (agents, with their own tokens) ─ ReadersOnly ─ router

Every path that is not declared open (``api.auth.OPEN_PATHS``) needs the reader's token, even one that does not exist.
An internal error is answered with one line of JSON that reveals no internals.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from stepscope.errors import RunError
from stepscope.hub.api import compare, files, ranks, samples, steps, sweeps
from stepscope.hub.api import runs as run_resources
from stepscope.hub.api.auth import Readers, ReadersOnly, session_routes
from stepscope.hub.api.resource import Asked, Parameter, Resource, openapi, route_of
from stepscope.hub.api.responses import CONTENT_TYPE, ApiError, Body, SafeHeaders, failure, takes_gzip
from stepscope.hub.api.stream import MEDIA_TYPE, Streams
from stepscope.hub.runs import Runs
from stepscope.page.assets import INDEX, Asset, find_asset

if TYPE_CHECKING:
    from stepscope.hub.ingest.endpoints import Agents
    from stepscope.hub.limits import Refusals

__all__ = ["answers_of", "make_app", "resources_of"]


# -- page -------------------------------------------------------------------------------------------------------------
# ``/`` and ``/assets/…``: the page itself.  Open to all: it contains nothing from a run.

UNBUILT_PAGE = """\
Stepscope hub.

This is the hub of one or more training runs. Its page was not built; run `make page` to build it. The HTTP API starts
at /api/v1/runs; /api/v1/openapi.json lists it, and docs/api.md in Stepscope describes it. All requests except this
one need the reader's token:

    curl -H "Authorization: Bearer $(jq -r .token runs/NAME/hub.json)" URL/api/v1/runs
"""
CACHED_FOREVER = "public, max-age=31536000, immutable"


def page_routes() -> list[Route]:
    return [Route("/", _home), Route("/assets/{file}", _asset)]


async def _home(request: Request) -> Response:
    asset = find_asset(INDEX)
    return PlainTextResponse(UNBUILT_PAGE) if asset is None else _asset_response(request, asset, "no-cache")


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
) -> ASGIApp:
    """``refusals``: what the server and ``ingest`` refused; ``framed``: the page may be embedded in a notebook.

    ``changes``: whoever has the hub's own token may label and delete runs.  Never for a page that others can embed.
    """
    if framed and changes:
        raise ValueError("a page that is embedded in another one must not change runs")
    streams = Streams() if streams is None else streams

    def text() -> str:
        from stepscope.hub.api.metrics import metrics_text  # large; imported only when metrics are requested

        return metrics_text(runs, readers, streams, ingest, refusals)

    resources = resources_of(streams, text, ingest=ingest is not None, changes=changes)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await runs.close()

    app: ASGIApp = Starlette(
        routes=[*page_routes(), *(route_of(one, runs) for one in resources), *session_routes(readers)],
        middleware=[Middleware(ReadersOnly, readers=readers, changes=changes)],
        exception_handlers={HTTPException: _refused, Exception: _fault},
        lifespan=lifespan,
    )
    if ingest is not None:
        from stepscope.hub.ingest.endpoints import in_front  # heavier than everything else imported here

        app = in_front(ingest, app)
    return SafeHeaders(app, framed=framed)


def answers_of(runs: Runs) -> ASGIApp:
    """Return the resources without authentication, for callers in this process."""
    return Router([route_of(one, runs) for one in resources_of(Streams(), str, ingest=False)])


def resources_of(
    streams: Streams, metrics: Callable[[], str], *, ingest: bool, changes: bool = False
) -> tuple[Resource, ...]:
    """Return all declared resources; the session and the home page are not among them."""
    packing = asyncio.Lock()

    def stream(asked: Asked) -> Response:
        said = asked.request.headers.get("last-event-id") or asked.values["after"]
        return streams.open(asked.run, partial(asked.runs.open, asked.run.id), said)

    async def report(asked: Asked) -> Body:
        from stepscope.hub.report_copy import Asker, copy_of  # large; imported only when a report is requested

        name = asked.run.name
        async with packing:  # a report of a large run takes seconds and memory: make one at a time
            try:
                data = await copy_of(Asker(answers_of(asked.runs), asked.run), wall_ns=time.time_ns())
            except RunError as error:
                raise ApiError(503, str(error)) from error
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(f'{name}.html', safe='')}"}
        return Body(data=data, media_type="text/html; charset=utf-8", headers=headers)

    def healthz(_asked: Asked) -> Mapping[str, Any]:
        return {"status": "ok"}

    def described(_asked: Asked) -> Mapping[str, Any]:
        return openapi(resources, ingest=ingest)

    resources = (
        Resource(path="/healthz", about="Whether the hub is running.", answer=healthz, open=True),
        Resource(
            path="/metrics",
            about="Metrics of the open runs and the hub, for Prometheus.",
            answer=lambda _asked: Body(data=metrics().encode(), media_type=CONTENT_TYPE, headers={}),
            media_types=("text/plain",),
        ),
        Resource(path="/api/v1/openapi.json", about="This description.", answer=described),
        *run_resources.RUN_RESOURCES,
        *(run_resources.CHANGE_RESOURCES if changes else ()),
        *steps.RESOURCES,
        *ranks.RESOURCES,
        *run_resources.FINDING_RESOURCES,
        *samples.RESOURCES,
        compare.resource(),
        *sweeps.resources(),
        *files.RESOURCES,
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
