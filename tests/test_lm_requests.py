"""Requests of lm-eval as prompts, and texts as its responses: tokens against those of lm-eval's own HFLM."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'driftgate[lm-eval]'")

from lm_eval_cases import PAIRS, ask, load_hf, load_lm

from driftgate.accuracy.prompts import Decoded
from driftgate.errors import InputError
from driftgate.evals.lm_eval import DriftgateLM
from driftgate.evals.lm_requests import encode, encode_pair, make_prompts, read_responses
from driftgate.evals.tasks.item_task import ModelText, TaskOptions


@pytest.fixture(scope="module")
def lm() -> DriftgateLM:
    return load_lm()


@pytest.fixture(scope="module")
def hf(lm):
    return load_hf(lm)


@pytest.fixture
def text(lm) -> ModelText:
    return lm.text


@pytest.mark.parametrize(("context", "continuation"), PAIRS[:4])
def test_a_pair_has_the_tokens_that_lm_eval_gives_it(text, hf, context, continuation):
    seen = []
    hf_tokens = hf._loglikelihood_tokens
    hf._loglikelihood_tokens = lambda requests, **_: seen.extend(requests) or [(0.0, False)]
    try:
        hf.loglikelihood([ask("loglikelihood", context, continuation)])
    finally:
        hf._loglikelihood_tokens = hf_tokens
    ((_, start, rest),) = seen
    assert encode_pair(text, context, continuation) == (start, rest)


def test_a_context_without_tokens_is_bos(text):
    assert encode_pair(text, "", "<bos>o-") == ([257], [111, 45])
    assert encode_pair(text, " \n", "o") == ([257], [32, 10, 111])


@pytest.fixture
def adds_bos(text) -> ModelText:
    """The same tokenizer, putting BOS before every text by itself, as most do."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = pickle.loads(pickle.dumps(text.tokenizer))
    post = TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 257)])
    tokenizer.backend_tokenizer.post_processor = post
    assert tokenizer.encode("o") == [257, 111]
    return ModelText(name="m", tokenizer=tokenizer, vocab_size=264, context=8, bos_id=257, eos_ids=(258,))


@pytest.mark.parametrize("context", ["o-n", "<bos>o-n"])
def test_bos_stands_once(adds_bos, context):
    instances = [
        ask("loglikelihood", context, "+"),
        ask("generate_until", context, {"max_gen_toks": 2}),
        ask("loglikelihood_rolling", context),
        ask("loglikelihood", "", context),
    ]
    for prompt in make_prompts(instances, options=TaskOptions(), text=adds_bos):
        tokens = [*prompt.token_ids, *prompt.continuation]
        assert (tokens[0], tokens.count(257)) == (257, 1)
    assert encode(adds_bos, "o", special=False) == [111]


def test_windows_of_a_long_text_score_every_token_once_and_fit(adds_bos):
    string = "abcdefghijklmnopqrstu"
    prompts = make_prompts([ask("loglikelihood_rolling", string)], options=TaskOptions(), text=adds_bos)
    assert "".join(chr(t) for p in prompts for t in p.continuation) == string
    assert len(prompts) == 3
    assert max(p.n_tokens for p in prompts) == adds_bos.context


@pytest.mark.parametrize(
    ("prefill", "kind", "expected"),
    [(None, "loglikelihood", 1), (None, "generate_until", 5), ("prompt", "loglikelihood", 5), (3, "generate_until", 3)],
)
def test_how_much_is_prefilled(text, prefill, kind, expected):
    instance = ask(kind, "abcde", "f" if kind == "loglikelihood" else {})
    (prompt,) = make_prompts([instance], options=TaskOptions(prefill=prefill), text=text)
    assert (len(prompt.token_ids), prompt.prefill) == (5, expected)


def test_prompts_of_a_document_share_an_item_and_survive_pickling(text):
    instances = [ask("loglikelihood", "a", "b"), ask("loglikelihood", "a", "c"), ask("loglikelihood", "a", "b", doc=1)]
    prompts = make_prompts(instances, options=TaskOptions(), text=text)
    assert [(p.item_id, p.repeat) for p in prompts] == [("t/0", 0), ("t/0", 1), ("t/1", 0)]
    assert pickle.loads(pickle.dumps(prompts)) == prompts


def test_a_continuation_without_tokens_is_refused(text):
    with pytest.raises(InputError, match=r"t/0: the continuation '' has no tokens"):
        make_prompts([ask("loglikelihood", "a", "")], options=TaskOptions(), text=text)


def generated(text: ModelText, tokens: str, until: list[str], *, stopped: bool) -> tuple[Any, int, bool]:
    instance = ask("generate_until", "a", {"until": until, "max_gen_toks": 99})
    prompts = make_prompts([instance], options=TaskOptions(), text=text)
    ids = tuple(tokens.encode()) if not stopped else (*tokens.encode(), 258)
    decoded = [Decoded(item_id="t/0", repeat=0, token_ids=ids, capped=not stopped)]
    response = read_responses(prompts, decoded, text)[0]
    return response.value, response.n_tokens, response.capped


def test_a_text_ends_at_its_first_stop_and_what_follows_does_not_count(text):
    assert generated(text, "abc\n\nde##f", ["##", "\n\n"], stopped=False) == ("abc", 5, False)
    assert generated(text, "abc", ["##"], stopped=False) == ("abc", 3, True)
    assert generated(text, "abc", ["##"], stopped=True) == ("abc", 4, False)
    assert generated(text, "äb##", ["##"], stopped=False) == ("äb", 5, False)


def test_a_stop_of_one_token_ends_the_decoding(text):
    instance = ask("generate_until", "a", {"until": ["\n", "##", ""]})
    (prompt,) = make_prompts([instance], options=TaskOptions(), text=text)
    assert (prompt.stop_ids, prompt.max_new_tokens, prompt.temperature) == ((258, 10), 256, 0.0)


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ({"do_sample": True}, {}, 1.0),
        ({"do_sample": True, "temperature": 0.5}, {}, 0.5),
        ({"do_sample": False, "temperature": 0.5, "top_p": 0.9}, {}, 0.0),
        ({"temperature": 0.5}, {}, 0.5),
        ({"do_sample": True, "top_p": 0.9}, {"temperature": 0.0}, 0.0),
        ({"temperature": 0.5, "top_p": 1.0, "top_k": 0, "num_beams": 1}, {"temperature": 0.7}, 0.7),
    ],
)
def test_temperature(text, arguments, options, expected):
    (prompt,) = make_prompts([ask("generate_until", "a", arguments)], options=TaskOptions(**options), text=text)
    assert prompt.temperature == expected


@pytest.mark.parametrize(
    "arguments", [{"do_sample": True, "top_p": 0.9}, {"num_beams": 4}, {"repetition_penalty": 1.1}, {"shine": 1}]
)
def test_what_would_change_the_text_is_refused_not_ignored(text, arguments):
    name = list(arguments)[-1]
    with pytest.raises(InputError, match=rf"t/0: generation_kwargs {name}: .* is not available"):
        make_prompts([ask("generate_until", "a", arguments)], options=TaskOptions(), text=text)
