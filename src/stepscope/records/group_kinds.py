"""What a process group is for, by the name its maker gave it.  The recorder and the agent share this."""

from __future__ import annotations

import re

from stepscope.records.collectives import GroupKind

__all__ = ["ALIKE", "is_data", "kind_of"]

ALIKE: tuple[GroupKind, ...] = ("data", "tensor", "context", "expert")
"""Groups whose ranks have the same work to do; stages of a pipeline have not."""

_DATA = re.compile(r"(?:d|dd|fsd|efsd|hsd)p|data|replicate|shard|batch")
"""The first word of the name of a dimension along which the data differ (``dp``, ``dp_shard``, ``data_parallel`` …)."""
_WORDS: tuple[tuple[GroupKind, str], ...] = (
    ("pipeline", r"pp|pipe|pipeline|embedding|embd"),
    ("tensor", r"e?tp|tensor"),
    ("context", r"cp|context|sp|sequence"),
    ("expert", r"ep|expert|experts|moe"),
)


def kind_of(description: str) -> GroupKind:
    """What a group is for, by what its maker called it: ``mesh_dp_shard``, ``TENSOR_MODEL_PARALLEL_GROUP`` …"""
    words = description.lower().removeprefix("mesh_").split("_")
    kinds = [kind for word in words if (kind := _kind_of_word(word)) is not None]
    # EXPERT_DATA_PARALLEL_GROUP: the data parallel group of the experts.
    return next((kind for kind in kinds if kind != "expert"), kinds[0] if kinds else "other")


def is_data(name: str) -> bool:
    """Whether a dimension of that name is one along which the data differ."""
    return _DATA.fullmatch(name.lower().partition("_")[0]) is not None


def _kind_of_word(word: str) -> GroupKind | None:
    if is_data(word):
        return "data"
    return next((kind for kind, pattern in _WORDS if re.fullmatch(pattern, word)), None)
