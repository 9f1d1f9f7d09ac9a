"""``/`` and ``/assets/…``: the page itself.  Open to all: nothing of a run is in it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from stepscope.hub.api.answers import failure, takes_gzip
from stepscope.page.assets import INDEX, Asset, find_asset

__all__ = ["page_routes"]

UNBUILT = """\
Stepscope hub.

This is the hub of one or more training runs. Its page was not built (`make page` does it); its HTTP API begins at
/api/v1/runs; /api/v1/openapi.json lists it, and docs/api.md of Stepscope explains it. Everything but this needs the
reader's token:

    curl -H "Authorization: Bearer $(jq -r .token runs/NAME/hub.json)" URL/api/v1/runs
"""
FOR_EVER = "public, max-age=31536000, immutable"


def page_routes() -> list[Route]:
    return [Route("/", _home), Route("/assets/{file}", _asset)]


async def _home(request: Request) -> Response:
    asset = find_asset(INDEX)
    return PlainTextResponse(UNBUILT) if asset is None else _answer(request, asset, "no-cache")


async def _asset(request: Request) -> Response:
    asset = find_asset(f"assets/{request.path_params['file']}")
    return failure(404, "there is no such file") if asset is None else _answer(request, asset, FOR_EVER)


def _answer(request: Request, asset: Asset, keeping: str) -> Response:
    packed = takes_gzip(request.headers)
    headers = {"Cache-Control": keeping, "Vary": "Accept-Encoding", **({"Content-Encoding": "gzip"} if packed else {})}
    return Response(asset.packed if packed else asset.data, headers=headers, media_type=asset.media_type)
