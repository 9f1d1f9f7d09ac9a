"""The verdict on a job's Flight Recorder dumps as one HTML page: no script, no external resources, light and dark.

The input is the document of ``stepscope flight --json`` and nothing else; all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.reports.flight_text import call_text, counter_text, group_text, place_text, ranks_of, troubled
from stepscope.reports.html import escaped, page

__all__ = ["render_flight_html"]

Document = Mapping[str, Any]

MEANING = {
    "c": "ended",
    "s": "started",
    "w": "waiting",
    "x": "waits in another one",
    "d": "ended, another one",
    "m": "not called",
    "-": "no longer in the ring",
    "?": "no dump",
}
GROUPS_SHOWN = 200
ROWS_SHOWN = 1024

STYLE = """
:root { --c: #7fb58c; --s: #6a9fd4; --w: #e0b04c; --x: #c8443c; --d: #b58ac0; }
@media (prefers-color-scheme: dark) { :root { --c: #3f7d50; --s: #3b6ea5; --w: #a57a1f; --x: #d0524a; --d: #8a5f99; } }
.grid th { white-space: nowrap; } .grid th.seq { writing-mode: vertical-rl; padding: .3rem 0; }
.grid td.mark, .legend i { width: 1.3rem; min-width: 1.3rem; height: 1.1rem; padding: 0; text-align: center;
  border: 1px solid var(--back); font-style: normal; vertical-align: middle; }
.legend { display: flex; flex-wrap: wrap; align-items: center; gap: .2rem 1rem; font-size: 13px; margin-top: .5rem; }
.legend i { display: inline-block; margin-right: .4rem; line-height: 1.1rem; }
.mark-c { background: var(--c); } .mark-s { background: var(--s); } .mark-w { background: var(--w); }
.mark-x { background: var(--x); } .mark-d { background: var(--d); }
.mark-m { background: var(--card); box-shadow: inset 0 0 0 2px var(--x); } .mark-q { background: var(--card); }
tr.trouble td { color: var(--bad); }
"""


def render_flight_html(document: Document) -> str:
    tone = "good" if document["healthy"] else "doubt" if document["undecidable"] else "bad"
    parts = (_verdict, _parted, _grid, _waits, _groups, _stacks, _notes)
    body = "\n".join(line for part in parts for line in part(document))
    return page(document["title"], body, tone=tone, style=STYLE)


def _verdict(document: Document) -> Iterator[str]:
    yield "<dl>"
    if document["kind"]:
        sure = "; the culprit cannot be determined" if document["undecidable"] else ""
        yield _pair("kind", escaped(document["kind"] + sure))
    for one in document["reasons"]:
        at = f"<br><code>{escaped(place_text(one['at']))}</code>" if one["at"] else ""
        yield _pair("culprit", f"rank {one['rank']} {escaped(one['reason'])}{at}")
    for word in ("suspects", "victims"):
        if document[word]:
            yield _pair(word, ranks_of(document[word]))
    waiting = document["waiting_in"]
    if waiting:
        what = f"{waiting['op']} {waiting['sequence']} {waiting['sizes']} of {group_text(waiting)}"
        yield _pair("wait in", escaped(what))
    for sentence in document["evidence"]:
        yield _pair("note", escaped(sentence))
    yield "</dl>"


def _parted(document: Document) -> Iterator[str]:
    split = document["first_divergence"]
    if not split:
        return
    how = "not all ranks called it" if split["differs"] == "missing" else f"another {split['differs']}"
    yield f"<h2>Divergence: collective {split['sequence']} of {escaped(group_text(split))} ({escaped(how)})</h2>"
    for side in split["call_sites"]:
        yield f"<p>{ranks_of(side['ranks'])}: <code>{escaped(call_text(side))}</code></p>"
        if side["frames"]:
            yield _listing(side["frames"])


def _grid(document: Document) -> Iterator[str]:
    grid = document["grid"]
    if not grid or not grid["sequences"]:
        return
    yield f"<h2>Ranks and collectives of {escaped(group_text(grid))}</h2>"
    yield '<div class="wide"><table class="grid"><tr><th></th>'
    yield "".join(f'<th class="seq">{number}</th>' for number in grid["sequences"]) + "</tr>"
    for ranks, marks in grid["rows"][:ROWS_SHOWN]:
        cells = "".join(
            f'<td class="mark mark-{_class(mark)}" title="{MEANING[mark]}">{_sign(mark)}</td>' for mark in marks
        )
        yield f"<tr><th>{ranks_of(ranks)}</th>{cells}</tr>"
    yield '</table></div><div class="legend">'
    yield "".join(f'<span><i class="mark-{_class(m)}">{_sign(m)}</i>{MEANING[m]}</span>' for m in "cswxdm?")
    yield "</div>"


def _waits(document: Document) -> Iterator[str]:
    if document["wait_for"]:
        yield "<h2>Waiting ranks</h2><table><tr><th>wait</th><th>for</th><th>in</th></tr>"
        for row in sorted(document["wait_for"], key=lambda row: -len(row["waiters"])):
            what = f"{row['op']} {row['sequence']} of {group_text(row)}"
            cells = (ranks_of(row["waiters"]), ranks_of(row["waited"]), escaped(what))
            yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        yield "</table>"
    if document["cycle"]:
        yield "<p>Cycle:</p><ol>" + "".join(f"<li>{escaped(one)}</li>" for one in document["cycle"]) + "</ol>"


def _groups(document: Document) -> Iterator[str]:
    yield "<h2>Groups</h2><div class='wide'><table>"
    yield "<tr><th>group</th><th>members</th><th>called</th><th>started</th><th>ended</th></tr>"
    rows = sorted(document["groups"], key=lambda row: not troubled(row))
    for row in rows[:GROUPS_SHOWN]:
        counters = "".join(f"<td>{counter_text(row, key)}</td>" for key in ("enqueued", "started", "completed"))
        tone = ' class="trouble"' if troubled(row) and not document["healthy"] else ""
        yield f"<tr{tone}><td>{escaped(group_text(row))}</td><td>{ranks_of(row['members'])}</td>{counters}</tr>"
    yield "</table></div>"
    if len(rows) > GROUPS_SHOWN:
        yield f"<p class='soft'>… and {len(rows) - GROUPS_SHOWN} more</p>"


def _stacks(document: Document) -> Iterator[str]:
    if document["stacks"]:
        yield "<h2>Stacks</h2>"
    for group in document["stacks"]:
        yield f"<p>{ranks_of(group['ranks'])}</p>"
        for thread in group["threads"]:
            who = "main thread" if thread["main"] else f"thread {thread['name']}".strip()
            yield f"<details{' open' if thread['main'] else ''}><summary>{escaped(who)}</summary>"
            yield _listing(thread["frames"]) + "</details>"


def _notes(document: Document) -> Iterator[str]:
    have, world = len(document["ranks"]), document["world"]
    whole = f"{have} ranks" if have == world else f"{have} of {world} ranks"
    yield f"<h2>Dumps</h2><p>Of {whole}.</p>"
    if document["problems"]:
        yield "<ul>" + "".join(f"<li>{escaped(one)}</li>" for one in document["problems"]) + "</ul>"


def _listing(frames: Sequence[Mapping[str, Any]]) -> str:
    return "<pre>" + "\n".join(escaped(place_text(frame)) for frame in frames) + "</pre>"


def _pair(term: str, description: str) -> str:
    return f"<dt>{term}</dt><dd>{description}</dd>"


def _class(mark: str) -> str:
    return mark if mark.isalpha() else "q"


def _sign(mark: str) -> str:
    """A sign for each mark, so that the meaning does not depend on color alone."""
    return {"x": "≠", "d": "≠", "m": "·", "?": "?", "w": "…"}.get(mark, "")
