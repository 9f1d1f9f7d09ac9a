"""Who comes late to the collectives of a group, and how much of the waiting for it shows.

Collectives are taken together by the set of ranks that share them: two process groups of the same ranks are one here.

*exposed*: of a rank's time in a collective, the part in which it computed nothing.  Computation that hides a collective
mostly runs at its beginning, since what comes after waits for the result; so the exposed part is counted from the end:
first as transfer, and what is left of it as waiting.

*inherited*: a rank may come last only because it was held up before, in a collective with other ranks: its own way from
there was no longer than its peers'.  Such a collective says nothing about the rank.

*across stages*: the ranks of a pipeline wait for each other by its schedule.  Ranks of different stages are known by
the groups in which they send and receive, or by the description of a group; who is last among them says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model import intervals
from stepscope.traces.model.columns import Ints
from stepscope.traces.ranks.clocks import SAME_CLOCK_NS
from stepscope.traces.ranks.exchange_groups import Group
from stepscope.traces.ranks.exchange_names import OPS

if TYPE_CHECKING:
    from stepscope.traces.rank import RankAnalysis
    from stepscope.traces.ranks.collectives import CollectivesAnalysis

__all__ = ["Arrivals", "Shown", "arrivals_of", "lower_median", "shown_of", "transfers_of"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
SENDS = tuple(OPS.index(op) for op in ("send", "recv"))


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Of the collectives that one set of ranks shares; [W, M]: by collective and member, NaN where it took no part."""

    group: Group
    """Of several with these ranks, the one with most waiting."""
    members: tuple[int, ...]
    """Ranks."""
    lacking: bool
    """Whether the group has ranks of which there is no trace."""
    across_stages: bool
    arrived_ns: Ints
    """[W]; when the last did, on the common clock, ascending."""
    step: Ints
    """[W]; the profiler's number; −1: in none."""
    last: NDArray[np.intp]
    """[W]; index of ``members``."""
    early_ns: Floats
    """[W, M]; how long before the last one it came."""
    exposed_wait_ns: Floats
    """[W, M]"""
    wait_ns: int
    """Of all members and collectives together, as the next."""
    transfer_ns: int
    done_ns: Floats
    """[W, M]; how long before the arrival of the last it was done with its collective before; NaN: there is none."""

    def __len__(self) -> int:
        return len(self.last)

    @property
    def mostly_waiting(self) -> bool:
        return self.wait_ns > self.transfer_ns

    @cached_property
    def late_by_ns(self) -> Floats:
        """[W]; how much later than the median of the others the last one came."""
        return self._of_others(self.early_ns)

    @cached_property
    def inherited(self) -> Bools:
        """[W]; the last rank was held up before, elsewhere, by more than half of what it is late."""
        own = self.done_ns[np.arange(len(self)), self.last]
        held_ns = self._of_others(self.done_ns) - own
        return np.asarray((held_ns > SAME_CLOCK_NS) & (held_ns > self.late_by_ns / 2), np.bool_)

    def _of_others(self, values: Floats) -> Floats:
        """[W]; the median of all members but the last."""
        others = values.copy()
        others[np.arange(len(self)), self.last] = np.nan
        return lower_median(others)

    def late_ns(self, late: Sequence[int]) -> Floats:
        """[W, late]; how much later than the median of the members that are not late; ``late``: indices."""
        others = np.delete(self.early_ns, late, axis=1)
        return np.nan_to_num(np.maximum(lower_median(others)[:, None] - self.early_ns[:, list(late)], 0.0))

    def lost_ns(self, late: Sequence[int]) -> int:
        """What each of the other members waits for these on average, as far as it shows."""
        which = np.isin(self.last, late) & ~self.inherited
        others = np.delete(self.exposed_wait_ns[which], late, axis=1)
        count = np.maximum((~np.isnan(others)).sum(axis=1), 1)
        return int((np.nansum(others, axis=1) / count).sum()) if others.size else 0

    def alone_ns(self, late: Sequence[int]) -> int:
        """By how much these were later than the last of the others, in all: instants, which count once."""
        which = np.isin(self.last, late) & ~self.inherited
        others = np.delete(self.early_ns[which], late, axis=1)
        if not others.size:
            return 0
        least = np.where(np.isnan(others), np.inf, others).min(axis=1)
        ahead = np.where(np.isfinite(least), least, 0).astype(np.int64)
        return intervals.total(intervals.merge(self.arrived_ns[which] - ahead, self.arrived_ns[which]))


