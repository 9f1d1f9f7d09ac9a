"""All runs of a hub together: GPU hours by cause, suspect hosts, slow links, shared changes (``stepscope.fleet``).

Bringing the catalog up to date and the analysis take about a second for tens of thousands of runs: one document is made
at a time, in a thread, and the last few are kept for a while.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from stepscope.errors import RunError
from stepscope.hub.api.auth import ONLY_RUN
from stepscope.hub.api.resource import Parameter, Query, Resource
from stepscope.hub.api.responses import ApiError
from stepscope.hub.open_run import READING_SHARE
from stepscope.hub.runs import Runs
from stepscope.store.user_runs import folder_tag, split_run_id

__all__ = ["resource"]

DAY_NS = 86_400_000_000_000
FRESH_S = 10.0
MOST_DOCUMENTS = 8
MOST_LISTED = 100
LONGEST_DAYS = 36_500


def resource() -> Resource:
    documents: OrderedDict[tuple[int | None, int], tuple[float, dict[str, Any]]] = OrderedDict()
    making = asyncio.Lock()

    async def answer(query: Query) -> Mapping[str, Any]:
        if query.request.scope.get("state", {}).get(ONLY_RUN) is not None:
            raise ApiError(403, "this token is for one run")
        wanted = query.values["since_days"], query.values["limit"]
        async with making:
            known = documents.get(wanted)
            if known is None or time.monotonic() >= known[0]:
                began_s = time.monotonic()
                try:
                    document = await asyncio.to_thread(_document, query.runs, *wanted)
                except RunError as error:
                    raise ApiError(503, str(error)) from error
                took_s = time.monotonic() - began_s
                documents[wanted] = known = began_s + max(FRESH_S, took_s / READING_SHARE), document
            documents.move_to_end(wanted)
            while len(documents) > MOST_DOCUMENTS:
                documents.popitem(last=False)
        return known[1]

    return Resource(
        path="/api/v1/fleet",
        about="All runs together: GPU hours by cause, hosts and links that made jobs slow, changes that jobs share.",
        answer=answer,
        parameters=(
            Parameter(name="since_days", about="only runs that started in the last so many days", most=LONGEST_DAYS),
            Parameter(name="limit", about="runs listed per row", default=20, most=MOST_LISTED),
        ),
    )


def _document(runs: Runs, since_days: int | None, limit: int) -> dict[str, Any]:
    from stepscope.fleet.catalog import RunCatalog  # only hubs that are asked for it load DuckDB
    from stepscope.fleet.document import fleet_document

    folders = {folder_tag(folder): folder for folder in runs.folders()}
    if not folders:
        raise ApiError(404, "this hub serves no folder of runs")
    catalog = RunCatalog.of_user(os.environ)
    update = catalog.update(folders)
    now_ns = time.time_ns()
    since_ns = None if since_days is None else now_ns - since_days * DAY_NS
    fleet = catalog.fleet(list(folders), since_wall_ns=since_ns)
    if not runs.of_several_folders:
        fleet = fleet.renamed(lambda id_: split_run_id(id_)[0])
    return fleet_document(
        fleet, generated_wall_ns=now_ns, since_wall_ns=since_ns, limit=limit, problems=update.problems[:MOST_LISTED]
    )
