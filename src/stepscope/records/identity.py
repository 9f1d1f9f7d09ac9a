"""What a rank reports about itself: who it is, and the facts the recorder saw in its live objects.

A ring is written by one process of one rank of one attempt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = [
    "FACTS_FORM",
    "RankIdentity",
    "checked_facts",
    "epochs_of",
    "logged_steps",
    "pack_facts",
    "rank_runs",
]


# -- Identity ---------------------------------------------------------------------------------------------------------

LARGEST = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """What a rank process knows about itself; it may learn more (its rank, its device) while the script runs."""

    host: str
    pid: int
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    attempt: int = 0
    """Restart count of an elastic job."""
    started_by: int = 0
    """The process on the same host that was this rank before and started this one; 0: none.  If that one trains, too,
    this one is its helper; else this one is the rank."""
    backend: str = ""
    """``gloo``, ``nccl`` … once a process group exists."""
    device: str = "cpu"
    """Device type the steps run on: ``cpu``, ``cuda``, ``mps``, ``xpu``."""
    device_name: str = ""
    device_index: int = -1
    device_uuid: str = ""
    device_bytes: int = 0
    """Memory of the device according to torch; 0: unknown."""
    device_timed: bool = False
    """Whether device times are recorded; if not, reports say that there are only host times."""
    torch: str = ""
    python: str = ""
    script: str = ""
    imported_ns: int = 0
    """When torch had been imported, on the monotonic clock; 0: unknown."""
    joined_ns: int = 0
    """When ``init_process_group`` had returned, likewise."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> RankIdentity:
        """Read what ``to_json`` wrote; keys of a newer version are ignored, other unexpected data is a ValueError."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, raw: object) -> RankIdentity:
        if not isinstance(raw, dict):
            raise ValueError("an identity must be a JSON object")  # noqa: TRY004  # like every other error in the data
        known: dict[str, Any] = {}
        for name, default, kind in _FIELDS:
            value: Any = raw.get(name, default)
            if type(value) is not kind or (type(value) is int and abs(value) > LARGEST):
                raise ValueError(f"{name} of an identity is {value!r}")
            known[name] = value
        return cls(**known)


_KINDS: dict[str, type] = {"str": str, "int": int, "bool": bool}
_FIELDS = tuple((field.name, field.default, _KINDS[str(field.type)]) for field in fields(RankIdentity))
"""Computed once: a hub reads a hundred thousand identities when a large job begins."""


# -- Facts ------------------------------------------------------------------------------------------------------------
# What the recorder saw in a rank's live objects: its format, and how it is kept small.
#
# Facts come from mapped memory and from files of any origin, so every reader calls ``checked_facts``: known keys whose
# values have the right type stay, everything else is dropped, and nothing is raised.

MAX_TEXT = 120
"""For names of classes and dtypes; the names of generated classes may have any length."""
MAX_ITEMS = 64
"""Runs of ranks, dimensions of a mesh."""

Check = Callable[[Any], bool]


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LARGEST


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT


def _is_text_or_empty(value: Any) -> bool:
    return value == "" or _is_text(value)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= MAX_ITEMS and all(map(check, value))


def _is_run(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_count, value)) and value[1] > 0 and value[2] > 0


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _is_evaluation(value: Any) -> bool:
    form: dict[str, Check] = {"name": _is_text, "count": _is_count, "ms": _is_amount, "after": _is_count}
    return isinstance(value, Mapping) and value.keys() == form.keys() and all(form[key](value[key]) for key in form)


FACTS_FORM: dict[str, Check | dict[str, Check]] = {
    "peers": lambda value: bool(value) and _list_of(_is_run)(value),
    "pipeline": _is_bool,
    "frameworks": lambda value: bool(value) and _list_of(_is_text)(value),
    "global_step": {"by": _is_text, "first": _is_count, "last": _is_count, "at": _is_count},
    "loader": {
        "num_workers": _is_count,
        "pin_memory": _is_bool,
        "prefetch_factor": _or_none(_is_count),
        "persistent_workers": _is_bool,
        "batch_size": _or_none(_is_count),
        "sampler": _is_text,
        "dataset": _is_text,
        "distributed_sampler": _is_bool,
        "set_epoch_missing": _is_bool,
        "length": _or_none(_is_count),
        "drop_last": _is_bool,
        "last_batch": _or_none(_is_count),
        "epochs": _is_count,
    },
    "ddp": {
        "bucket_mb": _is_amount,
        "find_unused_parameters": _is_bool,
        "static_graph": _is_bool,
        "gradient_as_bucket_view": _is_bool,
        "broadcast_buffers": _is_bool,
        "gradient_mb": _is_amount,
        "group": _is_text,
        "buckets": _is_count,
        "bucket_sizes_mb": _list_of(_is_amount),
        "tensors": _is_count,
        "batchnorm": _is_count,
        "iterations": _is_count,
        "unused": _is_text,
        "comm_hook": _is_text,
    },
    "fsdp": {
        "version": _is_count,
        "units": _is_count,
        "parameters": _is_count,
        "largest_share": _is_amount,
        "strategy": _is_text,
        "resharded_units": _is_count,
        "param_dtype": _is_text,
        "reduce_dtype": _is_text,
        "cpu_offload": _is_bool,
        "forward_prefetch": _is_bool,
        "backward_prefetch": _or_none(_is_text),
    },
    "model": {
        "class": _is_text,
        "parameters": _is_count,
        "modules": _is_count,
        "batchnorm": _is_count,
        "sync_batchnorm": _is_count,
        "compiled": _is_bool,
        "dtype": _is_text,
    },
    "optimizer": {
        "class": _is_text,
        "fused": _or_none(_is_bool),
        "foreach": _or_none(_is_bool),
        "tensors": _is_count,
    },
    "growing": {
        "holder": _is_text_or_empty,
        "per_step": _is_amount,
        "element": _is_text_or_empty,
        "element_bytes": _is_count,
        "graph": _is_bool,
        "from": _is_count,
        "to": _is_count,
    },
    "autocast": _or_none(_is_text),
    "mesh": {"names": _list_of(_is_text), "shape": _list_of(_is_count)},
    "process_group_open": _is_bool,
    "threads": _is_count,
    "gc": {"enabled": _is_bool, "thresholds": _list_of(_is_count)},
    "cudnn_benchmark": _is_bool,
    "tf32": _is_bool,
    "floors": {
        "step": _list_of(_is_count),
        "host": _list_of(_is_count),
        "device": _list_of(_is_count),
        "epochs": _is_count,
        "epoch_steps": _list_of(_is_count),
    },
    "progress": {"by": _is_text, "numbers": _list_of(_is_pair), "epochs": _list_of(_is_pair)},
    "evaluations": _list_of(_is_evaluation),
    "malloc": {"step": _list_of(_is_count), "free": _list_of(_is_count), "resident": _list_of(_is_count)},
}
"""Every key, the most important first."""


def checked_facts(raw: object) -> dict[str, Any]:
    """The valid facts in ``raw``; {} if nothing is valid."""
    if not isinstance(raw, Mapping):
        return {}
    facts: dict[str, Any] = {}
    for key, form in FACTS_FORM.items():
        if key not in raw:
            continue
        value = raw[key]
        if isinstance(form, dict):
            known = _checked_group(value, form)
            if known:
                facts[key] = known
        elif form(value):
            facts[key] = value
    return facts


def _checked_group(raw: object, form: Mapping[str, Check]) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        return {}
    return {name: raw[name] for name, check in form.items() if name in raw and check(raw[name])}


def pack_facts(facts: Mapping[str, Any], limit: int) -> bytes:
    """JSON of at most ``limit`` bytes; if it does not fit, the least important keys are dropped."""
    checked = checked_facts(facts)
    while True:
        text = json.dumps(checked, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
        if len(text) <= limit or not checked:
            return text
        checked.popitem()


def rank_runs(ranks: Iterable[int], own: int) -> list[list[int]]:
    """Ranks as arithmetic runs [start, count, step], so that ten thousand of them stay small.

    If the set is too irregular for that, only the run that contains ``own``.
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs:
            start, count, step = runs[-1]
            if count == 1 or rank == start + count * step:
                runs[-1] = [start, count + 1, rank - start if count == 1 else step]
                continue
        runs.append([rank, 1, 1])
    if len(runs) <= MAX_ITEMS:
        return runs
    return [run for run in runs if own in range(run[0], run[0] + run[1] * run[2], run[2])]


