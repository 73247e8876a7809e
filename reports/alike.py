"""Texts that differ in their numbers alone, told once: what stands for several plans or tasks is one line.

Notable: a number that is not the same in all of them becomes a range, least and greatest as they were written. Digits
inside names (``nvfp4/fp32@16``, ``I1``, ``p99.9``) are no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

__all__ = ["group_alike", "merge_numbers"]

T = TypeVar("T")
_NUMBER = re.compile(r"(?<![\w@/.\-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w@/])")


def group_alike(things: Iterable[T], text: Callable[[T], str]) -> list[list[T]]:
    """Things whose texts differ in numbers alone, together, in the order in which each text is met first."""
    groups: dict[str, list[T]] = {}
    for thing in things:
        groups.setdefault(_NUMBER.sub("#", text(thing)), []).append(thing)
    return list(groups.values())


def merge_numbers(texts: Sequence[str]) -> str:
    """One text for all, with a range wherever they have unlike numbers.

    Args:
        texts: one or more that are the same but for their numbers.
    """
    places = iter(zip(*(_NUMBER.findall(text) for text in texts), strict=True))
    return _NUMBER.sub(lambda _: _tell_range(next(places)), texts[0])


def _tell_range(numbers: Sequence[str]) -> str:
    low, high = min(numbers, key=_read), max(numbers, key=_read)
    return low if _read(low) == _read(high) else f"{low}…{high}"


def _read(number: str) -> float:
    return float(number.replace(",", ""))
