"""TensorBoard: event files of scalars, with findings as text.

The event files are written with TensorBoard's own writer and protocol buffers; neither torch nor TensorFlow is needed.
A folder below ``DIR`` is one run there, named like the run: with ``_`` for slashes, without leading dots.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from stepscope.integrations.exporter import Exporter
from stepscope.integrations.run_feed import PREFIX, FindingChange, Row, RunAbout, finding_line, run_text
from stepscope.store.file_io import read_document

__all__ = ["make_exporter"]

TEXT_PLUGIN = "text"


def make_exporter(where: str) -> Exporter:
    return _TensorBoard(Path(where))


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        self._parent = folder
        self._folder = folder
        self._writer: Any = None
        self._step = 0

    @property
    def where(self) -> str:
        return f"tensorboard --logdir {self._parent}"

    def begin(self, run: RunAbout) -> None:
        self._folder = self._parent / (run.name.replace("/", "_").lstrip(".") or "run")
        self._writer = EventFileWriter(str(self._folder))
        self._text("run", run_text(run), 0, run.created_wall_ns)

    def write_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            self._add(Summary(value=values), row.step, row.wall_ns)
        self._writer.flush()

    def write_finding(self, change: FindingChange) -> None:
        self._text("findings", finding_line(change), change.step, change.wall_ns)

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        text = next((read_document(path).decode(errors="replace") for path in files if path.suffix == ".txt"), "")
        self._text("summary", f"```\n{text}\n```" if text else status, self._step, 0)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _text(self, tag: str, text: str, step: int, wall_ns: int) -> None:
        tensor = TensorProto(
            dtype=DT_STRING,
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
            string_val=[text.encode()],
        )
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=TEXT_PLUGIN))
        value = Summary.Value(tag=f"{PREFIX}{tag}", metadata=metadata, tensor=tensor)
        self._add(Summary(value=[value]), step, wall_ns)

    def _add(self, summary: Any, step: int, wall_ns: int) -> None:
        self._step = max(self._step, step)
        self._writer.add_event(Event(wall_time=wall_ns / 1e9 if wall_ns else time.time(), step=step, summary=summary))
