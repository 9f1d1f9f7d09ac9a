"""Tests of the reader of Kineto traces run twice: with the scanner in C, and in Python alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stepscope.traces.reading import scanned

BOTH_WAYS = ("bad_input", "exact", "kineto", "read")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition("test_trace_")[2] in BOTH_WAYS:
        metafunc.fixturenames.append("way_of_reading")
        metafunc.parametrize("way_of_reading", ["scanner", "python"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def way_of_reading(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(scanned.PURE, raising=False)
        if request.param == "python":
            patch.setenv(scanned.PURE, "1")
        elif scanned.scanner_function() is None:
            pytest.skip("the scanner in C was not built: no C compiler")
        yield
