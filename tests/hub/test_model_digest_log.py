"""The log of digests against one that is a plain list of bins, folded pair by pair."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from digest_parts import StepDigest
from numpy.typing import NDArray

from stepscope.hub.live.digests import METRICS, QUANTILES, WORST, Bins, DigestLog


def test_the_log_folds_its_past_and_loses_no_step_and_no_extreme() -> None:
    random = np.random.default_rng(0)
    log = DigestLog(room=64)
    most, mean = np.zeros(1000, np.float32), np.zeros(1000)
    for step in range(1000):
        values = np.sort(random.random(8)).astype(np.float32)
        digest = one_digest(step, values)
        most[step], mean[step] = values[-1], values.mean()
        log.put(digest.bins())
    n = log.count
    assert n <= 64
    bins = log.bins(0, 999, 64)
    assert len(bins) == n
    assert bins.first[0] == 0
    assert bins.last[-1] == log.last_step == 999
    assert (bins.first[1:] == bins.last[:-1] + 1).all()
    assert bins.steps.sum() == 1000
    assert (bins.steps[-32:] == 1).all()
    assert bins.steps.max() <= 4 * 1000 / 32  # the past is coarse, but evenly so
    for at in range(n):
        assert bins.quantiles[at, 0, -1] == most[bins.first[at] : bins.last[at] + 1].max()
        assert bins.values[at, 0, 1] == bins.quantiles[at, 1, -1]
        assert abs(bins.mean[at, 0] - mean[bins.first[at] : bins.last[at] + 1].mean()) < 1e-5
    folded = log.bins(0, 999, 5)
    assert len(folded) <= 5
    assert folded.steps.sum() == 1000


def one_digest(step: int, values: NDArray[np.float32]) -> StepDigest:
    quantiles = np.zeros((METRICS, 8), np.float32)
    quantiles[:2] = values
    worst = np.zeros((1, METRICS), np.float32)
    worst[0, 1] = values[-1]
    mean = np.full(METRICS, values.mean(), np.float32)
    return StepDigest(step=step, ranks=8, quantiles=quantiles, mean=mean, worst=np.array([3]), values=worst)


@dataclass(frozen=True, kw_only=True)
class Bin:
    first: int
    last: int
    steps: int
    ranks: int
    quantiles: NDArray[np.float32]
    mean: NDArray[np.float32]
    worst: list[tuple[int, int, NDArray[np.float32]]]
    """Column, step and values."""
    memory: NDArray[np.float32]
    device: NDArray[np.float32]
    start_wall_ns: int


class ListLog:
    """What a log is to do, as its words say."""

    def __init__(self, room: int) -> None:
        self.room, self.bins = room, list[Bin]()

    def put(self, digest: StepDigest, start_wall_ns: int) -> None:
        inside = [one for one in self.bins if one.first <= digest.step <= one.last]
        if any(one.first != one.last for one in inside):
            return
        if not inside and len(self.bins) == self.room:
            fold(self.bins, self.room // 2, self.room // 8)
            if any(one.first <= digest.step <= one.last for one in self.bins):
                return
        worst = [(int(c), digest.step, v) for c, v in zip(digest.worst, digest.values, strict=True)]
        one = Bin(
            first=digest.step,
            last=digest.step,
            steps=1,
            ranks=digest.ranks,
            quantiles=digest.quantiles,
            mean=digest.mean,
            worst=worst,
            memory=digest.memory,
            device=digest.device,
            start_wall_ns=start_wall_ns,
        )
        others = [kept for kept in self.bins if kept.first != digest.step]
        self.bins = sorted([*others, one], key=lambda kept: kept.first)


def fold(bins: list[Bin], among: int, least: int) -> None:
    """Join pairs among the first, the shortest first, until so many are freed."""
    freed, longest = 0, 2
    while freed < least:
        upto = among - freed
        joined = pairs(bins, upto, longest)
        freed += joined
        longest *= 1 if joined else 2


def pairs(bins: list[Bin], upto: int, longest: int) -> int:
    made = []
    for at in range(0, upto - 1, 2):
        pair = bins[at : at + 2]
        made += [joined(*pair)] if pair[0].steps + pair[1].steps <= longest else pair
    freed = upto - upto % 2 - len(made)
    bins[: upto - upto % 2] = made
    return freed


def joined(one: Bin, other: Bin) -> Bin:
    weight = one.steps / (one.steps + other.steps)

    def between(mine: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float32]:
        exact: NDArray[np.float32] = (mine * np.float64(weight) + theirs * np.float64(1 - weight)).astype(np.float32)
        return exact

    quantiles = between(one.quantiles, other.quantiles)
    quantiles[:, 0] = np.minimum(one.quantiles[:, 0], other.quantiles[:, 0])
    quantiles[:, -1] = np.maximum(one.quantiles[:, -1], other.quantiles[:, -1])
    return replace(
        one,
        last=other.last,
        steps=one.steps + other.steps,
        ranks=max(one.ranks, other.ranks),
        quantiles=quantiles,
        mean=between(one.mean, other.mean),
        worst=sorted([*one.worst, *other.worst], key=lambda entry: -entry[2][1])[:WORST],
        memory=np.fmax(one.memory, other.memory),
        device=joined_device(one.device, other.device),
    )


def joined_device(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    """The mean over the steps that were timed, of which there may be none; and the longest of them."""
    timed = one[0] + other[0]
    share = one[0] / max(timed, np.float32(1))
    return np.array([timed, max(one[1], other[1]), *(one[2:] * share + other[2:] * (1 - share))], np.float32)


def same(found: Bins, expected: list[Bin]) -> None:
    """To the last bit."""
    assert len(found) == len(expected)
    for at, one in enumerate(expected):
        for name in ("first", "last", "steps", "ranks", "quantiles", "mean", "memory", "device", "start_wall_ns"):
            np.testing.assert_array_equal(getattr(found, name)[at], getattr(one, name), name)
        k = len(one.worst)
        assert (found.worst[at, k:] == -1).all()
        assert list(zip(found.worst[at, :k], found.worst_step[at, :k], strict=True)) == [w[:2] for w in one.worst]
        for place, (_, _, values) in enumerate(one.worst):
            np.testing.assert_array_equal(found.values[at, place], values)


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, 5, 20])
def test_the_log_is_the_plain_list_whatever_the_order(ranks: int) -> None:
    """Steps come late, come again, and bring new phases and device times once the log has folded: none is mixed up."""
    random = np.random.default_rng(ranks)
    log, plain = DigestLog(room=32), ListLog(32)
    late: list[int] = []
    for newest in range(0, 400, 2):
        late.append(newest)
        number = late.pop(int(random.integers(len(late)))) if random.random() < 0.7 or len(late) > 5 else newest
        if random.random() < 0.1:
            number = max(0, number - int(random.integers(9)))
        digest = random_digest(random, number, ranks, metrics=4 if number < 250 else 6)
        log.put(digest.bins(1000 + number))
        plain.put(padded(digest, 6), 1000 + number)
        assert log.last_step == plain.bins[-1].last
    same(log.bins(0, 400, 32), plain.bins)
    chosen = [one for one in plain.bins if one.last >= 50 and one.first <= 390]
    longest = 2
    while len(chosen) > 7:
        longest *= 1 if pairs(chosen, len(chosen), longest) else 2
    same(log.bins(50, 390, 7), chosen)
    while len(chosen) > 1:
        longest *= 1 if pairs(chosen, len(chosen), longest) else 2
    at_once = log.bins(50, 390, 1)  # merged in one go: sums in another order, so the last bits may differ
    for name in ("first", "last", "steps", "ranks", "quantiles", "mean", "memory", "device", "start_wall_ns"):
        np.testing.assert_allclose(getattr(at_once, name)[0], getattr(chosen[0], name), rtol=1e-5, err_msg=name)
    assert at_once.worst[0].tolist()[: len(chosen[0].worst)] == [column for column, _, _ in chosen[0].worst]
    assert log.bins(0, 400, 5, metrics=9).metrics == 9


def padded(digest: StepDigest, metrics: int) -> StepDigest:
    """With nothing in the phases that it does not know."""
    more = 0, metrics - len(digest.mean)
    return replace(
        digest,
        quantiles=np.pad(digest.quantiles, (more, (0, 0))),
        mean=np.pad(digest.mean, more),
        values=np.pad(digest.values, ((0, 0), more)),
        device=np.pad(digest.device, (0, metrics - 1 - len(digest.device))),
    )


def random_digest(random: np.random.Generator, step: int, ranks: int, metrics: int) -> StepDigest:
    values = random.integers(0, 50, (ranks, metrics)).astype(np.float32) / 3
    worst = np.lexsort((np.arange(ranks), -values[:, 1]))[:WORST]
    return StepDigest(
        step=step,
        ranks=ranks,
        quantiles=np.quantile(values, QUANTILES, axis=0).T.astype(np.float32),
        mean=values.mean(axis=0),
        worst=worst,
        values=values[worst],
        memory=np.where(random.random(4) < 0.3, np.nan, random.random(4)).astype(np.float32),
        device=random_device(random, 0 if step < 150 else metrics - 1),
    )


def random_device(random: np.random.Generator, width: int) -> NDArray[np.float32]:
    """Every other step or so was timed."""
    if not width or random.random() < 0.5:
        return np.zeros(width, np.float32)
    return np.array([1, *random.integers(0, 50, width - 1) / 3], np.float32)
