"""The compiled kernels, without a GPU: what fixes the bits is the same in baseline, replay and flush, and all compile.

Triton adds up a row in the order that the layout of the tile gives, and picks that layout from the memory accesses of
the whole kernel. So the sums of the state must have the layouts of the baseline whatever else a plan reads and writes.
One process (tests/compile_cases.py) compiles each launch once: heads of real models to TTGIR, where layouts are fixed,
and every variant of the kernels to a binary on small heads, where that is quick.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from kernel_cases import make_shape
from mutants import write_mutant

from driftgate.kernels.contract import Dot, Recurrence, ReplayOptions
from driftgate.kernels.launch import choose_launch
from driftgate.quant.formats import FORMATS

HERE = Path(__file__).parent
BIG = (16, 32, 128, 128)
WIDE = (2, 4, 256, 256)
SMALL = (1, 2, 32, 16)
REAL = {"gdn": BIG, "kda": (4, 4, 128, 128), "mamba2": (2, 16, 128, 64)}
READOUTS = ("output_only", "exact_readout")
KERNELS = ("decode_kernel", "flush_kernel", "key_kernel", "product_kernel", "read_kernel")
SPLITS = [(a, b) for a, b in product(FORMATS, FORMATS) if a == b or FORMATS[b].bits <= FORMATS[a].bits]
CORE = ("fp32", "bf16", "fp16", "fp8", "nvfp4")
CORE_SPLITS = [(a, b) for a, b in SPLITS if a in CORE and b in CORE]


def case(recurrence: str, read: str | None = None, *, launch: str = "flush_kernel", **changes: Any) -> dict[str, Any]:
    """recurrence and read are formats; what is no field of a case is an option of the plan."""
    fields = {
        "arch": 90, "kernels": "gdn", "shape": BIG, "activation": "bfloat16", "launch": launch, "flush_only": False,
        "rows": 1, "mutant": None, "full": False,
    }  # fmt: skip
    options = {"recurrence": recurrence, "read": read or recurrence, "length": 16}
    for name, value in changes.items():
        (fields if name in fields else options)[name] = value
    if launch == "decode_kernel":
        options["length"] = 0
    return fields | {"options": options}


def baseline_of(plan: dict[str, Any]) -> dict[str, Any]:
    """The step-by-step kernel that stores the same format."""
    stored = plan["options"]["recurrence"]
    kept = {name: plan[name] for name in ("arch", "kernels", "shape", "activation")}
    return case(stored, launch="decode_kernel", **kept)


def exact(fmt: str, **changes: Any) -> dict[str, Any]:
    """The readout that has to keep the bits where it reads what the checkpoint holds."""
    return case(fmt, launch="read_kernel", readout="exact_readout", **changes)


LAYOUTS = [
    *(case(a, b) for a, b in CORE_SPLITS),
    *(exact(a) for a in CORE),
    *(case(a, flush_only=True) for a in CORE),
    *(case("fp32", b, arch=100) for b in ("fp32", "fp8", "nvfp4")),
    *(case("fp32", b, rows=16) for b in ("fp32", "nvfp4")),
    *(make("fp32", kernels=k, shape=WIDE) for k, make in product(("gdn", "kda"), (case, exact))),
    case("fp8", "nvfp4", shape=WIDE, stochastic=True),
    case("fp32", "nvfp4", shape=(2, 4, 64, 64), activation="float32"),
    case("fp8", "nvfp4", shape=(2, 4, 40, 24)),
    case("fp32", "nvfp4", shape=(1, 2, 32, 80), length=32),
    *(
        make("fp32", kernels=k, shape=REAL[k], arch=arch)
        for k, make, arch in product(("kda", "mamba2"), (case, exact), (90, 100))
    ),
    *(
        case(a, b, kernels=k, shape=REAL[k])
        for k, (a, b) in product(("kda", "mamba2"), (("fp32", "nvfp4"), ("fp8", "nvfp4"), ("bf16", "bf16")))
    ),
    *(case("fp32", kernels=k, shape=REAL[k], flush_only=True) for k in ("kda", "mamba2")),
    *(case("fp32", "fp8", kernels=k, shape=REAL[k], rows=16) for k in ("kda", "mamba2")),
    *(make("fp32", kernels="mamba2", shape=(8, 16, 128, 80)) for make in (case, exact)),
    case("bf16", "nvfp4", kernels="mamba2", shape=(8, 16, 128, 80)),
]
SHAPES = (BIG, (2, 4, 64, 64), (2, 4, 40, 24), (1, 1, 32, 256))
OTHERS = [
    make(a, b, arch=arch, shape=shape, activation=activation, kernels=k)
    for (a, b), make, arch, shape, activation, k in product(
        CORE_SPLITS, (case, lambda a, b, **c: exact(a, **c)), (90, 100), SHAPES, ("bfloat16", "float32"), REAL
    )
]
LONG = [  # every pair of formats once, and a seeded sample of everything else
    *(case(a, b, kernels=k, shape=REAL[k]) for (a, b), k in product(SPLITS, REAL)),
    *random.Random(0).sample(OTHERS, 60),
]


def variants(kernels: str, arch: int, pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Every kernel of a recurrence, compiled to a binary; the pairs of formats (recurrence, read) in turn."""
    common: dict[str, Any] = {"kernels": kernels, "arch": arch, "shape": SMALL, "full": True}
    read = common | {"launch": "read_kernel"}
    makes = [
        {"launch": "decode_kernel"} | common,
        common,
        common | {"rows": 16},
        common | {"fold": "cached"},
        common | {"flush_only": True},
        read | {"launch": "key_kernel"},
        read | {"launch": "product_kernel"},
        read | {"readout": "exact_readout"},
        *(read | {"readout": "state_output", "dot": dot.value} for dot in Dot),
    ]
    found = []
    for n, make in enumerate(makes):
        a, b = pairs[n % len(pairs)]
        b = a if make.get("launch") == "decode_kernel" else b
        found.append(case(a, b, **make))
    return found


