"""What is worth saying of the nodes of a run: who never came, who was lost, whose clock is off, who was turned away."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepscope.records.units import count_text
from stepscope.store.nodes import NodeInfo

__all__ = ["node_notices"]

CLOCK_OFF_S = 1.0
REFUSED = {
    "tls": "no TLS that it speaks, or its certificate was not taken",
    "key": "joins with another key",
    "join": "joins to another run",
    "join_rate": "joins too often",
    "token": "wrong tokens",
    "frame": "no frames of ours",
    "rank": "ranks that another node has",
    "spool": "frames in another's name",
    "node_taken": "a number that another node has",
    "connections": "too many connections",
    "connection_rate": "connections too often",
    "body_large": "too large",
    "body_slow": "too slow",
    "head_slow": "too slow to begin",
    "head_large": "headers too large",
    "http": "no HTTP",
    "disk": "the disk was full",
}
"""What the hub turned away, in words."""
SHOWN = 8
"""Nodes of one sort that get a sentence of their own."""


def node_notices(
    meta: Mapping[str, Any],
    nodes: Sequence[NodeInfo],
    refused: Mapping[str, int],
    *,
    lost: Callable[[NodeInfo], bool],
    over: bool,
) -> list[str]:
    """``refused``: what came from nobody we know, by reason; ``lost``: whether one that said no goodbye is gone;
    ``over``: whether nobody can join any more.
    """
    notices = _absent(meta, nodes) if over else []
    nodes = [node for node in nodes if node.spool != meta.get("spool")]  # this host's own agent says it is there, too
    hosts = {node.spool: node.host for node in nodes}
    gone = [_lost(node, hosts) for node in nodes if node.bye is None and lost(node)]
    off = [node for node in nodes if abs(node.offset_ns or 0) > CLOCK_OFF_S * 1e9]
    notices += _some(gone, "more nodes were lost")
    notices += _some([_clock(node) for node in off], "more clocks are off")
    badly = [node for node in nodes if node.bye is not None and node.bye.get("status") not in ("finished", "orphaned")]
    notices += _some([_ended(node) for node in badly if node.node], "more nodes ended badly")
    bad = [f"{_who(node)}: {count_text(node.refused, 'frame')} refused." for node in nodes if node.refused]
    notices += _some(bad, "more nodes sent what was refused")
    if refused:
        counts = sorted(refused.items(), key=lambda one: -one[1])
        reasons = ", ".join(f"{REFUSED.get(why, why.replace('_', ' '))} ({count:,})" for why, count in counts)
        notices.append(f"The hub refused {count_text(sum(refused.values()), 'request')}: {reasons}.")
    return notices


def _absent(meta: Mapping[str, Any], nodes: Sequence[NodeInfo]) -> list[str]:
    expected = meta.get("nnodes")
    if not isinstance(expected, int) or not 1 < expected <= 1 << 20:
        return []
    missing = sorted(set(range(1, expected)) - {node.node for node in nodes})
    if not missing:
        return []
    if len(missing) == 1:
        return [f"Node {missing[0]} never joined; there is nothing of it here."]
    shown = ", ".join(str(number) for number in missing[:SHOWN])
    more = f" and {len(missing) - SHOWN:,} more" if len(missing) > SHOWN else ""
    return [f"Nodes {shown}{more} never joined; there is nothing of them here."]


def _lost(node: NodeInfo, hosts: Mapping[str, str]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(node.heard_wall_ns / 1e9))
    after = f"; host {hosts[node.replaced_by]} took its place" if node.replaced_by in hosts else ""
    return f"{_who(node)} was lost: it was last heard of at {when} and never said how it ended{after}."


def _ended(node: NodeInfo) -> str:
    bye = node.bye or {}
    code = f" (exit code {bye['exit_code']})" if bye.get("exit_code") is not None else ""
    how = "was interrupted" if bye.get("status") == "interrupted" else str(bye.get("status"))
    return f"{_who(node)} {how}{code}."


def _clock(node: NodeInfo) -> str:
    seconds = (node.offset_ns or 0) / 1e9
    way = "ahead" if seconds > 0 else "behind"
    return f"{_who(node)}: its clock is {abs(seconds):,.1f} s {way}; times are shown by this host's."


def _who(node: NodeInfo) -> str:
    return f"Node {node.node} (host {node.host})"


def _some(sentences: list[str], more: str) -> list[str]:
    rest = len(sentences) - SHOWN
    return sentences if rest <= 0 else [*sentences[:SHOWN], f"{rest:,} {more}."]
