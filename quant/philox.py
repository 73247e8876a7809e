"""Random bits of stochastic rounding: Philox4x32-10, counted by what is rounded and not by where it runs.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11). The key is a seed of 64 bits. The
counter holds, from its low word on: the index of the element within its layer's [heads, d_v, d_k], 64 bits;
the tokens that the sequence has seen, 32; a hash of sequence and layer, 32. Word 0 of the block is the
element's; a rounding takes its low bits. So the bits depend neither on the slot, the batch nor the tile, and
they change from one write of a state to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Noise", "hash_stream", "philox4x32", "spread_word"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_CPU_PIECE = 2**14


def philox4x32(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32.

    Args:
        seed: key, its low 64 bits count.
        counter: four words of 32 bits, lowest first, int64 tensors that broadcast to one shape.

    Returns:
        Four words in [0, 2^32), int64, of that shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(10):
        # A product of two words wraps in int64 without losing a bit of its 64.
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high_a, high_b = (a >> 32) & _MASK, (b >> 32) & _MASK
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, b & _MASK, high_a ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def hash_stream(sequence: int | Tensor, layer: int | Tensor) -> Tensor:
    """32 bits that tell sequence and layer: word 0 of Philox with key 0 at counter (sequence, 64 bits; layer; 0).

    Args:
        sequence: id of a sequence, int or int64 tensor; its low 64 bits count.
        layer: recurrent layer, counted from 0.

    Returns:
        int64 in [0, 2^32), the shape that both broadcast to.
    """
    ids, layers = (torch.as_tensor(t, dtype=torch.int64) for t in (sequence, layer))
    return philox4x32(0, (ids & _MASK, ids >> 32 & _MASK, layers & _MASK, torch.zeros_like(layers)))[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Noise:
    """Where the random bits of one write come from.

    Attributes:
        seed: of the plan, 64 bits.
        tokens: tokens that each sequence has seen, an int or int64 [n]; the low 32 bits count.
        streams: :func:`hash_stream` of each sequence and the layer, an int or int64 [n].
        first_element: index of the first element within its layer's [heads, d_v, d_k].
    """

    seed: int
    tokens: int | Tensor = 0
    streams: int | Tensor = 0
    first_element: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.first_element < 2**63:
            raise ValueError(f"first_element: expected 0 to 2^63 - 1, got {self.first_element}")

    def words(self, shape: torch.Size, device: torch.device) -> Tensor:
        """One word for each element of states [n, heads, d_v, d_k]; fewer axes are one sequence.

        Returns:
            int64 of that shape, in [0, 2^32).

        Raises:
            ValueError: more than four axes, or tokens or streams that do not fit n.
        """
        if len(shape) > 4:
            raise ValueError(f"x: expected up to [n, heads, d_v, d_k] for stochastic rounding, got {list(shape)}")
        n = shape[0] if len(shape) == 4 else 1
        inner = shape[-3:]
        size = inner.numel()
        index = torch.arange(size, dtype=torch.int64, device=device) + self.first_element
        rows = {}
        for name in ("tokens", "streams"):
            value = torch.as_tensor(getattr(self, name), dtype=torch.int64, device=device).reshape(-1, 1)
            if len(value) not in (1, n):
                raise ValueError(f"{name}: expected an int or [{n}], got {len(value)} values")
            rows[name] = value & _MASK
        drawn = torch.empty(n, size, dtype=torch.int64, device=device)
        # On a CPU in pieces that stay in its cache: three times as fast.
        piece = _CPU_PIECE if device.type == "cpu" else max(size, 1)
        for target, part in zip(drawn.split(piece, dim=1), index.split(piece), strict=True):
            counter = (part & _MASK, part >> 32 & _MASK, rows["tokens"], rows["streams"])
            target.copy_(philox4x32(self.seed, counter)[0])
        return drawn.reshape(shape)


def spread_word(word: Tensor) -> Tensor:
    """16 random bits for each of four values from one word, as the packed conversions of sm_100a take them.

    Args:
        word: int64 [...], in [0, 2^32).

    Returns:
        int64 [..., 4]: low half, its bits reversed, high half, its bits reversed.
    """
    halves = torch.stack((word & 0xFFFF, word >> 16 & 0xFFFF), dim=-1)
    mirrored = torch.zeros_like(halves)
    for bit in range(16):
        mirrored |= (halves >> bit & 1) << (15 - bit)
    return torch.stack((halves, mirrored), dim=-1).flatten(-2)
