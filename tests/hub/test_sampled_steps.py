"""A look at the layers makes a step longer: such steps do not count in the times of bins."""

from __future__ import annotations

import numpy as np
from digest_parts import StepDigest

from stepscope.hub.live.digests import DEVICE_PHASES, DigestLog

QUANTILES = 8


def digest(step: int, ns: float, *, sampled: bool = False) -> StepDigest:
    device = np.array([2.0, ns, ns, ns], np.float32)[: DEVICE_PHASES + 1]  # both ranks were timed
    return StepDigest(
        step=step,
        ranks=2,
        quantiles=np.full((2, QUANTILES), ns, np.float32),
        mean=np.full(2, ns, np.float32),
        worst=np.array([1, 0]),
        values=np.full((2, 2), ns, np.float32),
        sampled=sampled,
        device=device,
    )


def log_of(times: list[float], sampled: set[int]) -> DigestLog:
    log = DigestLog(64)
    for step, ns in enumerate(times):
        log.put(digest(step, ns, sampled=step in sampled).bins())
    return log


def test_a_sampled_step_is_in_a_bin_but_not_in_its_times() -> None:
    log = log_of([90.0, 95.0, 10.0, 12.0, 80.0, 85.0, 11.0], {0, 1, 4, 5})
    found = log.bins(0, 6, 64)
    assert found.first.tolist() == [0, 3, 6]
    assert found.last.tolist() == [2, 5, 6]
    assert (found.steps.tolist(), found.sampled.tolist()) == ([3, 3, 1], [2, 2, 0])
    assert found.mean[:, 0].tolist() == [10.0, 12.0, 11.0]
    assert found.quantiles[:, 0, -1].tolist() == [10.0, 12.0, 11.0]
    assert found.worst_step[:, :2].tolist() == [[2, 2], [3, 3], [6, 6]]
    (whole,) = (log.bins(0, 6, 1),)
    assert (whole.mean[0, 0], whole.quantiles[0, 0, -1], whole.steps[0]) == (11.0, 12.0, 7)


def test_where_every_step_is_sampled_all_count() -> None:
    found = log_of([10.0, 20.0], {0, 1}).bins(0, 1, 64)
    assert found.mean[:, 0].tolist() == [10.0, 20.0]


def test_nor_do_they_count_on_the_device() -> None:
    log = log_of([10.0, 90.0, 12.0, 11.0], {1})
    found = log.bins(0, 3, 64)
    assert found.device[:, 1].tolist() == [10.0, 12.0, 11.0]
    (whole,) = log.bins(0, 3, 1).device
    assert (whole[0], whole[1], whole[DEVICE_PHASES]) == (6.0, 12.0, 11.0)
    assert log_of([10.0, 20.0], {0, 1}).bins(0, 1, 1).device[0, 1] == 20.0
