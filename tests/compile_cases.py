"""Run by tests/test_compile.py as a program, without TRITON_INTERPRET and without a GPU: compiles what launches would.

Usage: compile_cases.py CASES.json RESULTS.json. A case: arch; kernels (gdn, kda, mamba2); shape [H, HV, d_k, d_v];
activation; the options of a plan; flush_only; launch (decode_kernel, flush_kernel or read_kernel: which of a step's
launches is compiled); rows (that a program of a flush serves); mutant (None: the real kernels); full.
A result: float additions by ``tl.sum`` in program order as [operand shape, axis, layout]; how many plain divisions and
matrix products. With full the launch is compiled to a binary, and there are: PTX instructions that approximate a
division or a square root; types of matrix products; what is done with 32-bit slot numbers; any fused multiply-add.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from driftgate.accuracy.step_data import draw_inputs
from driftgate.kernels.contract import Recurrence
from driftgate.kernels.pool import StatePool

sys.path.append(str(Path(__file__).parent))  # case files share modules
from kernel_cases import find_kernels, make_options, make_shape

KERNELS = ("decode_kernel", "flush_kernel", "key_kernel", "product_kernel", "read_kernel")
LAUNCH_FLAGS = ("num_warps", "num_stages", "enable_fp_fusion")
REDUCTION = re.compile(
    r'"tt\.reduce"\([^)]*\) <\{axis = (\d)[^>]*\}> \(\{((?:(?!"tt\.reduce").)*?)\}\) : '
    r"\(tensor<([\dx]+)xf32, (#[^\n]*?)>\) ->",
    re.S,
)
APPROXIMATE = re.compile(r"\b(?:div\.full|div\.approx|rcp\.approx|sqrt\.approx)\S*")
PRODUCT = re.compile(r"= (?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b")
TTIR_PRODUCT = re.compile(r"= tt\.dot [^:]*?(?:inputPrecision = (\w+) )?: tensor<\d+x\d+x(\w+)>")
Launched = tuple[Any, tuple[Any, ...], dict[str, Any]]


class StoppedError(Exception):
    """Carries the TTGIR of a compilation that went no further."""


class Recorder:
    """Stands in for a jitted kernel and keeps the arguments of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, []
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **kwargs: self.calls.append((self.kernel, args, kwargs))


def capture(case: dict[str, Any]) -> Launched:
    """Kernel and arguments that driftgate launches for a case."""
    shape, dtype = make_shape(case["shape"]), getattr(torch, case["activation"])
    options, recurrence = make_options(**case["options"]), Recurrence(case["kernels"])
    data = draw_inputs(shape, dtype, n_rows=2, n_steps=1, seed=0, recurrence=recurrence)
    pool = StatePool(shape, options, recurrence=recurrence, n_slots=data.n_slots, activation_dtype=dtype)
    public = find_kernels(case["kernels"], case["mutant"])
    module: ModuleType = importlib.import_module(public.fold_now.__module__)
    real = {name: getattr(module, name) for name in KERNELS}
    recorders = {name: Recorder(kernel) for name, kernel in real.items()}
    for name, recorder in recorders.items():
        setattr(module, name, recorder)
    try:
        if case["flush_only"]:
            public.flush_now(pool, data.slots[data.live_rows], **data.fold_constants())
        else:
            take = public.decode_step if options.step_by_step else public.replay_step
            take(**data.inputs(0), pool=pool, layer=0, slots=data.slots)
    finally:
        for name, kernel in real.items():
            setattr(module, name, kernel)
    ((kernel, args, kwargs),) = recorders[case["launch"]].calls
    return kernel, args, kwargs | ({"ROWS": case["rows"]} if case["launch"] == "flush_kernel" else {})


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int) -> Any:
    """Compile as the launch would: same types, constants and divisibility."""
    flags = {name: kwargs[name] for name in LAUNCH_FLAGS}
    assert isinstance(flags["enable_fp_fusion"], bool)
    values = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k not in flags}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int) and number % 16 == 0 and not parameter.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=flags)


def read_ir(text: str) -> dict[str, Any]:
    """Additions, divisions and matrix products of a TTGIR module."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", text, re.M))
    sums = []
    for axis, body, dims, layout in REDUCTION.findall(text):
        if "arith.addf" in body:
            named = re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), layout)
            sums.append([dims, int(axis), named])
    divisions, products = (len(re.findall(pattern, text)) for pattern in (r"\barith\.divf\b", PRODUCT))
    return {"sums": sums, "plain_divisions": divisions, "products": products}


def find_slot_uses(ttir: str) -> list[str]:
    """Operations on slot numbers as they are loaded, one row at a time, in 32 bits."""
    uses = set()
    for address in re.findall(r"(%\S+) = tt\.addptr %slots, ", ttir):
        for slot in re.findall(rf"(%\S+) = tt\.load {re.escape(address)}[ ,].*!tt\.ptr<i32>", ttir):
            lines = [line for line in ttir.splitlines() if re.search(rf"{re.escape(slot)}(?![\w])", line)]
            uses |= {found[1] for line in lines if (found := re.search(rf"= (\S+) .*{re.escape(slot)}(?!\w)", line))}
    return sorted(uses)


def run(case: dict[str, Any]) -> dict[str, Any]:
    launch = capture(case)
    if case["full"]:
        compiled = compile_launch(*launch, case["arch"])
        ptx, ttir = compiled.asm["ptx"], compiled.asm["ttir"]
        return read_ir(compiled.asm["ttgir"]) | {
            "approximate": sorted(set(APPROXIMATE.findall(ptx))),
            "fma": "fma.rn.f32" in ptx,
            "product_types": [kind if kind != "f32" else how or "ieee" for how, kind in TTIR_PRODUCT.findall(ttir)],
            "slot_uses": find_slot_uses(ttir),
            "binary": len(compiled.asm["cubin"]),
        }

    def stop(module: object, *_rest: object) -> None:
        raise StoppedError(str(module))

    plain = CUDABackend.__dict__["make_llir"]
    CUDABackend.make_llir = staticmethod(stop)
    try:
        return read_ir(compile_launch(*launch, case["arch"]).asm["ttgir"])  # already compiled to a binary
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
