"""Number formats for recurrent states: records, catalogue, exact oracle, fast codecs.

``formats`` (records and catalogue) and ``arithmetic`` (named choices), both without torch · ``quantized`` (whole
tensors, every scope, ``QuantizedTensor``) · ``codecs`` (rows of a state pool) and a module for each kind of scale ·
``elements`` (casts) · ``philox`` (random bits) · ``swizzle`` (export of block scales) · ``device`` (Triton) ·
``oracle`` (slow and exact, NumPy). Names that need torch load it when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from driftgate.quant.arithmetic import Arithmetic, BlockChoice, Convention, MxRule, Profile
from driftgate.quant.formats import FORMATS, Format, Rounding, ScaleKind, Scope, get_format

if TYPE_CHECKING:
    from driftgate.quant.codecs import EncodedRows, decode_rows, encode_rows, find_nonfinite_rows
    from driftgate.quant.philox import Noise, hash_stream
    from driftgate.quant.quantized import QuantizedTensor
    from driftgate.quant.swizzle import swizzle_scales, unswizzle_scales

__all__ = [
    "FORMATS",
    "Arithmetic",
    "BlockChoice",
    "Convention",
    "EncodedRows",
    "Format",
    "MxRule",
    "Noise",
    "Profile",
    "QuantizedTensor",
    "Rounding",
    "ScaleKind",
    "Scope",
    "decode_rows",
    "encode_rows",
    "find_nonfinite_rows",
    "get_format",
    "hash_stream",
    "swizzle_scales",
    "unswizzle_scales",
]

_LAZY = {
    "EncodedRows": "codecs",
    "Noise": "philox",
    "QuantizedTensor": "quantized",
    "decode_rows": "codecs",
    "encode_rows": "codecs",
    "find_nonfinite_rows": "codecs",
    "hash_stream": "philox",
    "swizzle_scales": "swizzle",
    "unswizzle_scales": "swizzle",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
