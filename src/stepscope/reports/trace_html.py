"""The analysis of a job's traces as one HTML page with charts: no external resources, light and dark, of bounded size.

The input is the document of ``stepscope trace --json`` and nothing else; all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.records.text import bytes_text, ns_text, number_text, share_text
from stepscope.reports.html import (
    CHART_STYLE,
    TABLE_SCRIPT,
    TABLE_STYLE,
    Bar,
    Curve,
    Part,
    curves,
    escaped,
    legend,
    page,
    sortable_table,
    stacked_bars,
    stacked_columns,
)
from stepscope.reports.layout import price_text
from stepscope.reports.trace_document import (
    certainty_of,
    facts_of,
    look_of,
    look_of_diff,
    other_findings,
    problems_of,
    rank_shown,
    worst_ranks,
)

__all__ = ["render_trace_html"]

Document = Mapping[str, Any]

BARS_SHOWN = 32
"""More ranks or steps are drawn as thin columns."""
ROWS = 100
FINDINGS_SHOWN = 40
FILES_SHOWN = 200
NOTICES_SHOWN = 100

STYLE = """
body { max-width: 72rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: .8rem; }
.card { background: var(--card); border-left: 4px solid var(--line); padding: .6rem .9rem; border-radius: 3px; }
.card p { margin: .3rem 0; } .card.critical { border-color: var(--bad); } .card.warning { border-color: var(--doubt); }
.card.healthy { border-color: var(--good); } .card h3 { font-size: .95rem; margin: .1rem 0 .4rem; }
.facts { color: var(--soft); } details { margin: .4rem 0; } summary { cursor: pointer; font-weight: 600; }
ul { padding-left: 1.2rem; }
"""

TONES = {"critical": "bad", "warning": "doubt", "info": "soft", "healthy": "good"}
PARTS = {
    "c1": "computing",
    "c2": "computing and communicating",
    "c3": "only communicating",
    "c4": "only copying",
    "c5": "idle",
}
"""Parts of a device's span; they add up to it."""
CAUSES = {"compute": "c1", "communication": "c3", "copy": "c4", "launch_delay": "c6", "kernel_gap": "c6"}
"""Causes on a critical path; all others are on the host."""
DRAWN = ("memory", "queue_curve", "copy_bandwidth")
"""Tables that are curves: drawn, not listed."""


def render_trace_html(document: Document, *, top: int = ROWS) -> str:
    """Render a document. ``top``: rows of each table."""
    verdict, diff = document["verdict"], document["diff"]
    sections = (_mixed, _diff, _verdict, _findings, _ranks, _collectives, _steps, _path, _memory, _queue)
    lines = [line for section in sections for line in section(document)]
    lines += [*_tables(document, top), *_notes(document)]
    return page(
        verdict["title"] if diff is None else diff["verdict"],
        "\n".join(lines),
        tone=TONES[look_of(verdict) if diff is None else look_of_diff(diff)],
        style=CHART_STYLE + TABLE_STYLE + STYLE,
        script=TABLE_SCRIPT,
    )


def _mixed(document: Document) -> Iterator[str]:
    if document["mixed"]:
        yield f'<p class="doubt">{escaped(document["mixed"])}</p>'


def _diff(document: Document) -> Iterator[str]:
    """What changed; then the current verdict under a separate heading."""
    diff = document["diff"]
    if diff is None:
        return
    yield from (f'<p class="soft">{escaped(notice)}</p>' for notice in diff["notices"])
    for number, table in enumerate(diff["tables"].values()):
        yield from _folded(table, ROWS, opened=number == 0)
    verdict = document["verdict"]
    yield f'<h2 class="{TONES[look_of(verdict)]}">{escaped(verdict["title"])}</h2>'


def _verdict(document: Document) -> Iterator[str]:
    verdict = document["verdict"]
    yield "<dl>"
    if verdict["price"]:
        yield f"<dt>cost</dt><dd>{escaped(verdict['price'])}</dd>"
    for number, sentence in enumerate(verdict["advice"]):
        yield f"<dt>{'' if number else 'to do'}</dt><dd>{escaped(sentence)}</dd>"
    certainty = certainty_of(verdict)
    if certainty:
        yield f"<dt>certainty</dt><dd>{escaped(certainty)}</dd>"
    yield f"<dt>trace</dt><dd>{escaped(' · '.join(facts_of(document)))}</dd></dl>"
    if document["what_if"]:
        yield from _folded(document["what_if"], ROWS, opened=True)


