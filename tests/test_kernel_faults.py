"""Public faults of replay and recurrent-state kernels, each as a test of its kind, for every recurrence it can befall.

A line: row, where it was reported, the fault; then the tests, of this file where none is named. The cases are functions
of slot_cases.py and value_cases.py. FAULTS puts many of the faults into the kernels and sees the cases fail.

 7  TensorRT-LLM #14509: stale buffers poison the state
    test_stale_buffers
 8  TensorRT-LLM #13453, vLLM #56524: cursor not reset when a slot changes hands
    test_slot_reuse
 9  TensorRT-LLM #14203: padded rows read uninitialised states
    test_padding
10  ROCm/aiter #5324: padded outputs left uninitialised; here zeros for every recurrence
    test_padding
11  vLLM #39064, #33326, SGLang #38997: null ids 0 and -1 mixed; here an explicit pad_slot
    test_padding, test_pool.py::test_a_number_that_is_no_slot_is_refused,
    test_arguments.py::test_a_flush_of_what_is_no_slot_is_refused
12  vllm-ascend #12040: padded rows of a graph keep a stale slot
    test_rows_that_became_padding, gpu/test_kernels_gpu.py::test_graph_replay_equals_eager
13  ReplaySSM a60d5ebf1, TensorRT-LLM: slot strides of a paged pool ignored
    test_strided_pool, test_pool.py::test_adopted_storage_is_read_and_written_in_place
14  sgl-kernel-npu #748: slices of packed inputs, misaligned pools
    test_rows, test_pool.py::test_adopted_storage_that_does_not_fit_is_refused,
    test_arguments.py::test_slots_that_do_not_fit_are_refused
15  flashinfer #3324: offsets of random bits cut to 32 bits
    test_quant_stochastic.py::test_neighbours_across_2_to_the_32_are_counted_on
16  TensorRT-LLM #14841: the same random bits at every replay of a graph
    test_draws_differ, gpu/test_kernels_gpu.py::test_a_graph_draws_anew_at_every_replay
17  flashinfer: stochastic rounding to FP16 flushes subnormals
    test_quant_stochastic.py::test_small_states_keep_their_mean_in_float16
18  flashinfer: one infinity spoils a row
    test_nonfinite_states_set_the_error_word, test_quant_codecs.py::test_a_nonfinite_element_leaves_the_scales_alone
19  flashinfer: blocks of zeros
    test_scales_of_rows_and_blocks, test_quant_codecs.py::test_a_row_of_zeros_decodes_to_zeros_with_finite_scales,
    test_quant_device.py::test_row_of_zeros
20  a tile of several rows that uses the first row's scale
    test_scales_of_rows_and_blocks, test_quant_codecs.py::test_a_row_does_not_depend_on_other_rows_or_on_strides,
    test_quant_device.py::test_codes_equal_the_codecs
21  vLLM #53877, SGLang #38975: beta rounded to BF16 on one path
    test_gates_and_runs
22  SGLang #32541, #33630: the fold's gate is not the model's
    test_gates.py::test_kda_steps_from_raw_gates, test_gates.py::test_mamba2_steps_from_raw_gates
23  mlx-lm #1624, TensorRT-LLM: epsilon outside the root
    test_small_keys, test_twins.py::test_epsilon_is_inside_the_root
24  cudnn-frontend #1017, SGLang #37739: exp of a positive sum of gates overflows
    test_steep_decay
25  TensorRT-LLM #14652, flashinfer #4481: softplus overflows, g = -inf
    test_forgetting, test_forgetting_one_channel, test_gates_and_runs, test_gates.py::test_kda_log_decay_at_its_limits,
    test_gates.py::test_mamba2_dt_at_its_limits
26  vLLM #51812: gates of other rows than q, k, v; here one order for all inputs, and shapes are checked
    test_rows, test_arguments.py::test_inputs_that_do_not_fit_are_refused
27  flashinfer #3145: scratch indexed by slot
    test_rows
28  SGLang #37834: a copied slot keeps the cursor
    test_snapshot, test_pool.py::test_copying_a_slot_with_buffered_entries_is_refused,
    test_pool.py::test_copying_a_slot_can_flush_it
29  Megatron-LM #6584: a snapshot that is the live state
    test_snapshot, test_pool.py::test_a_copied_slot_is_its_own
30  mlx-swift-lm #143: accepted drafts taken for committed inputs
    test_verify.py::test_accepted_tokens_and_no_others_are_kept
31  ReplaySSM 56a0f5305: windows of changing length
    test_verify.py::test_exact_route_keeps_the_bits_of_single_steps
32  SGLang: padded rows of a window leak
    test_verify.py::test_later_tokens_do_not_matter
33  ninfer #220: the buffer holds another rounding than the step used
    test_gates_and_runs, test_kernels.py::test_kernel_agrees_with_the_fp64_twin
34  an FP32 state stored through BF16
    test_state_keeps_its_bits
35  dt·B of Mamba-2 rounded to BF16
    test_product_in_fp32
36  SGLang #33780: bits change with a specialisation, or with Triton; the second shows as a certificate that fails
    test_strided_pool, test_certify.py::test_first_difference_says_where
37  SGLang #38184: TF32 without being asked for
    test_compile.py::test_every_kernel_compiles, test_compile.py::test_nothing_is_approximate_on_the_exact_route
38  SGLang #28695: lengths that are no power of two, windows too long for the buffer
    test_every_length_equals_sequential, test_lengths_that_cannot_be,
    test_verify.py::test_windows_that_do_not_fit_in_the_buffer_are_refused
39  llama.cpp #28879: perplexity alone misleads
    test_policy.py::test_a_control_within_three_noise_floors_takes_passes_back
40  mlx-serve #415: a verdict on a mis-parsed file
    test_dump.py::test_a_faulty_file_is_refused_in_one_line, test_records.py::test_a_file_of_another_run_is_refused
41  vLLM #43301: prefill and decode kernels differ by themselves; here all plans share the prefill, and a noise floor
    test_adapters.py::test_the_prefill_is_the_models_own,
    test_lockstep.py::test_another_order_of_additions_is_tiny_and_formats_are_not
42  LocalAI: a reset clears the table of formats per head; here a format belongs to a pool and no table exists
    test_pool.py::test_formats_survive_a_reset
43  vLLM #40012: lanes of a packed conversion in another order
    test_quant_stochastic.py::test_stored_codes_of_four_values_that_share_a_word,
    test_quant_device.py::test_codes_equal_the_codecs
44  TensorRT-LLM #14448: heads of 80 with a BF16 state
    test_heads_of_80_and_groups_of_heads
Beside them: groups of heads (test_heads_of_80_and_groups_of_heads), batches of none (test_padding), offsets beyond 2^31
elements (test_offsets_beyond_2_to_the_31, test_compile.py::test_narrow_slots_are_told), the same slot twice
(test_arguments.py::test_slots_that_do_not_fit_are_refused).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from mutants import write_mutant

from driftgate.kernels.contract import HeadShape, ReplayOptions

CASES = Path(__file__).parent / "kernel_cases.py"
EVERY = ("gdn", "kda", "mamba2")
DELTA = ("gdn", "kda")
PLANS: list[dict[str, Any]] = [
    {"length": 4},
    {"length": 4, "readout": "exact_readout", "read": "nvfp4"},
    {"length": 4, "fold": "cached"},
    {"length": 4, "readout": "state_output", "recurrence": "fp8", "read": "fp8"},
]
# A fault, where it is put into the kernels, and the cases that have to see it.
FAULTS: dict[str, tuple[str, str, list[tuple[str, dict[str, Any]]]]] = {
    "stale entries read": (
        "mask=(o_l < h) & (o_n < n)",
        "mask=(o_l < 16) & (o_n < n)",
        [("stale_buffers", {"recurrence": r, "n_steps": 2, "options": {"length": 17}}) for r in EVERY],
    ),
    "padded outputs left as they were": (
        "    if slot == PAD:\n        tl.store(out + i_head",
        "    if slot == PAD:\n        return\n    if slot < PAD:\n        tl.store(out + i_head",
        [("padding_reads_nothing", {"recurrence": r, "length": 0}) for r in EVERY],
    ),
    "-1 is always padding": (
        '"PAD": pad_slot',
        '"PAD": -1',
        [("pad_slot_zero", {"recurrence": r, "length": n}) for r in EVERY for n in (0, 2)],
    ),
    "slot 0 is always padding": (
        '"PAD": pad_slot',
        '"PAD": 0',
        [("pad_slot_zero", {"recurrence": r, "length": n}) for r in EVERY for n in (0, 2)],
    ),
    "slot stride taken for contiguous": (
        "codes_slot = codes.stride(0) * codes.element_size()",
        "codes_slot = codes[0].numel() * codes.element_size()",
        [("strided_pool", {"recurrence": r, "options": {"length": n}}) for r in EVERY for n in (0, 3)],
    ),
    "inputs taken for contiguous": (
        "    x = x.contiguous()\n    return x.clone() if x.data_ptr() % 16 else x\n",
        "    return x\n",
        [("strided_inputs", {"recurrence": r}) for r in EVERY],
    ),
    "decays from running sums": (
        "return b_P, tl.exp(tl.cumsum(b_e, axis=0, reverse=True))",
        "return b_P, b_P * tl.exp(-tl.cumsum(b_past, axis=0))",
        [
            *(("steep_decay", {"recurrence": r, "n_steps": 32, "options": {"length": 32}}) for r in ("gdn", "mamba2")),
            ("forgetting", {"recurrence": "gdn", "options": {"length": 4}}),
        ],
    ),
    "decays per channel from running sums": (
        "return tl.exp(tl.sum(b_e, axis=0)), tl.exp(tl.cumsum(b_e, axis=0))",
        "return tl.exp(tl.sum(b_e, axis=0)), tl.exp(tl.sum(b_e, axis=0))[None, :] * "
        "tl.exp(tl.cumsum(b_e, axis=0) - tl.sum(b_e, axis=0)[None, :])",
        [
            ("steep_decay", {"recurrence": "kda", "n_steps": 32, "options": {"length": 32}}),
            ("forgetting", {"recurrence": "kda", "options": {"length": 4}}),
        ],
    ),
    "epsilon beside the root": (
        "tl.rsqrt(tl.sum(b * b, axis=0) + 1e-6)",
        "tl.div_rn(1.0, tl.sqrt_rn(tl.sum(b * b, axis=0)) + 1e-6)",
        [("small_keys", {"recurrence": r, "amplitude": 1e-4}) for r in DELTA],
    ),
    "beta through BF16": (
        "        tl.store(p_betas + place, b_beta)\n\n\n@triton.jit(do",
        "        tl.store(p_betas + place, b_beta.to(tl.bfloat16).to(tl.float32))\n\n\n@triton.jit(do",
        [("gate_keeps_its_bits", {"recurrence": r}) for r in EVERY],
    ),
    "state through BF16": (
        "(b_k[None, :], (BV, BK)), b_S)",
        "(b_k[None, :], (BV, BK)), b_S.to(tl.bfloat16).to(tl.float32))",
        [("state_keeps_its_bits", {"recurrence": r, "options": {"length": n}}) for r in EVERY for n in (0, 2)],
    ),
    "dt B through BF16": (
        "b_k = b_beta * b_k",
        "b_k = (b_beta * b_k).to(tl.bfloat16).to(tl.float32)",
        [("product_in_fp32", {"length": n}) for n in (0, 1, 3)],
    ),
    "no error word": (
        "if bad != 0:",
        "if bad > 1:",
        [
            ("nonfinite_sets_the_error_word", {"recurrence": r, "fmt": "fp8", "length": n})
            for r in EVERY
            for n in (0, 1)
        ],
    ),
    "the same draws at every token": (
        "seed, seen, streams + slot",
        "seed, 0, streams + slot",
        [("draws_differ", {"recurrence": r, "fmt": "bf16", "length": 1}) for r in EVERY],
    ),
}


@pytest.fixture
def case(interpreted):
    """``case(name, **arguments)`` runs a case under Triton's interpreter."""
    return lambda name, **arguments: interpreted(CASES, "run_edge", name=name, **arguments)


