"""How a bad network is told: the sentence, what the kernel's counters add to it, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.bad_ways import Bad
from stepscope.diagnosis.robust import lower_median
from stepscope.diagnosis.view import View
from stepscope.records.units import count_text, ms_text, number_text, share_text

__all__ = ["Counters", "advice_for", "title_of"]

Floats = NDArray[np.float64]
GBIT_BYTES = 125_000_000.0
SELDOM = 0.5
"""Of the steps in that time: fewer are told by their number."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """By host [H]; nan where not told."""

    speed_bps: Floats
    """Of its link, in bytes."""
    retransmits: Floats
    """Of the TCP segments sent."""
    errors_ps: Floats
    drops_ps: Floats

    @property
    def slow_links(self) -> NDArray[np.bool_]:
        """[H]; hosts whose link is slower than those of most."""
        known = self.speed_bps[~np.isnan(self.speed_bps)]
        if len(known) < 2:
            return np.zeros(len(self.speed_bps), np.bool_)
        # Of two hosts the faster one is what both should be.
        usual = float(known.max()) if len(known) == 2 else lower_median(known)
        return np.asarray(self.speed_bps <= thresholds.SPEED_RATIO * usual, np.bool_)

    def others(self, values: Floats, host: int) -> float:
        """The median of the others; nan where there are none."""
        rest = np.delete(values, host)
        rest = rest[~np.isnan(rest)]
        return float(np.median(rest)) if len(rest) else float("nan")

    def evidence(self, told: Sequence[int]) -> dict[str, Any]:
        """Of the first host that is told of."""
        if not told:
            return {}
        host = told[0]
        figures = {
            "speed_bps": self.speed_bps[host],
            "others_speed_bps": self.others(self.speed_bps, host),
            "retransmit_share": self.retransmits[host],
            "others_retransmit_share": self.others(self.retransmits, host),
            "net_errors_ps": self.errors_ps[host],
            "net_drops_ps": self.drops_ps[host],
        }
        return {name: None if np.isnan(value) else round(float(value), 5) for name, value in figures.items()}


def title_of(
    view: View,
    bad: Bad,
    names: Sequence[str],
    *,
    cost: Mapping[str, Any],
    per_step_ns: float,
    hits: int,
    since: tuple[int, int] | None,
) -> str:
    """``hits``: steps that took longer for it; ``since``: first and last step of it, when it was not all the time."""
    alone = len(set(view.hosts)) == 2
    first, last = since or view.span
    some = "" if hits >= SELDOM * (last - first + 1) else f"in {count_text(hits, 'step')} "
    return f"{_who(bad, names)} {_what(bad, alone=alone)}{_when(view, since)}; {_price(cost, per_step_ns, some)}."


def _who(bad: Bad, names: Sequence[str]) -> str:
    if bad.where == "network":
        return "The network between all hosts"
    if bad.where == "link":
        return f"The link between {names[0]} and {names[1]}"
    more = len(names) - 1
    others = "" if not more else f" (and of {more} more host{'s' if more > 1 else ''})"
    return f"The network of host {names[0]}{others}"


def _what(bad: Bad, *, alone: bool) -> str:
    if bad.what == "speed":
        return f"is slow: its link runs at {_gbit(bad.value)}, that of the others at {_gbit(bad.usual)}"
    words, text = "is slow: a round trip takes {}", ms_text(bad.value / 1e3)
    usual = "" if np.isnan(bad.usual) else ms_text(bad.usual / 1e3)
    if bad.what == "loss":
        words, text = "loses packets: {} of the probes are lost", _percent(bad.value)
        usual = "" if np.isnan(bad.usual) else _percent(bad.usual)
    than = "before" if bad.where == "network" or alone else "elsewhere"
    return words.format(text) + (f", {than} {usual}" if usual else "")


def _percent(share: float) -> str:
    return "none" if share == 0 else f"{share:.1%}"


def _gbit(speed_bps: float) -> str:
    gbit = speed_bps / GBIT_BYTES
    return f"{gbit:.0f} Gbit/s" if gbit == round(gbit) else f"{number_text(gbit)} Gbit/s"


def _when(view: View, since: tuple[int, int] | None) -> str:
    if since is None:
        return ""
    over = since[1] < int(view.steps[-1])
    return f" (steps {since[0]} to {since[1]})" if over else f" (since step {since[0]})"


def _price(cost: Mapping[str, Any], per_step_ns: float, some: str) -> str:
    if not cost["share"]:
        return "the steps do not suffer from it"
    return f"{some}exchanges take {ms_text(per_step_ns / 1e6)} longer for it, {share_text(cost['share'])} of the time"


def advice_for(
    bad: Bad, names: Sequence[str], counters: Counters, told: Sequence[int], *, alone: bool
) -> tuple[str, ...]:
    """``alone``: the two hosts of a link are all there are."""
    if bad.where == "network":
        return ("No host stands out: other traffic on the switches, a route between sites, the network's provider.",)
    if bad.where == "link" and alone:
        return (f"ip -s link and ethtool -S on {names[0]} and {names[1]}: which end has the errors, drops, low speed?",)
    if bad.where == "link":
        return (f"{names[0]} and {names[1]} are well with other hosts: look at the switches and routes between them.",)
    host = names[0]
    first = {
        "speed": f"ethtool on {host}: a cable or port that negotiated a lower speed, or the wrong interface in use.",
        "loss": f"ip -s link and ethtool -S on {host}: errors and drops; then cable, transceiver, switch port, MTU.",
        "latency": f"See what else uses the link of {host}; cable, switch port, route, the virtual machine's host.",
    }[bad.what]
    seen = _seen(counters, told[0]) if told else ""
    return (
        *([seen] if seen else []),
        first,
        "Until then leave the host out: in a synchronous job all ranks go at the pace of its network.",
    )


def _seen(counters: Counters, host: int) -> str:
    """What the host itself counted, where that says something."""
    parts = []
    if counters.errors_ps[host] > 0:
        parts.append(f"{number_text(float(counters.errors_ps[host]))} errors a second on its interfaces")
    again = counters.retransmits[host]
    if again >= thresholds.RETRANSMITS:
        parts.append(f"{share_text(float(again))} of its TCP segments sent again")
    return f"Its kernel says the same: {', '.join(parts)}." if parts else ""
