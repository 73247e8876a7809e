"""Run by tests/test_interpreter.py as a program, with TRITON_INTERPRET=1: kernels over the arrays of a file.

Usage: interpreter_cases.py INPUTS.npz OUTPUTS.npz
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from driftgate.kernels import interpreter

TORCH = {
    "bf16": (torch.bfloat16, np.int16),
    "fp16": (torch.float16, np.int16),
    "e4m3": (torch.float8_e4m3fn, np.uint8),
    "e5m2": (torch.float8_e5m2, np.uint8),
}


@triton.jit
def widen(x, y, N: tl.constexpr):
    o = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + o, tl.load(x + o).to(tl.float32))


@triton.jit
def narrow(x, y, n, N: tl.constexpr, IMPLICIT: tl.constexpr):
    o = tl.program_id(0) * N + tl.arange(0, N)
    b_x = tl.load(x + o, mask=o < n, other=0.0)
    if IMPLICIT:
        tl.store(y + o, b_x, mask=o < n)
    else:
        tl.store(y + o, b_x.to(y.dtype.element_ty), mask=o < n)


@triton.jit
def multiply_add(x, y, z, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.fma(tl.load(x + o), tl.load(y + o), tl.load(z + o)))


@triton.jit
def dot(a, b, c, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    o_m, o_k, o_n = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    b_a = tl.load(a + o_m * K + o_k[None, :])
    b_b = tl.load(b + o_k[:, None] * N + o_n)
    tl.store(c + o_m * N + o_n, tl.dot(b_a, b_b))


@triton.jit
def bf16_arithmetic(x, y, total, product, less, scaled, bigger, counted, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x, b_y = tl.load(x + o), tl.load(y + o)
    tl.store(total + o, b_x + b_y)
    tl.store(product + o, b_x * b_y)
    tl.store(less + o, (b_x < b_y).to(tl.float32))
    tl.store(scaled + o, b_x * 0.3)
    tl.store(bigger + o, tl.maximum(b_x, b_y))
    tl.store(counted + o, (o * 3 - 100).to(tl.bfloat16))


@triton.jit
def rounded_functions(x, y, quotient, root, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x, b_y = tl.load(x + o), tl.load(y + o)
    tl.store(quotient + o, tl.div_rn(b_x, b_y))
    tl.store(root + o, tl.sqrt_rn(tl.abs(b_x)))


@triton.jit
def shapes(x, suffix, joined, transposed, woven, high, low, M: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    b_x = tl.load(x + o)
    tl.store(suffix + o, tl.cumsum(b_x, axis=1, reverse=True))
    o_wide = tl.arange(0, M)[:, None] * (2 * N) + tl.arange(0, 2 * N)[None, :]
    tl.store(joined + o_wide, tl.reshape(tl.join(b_x, -b_x), [M, 2 * N]))
    o_across = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(transposed + o_across, tl.trans(b_x) + 0.0)
    tl.store(woven + o_wide, tl.interleave(b_x, b_x * 2))
    b_low, b_high = tl.split(tl.reshape(b_x, [M, N // 2, 2]))
    o_half = tl.arange(0, M)[:, None] * (N // 2) + tl.arange(0, N // 2)[None, :]
    tl.store(low + o_half, b_low)
    tl.store(high + o_half, b_high)


@triton.jit
def nan_rules(x, y, larger, kept, clamped, row_max, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x, b_y = tl.load(x + o), tl.load(y + o)
    tl.store(larger + o, tl.maximum(b_x, b_y))
    tl.store(kept + o, tl.maximum(b_x, b_y, propagate_nan=tl.PropagateNan.ALL))
    tl.store(clamped + o, tl.clamp(b_x, -1.0, 1.0))
    b_nothing = b_x * float("nan")
    tl.store(row_max, tl.max(b_x, axis=0))
    tl.store(row_max + 1, tl.max(b_nothing, axis=0))


@triton.jit
def high_products(x, y, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.umulhi(tl.load(x + o), tl.load(y + o)))


@triton.jit
def sums(x, plain, strided, M: tl.constexpr, N: tl.constexpr):
    o_m, o_n = tl.arange(0, M), tl.arange(0, N)
    tl.store(plain + o_m, tl.sum(tl.load(x + o_m[:, None] * N + o_n[None, :]), axis=1))
    b_across = tl.load(x + o_n[:, None] + o_m[None, :] * N)
    tl.store(strided + o_m, tl.sum(tl.trans(b_across), axis=1))


@triton.jit
def double(x):
    return x + x


@triton.jit
def nested(x, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x = double(double(tl.load(x + o)))
    tl.store(x + o, b_x + tl.sum(b_x, axis=0))


@triton.jit
def tf32_dot(x, N: tl.constexpr):
    b_x = tl.full([N, N], 1.0, tl.float32)
    tl.store(x + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :], tl.dot(b_x, b_x, input_precision="tf32"))


@triton.jit
def bf16_sum(x, N: tl.constexpr):
    tl.store(x, tl.sum(tl.full([N], 1.0, tl.bfloat16), axis=0).to(tl.float32))


@triton.jit
def bf16_fma(x, N: tl.constexpr):
    b_x = tl.full([N], 1.0, tl.bfloat16)
    tl.store(x + tl.arange(0, N), tl.fma(b_x, b_x, b_x).to(tl.float32))


@triton.jit
def bf16_from_double(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.full([N], 1.0, tl.float64).to(tl.bfloat16).to(tl.float32))


@triton.jit
def fp8_toward_zero(x, N: tl.constexpr):
    b_x = tl.full([N], 1.1, tl.float32).to(tl.float8e4nv, fp_downcast_rounding="rtz")
    tl.store(x + tl.arange(0, N), b_x.to(tl.float32))


def typed(codes: np.ndarray, name: str) -> torch.Tensor:
    """Codes as a tensor of the float type ``name``."""
    dtype, bits = TORCH[name]
    return torch.from_numpy(codes.view(bits).copy()).view(dtype)


def raw(tensor: torch.Tensor) -> np.ndarray:
    """Bits of a tensor as unsigned integers."""
    size = tensor.element_size()
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return tensor.view(signed).numpy().view(f"u{size}")


def run_conversions(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    for name, (dtype, _) in TORCH.items():
        codes = np.arange(1 << (8 * torch.empty(0, dtype=dtype).element_size())).astype(f"u{dtype.itemsize}")
        wide = torch.empty(len(codes))
        widen[(1,)](typed(codes, name), wide, len(codes))
        outputs[f"widen/{name}"] = wide.numpy()
        for source in ("random", "golden"):
            x = torch.from_numpy(inputs[source])
            for implicit in (True, False):
                y = torch.empty(len(x), dtype=dtype)
                narrow[(triton.cdiv(len(x), 16384),)](x, y, len(x), 16384, implicit)
                outputs[f"narrow/{name}/{source}/{'store' if implicit else 'cast'}"] = raw(y)


def run_arithmetic(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    for kind in ("fp32", "fp16"):
        x, y, z = (torch.from_numpy(inputs[f"fma/{kind}/{i}"]) for i in "xyz")
        out = torch.empty_like(x)
        multiply_add[(1,)](x, y, z, out, len(x))
        outputs[f"fma/{kind}"] = out.numpy()
    for kind, dtype in (("bf16", torch.bfloat16), ("e4m3", torch.float8_e4m3fn), ("fp16", torch.float16)):
        a, b = (torch.from_numpy(inputs[f"dot/{i}"]).to(dtype) for i in "ab")
        c = torch.empty(a.shape[0], b.shape[1])
        dot[(1,)](a, b, c, *a.shape, b.shape[1])
        outputs[f"dot/{kind}"] = c.numpy()
    x, y = (typed(inputs[f"bf16/{i}"], "bf16") for i in "xy")
    results = {name: torch.empty_like(x) for name in ("total", "product", "less", "scaled", "bigger", "counted")}
    results["less"] = torch.empty(len(x))
    bf16_arithmetic[(1,)](x, y, *results.values(), len(x))
    outputs.update({f"bf16/{name}": value.float().numpy() for name, value in results.items()})
    x, y = (torch.from_numpy(inputs[f"quotient/{i}"]) for i in "xy")
    quotient, root = torch.empty_like(x), torch.empty_like(x)
    rounded_functions[(1,)](x, y, quotient, root, len(x))
    outputs.update(quotient=quotient.numpy(), root=root.numpy())


def run_shapes(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    x = torch.from_numpy(inputs["shapes"])
    m, n = x.shape
    results = {
        "suffix": torch.empty(m, n),
        "joined": torch.empty(m, 2 * n),
        "transposed": torch.empty(n, m),
        "woven": torch.empty(m, 2 * n),
        "high": torch.empty(m, n // 2),
        "low": torch.empty(m, n // 2),
    }
    shapes[(1,)](x, *results.values(), m, n)
    outputs.update({f"shapes/{name}": value.numpy() for name, value in results.items()})
    x, y = (torch.from_numpy(inputs[f"nan/{i}"]) for i in "xy")
    results = {name: torch.empty_like(x) for name in ("larger", "kept", "clamped", "row_max")}
    nan_rules[(1,)](x, y, *results.values(), len(x))
    outputs.update({f"nan/{name}": value.numpy() for name, value in results.items()})
    x, y = (torch.from_numpy(inputs[f"high/{i}"]) for i in "xy")
    out = torch.empty_like(x)
    high_products[(1,)](x, y, out, len(x))
    outputs["high"] = out.numpy()
    x = torch.from_numpy(inputs["sums"])
    plain, strided = torch.empty(x.shape[0]), torch.empty(x.shape[0])
    sums[(1,)](x, plain, strided, *x.shape)
    outputs.update(sums_plain=plain.numpy(), sums_strided=strided.numpy())
    x = torch.arange(8.0)
    nested[(2,)](x, 8)
    outputs["nested"] = x.numpy()


def message(call: Callable[[], object]) -> str:
    """What a call raises, or ``no error``."""
    try:
        call()
    except Exception as error:  # the interpreter wraps what a kernel raises
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals() -> dict[str, str]:
    x = torch.zeros(256)
    kernels = (tf32_dot, bf16_sum, bf16_fma, bf16_from_double, fp8_toward_zero)
    found = {kernel.fn.__name__: message(lambda kernel=kernel: kernel[(1,)](x, 16)) for kernel in kernels}
    version = triton.__version__
    for other in ("3.10.0", "3.5.1", "4.0.0+git"):
        triton.__version__ = other
        found[other] = message(interpreter.install)
    triton.__version__ = version
    return found


def main() -> None:
    """Everything above, in one process."""
    patched = triton.runtime.interpreter.InterpreterBuilder.cast_impl
    interpreter.install()
    corrected = triton.runtime.interpreter.InterpreterBuilder.cast_impl
    interpreter.install()
    once = patched is not corrected is triton.runtime.interpreter.InterpreterBuilder.cast_impl
    inputs = dict(np.load(sys.argv[1]))
    outputs: dict[str, np.ndarray] = {"installed_once": np.array(once and interpreter.is_interpreted())}
    restored = tl.load
    run_conversions(inputs, outputs)
    run_arithmetic(inputs, outputs)
    run_shapes(inputs, outputs)
    outputs["language_restored"] = np.array(tl.load is restored)
    outputs["refusals"] = np.array(json.dumps(refusals()))
    np.savez(sys.argv[2], **outputs)


if __name__ == "__main__":
    main()
