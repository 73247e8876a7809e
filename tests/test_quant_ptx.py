"""What the tile functions compile to: exact divisions, no contraction, one order of additions.

One process without TRITON_INTERPRET (tests/quant_ptx_cases.py) compiles for sm_80, sm_90 and sm_100; no GPU
is needed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "quant_ptx_cases.py"
READ = ("bf16", "fp8", "nvfp4", "fp8_e5m2", "int8", "int16", "mxfp4", "mxfp8")
STOCHASTIC = ("bf16", "fp16", "fp8", "int8", "nvfp4")
FORMATS = ("fp32", "fp16", *READ)
QUANTISING = (
    *(f"{name}/90" for name in ("fp8", "nvfp4", "fp8_e5m2", "int8", "int16", "mxfp4", "mxfp8")),
    *(f"{name}/100" for name in ("fp8", "nvfp4", "fp8_e5m2", "mxfp4")),
    *(f"{name}/80" for name in ("fp8", "nvfp4", "fp8_e5m2", "mxfp8")),
)
APPROXIMATE = re.compile(r"\S*(?:div\.full|div\.approx|rcp\.approx|\.ftz)\S*")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("ptx")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-P", CASES, folder / "found.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.parametrize("case", QUANTISING)
def test_quantising_stores_divide_exactly(compiled: dict[str, dict[str, str]], case: str) -> None:
    ptx = compiled[f"write/{case}"]["ptx"]
    assert "div.rn.f32" in ptx
    assert APPROXIMATE.findall(ptx) == []


@pytest.mark.parametrize("case", [*(f"write/{name}/90" for name in FORMATS), *(f"read/{name}/90" for name in READ)])
def test_nothing_is_contracted_though_fusion_is_on(compiled: dict[str, dict[str, str]], case: str) -> None:
    assert re.findall(r"\bfma\.rn\S*", compiled[case]["ptx"]) == []


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_stores_divide_exactly(compiled: dict[str, dict[str, str]], name: str) -> None:
    assert APPROXIMATE.findall(compiled[f"stochastic/{name}/90"]["ptx"]) == []


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "fp8_e5m2", "mxfp8"])
def test_integer_codec_needs_no_fp8_instruction(compiled: dict[str, dict[str, str]], name: str) -> None:
    assert re.search("e[45]m[23]", compiled[f"write/{name}/80"]["ptx"]) is None
    element = "e5m2" if name == "fp8_e5m2" else "e4m3"
    assert f"cvt.rn.satfinite.{element}x2.f32" in compiled[f"write/{name}/90"]["ptx"]


@pytest.mark.parametrize("name", READ)
def test_reads_are_vectorised(compiled: dict[str, dict[str, str]], name: str) -> None:
    # 16 rows of 64 elements on 32 threads are 32 elements a thread: 4, 2 and 1 loads of 16 bytes.
    loads = re.findall(r"ld\.global\.v4\.b32", compiled[f"read/{name}/90"]["ptx"])
    assert len(loads) == {"bf16": 4, "int16": 4, "nvfp4": 1, "mxfp4": 1}.get(name, 2)


def sum_layouts(ttgir: str) -> set[str]:
    """Layouts of the operands of float reductions over a [32, 128] tile, spelled out."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, flags=re.MULTILINE))
    blocks = re.findall(r'= "tt\.reduce"\(.*?\}\) : \(tensor<32x128xf32, (#\w+)>\)', ttgir, flags=re.DOTALL)
    return {layouts[name] for name in blocks}


@pytest.mark.parametrize("name", READ)
def test_a_copy_does_not_change_the_order_of_additions(compiled: dict[str, dict[str, str]], name: str) -> None:
    alone = sum_layouts(compiled["flush/none"]["ttgir"])
    assert len(alone) == 1
    assert sum_layouts(compiled[f"flush/{name}"]["ttgir"]) == alone
