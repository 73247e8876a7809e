"""The lm-eval model: its numbers against lm-eval's own HFLM, the models it takes, what it refuses, its samples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'driftgate[lm-eval]'")

import hub_cases
from lm_eval_cases import PAIRS, PLAN, ask, load_hf, load_lm

from driftgate.accuracy.answers import AnswerRunner
from driftgate.accuracy.prompts import Decoded
from driftgate.errors import InputError, UsageError
from driftgate.evals.checkpoints import list_checkpoints
from driftgate.evals.lm_eval import DriftgateLM, paired_items

DOCS = Path(__file__).resolve().parents[1] / "docs" / "lm-eval.md"
SIGNS = ["+", "-", "*", "/"]
TEXTS = ["<bos>o-n+?o-", "o-n+?o-p*q", "ö"]


@pytest.fixture(scope="module")
def lm() -> DriftgateLM:
    return load_lm()


@pytest.fixture(scope="module")
def hf(lm):
    return load_hf(lm)


# loglikelihood, loglikelihood_rolling


def test_log_likelihoods_are_those_of_lm_eval(lm, hf):
    requests = [ask("loglikelihood", *pair, doc=i) for i, pair in enumerate(PAIRS[:4])]
    for own, other in zip(lm.baseline.loglikelihood(requests), hf.loglikelihood(requests), strict=True):
        assert own[0] == pytest.approx(other[0], abs=1e-3)
        assert own[1] == other[1]
    requests = [ask("loglikelihood_rolling", string, doc=i) for i, string in enumerate(TEXTS[1:])]
    assert lm.baseline.loglikelihood_rolling(requests) == pytest.approx(hf.loglikelihood_rolling(requests), abs=1e-3)


def test_answers_come_in_the_order_of_the_requests(lm):
    requests = [ask("loglikelihood", "<bos>o-n+" + "p*" * (i % 5), sign, doc=i) for i in range(9) for sign in SIGNS]
    forward = lm.loglikelihood(requests)
    documents = [[requests[i] for i in range(4 * d, 4 * d + 4)] for d in (5, 2, 8, 0, 1, 7, 3, 6, 4)]
    backward = iter(lm.loglikelihood([r for own in documents for r in own]))
    by_document = {own[0].doc_id: [next(backward) for _ in own] for own in documents}
    assert forward == [answer for d in range(9) for answer in by_document[d]]
    assert len({likelihood for likelihood, _ in forward}) >= 20


def test_a_plan_reads_its_own_state(lm):
    requests = [ask("loglikelihood", "<bos>o-n+" + "p*q/" * 10, sign) for sign in SIGNS]
    plan, baseline = lm.loglikelihood(requests), lm.baseline.loglikelihood(requests)
    assert all(a[0] != b[0] for a, b in zip(plan, baseline, strict=True))


def test_plan_and_baseline_come_from_one_decode(lm, monkeypatch):
    calls = []
    run = AnswerRunner.run
    monkeypatch.setattr(AnswerRunner, "run", lambda self, *a, **k: calls.append(1) or run(self, *a, **k))
    requests = [ask("loglikelihood", "<bos>o-n+z", sign) for sign in SIGNS]
    lm.loglikelihood(requests)
    lm.baseline.loglikelihood(requests)
    assert calls == [1]


def test_logits_that_are_not_finite_are_no_answer(lm, monkeypatch):
    answer = Decoded(item_id="t/0", repeat=0, logprobs=(float("nan"),), finite=False)
    monkeypatch.setattr(AnswerRunner, "run", lambda self, prompts, **_: {"baseline": [answer], PLAN: [answer]})
    with pytest.raises(InputError, match=r"plan nvfp4@16, t/0: logits with NaN"):
        lm.loglikelihood([ask("loglikelihood", "not finite", "+")])


# generate_until


def test_greedy_texts_are_those_of_lm_eval(lm, hf):
    arguments = [{"until": until, "max_gen_toks": 9} for until in (["/"], ["y/y"], "h", [])]
    requests = [ask("generate_until", "A1B2A", a, doc=i) for i, a in enumerate(arguments)]
    texts = lm.baseline.generate_until(requests)
    assert texts == hf.generate_until(requests)
    assert texts == ["8y", "8", "8y/y/y/y/", "8y/y/y/y/"]


def test_the_same_request_twice_is_sampled_twice(lm):
    request = ask("generate_until", "<bos>o-n+", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8})
    first, second = lm.generate_until([request, request])
    assert first != second
    assert lm.generate_until([request, request]) == [first, second]


def test_nothing_is_cut_off(lm):
    too_long = ask("generate_until", "o-n+", {"max_gen_toks": 262144})
    with pytest.raises(InputError, match=r"4 tokens of prompt and 262144 after it exceed the model's 262144 positions"):
        lm.generate_until([too_long])


# models and options


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"model": "tiny-gnd"}, UsageError, "did you mean tiny-gdn"),
        ({"model": "./nowhere"}, InputError, "model folder ./nowhere does not exist"),
        ({"plan": "nvfp5@16"}, UsageError, "nvfp5"),
        ({"backend": "cuda"}, UsageError, "unknown backend 'cuda'"),
        ({"backend": "triton", "device": "cpu"}, UsageError, "backend triton needs a GPU"),
        ({"dtype": "fp8"}, UsageError, "unknown dtype 'fp8'"),
        ({"batch": 0}, UsageError, "batch 0"),
        ({"prefill": "all"}, UsageError, "prefill 'all': expected none, prompt, or a number"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments, kind, message):
    with pytest.raises(kind, match=re.escape(message)) as caught:
        DriftgateLM(**{"model": "tiny-gdn", **arguments})
    assert "\n" not in str(caught.value)


def test_a_hub_id_is_the_checkpoint_in_the_cache(lm, tmp_path, monkeypatch):
    cache = hub_cases.use_cache(tmp_path, monkeypatch)
    hub_cases.fill_cache(cache, list_checkpoints()["tiny-gdn"])
    found = DriftgateLM(hub_cases.NAME, PLAN, batch=16, device="cpu")
    assert (found.text.name, found.tokenizer_name) == (hub_cases.NAME, hub_cases.NAME.replace("/", "__"))
    requests = [ask("loglikelihood", "<bos>o-n+" + "p*q/" * 10, sign) for sign in SIGNS]
    assert found.loglikelihood(requests) == lm.loglikelihood(requests)
    with pytest.raises(InputError, match=r"owner/absent is no folder and not in the cache"):
        DriftgateLM("owner/absent")
    with pytest.raises(InputError, match=rf"model folder {hub_cases.NAME} does not exist"):
        DriftgateLM(Path(hub_cases.NAME))


def test_nothing_is_fetched_for_what_is_refused_anyway(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    hub_cases.use_cache(tmp_path, monkeypatch)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: asked.append(1) or str(tmp_path))
    for choices in ({"backend": "triton"}, {"device": "warp"}, {"plan": "nvfp5@4"}, {"batch": 0}):
        with pytest.raises(UsageError):
            DriftgateLM(hub_cases.NAME, **{"device": "cpu"} | choices)
    assert asked == []


# samples


def test_samples_that_do_not_decide_are_refused():
    sample = {"doc_id": 3, "filter": "none", "metrics": ["acc"], "acc": 0.5}
    with pytest.raises(InputError, match=r"baseline: acc of t/3 is 0.5, neither right nor wrong; it has acc"):
        paired_items({"baseline": {"samples": {"t": [sample]}}}, task="t", metric="acc")
    with pytest.raises(InputError, match=r"baseline: no samples of task u; call simple_evaluate with log_samples=True"):
        paired_items({"baseline": {"samples": {"t": [sample]}}}, task="u", metric="acc")
    with pytest.raises(InputError, match=r"baseline: no samples of task t went through filter strict"):
        paired_items({"baseline": {"samples": {"t": [sample]}}}, task="t", metric="acc", filter_name="strict")


def test_the_documented_example(tmp_path, monkeypatch, capsys):
    import datasets

    blocks = dict(re.findall(r"```(yaml|json|python)\n(.*?)```", DOCS.read_text("utf-8"), flags=re.DOTALL))
    (tmp_path / "signs.yaml").write_text(blocks["yaml"])
    (tmp_path / "signs.jsonl").write_text(blocks["json"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    exec(compile(blocks["python"], str(DOCS), "exec"), {})
    n, lost, gained, p = capsys.readouterr().out.split()[-4:]
    assert (n, float(p)) == ("2", 1.0)
    assert int(lost) == int(gained) == 0
