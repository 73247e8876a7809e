"""A digest of the bits of logits over many steps, formed on the device: was a rerun bit-equal?"""

from __future__ import annotations

import torch

__all__ = ["LogitDigest"]


class LogitDigest:
    """Sum of bits times odd weights, chained over steps by an odd factor; int64 arithmetic that wraps.

    A single flipped bit always changes it; it guards against mistakes, not against an adversary.

    Args:
        device: of the logits.
    """

    FACTOR = 6364136223846793005

    def __init__(self, device: torch.device | str) -> None:
        self._sum = torch.zeros((), dtype=torch.int64, device=device)
        self._weights: torch.Tensor | None = None

    def add(self, logits: torch.Tensor) -> None:
        """Take in the logits of one step, any shape, which stays the same, float32 or 16 bits."""
        bits = logits.contiguous().view(torch.int16 if logits.element_size() == 2 else torch.int32).flatten().long()
        if self._weights is None or len(self._weights) != len(bits):
            self._weights = torch.arange(1, 2 * len(bits), 2, device=bits.device)
        self._sum = self._sum * self.FACTOR + (bits * self._weights).sum()

    def value(self) -> int:
        """The digest so far; a synchronisation of a GPU."""
        return int(self._sum)
