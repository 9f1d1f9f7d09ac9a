from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.recorder import guard
from stepscope.recorder.guard import Patches
from stepscope.recorder.ledger import NOT_NOW
from stepscope.recorder.recorder import MAX_FAILURES, Recorder
from stepscope.records.steps import BACKWARD
from stepscope.ring import RingReader


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
    guard._count = before


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
