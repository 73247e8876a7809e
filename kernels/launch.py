"""Every launch configuration in one table, and the flags that all launches share.

Notable: the exact route needs the same tile and number of warps in baseline, replay and flush, because they fix the
order of additions in a row; so a configuration belongs to a head shape and never to a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from driftgate.kernels.contract import HeadShape

__all__ = ["ENABLE_FP_FUSION", "Launch", "choose_launch"]

ENABLE_FP_FUSION = False
"""Passed with every launch: the multiply-adds that the kernels want are written as ``tl.fma``."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Tile and launch parameters of one kernel.

    Attributes:
        block_v: rows of a state that one program holds, a power of two.
        block_k: columns of its tile, the power of two at or above d_k.
        num_warps: warps of a program.
        num_stages: software pipelining depth.
    """

    block_v: int
    block_k: int
    num_warps: int
    num_stages: int

    def flags(self) -> dict[str, int | bool]:
        """Keyword arguments of the launch itself."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": ENABLE_FP_FUSION,
        }


def choose_launch(shape: HeadShape, *, interpreted: bool, alternative: bool = False) -> Launch:
    """Configuration for a head shape.

    Args:
        shape: heads of the layer.
        interpreted: Triton's interpreter costs per program, so one program takes a whole head there.
        alternative: another legal configuration, which adds in another order: for noise floors, never for a plan.
    """
    block_k = max(16, _power_of_two(shape.d_k))
    whole = max(16, _power_of_two(shape.d_v))
    block = whole if interpreted else min(32, whole)
    num_warps = 4 if alternative else 1
    return Launch(block_v=block, block_k=block_k, num_warps=num_warps, num_stages=2)


def _power_of_two(n: int) -> int:
    """Smallest power of two at or above n."""
    return 1 << (n - 1).bit_length()
