"""A recorded run for Python: finished, killed or still active."""

from __future__ import annotations

import html
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from stepscope.cli.arguments import locate_run, run_or_url
from stepscope.diagnosis.engine.window import last_attempt
from stepscope.errors import NotARun, UsageError
from stepscope.frame import Frame, frame_of_database, frame_of_findings, frame_of_records, frame_of_rows
from stepscope.incidents.document import current_summary
from stepscope.notebook.cells import HEIGHT, show
from stepscope.records.layers import MEMORY_KINDS
from stepscope.records.text import count_text, printable
from stepscope.reports import render_text
from stepscope.reports.layers import choose_sample, layers_document
from stepscope.store.load import load_run
from stepscope.store.paths import META
from stepscope.store.sealed.sql import QUERY_S, RunDatabase

__all__ = ["Run", "open"]

TEXT_WIDTH = 100
PHASE_KEYS = ("rank", "attempt", "step", "wall_ns")
"""The columns before the phases."""
NOT_PHASES = ("start_ns", "wall_ns", "between_ns", "ddp_compute_ns", "ddp_comm_ns", "device_wall_ns")
SAMPLE_KEYS = ("wall_ns", "mono_ns", "node", "kind")
SHARE_COLUMNS = ("share", "mean_ms", "median_ms", "worst_ms", "worst_rank", "steps")
LAYER_COLUMNS = ("name", "type", "parent", "elements", "total_bytes", "share")
LAYER_TIMES = ("forward_us", "own_forward_us", "backward_us", "own_backward_us")
LAYER_NORMS = ("grad_norm", "weight_norm", "update_ratio", "zero_share")


