"""Block scales in the order that tensor cores read them: tiles of 128 rows by 4 scales; for export alone.

The scale of row m and block k lies at ((m/128)*ceil(K/4) + k/4)*512 + (m%32)*16 + ((m%128)/32)*4 + k%4, as cuBLAS,
FlashInfer, TransformerEngine and torchao store it. Pools and ``QuantizedTensor`` keep scales row by row.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

__all__ = ["swizzle_scales", "unswizzle_scales"]

_ROWS, _COLUMNS = 128, 4


def swizzle_scales(scales: Tensor) -> Tensor:
    """Swizzle scales [..., rows, blocks], leading axes counted as rows.

    Args:
        scales: uint8, raw E4M3 or E8M0 bits.

    Returns:
        uint8 [128*ceil(rows/128) * 4*ceil(blocks/4)], zeros where the tiles reach beyond the scales.

    Raises:
        ValueError: fewer than two axes, or no element.
    """
    if scales.dim() < 2 or not scales.numel():
        raise ValueError(f"scales: expected [..., rows, blocks], got {list(scales.shape)}")
    linear = scales.flatten(0, -2)
    linear = pad(linear, (0, -linear.shape[1] % _COLUMNS, 0, -linear.shape[0] % _ROWS))
    tiles = linear.view(linear.shape[0] // _ROWS, 4, 32, linear.shape[1] // _COLUMNS, _COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def unswizzle_scales(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    """Scales [rows, blocks] from what :func:`swizzle_scales` gave.

    Raises:
        ValueError: a length that these rows and blocks do not have.
    """
    row_tiles, column_tiles = -(-rows // _ROWS), -(-blocks // _COLUMNS)
    if swizzled.shape != (row_tiles * column_tiles * _ROWS * _COLUMNS,):
        raise ValueError(
            f"swizzled: expected [{row_tiles * column_tiles * _ROWS * _COLUMNS}] for {rows} rows of {blocks} scales, "
            f"got {list(swizzled.shape)}"
        )
    tiles = swizzled.view(row_tiles, column_tiles, 32, 4, _COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * _ROWS, column_tiles * _COLUMNS)[:rows, :blocks]
