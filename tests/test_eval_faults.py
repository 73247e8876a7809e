"""Public faults of evaluation tools, each as tests of its kind.

A line: row, where it was reported, the fault; then the tests, of this file where none is named. Rows that other tables
hold are not listed: faults of kernels are in test_kernel_faults.py.

 2  ik_llama.cpp #325, llama.cpp #12557, #23572: 16-bit log-probabilities of the baseline, negative KL, wrong tails
    test_logits_that_were_stored_and_read_have_a_kl_of_exactly_0, test_metrics.py::test_no_step_is_negative,
    test_metrics.py::test_equal_logits_give_exactly_zero, test_metrics.py::test_small_divergences_keep_their_digits,
    test_metrics.py::test_agrees_with_long_double_at_a_large_vocabulary
 4  Model-Optimizer: a sum of p·|ln p - ln q| taken for KL, unequal lengths trimmed in silence
    test_metrics.py::test_closed_form, test_metrics.py::test_refuses
 5  Model-Optimizer, llm-compressor #2659: means of means, failed chunks that still divide
    test_statistics.py::test_token_and_sequence_mean_of_unequal_lengths,
    test_statistics.py::test_non_finite_steps_are_counted_named_and_left_out
 6  exllamav3: a KL below 6e-8 stored as 0
    test_a_tiny_kl_survives_the_run_folder, test_statistics.py::test_tiny_values_survive
 8  PyTorch #14457, sparseml #674: kl_div reduced over the wrong axes
    test_metrics.py::test_no_reduction_over_steps
 9  mlx-lm #1855, trl #6803: padded positions enter the mean
    test_statistics.py::test_padding_enters_nothing, test_metrics.py::test_padding_of_the_vocabulary_is_cut_off,
    test_lockstep.py::test_batches_are_runs_of_their_own_and_padding_enters_nothing
10  lm-eval #704, vLLM #5898: answers change with the batch; here the shape is kept, and its noise is told by itself
    test_lockstep.py::test_another_order_of_additions_is_tiny_and_formats_are_not,
    test_lockstep.py::test_the_baseline_equals_itself, test_lockstep.py::test_a_plan_does_not_depend_on_the_others,
    test_answers.py::test_answers_depend_on_no_limit_and_no_other_batch
11  genlm-backend #66, lm-eval #2921: log-softmax in 16 bits
    test_metrics.py::test_large_bfloat16_logits_are_upcast_first, test_metrics.py::test_large_half_precision_logits
12  lm-eval #3333, sglang #888: two BOS, or none
    test_gpqa.py::test_row_12_there_is_one_bos_where_there_is_any,
    test_gpqa.py::test_row_12_an_embedded_checkpoint_is_asked_as_it_was_trained,
    test_lm_requests.py::test_bos_stands_once
14  lighteval #1040, #1363: a limit that sticks in a cache, ids that collide
    test_question_file.py::test_row_14_a_file_that_changed_is_read_anew,
    test_question_file.py::test_row_14_one_id_twice_is_an_error_within_a_file_and_over_two,
    test_answering.py::test_a_limit_takes_items_of_a_run_without_one
16  inspect #5145, #721, tpu-inference #3518: letters read from the wrong place
    test_extraction.py::test_row_16_a_letter_is_read,
    test_extraction.py::test_row_16_without_a_letter_there_is_a_reason,
    test_extraction.py::test_row_16_an_answer_that_was_cut_off_counts_only_where_it_is_sure
17  evalchemy #155, marin #7527: gold always one letter, bad gold taken for A
    test_gpqa.py::test_row_17_gold_letters_are_near_uniform,
    test_question_file.py::test_row_17_a_gold_answer_outside_a_to_d_is_an_error,
    test_items.py::test_a_plan_that_prefers_a_letter_is_seen_and_gold_that_is_uniform_is_not
18  lm-eval #3735, evalscope #1446: the text of a choice is altered
    test_question_file.py::test_row_18_cells_come_back_verbatim,
    test_question_file.py::test_row_18_equal_choices_are_flagged,
    test_gpqa.py::test_row_18_a_prompt_holds_every_cell_verbatim
19  olmo-eval #399, omlx #3772, NeMo-RL #2725: answers cut at the cap are wrong answers, and nobody is told
    test_task_checks.py::test_an_answer_that_is_cut_at_the_cap_is_told_and_gated_by_policy,
    test_items.py::test_both_sides_are_counted,
    test_samples_command.py::test_caps_and_unread_answers_of_both_sides_are_told_and_gated,
    test_samples_command.py::test_caps_that_no_file_records_are_unknown_and_pass_no_check
20  lm-eval #3115, #2880: prompts cut from the left
    test_gpqa.py::test_row_20_a_prompt_that_does_not_fit_is_an_error_that_names_both_numbers,
    test_answers.py::test_prompts_are_never_cut, test_lm_eval.py::test_nothing_is_cut_off
21  lm-eval #1719, #1751: results depend on the number of ranks
    test_answering.py::test_items_are_the_same_in_any_number_of_shards
22  verifiers #803, bubench #93, llama.cpp #21152: torn lines, duplicates and foreign files at a resume
    test_answering.py::test_an_interrupted_task_goes_on_where_it_stopped,
    test_answering.py::test_a_damaged_batch_is_named, test_answering.py::test_nothing_is_served_under_another_identity,
    test_samples.py::test_the_same_answer_twice_is_refused
23  inspect #2314, marin #7391, flexeval #265: exit code 0 for unknown tasks, no results, failed writes
    test_every_way_to_measure_nothing_has_a_code_of_its_own, test_suite.py::test_plans_that_do_not_fit_are_usage_errors,
    test_suite.py::test_an_unknown_task_in_a_file_is_a_usage_error,
    test_run_command.py::test_a_folder_without_permission_is_refused,
    test_samples_command.py::test_no_scored_item_is_exit_code_5_and_prints_nothing
24  llm-compressor test_lmeval.py, agentv #882: rounded ratios, a text that disagrees with the exit code
    test_power.py::test_sides, test_samples_command.py::test_text_json_and_exit_code_agree,
    test_samples_command.py::test_a_bound_equal_to_the_margin_passes_and_1e_9_beyond_does_not,
    test_samples_command.py::test_a_base_that_is_never_right_passes_nothing,
    test_task_checks.py::test_a_loss_bound_equal_to_the_margin_passes_and_1e_9_beyond_does_not,
    test_gate_command.py::test_text_json_junit_annotations_and_exit_code_agree
25  lm-eval #3831, #4017: unpaired z of paired items, "not significant" read as equal
    test_task_checks.py::test_no_flips_of_198_pass_at_two_points_with_a_bound_of_one_and_a_half,
    test_task_checks.py::test_ten_lost_and_four_gained_of_198_are_inconclusive,
    test_error_rates.py::test_a_harmless_plan_with_an_unlucky_small_sample_is_inconclusive,
    test_error_rates.py::test_answers_taken_for_items_would_not_cover
26  lm-eval #1723, #2394, lighteval #270: offline runs that fail late or are empty
    test_question_file.py::test_row_26_offline_a_hub_id_that_is_not_cached_is_one_line,
    test_question_file.py::test_row_26_a_missing_file_is_one_line,
    test_gpqa.py::test_row_26_a_missing_file_is_told_when_prompts_are_built
28  ollama #15865, vLLM #13466: an FP32 state stored in 16 bits
    test_pool.py::test_audit_finds_a_type_that_the_plan_does_not_name, test_kernel_faults.py::test_state_keeps_its_bits
29  llama.cpp #21681, vLLM #57267: a restored prefix changes the state
    test_pool.py::test_copying_a_slot_with_buffered_entries_is_refused,
    test_pool.py::test_copying_a_slot_can_flush_it, test_kernel_faults.py::test_snapshot
30  sglang #26929, vLLM #35753: stochastic rounding that does not repeat, a seed that is not kept
    test_lockstep.py::test_stochastic_rounding_depends_on_seed_and_sequence_and_on_no_batch,
    test_main_job.py::test_the_manifest_says_what_is_needed_to_repeat_the_run
31  llama.cpp #7291, #2858: too little text, and bars all the same
    test_too_little_text_has_no_bars_or_cannot_pass, test_statistics.py::test_too_few_steps_have_no_bars,
    test_statistics.py::test_zero_steps_are_an_error,
    test_drift_checks.py::test_p99_9_of_few_steps_can_fail_but_never_pass
32  hipfire #398: the difference of two engines taken for that of a format
    test_what_fp32_costs_here_is_told_apart_from_the_plan,
    test_drift_checks.py::test_a_low_precision_plan_that_cannot_be_told_from_fp32_was_not_measured,
    test_policy.py::test_twins_and_kernels_must_agree_where_the_state_is_fp32,
    test_crosscheck.py::test_interpreted_logits_equal_those_of_the_torch_twin_up_to_rounding
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_cases import call_program, enter_empty_folder, is_one_line
from policy_cases import PLAN, one, rule
from run_cases import Measured, lognormal, make_run
from sample_cases import plain_rows, write_lines

from driftgate.accuracy.kl_summary import summarize_kl
from driftgate.accuracy.metrics.kl import kl_divergence
from driftgate.accuracy.records import load_run, save_run

ROWS = {2, 4, 5, 6, 8, 9, 10, 11, 12, 14, *range(16, 27), *range(28, 33)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_that_were_stored_and_read_have_a_kl_of_exactly_0(tmp_path, dtype):
    """Whatever the model's type, what is compared is what was computed: storing it changes no bit."""
    logits = (4 * torch.randn(7, 5003, generator=torch.Generator().manual_seed(0))).to(dtype)
    torch.save(logits, tmp_path / "logits.pt")
    assert (kl_divergence(torch.load(tmp_path / "logits.pt"), logits) == 0.0).all()
    rounded = logits.half().to(dtype) if dtype == torch.float32 else None
    if rounded is not None:  # the fault: the baseline kept in 16 bits is another distribution
        assert (kl_divergence(rounded, logits) > 0.0).all()


