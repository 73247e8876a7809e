"""What ``driftgate formats`` shows: the error of every number format on tensors of a file, or on an example.

Each format stores the tensor with its default arithmetic, nearest even, scale blocks along the last axis, and what it
reads back as is compared in float64. A tensor is [slots, heads, d_v, d_k] or has fewer axes; the greatest axes come
last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from driftgate.errors import InputError, unknown_name
from driftgate.quant import FORMATS, Format, Scope

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FormatError", "FormatErrors", "make_example", "measure_formats"]

SCOPES = tuple(scope.value for scope in Scope if scope is not Scope.ROW_32)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EXAMPLE = "example"


@dataclass(frozen=True, kw_only=True)
class FormatError:
    """One format on one tensor.

    Attributes:
        tensor: name of the tensor in its file.
        format: name of the format.
        bits: of one element without scales.
        bytes_per_row: codes and scales of a row as a state pool stores it (scope row).
        relative_error: Frobenius norm of the error over that of the tensor; None for a tensor of zeros or an overflow.
        snr_db: -20 log10 of it; None where there is no error, or no relative error.
        max_abs_error: greatest error of an element, in the units of the tensor; None for an overflow.
        overflow: finite elements that became infinite.
    """

    tensor: str
    format: str
    bits: int
    bytes_per_row: int
    relative_error: float | None
    snr_db: float | None
    max_abs_error: float | None
    overflow: int


@dataclass(frozen=True, kw_only=True)
class FormatErrors:
    """All formats on all tensors of a source.

    Attributes:
        source: the file, or what the example is.
        scope: elements that share an FP32 scale, where a format has one.
        shapes: shape of each measured tensor.
        skipped: what was not measured and why, by tensor.
        rows: in the order of tensors, then formats.
    """

    source: str
    scope: str
    shapes: dict[str, list[int]]
    rows: list[FormatError]
    skipped: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; undefined numbers are None."""
        return {"schema_version": 1, **asdict(self)}

    def notes(self) -> list[str]:
        """What a reader must know beside the table."""
        lines = [
            f"source: {self.source}",
            f"blocks along the last axis; FP32 scale per {self.scope}; NVFP4 te, MX rceil, encode; nearest even",
        ]
        lines += [f"{name}: {shape}" for name, shape in self.shapes.items()]
        return lines + [f"{name}: skipped, {why}" for name, why in self.skipped.items()]

    def table(self) -> Table:
        """The rows for a terminal."""
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        several = len(self.shapes) > 1
        names = ("format", "bits", "bytes per row", "relative error", "SNR dB", "max error", "overflow")
        for name in (("tensor",) if several else ()) + names:
            table.add_column(name, justify="left" if name in ("tensor", "format") else "right")
        for row in self.rows:
            numbers = (_show(row.relative_error, ".2e"), _show(row.snr_db, ".1f"), _show(row.max_abs_error, ".2e"))
            cells = (row.format, str(row.bits), str(row.bytes_per_row), *numbers, str(row.overflow))
            table.add_row(*((row.tensor,) if several else ()), *cells)
        return table


def measure_formats(path: Path | None, *, scope: str = "row") -> FormatErrors:
    """Store the tensors of a file in every format and measure what each loses.

    Args:
        path: ``.npy`` (one tensor) or ``.safetensors`` (every float32, bfloat16 and float16 tensor of one to four
            axes; others are listed as skipped); None: a built-in example.
        scope: elements that share an FP32 scale: tensor, slot, head or row.

    Returns:
        A row for each tensor and format, widest format first.

    Raises:
        UsageError: an unknown scope.
        InputError: the file is missing, of another kind or damaged; nothing in it can be measured; NaN or infinity.
    """
    if scope not in SCOPES:
        raise unknown_name("scope", scope, SCOPES)
    skipped: dict[str, str] = {}
    if path is None:
        source = "built-in example, a Gated DeltaNet state after 256 steps of seeded noise (no FILE was given)"
        tensors = iter([(_EXAMPLE, make_example())])
    else:
        source, tensors = str(path), _read(path, skipped)
    shapes: dict[str, list[int]] = {}
    rows: list[FormatError] = []
    for name, x in tensors:
        if not bool(x.isfinite().all()):
            place = (~x.isfinite()).nonzero()[0].tolist()
            raise InputError(
                f"{source}: {name}{place} is {x[tuple(place)].item()}; formats are measured on finite states"
            )
        shapes[name] = list(x.shape)
        rows += [_measure(name, x, fmt, scope) for fmt in FORMATS.values()]
    if not rows:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(skipped.items())[:3]) or "it holds no tensor"
        raise InputError(f"{source}: nothing to measure ({reasons}); give float32, bfloat16 or float16 tensors")
    return FormatErrors(source=source, scope=scope, shapes=shapes, rows=rows, skipped=skipped)


