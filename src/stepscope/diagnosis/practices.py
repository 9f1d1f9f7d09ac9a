"""Settings of the live objects that are wrong whatever the clock says: told in a sentence each, not as findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.diagnosis.window import Window

__all__ = ["remarks_on"]

PLAIN_SAMPLERS = ("RandomSampler", "SequentialSampler")
"""What a DataLoader makes by itself."""


def remarks_on(window: Window) -> list[str]:
    """What the first rank's objects show; facts may be missing one by one."""
    facts = next((facts for facts in window.facts if facts), {})
    world_size = max((identity.world_size for identity in window.identities), default=1)
    return [*_sampling(_part(facts, "loader"), world_size), *_normalising(_part(facts, "model"), world_size)]


def _sampling(loader: Mapping[str, Any], world_size: int) -> Iterator[str]:
    sampler = loader.get("sampler")
    if world_size > 1 and loader.get("distributed_sampler") is False and sampler in PLAIN_SAMPLERS:
        yield (
            f"Each of the {world_size} ranks draws from the whole dataset ({sampler}): without a DistributedSampler "
            "they train on the same samples, unless the dataset itself is split."
        )
    if loader.get("set_epoch_missing") is True:
        yield "DistributedSampler.set_epoch() is not called: every epoch has the same order."


def _normalising(model: Mapping[str, Any], world_size: int) -> Iterator[str]:
    count = model.get("sync_batchnorm")
    if isinstance(count, int) and count > 0 and world_size == 1:
        yield f"{count} SyncBatchNorm layers in a job of one rank only cost time: BatchNorm computes the same."


def _part(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = facts.get(name)
    return part if isinstance(part, dict) else {}

