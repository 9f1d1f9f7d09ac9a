"""What Nsight Compute measured of kernels (``ncu --csv``), joined to the kernels of a trace by name.

Two forms of its CSV are read, after any lines that ncu or the program printed before:

- *details* (the default page): a row per launch and metric, with ``Metric Name``, ``Metric Unit``, ``Metric Value``;
- *raw* (``--page raw``): a row per launch and a column per metric, with a row of units below the header.

Unknown columns and metrics are ignored, unreadable values are unknown, and what a file lacks stays None. Values of
several launches of a kernel are averaged, durations weighted equally.

ncu prints the function's name alone unless it is called with ``--print-kernel-base demangled``; a trace has the whole
signature. A name is therefore joined to the equal one, else to all with the same function.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from stepscope.errors import TraceError
from stepscope.traces.job import JobAnalysis
from stepscope.traces.model.tables import Table, table_of

__all__ = ["NcuKernel", "function_of", "read_ncu", "with_ncu"]

MOST_BYTES: Final = 256 << 20
MOST_KERNELS: Final = 100_000
NAME: Final = "Kernel Name"
LAUNCH: Final = ("ID", "Process ID")

TIMES_NS: Final = {
    **dict.fromkeys(("ns", "nsecond"), 1.0),
    **dict.fromkeys(("us", "µs", "usecond"), 1e3),
    **dict.fromkeys(("ms", "msecond"), 1e6),
    **dict.fromkeys(("s", "second"), 1e9),
}
DETAILS: Final = {
    "Duration": "duration_ns",
    "Compute (SM) Throughput": "sm_share",
    "SM [%]": "sm_share",
    "DRAM Throughput": "dram_share",
    "Achieved Occupancy": "occupancy_share",
    "Theoretical Occupancy": "possible_occupancy_share",
    "Block Limit Registers": "registers",
    "Block Limit Shared Mem": "shared memory",
    "Block Limit Warps": "warps",
    "Block Limit SM": "blocks",
    "Block Limit Barriers": "barriers",
}
RAW: Final = {
    "gpu__time_duration.sum": "duration_ns",
    "gpu__time_duration.avg": "duration_ns",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_share",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram_share",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_share",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_share",
    "sm__maximum_warps_per_active_cycle_pct": "possible_occupancy_share",
    "launch__occupancy_limit_registers": "registers",
    "launch__occupancy_limit_shared_mem": "shared memory",
    "launch__occupancy_limit_warps": "warps",
    "launch__occupancy_limit_blocks": "blocks",
    "launch__occupancy_limit_barriers": "barriers",
}
LIMITS: Final = ("registers", "shared memory", "warps", "blocks", "barriers")
"""Resources of a multiprocessor; of each, how many blocks of the kernel it has room for."""
SHARES: Final = ("occupancy_share", "possible_occupancy_share", "dram_share", "sm_share")
COLUMNS: Final = ("duration_ns", *SHARES, "limited_by")


@dataclass(frozen=True, kw_only=True)
class NcuKernel:
    """The means over the launches that were measured; None: not in the file."""

    name: str
    launches: int
    duration_ns: int | None
    occupancy_share: float | None
    """Achieved, as all shares 0 to 1."""
    possible_occupancy_share: float | None
    """What the launch allows."""
    dram_share: float | None
    """Of the peak throughput."""
    sm_share: float | None
    limited_by: str | None
    """The resource that allows the fewest blocks on a multiprocessor: ``registers``, ``shared memory`` …"""


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Sums:
    launches: set[tuple[str, ...]] = field(default_factory=set)
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, figure: str, value: float) -> None:
        self.sums[figure] = self.sums.get(figure, 0.0) + value
        self.counts[figure] = self.counts.get(figure, 0) + 1

    def mean(self, figure: str) -> float | None:
        return self.sums[figure] / self.counts[figure] if figure in self.counts else None


def read_ncu(path: Path) -> list[NcuKernel]:
    """Read a file, the kernels with the longest measured time first; TraceError if it is not ncu's CSV."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise TraceError(f"{path}: larger than {MOST_BYTES >> 20} MiB; export fewer kernels or metrics")
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            found = _kernels(file, path)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except csv.Error as error:
        raise TraceError(f"{path}: not valid CSV ({error})") from None
    kernels = [_kernel(name, sums) for name, sums in found.items()]
    return sorted(kernels, key=lambda each: -(each.duration_ns or 0) * each.launches)


def _kernels(lines: Iterable[str], path: Path) -> dict[str, _Sums]:
    found: dict[str, _Sums] = {}
    header: list[str] | None = None
    units: dict[str, str] | None = None
    for row in csv.reader(lines):
        if NAME in row and (header is None or row != header):
            header, units = row, None
            continue
        if header is None or len(row) != len(header):
            continue  # output of the program, or of ncu
        cells = dict(zip(header, row, strict=True))
        name = cells[NAME].strip()
        if "Metric Name" not in cells and units is None:
            units = cells
            if not name:
                continue  # the row of units
        if not name or (name not in found and len(found) >= MOST_KERNELS):
            continue
        sums = found.setdefault(name, _Sums())
        sums.launches.add(tuple(cells.get(key, "") for key in LAUNCH))
        for figure, value in _figures(cells, units or {}):
            sums.add(figure, value)
    if header is None:
        raise TraceError(f"{path}: is not the output of ncu --csv: no column {NAME!r}")
    return found


