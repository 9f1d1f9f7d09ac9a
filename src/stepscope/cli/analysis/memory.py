"""``stepscope memory``: which layers hold the memory and take the time, from the sampled steps of a run."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.cli.arguments import RUN_HELP, count, locate_run, whole_number
from stepscope.cli.output import progress_bar
from stepscope.errors import RunError, UsageError
from stepscope.records.text import bytes_text, ns_text, printable, share_text

__all__ = ["EPILOG", "HELP", "add_arguments", "render_layers", "run"]

HELP = "show which layers use the memory and time of a run"
EPILOG = """\
examples:
  stepscope memory                         the newest run in runs/: its fullest rank, its last sample
  stepscope memory runs/NAME --rank 3      one rank
  stepscope memory NAME --step 500         the last sample up to step 500
  stepscope memory NAME --depth 6          deeper into the modules
  stepscope memory NAME --sort time        the modules that take longest first
  stepscope memory NAME --json             the document (docs/schema.md)

`stepscope run` samples layers unless it is given `--layers off`.
"""
HINT = "they begin at step 11, unless the run used `--layers off`"
DEPTH = 3
WIDEST = 110
BAR_CELLS = 14
WIDEST_NAME = 50
"""There are no bars if names would be cut for them; longer names are cut anyway."""
LIKE_BYTES, LIKE_TIME = 1.1, 1.5
"""Modules whose bytes and times differ by more than this are not shown as one."""
MOST_LEVELS = 64
MOST_SIBLINGS = 40
"""Lines below one module; the rest is counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", type=Path, nargs="?", help=RUN_HELP)
    parser.add_argument("--rank", type=whole_number, metavar="R", help="rank to show (default: the fullest)")
    parser.add_argument(
        "--step", type=whole_number, metavar="N", help="the last sample up to this step (default: the last sample)"
    )
    parser.add_argument(
        "--depth",
        type=count("levels"),
        default=DEPTH,
        metavar="D",
        help=f"levels of modules to show (default: {DEPTH})",
    )
    parser.add_argument(
        "--sort",
        choices=tuple(ORDERS),
        default="bytes",
        metavar="ORDER",
        help="order of modules: bytes (default), time, or name",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    from stepscope.reports.layers import choose_sample, layers_document
    from stepscope.store.load import load_run

    run_dir = locate_run(args.path)
    with progress_bar("reading the run") as tell:
        records = load_run(run_dir, samples=False, progress=tell).data.layers
    if not records:
        raise RunError(f"{run_dir} has no layer samples; {HINT}")
    sample = choose_sample(records, rank=args.rank, step=args.step)
    if sample is None:
        from stepscope.flight.wording import spans_text

        ranks = sorted({one.rank for one in records.of_memory})
        raise UsageError(f"rank {args.rank} has no layer samples; ranks with samples: {spans_text(ranks)}")
    document = layers_document(records, sample)
    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
        print(printable(render_layers(document, width=width, depth=args.depth, sort=args.sort), keep="\n"), end="")
    return 0


# -- text -------------------------------------------------------------------------------------------------------------


def render_layers(document: Mapping[str, Any], *, width: int = 80, depth: int = DEPTH, sort: str = "bytes") -> str:
    from stepscope.reports.layout import NARROWEST, Page

    width = max(width, NARROWEST)
    page = Page(width, color=False)
    page.lines.append(document["text"]["shown"])
    page.blank()
    page.lines += _totals(document, width)
    page.blank()
    page.lines += _module_lines(document, width, depth, ORDERS[sort])
    page.blank()
    page.labelled("times", [document["text"]["times"] + "."] if document["text"]["times"] else [])
    page.labelled("notes", document["notes"])
    page.labelled("not seen", ["; ".join(document["unseen"]) + "."] if document["unseen"] else [])
    return "\n".join(page.lines).rstrip("\n") + "\n"


def _totals(document: Mapping[str, Any], width: int) -> list[str]:
    """By kind, their sum, and what it compares with."""
    from stepscope.reports.layout import bar

    kinds = document["kinds"]
    titles = max(len("device"), *(len(kind["title"]) for kind in kinds))
    sizes = max(len(text) for text in [document["text"]["total_bytes"], *(kind["text"]["bytes"] for kind in kinds)])
    lines = [
        f"  {kind['title'].ljust(titles)}  {kind['text']['bytes'].rjust(sizes)}  {kind['text']['share'].rjust(4)}  "
        f"{bar(kind['share'], BAR_CELLS)}".rstrip()
        for kind in kinds
    ]
    lines.append(f"  {'sum'.ljust(titles)}  {document['text']['total_bytes'].rjust(sizes)}")
    said = {"ranks": document["over_ranks"]["text"] if document["over_ranks"]["ranks"] > 1 else ""}
    said["peak"] = "" if document["peak"] is None else document["peak"]["text"]
    said["device"] = "" if document["device"] is None else document["device"]["text"]
    for label, text in said.items():
        wrapped = textwrap.wrap(text, width - titles - 4)
        lines += [f"  {'' if at else label:{titles}}  {line}" for at, line in enumerate(wrapped)]
    return lines


# -- modules ----------------------------------------------------------------------------------------------------------
# Modules with consecutive numbers that are built alike (the blocks of a transformer) are one line, and so are the
# modules at the same place inside them.


@dataclass(kw_only=True)
class _Node:
    """One line: a module, or modules that are built alike."""

    members: list[int]
    children: list[_Node]
    name: str
    about: str
    bytes: int
    forward_us: float | None
    backward_us: float | None

    @property
    def time_us(self) -> float:
        return (self.forward_us or 0.0) + (self.backward_us or 0.0)


def _natural(node: _Node) -> list[tuple[int, str]]:
    return [(int(part or 0), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", node.name)]


ORDERS: dict[str, Callable[[_Node], Any]] = {
    "bytes": lambda node: -node.bytes,
    "time": lambda node: -node.time_us,
    "name": _natural,
}


class _Builder:
    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows
        self._children: list[list[int]] = [[] for _ in rows]
        for at, row in enumerate(rows):
            if row["parent"] >= 0:
                self._children[row["parent"]].append(at)
        self._shape: list[int] = [0] * len(rows)
        known: dict[Any, int] = {}
        for at in reversed(range(len(rows))):  # children come after their parents
            inside = tuple((self._last(child), self._shape[child]) for child in self._children[at])
            self._shape[at] = known.setdefault((rows[at]["type"], rows[at]["elements"], inside), len(known))

    def roots(self) -> list[_Node]:
        return [self._node([at], "", 0) for at, row in enumerate(self._rows) if row["parent"] < 0]

    def _last(self, at: int) -> str:
        name: str = self._rows[at]["name"]
        return name.rpartition(".")[2]

    def _node(self, members: list[int], above: str, level: int) -> _Node:
        rows = [self._rows[at] for at in members]
        first = rows[0]["name"]
        inside = zip(*(self._children[at] for at in members if level < MOST_LEVELS), strict=True)
        groups = self._groups([list(places) for places in inside])
        children = [self._node(group, first, level + 1) for group in groups]
        node = _Node(
            members=members,
            children=children,
            name=_below(first, above) or rows[0]["type"],
            about="" if not first else rows[0]["type"],
            bytes=sum(row["total_bytes"] for row in rows),
            forward_us=_summed([row["forward_us"] for row in rows]),
            backward_us=_summed([row["backward_us"] for row in rows]),
        )
        if len(members) > 1:
            sizes = sorted({row["total_bytes"] for row in rows})
            least, most = bytes_text(sizes[0]), bytes_text(sizes[-1])
            each = f"{most} each" if least == most else f"{least} to {most} each"
            node.about = f"{len(members)} × {rows[0]['type']}, {each}"
            if self._last(members[0]) != self._last(members[-1]):
                node.name = f"{node.name} … {self._last(members[-1])}"
        if len(children) == 1 and not any(self._has_own(at) for at in members):
            # A container that holds nothing itself, such as a ModuleList, is shown as what is in it.
            children[0].name = f"{node.name}.{children[0].name}"
            return children[0]
        return node

    def _has_own(self, at: int) -> bool:
        row = self._rows[at]
        return bool(row["own_bytes"] or row["own_forward_us"] or row["left_out"] or not row["name"])

    def _groups(self, places: Sequence[list[int]]) -> list[list[int]]:
        """Join neighbors that are alike and have consecutive numbers."""
        groups: list[list[int]] = []
        sizes = times = (0.0, 0.0)
        for members in places:
            own_sizes = [self._rows[at]["total_bytes"] for at in members]
            own_times = [(self._rows[at]["forward_us"] or 0) + (self._rows[at]["backward_us"] or 0) for at in members]
            joined = min(sizes[0], *own_sizes), max(sizes[1], *own_sizes)
            lasted = min(times[0], *own_times), max(times[1], *own_times)
            # None may be large or slow among the others: that one must be seen.
            like = joined[1] <= LIKE_BYTES * joined[0] and lasted[1] <= LIKE_TIME * lasted[0]
            if groups and like and self._follows(groups[-1][-1], members[0]):
                groups[-1] += members
                sizes, times = joined, lasted
            else:
                groups.append(list(members))
                sizes, times = (min(own_sizes), max(own_sizes)), (min(own_times), max(own_times))
        return groups

    def _follows(self, one: int, two: int) -> bool:
        first, second = self._last(one), self._last(two)
        numbered = _numbered(first) and _numbered(second) and int(second) == int(first) + 1
        return numbered and self._shape[one] == self._shape[two]


def _numbered(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


def _below(name: str, above: str) -> str:
    return name.removeprefix(f"{above}.") if above else name


def _summed(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _module_lines(document: Mapping[str, Any], width: int, depth: int, order: Callable[[_Node], Any]) -> list[str]:
    from stepscope.reports.layout import bar, cut

    shown: list[tuple[int, _Node]] = []
    deeper = False

    def add(nodes: Sequence[_Node], level: int) -> None:
        nonlocal deeper
        ordered = sorted(nodes, key=order)
        for node in ordered[:MOST_SIBLINGS]:
            shown.append((level, node))
            if level < depth:
                add(node.children, level + 1)
            else:
                deeper = deeper or bool(node.children)
        if rest := ordered[MOST_SIBLINGS:]:
            shown.append((level, _rest(rest)))

    add(_Builder(document["modules"]).roots(), 0)
    total = document["total_bytes"]
    timed = any(node.time_us for _, node in shown)
    heads = ["bytes", "share", "", *(["forward", "backward"] if timed else [])]
    cells = [
        [
            bytes_text(node.bytes),
            share_text(node.bytes / total if total else None),
            bar(node.bytes / total if total else 0.0, BAR_CELLS),
            *([ns_text(_ns(node.forward_us)), ns_text(_ns(node.backward_us))] if timed else []),
        ]
        for _, node in shown
    ]
    widths = [max(len(head), *(len(row[at]) for row in cells)) for at, head in enumerate(heads)]
    widths[2] = BAR_CELLS
    names = ["  " * level + node.name + (f"  {node.about}" if node.about else "") for level, node in shown]
    if width < sum(widths) + 2 * len(widths) + 2 + min(max(map(len, names)), WIDEST_NAME):
        heads, cells, widths = _without_bars(heads, cells, widths)
    bars = heads.index("") if "" in heads else -1
    room = min(width - 2 - sum(widths) - 2 * len(widths), max(map(len, ["module", *names])))
    lines = [_line("module", heads, widths, room, bars)]
    lines += [_line(cut(name, room), row, widths, room, bars) for name, row in zip(names, cells, strict=True)]
    return [*lines, *([f"  More inside: --depth {depth + 1}"] if deeper else [])]


def _without_bars(
    heads: list[str], cells: list[list[str]], widths: list[int]
) -> tuple[list[str], list[list[str]], list[int]]:
    return [*heads[:2], *heads[3:]], [[*row[:2], *row[3:]] for row in cells], [*widths[:2], *widths[3:]]


def _line(name: str, cells: Sequence[str], widths: Sequence[int], room: int, bars: int) -> str:
    padded = [
        cell.ljust(width) if at == bars else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(["", name.ljust(room), *padded]).rstrip()


def _rest(nodes: Sequence[_Node]) -> _Node:
    return _Node(
        members=[],
        children=[],
        name=f"… and {len(nodes):,} more",
        about="",
        bytes=sum(node.bytes for node in nodes),
        forward_us=_summed([node.forward_us for node in nodes]),
        backward_us=_summed([node.backward_us for node in nodes]),
    )


def _ns(us: float | None) -> float | None:
    return None if us is None else us * 1e3
