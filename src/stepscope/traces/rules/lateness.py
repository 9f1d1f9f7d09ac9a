"""Why a rank comes late: what it does longer than the median of the ranks that are not late.

Every cause is a time that the traces have of all ranks.  One is named if its excess explains half of the lateness;
otherwise none is.  Longer computation is told apart further: the same kernels that take longer, or more of them; with
shapes in the trace also larger inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.units import ms_text, ns_text, share_text
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import View, holes_of

if TYPE_CHECKING:
    from stepscope.traces.rank import RankAnalysis

__all__ = ["Cause", "cause_of", "waits_of_host"]

Ints = NDArray[np.int64]
NAME_LENGTH = 48


@dataclass(frozen=True, kw_only=True)
class Cause:
    """``kind``: ``input``, ``garbage``, ``compiling``, ``slower_kernels``, ``more_work``, ``copies``, ``host``,
    ``gaps``, ``python``, ``before_the_trace``; empty: nothing in the traces explains it by itself.
    """

    kind: str = ""
    words: str = ""
    """Of one rank, a sentence without its end: ``it spends 3.20 ms a step more than its peers in the DataLoader``."""
    more_ns: int = 0
    """Over all steps."""
    evidence: dict[str, Any] = field(default_factory=dict)


def waits_of_host(view: View) -> Ints:
    """[R]; for others in collectives of the host, while the device idles."""
    waited_ns = view.each(lambda one: int(view.job.collectives.wait_ns.get(one.rank, 0)))
    return np.where(view.host_comm, waited_ns, 0)


def cause_of(view: View, row: int, peers: Sequence[int], late_ns: float) -> Cause:
    """``row``, ``peers``: of the view; ``late_ns``: what is to be explained, over all steps."""
    if not peers:
        return Cause()
    kind, more_ns = max(_excesses(view, row, peers), key=lambda each: each[1])
    if more_ns <= 0 or more_ns < thresholds.EXPLAINS_SHARE * late_ns:
        return Cause()
    each = f"{ms_text(more_ns / int(view.steps[row]) / 1e6)}{' a step' if view.stepped else ''}"
    if kind == "computing":
        return _computing(view, row, peers, more_ns, each)
    words, evidence = _words(view, row, peers, kind, more_ns, each)
    return Cause(kind=kind, words=words, more_ns=more_ns, evidence=evidence)


def _excesses(view: View, row: int, peers: Sequence[int]) -> Iterator[tuple[str, int]]:
    """What tells most first: where two are as long, the first is taken."""
    shifts = view.job.clocks.shifts
    starts = view.each(lambda one: one.meta.origin_ns + one.steps[0].start_ns - shifts.get(one.rank, 0))
    everything: tuple[tuple[str, Ints], ...] = (
        ("input", view.each(lambda one: one.host.loading_ns)),
        ("garbage", view.each(lambda one: sum(pause.dur_ns for pause in one.host.pauses))),
        ("compiling", view.each(lambda one: one.host.compile_ns)),
        ("computing", view.times.compute_ns),
        ("copies", view.each(lambda one: one.pace.work.exposed_memory_ns)),
        ("host", np.where(view.on_device, view.idle.host_ns - waits_of_host(view), 0)),
        ("gaps", view.idle.kernel_ns + view.idle.other_ns),
        ("python", view.each(lambda one: one.exchanges.host.idle_ns if one.exchanges.host else 0)),
        ("before_the_trace", starts if view.stepped else np.zeros_like(starts)),
    )
    for kind, values in everything:
        yield kind, int(values[row]) - median_low(values[list(peers)].tolist())


def _words(
    view: View, row: int, peers: Sequence[int], kind: str, more_ns: int, each: str
) -> tuple[str, dict[str, Any]]:
    if kind == "before_the_trace":
        return f"it begins the first traced step {ms_text(more_ns / 1e6)} after its peers, held up before the trace", {}
    if kind in ("host", "python"):
        holes = holes_of(view.analyses[row])
        place = holes[0][0] if holes and holes[0][1] >= thresholds.EXPLAINS_SHARE * more_ns else None
        if place:
            return f"its host spends {each} more than its peers' in {place}", {"place": place}
        if kind == "python":
            return f"it spends {each} more than its peers between operators", {}
        return f"its device waits {each} longer than its peers' for the host to launch", _launching(view, row, peers)
    if kind == "gaps":
        return f"its device idles {each} longer than its peers' before kernels that are queued already", {}
    doing = {
        "input": "in the DataLoader",
        "garbage": "collecting garbage",
        "compiling": "compiling",
        "copies": "copying to or from the device",
    }
    return f"it spends {each} more than its peers {doing[kind]}", {}


def _launching(view: View, row: int, peers: Sequence[int]) -> dict[str, Any]:
    """How far ahead of its device the host is, here and with the peers."""

    def middle(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median_low(known) if known else None

    own = view.analyses[row].pace.device
    others = [view.analyses[peer].pace.device for peer in peers]
    return {
        "launch_delay_ns": own.launch_delay_ns_median,
        "peers_launch_delay_ns": middle([each.launch_delay_ns_median for each in others]),
        "mean_queue": _rounded(own.mean_queue),
        "peers_mean_queue": _rounded(middle([each.mean_queue for each in others])),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _computing(view: View, row: int, peers: Sequence[int], more_ns: int, each: str) -> Cause:
    """The same kernels, longer; or more of them, or of larger inputs."""
    one, others = view.analyses[row], [view.analyses[peer] for peer in peers]
    own, usual = _kernels(one), _usual(others)
    longer = {name: count * (total / count - usual[name][1]) for name, (count, total) in own.items() if name in usual}
    added = {
        name: (count - usual[name][0]) * usual[name][1] if name in usual else total
        for name, (count, total) in own.items()
    }
    larger = _larger(one, others)
    if larger:
        words = f"it has {each} more to compute than its peers: {larger}"
        return Cause(kind="more_work", words=words, more_ns=more_ns, evidence={"larger_input": larger})
    if not longer and not added:
        return Cause(kind="more_work", words=f"it computes {each} longer than its peers", more_ns=more_ns)
    if sum(added.values()) > sum(longer.values()):
        count, peers_count = (sum(figures[0] for figures in kernels.values()) for kernels in (own, usual))
        words = (
            f"it has {each} more to compute than its peers: {count:,.0f} kernels{' a step' if view.stepped else ''}, "
            f"not {peers_count:,.0f}"
        )
        counts = {"kernels_per_step": round(count, 1), "peers_kernels_per_step": round(peers_count, 1)}
        return Cause(kind="more_work", words=words, more_ns=more_ns, evidence=counts)
    name = max(longer, key=lambda name: longer[name])
    mean_ns, usual_ns = own[name][1] / own[name][0], usual[name][1]
    words = (
        f"its kernels take {each} longer than its peers' ({_short(name)} {ns_text(mean_ns)} instead of "
        f"{ns_text(usual_ns)}, {share_text(mean_ns / usual_ns - 1)} longer)"
    )
    same = None if _shapes(one) is None or None in map(_shapes, others) else True
    evidence = {
        "kernel": name,
        "kernel_ns": round(mean_ns),
        "peers_kernel_ns": round(usual_ns),
        "same_shapes": same,
    }
    return Cause(kind="slower_kernels", words=words, more_ns=more_ns, evidence=evidence)


def _short(name: str) -> str:
    name = name.removeprefix("void ").partition("(")[0]
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"


def _kernels(one: RankAnalysis) -> dict[str, tuple[float, float]]:
    """By name: count and time of kernels that compute, per step."""
    table = one.tables.get("kernels")
    steps = max(len(one.steps), 1)
    return {
        row["name"]: (row["count"] / steps, row["total_ns"] / steps)
        for row in (table.to_rows() if table else ())
        if row["class"] != "communication"
    }


def _usual(others: Sequence[RankAnalysis]) -> dict[str, tuple[float, float]]:
    """By name: the median count per step, and the median of the mean durations; of kernels that most of them have."""
    tables = [_kernels(one) for one in others]
    out = {}
    for name in {name for table in tables for name in table}:
        found = [table[name] for table in tables if name in table]
        if len(found) * 2 > len(tables):
            out[name] = (median_low(count for count, _ in found), median_low(total / count for count, total in found))
    return out


def _shapes(one: RankAnalysis) -> dict[tuple[str, str], int] | None:
    """By operator and its inputs: time on the device; None: not recorded."""
    table = one.tables.get("operators_by_shape")
    rows = [row for row in table.to_rows() if row["input_dims"]] if table else []
    times = {(row["operator"], str(row["input_dims"])): row["device_self_ns"] for row in rows if row["device_self_ns"]}
    return times or None


def _larger(one: RankAnalysis, others: Sequence[RankAnalysis]) -> str:
    """The heaviest operator with inputs that no peer has, if such take most of the device's time; else nothing."""
    own, known = _shapes(one), [_shapes(other) for other in others]
    if own is None or None in known:
        return ""
    theirs = {key for shapes in known for key in shapes or ()}
    differing = {key: time_ns for key, time_ns in own.items() if key not in theirs}
    if sum(differing.values()) * 2 < sum(own.values()):
        return ""
    operator, dims = max(differing, key=lambda key: differing[key])
    like = [key for key in theirs if key[0] == operator]
    return f"{operator} of {dims}, not {max(like)[1]}" if like else f"{operator} of {dims}"
