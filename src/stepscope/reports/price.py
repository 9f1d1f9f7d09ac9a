"""What a finding costs, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.records.units import duration_text, ms_text, share_text

__all__ = ["TRIVIAL_SHARE", "finding_price", "price_text"]

TRIVIAL_SHARE = 0.01
"""Of the time: costs below are not worth a sentence."""
TRIVIAL_LOSS_S = 1.0
"""Of training: a loss below is not worth one either."""


def finding_price(kind: str, cost: Mapping[str, Any], evidence: Mapping[str, Any], *, over: bool) -> str | None:
    """What a finding about a run costs, by its kind; None when that is not worth a sentence.

    While a run goes on only its last steps are looked at: a checkpoint may lie before them.
    """
    share, seconds = cost.get("share"), cost.get("seconds")
    if kind == "insufficient_data" or not share or seconds is None:
        return None
    if kind != "rank_crashed" or "checkpoint_step" not in evidence:  # a death that only the watchdog saw: a standstill
        return price_text(cost, over=over)
    if seconds < TRIVIAL_LOSS_S:
        return None
    lost, saved = f"{duration_text(seconds)} of training is lost", evidence.get("checkpoint_step")
    if saved is not None:
        return f"{lost}: the last checkpoint seen was in step {saved}."
    return f"{lost}: no checkpoint was seen." if over else f"at least {lost}: no checkpoint in the last steps."


def price_text(cost: Mapping[str, Any], *, over: bool = True) -> str | None:
    """``61% of the time (2.5 s); without it …``, or where no remedy saves all of it ``at most 61% …``.

    ``over``: whether nothing more can be lost.
    """
    share, seconds = cost.get("share"), cost.get("seconds")
    if not share or seconds is None or share < TRIVIAL_SHARE:
        return None
    fixed = cost.get("if_fixed") or {}
    step_ms, speedup = fixed.get("step_ms"), fixed.get("speedup")
    then = ""
    if step_ms and speedup and cost.get("up_to"):
        then = f"; without all of it {_step_then(step_ms, speedup)}"
    elif step_ms and speedup:
        then = f"; without it {_step_then(step_ms, speedup)}"
    spent = duration_text(seconds) + ("" if over else " so far")
    most_share, most_seconds = cost.get("most_share"), cost.get("most_seconds")
    if most_share and most_seconds is not None and most_share > share:
        gain = f"; what helps gains {share_text(share)}, typically"
        then = f": a step then takes {ms_text(step_ms)}, {speedup:.2f}× as fast" if step_ms and speedup else ""
        return f"at most {share_text(most_share)} of the time ({duration_text(most_seconds)}){gain}{then}."
    return f"{'up to ' if cost.get('up_to') else ''}{share_text(share)} of the time ({spent}){then}."


def _step_then(step_ms: float, speedup: float) -> str:
    """Means: what is lost in some steps only does not show in the median step."""
    return f"a step takes {ms_text(step_ms)} instead of {ms_text(step_ms * speedup)} on average, {speedup:.2f}× as fast"