@dataclass(frozen=True, kw_only=True)
class Shown:
    """[ranks] each: exposed time in collectives, split; by sums over collectives, of which two may run at a time."""

    transfer_ns: Ints
    """With all of those that cannot be split, because no other rank's trace has them."""
    wait_ns: Ints
    send_ns: Ints
    """In sends and receives, which wait and transfer in one."""
    stages_ns: Ints
    """Waiting of ranks of different pipeline stages for each other, which is in ``wait_ns``, too."""


def lower_median(values: Floats) -> Floats:
    """[W] of [W, M]; of an even number the lower, NaN where there is none."""
    order = np.sort(values, axis=1)
    known = (~np.isnan(values)).sum(axis=1)
    if not values.shape[1]:
        return np.full(len(values), np.nan)
    return np.asarray(order[np.arange(len(values)), np.maximum(known - 1, 0) // 2], np.float64)


def arrivals_of(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis) -> tuple[Arrivals, ...]:
    """One of every set of ranks that shares collectives; ``analyses``: as they were matched."""
    pairs, split = collectives.pairs, collectives.split
    wholes = np.flatnonzero(split.counts)
    if not len(wholes):
        return ()
    shift_ns = np.array([clock.shift_ns for clock in collectives.clocks.clocks], np.int64)
    exposed_ns = _exposed(analyses, collectives)
    exposed_wait_ns = exposed_ns - np.minimum(exposed_ns, split.own_transfer_ns)
    done_ns = _done_before(analyses, collectives, shift_ns)
    stages = _stages(analyses)
    good = np.flatnonzero(split.counts[pairs.whole])
    group = pairs.group[pairs.whole[good]].astype(np.int64)
    # Every rank that ever took part in a collective of the group.
    taken: dict[int, set[int]] = {}
    for key in np.unique(group * len(pairs.ranks) + pairs.rank[good]).tolist():
        taken.setdefault(key // len(pairs.ranks), set()).add(key % len(pairs.ranks))
    sets = sorted({tuple(sorted(members)) for members in taken.values()})
    set_of = np.full(len(pairs.groups), -1, np.intp)
    for code, took_part in taken.items():
        set_of[code] = sets.index(tuple(sorted(took_part)))
    waits = np.bincount(group, split.wait_ns[good], minlength=len(pairs.groups))
    by_set = good[np.argsort(set_of[group], kind="stable")]
    bounds = np.cumsum(np.bincount(set_of[group], minlength=len(sets)))
    row, column = np.full(len(pairs.first), -1, np.intp), np.full(len(pairs.ranks), -1, np.intp)
    out = []
    for members, parts in zip(sets, np.split(by_set, bounds[:-1]), strict=True):
        codes = np.unique(pairs.group[pairs.whole[parts]]).tolist()
        own = np.unique(pairs.whole[parts])
        own = own[np.argsort(split.arrived_ns[own], kind="stable")]
        column[list(members)], row[own] = np.arange(len(members)), np.arange(len(own))
        at = (row[pairs.whole[parts]], column[pairs.rank[parts]])
        start_ns = pairs.start_ns[parts] - shift_ns[pairs.rank[parts]]
        arrived_ns = split.arrived_ns[own]

        shape = (len(own), len(members))
        ranks = tuple(pairs.ranks[place] for place in members)
        out.append(
            Arrivals(
                group=pairs.groups[max(codes, key=waits.__getitem__)],
                members=ranks,
                lacking=max(pairs.groups[code].size for code in codes) > len(members),
                across_stages=any(len(stage.intersection(ranks)) > 1 for stage in stages),
                arrived_ns=arrived_ns,
                step=pairs.step[own],
                last=column[split.last[own]],
                early_ns=_laid_out(shape, at, arrived_ns[at[0]] - start_ns),
                exposed_wait_ns=_laid_out(shape, at, exposed_wait_ns[parts]),
                wait_ns=int(split.wait_ns[parts].sum()),
                transfer_ns=int(split.own_transfer_ns[parts].sum()),
                done_ns=_laid_out(shape, at, arrived_ns[at[0]] - done_ns[parts]),
            )
        )
    return tuple(out)


def _laid_out(
    shape: tuple[int, int], at: tuple[NDArray[np.intp], NDArray[np.intp]], values: NDArray[np.generic]
) -> Floats:
    grid = np.full(shape, np.nan)
    grid[at] = values
    return grid


def shown_of(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis, arrivals: Sequence[Arrivals]) -> Shown:
    """``analyses``: as they were matched; ``arrivals``: of the same."""
    pairs, split = collectives.pairs, collectives.split
    exposed_ns = _exposed(analyses, collectives)
    good = split.counts[pairs.whole]
    transfer_ns = np.minimum(exposed_ns, split.own_transfer_ns)
    count = len(analyses)

    def by_rank(values: Ints) -> Ints:
        return np.bincount(pairs.rank[good], values[good], minlength=count).astype(np.int64)

    split_ns, waited_ns = by_rank(transfer_ns), by_rank(exposed_ns - transfer_ns)
    whole_ns, send_ns = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for place, one in enumerate(analyses):
        own_ns = one.exchanges.end_ns - one.exchanges.start_ns - one.exchanges.overlap_ns
        sends = np.isin(one.exchanges.op, SENDS)
        whole_ns[place], send_ns[place] = own_ns[~sends].sum(), own_ns[sends].sum()
    stages_ns = np.zeros(count, np.int64)
    for each in arrivals:
        if each.across_stages:
            places = [pairs.ranks.index(rank) for rank in each.members]
            stages_ns[places] += np.nansum(each.exposed_wait_ns, axis=0).astype(np.int64)
    return Shown(
        transfer_ns=np.maximum(whole_ns - waited_ns, split_ns),
        wait_ns=waited_ns,
        send_ns=send_ns,
        stages_ns=stages_ns,
    )


def _exposed(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis) -> Ints:
    """[parts]; the rank's time in it while it computed nothing."""
    pairs = collectives.pairs
    overlap_ns = np.concatenate([one.exchanges.overlap_ns for one in analyses])
    hidden_ns = overlap_ns[_bases(analyses)[pairs.rank] + pairs.entry]
    return np.asarray(np.maximum(pairs.end_ns - pairs.start_ns - hidden_ns, 0), np.int64)


def _bases(analyses: Sequence[RankAnalysis]) -> NDArray[np.int64]:
    """[ranks]; where its exchanges begin, if those of all ranks are in one list."""
    return np.cumsum([0, *(len(one.exchanges) for one in analyses)])[:-1]


def transfers_of(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis) -> list[Ints]:
    """By rank, [its exchanges]: exposed time without waiting; all of it where that is not known."""
    pairs, split = collectives.pairs, collectives.split
    everything = [each.exchanges.end_ns - each.exchanges.start_ns - each.exchanges.overlap_ns for each in analyses]
    if not everything:
        return []
    out, bases = np.concatenate(everything), _bases(analyses)
    good = split.counts[pairs.whole]
    at = (bases[pairs.rank] + pairs.entry)[good]
    out[at] = np.minimum(out[at], split.own_transfer_ns[good])
    return np.split(out, bases[1:])


def _done_before(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis, shift_ns: Ints) -> Floats:
    """[parts]; when the rank was done with its exchange before, on the common clock; NaN: there was none."""
    pairs = collectives.pairs
    out = np.full(len(pairs.whole), np.nan)
    for place, one in enumerate(analyses):
        own = np.flatnonzero(pairs.rank == place)
        ends_ns = np.sort(one.exchanges.end_ns)
        before = np.searchsorted(ends_ns, pairs.start_ns[own], side="right") - 1
        known = before >= 0
        out[own[known]] = ends_ns[before[known]] - shift_ns[place]
    return out


def _stages(analyses: Sequence[RankAnalysis]) -> set[frozenset[int]]:
    """Sets of ranks that are, or may be, in different stages of one pipeline."""
    everybody = frozenset(one.rank for one in analyses)
    out = set()
    for one in analyses:
        exchanges = one.exchanges
        sending = set(exchanges.group[np.isin(exchanges.op, SENDS)].tolist())
        for code, group in enumerate(exchanges.groups):
            if code in sending or group.kind == "pipeline":
                out.add(frozenset(group.members) or everybody)
        if -1 in sending:
            out.add(everybody)
    return out
