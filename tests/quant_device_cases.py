"""Run by tests/test_quant_device.py as a program: states through the tile functions, interpreted or on a GPU.

Usage: quant_device_cases.py INPUTS.npz OUTPUTS.npz. The inputs hold ``cases``, a JSON list of {name, format,
block_v, cvt, noise or nothing}, and ``<name>/x`` [d_v, d_k] for each. Every stored buffer lies between two guards, so
that bytes touched outside show; what a kernel must not read is NaN.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import triton
import triton.language as tl

from driftgate.kernels import interpreter
from driftgate.quant import get_format
from driftgate.quant.device import FORMAT_IDS, draw_words, load_tile, round_trip_tile, store_tile

GUARD = 256
POISON = 0xAA
DEVICE = "cpu" if interpreter.is_interpreted() else "cuda"


@triton.jit
def write(
    x,
    codes,
    block_scales,
    row_scales,
    error,
    back,
    D_V: tl.constexpr,
    D_K: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    CVT: tl.constexpr,
    SR: tl.constexpr,
    seed,
    first_element,
    tokens,
    stream,
):
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)[None, :]
    mask = (o_v < D_V)[:, None] & (o_k < D_K)
    b_x = tl.load(x + o_v[:, None] * D_K + o_k, mask=mask, other=float("nan"))
    b_words = draw_words(o_v, D_K, BK, seed, first_element, tl.load(tokens), tl.load(stream)) if SR else 0
    bad = store_tile(codes, block_scales, row_scales, b_x, o_v, D_V, D_K, BV, BK, FORMAT, CVT, SR, b_words)
    tl.store(error + tl.program_id(0), bad)
    b_x = tl.where((o_v < D_V)[:, None], b_x, 0.0)
    tl.store(back + o_v[:, None] * BK + o_k, round_trip_tile(b_x, D_K, BV, BK, FORMAT, CVT, SR, b_words))


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
    tl.store(y + o_v[:, None] * BK + tl.arange(0, BK)[None, :], b_y)


def guarded(shape: tuple[int, ...], dtype: torch.dtype, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor filled with a byte between two guards of another, and all of its memory."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = torch.full((GUARD + size + GUARD,), POISON, dtype=torch.uint8, device=DEVICE)
    memory[GUARD : GUARD + size] = fill
    return memory[GUARD : GUARD + size].view(dtype).view(shape), memory


def run(case: dict[str, object], x: torch.Tensor) -> dict[str, np.ndarray]:
    """Store x, read it back, and everything that lies in memory."""
    fmt, block_v = get_format(str(case["format"])), int(str(case["block_v"]))
    d_v, d_k = x.shape
    block_k = max(16, triton.next_power_of_2(d_k))
    tiles = triton.cdiv(d_v, block_v)
    layout = {"codes": ((d_v, fmt.codes_per_row(d_k)), fmt.storage_dtype)}
    if fmt.block_scaled:
        layout["block_scales"] = ((d_v, fmt.blocks_per_row(d_k)), torch.uint8)
    if fmt.scope_scaled:
        layout["row_scales"] = ((d_v,), torch.float32)
    stored = {name: guarded(*what, fill=0x55) for name, what in layout.items()}
    unused = torch.empty(16, dtype=torch.uint8, device=DEVICE)
    pointers = [stored[name][0] if name in stored else unused for name in ("codes", "block_scales", "row_scales")]
    error = torch.full((tiles,), -1, dtype=torch.int32, device=DEVICE)
    back, y = (torch.full((tiles * block_v, block_k), float("nan"), device=DEVICE) for _ in range(2))
    constants = (d_v, d_k, block_v, block_k, int(FORMAT_IDS[fmt.name]), bool(case["cvt"]))
    noise = dict(case.get("noise") or {"seed": 0, "first_element": 0, "tokens": 0, "streams": 0})
    counters = [torch.tensor([noise[name]], dtype=torch.int64, device=DEVICE) for name in ("tokens", "streams")]
    drawn = (bool(case.get("noise")), noise["seed"], noise["first_element"], *counters)
    write[(tiles,)](x, *pointers, error, back, *constants, *drawn)
    read[(tiles,)](*pointers, y, *constants)
    results = {name: memory for name, (_, memory) in stored.items()}
    results.update(error=error, back=back, y=y)
    return {name: tensor.cpu().numpy() for name, tensor in results.items()}


def main() -> None:
    """All cases of one file."""
    if interpreter.is_interpreted():
        interpreter.install()
    inputs = dict(np.load(sys.argv[1]))
    outputs = {}
    for case in json.loads(str(inputs["cases"])):
        found = run(case, torch.from_numpy(inputs[f"{case['name']}/x"]).to(DEVICE))
        outputs.update({f"{case['name']}/{key}": value for key, value in found.items()})
    np.savez(sys.argv[2], **outputs)


if __name__ == "__main__":
    main()