def _figures(cells: Mapping[str, str], units: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    if "Metric Name" in cells:
        figure = DETAILS.get(cells["Metric Name"]) or RAW.get(cells["Metric Name"])
        value = _value(figure, cells.get("Metric Value", ""), cells.get("Metric Unit", "")) if figure else None
        if figure and value is not None:
            yield figure, value
        return
    done = set()
    for column, figure in RAW.items():
        value = _value(figure, cells[column], units.get(column, "")) if column in cells and figure not in done else None
        if value is not None:
            done.add(figure)
            yield figure, value


def _value(figure: str, text: str, unit: str) -> float | None:
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    if not 0 <= number < 1e18:
        return None
    if figure == "duration_ns":
        scale = TIMES_NS.get(unit.strip().lower())
        return None if scale is None else number * scale
    return number / 100 if figure in SHARES else number


def _kernel(name: str, sums: _Sums) -> NcuKernel:
    duration_ns = sums.mean("duration_ns")
    limits = {resource: blocks for resource in LIMITS if (blocks := sums.mean(resource)) is not None}
    shares = {share: sums.mean(share) for share in SHARES}
    return NcuKernel(
        name=name,
        launches=len(sums.launches),
        duration_ns=None if duration_ns is None else round(duration_ns),
        limited_by=min(limits, key=lambda resource: limits[resource]) if limits else None,
        **shares,
    )


# -- join -------------------------------------------------------------------------------------------------------------

ANONYMOUS: Final = "(anonymous namespace)"
RETURNED: Final = re.compile(r"^(void|bool|int|float)\s+")


def function_of(name: str) -> str:
    """Return a kernel's function without namespaces, templates and parameters."""
    plain = RETURNED.sub("", name.replace(ANONYMOUS, "anonymous").strip())
    end = min((at for at in (plain.find("<"), plain.find("(")) if at > 0), default=len(plain))
    return plain[:end].rpartition("::")[2].strip()


def with_ncu(job: JobAnalysis, measured: Sequence[NcuKernel], path: Path) -> JobAnalysis:
    """Add ncu's columns to the rows of kernels of each rank, a table ``ncu``, and a notice on what did not match."""
    by_name = {kernel.name: kernel for kernel in measured}
    by_function: dict[str, NcuKernel] = {}
    for kernel in reversed(measured):
        by_function[function_of(kernel.name)] = kernel

    def found(name: str) -> tuple[NcuKernel | None, str]:
        if name in by_name:
            return by_name[name], "name"
        kernel = by_function.get(function_of(name))
        # A whole signature that differs is another instance of the template.
        return (kernel, "function") if kernel is not None and kernel.name == function_of(kernel.name) else (None, "")

    used: set[str] = set()
    ranks = []
    for analysis in job.ranks:
        kernels = analysis.tables.get("kernels")
        if kernels is None:
            ranks.append(analysis)
            continue
        joined = [found(row["name"]) for row in kernels.to_rows()]
        used |= {kernel.name for kernel, _ in joined if kernel is not None}
        tables = {**analysis.tables, "kernels": _wider(kernels, joined)}
        rows = _rows(kernels, joined)
        if rows:
            tables["ncu"] = rows
        ranks.append(replace(analysis, tables=tables))
    missing = [kernel for kernel in measured if kernel.name not in used]
    notices = []
    if missing:
        example = missing[0].name[:80]
        notices.append(f"{path}: {len(missing)} of {len(measured)} kernels are not in the trace, such as {example}")
    return replace(job, ranks=tuple(ranks), notices=(*job.notices, *notices))


def _figures_of(kernel: NcuKernel | None) -> tuple[Any, ...]:
    return tuple(None if kernel is None else getattr(kernel, column) for column in COLUMNS)


def _wider(kernels: Table, joined: Sequence[tuple[NcuKernel | None, str]]) -> Table:
    columns = (*kernels.columns, *(f"ncu_{column}" for column in COLUMNS))
    rows = tuple((*row, *_figures_of(kernel)) for row, (kernel, _) in zip(kernels.rows, joined, strict=True))
    return replace(kernels, columns=columns, rows=rows)


def _rows(kernels: Table, joined: Sequence[tuple[NcuKernel | None, str]]) -> Table | None:
    rows = [
        (row["name"], row["count"], row["total_ns"], row["mean_ns"], kernel.launches, *_figures_of(kernel), how)
        for row, (kernel, how) in zip(kernels.to_rows(), joined, strict=True)
        if kernel is not None
    ]
    if not rows:
        return None
    columns = ("name", "count", "total_ns", "mean_ns", "launches", *COLUMNS, "joined_by")
    note = "count, total, mean: in the trace; launches and later columns: measured by Nsight Compute"
    return table_of("ncu", "Kernels as measured by Nsight Compute", columns, rows, note=note)
