"""The compiled GDN kernels on a GPU: certificates, the FP64 twin, CUDA graphs. ``pytest tests/gpu -m gpu``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from driftgate.accuracy.invariants import check_cases
from driftgate.accuracy.step_data import draw_inputs
from driftgate.kernels.contract import Backend, HeadShape, ReplayOptions
from driftgate.kernels.gdn import implementation
from driftgate.kernels.pool import StatePool

pytestmark = pytest.mark.gpu

BIG = HeadShape(key_heads=16, value_heads=32, d_k=128, d_v=128)
MEDIUM = HeadShape(key_heads=2, value_heads=4, d_k=64, d_v=64)
ODD = HeadShape(key_heads=2, value_heads=4, d_k=40, d_v=24)
WIDE = HeadShape(key_heads=1, value_heads=2, d_k=32, d_v=80)

AGAINST_TWIN: list[tuple[list[int], dict[str, Any], str]] = [
    ([16, 32, 128, 128], {"length": 0}, "bfloat16"),
    ([16, 32, 128, 128], {"length": 8, "read": "nvfp4"}, "bfloat16"),
    ([2, 4, 64, 64], {"length": 0, "recurrence": "nvfp4", "read": "nvfp4"}, "float32"),
    ([2, 4, 64, 64], {"length": 5, "readout": "exact_readout", "read": "fp8"}, "float32"),
    ([1, 2, 40, 24], {"length": 5, "fold": "cached", "readout": "exact_readout", "buffer": "bf16"}, "bfloat16"),
    ([2, 2, 16, 80], {"length": 3, "fold": "cached"}, "float32"),
    ([1, 2, 24, 16], {"length": 2, "read": "nvfp4", "recurrence": "fp8"}, "bfloat16"),
    ([1, 1, 128, 16], {"length": 3, "read": "bf16", "recurrence": "fp16"}, "float32"),
    ([1, 2, 64, 24], {"length": 16, "recurrence": "bf16", "read": "bf16", "track": 5}, "bfloat16"),
]


def load_cases() -> ModuleType:
    path = Path(__file__).parents[1] / "gdn_cases.py"
    spec = importlib.util.spec_from_file_location("gdn_cases_on_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CASES = load_cases()


def check_certificate(**arguments: Any) -> None:
    """What ``certify`` runs, without its records, which need pydantic."""
    n = 0
    for found in check_cases(implementation(Backend.TRITON), device="cuda", **arguments):
        n += 1
        assert found.tally.n_different == 0, (found.case.invariant, found.plan, found.tally.report())
    assert n > 0


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 16, 32])
def test_fp32_keeps_its_bits(length: int) -> None:
    check_certificate(shapes=[BIG], lengths=(length,), formats=("fp32",))


@pytest.mark.parametrize("recurrence", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("length", [1, 16])
def test_formats_keep_their_bits_on_big_heads(recurrence: str, length: int) -> None:
    check_certificate(shapes=[BIG], lengths=(length,), formats=("fp32", recurrence))


@pytest.mark.parametrize("shape", [MEDIUM, ODD], ids=["64x64", "40x24"])
@pytest.mark.parametrize("formats", [("fp16", "nvfp4"), ("fp8", "nvfp4"), ("bf16", "fp8")], ids="-".join)
def test_formats_keep_their_bits_on_other_heads(shape: HeadShape, formats: tuple[str, str]) -> None:
    check_certificate(shapes=[shape], lengths=(1, 3), formats=("fp32", *formats))


def test_a_buffer_with_the_shape_of_the_state_does_not_move_bits() -> None:
    """L = 32 at d_k = 32: keys and û are [32, 32] as the state's tile is."""
    check_certificate(shapes=[WIDE], lengths=(32,), formats=("fp32",))


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32])
def test_output_only_readout_agrees_with_the_twin_at_every_cursor(length: int) -> None:
    """Tiles of fewer than 16 buffered entries came out wrong when compiled (Triton 3.6), at every cursor above 0."""
    found = CASES.compare_with_twin(
        shape=[1, 2, 64, 64], options={"length": length}, activation="float32", n_steps=length + 3, device="cuda"
    )
    assert {what: ratio for what, ratio in found["worst"].items() if ratio > 1} == {}


@pytest.mark.parametrize("case", AGAINST_TWIN, ids=lambda c: "x".join(map(str, c[0])) + "-" + str(c[1]["length"]))
def test_kernel_agrees_with_the_fp64_twin(case: tuple[list[int], dict[str, Any], str]) -> None:
    shape, options, activation = case
    found = CASES.compare_with_twin(
        shape=shape, options=options, activation=activation, n_steps=max(4, options["length"] + 2), device="cuda"
    )
    assert {"output", "state", "padding"} <= set(found["worst"])
    assert {what: ratio for what, ratio in found["worst"].items() if ratio > 1} == {}
    assert found["other_codes"] <= 0.03


@pytest.mark.parametrize(
    "options", [{"length": 6, "fold": "cached"}, {"length": 6, "recurrence": "fp8", "read": "nvfp4"}]
)
def test_flush_without_a_step(options: dict[str, Any]) -> None:
    found = CASES.compare_flush_now(shape=[1, 2, 24, 16], options=options, device="cuda")
    assert found["worst"]["state"] <= 1


def test_runs_are_repeatable() -> None:
    CASES.edge_runs_are_repeatable(device="cuda")


def test_graph_replay_equals_eager() -> None:
    """I5, and rows that become padding between replays leave their slots alone."""
    from driftgate.kernels.gdn import decode

    n_steps = 11
    data = draw_inputs(MEDIUM, torch.bfloat16, n_rows=3, n_steps=n_steps, seed=3, device="cuda")
    options = ReplayOptions(read="nvfp4", recurrence="fp8", length=4)
    pools = []
    for _ in range(2):
        pool = StatePool(MEDIUM, options, n_slots=data.n_slots, activation_dtype=torch.bfloat16, device="cuda")
        pool.write(0, torch.arange(data.n_slots, device="cuda"), data.states)
        pools.append(pool)
    eager, captured = pools
    inputs, slots = [x.clone() for x in data.inputs(0)], torch.full_like(data.slots, -1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles; all rows are padding, so nothing is written
        decode.replay_step(*inputs, pool=captured, layer=0, slots=slots)
        captured.advance(slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode.replay_step(*inputs, pool=captured, layer=0, slots=slots)
        captured.advance(slots)
    for t in range(n_steps):
        rows = data.slots.clone()
        if t % 3 == 2:
            rows[data.live_rows[t % 2]] = -1
        expected = decode.replay_step(*data.inputs(t), pool=eager, layer=0, slots=rows)
        eager.advance(rows)
        for static, new in zip(inputs, data.inputs(t), strict=True):
            static.copy_(new)
        slots.copy_(rows)
        graph.replay()
        assert torch.equal(out, expected), f"step {t}"
    assert int(eager.cursor[:-1].sum()) > 0
    for a, b in zip((eager.checkpoint, eager.copy), (captured.checkpoint, captured.copy), strict=True):
        for x, y in zip(a.tensors(), b.tensors(), strict=True):
            assert torch.equal(x, y)
    for name in ("cursor", "tokens", "flush", "error"):
        assert torch.equal(getattr(eager, name)[:-1], getattr(captured, name)[:-1])