def _findings(document: Document) -> Iterator[str]:
    others = other_findings(document)[:FINDINGS_SHOWN]
    if not others:
        return
    yield '<h2>Also found</h2><div class="cards">'
    for finding in others:
        price = price_text(finding["cost"])
        yield f'<div class="card {escaped(look_of(finding))}"><h3>{escaped(finding["title"])}</h3>'
        if price:
            yield f"<p>{escaped(price)}</p>"
        yield from (f'<p class="soft">{escaped(sentence)}</p>' for sentence in finding["advice"])
        yield "</div>"
    yield "</div>"


def _ranks(document: Document) -> Iterator[str]:
    bars = [_time_bar(f"rank {row['rank']}", row) for row in document["distributed"]["rows"] if row["span_ns"]]
    if not bars:
        return
    on_host = all(row["measured"] == "host" for row in document["distributed"]["rows"])
    yield f"<h2>Where the time of the {'ranks' if on_host else 'devices'} goes</h2>"
    yield legend(list(PARTS.items()))
    yield _bars(bars)


def _time_bar(label: str, row: Mapping[str, Any]) -> Bar:
    """A bar for a table row with a span and its parts."""
    span_ns, comm_ns = row["span_ns"], row["exposed_comm_ns"]
    times_ns = (
        row["compute_ns"] - row["overlap_ns"],
        row["overlap_ns"],
        comm_ns,
        max(span_ns - row["compute_ns"] - comm_ns - row["idle_ns"], 0),
        row["idle_ns"],
    )
    parts = tuple(
        Part(look=look, value=time_ns, title=f"{name}: {ns_text(time_ns)}, {share_text(time_ns / span_ns)}")
        for (look, name), time_ns in zip(PARTS.items(), times_ns, strict=True)
    )
    return Bar(label=label, parts=parts, figure=ns_text(span_ns))


def _bars(bars: Sequence[Bar]) -> str:
    return stacked_bars(bars) if len(bars) <= BARS_SHOWN else stacked_columns(bars, ns_text)


def _steps(document: Document) -> Iterator[str]:
    """The work that each step launched or, without a device, its length."""
    rank, table = _of_shown(document, "temporal_steps")
    if not table:
        return
    on_device = any(row["span_ns"] for row in table["rows"])
    bars = [
        _time_bar(f"step {row['step']}", row)
        if on_device and row["span_ns"]
        else Bar(
            label=f"step {row['step']}",
            parts=(Part(look="c1", value=row["wall_ns"], title=ns_text(row["wall_ns"])),),
            figure=ns_text(row["wall_ns"]),
        )
        for row in table["rows"]
    ]
    yield f"<h2>Steps of rank {escaped(rank)}{', on the device' if on_device else ''}</h2>"
    yield _bars(bars)


def _path(document: Document) -> Iterator[str]:
    """By rank and by cause over all ranks; by cause for a single rank."""
    path = document["path"]
    length_ns = path["length_ns"]
    if not length_ns:
        return
    yield f"<h2>Critical path: what {ns_text(length_ns)} of steps were due to</h2>"
    if len(document["ranks"]) > 1:
        ranks = list(path["by_rank"].items())
        yield stacked_bars([_path_bar(f"rank {rank}", "c1", ns, length_ns) for rank, ns in ranks[:BARS_SHOWN]])
        yield "<h3>by cause</h3>"
    causes = path["by_cause"].items()
    yield stacked_bars(
        [_path_bar(name.replace("_", " "), CAUSES.get(name, "c7"), ns, length_ns) for name, ns in causes]
    )


def _path_bar(label: str, look: str, time_ns: int, length_ns: int) -> Bar:
    text = f"{share_text(time_ns / length_ns)}, {ns_text(time_ns)}"
    return Bar(label=label, parts=(Part(look=look, value=time_ns, title=text),), figure=text)


