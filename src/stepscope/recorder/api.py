"""What a training script may call itself.  Nothing here raises into the script, and all of it is a no-op when off."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from stepscope.recorder import attach, bootstrap
from stepscope.recorder.guard import failsafe, warn
from stepscope.recorder.ledger import NOT_NOW
from stepscope.records.phases import OTHER
from stepscope.records.places import ENV_RUN_DIR, ENV_SESSION, helper_command, helper_environment
from stepscope.records.slot import FLAG_EXPLICIT, NOTE_BYTES

__all__ = ["init", "note", "phase", "step", "summary"]

P = ParamSpec("P")
R = TypeVar("R")

SUMMARY_TIMEOUT_S = 60


@failsafe
def init(*, name: str | None = None, dir: str = "runs") -> None:  # noqa: A002 - what the user calls it
    """Record this process, when it was not started by ``stepscope run`` (which has begun already).

    All ranks of one launcher on one node meet in one run.  An agent process is started beside them; it ends with them
    and leaves the summary in ``dir/NAME``.
    """
    if bootstrap.current() is not None or bootstrap.switched_off(os.environ):
        return
    if ENV_SESSION in os.environ:
        bootstrap.start_from_environment()  # started by a process that is being recorded: its run is ours
    else:
        attach.attach(name, Path(dir))


class step:  # noqa: N801 - reads as a statement in the user's script
    """Own step borders: a step ends where the ``with`` block ends, and optimizers no longer end steps."""

    def __enter__(self) -> None:
        recorder = bootstrap.current()
        if recorder is not None:
            recorder.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = bootstrap.current()
        if recorder is not None and kind is None:
            recorder.end_step(FLAG_EXPLICIT)


class phase:  # noqa: N801
    """A named part of a step, as a context manager or a decorator; names like ``input`` count for our own phases."""

    def __init__(self, name: str) -> None:
        self._name = str(name)
        self._outer: list[int] = []

    def __enter__(self) -> None:
        recorder = bootstrap.current()
        slot = OTHER if recorder is None else recorder.slot_of(self._name)
        self._outer.append(NOT_NOW if recorder is None or slot == OTHER else recorder.ledger.enter(slot))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = bootstrap.current()
        outer = self._outer.pop()
        if outer != NOT_NOW and recorder is not None:
            recorder.ledger.leave(outer)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with phase(self._name):
                return function(*args, **kwargs)

        return inside


@failsafe
def note(**values: Any) -> None:
    """Keep values beside the present step (a loss, a batch size); they appear as ``note`` events of the run."""
    recorder = bootstrap.current()
    if recorder is None:
        return
    for key, value in values.items():
        text = json.dumps({key: _plain(value)}, separators=(",", ":"), default=str).encode()
        if len(text) > NOTE_BYTES:
            short = str(value)[: max(NOTE_BYTES // 8, 1)]
            text = json.dumps({key[:64]: short + "…"}, separators=(",", ":")).encode()
        recorder.note(text)


def summary() -> dict[str, Any]:
    """The summary of the run so far (docs/schema.md); empty when off.  Computed in a process of its own."""
    run_dir = os.environ.get(ENV_RUN_DIR)
    if bootstrap.current() is None or not run_dir:
        return {}
    try:
        # The interpreter that began the run: the job's own may lack what a summary needs.
        python = json.loads(Path(run_dir, "run.json").read_bytes())["executable"]
        command = helper_command("stepscope", "report", "--json", run_dir, python=python)
        done = subprocess.run(
            command, env=helper_environment(os.environ), capture_output=True, timeout=SUMMARY_TIMEOUT_S, check=True
        )
        result: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        warn(f"no summary: {error}")
        return {}
    return result


def _plain(value: Any) -> Any:
    """A number for anything that is one: a tensor on the host, a numpy scalar.

    A tensor on a device is not read: that would wait for the device.
    """
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    device = getattr(value, "device", None)
    if hasattr(value, "item") and getattr(device, "type", "cpu") == "cpu":
        return value.item()
    return str(value) if device is None else f"<tensor on {device}>"
