"""One document about the layers of a model in a sampled step (memory, time and gradients by module), and its text.

``choose_sample`` picks the sample of a rank, and ``layers_document`` makes the document (docs/schema.md) that
``render_layers`` (``stepscope memory``), the API and the page draw.  Bytes of a module and of what is inside it are
sums, so children and the module's own bytes add up to its total exactly.  Times are as measured: a module that was not
called itself has the sum of its children, and a module that is called from several places counts where the tree has it.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.records.layers import MEMORY_KINDS, LayerRecords, LayerSample, ModelTree, plain_numbers
from stepscope.records.text import bytes_text, count_text, norm_text, ns_text, printable, share_text
from stepscope.reports.layout import NARROWEST, Page

__all__ = ["choose_sample", "layers_document", "no_layers", "render_layers"]

SCHEMA = 1
MOST_POINTS = 500
"""Most points in the timeline, and most sampled steps to choose from."""
MOST_RANKS = 4096
"""Most ranks to choose from."""
MOSTLY = 0.9
"""If a step's peak is less than this share of the allocator's, that was reached somewhere else."""
KIND_TITLES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "buffers": "buffers",
    "activations": "activations",
}
_NORMS = ("grad_norm", "weight_norm", "update_ratio")


def choose_sample(records: LayerRecords, *, rank: int | None = None, step: int | None = None) -> LayerSample | None:
    """Return the sample to show, of the last attempt; None without one, or without one of that rank.

    Without a ``rank``: the rank that holds most, of those that ran out of memory if there are any.  A rank's sample is
    its last one, with a ``step`` the last one up to it, or else its first.
    """
    shown = _shown(records, step)
    if rank is not None or not shown:
        return shown.get(rank) if rank is not None else None
    ended = {each.rank: each for each in shown.values() if each.out_of_memory}
    return shown[_fullest(ended or shown)]


def no_layers() -> dict[str, Any]:
    """The document of a run without samples."""
    return {"schema": SCHEMA, "kind": "layers", "rank": None, "step": None, "ranks": [], "steps": [], "modules": []}


def layers_document(records: LayerRecords, sample: LayerSample, *, most: int | None = None) -> dict[str, Any]:
    """Return the document about one sample; ``most``: the number of modules that it may list."""
    model = records.models[sample.model]
    modules = _Modules(model, sample)
    ranks = _shown(records, sample.step)
    totals = {rank: _total(sample) for rank, sample in ranks.items()}
    total = totals[sample.rank]
    own = [other for other in _last_attempt(records) if other.rank == sample.rank]
    samples = sum(not other.out_of_memory for other in own)
    rows, left_out = modules.rows(most)
    peak = _peak(model, sample)
    device = _device(sample, total, None if peak is None else peak["bytes"], ranks)
    kinds = [_kind(kind, sample, total, ranks.values()) for kind in MEMORY_KINDS if _has(kind, ranks.values())]
    over_ranks = _over_ranks(totals)
    return {
        "schema": SCHEMA,
        "kind": "layers",
        "attempt": sample.attempt,
        "rank": sample.rank,
        "step": sample.step,
        "wall_ns": sample.wall_ns,
        "clock": sample.clock,
        "compiled": model.compiled,
        "replicated": model.replicated,
        "skipped": sample.skipped,
        "out_of_memory": sample.out_of_memory,
        "group": sample.group,
        "ranks": sorted(ranks)[:MOST_RANKS],
        "steps": [other.step for other in _thinned(own)],
        "samples": samples,
        "total_bytes": total,
        "kinds": kinds,
        "over_ranks": over_ranks,
        "device": device,
        "peak": peak,
        "timeline": _timeline(own),
        "nonfinite_forward": _named(model, sample.nonfinite_forward),
        "nonfinite_backward": _named(model, sample.nonfinite_backward),
        "modules": rows,
        "modules_total": len(model.modules),
        "modules_left_out": left_out,
        "sentences": _sentences(model, total, kinds, over_ranks, device, peak),
        "notes": _notes(records, own, sample),
        "unseen": _unseen(model, sample, len(ranks)),
        "text": {
            "total_bytes": bytes_text(total),
            "shown": _which(sample, ranks, samples),
            "times": _times_text(sample, rows[0]["text"]),
        },
    }


# -- samples ----------------------------------------------------------------------------------------------------------


def _last_attempt(records: LayerRecords) -> list[LayerSample]:
    """Samples are in order of attempt."""
    samples = records.of_memory
    last = samples[-1].attempt if samples else 0
    return [sample for sample in samples if sample.attempt == last]


def _shown(records: LayerRecords, step: int | None) -> dict[int, LayerSample]:
    """By rank, its last sample up to ``step``; its first one if all are later."""
    found: dict[int, LayerSample] = {}
    for sample in _last_attempt(records):
        if sample.rank not in found or step is None or sample.step <= step:
            found[sample.rank] = sample
    return found


def _fullest(shown: Mapping[int, LayerSample]) -> int:
    """The rank that held most in its step, by its allocator, which also has what no layer owns, or else by its layers.

    What the allocator has in use at the end of the step is without activations, which have been freed by then.
    """
    in_use = _in_use(shown)
    holders = {
        rank: in_use[rank] + _sum(sample, "activations") if in_use else _total(sample) for rank, sample in shown.items()
    }
    return max(holders, key=lambda rank: (holders[rank], -rank))


def _in_use(shown: Mapping[int, LayerSample]) -> dict[int, int]:
    """By rank, what its allocator had in use at the end of the step; empty if that is not known of all of them."""
    found = {rank: sample.device_bytes for rank, sample in shown.items() if sample.device_bytes is not None}
    return found if len(found) == len(shown) else {}


def _total(sample: LayerSample) -> int:
    return sum(_sum(sample, kind) for kind in MEMORY_KINDS)


def _sum(sample: LayerSample, kind: str) -> int:
    return sum(sample.memory.get(kind, ()))


def _has(kind: str, samples: Iterable[LayerSample]) -> bool:
    return any(_sum(sample, kind) for sample in samples)


def _thinned(samples: Sequence[LayerSample]) -> Sequence[LayerSample]:
    """At most ``MOST_POINTS``, evenly, the last one among them."""
    every = -(-len(samples) // MOST_POINTS)
    return samples if every <= 1 else samples[(len(samples) - 1) % every :: every]


def _timeline(samples: Sequence[LayerSample]) -> dict[str, Any]:
    shown = _thinned(samples)
    return {
        "step": [sample.step for sample in shown],
        "bytes": {kind: [_sum(sample, kind) for sample in shown] for kind in MEMORY_KINDS if _has(kind, shown)},
        "total_bytes": [_total(sample) for sample in shown],
        "device_bytes": [sample.device_bytes for sample in shown],
        "device_peak": [sample.device_peak for sample in shown],
        "peak_bytes": [max((size for size, _ in sample.peaks.values()), default=None) for sample in shown],
        "peak_phase": [max(sample.peaks, key=lambda phase: sample.peaks[phase][0], default=None) for sample in shown],
    }


# -- totals -----------------------------------------------------------------------------------------------------------


def _kind(kind: str, sample: LayerSample, total: int, samples: Iterable[LayerSample]) -> dict[str, Any]:
    own = _sum(sample, kind)
    values = [_sum(sample, kind) for sample in samples]
    spread = {"min": min(values), "median": _median(values), "max": max(values)}
    return {
        "kind": kind,
        "title": KIND_TITLES[kind],
        "bytes": own,
        "share": _share(own, total),
        "over_ranks": spread,
        "text": {
            "bytes": bytes_text(own),
            "share": share_text(_share(own, total)),
            **{name: bytes_text(value) for name, value in spread.items()},
        },
    }


def _over_ranks(totals: Mapping[int, int]) -> dict[str, Any]:
    low = min(totals, key=lambda rank: (totals[rank], rank))
    high = max(totals, key=lambda rank: (totals[rank], -rank))
    middle = _median(totals.values())
    least, most = bytes_text(totals[low]), bytes_text(totals[high])
    text = f"from {least} (rank {low}) to {most} (rank {high}), median {bytes_text(middle)}"
    if len(totals) == 1:
        text = "only this rank has samples"
    elif least == most:
        text = f"{most} on each of {count_text(len(totals), 'rank')}"
    return {
        "ranks": len(totals),
        "min": totals[low],
        "median": middle,
        "max": totals[high],
        "min_rank": low,
        "max_rank": high,
        "text": text,
    }


def _device(
    sample: LayerSample, total: int, peak: int | None, shown: Mapping[int, LayerSample]
) -> dict[str, Any] | None:
    """What the allocator counted, and how much of it the account does not explain; None without a GPU.

    ``peak``: of the step, as it was added up; ``shown``: the samples of all ranks.
    """
    if sample.device_peak is None and sample.device_bytes is None:
        return None
    constant = total - _sum(sample, "activations")
    peak_rest = None if sample.device_peak is None or peak is None else sample.device_peak - peak
    rest = None if sample.device_bytes is None else sample.device_bytes - constant
    parts = []
    if sample.device_peak is not None:
        explained = "" if peak is None else f" ({_explained(peak, sample.device_peak)})"
        parts.append(f"{bytes_text(sample.device_peak)} at most up to this step{explained}")
    if sample.device_bytes is not None and rest is not None:
        parts.append(f"{bytes_text(sample.device_bytes)} at the end of the step ({_rest(rest, sample.device_bytes)})")
    in_use = _in_use(shown)
    over_ranks = _over_ranks(in_use) if len(in_use) > 1 else None
    if over_ranks is not None and bytes_text(over_ranks["min"]) != bytes_text(over_ranks["max"]):
        parts.append(f"over ranks {over_ranks['text']}")
    return {
        "peak_bytes": sample.device_peak,
        "bytes": sample.device_bytes,
        "held_bytes": constant,
        "peak_rest_bytes": peak_rest,
        "rest_bytes": rest,
        "over_ranks": over_ranks,
        "text": "; ".join(parts),
    }


def _peak(model: ModelTree, sample: LayerSample) -> dict[str, Any] | None:
    """The most bytes in use in the step, by phase; None if that is not known."""
    if not sample.peaks:
        return None
    phases: list[dict[str, Any]] = [
        {
            "phase": phase,
            "bytes": size,
            "module": _named(model, at),
            "text": f"{bytes_text(size)} in {phase}{_place(model, phase, at)}",
        }
        for phase, (size, at) in sample.peaks.items()
    ]
    highest = max(phases, key=lambda phase: phase["bytes"])
    others = [f"{phase['phase']} {bytes_text(phase['bytes'])}" for phase in phases if phase is not highest]
    return {
        **highest,
        "phases": phases,
        "text": highest["text"] + (f" ({', '.join(others)})" if others else ""),
    }


def _place(model: ModelTree, phase: str, at: int | None) -> str:
    if at is not None:
        return f" of {_named(model, at)}"
    return "" if phase == "optimizer" or model.compiled else ", outside of the layers"


def _explained(peak: int, most: int) -> str:
    """How a step's peak compares with what the allocator had at most."""
    if peak > most:
        return f"the step's peak, as it is added up, is {bytes_text(peak - most)} more"
    text = f"the step's peak explains {share_text(_share(peak, most))}"
    if peak < MOSTLY * most:
        return f"{text}; the other {bytes_text(most - peak)} were in use at another time, or outside of the layers"
    return f"{text}; {bytes_text(most - peak)} is not accounted for"


