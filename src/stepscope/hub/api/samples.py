"""What happened when, and what the agents saw of hosts, processes, GPUs and the network."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stepscope.hub.api.answers import ApiError
from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.model.lines import of_kind, parse_raw
from stepscope.hub.views.nodes import nodes_of
from stepscope.hub.views.sample_series import WHO, sample_series
from stepscope.store.paths import SAMPLES, STACKS

__all__ = ["RESOURCES"]

MOST_EVENTS = 10_000
MOST_CURVES = 1024
MOST_LINES = 1_000_000
"""That are gone through for one answer …"""
MOST_PARSED = 20_000
"""… and that it is made of: of more, every n-th of each source."""
NODES = Parameter(name="nodes", about="names, divided by commas; all if it is not given", kind="texts", many=256)


def _events(asked: Asked) -> Mapping[str, Any]:
    live, after, limit = asked.run.live, asked.values["after"], asked.values["limit"]
    found = live.events(after, limit=limit)
    wanted = asked.values["event"]
    chosen = [event for event in found if not wanted or event.get("event") in wanted]
    return {"total": live.said.events_seen, "next": found[-1]["number"] if found else after, "events": chosen}


async def _samples(asked: Asked) -> Mapping[str, Any]:
    await asked.run.sampled()
    values, said = asked.values, asked.run.live.said
    raw = list(said.raw(SAMPLES, values["nodes"] or said.nodes(SAMPLES)))
    if len(raw) > MOST_LINES:
        raise ApiError(400, "too many samples at once; name some nodes")

    def made() -> dict[str, Any]:
        span_ns = values["first_ns"], values["last_ns"]
        return sample_series(
            parse_raw(of_kind(raw, values["kind"], span_ns, MOST_PARSED)),
            kind=values["kind"],
            fields=values["fields"],
            span_ns=span_ns,
            bins=values["bins"],
            statistic=values["stat"],
            most=values["limit"],
        )

    return await asyncio.to_thread(made)


def _stacks(asked: Asked) -> Mapping[str, Any]:
    live, rank = asked.run.live, asked.values["rank"]
    found = live.stacks(nodes=asked.values["nodes"] or None, limit=asked.values["limit"])
    return {"stacks": [stack for stack in found if rank is None or stack.get("rank") == rank], "file": STACKS}


async def _nodes(asked: Asked) -> Mapping[str, Any]:
    await asked.run.sampled()
    start, limit = asked.values["start"], asked.values["limit"]
    total, found = nodes_of(asked.run, start, limit)
    return {"total": total, "nodes": [asdict(node) for node in found], "refused": asked.run.refused()}


RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/events",
        about="What happened, in the order in which the hub heard of it; next is the after of the next question.",
        answer=_events,
        parameters=(
            Parameter(name="after", about="number of the last event that is known already", default=0),
            Parameter(name="limit", about="how many at most", default=1000, least=1, most=MOST_EVENTS),
            Parameter(name="event", about="only these kinds, divided by commas", kind="texts", default=()),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}/samples",
        about="Samples as curves: a host's, a process's, a GPU's, a probe's figures in bins of time.",
        answer=_samples,
        parameters=(
            Parameter(name="kind", about="of whom", kind="choice", default="host", choices=tuple(WHO)),
            NODES,
            Parameter(name="fields", about="which figures, divided by commas", kind="texts", default=()),
            Parameter(name="first_ns", about="wall clock, nanoseconds since 1970"),
            Parameter(name="last_ns", about="wall clock, nanoseconds since 1970"),
            Parameter(name="bins", about="at most so many", default=512, least=1, most=4096),
            Parameter(
                name="stat", about="of a bin", kind="choice", default="mean", choices=("mean", "max", "min", "last")
            ),
            Parameter(name="limit", about="curves at most", default=256, least=1, most=MOST_CURVES),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}/stacks",
        about="Where ranks were seen, by line.",
        answer=_stacks,
        parameters=(
            Parameter(name="rank", about="only this one"),
            NODES,
            Parameter(name="limit", about="how many at most", default=1000, least=1, most=10_000),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}/nodes",
        about="The nodes: ranks, clock, round trip, what each sent, and its last figures.",
        answer=_nodes,
        parameters=(
            Parameter(name="start", about="how many to pass over", default=0),
            Parameter(name="limit", about="how many at most", default=1000, least=1, most=20_000),
        ),
    ),
)
