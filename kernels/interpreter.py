"""Make Triton's interpreter compute what the compiled kernel computes, or say that it cannot.

Under ``TRITON_INTERPRET=1`` kernels run as NumPy programs, which is how they run without a GPU. NumPy has no
bfloat16 and no FP8, so Triton keeps those as integers and, in every release checked, goes on to compute on
the integers, and it rounds where the hardware does not. None of that raises. :func:`install` replaces the
operations concerned; ``CORRECTED`` lists them and ``REFUSED`` what raises from then on because no exact
answer is implemented. Two things that only look like numerics are settled as well: reductions add in an order
that depends on the shape alone, not on the memory layout that earlier operations left, and device functions
no longer patch the language again on every call (0.3 ms each).

Still different from a GPU, and not to be compared with it bit for bit: the order of additions in ``tl.sum``
and ``tl.dot``; ``exp``, ``log``, ``sqrt`` and ``/``, which are approximations there and correctly rounded, or
nearly, here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch

__all__ = ["CHECKED_RELEASES", "CORRECTED", "REFUSED", "install", "is_interpreted"]

#: Triton release lines whose interpreter was read and tested against the tables of tests/test_interpreter.py.
CHECKED_RELEASES = ("3.6", "3.7", "3.8", "3.9")

#: What :func:`install` corrects: operation, and what the interpreter does without it.
CORRECTED: Mapping[str, str] = MappingProxyType(
    {
        "float32 to bfloat16": "truncates, also where tl.store converts implicitly; now nearest even",
        "float32 to E4M3 and E5M2": "rounds wrongly, 500 becomes 256; now nearest even, saturating",
        "E4M3 and E5M2 to float": "NaN and infinity become numbers; now they stay what they are",
        "integer to bfloat16": "stores the integer's bits; now converts the value",
        "bfloat16 and FP8 arithmetic and comparisons": "work on raw bits; now on values, rounded once",
        "tl.dot on bfloat16 and E4M3": "multiplies raw bits, or loses NaN; now float32 products of values",
        "tl.fma": "rounds the product before 3.9; now rounds once",
        "tl.maximum, tl.minimum, tl.clamp": "propagate NaN before 3.8; now drop it unless told otherwise",
        "tl.max, tl.min over NaN only": "warn; now give NaN",
        "tl.umulhi on negative integers": "sign-extends before 3.9; now multiplies unsigned",
        "tl.sum, tl.cumsum": "add in an order that depends on strides; now on shape and axis alone",
        "overflow and invalid operations": "warn, an error under pytest; now silent, as on a GPU",
    }
)

#: What raises after :func:`install` instead of giving a wrong value.
REFUSED: tuple[str, ...] = (
    "tl.dot of float32 operands with input_precision other than 'ieee' (TF32 is not emulated)",
    "tl.dot_scaled",
    "tl.fma in bfloat16, FP8 or float64",
    "reductions and scans of bfloat16 or FP8",
    "conversions between float64 and bfloat16 or FP8, and roundings other than nearest even but for bfloat16",
    "the types float8e4b15, float8e4b8 and float8e5b16",
)


@dataclass(frozen=True)
class _RawFloat:
    """A float type that the interpreter holds as integers because NumPy does not have it.

    Attributes:
        kind: the torch type that converts it.
        bits: integers of its width, for NumPy and for torch.
        largest: greatest finite magnitude where conversions saturate, None where they overflow to infinity.
        nan: code that a NaN becomes.
    """

    kind: torch.dtype
    bits: tuple[Any, torch.dtype]
    largest: float | None
    nan: int

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Values, float32, of codes of any shape."""
        raw = np.array(codes, order="C").view(self.bits[0])
        return np.asarray(torch.from_numpy(raw).view(self.kind).float().numpy())

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Codes, unsigned, of values converted to float32: nearest even."""
        x = np.array(values, dtype=np.float32, order="C")
        nan = np.isnan(x)
        if self.largest is not None:
            np.clip(x, -self.largest, self.largest, out=x)
        codes = torch.from_numpy(x).to(self.kind).view(self.bits[1]).numpy()
        codes = codes.view(f"u{codes.itemsize}")
        if nan.any():
            codes[nan] = self.nan
        return codes


_RAW = {
    "bf16": _RawFloat(torch.bfloat16, (np.int16, torch.int16), None, 0x7FFF),
    "fp8e4nv": _RawFloat(torch.float8_e4m3fn, (np.uint8, torch.uint8), 448.0, 0x7F),
    "fp8e5": _RawFloat(torch.float8_e5m2, (np.uint8, torch.uint8), 57344.0, 0x7F),
}
_UNKNOWN = frozenset({"fp8e4b15", "fp8e4b8", "fp8e5b16"})

_installed = False


def is_interpreted() -> bool:
    """Whether Triton kernels of this process run under the interpreter.

    True if ``TRITON_INTERPRET`` was set when triton was imported (or is now: this imports it) and still is;
    Triton decides for each function when it is decorated.
    """
    import triton
    import triton.language as tl

    library_interpreted = not isinstance(tl.sum, triton.runtime.jit.JITFunction)
    return library_interpreted and bool(triton.knobs.runtime.interpret)


def install() -> None:
    """Correct the interpreter of this process, once; calling it again does nothing.

    Raises:
        RuntimeError: this Triton release was not checked, or the process does not interpret.
    """
    global _installed
    import triton

    release = ".".join(triton.__version__.split(".")[:2])
    if release not in CHECKED_RELEASES:
        raise RuntimeError(
            f"Triton {triton.__version__}: its interpreter was not checked, so its results cannot be "
            f"trusted; install a release of {', '.join(CHECKED_RELEASES)} or run on a GPU"
        )
    if not is_interpreted():
        raise RuntimeError(
            "TRITON_INTERPRET is not on: set TRITON_INTERPRET=1 in the environment before triton is imported"
        )
    if _installed:
        return
    from triton.runtime import interpreter

    _correct_conversions(interpreter)
    _correct_arithmetic(interpreter)
    _correct_products(interpreter)
    _correct_reductions(interpreter)
    _patch_once_per_launch(interpreter)
    _skip_dropped_work(interpreter)
    _installed = True


def _name(handle_or_type: Any) -> str:
    """Triton's name of the element type, e.g. ``bf16``."""
    dtype = getattr(handle_or_type, "dtype", handle_or_type)
    return str(dtype.scalar)


