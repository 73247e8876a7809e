"""Bits do not depend on how far apart the slots of an adopted pool lie, as long as ``audit`` allows it.

A stride that is a multiple of 16 elements is compiled anew, with wider accesses where nothing else tells the alignment;
the sums have to keep their layout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_compile import SMALL, case

HERE = Path(__file__).parent
SIXTEEN_BYTES = {"fp32": 4, "bf16": 8}
LAUNCHES = {  # the stride that a launch reads states with, and the readout that has to keep the bits
    "decode_kernel": ("codes_slot", "output_only"),
    "flush_kernel": ("codes_slot", "output_only"),
    "read_kernel": ("copy_codes_slot", "exact_readout"),
}
CASES = {
    f"{fmt} {launch} +{shift}": case(fmt, launch=launch, shape=SMALL, readout=readout)
    | {"argument": argument, "shift": shift}
    for fmt, step in SIXTEEN_BYTES.items()
    for launch, (argument, readout) in LAUNCHES.items()
    for shift in (0, step)
}


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("strides")
    given, found = folder / "cases.json", folder / "results.json"
    given.write_text(json.dumps(list(CASES.values())))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(HERE / "compile_stride_cases.py"), str(given), str(found)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(CASES, json.loads(found.read_text()), strict=True))


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("fmt", SIXTEEN_BYTES)
def test_slots_further_apart_keep_the_layout_of_the_sums(sums: dict[str, Any], fmt: str, launch: str) -> None:
    near, far = sums[f"{fmt} {launch} +0"], sums[f"{fmt} {launch} +{SIXTEEN_BYTES[fmt]}"]
    assert near
    assert far == near