def _rest(rest: int, of: int) -> str:
    if rest >= 0:
        return f"{bytes_text(rest)}, {share_text(_share(rest, of))}, is not in any layer"
    return f"{bytes_text(-rest)} less than the sum of the layers"


def _median(values: Iterable[int]) -> int:
    """Of an even number, the mean of the two in the middle."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


# -- modules ----------------------------------------------------------------------------------------------------------

Column = list[float | None]


class _Modules:
    """The figures of each module, alone and with everything inside it."""

    def __init__(self, model: ModelTree, sample: LayerSample) -> None:
        self._model = model
        self._parents = [module.parent for module in model.modules]
        count = len(self._parents)
        self._own = {kind: list(sample.memory.get(kind) or (0,) * count) for kind in MEMORY_KINDS}
        self._bytes = {kind: self._summed(values) for kind, values in self._own.items()}
        self._total = [sum(values) for values in zip(*self._bytes.values(), strict=True)]
        self._whole = sum(total for total, parent in zip(self._total, self._parents, strict=True) if parent < 0)
        self._forward, self._own_forward = self._times(sample.forward_us, measured_whole=True)
        self._backward, self._own_backward = self._times(sample.backward_us, measured_whole=False)
        self._host_forward, _ = self._times(sample.host_forward_us or (None,) * count, measured_whole=True)
        self._host_backward, _ = self._times(sample.host_backward_us or (None,) * count, measured_whole=False)
        self._health = self._health_of(sample)

    def rows(self, most: int | None) -> tuple[list[dict[str, Any]], int]:
        """Return the modules in the order of the model, without the smallest ones, and how many those are."""
        chosen = self._rows_shown(most)
        place = {at: row for row, at in enumerate(chosen)}
        hidden = [0] * len(chosen)
        counted_in: list[int] = []  # by module: the row of the innermost one around it that is kept
        for at, parent in enumerate(self._parents):
            counted_in.append(place[at] if at in place else counted_in[parent])
            hidden[counted_in[at]] += at not in place
        rows = [self._row(at, place, hidden[row]) for row, at in enumerate(chosen)]
        return rows, len(self._parents) - len(chosen)

    def _rows_shown(self, most: int | None) -> list[int]:
        count = len(self._parents)
        if most is None or count <= most:
            return list(range(count))
        columns = (self._total, self._forward, self._backward)
        wholes = [max((value or 0 for value in column), default=0) or 1 for column in columns]
        size = [max((c[at] or 0) / w for c, w in zip(columns, wholes, strict=True)) for at in range(count)]
        for at in reversed(range(count)):  # a module is as large as the largest in it: its parent is always kept
            if (parent := self._parents[at]) >= 0:
                size[parent] = max(size[parent], size[at])
        roots = [at for at in range(count) if self._parents[at] < 0]
        return sorted({*roots, *sorted(range(count), key=lambda at: (-size[at], at))[:most]})

    def _row(self, at: int, place: Mapping[int, int], hidden: int) -> dict[str, Any]:
        module = self._model.modules[at]
        parent = self._parents[at]
        own = {kind: values[at] for kind, values in self._own.items() if values[at]}
        total = {kind: values[at] for kind, values in self._bytes.items() if values[at]}
        times = {
            "forward_us": self._forward[at],
            "own_forward_us": self._own_forward[at],
            "backward_us": self._backward[at],
            "own_backward_us": self._own_backward[at],
            "host_forward_us": self._host_forward[at],
            "host_backward_us": self._host_backward[at],
        }
        health = {name: values[at] for name, values in self._health.items()}
        share = _share(self._total[at], self._whole)
        return {
            "name": printable(module.name),
            "type": printable(module.type),
            "parent": place[parent] if parent >= 0 else -1,
            "elements": module.elements,
            "left_out": hidden,
            "own_bytes": own,
            "bytes": total,
            "total_bytes": self._total[at],
            "share": share,
            **{name: None if us is None else round(us, 3) for name, us in times.items()},
            **dict(zip(health, plain_numbers(list(health.values())), strict=True)),
            "text": {
                "total_bytes": bytes_text(self._total[at]),
                "share": share_text(share),
                "bytes": {kind: bytes_text(value) for kind, value in total.items()},
                **{name: ns_text(None if us is None else us * 1e3) for name, us in times.items()},
                **{name: norm_text(health[name]) for name in _NORMS},
                "zero_share": share_text(health["zero_share"]),
            },
        }

    def _summed(self, values: Sequence[int]) -> list[int]:
        """Each with everything inside it; a parent comes before its children."""
        total = list(values)
        for at in reversed(range(len(total))):
            if (parent := self._parents[at]) >= 0:
                total[parent] += total[at]
        return total

    def _times(self, values: Sequence[float | None], *, measured_whole: bool) -> tuple[Column, Column]:
        """Total and own time; ``measured_whole``: what was measured includes the children."""
        known = [value if value is not None and 0 <= value < math.inf else None for value in values]
        inner: Column = [None] * len(known)
        total: Column = [None] * len(known)
        own: Column = [None] * len(known)
        for at in reversed(range(len(known))):
            measured, inside = known[at], inner[at]
            if measured is None:
                total[at] = inside
                own[at] = None if inside is None else 0.0
            elif measured_whole:
                total[at] = measured
                own[at] = max(0.0, measured - (inside or 0.0))
            else:
                total[at] = measured + (inside or 0.0)
                own[at] = measured
            value, parent = total[at], self._parents[at]
            if value is not None and parent >= 0:
                inner[parent] = (inner[parent] or 0.0) + value
        return total, own

    def _health_of(self, sample: LayerSample) -> dict[str, Column]:
        """Norms of a module are those of all parameters inside it; ratios and shares are weighted."""
        trainable = [module.trainable for module in self._model.modules]
        weights = sample.weight_norm
        pairs = list(zip(sample.update_ratio, weights, strict=True))
        changes = [None if ratio is None or not weight else ratio * weight for ratio, weight in pairs]
        changed = [weight if change is not None else None for change, weight in zip(changes, weights, strict=True)]
        zeros = list(zip(sample.zero_share, trainable, strict=True))
        zero = self._added([None if share is None else share * count for share, count in zeros])
        of = self._added([None if share is None else float(count) for share, count in zeros])
        ratio = self._ratio(self._joined(changes), self._joined(changed), sample.update_ratio)
        return {
            "grad_norm": self._joined(sample.grad_norm),
            "weight_norm": self._joined(weights),
            "update_ratio": ratio,
            "zero_share": self._ratio(zero, of, sample.zero_share),
        }

    def _joined(self, norms: Sequence[float | None]) -> Column:
        """Norms of modules with everything inside them: the root of the sum of squares, without an overflow."""
        total = list(norms)
        for at in reversed(range(len(total))):
            value, parent = total[at], self._parents[at]
            if value is not None and parent >= 0:
                total[parent] = math.hypot(total[parent] or 0.0, value)
        return total

    def _added(self, values: Sequence[float | None]) -> Column:
        total = list(values)
        for at in reversed(range(len(total))):
            value, parent = total[at], self._parents[at]
            if value is not None and parent >= 0:
                total[parent] = (total[parent] or 0.0) + value
        return total

    @staticmethod
    def _ratio(parts: Column, wholes: Column, own: Sequence[float | None]) -> Column:
        """``own`` where there is no whole to divide by."""
        rows = zip(parts, wholes, own, strict=True)
        return [alone if part is None or not whole else part / whole for part, whole, alone in rows]


# -- sentences --------------------------------------------------------------------------------------------------------


def _which(sample: LayerSample, shown: Mapping[int, LayerSample], samples: int) -> str:
    fullest = len(shown) > 1 and sample.rank == _fullest(shown)
    place = f", the fullest of {count_text(len(shown), 'rank')}," if fullest else ""
    when = " when it ran out of memory" if sample.out_of_memory else ""
    return f"Rank {sample.rank}{place} in step {sample.step:,}{when} ({count_text(samples, 'sample')})"


def _sentences(
    model: ModelTree,
    total: int,
    kinds: Sequence[Mapping[str, Any]],
    over_ranks: Mapping[str, Any],
    device: Mapping[str, Any] | None,
    peak: Mapping[str, Any] | None,
) -> list[str]:
    parts = sorted((kind for kind in kinds if kind["bytes"]), key=lambda kind: -kind["bytes"])
    shares = ", ".join(f"{kind['title']} {kind['text']['share']}" for kind in parts)
    modules = count_text(len(model.modules), "module")
    hold = "holds" if len(model.modules) == 1 else "hold"
    sentences = [f"The model's {modules} {hold} {bytes_text(total)}{f': {shares}' if shares else ''}."]
    if over_ranks["ranks"] > 1:
        sentences.append(f"Over ranks: {over_ranks['text']}.")
    if peak is not None:
        sentences.append(f"The peak of the step: {peak['text']}.")
    if device is not None:
        sentences.append(f"The device's allocator: {device['text']}.")
    return sentences


def _notes(records: LayerRecords, own: Sequence[LayerSample], sample: LayerSample) -> list[str]:
    """``own``: all samples of this rank."""
    sentences = []
    if sample.skipped:
        sentences.append("The gradient scaler skipped this step because of infinite gradients.")
    began = min((other for other in own if _is_nonfinite(other)), key=lambda other: other.step, default=sample)
    if _is_nonfinite(sample) and began.step < sample.step:
        places = _nonfinite(records.models[began.model], began)
        return [
            *sentences,
            f"Values became NaN or infinite before this sample: in that of step {began.step:,}, {places}.",
        ]
    if places := _nonfinite(records.models[sample.model], sample):
        sentences.append(f"NaN or infinite: {places}.")
    return sentences


def _is_nonfinite(sample: LayerSample) -> bool:
    return not sample.skipped and (sample.nonfinite_forward is not None or sample.nonfinite_backward is not None)


def _nonfinite(model: ModelTree, sample: LayerSample) -> str:
    """``the first output is that of layers.3, the first gradient that of layers.7``."""
    firsts = (("output", sample.nonfinite_forward), ("gradient", sample.nonfinite_backward))
    return ", ".join(f"the first {what} is that of {_named(model, at)}" for what, at in firsts if at is not None)


def _times_text(sample: LayerSample, model: Mapping[str, str]) -> str:
    """Whose times they are, where there are both; ``model``: the texts of the model itself."""
    if sample.clock != "device":
        return ""
    if not any(value is not None for value in sample.host_forward_us):
        return "of the device"
    forward, backward = model["host_forward_us"], model["host_backward_us"]
    return f"of the device; the host took {forward} to start the work of forward, and {backward} for backward"


def _unseen(model: ModelTree, sample: LayerSample, ranks: int) -> list[str]:
    """What the figures do not contain, so that they are not taken for the whole."""
    sentences = []
    if not _sum(sample, "activations"):
        sentences.append("activations were not measured")
    elif sample.out_of_memory:
        sentences.append("activations are those of the last sampled step")
    elif model.compiled:
        sentences.append("activations of compiled code count for the model itself, not for its layers")
    if sample.peaks:
        sentences.append("the peak is added up from sizes, without what an operation or a library uses for itself")
    if model.compiled:
        sentences.append("layers inside the compiled region are not timed")
    if not model.replicated and ranks > 1:
        sentences.append("of parameters that are sharded, only this rank's part is counted")
    if not any(value is not None for value in sample.forward_us):
        sentences.append("layers were not timed")
    elif sample.clock == "host" and (sample.device_peak is not None or sample.device_bytes is not None):
        sentences.append("times are the host's, which starts work on the device and does not wait for it")
    return sentences


def _named(model: ModelTree, at: int | None) -> str | None:
    if at is None:
        return None
    module = model.modules[at]
    return printable(module.name or module.type)


# -- text -------------------------------------------------------------------------------------------------------------

BAR_CELLS = 14
WIDEST_NAME = 50
"""There are no bars if names would be cut for them; longer names are cut anyway."""
LIKE_BYTES = 1.1
LIKE_TIME = {"device": 1.5, "host": 4.0}
"""Modules whose bytes or times differ by more than this are not shown as one.  On a busy host equal modules differ by 3
in one sample."""
MOST_LEVELS = 64
MOST_SIBLINGS = 40
"""Lines below one module; the rest is counted."""


def render_layers(document: Mapping[str, Any], *, width: int = 80, depth: int = 3, sort: str = "bytes") -> str:
    width = max(width, NARROWEST)
    page = Page(width, color=False)
    page.lines.append(document["text"]["shown"])
    page.blank()
    page.lines += _totals(document, width)
    page.blank()
    page.lines += _module_lines(document, width, depth, ORDERS[sort])
    page.blank()
    page.labeled("times", [document["text"]["times"] + "."] if document["text"]["times"] else [])
    page.labeled("notes", document["notes"])
    page.labeled("not seen", ["; ".join(document["unseen"]) + "."] if document["unseen"] else [])
    return "\n".join(page.lines).rstrip("\n") + "\n"


def _totals(document: Mapping[str, Any], width: int) -> list[str]:
    """By kind, their sum, and what it compares with."""
    from stepscope.reports.layout import bar

    kinds = document["kinds"]
    titles = max(len("device"), *(len(kind["title"]) for kind in kinds))
    sizes = max(len(text) for text in [document["text"]["total_bytes"], *(kind["text"]["bytes"] for kind in kinds)])
    lines = [
        f"  {kind['title'].ljust(titles)}  {kind['text']['bytes'].rjust(sizes)}  {kind['text']['share'].rjust(4)}  "
        f"{bar(kind['share'], BAR_CELLS)}".rstrip()
        for kind in kinds
    ]
    lines.append(f"  {'sum'.ljust(titles)}  {document['text']['total_bytes'].rjust(sizes)}")
    texts = {"ranks": document["over_ranks"]["text"] if document["over_ranks"]["ranks"] > 1 else ""}
    texts["peak"] = "" if document["peak"] is None else document["peak"]["text"]
    texts["device"] = "" if document["device"] is None else document["device"]["text"]
    for label, text in texts.items():
        wrapped = textwrap.wrap(text, width - titles - 4)
        lines += [f"  {'' if at else label:{titles}}  {line}" for at, line in enumerate(wrapped)]
    return lines


# -- modules ----------------------------------------------------------------------------------------------------------
# Modules with consecutive numbers that are built alike (the blocks of a transformer) are one line, and so are the
# modules at the same place inside them.


@dataclass(kw_only=True)
class _Node:
    """One line: a module, or modules that are built alike."""

    members: list[int]
    children: list[_Node]
    name: str
    about: str
    bytes: int
    forward_us: float | None
    backward_us: float | None

    @property
    def time_us(self) -> float:
        return (self.forward_us or 0.0) + (self.backward_us or 0.0)


def _natural(node: _Node) -> list[tuple[int, str]]:
    return [(int(part or 0), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", node.name)]


ORDERS: dict[str, Callable[[_Node], Any]] = {
    "bytes": lambda node: -node.bytes,
    "time": lambda node: -node.time_us,
    "name": _natural,
}


class _Builder:
    def __init__(self, rows: Sequence[Mapping[str, Any]], *, like_time: float) -> None:
        self._rows = rows
        self._like_time = like_time
        self._children: list[list[int]] = [[] for _ in rows]
        for at, row in enumerate(rows):
            if row["parent"] >= 0:
                self._children[row["parent"]].append(at)
        self._shape: list[int] = [0] * len(rows)
        known: dict[Any, int] = {}
        for at in reversed(range(len(rows))):  # children come after their parents
            inside = tuple((self._last(child), self._shape[child]) for child in self._children[at])
            self._shape[at] = known.setdefault((rows[at]["type"], rows[at]["elements"], inside), len(known))

    def roots(self) -> list[_Node]:
        return [self._node([at], "", 0) for at, row in enumerate(self._rows) if row["parent"] < 0]

    def _last(self, at: int) -> str:
        name: str = self._rows[at]["name"]
        return name.rpartition(".")[2]

    def _node(self, members: list[int], above: str, level: int) -> _Node:
        rows = [self._rows[at] for at in members]
        first = rows[0]["name"]
        inside = zip(*(self._children[at] for at in members if level < MOST_LEVELS), strict=True)
        groups = self._groups([list(places) for places in inside])
        children = [self._node(group, first, level + 1) for group in groups]
        node = _Node(
            members=members,
            children=children,
            name=_below(first, above) or rows[0]["type"],
            about="" if not first else rows[0]["type"],
            bytes=sum(row["total_bytes"] for row in rows),
            forward_us=_summed([row["forward_us"] for row in rows]),
            backward_us=_summed([row["backward_us"] for row in rows]),
        )
        if len(members) > 1:
            sizes = sorted({row["total_bytes"] for row in rows})
            least, most = bytes_text(sizes[0]), bytes_text(sizes[-1])
            each = f"{most} each" if least == most else f"{least} to {most} each"
            node.about = f"{len(members)} × {rows[0]['type']}, {each}"
            if self._last(members[0]) != self._last(members[-1]):
                node.name = f"{node.name} … {self._last(members[-1])}"
        if len(children) == 1 and not any(self._has_own(at) for at in members):
            # A container that holds nothing itself, such as a ModuleList, is shown as what is in it.
            children[0].name = f"{node.name}.{children[0].name}"
            return children[0]
        return node

    def _has_own(self, at: int) -> bool:
        row = self._rows[at]
        return bool(row["own_bytes"] or row["own_forward_us"] or row["left_out"] or not row["name"])

    def _groups(self, places: Sequence[list[int]]) -> list[list[int]]:
        """Join neighbors that are alike and have consecutive numbers."""
        groups: list[list[int]] = []
        sizes = times = (0.0, 0.0)
        for members in places:
            own_sizes = [self._rows[at]["total_bytes"] for at in members]
            own_times = [(self._rows[at]["forward_us"] or 0) + (self._rows[at]["backward_us"] or 0) for at in members]
            joined = min(sizes[0], *own_sizes), max(sizes[1], *own_sizes)
            lasted = min(times[0], *own_times), max(times[1], *own_times)
            # None may be large or slow among the others: that one must be seen.
            like = joined[1] <= LIKE_BYTES * joined[0] and lasted[1] <= self._like_time * lasted[0]
            if groups and like and self._follows(groups[-1][-1], members[0]):
                groups[-1] += members
                sizes, times = joined, lasted
            else:
                groups.append(list(members))
                sizes, times = (min(own_sizes), max(own_sizes)), (min(own_times), max(own_times))
        return groups

    def _follows(self, before: int, after: int) -> bool:
        first, second = self._last(before), self._last(after)
        numbered = _numbered(first) and _numbered(second) and int(second) == int(first) + 1
        return numbered and self._shape[before] == self._shape[after]


def _numbered(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


def _below(name: str, above: str) -> str:
    return name.removeprefix(f"{above}.") if above else name


def _summed(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _module_lines(document: Mapping[str, Any], width: int, depth: int, order: Callable[[_Node], Any]) -> list[str]:
    from stepscope.reports.layout import bar, cut

    shown: list[tuple[int, _Node]] = []
    deeper = False

    def add(nodes: Sequence[_Node], level: int) -> None:
        nonlocal deeper
        ordered = sorted(nodes, key=order)
        for node in ordered[:MOST_SIBLINGS]:
            shown.append((level, node))
            if level < depth:
                add(node.children, level + 1)
            else:
                deeper = deeper or bool(node.children)
        if rest := ordered[MOST_SIBLINGS:]:
            shown.append((level, _others(rest)))

    like_time = LIKE_TIME.get(document["clock"], LIKE_TIME["host"])
    add(_Builder(document["modules"], like_time=like_time).roots(), 0)
    total = document["total_bytes"]
    timed = any(node.time_us for _, node in shown)
    heads = ["bytes", "share", "", *(["forward", "backward"] if timed else [])]
    cells = [
        [
            bytes_text(node.bytes),
            share_text(node.bytes / total if total else None),
            bar(node.bytes / total if total else 0.0, BAR_CELLS),
            *([ns_text(_ns(node.forward_us)), ns_text(_ns(node.backward_us))] if timed else []),
        ]
        for _, node in shown
    ]
    widths = [max(len(head), *(len(row[at]) for row in cells)) for at, head in enumerate(heads)]
    widths[2] = BAR_CELLS
    names = ["  " * level + node.name + (f"  {node.about}" if node.about else "") for level, node in shown]
    if width < sum(widths) + 2 * len(widths) + 2 + min(max(map(len, names)), WIDEST_NAME):
        heads, cells, widths = _without_bars(heads, cells, widths)
    bars = heads.index("") if "" in heads else -1
    room = min(width - 2 - sum(widths) - 2 * len(widths), max(map(len, ["module", *names])))
    lines = [_line("module", heads, widths, room, bars)]
    lines += [_line(cut(name, room), row, widths, room, bars) for name, row in zip(names, cells, strict=True)]
    return [*lines, *([f"  More inside: --depth {depth + 1}"] if deeper else [])]


def _without_bars(
    heads: list[str], cells: list[list[str]], widths: list[int]
) -> tuple[list[str], list[list[str]], list[int]]:
    return [*heads[:2], *heads[3:]], [[*row[:2], *row[3:]] for row in cells], [*widths[:2], *widths[3:]]


def _line(name: str, cells: Sequence[str], widths: Sequence[int], room: int, bars: int) -> str:
    padded = [
        cell.ljust(width) if at == bars else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(["", name.ljust(room), *padded]).rstrip()


def _others(nodes: Sequence[_Node]) -> _Node:
    return _Node(
        members=[],
        children=[],
        name=f"… and {len(nodes):,} more",
        about="",
        bytes=sum(node.bytes for node in nodes),
        forward_us=_summed([node.forward_us for node in nodes]),
        backward_us=_summed([node.backward_us for node in nodes]),
    )


def _ns(us: float | None) -> float | None:
    return None if us is None else us * 1e3
