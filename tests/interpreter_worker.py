"""Run by the fixture ``interpreted`` as a program, with TRITON_INTERPRET=1: calls functions of case files.

Protocol, one JSON document a line: {"file", "function", "arguments"} in, {"result"} or {"error"} out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

import torch

LOADED: dict[str, ModuleType] = {}


def load(file: str) -> ModuleType:
    if file not in LOADED:
        spec = importlib.util.spec_from_file_location(f"cases_{len(LOADED)}", file)
        assert spec is not None
        assert spec.loader is not None
        LOADED[file] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = LOADED[file]  # jitted functions and dataclasses look their module up
        spec.loader.exec_module(LOADED[file])
    return LOADED[file]


def answer(request: dict[str, object]) -> dict[str, object]:
    try:
        function = getattr(load(str(request["file"])), str(request["function"]))
        return {"result": function(**request["arguments"])}
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    torch.set_num_threads(1)
    sys.path.append(str(Path(__file__).parent))  # case files share modules
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the cases print goes to standard error
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
