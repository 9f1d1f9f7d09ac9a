from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stepscope.recorder import guard
from stepscope.recorder.guard import Patches
from stepscope.recorder.ledger import NOT_NOW
from stepscope.recorder.recorder import MAX_FAILURES, Recorder
from stepscope.records.steps import BACKWARD, OTHER, STEP, STEP_FIELDS
from stepscope.ring import RingReader
from tests.recorder.conftest import forgive_failures


def test_an_error_of_ours_becomes_a_count(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "from stepscope.recorder import guard\n"
        "@guard.failsafe\n"
        "def hook(x): return 1 // x\n"
        "seen = []\n"
        "guard.on_failure(seen.append)\n"
        "assert (hook(1), hook(0), hook(0)) == (1, None, None)\n"
        "assert (guard.failures(), seen) == (2, [1, 2])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("a Stepscope hook failed and was ignored: ZeroDivisionError") == 1


def test_only_exceptions_are_swallowed() -> None:
    @guard.failsafe
    def hook() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hook()


def test_a_recorder_that_keeps_failing_switches_itself_off(
    make_recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    class Broken:
        every_step = True

        def words(self) -> list[int]:
            raise RuntimeError("no figures today")

    recorder = make_recorder()
    before = guard.failures()
    recorder.begin()
    recorder.watch_backward(Broken())
    for _ in range(2 * MAX_FAILURES):
        recorder.end_step()
    assert recorder.ledger.enter(BACKWARD) == NOT_NOW
    assert recorder.step == MAX_FAILURES - before
    (path,) = (tmp_path / "session").glob("*.ring")
    reader = RingReader(path)
    batch = reader.read(0)
    reader.close()
    assert (len(batch.slots), batch.lost) == (recorder.step, 0)  # a step whose figures failed is still a step
    guard.on_failure(None)
    forgive_failures(before)


class Owner:
    def kept(self) -> str:
        return "original"


class Heir(Owner):
    pass


def test_undo_restores_own_and_inherited_names() -> None:
    patches = Patches()
    patches.set(Owner, "kept", lambda self: "patched")
    patches.set(Heir, "kept", lambda self: "patched heir")
    assert (Owner().kept(), Heir().kept()) == ("patched", "patched heir")
    patches.undo()
    assert (Owner().kept(), Heir().kept()) == ("original", "original")
    assert "kept" not in vars(Heir)


def test_undo_leaves_what_somebody_else_patched_over() -> None:
    patches = Patches()
    original = Owner.kept
    patches.set(Owner, "kept", lambda self: "ours")
    Owner.kept = lambda self: "theirs"  # type: ignore[method-assign]
    patches.undo()
    assert Owner().kept() == "theirs"
    Owner.kept = original  # type: ignore[method-assign]


# -- signal handlers of the script ------------------------------------------------------------------------------------


class StopError(Exception):
    """What a handler of the script raises."""


def raises(number: int, frame: object) -> None:
    raise StopError(number)


class Handler:
    def __call__(self, number: int, frame: object) -> None:
        raise StopError

    def method(self, number: int, frame: object) -> None:
        self(number, frame)


def forgets(number: int, frame: object) -> None:
    del number, frame
    raise StopError


def with_more(extra: object, number: int, frame: object) -> None:
    json.loads("")  # fails in the standard library


@pytest.mark.parametrize(
    "handler",
    [raises, Handler(), Handler().method, forgets, lambda *_: raises(1, None), functools.partial(with_more, "extra")],
)
def test_what_a_signal_handler_raises_passes(handler: Callable[[int, object], None]) -> None:
    @guard.failsafe
    def hook() -> None:
        signal.raise_signal(signal.SIGUSR1)

    before, failures = signal.signal(signal.SIGUSR1, handler), guard.failures()
    try:
        with pytest.raises((StopError, json.JSONDecodeError)):
            hook()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert guard.failures() == failures


def test_what_a_hook_calls_itself_is_swallowed() -> None:
    """Also code of the script: without us nobody would have called it."""

    class Owner:
        @property
        def shape(self) -> None:
            raise StopError

    @guard.failsafe
    def reads(owner: object) -> None:
        owner.shape  # type: ignore[attr-defined]  # noqa: B018

    @guard.failsafe
    def parses(text: str) -> None:
        json.loads(text)

    before = guard.failures()
    assert (reads(Owner()), parses("")) == (None, None)
    assert guard.failures() == before + 2
    forgive_failures(before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that was being read
def test_a_storm_of_signals_loses_none_and_leaves_the_phases_in_order(
    make_recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    class Figures:
        every_step = True

        def words(self) -> list[int]:
            return list(range(10))[:0]

    recorder = make_recorder()
    recorder.begin()
    recorder.watch_backward(Figures())
    backward = recorder.ledger.timed(lambda: sum(range(200)), BACKWARD)
    raised = caught = 0
    armed = False

    def handler(number: int, frame: object) -> None:
        nonlocal raised, armed
        if armed:
            armed = False  # until the script has handled it
            raised += 1
            raise StopError

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        while raised < 200:
            try:
                armed = True
                backward()
                recorder.end_step()
                armed = False
            except StopError:
                caught += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (caught, recorder.ledger.phase) == (raised, OTHER)
    at = recorder.step
    backward()
    recorder.end_step()
    (path,) = (tmp_path / "session").glob("*.ring")
    reader = RingReader(path)
    last = [slot for slot in reader.read(0).slots if slot[4] == STEP][-1]
    assert np.frombuffer(last, dtype=np.dtype(STEP_FIELDS))["step"] == at
    reader.close()
    guard.on_failure(None)
