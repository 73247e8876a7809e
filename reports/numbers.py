"""How a number is written: one place decides it for every report.

Notable: undefined numbers read ``n/a``; a KL of exactly 0 reads ``0`` and no other does.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = [
    "NA", "format_interval", "format_kl", "format_number", "format_percent", "format_points", "format_ratio",
]  # fmt: skip

NA = "n/a"


def format_kl(value: float | None) -> str:
    """A KL in nats: three digits, scientific; exactly 0 reads ``0``."""
    if value is None or not math.isfinite(value):
        return NA
    return "0" if value == 0 else f"{value:.2e}"


def format_percent(fraction: float | None, *, digits: int = 2) -> str:
    """A fraction as a percentage."""
    return NA if fraction is None or not math.isfinite(fraction) else f"{100 * fraction:.{digits}f} %"


def format_points(fraction: float | None) -> str:
    """A signed difference of fractions in percentage points; the unit is in the heading."""
    return NA if fraction is None or not math.isfinite(fraction) else f"{100 * fraction + 0.0:+.2f}"


def format_ratio(value: float | None, *, digits: int = 5) -> str:
    """A ratio near 1 with fixed digits, so that a small change stays visible."""
    return NA if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def format_number(value: Any, *, digits: int = 4) -> str:
    """Anything of a record as text: numbers to ``digits`` significant digits, null and non-finite as n/a."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NA
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, list | tuple):
        return ", ".join(format_number(item, digits=digits) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={format_number(item, digits=digits)}" for key, item in value.items())
    return str(value)


def format_interval(low: str, high: str) -> str:
    """Two written bounds as ``[low, high]``; n/a where neither is defined."""
    return NA if low == high == NA else f"[{low}, {high}]"