def plan_name(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


def within_bounds(found: dict[str, Any]) -> bool:
    return bool(found["worst"]) and max(found["worst"].values()) <= 1


# Rows 7 to 14, 26 to 29, 36: which bytes a step reads and writes.


@pytest.mark.parametrize("options", [*PLANS, {"length": 4, "recurrence": "nvfp4", "read": "nvfp4"}], ids=plan_name)
@pytest.mark.parametrize("recurrence", EVERY)
def test_stale_buffers(case, recurrence: str, options: dict[str, Any]) -> None:
    case("stale_buffers", recurrence=recurrence, options=options)


@pytest.mark.parametrize("options", PLANS, ids=plan_name)
@pytest.mark.parametrize("recurrence", EVERY)
def test_slot_reuse(case, recurrence: str, options: dict[str, Any]) -> None:
    case("slot_reuse", recurrence=recurrence, options=options)


@pytest.mark.parametrize("length", [0, 2])
@pytest.mark.parametrize("recurrence", EVERY)
@pytest.mark.parametrize("name", ["padding_reads_nothing", "pad_slot_zero", "nothing_to_do"])
def test_padding(case, name: str, recurrence: str, length: int) -> None:
    case(name, recurrence=recurrence, length=length)


@pytest.mark.parametrize("options", [{"length": 0}, {"length": 2, "read": "fp8"}], ids=plan_name)
@pytest.mark.parametrize("recurrence", EVERY)
def test_rows_that_became_padding(case, recurrence: str, options: dict[str, Any]) -> None:
    case("rows_that_became_padding", recurrence=recurrence, options=options)


@pytest.mark.parametrize(
    "options", [{"length": 0}, {"length": 3, "read": "fp8"}, {"length": 2, "recurrence": "nvfp4", "read": "nvfp4"}],
    ids=plan_name,
)  # fmt: skip
@pytest.mark.parametrize("recurrence", EVERY)
def test_strided_pool(case, recurrence: str, options: dict[str, Any]) -> None:
    case("strided_pool", recurrence=recurrence, options=options)


@pytest.mark.parametrize("length", [0, 2])
@pytest.mark.parametrize("recurrence", EVERY)
def test_offsets_beyond_2_to_the_31(case, recurrence: str, length: int) -> None:
    case("far_offsets", recurrence=recurrence, length=length)


@pytest.mark.parametrize("recurrence", EVERY)
@pytest.mark.parametrize("name", ["strided_inputs", "rows_do_not_meet"])
def test_rows(case, name: str, recurrence: str) -> None:
    case(name, recurrence=recurrence)


@pytest.mark.parametrize(
    "options", [{"length": 5, "read": "nvfp4"}, {"length": 5, "recurrence": "fp8", "read": "fp8", "stochastic": True}],
    ids=plan_name,
)  # fmt: skip
@pytest.mark.parametrize("recurrence", EVERY)
def test_snapshot(case, recurrence: str, options: dict[str, Any]) -> None:
    case("snapshot", recurrence=recurrence, options=options)


# Rows 16, 18, 21 to 25, 33 to 35, 38, 44: single values.


@pytest.mark.parametrize("options", PLANS[:3], ids=plan_name)
@pytest.mark.parametrize("recurrence", EVERY)
def test_forgetting(case, recurrence: str, options: dict[str, Any]) -> None:
    case("forgetting", recurrence=recurrence, options=options)


def test_forgetting_one_channel(case) -> None:
    case("forgetting_one_channel")


@pytest.mark.parametrize("n_steps", [16, 64])
@pytest.mark.parametrize("readout", ["output_only", "exact_readout", "state_output"])
@pytest.mark.parametrize("recurrence", EVERY)
def test_steep_decay(case, recurrence: str, readout: str, n_steps: int) -> None:
    options = {"length": n_steps, "readout": readout}
    assert within_bounds(case("steep_decay", recurrence=recurrence, options=options, n_steps=n_steps))


@pytest.mark.parametrize("amplitude", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("recurrence", DELTA)
def test_small_keys(case, recurrence: str, amplitude: float) -> None:
    assert within_bounds(case("small_keys", recurrence=recurrence, amplitude=amplitude))


@pytest.mark.parametrize("recurrence", EVERY)
@pytest.mark.parametrize("name", ["gate_keeps_its_bits", "gates_at_their_limits", "runs_are_repeatable"])
def test_gates_and_runs(case, name: str, recurrence: str) -> None:
    case(name, recurrence=recurrence)


@pytest.mark.parametrize("options", [{"length": 0}, {"length": 1}, {"length": 5}, PLANS[1], PLANS[2]], ids=plan_name)
@pytest.mark.parametrize("recurrence", EVERY)
def test_state_keeps_its_bits(case, recurrence: str, options: dict[str, Any]) -> None:
    case("state_keeps_its_bits", recurrence=recurrence, options=options)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_product_in_fp32(case, length: int) -> None:
    case("product_in_fp32", length=length)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("fmt", ["fp32", "fp16", "fp8", "nvfp4"])
@pytest.mark.parametrize("recurrence", EVERY)
def test_nonfinite_states_set_the_error_word(case, recurrence: str, fmt: str, length: int) -> None:
    case("nonfinite_sets_the_error_word", recurrence=recurrence, fmt=fmt, length=length)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("fmt", ["fp8", "int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("recurrence", EVERY)
def test_scales_of_rows_and_blocks(case, recurrence: str, fmt: str, length: int) -> None:
    case("scales_of_rows_and_blocks", recurrence=recurrence, fmt=fmt, length=length)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
@pytest.mark.parametrize("recurrence", EVERY)
def test_draws_differ(case, recurrence: str, fmt: str, length: int) -> None:
    case("draws_differ", recurrence=recurrence, fmt=fmt, length=length)


@pytest.mark.parametrize("length", [1, 3, 5, 13])
@pytest.mark.parametrize("recurrence", EVERY)
def test_every_length_equals_sequential(case, recurrence: str, length: int) -> None:
    case("equals_sequential", recurrence=recurrence, length=length)


def test_lengths_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="length and track: expected 0 or more, got -1"):
        ReplayOptions(length=-1)
    with pytest.raises(ValueError, match="window: expected 2 T <= L = 7, got T = 4"):
        ReplayOptions(length=7, window=4)


@pytest.mark.parametrize(("heads", "d_k", "d_v", "recurrence"), [
    ((8, 8), 128, 80, "mamba2"), ((1, 2), 128, 80, "kda"), ((1, 2), 80, 80, "gdn"),
    ((4, 16), 16, 16, "gdn"), ((4, 16), 16, 16, "kda"), ((4, 16), 16, 16, "mamba2"),
])  # fmt: skip
def test_heads_of_80_and_groups_of_heads(
    interpreted, heads: tuple[int, int], d_k: int, d_v: int, recurrence: str
) -> None:
    found = interpreted(
        CASES, "compare_with_twin", shape=[*heads, d_k, d_v], recurrence=recurrence, n_steps=3, n_rows=1,
        options={"length": 2, "recurrence": "bf16", "read": "bf16"},
    )  # fmt: skip
    assert within_bounds(found)
    assert found["other_codes"] <= 0.03


def test_heads_that_are_no_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="value_heads: expected a multiple of key_heads = 3"):
        HeadShape(key_heads=3, value_heads=4, d_k=16, d_v=16)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_cases_tell_a_kernel_with_the_fault(interpreted, tmp_path: Path, fault: str) -> None:
    old, new, cases = FAULTS[fault]
    kernels = str(write_mutant(tmp_path, old, new))
    for name, arguments in cases:
        assert interpreted(CASES, "fails", name=name, kernels=kernels, **arguments)


def test_the_table_names_tests_that_exist() -> None:
    here = Path(__file__)
    rows = {int(row) for row in re.findall(r"^ ?(\d+)  ", __doc__, re.M)}
    assert rows == set(range(7, 45))
    for file, test in re.findall(r"(?:([\w/]+\.py)::)?(test_\w+)(?![\w.])", __doc__):
        source = (here.parent / file if file else here).read_text()
        assert f"def {test}(" in source, f"{file or here.name} has no {test}"