PAIRS = {  # every format is stored and read by some kernel, at random where it can be
    ("gdn", 90): [("fp8", "fp8"), ("fp16", "mxfp8"), ("int16", "nvfp4"), ("fp32", "mxfp4")],
    ("gdn", 100): [("fp32", "fp32"), ("int8", "int8"), ("bf16", "fp8")],
    ("kda", 90): [("int8", "int8"), ("fp8_e5m2", "nvfp4"), ("fp32", "int16"), ("bf16", "bf16")],
    ("kda", 100): [("nvfp4", "nvfp4"), ("fp32", "fp8"), ("mxfp8", "mxfp4")],
    ("mamba2", 90): [("fp16", "fp16"), ("fp32", "nvfp4"), ("fp8", "fp8_e5m2"), ("mxfp4", "mxfp4")],
    ("mamba2", 100): [("bf16", "bf16"), ("fp32", "fp32"), ("int16", "int8")],
}
FULL = [
    *(plan for (kernels, arch), pairs in PAIRS.items() for plan in variants(kernels, arch, pairs)),
    *(
        case(a, launch=launch, kernels=k, arch=arch, shape=SMALL, full=True, stochastic=True)
        for (a, k, arch), launch in zip(
            product(("bf16", "fp8", "nvfp4"), REAL, (90, 100)), 9 * ["decode_kernel", "flush_kernel"], strict=True
        )
    ),
    *(
        case(
            "fp32", "nvfp4", launch="read_kernel", kernels=k, shape=shape, full=True, readout="state_output", dot="tf32"
        )
        for k, shape in (("gdn", WIDE), ("kda", WIDE), ("mamba2", REAL["mamba2"]))
    ),
    *(case("fp32", b, launch="product_kernel", kernels=k, shape=REAL[k], full=True) for k, b in product(REAL, CORE)),
    *(case("fp32", launch="key_kernel", kernels=k, shape=REAL[k], full=True) for k in REAL),
    case("fp32", kernels="mamba2", shape=(8, 16, 128, 80), full=True),
    case("nvfp4", kernels="mamba2", launch="decode_kernel", shape=REAL["mamba2"], arch=100, full=True),
]


def name(plan: dict[str, Any]) -> str:
    options = dict(plan["options"])
    formats = f"{options.pop('read')}/{options.pop('recurrence')}@{options.pop('length')}"
    rest = [str(options[option]) for option in sorted(options)]
    rest += [f"rows-{plan['rows']}"] * (plan["rows"] > 1) + ["flush_now"] * plan["flush_only"]
    kernel = plan["launch"].removesuffix("_kernel")
    return "-".join(
        [plan["kernels"], kernel, formats, *rest, f"sm_{plan['arch']}", "x".join(map(str, plan["shape"]))]
        + ["float32"] * (plan["activation"] == "float32")
    )


def key(plan: dict[str, Any]) -> str:
    return json.dumps(plan, sort_keys=True)


