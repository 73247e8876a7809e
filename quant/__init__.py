"""Number formats for recurrent states: records, catalogue, exact oracle, fast codecs.

``formats`` (records and catalogue, no torch) · ``quantized`` (whole tensors, every scope,
``QuantizedTensor``) · ``codecs`` (rows of a state pool, torch) · ``oracle`` (slow and exact, NumPy). Names
that need torch load it when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from driftgate.quant.formats import FORMATS, Format, Rounding, ScaleKind, Scope, get_format

if TYPE_CHECKING:
    from driftgate.quant.codecs import EncodedRows, decode_rows, encode_rows, find_nonfinite_rows
    from driftgate.quant.quantized import QuantizedTensor

__all__ = [
    "FORMATS",
    "EncodedRows",
    "Format",
    "QuantizedTensor",
    "Rounding",
    "ScaleKind",
    "Scope",
    "decode_rows",
    "encode_rows",
    "find_nonfinite_rows",
    "get_format",
]

_LAZY = {
    "EncodedRows": "codecs",
    "QuantizedTensor": "quantized",
    "decode_rows": "codecs",
    "encode_rows": "codecs",
    "find_nonfinite_rows": "codecs",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