def _values(handle: Any) -> np.ndarray:
    """Values of a float handle in a type that NumPy has."""
    name = _name(handle)
    _refuse(name in _UNKNOWN, f"the type {name}")
    return _RAW[name].decode(handle.data) if name in _RAW else handle.data


def _refuse(condition: bool, what: str) -> None:
    if condition:
        raise NotImplementedError(f"Triton's interpreter gives wrong values for {what}; convert to float32 first")


def _correct_conversions(interpreter: Any) -> None:
    builder = interpreter.InterpreterBuilder
    handle_of = interpreter.TensorHandle
    rounding = interpreter._ir.ROUNDING_MODE

    def convert(self: Any, source: Any, target: Any) -> Any:
        old, new = _name(source), _name(target)
        _refuse(old in _UNKNOWN or new in _UNKNOWN, f"conversions from {old} to {new}")
        _refuse("fp64" in (old, new) and (old in _RAW or new in _RAW), f"conversions from {old} to {new}")
        x = _RAW[old].decode(source.data) if old in _RAW and source.data.dtype != np.bool_ else source.data
        data = _RAW[new].encode(x) if new in _RAW else x.astype(interpreter._get_np_dtype(target))
        return handle_of(data, target.scalar)

    def convert_float(self: Any, source: Any, target: Any, mode: Any) -> Any:
        if mode is None or mode == rounding.RTNE:
            return convert(self, source, target)
        old, new = _name(source), _name(target)
        _refuse((old, new) != ("fp32", "bf16"), f"rounding toward zero from {old} to {new}")
        bits = np.array(source.data, order="C").view(np.uint32)
        codes = np.where(np.isnan(source.data), 0x7FFF, bits >> 16).astype(np.uint16)
        return handle_of(codes, target.scalar)

    builder.cast_impl = convert
    builder.create_fp_to_fp = convert_float
    builder.get_bf16 = lambda self, value: handle_of(_RAW["bf16"].encode(np.array([value])), interpreter.tl.bfloat16)


