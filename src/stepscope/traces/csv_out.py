"""Tables as CSV files: one per table, those of all ranks together with a column ``rank`` in front."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stepscope.errors import TraceError
from stepscope.traces.table import Table

__all__ = ["write_csv"]


def write_csv(folder: Path, of_ranks: Mapping[int, Mapping[str, Table]], of_job: Iterable[Table] = ()) -> list[Path]:
    """``NAME.csv`` each, in a folder that is made if need be; what is there by these names is overwritten.

    ``of_ranks``: by rank and name; where ranks have different columns, the file has all of them.  A table of the job
    that is called as one of the ranks' is ``job_NAME.csv``.
    """
    files: dict[str, tuple[list[str], list[dict[str, Any]]]] = {}
    for rank in sorted(of_ranks):
        for name, table in of_ranks[rank].items():
            columns, rows = files.setdefault(name, (["rank"], []))
            columns += [column for column in table.columns if column not in columns]
            rows += [{**row, "rank": rank} for row in table.to_rows()]
    for table in of_job:
        name = f"job_{table.name}" if table.name in files else table.name
        files[name] = (list(table.columns), table.to_rows())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(folder / f"{name}.csv", columns, rows) for name, (columns, rows) in files.items()]
    except OSError as error:
        raise TraceError(f"{error.filename or folder} cannot be written: {error.strerror}") from None


def _write(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path
