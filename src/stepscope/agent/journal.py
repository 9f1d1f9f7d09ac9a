"""Writes events, samples, stacks and looks at layers to disk. Rejected writes are kept here, in bounds, and retried."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepscope.records import run_clock
from stepscope.records.files import open_file
from stepscope.records.layers import FIRST_SHARED_STEP, SHARED_STEPS
from stepscope.records.text import say
from stepscope.store.file_io import append_jsonl, append_lines, bounded_lines
from stepscope.store.paths import EVENTS, LAYERS, SAMPLES, STACKS

__all__ = ["Journal"]

MAX_EVENTS = 2000
MAX_SAMPLES = 2000
MAX_STACKS = 200
"""Beyond these the oldest are dropped. They cover minutes of a full disk."""
DENSE_LAYERS_BYTES = 64 << 20
"""For each such piece of the file, half as many samples of layers are kept from there on."""
_MODEL = re.compile(rb'\{"kind":"model","model":"([0-9a-f]{1,64})"')
_SAMPLE = re.compile(rb'\{"kind":"sample","step":(\d{1,18}),')
"""How the recorder's lines begin (``recorder/layers/sampler.py``)."""


class Journal:
    """The only place that knows whether the run directory accepts writes. It reports a failure once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._stacks: deque[dict[str, Any]] = deque(maxlen=MAX_STACKS)
        self._layers: list[bytes] = []
        self._models: set[bytes] | None = None
        """The models that the file describes; None: not known yet."""
        self._layers_bytes = 0
        self.samples_wanted = True
        """False if there is no room for more (``agent/disk_space.py``)."""
        self._refused = False
        self._recovered = False

    def event(self, event: str, **fields: Any) -> None:
        self._events.append({"schema": 1, "wall_ns": run_clock.wall_ns(), "event": event, **fields})

    def samples(self, records: Iterable[dict[str, Any]]) -> None:
        if self.samples_wanted:
            self._samples.extend(records)

    def stack(self, record: dict[str, Any]) -> None:
        self._stacks.append(record)

    @property
    def takes_layers(self) -> bool:
        """False while those taken are not written yet: the others are kept where they are."""
        return not self._layers

    def layers(self, lines: Iterable[bytes], *, rank: int, attempt: int, pid: int) -> None:
        """Take lines as a recorder wrote them; a model is described once, whichever rank says so."""
        if self._models is None:
            self._models, self._layers_bytes = _described(self._run_dir / LAYERS)
        whose = b'{"rank":%d,"attempt":%d,"pid":%d,' % (rank, attempt, pid)
        for line in lines:
            if (model := _MODEL.match(line)) is not None:
                if model[1] in self._models:
                    continue
                self._models.add(model[1])
            elif (sample := _SAMPLE.match(line)) is not None:
                if not self.samples_wanted or not self._is_kept(int(sample[1])):
                    continue
                line = whose + line[1:]  # noqa: PLW2901
            else:
                continue
            self._layers.append(line)
            self._layers_bytes += len(line)

    def _is_kept(self, step: int) -> bool:
        pieces = self._layers_bytes // DENSE_LAYERS_BYTES
        return not pieces or (step - FIRST_SHARED_STEP) % (SHARED_STEPS << min(pieces - 1, 24)) == 0

    def flush(self) -> bool:
        """Write all pending records; return False if a write fails."""
        try:
            append_lines(self._run_dir / LAYERS, b"".join(self._layers))
        except OSError as error:
            self.refused(error)
            return False
        self._layers.clear()
        for name, waiting in ((EVENTS, self._events), (SAMPLES, self._samples), (STACKS, self._stacks)):
            if not waiting:
                continue
            try:
                append_jsonl(self._run_dir / name, waiting)
            except OSError as error:
                self.refused(error)
                return False
            waiting.clear()
        return True

    def refused(self, error: OSError) -> None:
        """Note a failed write. The records stay pending."""
        if self._refused:
            return
        self._refused = True
        message = f"cannot write to {self._run_dir}: {error.strerror}"
        self.event("warning", message=message)
        say(f"{message}; steps stay in their rings until it is writable again")

    def accepted(self) -> None:
        """Note that steps were written."""
        if self._refused and not self._recovered:
            self._recovered = True
            self.event("warning", message=f"{self._run_dir} is writable again")


def _described(path: Path) -> tuple[set[bytes], int]:
    """Which models the file already describes, from an earlier agent, and its size."""
    try:
        file = open_file(path)
    except OSError:
        return set(), 0
    with file:
        models = {found[1] for found in map(_MODEL.match, bounded_lines(file)) if found is not None}
        return models, file.tell()
