"""The clock of a run, when somebody sets the time of day."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from stepscope.records import run_clock
from stepscope.records.places import ENV_CLOCK

HOUR_NS, DAY_NS = 3600 * 10**9, 86400 * 10**9
META: dict[str, Any] = {
    "created_wall_ns": 1_700_000_000 * 10**9,
    "created_mono_ns": 50 * 10**9,
    "place": {"boot": "this"},
    "launcher": {"pid": 1},
}


@pytest.fixture(autouse=True)
def own_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(run_clock, "_ahead_ns", None)
    return


@pytest.mark.parametrize("set_ns", [-HOUR_NS, DAY_NS])
def test_setting_the_time_of_day_moves_nothing(monkeypatch: pytest.MonkeyPatch, set_ns: int) -> None:
    monkeypatch.setattr(time, "monotonic_ns", lambda: 60 * 10**9)
    run_clock.follow_run(META, "this")
    before = run_clock.wall_ns()
    monkeypatch.setattr(time, "time_ns", lambda: META["created_wall_ns"] + set_ns)
    assert run_clock.wall_ns() == before == META["created_wall_ns"] + 10 * 10**9
    assert run_clock.now_of(META, "this") == before


@pytest.mark.parametrize(
    ("boot", "changed"),
    [
        ("another", {}),
        ("", {}),
        ("this", {"launcher": None}),
        ("this", {"created_mono_ns": None}),
        ("this", {"place": 1}),
    ],
)
def test_without_a_run_s_clock_it_is_the_time_of_day(
    monkeypatch: pytest.MonkeyPatch, boot: str, changed: dict[str, Any]
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 7)
    run_clock.follow_run({**META, **changed}, boot)
    assert run_clock.wall_ns() == run_clock.now_of({**META, **changed}, boot) == 7


@pytest.mark.parametrize(("said", "ahead_ns"), [("12", 12), ("", None), ("-5", None), ("1e9", None), ("9" * 30, None)])
def test_a_rank_takes_it_from_its_environment(monkeypatch: pytest.MonkeyPatch, said: str, ahead_ns: int | None) -> None:
    monkeypatch.setenv(ENV_CLOCK, said)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 100)
    monkeypatch.setattr(time, "time_ns", lambda: 7)
    run_clock.follow_environment()
    assert run_clock.wall_ns() == (7 if ahead_ns is None else 100 + ahead_ns)
