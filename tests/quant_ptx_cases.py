"""Run by tests/test_quant_ptx.py as a program, without TRITON_INTERPRET: compiles tile kernels, needs no GPU.

Usage: quant_ptx_cases.py OUTPUT.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from driftgate.quant.device import FORMAT_IDS, draw_words, load_tile, round_trip_tile, store_tile

CODES = {"fp32": "*fp32", "bf16": "*bf16", "fp16": "*fp16", "int8": "*i8", "int16": "*i16"}
READ = ("bf16", "fp8", "nvfp4", "fp8_e5m2", "int8", "int16", "mxfp4", "mxfp8")
STOCHASTIC = ("bf16", "fp16", "fp8", "int8", "nvfp4")
SMALL = {"D_V": 64, "D_K": 64, "BV": 16, "BK": 64}
LAUNCHED = {"D_V": 128, "D_K": 128, "BV": 32, "BK": 128}


@triton.jit
def write(
    x,
    codes,
    block_scales,
    row_scales,
    back,
    error,
    D_V: tl.constexpr,
    D_K: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    CVT: tl.constexpr,
    SR: tl.constexpr,
):
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    o = o_v[:, None] * D_K + tl.arange(0, BK)[None, :]
    b_x = tl.load(x + o)
    b_words = draw_words(o_v, D_K, BK, 1, 0, tl.load(error), 2) if SR else 0
    tl.store(error, store_tile(codes, block_scales, row_scales, b_x, o_v, D_V, D_K, BV, BK, FORMAT, CVT, SR, b_words))
    tl.store(back + o, round_trip_tile(b_x, D_K, BV, BK, FORMAT, CVT, SR, b_words))


@triton.jit
def read(
    codes,
    block_scales,
    row_scales,
    y,
    D_V: tl.constexpr,
    D_K: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    CVT: tl.constexpr,
):
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    b_y = load_tile(codes, block_scales, row_scales, o_v, D_V, D_K, BV, BK, FORMAT, CVT)
    tl.store(y + o_v[:, None] * D_K + tl.arange(0, BK)[None, :], b_y)


@triton.jit
def flush(
    state,
    q,
    out,
    codes,
    block_scales,
    row_scales,
    error,
    D_V: tl.constexpr,
    D_K: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    COPY: tl.constexpr,
):
    """Like a flush: an FP32 state read, summed over and written, beside a copy in another format."""
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    b_s = load_tile(state, state, state, o_v, D_V, D_K, BV, BK, 0)
    b_q = tl.load(q + tl.arange(0, BK))
    for _ in range(4):
        b_s = b_s * 0.5 + tl.sum(b_s * b_q[None, :], axis=1)[:, None] * b_q[None, :]
    tl.store(out + o_v, tl.sum(b_s * b_q[None, :], axis=1))
    bad = store_tile(state, state, state, b_s, o_v, D_V, D_K, BV, BK, 0)
    if COPY:
        bad |= store_tile(codes, block_scales, row_scales, b_s, o_v, D_V, D_K, BV, BK, FORMAT)
    tl.store(error, bad)


def build(
    kernel: triton.JITFunction, name: str, arch: int, tile: dict[str, int], *, fusion: bool, **constants: bool
) -> dict[str, object]:
    """Compile one kernel for one format; its assembly and how long it took."""
    kinds = {"codes": CODES.get(name, "*u8"), "block_scales": "*u8", "error": "*i32"}
    values = {**tile, "FORMAT": int(FORMAT_IDS[name]), **constants}
    signature = {a: "constexpr" if a in values else kinds.get(a, "*fp32") for a in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a not in values}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": 1, "enable_fp_fusion": fusion}
    start = time.perf_counter()
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    seconds = time.perf_counter() - start
    return {"ptx": compiled.asm["ptx"], "ttgir": compiled.asm["ttgir"], "seconds": seconds}


def main() -> None:
    """All kernels that tests/test_quant_ptx.py looks at; fusion is on where it could do harm."""
    found = {f"write/{name}/90": build(write, name, 90, SMALL, fusion=True, CVT=True, SR=False) for name in FORMAT_IDS}
    for name in READ:
        found[f"read/{name}/90"] = build(read, name, 90, SMALL, fusion=True, CVT=True)
        found[f"flush/{name}"] = build(flush, name, 90, LAUNCHED, fusion=False, COPY=True)
    for name in STOCHASTIC:
        found[f"stochastic/{name}/90"] = build(write, name, 90, SMALL, fusion=True, CVT=True, SR=True)
    found["flush/none"] = build(flush, "fp32", 90, LAUNCHED, fusion=False, COPY=False)
    for name in ("fp8", "nvfp4", "fp8_e5m2", "mxfp4"):
        found[f"write/{name}/100"] = build(write, name, 100, SMALL, fusion=True, CVT=True, SR=False)
    for name in ("fp8", "nvfp4", "fp8_e5m2", "mxfp8"):
        found[f"write/{name}/80"] = build(write, name, 80, SMALL, fusion=True, CVT=False, SR=False)
    for name in STOCHASTIC:
        found[f"stochastic/{name}/90"] = build(write, name, 90, SMALL, fusion=True, CVT=True, SR=True)
    found["flush/none"] = build(flush, "fp32", 90, LAUNCHED, fusion=False, COPY=False)
    for name in ("fp8", "nvfp4", "fp8_e5m2", "int8", "mxfp4", "mxfp8"):
        found[f"write/{name}/100"] = build(write, name, 100, SMALL, fusion=True, CVT=True, SR=False)
        found[f"write/{name}/80"] = build(write, name, 80, SMALL, fusion=True, CVT=False, SR=False)
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
