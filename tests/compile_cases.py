"""Run by tests/test_compile.py as a program, without TRITON_INTERPRET and without a GPU: compiles what launches would.

Usage: compile_cases.py CASES.json RESULTS.json. A case: arch, shape [H, HV, d_k, d_v], activation, recurrence, read,
length (0: baseline), readout, flush_only, ptx. A result: float additions by ``tl.sum`` in program order as [operand
shape, axis, layout]; plain divisions; and with ptx the PTX instructions that approximate a division or a square root.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from driftgate.kernels.contract import HeadShape, Readout, ReplayOptions
from driftgate.kernels.gdn import decode
from driftgate.kernels.pool import StatePool

KERNELS = ("decode_kernel", "replay_kernel")
LAUNCH_FLAGS = ("num_warps", "num_stages", "enable_fp_fusion")
REDUCTION = re.compile(
    r'"tt\.reduce"\(.*?\) <\{axis = (\d)[^>]*\}> \(\{(.*?)\}\) : \(tensor<([\dx]+)xf32, (.*?)>\) ->', re.S
)
APPROXIMATE = re.compile(r"\b(?:div\.full|div\.approx|rcp\.approx|sqrt\.approx|rsqrt\.approx)\S*")


class StoppedError(Exception):
    """Carries the TTGIR of a compilation that went no further."""


class Recorder:
    """Stands in for a jitted kernel and keeps the arguments of its launch."""

    def __init__(self, kernel: Any, calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **kwargs: self.calls.append((self.kernel, args, kwargs))


def capture(case: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Kernel and arguments that driftgate launches for a case."""
    key_heads, value_heads, d_k, d_v = case["shape"]
    shape = HeadShape(key_heads=key_heads, value_heads=value_heads, d_k=d_k, d_v=d_v)
    options = ReplayOptions(
        recurrence=case["recurrence"], read=case["read"], length=case["length"], readout=Readout(case["readout"])
    )
    dtype = getattr(torch, case["activation"])
    pool = StatePool(shape, options, n_slots=3, activation_dtype=dtype)
    slots = torch.arange(2, dtype=torch.int32)
    k, v = torch.zeros(2, key_heads, d_k, dtype=dtype), torch.zeros(2, value_heads, d_v, dtype=dtype)
    gate = torch.zeros(2, value_heads)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    real = {name: getattr(decode, name) for name in KERNELS}
    for name, kernel in real.items():
        setattr(decode, name, Recorder(kernel, calls))
    try:
        if case["flush_only"]:
            decode.flush_now(pool, slots)
        else:
            take = decode.decode_step if options.step_by_step else decode.replay_step
            take(k, k, v, gate, gate, pool=pool, layer=0, slots=slots)
    finally:
        for name, kernel in real.items():
            setattr(decode, name, kernel)
    (call,) = calls
    return call


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int) -> Any:
    """Compile as the launch would: same types, constants and divisibility."""
    flags = {name: kwargs[name] for name in LAUNCH_FLAGS}
    assert flags["enable_fp_fusion"] is False
    values = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k not in flags}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int) and number % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=flags)


def read_ir(text: str) -> dict[str, Any]:
    """Additions and divisions of a TTGIR module."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", text, re.M))
    sums = []
    for axis, body, dims, layout in REDUCTION.findall(text):
        if "arith.addf" in body:
            named = re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), layout)
            sums.append([dims, int(axis), named])
    return {"sums": sums, "plain_divisions": len(re.findall(r"\barith\.divf\b", text))}


def run(case: dict[str, Any]) -> dict[str, Any]:
    launch = capture(case)
    if case["ptx"]:
        compiled = compile_launch(*launch, case["arch"])
        approximate = sorted(set(APPROXIMATE.findall(compiled.asm["ptx"])))
        return read_ir(compiled.asm["ttgir"]) | {"approximate": approximate, "fma": "fma.rn.f32" in compiled.asm["ptx"]}

    def stop(module: object, *_rest: object) -> None:
        raise StoppedError(str(module))

    plain = CUDABackend.__dict__["make_llir"]
    CUDABackend.make_llir = staticmethod(stop)
    try:
        return read_ir(compile_launch(*launch, case["arch"]).asm["ttgir"])  # already compiled for its PTX
    except StoppedError as stopped:
        return read_ir(str(stopped))
    finally:
        CUDABackend.make_llir = plain


def main() -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(case) for case in cases]))


if __name__ == "__main__":
    main()
