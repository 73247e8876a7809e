"""The certificate: it passes driftgate's kernels, and fails every faulty copy of them under the right invariant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from driftgate.accuracy import certify
from driftgate.accuracy.adapters.families import StepInputs
from driftgate.accuracy.bits import BitTally, ulp_distance
from driftgate.accuracy.certify import count_cases
from driftgate.accuracy.observers import RecordedInputs
from driftgate.accuracy.step_data import draw_inputs
from driftgate.errors import EmptyRunError, UsageError
from driftgate.kernels.contract import Backend, HeadShape
from driftgate.kernels.gdn import reference

HERE = Path(__file__).parent
CASES = HERE / "certify_cases.py"
SOURCE = HERE.parent / "kernels" / "gdn" / "decode.py"
SMALL = HeadShape(key_heads=1, value_heads=2, d_k=16, d_v=16)

FOLD_STEP = "b_S, _ = gdn_step(b_S, b_k, b_v, b_g, tl.load(p_betas + j), BV, BK)"
STORE = "        bad = store_tile(p_codes, p_blocks, p_rows, b_S, o_v, DV, DK, BV, BK, FORMAT)\n        if SPLIT:"
MUTANTS = {
    "beta rounded to BF16 in the buffer": (
        "tl.store(betas + p_gates + h, b_beta)",
        "tl.store(betas + p_gates + h, b_beta.to(tl.bfloat16).to(tl.float32))",
        ([3], ["fp32"], {"I2"}),
    ),
    "fold without fma": (
        FOLD_STEP,
        "b_S = b_S * tl.exp(b_g)\n"
        "            b_u = tl.load(p_betas + j) * (b_v - tl.sum(b_S * b_k[None, :], axis=1))\n"
        "            b_S = b_S + b_u[:, None] * b_k[None, :]",
        ([3], ["fp32"], {"I2"}),
    ),
    "decay after the update": (
        FOLD_STEP,
        "b_S, _ = gdn_step(b_S, b_k, b_v, 0.0, tl.load(p_betas + j), BV, BK)\n            b_S = b_S * tl.exp(b_g)",
        ([3], ["fp32"], {"I2"}),
    ),
    "fold reads past the cursor": (
        "for j in range(0, h):",
        "for j in range(0, h + 1):",
        ([3], ["fp32"], {"I2"}),
    ),
    "readout reads past the cursor": (
        "mask=(o_l < h) & (o_n < n)",
        "mask=(o_l < h + 1) & (o_n < n)",
        ([3], ["fp32"], {"I2"}),
    ),
    "cached corrections folded in an exact plan": (
        "EXACT_FOLD=options.fold is Fold.EXACT,",
        "EXACT_FOLD=not options.keeps_corrections,",
        ([3], ["fp32"], {"I2"}),
    ),
    "a flush that is not written": (
        STORE,
        "        bad = 0\n        if h != 2:\n    " + STORE.replace("\n        if SPLIT:", "") + "\n        if SPLIT:",
        ([3], ["fp32"], {"I2"}),
    ),
    "a step between flushes that writes the state": (
        "        b_o = b_Rq + b_u * tl.sum(b_k * b_q, axis=0)\n",
        "        b_o = b_Rq + b_u * tl.sum(b_k * b_q, axis=0)\n"
        "        bad = store_tile(p_codes, p_blocks, p_rows, b_R + 0.5, o_v, DV, DK, BV, BK, FORMAT)\n",
        ([3], ["fp32"], {"I2"}),
    ),
    "FP32 checkpoint stored through BF16": (
        STORE,
        "        b_S = b_S.to(tl.bfloat16).to(tl.float32)\n" + STORE,
        ([1], ["fp32"], {"I1", "I2", "I7"}),
    ),
    "copy quantised from the FP32 state": (
        "b_S = round_trip_tile(b_S, DK, BV, BK, FORMAT)",
        "pass",
        ([2], ["fp8", "nvfp4"], {"I3"}),
    ),
    "flush starts from the copy": (
        "    if flushing:\n        b_S = load_tile(p_codes, p_blocks, p_rows, o_v, DV, DK, BV, BK, FORMAT)",
        "    if flushing:\n"
        "        b_S = load_tile(p_copy_codes, p_copy_blocks, p_copy_rows, o_v, DV, DK, BV, BK, COPY_FORMAT)",
        ([2], ["fp8", "nvfp4"], {"I3"}),
    ),
    "padded outputs are not written": (
        "    if slot == PAD:\n        if TAKE_STEP:\n            tl.store(out",
        "    if slot == PAD:\n        if False:\n            tl.store(out",
        ([1], ["fp32"], {"I1", "I2"}),
    ),
}  # fmt: skip


def test_certifies_the_kernels(interpreted) -> None:
    records = interpreted(CASES, "run", shape=[1, 2, 24, 16], lengths=[1, 3], formats=["fp32", "fp8", "nvfp4"])
    assert [r for r in records if not r["equal"]] == []
    assert {r["invariant"] for r in records} == {"I1", "I2", "I3", "I7"}
    assert all(sum(r["case"]["n_compared"].values()) > 0 for r in records)


@pytest.mark.long
@pytest.mark.parametrize("shape", [[1, 2, 16, 16], [2, 4, 40, 24]])
def test_certifies_the_kernels_for_every_format(interpreted, shape: list[int]) -> None:
    formats = ["fp32", "bf16", "fp16", "fp8", "nvfp4"]
    records = interpreted(CASES, "run", shape=shape, lengths=[1, 2, 3, 5, 8], formats=formats)
    assert [r for r in records if not r["equal"]] == []


@pytest.mark.parametrize("name", MUTANTS)
def test_fails_a_faulty_kernel(interpreted, tmp_path: Path, name: str) -> None:
    old, new, (lengths, formats, invariants) = MUTANTS[name]
    source = SOURCE.read_text()
    assert source.count(old) == 1, f"kernels/gdn/decode.py no longer holds this text once:\n{old}"
    path = tmp_path / "decode.py"
    path.write_text(source.replace(old, new))
    records = interpreted(CASES, "run", shape=[1, 1, 16, 16], lengths=lengths, formats=formats, kernels=str(path))
    failed = [r for r in records if not r["equal"]]
    assert {r["invariant"] for r in failed} >= invariants
    for record in failed:
        assert record["n_different"] > 0
        assert record["first_different"]["what"] in ("output", "checkpoint", "copy", "padding", "unused slot")


@pytest.mark.parametrize("lengths", [(1,), (1, 2, 5)])
def test_certifies_the_torch_twin(lengths: tuple[int, ...]) -> None:
    seen: list[int] = []
    records = certify(backend=Backend.TORCH, shapes=[SMALL], lengths=lengths, progress=seen.append)
    assert [r for r in records if not r.equal] == []
    assert sum(seen) == len(records) == count_cases(shapes=[SMALL], lengths=lengths)


def test_first_difference_says_where() -> None:
    def replay_step(*args, pool, slots, **kwargs):  # type: ignore[no-untyped-def]
        out = reference.replay_step(*args, pool=pool, slots=slots, **kwargs)
        if int(pool.tokens[slots[2].long()]) == 2:
            out[2, 1, 3] = torch.nextafter(out[2, 1, 3], torch.tensor(torch.inf))
        return out

    faulty = SimpleNamespace(decode_step=reference.decode_step, replay_step=replay_step, flush_now=reference.flush_now)
    records = certify(backend=Backend.TORCH, shapes=[SMALL], lengths=[1], formats=["fp32"], implementation=faulty)
    record = next(r for r in records if r.invariant == "I1" and r.case["activation"] == "float32")
    where = record.first_different
    assert where is not None
    assert {k: where[k] for k in ("step", "row", "head", "element", "what")} == {
        "step": 2, "row": 2, "head": 1, "element": [3], "what": "output",
    }  # fmt: skip
    assert where["ulp_histogram"] == {"1": 1}
    assert (record.n_different, record.max_ulp) == (1, 1)


def test_a_kernel_that_does_nothing_is_an_error() -> None:
    idle = SimpleNamespace(
        decode_step=lambda q, k, v, *rest, **options: torch.zeros_like(v),
        replay_step=lambda q, k, v, *rest, **options: torch.zeros_like(v),
        flush_now=lambda *args, **options: None,
    )
    with pytest.raises(EmptyRunError, match="computes nothing"):
        certify(backend=Backend.TORCH, shapes=[SMALL], lengths=[1], formats=["fp32"], implementation=idle)


def test_nothing_to_certify_is_an_error() -> None:
    with pytest.raises(EmptyRunError, match="no case"):
        certify(backend=Backend.TORCH, shapes=[SMALL], lengths=[], formats=["fp32"])


def test_unknown_format_is_refused() -> None:
    with pytest.raises(UsageError, match="fp9"):
        certify(backend=Backend.TORCH, shapes=[SMALL], lengths=[1], formats=["fp9"])


def record_inputs(n_layers: int, n_steps: int) -> RecordedInputs:
    layers = [draw_inputs(SMALL, torch.bfloat16, n_rows=1, n_steps=n_steps, seed=layer) for layer in range(n_layers)]
    inputs = [
        [StepInputs(**{name: getattr(d, name)[t][:1] for name in ("q", "k", "v", "g", "beta")}) for t in range(n_steps)]
        for d in layers
    ]
    initial = torch.stack([d.states[d.slots[0]] for d in layers])
    return RecordedInputs(shape=SMALL, inputs=inputs, initial=initial)


@pytest.mark.parametrize("n_layers", [1, 2, 5])
def test_recorded_inputs_take_the_place_of_random_ones(n_layers: int) -> None:
    recorded = record_inputs(n_layers, 9)
    records = certify(backend=Backend.TORCH, lengths=[1, 3], formats=["fp32", "fp8"], recorded=recorded)
    assert all(r.equal and r.case["data"] == "recorded" for r in records)
    assert {r.case["activation"] for r in records} == {"bfloat16"}
    assert {r.case["steps"] for r in records} == {5, 9}


def test_too_few_recorded_steps_for_a_flush_are_an_error() -> None:
    with pytest.raises(EmptyRunError, match="give more steps"):
        certify(backend=Backend.TORCH, lengths=[5], formats=["fp32"], recorded=record_inputs(2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ulp_distance_counts_numbers_between(dtype: torch.dtype) -> None:
    one, zero = torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype)
    up = torch.nextafter(one, 2 * one)
    assert ulp_distance(one, up).item() == 1
    assert ulp_distance(-up, -one).item() == 1
    assert ulp_distance(zero, -zero).item() == 0
    tiny = torch.nextafter(zero, one)
    assert ulp_distance(-tiny, tiny).item() == 2


def test_tally_tells_zeros_apart_and_takes_no_nan_for_equal() -> None:
    tally = BitTally()
    tally.compare("output", torch.zeros(1, 1, 2), torch.tensor([[[0.0, -0.0]]]), step=0, rows=[0])
    assert (tally.n_different, tally.max_ulp, tally.histogram) == (1, 0, {"0": 1})
    nan = torch.full((1, 1, 1), torch.nan)
    tally.compare("output", nan, nan, step=1, rows=[0])
    assert tally.n_different == 2


def test_tally_refuses_other_types() -> None:
    with pytest.raises(ValueError, match="expected"):
        BitTally().compare("state", torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bfloat16), step=0, rows=[0])


def test_the_room_gives_the_function_whatever_was_imported_first() -> None:
    program = (
        "import sys, driftgate.accuracy as room\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "import driftgate.accuracy.certify\n"
        "from driftgate.accuracy import certify, kl_divergence, PrecisionPlan, LockstepRunner\n"
        "assert certify is sys.modules['driftgate.accuracy.certify'].certify is room.certify\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
