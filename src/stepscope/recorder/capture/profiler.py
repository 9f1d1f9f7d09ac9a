"""The seam to torch's profiler: starting it for a capture, and noticing that the script uses it itself.

A process has room for one profiler.  The script's comes first: a capture does not begin while it is active, and is
given up the moment the script prepares one (``ProfilerUse``), before torch would refuse it.

What torch does when its profiler stops includes one ``synchronize`` of the device; it is the only one that Stepscope
ever causes, and it happens between two steps.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepscope.recorder.guard import Patches, failsafe
from stepscope.records.capture import CaptureOrder
from stepscope.records.paths import TEARDOWN_CUPTI

__all__ = ["ProfilerUse", "TorchProfiler", "danger_of_unloading"]

METADATA = "stepscope"
"""The key of a trace's top level under which a capture describes itself."""
NEEDED = ("_prepare_trace", "_start_trace", "__exit__")
"""Methods of ``torch.autograd.profiler.profile`` in every supported version of torch, through which its profilers
begin and end."""
OTHERS = (("profiler", "emit_nvtx"), ("profiler", "emit_itt"), ("profiler_legacy", "profile"))
"""Classes in modules of ``torch.autograd`` that use the profiler in other ways, from their ``__enter__`` on."""

UNLOADS_SAFELY_SINCE = (12, 6)
"""A version of CUDA."""


def danger_of_unloading(cuda: str | None, environ: Mapping[str, str]) -> str:
    """Why a capture that nobody ordered must not unload CUPTI with this version of CUDA; empty: nothing."""
    version = re.match(r"(\d+)\.(\d+)", cuda or "")
    if (
        version is None
        or environ.get(TEARDOWN_CUPTI) != "1"
        or tuple(map(int, version.groups())) >= UNLOADS_SAFELY_SINCE
    ):
        return ""
    return f"CUDA {cuda} with {TEARDOWN_CUPTI}=1 can end a process that uses CUDA graphs"


class TorchProfiler:
    """One of our profilers, from its first warm-up step on."""

    def __init__(self, torch: Any, order: CaptureOrder, *, cuda: bool, use: ProfilerUse) -> None:
        profiler = torch.profiler
        self._torch = torch
        self._use = use
        self._started = False
        activity = profiler.ProfilerActivity
        # Torch reads Python's frames with the interpreter's profile function, of which there is only one.
        self.reads_frames = order.stacks and sys.getprofile() is None
        self._profile: Any = profiler._KinetoProfile(
            activities=[activity.CPU, *([activity.CUDA] if cuda else [])],
            record_shapes=order.shapes,
            profile_memory=order.memory,
            with_stack=self.reads_frames,
        )

    def prepare(self) -> None:
        """Begin to warm up: what is recorded until ``start`` is discarded."""
        with self._use.ours(), _QuietKineto():
            # Some versions of torch print a warning unless events accumulate.  They must not: torch would convert all
            # of them to Python objects when the profiler stops.
            self._profile.acc_events = True
            self._profile.prepare_trace()
            self._profile.acc_events = self._profile.profiler.acc_events = False

    def start(self, about: Mapping[str, Any]) -> None:
        """Record from here on; ``about`` goes into the trace."""
        with self._use.ours():
            self._profile.start_trace()
        self._started = True
        self._profile.add_metadata_json(METADATA, json.dumps(about))

    def stop(self) -> None:
        with self._use.ours():
            if not self._started:
                self._profile.start_trace()  # torch has no other way to leave the warm-up
            self._profile.stop_trace()

    def events(self) -> int:
        """How many events were recorded; takes some microseconds for each."""
        return len(self._profile.profiler.kineto_results.events())

    def write(self, path: Path) -> None:
        """Write the trace as Chrome's JSON; OSError if torch could not."""
        self._profile.export_chrome_trace(str(path))
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 64, 0))
            if not file.read().rstrip().endswith(b"}"):
                raise OSError("torch did not write the trace to its end")


class ProfilerUse:
    """Whether the script uses torch's profiler."""

    def __init__(
        self, torch: Any, *, prepares: Callable[[], object], starts: Callable[[], object], stops: Callable[[], object]
    ) -> None:
        """``prepares``, ``starts`` and ``stops`` are called when the script's own profiler is about to do so (or just
        did, for ``starts``)."""
        self._torch = torch
        self._prepares, self._starts, self._stops = failsafe(prepares), failsafe(starts), failsafe(stops)
        self._ours = False
        self._theirs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.supported = False

    def install(self, patches: Patches) -> None:
        profile = self._torch.autograd.profiler.profile
        if not all(hasattr(profile, name) for name in NEEDED):
            return
        prepare, start, leave = (getattr(profile, name) for name in NEEDED)

        @functools.wraps(prepare)
        def prepare_trace(profile: Any) -> Any:
            if not self._ours:
                self._prepares()
                self._theirs.add(profile)
            return prepare(profile)

        @functools.wraps(start)
        def start_trace(profile: Any) -> Any:
            result = start(profile)
            if not self._ours:
                self._theirs.add(profile)
                self._starts()
            return result

        @functools.wraps(leave)
        def leave_profile(profile: Any, *args: Any) -> Any:
            if not self._ours and profile in self._theirs:
                self._theirs.discard(profile)
                self._stops()
            return leave(profile, *args)

        for name, replacement in zip(NEEDED, (prepare_trace, start_trace, leave_profile), strict=True):
            patches.set(profile, name, replacement)
        for module, name in OTHERS:
            other = getattr(getattr(self._torch.autograd, module, None), name, None)
            if hasattr(other, "__enter__"):
                self._give_way_to(other, patches)
        self.supported = True

    def _give_way_to(self, other: Any, patches: Patches) -> None:
        begin = other.__enter__

        @functools.wraps(begin)
        def enter(profile: Any) -> Any:
            self._prepares()
            return begin(profile)

        patches.set(other, "__enter__", enter)

    def forget(self) -> None:
        self._ours = False
        self._theirs = weakref.WeakSet()

    @property
    def active(self) -> bool:
        """Whether a profiler that is not ours is prepared or running."""
        return bool(self._theirs) or bool(self._torch._C._autograd._profiler_enabled())

    def ours(self) -> _Ours:
        """What happens to torch's profiler within this context is our own doing."""
        return _Ours(self)


class _Ours:
    def __init__(self, use: ProfilerUse) -> None:
        self._use = use

    def __enter__(self) -> None:
        self._use._ours = True

    def __exit__(self, *_: object) -> None:
        self._use._ours = False


LOG_LEVEL, SILENT = "KINETO_LOG_LEVEL", "99"


class _QuietKineto:
    """Keeps Kineto from printing a line to standard error at each start and stop, unless the user chose its level.

    It reads the variable once, when the first profiler of the process is prepared.
    """

    def __enter__(self) -> None:
        self._set = LOG_LEVEL not in os.environ
        if self._set:
            os.environ[LOG_LEVEL] = SILENT

    def __exit__(self, *_: object) -> None:
        if self._set:
            del os.environ[LOG_LEVEL]
