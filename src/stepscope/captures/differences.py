"""What the slow rank of a capture does longer than a median rank, or than in a baseline: RankTimes → differences.

The slow rank is the one that works longest, which the others wait for; a rank of median work is its peer.  Named is the
innermost operator, kernel, layer or line that explains at least half of the difference: what is further outside says
less, and what explains less is not why.  If nothing does, it is the phase, or all of the step.  This one comes first.

Load on the machine may even out how long ranks work.  An operator that takes much of each step on one rank, and that no
other rank runs, is named even then, if they call all others equally often.

With the baseline of the run, an earlier capture, a rank is compared with itself if it was captured then, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from stepscope.captures.rank_times import Names, Piece, RankTimes
from stepscope.judge import thresholds
from stepscope.records.capture import Difference
from stepscope.records.text import ns_text, phase_place, printable
from stepscope.traces.host.stalls import is_region
from stepscope.traces.model.kernel_names import fitted, short_name

__all__ = ["changes_of", "differences_of"]

ALSO_LISTED = 8
LONGEST_NAME = 120
SHOWN_NAME = 40
"""Of a kernel, in a sentence."""

Key = tuple[str, str, str, str, str]


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """What is compared."""

    slow: RankTimes
    peer: RankTimes
    baseline: str = ""
    """``the baseline of steps 20 to 29``, from which the peer is; empty: it is another rank in the same steps."""

    @property
    def extra_ns(self) -> int:
        return self.slow.work_ns - self.peer.work_ns

    @property
    def other(self) -> str:
        return "the baseline" if self.baseline else f"rank {self.peer.rank}"

    def sentence(self, extra_ns: int, where: str, end: str = "") -> str:
        """``where``: `` in aten::mm in backward``; ``end``: a further clause."""
        spends = f"Rank {self.slow.rank} spends {ns_text(extra_ns)} more per step"
        if not self.baseline:
            return f"{spends} than rank {self.peer.rank}{where}{end}."
        whose = "in" if self.peer.rank == self.slow.rank else f"rank {self.peer.rank} in"
        return f"{spends}{where}{',' if ',' in where else ''} than {whose} {self.baseline}{end}."


def differences_of(ranks: Sequence[RankTimes]) -> tuple[Difference, ...]:
    """Compare the rank that works longest with a median rank; empty if there is only one rank.

    If they work equally long, only what one rank alone runs is a difference.
    """
    ranks = [times for times in ranks if times.step_ns]
    if len(ranks) < 2:
        return ()
    slow, peer = _pair(ranks)
    pair = _Pair(slow=slow, peer=peer)
    if not _is_much(pair) or not _in_most_steps(slow, peer):
        return _on_single_rank(ranks)
    found = _explained(pair)
    waits_ns = peer.wait_ns - slow.wait_ns
    if waits_ns >= thresholds.CAPTURE_EXPLAINS * pair.extra_ns:
        found.append(
            Difference(
                what="wait",
                name="",
                rank=peer.rank,
                peer=slow.rank,
                extra_ns=waits_ns,
                text=f"Rank {peer.rank} waits {ns_text(waits_ns)} longer per step for others than rank {slow.rank}.",
            )
        )
    return tuple(found)


def changes_of(ranks: Sequence[RankTimes], before: Sequence[RankTimes], baseline: str) -> tuple[Difference, ...]:
    """What takes longer than in the ``baseline`` (``the baseline of steps 20 to 29``); empty if nothing does.

    The rank that works longest is compared with itself, or with a median rank if it is not in the baseline.
    """
    ranks, before = ([times for times in each if times.step_ns] for each in (ranks, before))
    if not ranks or not before:
        return ()
    slow = min(ranks, key=lambda times: (-times.work_ns, times.rank))
    median_ns = median_low(times.work_ns for times in before)
    peer = next((times for times in before if times.rank == slow.rank), None) or next(
        times for times in before if times.work_ns == median_ns
    )
    pair = _Pair(slow=slow, peer=peer, baseline=baseline)
    if slow.stacked != peer.stacked or not _is_much(pair) or not _in_most_steps_since(slow, peer):
        return ()
    return tuple(_explained(pair))


def _is_much(pair: _Pair) -> bool:
    share_ns = thresholds.CAPTURE_STEP_SHARE * pair.slow.step_ns
    return pair.extra_ns >= max(share_ns, thresholds.CAPTURE_FLOOR_NS)


def _on_single_rank(ranks: Sequence[RankTimes]) -> tuple[Difference, ...]:
    """The operator that takes most of each step on a rank while no other rank runs it anywhere; empty if none is large.

    If another rank runs something in its place, or calls what both run more or less often, they do different work by
    design (pipelines, experts, kernels that were chosen by measuring): that is no difference.
    """
    found: list[tuple[int, Piece, _Pair]] = []
    for slow in ranks:
        others = [times for times in ranks if times is not slow]
        what = "kernel" if slow.on_device else "operator"
        elsewhere = {piece.name for times in others for piece in times.pieces if piece.what == what}
        here = {piece.name for piece in slow.pieces if piece.what == what}
        alone = [piece for piece in slow.pieces if piece.what == what and piece.name not in elsewhere]
        instead = (piece for times in others for piece in times.pieces if piece.what == what and piece.name not in here)
        most_ns = max((piece.work_ns for piece in alone), default=0)
        instead_ns = max((piece.work_ns for piece in instead), default=0)
        if most_ns < thresholds.CAPTURE_ALONE_SHARE * slow.step_ns or instead_ns >= most_ns / 2:
            continue
        if not all(_alike(slow, times, what) for times in others):
            continue
        explaining = [piece for piece in alone if piece.work_ns >= thresholds.CAPTURE_EXPLAINS * most_ns]
        decisive = max(explaining, key=lambda piece: (piece.depth, piece.work_ns))
        if decisive.in_steps == len(slow.steps) >= thresholds.CAPTURE_ALONE_STEPS:
            peer = sorted(others, key=lambda times: (-times.work_ns, times.rank))[len(others) // 2]
            found.append((decisive.work_ns, decisive, _Pair(slow=slow, peer=peer)))
    if not found:
        return ()
    work_ns, piece, pair = max(found, key=lambda each: (each[0], -each[2].slow.rank))
    return (_difference(piece, None, pair, work_ns),)


def _alike(slow: RankTimes, other: RankTimes, what: str) -> bool:
    """Whether nearly all their work in operators that both run is in those that both call equally often per step."""
    calls, own_ns = zip(*(_by_name(times, what) for times in (slow, other)), strict=True)
    both = calls[0].keys() & calls[1].keys()
    steps, others = len(slow.steps), len(other.steps)
    # A kernel at the edge of the steps may be missing.
    often = {name for name in both if 2 * abs(calls[0][name] * others - calls[1][name] * steps) < steps * others}
    return all(
        sum(of[name] for name in often) >= thresholds.CAPTURE_ALIKE_SHARE * sum(of[name] for name in both)
        for of in own_ns
    )


def _by_name(times: RankTimes, what: str) -> tuple[Counter[str], Counter[str]]:
    """How often each is called in all steps, and how long it works itself in a step."""
    calls, own_ns = Counter[str](), Counter[str]()
    for piece in times.pieces:
        if piece.what == what:
            calls[piece.name] += piece.calls
            own_ns[piece.name] += piece.own_ns
    return calls, own_ns


def _explained(pair: _Pair) -> list[Difference]:
    """What explains that the slow rank works longer, the decisive one first."""
    slow, peer, extra_ns = pair.slow, pair.peer, pair.extra_ns
    of_peer = {_key(piece): piece for piece in peer.pieces}

    def more_ns(piece: Piece) -> int:
        other = of_peer.get(_key(piece))
        return piece.work_ns - (other.work_ns if other is not None else 0)

    def own_more_ns(piece: Piece) -> int:
        other = of_peer.get(_key(piece))
        return piece.own_ns - (other.own_ns if other is not None else 0)

    explaining = [piece for piece in slow.pieces if more_ns(piece) >= thresholds.CAPTURE_EXPLAINS * extra_ns]
    # The function that makes the step is around everything, and says nothing.
    explaining = [piece for piece in explaining if piece.phase or piece.what == "kernel" or not _is_whole(piece, slow)]
    explaining = [piece for piece in explaining if not _is_whole_phase(piece, of_peer, peer)]
    found: list[Difference] = []
    decisive = max(explaining, key=lambda piece: (piece.depth, more_ns(piece)), default=None)
    if decisive is not None:
        found.append(_difference(decisive, of_peer.get(_key(decisive)), pair, more_ns(decisive)))
    if decisive is None or decisive.what == "phase":
        found = [_spread(decisive, pair, more_ns(decisive) if decisive is not None else extra_ns)]
    others = sorted(
        (piece for piece in slow.pieces if piece.what != "phase" and piece is not decisive),
        key=own_more_ns,
        reverse=True,
    )
    found += [
        _difference(piece, of_peer.get(_key(piece)), pair, own_more_ns(piece))
        for piece in others[:ALSO_LISTED]
        if own_more_ns(piece) >= thresholds.CAPTURE_ALSO_SHARE * extra_ns
    ]
    return found


def _pair(ranks: Sequence[RankTimes]) -> tuple[RankTimes, RankTimes]:
    """The rank that works longest, and the one in the middle of the others."""
    slow, *others = sorted(ranks, key=lambda times: (-times.work_ns, times.rank))
    return slow, others[len(others) // 2]


def _in_most_steps(slow: RankTimes, peer: RankTimes) -> bool:
    """Whether it works longer in most of the steps that both have; a single long step is chance."""
    others = dict(zip(peer.steps, peer.work_by_step_ns, strict=False))
    pairs = [
        (own_ns, others[number])
        for number, own_ns in zip(slow.steps, slow.work_by_step_ns, strict=False)
        if number in others
    ]
    longer = sum(own_ns > other_ns for own_ns, other_ns in pairs)
    return len(pairs) < thresholds.CAPTURE_STEPS or longer >= thresholds.CAPTURE_MOST_STEPS * len(pairs)


def _in_most_steps_since(slow: RankTimes, before: RankTimes) -> bool:
    """Whether most of its steps are longer than a usual one of the baseline."""
    if len(slow.work_by_step_ns) < thresholds.CAPTURE_STEPS or not before.work_by_step_ns:
        return True
    usual_ns = median_low(before.work_by_step_ns)
    longer = sum(own_ns > usual_ns for own_ns in slow.work_by_step_ns)
    return longer >= thresholds.CAPTURE_MOST_STEPS * len(slow.work_by_step_ns)


def _key(piece: Piece) -> Key:
    return piece.what, piece.name, piece.phase, piece.line, piece.function


def _is_whole(piece: Piece, slow: RankTimes) -> bool:
    """Whether it is around the phases: nearly all the work of a step is in it, and most of that in what it calls.

    A function between two phases is not deeper than they are, either, but works itself.
    """
    within = [other.depth for other in slow.pieces if other.what == "phase"]
    return (
        bool(within)
        and piece.depth < min(within)
        and piece.work_ns >= thresholds.CAPTURE_WHOLE_SHARE * slow.work_ns
        and piece.own_ns < thresholds.CAPTURE_EXPLAINS * piece.work_ns
    )


def _is_whole_phase(piece: Piece, of_peer: Mapping[Key, Piece], peer: RankTimes) -> bool:
    """Whether it is a layer in which the other rank, too, spends nearly all of the phase: it says no more than that."""
    other = of_peer.get(_key(piece))
    if piece.what != "layer" or other is None:
        return False
    phase_ns = sum(each.work_ns for each in peer.pieces if each.what == "phase" and each.phase == piece.phase)
    return 0 < phase_ns * thresholds.CAPTURE_WHOLE_SHARE <= other.work_ns


def _difference(piece: Piece, other: Piece | None, pair: _Pair, extra_ns: int) -> Difference:
    name = printable(piece.name)[:LONGEST_NAME]
    shown = fitted(short_name(name), SHOWN_NAME) if piece.what == "kernel" else ""
    line = printable(piece.line)[:LONGEST_NAME]
    function = printable(piece.function)[:LONGEST_NAME]
    layer = _layer(piece, other)
    place = _place(piece, shown or name, line, function, layer)
    return Difference(
        what=piece.what,
        name=name,
        shown=shown,
        rank=pair.slow.rank,
        peer=pair.peer.rank,
        extra_ns=extra_ns,
        phase=printable(piece.phase)[:LONGEST_NAME],
        line=line,
        layer=layer[-1] if layer else "",
        text=pair.sentence(extra_ns, f" in {place}", _calls(piece, other, pair)),
    )


def _layer(piece: Piece, other: Piece | None) -> Names:
    """Name the innermost layer, after those around it, in which at least half of the difference is; empty: none."""
    more_ns: dict[Names, int] = {}
    for sign, of_layers in ((1, piece.layers), (-1, other.layers if other is not None else {})):
        for names, spent_ns in of_layers.items():
            for depth in range(len(names)):
                more_ns[names[: depth + 1]] = more_ns.get(names[: depth + 1], 0) + sign * spent_ns
    extra_ns = piece.work_ns - (other.work_ns if other is not None else 0)
    enough = [names for names, ns in more_ns.items() if extra_ns > 0 and ns >= thresholds.CAPTURE_EXPLAINS * extra_ns]
    found = max(enough, key=lambda names: (len(names), more_ns[names]), default=())
    # A compiled region is an operator, too.
    return tuple(printable(name)[:LONGEST_NAME] for name in found if name != piece.name)


def _layer_text(names: Names) -> str:
    """``layer Linear_3``; ``Torch-Compiled Region: 0/1 in layer Block_1``."""
    name, around = names[-1], names[:-1]
    if not is_region(name):
        return f"layer {name}"
    return f"{name} in layer {around[-1]}" if around and not is_region(around[-1]) else name


def _place(piece: Piece, name: str, line: str, function: str, layer: Names) -> str:
    """``aten::mm in backward of layer Linear_3, from train.py:24 (backward)``."""
    where = f" {phase_place(printable(piece.phase))}" if piece.phase else ""
    where += f" of {_layer_text(layer)}" if layer else ""
    if piece.what == "line" and name == function:
        return f"{line} ({function}){where}" if line else f"{function}{where}"
    source = f"{line} ({function})" if line else f"{function}" if function else ""
    what = {"layer": "layer ", "kernel": "kernel "}.get(piece.what, "")
    return f"{what}{name}{where}{', from ' if source else ''}{source}"


def _calls(piece: Piece, other: Piece | None, pair: _Pair) -> str:
    """Whether it runs more often, which is another cause than running longer."""
    if other is None:
        return f"; {pair.other} does not run it there"
    steps, others = max(len(pair.slow.steps), 1), max(len(pair.peer.steps), 1)
    if piece.calls * others >= 2 * other.calls * steps:
        return f"; it runs {piece.calls / steps:.3g} times instead of {other.calls / others:.3g}"
    return ""


def _spread(phase: Piece | None, pair: _Pair, extra_ns: int) -> Difference:
    """No operator or line explains half of it."""
    slow, peer = pair.slow, pair.peer
    why = "no operator, kernel or line explains half of it"
    ratio = _slower(slow, peer)
    elsewhere = _slower(slow, peer, without=phase.phase) if phase is not None else ratio
    if ratio >= thresholds.CAPTURE_SLOWER and elsewhere >= thresholds.CAPTURE_SLOWER:
        phase, extra_ns = None, slow.work_ns - peer.work_ns
        why = f"the same calls take {ratio:.2g} times as long, everywhere: its processor or device is slower, or shared"
    name = printable(phase.phase)[:LONGEST_NAME] if phase is not None else ""
    where = f" {phase_place(name)}" if name else ""
    return Difference(
        what="phase",
        name=name,
        rank=slow.rank,
        peer=peer.rank,
        extra_ns=extra_ns,
        phase=name,
        text=pair.sentence(extra_ns, where, f"; {why}"),
    )


def _slower(slow: RankTimes, peer: RankTimes, without: str | None = None) -> float:
    """How many times as long the operators take that both call equally often, except in one phase."""
    calls = {_key(piece): piece for piece in peer.pieces}
    pairs = [
        (piece.own_ns, other.own_ns)
        for piece in slow.pieces
        if piece.what in ("operator", "kernel")
        and piece.phase != without
        and (other := calls.get(_key(piece))) is not None
        and other.calls * len(slow.steps) == piece.calls * len(peer.steps)
    ]
    whole_ns = sum(other for _, other in pairs)
    if not whole_ns:
        return math.inf if without is not None else 0.0
    return sum(own for own, _ in pairs) / whole_ns
