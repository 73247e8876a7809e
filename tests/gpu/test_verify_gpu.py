"""Compiled speculative windows on a GPU: I6, the FP64 twin, padded tiles, CUDA graphs. ``pytest tests/gpu -m gpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import verify_cases

pytestmark = pytest.mark.gpu

BIG = [16, 32, 128, 128]
SHAPES = {"gdn": BIG, "kda": [32, 32, 128, 128], "mamba2": [8, 64, 128, 64]}
EXACT = {"length": 16, "window": 4, "readout": "exact_readout"}

AGAINST_TWIN: list[tuple[str, list[int], dict[str, Any], str]] = [
    ("gdn", BIG, {"length": 16, "window": 4}, "bfloat16"),
    ("gdn", BIG, {"length": 8, "window": 4, "recurrence": "fp8", "read": "nvfp4", "stochastic": True}, "bfloat16"),
    ("gdn", [1, 2, 24, 40], {"length": 8, "window": 4, "buffer": "bf16", "fold": "cached"}, "float32"),
    ("kda", [4, 4, 128, 128], {"length": 32, "window": 16, "read": "fp8"}, "bfloat16"),
    ("kda", [1, 2, 40, 24], EXACT | {"length": 8}, "float32"),
    ("mamba2", [8, 64, 128, 64], {"length": 16, "window": 4, "read": "nvfp4"}, "bfloat16"),
    ("mamba2", [1, 2, 16, 80], {"length": 8, "window": 4, "recurrence": "fp16", "read": "fp16"}, "float32"),
]


def check_bits(recurrence: str, options: dict[str, Any], **where: Any) -> None:
    found = verify_cases.run_windows(recurrence=recurrence, options=options, device="cuda", **where)
    assert found["different"] == 0, found["first"]
    assert found["compared"] > 0


@pytest.mark.parametrize("recurrence", SHAPES)
@pytest.mark.parametrize("activation", ["float32", "bfloat16"])
@pytest.mark.parametrize("readout", ["output_only", "exact_readout"])
def test_fp32_keeps_the_bits_of_single_steps(recurrence: str, activation: str, readout: str) -> None:
    check_bits(recurrence, EXACT | {"readout": readout}, shape=SHAPES[recurrence], activation=activation)


@pytest.mark.parametrize("shape", [[2, 4, 64, 64], [2, 4, 40, 24], [1, 2, 32, 80], [1, 1, 16, 16]], ids=str)
@pytest.mark.parametrize("recurrence", SHAPES)
def test_other_heads_keep_the_bits_of_single_steps(recurrence: str, shape: list[int]) -> None:
    check_bits(recurrence, {"length": 8, "window": 4, "readout": "exact_readout"}, shape=shape)
    check_bits(recurrence, {"length": 9, "window": 3}, shape=shape)


@pytest.mark.parametrize("readout", ["output_only", "exact_readout"])
def test_long_windows_keep_the_bits_of_single_steps(readout: str) -> None:
    check_bits("gdn", {"length": 32, "window": 16, "readout": readout}, shape=[2, 4, 64, 64], activation="bfloat16")


@pytest.mark.parametrize("recurrence", SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        {"recurrence": "fp8", "read": "nvfp4", "fold": "cached", "stochastic": True},
        {"recurrence": "nvfp4", "read": "nvfp4", "readout": "exact_readout"},
        {"recurrence": "fp32", "read": "fp8", "buffer": "bf16"},
    ],
    ids=["fp8-nvfp4", "nvfp4", "fp32-fp8"],
)
def test_rejected_drafts_leave_no_trace(recurrence: str, options: dict[str, Any]) -> None:
    check_bits(recurrence, {"length": 16, "window": 4} | options, shape=SHAPES[recurrence], activation="bfloat16")


@pytest.mark.parametrize("found", AGAINST_TWIN, ids=lambda c: f"{c[0]}-{'x'.join(map(str, c[1]))}-{c[2]['length']}")
def test_window_agrees_with_the_fp64_twin(found: tuple[str, list[int], dict[str, Any], str]) -> None:
    recurrence, shape, options, activation = found
    result = verify_cases.compare_with_twin(
        recurrence=recurrence, shape=shape, options=options, activation=activation, n_calls=8, device="cuda"
    )
    assert {"output", "zeros"} <= set(result["worst"])
    assert {what: ratio for what, ratio in result["worst"].items() if ratio > 1} == {}
    assert result["other_codes"] <= 0.03


@pytest.mark.parametrize("recurrence", SHAPES)
@pytest.mark.parametrize("options", [{"length": 16, "window": 4}, EXACT], ids=["products", "exact"])
def test_later_tokens_do_not_matter(recurrence: str, options: dict[str, Any]) -> None:
    verify_cases.edge_later_tokens_do_not_matter(recurrence=recurrence, options=options, device="cuda")


def test_graph_replay_equals_eager() -> None:
    """I5: windows and commits of rows that differ in length, acceptance and padding from replay to replay."""
    from driftgate.kernels.kda import decode

    data = verify_cases.draw([2, 2, 64, 64], "bfloat16", "kda", n_steps=40, device="cuda")
    options = verify_cases.make_options(length=8, window=4, recurrence="fp8", read="nvfp4", stochastic=True)
    eager, captured = (verify_cases.make_pool(data, options) for _ in range(2))
    inputs = {name: x.clone() for name, x in verify_cases.take(data, 0, 4).items()}
    slots, lengths, kept = torch.full_like(data.slots, -1), torch.ones_like(data.slots), torch.ones_like(data.slots)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles; all rows are padding, so nothing is written
        decode.verify_window(**inputs, pool=captured, layer=0, slots=slots, lengths=lengths)
        captured.commit(slots, lengths, kept)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode.verify_window(**inputs, pool=captured, layer=0, slots=slots, lengths=lengths)
        captured.commit(slots, lengths, kept)
    for call in range(10):
        rows = data.slots.clone()
        if call % 3 == 2:
            rows[data.live_rows[call % 2]] = -1
        fed = [verify_cases.LENGTHS[row][call % 4] for row in range(3)]
        counts = verify_cases.spread(data, fed)
        keep = verify_cases.spread(data, [(2 * call + row) % (n + 1) for row, n in enumerate(fed)])
        new = verify_cases.take(data, 4 * call, 4)
        expected = decode.verify_window(**new, pool=eager, layer=0, slots=rows, lengths=counts)
        eager.commit(rows, counts, keep)
        for name, x in new.items():
            inputs[name].copy_(x)
        for held, value in ((slots, rows), (lengths, counts), (kept, keep)):
            held.copy_(value)
        graph.replay()
        assert torch.equal(out, expected), f"call {call}"
    assert int(eager.base[:-1].sum()) > 0, "no row flushed"
    for a, b in zip((eager.checkpoint, eager.copy), (captured.checkpoint, captured.copy), strict=True):
        for x, y in zip(a.tensors(), b.tensors(), strict=True):
            assert torch.equal(x, y)
    for name in ("cursor", "base", "tokens", "flush", "error"):
        assert torch.equal(getattr(eager, name)[:-1], getattr(captured, name)[:-1])
