"""The answer engine: what is decoded for an item is the model's, the plan's, and nobody else's."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from driftgate.accuracy.answers import BASELINE_NAME, AnswerRunner, first_items, order_batches
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.prompts import Decoded, Prompt, check_lengths
from driftgate.accuracy.sampling import gumbel_rows, item_key, sample
from driftgate.errors import EmptyRunError, InputError
from driftgate.kernels.contract import Backend

VOCAB, BATCH, LAYERS = 96, 4, 2
PLANS = ("fp32@1", "fp32@4", "nvfp4@4", "nvfp4/fp32@4")


def make_prompts(n: int = 6) -> list[Prompt]:
    """Unequal lengths and prefills; all three kinds of question at once, repeats 0 and 1 of one item."""
    rng = np.random.default_rng(5)
    prompts = []
    for i in range(n):
        length = 9 + 5 * i
        prompts.append(
            Prompt(
                item_id=f"item {i}",
                token_ids=tuple(rng.integers(3, VOCAB, length).tolist()),
                prefill=(1, length, length // 2)[i % 3],
                continuation=tuple(rng.integers(3, VOCAB, 4).tolist()),
                choices=(7, 8, 9, 10),
                max_new_tokens=12,
            )
        )
    return [*prompts, replace(prompts[0], repeat=1)]


def make_runner(model: torch.nn.Module, *names: str, batch: int = BATCH, **options: int) -> AnswerRunner:
    plans = {name: PrecisionPlan.parse(name) for name in names}
    return AnswerRunner(model, plans, batch=batch, backend=Backend.TORCH, **options)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return make_prompts()


@pytest.fixture(scope="module")
def answers(tiny_model, prompts) -> dict[str, list[Decoded]]:
    return make_runner(tiny_model, *PLANS).run(prompts)


@torch.no_grad()
def log_softmax(model: torch.nn.Module, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Of the unwrapped model's own forward, [tokens, vocab] float64."""
    return model(input_ids=torch.tensor([token_ids])).logits[0].double().log_softmax(-1)


def test_log_probabilities_are_those_of_the_model(tiny_model, prompts, answers):
    # FP32 sums of a few hundred terms in another order: 5e-5 is what the wrapper is held to (test_adapters.py).
    for prompt, found in zip(prompts, answers[BASELINE_NAME], strict=True):
        expected = log_softmax(tiny_model, prompt.token_ids + prompt.continuation)
        first = len(prompt.token_ids) - 1
        wanted = [float(expected[first + j, token]) for j, token in enumerate(prompt.continuation)]
        np.testing.assert_allclose(found.logprobs, wanted, atol=5e-5)
        np.testing.assert_allclose(found.choice_logprobs, expected[-1, list(prompt.choices)], atol=5e-5)
        assert not found.greedy


def test_a_continuation_of_most_likely_tokens_is_greedy(tiny_model, prompts):
    prompt = replace(prompts[1], max_new_tokens=0, choices=())
    likely = prompt.token_ids
    for _ in range(3):
        likely += (int(log_softmax(tiny_model, likely)[-1].argmax()),)
    asked = [replace(prompt, continuation=likely[len(prompt.token_ids) :])]
    asked.append(replace(asked[0], item_id="other", continuation=(*asked[0].continuation[:2], 3)))
    found = make_runner(tiny_model, batch=2).run(asked)[BASELINE_NAME]
    assert [f.greedy for f in found] == [True, False]


def test_temperature_0_takes_the_most_likely_token(tiny_model, prompts):
    asked = [replace(p, temperature=0.0, continuation=(), choices=()) for p in prompts[:3]]
    found = make_runner(tiny_model).run(asked)[BASELINE_NAME]
    for prompt, answer in zip(asked, found, strict=True):
        expected = log_softmax(tiny_model, prompt.token_ids + answer.token_ids[:-1])
        assert list(answer.token_ids) == expected[len(prompt.token_ids) - 1 :].argmax(-1).tolist()
        assert answer.capped


def test_samples_take_the_greatest_logit_plus_noise_of_item_and_index(tiny_model, prompts, answers):
    for prompt, answer in zip(prompts, answers[BASELINE_NAME], strict=True):
        fed = prompt.token_ids + prompt.continuation
        logits = log_softmax(tiny_model, fed + answer.token_ids[:-1])[len(fed) - 1 :]
        keys = torch.tensor([item_key(prompt.item_id, prompt.repeat)]).expand(len(logits))
        noise = gumbel_rows(0, keys, torch.arange(len(logits)), VOCAB)
        assert (logits + noise).argmax(-1).tolist() == list(answer.token_ids)


def test_repeats_differ_and_seeds_differ(tiny_model, prompts, answers):
    assert answers[BASELINE_NAME][0].token_ids != answers[BASELINE_NAME][-1].token_ids
    other = make_runner(tiny_model, seed=1).run(prompts[:1])[BASELINE_NAME]
    assert other[0].token_ids != answers[BASELINE_NAME][0].token_ids


