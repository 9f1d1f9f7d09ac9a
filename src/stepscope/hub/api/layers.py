"""The layers of the model in a sampled step: memory, time and gradients by module."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.api.responses import ApiError
from stepscope.records.layers import LayerRecords

__all__ = ["RESOURCES"]

LARGEST_RANK = (1 << 31) - 1


async def _layers(asked: Asked) -> Mapping[str, Any]:
    records = await asked.run.layers()
    return await asyncio.to_thread(_document, records, asked.values["rank"], asked.values["step"])


def _document(records: LayerRecords, rank: int | None, step: int | None) -> Mapping[str, Any]:
    from stepscope.reports.layers import MOST_MODULES, choose_sample, layers_document, no_layers

    if not records:
        return no_layers()
    sample = choose_sample(records, rank=rank, step=step)
    if sample is None:
        raise ApiError(404, "there are no layer samples of this rank")
    return layers_document(records, sample, most=MOST_MODULES)


RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/layers",
        about="Memory, time and gradients by module, of one rank in a sampled step (docs/schema.md).",
        answer=_layers,
        parameters=(
            Parameter(name="rank", about="default: the rank that holds most", most=LARGEST_RANK),
            Parameter(name="step", about="the last sample up to this step, or else the first; default: the last one"),
        ),
    ),
)
