"""The results as text: one row a family, then the totals against their bars, then what was not right."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from league.score import Judged, total

__all__ = ["Scored", "render"]

BARS = (
    ("precision", "precision", 0.97),
    ("recall", "recall", 0.97),
    ("right rank", "rank", 0.99),
    ("right phase", "phase", None),
    ("right step", "step", None),
    ("right period", "period", None),
)
EFFECT = "effect10"
EFFECT_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A run of a case, judged."""

    id: str
    judged: Judged
    said: str
    detected_after: int | None = None
    has_start: bool = False

    @property
    def family(self) -> str:
        return self.id.split("/", maxsplit=1)[0]


def render(tools: Mapping[str, Sequence[Scored]]) -> str:
    lines = []
    for tool, scored in tools.items():
        if scored:
            lines += ["", tool, "", *_families(scored)]
    lines += ["", *_side_by_side({tool: scored for tool, scored in tools.items() if scored})]
    for tool, scored in tools.items():
        wrong = [each for each in scored if not each.judged.perfect]
        if wrong:
            lines += ["", f"{tool}: not right in {len(wrong)} of {len(scored)}", *map(_wrong_line, wrong)]
    return "\n".join(lines)


def _families(scored: Sequence[Scored]) -> Iterator[str]:
    heads = ("runs", "perfect", "found", "rank", "phase", "step", "period", "warned", "false")
    yield f"  {'':10}" + "".join(f"{head:>9}" for head in heads) + f"{'steps until detected':>24}"
    for family in dict.fromkeys(each.family for each in scored):
        own = [each for each in scored if each.family == family]
        sums = total([each.judged for each in own])
        asked = (sums.recall, sums.rank, sums.phase, sums.step, sums.period)
        cells = [str(sums.runs), str(sums.perfect), *(f"{right}/{of}" if of else "·" for right, of in asked)]
        right, warned = sums.precision
        cells += [str(warned), str(warned - right)]
        yield f"  {family:10}" + "".join(f"{cell:>9}" for cell in cells) + f"{_detection(own):>24}"


def _detection(scored: Sequence[Scored]) -> str:
    started = [each for each in scored if each.has_start]
    after = [each.detected_after for each in started if each.detected_after is not None]
    if not after:
        return "·"
    missed = f", {len(started) - len(after)} never" if len(after) < len(started) else ""
    return f"median {statistics.median(after):g}, max {max(after)}{missed}"


def _side_by_side(tools: Mapping[str, Sequence[Scored]]) -> Iterator[str]:
    yield f"  {'':26}{'bar':>6}" + "".join(f"{tool:>28}" for tool in tools)
    sums = {tool: total([each.judged for each in scored]) for tool, scored in tools.items()}
    for name, field, bar in BARS:
        cells = [_share(getattr(each, field), bar) for each in sums.values()]
        yield f"  {name:26}{bar or '':>6}" + "".join(f"{cell:>28}" for cell in cells)
    cells = [f"{each.healthy_warned[0]} of {each.healthy_warned[1]}" for each in sums.values()]
    yield f"  {'healthy with a warning':26}{'0':>6}" + "".join(f"{cell:>28}" for cell in cells)
    effects = [_detection([each for each in scored if each.family == EFFECT]) for scored in tools.values()]
    yield f"  {'steps until a 10% effect':26}{EFFECT_STEPS:>6}" + "".join(f"{cell:>28}" for cell in effects)


def _share(pair: tuple[int, int], bar: float | None) -> str:
    right, of = pair
    if not of:
        return "·"
    below = "MISSED  " if bar and right / of < bar else ""
    return f"{below}{right / of:.3f} ({right} of {of})"


def _wrong_line(scored: Scored) -> str:
    judged = scored.judged
    reasons = [] if judged.found or judged.healthy else ["missed"]
    asked = {"rank": judged.rank, "phase": judged.phase, "step": judged.step, "period": judged.period}
    reasons += [f"wrong {name}" for name, right in asked.items() if right is False]
    reasons += [f"false: {title}" for title in judged.false]
    return f"  {scored.id:34} {'; '.join(reasons)}   [{scored.said}]"
