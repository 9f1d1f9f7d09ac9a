"""Tables as CSV files: one per table, those of all ranks together with a column ``rank`` in front.

A list of what was written stays in the folder, with the size and time of each file: so the next set can take away what
is left of this one, and nothing else.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stepscope.errors import UsageError
from stepscope.records.replacing import replaced
from stepscope.traces.model.table import Table

__all__ = ["tables_in", "write_csv"]

LIST = ".stepscope-tables"


def write_csv(folder: Path, of_ranks: Mapping[int, Mapping[str, Table]], of_job: Iterable[Table] = ()) -> list[Path]:
    """``NAME.csv`` each, in a folder that is made if need be; what is there by these names is replaced.

    Files of an earlier set that this one does not have are removed, unless somebody has changed them since.

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
        stale = _unchanged(folder)
        written = [_write(folder / f"{name}.csv", columns, rows) for name, (columns, rows) in files.items()]
        for name in stale.difference(path.name for path in written):
            (folder / name).unlink(missing_ok=True)
        _remember(folder, written)
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
    return written


def tables_in(folder: Path | None) -> list[Path]:
    """What is there already that a table might replace."""
    return [] if folder is None else sorted(folder.glob("*.csv"))


def _write(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> Path:
    with replaced(path) as spare, spare.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _unchanged(folder: Path) -> set[str]:
    """Of the set written before: the names of files that are as they were."""
    try:
        listed = json.loads((folder / LIST).read_bytes())
    except (FileNotFoundError, ValueError):
        return set()
    if not isinstance(listed, dict):
        return set()
    return {
        name
        for name, told in listed.items()
        if name.endswith(".csv") and name == Path(name).name and _told(folder / name) == told
    }


def _remember(folder: Path, written: Iterable[Path]) -> None:
    with replaced(folder / LIST) as spare:
        spare.write_text(json.dumps({path.name: _told(path) for path in written}, indent=0), encoding="utf-8")


def _told(path: Path) -> list[int] | None:
    """Size and time of change; None: there is no such file."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns]
