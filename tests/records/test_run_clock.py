"""The clock of a run, when somebody sets the time of day."""

from __future__ import annotations

import time
from typing import Any

import pytest

from stepscope.records import run_clock
from stepscope.records.paths import ENV_CLOCK

HOUR_NS, DAY_NS = 3600 * 10**9, 86400 * 10**9
META: dict[str, Any] = {
    "created_wall_ns": 1_700_000_000 * 10**9,
    "created_mono_ns": 50 * 10**9,
    "place": {"boot": "this"},
    "launcher": {"pid": 1},
}


@pytest.fixture(autouse=True)
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_clock, "_ahead_ns", None)
    monkeypatch.setattr(run_clock, "boot_id", lambda: "this")


@pytest.mark.parametrize("set_ns", [-HOUR_NS, DAY_NS])
def test_setting_the_time_of_day_moves_nothing(monkeypatch: pytest.MonkeyPatch, set_ns: int) -> None:
    monkeypatch.setattr(time, "monotonic_ns", lambda: 60 * 10**9)
    run_clock.follow_run(META)
    before = run_clock.wall_ns()
    monkeypatch.setattr(time, "time_ns", lambda: META["created_wall_ns"] + set_ns)
    assert run_clock.wall_ns() == before == META["created_wall_ns"] + 10 * 10**9
    assert run_clock.now_of(META) == before


@pytest.mark.parametrize(
    ("boot", "changed"),
    [
        ("another", {}),
        ("", {}),
        ("this", {"created_mono_ns": None}),
        ("this", {"place": 1}),
    ],
)
def test_without_a_run_s_clock_it_is_the_time_of_day(
    monkeypatch: pytest.MonkeyPatch, boot: str, changed: dict[str, Any]
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 7)
    monkeypatch.setattr(run_clock, "boot_id", lambda: boot)
    run_clock.follow_run({**META, **changed})
    assert run_clock.wall_ns() == run_clock.now_of({**META, **changed}) == 7
    assert run_clock.environment_of({**META, **changed}) == {}


@pytest.mark.parametrize(
    ("message", "ahead_ns"),
    [("this:12", 12), *((bad, None) for bad in ("", "12", ":12", "this:", "this:-5", "this:1e9", f"this:{'9' * 30}"))],
)
def test_a_rank_takes_it_from_its_environment(
    monkeypatch: pytest.MonkeyPatch, message: str, ahead_ns: int | None
) -> None:
    monkeypatch.setenv(ENV_CLOCK, message)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 100)
    monkeypatch.setattr(time, "time_ns", lambda: 7)
    run_clock.follow_environment()
    assert run_clock.wall_ns() == (7 if ahead_ns is None else 100 + ahead_ns)


def test_a_rank_on_another_machine_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``mpirun -x`` and ``srun --export`` pass the environment on, and every machine counts from its own boot."""
    (name, said), *more = run_clock.environment_of(META).items()
    assert (name, said, more) == (ENV_CLOCK, f"this:{META['created_wall_ns'] - META['created_mono_ns']}", [])
    monkeypatch.setenv(name, said)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 60 * 10**9)
    monkeypatch.setattr(time, "time_ns", lambda: 7)
    run_clock.follow_environment()
    assert run_clock.wall_ns() == META["created_wall_ns"] + 10 * 10**9
    monkeypatch.setattr(run_clock, "boot_id", lambda: "another")
    run_clock.follow_environment()
    assert run_clock.wall_ns() == 7
