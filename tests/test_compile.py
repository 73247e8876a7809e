"""The compiled kernels, without a GPU: what fixes the bits is the same in baseline, replay and flush.

Triton adds up a row in the order that the layout of the tile gives, and picks that layout from the memory accesses of
the whole kernel. So the sums of the state must have the layouts of the baseline whatever else a plan reads and writes.
One process (tests/compile_cases.py) compiles each launch once, to TTGIR where nothing further is asked of it.
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

from driftgate.kernels.contract import HeadShape, ReplayOptions
from driftgate.kernels.launch import choose_launch
from driftgate.quant.formats import FORMATS

HERE = Path(__file__).parent
BIG = (16, 32, 128, 128)
READOUTS = ("output_only", "exact_readout")
SPLITS = [(a, b) for a, b in product(FORMATS, FORMATS) if a == b or FORMATS[b].bits <= FORMATS[a].bits]
CORE = ("fp32", "bf16", "fp16", "fp8", "nvfp4")
CORE_SPLITS = [(a, b) for a, b in SPLITS if a in CORE and b in CORE]


def case(recurrence: str, read: str | None = None, **changes: Any) -> dict[str, Any]:
    fields = {
        "arch": 90, "shape": BIG, "activation": "bfloat16", "recurrence": recurrence, "read": read or recurrence,
        "length": 16, "readout": "output_only", "flush_only": False, "ptx": False,
    }  # fmt: skip
    assert set(changes) <= set(fields)
    return fields | changes


def baseline_of(plan: dict[str, Any]) -> dict[str, Any]:
    """The step-by-step kernel that stores the same format."""
    return plan | {"length": 0, "read": plan["recurrence"], "readout": "output_only", "flush_only": False, "ptx": False}


SHORT = [
    *(case(a, b, readout=r) for (a, b), r in product(CORE_SPLITS, READOUTS)),
    *(case("fp32", b, length=32) for b in ("fp32", "nvfp4")),
    *(case(a, flush_only=True) for a in CORE),
    *(case("fp32", b, arch=100, readout=r) for b, r in product(("fp32", "fp8", "nvfp4"), READOUTS)),
    case("fp32", "nvfp4", shape=(2, 4, 64, 64), activation="float32", length=5),
    case("fp8", "nvfp4", shape=(2, 4, 40, 24), length=3),
    case("fp32", "nvfp4", shape=(1, 2, 32, 80), length=32),  # buffered keys and û have the shape of the state's tile
]
SHAPES = (BIG, (2, 4, 64, 64), (2, 4, 40, 24), (1, 1, 32, 256))
OTHERS = [
    case(a, b, readout=r, arch=arch, shape=shape, length=length, activation=activation)
    for (a, b), r, arch, shape, length, activation in product(
        CORE_SPLITS, READOUTS, (90, 100), SHAPES, (1, 2, 16, 32), ("bfloat16", "float32")
    )
]
LONG = [  # every pair of formats once, and a seeded sample of everything else
    *(case(a, b, readout=r) for (a, b), r in product(SPLITS, READOUTS)),
    *random.Random(0).sample(OTHERS, 60),
]
WITH_PTX = [case("fp8", "nvfp4", ptx=True), case("nvfp4", length=0, arch=100, ptx=True)]


def name(plan: dict[str, Any]) -> str:
    flush = "-flush_now" if plan["flush_only"] else ""
    shape = "x".join(map(str, plan["shape"]))
    return f"{plan['read']}/{plan['recurrence']}@{plan['length']}-{plan['readout']}-sm_{plan['arch']}-{shape}{flush}"


def key(plan: dict[str, Any]) -> str:
    return json.dumps(plan, sort_keys=True)


def compile_all(plans: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    every = list({key(p): p for plan in plans for p in (plan, baseline_of(plan))}.values())
    given, found = folder / "cases.json", folder / "results.json"
    given.write_text(json.dumps(every))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(HERE / "compile_cases.py"), str(given), str(found)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip((key(p) for p in every), json.loads(found.read_text()), strict=True))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return compile_all([*SHORT, *WITH_PTX], tmp_path_factory.mktemp("compiled"))


def tile_sums(result: dict[str, Any], plan: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Layouts of the sums over a state's rows, in program order, and of the sums over a key (its norm)."""
    key_heads, value_heads, d_k, d_v = plan["shape"]
    shape = HeadShape(key_heads=key_heads, value_heads=value_heads, d_k=d_k, d_v=d_v)
    launch = choose_launch(shape, interpreted=False)
    tile = f"{launch.block_v}x{launch.block_k}"
    rows = [layout for dims, axis, layout in result["sums"] if (dims, axis) == (tile, 1)]
    norms = [layout for dims, axis, layout in result["sums"] if (dims, axis) == (str(launch.block_k), 0)]
    return rows, norms


def check_layouts(plan: dict[str, Any], compiled: dict[str, dict[str, Any]]) -> None:
    rows, norms = tile_sums(compiled[key(plan)], plan)
    base_rows, base_norms = tile_sums(compiled[key(baseline_of(plan))], plan)
    assert len(base_rows) == 2, "the baseline sums the state for S k and for S q"
    assert len(set(base_rows)) == len(set(base_norms)) == 1
    # A flush comes first: S k of a folded step, then S k and S q of the step itself. With FP32 read and recurrence the
    # readout after it, the same three sums, has to keep the bits too.
    n = 1 if plan["flush_only"] else 3
    if plan["recurrence"] == plan["read"] and plan["readout"] == "exact_readout":
        n = 6
    assert rows[:n] == [base_rows[0]] * n
    assert set(norms) == {base_norms[0]}


@pytest.mark.parametrize("plan", SHORT, ids=name)
def test_sums_of_the_state_have_the_layout_of_the_baseline(
    plan: dict[str, Any], compiled: dict[str, dict[str, Any]]
) -> None:
    check_layouts(plan, compiled)


@pytest.mark.parametrize("plan", SHORT, ids=name)
def test_no_division_is_approximate(plan: dict[str, Any], compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[key(plan)]["plain_divisions"] == 0
    assert compiled[key(baseline_of(plan))]["plain_divisions"] == 0


@pytest.mark.parametrize("plan", WITH_PTX, ids=name)
def test_ptx_divides_and_takes_roots_exactly(plan: dict[str, Any], compiled: dict[str, dict[str, Any]]) -> None:
    result = compiled[key(plan)]
    assert result["approximate"] == []
    assert result["fma"], "the rank-1 update is a fused multiply-add"


def test_every_pair_of_formats_is_a_plan() -> None:
    for recurrence, read in SPLITS:
        assert ReplayOptions(recurrence=recurrence, read=read, length=2).recurrence == recurrence
    assert len(CORE_SPLITS) == 16
    assert len(SPLITS) == 65


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_launch_has_the_layouts_of_the_baseline(tmp_path: Path) -> None:
    found = compile_all(LONG, tmp_path)
    for plan in LONG:
        check_layouts(plan, found)
