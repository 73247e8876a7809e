"""How to serve a plan: commands for what an engine has flags for, a reason for what it has none for."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_cases import make_run, with_results

from driftgate.reports import markdown
from driftgate.reports.serving import describe_serving


def told(plan: str, engine: str, *, recurrence: str = "gdn") -> str:
    """What the closing section says of one plan."""
    run = make_run()
    record = next(iter(run.results.plans.values()))
    bits = [b.model_copy(update={"recurrence": recurrence}) for b in run.results.bitwise]
    serving = describe_serving(with_results(run, plans={plan: record}, bitwise=bits))
    return next(command for _, name, command in serving.rows if name == engine)


@pytest.mark.parametrize(
    ("plan", "recurrence", "engine", "flags"),
    [
        ("fp32@16+cached", "gdn", "SGLang", ("--enable-linear-replayssm", "--linear-replayssm-cache-len 16")),
        ("fp32@8+cached+track=256", "kda", "SGLang", ("--linear-replayssm-cache-len 8", "no_buffer")),
        ("bf16@16", "mamba2", "vLLM", ("--use-replayssm", "--mamba-ssm-cache-dtype bfloat16")),
        ("fp16@1", "gdn", "vLLM", ("--mamba-ssm-cache-dtype float16",)),
    ],
)  # fmt: skip
def test_a_plan_that_an_engine_has_flags_for_is_a_command(plan, recurrence, engine, flags):
    command = told(plan, engine, recurrence=recurrence)
    assert all(flag in command for flag in flags) and "not servable" not in command
    assert ("replayssm" in command) == ("@1" not in plan or "@16" in plan)


@pytest.mark.parametrize(
    ("plan", "recurrence", "engine", "reason"),
    [
        ("nvfp4/fp32@16", "gdn", "SGLang", "no flag for a read copy"),
        ("fp8@16", "gdn", "SGLang", "no state type fp8"),
        ("fp32@16", "gdn", "vLLM", "replay is for mamba2 alone"),
        ("fp32@16", "mamba2", "SGLang", "replay is for gdn and kda alone"),
        ("fp16@16+sr", "mamba2", "vLLM", "no flag for +sr"),
        ("fp32@16+exact_readout", "mamba2", "vLLM", "no flag for +exact_readout"),
        ("mixed layers", "gdn", "vLLM", "no engine has formats by layer"),
    ],
)
def test_a_plan_without_flags_has_its_reason_and_no_command(plan, recurrence, engine, reason):
    command = told(plan, engine, recurrence=recurrence)
    assert command.startswith("not servable") and reason in command
    assert "--" not in command


def test_the_section_closes_the_report_with_sources_and_when_not_to(tmp_path: Path):
    text = markdown.render(make_run(), tmp_path).read_text(encoding="utf-8")
    closing = text[text.index("## How to serve this plan") :]
    assert "\n## " not in closing[3:]
    for words in (
        "7843466596348febfbffead495bc1f5de9501411", "866fea2b9", "flag for a read copy", "Batch 1", "attention alone",
        "experts", "Kimi Delta Attention", "no\\_buffer", "split of prefill and decode", "Triton decode backend",
    ):  # fmt: skip
        assert words in closing or words.replace("\\", "") in closing, words


def test_only_a_candidate_that_passed_is_recommended():
    run = make_run()
    assert describe_serving(run).lead.startswith("Of the candidates that passed, nvfp4/fp32@16 moves the fewest bytes")
    failed = [v.model_copy(update={"verdict": "fail"}) for v in run.results.verdicts]
    assert "none is fit" in describe_serving(with_results(run, verdicts=failed)).lead
