"""Number formats of recurrent states: one frozen record each, everything else derived; no torch at import.

A format says what the elements are, how they are stored and where their scales lie; how to compute codes is
the codec of the same name in :mod:`driftgate.quant.codecs`. A new format is one record in ``_RECORDS`` and
one codec there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from driftgate.errors import unknown_name

if TYPE_CHECKING:
    import torch

    from driftgate.quant.arithmetic import Arithmetic
    from driftgate.quant.quantized import QuantizedTensor

__all__ = ["FORMATS", "Format", "Rounding", "ScaleKind", "Scope", "get_format"]

# Bytes of one stored element of each torch dtype that codes may have.
_STORAGE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1}


class ScaleKind(Enum):
    """Which scales are stored beside the codes."""

    NONE = "none"
    SCOPE = "scope"  # one FP32 decode scale per scope: x = code * scale
    BLOCK = "block"  # a power of two per block, E8M0: x = code * block_scale
    BLOCK_AND_SCOPE = "block+scope"  # E4M3 per block, FP32 per scope: x = code * (block_scale * scale)


class Scope(Enum):
    """How many elements of x [slots, heads, d_v, d_k] share one FP32 scale."""

    TENSOR = "tensor"
    SLOT = "slot"
    HEAD = "head"
    ROW = "row"  # the elements along the axis of the scale blocks, by default one d_v row over d_k
    ROW_32 = "1x32"  # 32 elements of a row; formats with an FP32 scale a scope and no block scales


class Rounding(Enum):
    """How a value between two codes is rounded."""

    NEAREST = "nearest"  # IEEE round to nearest, ties to the even code; beyond the greatest value: saturate
    STOCHASTIC = "stochastic"  # up or down at random, unbiased; scales stay nearest


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        name: canonical name, as plans print it.
        title: one line for people.
        bits: bits of one element without its scales; orders formats by width.
        max_value: greatest finite magnitude of an element, before scaling.
        storage: torch dtype name of the codes; ``uint8`` holds raw bits, two elements a byte where bits is 4.
        scale: which scales are stored.
        block: elements that share one block scale, None without block scales.
        stochastic: whether elements can be rounded at random.
        aliases: other names that :func:`get_format` takes.
    """

    name: str
    title: str
    bits: int
    max_value: float
    storage: str
    scale: ScaleKind = ScaleKind.NONE
    block: int | None = None
    stochastic: bool = True
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.storage not in _STORAGE_BYTES:
            raise ValueError(f"storage: expected one of {sorted(_STORAGE_BYTES)}, got {self.storage!r}")
        if self.bits < 1 or 8 * _STORAGE_BYTES[self.storage] % self.bits:
            raise ValueError(f"bits: expected a divisor of the {self.storage} width, got {self.bits}")
        if self.max_value <= 0:
            raise ValueError(f"max_value: expected a positive number, got {self.max_value}")
        if (self.block is not None) != self.block_scaled:
            raise ValueError(f"block: expected a size exactly for a block scale, got {self.block}")
        if self.block is not None and (self.block < 1 or self.block % self.elements_per_code):
            raise ValueError(f"block: expected a multiple of {self.elements_per_code}, got {self.block}")

    @property
    def low_precision(self) -> bool:
        """Whether an element is narrower than FP32."""
        return self.bits < 32

    @property
    def scaled(self) -> bool:
        """Whether scales are stored beside the codes."""
        return self.scale is not ScaleKind.NONE

    @property
    def block_scaled(self) -> bool:
        """Whether blocks along a row have scales of their own."""
        return self.scale in (ScaleKind.BLOCK, ScaleKind.BLOCK_AND_SCOPE)

    @property
    def scope_scaled(self) -> bool:
        """Whether each scope has an FP32 scale."""
        return self.scale in (ScaleKind.SCOPE, ScaleKind.BLOCK_AND_SCOPE)

    @property
    def elements_per_code(self) -> int:
        """Elements that one stored code holds: 2 where 4-bit elements are packed in bytes, else 1."""
        return 8 * _STORAGE_BYTES[self.storage] // self.bits

    @property
    def storage_dtype(self) -> torch.dtype:
        """The torch dtype of the codes."""
        import torch

        dtype = getattr(torch, self.storage)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def blocks_per_row(self, d_k: int) -> int:
        """Block scales of a row of d_k elements (the last block may be padded); 0 without block scales."""
        _check_row_length(d_k)
        return 0 if self.block is None else -(-d_k // self.block)

    def codes_per_row(self, d_k: int) -> int:
        """Length of the last axis of the codes of a row of d_k elements; packed blocks are stored whole."""
        _check_row_length(d_k)
        if self.block is None or self.elements_per_code == 1:
            return d_k
        return self.blocks_per_row(d_k) * self.block // self.elements_per_code

    def bytes_per_row(self, d_k: int) -> int:
        """Bytes that a state pool stores for a row of d_k elements: codes, block scales, FP32 row scale."""
        code_bytes = self.codes_per_row(d_k) * _STORAGE_BYTES[self.storage]
        return code_bytes + self.blocks_per_row(d_k) + (4 if self.scope_scaled else 0)

    def quantize(
        self,
        x: torch.Tensor,
        dim: int = -1,
        scope: str | Scope | None = None,
        rounding: str | Rounding = Rounding.NEAREST,
        seed: int | None = None,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> QuantizedTensor:
        """Store x in this format; see :func:`driftgate.quant.quantized.quantize`."""
        from driftgate.quant.quantized import quantize

        return quantize(self, x, dim=dim, scope=scope, rounding=rounding, seed=seed, arithmetic=arithmetic)


def _check_row_length(d_k: int) -> None:
    if d_k < 1:
        raise ValueError(f"d_k: expected 1 or more, got {d_k}")


_RECORDS = (
    Format("fp32", "IEEE binary32", 32, (2 - 2**-23) * 2.0**127, "float32", stochastic=False),
    Format("bf16", "bfloat16, nearest even", 16, (2 - 2**-7) * 2.0**127, "bfloat16"),
    Format("fp16", "IEEE binary16, nearest even; overflow becomes inf and is reported", 16, 65504.0, "float16"),
    Format("int16", "INT16 within ±32767, one FP32 scale per row", 16, 32767.0, "int16", ScaleKind.SCOPE),
    Format(
        "fp8",
        "FP8 E4M3FN, saturating, one FP32 scale per row",
        8,
        448.0,
        "uint8",
        scale=ScaleKind.SCOPE,
        aliases=("fp8_e4m3",),
    ),
    Format("fp8_e5m2", "FP8 E5M2, saturating, one FP32 scale per row", 8, 57344.0, "uint8", ScaleKind.SCOPE),
    Format("int8", "INT8 within ±127, one FP32 scale per row", 8, 127.0, "int8", ScaleKind.SCOPE),
    Format(
        "mxfp8",
        "MXFP8: E4M3FN, one power of two per 32 elements",
        8,
        448.0,
        "uint8",
        scale=ScaleKind.BLOCK,
        block=32,
        stochastic=False,
    ),
    Format(
        "nvfp4",
        "NVFP4: E2M1, one E4M3 scale per 16 elements, one FP32 scale per row",
        4,
        6.0,
        "uint8",
        scale=ScaleKind.BLOCK_AND_SCOPE,
        block=16,
    ),
    Format(
        "mxfp4",
        "MXFP4: E2M1, one power of two per 32 elements",
        4,
        6.0,
        "uint8",
        scale=ScaleKind.BLOCK,
        block=32,
        stochastic=False,
    ),
)


def _index(records: Iterable[Format]) -> dict[str, Format]:
    """Records by canonical name and alias; a name used twice is refused."""
    by_name: dict[str, Format] = {}
    for record in records:
        for name in (record.name, *record.aliases):
            if name in by_name:
                raise ValueError(f"format name {name!r} is used twice")
            by_name[name] = record
    return by_name


_BY_NAME = _index(_RECORDS)

#: Every format by its canonical name, widest first.
FORMATS: Mapping[str, Format] = MappingProxyType({record.name: record for record in _RECORDS})


def get_format(name: str) -> Format:
    """The format of that name or alias (``fp8_e4m3`` is ``fp8``).

    Raises:
        UsageError: no format has that name; the message lists near ones.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise unknown_name("format", name, _BY_NAME) from None
