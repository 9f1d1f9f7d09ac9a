"""Statistics by group against Python's own."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, median_high, median_low, pstdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.model.tables import grouped, median, sums_of

PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**13)), max_size=40)


@given(PAIRS)
def test_groups(pairs: list[tuple[int, int]]) -> None:
    keys = np.array([key for key, _ in pairs], np.int32)
    values = np.array([value for _, value in pairs], np.int64)
    groups = grouped(keys, values)
    expected = defaultdict(list)
    for key, value in pairs:
        expected[key].append(value)
    assert groups.key.tolist() == sorted(expected)
    own = [sorted(expected[key]) for key in sorted(expected)]
    assert groups.count.tolist() == [len(each) for each in own]
    assert groups.total.tolist() == [sum(each) for each in own]
    assert groups.median.tolist() == [(e[(len(e) - 1) // 2] + e[len(e) // 2]) // 2 for e in own]
    assert [(low, high) for low, high in zip(groups.least, groups.most, strict=True)] == [(e[0], e[-1]) for e in own]
    assert groups.mean.tolist() == pytest.approx([fmean(each) for each in own], abs=0.6, rel=1e-12)
    assert groups.deviation.tolist() == pytest.approx([pstdev(each) for each in own], abs=0.6, rel=1e-6)
    assert sums_of(groups, keys, values > 5).tolist() == [sum(value > 5 for value in each) for each in own]


@given(st.lists(st.integers(0, 10**15), max_size=30))
def test_median(values: list[int]) -> None:
    found = median(np.array(values, np.int64))
    assert found == ((median_low(values) + median_high(values)) // 2 if values else None)