def test_plans_with_the_baselines_bits_never_diverge(answers):
    for base, own in zip(answers[BASELINE_NAME], answers["fp32@1"], strict=True):
        assert own == base


def test_divergence_is_the_first_token_that_differs(answers):
    seen = 0
    for base, own in zip(answers[BASELINE_NAME], answers["nvfp4@4"], strict=True):
        different = [i for i, (a, b) in enumerate(zip(base.token_ids, own.token_ids, strict=True)) if a != b]
        assert own.first_divergence == (different[0] if different else None)
        assert (own.tie_margin is None) == (own.first_divergence is None)
        seen += bool(different)
    assert seen > 0


def test_the_tie_margin_is_the_baselines_lead(tiny_model, prompts, answers):
    index = next(i for i, a in enumerate(answers["nvfp4@4"]) if a.first_divergence is not None)
    prompt, base, own = prompts[index], answers[BASELINE_NAME][index], answers["nvfp4@4"][index]
    fed = prompt.token_ids + prompt.continuation + base.token_ids[: own.first_divergence]
    keys = torch.tensor([item_key(prompt.item_id, prompt.repeat)])
    scores = log_softmax(tiny_model, fed)[-1] + gumbel_rows(0, keys, torch.tensor([own.first_divergence]), VOCAB)[0]
    two = scores.topk(2).values
    assert own.tie_margin == pytest.approx(float(two[0] - two[1]), abs=1e-4)


@pytest.mark.parametrize(
    ("plan", "prefill", "expected"),
    [
        ("fp32@4", 1, 0),
        # 9 tokens, 4 scored, 12 generated: logits of a = 9 ... 24, one step each as 1 token is prefilled; the
        # steps 3, 7, 11 ... flush, which predict a = 5, 9, 13, 17, 21, and read the FP32 recurrence
        ("nvfp4/fp32@4", 1, (16 - 4) * LAYERS),
        ("nvfp4@4", 1, 16 * LAYERS),
        ("nvfp4/fp32@4", 9, (15 - 3) * LAYERS),  # the first logits are the prefill's
    ],
)
def test_reads_of_low_precision_states_while_answering(tiny_model, prompts, plan, prefill, expected):
    runner = make_runner(tiny_model, plan, batch=1)
    found = runner.run([replace(prompts[0], prefill=prefill)])
    assert found[plan][0].low_precision_reads == expected
    assert found[BASELINE_NAME][0].low_precision_reads == 0


def test_reads_are_those_of_what_is_asked_whatever_the_neighbours_ask(tiny_model, prompts):
    """A scored continuation of 4 tokens: 4 steps that predict them, and none for the token after."""
    asked = replace(prompts[0], choices=(), max_new_tokens=0)
    runner = make_runner(tiny_model, "nvfp4@4", batch=2)
    found = runner.run([asked, replace(prompts[0], item_id="longer")])["nvfp4@4"]
    assert found[0].low_precision_reads == 4 * LAYERS


def test_choices_alone_are_read_by_one_step(tiny_model, prompts):
    asked = replace(prompts[0], continuation=(), max_new_tokens=0)
    runner = make_runner(tiny_model, "nvfp4@4", batch=2)
    found = runner.run([asked, replace(asked, item_id="prefilled", prefill=9)])["nvfp4@4"]
    assert [f.low_precision_reads for f in found] == [LAYERS, 0]


def test_generation_stops_at_a_stop_token_and_keeps_it(tiny_model, prompts, answers):
    whole = answers[BASELINE_NAME][1].token_ids
    stop = whole[5]
    assert stop not in whole[:5]
    asked = [replace(p, stop_ids=(stop,)) if i == 1 else p for i, p in enumerate(prompts)]
    found = make_runner(tiny_model, *PLANS).run(asked)[BASELINE_NAME]
    assert found[1].token_ids == whole[:6]
    assert not found[1].capped
    assert [f.token_ids for i, f in enumerate(found) if i != 1] == [
        f.token_ids for i, f in enumerate(answers[BASELINE_NAME]) if i != 1
    ]


def test_forced_tokens_are_fed_and_the_model_goes_on_from_them(tiny_model, prompts, answers):
    whole = answers[BASELINE_NAME][2].token_ids
    asked = replace(prompts[2], forced=((3, 11), (4, 12)), stop_ids=(11,))
    found = make_runner(tiny_model).run([asked])[BASELINE_NAME][0]
    assert found.token_ids[:5] == (*whole[:3], 11, 12)  # and a forced token stops nothing
    assert len(found.token_ids) == 12
    after = log_softmax(tiny_model, asked.token_ids + asked.continuation + found.token_ids[:5])[-1]
    keys = torch.tensor([item_key(asked.item_id, 0)])
    assert found.token_ids[5] == int((after + gumbel_rows(0, keys, torch.tensor([5]), VOCAB)[0]).argmax())