def _correct_arithmetic(interpreter: Any) -> None:
    builder = interpreter.InterpreterBuilder
    handle_of, none = interpreter.TensorHandle, interpreter._ir.PROPAGATE_NAN.NONE
    plain_binary, plain_unary, boolean = builder.binary_op, builder.unary_op, interpreter.tl.int1

    def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        name = _name(lhs)
        _refuse(name in _UNKNOWN, f"arithmetic in {name}")
        if name not in _RAW:
            result = plain_binary(self, lhs, rhs, op)
            if result.data.dtype == np.bool_:
                result.dtype = boolean
            return result
        data = op(_values(lhs), _values(rhs))
        if data.dtype == np.bool_:
            return handle_of(data, boolean)
        return handle_of(_RAW[name].encode(data), lhs.dtype.scalar)

    def unary(self: Any, arg: Any, op: Any) -> Any:
        name = _name(arg)
        if name in _RAW:
            return handle_of(_RAW[name].encode(op(_values(arg))), arg.dtype.scalar)
        return plain_unary(self, arg, op)

    def clamp(self: Any, arg: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        if propagate_nan == none:
            return binary(self, binary(self, arg, low, np.fmax), high, np.fmin)
        return binary(self, binary(self, arg, low, np.maximum), high, np.minimum)

    def multiply_high(self: Any, lhs: Any, rhs: Any) -> Any:
        x, y = (np.array(h.data, order="C").view(f"u{h.data.itemsize}") for h in (lhs, rhs))
        if x.itemsize == 8:
            high = interpreter.np_umulhi_u64(x, y)
        else:
            high = (x.astype(np.uint64) * y.astype(np.uint64)) >> (8 * x.itemsize)
        return handle_of(high.astype(x.dtype).view(lhs.data.dtype), lhs.dtype.scalar)

    builder.binary_op = binary
    builder.unary_op = unary
    builder.create_clampf = clamp
    builder.create_maxnumf = lambda self, lhs, rhs: binary(self, lhs, rhs, np.fmax)
    builder.create_minnumf = lambda self, lhs, rhs: binary(self, lhs, rhs, np.fmin)
    builder.create_umulhi = multiply_high


def _correct_products(interpreter: Any) -> None:
    builder = interpreter.InterpreterBuilder
    handle_of, ieee = interpreter.TensorHandle, interpreter._ir.INPUT_PRECISION.IEEE
    plain_dot = builder.create_dot

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        name = _name(z)
        _refuse(name not in ("fp32", "fp16"), f"tl.fma in {name}")
        return handle_of(_multiply_add(x.data, y.data, z.data).astype(z.data.dtype), z.dtype.scalar)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        names = {_name(a), _name(b)}
        _refuse("fp32" in names and precision != ieee, "tl.dot in TF32 (pass input_precision='ieee')")
        if names.isdisjoint(_RAW) and names.isdisjoint(_UNKNOWN):
            return plain_dot(self, a, b, d, precision, imprecise)
        _refuse(_name(d) in _RAW, f"tl.dot that accumulates in {_name(d)}")
        return handle_of(np.matmul(_values(a), _values(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def dot_scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse(True, "tl.dot_scaled")

    builder.create_fma = fused
    builder.create_dot = dot
    builder.create_dot_scaled = dot_scaled


def _multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x*y + z of float16 or float32 arrays, as float64 that rounds to what a fused operation gives.

    The product of two 24-bit significands is exact in 53 bits. The sum is not; rounding it to odd (an inexact
    result takes the neighbour whose last bit is 1) keeps on which side of every shorter number and of every
    tie it lies, so the second rounding is the only one (Boldo and Melquiond, 2008: 53 >= 24 + 2 bits are
    enough).
    """
    with np.errstate(all="ignore"):
        product = np.multiply(x, y, dtype=np.float64)
        addend = np.asarray(z, dtype=np.float64)
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        inexact = np.isfinite(total) & (error != 0) & (np.ascontiguousarray(total).view(np.int64) & 1 == 0)
        neighbour = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.asarray(np.where(inexact, neighbour, total))


def _correct_reductions(interpreter: Any) -> None:
    base, reduce, scan = interpreter.ReduceScanOpInterface, interpreter.ReduceOps, interpreter.ScanOps
    plain_check, plain_min_max = base.check_tensor, reduce.min_max
    plain_run = interpreter.GridExecutor.__call__
    without_nan = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def check_tensor(self: Any, inputs: Any) -> None:
        plain_check(self, inputs)
        for tensor in inputs:
            name = str(tensor.dtype.scalar)
            _refuse(name in _RAW or name in _UNKNOWN, f"reductions and scans of {name}")

    def min_max(self: Any, inputs: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        return plain_min_max(self, inputs, without_nan.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    def in_order(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def run(self: Any, tensor: Any) -> Any:
            tensor.handle.data = np.ascontiguousarray(tensor.handle.data)
            return method(self, tensor)

        return run

    def run_quietly(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return plain_run(self, *args, **kwargs)

    base.check_tensor = check_tensor
    reduce.min_max = min_max
    reduce.sum = in_order(reduce.sum)
    scan.cumsum = in_order(scan.cumsum)
    scan.cumprod = in_order(scan.cumprod)
    interpreter.GridExecutor.__call__ = run_quietly


def _patch_once_per_launch(interpreter: Any) -> None:
    """Redirect the language once when a launch begins; device functions called from it find it redirected.

    The first launch records what Triton redirects in ``triton.language`` and its core; later ones repeat the
    record.
    """
    plain_patch, tl, missing = interpreter._patch_lang, interpreter.tl, interpreter._MISSING
    whole_language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    record: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}
    open_launches: list[Any] = []

    class Launch:
        """The redirections of one launch."""

        def __init__(self) -> None:
            if not record:
                for owner, name, before in plain_patch(whole_language)._changes:
                    first = record.get((id(owner), name), (owner, name, before))[2]
                    record[id(owner), name] = (owner, name, first, vars(owner)[name])
            else:
                for owner, name, _, after in record.values():
                    setattr(owner, name, after)
            open_launches.append(self)

        def restore(self) -> None:
            open_launches.remove(self)
            for owner, name, before, _ in record.values():
                if before is missing:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)

    class NestedCall:
        """A device function inside a launch: nothing was changed, nothing is to restore."""

        def restore(self) -> None:
            pass

    interpreter._patch_lang = lambda fn: NestedCall() if open_launches else Launch()


def _skip_dropped_work(interpreter: Any) -> None:
    """Leave out work that changes no result: some ten operations for each integer addition, and a table.

    The overflow checks end in assertions that the interpreter, never in debug mode, drops.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    plain, tl = interpreter._get_np_dtype, interpreter.tl
    known: dict[str, np.dtype[Any]] = {}

    def numpy_type(dtype: Any) -> np.dtype[Any]:
        scalar = dtype.scalar
        if isinstance(scalar, tl.pointer_type):
            return np.dtype(np.uint64)
        if scalar.name not in known:
            known[scalar.name] = plain(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = numpy_type
