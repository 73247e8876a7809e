"""Every launch configuration in one table, and the flags that all launches share.

Notable: the exact route needs the same tile and number of warps in baseline, replay and flush, because they fix the
order of additions in a row; so its configuration belongs to a head shape and never to a plan. Readouts that form no
state (output_only, state_output) have their own launch and configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from driftgate.kernels.contract import HeadShape, Recurrence
from driftgate.quant.formats import get_format

__all__ = ["ENABLE_FP_FUSION", "Launch", "choose_key_launch", "choose_launch", "choose_read_launch"]

ENABLE_FP_FUSION = False
"""Of exact routes: the multiply-adds that they want are written as ``tl.fma``. Readouts of no promised bits fuse."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Tile and launch parameters of one kernel.

    Attributes:
        block_v: rows of a state that one program holds, a power of two.
        block_k: columns of its tile, the power of two at or above d_k.
        num_warps: warps of a program.
        num_stages: software pipelining depth.
        fuse: whether the compiler may contract a product and an addition; passed with every launch.
    """

    block_v: int
    block_k: int
    num_warps: int
    num_stages: int
    fuse: bool = ENABLE_FP_FUSION

    def flags(self) -> dict[str, int | bool]:
        """Keyword arguments of the launch itself."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.fuse,
        }


def choose_launch(shape: HeadShape, *, interpreted: bool, alternative: bool = False) -> Launch:
    """Configuration for a head shape.

    Args:
        shape: heads of the layer.
        interpreted: Triton's interpreter costs per program, so one program takes a whole head there.
        alternative: another legal configuration, which adds in another order and contracts products and additions:
            for noise floors, never for a plan.
    """
    block_k = max(16, _power_of_two(shape.d_k))
    whole = max(16, _power_of_two(shape.d_v))
    block = whole if interpreted else min(max(16, 4096 // block_k), 64, whole)
    num_warps = max(1, block * block_k // 4096) * (4 if alternative else 1)
    return Launch(block_v=block, block_k=block_k, num_warps=num_warps, num_stages=2, fuse=alternative)


def choose_key_launch(shape: HeadShape) -> Launch:
    """Configuration of the products of buffered keys that all tiles of a readout share; it holds no state."""
    block_k = max(16, _power_of_two(shape.d_k))
    return Launch(block_v=1, block_k=block_k, num_warps=1, num_stages=2, fuse=True)


_READ_ELEMENTS = {
    (Recurrence.GDN, False): 4096,
    (Recurrence.GDN, True): 2048,
    (Recurrence.KDA, False): 2048,
    (Recurrence.KDA, True): 2048,
    (Recurrence.MAMBA2, False): 4096,
    (Recurrence.MAMBA2, True): 8192,
}
"""Elements of a tile that a warp multiplies at a time, by recurrence and whether an element has 8 bits or fewer."""


def choose_read_launch(shape: HeadShape, recurrence: Recurrence, read: str, *, interpreted: bool) -> Launch:
    """Configuration of a readout between flushes that does not have to give the baseline's bits.

    Args:
        shape: heads of the layer.
        recurrence: which.
        read: format that is read.
        interpreted: as ``choose_launch`` has it.
    """
    if interpreted:
        return replace(choose_launch(shape, interpreted=True), fuse=True)
    block_k = max(16, _power_of_two(shape.d_k))
    elements = _READ_ELEMENTS[recurrence, get_format(read).bits <= 8]
    block = min(max(16, elements // block_k), 64, max(16, _power_of_two(shape.d_v)))
    return Launch(block_v=block, block_k=block_k, num_warps=1, num_stages=2, fuse=True)


def _power_of_two(n: int) -> int:
    """Smallest power of two at or above n."""
    return 1 << (n - 1).bit_length()