def test_a_tiny_kl_survives_the_run_folder(tmp_path):
    kl = np.full((4, 128), 1e-9) * np.linspace(0.5, 1.5, 128)
    save_run(tmp_path, make_run({PLAN: Measured(kl=kl)}, floor=1e-13))
    stored = load_run(tmp_path)
    assert stored.steps["kl"].to_numpy().tobytes() == kl.ravel().tobytes()
    assert stored.results.plans[PLAN].kl.mean == pytest.approx(1e-9, rel=1e-12, abs=0.0)
    assert json.loads((tmp_path / "results.json").read_text())["noise_floor"]["kl_mean"] == 1e-13


def answers(folder: Path, name: str, given: str, **fields: object) -> Path:
    return write_lines(folder / f"{name}.jsonl", [row | fields for row in plain_rows(given)])


def test_every_way_to_measure_nothing_has_a_code_of_its_own(capfd, monkeypatch, tmp_path):
    """Codes 2, 4 and 5 are those of no verdict, and nothing that they print says pass."""
    enter_empty_folder(monkeypatch, tmp_path)
    base, failed = answers(tmp_path, "base", "1" * 198), answers(tmp_path, "failed", "1" * 198, correct=None)
    empty, gate = answers(tmp_path, "empty", ""), ("gate", "--margin", 2, "--samples")
    calls = {
        2: [("run", "--plan", "nvfp5@16"), ("run", "--task", "gqpa"), ("run", "dirft")],
        4: [("run", "--out", base), (*gate, base, tmp_path / "none.jsonl")],
        5: [("run", "--steps", 0), (*gate, base, empty), (*gate, base, failed)],
        0: [(*gate, base, answers(tmp_path, "same", "1" * 198, engine="another"))],
        1: [(*gate, base, answers(tmp_path, "wrong", "0" * 198))],
        3: [(*gate, base, answers(tmp_path, "mixed", "0" * 8 + "1" * 190))],
    }
    for code, lines in calls.items():
        for arguments in lines:
            found, out, err = call_program(capfd, monkeypatch, *arguments)
            assert found == code, arguments
            assert ("verdict: pass" in out) == (code == 0)
            assert (out == "" and is_one_line(err)) == (code in (2, 4, 5)), arguments


