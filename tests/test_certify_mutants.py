"""Every faulty copy of the kernels fails the certificate, under the invariant that it breaks, and looks like itself.

A fault is a text of the Triton modules and what takes its place. Faults that only compiled code shows, the layout of a
copy and approximate divisions, are in test_compile_mutants.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mutants import write_mutant

CASES = Path(__file__).parent / "certify_cases.py"
FLUSHED = "            store_states(\n                b_S, p_codes, p_blocks, p_rows, p_copy_codes"
FOLDED = "        b_S, _ = take_step(b_S, b_k, b_v, b_g, b_beta, DELTA and REPLAYED, CHANNELS, BV, BK)\n"
BUFFERED = "\n    b_o = finish_output(b_o, b_v, D + i_hv, z + p_v, o_v, DV, HAS_D, HAS_Z)"
ENTRY = "    return prepare_key(b_k, b_beta, DELTA, NORMALISE), b_g, b_beta, b_v"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault, what is run to see it, the invariants that have to fail, and what the failure has to look like."""

    old: str
    new: str
    invariants: tuple[str, ...]
    plans: list[str] | None
    looks_like: str = ""
    recurrence: str = "gdn"
    formats: list[str] = field(default_factory=lambda: ["fp32"])
    lengths: list[int] = field(default_factory=lambda: [3])
    shape: list[int] = field(default_factory=lambda: [1, 1, 16, 16])


