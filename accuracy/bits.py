"""Equality of bits, counted: how many elements differ, by how many ulps, and where the first one is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["BitTally", "ulp_distance"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def ulp_distance(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Representable numbers between two tensors of one type, elementwise, int64; of raw bytes, their difference.

    +0 and -0 are at distance 0 though their bits differ; a NaN is as far away as its bits are.
    """
    return (_ordered(expected) - _ordered(got)).abs()


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats that they stand for."""
    if not x.is_floating_point():
        return x.long()
    bits = x.contiguous().view(_INTEGERS[x.element_size()]).long()
    return torch.where(bits < 0, -(bits & ((1 << (8 * x.element_size() - 1)) - 1)), bits)


class BitTally:
    """What the comparisons of one case found.

    Attributes:
        n_compared: elements compared, by what they are (``output``, ``checkpoint``, ``copy``).
        different: elements whose bits differ, or that are not finite, by what they are; without those at 0.
        max_ulp: greatest distance of one of them.
        first: the first that differs: step, row, head, element, expected, got, what; None where nothing does.
        histogram: differing elements by distance: ``0`` (signs of zeros), ``1``, ``2``, ``3-4``, ``5-8`` …
        looks_like: the cause that the differences look like (``causes.py``).
    """

    def __init__(self) -> None:
        self.n_compared: dict[str, int] = {}
        self.different: dict[str, int] = {}
        self.max_ulp = 0
        self.first: dict[str, Any] | None = None
        self.histogram: dict[str, int] = {}
        self.looks_like = "unknown"

    @property
    def n_different(self) -> int:
        """Elements that differ."""
        return sum(self.different.values())

    def compare(self, what: str, expected: torch.Tensor, got: torch.Tensor, *, step: int, rows: Sequence[int]) -> None:
        """Compare bits.

        Args:
            what: name of the figure.
            expected: [len(rows), heads, ...].
            got: as ``expected``; a value that is not finite counts as different.
            step: decode step, counted from 0; -1 for before the first.
            rows: row of the batch that each entry of the leading axis belongs to; -1 for a slot that no row uses.
        """
        if expected.shape != got.shape or expected.dtype != got.dtype:
            raise ValueError(
                f"{what}: expected {tuple(expected.shape)} {expected.dtype}, got {tuple(got.shape)} {got.dtype}"
            )
        self.n_compared[what] = self.n_compared.get(what, 0) + expected.numel()
        integers = _INTEGERS[expected.element_size()]
        different = expected.contiguous().view(integers) != got.contiguous().view(integers)
        self._add(what, expected, got, different | ~got.isfinite(), step, rows)

    def compare_bytes(
        self, what: str, expected: torch.Tensor, got: torch.Tensor, *, step: int, rows: Sequence[int]
    ) -> None:
        """Compare bits of tensors that may hold NaN, as ``compare`` does for numbers."""
        integers = _INTEGERS[expected.element_size()]
        self.compare(what, expected.contiguous().view(integers), got.contiguous().view(integers), step=step, rows=rows)

    def require_finite(self, what: str, got: torch.Tensor, *, step: int, rows: Sequence[int]) -> None:
        """Count elements [len(rows), heads, ...] that are not finite as different; nothing else is known of them."""
        self._add(what, torch.zeros_like(got), got, ~got.isfinite(), step, rows)

    def require_other(self, what: str, one: torch.Tensor, other: torch.Tensor, *, step: int, row: int) -> None:
        """Count all elements [heads, ...] as wrong if two tensors are equal that must not be."""
        self.n_compared[what] = self.n_compared.get(what, 0) + one.numel()
        if torch.equal(one, other):
            everything = torch.ones_like(one, dtype=torch.bool)[None]
            self._add(what, one[None], other[None], everything, step, [row])

    def _add(
        self,
        what: str,
        expected: torch.Tensor,
        got: torch.Tensor,
        different: torch.Tensor,
        step: int,
        rows: Sequence[int],
    ) -> None:
        n = int(different.sum())
        if not n:
            return
        self.different[what] = self.different.get(what, 0) + n
        distance = ulp_distance(expected[different], got[different])
        self.max_ulp = max(self.max_ulp, int(distance.max()))
        buckets, counts = torch.unique(_bucket(distance), return_counts=True)
        for bucket, count in zip(buckets.tolist(), counts.tolist(), strict=True):
            name = _bucket_name(bucket)
            self.histogram[name] = self.histogram.get(name, 0) + count
        if self.first is None:
            row, *rest = different.nonzero()[0].tolist()
            head, *element = rest or [0]
            at = (row, *rest)
            self.first = {
                "step": step,
                "row": rows[row],
                "head": head,
                "element": element,
                "expected": _plain(expected[at].item()),
                "got": _plain(got[at].item()),
                "what": what,
            }

    def report(self) -> dict[str, Any] | None:
        """``first`` with the cause and the histogram of all, as results.json keeps it."""
        if self.first is None:
            return None
        return {**self.first, "looks_like": self.looks_like, "ulp_histogram": self.histogram}


def _bucket(distance: torch.Tensor) -> torch.Tensor:
    """0 for 0, else 1 + ceil(log2 d), which are the distances 1, 2, 3-4, 5-8 and so on."""
    return torch.where(distance == 0, 0, 1 + distance.clamp(min=1).double().log2().ceil().long())


def _bucket_name(bucket: int) -> str:
    if bucket < 3:
        return str(bucket)
    return f"{2 ** (bucket - 2) + 1}-{2 ** (bucket - 1)}"


def _plain(value: float) -> float | str:
    """A number that JSON holds; others by name."""
    return value if math.isfinite(value) else repr(value)
