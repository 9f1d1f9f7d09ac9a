"""What the script has set up, as one table for the run: the facts of a rank, and where other ranks differ from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.records.series import RankSeries

__all__ = ["differing_facts", "facts_of_run"]

COMPARED = ("loader", "ddp", "optimizer", "threads")
"""What should be the same everywhere …"""
OWN = ("length", "set_epoch_missing", "gradient_mb", "group", "buckets", "bucket_sizes_mb", "tensors")
"""… but for what follows from a rank's share of the data or of the model."""


def facts_of_run(current: Sequence[RankSeries]) -> dict[str, Any]:
    """Those of the lowest rank that has any; {}: nothing is known."""
    known = [series for series in current if series.facts]
    return dict(min(known, key=lambda series: series.rank).facts) if known else {}


def differing_facts(current: Sequence[RankSeries]) -> list[str]:
    """``loader.num_workers`` and the like: settings in which the ranks that know them disagree."""
    seen: dict[str, list[Any]] = {}
    for series in current:
        for key in (key for key in COMPARED if key in series.facts):
            value = series.facts[key]
            named = {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
            for name, one in named.items():
                if one not in seen.setdefault(name, []):
                    seen[name].append(one)
    return sorted(name for name, values in seen.items() if len(values) > 1 and name.rpartition(".")[2] not in OWN)
