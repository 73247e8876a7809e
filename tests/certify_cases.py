"""Called by tests/test_certify.py under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from driftgate.accuracy import certify
from driftgate.kernels.contract import Backend, HeadShape


def load_kernels(path: str) -> ModuleType:
    """A changed copy of kernels/gdn/decode.py, under another name."""
    spec = importlib.util.spec_from_file_location(f"mutant_{abs(hash(path))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Triton looks the module of a jitted function up
    spec.loader.exec_module(module)
    return module


def run(
    shape: list[int], lengths: list[int], formats: list[str], kernels: str | None = None
) -> list[dict[str, object]]:
    """Records of ``certify`` as JSON; shape is H, HV, d_k, d_v."""
    key_heads, value_heads, d_k, d_v = shape
    records = certify(
        backend=Backend.TRITON_INTERPRET,
        shapes=[HeadShape(key_heads=key_heads, value_heads=value_heads, d_k=d_k, d_v=d_v)],
        lengths=lengths,
        formats=formats,
        implementation=None if kernels is None else load_kernels(kernels),
    )
    return [record.model_dump() for record in records]