def make_example(*, heads: int = 4, d: int = 64, steps: int = 256, seed: int = 0) -> torch.Tensor:
    """A state as Gated DeltaNet makes it from normal keys and values: float32 [1, heads, d, d].

    S = a S; S = S + beta (v - S k) k^T with unit keys, decays between 0.9 and 1 by head and beta between 0 and 1
    (arXiv 2412.06464, equation 10), in float64.
    """
    rng = np.random.default_rng(seed)
    state = np.zeros((heads, d, d))
    decay = 1 - 10.0 ** rng.uniform(-3, -1, (heads, 1, 1))
    for _ in range(steps):
        k, v = rng.standard_normal((2, heads, d))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        beta = rng.uniform(0, 1, (heads, 1))
        state *= decay
        u = beta * (v - np.einsum("hvk,hk->hv", state, k))
        state += np.einsum("hv,hk->hvk", u, k)
    return torch.from_numpy(state.astype(np.float32))[None]


def _measure(name: str, x: torch.Tensor, fmt: Format, scope: str) -> FormatError:
    stored = fmt.quantize(x, scope=scope)
    exact = x.double()
    error = (stored.dequantize().double() - exact).abs()
    norm, greatest = float(exact.norm()), float(error.max())
    relative = float(error.norm()) / norm if norm > 0 else math.nan
    return FormatError(
        tensor=name,
        format=fmt.name,
        bits=fmt.bits,
        bytes_per_row=fmt.bytes_per_row(x.shape[-1]),
        relative_error=relative if math.isfinite(relative) else None,
        snr_db=-20 * math.log10(relative) if relative > 0 and math.isfinite(relative) else None,
        max_abs_error=greatest if math.isfinite(greatest) else None,
        overflow=stored.n_overflow,
    )


def _read(path: Path, skipped: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a file, one after the other; what cannot be measured goes to ``skipped``."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; give a .npy or .safetensors file, or none for an example")
    if path.suffix == ".npy":
        return iter([(path.stem, _read_npy(path))])
    if path.suffix == ".safetensors":
        return _read_safetensors(path, skipped)
    raise InputError(f"{path}: expected a .npy or .safetensors file, got {path.suffix or 'no suffix'!r}")


def _read_npy(path: Path) -> torch.Tensor:
    try:  # mapped: a header that promises more than the file holds is refused before anything is allocated
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError, TypeError, SyntaxError) as error:
        raise InputError(f"{path}: not a readable .npy file without pickled objects ({error})") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: expected one array, got an archive or a pickle; save it with numpy.save")
    if array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4):
        raise InputError(f"{path}: expected float32 or float16, got {array.dtype}; convert it with .astype('float32')")
    if why := _unfit(array.shape):
        raise InputError(f"{path}: {why}")
    return torch.from_numpy(array.astype(np.float32))


def _read_safetensors(path: Path, skipped: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a file, not a dict
                x = file.get_tensor(name)
                why = f"it is {str(x.dtype).removeprefix('torch.')}" if x.dtype not in _FLOATS else _unfit(x.shape)
                if why:
                    skipped[name] = why
                else:
                    yield name, x.float()
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a readable .safetensors file ({error})") from None


def _unfit(shape: tuple[int, ...]) -> str | None:
    """Why a tensor of that shape cannot be measured, or None."""
    if math.prod(shape) == 0:
        return f"it is empty, {list(shape)}"
    if not 1 <= len(shape) <= 4:
        return f"expected one to four axes, [slots, heads, d_v, d_k], got {len(shape)}"
    return None


def _show(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
