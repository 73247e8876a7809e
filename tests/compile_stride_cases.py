"""Run by tests/test_compile_strides.py as a program, without TRITON_INTERPRET and without a GPU.

Usage: compile_stride_cases.py CASES.json RESULTS.json. A case is one of compile_cases.py with two more fields:
argument, a slot stride of the launch; shift, elements that are added to it. A result: float additions, as there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))  # case files share modules
import compile_cases


def run(case: dict[str, Any]) -> list[Any]:
    kernel, args, kwargs = compile_cases.capture(case)
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    assert isinstance(given[case["argument"]], int)
    given[case["argument"]] += case["shift"]
    compiled = compile_cases.compile_launch(kernel, (), given, case["arch"])
    return compile_cases.read_ir(compiled.asm["ttgir"])["sums"]  # type: ignore[no-any-return]


def main() -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(case) for case in cases]))


if __name__ == "__main__":
    main()