def _collectives(document: Document) -> Iterator[str]:
    collectives = document["collectives"]
    if not collectives["count"]:
        return
    bars = []
    for rank, wait_ns in collectives["wait_ns"].items():
        last, transfer_ns = collectives["last_counts"][rank], collectives["own_transfer_ns"][rank]
        parts = (
            Part(look="c3", value=wait_ns, title=f"waiting for the last to arrive: {ns_text(wait_ns)}"),
            Part(look="c1", value=transfer_ns, title=f"transfer: {ns_text(transfer_ns)}"),
        )
        figure = f"{ns_text(wait_ns)}, last {last}×"
        bars.append(Bar(label=f"rank {rank}", parts=parts, figure=figure))
    yield "<h2>Collectives: waiting and transfer</h2>"
    yield legend([("c3", "waiting for the last rank"), ("c1", "transfer")])
    yield _bars(bars)


def _memory(document: Document) -> Iterator[str]:
    rank, table = _of_shown(document, "memory")
    if not table:
        return
    rows, drawn = table["rows"], []
    for column, look, name in (("reserved_bytes", "c3", "reserved"), ("allocated_bytes", "c1", "allocated")):
        points = [(row["time_ns"], row[column]) for row in rows if row[column] is not None]
        peak = f"peak: {bytes_text(max(value for _, value in points))} {name}" if name == "allocated" and points else ""
        drawn.append(Curve(look=look, name=name, points=points, peak=peak))
    yield f"<h2>Memory of rank {escaped(rank)}</h2>"
    yield legend([("c1", "allocated"), ("c3", "reserved")])
    yield curves(drawn, bytes_text, "0", ns_text(rows[-1]["time_ns"] - rows[0]["time_ns"]))


def _queue(document: Document) -> Iterator[str]:
    """Queue length of the stream with most launches."""
    rank, table = _of_shown(document, "queue_curve")
    if not table:
        return
    stream = table["rows"][0]["stream"]
    points = [(row["start_ns"], row["max_length"]) for row in table["rows"] if row["stream"] == stream]
    yield f"<h2>Launched but not started, on stream {escaped(str(stream))} of rank {escaped(rank)}</h2>"
    curve = Curve(look="c1", name="queue length", points=points)
    yield curves([curve], number_text, "0", ns_text(points[-1][0] - points[0][0]))


def _of_shown(document: Document, name: str) -> tuple[str, Mapping[str, Any] | None]:
    rank = rank_shown(document)
    table = document["ranks"][rank]["tables"].get(name) if rank is not None else None
    return rank or "", table if table and len(table["rows"]) > 1 else None


def _tables(document: Document, top: int) -> Iterator[str]:
    if len(document["ranks"]) > 1:
        yield f"<h2>Ranks</h2>{sortable_table(document['distributed']['columns'], worst_ranks(document, count=top))}"
        for table in (*document["collectives"]["tables"].values(), document["path"]["table"]):
            yield from _folded(table, top)
    rank = rank_shown(document)
    if rank is None:
        return
    yield f"<h2>Tables of rank {escaped(rank)}</h2>"
    for name, table in document["ranks"][rank]["tables"].items():
        if name not in DRAWN:
            yield from _folded(table, top)


def _folded(table: Mapping[str, Any], top: int, *, opened: bool = False) -> Iterator[str]:
    rows = table["rows"][:top]
    if not rows:
        return
    more = len(table["rows"]) - len(rows) + table["left_out"]
    yield f"<details{' open' if opened else ''}><summary>{escaped(table['title'])} ({len(rows)})</summary>"
    if table["note"]:
        yield f'<p class="soft">{escaped(table["note"])}</p>'
    yield sortable_table(table["columns"], rows)
    if more:
        yield f'<p class="soft">… and {more:,} more.</p>'
    yield "</details>"


def _notes(document: Document) -> Iterator[str]:
    told = problems_of(document)
    if told:
        yield "<h2>Worth knowing</h2><ul>"
        yield from (f"<li>{escaped(sentence)}</li>" for sentence in told[:NOTICES_SHOWN])
        yield "</ul>"
    yield "<h2>Files</h2>"
    columns = ("path", "rank", "host", "format", "events", "backend")
    yield sortable_table(columns, document["files"][:FILES_SHOWN])
