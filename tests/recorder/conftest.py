"""A recorder in this very process, with torch instrumented for the length of a test."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clock import FakeClock

from stepscope.recorder import bootstrap, guard
from stepscope.recorder import recorder as recorder_module
from stepscope.recorder.guard import ImportWatch
from stepscope.recorder.instrumentation import Instrumentation
from stepscope.recorder.layers.sampler import LayerSampler
from stepscope.recorder.recorder import Recorder
from stepscope.records.identity import RankIdentity
from stepscope.records.layers import LayerRecords, LayerSample, ModelTree, read_layers
from stepscope.records.paths import ENV_LAYERS
from stepscope.records.series import note_event
from stepscope.records.steps import BUILTIN_PHASES, NOTE, NOTE_SLOT, STEP, STEP_FIELDS
from stepscope.ring import RingReader, RingWriter
from stepscope.ring.layout import MIN_CAPACITY

SEEN_NOTE = b'{"~'


class Recording:
    """What was recorded so far, as a reader of the ring sees it."""

    def __init__(self, recorder: Recorder, session: Path) -> None:
        self.recorder = recorder
        self._session = session

    def slots(self) -> list[bytes]:
        (path,) = self._session.glob("*.ring")
        reader = RingReader(path)
        batch = reader.read(0)
        reader.close()
        assert (batch.lost, batch.torn) == (0, 0)
        return batch.slots

    def steps(self) -> Any:
        """All steps; each is checked to be accounted for to the nanosecond."""
        whole = b"".join(slot for slot in self.slots() if slot[4] == STEP)
        steps = np.frombuffer(whole, dtype=np.dtype(STEP_FIELDS))
        assert (steps["phase_ns"].sum(axis=1) == steps["wall_ns"]).all()
        assert (steps["start_ns"][1:] == steps["start_ns"][:-1] + steps["wall_ns"][:-1]).all()
        assert list(steps["step"]) == list(range(len(steps)))
        return steps

    def notes(self) -> list[bytes]:
        """What the script noted."""
        notes = [NOTE_SLOT.unpack(slot)[5].rstrip(b"\0") for slot in self.slots() if slot[4] == NOTE]
        return [text for text in notes if not text.startswith(SEEN_NOTE)]

    def noted_steps(self) -> list[int]:
        """The step of each note of the script."""
        notes = [NOTE_SLOT.unpack(slot) for slot in self.slots() if slot[4] == NOTE]
        return [step for *_, step, _, said in notes if not said.startswith(SEEN_NOTE)]

    def seen(self) -> dict[int, dict[str, Any]]:
        """Loss and gradient norm as the recorder saw them, by step."""
        notes = [NOTE_SLOT.unpack(slot) for slot in self.slots() if slot[4] == NOTE]
        found = {step: json.loads(said[:length]) for *_, step, length, said in notes if said.startswith(SEEN_NOTE)}
        return {step: note_event(values)["values"] for step, values in found.items()}

    def facts(self) -> dict[str, Any]:
        """What the ring's header says of the live objects."""
        (path,) = self._session.glob("*.ring")
        reader = RingReader(path)
        facts = reader.header().facts
        reader.close()
        return facts

    def spent(self) -> list[dict[str, int]]:
        """What each step spent in which phase."""
        return [
            {name: int(ns) for name, ns in zip(BUILTIN_PHASES, row["phase_ns"], strict=False) if ns}
            for row in self.steps()
        ]

    def phase(self, name: str) -> Any:
        """Nanoseconds of one phase, by step."""
        return self.steps()["phase_ns"][:, BUILTIN_PHASES.index(name)]