# -- Progress ---------------------------------------------------------------------------------------------------------
# A Stepscope step in the words of the framework: its number in the framework's logs, and its epoch.  The fact
# ``progress`` has pairs of a Stepscope step and the number, or the epoch, that began with it.  Facts come from files of
# any origin; what does not fit is not known (None).


def logged_steps(facts: Mapping[str, Any], first: int, last: int) -> tuple[int, int] | None:
    """The numbers of these steps in the framework's logs, if they were counted without a break."""
    pairs = _pairs(facts, "numbers")
    begin = _at(pairs, first)
    if begin is None or begin != _at(pairs, last):
        return None
    step, number = begin
    return number + first - step, number + last - step


def epochs_of(facts: Mapping[str, Any], first: int, last: int) -> tuple[int, int] | None:
    """The epochs of the first and the last of these steps."""
    pairs = _pairs(facts, "epochs")
    begin, end = _at(pairs, first), _at(pairs, last)
    return None if begin is None or end is None else (begin[1], end[1])


def _pairs(facts: Mapping[str, Any], key: str) -> list[tuple[int, int]]:
    progress = facts.get("progress")
    rows = progress.get(key) if isinstance(progress, Mapping) else None
    if not isinstance(rows, list):
        return []
    return [
        (row[0], row[1]) for row in rows if isinstance(row, list) and len(row) == 2 and all(type(n) is int for n in row)
    ]


def _at(pairs: list[tuple[int, int]], step: int) -> tuple[int, int] | None:
    """The pair that holds for a step."""
    return next((pair for pair in reversed(pairs) if pair[0] <= step), None)