MUTANTS = {
    "beta rounded to BF16 in the buffer": Mutant(
        old="tl.store(p_betas + place, b_beta)",
        new="tl.store(p_betas + place, b_beta.to(tl.bfloat16).to(tl.float32))",
        invariants=("I2",),
        plans=["fp32@3+exact_readout"],
        looks_like="beta rounded to BF16, in the fold alone",
    ),
    "fold without fma": Mutant(
        old=FOLDED,
        new="        b_D = b_S * tl.exp(b_g)\n"
        "        b_u = b_beta * (b_v - tl.sum(b_D * b_k[None, :], axis=1))\n"
        "        b_S = b_D + b_u[:, None] * b_k[None, :]\n",
        invariants=("I2",),
        plans=["fp32@3"],
        looks_like="a multiply-add contracted otherwise",
    ),
    "decay after the update": Mutant(
        old=FOLDED,
        new="        b_S, _ = take_step(b_S, b_k, b_v, 0.0, b_beta, DELTA and REPLAYED, CHANNELS, BV, BK)\n"
        "        b_S = b_S * tl.exp(b_g)\n",
        invariants=("I2",),
        plans=["fp32@3"],
        looks_like="decay after the update",
    ),
    "fold reads past the cursor": Mutant(
        old="    p_added = p_values if REPLAYED else p_corrections\n    b_k, b_g",
        new="    p_added = p_values if REPLAYED else p_corrections\n    h = h + 1\n    b_k, b_g",
        invariants=("I2",),
        plans=["fp32@3"],
        looks_like="a read past the cursor",
    ),
    "readout reads past the cursor": Mutant(
        old="mask=(o_l < h) & (o_n < n)",
        new="mask=(o_l < h + 1) & (o_n < n)",
        invariants=("I2",),
        plans=["fp32@3"],
        looks_like="a read past the cursor",
    ),
    "cached corrections folded in an exact plan": Mutant(
        old="EXACT_FOLD=options.fold is Fold.EXACT,",
        new="EXACT_FOLD=not options.keeps_corrections(recurrence),",
        invariants=("I2",),
        plans=["fp32@3"],
    ),
    "cached corrections folded, read from a copy": Mutant(
        old="EXACT_FOLD=options.fold is Fold.EXACT,",
        new="EXACT_FOLD=not options.keeps_corrections(recurrence),",
        invariants=("I3",),
        formats=["fp32", "nvfp4"],
        plans=["nvfp4/fp32@2"],
        lengths=[2],
        looks_like="corrections cached from the copy are folded",
    ),
    "a flush that is not written": Mutant(
        old=FLUSHED,
        new="            if h != 2:\n  " + FLUSHED,
        invariants=("I2",),
        plans=["fp32@3"],
        looks_like="a flush that is not written",
    ),
    "a step between flushes that writes the state": Mutant(
        old=BUFFERED,
        new=BUFFERED + "\n    tl.store(p_codes + o_v, b_o, mask=o_v < DV)",
        invariants=("I2",),
        plans=["fp32@3+exact_readout"],
    ),
    "FP32 checkpoint stored through BF16": Mutant(
        old=FLUSHED,
        new="            b_S = b_S.to(tl.bfloat16).to(tl.float32)\n" + FLUSHED,
        invariants=("I1", "I2", "I7"),
        plans=["fp32@1"],
        lengths=[1],
        looks_like="FP32 state stored through BF16",
    ),
    "copy quantised from the FP32 state": Mutant(
        old="b_S = round_trip_tile(b_S, DK, BV, BK, FORMAT, True, SR, words)",
        new="pass",
        invariants=("I3",),
        formats=["fp8", "nvfp4"],
        plans=["nvfp4/fp8@2"],
        lengths=[2],
        looks_like="copy quantised from the FP32 state",
    ),
    "flush starts from the copy": Mutant(
        old="            b_S = load_tile(p_codes, p_blocks, p_rows, o_v, DV, DK, BV, BK, FORMAT)\n"
        "            b_S = fold_buffer(",
        new="            b_S = load_tile(p_copy_codes, p_copy_blocks, p_copy_rows, o_v, DV, DK, BV, BK, COPY_FORMAT)\n"
        "            b_S = fold_buffer(",
        invariants=("I3",),
        formats=["fp8", "nvfp4"],
        plans=["nvfp4/fp8@2"],
        lengths=[2],
        looks_like="flush starts from the copy",
    ),
    "checkpoint below FP32 folded in its own precision": Mutant(
        old=FOLDED,
        new=FOLDED + "        b_S = b_S.to(tl.bfloat16).to(tl.float32)\n",
        invariants=("I3",),
        formats=["fp8"],
        plans=["fp8@3"],
    ),
    "padded outputs are not zeros": Mutant(
        old="\n            tl.store(out + p_v + o_v, tl.zeros([BV], tl.float32)",
        new="\n            tl.store(out + p_v + o_v, tl.full([BV], 42.0, tl.float32)",
        invariants=("I1", "I2", "I4"),
        plans=["fp32@1"],
        lengths=[1],
        looks_like="padded rows are not written with zeros",
    ),
    "beta of the first row for all": Mutant(
        old="b_beta = tl.load(beta + i_head)",
        new="b_beta = tl.load(beta + i_hv)",
        invariants=("I4",),
        plans=["fp32@3"],
    ),
    "slots beyond 4,095 taken for others": Mutant(
        old="codes + slot * codes_slot",
        new="codes + (slot % 4096) * codes_slot",
        invariants=("I4",),
        plans=["fp32@3"],
    ),
    "slot stride taken for contiguous": Mutant(
        old="codes_slot = codes.stride(0) * codes.element_size()",
        new="codes_slot = codes[0].numel() * codes.element_size()",
        invariants=("I4",),
        plans=["fp32@3"],
    ),
    "draws without the token": Mutant(
        old="first, tokens, tl.load(p_stream)",
        new="first, 0, tl.load(p_stream)",
        invariants=("I5",),
        formats=["fp8"],
        plans=["fp8@1+sr"],
        lengths=[1],
        looks_like="draws that do not depend on the tokens seen",
    ),
    "one decay for all channels in the fold": Mutant(
        old="b_g = tl.load(p_log_decay + j * DK + o_k, mask=(o_k < DK) & used, other=0.0)",
        new="b_g = tl.load(p_log_decay + j * DK + o_k * 0, mask=(o_k < DK) & used, other=0.0)",
        recurrence="kda",
        invariants=("I2",),
        plans=["fp32@3"],
        looks_like="one decay for all channels, in the fold alone",
    ),
    "dt·B rounded to BF16 in the fold": Mutant(
        old=ENTRY,
        new=ENTRY.replace("NORMALISE)", "NORMALISE).to(tl.bfloat16).to(tl.float32)"),
        recurrence="mamba2",
        invariants=("I2",),
        plans=["fp32@3"],
        looks_like="dt·B rounded to BF16, in the fold alone",
    ),
    "D·x added twice in replay": Mutant(
        old="                b_o = finish_output(b_o, b_v, D + i_hv, z + p_v",
        new="                b_o = finish_output(b_o + tl.load(D + i_hv) * b_v, b_v, D + i_hv, z + p_v",
        recurrence="mamba2",
        invariants=("I1",),
        plans=["fp32@1"],
        lengths=[1],
        looks_like="D·x added twice",
    ),
}
TOLERANCE = {  # faults that baseline and replay share, or that stand in a readout that promises no bits
    "beta rounded to BF16 in every step": (
        "gdn",
        "b_beta = tl.load(beta + i_head)",
        "b_beta = tl.load(beta + i_head).to(tl.bfloat16).to(tl.float32)",
        {"output", "state"},
    ),
    "decays grow": (
        "mamba2",
        "return b_P, tl.exp(tl.cumsum(b_e, axis=0, reverse=True))",
        "return b_P, tl.exp(-tl.cumsum(b_e, axis=0, reverse=True))",
        {"output"},
    ),
    "dt·B rounded to BF16 in every step": (
        "mamba2",
        "        b_k = b_beta * b_k\n    return b_k",
        "        b_k = (b_beta * b_k).to(tl.bfloat16).to(tl.float32)\n    return b_k",
        {"output", "state"},
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_fails_a_faulty_kernel(interpreted, tmp_path: Path, name: str) -> None:
    mutant = MUTANTS[name]
    kernels = str(write_mutant(tmp_path, mutant.old, mutant.new))
    records = interpreted(
        CASES, "run", recurrence=mutant.recurrence, shape=mutant.shape, lengths=mutant.lengths,
        formats=mutant.formats, invariants=list(mutant.invariants), plans=mutant.plans, kernels=kernels,
    )  # fmt: skip
    failed = [r for r in records if not r["equal"]]
    assert {r["invariant"] for r in failed} == set(mutant.invariants)
    for record in failed:
        assert record["n_different"] > 0
        assert record["recurrence"] == mutant.recurrence
    named = [r["first_different"]["looks_like"] for r in failed]
    assert any(text.startswith(mutant.looks_like) for text in named), named


@pytest.mark.parametrize("name", TOLERANCE)
def test_fails_a_kernel_outside_its_bounds(interpreted, tmp_path: Path, name: str) -> None:
    recurrence, old, new, whats = TOLERANCE[name]
    records = interpreted(
        CASES, "measure", recurrence=recurrence, shape=[1, 1, 16, 16], lengths=[3], readouts=["output_only"],
        activations=["float32"], kernels=str(write_mutant(tmp_path, old, new)),
    )  # fmt: skip
    outside = [r for r in records if not r["within"]]
    assert {r["what"] for r in outside} == whats
    for record in outside:
        assert record["error"] is None or record["error"] > 2 * record["bound"]