class Layers:
    """What the sampler of layers wrote so far."""

    def __init__(self, recording: Recording, session: Path) -> None:
        self.recording = recording
        self._session = session

    @property
    def sampler(self) -> LayerSampler:
        sampler = self.recording.recorder.layers
        assert isinstance(sampler, LayerSampler)
        return sampler

    def lines(self) -> list[dict[str, Any]]:
        """As they were written."""
        return [json.loads(line) for path in self._session.glob("*.layers") for line in path.read_text().splitlines()]

    def records(self) -> LayerRecords:
        records, bad = read_layers([{"rank": 0, "attempt": 0, **line} for line in self.lines()])
        assert bad == 0
        return records

    def last(self) -> tuple[ModelTree, LayerSample]:
        """The last sample and its model."""
        records = self.records()
        sample = records.samples[-1]
        return records.models[sample.model], sample

    def by_name(self, field: str) -> dict[str, Any]:
        """A figure of the last sample by module, where there is one."""
        model, sample = self.last()
        values = sample.memory[field] if field in sample.memory else getattr(sample, field)
        return {
            module.name: value for module, value in zip(model.modules, values, strict=True) if value not in (None, 0)
        }


@pytest.fixture
def make_recorder(tmp_path: Path) -> Callable[..., Recorder]:
    def make(**kwargs: Any) -> Recorder:
        session, run_dir = tmp_path / "session", tmp_path / "run"
        session.mkdir(exist_ok=True)
        run_dir.mkdir(exist_ok=True)
        kind = Recorder if "now" in kwargs else bootstrap.recorder_class()  # hooks in C have a clock of their own
        return kind(session, run_dir, **kwargs)

    return make


@pytest.fixture
def recording(make_recorder: Callable[..., Recorder], tmp_path: Path) -> Iterator[Recording]:
    """Torch under the recorder; afterwards torch is as before and no hook of ours has failed."""
    with _recorded(make_recorder()) as recorder:
        yield Recording(recorder, tmp_path / "session")


@pytest.fixture
def nothing_is_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled something."""
    count = recorder_module._compile_count
    before = count()
    monkeypatch.setattr(recorder_module, "_compile_count", lambda: count() - before)


@pytest.fixture
def layers(
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    nothing_is_compiled_yet: None,
) -> Layers:
    """A recording in which every step is sampled."""
    monkeypatch.setenv(ENV_LAYERS, "every")
    return Layers(request.getfixturevalue("recording"), tmp_path / "session")


@pytest.fixture
def clock() -> FakeClock:
    """The time of ``clocked``; torch itself takes none."""
    return FakeClock()


@pytest.fixture
def clocked(make_recorder: Callable[..., Recorder], tmp_path: Path, clock: FakeClock) -> Iterator[Recording]:
    """As ``recording``, in which time passes only where the test says so."""
    with _recorded(make_recorder(now=clock)) as recorder:
        yield Recording(recorder, tmp_path / "session")


def forgive_failures(count: int) -> None:
    """Set the count of our failures back to what it was before those that a test meant to happen."""
    guard._count = count


@contextlib.contextmanager
def _recorded(recorder: Recorder) -> Iterator[Recorder]:
    import torch

    failures = guard.failures()
    watch = ImportWatch()
    instrumentation = Instrumentation(recorder, torch, watch)
    yield recorder
    instrumentation.remove()
    watch.remove()
    guard.on_failure(None)
    assert guard.failures() == failures, "a hook of ours failed"


# -- Process groups ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process_group(world_size: int = 1) -> Iterator[Any]:
    """A group of this process; one of more ranks only pretends to have them: what it exchanges is zero."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    backend, store = ("gloo", dist.HashStore()) if world_size == 1 else ("fake", FakeStore())
    dist.init_process_group(backend, store=store, rank=0, world_size=world_size)
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook  # torch puts one of its own there and leaves it


@pytest.fixture
def alone() -> Iterator[Any]:
    """A group of this process."""
    with process_group() as group:
        yield group


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A group that only pretends to have two ranks."""
    with process_group(2):
        yield


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[RingWriter]:
    """Of no recorder."""
    ring = RingWriter(tmp_path / "1.ring", RankIdentity(host="node", pid=os.getpid()), capacity=MIN_CAPACITY)
    yield ring
    ring.close()


@pytest.fixture
def sampled(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock
) -> Layers:
    """A recording at the default rate, on a clock of its own: looks at gradients take no time."""
    monkeypatch.delenv(ENV_LAYERS, raising=False)
    found = Layers(request.getfixturevalue("clocked"), tmp_path / "session")
    found.sampler._now = clock
    return found
