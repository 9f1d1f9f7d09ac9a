"""The layers of the model in a sampled step: memory, time and gradients by module."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.api.responses import ApiError
from stepscope.records.layers import LayerRecords
from stepscope.reports.layers import choose_sample, layers_document, no_layers

__all__ = ["RESOURCES"]

LARGEST_RANK = (1 << 31) - 1
MOST_MODULES = 1000


async def _layers(asked: Asked) -> Mapping[str, Any]:
    records = await asked.run.layers()
    values = asked.values
    return await asyncio.to_thread(_document, records, values["rank"], values["step"], values["modules"])


def _document(records: LayerRecords, rank: int | None, step: int | None, modules: int) -> Mapping[str, Any]:

    if not records:
        return no_layers()
    sample = choose_sample(records, rank=rank, step=step)
    if sample is None:
        raise ApiError(404, "there are no layer samples of this rank")
    return layers_document(records, sample, most=modules)


RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/layers",
        about="Memory, time and gradients by module, of one rank in a sampled step (docs/schema.md).",
        answer=_layers,
        parameters=(
            Parameter(name="rank", about="default: the rank that holds most", most=LARGEST_RANK),
            Parameter(name="step", about="the last sample up to this step, or else the first; default: the last one"),
            Parameter(
                name="modules",
                about="maximum number; the smallest others are counted in the modules that contain them",
                default=MOST_MODULES,
                least=1,
                most=MOST_MODULES,
            ),
        ),
    ),
)