class Run:
    """A run as it was when it was opened; ``stepscope.open`` makes it.

    Methods give data frames, properties plain values. Of an active run, ``reload()`` returns what is known by then.
    """

    path: Path
    """The run directory; of an archived run, its copy on this disk."""
    summary: dict[str, Any]
    """The document of ``summary.json`` (docs/schema.md)."""
    active: bool
    """Whether the run is still recorded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._loaded = load_run(path)
        self.summary, self.active = current_summary(path, self._loaded.data)

    @property
    def name(self) -> str:
        return self._loaded.data.name

    @property
    def status(self) -> str:
        """``finished``, ``failed``, ``crashed``, ``interrupted`` or ``running``."""
        return str(self.summary["status"])

    @property
    def verdict(self) -> str:
        """The first finding in one sentence."""
        return str(self.summary["verdict"]["title"])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the last attempt."""
        return tuple(series.rank for series in last_attempt(self._loaded.data.ranks))

    @property
    def notices(self) -> tuple[str, ...]:
        """What is missing or could not be read, in sentences."""
        return tuple(self.summary["notices"])

    def reload(self) -> Run:
        """Return the run as it is now."""
        return Run(self.path)

    # -- steps

    def steps(self) -> Frame:
        """One row per rank and step, of all attempts: times, memory and phases; columns as in ``stepscope sql``."""
        return self.sql("SELECT * FROM steps ORDER BY attempt, rank, step")

    def phases(self) -> Frame:
        """One row per rank and step, in the order of ``steps()``: its time on the host, in each phase that has any.

        ``device_…``: the same on the device, in steps that were timed there.
        """
        steps = self.steps()
        phases = [name for name in steps.columns if name.endswith("_ns") and name not in NOT_PHASES]
        used = [name for name in phases if (steps[name] > 0).any()]
        return Frame({name: steps[name] for name in (*PHASE_KEYS, *used)})

    def phase_shares(self) -> Frame:
        """One row per phase of the steady steps: its share of the training time, mean, median and worst rank."""
        return frame_of_records(
            ("phase", *SHARE_COLUMNS), [{"phase": name, **row} for name, row in self.summary["phases"].items()]
        )

    def collectives(self) -> Frame:
        """One row per rank of each collective that was recorded individually; without rows on one rank."""
        return self.sql("SELECT * FROM collectives ORDER BY attempt, rank, step, start_ns")

    # -- findings and the model

    def findings(self) -> Frame:
        """One row per finding, the most severe and most costly first; ``summary["findings"]`` has their evidence."""
        return frame_of_findings(self.summary["findings"])

    def layers(self, rank: int | None = None, step: int | None = None) -> Frame:
        """One row per module of the model in a sampled step: memory by kind, times and norms.

        ``rank``: the fullest by default; ``step``: the last sampled step up to it. Without samples, no rows.
        """
        records = self._loaded.data.layers
        sample = choose_sample(records, rank=rank, step=step)
        columns = (*LAYER_COLUMNS, *(f"{kind}_bytes" for kind in MEMORY_KINDS), *LAYER_TIMES, *LAYER_NORMS)
        if sample is None:
            return frame_of_rows(
                columns, [], note="no layers were sampled" + ("" if rank is None else f" on rank {rank}")
            )
        document = layers_document(records, sample)
        rows = [
            {
                **module,
                **{f"{kind}_bytes": module["bytes"].get(kind, 0) for kind in MEMORY_KINDS},
                **{name: None if module[name] is None else float(module[name]) for name in LAYER_NORMS},
            }
            for module in document["modules"]
        ]
        return frame_of_records(columns, rows, note=document["text"]["shown"])

    # -- what was noted, sampled and happened

    def metrics(self) -> Frame:
        """One row per number: ``rank``, ``step``, ``name``, ``value``; from ``note()``, or seen by the recorder."""
        return self.sql("SELECT * FROM metrics ORDER BY step, rank, name")

    def notes(self) -> Frame:
        """One row per value given to ``note()``, also texts: ``rank``, ``step``, ``wall_ns``, ``name``, ``value``."""
        rows = [
            (event.get("rank"), event.get("step"), event.get("wall_ns"), name, value)
            for event in self._loaded.data.events
            if event.get("event") == "note" and isinstance(event.get("values"), dict)
            for name, value in event["values"].items()
        ]
        return frame_of_rows(("rank", "step", "wall_ns", "name", "value"), rows)

    def samples(self, kind: str | None = None) -> Frame:
        """One row per sample of a host, process, GPU or network path.

        ``kind``: ``host``, ``process``, ``gpu`` or ``probe``, without the columns that this kind does not have.
        """
        if kind is None:
            return self.sql("SELECT * FROM samples ORDER BY wall_ns")
        if kind not in ("host", "process", "gpu", "probe"):
            raise UsageError(f"no samples of kind {kind!r}; kinds: host, process, gpu, probe")
        found = self.sql(f"SELECT * FROM samples WHERE kind = '{kind}' ORDER BY wall_ns")
        return Frame({name: found[name] for name in found.columns if name in SAMPLE_KEYS or _has_any(found[name])})

    def events(self) -> Frame:
        """One row per event of the run; ``data`` is the rest of each as JSON."""
        return self.sql("SELECT * FROM events ORDER BY wall_ns")

    def sql(self, query: str, *, limit_s: float = QUERY_S) -> Frame:
        """Run a query on the tables of ``stepscope sql`` (docs/storage.md); UsageError if it is invalid or too slow."""
        return frame_of_database(self._database.columns(query, limit_s=limit_s))

    # -- to look at

    def show(self, *, height: int = HEIGHT) -> None:
        """Show the run's page in a notebook cell; its summary anywhere else."""
        show(self.path, height=height)

    def __str__(self) -> str:
        """Return the summary as text, as ``stepscope report`` prints it."""
        return printable(render_text(self.summary, width=TEXT_WIDTH), keep="\n")

    def __repr__(self) -> str:
        return f"<Run {self.name}: {self.status}, {count_text(len(self.ranks), 'rank')}: {self.verdict}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    @cached_property
    def _database(self) -> RunDatabase:
        return RunDatabase(self.path, self._loaded, self.summary["findings"])


def open(run: str | os.PathLike[str] | None = None) -> Run:  # noqa: A001
    """Open a run: its folder, its name in ``runs/``, or the address of an archived run; by default the newest there.

    Nothing of the run is changed. Raises ``stepscope.errors.StepscopeError``, with one line that says why, if there
    is no such run.
    """
    found = locate_run(None if run is None else run_or_url(os.fspath(run)))
    if not (found / META).is_file():
        raise NotARun(f"{found} is not a run (there is no {META}); for traces there is stepscope.traces.open")
    return Run(found)


def _has_any(column: Any) -> bool:
    if column.dtype == object:
        return any(value is not None for value in column)
    return column.dtype.kind != "f" or bool((column == column).any())