def test_answers_depend_on_no_limit_and_no_other_batch(prompts, answers, tiny_model):
    """Row 21 of the public faults: whole batches, in an order of their own."""
    runner = make_runner(tiny_model, *PLANS)
    for limit in (1, 2, 4):
        batches = order_batches(prompts, batch=BATCH, seed=0, limit=limit)
        wanted = first_items(prompts, seed=0, limit=limit)
        held = {prompts[i].item_id for rows in batches for i in rows}
        assert len(wanted) == limit
        assert set(wanted) <= held
        for rows in batches:
            part = runner.run_batch([prompts[i] for i in rows]).answers
            for name, found in part.items():
                assert found == [answers[name][i] for i in rows]


def test_the_order_of_the_file_does_not_matter(prompts, answers, tiny_model):
    found = make_runner(tiny_model, *PLANS).run(prompts[::-1])
    assert {name: list(reversed(own)) for name, own in found.items()} == answers


def test_every_prompt_is_in_one_batch(prompts):
    batches = order_batches(prompts, batch=3, seed=7)
    assert sorted(i for rows in batches for i in rows) == list(range(len(prompts)))
    assert [len(rows) for rows in batches] == [3, 3, 1]
    assert batches != order_batches(prompts, batch=3, seed=8)


def test_the_baseline_equals_itself_and_a_rerun_in_the_same_shape(tiny_model, prompts):
    batch = prompts[:BATCH]
    first = make_runner(tiny_model, *PLANS).run_batch(batch)
    fewer = make_runner(tiny_model, "fp8@4", least_plans=len(PLANS)).run_batch(batch)
    assert first.again_equal
    assert first.digest == fewer.digest
    assert fewer.answers[BASELINE_NAME] == first.answers[BASELINE_NAME]
    assert list(fewer.answers) == [BASELINE_NAME, "fp8@4"]


def test_the_digest_sees_one_bit(tiny_model, prompts):
    model = copy.deepcopy(tiny_model)
    before = make_runner(model).run_batch(prompts[:1]).digest
    with torch.no_grad():
        weight = model.lm_head.weight
        weight[50, 0] = torch.nextafter(weight[50, 0], weight.new_tensor(9.0))
    assert make_runner(model).run_batch(prompts[:1]).digest != before


def test_logits_that_are_not_finite_are_told(tiny_model, prompts):
    model = copy.deepcopy(tiny_model)
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    found = make_runner(model).run(prompts[:2])[BASELINE_NAME]
    assert [f.finite for f in found] == [False, False]


def test_a_prompt_may_ask_nothing_of_the_decode_step(tiny_model, prompts):
    asked = replace(prompts[1], continuation=(), max_new_tokens=0)
    found = make_runner(tiny_model).run([asked])[BASELINE_NAME][0]
    expected = log_softmax(tiny_model, asked.token_ids)[-1, list(asked.choices)]
    np.testing.assert_allclose(found.choice_logprobs, expected, atol=5e-5)


def test_ties_go_to_the_lower_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [torch.nan, 1.0, 2.0, 0.0]])
    tokens, margin = sample(logits, torch.zeros(2, 4), torch.zeros(2, dtype=torch.float64))
    assert tokens.tolist() == [1, 0]
    assert margin[0] == 0


def test_noise_is_gumbel_and_keyed():
    keys = torch.tensor([item_key("a", 0), item_key("a", 1), item_key("b", 0)])
    noise = gumbel_rows(3, keys, torch.tensor([0, 0, 0]), 4000)
    assert torch.equal(noise[1:2, :100], gumbel_rows(3, keys[1:2], torch.tensor([0]), 100))
    # Mean 0.5772 and variance pi^2/6 of the Gumbel distribution; five standard errors of 12,000 draws.
    assert abs(float(noise.mean()) - 0.5772) < 5 * 1.2825 / 12000**0.5
    assert abs(float(noise.var()) - 1.6449) < 5 * (5.4 - 1) ** 0.5 * 1.6449 / 12000**0.5
    others = [gumbel_rows(3, keys[:1], torch.tensor([1]), 100), gumbel_rows(4, keys[:1], torch.tensor([0]), 100)]
    for other in (*others, noise[1:2, :100], noise[2:, :100]):
        assert float((noise[0, :100] - other[0]).abs().min()) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": 0}, "prefill: expected 1 to 9"),
        ({"prefill": 10}, "prefill: expected 1 to 9"),
        ({"continuation": (), "choices": (), "max_new_tokens": 0}, "nothing is asked"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(prompts, change, message):
    with pytest.raises(ValueError, match=message):
        replace(prompts[0], **change)


def test_nothing_to_answer_is_an_empty_run(tiny_model):
    with pytest.raises(EmptyRunError, match="zero items"):
        make_runner(tiny_model).run([])


def test_items_that_are_there_twice_are_refused(tiny_model, prompts):
    with pytest.raises(ValueError, match=r"every \(item_id, repeat\) once"):
        make_runner(tiny_model).run([prompts[0], prompts[0]])


def test_prompts_are_never_cut(prompts):
    check_lengths(prompts, context=50, task="t")
    check_lengths(prompts, context=None, task="t")
    with pytest.raises(InputError, match=r"task t, item item 5: 34 tokens of prompt and 16 after it exceed .* 49"):
        check_lengths(prompts, context=49, task="t")
