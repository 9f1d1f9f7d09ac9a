"""What recording costs, all of it, against a budget: main-thread CPU, memory, start-up, samples of layers and disk.

    make cost                                 # four minutes; exit code 1 if a figure is above its limit
    make cost COST_ARGS="--quick"             # a minute and a half, as in .ci/run
    make cost COST_ARGS="--write"             # also keep the figures, and write them into README.md and docs/
    python bench/cost.py --pages [--check]    # only the pages, from the figures that are kept

``cost_budget.toml`` has the budget.  Each figure comes from the benchmark that its line there names; the hooks are
measured in pairs of steps inside one process, whole processes in turns with bare ones.  A figure above its limit is
measured once more before it counts, since another program may have had the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hook_costs import typical

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Budget", "Figure", "exceeded", "main", "page_with", "read_budget", "table", "write_pages"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PAGES = ("README.md", "docs/benchmarks.md", "docs/faq.md")
PART_TIMEOUT_S = 900.0


# -- budget -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Budget:
    about: str
    unit: str
    goal: float
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    value: float
    low: float
    high: float


def read_budget(path: Path = HERE / "cost_budget.toml") -> dict[str, Budget]:
    return {name: Budget(**fields) for name, fields in tomllib.loads(path.read_text()).items()}


def exceeded(figures: Mapping[str, Figure], budget: Mapping[str, Budget]) -> list[str]:
    """The figures above their limits, by the lower end of their spread: noise alone fails nothing."""
    return [
        name
        for name, figure in figures.items()
        if (limit := budget[name].limit) is not None and figure.low > limit and figure.value > limit
    ]


# -- measuring --------------------------------------------------------------------------------------------------------


def _hook_figures(pairs: int, device: str) -> dict[str, Figure]:
    """Also prints who spends what."""
    workload = "transformer" if device == "cuda" else "1"
    document = _run("hook_costs.py", "--device", device, "--workload", workload, "--pairs", str(pairs))
    whole = document["pairs"]["all hooks together"]
    differences = {at: [hooked[at] - bare[at] for hooked, bare in whole] for at in (0, 1)}
    bare = {at: statistics.median(lap[at] for _, lap in whole) for at in (0, 1)}
    cpu, wall = (_typical(differences[at]) for at in (0, 1))
    if device == "cuda":
        return {"gpu_hooks_us": cpu, "gpu_hooks_share": _share(wall, bare[1])}
    return {"hooks_us": cpu, "hooks_share": _share(cpu, bare[0])}


def _layer_figures(pairs: int) -> dict[str, Figure]:
    document = _run("layers.py", "--pairs", str(pairs))
    times = [sampled / (plain / 2) - 1 for sampled, plain in document["sampled"]]
    low, share, high = (100 * rate for rate in document["rates"]["an hour"])
    return {
        "sampled_step": _typical(times),
        "sampling_share": Figure(value=share, low=low, high=high),
    }


def _process_figures(steps: int, repeats: int) -> dict[str, Figure]:
    document = _run("overhead.py", "--sizes", "1", "--steps", str(steps), "--repeats", str(repeats))
    rows = document["rows"]["1"]
    recorded, bare = rows["stepscope"], rows["bare"]

    def added(name: str) -> list[float]:
        return sorted(with_us[name] - without[name] for with_us, without in zip(recorded, bare, strict=True))

    def absolute(name: str) -> list[float]:
        return sorted(row[name] for row in recorded)

    found = {
        "first_line_ms": added("first_line_ms"),
        "process_mb": added("rss_mb"),
        "beside_mb": absolute("beside_mb"),
        "beside_end_mb": absolute("beside_end_mb"),
        "disk_sealed_b": absolute("disk_sealed_b"),
    }
    return {
        name: Figure(value=statistics.median(values), low=values[0], high=values[-1]) for name, values in found.items()
    }


def _run(script: str, *arguments: str) -> dict[str, Any]:
    """What a benchmark writes; its own lines go to the terminal."""
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as work:
        result = Path(work) / "result.json"
        command = [sys.executable, str(HERE / script), *arguments, "--json", str(result)]
        subprocess.run(command, check=True, timeout=PART_TIMEOUT_S)
        document: dict[str, Any] = json.loads(result.read_text())
        return document


def _typical(differences: list[float]) -> Figure:
    low, middle, high = typical(differences)
    return Figure(value=middle, low=low, high=high)


def _share(figure: Figure, whole: float) -> Figure:
    return Figure(value=100 * figure.value / whole, low=100 * figure.low / whole, high=100 * figure.high / whole)


def _parts(quick: bool) -> list[Callable[[], dict[str, Figure]]]:
    parts: list[Callable[[], dict[str, Figure]]] = [
        lambda: _hook_figures(300 if quick else 800, "cpu"),
        lambda: _layer_figures(60 if quick else 300),
        lambda: _process_figures(600, 2 if quick else 5),
    ]
    if _has_gpu():
        parts.append(lambda: _hook_figures(200 if quick else 500, "cuda"))
    return parts


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


# -- showing ----------------------------------------------------------------------------------------------------------


def table(figures: Mapping[str, Figure], budget: Mapping[str, Budget]) -> str:
    """In Markdown, which a terminal shows as well."""
    lines = ["| what recording adds | measured (spread) | goal | limit |", "|---|---|---|---|"]
    for name, wanted in budget.items():
        if (figure := figures.get(name)) is None:
            continue
        measured = f"**{_number(figure.value)} {wanted.unit}** ({_number(figure.low)} to {_number(figure.high)})"
        limit = "–" if wanted.limit is None else f"{_number(wanted.limit)} {wanted.unit}"
        goal = f"{_number(wanted.goal)} {wanted.unit}" + (": missed" if figure.value > wanted.goal else "")
        lines.append(f"| {wanted.about} | {measured} | {goal} | {limit} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 20 else f"{value:,.2g}" if abs(value) < 1 else f"{value:,.1f}"


def page_with(text: str, parts: Mapping[str, str]) -> str:
    """A page in which what lies between ``<!-- cost: NAME -->`` and ``<!-- end of cost -->`` is replaced."""

    def current(match: re.Match[str]) -> str:
        begin, name, line_break, end = match["begin"], match["name"], match["break"], match["end"]
        return f"{begin}{line_break}{parts[name]}{line_break}{end}" if name in parts else match[0]

    pattern = r"(?P<begin><!-- cost: (?P<name>[\w-]+) -->)(?P<break>\n?).*?\n?(?P<end><!-- end of cost -->)"
    return re.sub(pattern, current, text, flags=re.DOTALL)


def _page_parts(budget: Mapping[str, Budget]) -> dict[str, str]:
    """What pages show, from the figures that are kept for each kind of machine."""
    parts: dict[str, str] = {}
    for path in sorted(RESULTS.glob("cost-*.json")):
        document = json.loads(path.read_text())
        figures = {name: Figure(**fields) for name, fields in document["figures"].items() if name in budget}
        parts[path.stem.removeprefix("cost-")] = f"{document['machine']}, {document['date']}:\n\n" + table(
            figures, budget
        )
        hooks, share = figures.get("hooks_us"), figures.get("hooks_share")
        if hooks is not None and share is not None:
            parts["cpu-line"] = (
                f"+{hooks.value:.0f} µs of CPU time, {_number(share.value)}% of a step of 0.7 to 1.3 ms "
                f"({document['machine'].partition(' (')[0]}, {document['date']})"
            )
    return parts


def write_pages(budget: Mapping[str, Budget], *, check: bool) -> int:
    """Exit code: 1 if a page was not current."""
    stale = []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text()
        if (current := page_with(text, _page_parts(budget))) != text:
            stale.append(name)
            if not check:
                path.write_text(current)
    if stale:
        print(("not current: " if check else "wrote ") + ", ".join(stale))
    return int(check and bool(stale))


def _machine() -> str:
    import torch

    device = f"one {torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{device}{os.cpu_count()} cores ({platform.machine()}), {versions}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats")
    parser.add_argument("--write", action="store_true", help="keep the figures in bench/results and update the pages")
    parser.add_argument("--pages", action="store_true", help="measure nothing; write the pages from the kept figures")
    parser.add_argument("--check", action="store_true", help="with --pages: exit code 1 if a page is not current")
    args = parser.parse_args()
    budget = read_budget()
    if args.pages:
        return write_pages(budget, check=args.check)
    figures: dict[str, Figure] = {}
    for part in _parts(args.quick):
        found = part()
        if exceeded(found, budget):
            print("above its limit; measuring once more")
            found = {name: min(found[name], other, key=lambda each: each.value) for name, other in part().items()}
        figures |= found
    print(f"\n{_machine()}, load {os.getloadavg()[0]:.1f}\n\n{table(figures, budget)}\n")
    if args.write:
        RESULTS.mkdir(exist_ok=True)
        kind = "gpu" if _has_gpu() else "cpu"
        document = {
            "machine": _machine(),
            "date": time.strftime("%-d %B %Y"),
            "load": round(os.getloadavg()[0], 1),
            "figures": {name: asdict(figure) for name, figure in figures.items()},
        }
        (RESULTS / f"cost-{kind}.json").write_text(json.dumps(document, indent=1) + "\n")
        write_pages(budget, check=False)
    for name in (above := exceeded(figures, budget)):
        print(f"{name} is above its limit: {figures[name].value:,.1f} {budget[name].unit} ({budget[name].about})")
    return int(bool(above))


if __name__ == "__main__":
    raise SystemExit(main())
