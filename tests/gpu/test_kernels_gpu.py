"""The compiled kernels on a GPU: certificates, the FP64 twins, CUDA graphs. ``pytest tests/gpu -m gpu``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import kernel_cases
import pytest
import torch
from test_kernels import OTHER_RECURRENCES

from driftgate.accuracy.invariants import check_cases
from driftgate.accuracy.step_data import StepData, draw_inputs
from driftgate.kernels import dispatch
from driftgate.kernels.contract import Backend, HeadShape, Readout, Recurrence, ReplayOptions
from driftgate.kernels.pool import StatePool

pytestmark = pytest.mark.gpu

EVERY = ("gdn", "kda", "mamba2")
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


REAL: list[tuple[str, list[int], dict[str, Any], str]] = [
    ("kda", [4, 4, 128, 128], {"length": 8, "read": "nvfp4"}, "bfloat16"),
    ("mamba2", [2, 16, 128, 64], {"length": 8, "read": "fp8"}, "bfloat16"),
    ("mamba2", [8, 16, 128, 80], {"length": 4, "recurrence": "bf16", "read": "bf16"}, "bfloat16"),
    ("gdn", [2, 4, 64, 64], {"length": 4, "readout": "state_output", "dot": "tf32"}, "bfloat16"),
    ("kda", [2, 4, 64, 64], {"length": 4, "readout": "state_output", "dot": "tf32"}, "bfloat16"),
    ("mamba2", [2, 4, 64, 64], {"length": 4, "readout": "state_output", "dot": "tf32"}, "bfloat16"),
    ("kda", [2, 4, 64, 64], {"length": 3, "recurrence": "nvfp4", "read": "nvfp4", "stochastic": True}, "bfloat16"),
]


def check_certificate(recurrence: str = "gdn", **arguments: Any) -> None:
    """What ``certify`` runs, without its records, which need pydantic."""
    n = 0
    kernels = import_module(f"driftgate.kernels.{recurrence}").implementation(Backend.TRITON)
    for found in check_cases(kernels, device="cuda", recurrence=Recurrence(recurrence), **arguments):
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


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("shape", [MEDIUM, ODD], ids=["64x64", "40x24"])
@pytest.mark.parametrize("recurrence", ["kda", "mamba2"])
def test_other_recurrences_keep_their_bits(recurrence: str, shape: HeadShape, length: int) -> None:
    check_certificate(recurrence, shapes=[shape], lengths=(length,), formats=("fp32", "fp8"))


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
    found = kernel_cases.compare_with_twin(
        shape=[1, 2, 64, 64], options={"length": length}, activation="float32", n_steps=length + 3, device="cuda"
    )
    assert {what: ratio for what, ratio in found["worst"].items() if ratio > 1} == {}


@pytest.mark.parametrize("case", AGAINST_TWIN, ids=lambda c: "x".join(map(str, c[0])) + "-" + str(c[1]["length"]))
def test_kernel_agrees_with_the_fp64_twin(case: tuple[list[int], dict[str, Any], str]) -> None:
    shape, options, activation = case
    found = kernel_cases.compare_with_twin(
        shape=shape, options=options, activation=activation, n_steps=max(4, options["length"] + 2), device="cuda"
    )
    assert {"output", "state", "padding"} <= set(found["worst"])
    assert {what: ratio for what, ratio in found["worst"].items() if ratio > 1} == {}
    assert found["other_codes"] <= 0.03


@pytest.mark.parametrize(
    "case", [*OTHER_RECURRENCES, *REAL], ids=lambda c: "-".join(map(str, (c[0], *c[1], *c[2].values())))
)
def test_other_kernels_agree_with_the_fp64_twin(case: tuple[str, list[int], dict[str, Any], str]) -> None:
    recurrence, shape, options, activation = case
    found = kernel_cases.compare_with_twin(
        shape=shape, options=options, activation=activation, n_steps=max(4, options["length"] + 2),
        recurrence=recurrence, device="cuda",
    )  # fmt: skip
    assert {"output", "state", "padding"} <= set(found["worst"])
    assert {what: ratio for what, ratio in found["worst"].items() if ratio > 1} == {}
    assert found["other_codes"] <= 0.03


@pytest.mark.parametrize("recurrence", EVERY)
def test_flush_programs_that_serve_several_rows(recurrence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large batches have them."""
    monkeypatch.setattr(dispatch, "FLUSH_PROGRAMS", 1)
    common: dict[str, Any] = {"shape": [1, 2, 24, 16], "recurrence": recurrence, "device": "cuda"}
    found = kernel_cases.compare_with_twin(options={"length": 3, "read": "fp8"}, n_rows=19, n_steps=7, **common)
    assert {what: ratio for what, ratio in found["worst"].items() if ratio > 1} == {}
    assert kernel_cases.compare_flush_now(options={"length": 6}, **common)["worst"]["state"] <= 1