def compile_all(plans: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    every = list({key(plan): plan for plan in plans}.values())
    given, found = folder / "cases.json", folder / "results.json"
    given.write_text(json.dumps(every))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(HERE / "compile_cases.py"), str(given), str(found)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip((key(p) for p in every), json.loads(found.read_text()), strict=True))


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return compile_all([*LAYOUTS, *map(baseline_of, LAYOUTS)], tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return compile_all(FULL, tmp_path_factory.mktemp("binaries"))


def tile_sums(result: dict[str, Any], plan: dict[str, Any]) -> tuple[list[list[str]], list[str]]:
    """Shapes and layouts of sums over a tile's rows, in program order; layouts of sums over a key (its norm)."""
    block_k = choose_launch(make_shape(plan["shape"]), interpreted=False).block_k
    rows = [[dims, layout] for dims, axis, layout in result["sums"] if "x" in dims and axis == 1]
    norms = [layout for dims, axis, layout in result["sums"] if (dims, axis) == (str(block_k), 0)]
    return rows, norms


def check_layouts(plan: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    """A fold sums S k of a buffered step where u depends on it; then the step itself sums S k, and S q."""
    delta = Recurrence(plan["kernels"]).delta_rule
    of_fold, of_step = (1, 2) if delta else (0, 1)
    rows, norms = tile_sums(found[key(plan)], plan)
    base_rows, base_norms = tile_sums(found[key(baseline_of(plan))], plan)
    assert len(base_rows) == of_step
    assert len(base_norms) == (2 if delta else 0)
    assert rows == base_rows[:of_fold] + ([] if plan["flush_only"] else base_rows)
    assert set(norms) == set(base_norms)


@pytest.mark.parametrize("plan", LAYOUTS, ids=name)
def test_sums_of_the_state_have_the_layout_of_the_baseline(plan: dict[str, Any], layouts: dict[str, Any]) -> None:
    check_layouts(plan, layouts)


@pytest.mark.parametrize("plan", LAYOUTS, ids=name)
def test_nothing_is_approximate_on_the_exact_route(plan: dict[str, Any], layouts: dict[str, Any]) -> None:
    """No plain division, which compiles to an approximation, and no matrix product, whose order is the hardware's."""
    for one in (plan, baseline_of(plan)):
        assert layouts[key(one)]["plain_divisions"] == 0
        assert layouts[key(one)]["products"] == 0


@pytest.mark.parametrize("plan", FULL, ids=name)
def test_every_kernel_compiles(plan: dict[str, Any], binaries: dict[str, Any]) -> None:
    """To a binary, with exact divisions and roots, and with 64-bit offsets of slots."""
    found = binaries[key(plan)]
    assert found["binary"] > 0
    assert found["approximate"] == []
    assert found["plain_divisions"] == 0
    assert found["fma"] or plan["launch"] in ("key_kernel", "product_kernel", "read_kernel"), (
        "the rank-1 update is a fused multiply-add"
    )
    assert found["slot_uses"] == ["arith.extsi"], "a slot number is widened before anything is done with it"
    readout = plan["options"].get("readout", "output_only")
    if readout == "state_output":
        assert found["product_types"] == [plan["options"]["dot"]]
    elif readout == "exact_readout" or plan["launch"] in ("decode_kernel", "flush_kernel"):
        assert found["product_types"] == [], "the order of a matrix product is the hardware's"
    else:
        assert "tf32" not in found["product_types"], "only state_output may round its operands"


SLOT = ".to(tl.int64)"
NARROW = {
    "decode_kernel": "    slot = tl.load(slots + i_row).to(tl.int64)\n    i_head = i_row * HV + i_hv\n    if slot",
    "flush_kernel": "        slot = tl.load(slots + i_row, mask=i_row < n_rows, other=PAD).to(tl.int64)\n",
    "key_kernel": "    slot = tl.load(slots + i_row).to(tl.int64)\n    if slot",
    "product_kernel": "    slot = tl.load(slots + i_row).to(tl.int64)\n    i_head = i_row * HV + i_hv\n    p_v",
    "read_kernel": "    slot = tl.load(slots + i_row).to(tl.int64)\n    p_v",
}


def test_narrow_slots_are_told(tmp_path: Path) -> None:
    """Offsets of 32 bits would wrap in a pool of more than 2^31 elements."""
    plans = []
    for launch, text in NARROW.items():
        folder = tmp_path / launch
        folder.mkdir()
        path = write_mutant(folder, text, text.replace(SLOT, ""))
        readout = "exact_readout" if launch == "read_kernel" else "output_only"
        plans.append(case("fp32", launch=launch, shape=SMALL, full=True, mutant=str(path), readout=readout))
    found = compile_all(plans, tmp_path)
    for plan in plans:
        assert "arith.muli" in found[key(plan)]["slot_uses"]


def test_every_format_and_variant_is_compiled() -> None:
    for field in ("recurrence", "read"):
        assert {plan["options"][field] for plan in FULL} == set(FORMATS)
    assert {plan["options"]["recurrence"] for plan in FULL if plan["launch"] == "decode_kernel"} >= set(CORE)
    for kernels, arch in product(REAL, (90, 100)):
        here = [plan for plan in FULL if (plan["kernels"], plan["arch"]) == (kernels, arch)]
        assert {plan["launch"] for plan in here} == set(KERNELS)
        assert {plan["options"].get("readout", "output_only") for plan in here} == {*READOUTS, "state_output"}
        assert {plan["options"]["dot"] for plan in here if "dot" in plan["options"]} == {dot.value for dot in Dot}
        assert {plan["options"].get("stochastic", False) for plan in here} == {True, False}


def test_every_pair_of_formats_is_a_plan() -> None:
    for recurrence, read in SPLITS:
        assert ReplayOptions(recurrence=recurrence, read=read, length=2).recurrence == recurrence
    assert len(CORE_SPLITS) == 16
    assert len(SPLITS) == 65


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_launch_has_the_layouts_of_the_baseline(tmp_path: Path) -> None:
    found = compile_all([*LONG, *map(baseline_of, LONG)], tmp_path)
    for plan in LONG:
        check_layouts(plan, found)