@pytest.mark.parametrize("n", [1, 2, 9, 10, 99])
def test_too_little_text_has_no_bars_or_cannot_pass(n):
    """Up to 99 steps of one sequence: below ten there is no interval, and none of these means passes any limit."""
    kl = lognormal(1e-4, shape=(1, n))
    found = summarize_kl(kl)
    assert (found.ci_low is None) == (found.upper_95 is None) == (n < 10)
    if found.ci_low is not None:
        assert 0.0 <= found.ci_low <= found.mean <= found.ci_high
    assert found.pass_blocked
    verdict = one(make_run({PLAN: Measured(kl=kl)}), rule("kl_mean", 1e6))
    assert verdict.verdict == "inconclusive"
    assert verdict.reason


@pytest.mark.parametrize(("floor", "verdict"), [(1e-9, "pass"), (1e-5, "invalid")])
def test_what_fp32_costs_here_is_told_apart_from_the_plan(floor, verdict):
    """A KL of 2e-5 beside FP32 under another launch: above that floor it is the plan's, within three of it nobody's."""
    run = make_run({PLAN: Measured(kl=lognormal(2e-5))}, floor=floor)
    assert one(run, rule("kl_mean", 0.01)).verdict == verdict
    assert (run.results.noise_floor.kl_mean, run.results.plans[PLAN].kl.mean) == (floor, pytest.approx(2e-5, rel=0.05))


def test_the_table_names_tests_that_exist():
    here = Path(__file__)
    rows = {int(row) for row in re.findall(r"^ ?(\d+)  ", __doc__, re.M)}
    assert rows == ROWS
    for file, test in re.findall(r"(?:([\w/]+\.py)::)?(test_\w+)(?![\w.])", __doc__):
        source = (here.parent / file if file else here).read_text(encoding="utf-8")
        assert f"def {test}(" in source, f"{file or here.name} has no {test}"
