"""Numbers as people read them: few digits, a unit, no false precision.  Every sentence and table uses these."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "bytes_text",
    "count_text",
    "duration_text",
    "ms_text",
    "named_ranks",
    "ns_text",
    "number_text",
    "rate_text",
    "share_text",
    "span_texts",
]

MINUTE_S = 60
HOUR_S = 3600


def ms_text(ms: float | None) -> str:
    """``83 µs``, ``2.04 ms``, ``69.0 ms``, ``950 ms``, ``12.3 s``."""
    if ms is None:
        return "–"
    if ms == 0:
        return "0"
    if ms < 0.9995:
        return f"{ms * 1000:.0f} µs"
    if ms < 9.995:
        return f"{ms:.2f} ms"
    if ms < 99.95:
        return f"{ms:.1f} ms"
    if ms < 9999.5:
        return f"{ms:,.0f} ms"
    return f"{ms / 1000:,.1f} s"


def ns_text(ns: float | None) -> str:
    """``0``, ``850 ns``, ``2.31 µs``, ``83.0 µs``; from a millisecond on as ``ms_text``."""
    if ns is None:
        return ms_text(None)
    if ns < 0:
        return f"-{ns_text(-ns)}"
    if ns >= 999_500:
        return ms_text(ns / 1e6)
    if ns < 999.5:
        return f"{ns:.0f} ns" if ns else "0"
    digits = 2 if ns < 9_995 else 1 if ns < 99_950 else 0
    return f"{ns / 1000:.{digits}f} µs"


def duration_text(seconds: float | None) -> str:
    """``420 ms``, ``8.2 s``, ``3 min 05 s``, ``2 h 07 min``."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return ms_text(seconds * 1000)
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min {whole % MINUTE_S:02d} s"
    return f"{whole // HOUR_S:,} h {whole % HOUR_S // MINUTE_S:02d} min"


def bytes_text(count: float | None) -> str:
    """Binary units, as ``free`` and ``nvidia-smi`` have them: ``512 MiB``, ``1.6 GiB``."""
    if count is None:
        return "–"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def span_texts(first: float, last: float) -> tuple[str, str]:
    """Two sizes in one unit, so fine that what lies between them can be seen: ``1,034 MiB`` and ``1,383 MiB``."""
    size, units = max(first, last), ["B", "KiB", "MiB", "GiB", "TiB"]
    power = 0
    while size >= 1000 and power < len(units) - 1:
        size, power = size / 1024, power + 1
    if power and abs(last - first) < 1024**power:
        power -= 1
    digits = 1 if power and abs(last - first) < 100 * 1024**power else 0
    first_text, last_text = (f"{value / 1024**power:,.{digits}f} {units[power]}" for value in (first, last))
    return first_text, last_text


def number_text(number: float) -> str:
    """``0.083``, ``2.04``, ``25.5``, ``1,260``."""
    if number < 0.9995:
        return f"{number:.3f}"
    if number < 9.995:
        return f"{number:.2f}"
    return f"{number:.1f}" if number < 99.95 else f"{number:,.0f}"


def rate_text(per_second: float) -> str:
    return f"{bytes_text(per_second)}/s"


def share_text(share: float | None) -> str:
    """``43%``; below one per cent ``<1%``."""
    if share is None:
        return "–"
    if 0 < share < 0.01:
        return "<1%"
    return f"{share:.0%}"


def count_text(count: int, thing: str) -> str:
    """``1 rank``, ``1,024 ranks``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def named_ranks(ranks: Sequence[int]) -> str:
    """``Rank 3``, ``Ranks 1, 2 and 5``; beyond eight the first few and a count."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    if len(ranks) > 8:
        return f"Ranks {', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} more"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
