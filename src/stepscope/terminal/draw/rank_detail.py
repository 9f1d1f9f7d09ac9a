"""One rank: who it is, its phases against the mean over all, its newest steps."""

from __future__ import annotations

from rich.text import Text

from stepscope.records.units import bytes_text, ms_text
from stepscope.reports.page import MARKS
from stepscope.terminal.draw.bars import padded_bar
from stepscope.terminal.draw.phases import COLOURS, means, phase_head
from stepscope.terminal.snapshot import Snapshot
from stepscope.terminal.text import STYLES, columns, fit, spark, wrapped

__all__ = ["draw_rank"]

NAME, NUMBER = 11, 10


def draw_rank(known: Snapshot, width: int, height: int, *, rank: int) -> list[Text]:
    about = known.rank
    if about is None or about.rank != rank:
        return [columns([(f"Rank {rank}", "bold"), ("  …", "dim")], width)]
    lines = [_title(known, width), *_findings(known, rank, width)]
    walls = [wall / 1e6 for wall in about.steps.wall_ns]
    if walls:
        words = f"{'step, mean':<{NAME}}{ms_text(about.mean_ns.get('wall', 0.0) / 1e6):>{NUMBER}}  "
        lines.append(columns([(words, ""), (spark(walls, width - len(words)), "cyan")], width))
    memory = [level for level in about.steps.memory_bytes.get("allocated", []) if level]
    if memory:
        words = f"{'memory':<{NAME}}{bytes_text(memory[-1]):>{NUMBER}}  "
        lines.append(columns([(words, ""), (spark(memory, width - len(words)), "cyan")], width))
    lines += _phases(known, width, height - len(lines))
    return lines[:height]


def _title(known: Snapshot, width: int) -> Text:
    about = known.rank
    assert about is not None
    who = about.identity
    device = who.device_name or who.device
    said = (who.host, f"pid {who.pid}", device, about.now.standing or about.now.state, f"step {about.now.last_step:,}")
    facts = [fact for fact in said if fact]
    if about.now.live_phase and not known.over:
        facts.append(f"in {about.now.live_phase}")
    return columns([(f"Rank {about.rank}", "bold"), (f"  {' · '.join(facts)}", "")], width)


def _findings(known: Snapshot, rank: int, width: int) -> list[Text]:
    named = [finding for finding in (known.findings.findings if known.findings else ()) if rank in finding.ranks]
    return [
        columns([(f"{MARKS.get(one.severity, '●')} ", STYLES.get(one.severity, "")), (line, "")], width)
        for one in named[:2]
        for line in wrapped(one.title, width - 2, 1)
    ]


def _phases(known: Snapshot, width: int, height: int) -> list[Text]:
    about = known.rank
    assert about is not None
    own = {name: value for name, value in about.mean_ns.items() if name not in ("wall", "work") and value > 0}
    if not own or height < 2:
        return []
    mean = means(known)
    longest = max([*own.values(), *(mean.get(name, 0.0) for name in own)])
    each = max(4, width - NAME - 2 * NUMBER - 4)
    head = f"{phase_head(known):<{NAME}}{'this rank':>{NUMBER}}{'mean':>{NUMBER}}"
    lines = [columns([(head, "dim")], width)]
    for name in sorted(own, key=lambda name: -own[name])[: height - 1]:
        numbers = f"{ms_text(own[name] / 1e6):>{NUMBER}}{ms_text(mean.get(name, 0.0) / 1e6):>{NUMBER}}  "
        bar = (padded_bar(own[name] / longest, each), COLOURS.get(name, "white"))
        lines.append(columns([(fit(name, NAME), ""), (numbers, ""), bar], width))
    return lines
