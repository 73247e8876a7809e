"""Perplexity: windows of a text, the ratio with its interval, and a model that knows nothing at chance."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from task_cases import STREAM_COLUMNS, decode, embedded_text, load_embedded, within

from driftgate.accuracy.prompts import Decoded
from driftgate.errors import EmptyRunError, InputError, UsageError
from driftgate.evals.tasks import load_task
from driftgate.evals.tasks.item_task import TaskOptions
from driftgate.evals.tasks.ppl import TEXT, PplTask, summarize_perplexity

SMALL = PplTask(n_windows=4, window=16)
GUESS = math.log(264)


def build(task=SMALL, **options):
    return task.build(TaskOptions(**options), embedded_text())


def answers_of(prompts, nll):
    """Made-up answers; ``nll`` [n_prompts, n_tokens] nats."""
    return [
        Decoded(item_id=p.item_id, repeat=0, logprobs=tuple((-row).tolist()))
        for p, row in zip(prompts, np.asarray(nll, dtype=float), strict=True)
    ]


def score(prompts, answers, plan="baseline"):
    return SMALL.score(prompts, {plan: answers}, embedded_text())


def test_the_bundled_text_is_prose_of_a_stated_source():
    text = TEXT.read_text("utf-8")
    assert 20_000 < len(text.encode()) < 200_000
    card = TEXT.with_suffix(".md").read_text("utf-8")
    assert "public domain" in card and f"{len(text.encode()):,} bytes" in card


def test_the_catalogue_builds_it():
    task = load_task("ppl")
    prompts = build(task)
    assert len(prompts) == task.n_windows
    assert all((p.token_ids, len(p.continuation), p.prefill) == ((257,), task.window, 1) for p in prompts)


def test_windows_lie_evenly_over_the_text_and_do_not_overlap(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(33 + i) for i in range(90)), "utf-8")
    prompts = build(data=str(file))
    assert [p.continuation[0] for p in prompts] == [33 + first for first in (0, 22, 45, 67)]
    assert all(p.continuation == tuple(range(p.continuation[0], p.continuation[0] + 16)) for p in prompts)
    assert len(build(PplTask(n_windows=40, window=16), data=str(file))) == 5


def test_a_prefill_is_context_and_is_not_scored(tmp_path):
    prompts = build(prefill=9)
    assert all((len(p.token_ids), p.prefill, len(p.continuation)) == (9, 9, 8) for p in prompts)
    with pytest.raises(UsageError, match="prefill prompt leaves nothing"):
        build(prefill="prompt")


def test_without_bos_the_first_token_is_the_context():
    prompts = SMALL.build(TaskOptions(), replace(embedded_text(), bos_id=None))
    assert all((len(p.token_ids), len(p.continuation)) == (1, 15) for p in prompts)


def test_the_ratio_is_that_of_the_mean_likelihoods_with_the_window_as_unit():
    prompts = build()
    rng = np.random.default_rng(1)
    base = rng.gamma(2.0, 1.0, (4, 16))
    shift = np.repeat([[0.01], [0.03], [0.02], [0.04]], 16, axis=1)
    answers = {"baseline": answers_of(prompts, base), "p": answers_of(prompts, base + shift)}
    found = summarize_perplexity(answers, "p")
    assert found.baseline == pytest.approx(math.exp(base.mean()))
    assert found.ratio == pytest.approx(math.exp(0.025))
    half = 3.1824463 * np.std([0.01, 0.02, 0.03, 0.04], ddof=1) / 2  # t of 3 degrees of freedom, two-sided 95 %
    assert found.ratio_ci_high == pytest.approx(math.exp(0.025 + half))
    assert found.ratio < found.ratio_upper_95 < found.ratio_ci_high
    record = SMALL.measure_perplexity(prompts, answers, "p")
    assert (record.plan, record.ratio_ci_low) == (found.plan, found.ratio_ci_low)
    assert summarize_perplexity(answers, "baseline").ratio == 1.0


def test_rows_hold_the_likelihood_of_each_window():
    prompts = build()
    items = score(prompts, answers_of(prompts, np.full((4, 16), 2.5) + np.arange(4)[:, None]))
    assert items["nll"].tolist() == [2.5, 3.5, 4.5, 5.5]
    assert items["correct"].tolist() == [True, True, True, True]
    assert items["answer"].tolist() == ["2.500", "3.500", "4.500", "5.500"]
    assert set(items["gold"]) == {"below 5.576"} and set(items["n_tokens"]) == {16}
    assert set(items.columns) >= STREAM_COLUMNS
    worse = score(prompts, answers_of(prompts, np.full((4, 16), 6.0)))
    assert not worse["correct"].any()


def test_a_logit_that_is_not_finite_is_never_averaged_away():
    prompts = build()
    good = answers_of(prompts, np.ones((4, 16)))
    bad = [*good[:3], replace(good[3], finite=False)]
    items = score(prompts, bad, "p")
    assert items["parse_reason"].tolist() == ["ok"] * 3 + ["nonfinite"]
    assert items["correct"].tolist() == [True] * 3 + [False]
    found = summarize_perplexity({"baseline": good, "p": bad}, "p")
    assert (found.plan, found.ratio, found.ratio_ci_high) == (None, None, None)
    assert found.baseline == pytest.approx(math.e)


def test_a_model_that_guesses_scores_chance():
    prompts = build(PplTask(n_windows=300, window=16))
    noise = np.random.default_rng(2).normal(0.0, 0.1, (len(prompts), 16))
    items = score(prompts, answers_of(prompts, GUESS + noise))
    assert within(items["correct"].mean(), PplTask.chance, len(items))
    exactly = score(prompts, answers_of(prompts, np.full((len(prompts), 16), GUESS + 1e-9)))
    assert not exactly["correct"].any()


def test_texts_that_do_not_fit_are_named(tmp_path):
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("thirty-one characters of text..", "utf-8")
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"short\.txt: 31 tokens are not two windows of 16"):
        build(data=str(short))
    with pytest.raises(InputError, match=r"binary\.txt is no readable UTF-8"):
        build(data=str(binary))
    with pytest.raises(InputError, match=r"missing\.txt does not exist"):
        build(data=str(tmp_path / "missing.txt"))
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        SMALL.build(TaskOptions(), replace(embedded_text(), tokenizer=None))
    with pytest.raises(EmptyRunError, match="score nothing"):
        build(PplTask(window=1))


def test_scores_come_from_decode_steps_and_are_the_models_own():
    """What the engine gives equals the model's own forward over the window (5e-5: FP32 sums in another order)."""
    import torch

    prompts = build()
    answers = decode(prompts, "nvfp4@4")
    model = load_embedded().model
    for prompt, own in zip(prompts, answers["baseline"], strict=True):
        ids = torch.tensor([[*prompt.token_ids, *prompt.continuation]])
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        expected = logp.gather(1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(own.logprobs, expected, atol=5e-5 * 16)
    assert all(own.low_precision_reads > 0 for own in answers["nvfp4@4"])
    assert summarize_perplexity(answers, "nvfp4@4").ratio != 1.0