@pytest.mark.parametrize(
    "options", [{"length": 6, "fold": "cached"}, {"length": 6, "recurrence": "fp8", "read": "nvfp4"}]
)
@pytest.mark.parametrize("recurrence", EVERY)
def test_flush_without_a_step(recurrence: str, options: dict[str, Any]) -> None:
    found = kernel_cases.compare_flush_now(shape=[1, 2, 24, 16], options=options, recurrence=recurrence, device="cuda")
    assert found["worst"]["state"] <= 1


@pytest.mark.parametrize("recurrence", EVERY)
def test_runs_are_repeatable(recurrence: str) -> None:
    kernel_cases.run_edge(name="runs_are_repeatable", recurrence=recurrence, device="cuda")


@pytest.mark.parametrize("recurrence", EVERY)
def test_a_pool_in_the_pages_of_an_engine_keeps_its_bits(recurrence: str) -> None:
    """Two slot strides, which may be two specialisations of a kernel."""
    kernel_cases.run_edge(name="strided_pool", recurrence=recurrence, options={"length": 3}, device="cuda")


def make_pool(data: StepData, options: ReplayOptions) -> StatePool:
    pool = StatePool(
        data.shape, options, recurrence=data.recurrence, n_slots=data.n_slots, activation_dtype=data.activation,
        seed=5, device="cuda",
    )  # fmt: skip
    slots = torch.arange(data.n_slots, device="cuda")
    pool.start(slots, tokens=0, sequences=slots)
    pool.write(0, slots, data.states)
    return pool


class Graph:
    """One step and its ``advance``, captured with all rows padded, so that compiling writes nothing."""

    def __init__(self, data: StepData, pool: StatePool) -> None:
        module = import_module(f"driftgate.kernels.{data.recurrence.value}.decode")
        self.step = module.decode_step if pool.options.step_by_step else module.replay_step
        self.pool = pool
        self.inputs = {name: x.clone() for name, x in data.inputs(0).items()}
        self.slots = torch.full_like(data.slots, -1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.take()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.take()

    def take(self) -> torch.Tensor:
        out = self.step(**self.inputs, pool=self.pool, layer=0, slots=self.slots)
        self.pool.advance(self.slots)
        return out

    def replay(self, inputs: dict[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        for name, new in inputs.items():
            self.inputs[name].copy_(new)
        self.slots.copy_(slots)
        self.graph.replay()
        return self.out


@pytest.mark.parametrize("readout", list(Readout), ids=lambda r: r.value)
@pytest.mark.parametrize("recurrence", EVERY)
def test_graph_replay_equals_eager(recurrence: str, readout: Readout) -> None:
    """I5, and rows that become padding between replays leave their slots alone (row 12 of test_kernel_faults.py)."""
    n_steps, shape = 11, HeadShape(key_heads=1, value_heads=2, d_k=32, d_v=16)
    data = draw_inputs(
        shape, torch.bfloat16, n_rows=3, n_steps=n_steps, seed=3, recurrence=Recurrence(recurrence), device="cuda"
    )
    options = ReplayOptions(read="nvfp4", recurrence="fp8", length=4, readout=readout)
    eager, captured = make_pool(data, options), make_pool(data, options)
    graph = Graph(data, captured)
    for t in range(n_steps):
        rows = data.slots.clone()
        if t % 3 == 2:
            rows[data.live_rows[t % 2]] = -1
        expected = graph.step(**data.inputs(t), pool=eager, layer=0, slots=rows)
        eager.advance(rows)
        assert torch.equal(graph.replay(data.inputs(t), rows), expected), f"step {t}"
    assert int(eager.cursor[:-1].sum()) > 0
    for a, b in zip((eager.checkpoint, eager.copy), (captured.checkpoint, captured.copy), strict=True):
        for x, y in zip(a.tensors(), b.tensors(), strict=True):
            assert torch.equal(x, y)
    for name in ("cursor", "tokens", "flush", "error"):
        assert torch.equal(getattr(eager, name)[:-1], getattr(captured, name)[:-1])


@pytest.mark.parametrize("recurrence", EVERY)
def test_a_graph_draws_anew_at_every_replay(recurrence: str) -> None:
    """Row 16 of test_kernel_faults.py: four replays of one input round otherwise, a second run of them the same."""
    shape = HeadShape(key_heads=1, value_heads=2, d_k=32, d_v=16)
    data = draw_inputs(
        shape, torch.float32, n_rows=2, n_steps=1, seed=3, recurrence=Recurrence(recurrence), device="cuda"
    )
    pool = make_pool(data, ReplayOptions(recurrence="bf16", read="bf16", stochastic=True))
    graph, first = Graph(data, pool), pool.checkpoint.codes.clone()
    slots, runs = torch.arange(data.n_slots, device="cuda"), []
    for _ in range(2):
        pool.start(slots, tokens=0, sequences=slots)
        for _ in range(4):
            pool.checkpoint.codes.copy_(first)
            graph.replay(data.inputs(0), data.slots)
            runs.append(pool.checkpoint.codes.clone())
    assert all(torch.equal(a, b) for a, b in zip(runs[:4], runs[4:], strict=True))
    assert all(not torch.equal(a, b) for i, a in enumerate(runs[:4]) for b in runs[:i])
