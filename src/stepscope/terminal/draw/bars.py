"""Horizontal bars of an exact length."""

from __future__ import annotations

from stepscope.reports.page import bar

__all__ = ["padded_bar"]


def padded_bar(share: float, width: int) -> str:
    return bar(share, width).ljust(width)
